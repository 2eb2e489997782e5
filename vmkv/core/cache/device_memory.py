"""One device's memory between a pool and torch's allocator.

A pool asks torch first when it is short. The other way round torch calls nothing before it raises
`torch.OutOfMemoryError`, so what may be repeated is called again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from ...errors import ConfigError
from ..backend import Backend, open_backend
from ..memory import ExtentPool
from .layer_group import torch_device

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


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
            free_bytes = backend.free_memory_bytes() + _idle_bytes(backend)
            budget_bytes = max(backend.granularity_bytes, free_bytes)
        return ExtentPool(
            backend,
            budget_bytes,
            host_budget_bytes=host_budget_bytes or 0,
            close_when_unused=True,
            on_pressure=lambda: _release_idle(backend),
        )
    except BaseException:
        if isinstance(memory, str):
            backend.close()
        raise


def call_with_room(
    pool: ExtentPool,
    function: Callable[Arguments, Result],
    *args: Arguments.args,
    **kwargs: Arguments.kwargs,
) -> Result:
    """`function(*args, **kwargs)`; where torch runs out of memory, once more with what is idle.

    In between, parked rows and prefixes of every cache over the pool, and its free memory, go back
    to the device. Live sequences keep what they have.

    Args:
        pool: The pool (`cache.pool`).
        function: Something that can be called again after it failed: making a tensor, loading a
            model; not a forward pass that writes to a cache.
        *args: For the function.
        **kwargs: For the function.

    Raises:
        torch.OutOfMemoryError: Also with all of that there is too little.
    """
    try:
        return function(*args, **kwargs)
    except torch.OutOfMemoryError:
        pool.give_back()
        _release_idle(pool.backend)
    return function(*args, **kwargs)


def _idle_bytes(backend: Backend) -> int:
    """Memory that torch's own allocator holds on this device and does not use."""
    if not _shares_device(backend):
        return 0
    device = torch_device(backend)
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _release_idle(backend: Backend) -> None:
    """Have torch's allocator give unused memory back to the device."""
    if _shares_device(backend):
        torch.cuda.empty_cache()


def _shares_device(backend: Backend) -> bool:
    """Whether torch has touched a GPU in this process; asking its allocator would start it."""
    is_cuda = torch_device(backend).type == "cuda"
    return is_cuda and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
