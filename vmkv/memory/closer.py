"""The closer: ends tables that nobody uses any more, and never waits for the device.

Layers are dropped or moved, a swap fails half-way: other caches of the pool run on meanwhile. So
what is closed here is retired behind a fence, and the reclaimer does the rest when that has passed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from ..errors import DriverError
from .reclaim import Reclaimer, RecordedFence

#: Retires everything until a fence has passed, such as `PageTable.close_behind`. Cannot fail.
CloseBehind = Callable[[RecordedFence], None]


class Closer:
    """That of one pool.

    Args:
        reclaimer: Where fences come from, and what unmaps behind them.
        lock: Guards what is left to close; the pool's.
    """

    def __init__(self, reclaimer: Reclaimer, lock: threading.RLock):
        self._reclaimer = reclaimer
        self._lock = lock
        self._left: list[CloseBehind] = []

    def close_soon(self, *closes: CloseBehind) -> None:
        """Close what nobody uses; what the driver refuses is tried again. Cannot fail."""
        with self._lock, suppress(DriverError):
            self._left += closes
            self.close_left()
            self._reclaimer.poll()  # On an idle device all of it goes now.
            self._reclaimer.free_idle_reservations()

    def close_later(self, close: CloseBehind) -> None:
        """Take over what could not be closed."""
        with self._lock:
            self._left.append(close)

    def close_left(self) -> None:
        """Close what is left to close, behind a fence of this moment.

        Raises:
            DriverError: No fence could be recorded. All of it is left, for the next time.
        """
        with self._lock:
            if self._left:
                fence = self._reclaimer.new_fence()
                while self._left:
                    self._left[-1](fence)
                    self._left.pop()
