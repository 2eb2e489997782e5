"""A stand-in for a cache in ordinary memory: rows of all layers interleaved, poisoned past the end.

`DenseRows` lays tokens out as vmkv does, `[row, token, layer, K|V, head, dim]`, so that a layer's
views have the strides of a real cache. Where a cache has unmapped memory it holds NaN, so a read
there makes the output NaN. In the margin that a backend declares as its over-read it holds large
finite numbers, which a kernel may fetch but must not use.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from vmkv.attention import AttentionBatch, AttentionSpec, why_not

MARGIN_FILL = 1e4


def skip_unless_served(name: str, spec: AttentionSpec) -> None:
    """Skip the test if backend `name` cannot serve `spec` here."""
    if reason := why_not(name, spec):
        pytest.skip(f"{name}: {reason}")


class DenseRows:
    """One layer's keys and values inside an interleaved, poisoned buffer.

    Attributes:
        keys: `[rows, row_tokens, H, Dk]`, a strided view.
        values: `[rows, row_tokens, H, Dv]`, a strided view.
    """

    def __init__(
        self,
        rows: int,
        row_tokens: int,
        num_kv_heads: int,
        k_dim: int,
        v_dim: int | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        layers: int = 3,
        layer: int = 1,
    ) -> None:
        v_dim = k_dim if v_dim is None else v_dim
        layer_elements = num_kv_heads * (k_dim + v_dim)
        buffer = torch.full(
            (rows, row_tokens, layers, layer_elements), torch.nan, dtype=dtype, device=device
        )
        self.buffer = buffer
        split = num_kv_heads * k_dim
        shape = (rows, row_tokens, num_kv_heads)
        self.keys = buffer[:, :, layer, :split].unflatten(2, (num_kv_heads, k_dim))
        self.values = buffer[:, :, layer, split:].unflatten(2, (num_kv_heads, v_dim))
        assert self.keys.shape == (*shape, k_dim)
        assert self.values.shape == (*shape, v_dim)
        assert self.keys.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()

    def fill(self, batch: AttentionBatch, overread: int, generator: torch.Generator) -> None:
        """Write random tokens for `batch`, and finite garbage into its margin."""
        for span in batch.spans:
            for view in (self.keys, self.values):
                live = view[span.row, : span.num_tokens]
                noise = torch.randn(live.shape, generator=generator)
                live.copy_(noise)
                view[span.row, span.num_tokens : span.num_tokens + overread] = MARGIN_FILL

    def live(self, batch: AttentionBatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copies of each sequence's keys and values, in the batch's order."""
        return [
            (
                self.keys[span.row, : span.num_tokens].clone(),
                self.values[span.row, : span.num_tokens].clone(),
            )
            for span in batch.spans
        ]


def random_query(
    batch: AttentionBatch,
    heads: int,
    dim: int,
    *,
    dtype: torch.dtype,
    device: str,
    generator: torch.Generator,
) -> torch.Tensor:
    """`[Tq, Hq, Dk]` of unit noise, the same on every device."""
    total = batch.spans[-1].query_end
    return torch.randn(total, heads, dim, generator=generator).to(device=device, dtype=dtype)


def changed_tokens(
    view: torch.Tensor, mapped: Sequence[tuple[int, int]], before: float
) -> dict[int, list[int]]:
    """Return the tokens of each row that no longer hold `before`; rows without any are left out.

    Args:
        view: Keys or values of a layer, `[rows, tokens, …]`.
        mapped: Each row, and the number of its tokens that may be read.
        before: The value that all of them held.
    """
    changed = {
        row: (view[row, :count] != before).flatten(1).any(1).nonzero()[:, 0].tolist()
        for row, count in mapped
    }
    return {row: tokens for row, tokens in changed.items() if tokens}
