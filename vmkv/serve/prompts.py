"""Validation of requests: prompts to token ids, and sampling parameters with defaults resolved."""

from __future__ import annotations

import copy
import itertools
import math
import operator
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from ..errors import ConfigError, shown
from ..hf import compat
from .params import SamplingParams


def token_ids_of(prompt: str | Sequence[int] | Any, tokenizer: Any) -> tuple[int, ...]:
    """Return a prompt's token ids, given as a sequence, a one-dimensional tensor, or text.

    The tokenizer adds its special tokens to text. `ConfigError` if the prompt is text without a
    tokenizer, or neither text nor tokens.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ConfigError("a prompt of text needs a tokenizer: pass Engine(tokenizer=…)")
        ids = tokenizer.encode(prompt)
    else:
        ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    try:
        return tuple(ids)
    except TypeError as error:
        raise ConfigError(f"a prompt must be text or token ids, not {prompt!r}") from error


def packed_prompt(
    prompt: str | Sequence[int] | Any, tokenizer: Any, vocab_size: int
) -> memoryview[int]:
    """Return a prompt's checked token ids as a view of bytes.

    Slices of it are no copies, and prefixes are compared as bytes. `ConfigError` as `token_ids_of`,
    or for a token outside the vocabulary.
    """
    tokens = compat.check_tokens(token_ids_of(prompt, tokenizer), vocab_size)
    return memoryview(array("q", tokens).tobytes()).cast("q")


def check_queued(priority: object, tenant: object) -> None:
    """Raise `ConfigError` unless the priority has 64 bits, and the tenant is a string or None."""
    if not isinstance(priority, int) or not -(1 << 63) <= priority < 1 << 63:
        raise ConfigError(f"priority={shown(priority)} must be an integer of 64 bits")
    if not isinstance(tenant, str | None):
        raise ConfigError(f"tenant={shown(tenant)} must be a string, or None")


def tokenised(params: SamplingParams, tokenizer: Any) -> SamplingParams:
    """Return parameters with bad words as tokens: each alone and, if that differs, after a space.

    `ConfigError` for stop texts or bad words without a tokenizer.
    """
    texts = [each for each in params.bad_words if isinstance(each, str)]
    if tokenizer is None and (params.stop or texts):
        name = "stop texts" if params.stop else "bad_words"
        raise ConfigError(f"{name} need a tokenizer: pass Engine(tokenizer=…)")
    if not texts:
        return params
    words = [each for each in params.bad_words if not isinstance(each, str)]
    for text in texts:
        alone, spaced = (
            tokenizer.encode(before + text.lstrip(), add_special_tokens=False)
            for before in ("", " ")
        )
        words.append(alone)
        # As vLLM does: not if the space is a token of its own.
        if spaced[:1] != alone[:1] and len(spaced) == len(alone):
            words.append(spaced)
    return replace(params, bad_words=words)


def resolve(
    params: SamplingParams,
    seed: int,
    end_tokens: Collection[int],
    max_tokens: int,
    vocab_size: int,
    num_prompt_tokens: int,
) -> SamplingParams:
    """Complete the parameters of one sample: seed, stop tokens, `max_tokens`, bad words.

    Bad words of several tokens become a logits processor. `ConfigError` if a token is not in the
    vocabulary, `min_tokens` do not fit, or no token may come first.
    """
    stops, processors = set(params.stop_token_ids), params.logits_processors
    words: Any = params.bad_words
    named: dict[str, Iterable[int]] = {"stop_token_ids": stops, "logit_bias": params.logit_bias}
    named["allowed_token_ids"] = params.allowed_token_ids or ()
    named["bad_words"] = itertools.chain(*words)
    for name, token_ids in named.items():
        outside = sorted({each for each in token_ids if each >= vocab_size})
        if outside:
            raise ConfigError(f"{name} {outside} are not in a vocabulary of {vocab_size}")
    long_words = [list(each) for each in words if len(each) > 1]
    if long_words:
        processors = (_without_words(long_words, num_prompt_tokens), *processors)
    if params.min_tokens > max_tokens:
        raise ConfigError(
            f"min_tokens={params.min_tokens}, and at most {max_tokens} fit after this prompt"
        )
    if not params.ignore_eos or params.structured_outputs is not None:
        stops |= {each for each in end_tokens if 0 <= each < vocab_size}
    banned = {each[0] for each in words if len(each) == 1}
    if params.min_tokens and params.structured_outputs is None:
        banned |= stops
    if banned and banned.issuperset(params.allowed_token_ids or range(vocab_size)):
        raise ConfigError(
            "bad_words, and with min_tokens the stop and end-of-sequence tokens, rule out each of "
            "allowed_token_ids, or of the vocabulary without them: allow another token"
        )
    resolved = copy.copy(params)  # Not `replace`, which would check every value again.
    vars(resolved).update(n=1, seed=seed, max_tokens=max_tokens, logits_processors=processors)
    vars(resolved).update(stop_token_ids=tuple(sorted(stops)))
    return resolved


def _without_words(words: list[list[int]], num_prompt_tokens: int) -> Callable[..., Any]:
    """Make a logits processor that bans the last tokens of words whose others were generated."""
    longest = max(map(len, words)) - 1

    def ban(input_ids: Any, scores: Any) -> Any:
        output = input_ids[0, num_prompt_tokens:][-longest:].tolist()
        banned = [word[-1] for word in words if output[1 - len(word) :] == word[:-1]]
        return scores.index_fill(1, input_ids.new_tensor(banned), -math.inf)

    return ban


def end_tokens(model: Any) -> frozenset[int]:
    """Return the model's end-of-sequence tokens, as `model.generate` determines them.

    A generation config takes precedence: None there means no token. `ConfigError` unless integers.
    """
    config = getattr(model, "generation_config", None) or model.config
    ends = getattr(config, "eos_token_id", None)
    if ends is None:
        return frozenset()
    try:
        return frozenset(map(operator.index, [ends] if isinstance(ends, int) else ends))
    except TypeError as error:  # For instance a text, whose digits would be tokens.
        raise ConfigError(
            f"the model's eos_token_id is {shown(ends)}: neither a token nor a list of tokens"
        ) from error


def vocabulary_sizes(model: Any) -> tuple[int, int]:
    """Return the number of the logits' columns and of the embedding's rows.

    `ConfigError` if the model is in training mode, or is no causal language model.
    """
    if model.training:
        raise ConfigError("the model is in training mode; call model.eval() first")
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or embedding is None:
        raise ConfigError(
            f"{type(model).__name__} has no language model head; load it with AutoModelForCausalLM"
        )
    return compat.num_logits(model), compat.num_embeddings(model)
