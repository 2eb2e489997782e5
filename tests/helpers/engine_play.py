"""Operations on an engine over stamped rows, with checks, for a state machine and a fuzzer.

The callers choose operations; this module carries them out and checks the result. Everything but
the model is real: `Engine`, its loop, scheduler, cache and pool.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from helpers.device import Device
from helpers.file_play import Files
from helpers.pool_play import PAGE, UNDERREAD_TOKENS, Guest, PoolPlay, add_layers, cost_model, noted
from helpers.scheduler_books import check_scheduler
from helpers.stamp_runner import VOCABULARY, Mishap, StampRunner, answer
from helpers.stamped_rows import STATES, History, StampedRows
from vmkv import ExtentPool, KVCache, SamplingParams
from vmkv import Sequence as Sequence_
from vmkv.core.memory.arbiter import PATIENCE_STEPS
from vmkv.errors import CapacityError, ConfigError, DriverError
from vmkv.serve import engine
from vmkv.serve.engine import Engine
from vmkv.serve.options import EngineOptions
from vmkv.serve.request import FinishReason, RequestHandle
from vmkv.serve.scheduler import PreemptionCosts

#: Bound of steps per token, including recomputation after a few preemptions.
_STEPS_PER_TOKEN_MAX = 10
_SAID_MAX = 60
#: Streams of guests and of content checks, which differ from the engine's.
_GUESTS_STREAMS = ((1 << 20) + 1, (1 << 20) + 2)
_CHECKS_STREAM = (1 << 20) + 3


@dataclass(frozen=True)
class Shape:
    """An engine, its layers and its memory.

    Attributes:
        windows: Window of each layer group; None for full attention.
        layers_per_group: Layers that share a token row.
        head_dim: 32 makes a token of one layer 512 bytes, an eighth of a page.
        max_num_seqs: As of `Engine`.
        max_num_batched_tokens: As of `Engine`.
        max_num_mixed_tokens: As of `Engine`.
        max_tokens: As of `Engine`.
        budget_pages: Budget of device memory.
        host_pages: Budget of host memory for swapping.
        prefix_caching: As of `Engine`.
        deterministic: As of `Engine`.
        swaps: Whether preempted requests are swapped instead of computed again.
        alias_pages: Smallest extent that is aliased instead of copied.
        overread_tokens: Over-read of the kernels.
        is_late: As of `Device`.
        watermark_pages: As of `Engine`.
        has_states: Whether layers keep states.
        evicts: As of `PoolPlay`.
        disk_pages: Budget of files, for blocks that leave host memory.
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
    has_states: bool = False
    evicts: bool = False
    disk_pages: int = 0


@dataclass(eq=False)
class Asked:
    """An accepted request, and facts that may excuse its failure.

    Attributes:
        handle: The engine's handle.
        peak_pages: Most pages that it may hold, by the engine's own account.
        available_pages: Fewest pages that were available to it without other requests.
        num_faults: Number of injected faults before it was added.
        num_mishaps: Number of failed steps before it was added.
    """

    handle: RequestHandle
    peak_pages: int
    available_pages: int
    num_faults: int
    num_mishaps: int


def engine_options(shape: Shape, pool: ExtentPool) -> dict[str, Any]:
    """Options of an engine of this shape over a pool."""
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
    """Make an engine over stamped rows; return it with its rows and its runner."""
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
        if shape.has_states:
            cache.add_states(STATES)
        cache.keep_resident(shape.overread_tokens)
        cache.current_stream = device.current_stream
        made["rows"] = StampedRows(cache, device, UNDERREAD_TOKENS)
        return made["rows"]

    def make_runner(_: object, rows: StampedRows, *__: object) -> StampRunner:
        made["runner"] = StampRunner(rows)
        return made["runner"]

    with (
        mock.patch.object(engine, "open_rows", open_rows),
        mock.patch.object(engine, "make_runner", make_runner),
    ):
        made_engine = Engine(_model(), seed=0, **engine_options(shape, pool))
    return made_engine, made["rows"], made["runner"]


