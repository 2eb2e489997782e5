"""FlashAttention-2, from the package `flash-attn` or the Hugging Face Hub (`flash_common.py`).

Two of its kernels read rows in place:

  uniform batch   `flash_attn_with_kvcache` over the 4-D view: rows by `cache_batch_idx`, lengths
                  by `cache_seqlens`, left padding by `cache_leftpad`. It splits long sequences
                  over the device, and it can write the new token itself.
  mixed batch     the varlen kernel over the flat view, with each row's start in place of a
                  cumulative length (`cu_seqlens_k`) and its length in `seqused_k`. The package's
                  public varlen function hides `seqused_k`; the function below it has it.

Every fetch is predicated by the length, so `overread_tokens` is 0. Sinks are applied from the
returned log-sum-exp.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch

from ..core.cache.fp8 import Scales
from ..errors import ConfigError
from . import flash_common as hub
from .base import AttentionBatch, AttentionSpec, Call, check_call, flat, split
from .flash_common import (
    FlashBackend,
    apply_sinks,
    by_token,
    check_dtype,
    why_not_flash,
    window_bounds,
)

HUB_KERNEL = "kernels-community/flash-attn2"
"""Repository on the Hugging Face Hub; versions from 4 on are built for torch 2.10 and newer."""
_TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


@functools.cache
def _load() -> ModuleType | str:
    """Return the interface module, or the reason why there is none."""
    package = _package()
    if not isinstance(package, str):
        return package
    of_hub = hub.load(HUB_KERNEL, 4 if _TORCH >= (2, 10) else 3)
    if isinstance(of_hub, str):
        return f"{package}; {of_hub}"
    interface: ModuleType = of_hub.flash_attn_interface
    return interface


def _package() -> ModuleType | str:
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


class Flash2Backend(FlashBackend):
    """FlashAttention-2 as an `AttentionBackend` and `AppendingBackend`."""

    name = "flash2"

    def overread_tokens(
        self, k_dim: int, v_dim: int | None = None, kv_dtype: torch.dtype | None = None
    ) -> int:
        """Return 0: the kernel predicates every key row by the sequence's length."""
        return 0

    def why_not(self, spec: AttentionSpec) -> str | None:
        """Check the limits of FlashAttention-2 and that the package can be imported."""
        limit = why_not_flash(spec, same_head_sizes=True)
        if limit is not None:
            return limit
        if torch.cuda.get_device_capability() < (8, 0):
            return "it needs compute capability 8.0 or newer"
        loaded = _load()
        return loaded if isinstance(loaded, str) else None

    def launch(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch the decode kernel for a uniform batch, the varlen kernel for a mixed one."""
        query, keys, values, batch = call[:4]
        if batch.is_uniform(query.shape[0]):
            return _with_kvcache(call)
        left, right = window_bounds(call.causal, call.window)
        out, logsumexp, *_ = _interface()._flash_attn_varlen_forward(
            query,
            flat(keys),
            flat(values),
            batch.query_starts,
            batch.key_starts,
            batch.max_query_tokens,
            batch.max_num_tokens,
            0.0,
            call.scale,
            call.causal,
            window_size_left=left,
            window_size_right=right,
            softcap=call.softcap,
            seqused_k=batch.visible_tokens,
        )
        return out, logsumexp

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
        scales: Scales | None = None,
    ) -> torch.Tensor:
        """Append and attend in one launch; the batch must be uniform."""
        call = Call(query, keys, values, batch, scale, causal, window, softcap, sinks, scales)
        check_call(call)
        check_dtype(self.name, query, keys)
        if not batch.is_uniform(query.shape[0]):
            raise ConfigError(
                "appending in the kernel needs as many queries of every sequence; "
                "call append() and forward() for a mixed batch"
            )
        out, logsumexp = _with_kvcache(call, (key, value))
        return out if sinks is None else apply_sinks(out, by_token(logsumexp), sinks)


def _with_kvcache(
    call: Call, appended: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the decode kernel, which first writes the keys and values in `appended`."""
    query, keys, values, batch = call[:4]
    shape = (batch.batch_size, batch.max_query_tokens)
    # The kernel chooses its number of splits by the view's length, so cut the view to the longest
    # sequence of the batch. Its choice is kept: no other number, 1 to 128, brings rows closer to
    # the speed of a dense tensor, and the same numbers are best for both.
    # The view keeps at least as many keys as a key head has query heads: the kernel treats those
    # as queries of one head, and refuses to append to a shorter view. It reads no more keys.
    num_grouped = query.shape[1] // keys.shape[2] * batch.max_query_tokens
    longest = min(batch.row_tokens, max(batch.max_num_tokens, num_grouped))
    out, logsumexp = _interface().flash_attn_with_kvcache(
        split(query, 0, shape),
        keys[:, :longest],
        values[:, :longest],
        k=None if appended is None else split(appended[0], 0, shape),
        v=None if appended is None else split(appended[1], 0, shape),
        cache_seqlens=batch.num_tokens if appended is None else batch.tokens_before,
        cache_batch_idx=batch.row_indices,
        cache_leftpad=batch.left_pad,
        softmax_scale=call.scale,
        causal=call.causal,
        window_size=window_bounds(call.causal, call.window),
        softcap=call.softcap,
        return_softmax_lse=True,
    )
    return out.flatten(0, 1), logsumexp
