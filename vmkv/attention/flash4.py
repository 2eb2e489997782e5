"""FlashAttention-4 (`flash_attn.cute`, package `flash-attn-4`): kernels written in Python.

They come with pip alone, and compile at their first use (3 s a kind). To the varlen function a row
is a page of its own: the page table is the batch's rows, and a page is as long as a row. Pages of
that size are fetched with a test of every token against `seqused_k`, so nothing is over-read.
(The flat view with each row's start in place of a cumulative length is 8 % faster in prefill,
through the copy engine, whose last tile runs past a row's end.)

Its Hopper kernels do not split the keys of a sequence. A few sequences that decode leave most of
the device idle then, and are left to torch's kernel, which splits them (one H200, Llama-3-8B shape,
tried by hand: one sequence of 8,192 tokens 90 us here and 24 there, 32 of 1,024 41 and 64).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from ..errors import ConfigError
from .base import AttentionSpec, Call
from .flash_common import FlashBackend, why_not_flash
from .torch_flash import TorchFlashBackend, has_varlen

#: What releases must take.
NEEDED = {"page_table", "seqused_k", "softmax_scale", "window_size", "return_lse"}


class Flash4Backend(FlashBackend):
    """FlashAttention-4 as a backend; see `AttentionBackend`."""

    name = "flash4"

    def overread_tokens(
        self, k_dim: int, v_dim: int | None = None, kv_dtype: torch.dtype | None = None
    ) -> int:
        """0: every token that is fetched from a page is tested first."""
        return 0

    def why_not(self, spec: AttentionSpec) -> str | None:
        """Hopper or newer, the package, and what its release can do."""
        limit = why_not_flash(spec, same_head_sizes=False)
        if limit is not None:
            return limit
        if spec.left_pad:
            return "its page tables begin where rows do, and cannot skip padding"
        if torch.cuda.get_device_capability()[0] < 9:
            return "its kernels are for Hopper and newer"
        loaded = _load()
        return loaded if isinstance(loaded, str) else None

    def launch(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """See `FlashBackend.launch`."""
        batch = call.batch
        if _is_narrow(call):
            return TorchFlashBackend().launch(call)
        out, logsumexp, *_ = varlen(
            call.query,
            call.keys,
            call.values,
            cu_seqlens_q=batch.query_starts,
            seqused_k=batch.visible_tokens,
            page_table=batch.row_indices[:, None],
            max_seqlen_q=batch.max_query_tokens,
            softmax_scale=call.scale,
            causal=call.causal,
            window_size=(None, None) if call.window is None else (call.window - 1, 0),
            softcap=call.softcap,
            return_lse=call.sinks is not None,
        )
        return out, logsumexp


def varlen(*tensors: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The package's varlen function.

    Raises:
        ConfigError: It cannot be had here.
    """
    loaded = _load()
    if isinstance(loaded, str):
        raise ConfigError(f"'flash4' cannot run: {loaded}")
    attended: tuple[torch.Tensor, torch.Tensor] = loaded(*tensors, **options)
    return attended


def _is_narrow(call: Call) -> bool:
    """Whether so few sequences decode that their keys should be split, and torch can do it."""
    query, batch = call.query, call.batch
    if batch.max_query_tokens > 1 or call.softcap or query.shape[2] != call.values.shape[3]:
        return False
    num_blocks = batch.row_indices.shape[0] * call.keys.shape[2]
    num_processors = torch.cuda.get_device_properties(query.device).multi_processor_count
    return 2 * num_blocks < num_processors and has_varlen()


@functools.cache
def _load() -> Callable[..., Any] | str:
    """The varlen function, or why there is none."""
    try:
        from flash_attn.cute import flash_attn_varlen_func
    except Exception as error:  # noqa: BLE001  # missing compilers fail in their own ways
        return f"package flash-attn-4 cannot be imported: {error}"
    missing = NEEDED - set(inspect.signature(flash_attn_varlen_func).parameters)
    if missing:
        return f"this release of flash_attn.cute takes no {sorted(missing)}"
    function: Callable[..., Any] = flash_attn_varlen_func
    return function
