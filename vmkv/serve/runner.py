"""Steps of the engine: a stepper's logits, and a token chosen from them in each slot.

With the defaults on CUDA layers are compiled and steps captured: one in which every sequence has
one token, and one with prompts that fits a bucket, is a replay. Elsewhere the model runs as it is.
With `deterministic`, each chunk has a pass and a draw of its own, so that what a request computes
has the same shapes whoever runs beside it, and thereby the same roundings.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from ..core.cache import KVCache
from ..errors import ClosedError, ConfigError, InternalError, VMKVError
from ..hf import compat as vocabulary
from ..hf.attention import attending_in_place
from ..step import Piece, Stepper
from ..step.logits import HeadInParts, StepLogits
from ..step.operator import check_free
from ..step.warm_up import warm_up
from .params import SamplingParams
from .request import TokenLogprobs
from .sampler import SampledTokens, Sampler
from .served_rows import ServedRows, fit_budget

# ---- base ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step sampled.

    Attributes:
        token_ids: One per piece that samples, in the order of the pieces.
        logprobs: Likewise; None for those that did not ask.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs | None]


class SlotError(VMKVError):
    """What is one request's alone has failed; the others of its step are not to blame.

    Attributes:
        slot: The request's slot.
    """

    def __init__(self, slot: int, error: Exception, what: str = "a logits processor"):
        super().__init__(f"{what} failed: {error!r}")
        self.slot = slot


class PendingStep(Protocol):
    """A step that was submitted."""

    @property
    def has_ended(self) -> bool:
        """Whether the device is done with it, well or not. Never waits, never raises."""

    def wait(self) -> None:
        """Wait until it is. May be called again.

        Raises:
            Exception: As `result`.
        """

    def result(self) -> StepResult:
        """Wait for the step. May be called once, in the order of submission; again if interrupted.

        Raises:
            Exception: The step failed on the device. Its tokens do not exist.
        """


class Runner(Protocol):
    """Executes steps over the rows of one cache, in the order of submission."""

    def set_slot(
        self,
        slot: int,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int] = (),
    ) -> None:
        """A request begins in `slot`, or goes on there after a preemption.

        Everything the slot held is forgotten. Steps submitted before are not affected.

        Args:
            slot: The slot.
            params: Resolved by the engine: `seed` is set, and `stop_token_ids` holds the model's
                end-of-sequence tokens unless they are to be ignored. They must not be chosen
                before `min_tokens` tokens.
            prompt_token_ids: The prompt, for the repetition penalty.
            output_token_ids: What was generated before the preemption: counts for penalties and
                `min_tokens`, and the generator goes on after so many draws, so that a preempted
                request says what it would have said. Token i of a request is drawn from
                `(seed, i)` alone.
        """

    def submit(self, pieces: Sequence[Piece]) -> PendingStep:
        """Launch a step: the model over all pieces, then sampling. Never waits for the device.

        Raises:
            Exception: Nothing was sampled and no slot has moved on; a `SlotError` where the code
                of one request alone is the cause. Keys and values of the
                new tokens may have been written, which is harmless: submitting the same pieces
                again writes the same.
        """

    def close(self) -> None:
        """Wait for submitted steps, and free what the runner holds. Idempotent."""


# ---- host tokens ---------------------------------------------------------------------------------


class HostTokens:
    """The tokens of the slots that have logits processors.

    Args:
        agree: The largest of all ranks' values of a number.
    """

    def __init__(self, agree: Callable[[int], int] = int) -> None:
        self._agree = agree
        self._slots: dict[int, tuple[SamplingParams, list[int]]] = {}

    def set_slot(
        self,
        slot: int,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
    ) -> None:
        """A request with these tokens begins, or goes on, in `slot`."""
        if params.needs_host_tokens:
            self._slots[slot] = (params, [*prompt_token_ids, *output_token_ids])
        else:
            self._slots.pop(slot, None)

    def concerns(self, slots: Sequence[int]) -> bool:
        """Whether any of `slots` has a processor."""
        return not self._slots.keys().isdisjoint(slots)

    def of(self, slot: int) -> list[int] | None:
        """The slot's tokens, to append to what the host reads; None where nobody asks."""
        return self._slots[slot][1] if slot in self._slots else None

    def process(self, logits: torch.Tensor, slots: Sequence[int]) -> torch.Tensor:
        """`logits [n, vocabulary]` of `slots`, processed where one has processors.

        Returns:
            The same tensor, or a changed copy of it.

        Raises:
            VMKVError: A processor failed here or on another rank; all ranks raise a `SlotError`.

        Cost: an agreement of the ranks, some 100 µs, where a slot has processors.
        """
        if not self.concerns(slots):
            return logits
        processed = logits.float().clone()
        failed_at, failure = -1, None
        for at, slot in enumerate(slots):
            if slot in self._slots:
                params, token_ids = self._slots[slot]
                input_ids = torch.tensor([token_ids], device=logits.device)
                scores = processed[at : at + 1]
                try:
                    for processor in params.logits_processors:
                        scores = processor(input_ids, scores)
                    processed[at : at + 1] = scores
                except Exception as error:  # noqa: BLE001  # raised once all ranks know of it
                    failed_at, failure = at, error
                    break
        agreed_at = self._agree(failed_at)
        if agreed_at >= 0:
            cause = failure if agreed_at == failed_at else None
            raise SlotError(slots[agreed_at], cause or RuntimeError("on another rank")) from cause
        return processed


