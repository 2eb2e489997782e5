"""Pools on the host that join a broker."""

from __future__ import annotations

from typing import Any

from vmkv import ExtentPool, HostBackend
from vmkv.core.memory import PoolMember
from vmkv.units import KiB

PAGE = 4 * KiB


def member_of(path: Any, name: str = "pool", **options: Any) -> PoolMember:
    """Join the broker at `path` with a device of the host."""
    its: dict[str, Any] = {"device": HostBackend(PAGE).name, "free_bytes": 0, **options}
    return PoolMember.join(path, name=name, **its)


def pool_of(path: Any, name: str = "pool", *, memory: Any = None, **options: Any) -> ExtentPool:
    """Make a pool over pages of 4 KiB that has joined; `memory` are options of the pool."""
    member = member_of(path, name, **options)
    pool = ExtentPool(HostBackend(PAGE), member.budget_bytes, **memory or {})
    member.bind(pool)
    return pool
