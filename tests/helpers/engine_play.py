"""An engine over stamped rows, everything that may happen to it, and what must then hold.

What a state machine and a fuzzer share: they choose, this carries out and checks. Everything is
the engine's own but the model: `Engine`, its loop, scheduler, cache and pool are real.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from helpers.device import Device
from helpers.pool_play import PAGE, UNDERREAD_TOKENS, Guest, PoolPlay, add_layers, cost_model, noted
from helpers.stamp_runner import VOCABULARY, Mishap, StampRunner, answer
from helpers.stamped_rows import History, StampedRows

from vmkv import ExtentPool, KVCache, SamplingParams
from vmkv import Sequence as Sequence_
from vmkv.core.cache import grow_ahead, make_ready
from vmkv.errors import CapacityError, ConfigError, DriverError
from vmkv.options import EngineOptions
from vmkv.serve import Engine, FinishReason, RequestHandle, engine
from vmkv.serve.scheduler import PreemptionCosts

#: More steps than a token takes, computed again after a few preemptions and all.
_STEPS_PER_TOKEN_MAX = 10
_SAID_MAX = 60
#: Guests work beside the engine and each other, and what looks at content beside all.
_GUESTS_STREAMS = ((1 << 20) + 1, (1 << 20) + 2)
_CHECKS_STREAM = (1 << 20) + 3


@dataclass(frozen=True)
class Shape:
    """An engine, its layers and its memory.

    Attributes:
        windows: Of each layer group; None for one that sees everything.
        layers_per_group: Layers that share a token row.
        head_dim: 32 makes a token of one layer 512 bytes, an eighth of a page.
        max_num_seqs: Requests that run at once.
        max_num_batched_tokens: Of a step.
        max_num_mixed_tokens: Of one that decodes as well.
        max_tokens: Of a request.
        budget_pages: Device memory.
        host_pages: Memory to swap to.
        prefix_caching: As of `Engine`, as is `deterministic`.
        deterministic: See there.
        swaps: Whether preempted requests are swapped rather than computed again.
        alias_pages: From how many pages on an extent is mapped again rather than copied.
        overread_tokens: What kernels fetch past the end.
        is_late: Whether the device runs behind.
        watermark_pages: As of `Engine`.
    """

    windows: tuple[int | None, ...] = (None,)
    layers_per_group: int = 1
    head_dim: int = 32
    max_num_seqs: int = 2
    max_num_batched_tokens: int = 16
    max_num_mixed_tokens: int | None = None
    max_tokens: int = 96
    budget_pages: int = 40
    host_pages: int = 0
    prefix_caching: bool = True
    deterministic: bool = False
    swaps: bool = True
    alias_pages: int = 0
    overread_tokens: int = 0
    is_late: bool = False
    watermark_pages: int | None = None


@dataclass(eq=False)
class Asked:
    """A request that was accepted, and what may excuse its failure.

    Attributes:
        handle: The engine's.
        peak_pages: What it may hold at most, by the engine's own account.
        available_pages: The least that it could have had if it had been alone.
        num_faults: Faults injected before it came.
        num_mishaps: Steps made to fail before it came.
    """

    handle: RequestHandle
    peak_pages: int
    available_pages: int
    num_faults: int
    num_mishaps: int


def engine_options(shape: Shape, pool: ExtentPool) -> dict[str, Any]:
    """What a shape says to an engine over a pool."""
    watermark = shape.watermark_pages
    return {
        "max_num_seqs": shape.max_num_seqs,
        "max_num_batched_tokens": shape.max_num_batched_tokens,
        "max_num_mixed_tokens": shape.max_num_mixed_tokens,
        "max_tokens": shape.max_tokens,
        "deterministic": shape.deterministic,
        "prefix_caching": shape.prefix_caching,
        "pool": pool,
        "preemption_costs": PreemptionCosts(flops_per_s=1.0 if shape.swaps else 1e30),
        "watermark_bytes": None if watermark is None else watermark * PAGE,
    }


def stamped_engine(
    shape: Shape, pool: ExtentPool, device: Device
) -> tuple[Engine, StampedRows, StampRunner]:
    """An engine over stamped rows, its rows, and its runner."""
    made: dict[str, Any] = {}

    def open_rows(_: object, pool: ExtentPool, options: EngineOptions) -> StampedRows:
        cache = KVCache(
            pool,
            max_tokens=shape.max_tokens,
            max_sequences=2 * options.max_num_seqs + 2,
            layers_per_group=shape.layers_per_group,
            cost_model=cost_model(shape.alias_pages),
        )
        for at, window in enumerate(shape.windows):
            first = at * shape.layers_per_group
            add_layers(cache, first, shape.layers_per_group, shape.head_dim, window)
        cache.keep_resident(shape.overread_tokens)
        cache.current_stream = device.current_stream
        made["rows"] = StampedRows(cache, device, UNDERREAD_TOKENS)
        return made["rows"]

    def make_runner(_: object, rows: StampedRows, __: object) -> StampRunner:
        made["runner"] = StampRunner(rows)
        return made["runner"]

    with (
        mock.patch.object(engine, "open_rows", open_rows),
        mock.patch.object(engine, "make_runner", make_runner),
    ):
        made_engine = Engine(_model(), seed=0, **engine_options(shape, pool))
    return made_engine, made["rows"], made["runner"]


class EnginePlay(PoolPlay):
    """One engine and its surroundings.

    Args:
        shape: What to play.

    Attributes:
        said: Token lists that were prompts, with what was said after them.
        asked: Requests that have not ended.
        guests: Sequences of others in the engine's cache.
    """

    def __init__(self, shape: Shape):
        super().__init__(
            shape.budget_pages,
            shape.host_pages,
            is_late=shape.is_late,
        )
        self.shape = shape
        try:
            self.engine, self.rows, self.runner = self._make_engine()
        except BaseException:
            self.abandon()
            raise
        self.cache = self.engine.cache
        self.device.note_stream(_CHECKS_STREAM)
        self.guests: list[Guest] = []
        self.asked: list[Asked] = []
        self.said: list[list[int]] = []
        self.num_mishaps = 0

    def _make_engine(self) -> tuple[Engine, StampedRows, StampRunner]:
        made = stamped_engine(self.shape, self.pool, self.device)
        made[0]._scheduler.AGING_STEPS = 8
        return made

    @property
    def num_steps(self) -> int:
        """Steps submitted so far."""
        return self.runner.num_steps

    # ---- requests -------------------------------------------------------------------------

    def add(self, prompt: list[int], params: SamplingParams, priority: int = 0) -> None:
        """Ask for something; the engine may find that it can never be."""
        with self._doing(f"add({prompt}, {_words(params)}, {priority})"):
            try:
                handle = self.engine.add(prompt, params, priority)
            except ConfigError:
                return
            total = len(prompt) + (handle.requests[0].params.max_tokens or 0)
            peak = self.engine._view.peak_pages(total)
            num_past_mishaps = self.num_mishaps - (self.runner.mishap is not None)
            self.asked.append(Asked(handle, peak, 1 << 60, self.num_faults, num_past_mishaps))
            self._say(prompt)

    def cancel(self, pick: int) -> None:
        """End one of those that have not ended."""
        if self.asked:
            asked = self.asked[pick % len(self.asked)]
            with self._doing(f"cancel({pick})  # {asked.handle}"):
                asked.handle.cancel()

    def cancel_all(self) -> None:
        """End all of them."""
        with self._doing("cancel_all()"):
            self.engine.cancel_all()
            assert not self.engine._scheduler.requests

    def step(self, num_steps: int = 1) -> None:
        """Run the engine."""
        with self._doing(f"step({num_steps})"):
            for _ in range(num_steps):
                try:
                    self.engine.step()
                except DriverError:
                    # A call outside of a step's own: nothing was begun, so to go on is possible.
                    if not self._end_fault():
                        raise
                self.check()

    def drain(self) -> None:
        """Run until nothing is left to do; that must come, and leave nothing behind."""
        with self._doing("drain()"):
            self._end_fault()
            self.runner.mishap = None
            num_tokens = sum(
                len(request.prompt_token_ids) + (request.params.max_tokens or 0)
                for asked in self.asked
                for request in asked.handle.requests
            )
            for _ in range(100 + _STEPS_PER_TOKEN_MAX * num_tokens):
                if not self.engine.has_unfinished:
                    break
                self.engine.step()
                self.check(is_deep=False)
            else:
                raise AssertionError(f"the engine does not come to an end: {self.engine!r}")
        assert not self.asked
        assert len(self.guests) == self.cache.stats().num_sequences
        assert not self.engine._scheduler.requests

    # ---- memory ---------------------------------------------------------------------------

    def trim(self, num_pages: int | None) -> None:
        """Give memory back that no live sequence needs."""
        with self._doing(f"trim({num_pages})"):
            self.cache.trim(None if num_pages is None else num_pages * PAGE)
            if num_pages is None:
                stats = self.cache.stats()
                assert (0, 0, 0) == (stats.parked_bytes, stats.free_bytes, stats.retired_bytes)

    def make_ready(self, num_tokens: int, num_new_tokens: int) -> None:
        """Have memory lie ready for whoever lives, as an engine does while the device works."""
        with self._doing(f"make_ready({num_tokens}, {num_new_tokens})"):
            live = self.cache.live_sequences()
            before, num_done = self._live_pages(), self.device.num_done
            wanted = [(each, each.num_tokens + num_tokens) for each in live]
            is_ready = make_ready(self.cache, wanted, num_new_tokens)
            assert before == self._live_pages(), "a live sequence gave way"
            if is_ready:
                grow_ahead(self.cache, wanted)
                assert before <= self._live_pages(), "a live sequence gave way"
            assert num_done == self.device.num_done, "it waited for the device"

    # ---- guests in the engine's cache -----------------------------------------------------

    def guest_open(self, prompt: list[int]) -> None:
        """Somebody opens a sequence beside the engine's."""
        stream = self._idle_stream()
        if stream is not None:
            with self._doing(f"guest_open({prompt})", stream):
                try:
                    sequence = self.cache.open(prompt=prompt)
                except CapacityError:
                    return
                guest = Guest(sequence, History(prompt[: sequence.num_tokens]), stream)
                self.guests.append(guest)
                self._guest_write(guest, prompt[sequence.num_tokens :])

    def guest_append(self, pick: int, num_tokens: int) -> None:
        """It grows, and says so."""
        guest = self._guest(pick)
        if guest is not None and guest.sequence.is_resident:
            with self._doing(f"guest_append({pick}, {num_tokens})", guest.stream):
                self._guest_write(guest, [1 + at % (VOCABULARY - 1) for at in range(num_tokens)])

    def guest_truncate(self, pick: int, num_tokens: int) -> None:
        """It goes back, and will write other tokens where some were."""
        guest = self._guest(pick)
        if guest is not None and guest.sequence.is_resident:
            num_tokens = min(num_tokens, len(guest.history))
            with self._doing(f"guest_truncate({pick}, {num_tokens})", guest.stream):
                try:
                    guest.sequence.truncate(num_tokens)
                except ConfigError:
                    return  # A window has passed.
                guest.history = History(guest.history.tokens[:num_tokens])

    def guest_fork(self, pick: int, num_tokens: int) -> None:
        """It is forked, where its memory is there, on another stream than its own."""
        guest, stream = self._guest(pick), self._idle_stream()
        if guest is not None and stream is not None:
            tokens = guest.history.tokens[:num_tokens]
            with self._doing(f"guest_fork({pick}, {num_tokens})", stream):
                try:
                    fork = guest.sequence.fork(len(tokens))
                except (CapacityError, ConfigError):
                    return
                self.guests.append(Guest(fork, History(tokens), stream))

    def guest_swap(self, pick: int, wait: bool) -> None:
        """It goes to host memory, on any stream, or comes back; or it stops on its way."""
        guest = self._guest(pick)
        if guest is not None:
            sequence = guest.sequence
            stream = 0 if sequence.is_resident else guest.stream
            with self._doing(f"guest_swap({pick}, {wait})", stream):
                try:
                    if sequence.is_resident:
                        sequence.swap_out(wait=wait)
                    elif sequence.transfer is not None and wait:
                        sequence.transfer.finish()
                    else:
                        sequence.swap_in()
                except CapacityError:
                    pass

    def guest_spill(self, pick: int, num_pages: int) -> None:
        """Its oldest memory goes to the host, on any stream, or all of it comes back (0)."""
        guest = self._guest(pick)
        if guest is not None and guest.sequence.is_resident:
            with self._doing(f"guest_spill({pick}, {num_pages})"):
                try:
                    if num_pages:
                        guest.sequence.spill(num_pages * PAGE)
                    else:
                        guest.sequence.unspill()
                except CapacityError:
                    pass

    def guest_close(self, pick: int) -> None:
        """It ends."""
        guest = self._guest(pick)
        if guest is not None:
            with self._doing(f"guest_close({pick})"):
                guest.sequence.close()
                self.guests.remove(guest)

    def _idle_stream(self) -> int | None:
        busy = [guest.stream for guest in self.guests]
        return next((each for each in _GUESTS_STREAMS if each not in busy), None)

    def _guest(self, pick: int) -> Guest | None:
        return self.guests[pick % len(self.guests)] if self.guests else None

    def _guest_write(self, guest: Guest, tokens: list[int]) -> None:
        room = self.shape.max_tokens - len(guest.history)
        if self._append(self.rows, guest, tokens[:room]):
            known = self.cache.prefixes.num_recorded(guest.sequence.row)
            guest.sequence.record(guest.history.tokens[known:])
            self._say(guest.history.tokens)

    # ---- trouble --------------------------------------------------------------------------

    def mishap(self, kind: str) -> None:
        """Let the next step fail."""
        self._log(f"mishap({kind!r})")
        self.num_mishaps += self.runner.mishap is None
        self.runner.mishap = _mishap(kind)

    # ---- what must hold -------------------------------------------------------------------

    def check(self, *, is_deep: bool = True) -> None:
        """Everything that must hold between two calls.

        Args:
            is_deep: The invariants of memory, and every row's content, as well.
        """
        super().check()
        self.engine._scheduler.check()
        for asked in [each for each in self.asked if each.handle.is_finished]:
            self.asked.remove(asked)
            self._check_outcome(asked)
        for asked in self.asked:
            for request in asked.handle.requests:
                said = request.output_token_ids
                assert len(said) <= (request.params.max_tokens or 0)
        if is_deep:
            self.cache.check()
            self._check_recorded()
            super().check()

    def _check_outcome(self, asked: Asked) -> None:
        """A request that has ended says what it would have said alone, or why it could not."""
        for request in asked.handle.requests:
            said, params = request.output_token_ids, request.params
            wanted = self._answer(request.prompt_token_ids, params)
            assert wanted[: len(said)] == said, f"{asked.handle} says {said} and not {wanted}"
            self._say([*request.prompt_token_ids, *said])
            reason = request.finish_reason
            if reason in (FinishReason.LENGTH, FinishReason.STOP):
                assert len(said) == len(wanted), f"{asked.handle} says only {said} of {wanted}"
                is_stop = said[-1] in params.stop_token_ids
                assert is_stop == (reason is FinishReason.STOP)
            elif reason is FinishReason.ERROR:
                self._check_error(asked, request.error)
            else:
                assert reason is FinishReason.CANCELLED

    def _answer(self, prompt: Sequence[int], params: SamplingParams) -> list[int]:
        return answer(prompt, params, params.max_tokens or 0)

    def _check_error(self, asked: Asked, error: Exception | None) -> None:
        had_fault = self.num_faults > asked.num_faults or self.backend.failed_call is not None
        had_mishap = self.num_mishaps > asked.num_mishaps
        was_short = asked.available_pages < asked.peak_pages
        if isinstance(error, DriverError):
            assert had_fault, f"{asked.handle} ended by {error!r}, and no fault was injected"
        elif isinstance(error, CapacityError):
            assert had_fault or had_mishap or was_short, (
                f"{asked.handle} ended by {error}, though it needs {asked.peak_pages} pages at "
                f"most and could always have had {asked.available_pages}"
            )
        else:
            assert had_mishap, f"{asked.handle} ended by {error!r}"

    def _check_recorded(self) -> None:
        """Whatever can be found as a prefix is what it says, in live rows and parked ones.

        Of live rows on the stream that works on them, of others behind all streams.
        """
        self.device.join_streams(_CHECKS_STREAM)
        streams = {guest.sequence.row: guest.stream for guest in self.guests}
        for row in range(self.cache.max_sequences):
            tokens = self.cache.prefixes.token_ids(row)
            sequence = self.cache.live.get(row)
            if not tokens or (sequence is not None and sequence.swapped is not None):
                continue
            stream = _CHECKS_STREAM if sequence is None else streams.get(row, 0)
            self._check_prefix(row, tokens, sequence, stream)
        for guest in self.guests:
            if guest.sequence.is_resident:
                self._check_guest(guest)

    def _check_guest(self, guest: Guest) -> None:
        """In the order of its stream's work, so that what is under way counts as done."""
        row, history = guest.sequence.row, History(guest.history.tokens)
        firsts = self.rows.firsts_mapped(row, len(history))
        with noted():
            work = partial(self.rows.compare, "a guest", row, history, firsts)
            self.device.submit(work, guest.stream)

    def _check_prefix(
        self, row: int, tokens: list[int], sequence: Sequence_ | None, stream: int
    ) -> None:
        """Likewise, but of a row that nobody uses, or that the `sequence` may soon not use.

        What gives way once that has ended need not wait for this.
        """
        tables = [group.table.rows[row] for group in self.cache.groups]
        before = [tuple(pages.mappings) for pages in tables]
        firsts = self.rows.firsts_mapped(row, len(tokens))

        def compare() -> None:
            if sequence is not None and not sequence.is_closed:
                self.rows.compare("a prefix", row, History(tokens), firsts)
                return
            now = [set(map(id, pages.mappings)) for pages in tables]
            ends, starts = [len(tokens)], [0]
            for group, held, left in zip(self.cache.groups, before, now, strict=True):
                kept = [mapping for mapping in held if id(mapping) in left]
                if held and not kept:
                    return
                if held and kept[-1] is not held[-1]:
                    ends.append(group.token_at(kept[-1].end_page))
                if held and kept[0] is not held[0]:
                    starts.append(group.first_token_at(kept[0].first_page))
            history = History(tokens[: min(ends)])
            self.rows.compare("a prefix", row, history, [max(first, *starts) for first in firsts])

        with noted():
            self.device.submit(compare, stream)

    def _note_available(self) -> None:
        """What a request could have if it were alone, now."""
        foreign = sum(
            mapping.extent.num_pages
            for rows, guests in ((self._other, self._other_sequences), (self.rows, self.guests))
            if rows is not None
            for guest in guests
            for group in rows.cache.groups
            for mapping in group.table.rows[guest.sequence.row].mappings
        )
        available = self.pool.stats().budget_bytes // PAGE - foreign
        for asked in self.asked:
            asked.available_pages = min(asked.available_pages, available)

    def _caches(self) -> Iterator[KVCache]:
        yield from super()._caches()
        if hasattr(self, "cache"):
            yield self.cache

    # ---- end ------------------------------------------------------------------------------

    def close(self) -> None:
        """End everything; nothing may be left."""
        self._end_fault()
        for guest in self.guests:
            guest.sequence.close()
        self.guests.clear()
        self.drain()
        self.trim(None)
        self.engine.close()
        super().close()

    def _say(self, tokens: list[int]) -> None:
        self.said.append(list(tokens))
        del self.said[:-_SAID_MAX]