# ---- pending -------------------------------------------------------------------------------------


class PendingTokens:
    """Sampled tokens on their way to the host. Implements `PendingStep`.

    Args:
        parts: What was sampled, in order.
        num_logprobs: Per token, how many log-probabilities to report; None for none.
        histories: Per token, the list to append it to, or None.
        order: Which of them comes first, second, … in the result.
    """

    def __init__(
        self,
        parts: Sequence[SampledTokens],
        num_logprobs: Sequence[int | None],
        histories: Sequence[list[int] | None],
        order: Sequence[int],
    ):
        self._order = order
        self._num_logprobs = num_logprobs
        self._histories = histories
        self._ready: Any = None
        self._parts = [
            SampledTokens(
                self._to_host(part.token_ids),
                *(
                    None if each is None else self._to_host(each)
                    for each in (part.logprobs, part.top_token_ids, part.top_logprobs)
                ),
            )
            for part in parts
        ]
        if parts and parts[0].token_ids.is_cuda:
            # Reading a tensor would wait for what was submitted after it as well.
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready.record()

    @staticmethod
    def _to_host(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_cuda:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    @property
    def has_ended(self) -> bool:
        """See `PendingStep`."""
        try:
            return self._ready is None or self._ready.query()
        except RuntimeError:  # What went wrong on the device is for who waits.
            return True

    def wait(self) -> None:
        """See `PendingStep`."""
        if self._ready is not None:
            self._ready.synchronize()

    def result(self) -> StepResult:
        """See `PendingStep`."""
        self.wait()
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        for part in self._parts:
            chosen = part.token_ids.tolist()
            wanted = self._num_logprobs[len(token_ids) : len(token_ids) + len(chosen)]
            logprobs += _logprobs(part, chosen, wanted)
            token_ids += chosen
        for history, token_id in zip(self._histories, token_ids, strict=True):
            if history is not None:
                history.append(token_id)
        return StepResult(
            [token_ids[at] for at in self._order], [logprobs[at] for at in self._order]
        )


def _logprobs(
    part: SampledTokens, token_ids: Sequence[int], wanted: Sequence[int | None]
) -> list[TokenLogprobs | None]:
    if all(each is None for each in wanted):
        return [None] * len(token_ids)
    if part.logprobs is None or part.top_token_ids is None or part.top_logprobs is None:
        raise InternalError("a slot asked for log-probabilities, and the sampler made none")
    values = part.logprobs.tolist()
    columns = zip(part.top_token_ids.tolist(), part.top_logprobs.tolist(), strict=True)
    found: list[TokenLogprobs | None] = []
    for at, (ids, top) in enumerate(columns):
        count = wanted[at]
        if count is None:
            found.append(None)
        else:
            best = dict(zip(ids[:count], top[:count], strict=True))
            found.append(TokenLogprobs(token_ids[at], values[at], best))
    return found


# ---- model runner --------------------------------------------------------------------------------

_LOG = logging.getLogger(__name__)
#: What rows are read with where it can serve a layer; see `RowAttention`.
_PREFERRED_BACKEND = "flash3"


@dataclass(frozen=True)
class RunnerOptions:
    """How fast, and at what price at the start.

    Attributes:
        compile_layers: Compile the model's layers. By default on CUDA.
        compile_backend: Of `torch.compile`.
        capture: Capture steps as CUDA graphs. By default on CUDA. Elsewhere the same padded steps
            run uncaptured, which only tests want.
        max_graph_tokens: The largest step with prompts that is captured. Larger ones keep the
            device busy while the host launches them; smaller ones waste less if there are few.
        compile_cache: A folder that keeps what was compiled; None for torch's own temporary one.
        show_progress: A progress bar while warming up.
        agree: The largest of all ranks' values of a number; of one process, its own.
        wrap: What steps go through on their way to the runner.
        head: The model's output head, where ranks have parts of it; see `GraphSpace`.
    """

    compile_layers: bool | None = None
    compile_backend: str = "inductor"
    capture: bool | None = None
    max_graph_tokens: int = 2048
    compile_cache: Path | None = None
    show_progress: bool = True
    agree: Callable[[int], int] = int
    wrap: Callable[[Any], Any] = lambda runner: runner
    head: HeadInParts | None = None


class ModelRunner:
    """Runs the engine's steps of one model over the rows of one cache. Implements `Runner`.

    The model attends through this runner until `close`.

    Args:
        model: A transformers causal language model that has proven itself.
        cache: Holds the model's layers, by number. Where steps are captured or warmed up, one of
            its rows is taken for padding.
        max_num_seqs: How many slots there are.
        max_num_batched_tokens: The largest step.
        attention_backend: The kernel for rows; by default, where steps are captured, flash3 if it
            can serve a layer, which keeps a tile of every row resident for its over-read; or else
            what `select` takes.
        calls: See `Stepper`.
        options: See there.
        deterministic: Run every chunk by itself.

    Attributes:
        stepper: What runs the model.
        graph_bytes: Device memory that graphs hold, once `warm_up` has captured them.

    Raises:
        ConfigError: The model or the cache cannot be served. The model is as before.
        CapacityError: No row, or no page, is left for padding. Likewise.
    """

    def __init__(
        self,
        model: Any,
        cache: KVCache,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        attention_backend: str | None = None,
        calls: tuple[int, ...] | None = None,
        options: RunnerOptions | None = None,
        deterministic: bool = False,
    ):
        self._model = model
        self._max_num_batched_tokens = max_num_batched_tokens
        self._options = options or RunnerOptions()
        self._deterministic = deterministic
        self._device = cache.device
        self._is_cuda = self._device.type == "cuda"
        self._is_closed = False
        self.graph_bytes = 0
        vocab_size = vocabulary.num_logits(model)
        compiles = self._wants(self._options.compile_layers)
        self.sampler = Sampler(
            max_num_seqs, vocab_size, self._device, compiled=self._is_cuda and compiles
        )
        self._host_tokens = HostTokens(self._options.agree)
        self._wanted_logprobs: dict[int, int | None] = {}
        check_free(model)
        with contextlib.ExitStack() as undo:
            self.stepper = self._make_stepper(
                cache, max_num_seqs, compiles, attention_backend=attention_backend, calls=calls
            )
            undo.callback(self.stepper.close)
            if not self.stepper.uses_operator:
                undo.enter_context(attending_in_place(model))
            if self._wants(self._options.capture):
                largest = min(self._options.max_graph_tokens, max_num_batched_tokens)
                dtype = model.get_output_embeddings().weight.dtype
                its: dict[str, Any] = {"agree": self._options.agree, "head": self._options.head}
                self.stepper.make_graphs(vocab_size, dtype, largest, **its)
            self._undo = undo.pop_all()

    def _wants(self, choice: bool | None) -> bool:
        return self._is_cuda if choice is None else choice

    def _make_stepper(
        self, cache: KVCache, max_num_seqs: int, compiles: bool, **its: Any
    ) -> Stepper:
        options = self._options
        its["preferred_backend"] = _PREFERRED_BACKEND if self._wants(options.capture) else None
        if compiles:
            try:
                backend = options.compile_backend
                return Stepper(self._model, [cache], max_num_seqs, compile_with=backend, **its)
            except ConfigError as error:
                if options.compile_layers:
                    raise
                _LOG.warning("%s", error)
        return Stepper(self._model, [cache], max_num_seqs, **its)

    # ---- steps ----------------------------------------------------------------------------

    def set_slot(
        self,
        slot: int,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int] = (),
    ) -> None:
        """See `Runner.set_slot`."""
        self.sampler.set_slot(slot, params, prompt_token_ids, output_token_ids)
        self._host_tokens.set_slot(slot, params, prompt_token_ids, output_token_ids)
        self._wanted_logprobs[slot] = params.logprobs

    @torch.no_grad()
    def submit(self, pieces: Sequence[Piece]) -> PendingTokens:
        """See `Runner.submit`."""
        if self._is_closed:
            raise ClosedError("this runner is closed; make a new one")
        every = range(len(pieces))
        passes = [[at] for at in every] if self._deterministic else [list(every)]
        parts: list[SampledTokens] = []
        sampling: list[int] = []
        for places in passes:
            step = self.stepper.run([pieces[at] for at in places])
            its = [places[at] for at in step.pieces]
            if its:
                parts.append(self._sample(step, [pieces[at].slot for at in its]))
                sampling += its
        slots = [pieces[at].slot for at in sampling]
        return PendingTokens(
            parts,
            [self._wanted_logprobs.get(slot) for slot in slots],
            [self._host_tokens.of(slot) for slot in slots],
            sorted(range(len(sampling)), key=sampling.__getitem__),
        )

    def _sample(self, step: StepLogits, slots: Sequence[int]) -> SampledTokens:
        """Choose a token in each of `slots`, and leave it where the next step looks."""
        if step.token_ids is not None and self._is_plain(slots):
            # From the device they are copied; here the next step would overwrite them.
            return SampledTokens(step.token_ids if self._is_cuda else step.token_ids.clone())
        at = torch.tensor(slots, dtype=torch.int64).to(self._device, non_blocking=True)
        processed = self._host_tokens.process(step.logits, slots)
        sampled = self.sampler.sample(step.logits, at, slots, processed)
        self.stepper.last_tokens.index_copy_(0, at, sampled.token_ids)
        return sampled

    def _is_plain(self, slots: Sequence[int]) -> bool:
        return self.sampler.is_greedy(slots) and not self._host_tokens.concerns(slots)

    # ---- start, and end -------------------------------------------------------------------

    def warm_up(self) -> None:
        """Compile, tune and capture everything, so that no request waits for it.

        A model that cannot be captured is served without graphs.

        Raises:
            CapacityError: Not even a short prompt fits the cache.

        Cost: with an 8-billion-parameter model half a minute the first time, and some seconds
            once `compile_cache` holds what was compiled.
        """
        options, dtype = self._options, self._model.get_output_embeddings().weight.dtype
        self.graph_bytes = warm_up(
            self.stepper,
            self._max_num_batched_tokens,
            compile_cache=options.compile_cache,
            must_compile=bool(options.compile_layers),
            then=lambda: self.sampler.warm_up(dtype),
            show_progress=options.show_progress,
            agree=options.agree,
        )

    def close(self) -> None:
        """See `Runner.close`."""
        self._is_closed = True
        self._undo.close()


