"""Guesses for the next tokens of requests, and how many of them a step should verify.

Guesses come from a draft model (`draft_model.py`), or from text: what a request has read and
written and, with the method "suffix", what other requests of its tenant have answered. Whoever
writes three or six tokens that stand there is expected to go on as it goes on there. Each token
that is read shows whether it was guessed from text, also while no guess is verified, so acceptance
is known at no cost to the device.

A step with guesses is planned after the step before was read, so the device waits for the host. It
is worth it if tokens come faster than by steps that are planned ahead, by the measured times of
both.

See DESIGN.md, Note [Guesses are verified where they pay].
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from .guided import Grammars
from .options import Speculation
from .request import Request

if TYPE_CHECKING:
    from ..core.cache import KVCache

# ---- texts ---------------------------------------------------------------------------------------

#: Tokens that are compared to find where a text is repeated; both lengths are looked up.
_SHORT, _LONG = 3, 6
#: Tokens after the last wrong guess in its text, where it goes on after a small change.
_RESUME_TOKENS = 4
_BITS, _ODD, _MASK = 21, 0x9E3779B1, (1 << 62) - 1
#: N-grams of a tenant's answers that are kept, twice; and tenants whose answers are.
_ANSWERS_MAX, _TENANTS_MAX = 1 << 16, 64
#: Tokens repeated so far, from which on a guess counts as of the next class.
_CLASSES = (_SHORT, _LONG, 12, 24)
#: Right guesses of each class, of four, that are assumed at first.
_ASSUMED = (1.0, 1.0, 2.0, 3.0, 3.5)
ASSUMED_TRIES = 4.0
#: Tallies are halved at so many tries: of all requests, and of one.
TRIES_MAX, OWN_TRIES_MAX = 256.0, 32.0

#: The continuation of each n-gram, by the n-gram's hash: a text, and a place in it.
_Places = dict[int, tuple[Sequence[int], int]]


class Tally:
    """Right guesses and tries by class."""

    def __init__(self) -> None:
        self.right, self.tries = [0.0] * len(_ASSUMED), [0.0] * len(_ASSUMED)

    def add(self, at: int, *, is_right: bool, most: float) -> None:
        """Count a try of class `at`; from `most` tries on, all of them count half."""
        self.right[at] += is_right
        self.tries[at] += 1
        if self.tries[at] >= most:
            self.right[at] /= 2
            self.tries[at] /= 2


def _keys(tail: Sequence[int]) -> tuple[int, int]:
    """Return hashes of the last `_LONG` and `_SHORT` tokens of a tail of `_LONG`."""
    a, b, c, d, e, f = tail
    short = (d << 2 * _BITS) ^ (e << _BITS) ^ f
    before = (a << 2 * _BITS) ^ (b << _BITS) ^ c
    return ~((before * _ODD ^ short) & _MASK), short


def _places_in(prompt: Sequence[int]) -> dict[int, int]:
    """Return where a prompt goes on after each n-gram, the last place of each."""
    tokens = np.asarray(prompt, np.int64)[:-1]
    if len(tokens) < _LONG:
        return {}
    short = (tokens[:-2] << 2 * _BITS) ^ (tokens[1:-1] << _BITS) ^ tokens[2:]
    with np.errstate(over="ignore"):
        long = ~((short[:-3] * _ODD ^ short[3:]) & _MASK)
    places = dict(zip(short.tolist(), range(_SHORT, len(prompt)), strict=True))
    places.update(zip(long.tolist(), range(_LONG, len(prompt)), strict=True))
    return places


class _Text:
    """The text of one request, and where it is being repeated."""

    def __init__(self, request: Request, places: dict[int, int]):
        self.prompt = request.prompt_token_ids
        self.in_prompt = places  # Shared by the samples of a prompt.
        self.output = array("q")
        self.in_output: dict[int, int] = {}
        self.tally = Tally()
        known = list(self.prompt[-_LONG:])
        self.tail = deque([0] * (_LONG - len(known)) + known, maxlen=_LONG)
        self.keys = _keys(self.tail)
        self.source: Sequence[int] | None = None  # The text that goes on as this one should,
        self.at = self.num_matched = 0  # the place of the next token, and the tokens before it.
        self.left: Any = None  # The text and the place where the last guess was wrong.

    def guess(self) -> int:
        """Return the next token's guess; -1 for none."""
        source = self.source
        return source[self.at] if source is not None and self.at < len(source) else -1

    def guesses(self, count: int) -> list[int]:
        """Return up to `count` guesses; an answer that repeats itself goes on repeating."""
        source, found = self.source, list[int]()
        if source is not None:
            found += source[self.at : self.at + count]
            if source is self.output and found:
                while len(found) < count:
                    found.append(found[self.at + len(found) - len(source)])
        return found

    def take(self, token_id: int, answers: tuple[_Places, _Places] | None) -> None:
        """Add a token that was read to the text, and look up where to go on."""
        at, is_right = len(self.output), self.guess() == token_id
        place = self.output, at
        for key in self.keys:
            self.in_output[key] = at
            if answers is not None:
                answers[0][key] = place
        self.output.append(token_id)
        self.tail.append(token_id)
        self.keys = _keys(self.tail)
        if is_right:
            self.at += 1
            self.num_matched += 1
        if not is_right or self.guess() < 0:
            self._look_up(answers)

    def _look_up(self, answers: tuple[_Places, _Places] | None) -> None:
        if self.guess() >= 0:
            self.left = self.source, self.at
        self.source = None
        for key, num_matched in zip(self.keys, (_LONG, _SHORT), strict=True):
            self.num_matched = num_matched
            if key in self.in_output:
                self.source, self.at = self.output, self.in_output[key]
            elif key in self.in_prompt:
                self.source, self.at = self.prompt, self.in_prompt[key]
            elif answers is not None and (found := answers[0].get(key) or answers[1].get(key)):
                self.source, self.at = found
            if self.guess() >= 0:
                return
        if self.left is not None:
            source, start = self.left
            for at in range(start, min(start + _RESUME_TOKENS, len(source) - 1)):
                if source[at] == self.tail[-1]:
                    self.source, self.at, self.num_matched = source, at + 1, 1
                    return


