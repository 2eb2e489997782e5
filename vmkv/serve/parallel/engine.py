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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ...errors import CapacityError, ConfigError, RankError
from ...options import EngineOptions
from ..engine import Engine
from ..engine_loop import FAILED_STEPS_MAX
from ..memory_view import pool_beside
from ..observer import EngineObserver
from ..params import SamplingParams
from ..prompts import check_tenant
from ..request import RequestHandle
from ..runner import RunnerOptions
from ..scheduler import PreemptionCosts
from . import Ranks, TensorParallel, localise
from .divided_head import head_of
from .loading import load
from .lockstep import Lockstep

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
        self._lockstep = lockstep = Lockstep(ranks)
        localise(model, ranks)
        pool = pool_beside(model, None, given, open_memory=lockstep.backend)
        lockstep.level(pool)
        # Choices that a rank would make for itself are rank 0's.
        seed = ranks.share(random.getrandbits(64) if given.seed is None else given.seed)
        costs = ranks.share(given.preemption_costs or PreemptionCosts.of(model))
        how = given.runner_options or RunnerOptions()
        how = replace(how, agree=ranks.max, wrap=lockstep.runner, head=head_of(model))
        its = replace(given, seed=seed, preemption_costs=costs, runner_options=how)
        its = replace(its, budget_bytes=None, host_budget_bytes=0)  # The pool has them.
        super().__init__(model, tokenizer=tokenizer, observer=observer, pool=pool, **vars(its))
        try:
            lockstep.begin(
                pool,
                max_tokens=self.max_tokens,
                overread_tokens=self.cache.overread_tokens,
                vocabulary=self._vocab_size,
            )
        except BaseException:
            super().close()
            raise

    @property
    def num_failed_steps(self) -> int:
        """Failed steps since the last successful one; the maximum once a rank is lost."""
        return super().num_failed_steps if self._ranks.failure is None else FAILED_STEPS_MAX

    def when_lost(self, call: Callable[[], None]) -> None:
        """Have `call` called, from any thread, when a rank is lost."""
        self._ranks.on_loss = call
        if self._ranks.failure is not None:
            call()

    # ---- calls on rank 0 ------------------------------------------------------------------

    def add(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        priority: int = 0,
        *,
        tenant: str | None = None,
    ) -> RequestHandle:
        """Add a request; raises `ConfigError` also if it cannot be pickled for the other ranks."""
        self._check_asked()
        check_tenant(tenant)
        if params is not None and params.logits_processors:
            self._ranks.check_sendable(params)
        prompt = prompt.tolist() if hasattr(prompt, "tolist") else prompt
        self._lockstep.note("add", prompt, params, priority, tenant)
        return super().add(prompt, params, priority, tenant=tenant)

    def cancel(self, handle: RequestHandle) -> None:
        """Cancel a request on all ranks."""
        if not handle.is_finished:
            self._note("cancel", _unfinished_id(handle))
            super().cancel(handle)

    def cancel_all(self, error: Exception | None = None) -> None:
        """Cancel every request on all ranks."""
        if error is not None:
            self._note("fail_all", str(error))
        super().cancel_all(error)

    def finish(self, handle: RequestHandle, sample: int) -> None:
        """End one sample on all ranks."""
        if not handle.is_finished:
            self._note("finish", _unfinished_id(handle), sample)
            super().finish(handle, sample)

    def set_budget(self, budget_bytes: int) -> None:
        """Set each rank's memory for keys and values; may evict prefixes and preempt requests.

        Raises `ConfigError`, and changes nothing, if running requests use more.
        """
        self._check_asked()
        self._lockstep.note("set_budget", budget_bytes)
        self._lockstep.flush()
        self.cache.pool.set_budget(budget_bytes)

    def advance(self) -> bool:
        """Run one step on all ranks; if a rank ends, all requests end with its `RankError`."""
        try:
            self._check_asked()
            if not self._loop.has_work:
                return False
            self._lockstep.flush(is_step=True)
            more = self._run_step()
            self._ranks.check()
        except RankError as error:
            super().cancel_all(error)
            raise
        except BaseException as error:
            if not isinstance(error, Exception):
                # An interrupt: the other ranks may wait for this one in the middle of the step.
                super().cancel_all(self._ranks.fail("a step was interrupted"))
            raise
        return more

    def _run_step(self) -> bool:
        more = self._loop.step()
        self._lockstep.num_requests = len(self._scheduler.requests)
        return more

    def fall_idle(self, is_wanted: Callable[[], bool] = lambda: False) -> None:
        """Give back memory above the watermark, the same on all ranks; see `Engine.fall_idle`."""
        self._check_asked()
        super().fall_idle(is_wanted)

    def _reclaim(self, num_bytes: int) -> int:
        self._lockstep.note("reclaim", num_bytes)
        self._lockstep.flush()
        return super()._reclaim(num_bytes)

    def close(self) -> None:
        """Close this engine; rank 0 also closes those of the other ranks. Idempotent."""
        if self._is_closed:
            return
        try:
            if not self._ranks.rank and self._ranks.failure is None:
                super().cancel_all()
                self._lockstep.note("close")
                self._lockstep.flush()
        except RankError as error:
            _LOG.error("%s", error)
        if self._ranks.failure is not None:
            super().cancel_all(self._ranks.failure)
        super().close()

    def _note(self, *command: Any) -> None:
        """Forward a command, unless a rank has ended: then this rank acts alone."""
        if not self._ranks.rank and self._ranks.failure is None:
            self._lockstep.note(*command)

    def _check_open(self) -> None:
        super()._check_open()
        self._ranks.check()

    def _check_asked(self) -> None:
        self._check_open()
        if self._ranks.rank:
            raise ConfigError("this engine follows that of rank 0: call follow(), and ask there")

    # ---- calls on the other ranks ---------------------------------------------------------

    def follow(self) -> None:
        """Repeat rank 0's commands and steps until its engine closes; then close this one."""
        if not self._ranks.rank:
            raise ConfigError("this engine is asked, and follows nobody")
        try:
            while not self._is_closed:
                commands, is_step = self._lockstep.receive()
                for name, *arguments in commands:
                    self._obey(name, arguments)
                if is_step:
                    self._run_step()
        finally:
            self.close()

    def _obey(self, name: str, arguments: Sequence[Any]) -> None:
        """Run one of rank 0's commands; a refusal, which rank 0 has raised, is only logged."""
        try:
            if name == "add":
                *others, tenant = arguments
                super().add(*others, tenant=tenant)
            elif name == "reclaim":
                super()._reclaim(*arguments)
            elif name == "set_budget":
                self.cache.pool.set_budget(*arguments)
            elif name == "fail_all":
                self._loop.end_all(RuntimeError(*arguments))
            elif name == "close":
                super().close()
            elif name == "finish":
                super().finish(self._handles[arguments[0]], arguments[1])
            elif name == "cancel":
                super().cancel(self._handles[arguments[0]])
        except (ConfigError, CapacityError) as error:
            _LOG.debug("%s is refused: %s", name, error)


