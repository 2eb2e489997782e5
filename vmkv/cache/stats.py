"""What a cache says about itself: an immutable snapshot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..memory import ExtentPool
from ..units import format_bytes
from .layer_group import LayerGroup


@dataclass(frozen=True)
class CacheStats:
    """A cache at one moment. For one sequence `reserved >= resident >= used`, in bytes.

    Attributes:
        num_sequences: Live sequences.
        reserved_bytes: Virtual addresses; they cost nothing.
        resident_bytes: Physical memory mapped by this cache, parked rows included.
        used_bytes: What the live tokens of live sequences need.
        parked_bytes: The part of `resident_bytes` in rows that wait to be adopted.
        free_bytes: Physical memory of the pool that is mapped nowhere.
        retired_bytes: Physical memory of the pool that waits for fences.
        budget_bytes: What the pool may create at most.
        driver_calls: How often each primitive reached the driver since the pool was made.
    """

    num_sequences: int
    reserved_bytes: int
    resident_bytes: int
    used_bytes: int
    parked_bytes: int
    free_bytes: int
    retired_bytes: int
    budget_bytes: int
    driver_calls: Mapping[str, int]

    def __str__(self) -> str:
        sequences = "1 sequence" if self.num_sequences == 1 else f"{self.num_sequences} sequences"
        return (
            f"{sequences}: {format_bytes(self.used_bytes)} used, "
            f"{format_bytes(self.resident_bytes)} resident "
            f"({format_bytes(self.parked_bytes)} parked), "
            f"{format_bytes(self.reserved_bytes)} of addresses reserved, "
            f"{sum(self.driver_calls.values())} driver calls"
        )


def collect_stats(
    pool: ExtentPool,
    groups: Sequence[LayerGroup],
    lengths: Mapping[int, int],
    parked: Sequence[int],
) -> CacheStats:
    """The stats of a cache with live rows of these `lengths` and these `parked` rows."""
    pool_stats = pool.stats()

    def resident(rows: Sequence[int]) -> int:
        return sum(group.resident_bytes(row) for group in groups for row in rows)

    parked_bytes = resident(parked)
    return CacheStats(
        num_sequences=len(lengths),
        reserved_bytes=sum(group.geometry.reserved_bytes for group in groups),
        resident_bytes=resident(list(lengths)) + parked_bytes,
        used_bytes=sum(
            group.used_bytes(num_tokens) for group in groups for num_tokens in lengths.values()
        ),
        parked_bytes=parked_bytes,
        free_bytes=pool_stats.free_bytes,
        retired_bytes=pool_stats.retired_bytes,
        budget_bytes=pool_stats.budget_bytes,
        driver_calls=dict(pool.backend.calls),
    )


def add_stats(stats: list[CacheStats]) -> CacheStats:
    """Several caches, one per device, as one."""
    calls: dict[str, int] = {}
    for each in stats:
        for name, count in each.driver_calls.items():
            calls[name] = calls.get(name, 0) + count
    return CacheStats(
        num_sequences=max((each.num_sequences for each in stats), default=0),
        reserved_bytes=sum(each.reserved_bytes for each in stats),
        resident_bytes=sum(each.resident_bytes for each in stats),
        used_bytes=sum(each.used_bytes for each in stats),
        parked_bytes=sum(each.parked_bytes for each in stats),
        free_bytes=sum(each.free_bytes for each in stats),
        retired_bytes=sum(each.retired_bytes for each in stats),
        budget_bytes=sum(each.budget_bytes for each in stats),
        driver_calls=calls,
    )
