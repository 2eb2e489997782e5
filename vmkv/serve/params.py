"""Sampling parameters of a request: the field's names, validated once, frozen."""

from __future__ import annotations

import copy
import itertools
import math
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from json import dumps
from typing import Any, NamedTuple

from ..errors import ConfigError, shown

#: Most alternatives per token.
_LOGPROBS_MAX = 1024
_SAMPLES_MAX = 1024
#: The device has as much room for every slot as the request with most biases.
_BIASES_MAX = 1024
#: Largest integer on the device, int64; seeds are 64 bits, too.
_INTEGER_MAX = 2**63 - 1
_FLOAT_MAX = sys.float_info.max


class Bounds(NamedTuple):
    """Range of a number in `SamplingParams`; `least` is excluded if `is_open`."""

    kind: type[int] | type[float]
    least: float
    most: float
    is_open: bool = False
    is_optional: bool = False

    def check(self, name: str, value: Any) -> None:
        """Raise `ConfigError` for a value that is outside the bounds, infinite or NaN."""
        if value is None and self.is_optional:
            return
        kind, least, most, is_open, _ = self
        is_number = isinstance(value, int | kind) and not isinstance(value, bool)
        # Comparison is exact for large integers; a conversion would overflow.
        is_finite = is_number and (kind is int or -_FLOAT_MAX <= value <= _FLOAT_MAX)
        if is_finite and least <= value <= most and not (is_open and value == least):
            return
        if kind is float:
            bound = "a finite number" + (f" above {least}" if is_open else f", at least {least}")
            bound += "" if most == math.inf else f" and at most {most}"
        elif most < _INTEGER_MAX:
            bound = f"an integer, in [{least}, {most}]"
        else:
            is_large = is_number and value > most
            bound = "an integer, of 64 bits" if is_large else f"an integer, at least {least}"
        raise ConfigError(f"{name}={shown(value)} must be {bound}")


_BIAS = Bounds(float, -100.0, 100.0)


def _integer(default: int | None, least: int, most: int = _INTEGER_MAX, **more: bool) -> Any:
    return field(default=default, metadata={"bounds": Bounds(int, least, most, **more)})


