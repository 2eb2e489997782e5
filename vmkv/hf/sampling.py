"""How transformers chooses tokens and ends sequences, for prompts of several lengths at once.

Logits processors and stopping criteria, *rules* here, often depend on the prompt's length
(`max_length`, `min_length`, `forced_eos_token_id`, …) or tokens (`no_repeat_ngram_size`,
`encoder_repetition_penalty`, …), and would count the padding of a batch. So transformers prepares
them once per prompt length, without padding, through the public `model.generate` with a decoding
loop that only returns its arguments.

The batch is left-padded, as rules expect. Rules of transformers that read tokens get each prompt
without padding, as it was prepared. The caller's rules get the whole padded batch, as in
`model.generate`: they may keep state for each row.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.generation.stopping_criteria import MaxLengthCriteria, StopStringCriteria

from ..errors import ConfigError
from . import compat

# ---- preparation ---------------------------------------------------------------------------------

#: Inputs that `model.generate` makes by itself and packed passes replace by their own.
_KNOWN_INPUTS = {
    *("attention_mask", "cache_position", "logits_to_keep", "position_ids", "use_cache"),
    *compat.CACHE_NAMES,
}
#: Options that vmkv makes from the prompts.
_OURS = (
    *("attention_mask", "cache_position", "custom_generate", "input_ids", "inputs"),
    *("inputs_embeds", "position_ids", "synced_gpus", *compat.CACHE_NAMES),
)
_OUTPUTS = ("output_attentions", "output_hidden_states", "output_logits", "output_scores")


@dataclass(frozen=True)
class Group:
    """Rows whose prompts count `num_tokens`, their prepared rules, and their `max_tokens`."""

    rows: tuple[int, ...]
    num_tokens: int
    processors: Sequence[Any]
    criteria: Sequence[Any]  # Without limits of the length.
    max_tokens: int | None
    config: Any

    @classmethod
    def of(
        cls, rows: Sequence[int], num_tokens: int, processors: Any, criteria: Any, config: Any
    ) -> Group:
        """Make a group of what transformers has prepared; raises as `_check_config`."""
        _check_config(config)
        limits = [int(each.max_length) for each in criteria if type(each) is MaxLengthCriteria]
        rest = [each for each in criteria if type(each) is not MaxLengthCriteria]
        return cls(tuple(rows), num_tokens, processors, rest, min(limits, default=None), config)


def prepare(
    model: Any, prompts: Sequence[Sequence[int]], options: Mapping[str, Any]
) -> list[Group]:
    """Prepare generation for each prompt length, the longest first, in a millisecond each."""
    options = dict(options)
    if options.get("assistant_model") is not None:
        raise ConfigError("ragged generation takes no assistant model; use a VMKVCache for that")
    given = [name for name in _OURS if options.get(name) is not None]
    if given:
        raise ConfigError(f"vmkv.generate makes {given[0]} from the prompts itself; leave it out")
    if options.get("adapter_names") is not None:
        raise ConfigError("ragged generation takes no adapter_names; use model.set_adapter(name)")
    if _effective(model, options, "token_healing"):
        raise ConfigError("ragged generation does not support token_healing; leave it out")
    _replace_stop_strings(model, options)
    by_length: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(row)
    longest, *lengths = sorted(by_length, reverse=True)
    first = _prepare(model, prompts, by_length[longest], options, is_one_of_many=bool(lengths))
    groups, new_tokens = [first], first.config.max_new_tokens
    depends_on_prompt = any(map(compat.reads_prompt, (*first.processors, *first.criteria)))
    criteria = options.get("stopping_criteria") or ()
    has_limit = MaxLengthCriteria in map(type, criteria)  # In place of `max_new_tokens`.
    for length in lengths:
        rows = by_length[length]
        if depends_on_prompt or new_tokens is None:
            groups.append(_prepare(model, prompts, rows, options, is_one_of_many=True))
        else:
            most = first.max_tokens if has_limit else length + new_tokens
            groups.append(replace(first, rows=tuple(rows), num_tokens=length, max_tokens=most))
    return groups


def check_adapters(model: Any) -> None:
    """Refuse peft's adapters that add tokens to a prompt, or that begin within it (aLoRA)."""
    # peft's own `generate` calls that of the model inside, with its method in place.
    adapted = getattr(getattr(model, "prepare_inputs_for_generation", None), "__self__", model)
    configs = getattr(adapted, "peft_config", {}).values()
    for name in ("is_prompt_learning", "alora_invocation_tokens"):
        if any([getattr(each, name, None) for each in configs]):
            raise ConfigError(f"ragged generation serves no adapter with {name}; use a VMKVCache")


