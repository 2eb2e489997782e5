"""Statistics of a cache: an immutable snapshot."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING

from ...units import format_bytes
from ..backend import MemoryLocation
from ..memory import Extent, PageMapping

if TYPE_CHECKING:
    from .kv_cache import KVCache


@dataclass
class SharingStats:
    """Counters of sharing and copying since a cache was made.

    Attributes:
        num_forks: Sequences that began with tokens of another row.
        aliased_bytes: Extents mapped a second time by forks and reorderings.
        copied_bytes: Tails, and extents that the cost model preferred to copy.
        copied_on_write_bytes: Shared extents copied because they had to be written.
        swapped_out_bytes: Sequences copied to host memory.
        swapped_in_bytes: Copied back.
        offloaded_bytes: Blocks of prefixes copied to host memory.
        loaded_bytes: Copied back.
        written_bytes: Blocks of prefixes written to files.
    """

    num_forks: int = 0
    aliased_bytes: int = 0
    copied_bytes: int = 0
    copied_on_write_bytes: int = 0
    swapped_out_bytes: int = 0
    swapped_in_bytes: int = 0
    offloaded_bytes: int = 0
    loaded_bytes: int = 0
    written_bytes: int = 0


@dataclass(frozen=True)
class BelowStats:
    """Blocks of prefixes in host memory, or in files.

    Attributes:
        num_bytes: Memory, or files, for blocks.
        num_loads: Prefixes of requests that were brought up from here.
        loaded_bytes: Their bytes.
        load_s: From the beginning of each load to its end.
        has_failed: Whether nothing is written any more, after an error.
    """

    num_bytes: int = 0
    num_loads: int = 0
    loaded_bytes: int = 0
    load_s: float = 0.0
    has_failed: bool = False


@dataclass(frozen=True)
class CacheStats:
    """A cache at one moment, in bytes.

    For one sequence `reserved >= resident >= used`; `used` counts shared memory once per sequence.

    Attributes:
        num_sequences: Live sequences.
        reserved_bytes: Virtual addresses; they cost nothing.
        resident_bytes: Physical memory mapped by this cache, parked rows included.
        used_bytes: Memory that the tokens of live sequences need.
        parked_bytes: The part of `resident_bytes` that only parked rows and checkpoints hold.
        shared_bytes: Saved by sharing: bytes mapped in excess of the physical memory behind them.
        host_bytes: Host memory of the pool that holds swapped sequences and evicted prefixes.
        free_bytes: Physical memory of the pool that is mapped nowhere.
        retired_bytes: Physical memory of the pool that waits for fences.
        budget_bytes: The pool's limit.
        num_prefix_hits: Sequences that began with a prefix found in the cache.
        num_prefix_misses: Sequences that looked for a prefix and found none.
        num_prefix_hit_tokens: Tokens that need not be computed again, over all hits.
        sharing: Bytes aliased and copied since the cache was made.
        driver_calls: Calls of each driver primitive since the pool was made.
        below: Blocks of prefixes below the device: "host", and "files" where there are any.
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
    below: Mapping[str, BelowStats] = field(default_factory=dict)

    def __str__(self) -> str:
        sequences = "1 sequence" if self.num_sequences == 1 else f"{self.num_sequences} sequences"
        return (
            f"{sequences}: {format_bytes(self.used_bytes)} used, "
            f"{format_bytes(self.resident_bytes)} resident "
            f"({format_bytes(self.parked_bytes)} parked), "
            f"{format_bytes(self.reserved_bytes)} of addresses reserved, "
            f"{sum(self.driver_calls.values())} driver calls"
        )


def collect_stats(cache: KVCache) -> CacheStats:
    """Return the cache's statistics. Cost: proportional to its rows."""
    with cache.pool.lock:  # Other caches' threads may evict parked rows.
        pool_stats, prefixes = cache.pool.stats(), cache.prefixes
        own = [group.table.rows[row] for group in cache.groups for row in cache.live]
        live_extents = _on_device(each for pages in own for each in pages.mappings)
        live_bytes = sum(extent.num_bytes for extent in set(live_extents))
        rows = [*cache.live, *cache.rows.parked]
        held = [group.mappings(row) for group in cache.groups for row in rows]
        all_extents = _on_device(itertools.chain.from_iterable(held))
        resident_bytes = sum(extent.num_bytes for extent in set(all_extents))
        return CacheStats(
            num_sequences=len(cache.live),
            reserved_bytes=sum(group.table.reserved_bytes for group in cache.groups),
            resident_bytes=resident_bytes,
            used_bytes=sum(
                group.used_bytes(sequence.num_tokens)
                for group in cache.groups
                for sequence in cache.live_sequences()
            ),
            parked_bytes=resident_bytes - live_bytes,
            shared_bytes=sum(extent.num_bytes for extent in all_extents) - resident_bytes,
            host_bytes=cache.pool.stats(MemoryLocation.HOST).resident_bytes
            + cache.pool.lent_host_bytes,
            free_bytes=pool_stats.free_bytes,
            retired_bytes=pool_stats.retired_bytes,
            budget_bytes=pool_stats.budget_bytes,
            num_prefix_hits=prefixes.num_hits,
            num_prefix_misses=prefixes.num_misses,
            num_prefix_hit_tokens=prefixes.num_hit_tokens,
            sharing=replace(cache.sharing),
            driver_calls=dict(cache.pool.backend.calls),
            below=cache.host_blocks.stats(),
        )


def _on_device(mappings: Iterable[PageMapping]) -> list[Extent]:
    return [each.extent for each in mappings if each.extent.location is MemoryLocation.DEVICE]


def add_stats(stats: list[CacheStats]) -> CacheStats:
    """Add the bytes and calls of one model's caches, one per device; counts take the maximum."""
    calls: Counter[str] = Counter()
    sharing: Counter[str] = Counter()
    added: dict[str, int] = {}
    for each in stats:
        calls.update(each.driver_calls)
        sharing.update(vars(each.sharing))
    for name in [each.name for each in fields(CacheStats) if each.type == "int"]:
        # A sequence on several devices counts once, and so does its prefix.
        add = partial(max, default=0) if name.startswith("num_") else sum
        added[name] = add([getattr(each, name) for each in stats])
    below = stats[0].below if len(stats) == 1 else {}
    return CacheStats(
        **added, sharing=SharingStats(**sharing), driver_calls=dict(calls), below=below
    )
