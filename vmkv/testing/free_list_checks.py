"""The contract of the free list, as one check: compared with plain Python lists.

Single-threaded; that no id is lost or doubled between threads is another test's matter.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Protocol


class FreeListLike(Protocol):
    """What `vmkv._native.FreeList` offers: see its type stub for the contract."""

    def push(self, size_class: int, extent_id: int, /) -> None:
        """Give an id that is out to a class."""

    def pop(self, size_class: int, /) -> int | None:
        """The last id pushed to a class, or None."""

    def bump(self) -> int | None:
        """The lowest id never issued, or None when all are."""

    def count(self, size_class: int, /) -> int:
        """How many ids a class lists."""


def check_free_list(
    make_free_list: Callable[[int, int], FreeListLike], *, num_steps: int = 2000, seed: int = 0
) -> None:
    """Drive a free list at random beside plain lists, and compare every answer.

    Args:
        make_free_list: From a capacity and a number of classes to an empty free list.
        num_steps: How many calls.
        seed: Of the choice of calls.

    Raises:
        AssertionError: An answer differs, or a wrong push was accepted.
    """
    capacity, num_classes = 13, 3
    choose = random.Random(seed)
    free_list = make_free_list(capacity, num_classes)
    model: list[list[int]] = [[] for _ in range(num_classes)]
    out: list[int] = []
    num_issued = 0
    for _ in range(num_steps):
        size_class = choose.randrange(num_classes)
        action = choose.choice(("bump", "push", "pop", "push a listed id"))
        if action == "bump":
            wanted = num_issued if num_issued < capacity else None
            got = free_list.bump()
            assert wanted == got, f"bump gives {got}, not {wanted}"
            if got is not None:
                num_issued += 1
                out.append(got)
        elif action == "push" and out:
            extent_id = out.pop(choose.randrange(len(out)))
            free_list.push(size_class, extent_id)
            model[size_class].append(extent_id)
        elif action == "pop":
            wanted = model[size_class].pop() if model[size_class] else None
            got = free_list.pop(size_class)
            assert wanted == got, f"pop({size_class}) gives {got}, not {wanted}"
            if got is not None:
                out.append(got)
        elif action == "push a listed id" and any(model):
            _check_refused(free_list, size_class, next(ids[-1] for ids in model if ids))
        for each, ids in enumerate(model):
            assert len(ids) == free_list.count(each), f"class {each} counts {free_list.count(each)}"


def _check_refused(free_list: FreeListLike, size_class: int, extent_id: int) -> None:
    try:
        free_list.push(size_class, extent_id)
    except ValueError:
        return
    raise AssertionError(f"id {extent_id} could be pushed twice")