def check_inputs(inputs: Mapping[str, Any]) -> None:
    """Refuse model inputs besides token ids, and a cache that holds tokens already."""
    for name in compat.CACHE_NAMES:
        past = inputs.get(name)
        # An empty cache of states alone cannot say its length.
        if past is not None and getattr(past, "is_initialized", True) and past.get_seq_length():
            raise ConfigError(f"ragged generation has rows of its own; leave {name} out")
    for name in sorted(inputs.keys() - _KNOWN_INPUTS):
        value = inputs[name]
        if value is None or (isinstance(value, bool | dict) and not value):
            continue
        if name in _OUTPUTS:
            raise _tokens_only(name)
        raise ConfigError(
            f"ragged generation gives the model token ids alone, not {name}; generate with "
            f"{compat.CACHE_NAME}=VMKVCache(config) instead"
        )


def _check_config(config: Any) -> None:
    if getattr(config, "prompt_lookup_num_tokens", None):
        raise ConfigError("ragged generation has no prompt lookup; use a VMKVCache for that")
    for name in ("num_beams", "num_return_sequences"):
        if (getattr(config, name, None) or 1) > 1:
            raise ConfigError(
                f"ragged generation has one sequence per prompt; {name} must be 1. Pass a "
                "VMKVCache to model.generate for beam search"
            )
    mode = str(config.get_generation_mode().value)
    if mode not in ("greedy_search", "sample"):
        raise ConfigError(
            f"ragged generation does greedy decoding and sampling, not {mode}: use model.generate "
            "with a VMKVCache"
        )
    for name in ("return_dict_in_generate", *_OUTPUTS):
        if getattr(config, name, None):
            raise _tokens_only(name)


def _tokens_only(name: str) -> ConfigError:
    return ConfigError(f"ragged generation returns tokens only; leave {name} out")


def _replace_stop_strings(model: Any, options: dict[str, Any]) -> None:
    """Make the criterion for stop strings, because decoding loops get no tokenizer."""
    tokenizer = options.pop("tokenizer", None)
    strings = _effective(model, options, "stop_strings")
    if strings is None:
        return
    if tokenizer is None:
        raise ConfigError("stop_strings need the model's tokenizer: pass tokenizer=…")
    criterion = StopStringCriteria(tokenizer, strings)
    options["stop_strings"] = None
    options["stopping_criteria"] = [*(options.get("stopping_criteria") or ()), criterion]


def _effective(model: Any, options: Mapping[str, Any], name: str) -> Any:
    """Return the value of an option from where transformers would take it."""
    value = options.get(name)
    for source in (options.get("generation_config"), model.generation_config):
        value = getattr(source, name, None) if value is None else value
    return value


def _prepare(
    model: Any,
    prompts: Sequence[Sequence[int]],
    rows: Sequence[int],
    options: Mapping[str, Any],
    *,
    is_one_of_many: bool,
) -> Group:
    """Have transformers prepare generation for the prompts `rows`, which have one length."""
    options = dict(options)
    for name in ("negative_prompt_ids", "negative_prompt_attention_mask"):
        each = options.get(name)
        if isinstance(each, torch.Tensor) and len(each) in (1, len(prompts)):
            options[name] = each.expand(len(prompts), -1)[list(rows)]
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
        *prepared, inputs = model.generate(
            ids, attention_mask=torch.ones_like(ids), custom_generate=_keep, **options
        )
    except ValueError as error:  # An invalid option, which its message names.
        raise ConfigError(str(error)) from error
    check_inputs(inputs)
    return Group.of(rows, ids.shape[1], *prepared)


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


# ---- tokens --------------------------------------------------------------------------------------


