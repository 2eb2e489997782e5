"""Waiting for what another thread or process does."""

from __future__ import annotations

import threading
from collections.abc import Callable

PATIENCE_S = 60.0
_INTERVAL_S = 0.002


def until(claim: Callable[[], bool]) -> None:
    """Ask until a claim holds; an AssertionError after a minute."""
    never = threading.Event()
    for _ in range(int(PATIENCE_S / _INTERVAL_S)):
        if claim():
            return
        never.wait(_INTERVAL_S)
    raise AssertionError("it has not come true")
