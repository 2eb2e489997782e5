"""FlashAttention-2, from the package `flash-attn`: no over-read, and appends in its kernel.

Two of its kernels read rows in place:

  uniform batch   `flash_attn_with_kvcache` over the 4-D view: rows by `cache_batch_idx`, lengths
                  by `cache_seqlens`, left padding by `cache_leftpad`. It splits long sequences
                  over the device, and it can write the new token itself.
  mixed batch     the varlen kernel over the flat view, with each row's start in place of a
                  cumulative length (`cu_seqlens_k`) and its length in `seqused_k`. The package's
                  public varlen function hides `seqused_k`; the function below it has it.

Every fetch is predicated by the length, so `overread_tokens` is 0. Sinks come from the returned
log-sum-exp.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch

from ..errors import ConfigError
from .base import AttentionSpec, check_call, flat, split
from .batch import AttentionBatch
from .flash_common import apply_sinks, check_dtype, why_not_flash, window_bounds


@functools.cache
def _load() -> ModuleType | str:
    """The package's interface module, or why there is none."""
    try:
        import flash_attn.flash_attn_interface as interface
    except Exception as error:  # noqa: BLE001  # a wheel for another torch fails in its own ways
        return f"package flash-attn (2.7 or newer) cannot be imported: {error}"
    module: ModuleType = interface
    if not hasattr(module, "_flash_attn_varlen_forward"):
        return "package flash-attn is older than 2.7"
    return module


def _interface() -> ModuleType:
    loaded = _load()
    if isinstance(loaded, str):
        raise ConfigError(f"'flash2' cannot run: {loaded}")
    return loaded


class Flash2Backend:
    """FlashAttention-2 as a backend; see `AttentionBackend` and `AppendingBackend`."""

    name = "flash2"

    def overread_tokens(self, k_dim: int, v_dim: int | None = None) -> int:
        """0: the kernel predicates every key row by the sequence's length."""
        return 0

    def why_not(self, spec: AttentionSpec) -> str | None:
        """The package, and the limits of FlashAttention-2."""
        limit = why_not_flash(spec, same_head_sizes=True)
        if limit is not None:
            return limit
        if torch.cuda.get_device_capability() < (8, 0):
            return "it needs compute capability 8.0 or newer"
        loaded = _load()
        return loaded if isinstance(loaded, str) else None

    def forward(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        causal: bool = True,
        window: int | None = None,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend.forward`."""
        check_dtype(self.name, query)
        check_call(query, keys, values, batch, causal=causal, window=window, sinks=sinks)
        if batch.is_uniform(query.shape[0]):
            return _with_kvcache(
                query, keys, values, batch, batch.num_tokens, None, None,
                scale, causal, window, softcap, sinks,
            )  # fmt: skip
        left, right = window_bounds(causal, window)
        out, logsumexp, *_ = _interface()._flash_attn_varlen_forward(
            query,
            flat(keys),
            flat(values),
            batch.query_starts,
            batch.key_starts,
            batch.max_query_tokens,
            batch.max_num_tokens,
            0.0,
            scale,
            causal,
            window_size_left=left,
            window_size_right=right,
            softcap=softcap,
            seqused_k=batch.visible_tokens,
        )
        return out if sinks is None else apply_sinks(out, logsumexp.transpose(0, 1), sinks)

    def append_and_attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        causal: bool = True,
        window: int | None = None,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `AppendingBackend.append_and_attend`."""
        check_dtype(self.name, query)
        check_call(query, keys, values, batch, causal=causal, window=window, sinks=sinks)
        if not batch.is_uniform(query.shape[0]):
            raise ConfigError(
                "appending in the kernel needs as many queries of every sequence; "
                "call append() and forward() for a mixed batch"
            )
        return _with_kvcache(
            query, keys, values, batch, batch.tokens_before, key, value,
            scale, causal, window, softcap, sinks,
        )  # fmt: skip


def _with_kvcache(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: AttentionBatch,
    cached_tokens: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    scale: float,
    causal: bool,
    window: int | None,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The decode kernel; `key` and `value` are appended at `cached_tokens` when given."""
    shape = (batch.batch_size, batch.max_query_tokens)
    # The kernel decides from the view's length how far to split a sequence, so show it the
    # longest sequence of the batch and not the capacity of a row.
    longest = batch.max_num_tokens
    out, logsumexp = _interface().flash_attn_with_kvcache(
        split(query, 0, shape),
        keys[:, :longest],
        values[:, :longest],
        k=None if key is None else split(key, 0, shape),
        v=None if value is None else split(value, 0, shape),
        cache_seqlens=cached_tokens,
        cache_batch_idx=batch.row_indices,
        cache_leftpad=batch.left_pad,
        softmax_scale=scale,
        causal=causal,
        window_size=window_bounds(causal, window),
        softcap=softcap,
        return_softmax_lse=True,
    )
    out = out.flatten(0, 1)
    return (
        out if sinks is None else apply_sinks(out, logsumexp.transpose(1, 2).flatten(0, 1), sinks)
    )
