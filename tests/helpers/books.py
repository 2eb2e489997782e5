"""State of a cache that a refused or failed operation must not change."""

from __future__ import annotations

import gc
import os

from vmkv import KVCache


def books(cache: KVCache) -> object:
    """Return what the driver, the pool, the rows and the process's descriptors hold."""
    gc.collect()  # A garbage cycle may hold descriptors of other tests.
    cache.pool.reclaimer.wait()
    cache.pool.reclaimer.free_idle_reservations()
    cache.check()
    return (
        cache.pool.backend.usage(),
        cache.pool.stats(),
        cache.pool.imported_extents(),
        sorted(cache.live),
        list(cache.rows.parked),
        cache.stats().num_sequences,
        len(os.listdir("/proc/self/fd")),
    )