# ---- what an engine is made of ----------------------------------------------------------------


def _model() -> Any:
    """What an engine asks of a model besides running it."""
    embedding = torch.nn.Embedding(VOCABULARY, 1)
    return SimpleNamespace(
        training=False,
        config=SimpleNamespace(is_encoder_decoder=False, eos_token_id=0),
        generation_config=SimpleNamespace(eos_token_id=0),
        get_input_embeddings=lambda: embedding,
        get_output_embeddings=lambda: embedding,
    )


def _mishap(kind: str) -> Mishap:
    if kind == "out of memory":
        return Mishap(torch.OutOfMemoryError("CUDA out of memory"))
    if kind == "out of memory, half-way":
        return Mishap(torch.OutOfMemoryError("CUDA out of memory"), has_written=True)
    if kind == "half-way":
        return Mishap(ValueError("the model broke"), has_written=True)
    if kind == "on the device":
        return Mishap(ValueError("the device broke"), is_late=True)
    assert kind == "at once"
    return Mishap(ValueError("the model broke"))


MISHAPS = ("out of memory", "out of memory, half-way", "half-way", "on the device", "at once")


def wait_for_host(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A logits processor: a request that has one is not run ahead of."""
    return scores


def _words(params: SamplingParams) -> str:
    named = ("n", "max_tokens", "temperature", "seed", "ignore_eos", "min_tokens")
    words = [f"{name}={getattr(params, name)}" for name in named]
    return ", ".join(words + ["waits"] * bool(params.logits_processors))
