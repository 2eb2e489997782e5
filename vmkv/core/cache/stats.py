"""Statistics of a cache: an immutable snapshot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from ...units import format_bytes
from ..backend import MemoryLocation
from ..memory import Extent, ExtentPool
from .layer_group import LayerGroup
from .prefix import PrefixIndex


@dataclass
class SharingStats:
    """Counters of sharing and copying since a cache was made.

    Attributes:
        num_forks: Sequences that began with tokens of another row.
        aliased_bytes: Extents mapped a second time by forks and reorderings.
        copied_bytes: Tails, and extents that the cost model preferred to copy.
        copied_on_write_bytes: Shared extents copied because they had to be written.
        swapped_out_bytes: Copied to host memory.
        swapped_in_bytes: Copied back.
    """

    num_forks: int = 0
    aliased_bytes: int = 0
    copied_bytes: int = 0
    copied_on_write_bytes: int = 0
    swapped_out_bytes: int = 0
    swapped_in_bytes: int = 0


@dataclass(frozen=True)
class CacheStats:
    """A cache at one moment, in bytes.

    For one sequence `reserved >= resident >= used`; `used` counts shared memory once per sequence.

    Attributes:
        num_sequences: Live sequences.
        reserved_bytes: Virtual addresses; they cost nothing.
        resident_bytes: Physical memory mapped by this cache, parked rows included.
        used_bytes: Memory that the tokens of live sequences need.
        parked_bytes: The part of `resident_bytes` that only parked rows hold.
        shared_bytes: Saved by sharing: bytes mapped in excess of the physical memory behind them.
        host_bytes: Host memory of the pool that holds swapped sequences.
        free_bytes: Physical memory of the pool that is mapped nowhere.
        retired_bytes: Physical memory of the pool that waits for fences.
        budget_bytes: The pool's limit.
        num_prefix_hits: Sequences that began with a prefix found in the cache.
        num_prefix_misses: Sequences that looked for a prefix and found none.
        num_prefix_hit_tokens: Tokens that need not be computed again, over all hits.
        sharing: Bytes aliased and copied since the cache was made.
        driver_calls: Calls of each driver primitive since the pool was made.
    """

    num_sequences: int
    reserved_bytes: int
    resident_bytes: int
    used_bytes: int
    parked_bytes: int
    shared_bytes: int
    host_bytes: int
    free_bytes: int
    retired_bytes: int
    budget_bytes: int
    num_prefix_hits: int
    num_prefix_misses: int
    num_prefix_hit_tokens: int
    sharing: SharingStats
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
    prefixes: PrefixIndex,
    sharing: SharingStats,
) -> CacheStats:
    """Collect the stats of a cache from its live rows' lengths and its parked rows."""
    pool_stats = pool.stats()
    live_extents = _extents(groups, list(lengths))
    parked_extents = _extents(groups, parked)
    live_bytes = sum(extent.num_bytes for extent in set(live_extents))
    all_extents = live_extents + parked_extents
    resident_bytes = sum(extent.num_bytes for extent in set(all_extents))
    return CacheStats(
        num_sequences=len(lengths),
        reserved_bytes=sum(group.geometry.reserved_bytes for group in groups),
        resident_bytes=resident_bytes,
        used_bytes=sum(
            group.used_bytes(num_tokens) for group in groups for num_tokens in lengths.values()
        ),
        parked_bytes=resident_bytes - live_bytes,
        shared_bytes=sum(extent.num_bytes for extent in all_extents) - resident_bytes,
        host_bytes=pool.stats(MemoryLocation.HOST).resident_bytes,
        free_bytes=pool_stats.free_bytes,
        retired_bytes=pool_stats.retired_bytes,
        budget_bytes=pool_stats.budget_bytes,
        num_prefix_hits=prefixes.num_hits,
        num_prefix_misses=prefixes.num_misses,
        num_prefix_hit_tokens=prefixes.num_hit_tokens,
        sharing=replace(sharing),
        driver_calls=dict(pool.backend.calls),
    )


def _extents(groups: Sequence[LayerGroup], rows: Sequence[int]) -> list[Extent]:
    return [
        mapping.extent
        for group in groups
        for row in rows
        for mapping in group.table.rows[row].mappings
        if mapping.extent.location is MemoryLocation.DEVICE
    ]


def add_stats(stats: list[CacheStats]) -> CacheStats:
    """Add the bytes and calls of one model's caches, one per device; counts take the maximum."""
    calls: Counter[str] = Counter()
    sharing: Counter[str] = Counter()
    for each in stats:
        calls.update(each.driver_calls)
        sharing.update(vars(each.sharing))
    added = {
        field.name: sum(getattr(each, field.name) for each in stats)
        for field in fields(CacheStats)
        if field.name not in ("sharing", "driver_calls") and not field.name.startswith("num_")
    }
    # A sequence on several devices counts once, and so does its prefix.
    counts = {
        field.name: max((getattr(each, field.name) for each in stats), default=0)
        for field in fields(CacheStats)
        if field.name.startswith("num_")
    }
    return CacheStats(
        **counts,
        sharing=SharingStats(**sharing),
        driver_calls=dict(calls),
        **added,
    )
