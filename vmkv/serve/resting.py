"""Engines without requests: they give memory back, sleep, and leave the model to training.

See DESIGN.md, Note [Weights sleep in host memory], and Note [Training has the model in turns].
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from ..core.cache import KVCache
from ..core.interrupts import uninterrupted
from ..errors import CapacityError, ConfigError, DriverError
from ..units import GiB, format_bytes
from .guided import Grammars
from .memory_view import MemoryView
from .scheduler import Scheduler
from .step_loop import StepLoop
from .training_turns import TrainingTurns, forget_prefixes
from .weights import Weights

if TYPE_CHECKING:
    from .parallel.lockstep import Lockstep

_LOG = logging.getLogger(__name__)
#: Memory returned to the device between polls for new work: some 10 ms.
_SLICE_BYTES = 1 * GiB


class RestingEngine:
    """The base class of `Engine` for the time without requests; `Engine` sets the attributes."""

    cache: KVCache
    loop: StepLoop
    grammars: Grammars
    advance: Callable[[], bool]
    _check_open: Callable[[], None]
    _note_idle: Callable[[], None]
    _lockstep: Lockstep | None
    _scheduler: Scheduler
    _turns: TrainingTurns
    _view: MemoryView
    _weights: Weights | None
    _is_closed: bool
    _is_inside = False  # Within `paused`.
    _is_stale = False  # Free memory may have changed since the budget was set.

    # ---- idle memory ----------------------------------------------------------------------

    def _shrink(self, most_bytes: int, is_wanted: Callable[[], bool]) -> bool:
        try:
            self._reclaim(0)  # The excess is measured once: later changes are other users'.
            excess_bytes = self.cache.pool.stats().created_bytes - most_bytes
            while excess_bytes > 0:
                if is_wanted():
                    return False
                released_bytes = self._reclaim(min(excess_bytes, _SLICE_BYTES))
                # Zero if the rest is live: a runner's padding row, or memory of other users.
                excess_bytes = excess_bytes - released_bytes if released_bytes else 0
        except (CapacityError, DriverError) as error:
            _LOG.warning("memory above the watermark could not be given back: %s", error)
        return True

    def _reclaim(self, num_bytes: int) -> int:
        """Return memory to the device; waits for fences, so that retired memory goes first."""
        if self._lockstep is not None:
            self._lockstep.repeat_now("_reclaim", num_bytes)
        self.cache.pool.reclaimer.wait()
        return self._view.reclaim(num_bytes)

    # ---- training -------------------------------------------------------------------------

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which the model can be trained; afterwards the engine serves it again.

        Inside, attention, the layers' `forward` and classes, and gradient checkpointing are as if
        the model had never been served; parameters are the same objects, whose gradients and
        `requires_grad` the engine never touches. At the end all modules go to eval mode; the next
        `paused()` puts modules that were in training mode back into it. Other engines of the model
        have to be paused, too.

        At the end cached prefixes are forgotten if the address of a parameter or buffer, or any of
        some 4,096 of its values, has changed; after a change that these may miss, of a few rows of
        an embedding, say, call `weights_changed`. Where addresses, modules, hooks, settings or
        adapters have changed, layers are joined, compiled and captured again. The vocabulary and
        the end-of-sequence tokens are read again.

        Raises:
            ConfigError: Requests are unfinished (finish or cancel them first), or the engine is
                paused already. At the end: the model can no longer be served. The engine then stays
                paused; undo the change, and enter and leave `paused()` again.
            ClosedError: The engine is closed.
            DriverError: The device has failed.

        Cost: a look at each module and parameter, and two waits for the device. If addresses or
            modules have changed, also that of making and warming up another runner.
        """
        if self._is_inside:
            raise ConfigError("the engine is paused already; leave that paused() first")
        try:
            try:
                self._pause()  # Holds a KeyboardInterrupt back until its end.
                yield
            finally:
                self._leave()
        finally:
            self._leave()  # Again, in case a KeyboardInterrupt came before the first.

    @uninterrupted
    def weights_changed(self) -> None:
        """Forget cached prefixes, whose memory is kept; call it once weights have changed.

        Not needed where they change within `paused()`, which compares them. Layers that were joined
        or captured at other addresses are made again.

        Raises:
            ConfigError: Requests are unfinished, or the model can no longer be served.
            ClosedError: The engine is closed.
        """
        self._check_one_device("weights_changed()")
        self._check_at_rest("weights_changed()")
        self.wake()
        forget_prefixes(self.cache)
        if not self._turns.is_paused:
            self._turns.pause(compares_values=False)
            self._resume()

    # ---- sleep ----------------------------------------------------------------------------

    @property
    def is_sleeping(self) -> bool:
        """Whether weights or cached prefixes are in host memory, until `wake`."""
        weights = self._weights
        return (weights is not None and weights.are_away) or self.cache.away is not None

    @uninterrupted
    def sleep(self, *, weights: bool = False, graphs: bool = False, prefixes: bool = False) -> None:
        """Give device memory back to the driver; without `weights` also within `paused()`.

        Cached prefixes are dropped, or with `prefixes` move to host memory, as many as the pool's
        host budget holds. With `weights` the model's weights move to host memory, and return to the
        same addresses: the next request, or `wake`, brings both back. Without either nothing has to
        be woken, and the next request takes what is free then. The budget of the engine's own pool
        then follows free memory, torch's idle memory included, up to its former value; a shared
        pool keeps its budget. Captured steps stay unless `graphs`, and so does a row of padding
        where layers keep states. With `graphs` a step is captured again when next needed, and
        within `paused()` copies of adapters go as well, which moves the weights beside them, unless
        `enable_sleep_mode` holds these in place. Does nothing while the engine sleeps.

        While the weights are away the model cannot be used: its call raises `ConfigError`, and a
        tensor of its weights must not be touched.

        Raises:
            ConfigError: Requests are unfinished; or `weights`, without the option
                `enable_sleep_mode`, or while training has the model.
            ClosedError: The engine is closed.
            OutOfPagesError: The host has no memory for the weights. The engine is awake.
            DriverError: The driver refused. The engine is awake, and another call gives the rest
                back.

        Cost: some 3 ms per GiB, and for what moves 20 ms more, for the first time 200; the next
            requests map the memory again.
        """
        if weights and (self._weights is None or self._turns.is_paused):
            raise ConfigError(
                "sleep(weights=True) needs an engine made with enable_sleep_mode=True, and not "
                "within paused(), since training has the weights; or leave weights out"
            )
        self._check_at_rest("sleep()")
        if self.is_sleeping:
            return
        start_s, self._is_stale = time.perf_counter(), True
        copies = graphs and self._turns.is_paused and self._weights is None
        self._turns.runner.sleep(graphs=graphs, copies=copies)
        try:
            self._view.sleep(keeps_prefixes=prefixes)
            if weights and self._weights is not None:
                self._weights.leave()
        except BaseException:
            self._view.wake()
            raise
        if self._turns.is_paused and self.cache.device.type == "cuda":
            torch._C._cuda_clearCublasWorkspaces()  # Each keeps a segment of torch's memory.
        torch.cuda.empty_cache()
        if away := self._away():
            _LOG.info("the engine sleeps: %s, %.2f s", away, time.perf_counter() - start_s)
            self._note_idle()

    @uninterrupted
    def wake(self) -> None:
        """Bring weights and cached prefixes back after `sleep`; does nothing if awake.

        Prefixes are dropped if memory is short. Does not wait for the copies.

        Raises:
            ClosedError: The engine is closed.
            CapacityError: The device has no memory for the weights now. The engine still sleeps.
            DriverError: The driver refused; likewise. If another call fails, too, the weights
                cannot come back: close the engine and load the model.

        Cost: 35 µs for 64 MiB, while the bus carries them (some 20 ms per GiB).
        """
        self._check_open()
        if not self.is_sleeping:
            return
        start_s, away = time.perf_counter(), self._away()
        if self._weights is not None:
            self._weights.come_back()
        self._view.wake()
        _LOG.info("the engine wakes: %s, %.2f s", away, time.perf_counter() - start_s)
        self._note_idle()

    def _away(self) -> str:
        weights, moved = self._weights, self.cache.away
        parts = [(weights.num_bytes, "weights")] if weights and weights.are_away else []
        parts += [(moved.copy.num_bytes, "cached prefixes")] if moved else []
        return " and ".join(f"{format_bytes(size)} of {what}" for size, what in parts)

    # ---- at rest --------------------------------------------------------------------------

    @uninterrupted
    def _pause(self) -> None:
        self._check_one_device("paused()")
        self._check_at_rest("paused()")
        self.wake()
        self._turns.pause(compares_values=bool(self.cache.prefixes.recorded))
        self._is_inside = True

    @uninterrupted
    def _leave(self) -> None:
        was_inside, self._is_inside = self._is_inside, False
        if was_inside and not self._is_closed:
            self._resume()

    def _resume(self) -> None:
        if self._turns.resume():
            forget_prefixes(self.cache)
        self._is_stale, self.loop.runner = True, self._turns.runner
        self.grammars.renew(self._turns.vocabulary.num_logits, self._turns.vocabulary.ends)

    def _check_one_device(self, call: str) -> None:
        if self._lockstep is not None:
            raise ConfigError(f"engine.{call} is for models on one device; this one is on several")

    def _check_at_rest(self, call: str) -> None:
        """Refuse if requests are left; read the steps that ended requests still have submitted."""
        self._check_open()
        if self._scheduler.requests:
            raise ConfigError(
                f"{len(self._scheduler.requests)} requests are unfinished; finish or cancel them "
                f"before engine.{call}"
            )
        while self.loop.has_work:
            self.advance()

    def _release(self) -> None:
        """Give the model its weights in torch's memory, before joined ones are parted."""
        if self._weights is not None:
            self._view.reclaim()
            self._weights.close()
