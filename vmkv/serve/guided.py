"""Guided decoding: grammars that llguidance compiles, and masks of the tokens that may come next.

Every process that runs the model compiles a request's grammar from its text, once for each thread
that fills masks, and has a matcher for each sample. A matcher follows the tokens that were read; it
needs neither the cache nor a slot. Where a grammar may end, its masks have the end-of-sequence
tokens, and nowhere else.
"""

from __future__ import annotations

import importlib.util
import json
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..errors import ConfigError, one_line
from ..units import KiB, div_ceil
from .params import StructuredOutputs
from .request import Request

if TYPE_CHECKING:
    import llguidance

#: Largest grammar; one of this size compiles in some 100 ms for each thread, while the engine
#: does nothing else.
TEXT_BYTES_MAX = 128 * KiB
#: Compiled grammars that are kept, for the requests to come; the least recently used one goes.
_KEPT_MAX = 64
_THREADS_MAX = 8
_BITS = 32
#: Tokens of up to so many characters are found to fit a string as one set. In a string of bounded
#: length a test of each token of the vocabulary would take milliseconds.
_SLICE_CHARS = ("{1,4}", "{1,8}", "{1,12}", "+")
#: White space between JSON's tokens: a line's indentation, but no endless rest of a page.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"


def check_grammar(asked: StructuredOutputs) -> None:
    """Check a grammar without a tokenizer; `Engine.add` finds the rest. From any thread.

    `ConfigError` with the reason if it is wrong, unsupported or too large, or without llguidance.

    Cost: some 1 ms, or 60 ms for the largest, mostly without the interpreter's lock.
    """
    grammar = _grammar_of(asked)
    from llguidance import LLMatcher

    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=_limits())
    if is_error:
        raise _refused(*messages)


class GuidedMatcher(NamedTuple):
    """Matcher of one sample; those of one grammar and `group` share a lexer, and so its lock."""

    group: int
    state: llguidance.LLMatcher


class Grammars:
    """Compiles grammars for one model, and fills masks.

    Args:
        tokenizer: The model's; grammars need a fast one.
        vocab_size: Number of the logits' columns.
        end_tokens: The model's end-of-sequence tokens; if none, the tokenizer's.
        is_pinned: Whether masks lie in pinned memory, for asynchronous copies.
    """

    def __init__(
        self, tokenizer: Any, vocab_size: int, end_tokens: Collection[int], *, is_pinned: bool
    ):
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_tokens = sorted(each for each in end_tokens if 0 <= each < vocab_size)
        self._is_pinned = is_pinned
        self._lock = threading.Lock()
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._executor: Any = None
        self._num_threads = min(_THREADS_MAX, len(os.sched_getaffinity(0)))
        self._kept: OrderedDict[StructuredOutputs, deque[GuidedMatcher]] = OrderedDict()

    def prepare(self) -> None:
        """Convert the vocabulary, so that the first grammar need not; no effect if impossible.

        Callable from another thread. Cost: some 1.5 s for 128,000 tokens.
        """
        if importlib.util.find_spec("llguidance") is not None and _is_fast(self._tokenizer):
            self._convert()

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end an output, after the first `matcher`."""
        return frozenset(self._convert().eos_tokens)

    def matcher(self, asked: StructuredOutputs) -> GuidedMatcher:
        """Return a new matcher at the beginning of the output.

        `ConfigError` as by `check_grammar`, if no output satisfies the grammar, or without a fast
        tokenizer.
        """
        # A copy shares its original's lexer, which is locked while it fills a mask: one original
        # for each thread, and copies of them in turn.
        originals = self._kept.pop(asked, None) or deque()
        if len(originals) < self._num_threads:
            originals.appendleft(GuidedMatcher(len(originals), self._compiled(asked)))
        else:
            originals.rotate()
        self._kept[asked] = originals
        if len(self._kept) > _KEPT_MAX:
            self._kept.popitem(last=False)
        original = originals[0]
        return original._replace(state=original.state.deep_copy())

    def advance(self, asked: StructuredOutputs, matcher: GuidedMatcher, token_id: int) -> None:
        """Take an output's next token; `ConfigError` if the grammar has become too much work."""
        # A matcher that failed while it filled a mask allows the end, and accepts it.
        if not matcher.state.consume_token(token_id) or matcher.state.is_error():
            self._kept.pop(asked, None)  # Copies share the lexer that has failed.
            raise _refused(matcher.state.get_error())

    def masks(self, requests: Sequence[Request | None]) -> torch.Tensor | None:
        """Return `[n, words] int32` with a bit for each token that a request may get next.

        Requests without a grammar, and None, may get any. None if no request has a grammar. Cost:
        10 to 200 µs for each, by its place in the grammar and the vocabulary, on up to 8 threads.
        """
        matchers = {at: each.matcher for at, each in enumerate(requests) if each and each.matcher}
        # Threads take neighbours, so that few wait for another's lexer.
        order = sorted(matchers, key=lambda at: matchers[at].group)
        guided = [(matchers[at].state, at) for at in order]
        if not guided:
            return None
        num_words = div_ceil(self._convert().vocab_size, _BITS)
        shape = (len(requests), num_words)
        masks = torch.empty(shape, dtype=torch.int32, pin_memory=self._is_pinned)
        if len(guided) < len(requests):
            masks.fill_(-1)
        self._executor.unsafe_compute_mask_ptr(guided, masks.data_ptr(), 4 * num_words, shape[0])
        for _, at in guided:
            request = requests[at]
            if request is not None and request.params.min_tokens > len(request.output_token_ids):
                _withhold(masks[at], request.params.stop_token_ids)
        return masks

    def _convert(self) -> llguidance.LLTokenizer:
        with self._lock:
            if self._vocabulary is None:
                import llguidance
                import llguidance.hf

                # Columns beyond the tokenizer's vocabulary are never chosen.
                self._vocabulary = llguidance.hf.from_tokenizer(
                    self._tokenizer,
                    n_vocab=max(self._vocab_size, len(self._tokenizer)),
                    eos_token=self._end_tokens or None,
                    slices=[rf'[^"\\\x00-\x1F\x7F]{each}' for each in _SLICE_CHARS],
                )
                self._executor = llguidance.LLExecutor(self._num_threads)
            return self._vocabulary

    def _compiled(self, asked: StructuredOutputs) -> llguidance.LLMatcher:
        grammar = _grammar_of(asked)
        import llguidance

        if not _is_fast(self._tokenizer):
            what = "none" if self._tokenizer is None else f"a slow {type(self._tokenizer).__name__}"
            raise ConfigError(
                "structured_outputs need a fast tokenizer, of the package tokenizers, and the "
                f"engine has {what}"
            )
        options: Any = {"log_level": 0, "limits": _limits()}
        unforced = _unforced(grammar, is_callers=asked.grammar is not None)
        matcher = llguidance.LLMatcher(self._convert(), unforced, **options)
        # The first mask shows a grammar without an output, and is kept with the lexer's states.
        if not matcher.is_error():
            matcher.compute_bitmask()
            if matcher.is_error():
                raise _refused("no output satisfies the grammar")
            return matcher
        told = llguidance.LLMatcher(self._convert(), grammar, **options)  # In the caller's words.
        raise _refused(told.get_error() or matcher.get_error())