class EnginePlay(PoolPlay):
    """One engine, guests in its cache, and another cache on its pool.

    Args:
        shape: Options of the engine and of its memory.

    Attributes:
        said: Token lists of prompts with their outputs.
        asked: Requests that have not ended.
        guests: Sequences in the engine's cache that are not the engine's.
    """

    def __init__(self, shape: Shape):
        super().__init__(
            shape.budget_pages,
            shape.host_pages,
            is_late=shape.is_late,
            evicts=shape.evicts,
        )
        self.shape = shape
        self.files: Files | None = None
        try:
            self.engine, self.rows, self.runner = self._make_engine()
            if shape.disk_pages:
                self.files = Files(self.engine.cache, shape.disk_pages * PAGE, shape.disk_pages)
        except BaseException:
            self.abandon()
            raise
        self.cache = self.engine.cache
        self._num_kept = self.cache.stats().num_sequences  # For the padding of graphs.
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
        """Number of submitted steps."""
        return self.runner.num_steps

    # ---- requests -------------------------------------------------------------------------

    def add(
        self,
        prompt: list[int],
        params: SamplingParams,
        priority: int = 0,
        tenant: str | None = None,
    ) -> None:
        """Add a request; the engine may refuse it as impossible."""
        with self._doing(f"add({prompt}, {_words(params)}, {priority}, {tenant!r})"):
            try:
                handle = self.engine.add(prompt, params, priority, tenant=tenant)
            except ConfigError:
                return
            total = len(prompt) + (handle.requests[0].params.max_tokens or 0)
            peak = self.engine._view.peak_pages(total)
            num_past_mishaps = self.num_mishaps - (self.runner.mishap is not None)
            self.asked.append(Asked(handle, peak, 1 << 60, self.num_faults, num_past_mishaps))
            self._say(prompt)

    def cancel(self, pick: int) -> None:
        """Cancel one unfinished request."""
        if self.asked:
            asked = self.asked[pick % len(self.asked)]
            with self._doing(f"cancel({pick})  # {asked.handle}"):
                asked.handle.cancel()

    def cancel_all(self) -> None:
        """Cancel all requests."""
        with self._doing("cancel_all()"):
            self.engine.cancel_all()
            assert not self.engine._scheduler.requests

    def step(self, num_steps: int = 1) -> None:
        """Run steps of the engine."""
        with self._doing(f"step({num_steps})"):
            for _ in range(num_steps):
                try:
                    self.engine.step()
                except DriverError:
                    # The fault hit a call outside of a step, so the engine can continue.
                    if not self._end_fault():
                        raise
                if self.files is not None:
                    self.files.run()
                self.check()

    def drain(self) -> None:
        """Run until no work is left; this must end and leave no state of requests."""
        with self._doing("drain()"):
            self._end_fault()
            self.runner.mishap = None
            num_tokens = sum(
                len(request.prompt_token_ids) + (request.params.max_tokens or 0)
                for asked in self.asked
                for request in asked.handle.requests
            )
            # A request for which memory never comes free is given up after that many steps.
            num_requests = sum(len(asked.handle.requests) for asked in self.asked)
            patience = (PATIENCE_STEPS + 2) * num_requests
            for _ in range(100 + patience + _STEPS_PER_TOKEN_MAX * num_tokens):
                if not self.engine.has_unfinished:
                    break
                self.engine.step()
                if self.files is not None:
                    self.files.run()
                self.check(is_deep=False)
            else:
                raise AssertionError(f"the engine does not come to an end: {self.engine!r}")
            self.engine._view.close_ended()  # A fault may have kept some open.
        assert not self.asked
        assert len(self.guests) + self._num_kept == self.cache.stats().num_sequences
        assert not self.engine._scheduler.requests

    # ---- memory ---------------------------------------------------------------------------

    def trim(self, num_pages: int | None) -> None:
        """Trim the cache."""
        with self._doing(f"trim({num_pages})"):
            self.cache.trim(None if num_pages is None else num_pages * PAGE)
            if num_pages is None:
                stats = self.cache.stats()
                assert (0, 0, 0) == (stats.parked_bytes, stats.free_bytes, stats.retired_bytes)

    # ---- files ----------------------------------------------------------------------------

    def run_files(self, num_times: int) -> None:
        """Run the threads of the files for a while."""
        if self.files is not None:
            with self._doing(f"run_files({num_times})"):
                self.files.run(num_times)

    def sink(self) -> None:
        """Leave prefixes in files alone; requests have ended."""
        self.drain()
        self.trim(None)
        if self.files is not None and not self.guests:
            with self._doing("sink()"):
                self.files.run(20)
                self.cache.forget_prefixes(with_files=False)

    def spoil_files(self, draw: random.Random) -> None:
        """Damage a file, or let the disk be full, or keep what a killed process leaves."""
        if self.files is not None:
            with self._doing("spoil_files()"):
                how = draw.random()
                if how < 0.05:
                    self.files.fill_disk()
                elif how < 0.3:
                    self.files.snapshot()
                else:
                    self._log(self.files.spoil(draw))

    def restart_files(self) -> None:
        """Open the files again, as another process does; requests have ended."""
        if self.files is not None:
            self.drain()
            with self._doing("restart_files()"):
                self.files.restart()

    def forget(self) -> None:
        """Forget all prefixes, as if the weights had changed; requests have ended."""
        self.drain()
        if not self.guests:
            with self._doing("forget()"):
                self.cache.forget_prefixes()

    # ---- guests: other sequences in the engine's cache ------------------------------------

    def guest_open(self, prompt: list[int]) -> None:
        """Open a sequence in the engine's cache."""
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
        """Grow a guest and record its tokens."""
        guest = self._guest(pick)
        if guest is not None and guest.sequence.is_resident:
            with self._doing(f"guest_append({pick}, {num_tokens})", guest.stream):
                self._guest_write(guest, [1 + at % (VOCABULARY - 1) for at in range(num_tokens)])

    def guest_truncate(self, pick: int, num_tokens: int) -> None:
        """Truncate a guest."""
        guest = self._guest(pick)
        if guest is not None and guest.sequence.is_resident:
            num_tokens = min(num_tokens, len(guest.history))
            with self._doing(f"guest_truncate({pick}, {num_tokens})", guest.stream):
                try:
                    guest.sequence.truncate(num_tokens)
                except ConfigError:
                    return  # The window has passed this length, or no state is kept after it.
                guest.history = History(guest.history.tokens[:num_tokens])

    def guest_fork(self, pick: int, num_tokens: int) -> None:
        """Fork a guest onto an idle stream."""
        guest, stream = self._guest(pick), self._idle_stream()
        if guest is not None and stream is not None:
            tokens = guest.history.tokens[:num_tokens]
            with self._doing(f"guest_fork({pick}, {num_tokens})", stream):
                try:
                    fork = guest.sequence.fork(len(tokens))
                except (CapacityError, ConfigError):
                    return
                self.guests.append(Guest(fork, History(tokens), stream))

    def guest_checkpoint(self, pick: int) -> None:
        """Keep the states of a guest."""
        guest = self._guest(pick)
        if guest is not None and guest.sequence.is_resident:
            with self._doing(f"guest_checkpoint({pick})", guest.stream):
                try:
                    guest.sequence.checkpoint()
                except CapacityError:
                    pass

    def guest_swap(self, pick: int) -> None:
        """Swap a guest out, on stream 0, or in."""
        guest = self._guest(pick)
        if guest is not None:
            sequence = guest.sequence
            stream = 0 if sequence.is_resident else guest.stream
            with self._doing(f"guest_swap({pick})", stream):
                try:
                    if sequence.is_resident:
                        sequence.swap_out()
                    else:
                        sequence.swap_in()
                except CapacityError:
                    pass

    def guest_close(self, pick: int) -> None:
        """Close a guest."""
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

    # ---- failures -------------------------------------------------------------------------

    def mishap(self, kind: str) -> None:
        """Make the next step fail."""
        self._log(f"mishap({kind!r})")
        self.num_mishaps += self.runner.mishap is None
        self.runner.mishap = _mishap(kind)

    # ---- checks ---------------------------------------------------------------------------

    def check(self, *, is_deep: bool = True) -> None:
        """Check everything that must hold between two calls.

        Args:
            is_deep: Check the invariants of memory and the content of every row too.
        """
        super().check()
        check_scheduler(self.engine._scheduler)
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
        """A finished request has its output without other requests, or a justified error."""
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
        """Check the content of every recorded prefix, in live rows and parked ones.

        Live rows are read on their own stream, others behind all streams.
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
        """Check the content of a guest in the order of its stream, after pending work."""
        row, history = guest.sequence.row, History(guest.history.tokens)
        firsts = self.rows.firsts_mapped(row, len(history))
        with noted():
            work = partial(self.rows.compare, "a guest", row, history, firsts)
            self.device.submit(work, guest.stream)

    def _check_prefix(
        self, row: int, tokens: list[int], sequence: Sequence_ | None, stream: int
    ) -> None:
        """Check the recorded content of a row that is parked or that `sequence` uses.

        Evicted parts are left out, and what is used again: neither need wait for this check.
        """
        parked_at = self.cache.rows.parked.get(row)
        if self.cache.states is not None:
            self._check_states_at_rest(row, tokens, stream)
        groups = [group for group in self.cache.groups if not group.is_fixed]
        tables = [group.table.rows[row] for group in groups]
        before = [tuple(pages.mappings) for pages in tables]
        firsts = self.rows.firsts_mapped(row, len(tokens))

        def compare() -> None:
            if sequence is not None and not sequence.is_closed:
                self.rows.compare("a prefix", row, History(tokens), firsts)
                return
            if sequence is None and self.cache.rows.parked.get(row) != parked_at:
                return
            now = [set(map(id, pages.mappings)) for pages in tables]
            recorded = self.cache.prefixes.token_ids(row)
            both = zip(tokens, recorded, strict=False)
            ends, starts = [sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))], [0]
            for group, held, left in zip(groups, before, now, strict=True):
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

    def _check_states_at_rest(self, row: int, tokens: list[int], stream: int) -> None:
        """Check those of recorded tokens, unless they are evicted before the check runs."""
        states, history = self.cache.states, History(tokens)

        def compare(num_tokens: int, at: int, before: object) -> None:
            is_there = states.at_rest(row).get(num_tokens) == at
            # Another sequence of this length may have ended there.
            known = self.cache.prefixes.token_ids(row)
            is_there &= known[:num_tokens] == tokens[:num_tokens]
            if is_there and states.table.rows[at].mappings[0] is before:
                self.rows.compare_state("a prefix", at, history, num_tokens)

        with noted():
            for num_tokens, at in states.at_rest(row).items():
                if 0 < num_tokens <= len(tokens):
                    mapping = states.table.rows[at].mappings[0]
                    self.device.submit(partial(compare, num_tokens, at, mapping), stream)

    def _note_available(self) -> None:
        """Update the pages that were available to each request without other requests."""
        foreign = sum(
            mapping.extent.num_pages
            for rows, guests in ((self._other, self._other_sequences), (self.rows, self.guests))
            if rows is not None
            for guest in guests
            for group in rows.cache.groups
            for mapping in group.table.rows[guest.sequence.row].mappings
        )
        view = self.engine._view
        padding = view._num_padding * view.peak_pages(1)  # No request can have it.
        available = self.pool.stats().budget_bytes // PAGE - foreign - padding
        for asked in self.asked:
            asked.available_pages = min(asked.available_pages, available)

    def _caches(self) -> Iterator[KVCache]:
        yield from super()._caches()
        if hasattr(self, "cache"):
            yield self.cache

    # ---- close ----------------------------------------------------------------------------

    def close(self) -> None:
        """Close everything and check that no memory is left."""
        self._end_fault()
        for guest in self.guests:
            guest.sequence.close()
        self.guests.clear()
        self.drain()
        self.trim(None)
        self.engine.close()
        if self.files is not None:
            self.files.close()
        super().close()

    def abandon(self) -> None:
        """Free as much as possible after a failure. Idempotent."""
        if self.files is not None:
            self.files.abandon()
        super().abandon()

    def _say(self, tokens: list[int]) -> None:
        self.said.append(list(tokens))
        del self.said[:-_SAID_MAX]


# ---- parts of an engine -----------------------------------------------------------------------


def _model() -> Any:
    """A stand-in with the attributes of a model that an engine reads."""
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
    if kind == "before sampling":
        return Mishap(ValueError("the sampler broke"), is_between=True)
    assert kind == "at once"
    return Mishap(ValueError("the model broke"))


MISHAPS = (
    *("out of memory", "out of memory, half-way", "half-way"),
    *("on the device", "before sampling", "at once"),
)


def wait_for_host(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A logits processor: steps of a request with one are sampled after the last one was read."""
    return scores


def _words(params: SamplingParams) -> str:
    named = ("n", "max_tokens", "temperature", "seed", "ignore_eos", "min_tokens")
    words = [f"{name}={getattr(params, name)}" for name in named]
    return ", ".join(words + ["waits"] * bool(params.logits_processors))
