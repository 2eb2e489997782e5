"""Sizes, rounding, names of types, and the integer kinds that must not be mixed up."""

from __future__ import annotations

from typing import NewType

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30
TiB = 1 << 40

DTYPES = ("float32", "float16", "bfloat16")
"""Types of weights, keys and values."""
KV_DTYPES = ("auto", "fp8")
"""Values of `kv_dtype`: the model's own type, or eight bits (`float8_e4m3fn`)."""

#: A virtual address, in bytes.
Address = NewType("Address", int)
#: The driver's name for one physical allocation.
Handle = NewType("Handle", int)


def div_ceil(numerator: int, denominator: int) -> int:
    """Smallest integer not below `numerator / denominator`."""
    return -(-numerator // denominator)


def align_up(value: int, alignment: int) -> int:
    """Smallest multiple of `alignment` not below `value`."""
    return -(-value // alignment) * alignment


def is_power_of_two(value: int) -> bool:
    """Whether `value` is 1, 2, 4, 8 …"""
    return value > 0 and value & (value - 1) == 0


def format_bytes(num_bytes: int) -> str:
    """Format `num_bytes` for a person: `1.5 GiB`, `64 KiB`, `12 B`."""
    for name, unit in (("TiB", TiB), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.4g} {name}"
    return f"{num_bytes} B"
