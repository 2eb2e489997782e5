"""Guesses of a small model for the next tokens of requests.

The model's rows are in the pool of the engine's cache, and live during a draft only:

    take parked rows, up to the last right guess -> compute what requests have read since, packed
    -> decode the other guesses, all rows at once -> park the rows

So nothing has to be done where a request ends, is preempted or cancelled, and whoever is short of
memory evicts parked rows, as those of prefixes. A request that has lost its row decodes plainly.

See DESIGN.md, Note [A draft model's rows are parked].
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import abc
from collections.abc import Iterable, Mapping
from dataclasses import replace
from operator import eq
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ..core.cache import Sequence
from ..core.interrupts import interruptible
from ..errors import ConfigError
from ..hf import compat
from ..hf.store import close_later
from ..step import Piece
from ..step.mixed_graphs import DRAFT_ROWS_MAX
from ..step.piece import likeliest
from .drafts import ASSUMED_TRIES, CHANCE_MIN, OWN_TRIES_MAX, TRIES_MAX, Drafter, Tally
from .guided import Grammars
from .options import EngineOptions
from .request import Request, RequestState
from .runner import ModelRunner, RunnerOptions, make_runner, passes
from .served_rows import ServedRows, open_rows
from .training_turns import Vocabulary

_LOG = logging.getLogger(__name__)
#: Running requests beyond which no guess would pay.
_REQUESTS_MAX = 64
#: Passes that are captured.
_CAPTURES: dict[str, Any] = {"max_graph_tokens": 256, "few_sizes": True}
#: Right guesses, of `ASSUMED_TRIES`, that are assumed at first.
_ASSUMED = 3.0
#: Tokens over which the time to compute a request's prompt is spread, at most.
_SPREAD_TOKENS = 64
#: Calls of `follow` without guesses after which acceptance and times are measured anew.
_RETRY_CALLS = 1024
#: Growth of a known time by a longer one; a shorter one replaces it.
_SLOWER_MAX = 1.1


class ModelDrafter(Drafter):
    """Guesses greedily with the model of `runner`, over `rows` in the pool of the engine's cache.

    `given` are the model's options; the other arguments are those of `Drafter`.
    """

    def __init__(self, rows: ServedRows, runner: ModelRunner, given: EngineOptions, *its: Any):
        super().__init__(*its)
        self._cache, self.caches = rows.cache, (rows.cache,)
        self.most_requests = given.max_num_seqs
        self._runner, self._pass_tokens = runner, given.max_num_batched_tokens
        self._rows: dict[Request, Sequence] = {}  # Those of the last draft, parked since.
        # Tokens of a request that its row holds; -1 once the row was lost.
        self._held: WeakKeyDictionary[Request, int] = WeakKeyDictionary()
        # The last guesses, and the number of tokens known before them.
        self._made: WeakKeyDictionary[Request, tuple[int, list[int]]] = WeakKeyDictionary()
        self._own: WeakKeyDictionary[Request, Tally] = WeakKeyDictionary()
        self._begin_trial()

    def _begin_trial(self) -> None:
        self._tally, self._num_plain = Tally(), 0
        self._tally.right[0], self._tally.tries[0] = _ASSUMED, ASSUMED_TRIES
        self._pass_s = self._token_s = 0.0  # Of a decoding pass, and a new token; 0 if unknown.

    # ---- choice ---------------------------------------------------------------------------

    def follow(self, requests: Iterable[Request]) -> None:
        """Compare tokens that were read with the last guesses."""
        self._num_plain += 1
        if self._num_plain > _RETRY_CALLS:
            self._begin_trial()
        for request in requests:
            num_before, guesses = self._made.get(request, (0, []))
            if not guesses or request.num_known == num_before:
                continue
            del self._made[request]
            read = request.tokens(num_before, request.num_known)[: len(guesses)]
            num_right = [*map(eq, guesses, read), False].index(False)
            for at in range(min(num_right + 1, len(read))):
                self._own[request].add(0, is_right=at < num_right, most=OWN_TRIES_MAX)
                self._tally.add(0, is_right=at < num_right, most=TRIES_MAX)
            # Nothing was computed from the last guess.
            self._held[request] = num_before + min(num_right, len(guesses) - 1)

    def _chances(self, request: Request, skipped: int) -> list[float]:
        own, everyone = self._own.setdefault(request, Tally()), self._tally
        right = own.right[0] + ASSUMED_TRIES * everyone.right[0] / everyone.tries[0]
        chance = right / (own.tries[0] + ASSUMED_TRIES)
        longest = request.num_known + self._asked.num_speculative_tokens
        if self._held.get(request, 0) < 0 or longest > self._cache.max_tokens:
            return []
        found = [chance**number for number in range(1, 1 + self.room(request))]
        return [each for each in found if each >= CHANCE_MIN]

    def _added_s(self, request: Request, number: int, most: int) -> float:
        num_new = request.num_known - self._held.get(request, 0)
        left = min(request.max_total_tokens - request.num_known, _SPREAD_TOKENS)
        begun_s = self._token_s * num_new / left if number == 1 else 0.0
        return begun_s + (self._pass_s if number > most else 0.0)

    # ---- a draft --------------------------------------------------------------------------

    def _guesses(self, numbers: Mapping[Request, int]) -> dict[Request, abc.Sequence[int]]:
        try:
            return self._drafted(numbers) if numbers else {}
        except Exception as error:  # noqa: BLE001  # no memory, for instance: they decode plainly
            _LOG.warning("the draft model could not guess: %r", error)
            self._held.update(dict.fromkeys(numbers, -1))
            return {}
        finally:
            self._park()

    def _park(self) -> None:
        for row in self._rows.values():
            row.close()

    def _drafted(self, numbers: Mapping[Request, int]) -> dict[Request, abc.Sequence[int]]:
        start_s, self._num_plain = time.perf_counter(), 0
        taken = self._taken(numbers)
        rows = [(each, taken[each]) for each in numbers if each in taken]
        if not rows:
            return {}
        pieces: dict[int, Piece] = {}
        for slot, (request, row) in enumerate(rows):
            past, end = row.num_tokens, request.num_known
            pieces[slot] = Piece(slot, row.row, past, end - past, request.tokens(past, end))
        most, stepper = max(numbers.values()), self._runner.stepper
        self._cache.grow([(row, each.num_known + most - 1) for each, row in rows])
        for group in passes(pieces, stepper.chunk_sizes, self._pass_tokens):
            self._run([part for _, part in group])
        found = [stepper.last_tokens[: len(rows)].clone()]
        for done in range(most - 1):
            self._run([Piece(x.slot, x.row, x.num_tokens + done, 1, None) for x in pieces.values()])
            found.append(stepper.last_tokens[: len(rows)].clone())
        made = torch.stack(found, 1).tolist()
        for (request, row), guesses in zip(rows, made, strict=True):
            row.record(request.tokens(row.num_recorded, request.num_known))
            self._held[request] = request.num_known
            self._made[request] = request.num_known, guesses
        took_s = time.perf_counter() - start_s
        self.times.leave_out(took_s)
        num_new = sum([each.num_new_tokens for each in pieces.values()])
        pass_s, token_s = took_s / most, max(0.0, took_s - most * self._pass_s) / num_new
        if num_new <= 2 * len(rows):
            self._pass_s = min(pass_s, _SLOWER_MAX * self._pass_s or pass_s)
        else:
            self._token_s = min(token_s, _SLOWER_MAX * self._token_s or token_s)
        return {each: self._made[each][1][: numbers[each]] for each, _ in rows}

    def _taken(self, numbers: Mapping[Request, int]) -> dict[Request, Sequence]:
        """Take the rows of running requests, and begin those of `numbers` that have had none."""
        self._park()  # What a failed driver call has left.
        cache, taken = self._cache, dict[Request, Sequence]()
        before, self._rows = self._rows, taken
        for request, row in before.items():
            at, held = row.row, min(self._held.get(request, 0), request.num_known - 1)
            with cache.pool.lock:
                is_there = held > 0 and at in cache.rows.parked and cache.keeps(at, held)
                if request.state is RequestState.RUNNING and is_there and cache.can_begin(at, held):
                    cache.rows.take(at, held, request.tenant, cache.current_stream())
                    taken[request] = Sequence(cache, at, held, request.tenant)
        others = [each for each in numbers if each not in taken]
        for request in others:
            if request in self._held:
                self._held[request] = -1
            elif request.leader not in others:  # Else it waits for the first sample's prompt.
                tokens = request.tokens(0, request.num_known)
                taken[request] = cache.open(len(tokens), prompt=tokens, tenant=request.tenant)
        return taken

    def _run(self, pieces: abc.Sequence[Piece]) -> None:
        stepper = self._runner.stepper
        with self._cache.submitting([(x.row, x.num_past_tokens, x.num_tokens) for x in pieces]):
            step = interruptible(stepper.run, pieces)
        if step.token_ids is None:  # Else the graph has stored them.
            slots = torch.tensor([pieces[at].slot for at in step.pieces], dtype=torch.int64)
            stepper.last_tokens[slots.to(stepper.device)] = likeliest(step.logits)


# ---- making --------------------------------------------------------------------------------------


def make_drafter(
    owner: object,
    model: Any,
    rows: ServedRows,
    given: EngineOptions,
    grammars: Grammars,
    lockstep: Any,
    undo: contextlib.ExitStack,
) -> Drafter | None:
    """Make an engine's drafter; None without `speculative_config`, or if layers keep states.

    A draft model is loaded, and served until `undo` ends; if `owner` ends before, its memory is
    freed later. `ConfigError` if it does not fit.
    """
    asked = given.speculation
    if asked is None:
        return None
    if rows.cache.states is not None:
        _LOG.info("no tokens are guessed: layers keep states, which cannot go back")
        return None
    agree = int if lockstep is None else lockstep.group.max
    max_rows, chunk_sizes = max(DRAFT_ROWS_MAX, given.max_num_seqs), rows.calls.chunks.values()
    its = asked, max_rows, chunk_sizes, grammars, agree
    if asked.model is None:
        return Drafter(*its)
    if lockstep is not None:
        raise ConfigError("speculative_config: a draft model needs a model on one device")
    draft = _loaded(asked.model, model)
    names = "max_num_batched_tokens", "memory_fraction", "attention_backend", "runner"
    options = replace(
        EngineOptions(**{name: getattr(given, name) for name in names}),
        max_num_seqs=min(given.max_num_seqs, _REQUESTS_MAX),
        runner_options=replace(given.runner_options or RunnerOptions(), **_CAPTURES),
    )
    draft_rows = open_rows(draft, rows.cache.pool, options)
    undo.callback(draft_rows.close)
    close_later(owner, draft_rows.cache)
    if draft_rows.cache.states is not None:
        raise ConfigError("speculative_config: layers of the draft model keep states")
    runner = make_runner(draft, draft_rows, options)
    undo.callback(runner.close)
    return ModelDrafter(draft_rows, runner, options, *its)


def _loaded(draft: Any, model: Any) -> Any:
    """Return the draft model, loaded if it is a name; `ConfigError` unless it suits the model."""
    device = model.get_input_embeddings().weight.device
    try:
        if not isinstance(draft, torch.nn.Module):
            draft = compat.load_model(str(draft), device=str(device), dtype=None)
        compat.check_model(draft)
        its = Vocabulary.of(draft)[:2]
    except ConfigError as error:
        raise ConfigError(f"speculative_config: the draft model: {error}") from error
    wanted = Vocabulary.of(model)[:2]
    if (its, draft.get_input_embeddings().weight.device) != (wanted, device):
        raise ConfigError(
            "speculative_config: the draft model needs the vocabulary and the device of the model, "
            f"logits and embedding of {wanted} on {device}; it has {its}"
        )
    return draft
