"""From what a caller asks to what the engine runs: tokens, and parameters without gaps."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from ..errors import ConfigError, shown
from ..hf import compat as vocabulary
from ..hf.prompt_tokens import check_tokens
from .params import SamplingParams


def token_ids_of(prompt: str | Sequence[int] | Any, tokenizer: Any) -> tuple[int, ...]:
    """A prompt's token ids.

    Args:
        prompt: Token ids (a tensor of one dimension will do), or text.
        tokenizer: For text; special tokens are added as it does by itself.

    Raises:
        ConfigError: The prompt is text without a tokenizer, or neither text nor tokens.
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
    """A prompt's token ids, checked, as the engine keeps them: bytes, seen as integers.

    Parts of it are no copies, and prefixes are compared by its bytes.

    Args:
        prompt: See `token_ids_of`.
        tokenizer: Likewise.
        vocab_size: See `check_tokens`.

    Raises:
        ConfigError: Likewise.
    """
    tokens = token_ids_of(prompt, tokenizer)
    check_tokens(tokens, vocab_size)
    return memoryview(array("q", tokens).tobytes()).cast("q")


def check_tenant(tenant: object) -> None:
    """Refuse a tenant that is no name.

    Raises:
        ConfigError: It is neither a string nor None.
    """
    if not isinstance(tenant, str | None):
        raise ConfigError(f"tenant={shown(tenant)} must be a string, or None")


def check_text(params: SamplingParams, tokenizer: Any) -> None:
    """Check that stop texts can be found.

    Raises:
        ConfigError: There is no tokenizer.
    """
    if params.stop and tokenizer is None:
        raise ConfigError("stop texts need a tokenizer: pass Engine(tokenizer=…)")


def resolve(
    params: SamplingParams,
    seed: int,
    end_tokens: Collection[int],
    max_tokens: int,
    vocab_size: int,
) -> SamplingParams:
    """Parameters of one sample, with everything filled in that the caller left to us.

    Raises:
        ConfigError: A stop token is not in the vocabulary, or `min_tokens` do not fit.
    """
    stops = set(params.stop_token_ids)
    outside = sorted(each for each in stops if each >= vocab_size)
    if outside:
        raise ConfigError(f"stop_token_ids {outside} are not in a vocabulary of {vocab_size}")
    if params.min_tokens > max_tokens:
        raise ConfigError(
            f"min_tokens={params.min_tokens}, and at most {max_tokens} fit after this prompt"
        )
    if not params.ignore_eos:
        stops |= {each for each in end_tokens if 0 <= each < vocab_size}
    return replace(
        params, n=1, seed=seed, stop_token_ids=tuple(sorted(stops)), max_tokens=max_tokens
    )


def end_tokens(model: Any) -> frozenset[int]:
    """The model's end-of-sequence tokens, as `model.generate` has them.

    Where there is a generation config, what it says is said: None is no token at all.

    Raises:
        ConfigError: They are no numbers.
    """
    config = getattr(model, "generation_config", None) or model.config
    ends = getattr(config, "eos_token_id", None)
    if ends is None:
        return frozenset()
    try:
        return frozenset(map(operator.index, [ends] if isinstance(ends, int) else ends))
    except TypeError as error:  # A text, for one, whose digits would be tokens.
        raise ConfigError(
            f"the model's eos_token_id is {shown(ends)}: neither a token nor a list of tokens"
        ) from error


def vocabulary_sizes(model: Any) -> tuple[int, int]:
    """Columns of the model's logits, and rows of its embedding.

    Raises:
        ConfigError: It has none: it is no causal language model; or it is in training mode.
    """
    if model.training:
        raise ConfigError("the model is in training mode; call model.eval() first")
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or embedding is None:
        raise ConfigError(
            f"{type(model).__name__} has no language model head; load it with AutoModelForCausalLM"
        )
    return vocabulary.num_logits(model), vocabulary.num_embeddings(model)
