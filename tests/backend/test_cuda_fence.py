"""A CUDA fence that several threads query and wait for, over fake events; needs no GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from vmkv.core.backend.cuda import CudaFence


class _Events:
    """Events 0 to 2, those below `num_passed` passed; calls `beside` once in the first method."""

    def __init__(self) -> None:
        self.num_passed = 0
        self.waited: set[int] = set()
        self.recycled: list[int] = []
        self.beside: Callable[[], object] | None = None

    def _interfere(self) -> None:
        beside, self.beside = self.beside, None  # Once.
        if beside is not None:
            beside()

    def has_event_passed(self, event: int) -> bool:
        self._interfere()
        return event < self.num_passed

    def wait_event(self, event: int) -> None:
        self._interfere()
        self.waited.add(event)

    def recycle_event(self, event: int) -> None:
        self._interfere()
        self.recycled.append(event)


@pytest.fixture
def events() -> _Events:
    return _Events()


@pytest.fixture
def fence(events: _Events) -> CudaFence:
    return CudaFence(cast(Any, events), [0, 1, 2])


@pytest.mark.parametrize("num_passed", [0, 1, 2])
def test_fence_has_passed_when_all_streams_have(
    events: _Events, fence: CudaFence, num_passed: int
) -> None:
    """Any stream may be the last one; each event is recycled once."""
    events.num_passed = num_passed
    assert not fence.has_passed()
    events.num_passed = 3
    assert fence.has_passed()
    assert fence.has_passed()
    assert [0, 1, 2] == sorted(events.recycled)


@pytest.mark.parametrize("ask", ["has_passed", "wait"])
@pytest.mark.parametrize("beside", ["has_passed", "wait"])
def test_concurrent_calls_recycle_each_event_once(
    events: _Events, fence: CudaFence, ask: str, beside: str
) -> None:
    """A second call comes during the first; each waits for all events or for none."""
    events.num_passed = 3
    events.beside = getattr(fence, beside)
    getattr(fence, ask)()
    assert [0, 1, 2] == sorted(events.recycled)
    assert events.waited in (set(), {0, 1, 2})