# ---- times ---------------------------------------------------------------------------------------

#: Sizes with so many measurements are measured in one of so many steps; the shortest counts.
_ENOUGH, _MEASURE_STEPS = 3, 8
#: Steps after which a size that was not measured again is forgotten, to be tried again.
_FORGET_STEPS = 1024
#: Time of a step with guesses of a size that is not known, relative to decoding.
_ASSUMED_FACTOR = 1.1


class StepTimes:
    """Times between the results of steps, by their kind and size.

    `agree` returns the maximum of an integer over all ranks, which measure alike.
    """

    def __init__(self, agree: Callable[[int], int] = int):
        self._agree = agree
        self._took_s: dict[bool, dict[int, deque[float]]] = {False: {}, True: {}}
        self._measured_at: dict[tuple[bool, int], int] = {}
        self._num_steps = 0
        self._read_s = math.inf

    def note(self, now_s: float, num_tokens: int, *, drafts: bool, counts: bool) -> None:
        """Note that a step's result was read; `counts` if its time is the one since the last."""
        took_s, self._read_s = now_s - self._read_s, now_s
        if not counts or took_s < 0:  # Nothing was read before.
            return
        self._num_steps += 1
        size = _rounded(num_tokens)
        known = self._took_s[drafts].setdefault(size, deque(maxlen=_ENOUGH))
        if len(known) < _ENOUGH or not self._num_steps % _MEASURE_STEPS:
            known.append(self._agree(round(1e6 * took_s)) / 1e6)
            self._measured_at[drafts, size] = self._num_steps
            for kind, each in tuple(self._measured_at):
                if self._num_steps - self._measured_at[kind, each] > _FORGET_STEPS:
                    del self._measured_at[kind, each], self._took_s[kind][each]

    def decoding_s(self, num_tokens: int) -> float | None:
        """Return the time of a step that decodes `num_tokens`; None if it is not known."""
        known = self._took_s[False]
        sizes = sorted(known)
        near = [each for each in sizes if each <= _rounded(num_tokens)][-1:] or sizes[:1]
        return min(known[near[0]]) if near else None

    def leave_out(self, took_s: float) -> None:
        """Leave `took_s` out of the time of the next step."""
        self._read_s += took_s

    def drafting(self, decoding_s: float) -> list[tuple[int, float]]:
        """Return known sizes of steps with guesses, each with the time from that size on."""
        found, most_s = [(0, _ASSUMED_FACTOR * decoding_s)], 0.0
        for size, took_s in sorted(self._took_s[True].items()):
            if len(took_s) > 1:  # The first one may have loaded kernels.
                most_s = max(most_s, min(took_s))
                found.append((size, most_s))
        return found