# ---- making --------------------------------------------------------------------------------------

#: Fraction of the device's memory that the budget leaves free, for kernels that load later.
_SPARE_FRACTION = 0.02


def make_runner(
    kind: str,
    model: Any,
    rows: ServedRows,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    deterministic: bool,
    attention_backend: str | None = None,
    options: Any = None,
) -> Runner:
    """A runner, warmed up.

    Args:
        kind: "auto", "eager" or "graphs".
        model: The model.
        rows: Its rows.
        max_num_seqs: Slots.
        max_num_batched_tokens: The largest step.
        deterministic: Whether requests must not depend on each other; only "eager" can do that.
        attention_backend: See `ModelRunner`.
        options: For "graphs", `RunnerOptions`.

    Raises:
        ConfigError: There is no such runner, or it cannot do what is asked.
    """
    if kind == "auto":
        kind = "graphs" if rows.cache.device.type == "cuda" and not deterministic else "eager"
    if kind not in ("eager", "graphs"):
        raise ConfigError(f'runner={kind!r} is none of "auto", "eager" and "graphs"')
    if deterministic and kind != "eager":
        raise ConfigError('deterministic needs runner="eager": leave the runner out')
    options = options or RunnerOptions()
    if kind == "eager":
        options = replace(options, compile_layers=False, capture=False)
    runner = ModelRunner(
        model,
        rows.cache,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        attention_backend=attention_backend,
        calls=rows.calls,
        options=options,
        deterministic=deterministic,
    )
    try:
        if kind == "graphs":
            runner.warm_up()
        if rows.cache.device.type == "cuda":
            total_bytes = torch.cuda.get_device_properties(rows.cache.device).total_memory
            fit_budget(rows.cache.pool, int(total_bytes * _SPARE_FRACTION))
    except BaseException:
        runner.close()
        raise
    return cast("Runner", options.wrap(runner))
