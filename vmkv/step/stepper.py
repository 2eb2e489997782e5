"""Steps of one model: pieces in, logits out.

A step is one packed forward pass, or the replay of a captured one. The caller grows the rows before
a step and chooses the tokens after it; `last_tokens` keeps tokens on the device from one step to
the next.

Layers find the step through a context variable (`PackedPass`): eager ones in their attention
implementation (`vmkv.hf.attention`), compiled ones in an operator (`row_attention.py`). Graphs are
captured in advance (`warm_up.py`), or when a size comes for the third time
(`capture_where_it_pays`).

See DESIGN.md, Note [One stepper].
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn import Linear
from torch.nn.functional import linear

from ..core.cache import KVCache
from ..errors import CapacityError, ConfigError, VMKVError
from ..units import MiB, div_ceil
from . import row_attention
from .cache_argument import cache_argument
from .compiled_layers import CompiledLayers
from .graphs import DecodeGraphs, GraphSpace, Scratch
from .latents import expansions, handing_latents
from .mixed_graphs import DRAFT_ROWS_MAX, MixedGraphs
from .model_guard import PACKED, ModelGuard, attending_through, has_users, hooks_of
from .piece import HeadInParts, Piece, StepLogits, cut_at_chunks, pack, packing_order
from .row_attention import (
    AttentionCalls,
    PackedPass,
    PackedPast,
    RowAttention,
    StepParts,
    passing,
    row_capacities,
)
from .state_plan import PackedSequences
from .states import PackedStates, splitting, state_modules


class Stepper:
    """Runs steps of one model over the rows of its caches, until `close`.

    Args:
        model: A transformers causal language model that passed its proof. Unless its layers are
            compiled, it attends through "vmkv".
        caches: One for each device of the model.
        num_slots: Most pieces of a step.
        attention_backend: Backend for rows; see `RowAttention`.
        preferred_backend: Backend to prefer if none is named.
        compile_with: Compile the layers with this backend of `torch.compile`; None to run eagerly.
        layers: Compiled layers that several steppers share in turn: steps run within `attending`,
            and in between the model runs as before.
        calls: Attention that the model computes in each pass; by default each layer of the caches
            attends once.

    Attributes:
        device: Device of the token ids.
        attention: Attention of the layers over the rows.
        uses_operator: Whether layers are compiled, and attend through an operator.
        calls: `calls.layers` of the argument; if None, the next pass sets it.
        guard: Checks that the model is unchanged.
        last_tokens: `[num_slots + 1] int64`, the token chosen last in each slot.
        decode_graphs: Captured decode steps, or None.
        mixed_graphs: Captured steps with prompts, or None.

    Raises:
        ConfigError: A cache has no layers, the layers cannot be compiled, or the model is served
            already where `compile_with` is given. The model is unchanged.
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
        calls: AttentionCalls | None = None,
    ):
        if not all(cache.layers for cache in caches):
            raise ConfigError("the cache holds no layers yet: add the model's first")
        self.model = model
        self.caches = list(caches)
        self.device: torch.device = model.get_input_embeddings().weight.device
        self._is_cuda = self.device.type == "cuda"
        self._autocast = row_attention.autocast_dtype(self.device)
        self.num_slots = num_slots
        self.last_tokens = torch.zeros(num_slots + 1, dtype=torch.int64, device=self.device)
        if calls is None:
            calls = AttentionCalls(tuple(sorted(at for each in caches for at in each.layers)))
        self.calls: tuple[int, ...] | None = calls.layers
        self.chunk_sizes = {*calls.chunks.values()}  #: Of layers that attend in chunks, in tokens.
        self._past_argument = cache_argument(model) if self.chunk_sizes or calls.is_named else ""
        self._latents = calls.latents
        self.attention = RowAttention(
            *(caches, attention_backend, preferred_backend, calls),
            expansions=expansions(model, calls.latents),
        )
        self._states: PackedStates | None = None
        if calls.states:
            if len(caches) > 1 or caches[0].states is None:
                raise ConfigError("layers with states need one cache, on one device, with them")
            modules = state_modules(model, calls.states)
            called = self.attention.called
            self._states = PackedStates(caches[0].states, calls.states, called, modules)
        rules = None if self._states is None else self._states.rules
        self._pass = PackedPass(self.attention.attend_in, self.attention, self._states, rules)
        # transformers passes a 4-D mask on unchanged, and vmkv's attention ignores it.
        self._mask = torch.empty((1, 1, 1, 1), dtype=torch.bool, device=self.device)
        self.uses_operator = compile_with is not None or layers is not None
        self._shared = layers
        self._layers: CompiledLayers | None = None
        self.decode_graphs: DecodeGraphs | None = None
        self.mixed_graphs: MixedGraphs | None = None
        self.scratch: Scratch | None = None
        self._space: GraphSpace | None = None
        self._captures_late = False
        self._logits_like: tuple[int, torch.dtype] | None = None
        self._serving = contextlib.ExitStack()  # Contexts in which the model attends.
        with contextlib.ExitStack() as undo:
            undo.callback(self.attention.close)
            undo.callback(self._serving.close)
            if self._states is not None:
                undo.callback(self._states.close)
                if self.uses_operator and (not self.state_tokens or layers is not None):
                    raise ConfigError("layers of models that keep states cannot be compiled")
            if compile_with is not None:
                if self.chunk_sizes:
                    raise ConfigError("layers of models that attend in chunks cannot be compiled")
                if calls.is_named:
                    raise ConfigError("layers that share their modules cannot be compiled")
                if has_users(model):
                    raise ConfigError(
                        "this model is served already, and its layers cannot be compiled "
                        "meanwhile: close what serves it first, or leave compile_layers out"
                    )
                self._attend_by_operator()
                self._layers = undo.enter_context(_compiled(model, compile_with))
            name = row_attention.IMPLEMENTATION if self.uses_operator else PACKED
            self.guard = ModelGuard(model, name)
            self._undo = undo.pop_all()

    @contextlib.contextmanager
    def attending(self, *, in_all_threads: bool = False) -> Iterator[None]:
        """Context in which the model attends over these rows; `ConfigError` if others do."""
        if self._shared is None:
            its = self._states
            split = contextlib.nullcontext() if its is None else splitting(self.model, its.layers)
            attending = attending_through(self.model, PACKED, in_all_threads=in_all_threads)
            with attending, split, handing_latents(self.model, self._latents):
                yield
        else:
            attending = row_attention.attending(self.model)
            with attending, handing_latents(self.model, self._latents), self._shared.in_place():
                yield

    def _attend_by_operator(self) -> None:
        attending = row_attention.attending(self.model, in_all_threads=True)
        self._serving.enter_context(attending)
        self._serving.enter_context(handing_latents(self.model, self._latents))
        if self._states is not None:
            self._serving.enter_context(self._states.rules.in_place())

    def resume(self) -> None:
        """Undo `pause`, with the same modules and parameters; raises as `attending`."""
        if not self.uses_operator:
            self._serving.enter_context(self.attending(in_all_threads=True))
            return
        self._attend_by_operator()
        if self._layers is not None:
            try:
                self._layers.resume()
            except BaseException:
                self.pause()
                raise
            self.guard = ModelGuard(self.model, row_attention.IMPLEMENTATION)

    def pause(self) -> None:
        """Restore the model's own code and attention; no step may run until `resume`."""
        if self._layers is not None:
            self._layers.pause()
        self._serving.close()

    # ---- steps ----------------------------------------------------------------------------

    @torch.no_grad()
    def run(
        self, pieces: Sequence[Piece], rows_elsewhere: Sequence[Sequence[int]] = ()
    ) -> StepLogits:
        """Launch a step. Never waits for the device.

        Args:
            pieces: Pieces of different slots and rows, whose rows are grown; in any order.
            rows_elsewhere: For each cache but the first, the rows of the pieces there.

        Raises:
            ConfigError: The model has changed since the stepper was made (`ModelGuard`). The step
                has no effect; steps run again once the change is undone.
            OutOfPagesError: No memory for the kernel's over-read.
            Exception: Any error of the model. Keys and values of the new tokens may have been
                written; the same step again writes the same. States are spoilt: sequences of models
                with states go back to a checkpoint, or start over.
        """
        for cache in self.caches:
            cache.note_stream()
        if not pieces:
            return StepLogits(torch.empty((0, 0), device=self.device), [])
        whole: Sequence[int] = range(len(pieces))
        if self.chunk_sizes:
            whole, pieces = cut_at_chunks(pieces, self.chunk_sizes)
            rows_elsewhere = [[rows[at] for at in whole] for rows in rows_elsewhere]
        order = packing_order(pieces)
        packed = [pieces[at] for at in order]
        sampling = [whole[at] for at in order if pieces[at].samples]
        if not packed[-1].decodes:  # Some may draft.
            told = [(whole[at], pieces[at]) for at in order if pieces[at].samples]
            sampling = [at for at, piece in told for _ in range(piece.num_drafted + 1)]
        # All decode, by their order; parts of one piece would share its slot.
        if packed[-1].decodes and len({*whole}) == len(packed):
            # Captured, a layer neither begins a state nor copies one.
            goes_on = self._states is None or all(
                [each.num_past_tokens and not each.checkpoints for each in packed]
            )
            if goes_on and self._ran_captured_decode(packed):
                return self._replayed(
                    [at for at, each in enumerate(packed) if each.samples], sampling
                )
        elif self.mixed_graphs is not None:
            bucket = self.mixed_graphs.key(packed)
            if bucket is not None:
                self.guard.check(is_fixed=True)
                self.mixed_graphs.replay(bucket, self.mixed_graphs.fill(bucket, packed))
                return self._replayed(range(len(sampling)), sampling)
        elsewhere = [[rows[at] for at in order] for rows in rows_elsewhere]
        return StepLogits(self.run_eagerly(packed, elsewhere), sampling)

    def _replayed(self, kept: Sequence[int], sampling: Sequence[int]) -> StepLogits:
        space = self._space
        assert space is not None  # Set with the graphs.
        count = len(kept)
        if not count or kept[-1] == count - 1:
            return StepLogits(space.logits[:count], sampling, space.token_ids[:count], space.head)
        at = torch.tensor(kept).to(self.device, non_blocking=True)
        return StepLogits(space.logits[at], sampling, head=space.head)

    def run_eagerly(
        self,
        packed: Sequence[Piece],
        rows_elsewhere: Sequence[Sequence[int]] = (),
        keep: Sequence[int] | torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run any step as one forward pass; return logits `[n, vocabulary]`.

        `packed` is in `packing_order`; `keep` selects packed tokens, by default the last tokens of
        pieces that sample. Other arguments and errors as in `run`.
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
            there = [replace(piece, row=row) for piece, row in zip(packed, rows, strict=True)]
            steps[cache.device] = pack(there, row_capacities(cache), cache.device).parts
        kept = step.ends if keep is None else torch.as_tensor(keep, device=self.device)
        if self._states is not None:
            self._states.begin(packed, self.device)
        logits = self.forward(token_ids, step.positions, kept, steps)
        self._logits_like = (logits.shape[1], logits.dtype)
        return logits

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        keep: torch.Tensor | None,
        steps: Mapping[torch.device, StepParts],
    ) -> torch.Tensor:
        """Return logits `[kept, vocabulary]` of packed tokens `[T]`; of all tokens by default.

        `steps` is by device. `ConfigError` if the model has changed, or attends as not proven.
        """
        self.guard.check(is_fixed=self.uses_operator)
        called = self.attention.called
        called.clear()
        self.attention.steps = steps
        given: dict[str, Any] = {}
        if self._past_argument:  # Models with chunks count positions from it (Llama 4).
            places = torch.arange(len(positions), device=self.device)
            given[self._past_argument] = self.attention.past = PackedPast(positions - places)
        try:
            with passing(self._pass), self._computing():
                output = self.model(
                    input_ids=token_ids[None],
                    position_ids=positions[None],
                    attention_mask=self._mask,
                    use_cache=False,
                    logits_to_keep=0 if keep is None else keep,
                    return_dict=True,
                    **given,
                )
        except VMKVError:
            raise
        except Exception as error:
            change = self.guard.change()
            if change is None:
                raise
            raise ConfigError(change) from error
        finally:
            self.attention.steps = self.attention.past = None
            if self._states is not None:
                self._states.rules.end()
        calls = tuple(sorted(called))
        if self.calls is None:
            self.calls = calls
        elif calls != self.calls:
            raise ConfigError(self.guard.change() or _other_calls(calls, self.calls))
        # Some models return the logits of all tokens.
        logits: torch.Tensor = output.logits[0]
        return logits if keep is None or logits.shape[0] == keep.shape[0] else logits[keep]

    def begin_states(self, parts: StepParts, sequences: PackedSequences | None) -> None:
        """Prepare states for a `forward` whose rows are known on the device only."""
        if self._states is None:
            return
        if sequences is not None:
            self._states.rules.begin(sequences)
        else:
            self._states.begin_decoding(next(iter(parts.everything.values())).row_indices)

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        """Context of the autocast, or of none, in which the stepper was made."""
        kind, dtype = self.device.type, self._autocast
        if dtype is None and not torch.is_autocast_enabled(kind):
            yield
            return
        # Conversions of weights that train are kept until the outermost autocast ends, even if it
        # is the model's own one that asks for that: a graph would read them when they are freed.
        trained = [each for each in self.model.parameters() if each.requires_grad]
        for each in trained:
            each.requires_grad = False
        try:
            with (
                torch.autocast(kind, dtype, enabled=dtype is not None, cache_enabled=False),
                self.head_in(None),
            ):
                yield
        finally:
            for each in trained:
                each.requires_grad = True

    def new_stream(self) -> torch.cuda.Stream:
        """Return a stream for captures, until `close`; torch's first one takes 70 MiB (H200)."""
        backend = self.caches[0].pool.backend
        stream = backend.new_stream(is_noted=False)
        self._undo.callback(backend.stream_destroy, stream)
        return torch.cuda.ExternalStream(stream, self.device)  # type: ignore[no-untyped-call]

    def head_in(self, room: torch.Tensor | None) -> contextlib.AbstractContextManager[None]:
        """Context in which a large head under autocast converts slices, into `room` if it fits."""
        return _head_in_slices(self.model.get_output_embeddings(), self._autocast, room)

    # ---- captures -------------------------------------------------------------------------

    def make_graphs(
        self,
        vocab_size: int,
        dtype: torch.dtype,
        max_mixed_tokens: int,
        *,
        few: bool = False,
        max_drafted: int = 0,
        agree: Callable[[int], int] = int,
        head: HeadInParts | None = None,
    ) -> None:
        """Prepare captured steps; on the host the same padded steps run eagerly.

        Logits are `dtype` with `vocab_size` columns. Steps with prompts are captured up to
        `max_mixed_tokens`, unless layers attend in chunks, or keep states and are called for each
        prompt. `few` uses few sizes of decode steps, which pad more; with `max_drafted`, steps in
        which sequences have up to so many guesses are captured too; `agree` and `head` as in
        `GraphSpace`. Raises `CapacityError` if no row or page is left for padding.
        """
        scratch = self.open_scratch()
        num_rows = self.num_slots
        if max_drafted:
            num_rows = max(num_rows, min(DRAFT_ROWS_MAX, num_rows * (max_drafted + 1)))
        its: dict[str, Any] = {"agree": agree, "head": head, "num_rows": num_rows}
        space = self._space = GraphSpace(self, vocab_size, dtype, scratch, **its)
        self.decode_graphs = DecodeGraphs(space, few=few)
        # Tiles may span chunks; other layers with states are called for each prompt.
        is_packed = not self.has_states or self.state_tokens > 0
        is_wanted = max_mixed_tokens > 1 or max_drafted > 0
        if is_wanted and not self.chunk_sizes and is_packed:
            its = {"max_drafted": max_drafted}
            self.mixed_graphs = MixedGraphs(space, max_mixed_tokens, self.num_processors, **its)

    @property
    def has_states(self) -> bool:
        """Whether layers keep states, which a step that fails midway spoils."""
        return self._states is not None

    @property
    def state_tokens(self) -> int:
        """Tokens in states of convolutions if all layers with states run packed; else 0."""
        states = self._states
        if states is None or sorted(states.layers) != [*states.rules.layers]:
            return 0
        return states.rules.state_tokens

    @property
    def num_processors(self) -> int:
        """Multiprocessors of the device; 1 on the host."""
        if not self._is_cuda:
            return 1
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count)

    def open_scratch(self) -> Scratch:
        """Return the padding row, of one token, opened once; `CapacityError` if none is left."""
        if self.scratch is None:
            cache = self.caches[0]
            sequence = cache.open(1)
            self._undo.callback(sequence.close)
            cache.grow([(sequence, 1)])
            if self._states is not None:
                self._states.clear(sequence.row)
            self.scratch = Scratch(self.num_slots, sequence.row)
        return self.scratch

    @property
    def logits_dtype(self) -> torch.dtype:
        """The type in which the model's head computes logits."""
        dtype: torch.dtype = self.model.get_output_embeddings().weight.dtype
        return self._autocast or dtype

    @property
    def can_capture(self) -> bool:
        """Whether steps may be captured, before trying: CUDA, one device, no autocast, no hooks."""
        return (
            self._is_cuda
            and [cache.device for cache in self.caches] == [self.device]
            and not torch.is_autocast_enabled("cuda")
            and not has_hooks(self.model)
        )

    def capture_where_it_pays(self) -> None:
        """Capture decode steps that recur, if `can_capture`; see `StepGraphs.run_recurring`."""
        self._captures_late = self.can_capture

    def _ran_captured_decode(self, packed: Sequence[Piece]) -> bool:
        """Run a decode-only step of a size that is captured, or will be; False if none is."""
        if self.decode_graphs is None and self._captures_late and self._logits_like is not None:
            # A step has shown the logits' shape.
            try:
                self.make_graphs(*self._logits_like, 0, few=True)
            except CapacityError:  # No room for padding.
                self._captures_late = False
        graphs = self.decode_graphs
        if graphs is None:
            return False
        bucket = graphs.key(len(packed), max([piece.num_tokens for piece in packed]))
        is_captured = not self._captures_late or bucket in graphs.captured
        self.guard.check(is_fixed=self.uses_operator or is_captured)
        integers = graphs.fill(bucket, packed)
        if self._captures_late:
            return graphs.run_recurring(bucket, integers)
        graphs.replay(bucket, integers)
        return True

    def drop_graphs(self, *, copies: bool) -> None:
        """Free all graphs, and with `copies`, within `pause`, copied weights; of an idle device."""
        self._close_graphs()
        if self._space is not None:
            self._space.sleep()
        if copies and self._layers is not None:
            self._layers.drop_copies()

    def _close_graphs(self) -> None:
        for graphs in (self.mixed_graphs, self.decode_graphs):
            if graphs is not None:
                graphs.close()
        if self._is_cuda:  # Captures have made workspaces in the graphs' memory.
            torch._C._cuda_clearCublasWorkspaces()

    def run_layers_plainly(self) -> bool:
        """Run the layers eagerly from now on; return whether they were compiled."""
        if self._layers is None:
            return False
        self._layers.close()
        self._layers = None
        # The parameters are where the model had them before.
        self.guard = ModelGuard(self.model, row_attention.IMPLEMENTATION)
        return True

    # ---- end ------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for the device, drop the graphs and restore the model. Idempotent."""
        if self._is_cuda:
            torch.cuda.synchronize(self.device)
        self._close_graphs()
        self.mixed_graphs = self.decode_graphs = self._space = None
        self._undo.close()


