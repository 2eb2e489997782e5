"""How much to map when a row must grow: pure functions, no memory.

A driver call costs the same for 2 MiB and for 64, so growing by more than is needed saves
calls and wastes bytes. The quantum settles the trade: one page while a row is short, then
about 1/64 of what is mapped. A row that doubles from n pages on so pays for 64 calls, not n,
and on average half a quantum, 1/128 of the row, is mapped too early. Both bounds are measured
by bench/bench_mapping.py and bench/bench_waste.py.
"""

from __future__ import annotations

#: A row grows by the largest class not above 1/64 of it. 1/32 would halve the calls and reach
#: the 2 % of waste that DESIGN.md allows; 1/128 buys nothing a user could see.
_QUANTUM_DIVISOR = 64
#: A sliding window keeps at most this many extents more than it needs.
_WINDOW_DIVISOR = 8


def growth_quantum_class(held_pages: int, largest_class: int) -> int:
    """The size class by which a row that holds `held_pages` grows, when it need not more."""
    quantum_pages = max(1, held_pages // _QUANTUM_DIVISOR)
    return min(quantum_pages.bit_length() - 1, largest_class)


def largest_class_for_window(window_pages: int, largest_class: int) -> int:
    """The largest class worth using where only `window_pages` are kept.

    An extent leaves only when the window has passed all of it, so a large one stays too long.
    """
    pages = max(1, window_pages // _WINDOW_DIVISOR)
    return min(pages.bit_length() - 1, largest_class)


def pages_to_map(
    row_end_page: int, needed_end_page: int, row_pages: int, quantum_class: int
) -> int:
    """How many pages to add to a row that must reach `needed_end_page`.

    A prompt gets exactly what it needs; a tail gets a quantum. Zero if the row is long enough.
    Never past the end of the row.
    """
    missing = needed_end_page - row_end_page
    if missing <= 0:
        return 0
    return min(max(missing, 1 << quantum_class), row_pages - row_end_page)