class Tokens:
    """The tokens of all sequences: `ids [B, T + new]`, padded on both sides; `live` ones go on."""

    def __init__(
        self, ids: torch.Tensor, lengths: Sequence[int], groups: Sequence[Group], streamer: Any
    ):
        self.ids = ids
        self.live = list(range(len(lengths)))
        self._live_at: torch.Tensor | None = None  # `live` on the device; None while all live.
        self._prompt_width = ids.shape[1]
        self._pads = [self._prompt_width - length for length in lengths]
        self._ends: list[int | None] = [None] * len(lengths)
        self._groups = groups
        self._rows = [torch.tensor(each.rows, device=ids.device) for each in groups]
        self._do_sample = bool(groups[0].config.do_sample)
        self._pad_token = compat.pad_token(groups[0].config)
        self._streamer = streamer
        if streamer is not None:
            streamer.put(ids.cpu())

    @property
    def max_tokens(self) -> int | None:
        """The length that the longest sequence may reach, its prompt included; None for any."""
        limits = [group.max_tokens for group in self._groups]
        return None if None in limits else max([each for each in limits if each is not None])

    def num_tokens(self, row: int) -> int:
        """Return the number of tokens of a live sequence, without padding."""
        return self.ids.shape[1] - self._pads[row]

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """Choose every sequence's next token, `[B]`; `logits` are `[live, vocabulary]`."""
        scores = logits.to(self.ids.device, torch.float32, copy=True)
        live_at, processors = self._live_at, self._groups[0].processors
        if processors:
            if live_at is not None:  # Processors get all sequences.
                every = scores.new_zeros(len(self._pads), scores.shape[1])
                scores = every.index_copy_(0, live_at, scores)
            for at, processor in enumerate(processors):
                if self._applies_to_all(processor):
                    scores = processor(self.ids, scores)
                    continue
                scores = scores.clone()
                for group, rows, ids in self._live_groups():
                    scores[rows] = group.processors[at](ids, scores[rows])
            scores = scores if live_at is None else scores[live_at]
        if self._do_sample:
            tokens = torch.multinomial(scores.softmax(-1), 1).squeeze(1)
        else:
            tokens = scores.argmax(-1)
        if live_at is not None:
            every = torch.full_like(self.ids[:, 0], self._pad_token)
            tokens = every.index_copy_(0, live_at, tokens)
        self.ids = torch.cat([self.ids, tokens[:, None]], 1)
        if self._streamer is not None:
            self._streamer.put(tokens.cpu())
        return tokens

    def stop(self) -> list[int]:
        """End sequences by the criteria and return them; waits for the device once, or never."""
        is_done = [False] * len(self._pads)
        criteria = self._groups[0].criteria
        if criteria:
            ends = torch.zeros(len(self._pads), dtype=torch.bool, device=self.ids.device)
            for at, criterion in enumerate(criteria):
                if self._applies_to_all(criterion):
                    ends = ends | criterion(self.ids, None)
                    continue
                for group, rows, ids in self._live_groups():
                    ends[rows] |= group.criteria[at](ids, None)
            is_done = ends.tolist()
        num_new = self.ids.shape[1] - self._prompt_width
        for group in self._groups:
            if group.max_tokens is not None and group.num_tokens + num_new >= group.max_tokens:
                for row in group.rows:
                    is_done[row] = True
        ended = [row for row in self.live if is_done[row]]
        if ended:  # Criteria may also report sequences that ended before.
            for row in ended:
                self._ends[row] = self.ids.shape[1]
            self.live = [row for row in self.live if not is_done[row]]
            self._live_at = torch.tensor(self.live, device=self.ids.device)
        if self._streamer is not None and not self.live:
            self._streamer.end()
        return ended

    def _applies_to_all(self, rule: Any) -> bool:
        """Whether a rule takes the whole batch, rather than each group's rows without padding."""
        return len(self._groups) == 1 or not compat.reads_prompt(rule)

    def _live_groups(self) -> Iterator[tuple[Group, torch.Tensor, torch.Tensor]]:
        for group, rows in zip(self._groups, self._rows, strict=True):
            if any(self._ends[row] is None for row in group.rows):
                yield group, rows, self.ids[rows, self._prompt_width - group.num_tokens :]

    def generated(self, rows: Sequence[int]) -> list[list[int]]:
        """Return new tokens of sequences, live or just ended; waits for the device once."""
        tokens: list[list[int]] = self.ids[list(rows), self._prompt_width :].tolist()
        return tokens

    def as_lists(self) -> list[list[int]]:
        """Return each sequence from its prompt's first token on, to its end."""
        starts = {
            at: self._prompt_width - its.num_tokens for its in self._groups for at in its.rows
        }
        rows = zip(self.ids.tolist(), self._ends, strict=True)
        return [row[starts[at] : end] for at, (row, end) in enumerate(rows)]
