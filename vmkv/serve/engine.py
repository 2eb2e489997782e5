"""The engine: requests of different lengths, continuously batched on one device.

    engine = Engine("MODEL")  # or Engine(model, tokenizer=tokenizer)
    outputs = engine.generate(["Hello", "The capital of France is"], SamplingParams(max_tokens=32))
    handle = engine.add("Once upon a time", SamplingParams(max_tokens=256), priority=-1)
    for output in handle:                      # runs the engine as far as needed
        print(output.text)

One thread at a time may use an engine; `AsyncEngine` gives it a thread of its own.

See DESIGN.md, Note [Weights sleep in host memory], and Note [Training has the model in turns].
"""

from __future__ import annotations

import contextlib
import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..core.backend import open_backend
from ..core.cache import KVCache
from ..core.interrupts import uninterrupted
from ..core.memory import ExtentPool
from ..errors import CapacityError, ClosedError, ConfigError, DriverError, PausedError
from ..hf.compat import given_or_loaded
from ..hf.store import close_later, close_orphans
from ..units import GiB, format_bytes
from .draft_model import make_drafter
from .guided import Grammars
from .memory_view import MemoryView
from .observer import EngineObserver, FirstToken, Idle, RequestAdded, RequestRecord
from .options import EngineOptions
from .params import SamplingParams, resolve, tokenised
from .request import (
    FinishReason,
    Request,
    RequestHandle,
    RequestOutput,
    check_queued,
    detokenizer_of,
    packed_prompt,
)
from .runner import ModelRunner, make_runner, spare_bytes
from .scheduler import PreemptionCosts, Scheduler
from .served_rows import OwnBudget, open_rows, pool_beside
from .step_loop import Ended, Sampled, Scored, StepLoop
from .training_turns import TrainingTurns, Vocabulary, renewed_runner
from .weights import Weights

if TYPE_CHECKING:
    from .parallel.lockstep import Lockstep

_LOG = logging.getLogger(__name__)
#: Memory returned to the device between polls for new work: some 10 ms.
_SLICE_BYTES = 1 * GiB


