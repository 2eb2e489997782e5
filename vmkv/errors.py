"""Every exception vmkv raises, sorted by who can act on it.

    VMKVError
     ├─ ConfigError          yours to fix: an argument, a shape or a call order is wrong
     ├─ CapacityError        expected, not a defect: something is full (a MemoryError)
     │   ├─ OutOfPagesError         retry after closing, trimming or evicting
     │   ├─ OutOfAddressSpaceError  retry after closing caches, or ask for less
     │   └─ SequenceFullError       never retry: the row ends here
     ├─ ClosedError          your code closed this object
     ├─ RankError            a rank (tensor parallelism) has ended: restart all ranks
     ├─ LostError            the replica of this request has ended: call again
     ├─ DriverError          a driver call failed; it names the call and the status
     │   ├─ CudaDriverError
     │   └─ HostDriverError
     └─ InternalError        an invariant is broken: our bug

All of them pickle with their attributes.
"""

from __future__ import annotations

import reprlib
from typing import Any


class VMKVError(Exception):
    """Base of all vmkv errors."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions pickle as `cls(*args)`, which drops keyword-only attributes; carry the
        # attributes as state instead and rebuild without calling `__init__`.
        return (_rebuild, (type(self), self.args, self.__dict__.copy()))


def _rebuild(cls: type[VMKVError], args: tuple[Any, ...], state: dict[str, Any]) -> VMKVError:
    # Not `cls.__new__`: MemoryError's constructor refuses Python subclasses.
    error: VMKVError = Exception.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


class ConfigError(VMKVError, ValueError):
    """An argument cannot work; the message says what to do. Nothing has changed."""


class CapacityError(VMKVError, MemoryError):
    """Something is full. Not a defect; state is as it was before the call."""


class OutOfPagesError(CapacityError, RuntimeError):
    """The pool cannot supply the pages an operation needs.

    Close, trim or evict something (or raise the budget) and call again. Its type and message are
    also those by which accelerate's `find_executable_batch_size` knows to try a smaller batch.

    Attributes:
        needed_bytes: Memory that the operation asked for.
        free_bytes: Memory that the pool could have supplied: unused budget and free extents.
        retired_bytes: Memory that becomes free once its fences have passed.
    """

    def __init__(self, message: str, *, needed_bytes: int, free_bytes: int, retired_bytes: int):
        super().__init__(f"{message}; the pool is out of memory.")
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
        self.retired_bytes = retired_bytes


class OutOfAddressSpaceError(CapacityError):
    """No virtual address range of `needed_bytes` is left: close caches, or ask for less."""

    def __init__(self, message: str, *, needed_bytes: int):
        super().__init__(message)
        self.needed_bytes = needed_bytes


class SequenceFullError(CapacityError):
    """A sequence would grow past `max_tokens`, the end of its row. A retry fails again."""

    def __init__(self, message: str, *, max_tokens: int):
        super().__init__(message)
        self.max_tokens = max_tokens


class ClosedError(VMKVError):
    """Your code closed this object and then used it."""


class PausedError(VMKVError):
    """Your code paused this engine for training, and then used it: leave `paused()` first."""


class RankError(VMKVError):
    """A rank has ended or does not answer: restart all ranks, and send their requests again."""


class LostError(VMKVError):
    """A replica ended before the request was done. The same call again may succeed."""


class DriverError(VMKVError, RuntimeError):
    """A driver call failed. The books are as they were before the operation.

    Attributes:
        call: The primitive that failed, e.g. `mem_create`.
        status: The number the driver returned.
        status_name: Its symbolic name, e.g. `CUDA_ERROR_OUT_OF_MEMORY`.
        is_out_of_memory: Whether the device has no memory left: free some and retry.
        num_done: Operations of the same batch that had succeeded before this one.
    """

    def __init__(
        self,
        call: str,
        status: int,
        status_name: str,
        details: str = "",
        *,
        is_out_of_memory: bool = False,
    ):
        because = f": {details}" if details else ""
        super().__init__(f"{call} failed with {status_name} ({status}){because}")
        self.call = call
        self.status = status
        self.status_name = status_name
        self.is_out_of_memory = is_out_of_memory
        self.num_done = 0


class CudaDriverError(DriverError):
    """The CUDA driver refused a call; `status` is its CUresult."""


class HostDriverError(DriverError):
    """The system, or the host backend's own rules, refused a call; `status` is an errno."""


class InternalError(VMKVError):
    """An invariant of vmkv is broken. This is our bug: please report it with the message."""


_LINE_CHARACTERS = 500
_VALUES = reprlib.Repr()
_VALUES.maxstring = 60


def one_line(error: object) -> str:
    """Format an error or a foreign text as one printable line of at most 500 characters.

    An error without a text is given by its type.
    """
    text = "".join(each if each.isprintable() else " " for each in str(error))
    text = " ".join(text.split()) or type(error).__name__
    return text if len(text) <= _LINE_CHARACTERS else f"{text[: _LINE_CHARACTERS - 1]}…"


def shown(value: object) -> str:
    """Quote a value for an error message, shortened."""
    try:
        return _VALUES.repr(value)
    except ValueError:  # Python converts integers of up to 4,300 digits to text.
        return "an integer of thousands of digits"
