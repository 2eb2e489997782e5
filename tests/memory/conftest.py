"""A pool over a host backend, checked and closed after every test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from vmkv import ExtentPool, HostBackend
from vmkv.core.memory import check_pool
from vmkv.units import KiB

PAGE = 4 * KiB


@pytest.fixture
def make_pool(host: HostBackend) -> Iterator[Callable[..., ExtentPool]]:
    """Makes a pool over `host` with a budget in pages, and checks its invariants at the end."""
    pools: list[ExtentPool] = []

    def make(budget_pages: int, backend: Any = None, **options: Any) -> ExtentPool:
        pools.append(ExtentPool(backend or host, budget_pages * PAGE, **options))
        return pools[-1]

    yield make
    for pool in pools:
        check_pool(pool)
        for table in tuple(pool.page_tables):
            table.close(lambda: False)
        pool.close()


@pytest.fixture
def pool(make_pool: Callable[..., ExtentPool]) -> ExtentPool:
    """A pool of 64 pages."""
    return make_pool(64)
