"""Extents: size classes of a number of pages, and reference counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmkv.core._native import count_references
from vmkv.core.memory import Extent, size_classes
from vmkv.units import Handle


@given(st.integers(0, 5000), st.integers(0, 6))
def test_size_classes_cover_exactly_and_descend(num_pages: int, largest_class: int) -> None:
    """The extents have exactly the pages asked for, largest first, none above the largest class."""
    classes = list(size_classes(num_pages, largest_class))
    assert num_pages == sum(1 << size_class for size_class in classes)
    assert sorted(classes, reverse=True) == classes
    assert all(0 <= size_class <= largest_class for size_class in classes)


@given(st.integers(1, 5000), st.integers(0, 6))
def test_size_classes_are_the_fewest(num_pages: int, largest_class: int) -> None:
    """Each extent is a driver call: one per largest class, and one per bit of the rest."""
    largest_pages = 1 << largest_class
    fewest = num_pages // largest_pages + (num_pages % largest_pages).bit_count()
    assert fewest == len(list(size_classes(num_pages, largest_class)))


def test_extent_is_referenced_by_mappings_and_owners() -> None:
    """The number of references is the sum of both (I2)."""
    extent = Extent(id=3, size_class=2, num_bytes=4 * 4096, handle=Handle(7))
    assert (4, 0) == (extent.num_pages, extent.num_references)
    assert [] == count_references([extent, extent], 1, 1, 0) + count_references([extent], 0, 0, 1)
    count_references([extent], 0, -1, 0)
    assert (2, 1, 1) == (extent.num_mappings, extent.num_live_mappings, extent.num_owners)
    assert 3 == extent.num_references
    assert "id=3" in repr(extent)


def test_last_reference_is_taken_away_once() -> None:
    """The call that removes it gets the extent; removing one more is refused."""
    extent = Extent(id=3, size_class=2, num_bytes=4 * 4096, handle=Handle(7))
    assert [] == count_references([extent], 1, 1, 1)
    assert [] == count_references([extent], 0, 0, -1)
    assert [] == count_references([extent], 0, -1, 0)
    assert [extent] == count_references([extent], -1, 0, 0)
    with pytest.raises(ValueError, match="Extent"):
        count_references([extent], 0, 0, -1)
    with pytest.raises(ValueError, match="1 live"):
        count_references([extent], 0, 1, 0)
    assert [] == count_references([extent], 0, 0, 0)
    with pytest.raises(TypeError):
        count_references([object()], 0, 0, 1)  # type: ignore[type-var]
