"""Locks in forked children, where the threads that held them do not exist."""

from __future__ import annotations

import os
import weakref
from typing import Any, TypeVar

_Lock = TypeVar("_Lock")
_LOCKS: weakref.WeakSet[Any] = weakref.WeakSet()


def free_in_children(lock: _Lock) -> _Lock:
    """Return `lock`, a `Lock` or `RLock`, which nobody holds in children forked later.

    What it guards may be half changed there: a child only closes what it has of its parent.
    """
    _LOCKS.add(lock)
    return lock


def _free_all() -> None:
    for lock in _LOCKS:
        lock._at_fork_reinit()


os.register_at_fork(after_in_child=_free_all)
