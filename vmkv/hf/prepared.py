"""Logits processors and stopping criteria, as transformers prepares them for each prompt alone.

Many depend on the prompt's length (`max_length`, `min_length`, `forced_eos_token_id`, …) or tokens
(`no_repeat_ngram_size`, `encoder_repetition_penalty`, …), and would count the padding of a batch.
So transformers prepares them once per prompt length, without padding, through the public
`model.generate` with a decoding loop that only returns its arguments.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import ConfigError
from . import compat

#: Inputs that `model.generate` makes by itself and packed passes replace by their own.
_KNOWN_INPUTS = {
    *("attention_mask", "cache_params", "cache_position", "logits_to_keep", "past_key_values"),
    *("position_ids", "use_cache"),
}
#: Options that vmkv makes from the prompts.
_OURS = (
    *("attention_mask", "cache_position", "custom_generate", "input_ids", "inputs"),
    *("inputs_embeds", "past_key_values", "position_ids", "synced_gpus"),
)
_OUTPUTS = ("output_attentions", "output_hidden_states", "output_logits", "output_scores")


@dataclass(frozen=True)
class Prepared:
    """Processors and criteria of the prompts `rows`, which have one length.

    `num_tokens` is that length as they count it; every value of `config` is filled in.
    """

    rows: tuple[int, ...]
    num_tokens: int
    processors: Sequence[Any]
    criteria: Sequence[Any]
    config: Any

    @property
    def max_tokens(self) -> int | None:
        """Number of tokens at which a sequence ends, its prompt included."""
        limits = [each.max_length for each in self.criteria if compat.is_length_limit(each)]
        return min(limits, default=None)


def prepare(
    model: Any, prompts: Sequence[Sequence[int]], options: Mapping[str, Any]
) -> list[Prepared]:
    """Prepare generation for each prompt length; processors and criteria correspond in order.

    Raises `ConfigError` for options that cannot be served. Costs a millisecond for each length, if
    an option depends on the prompt.
    """
    options = dict(options)
    _check_options(options)
    if _effective(model, options, "token_healing"):
        raise ConfigError("ragged generation heals no tokens; leave token_healing out")
    _replace_stop_strings(model, options)
    by_length: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(row)
    lengths = sorted(by_length, reverse=True)
    prepared = [_prepare(model, prompts, by_length[lengths[0]], options, len(lengths) > 1)]
    first = prepared[0]
    new_tokens = first.config.max_new_tokens
    if new_tokens is not None and not _depends_on_prompt(first):
        given = [id(each) for each in options.get("stopping_criteria") or ()]
        for length in lengths[1:]:
            limit = compat.length_limit(length + new_tokens)
            criteria = [
                limit if compat.is_length_limit(each) and id(each) not in given else each
                for each in first.criteria
            ]
            rows = tuple(by_length[length])
            prepared.append(replace(first, rows=rows, num_tokens=length, criteria=criteria))
        return prepared
    for length in lengths[1:]:
        prepared.append(_prepare(model, prompts, by_length[length], options, is_one_of_many=True))
    return prepared


def check_inputs(inputs: Mapping[str, Any]) -> None:
    """Refuse model inputs besides token ids, and a cache that holds tokens already."""
    past = inputs.get("past_key_values")
    if past is not None and past.get_seq_length():
        raise ConfigError(
            "ragged generation keeps sequences in rows of its own; leave past_key_values out"
        )
    outputs = [name for name in _OUTPUTS if inputs.get(name)]
    if outputs:
        raise _tokens_only(outputs[0])
    unknown = sorted(
        name
        for name in inputs.keys() - _KNOWN_INPUTS
        if inputs[name] is not None and not (isinstance(inputs[name], dict) and not inputs[name])
    )
    if unknown:
        raise ConfigError(
            f"ragged generation gives the model token ids alone, not {unknown[0]}; generate with "
            "past_key_values=VMKVCache(config) instead"
        )


def check_config(config: Any) -> None:
    """Refuse ways of decoding other than one token after another per prompt."""
    if getattr(config, "prompt_lookup_num_tokens", None):
        raise ConfigError("ragged generation does not look prompts up; use a VMKVCache for that")
    for name in ("num_beams", "num_return_sequences"):
        if (getattr(config, name, None) or 1) > 1:
            raise ConfigError(
                f"ragged generation has one sequence per prompt; {name} must be 1. Pass a "
                "VMKVCache to model.generate for beam search"
            )
    mode = str(config.get_generation_mode().value)
    if mode not in ("greedy_search", "sample"):
        raise ConfigError(
            f"ragged generation takes the likeliest token or samples one; it knows no {mode}. Use "
            "model.generate for that, with a VMKVCache"
        )
    for name in ("return_dict_in_generate", *_OUTPUTS):
        if getattr(config, name, None):
            raise _tokens_only(name)


def _tokens_only(name: str) -> ConfigError:
    return ConfigError(f"ragged generation returns tokens only; leave {name} out")


def _check_options(options: Mapping[str, Any]) -> None:
    if options.get("assistant_model") is not None:
        raise ConfigError("ragged generation takes no assistant model; use a VMKVCache for that")
    given = [name for name in _OURS if options.get(name) is not None]
    if given:
        raise ConfigError(f"vmkv.generate makes {given[0]} from the prompts itself; leave it out")


def _replace_stop_strings(model: Any, options: dict[str, Any]) -> None:
    """Make the criterion for stop strings, because decoding loops get no tokenizer."""
    tokenizer = options.pop("tokenizer", None)
    strings = _effective(model, options, "stop_strings")
    if strings is None:
        return
    if tokenizer is None:
        raise ConfigError("stop_strings need the model's tokenizer: pass tokenizer=…")
    criterion = compat.stop_string_criterion(tokenizer, strings)
    options["stop_strings"] = None
    options["stopping_criteria"] = [*(options.get("stopping_criteria") or ()), criterion]


def _effective(model: Any, options: Mapping[str, Any], name: str) -> Any:
    """Return the value of an option from where transformers would take it."""
    sources = (options.get("generation_config"), model.generation_config)
    values = (options.get(name), *(getattr(source, name, None) for source in sources))
    return next((value for value in values if value is not None), None)


def _prepare(
    model: Any,
    prompts: Sequence[Sequence[int]],
    rows: Sequence[int],
    options: Mapping[str, Any],
    is_one_of_many: bool,
) -> Prepared:
    """Have transformers prepare generation for the prompts `rows`, which have one length."""
    options = dict(options)
    for name in ("negative_prompt_ids", "negative_prompt_attention_mask"):
        each = options.get(name)
        if isinstance(each, torch.Tensor) and len(each) == len(prompts):
            options[name] = each[list(rows)]
    allowed = options.get("prefix_allowed_tokens_fn")
    if allowed is not None:
        options["prefix_allowed_tokens_fn"] = lambda at, tokens: allowed(rows[at], tokens)
    if is_one_of_many and options.get("logits_processor"):
        # transformers' processors may keep state of each row. The model must not be copied.
        options["logits_processor"] = [
            copy.deepcopy(each, {id(model): model}) if compat.is_transformers_own(each) else each
            for each in options["logits_processor"]
        ]
    device = model.get_input_embeddings().weight.device
    ids = torch.tensor([prompts[row] for row in rows], device=device)
    try:
        processors, criteria, config, inputs = model.generate(
            ids, attention_mask=torch.ones_like(ids), custom_generate=_keep, **options
        )
    except ValueError as error:  # An invalid option, which its message names.
        raise ConfigError(str(error)) from error
    check_inputs(inputs)
    check_config(config)
    return Prepared(tuple(rows), ids.shape[1], processors, criteria, config)


def _keep(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    **model_kwargs: Any,
) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Return the arguments of a decoding loop, without decoding."""
    return logits_processor, stopping_criteria, generation_config, model_kwargs


def _depends_on_prompt(prepared: Prepared) -> bool:
    """Whether a processor or criterion reads the prompt, beyond its number of tokens."""
    return any(
        compat.reads_prompt(each)
        for each in (*prepared.processors, *prepared.criteria)
        if not compat.is_length_limit(each)
    )
