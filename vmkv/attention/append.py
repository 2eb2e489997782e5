"""The fused append: write a step's keys and values, of every sequence, into their rows.

A model produces the new keys and values packed, `[Tq, H, D]`; each token belongs at the end of
its own row. One call writes both tensors of a layer. On CUDA that is one kernel that finds each
token's row by itself (`append_cuda.py`), where `index_put` takes two launches and an index vector;
on CPU, two `index_copy_` over the flat view with indices shared by all layers.

Only the new tokens' places are written, and nothing else is read or written: the rest of the
view may not be mapped.
"""

from __future__ import annotations

import torch

from ..cache.fp8 import FP8, Scales, encode
from ..errors import ConfigError
from .base import check_rows, check_scales, flat
from .batch import AttentionBatch


def append(
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: AttentionBatch,
    scales: Scales | None = None,
) -> None:
    """Write new keys and values at positions `num_tokens - query_tokens + i` of their rows.

    Of padding, whose positions are below 0, nothing is written.

    Args:
        key: `[Tq, H, Dk]`, packed as `batch.query_starts` says; any strides whose last is 1.
        value: `[Tq, H, Dv]`, likewise.
        keys: `[rows, row_tokens, H, Dk]`, the layer's view; written. Of the new keys' type, or in
            eight bits, see `cache/fp8.py`.
        values: `[rows, row_tokens, H, Dv]`, the layer's view; written.
        batch: This step's batch; its `num_tokens` already count the new ones.
        scales: Of a layer in eight bits; None for 1.

    Raises:
        ConfigError: Shapes, dtypes or devices do not fit. Nothing was written.

    Cost: one launch on CUDA; elsewhere two operations, and a few per batch.
    Ordering: on the current stream, before any attention launched on it later.
    """
    for new, view, what in ((key, keys, "keys"), (value, values, "values")):
        if view.ndim != 4 or new.ndim != 3 or new.shape[1:] != view.shape[2:]:
            raise ConfigError(
                f"new {what} {tuple(new.shape)} do not fit the view {tuple(view.shape)}"
            )
        if view.dtype not in (new.dtype, FP8) or new.device != view.device:
            raise ConfigError(
                f"new {what} are {new.dtype} on {new.device}, "
                f"the view is {view.dtype} on {view.device}"
            )
        check_rows(view, batch.row_tokens)
    if key.shape[0] != value.shape[0]:
        raise ConfigError(f"{key.shape[0]} new keys but {value.shape[0]} new values")
    if scales is not None:
        check_scales(scales, keys)
    if key.is_cuda:
        # Imported here: it compiles for a GPU, which other machines have no tools for.
        from .append_cuda import append_ragged

        append_ragged(
            key,
            value,
            keys,
            values,
            batch.row_indices,
            batch.num_tokens,
            batch.query_starts,
            scales,
        )
    else:
        positions = batch.flat_positions
        if positions.numel() and int(positions.min()) < 0:
            is_real = positions >= 0
            positions, key, value = positions[is_real], key[is_real], value[is_real]
        if keys.dtype == FP8:
            # Stored bytes are copied as what they are: torch indexes no numbers of eight bits.
            key = encode(key, None if scales is None else scales.inverse_keys).view(torch.uint8)
            value = encode(value, None if scales is None else scales.inverse_values)
            keys, values, value = (each.view(torch.uint8) for each in (keys, values, value))
        flat(keys).index_copy_(0, positions, key)
        flat(values).index_copy_(0, positions, value)
