"""The two layer classes: transformers' own, with virtual memory instead of `torch.cat`.

Both subclass the layers of the installed release, so that masks, lengths and flags are that
release's; only the storage of keys and values is replaced. `keys` and `values` are properties,
because models and transformers read them as attributes.
"""

from __future__ import annotations

import copy
import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..attention import AttentionBackend, Call, select
from ..errors import ConfigError
from ..step.row_attention import LayerCall, in_autocast
from . import compat
from .group_step import GroupStep
from .store import Store

_LOG = logging.getLogger(__name__)
_Function = TypeVar("_Function", bound=Callable[..., Any])


def outside_graphs(function: _Function) -> _Function:
    """Let `torch.compile` end its graph at calls of `function`; others are plain calls."""
    apart: Any = torch.compiler.disable(function)  # type: ignore[no-untyped-call]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (apart if torch.compiler.is_compiling() else function)(*args, **kwargs)

    return call  # type: ignore[return-value]


class VirtualLayer:
    """The common part of both classes; mixed in before the transformers class."""

    # `_layer_type` stays None: setting it would replace transformers' layer for everybody.
    is_compileable = False
    record_past = False  # Only sliding layers ever set it, and 4.57 does not know it.

    def __init__(self, index: int, store: Store, window_tokens: int | None, original: Any):
        # transformers' __init__ differs between releases; copy the attributes that it set.
        for name, value in vars(original).items():
            if name not in ("keys", "values", "cumulative_length", "is_initialized"):
                setattr(self, name, value)
        self.is_initialized = False
        self._index = index
        self._store = store
        self.window_tokens = window_tokens  # None for all.
        self._length = 0
        self._first_kept = 0
        self.is_read_in_place = False  # Whether attention has read the layer's rows.
        self._batch_size = 0
        # The kernel, and the request that it was chosen for.
        self._kernel: tuple[tuple[object, ...], AttentionBackend] | None = None
        self._tag = weakref.ref(self)  # Weak, so that tensor and layer form no cycle.

    # ---- update ---------------------------------------------------------------------------

    def lazy_initialization(self, key_states: torch.Tensor, *value_states: torch.Tensor) -> None:
        """Bind the layer to memory. 4.57 passes only the keys; values then have their shape."""
        values = value_states[0] if value_states else key_states
        self._store.bind(self._index, key_states, values)
        self._kernel = None
        self._batch_size = key_states.shape[0]
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    @outside_graphs
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values `[batch, kv_heads, new_tokens, dim]`; returns all to attend to.

        Returns views `[batch, kv_heads, tokens, dim]` over the cache's memory, without a copy; a
        sliding layer returns the window before the new tokens, and these. Edit `layer.keys` and
        `layer.values` rather than these views: writing to memory that entries or copies share ends
        the process. Rows in eight bits are
        decoded into new tensors, unless attention is `"vmkv"` and has read the rows themselves
        before; a model that changes keys on their way to attention needs them decoded.

        Raises:
            OutOfPagesError: The pool is full. The layer is unchanged and stays usable.
            SequenceFullError: The rows end at `max_tokens`. The layer is unchanged.
            ConfigError: Shape, dtype or device differ from before, or gradients are wanted.
            ClosedError: The cache is closed.

        Cost: one launch per layer on CUDA; once per step, two view calls per layer group. Runs on
            torch's current stream and never waits for the device.
        """
        key_states, value_states = in_autocast(key_states, value_states)
        if self._length == 0:
            self.lazy_initialization(key_states, value_states)
        if (
            key_states.dtype != self.dtype
            or value_states.dtype != self.dtype
            or key_states.device != self.device
            or value_states.device != self.device
        ):
            raise self._mismatch(key_states, value_states)
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise ConfigError(
                "keys require gradients, which cannot flow through a virtual-memory cache; "
                "run the model under torch.no_grad() or torch.inference_mode()"
            )
        step, index = self._store.places[self._index]
        start = self._length
        end = start + key_states.shape[-2]
        if step.start != start or step.end != end or step.batch_size != self._batch_size:
            step, index = self._begin_step(step, key_states, value_states)
        elif key_states.shape != step.key_shape or value_states.shape != step.value_shape:
            raise self._mismatch(key_states, value_states)
        step.write(index, key_states, value_states)
        self.note_length(end)
        keys, values = step.keys[index], step.values[index]
        if step.is_fp8 and not (self._store.attends_in_place and self.is_read_in_place):
            if not self._store.attends_in_place:
                _say_that_it_decodes()
            keys, values = step.decoded(index, self.dtype)
        if self._store.returns_copies:
            keys, values = keys.contiguous(), values.contiguous()
        for each in (keys, values):  # A model may transform either before attention.
            each._vmkv_layer = self._tag  # type: ignore[attr-defined]
        return keys, values

    def decoded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tensors of the last `update`, decoded to the model's type."""
        step, index = self._store.places[self._index]
        return step.decoded(index, self.dtype)

    def _begin_step(
        self, step: GroupStep, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[GroupStep, int]:
        self._store.check_open()
        start, num_tokens = self._length, keys.shape[-2]
        shape = step.group.geometry.shape
        if keys.shape != (self._batch_size, shape.num_k_heads, num_tokens, shape.k_dim) or (
            values.shape != (self._batch_size, shape.num_v_heads, num_tokens, shape.v_dim)
        ):
            raise self._mismatch(keys, values)
        if start:
            if self._store.is_encoder_decoder and not self._store.has_seen_all:
                raise ConfigError(
                    f"layer {self._index} was updated twice in one pass: this is an "
                    "encoder-decoder model, which needs two caches; pass "
                    f"VMKVCache.for_encoder_decoder(config) as {compat.CACHE_NAME}"
                )
            follows_decoding = (step.start, step.end) == (start - 1, start) and start > 1
            if num_tokens > 1 and follows_decoding and not self._store.was_continued:
                self._store.was_continued = True
                _LOG.warning(
                    "new tokens continue the %d that an earlier generate left in this cache; for "
                    "another prompt make a new cache, or call reset() first",
                    start,
                )
            self._store.close_gaps()
        step, index = self._store.places[self._index]
        step.advance(self._batch_size, self._visible_from(start), start, start + num_tokens)
        return step, index

    def _visible_from(self, start: int) -> int:
        """Return the first token that a query at position `start` sees."""
        return 0 if self.window_tokens is None else max(0, start - self.window_tokens + 1)

    def note_length(self, num_tokens: int) -> None:
        """Note that the layer holds `num_tokens` tokens now, the new ones written."""
        self._length = num_tokens
        if self.window_tokens is not None and not self.record_past:
            self._first_kept = self._visible_from(num_tokens)

    def _mismatch(self, keys: torch.Tensor, values: torch.Tensor) -> ConfigError:
        step, _ = self._store.places[self._index]
        shape = step.group.geometry.shape
        return ConfigError(
            f"layer {self._index} holds a batch of {self._batch_size} with {shape.num_k_heads} "
            f"heads of {shape.k_dim} (values {shape.num_v_heads} of {shape.v_dim}), {self.dtype} "
            f"on {self.device}; got keys {tuple(keys.shape)} and values {tuple(values.shape)}, "
            f"{keys.dtype} on {keys.device}. Call reset() to start over with another batch"
        )

    # ---- attention in place -----------------------------------------------------------------

    def attend(self, asked: LayerCall, padding: torch.Tensor | None) -> torch.Tensor | None:
        """Attend to the layer's rows: `[B, Tq, Hq, Dv]`; None unless `padding` is left padding."""
        step, index = self._store.places[self._index]
        batch_size, num_heads, num_queries, dim = asked.query.shape
        if step.end != self._length or num_queries != step.end - step.start:
            return None
        batch = step.attention_batch(padding)
        if batch is None:
            return None
        call = Call(
            asked.query.transpose(1, 2).reshape(-1, num_heads, dim),
            *step.all_rows(index),
            batch,
            asked.scale,
            asked.window,
            asked.softcap,
            asked.sinks,
            step.group.scales_at(index),
        )
        kind = call.kind
        if self._kernel is None or self._kernel[0] != kind:
            spec = call.spec(step.rows.core.max_tokens)
            backend = select(spec, self._store.options.attention_backend)
            step.rows.core.keep_resident(backend.overread_tokens(spec))
            self._kernel = (kind, backend)
        self.is_read_in_place = True
        return self._kernel[1].attend(call).view(batch_size, num_queries, num_heads, -1)

    # ---- contents -------------------------------------------------------------------------

    def _kept(self, name: str) -> torch.Tensor | None:
        if not self.is_initialized:
            return None
        self._store.check_open()
        step, index = self._store.places[self._index]
        step.rows.core.unshare_all(step.rows.sequences)
        view: torch.Tensor = getattr(step.group.views, name)
        with torch.inference_mode(mode=False), torch.no_grad():
            return view[index, : self._batch_size, :, self._first_kept : self._length]

    def _assign(self, name: str, value: Any) -> None:
        # transformers assigns None to mean "forget", next to what `reset` does anyway.
        if value is None:
            return
        kept = self._kept(name)  # Which `layer.keys += …` assigns after it has changed them.
        if kept is None or not (type(value) is torch.Tensor and kept.is_set_to(value)):
            self.offload()

    def offload(self) -> None:
        """Refuse what would change one layer alone."""
        raise ConfigError(
            "keys and values of a VMKVCache cannot be replaced, nor can one layer be offloaded or "
            "reordered: edit them in place, as layer.values.mul_(…); add tokens by update; "
            "reorder_cache and batch_select_indices concern all layers, call them on the cache"
        )

    # Contents `[batch, kv_heads, kept_tokens, dim]`, or None; eight bits are not decoded. They may
    # be edited until the cache changes: what other entries or copies shared has been copied.
    keys = property(lambda self: self._kept("keys"), lambda self, to: self._assign("keys", to))
    values = property(lambda my: my._kept("values"), lambda my, to: my._assign("values", to))

    def get_seq_length(self, *args: Any) -> int:
        """Return the number of tokens seen so far, without waiting for the device."""
        if self._store.is_closed:  # `check_open` cannot be traced.
            self._store.check_open()
        return self._length

    # ---- changes --------------------------------------------------------------------------

    def crop(self, argument: int) -> None:
        """Remove the last tokens, and forget recorded ones that have left the window."""
        was_beyond_window = self._is_beyond_window
        self._length = self.cropped_length(int(argument))
        if was_beyond_window:
            self._first_kept = max(self._first_kept, self._visible_from(self._length))

    def cropped_length(self, argument: int) -> int:
        """Return how many tokens `crop(argument)` would leave, or raise what it would raise."""
        self._store.check_open()
        if self._is_beyond_window:
            if not self.record_past:
                raise past_is_lost()
            if argument > 0:
                raise RuntimeError(
                    "a sliding-window layer beyond its window is cropped by a negative number "
                    "of tokens to remove"
                )
        return compat.cropped_length(self._length, argument)

    @property
    def _is_beyond_window(self) -> bool:
        return self.window_tokens is not None and self._length >= self.window_tokens

    def reset(self) -> None:
        """Forget all tokens; memory stays for the next batch, which may be of another size."""
        self._store.check_open()
        self._length = self._first_kept = self._batch_size = 0
        self.is_initialized = False

    def __deepcopy__(self, memo: dict[int, Any]) -> VirtualLayer:
        """Copy the layer over a fork of its store, the same for all layers of a cache."""
        twin = copy.copy(self)
        twin._store, twin._kernel = copy.deepcopy(self._store, memo), None
        twin._tag = weakref.ref(twin)
        return twin


@functools.cache
def _say_that_it_decodes() -> None:
    _LOG.warning(
        "keys and values in eight bits are decoded for each layer and step, because the model "
        "attends through a function that cannot read them; "
        'model.set_attn_implementation("vmkv") reads them in place where a kernel can'
    )


def layer_behind(tensor: torch.Tensor) -> VirtualLayer | None:
    """Return the layer whose `update` returned exactly this tensor, or None."""
    tag = getattr(tensor, "_vmkv_layer", None)
    layer: VirtualLayer | None = None if tag is None else tag()
    return layer


class VMKVFullLayer(VirtualLayer, DynamicLayer):  # type: ignore[misc]
    """A layer whose queries see every token."""


class VMKVSlidingLayer(VirtualLayer, DynamicSlidingWindowLayer):  # type: ignore[misc]
    """A layer whose queries see the last `sliding_window` tokens; pages before them are retired."""

    @property
    def cumulative_length(self) -> int:
        """Number of tokens seen so far; transformers computes masks from it."""
        return self._length

    def activate_past_recording(self) -> None:
        """Keep tokens that leave the window until the next `crop`, so that it can go back."""
        self.record_past = True
        self._store.keep_past()


def past_is_lost() -> Exception:
    """Make the error for tokens that have left a sliding window for good."""
    return compat.CROPPED_TOO_FAR(
        "cannot crop beyond a sliding window: call activate_past_recording() before the tokens "
        "that are to be undone"
    )
