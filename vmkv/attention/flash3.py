"""FlashAttention-3 (Hopper): the fastest kernel there, at the price of an over-read.

Two packagings of the same kernels are accepted, looked for in this order:

  `flash_attn_interface`   what the flash-attention repository installs from `hopper/`
  `_vllm_fa3_C`            the operator library inside vLLM's wheel; found beside an installed
                           vLLM, already loaded, or named by `VMKV_FLASH3_LIBRARY`

Both read the 4-D view: rows by `kv_batch_idx`, lengths by `seqused_k`, and a mixed batch by
`cu_seqlens_q`; no row starts are needed.

The kernel fetches whole key tiles by TMA, past a sequence's length up to the tile's end, and
faults where that is not mapped. Rows outside the tensor's own shape are never fetched. Hence two
rules: `overread_tokens` is one tile, and the view is cut to the longest sequence of the batch, so
that a tile never reaches past a row's end into the next row.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError
from .base import AttentionSpec, Call, split
from .flash_common import FlashBackend, why_not_flash, window_bounds

LIBRARY_VARIABLE = "VMKV_FLASH3_LIBRARY"
"""Environment variable: path of vLLM's `_vllm_fa3_C` library, for use without vLLM."""

# Widest key tile by head size, of the 16-bit kernels, over causal, windowed and plain, in both
# packagings (`tile_size_fwd_sm90` in hopper/tile_size.h).
KEY_TILES = ((64, 192), (96, 144), (128, 176), (192, 128), (256, 80))

_QUERY_BLOCK = 128
"""Queries, of all heads, that a processor takes at a time."""

# Values of the library's arguments that are neither tensors nor set by a call. Whatever else a
# release adds is optional and left out as None, or makes `library_kernel` refuse it.
NEUTRAL = {
    "is_rotary_interleaved": True,
    "num_splits": 0,  # 0: the kernel's own heuristic; `Flash3Backend` says when not
    "sm_margin": 0,
    "attention_chunk": 0,
    "cp_world_size": 1,
    "cp_rank": 0,
}
# What a call sets, and what the kernel must therefore accept.
CALL_ARGUMENTS = frozenset(
    {
        "q",
        "k",
        "v",
        "cu_seqlens_q",
        "seqused_k",
        "max_seqlen_q",
        "kv_batch_idx",
        "leftpad_k",
        "softmax_scale",
        "is_causal",
        "window_size_left",
        "window_size_right",
        "softcap",
        "num_splits",
    }
)

