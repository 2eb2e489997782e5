"""An engine whose model is divided among several devices, with a process for each.

    with open_parallel_engine("meta-llama/Llama-3.1-8B", 2) as engine:
        engine.generate(...)

starts, watches and ends the other ranks. With ranks that torchrun has started:

    ranks = TensorParallel.from_environment()
    with ParallelEngine(load(path, ranks), tensor_parallel=ranks) as engine:
        if ranks.rank:
            engine.follow()
        else:
            engine.generate(...)
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ...errors import CapacityError, ConfigError, RankError
from ..engine import Engine
from ..engine_loop import FAILED_STEPS_MAX
from ..observer import EngineObserver
from ..options import EngineOptions
from ..scheduler import PreemptionCosts
from ..served_rows import pool_beside
from . import Ranks, TensorParallel, localise
from .localise import head_of, load
from .lockstep import Lockstep
from .membership import Memberships

_LOG = logging.getLogger(__name__)
#: Time for the other ranks to free their resources, once rank 0 has closed its engine.
_END_S = 30.0


class ParallelEngine(Engine):
    """An `Engine` on each rank: rank 0's takes requests, and the others `follow` it.

    Each rank makes one with the same arguments, which are those of `Engine` except `pool` and
    `kv_scales`; tokenizers too, to search for stop texts. `model` is whole, and this rank's part is
    kept, or was divided by `load` or transformers. All ranks use the smallest budgets of any.

    Every call raises `RankError` once a rank has ended. `ConfigError` is raised as by `Engine`, and
    if the model cannot be divided.
    """

    _lockstep: Lockstep

    def __init__(
        self,
        model: Any,
        *,
        tensor_parallel: TensorParallel,
        tokenizer: Any = None,
        observer: EngineObserver | None = None,
        **options: Any,
    ):
        self._is_closed = True
        given = checked_options(options)
        self._ranks = ranks = tensor_parallel
        lockstep = self._lockstep = Lockstep(ranks)
        localise(model, ranks)
        lockstep.head = head_of(model)
        self._memberships = Memberships(ranks)
        self._obey = self._memberships.obey
        pool = pool_beside(model, None, given, lockstep.backend, self._memberships.join)
        lockstep.level(pool)
        # Choices that a rank would make for itself are rank 0's.
        seed = ranks.share(random.getrandbits(64) if given.seed is None else given.seed)
        costs = ranks.share(given.preemption_costs or PreemptionCosts.of(model))
        its = replace(given, seed=seed, preemption_costs=costs)
        # The pool has them.
        its = replace(its, budget_bytes=None, host_budget_bytes=0, pool_socket=None)
        super().__init__(
            model, tokenizer=tokenizer, observer=observer, pool=pool, lockstep=lockstep, **vars(its)
        )
        try:
            self.grammars.ends_slow = False
            lockstep.begin(
                pool, self.max_tokens, self.cache.overread_tokens, self._turns.vocabulary.num_logits
            )
        except BaseException:
            super().close()
            raise

    @property
    def num_failed_steps(self) -> int:
        """Failed steps since the last successful one; the maximum once a rank is lost."""
        return super().num_failed_steps if self._ranks.failure is None else FAILED_STEPS_MAX

    def when_lost(self, call: Callable[[], None]) -> None:
        """Have `call` called, from any thread, when a rank is lost, or a broker gives an order."""
        self._ranks.on_loss = self._memberships.on_order = call
        if self._ranks.failure is not None or self._memberships.orders:
            call()

    # ---- rank 0 ---------------------------------------------------------------------------

    def set_budget(self, budget_bytes: int) -> None:
        """Set each rank's memory for keys and values; may evict prefixes and preempt requests.

        Raises `ConfigError`, and changes nothing, if running requests use more.
        """
        self._check_open()
        self._lockstep.repeat_now("set_budget", budget_bytes)
        self.cache.pool.set_budget(budget_bytes)

    def advance(self) -> bool:
        """Run one step on all ranks; if a rank ends, all requests end with its `RankError`."""
        try:
            self._check_open()
            while self._memberships.orders:
                order = self._memberships.orders.popleft()
                self._lockstep.repeat_now("_obey", *order)
                self._obey(*order)
            if not self.loop.has_work:
                return False
            self._lockstep.flush(is_step=True)
            more = self._run_step()
            self._ranks.check()
        except RankError as error:
            self.cancel_all(error)
            raise
        except BaseException as error:
            if not isinstance(error, Exception):
                # An interrupt: the other ranks may wait for this one in the middle of the step.
                self.cancel_all(self._ranks.fail("a step was interrupted"))
            raise
        return more

    def _run_step(self) -> bool:
        self._memberships.come_down()
        more = self.loop.step()
        self._lockstep.num_requests = len(self._scheduler.requests)
        return more

    def sleep(self, **what: bool) -> None:
        """Sleep on all ranks or none, as `Engine.sleep`, but with their graphs."""
        if what.get("graphs"):
            raise ConfigError("sleep(graphs=True) is for models on one device; leave graphs out")
        self._check_at_rest("sleep()")
        self._lockstep.repeat_now("sleep", **what)
        self._lockstep.or_end(partial(super().sleep, **what), CapacityError)
        self._memberships.report()

    def wake(self) -> None:
        """Wake all ranks or none, as `Engine.wake`."""
        if self.is_sleeping:
            self._lockstep.repeat_now("wake")
            self._lockstep.or_end(super().wake, CapacityError)

    def close(self) -> None:
        """Close this engine; rank 0 also closes those of the other ranks. Idempotent."""
        if self._is_closed:
            return
        try:
            self.cancel_all()
            self._lockstep.repeat_now("close")
        except RankError as error:
            _LOG.error("%s", error)
        if self._ranks.failure is not None:
            self.cancel_all(self._ranks.failure)
        super().close()

    # ---- other ranks ----------------------------------------------------------------------

    def follow(self) -> None:
        """Repeat rank 0's calls and steps until its engine closes; then close this one."""
        if not self._ranks.rank:
            raise ConfigError("this is rank 0, which takes requests; other ranks call follow()")
        self._lockstep.is_following = True
        threading.Thread(target=self.grammars.prepare, daemon=True).start()
        try:
            while not self._is_closed:
                commands, is_step = self._lockstep.receive()
                for name, arguments, options in commands:
                    try:
                        getattr(self, name)(*arguments, **options)
                    except (ConfigError, CapacityError) as error:  # Rank 0 has raised it, too.
                        _LOG.debug("%s is refused: %s", name, error)
                if is_step:
                    self._run_step()
        finally:
            self.close()


