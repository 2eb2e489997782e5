"""Guided decoding: grammars that llguidance compiles, and masks of the tokens that may come next.

Every process that runs the model compiles a request's grammar from its text, once for each thread
that fills masks, and has a matcher for each sample, which follows the tokens that were read. Where
a grammar may end, and only there, its masks have the end-of-sequence tokens.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import json
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..errors import ConfigError, one_line
from ..units import KiB, div_ceil
from .grammar_trial import GrammarTrials, compiled
from .params import StructuredOutputs
from .request import Request

if TYPE_CHECKING:
    import llguidance

#: Largest grammar.
TEXT_BYTES_MAX = 128 * KiB
#: Compiled grammars that are kept, for the requests to come; the least recently used one goes.
_KEPT_MAX = 64
_THREADS_MAX = 8
#: Processor time of a mask, beyond which its request ends.
MASK_S = 0.02
_BITS = 32
#: Tokens of up to so many characters are found to fit a string as one set. In a string of bounded
#: length a test of each token of the vocabulary would take milliseconds.
_SLICE_CHARS = ("{1,4}", "{1,8}", "{1,12}", "+")
#: White space between JSON's tokens: a line's indentation, but no endless rest of a page.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"


@functools.cache
def _trials_of_bytes() -> GrammarTrials:
    return GrammarTrials()


def check_grammar(asked: StructuredOutputs, trials: GrammarTrials | None = None) -> None:
    """Check a grammar of a client in another process; `Engine.add` finds the rest.

    From any thread. `trials` are those of the model's vocabulary. `ConfigError` with the reason if
    it is refused. Cost: some 10 ms, up to two times `TRIAL_S`; nothing if it is known.
    """
    trials = trials or _trials_of_bytes()
    reason = trials.verdicts.get(asked)
    if reason is None:
        grammar = _grammar_of(asked)
        reason = trials.judge(asked, grammar, _unforced(asked, grammar))
    if reason:
        raise _refused(reason)


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
        self._is_pinned = is_pinned
        self._lock = threading.Lock()
        self._executor: Any = None
        self._num_threads = min(_THREADS_MAX, len(os.sched_getaffinity(0)))
        self._kept: OrderedDict[StructuredOutputs, deque[GuidedMatcher]] = OrderedDict()
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="vmkv-grammar")
        self._ahead: dict[StructuredOutputs, Future[list[llguidance.LLMatcher]]] = {}
        #: Whether the clock may end a request; ranks would end different ones.
        self.ends_slow = True
        self._slow: list[Any] = []  # Matchers of the last masks that took too long.
        self._tokens: tuple[int, int, list[int]] | None = None
        self.renew(vocab_size, end_tokens)

    def renew(self, vocab_size: int, end_tokens: Collection[int]) -> None:
        """Compile again if the vocabulary or its end tokens have changed; no matcher is in use."""
        ends = sorted(each for each in end_tokens if 0 <= each < vocab_size)
        tokens = vocab_size, len(self._tokenizer) if is_fast(self._tokenizer) else 0, ends
        with self._lock:
            if tokens != self._tokens:
                self._tokens, self._vocab_size, self._end_tokens = tokens, vocab_size, ends
                self._vocabulary: llguidance.LLTokenizer | None = None
                self._kept.clear()
                self._ahead.clear()

    def prepare(self) -> None:
        """Convert the vocabulary, from any thread. Cost: some 1.5 s for 128,000 tokens."""
        if importlib.util.find_spec("llguidance") is not None and is_fast(self._tokenizer):
            self._convert()

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end an output, after the first `matcher`."""
        return frozenset(self._convert().eos_tokens)

    def is_ready(
        self, asked: StructuredOutputs, num_samples: int, when_ready: Callable[[], None]
    ) -> bool:
        """Whether `matcher` need not compile; if not, another thread does, then `when_ready()`."""
        missing = min(num_samples, self._num_threads - len(self._kept.get(asked, ())))
        ahead = self._ahead.get(asked)
        if missing <= 0:
            return True
        if ahead is None or (
            ahead.done() and not ahead.exception() and len(ahead.result()) < missing
        ):
            self._ahead.pop(asked, None)
            if len(self._ahead) >= _KEPT_MAX:  # Of requests that were cancelled.
                del self._ahead[next(iter(self._ahead))]
            ahead = self._compiler.submit(lambda: [self._compiled(asked) for _ in range(missing)])
            self._ahead[asked] = ahead
            ahead.add_done_callback(lambda _: when_ready())
        return ahead.done()

    def matcher(self, asked: StructuredOutputs) -> GuidedMatcher:
        """Return a new matcher at the beginning of the output; `ConfigError` if it is refused."""
        # A copy shares its original's lexer, which is locked while it fills a mask: one original
        # for each thread, and copies of them in turn.
        originals = self._kept.pop(asked, None) or deque()
        if len(originals) < self._num_threads:
            ahead = self._ahead.pop(asked, None)
            found = [self._compiled(asked)] if ahead is None else ahead.result()
            originals.appendleft(GuidedMatcher(len(originals), found.pop()))
            if ahead is not None and found:
                self._ahead[asked] = ahead
        else:
            originals.rotate()
        self._kept[asked] = originals
        if len(self._kept) > _KEPT_MAX:
            self._kept.popitem(last=False)
        original = originals[0]
        return original._replace(state=original.state.deep_copy())

    def advance(self, asked: StructuredOutputs, matcher: GuidedMatcher, token_id: int) -> None:
        """Take an output's next token; `ConfigError` if the grammar has become too much work."""
        if any(each is matcher for each in self._slow):
            told = f"more than {1e3 * MASK_S:.0f} ms, which all requests wait for"
            raise _refused(f"a token takes {told}: send a less ambiguous grammar")
        # A matcher that failed while it filled a mask allows the end, and accepts it.
        if not matcher.state.consume_token(token_id) or matcher.state.is_error():
            self._kept.pop(asked, None)  # Copies share the lexer that has failed.
            raise _refused(matcher.state.get_error())

    def forced(self, request: Request) -> list[int]:
        """Return the next tokens of a guided request if its grammar leaves no choice of text."""
        text = request.matcher.state.compute_ff_bytes().decode(errors="ignore")
        return self._tokenizer.encode(text, add_special_tokens=False) if text else []

    def fitting(self, request: Request, token_ids: Sequence[int]) -> Sequence[int]:
        """Return the first of a guided request's guesses that its grammar allows, without ends."""
        ends = (at for at, each in enumerate(token_ids) if each in request.params.stop_token_ids)
        token_ids = token_ids[: next(ends, len(token_ids))]
        return token_ids[: request.matcher.state.validate_tokens(list(token_ids))]

    def masks(
        self, requests: Sequence[Request | None], guesses: Sequence[int] | None = None
    ) -> torch.Tensor | None:
        """Return `[n, words] int32` with a bit for each token that a request may get next.

        Requests without a grammar, and None, may get any. None if no request has a grammar. With
        `guesses`, a request has a row after each, and the last is -1. Cost: 10 to 200 µs for each
        row, on up to 8 threads.
        """
        matchers = {at: each.matcher for at, each in enumerate(requests) if each and each.matcher}
        if guesses is not None:  # By the first row of each.
            matchers = {at: it for at, it in matchers.items() if not at or guesses[at - 1] < 0}
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
        alone, drafts = guided, dict[int, list[int]]()
        if guesses is not None:
            drafts = {at: list(takewhile(lambda each: each >= 0, guesses[at:])) for _, at in guided}
            alone = [each for each in guided if not drafts[each[1]]]
        drafted: list[Any] = [(each, at, drafts[at]) for each, at in guided if drafts.get(at)]
        began_s, place = time.perf_counter(), (masks.data_ptr(), 4 * num_words, shape[0])
        if alone:
            self._executor.unsafe_compute_mask_ptr(alone, *place)
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *place)
        took_s = time.perf_counter() - began_s
        num_masks = len(guided) + sum(map(len, drafts.values()))
        most_s = MASK_S * div_ceil(num_masks, self._num_threads)
        is_slow = self.ends_slow and took_s > most_s
        self._slow = [each for each in matchers.values() if is_slow and _is_slow(each)]
        for _, at in guided:
            request = requests[at]
            assert request is not None
            num_early = request.params.min_tokens - len(request.output_token_ids)
            for row in range(at, at + min(1 + len(drafts.get(at, ())), num_early)):
                _withhold(masks[row], request.params.stop_token_ids)
        return masks

    def _convert(self) -> llguidance.LLTokenizer:
        with self._lock:
            if self._vocabulary is None:
                import llguidance

                its = (self._tokenizer, self._vocab_size, self._end_tokens)
                text, options = vocabulary_of(*its)
                self._vocabulary = llguidance.LLTokenizer(text, **options)
                self._executor = llguidance.LLExecutor(self._num_threads)
            return self._vocabulary

    def _compiled(self, asked: StructuredOutputs) -> llguidance.LLMatcher:
        grammar = _grammar_of(asked)
        if not is_fast(self._tokenizer):
            what = "none" if self._tokenizer is None else f"a slow {type(self._tokenizer).__name__}"
            raise ConfigError(
                "structured_outputs need a fast tokenizer, of the package tokenizers, and the "
                f"engine has {what}"
            )
        found = compiled(self._convert(), grammar, _unforced(asked, grammar))
        if isinstance(found, str):
            raise _refused(found)
        return found


