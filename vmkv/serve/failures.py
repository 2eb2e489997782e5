"""Classification and logging of step failures."""

from __future__ import annotations

import logging
import traceback

import torch

from ..errors import CapacityError, OutOfPagesError

_LOG = logging.getLogger(__name__)


def log_and_release(error: BaseException) -> None:
    """Log an error with its traceback, then drop the frames.

    Frames hold activations and views of the cache, and the error lives as long as the request's
    output.
    """
    _LOG.error("a step failed:\n%s", "".join(traceback.format_exception(error)))
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        link.__traceback__ = None
        link = link.__cause__ or link.__context__


def missing_bytes(error: CapacityError) -> int:
    """Return how many bytes the cache lacked, at least 1."""
    if isinstance(error, OutOfPagesError):
        return max(1, error.needed_bytes - error.free_bytes)
    return 1


def is_out_of_memory(error: Exception) -> bool:
    """Whether the device or the host was out of memory; torch on the CPU has no class for that."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