def _grammar_of(asked: StructuredOutputs) -> str:
    """Return a grammar in llguidance's form; `ConfigError` as by `check_grammar`."""
    texts = (asked.json, asked.regex, asked.grammar, *(asked.choice or ()))
    try:
        num_bytes = sum(len(each.encode()) for each in texts if isinstance(each, str))
    except UnicodeEncodeError as error:  # Half of a surrogate pair.
        raise _refused(str(error)) from error
    if num_bytes > TEXT_BYTES_MAX:
        raise _refused(f"{num_bytes} bytes of grammar are too large: at most {TEXT_BYTES_MAX}")
    if importlib.util.find_spec("llguidance") is None:
        raise ConfigError("structured_outputs need llguidance: pip install 'vmkv[serve]'")
    from llguidance import LLMatcher

    if asked.regex is not None:
        return LLMatcher.grammar_from_regex(asked.regex)
    if asked.grammar is not None:
        return LLMatcher.grammar_from_lark(asked.grammar)
    if asked.choice is not None:
        choices = " | ".join(json.dumps(each, ensure_ascii=False) for each in asked.choice)
        # JSON may have this control character as it is, and Lark may not.
        choices = choices.replace("\x7f", r"\u007f")
        return LLMatcher.grammar_from_lark(f"start: {choices}")
    try:
        return LLMatcher.grammar_from_json_schema(
            str(asked.json or '{"type": "object"}'),
            defaults={"whitespace_pattern": _WHITESPACE, "coerce_one_of": True},
        )
    except ValueError as error:  # No JSON at all.
        raise _refused(str(error)) from error


def _unforced(grammar: str, *, is_callers: bool) -> str:
    """Return a grammar that leaves the tokenisation of forced texts to the model.

    Otherwise a mask has the tokenizer's own tokenisation alone, which may contain an added token,
    such as `<think>`. To a grammar that is no text, so the matcher then refuses it.
    """
    if grammar.lstrip().startswith("{"):
        if is_callers:  # In llguidance's JSON, perhaps of several grammars.
            return grammar
        (rules,) = json.loads(grammar)["grammars"]
        grammar = rules["lark_grammar"] or f"start: %json {json.dumps(rules['json_schema'])}"
    return f'{grammar}\n%llguidance {{"no_forcing": true}}\n'


def _limits() -> Any:
    from llguidance import LLParserLimits

    return LLParserLimits(verbose_errors=False)


def _refused(reason: str) -> ConfigError:
    return ConfigError(f"structured_outputs: {one_line(ValueError(reason))}")


def _is_fast(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "is_fast", False))


def _withhold(mask: torch.Tensor, token_ids: Sequence[int]) -> None:
    """Clear the bits of tokens, unless that leaves none."""
    kept = mask.clone()
    for token_id in token_ids:
        bit = 1 << token_id % _BITS
        mask[token_id // _BITS] &= ~(bit - (1 << _BITS) if bit >> (_BITS - 1) else bit)
    if not mask.any():
        mask.copy_(kept)