def vocabulary_of(
    tokenizer: Any, vocab_size: int = 0, end_tokens: Sequence[int] = ()
) -> tuple[str, dict[str, Any]]:
    """Return the arguments of `LLTokenizer` for a fast tokenizer."""
    backend = copy.copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    return backend.to_str(), {
        # Columns beyond the tokenizer's vocabulary are never chosen.
        "n_vocab": max(vocab_size, len(tokenizer)),
        "eos_token": list(end_tokens) or tokenizer.eos_token_id,
        "slices": [rf'[^"\\\x00-\x1F\x7F]{each}' for each in _SLICE_CHARS],
    }


def _grammar_of(asked: StructuredOutputs) -> str:
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


def _unforced(asked: StructuredOutputs, grammar: str) -> str:
    """Return a grammar that leaves the tokenisation of forced texts to the model.

    Otherwise a mask has the tokenizer's own alone, maybe with an added token such as `<think>`.
    """
    if grammar.lstrip().startswith("{"):
        if asked.grammar is not None:  # In llguidance's JSON, perhaps of several grammars.
            return grammar
        (rules,) = json.loads(grammar)["grammars"]
        grammar = rules["lark_grammar"] or f"start: %json {json.dumps(rules['json_schema'])}"
    return f'{grammar}\n%llguidance {{"no_forcing": true}}\n'


def _refused(reason: str) -> ConfigError:
    return ConfigError(f"structured_outputs: {one_line(ValueError(reason))}")


def is_fast(tokenizer: Any) -> bool:
    """Return whether a tokenizer is of the package tokenizers, as grammars need it."""
    return bool(getattr(tokenizer, "is_fast", False))


def _is_slow(matcher: GuidedMatcher) -> bool:
    began_s = time.thread_time()
    matcher.state.compute_bitmask()
    return time.thread_time() - began_s > MASK_S


def _withhold(mask: torch.Tensor, token_ids: Sequence[int]) -> None:
    kept = mask.clone()
    for token_id in token_ids:
        bit = 1 << token_id % _BITS
        mask[token_id // _BITS] &= ~(bit - (1 << _BITS) if bit >> (_BITS - 1) else bit)
    if not mask.any():
        mask.copy_(kept)