def _rounded(num_tokens: int) -> int:
    shift = max(0, num_tokens.bit_length() - 4)
    return num_tokens >> shift << shift


# ---- drafter -------------------------------------------------------------------------------------

#: Tokens per second by which guesses must be faster.
_GAIN_MIN = 1.03
#: Tokens that are taken in one call, some 5 ms; a prompt's count as so many fewer.
_FOLLOW_TOKENS, _PROMPT_DIVISOR = 512, 16
#: Guesses that are less likely to be reached and right are not considered.
CHANCE_MIN = 0.05


class Drafter:
    """Guesses tokens of running requests, and chooses how many of them to verify.

    `max_rows` bounds the logits of a step. Where layers attend in chunks of `chunk_sizes` tokens,
    guesses end with the chunk. The guesses of guided requests fit their grammar.
    """

    caches: Sequence[KVCache] = ()  #: Of a draft model.

    def __init__(
        self,
        asked: Speculation,
        max_rows: int,
        chunk_sizes: Iterable[int],
        grammars: Grammars,
        agree: Callable[[int], int] = int,
    ):
        self._asked, self._grammars = asked, grammars
        self._max_rows = max_rows
        self.most_requests = max_rows // 2  #: With more, no guess would pay.
        self._chunk_sizes = tuple(chunk_sizes)
        self.times = StepTimes(agree)
        self._texts: WeakKeyDictionary[Request, _Text] = WeakKeyDictionary()
        self._answers: OrderedDict[str | None, tuple[_Places, _Places]] = OrderedDict()
        self._tally = Tally()
        self._tally.right, self._tally.tries = list(_ASSUMED), [ASSUMED_TRIES] * len(_ASSUMED)

    def follow(self, requests: Iterable[Request]) -> None:
        """Take tokens that were read; what is too much waits for the next call.

        Cost: some 8 µs for each, and 0.5 µs for each of a prompt.
        """
        left = _FOLLOW_TOKENS
        for request in requests:
            if left <= 0:
                break
            if request.params.logits_processors:
                continue
            text = self._texts.get(request)
            if text is None:
                text = self._texts[request] = self._begun(request)
                left -= len(text.prompt) // _PROMPT_DIVISOR
            num_known = len(text.output)
            if left <= 0 or num_known == len(request.output_token_ids):
                continue
            answers = None
            if self._asked.method == "suffix":
                answers = self._answers_of(request.tenant)
            new = request.output_token_ids[num_known : num_known + left]
            left -= len(new)
            for token_id in new:
                guess, at = text.guess(), bisect_right(_CLASSES, text.num_matched)
                if guess >= 0:
                    is_right = guess == token_id
                    text.tally.add(at, is_right=is_right, most=OWN_TRIES_MAX)
                    self._tally.add(at, is_right=is_right, most=TRIES_MAX)
                text.take(token_id, answers)
            is_behind = len(text.output) < len(request.output_token_ids)
            if is_behind or request.matcher is None:
                continue
            if forced := self._grammars.forced(request):
                text.source, text.at, text.num_matched = forced, 0, _CLASSES[-1]

    def _begun(self, request: Request) -> _Text:
        leader = self._texts.get(request.leader) if request.leader is not None else None
        if leader is not None:
            return _Text(request, leader.in_prompt)
        return _Text(request, _places_in(request.prompt_token_ids))

    def _answers_of(self, tenant: str | None) -> tuple[_Places, _Places]:
        answers = self._answers.pop(tenant, None) or ({}, {})
        if len(answers[0]) >= _ANSWERS_MAX:
            answers = ({}, answers[0])
        self._answers[tenant] = answers
        if len(self._answers) > _TENANTS_MAX:
            self._answers.popitem(last=False)
        return answers

    def room(self, request: Request) -> int:
        """Return how many guesses a request may have, whose tokens were read."""
        past = request.num_computed
        if request.params.logits_processors:
            return 0
        ends = [(past // each + 1) * each for each in self._chunk_sizes]
        left = min([request.max_total_tokens - 1, *ends]) - past - 1
        return max(0, min(self._asked.num_speculative_tokens, left))

    def _chances(self, request: Request, skipped: int) -> list[float]:
        """Return the probabilities that guesses after the first `skipped`, and all before, hold."""
        text = self._texts.get(request)
        if text is None or text.source is None:
            return []
        if len(text.output) < len(request.output_token_ids):
            return []
        count = skipped + self.room(request)
        if text.source is not text.output:
            count = min(count, len(text.source) - text.at)
        own, everyone, found = text.tally, self._tally, list[float]()
        of_class: dict[int, float] = {}
        probability = 1.0
        for num_matched in range(text.num_matched, text.num_matched + count):
            at = bisect_right(_CLASSES, num_matched)
            if at not in of_class:
                right = own.right[at] + ASSUMED_TRIES * everyone.right[at] / everyone.tries[at]
                of_class[at] = right / (own.tries[at] + ASSUMED_TRIES)
            probability *= of_class[at]
            if probability < CHANCE_MIN:
                break
            found.append(probability)
        return found[skipped:]

    def numbers(self, requests: Sequence[Request], *, skipped: int = 0) -> Mapping[Request, int]:
        """Return how many guesses of each decoding request to verify; empty if none pays.

        With `skipped`, so many tokens of each are computed already, and not known.
        """
        num_decoding = len(requests)
        decoding_s = self.times.decoding_s(num_decoding)
        if decoding_s is None:
            return {}
        chances = [(-p, at) for at, one in enumerate(requests) for p in self._chances(one, skipped)]
        chances.sort()
        sizes = self.times.drafting(decoding_s)[::-1]
        best, num_best = _GAIN_MIN * num_decoding / decoding_s, 0
        expected, took_s, guessing_s = float(num_decoding), 0.0, 0.0
        number, most = [0] * num_decoding, 0
        for count, (chance, at) in enumerate(chances[: max(0, self._max_rows - num_decoding)], 1):
            expected -= chance
            number[at] += 1
            guessing_s += self._added_s(requests[at], number[at], most)
            most = max(most, number[at])
            while sizes and sizes[-1][0] <= _rounded(num_decoding + count):
                took_s = sizes.pop()[1]
            if expected > best * (took_s + guessing_s):
                best, num_best = expected / (took_s + guessing_s), count
        counts = Counter(at for _, at in chances[:num_best])
        return {requests[at]: count for at, count in counts.items()}

    def _added_s(self, request: Request, number: int, most: int) -> float:
        """Return the time that guess `number` of a request adds, where others have `most`."""
        return 0.0  # Texts are followed anyway.

    def drafts(self, requests: Sequence[Request]) -> Mapping[Request, Sequence[int]]:
        """Return the guesses of decoding requests, whose tokens were all read, that pay."""
        found = self._guesses(self.numbers(requests))
        for each in found:
            if each.matcher is not None:
                found[each] = self._grammars.fitting(each, found[each])
        return {each: guesses for each, guesses in found.items() if guesses}

    def _guesses(self, numbers: Mapping[Request, int]) -> dict[Request, Sequence[int]]:
        return {each: self._texts[each].guesses(count) for each, count in numbers.items()}
