"""The fast runner: compiled layers, decode steps as CUDA graphs, no host wait but for the tokens.

A step in which every sequence has one token, and one with prompts that fits a bucket, is a replay:
one small copy to the device, one launch. A larger step is one packed forward pass through the
compiled layers, which the device takes longer for than the host. All read the tokens sampled last
from the device, and leave theirs there.

On a device without CUDA the same steps run without graphs and, by default, without a compiler.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...cache import KVCache
from ...errors import CapacityError, ClosedError, ConfigError
from ...hf import compat, vocabulary
from ...hf.forward import kept_logits
from ...units import GiB
from ..params import SamplingParams
from ..sampler import SampledTokens, Sampler
from . import buffers, custom_op
from .base import Chunk, StepResult
from .compile import CompiledLayers
from .compile_cache import CompileCache
from .decode_graphs import DecodeGraphs
from .eager import PendingTokens
from .graphs import GraphSpace, Scratch, StepGraphs
from .host_tokens import HostTokens
from .mixed_graphs import MixedGraphs
from .row_attention import RowAttention

_LOG = logging.getLogger(__name__)


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
        attention_backend: The kernel for rows; by default flash3 where it can serve a layer,
            which keeps a tile of every row resident for its over-read, or else what `select` takes.
        compile_cache: A folder that keeps what was compiled; None for torch's own temporary one.
        show_progress: A progress bar while warming up.
        agree: The largest of all ranks' values of a number; of one process, its own.
    """

    compile_layers: bool | None = None
    compile_backend: str = "inductor"
    capture: bool | None = None
    max_graph_tokens: int = 2048
    attention_backend: str | None = None
    compile_cache: Path | None = None
    show_progress: bool = True
    agree: Callable[[int], int] = int


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

    Attributes:
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
        vocab_size = vocabulary.num_logits(model)
        compiled = self._is_cuda and self._wants(self._options.compile_layers)
        self.sampler = Sampler(max_num_seqs, vocab_size, self._device, compiled=compiled)
        self._host_tokens = HostTokens()
        self._wanted_logprobs: dict[int, int | None] = {}
        self._last_tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=self._device)
        # Four dimensions: transformers hands such a mask on as it is, and the kernels ignore it.
        self._mask = torch.empty((1, 1, 1, 1), dtype=torch.bool, device=self._device)
        self._attention = RowAttention(cache, self._options.attention_backend)
        self._decode_graphs: DecodeGraphs | None = None
        self._mixed_graphs: MixedGraphs | None = None
        self._layers: CompiledLayers | None = None
        self.graph_bytes = 0
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
            if self._wants(self._options.capture):
                self._make_graphs(vocab_size)
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

    def _make_graphs(self, vocab_size: int) -> None:
        space = self._space = GraphSpace(
            self._forward,
            self._attention,
            self._last_tokens,
            vocab_size=vocab_size,
            dtype=self._model.get_output_embeddings().weight.dtype,
            max_num_seqs=self._max_num_seqs,
            max_tokens=self._cache.max_tokens,
            scratch=Scratch(self._max_num_seqs, self._scratch.row),
            agree=self._options.agree,
        )
        heads = min(group.geometry.shape.num_k_heads for group in self._cache.groups)
        processors = 1
        if self._is_cuda:
            processors = torch.cuda.get_device_properties(self._device).multi_processor_count
        # A sequence occupies a processor per key head; kernels split below 0.8 of them all.
        self._decode_graphs = DecodeGraphs(space, int(0.8 * processors / heads) + 1)
        largest = min(self._options.max_graph_tokens, self._max_num_batched_tokens)
        if largest > 1:
            self._mixed_graphs = MixedGraphs(space, largest, processors)

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
        sampled = self._replay(packed, sampling)
        if sampled is None:
            sampled = self._run(packed, sampling)
        samplers = [at for at in packed_order if chunks[at].samples]
        places = sorted(range(len(samplers)), key=samplers.__getitem__)
        wanted = [self._wanted_logprobs.get(slot) for slot in sampling]
        histories = [self._host_tokens.of(slot) for slot in sampling]
        return _InOrder(PendingTokens([sampled], wanted, histories), places)

    def _replay(self, chunks: Sequence[Chunk], sampling: Sequence[int]) -> SampledTokens | None:
        """A step as a graph; None where it has none."""
        decode, mixed = self._decode_graphs, self._mixed_graphs
        if decode is not None and chunks and all(map(buffers.decodes, chunks)):
            width = decode.key(len(chunks), max(chunk.num_tokens for chunk in chunks))
            decode.replay(width, decode.fill(width, chunks))
            kept = [at for at, chunk in enumerate(chunks) if chunk.samples]
        elif mixed is not None and (bucket := mixed.key(chunks)) is not None:
            mixed.replay(bucket, mixed.fill(bucket, chunks))
            kept = list(range(len(sampling)))
        else:
            return None
        return self._taken(kept, sampling)

    def _taken(self, kept: Sequence[int], sampling: Sequence[int]) -> SampledTokens:
        """What to make of the logits at `kept` that a graph has left."""
        space = self._space
        count = len(kept)
        is_dense = not kept or kept[-1] == count - 1
        if is_dense and self._is_plain(sampling):
            token_ids = space.token_ids[:count]
            # From the device they are copied; here the next step would overwrite them.
            return SampledTokens(token_ids if self._is_cuda else token_ids.clone())
        logits = space.logits[:count]
        if not is_dense:
            logits = space.logits[torch.tensor(kept).to(self._device, non_blocking=True)]
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
        self, token_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor | None
    ) -> torch.Tensor:
        """Logits `[kept, vocabulary]` of packed tokens `[T]`; of all of them by default."""
        output = self._model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            attention_mask=self._mask,
            use_cache=False,
            logits_to_keep=0 if keep is None else keep,
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
        cache = CompileCache(self._options.compile_cache, self._model.config)
        cache.load()
        kinds: list[StepGraphs[Any]] = [
            each for each in (self._mixed_graphs, self._decode_graphs) if each is not None
        ]
        total = 2 + sum(len(each.keys()) for each in kinds)
        with torch.no_grad(), _progress(total, self._options.show_progress) as bar:
            bar.set_description("prompts")
            self._warm_up_prompts()
            bar.update()
            bar.set_description("one token")
            token = Chunk(self._max_num_seqs, self._scratch.row, 0, 1, [0], samples=True)
            self._run([token], [])
            self.sampler.warm_up(self._model.get_output_embeddings().weight.dtype)
            bar.update()
            bar.set_description("graphs")
            self._capture(kinds, bar.update)
        cache.save()

    def _capture(self, kinds: Sequence[StepGraphs[Any]], captured: Callable[[], object]) -> None:
        """Capture every graph, those with most tokens first; kinds that cannot be are dropped."""
        start_s, free_bytes = time.perf_counter(), self._free_bytes()
        for graphs in kinds:
            failure: Exception | None = None
            try:
                graphs.capture_all(captured)
            except (RuntimeError, ConfigError) as error:
                if graphs.captured:
                    raise
                failure = error
            if self._options.agree(int(failure is not None)):
                _LOG.warning(
                    "%s cannot be captured as CUDA graphs: %s",
                    graphs.name,
                    failure or "another rank cannot",
                )
                graphs.close()
                if graphs is self._mixed_graphs:
                    self._mixed_graphs = None
                else:
                    self._decode_graphs = None
        if self._is_cuda:
            torch.cuda.synchronize(self._device)
        self.graph_bytes = max(0, free_bytes - self._free_bytes())
        _LOG.info(
            "captured %d graphs in %.1f s; they hold %.2f GiB",
            sum(len(each.captured) for each in kinds),
            time.perf_counter() - start_s,
            self.graph_bytes / GiB,
        )

    def _free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0] if self._is_cuda else 0

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

    def close(self) -> None:
        """See `Runner.close`."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._is_cuda:
            torch.cuda.synchronize(self._device)
        for graphs in (self._mixed_graphs, self._decode_graphs):
            if graphs is not None:
                graphs.close()
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
