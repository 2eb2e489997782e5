"""Append and attention of a step's layers, over the rows of caches.

A step's tokens are packed by kind, because each kind can have a kernel of its own:

  decode     one query per sequence over its row; splits long rows over the device
  beginning  whole prompts, or their first chunks, over their own packed keys
  continued  later chunks of a prompt, over their rows

A kernel that `mixes` takes all of them in one launch, unless decoding rows may be long: an unsplit
row occupies one processor for its whole length. A step that only decodes is one launch per layer if
the kernel can append and rows have no left padding, which only such steps may have. A captured step
with prompts (`graphs.py`) has two kinds, decode and tiles, with the graph's sizes.

Compiled layers attend through an operator, one opaque call to compilers: the implementation
`"vmkv_rows"` of transformers. Each layer has a tensor of its number, not a number in code, so one
compiled layer serves all; the step's rows and lengths never pass through the model.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..attention import AttentionBackend, AttentionBatch, Call, append, select
from ..attention.append import append_rotated, can_rotate
from ..attention.registry import get, select_for_new, why_not
from ..core.cache import KVCache
from ..core.cache.fp8 import Scales
from ..errors import ConfigError, InternalError
from .graph_passes import turned
from .model_guard import attending_through, numbered_layers, register_attention

if TYPE_CHECKING:
    from .latents import Expansion, Latent
    from .state_rules import PackedRules
    from .states import PackedStates, StateLayer, StateProbe

#: Longest rows that decode in one launch with prompts, which splits no row: this many tokens take a
#: processor about 0.15 ms. (H200, 8B Llama shape, chat: a step with prompts takes 1.8 % less than
#: with a launch for each kind.)
_LONG_ROW_TOKENS = 16_384

Batches = Mapping[int, AttentionBatch]
"""One batch for each row capacity, which layer groups differ in."""


@dataclass(frozen=True)
class StepParts:
    """A step as attention sees it; with `is_decode` captured, of decode entries and tiles."""

    num_decode_tokens: int  # The first tokens of the step.
    num_beginning_tokens: int  # The tokens after those.
    everything: Batches  # All tokens, for the append.
    # By kind, in steps of more than one; a kind that the step lacks is empty.
    decode: Batches = field(default_factory=dict)
    beginnings: Batches = field(default_factory=dict)
    continued: Batches = field(default_factory=dict)
    prompts: Batches = field(default_factory=dict)  # Beginnings and continued, over rows.
    is_decode: torch.Tensor | None = None  # `[entries, 1, 1] bool`: whether an entry is used.

    def in_chunks(self, num_tokens: int) -> StepParts:
        """Return this step with rows that begin at the last chunk; no piece may span chunks."""

        def cut(batches: Batches) -> Batches:
            return {
                capacity: replace(
                    batch, left_pad=(batch.num_tokens - 1).clamp(0) // num_tokens * num_tokens
                )
                for capacity, batch in batches.items()
            }

        names = ("everything", "decode", "continued", "prompts")
        parts: dict[str, Any] = {name: cut(getattr(self, name)) for name in names}
        return replace(self, **parts)


class AttentionCalls(NamedTuple):
    """Attention that a model computes in each packed pass.

    `layers` are ascending, each as often as it attends, or runs with a state; `states` are those
    with one. `sources` maps a layer without keys of its
    own to the one whose rows it reads, which comes before it in a pass. `chunks` maps a layer whose
    queries see no token before their chunk of the sequence to the chunk's tokens.

    Modules of some models do not tell which layer they are, because layers share them: with
    `is_named`, a call is of the layer that the model has named to its cache last. `regrouped` has
    layers that attend several times to their keys: for each time, the head of the layer's values
    that a head of keys goes with. `latents` has layers with latent attention, whose rows hold
    latents instead of keys, and the rotated parts that heads share instead of values.
    """

    layers: tuple[int, ...]
    sources: Mapping[int, int] = {}
    chunks: Mapping[int, int] = {}
    states: Mapping[int, StateLayer] = {}
    is_named: bool = False
    regrouped: Mapping[int, Sequence[Sequence[int]]] = {}
    latents: Mapping[int, Latent] = {}

    def add_rows(self, cache: KVCache) -> None:
        """Add rows for layers that keep something else than keys, before any sequence begins."""
        if self.states:
            cache.add_states({at: list(its.shapes.values()) for at, its in self.states.items()})


@dataclass
class PackedPast:
    """Past of packed tokens without keys, for models that count positions or name layers by it."""

    offsets: torch.Tensor
    layer: int = -1
    new: tuple[torch.Tensor, torch.Tensor] | None = None
    is_initialized: bool = True

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor:
        """Return the offsets, which a model adds to the tokens' indices."""
        return self.offsets

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return new keys and values as they are: attention appends them."""
        self.layer, self.new = layer_idx, (keys, values)
        return keys, values


class LayerCall(NamedTuple):
    """A layer's call of attention in a pass, as the model makes it.

    `query` is `[B, Hq, T, D]`, `key` and `value` are `[B, H, T, D]`; in a packed step B is 1.
    `window` is None where the model states none; `mask` and `bias` are the model's. `angles` are
    cosines and sines `[1, T, D]` by which queries and keys are still to be rotated.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    window: int | None = None
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    angles: tuple[torch.Tensor, torch.Tensor] | None = None


