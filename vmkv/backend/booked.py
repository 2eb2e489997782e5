"""What both backends share: books, counters, and batches through the native executor."""

from __future__ import annotations

import abc
import threading
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from .. import _native
from ..errors import DriverError
from ..units import Handle
from .base import Backend, BackendUsage, Op, UnmapOp, primitive_of
from .books import Books
from .plan import pack


class NativeCalls(NamedTuple):
    """Where the executor finds the driver's functions, and the device they are told."""

    map: int
    set_access: int
    unmap: int
    location_type: int
    location_id: int


class BookedBackend(Backend):
    """A backend that checks every operation against its books before the driver sees it.

    Drivers accept some of what the contract refuses: mmap almost everything, CUDA an unmap whose
    size is no multiple of the granularity (seen on driver 580). The books refuse it for both.
    """

    def __init__(self, granularity_bytes: int):
        self.granularity_bytes = granularity_bytes
        self.calls = Counter()
        self._books = Books(granularity_bytes)
        self._lock = threading.Lock()

    def run_until_failure(self, ops: Sequence[Op]) -> tuple[int, DriverError | None]:
        """See `Backend.run_until_failure`."""
        with self._lock:
            refusal: DriverError | None = None
            leaving: set[int] = set()
            plan = bytearray()
            legal: list[Op] = []
            for op in ops:
                why = self._books.why_not(op, leaving)
                if why is not None:
                    refusal = self._refusal(primitive_of(op), f"{op}: {why}")
                    break
                plan += pack(op)
                legal.append(op)
                self._books.note(op)
            num_done, status, *_ = _native.execute(bytes(plan), *self._native_calls())
            for op in ops[: num_done + 1]:
                self.calls[primitive_of(op)] += 1
            for op in legal[:num_done]:
                if isinstance(op, UnmapOp):
                    for handle, allocation in self._books.note_unmapped(op):
                        if allocation.is_gone:
                            self._forget(handle)
            if not status:
                return num_done, refusal
            for op in reversed(legal[num_done:]):
                self._books.unnote(op)
            failed = ops[num_done]
            return num_done, self._error(primitive_of(failed), status, f"{failed}")

    def usage(self) -> BackendUsage:
        """See `Backend.usage`."""
        with self._lock:
            return self._books.usage()

    @abc.abstractmethod
    def _native_calls(self) -> NativeCalls:
        """The functions that carry out a batch."""

    @abc.abstractmethod
    def _forget(self, handle: Handle) -> None:
        """`handle` was released and has lost its last mapping: its memory goes. Locked."""

    @abc.abstractmethod
    def _error(self, call: str, status: int, details: str) -> DriverError:
        """The error that the driver's `status` means."""

    @abc.abstractmethod
    def _refusal(self, call: str, details: str) -> DriverError:
        """The error for what the contract refuses and the driver might not."""
