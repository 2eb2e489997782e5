"""A backend around another one, for wrappers that change some of its calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .base import Backend


def forwarded(call: str) -> Callable[..., Any]:
    """Make a method of a `ForwardingBackend` that passes a call on."""

    def method(self: ForwardingBackend, *args: Any, **options: Any) -> Any:
        return self.forward(call, *args, **options)

    return method


class ForwardingBackend(Backend):
    """Passes every call on to `upstream`, by way of `forward`; `copy_many` copies one by one."""

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
    pin = forwarded("pin")
    unpin = forwarded("unpin")
    record_fence = forwarded("record_fence")
    join_streams = forwarded("join_streams")
    new_stream = forwarded("new_stream")
    stream_destroy = forwarded("stream_destroy")
    stream_wait = forwarded("stream_wait")
    copy = forwarded("copy")
    fill = forwarded("fill")

    run_until_failure = forwarded("run_until_failure")
    note_stream = forwarded("note_stream")
    usage = forwarded("usage")
    free_memory_bytes = forwarded("free_memory_bytes")
    free_host_memory_bytes = forwarded("free_host_memory_bytes")
    close = forwarded("close")
