"""From what a user names (a device, a backend, a pool) to a pool."""

from __future__ import annotations

from ..backend import Backend, open_backend
from ..errors import ConfigError
from ..memory import ExtentPool
from .views import reclaimable_bytes, release_reclaimable


def open_pool(
    memory: str | Backend | ExtentPool,
    budget_bytes: int | None,
    host_budget_bytes: int | None = None,
) -> ExtentPool:
    """The pool to build a cache on; one made here closes with its last user.

    Args:
        memory: A device's name, a backend, or a pool that is shared.
        budget_bytes: Physical memory at most; by default what is free on the device now, with
            what torch's allocator holds and does not use.
        host_budget_bytes: Host memory for swapping at most; by default none.

    Raises:
        ConfigError: The budget is impossible, or given for a pool, which has its own.
    """
    if isinstance(memory, ExtentPool):
        if budget_bytes is not None or host_budget_bytes is not None:
            raise ConfigError("a shared pool has its own budgets; leave budget_bytes out")
        return memory
    backend = open_backend(memory) if isinstance(memory, str) else memory
    try:
        if budget_bytes is None:
            free_bytes = backend.free_memory_bytes() + reclaimable_bytes(backend)
            budget_bytes = max(backend.granularity_bytes, free_bytes)
        return ExtentPool(
            backend,
            budget_bytes,
            host_budget_bytes=host_budget_bytes or 0,
            close_when_unused=True,
            on_pressure=lambda: release_reclaimable(backend),
        )
    except BaseException:
        if isinstance(memory, str):
            backend.close()
        raise
