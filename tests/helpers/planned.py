"""Bytes of a token, and of a sequence's states, as planned and as an engine's rows have them."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from vmkv.cli.capacity import kind_bytes, model_shape
from vmkv.hf.configuration import layer_windows
from vmkv.hf.proof import prove
from vmkv.hf.store import CacheOptions, Store
from vmkv.units import KiB

#: All layers of a kind lie side by side, as on a GPU.
_OPTIONS = CacheOptions(max_tokens=64, max_batch_size=2, layers_per_group=1000)


def engine_bytes(model: Any, kv_dtype: str = "auto") -> list[int]:
    """Bytes of a token in each group of rows, and last those of a sequence's states."""
    signatures, calls, _ = prove(model, kv_dtype=kv_dtype)
    options = dataclasses.replace(_OPTIONS, kv_dtype=kv_dtype)
    store = Store(model.config, options, layer_windows(model.config), past_stated=False)
    with contextlib.closing(store):
        store.bind_all(signatures, calls)
        (cache,) = store.cores
        states = 0 if cache.states is None else cache.states.state_bytes
        return [*sorted(each.token_bytes for each in cache.groups if not each.is_fixed), states]


def planned_bytes(config: Any, dtype: str, kv_dtype: str = "auto") -> list[int]:
    """Bytes of a token for each kind of layers, and last those of a sequence's states."""
    shape = model_shape(config, dtype=dtype, kv_dtype=kv_dtype)
    return [*sorted(kind_bytes(each, 1).token_bytes for each in shape.kinds), shape.state_bytes]


def check_planned(model: Any, config: Any) -> None:
    """Check that the rows of a model in float32 are those that `vmkv plan` promises."""
    *rows, states = planned_bytes(config, "float32")
    *kept, kept_states = engine_bytes(model)
    assert kept == rows
    # States begin at multiples of some bytes; a row of them takes whole pages anyway.
    assert states <= kept_states < states + 4 * KiB
