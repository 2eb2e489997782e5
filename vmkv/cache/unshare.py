"""Copy-on-write: before a row is written, what it shares there becomes its own.

Sequences only append, and forks copy the tail, so this happens where a sequence was truncated
into what it shares, or where a parked row that others started from is used for something new.
"""

from __future__ import annotations

from ..errors import OutOfPagesError
from ..memory import Mapping, RowChange, change, make_writable, size_classes
from .layer_group import LayerGroup


def unshare(group: LayerGroup, row: int, num_tokens: int, *, tenant: object, stream: int) -> int:
    """Make everything of `row` from token `num_tokens` on writable, keeping what is before.

    What lies wholly behind is given up where it is shared; a shared extent that holds some of
    the first `num_tokens` tokens is replaced by a copy, at the same addresses.

    Returns:
        The bytes copied.

    Raises:
        OutOfPagesError, DriverError: The row holds what it held.

    Cost: nothing while no page from there on is shared; else a wait for the device where
        something is replaced.
    """
    pages = group.table.rows[row]
    first_page = group.geometry.whole_pages_below(num_tokens)
    if pages.shared_end_page <= first_page:
        return 0
    # Another stream may still read, for who shared it and has ended, what this one will overwrite.
    group.pool.backend.join_streams(stream)
    concerned = group.table.overlapping(row, first_page, pages.end_page)
    shared = next((mapping for mapping in concerned if mapping.extent.is_shared), None)
    copied_bytes = 0
    if shared is not None:
        kept_end_page = group.geometry.pages_for(num_tokens)
        if shared.first_page < kept_end_page:
            try:
                copied_bytes = _replace(group, row, shared, num_tokens, tenant, stream)
            except OutOfPagesError:
                # No room for a copy. None is needed where only victims show it besides.
                with group.pool.lock:
                    if not group.pool.pressure.give_up([shared.extent]):
                        raise
                return unshare(group, row, num_tokens, tenant=tenant, stream=stream)
        else:
            fence = group.pool.reclaimer.new_fence()
            group.table.retire_back(row, shared.first_page, fence)
        concerned = group.table.overlapping(row, first_page, pages.end_page)
    make_writable(group.table, row, concerned)
    group.scrub(row, num_tokens, tenant, stream)  # While it was shared, nobody could.
    pages.shared_end_page = min(pages.shared_end_page, first_page)
    return copied_bytes


def _replace(
    group: LayerGroup,
    row: int,
    shared: Mapping,
    num_tokens: int,
    tenant: object,
    stream: int,
) -> int:
    """Put a copy of the tokens from `shared` on up to `num_tokens` in its place."""
    pool, table, first_page = group.pool, group.table, shared.first_page
    copied_bytes = num_tokens * group.geometry.token_bytes - first_page * pool.page_bytes
    num_pages = group.geometry.pages_for(num_tokens) - first_page
    classes = tuple(size_classes(num_pages, group.largest_class))
    old = table.overlapping(row, first_page, table.rows[row].end_page)
    copied = RowChange(table, row, first_page, classes, tenant, old=old, kept_bytes=copied_bytes)
    with change(pool, [copied], reads=old) as made:
        made.map(stream)
    return copied_bytes