#: Converted weights of a head at once; a vocabulary of 128,256 at the 1B shape takes 525 MB.
_SLICE_BYTES = 32 * MiB


@contextlib.contextmanager
def _head_in_slices(
    head: Any, dtype: torch.dtype | None, room: torch.Tensor | None
) -> Iterator[None]:
    """Context of autocast in which a large head converts a slice of its weights at a time."""
    num_slices = 1
    is_plain = type(head) is Linear and "forward" not in vars(head)
    if dtype is not None and is_plain and head.weight.dtype != dtype:
        num_slices = div_ceil(head.weight.numel() * dtype.itemsize, _SLICE_BYTES)
    if num_slices < 2:
        yield
        return
    weight, bias = head.weight, head.bias
    size = div_ceil(len(weight), num_slices)

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        rows, num_rows = room, hidden.shape[:-1].numel()
        if rows is None or num_rows > len(rows) or rows.shape[1] != len(weight):
            rows = hidden.new_empty((num_rows, len(weight)), dtype=dtype)
        logits = rows[:num_rows].view(*hidden.shape[:-1], len(weight))
        for at in range(0, len(weight), size):
            part = slice(at, at + size)
            logits[..., part] = linear(hidden, weight[part], None if bias is None else bias[part])
        return logits

    vars(head)["forward"] = forward
    try:
        yield
    finally:
        del vars(head)["forward"]


def has_hooks(model: torch.nn.Module) -> bool:
    """Whether a module has forward hooks that a captured step would leave out."""
    return any(map(hooks_of, model.modules()))


def _other_calls(called: Sequence[int], proven: Sequence[int]) -> str:
    now, before = Counter(called), Counter(proven)
    layer = next(each for each in sorted(now | before) if now[each] != before[each])
    return (
        f"in a step, layer {layer} of the model attended {now[layer]} times instead of "
        f"{before[layer]}: its attention or its code has been changed; undo that, or close the "
        "engine or cache that serves the model and make another"
    )


@contextlib.contextmanager
def _compiled(model: Any, backend: str) -> Iterator[CompiledLayers]:
    """Context with compiled layers; as a generator, it also ends with an unclosed stepper."""
    layers = CompiledLayers(model, backend=backend)
    try:
        yield layers
    finally:
        layers.close()