Kernel = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class Flash3Backend(FlashBackend):
    """FlashAttention-3 as a backend; see `AttentionBackend`."""

    name = "flash3"

    def overread_tokens(self, k_dim: int, v_dim: int | None = None) -> int:
        """One key tile: 192 tokens at head size 64, 176 at 128, 80 at 256."""
        for limit, tile in KEY_TILES:
            if k_dim <= limit:
                return tile
        raise ConfigError(f"FlashAttention-3 serves head sizes up to 256, not {k_dim}")

    def why_not(self, spec: AttentionSpec) -> str | None:
        """Hopper, one of the packagings, and the limits of FlashAttention-3."""
        limit = why_not_flash(spec, same_head_sizes=False)
        if limit is not None:
            return limit
        if torch.cuda.get_device_capability()[0] != 9:
            return "its kernels are for Hopper (compute capability 9.0)"
        same = spec.k_dim == spec.v_dim
        latent = spec.k_dim <= 64
        wide_keys = 128 < spec.k_dim <= 192 and 96 < spec.v_dim <= 128
        if not (same or latent or wide_keys):
            return f"it has no kernel for head sizes {spec.k_dim} and {spec.v_dim}"
        loaded = _load()
        return loaded if isinstance(loaded, str) else None

    def launch(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """See `FlashBackend.launch`."""
        query, keys, values, batch = call[:4]
        kernel = _load()
        if isinstance(kernel, str):
            raise ConfigError(f"'flash3' cannot run: {kernel}")
        uniform = batch.is_uniform(query.shape[0])
        if uniform:
            query = split(query, 0, (batch.batch_size, batch.max_query_tokens))
        longest = batch.max_num_tokens
        # Whoever may split pays for the pass that joins the parts, split or not (H200, 2,048
        # queries in tiles: 45 us, 32 without): no use where queries alone keep the device busy.
        num_blocks = query.numel() // (query.shape[-1] * _QUERY_BLOCK)
        is_busy = num_blocks >= _num_processors(query.device)
        out, logsumexp = kernel(
            query,
            keys[:, :longest],
            values[:, :longest],
            seqused_k=batch.num_tokens,
            kv_batch_idx=batch.row_indices,
            leftpad_k=batch.left_pad,
            cu_seqlens_q=None if uniform else batch.query_starts,
            max_seqlen_q=None if uniform else batch.max_query_tokens,
            scale=call.scale,
            causal=call.causal,
            window=window_bounds(call.causal, call.window),
            softcap=call.softcap,
            num_splits=1 if is_busy else 0,
        )
        return out.flatten(0, 1) if uniform else out, logsumexp


@functools.cache
def _num_processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def _load() -> Kernel | str:
    """The kernel behind one signature (see `package_kernel`), or why there is none."""
    reasons = []
    for source in (package_kernel, library_kernel):
        found = source()
        if not isinstance(found, str):
            return found
        reasons.append(found)
    return "; ".join(reasons)


def package_kernel() -> Kernel | str:
    """The kernel of the package `flash_attn_interface`, or why there is none."""
    try:
        from flash_attn_interface import flash_attn_with_kvcache
    except Exception as error:  # noqa: BLE001  # a wheel for another torch fails in its own ways
        return f"package flash_attn_interface cannot be imported: {error}"

    def kernel(
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        seqused_k: torch.Tensor,
        kv_batch_idx: torch.Tensor,
        leftpad_k: torch.Tensor | None,
        cu_seqlens_q: torch.Tensor | None,
        max_seqlen_q: int | None,
        scale: float,
        causal: bool,
        window: tuple[int, int],
        softcap: float,
        num_splits: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, logsumexp, *_ = flash_attn_with_kvcache(
            query,
            keys,
            values,
            cache_seqlens=seqused_k,
            cache_batch_idx=kv_batch_idx,
            cache_leftpad=leftpad_k,
            cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=max_seqlen_q,
            softmax_scale=scale,
            causal=causal,
            window_size=window,
            softcap=softcap,
            num_splits=num_splits,
            return_softmax_lse=True,
        )
        return out, logsumexp

    return kernel


def library_kernel() -> Kernel | str:
    """The kernel of vLLM's library, or why there is none.

    Its releases differ in the arguments they take. Whatever the operator knows may be passed by
    name; what is not passed is left neutral.
    """
    operator = _operator()
    if isinstance(operator, str):
        return operator
    arguments = [(argument.name, argument) for argument in operator._schema.arguments]
    missing = CALL_ARGUMENTS - {name for name, _ in arguments}
    unknown = [
        name
        for name, argument in arguments
        if name not in CALL_ARGUMENTS
        and name not in NEUTRAL
        and not isinstance(argument.type, torch.OptionalType)
    ]
    if missing or unknown:
        return f"this _vllm_fa3_C lacks arguments {sorted(missing)} or needs {unknown}"
    neutral: dict[str, Any] = {name: NEUTRAL.get(name) for name, _ in arguments}

    def kernel(
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scale: float,
        causal: bool,
        window: tuple[int, int],
        **others: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        call = neutral | others
        call |= {"q": query, "k": keys, "v": values, "softmax_scale": scale, "is_causal": causal}
        call |= {"window_size_left": window[0], "window_size_right": window[1]}
        out, logsumexp, *_ = operator(*call.values())
        return out, logsumexp

    return kernel


def _operator() -> Any:
    """`torch.ops._vllm_fa3_C.fwd.default`, loading its library if need be, or why there is none."""
    if not hasattr(torch.ops._vllm_fa3_C, "fwd"):
        path = _library_path()
        if path is None:
            return f"no vLLM with _vllm_fa3_C is installed, and {LIBRARY_VARIABLE} is not set"
        try:
            torch.ops.load_library(path)  # type: ignore[no-untyped-call]
        except OSError as error:
            return f"{path} cannot be loaded: {error}"
    if not hasattr(torch.ops._vllm_fa3_C, "fwd"):
        return f"{path} registers no operator _vllm_fa3_C::fwd"
    return torch.ops._vllm_fa3_C.fwd.default


def _library_path() -> Path | None:
    named = os.environ.get(LIBRARY_VARIABLE)
    if named:
        return Path(named)
    # `find_spec` of a top-level package does not run it; importing vLLM takes seconds.
    spec = importlib.util.find_spec("vllm")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        for path in sorted(Path(folder, "vllm_flash_attn").glob("_vllm_fa3_C*.so")):
            return path
    return None
