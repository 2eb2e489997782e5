"""Naive models of the pool and of the cache: what a fuzzer compares the real ones with.

They know nothing of drivers, lists or fences in flight; they count, and they remember.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class ModelPool:
    """An extent pool, as four numbers and a bag of free extents.

    Attributes:
        budget_pages: What may be created at most.
        created_pages: What exists.
        free: How many extents of each size class are free.
    """

    budget_pages: int
    created_pages: int = 0
    free: Counter[int] = field(default_factory=Counter)

    @property
    def free_pages(self) -> int:
        """Pages in free extents."""
        return sum(count << size_class for size_class, count in self.free.items())

    @property
    def in_use_pages(self) -> int:
        """Pages in extents that somebody needs."""
        return self.created_pages - self.free_pages

    def acquire(self, size_classes: Sequence[int]) -> bool:
        """Whether the pool can supply these extents; it then does."""
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
        """Nobody needs one extent of this class any more."""
        self.free[size_class] += 1

    def trim(self, num_pages: int) -> int:
        """Release free extents, large ones first, until `num_pages` are gone; returns the pages."""
        released = 0
        for size_class in sorted(self.free, reverse=True):
            while self.free[size_class] and released < num_pages:
                self.free[size_class] -= 1
                released += 1 << size_class
        self.created_pages -= released
        return released

    def set_budget(self, budget_pages: int) -> bool:
        """Whether the budget can become that; it then does."""
        if budget_pages < max(1, self.in_use_pages):
            return False
        self.trim(self.created_pages - budget_pages)
        self.budget_pages = budget_pages
        return True


class ModelCache:
    """A KV cache, as one list of stamps per sequence.

    A stamp is unique to one write of one token, so that content which belongs to another
    sequence, another position or another time is recognised as such.
    """

    def __init__(self) -> None:
        self.stamps: dict[int, list[int]] = {}
        self._num_stamps = 0
        self._num_sequences = 0

    def open(self) -> int:
        """A new sequence's id."""
        self._num_sequences += 1
        self.stamps[self._num_sequences] = []
        return self._num_sequences

    def fork(self, sequence: int, num_tokens: int) -> int:
        """A new sequence's id, with the first `num_tokens` stamps of another."""
        fork = self.open()
        self.stamps[fork] = self.stamps[sequence][:num_tokens]
        return fork

    def reorder(self, sequences: list[int], sources: list[int]) -> None:
        """Each of `sequences` goes on from the one that `sources` names, by index."""
        before = [list(self.stamps[sequence]) for sequence in sequences]
        for sequence, source in zip(sequences, sources, strict=True):
            self.stamps[sequence] = list(before[source])

    def append(self, sequence: int, num_tokens: int) -> list[int]:
        """The stamps to write for `num_tokens` new tokens."""
        fresh = list(range(self._num_stamps + 1, self._num_stamps + num_tokens + 1))
        self._num_stamps += num_tokens
        self.stamps[sequence] += fresh
        return fresh

    def truncate(self, sequence: int, num_tokens: int) -> None:
        """Forget all but the first `num_tokens`."""
        del self.stamps[sequence][num_tokens:]

    def close(self, sequence: int) -> None:
        """Forget the sequence."""
        del self.stamps[sequence]
