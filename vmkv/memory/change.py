"""A change of mappings: what it reads stays where it is until it is made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from .page_table import Mapping
from .pool import ExtentPool


@contextmanager
def pinned(pool: ExtentPool, mappings: Iterable[Mapping]) -> Iterator[None]:
    """For the length of a block, `mappings` are read: nobody who gives way gives them up.

    Of extents it would not be enough: what is read lies at an address.
    """
    with pool.lock:
        its = list(mappings)
        for mapping in its:
            mapping.num_pins += 1
    try:
        yield
    finally:
        with pool.lock:
            for mapping in its:
                mapping.num_pins -= 1
