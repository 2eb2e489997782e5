"""Simple models of the pool and of the cache, which fuzz tests compare with the real ones.

They have no driver, no free lists and no fences, only counts and token lists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class ModelPool:
    """An extent pool as page counts and numbers of free extents.

    Attributes:
        budget_pages: Most pages that may exist.
        created_pages: Number of pages that exist.
        free: Number of free extents of each size class.
    """

    budget_pages: int
    created_pages: int = 0
    free: Counter[int] = field(default_factory=Counter)

    @property
    def free_pages(self) -> int:
        """Number of pages in free extents."""
        return sum(count << size_class for size_class, count in self.free.items())

    @property
    def in_use_pages(self) -> int:
        """Number of pages in extents in use."""
        return self.created_pages - self.free_pages

    def acquire(self, size_classes: Sequence[int]) -> bool:
        """Acquire extents; return False if the budget does not allow it."""
        wanted = sum(1 << size_class for size_class in size_classes)
        if self.in_use_pages + wanted > self.budget_pages:
            return False
        missing = 0
        for size_class in size_classes:
            if self.free[size_class]:
                self.free[size_class] -= 1
            else:
                missing += 1 << size_class
        self.trim(self.created_pages + missing - self.budget_pages)
        self.created_pages += missing
        return True

    def give_back(self, size_class: int) -> None:
        """Free one extent of this class."""
        self.free[size_class] += 1

    def trim(self, num_pages: int) -> int:
        """Release free extents, large ones first, until `num_pages` are gone; return the pages."""
        released = 0
        for size_class in sorted(self.free, reverse=True):
            while self.free[size_class] and released < num_pages:
                self.free[size_class] -= 1
                released += 1 << size_class
        self.created_pages -= released
        return released

    def set_budget(self, budget_pages: int) -> bool:
        """Set the budget; return False if pages in use do not allow it."""
        if budget_pages < max(1, self.in_use_pages):
            return False
        self.trim(self.created_pages - budget_pages)
        self.budget_pages = budget_pages
        return True


class ModelCache:
    """A KV cache as one list of stamps per sequence.

    A stamp is unique to one write of one token, so content of another sequence, another position or
    another time differs.
    """

    def __init__(self) -> None:
        self.stamps: dict[int, list[int]] = {}
        self._num_stamps = 0
        self._num_sequences = 0

    def open(self) -> int:
        """Open a sequence and return its id."""
        self._num_sequences += 1
        self.stamps[self._num_sequences] = []
        return self._num_sequences

    def fork(self, sequence: int, num_tokens: int) -> int:
        """Fork the first `num_tokens` of a sequence and return the id of the fork."""
        fork = self.open()
        self.stamps[fork] = self.stamps[sequence][:num_tokens]
        return fork

    def reorder(self, sequences: list[int], sources: list[int]) -> None:
        """Replace each of `sequences` by a copy of the one with the index in `sources`."""
        before = [list(self.stamps[sequence]) for sequence in sequences]
        for sequence, source in zip(sequences, sources, strict=True):
            self.stamps[sequence] = list(before[source])

    def append(self, sequence: int, num_tokens: int) -> list[int]:
        """Append `num_tokens` tokens and return the stamps to write."""
        fresh = list(range(self._num_stamps + 1, self._num_stamps + num_tokens + 1))
        self._num_stamps += num_tokens
        self.stamps[sequence] += fresh
        return fresh

    def truncate(self, sequence: int, num_tokens: int) -> None:
        """Keep only the first `num_tokens`."""
        del self.stamps[sequence][num_tokens:]

    def close(self, sequence: int) -> None:
        del self.stamps[sequence]