def _number(default: float, least: float, most: float = math.inf, **more: bool) -> Any:
    return field(default=default, metadata={"bounds": Bounds(float, least, most, **more)})


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """Form that the output must have; exactly one attribute is given.

    The model's end-of-sequence tokens are chosen only where the output is complete. An output that
    is cut by `max_tokens`, a stop text or a stop token of the request is incomplete.

    Attributes:
        json: JSON schema, as text or as a mapping, which is kept as text.
        json_object: Whether the output is any JSON object.
        regex: Regular expression of the whole output, in the syntax of Rust's `regex`.
        grammar: Grammar in llguidance's dialect of Lark.
        choice: Texts of which the output is one.

    Raises:
        ConfigError: None or several are given, or one has a wrong type. Grammars are compiled, and
            refused, by `Engine.add`.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None
    choice: Sequence[str] | None = None

    def __post_init__(self) -> None:
        given = [name for name, value in vars(self).items() if value not in (None, False)]
        if len(given) != 1:
            names = " and ".join(given) or "none"
            raise ConfigError(
                "structured_outputs: exactly one of json, json_object, regex, grammar and choice "
                f"is given, not {names}"
            )
        (name,), value = given, getattr(self, given[0])
        if name == "json" and isinstance(value, Mapping):
            try:
                object.__setattr__(self, "json", dumps(dict(value)))
            except (TypeError, ValueError, RecursionError) as error:
                raise ConfigError(f"structured_outputs: json is no JSON: {error}") from error
        elif name == "choice":
            choice = () if isinstance(value, str) else _tuple("structured_outputs: choice", value)
            if not choice or not all(isinstance(each, str) and each for each in choice):
                raise ConfigError(
                    f"structured_outputs: choice={shown(value)} must be a list of non-empty texts"
                )
            object.__setattr__(self, "choice", choice)
        elif not isinstance(value, bool if name == "json_object" else str):
            raise ConfigError(
                f"structured_outputs: {name}={shown(value)} must be "
                + ("true or false" if name == "json_object" else "a text")
            )


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters and stop conditions of one request.

    Attributes:
        n: Number of samples of the prompt.
        temperature: Divisor of the logits; 0 for greedy decoding.
        top_k: Choose among this many likeliest tokens; 0, -1 or more than the vocabulary for all.
        top_p: Choose among the fewest likeliest tokens whose probabilities reach this sum.
        min_p: Exclude tokens less likely than this fraction of the likeliest one.
        repetition_penalty: Above 1 makes tokens of the prompt or the output less likely.
        presence_penalty: Subtracted from the logits of tokens in the output.
        frequency_penalty: Subtracted once per occurrence of the token in the output.
        logit_bias: Added to the logits of the tokens, each in [-100, 100].
        allowed_token_ids: Choose among these tokens alone; None for all.
        bad_words: Texts that the output does not contain, or their token ids. Texts need a
            tokenizer, and are tokenised alone and after a space, as in vLLM. With a bad word of
            several tokens, the host waits for every token of the request.
        seed: Makes the request repeatable; sample i of `n` uses `seed + i`. None draws a seed.
        stop: Texts that end the output. Needs a tokenizer.
        include_stop_str_in_output: Whether the output's text keeps the stop text.
        stop_token_ids: Tokens that end the output, besides the model's end-of-sequence tokens. The
            token is kept in `token_ids`, but not in the text.
        ignore_eos: Ignore the model's end-of-sequence tokens, but for the end of
            `structured_outputs`.
        max_tokens: Maximum output tokens; None for as many as fit.
        min_tokens: Output tokens before which no stop token is chosen and no stop text is searched.
        logprobs: Number of likeliest tokens to report log-probabilities of, besides the chosen one;
            0 for that alone, None for none.
        prompt_logprobs: The same for the tokens of the prompt, reported once for all samples. The
            prompt is computed even if its beginning is cached, beside others that are scored, in
            passes of 256 tokens, so that their logits take little memory.
        retention_s: Seconds after its end for which its prefix stays cached before those of the
            tenant's other requests.
        skip_special_tokens: Whether the text leaves out special tokens.
        detokenize: Whether to produce text; required for stop texts.
        structured_outputs: Form that the output must have; needs a fast tokenizer and llguidance.
        logits_processors: transformers' logits processors, called as `processor(input_ids, scores)`
            with `[1, T]` of this request and `[1, vocabulary]`. Not shared with other requests.
            They get every token so far, and run while the device computes the logits.

    Raises:
        ConfigError: A value is outside its range.
    """

    n: int = _integer(1, 1, _SAMPLES_MAX)
    temperature: float = _number(1.0, 0.0)
    top_k: int = _integer(0, 0)
    top_p: float = _number(1.0, 0.0, 1.0, is_open=True)
    min_p: float = _number(0.0, 0.0, 1.0)
    repetition_penalty: float = _number(1.0, 0.0, is_open=True)
    presence_penalty: float = _number(0.0, -2.0, 2.0)
    frequency_penalty: float = _number(0.0, -2.0, 2.0)
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str | Sequence[int]] = ()
    seed: int | None = _integer(None, -_INTEGER_MAX, _INTEGER_MAX - _SAMPLES_MAX, is_optional=True)
    stop: str | Sequence[str] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    max_tokens: int | None = _integer(16, 1, is_optional=True)
    min_tokens: int = _integer(0, 0)
    logprobs: int | None = _integer(None, 0, _LOGPROBS_MAX, is_optional=True)
    prompt_logprobs: int | None = _integer(None, 0, _LOGPROBS_MAX, is_optional=True)
    retention_s: float = _number(0.0, 0.0)
    skip_special_tokens: bool = True
    detokenize: bool = True
    structured_outputs: StructuredOutputs | None = None
    logits_processors: Sequence[Callable[..., Any]] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        # Normalize each sequence to a tuple, and top_k=-1 to 0.
        stop = (self.stop,) if isinstance(self.stop, str) else _tuple("stop", self.stop)
        object.__setattr__(self, "stop", stop)
        for name in ("stop_token_ids", "logits_processors"):
            object.__setattr__(self, name, _tuple(name, getattr(self, name)))
        object.__setattr__(self, "top_k", 0 if self.top_k == -1 else self.top_k)
        for each in fields(self):
            if "bounds" in each.metadata:
                each.metadata["bounds"].check(each.name, getattr(self, each.name))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ConfigError(f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}")
        if not all(isinstance(each, str) and each for each in stop):
            raise ConfigError(f"stop={shown(self.stop)} must be non-empty texts")
        if stop and not self.detokenize:
            raise ConfigError("detokenize=False leaves no text to find stop texts in")
        if not _are_tokens(self.stop_token_ids):
            raise ConfigError(f"stop_token_ids={shown(self.stop_token_ids)} must be token ids")
        if not isinstance(self.structured_outputs, StructuredOutputs | None):
            raise ConfigError(
                f"structured_outputs={shown(self.structured_outputs)} must be StructuredOutputs"
            )
        self._check_choice()
        if not all(callable(each) for each in self.logits_processors):
            raise ConfigError("logits_processors must be callable as processor(input_ids, scores)")

    def _check_choice(self) -> None:
        allowed, biases = self.allowed_token_ids, self.logit_bias
        if allowed is not None:
            allowed = _tuple("allowed_token_ids", allowed)
            object.__setattr__(self, "allowed_token_ids", allowed)
            if not allowed or not _are_tokens(allowed):
                raise ConfigError(f"allowed_token_ids={shown(allowed)} must be one or more tokens")
        is_map = isinstance(biases, Mapping) and _are_tokens(biases)
        if not is_map or len(biases) > _BIASES_MAX:
            raise ConfigError(
                f"logit_bias={shown(biases)} must map token ids, at most {_BIASES_MAX}, to biases"
            )
        object.__setattr__(self, "logit_bias", dict(biases))
        for value in biases.values():
            _BIAS.check("logit_bias", value)
        words = [
            each if isinstance(each, str) else _tuple("bad_words", each)
            for each in _tuple("bad_words", self.bad_words)
        ]
        object.__setattr__(self, "bad_words", tuple(words))
        for word in words:
            if not (word.strip() if isinstance(word, str) else word and _are_tokens(word)):
                raise ConfigError(f"bad_words={shown(word)} must be texts that are not blank")

    @property
    def has_penalties(self) -> bool:
        """Whether the logits depend on the tokens so far."""
        own = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return own != (1, 0, 0)


def _tuple(name: str, values: Iterable[Any]) -> tuple[Any, ...]:
    try:
        return tuple(values)
    except TypeError as error:
        raise ConfigError(f"{name}={shown(values)} must be a sequence") from error


def _are_tokens(values: Iterable[object]) -> bool:
    return all(
        isinstance(each, int) and not isinstance(each, bool) and 0 <= each <= _INTEGER_MAX
        for each in values
    )


# ---- resolving -----------------------------------------------------------------------------------


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

    Bad words of several tokens become a logits processor. `ConfigError` if they cannot be served.
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
    longest = max(map(len, words)) - 1

    def ban(input_ids: Any, scores: Any) -> Any:
        output = input_ids[0, num_prompt_tokens:][-longest:].tolist()
        banned = [word[-1] for word in words if output[1 - len(word) :] == word[:-1]]
        return scores.index_fill(1, input_ids.new_tensor(banned), -math.inf)

    return ban