def checked_options(options: Mapping[str, Any]) -> EngineOptions:
    """Return the options; `ConfigError` for one that a `ParallelEngine` does not support."""
    if "pool" in options:
        raise ConfigError("ranks cannot share a pool with others; leave pool out")
    given = EngineOptions(**options)
    if given.kv_scales is not None:
        raise ConfigError("kv_scales are of all heads, a rank has some only: leave kv_scales out")
    if given.disk_folder is not None:
        raise ConfigError("ranks do not keep files of blocks in lockstep: leave disk_folder out")
    return given


@contextlib.contextmanager
def open_parallel_engine(
    model: str | Callable[[TensorParallel], Any],
    num_ranks: int,
    *,
    device_type: str = "cuda",
    dtype: str | None = None,
    timeout_s: float = 60.0,
    observer: Any = None,
    tokenizer: Any = None,
    **options: Any,
) -> Iterator[ParallelEngine]:
    """Open rank 0's engine, with every other rank in a process of its own.

    `model` is a folder, a Hub name, or a picklable function that makes the model on a rank;
    `device_type` is "cuda" or "cpu"; `dtype` is of the weights, by default as saved. `observer` is
    rank 0's; `tokenizer` and `options`, which are pickled, are of every `ParallelEngine`.

    If a rank ends, all end: calls raise `RankError`, and another engine can be opened once this one
    is closed. Raises `ConfigError` for too few devices or a model that cannot be divided.
    """
    checked_options(options)
    options["tokenizer"] = tokenizer
    make = partial(load, model, dtype=dtype) if isinstance(model, str) else model
    with Ranks(num_ranks, device_type, _follow, (make, options), timeout_s=timeout_s) as ranks:
        assert ranks.group is not None  # Set once all ranks have connected.
        engine = ParallelEngine(
            make(ranks.group), tensor_parallel=ranks.group, observer=observer, **options
        )
        with engine:
            yield engine
        if ranks.group.failure is None and not ranks.wait(_END_S):
            _LOG.warning("a rank did not end by itself, and was killed")


def _follow(group: TensorParallel, make: Callable[..., Any], options: dict[str, Any]) -> None:
    ParallelEngine(make(group), tensor_parallel=group, **options).follow()
