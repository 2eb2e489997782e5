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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...cache import KVCache
from ...errors import ClosedError, ConfigError
from ...hf import vocabulary
from ...hf.attention import attending_in_place
from ...step import Piece, Stepper
from ...step.logits import HeadInParts, StepLogits
from ...step.operator import check_free
from ...step.warm_up import warm_up
from ..params import SamplingParams
from ..sampler import SampledTokens, Sampler
from .host_tokens import HostTokens
from .pending import PendingTokens

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
