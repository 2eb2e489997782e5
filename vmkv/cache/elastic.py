"""Giving memory back to torch when torch runs out of it.

A pool and torch's allocator divide one device between them. The pool asks torch first when it is
short (`release_reclaimable`); this is the other way round. Torch calls nothing before it raises
`torch.OutOfMemoryError`, so what may be repeated is called again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from ..memory import ExtentPool
from .views import release_reclaimable

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


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
        release_reclaimable(pool.backend)
    return function(*args, **kwargs)
