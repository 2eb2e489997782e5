"""Steps of one model: pieces in, logits out.

A step is one packed forward pass, or the replay of one that was captured. Whoever has a stepper
grows the rows before a step and chooses the tokens after it; `last_tokens` is where tokens go from
one step to the next on the device.

Layers run as they are, and are handed the step as a keyword by an attention implementation that
passes it on (`vmkv.hf.attention`); or compiled, and find it through an operator (`operator.py`).

Captures come ahead of all steps (`warm_up.py`), or where they pay: a size that comes again and
again is captured the third time.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..core.cache import KVCache
from ..errors import CapacityError, ConfigError, VMKVError
from . import operator
from .compiled_layers import CompiledLayers
from .decode_graphs import BatchGraphs, DecodeGraphs
from .graphs import GraphSpace, Key, Scratch, StepGraphs
from .logits import HeadInParts, StepLogits
from .mixed_graphs import MixedGraphs
from .model_guard import PACKED, ModelGuard, has_users
from .piece import Piece, pack, packing_order
from .row_attention import RowAttention, row_capacities

_LOG = logging.getLogger(__name__)
#: How often a size runs eagerly before it is captured, which takes about as long as that saves.
_EAGER_RUNS = 2


class Stepper:
    """Runs steps of one model over the rows of its caches, until `close`.

    Args:
        model: A transformers causal language model that has proven itself. Unless its layers are
            compiled, it attends through "vmkv", which hands `vmkv_batch` on.
        caches: One for each device of the model.
        num_slots: Pieces of a step at most.
        attention_backend: The kernel for rows; see `RowAttention`.
        preferred_backend: Likewise.
        compile_with: Compile the layers with this backend of `torch.compile`; None for not at all.
        layers: Layers that are compiled already, for several steppers in turn: steps run within
            `attending`, and between them the model is as before.
        calls: The layers whose attention the model calls in each pass, in ascending order, each as
            often as its proof found; by default each layer of the caches once.

    Attributes:
        model: See above.
        caches: Likewise.
        device: Where its tokens go.
        uses_operator: Whether the stepper makes the model attend by itself.
        calls: See above; None to take those of the next pass.
        guard: Whether the model is what it was when the stepper was made.
        last_tokens: `[num_slots + 1] int64`, the token that was chosen last in each slot.
        decode_graphs: Captured steps of one token each; None where there are none.
        mixed_graphs: Captured steps with prompts; likewise.

    Raises:
        ConfigError: A cache has no layers, or the layers cannot be compiled, or another stepper
            runs them compiled, or with `compile_with` anybody attends through the model already.
            The model is as before.
    """

    def __init__(
        self,
        model: Any,
        caches: Sequence[KVCache],
        num_slots: int,
        *,
        attention_backend: str | None = None,
        preferred_backend: str | None = None,
        compile_with: str | None = None,
        layers: CompiledLayers | None = None,
        calls: tuple[int, ...] | None = None,
    ):
        if not all(cache.layers for cache in caches):
            raise ConfigError("the cache holds no layers yet: add the model's first")
        self.model = model
        self.caches = list(caches)
        self.device: torch.device = model.get_input_embeddings().weight.device
        self._is_cuda = self.device.type == "cuda"
        self.num_slots = num_slots
        self.last_tokens = torch.zeros(num_slots + 1, dtype=torch.int64, device=self.device)
        self.calls: tuple[int, ...] | None = calls
        if calls is None:
            self.calls = tuple(sorted(layer for cache in caches for layer in cache.layers))
        self._attention = RowAttention(caches, attention_backend, preferred_backend)
        # Four dimensions: transformers hands such a mask on as it is, and ours ignores it.
        self._mask = torch.empty((1, 1, 1, 1), dtype=torch.bool, device=self.device)
        self.uses_operator = compile_with is not None or layers is not None
        self._keywords: dict[str, Any] = {}
        self._layers: CompiledLayers | None = None
        self.decode_graphs: DecodeGraphs | None = None
        self.mixed_graphs: MixedGraphs | None = None
        self.scratch: Scratch | None = None
        self._space: GraphSpace | None = None
        # Where steps are captured when it pays: how often each size has come.
        self._num_runs: Counter[tuple[int, int]] | None = None
        self._uncapturable: set[tuple[int, int]] = set()
        self._logits_like: tuple[int, torch.dtype] | None = None
        with contextlib.ExitStack() as undo:
            undo.callback(self._attention.close)
            if not self.uses_operator:
                self._mask._vmkv_placeholder = True  # type: ignore[attr-defined]
                self._keywords["vmkv_batch"] = _ByKeyword(self._attention)
            elif compile_with is not None:
                if has_users(model):
                    raise ConfigError(
                        "this model is served already, and its layers cannot be compiled "
                        "meanwhile: close what serves it first, or leave compile_layers out"
                    )
                undo.enter_context(operator.attending(model, self._attention))
                self._layers = undo.enter_context(_compiled(model, compile_with))
            name = operator.IMPLEMENTATION if self.uses_operator else PACKED
            self.guard = ModelGuard(model, name)
            self._undo = undo.pop_all()

    @contextlib.contextmanager
    def attending(self, layers: CompiledLayers) -> Iterator[None]:
        """While this lasts, the model runs compiled, over this stepper's rows.

        Args:
            layers: What the stepper was made with.

        Raises:
            ConfigError: Another stepper runs the layers. The model is as before.
        """
        with operator.attending(self.model, self._attention), layers.in_place():
            yield

    # ---- steps ----------------------------------------------------------------------------

    @torch.no_grad()
    def run(
        self, pieces: Sequence[Piece], rows_elsewhere: Sequence[Sequence[int]] = ()
    ) -> StepLogits:
        """Launch a step. Never waits for the device.

        Args:
            pieces: Of different slots and rows, each grown; in any order.
            rows_elsewhere: For each cache but the first, the rows of the pieces there.

        Raises:
            ConfigError: The model has changed since the stepper was made: how it attends, its mode,
                its type or device, or where the parameters of a captured step lie. Nothing of the
                step counts. Once the model is what it was, steps run again.
            OutOfPagesError: There is no memory for what a kernel fetches past the rows' ends.
            Exception: What the model raises. Keys and values of the new tokens may have been
                written; the same step again writes the same.
        """
        for cache in self.caches:
            cache.note_stream()
        if not pieces:
            return StepLogits(torch.empty((0, 0), device=self.device), [])
        order = packing_order(pieces)
        packed = [pieces[at] for at in order]
        sampling = [at for at in order if pieces[at].samples]
        if all(piece.decodes for piece in packed):
            step = self._run_captured_decode(packed, sampling)
            if step is not None:
                return step
        elif self.mixed_graphs is not None:
            mixed_bucket = self.mixed_graphs.key(packed)
            if mixed_bucket is not None:
                integers = self.mixed_graphs.fill(mixed_bucket, packed)
                self._replay(self.mixed_graphs, mixed_bucket, integers)
                return self._replayed(range(len(sampling)), sampling)
        elsewhere = [[rows[at] for at in order] for rows in rows_elsewhere]
        return StepLogits(self.run_eagerly(packed, elsewhere), sampling)

    def _replay(self, graphs: StepGraphs[Key], key: Key, integers: torch.Tensor) -> None:
        self.guard.check(is_fixed=True)
        graphs.replay(key, integers)

    def _replayed(self, kept: Sequence[int], sampling: Sequence[int]) -> StepLogits:
        """The logits at `kept` that a graph has left."""
        space = self._space
        assert space is not None  # Graphs have one.
        count = len(kept)
        if not count or kept[-1] == count - 1:
            return StepLogits(space.logits[:count], sampling, space.token_ids[:count], space.head)
        at = torch.tensor(kept).to(self.device, non_blocking=True)
        return StepLogits(space.logits[at], sampling, head=space.head)

    def run_eagerly(
        self,
        packed: Sequence[Piece],
        rows_elsewhere: Sequence[Sequence[int]] = (),
        keep: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Any step, as one forward pass; logits `[n, vocabulary]`.

        Args:
            packed: Pieces in the order that `packing_order` gives.
            rows_elsewhere: See `run`, as for what is raised.
            keep: Which of the packed tokens' logits are wanted; by default those of the last tokens
                of the pieces that sample.
        """
        first = self.caches[0]
        step = pack(packed, row_capacities(first), self.device)
        token_ids, num_decode = step.token_ids, step.decode_slots.shape[0]
        if num_decode:
            told = token_ids[:num_decode]
            last = self.last_tokens[step.decode_slots]
            token_ids[:num_decode] = torch.where(told < 0, last, told)
        steps = {self.device: step.parts}
        if first.device != self.device:
            steps[first.device] = pack(packed, row_capacities(first), first.device).parts
        for cache, rows in zip(self.caches[1:], rows_elsewhere, strict=True):
            there = [piece._replace(row=row) for piece, row in zip(packed, rows, strict=True)]
            steps[cache.device] = pack(there, row_capacities(cache), cache.device).parts
        self._attention.steps = steps
        try:
            kept = step.ends if keep is None else torch.tensor(keep, device=self.device)
            logits = self._forward(token_ids, step.positions, kept)
        finally:
            self._attention.steps = None
        self._logits_like = (logits.shape[1], logits.dtype)
        return logits

    def _forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor | None
    ) -> torch.Tensor:
        """Logits `[kept, vocabulary]` of packed tokens `[T]`; of all of them by default.

        Raises:
            ConfigError: The model has changed, or it did not attend as its proof found.
        """
        self.guard.check(is_fixed=self.uses_operator)
        called = self._attention.called
        called.clear()
        try:
            output = self.model(
                input_ids=token_ids[None],
                position_ids=positions[None],
                attention_mask=self._mask,
                use_cache=False,
                logits_to_keep=0 if keep is None else keep,
                return_dict=True,
                **self._keywords,
            )
        except VMKVError:
            raise
        except Exception as error:
            change = self.guard.change()
            if change is None:
                raise
            raise ConfigError(change) from error
        calls = tuple(sorted(called))
        if self.calls is None:
            self.calls = calls
        elif calls != self.calls:
            raise ConfigError(self.guard.change() or _other_calls(calls, self.calls))
        return kept_logits(output, keep)

    # ---- captures -------------------------------------------------------------------------

    def make_graphs(
        self,
        vocab_size: int,
        dtype: torch.dtype,
        max_mixed_tokens: int,
        *,
        few: bool = False,
        agree: Callable[[int], int] = int,
        head: HeadInParts | None = None,
    ) -> None:
        """Prepare for captured steps; on the host the same padded steps run as they are.

        Args:
            vocab_size: Columns of the logits.
            dtype: Theirs.
            max_mixed_tokens: The largest step with prompts that is captured.
            few: Have few sizes of decode steps, because each is captured when it is wanted.
            agree: See `GraphSpace`.
            head: Likewise.

        Raises:
            CapacityError: No row, or no page, is left for padding.
        """
        scratch = self.open_scratch()
        space = self._space = self._graph_space(vocab_size, dtype, scratch, agree, head=head)
        self.decode_graphs = DecodeGraphs(space, self._split_below, few=few)
        if max_mixed_tokens > 1:
            self.mixed_graphs = MixedGraphs(space, max_mixed_tokens, self._num_processors)

    def make_batch_graphs(
        self, vocab_size: int, dtype: torch.dtype, stream: torch.cuda.Stream | None = None
    ) -> BatchGraphs:
        """Prepare for captured steps in which the rows 0, 1, … of all slots decode; see there.

        Whoever asks has them: runs them, beside `run`, and closes them before the stepper. They
        hold the stepper, and it does not hold them.

        Args:
            vocab_size: Columns of the logits.
            dtype: Theirs.
            stream: See `GraphSpace`.
        """
        no_padding = Scratch(self.num_slots, 0)  # Nobody asks for it.
        space = self._graph_space(vocab_size, dtype, no_padding, stream=stream)
        return BatchGraphs(space, self._split_below)

    def _graph_space(
        self,
        vocab_size: int,
        dtype: torch.dtype,
        scratch: Scratch,
        agree: Callable[[int], int] = int,
        stream: torch.cuda.Stream | None = None,
        head: HeadInParts | None = None,
    ) -> GraphSpace:
        return GraphSpace(
            self._forward,
            self._attention,
            self.caches[0],
            self.last_tokens,
            vocab_size=vocab_size,
            dtype=dtype,
            max_num_seqs=self.num_slots,
            scratch=scratch,
            agree=agree,
            stream=stream,
            head=head,
        )

    @property
    def _num_processors(self) -> int:
        if not self._is_cuda:
            return 1
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count)

    @property
    def _split_below(self) -> int:
        """How many sequences keep the device busy without being split."""
        heads = min(group.geometry.shape.num_k_heads for group in self.caches[0].groups)
        # A sequence occupies a processor per key head; kernels split below 0.8 of them all.
        return int(0.8 * self._num_processors / heads) + 1

    def open_scratch(self) -> Scratch:
        """The row that padding works on, which holds one token. Opened once.

        Raises:
            CapacityError: No row, or no page, is left.
        """
        if self.scratch is None:
            cache = self.caches[0]
            sequence = cache.open(1)
            self._undo.callback(sequence.close)
            cache.grow([(sequence, 1)])
            self.scratch = Scratch(self.num_slots, sequence.row)
        return self.scratch

    @property
    def can_capture(self) -> bool:
        """Whether steps may be captured, as far as is known without trying.

        Not where somebody hooked into the model is to be called in every step.
        """
        return (
            self._is_cuda
            and [cache.device for cache in self.caches] == [self.device]
            and not torch.is_autocast_enabled("cuda")
            and not has_hooks(self.model)
        )

    def capture_where_it_pays(self) -> None:
        """Have decode steps captured that come again and again, where `can_capture`.

        For a model whose steps never wait for the device: a capture that fails leaves torch's
        allocator as if it went on.
        """
        if self.can_capture:
            self._num_runs = Counter()

    def _run_captured_decode(
        self, packed: Sequence[Piece], sampling: Sequence[int]
    ) -> StepLogits | None:
        """A step in which all decode, as a graph; None where there is none (yet)."""
        if self.decode_graphs is None and self._num_runs is not None:
            self._make_graphs_late()
        graphs = self.decode_graphs
        if graphs is None:
            return None
        bucket = graphs.key(len(packed), max(piece.num_tokens for piece in packed))
        if self._num_runs is None or bucket in graphs.captured:
            self._replay(graphs, bucket, graphs.fill(bucket, packed))
        elif not self._captured_by_now(graphs, bucket, packed, self._num_runs):
            return None
        kept = [at for at, piece in enumerate(packed) if piece.samples]
        return self._replayed(kept, sampling)

    def _make_graphs_late(self) -> None:
        """Once a step has shown what logits look like; not at all without room for padding."""
        if self._logits_like is not None:
            try:
                self.make_graphs(*self._logits_like, 0, few=True)
            except CapacityError:
                self._num_runs = None

    def _captured_by_now(
        self,
        graphs: DecodeGraphs,
        bucket: tuple[int, int],
        packed: Sequence[Piece],
        num_runs: Counter[tuple[int, int]],
    ) -> bool:
        """Capture a step that has no graph yet and replay it, if it has come often enough.

        False where it is to run eagerly: the first times, and for good where capturing fails.
        """
        num_runs[bucket] += 1
        if num_runs[bucket] <= _EAGER_RUNS or bucket in self._uncapturable:
            return False
        try:
            graphs.capture(bucket)
        except Exception as error:  # noqa: BLE001  # eagerly it has run, and goes on to
            _LOG.info("%s cannot be captured as CUDA graphs: %s", graphs.name, error)
            self._uncapturable.add(bucket)
            return False
        self._replay(graphs, bucket, graphs.fill(bucket, packed))
        return True

    def run_layers_plainly(self) -> bool:
        """Give up compiling the layers; whether they were compiled until now."""
        if self._layers is None:
            return False
        self._layers.close()
        self._layers = None
        return True

    # ---- end ------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for the device, drop the graphs, and let the model run as before. Idempotent."""
        if self._is_cuda:
            torch.cuda.synchronize(self.device)
        for graphs in (self.mixed_graphs, self.decode_graphs):
            if graphs is not None:
                graphs.close()
        self.mixed_graphs = self.decode_graphs = self._space = None
        self._undo.close()


