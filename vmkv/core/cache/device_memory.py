"""Device memory is shared between a pool and torch's allocator.

A pool that is short asks torch's allocator to release its idle memory. Torch has no such hook: it
raises `torch.OutOfMemoryError`, so `call_with_room` frees pool memory and calls the function again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch

from ...errors import ConfigError
from ...units import format_bytes
from ..backend import Backend, open_backend
from ..interrupts import uninterrupted
from ..memory import ExtentPool, PoolMember
from .layer_group import torch_device

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def open_pool(
    memory: str | Backend | ExtentPool,
    budget_bytes: int | None,
    host_budget_bytes: int | None = None,
) -> ExtentPool:
    """Return the pool to build a cache on; a pool made here closes with its last user.

    Without `budget_bytes` the limit is the device's free memory, plus memory that torch's allocator
    holds idle. Without `host_budget_bytes` there is no host memory for swapping. `ConfigError` for
    either with a shared pool, or beyond the memory of the device.
    """
    if isinstance(memory, ExtentPool):
        if budget_bytes is not None or host_budget_bytes is not None:
            raise ConfigError("a shared pool has its own budgets; leave budget_bytes out")
        return memory
    with _opened(memory) as backend:
        if budget_bytes is None:
            free_bytes = backend.free_memory_bytes() + _idle_bytes(backend)
            budget_bytes = max(backend.granularity_bytes, free_bytes)
        return _made(backend, budget_bytes, host_budget_bytes)


@uninterrupted
def open_member_pool(
    memory: str | Backend,
    join: Callable[..., PoolMember],
    *,
    host_budget_bytes: int | None = None,
    **figures: Any,
) -> ExtentPool:
    """Make a pool that joins a broker; it closes, and leaves, with its last user.

    `join` is `PoolMember.join` with the broker's socket, and raises as that does; `figures` are its
    name, floor, limit and weight.
    """
    with _opened(memory) as backend:
        free_bytes = backend.free_memory_bytes() + _idle_bytes(backend)
        member = join(device=backend.name, free_bytes=free_bytes, **figures)
        try:
            pool = _made(backend, member.budget_bytes, host_budget_bytes)
        except BaseException:
            member.leave()
            raise
        member.bind(pool)
        return pool


@contextlib.contextmanager
def _opened(memory: str | Backend) -> Iterator[Backend]:
    """Open a backend by its name; closed again if the block fails."""
    backend = open_backend(memory) if isinstance(memory, str) else memory
    try:
        yield backend
    except BaseException:
        if isinstance(memory, str):
            backend.close()
        raise


def check_budgets(device: Any, budget_bytes: int | None, host_budget_bytes: int | None) -> None:
    """Raise `ConfigError` for a budget beyond all memory of the device, or of the host.

    `device` is a torch device, or its name.
    """
    host_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    is_cuda = torch.device(device).type == "cuda"
    own_bytes = torch.cuda.get_device_properties(device).total_memory if is_cuda else host_bytes
    asked = {"budget_bytes": (budget_bytes or 0, own_bytes)}
    asked["host_budget_bytes"] = host_budget_bytes or 0, host_bytes
    for name, (num_bytes, most_bytes) in asked.items():
        if num_bytes > most_bytes:
            has = f"{format_bytes(most_bytes)} of this machine: lower it"
            raise ConfigError(f"{name} of {format_bytes(num_bytes)} is beyond the {has}")


def _made(backend: Backend, budget_bytes: int, host_budget_bytes: int | None) -> ExtentPool:
    check_budgets(torch_device(backend), budget_bytes, host_budget_bytes)
    return ExtentPool(
        backend,
        budget_bytes,
        host_budget_bytes=host_budget_bytes or 0,
        close_when_unused=True,
        on_pressure=lambda: _release_idle(backend),
    )


def call_with_room(
    pool: ExtentPool,
    function: Callable[Arguments, Result],
    *args: Arguments.args,
    **kwargs: Arguments.kwargs,
) -> Result:
    """Call a function; if torch runs out of memory, free idle memory and call it once more.

    In between, parked rows and prefixes of every cache over the pool, and its free memory, go back
    to the device. Live sequences keep their memory.

    Args:
        pool: The pool (`cache.pool`).
        function: A function that can be repeated after a failure: making a tensor, loading a model;
            not a forward pass that writes to a cache.
        *args: Passed to the function.
        **kwargs: Passed to the function.

    Raises:
        torch.OutOfMemoryError: The second attempt failed, too.
    """
    try:
        return function(*args, **kwargs)
    except torch.OutOfMemoryError:
        pool.give_back()
        _release_idle(pool.backend)
    return function(*args, **kwargs)


def free_bytes(backend: Backend, wanted_bytes: int) -> int:
    """Return the device's free memory; torch releases what it holds idle if less than is wanted."""
    if backend.free_memory_bytes() < wanted_bytes and _idle_bytes(backend):
        _release_idle(backend)
    return backend.free_memory_bytes()


def _idle_bytes(backend: Backend) -> int:
    """Memory that torch's own allocator holds on this device and does not use."""
    if not _shares_device(backend):
        return 0
    device = torch_device(backend)
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _release_idle(backend: Backend) -> None:
    if _shares_device(backend):
        torch.cuda.empty_cache()


def _shares_device(backend: Backend) -> bool:
    """Whether torch has touched a GPU in this process; asking its allocator would start it."""
    is_cuda = torch_device(backend).type == "cuda"
    return is_cuda and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