def in_autocast(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    """Convert to the type in which autocast attends; rotary embeddings leave float32 behind."""
    kind = tensors[0].device.type
    # "meta" has none. Compilers cannot trace `is_autocast_available`, and would split layers.
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    return [each.to(torch.get_autocast_dtype(kind)) for each in tensors]


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the type of the autocast that is on for a device, or None."""
    kind = device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


# ---- the pass ------------------------------------------------------------------------------------


class PackedPass(NamedTuple):
    """Code that computes layers in a packed pass; without it, they compute as they are."""

    attend: Callable[[Any, LayerCall], torch.Tensor] | None = None
    rows: RowAttention | None = None
    states: PackedStates | StateProbe | None = None
    rules: PackedRules | None = None


_RUNNING: ContextVar[PackedPass] = ContextVar("vmkv_pass", default=PackedPass())  # noqa: B039
running = _RUNNING.get
"""Return the pass of this thread; empty between passes."""


@contextlib.contextmanager
def passing(its: PackedPass) -> Iterator[None]:
    """Context in which passes of this thread are `its`."""
    token = _RUNNING.set(its)
    try:
        yield
    finally:
        _RUNNING.reset(token)


# ---- rows ----------------------------------------------------------------------------------------

_Kernels = tuple[AttentionBackend, AttentionBackend | None, bool]
"""Kernels of one kind of layer, over rows and for beginnings, and whether the first one `mixes`."""


class _Layer(NamedTuple):
    """A layer's cache and the views of all its rows, `[rows, row_tokens, heads, dim]`."""

    cache: KVCache
    keys: torch.Tensor
    values: torch.Tensor
    scales: Scales | None
    window: int | None


class RowAttention:
    """Appends to and attends from the rows of caches, for every layer of a model.

    `caches` has one entry per device; layers are numbered as in the model, and `calls` tells which
    of them have no rows or attend in chunks. `expansions` are of the layers that `calls.latents`
    has. Layers use the backend
    `attention_backend`; if None, `preferred` where it can serve, else the choice of `select`, which
    avoids flash3 for its over-read. With many sequences of different lengths flash3 pays (one H200,
    8B Llama shape: a decode step of 64 at 128 to 4,096 tokens takes 8.6 ms, with flash2 9.6).
    """

    def __init__(
        self,
        caches: Sequence[KVCache],
        attention_backend: str | None = None,
        preferred: str | None = None,
        calls: AttentionCalls | None = None,
        expansions: Mapping[int, Expansion] | None = None,
    ):
        self._name = attention_backend
        self._preferred = preferred
        self._layers = {
            layer: _Layer(
                cache,
                cache.keys(layer),
                cache.values(layer),
                cache.scales(layer),
                cache.place(layer)[0].window_tokens,
            )
            for cache in caches
            for layer in cache.layers
        }
        self._calls = calls = calls or AttentionCalls(())
        # The last step by device and tokens of a chunk, and the same as layers with chunks see it.
        self._in_chunks: dict[tuple[torch.device, int], tuple[StepParts, StepParts]] = {}
        self._layers.update((layer, self._layers[its]) for layer, its in calls.sources.items())
        self._expansions = dict(expansions or {})
        self.keeps_latents = bool(self._expansions)  #: Whether layers have rows of latents.
        self._kernels: dict[tuple[object, ...], _Kernels] = {}
        self._kernels_for_new: dict[tuple[object, ...], AttentionBackend] = {}
        self._side: torch.cuda.Stream | None = None
        # The next forward pass's step by device; None between steps.
        self.steps: Mapping[torch.device, StepParts] | None = None
        self.called: list[int] = []  # Layers that attended, in order; the caller clears it.
        self.past: PackedPast | None = None  # The pass's, if the model gets one.

    def attend_in(self, module: Any, asked: LayerCall) -> torch.Tensor:
        """Attend for a layer by its module; the model was proven to have no masks and biases."""
        past = self.past
        if past is None or not self._calls.is_named:
            return self.attend(int(module.layer_idx), asked)
        if past.layer in self._calls.regrouped:
            return self._attend_regrouped(past, asked)
        return self.attend(past.layer, asked)

    def _attend_regrouped(self, past: PackedPast, asked: LayerCall) -> torch.Tensor:
        """Attend with other pairs of keys and values, in runs of heads that lie side by side."""
        assert past.new is not None  # Set with the layer.
        layer, its = past.layer, self._layers[past.layer]
        heads = self._calls.regrouped[layer][self.called.count(layer)]
        step = self._step_of(layer, its.cache.device)
        if layer not in self.called:
            append(_call(its, asked, step.everything), _packed(*in_autocast(*past.new)))
        self.called.append(layer)
        group, outputs = asked.query.shape[1] // len(heads), []
        for _, run in itertools.groupby(enumerate(heads), lambda pair: pair[1] - pair[0]):
            of_keys, of_values = (slice(its[0], its[-1] + 1) for its in zip(*run, strict=True))
            part = its._replace(
                keys=its.keys[:, :, of_keys],
                values=its.values[:, :, of_values],
                scales=its.scales and its.scales.of_heads(of_keys, of_values),
            )
            query = asked.query[:, of_keys.start * group : of_keys.stop * group]
            outputs.append(self._attend(part, asked._replace(query=query), step, appends=False))
        return torch.cat(outputs, 2)

    def attend(self, layer: int, asked: LayerCall) -> torch.Tensor:
        """Append a layer's keys and values, and attend from its rows: `[1, T, Hq, Dv]`."""
        self.called.append(layer)
        its = self._layers[layer]
        step = self._step_of(layer, its.cache.device)
        if layer in self._expansions:
            return self._attend_latents(its, self._expansions[layer], asked, step)
        return self._attend(its, asked, step, appends=layer not in self._calls.sources)

    def _attend(
        self, its: _Layer, asked: LayerCall, step: StepParts, *, appends: bool
    ) -> torch.Tensor:
        capacity = its.keys.shape[1]
        new = _packed(asked.key, asked.value)
        call = _call(its, asked, step.everything)
        rows, for_new, mixes = self._kernels_for(its.cache, call)
        is_whole = step.is_decode is None and step.num_decode_tokens == call.query.shape[0]
        # Attention kernels that append neither rotate by angles nor append two parts of one row.
        is_plain = asked.angles is None and call.batch.left_pad is None and not self._calls.chunks
        if is_whole and is_plain and appends and rows.appends:
            return rows.attend(replace(call, new=new))[None]
        if not is_whole and mixes:
            decode = step.decode
            is_whole = not decode or decode[capacity].max_num_tokens <= _LONG_ROW_TOKENS
        if is_whole or not appends or not step.beginnings:
            for_new = None
        key = new[0]
        if appends:
            call, key = _append(call, new, asked.angles, keep_keys=for_new is not None)
        elif asked.angles is not None:
            call = replace(call, query=turned(call.query, *(each[0] for each in asked.angles)))
        if is_whole:
            return rows.attend(call)[None]
        if step.is_decode is not None:
            return self._attend_tiled(rows, call, step.is_decode, step)[None]
        return _attend_in_parts(rows, for_new, call, (key, new[1]), step)[None]

    def _attend_latents(
        self, its: _Layer, expansion: Expansion, asked: LayerCall, step: StepParts
    ) -> torch.Tensor:
        """Append latents and attend to those in rows; whole prompts to their expanded ones."""
        query, new = asked.query[0].transpose(0, 1), _packed(asked.key, asked.value)
        append(_call(its, asked._replace(query=asked.key), step.everything), new)
        if step.is_decode is not None or step.num_decode_tokens == query.shape[0]:
            return self._attend_absorbed(its, expansion, asked, query, step.everything, step)[None]
        out = query.new_empty((*query.shape[:2], expansion.its.v_dim))
        begin, end = step.num_decode_tokens, step.num_decode_tokens + step.num_beginning_tokens
        for part, batches in (slice(begin), step.decode), (slice(end, None), step.continued):
            if batches:
                self._attend_absorbed(its, expansion, asked, query[part], batches, step, out[part])
        if step.beginnings:
            key, value = expansion.expanded(*[each[begin:end] for each in new])
            batch = replace(step.beginnings[its.keys.shape[1]], row_tokens=end - begin)
            rows = its._replace(keys=key[None], values=value[None])
            whole = asked._replace(query=asked.query[:, :, begin:end])
            call = replace(_call(rows, whole, {end - begin: batch}), new=(key, value))
            out[begin:end] = self._for_new(call).attend_new(call)
        return out[None]

    def _attend_absorbed(
        self,
        its: _Layer,
        expansion: Expansion,
        asked: LayerCall,
        query: torch.Tensor,
        batches: Batches,
        step: StepParts,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend from `query [T, Hq, D]` to latents in rows: `[T, Hq, Dv]`."""
        # In a token row the shared part of keys follows the latent.
        width = its.keys.shape[3] + its.values.shape[3]
        joint = its.keys.as_strided((*its.keys.shape[:3], width), its.keys.stride())
        absorbed = expansion.absorbed(query).transpose(0, 1)[None]
        rows = its._replace(keys=joint, values=its.keys)
        call = _call(rows, asked._replace(query=absorbed), batches)
        kernel, _, mixes = self._kernels_for(its.cache, call)
        if step.is_decode is not None and not mixes:
            attended = self._attend_tiled(kernel, call, step.is_decode, step)
        else:
            attended = kernel.attend(call)
        return expansion.values(attended, out)

    def _for_new(self, call: Call) -> AttentionBackend:
        """Return the kernel for expanded prompts."""
        kernel = self._kernels_for_new.get(call.kind)
        if kernel is None:
            kernel = select_for_new(call.spec()) or get("sdpa")
            self._kernels_for_new[call.kind] = kernel
        return kernel

    def _step_of(self, layer: int, device: torch.device) -> StepParts:
        """Return the step as a layer's attention sees it; without host work per sequence."""
        assert self.steps is not None
        step, chunk = self.steps[device], self._calls.chunks.get(layer)
        if chunk is None:
            return step
        known = self._in_chunks.get((device, chunk))
        if known is None or known[0] is not step:
            known = self._in_chunks[device, chunk] = step, step.in_chunks(chunk)
        return known[1]

    def _attend_tiled(
        self, backend: AttentionBackend, call: Call, is_decode: torch.Tensor, step: StepParts
    ) -> torch.Tensor:
        """Attend in tiles, and in parallel for decodes: `[T, Hq, Dv]`."""
        query, capacity, width = call.query, call.keys.shape[1], step.num_decode_tokens
        beside = self._beside(backend.name, query.device)
        with torch.cuda.stream(beside):
            out = backend.attend(replace(call, batch=step.prompts[capacity]))
        decoded = backend.attend(replace(call, query=query[:width], batch=step.decode[capacity]))
        if beside is not None:
            torch.cuda.current_stream(query.device).wait_stream(beside)
        torch.where(is_decode, decoded, out[:width], out=out[:width])
        return out

    def _beside(self, name: str, device: torch.device) -> torch.cuda.Stream | None:
        """Return a stream to run tiles in parallel with decoding; None if that does not help.

        A few prompt tokens leave most of the device idle (H200, flash2, 14 tokens after 2,048
        beside 64 that decode: 118 us instead of 183), unless the kernel splits keys, as flash3
        does. The stream first waits for the current one, so its tensors need no `record_stream`.
        """
        if device.type != "cuda" or name == "flash3":
            return None
        if self._side is None:
            self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._side.wait_stream(torch.cuda.current_stream(device))
        return self._side

    def _kernels_for(self, cache: KVCache, call: Call) -> _Kernels:
        kind = (id(cache), *call.kind)
        kernels = self._kernels.get(kind)
        if kernels is None:
            spec = call.spec(cache.max_tokens)
            name = self._name
            if name is None and self._preferred and why_not(self._preferred, spec) is None:
                name = self._preferred
            rows = select(spec, name)
            cache.keep_resident(rows.overread_tokens(spec))
            kernels = self._kernels[kind] = rows, select_for_new(spec), rows.mixes(spec)
        return kernels

    @property
    def kernel_names(self) -> list[str]:
        """Backends that have been chosen so far, sorted."""
        return sorted({rows.name for rows, *_ in self._kernels.values()})

    def close(self) -> None:
        """Drop the caches' tensors, which keep addresses reserved. Idempotent."""
        self._layers.clear()
        self._expansions.clear()
        self._in_chunks.clear()
        self.steps = self.past = None


def _packed(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return key[0].transpose(0, 1), value[0].transpose(0, 1)


def _call(its: _Layer, asked: LayerCall, batches: Batches) -> Call:
    return Call(
        asked.query[0].transpose(0, 1),
        its.keys,
        its.values,
        batches[its.keys.shape[1]],
        asked.scale,
        its.window if asked.window is None else asked.window,
        asked.softcap,
        asked.sinks,
        its.scales,
    )


def _append(
    call: Call,
    new: tuple[torch.Tensor, torch.Tensor],
    angles: tuple[torch.Tensor, torch.Tensor] | None,
    *,
    keep_keys: bool,
) -> tuple[Call, torch.Tensor]:
    """Append new keys and values, rotated by `angles`; return the call, and keys if kept."""
    key, value = new
    if angles is not None:
        cos, sin = (each[0] for each in angles)
        if can_rotate(call, new, cos, sin):
            query, kept = append_rotated(call, new, cos, sin, keep_keys=keep_keys)
            return replace(call, query=query), key if kept is None else kept
        call, key = replace(call, query=turned(call.query, cos, sin)), turned(key, cos, sin)
    append(call, (key, value))
    return call, key


def _attend_in_parts(
    backend: AttentionBackend,
    for_new: AttentionBackend | None,
    call: Call,
    new: tuple[torch.Tensor, torch.Tensor],
    step: StepParts,
) -> torch.Tensor:
    """Attend kind by kind, beginnings by `for_new` if given; returns `[T, Hq, Dv]`."""
    query, capacity = call.query, call.keys.shape[1]
    # Kernels that can write into `out` do so; the others' results are copied.
    out = query.new_empty((query.shape[0], query.shape[1], call.values.shape[3]))

    def attend(first: int, end: int, batches: Batches) -> None:
        if batches:
            into = out[first:end]
            part = replace(call, query=query[first:end], batch=batches[capacity], out=into)
            if for_new is not None and batches is step.beginnings:
                part = replace(part, new=(new[0][first:end], new[1][first:end]))
                attended = for_new.attend_new(part)
            else:
                attended = backend.attend(part)
            if attended.data_ptr() != into.data_ptr():
                into.copy_(attended)

    begin, end = step.num_decode_tokens, query.shape[0]
    attend(0, begin, step.decode)
    if for_new is None:
        attend(begin, end, step.prompts)
    else:
        continued = begin + step.num_beginning_tokens
        attend(begin, continued, step.beginnings)
        attend(continued, end, step.continued)
    return out


def row_capacities(cache: KVCache) -> set[int]:
    """Return the row capacities of a cache's layer groups, in tokens."""
    return {group.row_tokens for group in cache.groups if not group.is_fixed}


def batches(capacities: set[int], whole: AttentionBatch) -> dict[int, AttentionBatch]:
    """Copy a batch for each row capacity."""
    return {
        each: replace(whole, max_num_tokens=min(whole.max_num_tokens, each), row_tokens=each)
        for each in capacities
    }


# ---- operator ------------------------------------------------------------------------------------

IMPLEMENTATION = "vmkv_rows"
"""Name in transformers' registry of attention implementations."""

_PLACE = "_vmkv_place"
V_DIM = "_vmkv_v_dim"
"""Attribute of a module that hands over latents: the width of its values."""
#: Modules that attend through the operator; copies of these do not. Note [State of the process].
_SERVED: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

_LIBRARY: Any = torch.library.Library("vmkv", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "attend_rows(Tensor query, Tensor key, Tensor value, Tensor place, Tensor? sinks, "
    "float scale, int window, float softcap, int v_dim=0, Tensor? cos=None, Tensor? sin=None) "
    "-> Tensor"
)


def _attend_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    place: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    v_dim: int = 0,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
) -> torch.Tensor:
    """Append and attend; declares no mutation, as no tensor that compilers see is a row.

    `v_dim` is the width of results where `value` is the shared part of latent keys.
    """
    rows = running().rows
    if rows is None:
        raise InternalError("attention was asked for outside a step")
    angles = None if cos is None or sin is None else (cos, sin)
    asked = LayerCall(query, key, value, scale, window or None, softcap, sinks=sinks, angles=angles)
    return rows.attend(int(place), asked).contiguous()  # On the CPU: no synchronisation.


def _shape_of_attend_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    place: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    v_dim: int = 0,
    *_: Any,
    **__: Any,
) -> torch.Tensor:
    return query.new_empty((1, query.shape[2], query.shape[1], v_dim or value.shape[3]))


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("attend_rows", _attend_rows, _key)
torch.library.register_fake("vmkv::attend_rows", _shape_of_attend_rows, lib=_LIBRARY)


def _rows_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function for transformers; arguments as `vmkv_attention`."""
    scale, v_dim = options.get("scaling"), getattr(module, V_DIM, 0)
    out = torch.ops.vmkv.attend_rows(
        *in_autocast(query, key, value),
        getattr(module, _PLACE),
        options.get("s_aux"),
        query.shape[-1] ** -0.5 if scale is None else scale,
        options.get("sliding_window") or 0,
        options.get("softcap") or 0.0,
        *([v_dim] if v_dim else []),
    )
    return out, None


@contextlib.contextmanager
def attending(model: Any, *, in_all_threads: bool = False) -> Iterator[None]:
    """Context in which layers attend through the operator; `ConfigError` if they do already."""
    check_free(model)
    layers = list(numbered_layers(model))
    if not layers:
        raise ConfigError("no layer of this model says which one it is (layer_idx)")
    register_attention(IMPLEMENTATION, _rows_attention, _no_mask)
    try:
        for module, layer in layers:
            setattr(module, _PLACE, torch.tensor([layer]))  # Compilers treat scalars otherwise.
            _SERVED.add(module)
        with attending_through(model, IMPLEMENTATION, in_all_threads=in_all_threads):
            yield
    finally:
        for module, _ in layers:
            vars(module).pop(_PLACE, None)
            _SERVED.discard(module)


def check_free(model: Any) -> None:
    """Raise `ConfigError` if the model's layers attend through this operator already."""
    if any(module in _SERVED for module, _ in numbered_layers(model)):
        raise ConfigError("this model is served by another runner already; close that first")


def _no_mask(**_: Any) -> None:
    """Return no mask: kernels apply causality themselves."""
