"""Growth of rows: pure functions, and the bounds that `core/cache/geometry.py` claims.

Durations are measured by bench/bench_mapping.py.
"""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from vmkv.core.cache.layer_group import growth_quantum_class, largest_class_for_window, pages_to_map
from vmkv.core.memory import size_classes

LARGEST_CLASS = 5
rows = st.integers(0, 20_000)


def _decode(num_pages: int) -> tuple[int, float]:
    """Grow a row page by page; return the number of mappings and the mean share mapped early."""
    end = mappings = 0
    early = 0.0
    for needed in range(1, num_pages + 1):
        more = pages_to_map(end, needed, 1 << 30, growth_quantum_class(end, LARGEST_CLASS))
        mappings += len(list(size_classes(more, LARGEST_CLASS)))
        end += more
        early += (end - needed) / needed
    return mappings, early / num_pages


@given(rows, rows, rows)
def test_pages_to_map_covers_the_needed_pages(end: int, needed: int, extra: int) -> None:
    """A row that is long enough gets nothing; another row gets enough, within its end."""
    row_pages = max(end, needed) + extra
    for size_class in (0, growth_quantum_class(end, LARGEST_CLASS)):
        more = pages_to_map(end, needed, row_pages, size_class)
        assert (more == 0) == (needed <= end)
        if more:
            assert needed <= end + more <= row_pages


@given(rows, rows)
def test_growth_of_a_quantum_or_more_is_exact(end: int, missing: int) -> None:
    quantum_class = growth_quantum_class(end, LARGEST_CLASS)
    more = pages_to_map(end, end + missing, 1 << 30, quantum_class)
    assert more in (missing, 1 << quantum_class if missing else 0)
    if missing >= 1 << quantum_class:
        assert missing == more


@given(rows)
def test_quantum_is_at_most_a_64th_and_a_power_of_two(end: int) -> None:
    """One page while a row is short, then the largest class within 1/64 of the row."""
    quantum_pages = 1 << growth_quantum_class(end, LARGEST_CLASS)
    assert quantum_pages == 1 or quantum_pages <= end / 64
    assert 2 * quantum_pages > min(end / 64, 1 << LARGEST_CLASS)


@given(rows)
def test_quantum_grows_with_the_row(end: int) -> None:
    """A longer row never grows by less."""
    assert growth_quantum_class(end, LARGEST_CLASS) <= growth_quantum_class(end + 1, LARGEST_CLASS)


@given(st.integers(1, 3000))
def test_decode_waste_stays_under_two_percent_once_rows_are_long(end: int) -> None:
    """At most one quantum less a page is mapped early: under 1/64 of the row."""
    more = pages_to_map(end, end + 1, 1 << 30, growth_quantum_class(end, LARGEST_CLASS))
    assert (more - 1) / (end + 1) < 1 / 64


def test_decode_mean_waste_is_half_a_quantum() -> None:
    """On average at most 1/128 of the row is mapped early."""
    for num_pages in (64, 512, 4096):
        _, early = _decode(num_pages)
        assert early <= 1 / 128


def test_decode_calls_grow_with_the_logarithm() -> None:
    """Each doubling costs at most 128 calls while quanta are below the largest class."""
    mappings = {num_pages: _decode(num_pages)[0] for num_pages in (64, 128, 512, 2048)}
    assert 64 == mappings[64]
    for num_pages, count in mappings.items():
        doublings = math.log2(num_pages / 64)
        assert count <= 64 + 128 * doublings
    assert mappings[2048] <= 2048 / 4


@given(st.integers(1, 100_000), st.integers(0, 6))
def test_window_extents_are_small_beside_the_window(window_pages: int, largest: int) -> None:
    """An extent is unmapped once the window has passed all of it: 1/8 of the window at most."""
    size_class = largest_class_for_window(window_pages, largest)
    assert 0 <= size_class <= largest
    assert 1 << size_class <= max(1, window_pages / 8)
