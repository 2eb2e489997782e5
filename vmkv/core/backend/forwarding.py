"""A backend around another one, for wrappers that change some of its calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...errors import DriverError
from .base import Backend, BackendUsage, Op


def forwarded(call: str) -> Callable[..., Any]:
    """Make a method of a `ForwardingBackend` that passes a call on."""

    def method(self: ForwardingBackend, *args: Any, **options: Any) -> Any:
        return self.forward(call, *args, **options)

    return method


class ForwardingBackend(Backend):
    """Passes every call on to `upstream`; driver calls that may fail go through `forward`.

    `copy_many` copies one by one, as a backend does by default.
    """

    def __init__(self, upstream: Backend):
        self.upstream = upstream
        self.name = upstream.name
        self.granularity_bytes = upstream.granularity_bytes
        self.calls = upstream.calls

    def forward(self, call: str, *args: Any, **options: Any) -> Any:
        """Make a call on the upstream."""
        return getattr(self.upstream, call)(*args, **options)

    @property
    def dlpack_device(self) -> tuple[int, int]:
        """The upstream's device."""
        return self.upstream.dlpack_device

    address_reserve = forwarded("address_reserve")
    address_free = forwarded("address_free")
    mem_create = forwarded("mem_create")
    mem_release = forwarded("mem_release")
    mem_export = forwarded("mem_export")
    mem_import = forwarded("mem_import")
    record_fence = forwarded("record_fence")
    join_streams = forwarded("join_streams")
    new_stream = forwarded("new_stream")
    stream_destroy = forwarded("stream_destroy")
    stream_wait = forwarded("stream_wait")
    copy = forwarded("copy")
    fill = forwarded("fill")

    def run_until_failure(self, ops: Sequence[Op]) -> tuple[int, DriverError | None]:
        """Run operations on the upstream."""
        return self.upstream.run_until_failure(ops)

    def note_stream(self, stream: int) -> None:
        """Note a stream on the upstream; reaches no driver, so cannot fail."""
        self.upstream.note_stream(stream)

    def usage(self) -> BackendUsage:
        """Return the upstream's usage."""
        return self.upstream.usage()

    def free_memory_bytes(self) -> int:
        """Return the upstream's free memory."""
        return self.upstream.free_memory_bytes()

    def free_host_memory_bytes(self) -> int:
        """Return the upstream's free host memory."""
        return self.upstream.free_host_memory_bytes()

    def close(self) -> None:
        """Close the upstream."""
        self.upstream.close()
