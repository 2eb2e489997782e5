"""Content with a stamp for each token, for tests of shared memory.

A stamp is a number of one token; the written value also depends on the layer and on keys or values,
so a page in the wrong place never looks right. Stamps are below 2^20: float32 holds them exactly.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from vmkv import Sequence


def append(sequence: Sequence, stamps: Iterable[int]) -> None:
    """Append one token for each stamp, and write it in every layer."""
    wanted = list(stamps)
    start = sequence.num_tokens
    sequence.append(len(wanted))
    sequence.cache.check()  # Before writing, which would crash if memory is missing.
    for at, tensor in enumerate(_tensors(sequence)):
        tensor[start:] = _as_tensor(wanted, at)[:, None, None].to(tensor.device)


def assert_holds(sequence: Sequence, stamps: Iterable[int]) -> None:
    """Check that every layer holds exactly these stamps, within its window."""
    wanted = list(stamps)
    assert len(wanted) == sequence.num_tokens
    for at, tensor in enumerate(_tensors(sequence)):
        group, _ = sequence.cache.place(sequence.cache.layers[at // 2])
        window = group.window_tokens
        first = 0 if window is None else max(0, len(wanted) - window + 1)
        expected = _as_tensor(wanted[first:], at)
        for head, dim in ((0, 0), (-1, -1)):
            assert torch.equal(expected, tensor[first:, head, dim].cpu()), f"tensor {at}"


def _tensors(sequence: Sequence) -> list[torch.Tensor]:
    return [
        tensor
        for layer in sequence.cache.layers
        for tensor in (sequence.keys(layer), sequence.values(layer))
    ]


def _as_tensor(stamps: list[int], at: int) -> torch.Tensor:
    return torch.tensor(stamps, dtype=torch.float32) * 16 + at