class Engine:
    """Serves a transformers model, to one thread at a time; `AsyncEngine` serves many.

    Args:
        model: A causal language model, in eval mode, on one device; or its folder or Hub name, and
            it is loaded with its tokenizer, onto the first GPU, or the CPU if there is none.
        tokenizer: The model's tokenizer, for prompts and outputs that are text.
        pool: Physical memory, with its own budget, shared with other caches and engines. Its
            engines preempt each other's requests in one order of arrival and priority. A request
            that fits the pool alone waits for memory; it fails with `OutOfPagesError` if for 100
            steps no memory comes free and no engine makes progress.
        observer: Receives the engine's events.
        lockstep: Other ranks of the model; a `ParallelEngine` gives it.
        options: Those of `vmkv.serve.options.EngineOptions`.

    Attributes:
        options: The options it was made with.
        cache: The keys and values.
        loop: Runs the steps.
        grammars: Compiles the grammars of `structured_outputs`.
        on_update: Called with each handle that has new output, its end included.

    Raises:
        ConfigError: The model cannot be loaded or served, or an option is impossible.
        TypeError: There is no such option.
        OutOfPagesError: The budget does not hold one token.
        CapacityError: The weights, or `max_num_seqs` requests (lower it), do not fit the device.
    """

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Any = None,
        pool: ExtentPool | None = None,
        observer: EngineObserver | None = None,
        lockstep: Lockstep | None = None,
        **options: Any,
    ):
        self._is_closed = True
        self._lockstep = lockstep
        model, tokenizer = given_or_loaded(model, tokenizer)
        self.options = given = EngineOptions(**options)
        self._scheduler = Scheduler(
            given.max_num_seqs,
            given.max_num_batched_tokens,
            costs=given.preemption_costs or PreemptionCosts.of(model),
            max_num_mixed_tokens=given.max_num_mixed_tokens,
            fixed_chunks=given.deterministic,
        )
        self.tokenizer = tokenizer
        vocabulary = Vocabulary.of(model)
        self._observer = observer
        self._is_idle = True  # Warming up has trimmed the cache.
        self._is_inside = False  # Within `paused`.
        self._is_stale = False  # Free memory may have changed since the budget was set.
        self._random = random.Random(given.seed)
        self._num_requests = 0
        self._handles: dict[int, RequestHandle] = {}
        self.on_update: Callable[[RequestHandle], None] | None = None
        close_orphans()
        is_shared, pool = pool is not None, pool_beside(model, pool, given)
        with contextlib.ExitStack() as undo:
            rows = open_rows(model, pool, given)
            undo.callback(rows.close)
            close_later(self, rows.cache)
            self._weights: Weights | None = None
            if given.can_sleep:
                # Another backend of the device; the function must not keep this engine alive.
                opening = open_backend if lockstep is None else lockstep.another_backend
                agree = int if lockstep is None else lockstep.group.max
                opener = partial(opening, pool.backend.name)
                self._weights = Weights(model, opener, agree, pool.member)
                undo.callback(self._weights.close)
                close_later(self, self._weights)
            self.cache: KVCache = rows.cache
            scheduler = self._scheduler
            self._view = MemoryView(self.cache, given, scheduler.requests, scheduler.costs)
            runner = make_runner(model, rows, given, self._weights, lockstep)
            renew = partial(renewed_runner, model, rows, given, self._weights)
            self._turns = TrainingTurns(model, vocabulary, runner, renew)
            undo.callback(lambda: self._runner.close())
            its = (tokenizer, vocabulary.num_logits, vocabulary.ends)
            self.grammars = Grammars(*its, is_pinned=self.cache.device.type == "cuda")
            drafter = make_drafter(self, model, rows, given, self.grammars, lockstep, undo)
            self._view.begin_serving(drafter.caches if drafter is not None else ())
            undo.callback(self._release)
            self._undo = undo.pop_all()
        self.loop = StepLoop(
            self._scheduler,
            self._view,
            runner,
            accept=self._accept,
            ended=self._ended,
            masks=self.grammars.masks,
            drafter=drafter,
            observer=observer,
        )
        spare = spare_bytes(self.cache.device, given)
        self._own_budget = None if is_shared or pool.member else OwnBudget(pool, spare)
        self._is_closed = False
        self.loop.rest()

    @property
    def _runner(self) -> ModelRunner:
        return self._turns.runner

    # ---- requests -------------------------------------------------------------------------

    @property
    def max_tokens(self) -> int:
        """Maximum length of a request in tokens, prompt and output, given row size and budget."""
        return self._view.fitting_tokens()

    @uninterrupted
    def add(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        priority: int = 0,
        *,
        tenant: str | None = None,
    ) -> RequestHandle:
        """Add a request to the queue and return a handle to read its outputs and to cancel it.

        Args:
            prompt: Token ids, or text if the engine has a tokenizer.
            params: Sampling parameters; `SamplingParams()` by default.
            priority: Lower values run first.
            tenant: Owner of the request's keys and values; prefixes are shared only within a
                tenant. None is a tenant of its own.

        Raises:
            ConfigError: The request can never be served: the prompt is empty or too long, a token
                is not in the vocabulary, text is wanted without a tokenizer, or a grammar is wrong
                or unsupported. Nothing was added.
            ClosedError: The engine is closed.
            CapacityError, DriverError: The engine slept, and could not wake; see `wake`.
        """
        self._check_open()
        self._check_here()
        params = params or SamplingParams()
        prompt = prompt.tolist() if hasattr(prompt, "tolist") else prompt
        text = prompt if isinstance(prompt, str) else None
        vocabulary = self._turns.vocabulary
        tokens = packed_prompt(prompt, self.tokenizer, vocabulary.num_embeddings)
        params = tokenised(params, self.tokenizer)
        check_queued(priority, tenant)
        if self._weights is not None:
            self.wake()
        if self._is_stale and self._own_budget is not None:
            self._own_budget.refit()
            self._is_stale = False
        self._is_idle = False
        max_total = longest = self.max_tokens
        if params.max_tokens is not None:
            max_total = min(longest, len(tokens) + params.max_tokens)
        if len(tokens) >= longest:
            raise ConfigError(
                f"a prompt of {len(tokens)} tokens leaves no room for an answer: requests hold "
                f"{longest} at most here; shorten it, or raise max_tokens or the budget"
            )
        asked, ends = params.structured_outputs, vocabulary.ends
        matchers = [asked and self.grammars.matcher(asked) for _ in range(params.n)]
        if asked is not None:
            ends = self.grammars.end_tokens
        self._tell_ranks(prompt, params, priority, tenant)
        requests: list[Request] = []
        try:
            for index in range(params.n):  # Samples after the first fork the computed prompt.
                seed = params.seed if params.seed is not None else self._random.getrandbits(48)
                sizes = (max_total - len(tokens), vocabulary.num_logits, len(tokens))
                resolved = resolve(params, seed + index, ends, *sizes)
                leader = requests[0] if requests else None
                its = (self._num_requests, tokens, resolved, priority, max_total, tenant, leader)
                request = Request(*its, matcher=matchers[index])
                request.arrived_s = time.perf_counter()
                if params.prompt_logprobs is not None:
                    request.prompt_logprobs.append(None)
                    params = replace(params, prompt_logprobs=None)  # Of the other samples.
                requests.append(request)
                request.detokenizer = detokenizer_of(self.tokenizer, tokens, resolved)
                self._scheduler.add(request, self._view, self.cache.pool.arbiter.arrival())
                self._num_requests += 1
        except BaseException:
            for request in requests:
                self.loop.end(request, FinishReason.CANCELLED)
            raise
        handle = RequestHandle(requests, text, self)
        for request in requests:
            self._handles[request.request_id] = handle
            if self._observer is not None:
                self._observer.on(RequestAdded(request.request_id), self.cache)
        return handle

    def _tell_ranks(
        self, prompt: Any, params: SamplingParams, priority: int, tenant: str | None
    ) -> None:
        """Have the other ranks add a request too; the time of rank 0 is that of all."""
        if self._lockstep is None:
            self._tell_time(time.monotonic())
        elif not self._lockstep.group.rank:
            self._tell_time(now_s := time.monotonic())
            self._lockstep.repeat("_tell_time", now_s)
            self._lockstep.repeat("add", prompt, params, priority, tenant=tenant)

    def _tell_time(self, now_s: float) -> None:
        self.cache.rows.now_s = now_s

    @uninterrupted
    def cancel(self, handle: RequestHandle) -> None:
        """End a request; it keeps the tokens it has. Idempotent."""
        for request in handle.requests:
            self._end(request.request_id, FinishReason.CANCELLED)

    @uninterrupted
    def finish(self, handle: RequestHandle, sample: int) -> None:
        """End a sample as if at a stop token, for callers that find stop texts. Idempotent."""
        self._end(handle.requests[sample].request_id, FinishReason.STOP)

    def _end(self, request_id: int, reason: FinishReason) -> None:
        request = self._scheduler.requests.get(request_id)
        if request is not None:
            if self._lockstep is not None:
                self._lockstep.repeat("_end", request_id, reason)
            self.loop.end(request, reason)

    @uninterrupted
    def cancel_all(self, error: Exception | None = None) -> None:
        """Cancel every request, or fail them all with `error`."""
        if error is not None:
            if self._lockstep is not None:
                self._lockstep.repeat("cancel_all", RuntimeError(str(error)))
            self.loop.end_all(error)
        for handle in tuple(self._handles.values()):
            self.cancel(handle)

    # ---- outcomes -------------------------------------------------------------------------

    def _accept(self, sampled: Sequence[Sampled], scored: Sequence[Scored]) -> list[Ended]:
        ended: list[Ended] = []
        for request, num_past, entries in scored:
            known = request.prompt_logprobs  # More than `num_past`, if a preempted one recomputes.
            known += entries[len(known) - num_past - 1 :]
            if self.on_update is not None and request.request_id in self._handles:
                self.on_update(self._handles[request.request_id])
        for request, token_id, logprobs in sampled:
            if request.finish_reason is not None:
                continue  # Cancelled by `on_update` of another request.
            params, reason, error = request.params, None, None
            if logprobs is not None:
                request.logprobs.append(logprobs)
            # Last: other threads expect the log-probabilities of each token they see.
            request.output_token_ids.append(token_id)
            num_tokens = len(request.output_token_ids)
            try:
                if num_tokens == 1:
                    request.first_token_s = time.perf_counter()
                    if self._observer is not None:
                        wait_s = request.first_token_s - request.arrived_s
                        self._observer.on(FirstToken(request.request_id, wait_s), self.cache)
                may_stop = num_tokens >= params.min_tokens
                asked = params.structured_outputs
                if asked is not None and request.matcher is not None:
                    self.grammars.advance(asked, request.matcher, token_id)
                    may_stop = True  # A grammar may end before.
                if may_stop and token_id in params.stop_token_ids:
                    # The text of a stop token is not part of the output.
                    is_end = token_id in self._turns.vocabulary.ends
                    request.stop_reason = None if is_end else token_id
                    reason = FinishReason.STOP
                elif request.detokenizer is not None:
                    _, reason, error = request.add_text([token_id])
                if reason is None and num_tokens == params.max_tokens:
                    reason = FinishReason.LENGTH
                if self.on_update is not None and request.request_id in self._handles:
                    self.on_update(self._handles[request.request_id])
            except Exception as failure:  # noqa: BLE001  # a grammar's, for this request alone
                reason, error = FinishReason.ERROR, failure
            if reason is not None:
                ended.append((request, reason, error))
        return ended

    def _ended(self, request: Request, reason: FinishReason, error: Exception | None) -> None:
        _, why, request.error = request.add_text((), reason, error)
        request.finish_reason = why  # Last: other threads take it as the end.
        handle = self._handles.pop(request.request_id, None)
        if handle is not None and self.on_update is not None:
            self.on_update(handle)
        if self._observer is not None:
            self._observer.on(RequestRecord.of(request), self.cache)

    # ---- running --------------------------------------------------------------------------

    @property
    def has_unfinished(self) -> bool:
        """Whether requests or unread steps are left."""
        return self.loop.has_work

    @property
    def num_failed_steps(self) -> int:
        """Consecutive failed steps, without failures of single requests and memory shortages."""
        return self.loop.num_failed_steps

    def step(self) -> None:
        """Run one step and update the handles; with nothing left to do, call `fall_idle`.

        Raises `ClosedError`, or a `DriverError` that no request caused; stepping may continue.
        """
        if not self.advance():
            self.fall_idle()

    def advance(self) -> bool:
        """Run one step, if there is work; returns whether more is left. Raises as `step`."""
        self._check_open()
        self._check_here()
        return self.loop.has_work and self.loop.step()

    @uninterrupted
    def fall_idle(self, is_wanted: Callable[[], bool] = lambda: False) -> None:
        """Return memory above the watermark to the device, and notify the observer.

        Does nothing while requests are left, or if already idle. `is_wanted` is polled before each
        slice of memory; once true, the rest is left to the next call. Raises `ClosedError`.

        Cost: some 10 µs with nothing above the watermark, else some 3 ms per GiB.
        """
        self._check_open()
        if self._is_idle or self.loop.has_work:
            return
        most_bytes = self.options.watermark_bytes
        if most_bytes is None or self._shrink(most_bytes, is_wanted):
            self._note_idle()

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

    def _note_idle(self) -> None:
        self._is_idle = True
        self.loop.rest()
        if self._observer is not None:
            self._observer.on(Idle(self.is_sleeping), self.cache)

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        priority: int = 0,
        *,
        tenant: str | None = None,
    ) -> list[RequestOutput]:
        """Generate one output per prompt, in order, like vLLM's `LLM.generate`.

        A failed output has `finish_reason` "error".

        Args:
            prompts: One prompt or several, each token ids or text.
            params: One for all prompts, or one each.
            priority: Priority of all of them.
            tenant: Tenant of all of them; see `add`.

        Raises:
            ConfigError: A prompt cannot be served, or the number of `params` differs from that of
                prompts. Nothing was generated.
        """
        prompts = prompts.tolist() if hasattr(prompts, "tolist") else prompts
        is_one = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))
        several: list[Any] = [prompts] if is_one else list(prompts)
        each = list(params) if isinstance(params, Sequence) else [params] * len(several)
        if len(each) != len(several):
            raise ConfigError(f"{len(each)} sampling parameters for {len(several)} prompts")
        handles: list[RequestHandle] = []

        @uninterrupted
        def add(prompt: str | Sequence[int], params: SamplingParams | None) -> None:
            handles.append(self.add(prompt, params, priority, tenant=tenant))

        try:
            for prompt, its in zip(several, each, strict=True):
                add(prompt, its)
            for handle in handles:
                while not handle.is_finished:
                    self.step()
        except BaseException:
            for handle in handles:
                self.cancel(handle)
            raise
        return [handle.output() for handle in handles]

    def when_lost(self, call: Callable[[], None]) -> None:
        """Register `call`, invoked from any thread when a part of the engine has died."""

    def use_device(self) -> None:
        """Make the engine's CUDA device current in the calling thread."""
        if self.cache.device.type == "cuda":
            torch.cuda.set_device(self.cache.device)

    # ---- training -------------------------------------------------------------------------

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which the model can be trained; afterwards the engine serves it again.

        Inside, attention, the layers' `forward` and classes, and gradient checkpointing are as if
        the model had never been served; parameters are the same objects. At the end all modules go
        to eval mode; the next `paused()` puts modules that were in training mode back into it.
        Other engines of the model have to be paused, too.

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

        Not needed where they change within `paused()`, which compares them.

        Raises:
            ConfigError: Requests are unfinished, or the model can no longer be served.
            ClosedError: The engine is closed.
        """
        self._check_one_device("weights_changed()")
        self._check_at_rest("weights_changed()")
        self.wake()
        self.cache.forget_prefixes()
        if not self._turns.is_paused:
            self._turns.pause(compares_values=False)
            self._resume()

    # ---- sleep ----------------------------------------------------------------------------

    @property
    def is_sleeping(self) -> bool:
        """Whether the weights are in host memory, until `wake`."""
        return self._weights is not None and self._weights.are_away

    @uninterrupted
    def sleep(self, *, weights: bool = False, graphs: bool = False, prefixes: bool = False) -> None:
        """Give device memory back to the driver; without `weights` also within `paused()`.

        Cached prefixes are dropped, or with `prefixes` move to host memory, as many as the pool's
        host budget holds; requests find them there. With `weights` the model's weights move to host
        memory, and return to the same addresses with the next request, or `wake`. The budget of the
        engine's own pool then follows free memory, up to its former value. With `graphs` captured
        steps go, too, and within `paused()` copies of adapters, which moves the weights beside them
        unless `enable_sleep_mode` holds these in place. Does nothing while the engine sleeps.

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
        self._view.sleep(keeps_prefixes=prefixes)
        if weights and self._weights is not None:
            self._weights.leave()
        if self._turns.is_paused and self.cache.device.type == "cuda":
            torch._C._cuda_clearCublasWorkspaces()  # Each keeps a segment of torch's memory.
        torch.cuda.empty_cache()
        if weights:
            self._log_weights("sleeps", start_s)
            self._note_idle()

    @uninterrupted
    def wake(self) -> None:
        """Bring the weights back after `sleep`; does nothing if awake.

        Does not wait for the copies.

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
        assert self._weights is not None
        start_s = time.perf_counter()
        self._weights.come_back()
        self._log_weights("wakes", start_s)
        self._note_idle()

    def _log_weights(self, does: str, start_s: float) -> None:
        size = format_bytes(self._weights.num_bytes if self._weights is not None else 0)
        _LOG.info("the engine %s: %s of weights, %.2f s", does, size, time.perf_counter() - start_s)

    # ---- at rest --------------------------------------------------------------------------

    @uninterrupted
    def _pause(self) -> None:
        self._check_one_device("paused()")
        self._check_at_rest("paused()")
        self.wake()
        has_prefixes = bool(self.cache.prefixes.recorded) or not self.cache.host_blocks.is_empty
        self._turns.pause(compares_values=has_prefixes)
        self._is_inside = True

    @uninterrupted
    def _leave(self) -> None:
        was_inside, self._is_inside = self._is_inside, False
        if was_inside and not self._is_closed:
            self._resume()

    def _resume(self) -> None:
        if self._turns.resume():
            self.cache.forget_prefixes()
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

    # ---- end ------------------------------------------------------------------------------

    @uninterrupted
    def close(self) -> None:
        """Cancel unfinished requests and free everything. Idempotent."""
        if self._is_closed:
            return
        self.cancel_all()
        if self.loop.has_work:
            self.loop.step()
        self._is_closed = True
        self._undo.close()

    def _check_here(self) -> None:
        if self._turns.is_paused:
            raise PausedError(
                "this engine is paused for training: leave engine.paused() before it generates; if "
                "leaving it raised an error, undo what that names, then enter and leave it again"
            )

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("this engine is closed; make a new one")
        if self._lockstep is not None:
            self._lockstep.check()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._is_closed:
            return "Engine(closed)"
        return (
            f"Engine({self._scheduler.num_running} running, {self._scheduler.num_waiting} waiting, "
            f"{format_bytes(self.cache.pool.stats().resident_bytes)} resident)"
        )
