"""Runs the engine's steps: a forward pass through the stepper, then sampling in each slot.

With `deterministic`, each chunk has a forward pass and a sampling call of its own, so that shapes
and rounding do not depend on the batch.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..core.cache import KVCache
from ..errors import ClosedError, ConfigError, VMKVError
from ..hf import compat
from ..step import Piece, Stepper
from ..step.model_guard import places_of, settings_of, unmerge_disabled
from ..step.piece import StepLogits, packing_order
from ..step.row_attention import AttentionCalls, check_free
from ..step.states import run_packed
from ..step.warm_up import warm_up
from .options import EngineOptions
from .params import SamplingParams
from .request import TokenLogprobs
from .sampler import SampledTokens, Sampler, with_logprobs
from .served_rows import ServedRows, fit_budget
from .weights import Weights

if TYPE_CHECKING:
    from .parallel.lockstep import Lockstep

# ---- base ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepResult:
    """Sampled tokens, -1 for none, one per sampling piece in order, and log-probabilities or None.

    `prompt_logprobs` are of the tokens that follow those of a piece in its prompt, by the piece's
    index.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs | None]
    prompt_logprobs: Mapping[int, Sequence[TokenLogprobs]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step whose forward pass is launched, and whose tokens are not sampled yet."""

    passes: Sequence[StepLogits]  # Of each pass that samples; valid until the next launch.
    slots: Sequence[int]  # Slots to sample, by row of all passes.
    order: Sequence[int] | None  # Rows in the order of the pieces; None if they are in order.
    # By row: the guess that its token must equal for the next row to count; None without guesses.
    guesses: Sequence[int] | None = None
    scores: Sequence[Scores] = ()  # Log-probabilities of prompts.


def _guesses(piece: Piece) -> list[int]:
    """Return what the rows of a piece must be followed by, the last row first; -1 for nothing."""
    ids, count = piece.token_ids or (), piece.num_drafted
    return [-1, *[ids[-each] for each in range(1, count + 1)]]


class SlotError(VMKVError):
    """Failure caused by the request of `slot` alone; the step's other requests go on."""

    def __init__(self, slot: int, error: Exception, what: str = "a logits processor"):
        super().__init__(f"{what} failed: {error!r}")
        self.slot = slot


# ---- host tokens ---------------------------------------------------------------------------------


#: A slot's parameters, and the history to which the host appends sampled tokens.
_History = tuple[SamplingParams, list[int]]


def _process(
    logits: torch.Tensor,
    slots: Sequence[int],
    histories: Mapping[int, _History],
    agree: Callable[[int], int],
) -> torch.Tensor:
    """Apply processors to a copy of `logits [n, vocabulary]`; all ranks fail if one does."""
    processed = logits.float().clone()
    failed_at, failure = -1, None
    for at, slot in enumerate(slots):
        if slot in histories:
            params, token_ids = histories[slot]
            input_ids = torch.tensor([token_ids], device=logits.device)
            scores = processed[at : at + 1]
            try:
                for processor in params.logits_processors:
                    scores = processor(input_ids, scores)
                processed[at : at + 1] = scores
            except Exception as error:  # noqa: BLE001  # raised after the ranks agree
                failed_at, failure = at, error
                break
    agreed_at = agree(failed_at)
    if agreed_at >= 0:
        cause = failure if agreed_at == failed_at else None
        raise SlotError(slots[agreed_at], cause or RuntimeError("on another rank")) from cause
    return processed


# ---- log-probabilities of prompts ---------------------------------------------------------------

#: Tokens of a pass, whose logits take 64 MiB for 128k entries in bfloat16, and rows of logits whose
#: log-probabilities are computed at once, in some 200 MiB.
_PASS_TOKENS, _ROWS = 256, 64
#: By slot: the number of alternatives that are wanted, and the prompt.
Wishes = Mapping[int, tuple[int, Sequence[int]]]


class Span(NamedTuple):
    """Rows of one piece in a pass; the first `num_told` have a next token in the prompt."""

    piece: int
    num_rows: int
    num_told: int
    num_logprobs: int


class Scores(NamedTuple):
    """Log-probabilities of the next tokens of a pass, in order of its spans."""

    tokens: SampledTokens
    spans: Sequence[Span]

    def entries(self) -> Iterator[tuple[int, list[TokenLogprobs]]]:
        """Yield the index of each piece with its entries; call it once they are on the host."""
        rows = zip(self.tokens.token_ids.tolist(), self.tokens.rows(), strict=True)
        for at, num_rows, num_told, most in self.spans:
            told = list(islice(rows, num_rows))[:num_told]
            yield at, [_entry(token_id, row, most) for token_id, row in told]


def _entry(token_id: int, row: tuple[float, list[int], list[float]], count: int) -> TokenLogprobs:
    logprob, ids, top = row
    return TokenLogprobs(token_id, logprob, dict(zip(ids[:count], top[:count], strict=True)))


def score(
    stepper: Stepper, pieces: Mapping[int, Piece], wishes: Wishes
) -> tuple[StepLogits, list[Scores]]:
    """Run pieces of prompts by their index; return the logits to sample from, and the scores."""
    for cache in stepper.caches:
        cache.note_stream()
    scores: list[Scores] = []
    ends: dict[int, torch.Tensor] = {}
    for group in passes(pieces, stepper.chunk_sizes, _PASS_TOKENS):
        group = [group[at] for at in packing_order([part for _, part in group])]
        follow: list[int] = []
        spans: list[Span] = []
        for at, part in group:
            most, prompt = wishes[part.slot]
            told = prompt[part.num_past_tokens + 1 : part.num_tokens + 1]
            spans.append(Span(at, part.num_new_tokens, len(told), most))
            follow += [*told, *([0] * (part.num_new_tokens - len(told)))]
        keep = torch.arange(len(follow), device=stepper.device)
        logits = stepper.run_eagerly([part for _, part in group], keep=keep)
        most = max(span.num_logprobs for span in spans)
        scores.append(Scores(_told(logits, follow, most), spans))
        for (at, part), end in zip(group, accumulate(each.num_rows for each in spans), strict=True):
            if part.samples:
                ends[at] = logits[end - 1 : end].clone()  # The others are freed.
    return StepLogits(torch.cat([logits[:0], *ends.values()]), list(ends)), scores


def passes(
    pieces: Mapping[int, Piece], chunk_sizes: Collection[int], most_tokens: int
) -> Iterator[list[tuple[int, Piece]]]:
    """Divide pieces into passes of at most `most_tokens`; no part of a piece crosses a chunk."""
    group: list[tuple[int, Piece]] = []
    room = most_tokens
    for at, piece in pieces.items():
        past, end = piece.num_past_tokens, piece.num_tokens
        while past < end:
            stop = min(past + room, end, *[(past // each + 1) * each for each in chunk_sizes])
            group.append((at, piece.part(past, stop)))
            past, room = stop, room - (stop - past)
            if past < end or not room:
                yield group
                group, room = [], most_tokens
    if group:
        yield group


def _told(logits: torch.Tensor, follow: Sequence[int], most: int) -> SampledTokens:
    ids = torch.tensor(follow).to(logits.device, non_blocking=True)
    num_logits = logits.shape[1]  # An embedding may have more rows.
    found = []
    for at in range(0, len(follow), _ROWS):
        some = ids[at : at + _ROWS]
        known = some.clamp(max=num_logits - 1)
        best = with_logprobs(known, logits[at : at + _ROWS], min(most, num_logits))
        assert best.logprobs is not None
        logprobs = best.logprobs.masked_fill(some >= num_logits, -math.inf)
        found.append((some, logprobs, best.top_token_ids, best.top_logprobs))
    return SampledTokens(*map(torch.cat, zip(*found, strict=True)))


# ---- pending -------------------------------------------------------------------------------------


class PendingTokens:
    """Sampled tokens on their way to the host.

    By the place of a token in all `parts`, `num_logprobs` is the number of log-probabilities to
    report, and `histories` a list to append the token to. `order` sorts the result, if given.
    """

    def __init__(
        self,
        parts: Sequence[SampledTokens],
        num_logprobs: Mapping[int, int],
        histories: Mapping[int, list[int]],
        order: Sequence[int] | None = None,
        scores: Sequence[Scores] = (),
    ):
        self._order = order
        self._num_logprobs = num_logprobs
        self._histories = histories
        self._ready: Any = None
        self._parts, self._scores = parts, scores
        tokens = [part.token_ids for part in (*parts, *(each.tokens for each in scores))]
        if tokens and tokens[0].is_cuda:
            self._parts = [part.to_host() for part in parts]
            self._scores = [each._replace(tokens=each.tokens.to_host()) for each in scores]
            # Reading a tensor would also wait for later steps.
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready.record(torch.cuda.current_stream(tokens[0].device))

    @property
    def has_ended(self) -> bool:
        """Whether the copy to the host has ended, or failed. Never blocks, never raises."""
        try:
            return self._ready is None or self._ready.query()
        except RuntimeError:  # Errors of the device are raised by `wait`.
            return True

    def wait(self) -> None:
        """Wait for the copy to the host, raising the error of a failed step. May be repeated."""
        if self._ready is not None:
            self._ready.synchronize()

    def result(self) -> StepResult:
        """Wait, append tokens to their histories, and return them; once per step, in order."""
        self.wait()
        token_ids: list[int] = []
        logprobs: dict[int, TokenLogprobs] = {}
        for part in self._parts:
            start = len(token_ids)
            token_ids += part.token_ids.tolist()
            for at, row in enumerate(part.rows(), start):
                if at in self._num_logprobs:
                    logprobs[at] = _entry(token_ids[at], row, self._num_logprobs[at])
        scores: dict[int, list[TokenLogprobs]] = {}
        for at, entries in chain.from_iterable(each.entries() for each in self._scores):
            scores.setdefault(at, []).extend(entries)
        for at, history in self._histories.items():
            history.append(token_ids[at])
        order = range(len(token_ids)) if self._order is None else self._order
        told = [logprobs.get(at) for at in order]
        return StepResult([token_ids[at] for at in order], told, scores)


# ---- model runner --------------------------------------------------------------------------------

_LOG = logging.getLogger(__name__)
#: Attention backend where it can serve a layer; see `RowAttention`.
_PREFERRED_BACKEND = "flash3"


@dataclass(frozen=True)
class RunnerOptions:
    """Options of compilation and CUDA graphs.

    Attributes:
        compile_layers: Compile the model's layers. By default on CUDA.
        compile_backend: Backend of `torch.compile`.
        capture: Capture steps as CUDA graphs. By default on CUDA. On other devices the padded steps
            run without capture, for tests.
        max_graph_tokens: Largest captured step with prompts. Larger steps hide the launch time
            anyway.
        few_sizes: Capture fewer sizes of decode steps, which pad more: graphs take less memory.
        show_progress: Show a progress bar while warming up.
    """

    compile_layers: bool | None = None
    compile_backend: str = "inductor"
    capture: bool | None = None
    max_graph_tokens: int = 2048
    few_sizes: bool = False
    show_progress: bool = True


class ModelRunner:
    """Runs the engine's steps of one model over the rows of one cache, in order of submission.

    The model attends through this runner until `close`. Captured or warmed-up steps take one row of
    the cache for padding. `graph_bytes` is the device memory of the graphs after `warm_up`.
    `ConfigError` or `CapacityError` leave the model unchanged.
    """

    def __init__(
        self,
        model: Any,
        cache: KVCache,
        given: EngineOptions,
        calls: AttentionCalls | None = None,
        lockstep: Lockstep | None = None,
    ):
        self._model = model
        self._agree: Callable[[int], int] = int if lockstep is None else lockstep.group.max
        self._given = given
        self._options: RunnerOptions = given.runner_options or RunnerOptions()
        self._device = cache.device
        self._is_cuda = self._device.type == "cuda"
        self._is_closed = False
        self.graph_bytes = 0
        vocab_size = compat.num_logits(model)
        self.sampler = Sampler(given.max_num_seqs, vocab_size, self._device)
        asked = given.speculation
        self._max_drafted = 0 if asked is None else asked.num_speculative_tokens
        self._histories: dict[int, _History] = {}  # By slot, where it has logits processors.
        self._wanted_logprobs: dict[int, int] = {}  # By slot, where it wants some.
        # By slot, where it wants log-probabilities of its prompt: how many, and the prompt.
        self._scored: dict[int, tuple[int, Sequence[int]]] = {}
        check_free(model)
        self._settings = settings_of(model)  # Before layers are compiled.
        with contextlib.ExitStack() as undo:
            self.stepper = self._make_stepper(cache, calls)
            undo.callback(self.stepper.close)
            if not self.stepper.uses_operator:
                self.stepper.resume()
            if self._wants(self._options.capture):
                largest = min(self._options.max_graph_tokens, given.max_num_batched_tokens)
                head = None if lockstep is None else lockstep.head
                its: dict[str, Any] = {"agree": self._agree, "head": head}
                few, dtype = self._options.few_sizes, self.stepper.logits_dtype
                if not self.stepper.has_states:
                    its["max_drafted"] = self._max_drafted
                self.stepper.make_graphs(vocab_size, dtype, largest, few=few, **its)
                if self.stepper.has_states and self.stepper.mixed_graphs is None:
                    _LOG.info("layers keep states: steps with prompts are not captured")
            self._undo = undo.pop_all()
        self._places = places_of(model)

    def _wants(self, choice: bool | None) -> bool:
        return self._is_cuda if choice is None else choice

    def _make_stepper(self, cache: KVCache, calls: AttentionCalls | None) -> Stepper:
        options, max_num_seqs = self._options, self._given.max_num_seqs
        its: dict[str, Any] = {"attention_backend": self._given.attention_backend, "calls": calls}
        its["preferred_backend"] = _PREFERRED_BACKEND if self._wants(options.capture) else None
        if self._wants(options.compile_layers):
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
        self, slot: int, params: SamplingParams, prompt: Sequence[int], output: Sequence[int] = ()
    ) -> None:
        """Set the state of `slot` for a request that begins or resumes, with resolved `params`.

        The output is that before a preemption. Submitted steps are unaffected.
        """
        self.sampler.set_slot(slot, params, prompt, output)
        self._histories.pop(slot, None)
        if params.logits_processors:
            self._histories[slot] = (params, [*prompt, *output])
        self._wanted_logprobs.pop(slot, None)
        if params.logprobs is not None:
            self._wanted_logprobs[slot] = params.logprobs
        self._scored.pop(slot, None)
        if params.prompt_logprobs is not None:
            self._scored[slot] = (params.prompt_logprobs, prompt)

    def submit(self, pieces: Sequence[Piece]) -> PendingTokens:
        """Launch the pieces and sample; see `launch` and `sample`."""
        return self.sample(self.launch(pieces))

    @torch.no_grad()
    def launch(self, pieces: Sequence[Piece]) -> LaunchedStep:
        """Run the pieces, in one forward pass or one each if deterministic.

        Pieces of prompts whose log-probabilities are wanted have passes of their own, before the
        others.

        Never waits for the device. Keys and values are written, even if it raises: launching the
        same pieces again is harmless, unless layers keep states. Without `sample`, no slot has
        advanced, and the tokens on the device are lost.
        """
        if self._is_closed:
            raise ClosedError("this runner is closed; make a new one")
        count = len(pieces)
        scored = {}
        if self._scored:
            scored = {at: each for at, each in enumerate(pieces) if self._is_scored(each)}
        groups: list[Sequence[int]] = [range(count)]
        if self._given.deterministic:
            groups = [[at] for at in range(count)]
        elif scored:
            rest = [at for at in range(count) if at not in scored]
            groups = [list(scored), rest] if rest else [list(scored)]
        passes: list[StepLogits] = []
        scores: list[Scores] = []
        sampling: list[int] = []  # The pieces that sample, in the order of the passes.
        for indices in groups:
            if scored and indices[0] in scored:
                step, some = score(self.stepper, {at: scored[at] for at in indices}, self._scored)
                scores += some
                its = list(step.pieces)
            else:
                group = pieces if len(groups) == 1 else [pieces[at] for at in indices]
                step = self.stepper.run(group)
                its = [indices[at] for at in step.pieces]
            if its:
                passes.append(step)
                sampling += its
        order = None
        if sampling != sorted(sampling):
            order = sorted(range(len(sampling)), key=sampling.__getitem__)
        slots, guesses = [pieces[at].slot for at in sampling], None
        if self._max_drafted and any(each.num_drafted for each in pieces):
            left = {at: _guesses(pieces[at]) for at in {*sampling}}
            guesses = [left[at].pop() for at in sampling]
        return LaunchedStep(passes, slots, order, guesses, scores)

    @torch.no_grad()
    def sample(
        self, launched: LaunchedStep, masks: torch.Tensor | None = None, ended: Collection[int] = ()
    ) -> PendingTokens:
        """Sample the tokens of the step launched last. Never waits for the device.

        `masks`, `[slots, words] int32` in pinned memory, has a bit for each token that a slot may
        have. Logits processors need the tokens of all earlier steps, and are not called for `ended`
        slots. If it raises, nothing was sampled and no slot has advanced; `SlotError` names the one
        request at fault.
        """
        slots, order, start = launched.slots, launched.order, 0
        parts: list[SampledTokens] = []
        rows: list[int] = []  # In the order of `parts`, if they are sampled in rounds.
        if masks is not None:
            masks = masks.to(self._device, non_blocking=True)
        for step in launched.passes:
            end = start + len(step.pieces)
            its = None if masks is None else masks[start:end]
            if launched.guesses is None:
                parts.append(self._sample(step, slots[start:end], its, ended))
            else:
                asked = slots[start:end], its, ended, launched.guesses[start:end]
                for some, part in self._sample_in_rounds(step, *asked):
                    parts.append(part)
                    rows += [start + each for each in some]
            start = end
        if rows:
            places = {row: place for place, row in enumerate(rows)}
            order = [places[row] for row in order or range(len(rows))]
            slots = [slots[row] for row in rows]
        num_logprobs, histories, wanted = {}, {}, self._wanted_logprobs
        if wanted or self._histories:
            known = self._histories
            num_logprobs = {at: wanted[slot] for at, slot in enumerate(slots) if slot in wanted}
            histories = {at: known[slot][1] for at, slot in enumerate(slots) if slot in known}
        return PendingTokens(parts, num_logprobs, histories, order, launched.scores)

    def _is_scored(self, piece: Piece) -> bool:
        _, prompt = self._scored.get(piece.slot, (0, ()))
        return piece.num_past_tokens + 1 < len(prompt)

    def _sample(
        self,
        step: StepLogits,
        slots: Sequence[int],
        masks: torch.Tensor | None,
        ended: Collection[int],
        at: torch.Tensor | None = None,
    ) -> SampledTokens:
        histories = self._histories
        if ended and histories:
            histories = {slot: its for slot, its in histories.items() if slot not in ended}
        has_processors = not histories.keys().isdisjoint(slots)
        is_plain = not has_processors and masks is None and self.sampler.is_greedy(slots)
        if step.token_ids is not None and is_plain:
            # On CUDA they are copied to the host; here the next step would overwrite them.
            return SampledTokens(step.token_ids if self._is_cuda else step.token_ids.clone())
        if at is None:
            at = self._sent(slots)
        logits, processed = step.logits, None
        if has_processors:
            processed = _process(logits, slots, histories, self._agree)
        sampled = self.sampler.sample(logits, at, slots, processed, masks)
        # Without a token a request ends, after a further step that any token will do for.
        self.stepper.last_tokens.index_copy_(0, at, sampled.token_ids.clamp(min=0))
        return sampled

    def _sample_in_rounds(
        self,
        step: StepLogits,
        slots: Sequence[int],
        masks: torch.Tensor | None,
        ended: Collection[int],
        guesses: Sequence[int],
    ) -> Iterator[tuple[Sequence[int], SampledTokens]]:
        """Sample a slot's rows one after the other, as if the guesses before were right.

        A row after a wrong guess draws for the padding slot, so that each slot has counted the
        tokens that it keeps, and no others.
        """
        everything = range(len(slots))
        is_unguided = masks is None and self._histories.keys().isdisjoint(slots)
        if is_unguided and self.sampler.is_greedy(slots):
            yield everything, self._sample(step, slots, None, ended)
            return
        rounds: dict[int, list[int]] = {}
        number = -1
        for row in everything:  # Rows of a slot are neighbours.
            number = number + 1 if row and slots[row] == slots[row - 1] else 0
            rounds.setdefault(number, []).append(row)
        wanted = self._sent(guesses)
        tokens = torch.empty_like(wanted)
        is_right = torch.ones_like(wanted, dtype=torch.bool)
        for number, some in rounds.items():
            rows, its = self._sent(some), [slots[row] for row in some]
            at = self._sent(its)
            if number:
                before = rows - 1
                is_right[rows] = is_right[before] & (tokens[before] == wanted[before])
                at = torch.where(is_right[rows], at, self.sampler.max_num_seqs)
            logits = StepLogits(step.logits[rows], some)
            some_masks = None if masks is None else masks[rows]
            sampled = self._sample(logits, its, some_masks, ended, at)
            tokens[rows] = sampled.token_ids
            yield some, sampled

    def _sent(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self._device, non_blocking=True)

    # ---- start, and end -------------------------------------------------------------------

    def warm_up(self) -> None:
        """Compile, tune and capture everything before the first request.

        A model that cannot be captured is served without graphs. `CapacityError` if not even a
        short prompt fits the cache. Cost: for 8 billion parameters half a minute the first time.
        """
        options, dtype = self._options, self.stepper.logits_dtype
        self.graph_bytes = warm_up(
            self.stepper,
            self._given.max_num_batched_tokens,
            must_compile=bool(options.compile_layers),
            then=lambda: self.sampler.warm_up(dtype),
            show_progress=options.show_progress,
            agree=self._agree,
        )

    def pause(self) -> None:
        """Wait for the device, and restore the model's own code until `resume`. Idempotent."""
        if self._is_cuda:
            torch.cuda.synchronize(self._device)
        self.stepper.pause()

    def resume(self) -> None:
        """Serve the model again after `pause`; `is_current` must hold."""
        self.stepper.resume()
        self._places = places_of(self._model)

    def is_current(self) -> bool:
        """Whether only values of the model have changed since this runner was made."""
        if self._is_closed:
            return False
        return self._places == places_of(self._model) and self._settings == settings_of(self._model)

    def sleep(self, *, graphs: bool, copies: bool) -> None:
        """Wait for the device, and free workspaces, and `graphs`, until the next step.

        With `copies`, within `pause`, copies of adapters are freed, which moves the weights beside
        them. No slot is in use.
        """
        if self._is_cuda:
            torch.cuda.synchronize(self._device)
        self.sampler.sleep()
        moves_current = copies and self.is_current()  # Else `is_current` stays false.
        if graphs:
            self.stepper.drop_graphs(copies=copies)
        if moves_current:
            self._places = places_of(self._model)

    def close(self) -> None:
        """Detach the model and free everything. Idempotent."""
        self._is_closed = True
        self._undo.close()


# ---- making --------------------------------------------------------------------------------------

#: Fraction of the device's memory that the budget leaves free, for kernels that load later.
_SPARE_FRACTION = 0.02


def spare_bytes(device: torch.device, given: EngineOptions) -> int:
    """Return the memory of a device that budgets leave free; 0 on the host."""
    if device.type != "cuda":
        return 0
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    return int(total_bytes * max(_SPARE_FRACTION, 1.0 - (given.memory_fraction or 1.0)))


def make_runner(
    model: Any,
    rows: ServedRows,
    given: EngineOptions,
    weights: Weights | None = None,
    lockstep: Lockstep | None = None,
) -> ModelRunner:
    """Make an engine's runner and warm it up; `weights`, if given, takes the model's weights first.

    `deterministic` needs an "eager" runner. Layers are not compiled if a layer with states has to
    run once for each sequence. `ConfigError` if `runner` is unknown or does not fit the options.
    """
    kind, deterministic = given.runner, given.deterministic
    if kind == "auto":
        kind = "graphs" if rows.cache.device.type == "cuda" and not deterministic else "eager"
    if kind not in ("eager", "graphs"):
        raise ConfigError(f'runner={kind!r} is none of "auto", "eager" and "graphs"')
    if deterministic and kind != "eager":
        raise ConfigError('deterministic needs runner="eager": leave the runner out')
    options = given.runner_options or RunnerOptions()
    if not run_packed(model, rows.calls.states):
        options = replace(options, compile_layers=False)
    if kind == "eager":
        options = replace(options, compile_layers=False, capture=False)
    unmerge_disabled(model)
    with contextlib.ExitStack() as undo:
        if weights is not None:
            chosen = options.compile_layers
            weights.hold(joins=rows.cache.device.type == "cuda" if chosen is None else chosen)
            undo.callback(weights.close)
        given = replace(given, runner_options=options)
        runner = ModelRunner(model, rows.cache, given, rows.calls, lockstep)
        undo.callback(runner.close)
        runner.sampler.tells_processed = given.logprobs_mode == "processed_logprobs"
        if kind == "graphs":
            runner.warm_up()
        if rows.cache.device.type == "cuda":
            fit_budget(rows.cache.pool, spare_bytes(rows.cache.device, given))
        undo.pop_all()
    return runner if lockstep is None else lockstep.wrapped(runner)
