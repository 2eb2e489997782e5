"""Caches that were dropped without `close()`.

`model.generate(..., past_key_values=VMKVCache(config))` never closes its cache, and a loop of
such calls must not fill the device. A destructor, though, runs at any moment, on any thread,
inside anybody's call: no time to wait for fences. So it only puts the memory on a list, and
the next cache to be made closes what is on it, if no tensor points into it any more. See Note
[An unclosed cache is closed later] and Note [State of the process] in DESIGN.md.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque

from .store import Store

_orphans: deque[Store] = deque()
_collecting = threading.Lock()


def add(store: Store) -> None:
    """Called by the garbage collector with the store of a cache that is gone."""
    if store.is_closed:
        return
    _orphans.append(store)
    warnings.warn(
        "a VMKVCache was never closed; its memory is given back when the next one is made. Use "
        "`with VMKVCache(...) as cache:` or cache.close()",
        ResourceWarning,
        stacklevel=2,
    )


def collect() -> None:
    """Close the orphans that no tensor points into any more."""
    with _collecting:
        for _ in range(len(_orphans)):
            store = _orphans.popleft()
            if store.has_outside_views():
                _orphans.append(store)
            else:
                store.close()
