"""Random numbers without state: hashes of what they are for.

A generator with state would tie a request to its neighbours in the batch, and a captured graph to
the number of its replays. A hash of (seed, index of the token, token id) does neither, needs no
launch of its own, and is the same on every device.
"""

from __future__ import annotations

import torch

# splitmix64's and murmur3's constants, as signed integers: arithmetic wraps.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_SPLIT_1 = 0xBF58476D1CE4E5B9 - 2**64
_SPLIT_2 = 0x94D049BB133111EB - 2**64
_LOW_32 = 2**32 - 1
_MURMUR_1 = 0x85EBCA6B
_MURMUR_2 = 0xC2B2AE35


def row_keys(seeds: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """One key per row, of a seed and a counter: `[n] int64`, all 64 bits random.

    Args:
        seeds: `[n] int64`.
        counters: `[n] int64`.
    """
    return _mix_64(_mix_64(seeds) + counters * _GOLDEN)


def gumbel_noise(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise of every token in every row.

    Args:
        keys: `[n] int64`, see `row_keys`.
        token_ids: `[vocabulary]` or `[n, k] int64`, below 2^32.

    Returns:
        `[n, vocabulary]` or `[n, k] float32`.

    Cost: some twenty elementwise operations; one launch where a compiler fuses them.
    """
    low, high = keys & _LOW_32, (keys >> 32) & _LOW_32
    bits = _mix_32(token_ids ^ low[:, None])
    bits = _mix_32((bits + high[:, None]) & _LOW_32)
    # An exponential variable by inversion, from the end where floats are densest: what wins is
    # the smallest. 32 bits, so that no two tokens of a vocabulary often tie.
    uniform = ((bits.float() + 0.5) * 2.0**-32).clamp_(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))


def _mix_64(bits: torch.Tensor) -> torch.Tensor:
    """splitmix64's finalizer."""
    bits = bits + _GOLDEN
    bits = (bits ^ _shifted(bits, 30)) * _SPLIT_1
    bits = (bits ^ _shifted(bits, 27)) * _SPLIT_2
    return bits ^ _shifted(bits, 31)


def _mix_32(bits: torch.Tensor) -> torch.Tensor:
    """murmur3's finalizer, on 32 bits held in 64, where there is no sign to mind."""
    bits = ((bits ^ (bits >> 16)) * _MURMUR_1) & _LOW_32
    bits = ((bits ^ (bits >> 13)) * _MURMUR_2) & _LOW_32
    return bits ^ (bits >> 16)


def _shifted(bits: torch.Tensor, by: int) -> torch.Tensor:
    """A right shift that brings in zeros; torch's brings in the sign."""
    shifted: torch.Tensor = (bits >> by) & (2 ** (64 - by) - 1)
    return shifted
