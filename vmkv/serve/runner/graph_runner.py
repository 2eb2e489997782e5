"""The fast runner: compiled layers, decode steps as CUDA graphs, no host wait but for the tokens.

A step in which every sequence has one token is a replay: one small copy to the device, one launch.
Any other step (prompts, or prompts and decoding together) is one packed forward pass through the
compiled layers. Both read the tokens sampled last from the device, and leave theirs there.

On a device without CUDA the same steps run without graphs and, by default, without a compiler.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...cache import KVCache
from ...errors import CapacityError, ClosedError, ConfigError
from ...hf import compat
from ...hf.forward import kept_logits
from ..params import SamplingParams
from ..sampler import SampledTokens, Sampler
from . import buffers, custom_op
from .base import Chunk, StepResult
from .compile import CompiledLayers
from .compile_cache import CompileCache
from .eager import PendingTokens
from .graphs import DecodeGraphs
from .host_tokens import HostTokens
from .row_attention import RowAttention

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunnerOptions:
    """How fast, and at what price at the start.

    Attributes:
        compile_layers: Compile the model's layers. By default on CUDA.
        compile_backend: Of `torch.compile`.
        capture: Capture decode steps as CUDA graphs. By default on CUDA.
        attention_backend: The kernel for rows; by default flash3 where it can serve a layer,
            which keeps a tile of every row resident for its over-read, or else what `select` takes.
        compile_cache: A folder that keeps what was compiled; None for torch's own temporary one.
        show_progress: A progress bar while warming up.
    """

    compile_layers: bool | None = None
    compile_backend: str = "inductor"
    capture: bool | None = None
    attention_backend: str | None = None
    compile_cache: Path | None = None
    show_progress: bool = True


class GraphRunner:
    """Runs steps of one model over the rows of one cache; see `Runner`.

    The model attends through this runner until `close`.

    Args:
        model: A transformers causal language model whose layers attend through transformers'
            attention interface.
        cache: Holds the model's layers, by number. One of its rows is taken for padding.
        max_num_seqs: How many slots there are.
        max_num_batched_tokens: The largest step.
        options: See there.

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
        options: RunnerOptions | None = None,
    ):
        self._model = model
        self._cache = cache
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._options = options or RunnerOptions()
        self._device = cache.device
        self._is_cuda = self._device.type == "cuda"
        if not cache.layers:
            raise ConfigError("the cache holds no layers yet: add the model's first")
        vocab_size = model.get_output_embeddings().weight.shape[0]
        compiled = self._is_cuda and self._wants(self._options.compile_layers)
        self.sampler = Sampler(max_num_seqs, vocab_size, self._device, compiled=compiled)
        self._host_tokens = HostTokens()
        self._wanted_logprobs: dict[int, int | None] = {}
        self._last_tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=self._device)
        # Four dimensions: transformers hands such a mask on as it is, and the kernels ignore it.
        self._mask = torch.empty((1, 1, 1, 1), dtype=torch.bool, device=self._device)
        self._attention = RowAttention(cache, self._options.attention_backend)
        self._graphs: DecodeGraphs | None = None
        self._layers: CompiledLayers | None = None
        self._is_closed = False
        with contextlib.ExitStack() as undo:
            self._scratch = cache.open(1)
            undo.callback(self._scratch.close)
            cache.grow([(self._scratch, 1)])
            self._before, ours, self._theirs = compat.attention_settings(model)
            custom_op.serve(model, self._attention)
            undo.callback(custom_op.withdraw, model)
            model.set_attn_implementation(_renamed(ours, custom_op.IMPLEMENTATION))
            undo.callback(model.set_attn_implementation, self._theirs)
            undo.callback(self._attention.close)
            self._layers = self._compiled_layers()
            if self._layers is not None:
                undo.callback(self._layers.close)
            if self._is_cuda and self._wants(self._options.capture):
                self._graphs = self._make_graphs(vocab_size)
            self._undo = undo.pop_all()

    def _wants(self, choice: bool | None) -> bool:
        return self._is_cuda if choice is None else choice

    def _compiled_layers(self) -> CompiledLayers | None:
        if not self._wants(self._options.compile_layers):
            return None
        try:
            return CompiledLayers(self._model, backend=self._options.compile_backend)
        except ConfigError as error:
            if self._options.compile_layers:
                raise
            _LOG.warning("%s", error)
            return None

    def _make_graphs(self, vocab_size: int) -> DecodeGraphs:
        heads = min(group.geometry.shape.num_k_heads for group in self._cache.groups)
        processors = torch.cuda.get_device_properties(self._device).multi_processor_count
        return DecodeGraphs(
            lambda token_ids, positions: self._forward(token_ids, positions, 0),
            self._attention,
            self._last_tokens,
            vocab_size=vocab_size,
            dtype=self._model.get_output_embeddings().weight.dtype,
            max_batch=self._max_num_seqs,
            max_tokens=self._cache.max_tokens,
            # A sequence occupies a processor per key head; kernels split below 0.8 of them all.
            split_below=int(0.8 * processors / heads) + 1,
            scratch=(self._max_num_seqs, self._scratch.row),
        )

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
        self._host_tokens.set_slot(slot, params, [*prompt_token_ids, *output_token_ids])
        self._wanted_logprobs[slot] = params.logprobs

    @torch.no_grad()
    def submit(self, chunks: Sequence[Chunk]) -> _InOrder:
        """See `Runner.submit`."""
        self._check_open()
        self._cache.note_stream()
        packed_order = buffers.order(chunks)
        packed = [chunks[at] for at in packed_order]
        sampling = [chunk.slot for chunk in packed if chunk.samples]
        if self._graphs is not None and packed and all(map(buffers.decodes, packed)):
            sampled = self._replay(packed, sampling)
        else:
            sampled = self._run(packed, sampling)
        samplers = [at for at in packed_order if chunks[at].samples]
        places = sorted(range(len(samplers)), key=samplers.__getitem__)
        wanted = [self._wanted_logprobs.get(slot) for slot in sampling]
        histories = [self._host_tokens.of(slot) for slot in sampling]
        return _InOrder(PendingTokens([sampled], wanted, histories), places)

    def _replay(self, chunks: Sequence[Chunk], sampling: Sequence[int]) -> SampledTokens:
        """A decode step, as a graph."""
        graphs = self._graphs
        assert graphs is not None  # Asked by the caller.
        key = graphs.key(len(chunks), max(chunk.num_tokens for chunk in chunks))
        scratch = (self._max_num_seqs, self._scratch.row)
        graphs.replay(key, buffers.decode_lines(chunks, key[0], scratch, self._device))
        if len(sampling) == len(chunks) and self._is_plain(sampling):
            return SampledTokens(graphs.token_ids[: len(chunks)])
        logits = graphs.logits[: len(chunks)]
        if len(sampling) < len(chunks):
            at = [at for at, chunk in enumerate(chunks) if chunk.samples]
            logits = logits[torch.tensor(at).to(self._device, non_blocking=True)]
        slots = torch.tensor(sampling, dtype=torch.int64).to(self._device, non_blocking=True)
        return self._sample(logits, slots, sampling)

    def _run(self, chunks: Sequence[Chunk], sampling: Sequence[int]) -> SampledTokens:
        """Any step, as one packed forward pass."""
        if not chunks:
            return SampledTokens(self._last_tokens[:0])
        step = buffers.pack(chunks, self._attention.row_tokens, self._device)
        token_ids, num_decode = step.token_ids, step.decode_slots.shape[0]
        if num_decode:
            told = token_ids[:num_decode]
            said = self._last_tokens[step.decode_slots]
            token_ids[:num_decode] = torch.where(told < 0, said, told)
        self._attention.step = step.parts
        try:
            logits = self._forward(token_ids, step.positions, step.ends)
        finally:
            self._attention.step = None
        if not sampling:
            return SampledTokens(self._last_tokens[:0])
        return self._sample(logits, step.slots, sampling)

    def _sample(
        self, logits: torch.Tensor, slots: torch.Tensor, sampling: Sequence[int]
    ) -> SampledTokens:
        if not sampling:
            return SampledTokens(self._last_tokens[:0])
        processed = self._host_tokens.process(logits, sampling)
        sampled = self.sampler.sample(processed, slots, sampling)
        self._last_tokens.index_copy_(0, slots, sampled.token_ids)
        return sampled

    def _is_plain(self, sampling: Sequence[int]) -> bool:
        return self.sampler.is_greedy(sampling) and not self._host_tokens.concerns(sampling)

    def _forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor | int
    ) -> torch.Tensor:
        """Logits `[kept, vocabulary]` of packed tokens `[T]`."""
        output = self._model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            attention_mask=self._mask,
            use_cache=False,
            logits_to_keep=keep,
            return_dict=True,
        )
        return kept_logits(output, None if isinstance(keep, int) else keep)

    # ---- start, and end -------------------------------------------------------------------

    def warm_up(self) -> None:
        """Compile, tune and capture everything, so that no request waits for it.

        A model that cannot be captured is served without graphs.

        Raises:
            CapacityError: Not even a short prompt fits the cache.

        Cost: with an 8-billion-parameter model half a minute the first time, and some seconds
            once `compile_cache` holds what was compiled.
        """
        self._check_open()
        keys = [] if self._graphs is None else list(self._graphs.keys())
        cache = CompileCache(self._options.compile_cache, self._model.config)
        cache.load()
        with torch.no_grad(), _progress(len(keys) + 2, self._options.show_progress) as bar:
            bar.set_description("prompts")
            self._warm_up_prompts()
            bar.update()
            bar.set_description("one token")
            token = Chunk(self._max_num_seqs, self._scratch.row, 0, 1, [0], samples=True)
            self._run([token], [])
            self.sampler.warm_up(self._model.get_output_embeddings().weight.dtype)
            bar.update()
            bar.set_description("graphs")
            for key in keys:
                if self._graphs is None:
                    break
                self._capture(key, is_first=key == keys[0])
                bar.update()
            if self._is_cuda:
                torch.cuda.synchronize(self._device)
        cache.save()

    def _warm_up_prompts(self) -> None:
        """The largest step that fits, and then one with chunks of every kind."""
        num_tokens = min(self._max_num_batched_tokens, self._cache.max_tokens)
        while True:
            sequence = self._cache.open()
            try:
                self._cache.grow([(sequence, num_tokens)])
                self._warm_up_in(sequence.row, num_tokens)
                break
            except CapacityError:
                if num_tokens < 2:
                    raise
                num_tokens //= 2
            finally:
                sequence.close()
        self._cache.trim()

    def _warm_up_in(self, row: int, num_tokens: int) -> None:
        slot, ids = self._max_num_seqs, [0] * num_tokens
        first = [Chunk(slot, row, 0, num_tokens, ids, samples=True)]
        try:
            self._run(first, [])
        except (CapacityError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            if self._layers is None or self._options.compile_layers:
                raise
            _LOG.warning("this model's layers cannot be compiled, and run as they are: %s", error)
            self._layers.close()
            self._layers = None
            self._run(first, [])
        half = num_tokens // 2
        if half > 1:
            later = Chunk(slot, row, half, num_tokens - half, ids[half:], samples=True)
            token = Chunk(slot, self._scratch.row, 0, 1, [0], samples=True)
            self._run([token, later], [])

    def _capture(self, key: tuple[int, int], *, is_first: bool) -> None:
        assert self._graphs is not None  # Asked by the caller.
        try:
            if is_first or key[0] == 1:
                self._graphs.warm_up(key)
            self._graphs.capture(key)
        except (RuntimeError, ConfigError) as error:
            if not is_first:
                raise
            _LOG.warning("this model's decode steps cannot be captured as CUDA graphs: %s", error)
            self._graphs = None

    def close(self) -> None:
        """See `Runner.close`."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._is_cuda:
            torch.cuda.synchronize(self._device)
        if self._graphs is not None:
            self._graphs.close()
        self._undo.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("this runner is closed; make a new one")


class _InOrder:
    """A pending step whose chunks were packed in another order than they came."""

    def __init__(self, pending: PendingTokens, places: Sequence[int]):
        self._pending = pending
        self._places = places

    def result(self) -> StepResult:
        result = self._pending.result()
        return StepResult(
            [result.token_ids[at] for at in self._places],
            [result.logprobs[at] for at in self._places],
        )


def _renamed(setting: dict[str, str] | str, name: str) -> dict[str, str] | str:
    return name if isinstance(setting, str) else dict.fromkeys(setting, name)


@contextlib.contextmanager
def _progress(total: int, is_shown: bool) -> Iterator[Any]:
    from tqdm import tqdm  # type: ignore[import-untyped]  # comes with transformers

    with tqdm(total=total, disable=not is_shown, leave=False) as bar:
        yield bar
