"""FlashAttention-4 (`flash_attn.cute`, package `flash-attn-4`): kernels written in Python.

The varlen function over the flat view, with each row's start in place of a cumulative length and
its length in `seqused_k`. It has no batch index, so the flat view is the only way in, and that
view does not end where a row ends: a tile at the end of a full row would be fetched from the next
row, which need not be mapped. `forward` therefore refuses a batch whose longest sequence ends
less than a tile before its row does.

Not selected by default: nothing of it has been measured for this project. Ask for it by name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from ..errors import ConfigError
from .base import AttentionSpec, Call, flat
from .flash_common import FlashBackend, why_not_flash

# Widest key tile by head size, over causal, windowed and plain, on Hopper and Blackwell
# (`_tile_size_fwd_sm90` and `FwdConfig` in flash_attn/cute/interface.py; releases of 2025 used
# 192 wherever there was neither mask nor window).
KEY_TILES = ((128, 192), (256, 128))


class Flash4Backend(FlashBackend):
    """FlashAttention-4 as a backend; see `AttentionBackend`."""

    name = "flash4"

    def overread_tokens(
        self, k_dim: int, v_dim: int | None = None, kv_dtype: torch.dtype | None = None
    ) -> int:
        """One key tile."""
        for limit, tile in KEY_TILES:
            if k_dim <= limit:
                return tile
        raise ConfigError(f"FlashAttention-4 serves head sizes up to 256, not {k_dim}")

    def why_not(self, spec: AttentionSpec) -> str | None:
        """Hopper or newer, the package, and what its release can do."""
        limit = why_not_flash(spec, same_head_sizes=False)
        if limit is not None:
            return limit
        if torch.cuda.get_device_capability()[0] < 9:
            return "its kernels are for Hopper and newer"
        loaded = _load()
        if isinstance(loaded, str):
            return loaded
        if spec.has_sinks and "return_lse" not in loaded[1]:
            return "this release of flash_attn.cute does not return the log-sum-exp for sinks"
        return None

    def launch(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """See `FlashBackend.launch`; rows must have room for the last tile."""
        query, keys, values, batch = call[:4]
        tile = self.overread_tokens(query.shape[2], values.shape[3])
        if batch.max_num_tokens + tile > batch.row_tokens:
            raise ConfigError(
                f"'flash4' reads up to {tile} tokens past a sequence of {batch.max_num_tokens}, "
                f"beyond its row of {batch.row_tokens}; use longer rows or another backend"
            )
        loaded = _load()
        if isinstance(loaded, str):
            raise ConfigError(f"'flash4' cannot run: {loaded}")
        function, parameters = loaded
        more: dict[str, Any] = {}
        if "max_seqlen_q" in parameters:
            more |= {
                "max_seqlen_q": batch.max_query_tokens,
                "max_seqlen_k": batch.max_num_tokens,
            }
        if "return_lse" in parameters:
            more["return_lse"] = call.sinks is not None
        elif call.sinks is not None:
            raise ConfigError("this release of flash_attn.cute cannot serve sinks")
        out, logsumexp, *_ = function(
            query,
            flat(keys),
            flat(values),
            cu_seqlens_q=batch.query_starts,
            cu_seqlens_k=batch.key_starts,
            seqused_k=batch.visible_tokens,
            softmax_scale=call.scale,
            causal=call.causal,
            window_size=(None, None) if call.window is None else (call.window - 1, 0),
            softcap=call.softcap,
            **more,
        )
        return out, logsumexp


@functools.cache
def _load() -> tuple[Callable[..., Any], frozenset[str]] | str:
    """The varlen function and its parameters, or why there is none."""
    try:
        from flash_attn.cute import flash_attn_varlen_func
    except Exception as error:  # noqa: BLE001  # missing compilers fail in their own ways
        return f"package flash-attn-4 cannot be imported: {error}"
    parameters = frozenset(inspect.signature(flash_attn_varlen_func).parameters)
    missing = {"cu_seqlens_k", "seqused_k", "softmax_scale", "window_size"} - parameters
    if missing:
        return f"this release of flash_attn.cute takes no {sorted(missing)}"
    return flash_attn_varlen_func, parameters
