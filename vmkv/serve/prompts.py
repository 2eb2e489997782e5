"""Validation of requests: prompts to token ids, and sampling parameters with defaults resolved."""

from __future__ import annotations

import copy
import operator
from array import array
from collections.abc import Collection, Sequence
from typing import Any

from ..errors import ConfigError, shown
from ..hf import compat as vocabulary
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
    tokens = token_ids_of(prompt, tokenizer)
    vocabulary.check_tokens(tokens, vocab_size)
    return memoryview(array("q", tokens).tobytes()).cast("q")


def check_tenant(tenant: object) -> None:
    """Raise `ConfigError` unless the tenant is a string or None."""
    if not isinstance(tenant, str | None):
        raise ConfigError(f"tenant={shown(tenant)} must be a string, or None")


def check_text(params: SamplingParams, tokenizer: Any) -> None:
    """Raise `ConfigError` for stop texts without a tokenizer."""
    if params.stop and tokenizer is None:
        raise ConfigError("stop texts need a tokenizer: pass Engine(tokenizer=…)")


def resolve(
    params: SamplingParams,
    seed: int,
    end_tokens: Collection[int],
    max_tokens: int,
    vocab_size: int,
) -> SamplingParams:
    """Complete the parameters of one sample: seed, stop tokens, `max_tokens`.

    `ConfigError` if a stop token is not in the vocabulary, or `min_tokens` do not fit.
    """
    stops = set(params.stop_token_ids)
    outside = sorted(each for each in stops if each >= vocab_size)
    if outside:
        raise ConfigError(f"stop_token_ids {outside} are not in a vocabulary of {vocab_size}")
    if params.min_tokens > max_tokens:
        raise ConfigError(
            f"min_tokens={params.min_tokens}, and at most {max_tokens} fit after this prompt"
        )
    if not params.ignore_eos or params.structured_outputs is not None:
        stops |= {each for each in end_tokens if 0 <= each < vocab_size}
    resolved = copy.copy(params)  # Not `replace`, which would check every value again.
    vars(resolved).update(
        n=1, seed=seed, stop_token_ids=tuple(sorted(stops)), max_tokens=max_tokens
    )
    return resolved


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
    return vocabulary.num_logits(model), vocabulary.num_embeddings(model)
