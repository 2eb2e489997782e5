"""The most likely token of each row of logits."""

from __future__ import annotations

import math

import pytest
import torch

from vmkv.step.piece import likeliest

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
COLUMNS = 192


def _rows() -> torch.Tensor:
    """Random rows, and rows with ties, infinities and NaN."""
    rows = torch.randn(9, COLUMNS, generator=torch.Generator().manual_seed(0))
    rows[1] = 0
    rows[2, 5:] = -0.0
    rows[2, :5] = -1
    rows[3, [70, 20, 150]] = 9
    rows[4, [130, 64]] = math.inf
    rows[5] = -math.inf
    rows[6, [100, 90]] = math.nan
    rows[7, COLUMNS - 1] = 9
    return rows


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("parts", [None, 1, 2, 8, 64])
def test_likeliest_returns_the_first_maximum(
    device: str, dtype: torch.dtype, parts: int | None
) -> None:
    """The result is that of argmax, for any number of parts."""
    rows = _rows().to(dtype)
    expected = torch.tensor([int(row.argmax()) for row in rows])
    assert [0, 5, 20, 64, 0, 90, COLUMNS - 1] == expected[1:8].tolist()
    assert torch.equal(expected, likeliest(rows.to(device), parts).cpu())
    part = torch.cat((rows, rows), 1).to(device)[:, :COLUMNS]
    assert torch.equal(expected, likeliest(part, parts).cpu())
