"""Copy-on-write: before a row is written, what it shares there becomes its own.

Sequences only append, and forks copy the tail, so this happens where a sequence was truncated
into what it shares, or where a parked row that others started from is used for something new.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..backend import Access
from ..errors import OutOfPagesError
from ..memory import Exchange, Mapping, exchange, size_classes
from .access import make_writable
from .layer_group import LayerGroup
from .staging import staged


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
                    if not group.pool.pressure.let_go([shared.extent]):
                        raise
                return unshare(group, row, num_tokens, tenant=tenant, stream=stream)
        else:
            fence = group.pool.reclaimer.new_fence()
            group.table.retire_back(row, shared.first_page, fence)
        concerned = group.table.overlapping(row, first_page, pages.end_page)
    make_writable(group.table, row, concerned)
    _scrub(group, row, concerned, num_tokens, tenant, stream)
    pages.shared_end_page = min(pages.shared_end_page, first_page)
    return copied_bytes


def _scrub(
    group: LayerGroup,
    row: int,
    mappings: Sequence[Mapping],
    num_tokens: int,
    tenant: object,
    stream: int,
) -> None:
    """Overwrite what the row holds of others: while that was shared, nobody could."""
    for mapping in mappings:
        if mapping.first_page >= group.geometry.pages_for(num_tokens):
            address = group.table.page_address(row, mapping.first_page)
            group.pool.prepare([mapping.extent], address, tenant, stream)


def _replace(
    group: LayerGroup,
    row: int,
    shared: Mapping,
    num_tokens: int,
    tenant: object,
    stream: int,
) -> int:
    """Put a copy of the tokens from `shared` on up to `num_tokens` in its place."""
    pool, table = group.pool, group.table
    start_bytes = shared.first_page * pool.page_bytes
    copied_bytes = num_tokens * group.geometry.token_bytes - start_bytes
    num_pages = group.geometry.pages_for(num_tokens) - shared.first_page
    fresh = pool.acquire_or_evict(tuple(size_classes(num_pages, group.largest_class)))
    try:
        # The block ends when the copy has: then the addresses go, and the extents are still ours.
        with staged(pool, fresh) as staging:
            pool.prepare(fresh, staging.address, tenant, stream)
            source = table.page_address(row, shared.first_page)
            pool.backend.copy(staging.address, source, copied_bytes, stream)
        new = [(extent, Access.READ_WRITE) for extent in fresh]
        old = table.overlapping(row, shared.first_page, table.rows[row].end_page)
        exchange(pool, [Exchange(table, row, shared.first_page, old, new)])
    finally:
        pool.disown(fresh)
    return copied_bytes
