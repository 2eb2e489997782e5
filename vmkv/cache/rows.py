"""Which rows are live, parked or empty, and which one a new sequence gets.

    empty --open--> live --close--> parked --adopt--> live
      ^------------------trim---------'

A *parked* row's sequence has ended and its memory is still mapped. A new sequence adopts the
parked row that fits best and pays no driver call: in steady state, none at all.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from ..errors import ConfigError, OutOfAddressSpaceError


class Rows:
    """The states of `num_rows` rows."""

    def __init__(self, num_rows: int):
        self.num_rows = num_rows
        self._empty = list(range(num_rows))  # A heap: low rows first, so views stay narrow.
        self._parked: dict[int, None] = {}  # Ordered: parked longest ago first.
        self._live: set[int] = set()

    @property
    def live(self) -> set[int]:
        """The rows of live sequences."""
        return self._live

    def parked(self) -> Iterator[int]:
        """Parked rows, oldest first."""
        return iter(tuple(self._parked))

    def is_parked(self, row: int) -> bool:
        """Whether `row` holds memory of an ended sequence."""
        return row in self._parked

    def choose(self, num_tokens: int, adoptable_tokens: Callable[[int], int]) -> int:
        """The row for a sequence of about `num_tokens`, not taken yet.

        The smallest parked row that is large enough; else the largest parked one, which then
        grows; else the first empty one.

        Raises:
            OutOfAddressSpaceError: Every row is live.
        """
        if self._parked:
            sizes = {row: adoptable_tokens(row) for row in self._parked}
            fitting = [row for row in self._parked if sizes[row] >= num_tokens]
            if fitting:
                return min(fitting, key=lambda row: sizes[row])
            return max(self._parked, key=lambda row: sizes[row])
        if self._empty:
            return self._empty[0]
        raise OutOfAddressSpaceError(
            f"all {self.num_rows} rows hold live sequences; close one, or make the cache with "
            "more rows",
            needed_bytes=0,
        )

    def take(self, row: int) -> None:
        """Make `row` live.

        Raises:
            ConfigError: There is no such row, or it is live already.
        """
        if row in self._parked:
            del self._parked[row]
        elif row in self._live or not 0 <= row < self.num_rows:
            raise ConfigError(f"row {row} of {self.num_rows} is not free")
        else:
            self._empty.remove(row)
            heapq.heapify(self._empty)
        self._live.add(row)

    def park(self, row: int) -> None:
        """`row`'s sequence has ended; its memory stays."""
        self._live.remove(row)
        self._parked[row] = None

    def empty(self, row: int) -> None:
        """A parked `row`'s memory has been retired."""
        del self._parked[row]
        heapq.heappush(self._empty, row)
