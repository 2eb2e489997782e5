"""Which rows are live, parked or empty, and which one a new sequence gets.

    empty --open--> live --close--> parked --adopt--> live
      ^------------evict, trim--------'

A *parked* row's sequence has ended and its memory is still mapped. A new sequence adopts the
parked row that fits best and pays no driver call: in steady state, none at all. A parked row that
holds a *prefix* others may want is adopted by a stranger last.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Iterator

from ..errors import ConfigError, OutOfAddressSpaceError


class Rows:
    """The states of `num_rows` rows. Guarded by the pool's lock."""

    def __init__(self, num_rows: int):
        self.num_rows = num_rows
        self._empty = list(range(num_rows))  # A heap: low rows first, so views stay narrow.
        self._parked: dict[int, int] = {}  # When each was last used; longest ago first.
        self._live: set[int] = set()
        # Since when nobody has submitted work on each, as far as is known; of live rows what forks
        # of them say.
        self._idle_since: dict[int, int] = {}

    @property
    def live(self) -> set[int]:
        """The rows of live sequences."""
        return self._live

    def parked(self) -> Iterator[int]:
        """Parked rows, used longest ago first."""
        return iter(tuple(self._parked))

    def is_parked(self, row: int) -> bool:
        """Whether `row` holds memory of an ended sequence."""
        return row in self._parked

    def last_used(self, row: int) -> int:
        """When a parked `row` was parked, or last started from."""
        return self._parked[row]

    def idle_since(self, row: int) -> int:
        """When work was submitted last on `row`, parked or taken and not used yet; 0 for never."""
        return self._idle_since.get(row, 0)

    def touch(self, row: int, now: int) -> None:
        """A sequence has started from `row`, live or parked, and may have copied from it."""
        self._idle_since[row] = now
        if row in self._parked:
            del self._parked[row]
            self._parked[row] = now

    def choose(
        self,
        num_tokens: int,
        adoptable_tokens: Callable[[int], int],
        with_prefix: Container[int] = (),
    ) -> int:
        """The row for a sequence of about `num_tokens` that starts from nothing, not taken yet.

        Of the parked rows that are not `with_prefix`, the smallest that is large enough, else the
        largest, which then grows; else the first empty one; else the one whose prefix was used
        longest ago.

        Raises:
            OutOfAddressSpaceError: Every row is live.
        """
        plain = [row for row in self._parked if row not in with_prefix]
        sizes = {row: adoptable_tokens(row) for row in plain}
        fitting = [row for row in plain if sizes[row] >= max(1, num_tokens)]
        if fitting:
            return min(fitting, key=lambda row: sizes[row])
        if plain:
            return max(plain, key=lambda row: sizes[row])
        return self.choose_unneeded()

    def choose_unneeded(self, but: int | None = None) -> int:
        """A row for a sequence that brings its own memory: empty, or parked longest unused.

        Args:
            but: Not this one.

        Raises:
            OutOfAddressSpaceError: Every row is live.
        """
        if self._empty:
            return self._empty[0]
        for row in self._parked:
            if row != but:
                return row
        raise OutOfAddressSpaceError(
            f"all {self.num_rows} rows hold live sequences; close one, or make the cache with "
            "more rows",
            needed_bytes=0,
        )

    def check_free(self, row: int) -> None:
        """Raise `ConfigError` if there is no such row, or it is live already."""
        if row in self._live or not 0 <= row < self.num_rows:
            raise ConfigError(f"row {row} of {self.num_rows} is not free")

    def take(self, row: int) -> None:
        """Make `row` live. Raises what `check_free` does."""
        self.check_free(row)
        if row in self._parked:
            del self._parked[row]
        elif row == self._empty[0]:
            heapq.heappop(self._empty)
        else:
            self._empty.remove(row)
            heapq.heapify(self._empty)
        self._live.add(row)

    def park(self, row: int, now: int = 0, idle_since: int | None = None) -> None:
        """`row`'s sequence has ended; its memory stays. Nobody works on it since `idle_since`."""
        self._live.remove(row)
        self._parked[row] = now
        since = now if idle_since is None else idle_since
        self._idle_since[row] = max(since, self._idle_since.get(row, since))

    def empty(self, row: int) -> None:
        """A parked `row`'s memory has been retired."""
        del self._parked[row]
        heapq.heappush(self._empty, row)