def _unfinished_id(handle: RequestHandle) -> int:
    """Return the number of an unfinished sample, by which every rank finds the handle."""
    return next(each.request_id for each in handle.requests if not each.is_finished)


def checked_options(options: Mapping[str, Any]) -> EngineOptions:
    """Return the options; `ConfigError` for one that a `ParallelEngine` does not support."""
    if "pool" in options:
        raise ConfigError("ranks cannot share a pool with others; leave pool out")
    given = EngineOptions(**options)
    if given.kv_scales is not None:
        raise ConfigError("kv_scales are of all heads, of which a rank has some; leave them out")
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
    `device_type` is "cuda" or "cpu"; `dtype` is of the weights, by default as saved; for
    `timeout_s` see `TensorParallel`. `observer` is rank 0's; `tokenizer` and `options`, which are
    pickled, are of every `ParallelEngine`.

    If a rank ends, all end: calls raise `RankError`, and another engine can be opened once this one
    is closed. Raises `ConfigError` for too few devices or a model that cannot be divided.
    """
    checked_options(options)
    options["tokenizer"] = tokenizer
    make = partial(load, model, dtype=dtype) if isinstance(model, str) else model
    ranks = Ranks(
        num_ranks,
        device_type,
        _follow,
        (make, options),
        timeout_s=timeout_s,
    )
    with ranks:
        assert ranks.group is not None  # Set once all ranks have connected.
        engine = ParallelEngine(
            make(ranks.group), tensor_parallel=ranks.group, observer=observer, **options
        )
        with engine:
            yield engine
        if ranks.group.failure is None and not ranks.wait(_END_S):
            _LOG.warning("a rank did not end by itself, and was killed")


def _follow(
    group: TensorParallel, make: Callable[[TensorParallel], Any], options: dict[str, Any]
) -> None:
    ParallelEngine(make(group), tensor_parallel=group, **options).follow()
