"""`VMKVCache`: a drop-in for `DynamicCache` whose sequences lie in virtual memory.

model.generate(**inputs, cache=VMKVCache(config=model.config))  # transformers 5.24
model.generate(**inputs, past_key_values=VMKVCache(config=model.config))  # before that
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from ..errors import ConfigError
from . import compat
from .layers import VirtualLayer, VMKVFullLayer, VMKVSlidingLayer, past_is_lost
from .store import CacheOptions, Store, StoreOwner


class VMKVCache(StoreOwner, DynamicCache):  # type: ignore[misc]
    """A transformers cache that grows by mapping pages instead of copying. Not thread-safe.

    Full-attention and sliding-window layers live in virtual memory; layers of other kinds (linear
    attention, state spaces, …) stay transformers' own. The first update allocates memory and
    determines device, dtype and shapes.

    Args:
        config: The model's configuration.
        options: `max_tokens`, `max_batch_size`, `budget_bytes`, `backend`, `pool`, `memory`,
            `layers_per_group`, `attention_backend`, `kv_dtype`, `kv_scales` and `skip_layers`: see
            `vmkv.hf.store.CacheOptions`.

    Raises:
        ConfigError: An option is invalid, or the model cannot be served.
        TypeError: There is no such option.

    `close()` or the end of a `with` block frees the cache. A cache dropped without `close` is freed
    when the next one is made, with a ResourceWarning.
    """

    def __init__(self, config: Any, *, offloading: bool = False, **options: Any):
        if offloading:
            raise ConfigError("VMKVCache does not offload; use DynamicCache(offloading=True)")
        layers = compat.default_cache(config).layers
        kinds = map(compat.window_of, layers)
        windows = {index: window for index, (is_ours, window) in enumerate(kinds) if is_ours}
        self._own(Store(config, CacheOptions(**options), windows))
        for index, window in windows.items():
            layer_class = VMKVFullLayer if window is None else VMKVSlidingLayer
            layers[index] = layer_class(index, self._store, window, layers[index])
        self._take(layers)

    def _take(self, layers: list[Any]) -> None:
        Cache.__init__(self, layers=layers)
        self._virtual_layers = [layer for layer in layers if isinstance(layer, VirtualLayer)]
        self._num_keeping = len(layers) - sum(map(compat.keeps_nothing, layers))

    @classmethod
    def for_encoder_decoder(cls, config: Any, **options: Any) -> EncoderDecoderCache:
        """Make the two caches of an encoder-decoder model, both in virtual memory.

        `options` are those of `VMKVCache`. The cross-attention cache stays in the model's type
        whatever `kv_dtype`, because models read its keys and values themselves.
        """
        plain = {**options, "kv_dtype": "auto", "kv_scales": None, "skip_layers": ()}
        return EncoderDecoderCache(cls(config, **options), cls(config, **plain))

    # ---- steps that bypass the layers -----------------------------------------------------

    def is_uniform(self, batch_size: int) -> bool:
        """Whether all layers with keys are virtual and equally long; steps may bypass them then."""
        layers, store = self._virtual_layers, self._store
        num_tokens = max([layer._length for layer in layers], default=0)
        return (
            num_tokens > 0
            and len(layers) == self._num_keeping
            and not store.is_closed
            and store.has_seen_all
            and len(store.cores) == 1
            and {(each._length, each._batch_size) for each in layers} == {(num_tokens, batch_size)}
        )

    def begin_step(self, batch_size: int) -> None:
        """Make room for one token per row. An error changes nothing."""
        (rows,) = self._store.rows.values()
        rows.ensure(batch_size, self._virtual_layers[0]._length + 1)

    def end_step(self) -> None:
        """Count one more token in every layer, written by other means than `update`."""
        for layer in self._virtual_layers:
            layer.note_length(layer._length + 1)

    # ---- changes of the whole batch -------------------------------------------------------

    def crop(self, argument: int) -> None:
        """Remove the last tokens of every layer; `argument` as in this transformers release.

        Raises:
            ValueError, RuntimeError: As the release's own layers. Nothing changed.
        """
        argument = int(argument)  # Assisted decoding may pass a tensor.
        # Check all layers before any is changed.
        lengths = [layer.cropped_length(argument) for layer in self._virtual_layers]
        if not self._store.keeps(max(lengths, default=0)):
            raise past_is_lost()
        for layer in sorted(self.layers, key=lambda each: isinstance(each, VirtualLayer)):
            layer.crop(argument)  # Layers of other kinds first: they may still refuse.
        self._settle()
        for rows in self._store.rows.values():  # Even while past tokens are kept.
            rows.core.retire_behind_windows()

    def reset(self) -> None:
        """Forget all tokens; memory stays parked for the next batch, of any size."""
        self._store.check_open()
        fresh = compat.default_cache(self._store.decoder_config).layers
        for index, layer in enumerate(self.layers):
            if isinstance(layer, VirtualLayer):
                layer.reset()
            else:  # Its own reset keeps states of the last batch's size, type and mode.
                self.layers[index] = fresh[index]
        self._settle()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Replace batch entry i by entry `beam_idx[i]`: the step of a beam search.

        Entries share their common tokens: see `KVCache.reorder`. An `OutOfPagesError` changes
        nothing if the model is on one device.

        Cost: waits for the indices; copies tokens that the beams wrote since they diverged.
        """
        self._rearrange("reorder_cache", beam_idx, beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each batch entry `repeats` times, next to itself; the new entries are forks."""
        entries = torch.arange(self._batch_size).repeat_interleave(repeats)
        self._rearrange("batch_repeat_interleave", repeats, entries)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the batch entries `indices`; the memory of the others is parked."""
        self._rearrange("batch_select_indices", indices, indices)

    @property
    def _batch_size(self) -> int:
        return max((layer._batch_size for layer in self._virtual_layers), default=0)

    def _rearrange(self, method: str, argument: Any, sources: torch.Tensor) -> None:
        others = [each for each in self.layers if not isinstance(each, VirtualLayer)]
        calls = [getattr(each, method) for each in others]  # Some lack it: before any change.
        if any(layer._length for layer in self._virtual_layers):
            # Like transformers' layers, accept lists, a boolean mask and negative indices.
            index = torch.as_tensor(sources, device="cpu")
            entries: list[int] = torch.arange(self._batch_size)[index].tolist()
            self._store.take_over(entries)
            for layer in self._virtual_layers:
                if layer.is_initialized:
                    layer._batch_size = len(entries)
        for call in calls:
            call(argument)
        self._settle()

    def _settle(self) -> None:
        num_tokens = max((layer._length for layer in self._virtual_layers), default=0)
        # Without tokens there is no batch: the next one may be smaller.
        self._store.settle(self._batch_size if num_tokens else 0, num_tokens)

    def close(self) -> None:
        """Wait for submitted work and free everything. Idempotent.

        Tensors from the cache must not be used afterwards.
        """
        compat.drop_shared_layers(self)
        super().close()

    # ---- copies ---------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> VMKVCache:
        """Copy the cache within its pools: each entry a fork; neither sees the other's writes."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin._own(copy.deepcopy(self._store, memo))
        try:
            twin._take(copy.deepcopy(self.layers, memo))
        except BaseException:
            twin.close()
            raise
        return twin

    def __reduce__(self) -> Any:
        raise ConfigError(
            "a VMKVCache lives in one process's memory and cannot be pickled or saved; use "
            "copy.deepcopy within the process, or save layer.keys.clone() and layer.values.clone()"
        )