def has_hooks(model: torch.nn.Module) -> bool:
    """Whether somebody hooked into a module is to be called in every step."""
    return any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())


def _other_calls(called: Sequence[int], proven: Sequence[int]) -> str:
    now, before = Counter(called), Counter(proven)
    layer = next(each for each in sorted(now | before) if now[each] != before[each])
    return (
        f"in a step, layer {layer} of the model attended {now[layer]} times instead of "
        f"{before[layer]}: its attention or its code has been changed; undo that, or close the "
        "engine or cache that serves the model and make it anew"
    )


@contextlib.contextmanager
def _compiled(model: Any, backend: str) -> Iterator[CompiledLayers]:
    """The layers compiled; a generator, which ends with its stepper also where nobody closes it."""
    layers = CompiledLayers(model, backend=backend)
    try:
        yield layers
    finally:
        layers.close()


class _ByKeyword:
    """A step as `vmkv_batch` of layers that run as they are."""

    def __init__(self, attention: RowAttention):
        self._attention = attention

    def attend(self, module: Any, *tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        """See `RowAttention.attend`; masks and biases the model has proven not to have."""
        for name in ("mask", "bias"):
            options.pop(name, None)
        return self._attention.attend(int(module.layer_idx), *tensors, **options)


def kept_logits(output: Any, keep: torch.Tensor | None) -> torch.Tensor:
    """Logits `[kept, vocabulary]` of a packed pass, whether or not the model can keep but those.

    Args:
        output: What the model returned.
        keep: Which tokens' were asked for; None for all.
    """
    logits: torch.Tensor = output.logits[0]
    return logits if keep is None or logits.shape[0] == keep.shape[0] else logits[keep]
