"""FlashAttention-2, from the package `flash-attn` or the Hugging Face Hub (`flash_common.py`).

Two of its kernels read rows in place:

  uniform batch   `flash_attn_with_kvcache` over the 4-D view: rows by `cache_batch_idx`, lengths
                  by `cache_seqlens`, left padding by `cache_leftpad`. It splits long sequences
                  over the device, and it can write the new token itself.
  mixed batch     the varlen kernel over the flat view, with each row's start in place of a
                  cumulative length (`cu_seqlens_k`) and its length in `seqused_k`. The package's
                  public varlen function hides `seqused_k`; the function below it has it.

torch has the varlen kernel of its own (`TorchFlashBackend`), for machines without the package.

Every fetch is predicated by the length, so `overread_tokens` is 0. Sinks are applied from the
returned log-sum-exp.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch

from ..errors import ConfigError
from . import flash_common
from .base import AttentionSpec, Call, flat
from .flash_common import FlashBackend, why_not_flash, window_bounds, with_sinks

HUB_KERNEL = "kernels-community/flash-attn2"
"""Repository on the Hugging Face Hub; versions from 4 on are built for torch 2.10 and newer."""
_TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


@functools.cache
def _load() -> ModuleType | str:
    return flash_common.first_found(_package, _of_hub)


def _of_hub() -> ModuleType | str:
    module = flash_common.load(HUB_KERNEL, 4 if _TORCH >= (2, 10) else 3)
    return module if isinstance(module, str) else module.flash_attn_interface


def _package() -> ModuleType | str:
    module = flash_common.package("flash_attn.flash_attn_interface", "flash-attn (2.7 or newer)")
    if isinstance(module, str) or hasattr(module, "_flash_attn_varlen_forward"):
        return module
    return "package flash-attn is older than 2.7"


def _interface() -> ModuleType:
    return flash_common.usable("flash2", _load())


class Flash2Backend(FlashBackend):
    """FlashAttention-2 as an `AttentionBackend`; to append, batches must be uniform."""

    name = "flash2"
    appends = True
    reads_new = True

    def why_not(self, spec: AttentionSpec) -> str | None:
        """Check the limits of FlashAttention-2 and that the package can be imported."""
        return why_not_flash(spec, 2) or flash_common.reason(_load())

    def launch(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch the decode kernel for a uniform batch, the varlen kernel for a mixed one."""
        batch = call.batch
        if batch.is_uniform(call.query.shape[0]):
            return _with_kvcache(call)
        if call.new is not None:
            raise ConfigError(
                "appending in the kernel needs as many queries of every sequence; "
                "call append(), and attend without new tensors, for a mixed batch"
            )
        return _varlen(
            call,
            (flat(call.keys), flat(call.values)),
            batch.key_starts,
            batch.max_num_tokens,
            seqused_k=batch.visible_tokens,
        )

    def attend_new(self, call: Call) -> torch.Tensor:
        """Launch the varlen kernel over the new keys and values."""
        assert call.new is not None  # By the contract of `attend_new`.
        starts, most = call.batch.query_starts, call.batch.max_query_tokens
        return with_sinks(call, *_varlen(call, call.new, starts, most))


def _varlen(
    call: Call,
    keys_and_values: tuple[torch.Tensor, torch.Tensor],
    key_starts: torch.Tensor,
    max_num_keys: int,
    **options: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    left, right = window_bounds(call.window)
    out, logsumexp, *_ = _interface()._flash_attn_varlen_forward(
        call.query,
        *keys_and_values,
        call.batch.query_starts,
        key_starts,
        call.batch.max_query_tokens,
        max_num_keys,
        0.0,
        call.scale,
        causal=True,
        window_size_left=left,
        window_size_right=right,
        softcap=call.softcap,
        **options,
    )
    return out, logsumexp


def _with_kvcache(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the decode kernel, which first writes the call's new keys and values."""
    query, batch = call.query, call.batch
    shape = (batch.batch_size, batch.max_query_tokens)
    # The kernel chooses its number of splits by the view's length, so cut the view to the longest
    # sequence of the batch. Its choice is kept: no other number, 1 to 128, brings rows closer to
    # the speed of a dense tensor, and the same numbers are best for both.
    # The view keeps at least as many keys as a key head has query heads: the kernel treats those
    # as queries of one head, and refuses to append to a shorter view. It reads no more keys.
    num_grouped = query.shape[1] // call.keys.shape[2] * batch.max_query_tokens
    longest = min(batch.row_tokens, max(batch.max_num_tokens, num_grouped))
    key, value = (None, None) if call.new is None else (_split(each, shape) for each in call.new)
    out, logsumexp = _interface().flash_attn_with_kvcache(
        _split(query, shape),
        call.keys[:, :longest],
        call.values[:, :longest],
        k=key,
        v=value,
        cache_seqlens=batch.num_tokens if call.new is None else batch.tokens_before,
        cache_batch_idx=batch.row_indices,
        cache_leftpad=batch.left_pad,
        softmax_scale=call.scale,
        causal=True,
        window_size=window_bounds(call.window),
        softcap=call.softcap,
        return_softmax_lse=True,
    )
    return out.flatten(0, 1), logsumexp


def _split(packed: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """View packed tokens `[Tq, H, D]` of equal sequences as `[*shape, H, D]`."""
    return packed.view(*shape, *packed.shape[1:])


class TorchFlashBackend(FlashBackend):
    """torch's own FlashAttention-2: no soft cap; left padding moves a row's start."""

    name = "torch"

    def why_not(self, spec: AttentionSpec) -> str | None:
        """Check the limits of FlashAttention-2, no soft cap, and torch's build."""
        limit = why_not_flash(spec, 2)
        if limit is None and spec.softcap:
            limit = "torch passes no soft cap to its kernel"
        if limit is None and not torch.backends.cuda.is_flash_attention_available():
            limit = "this torch was built without FlashAttention"
        return limit

    def launch(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch the varlen kernel over the flat view."""
        if call.softcap:
            raise ConfigError("'torch' has no soft cap; select 'flash2' or 'sdpa'")
        batch = call.batch
        left, right = window_bounds(call.window)
        # A single query is the last token and sees every key. Unbounded instead of causal lets the
        # kernel handle a group's query heads together and split the keys.
        is_causal = call.window is None and batch.max_query_tokens > 1
        out, logsumexp, *_ = torch.ops.aten._flash_attention_forward(
            *(call.query, flat(call.keys), flat(call.values)),
            *(batch.query_starts, batch.key_starts),
            *(batch.max_query_tokens, batch.max_num_tokens),
            dropout_p=0.0,
            is_causal=is_causal,
            return_debug_mask=False,
            scale=call.scale,
            window_size_left=left,
            window_size_right=0 if is_causal else right,
            seqused_k=batch.visible_tokens,
        )
        return out, logsumexp
