"""The importing side: another process's prefix at the start of a row, read-only."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Collection, Sequence
from itertools import islice

from ....errors import ConfigError
from ....interrupts import interruptible
from ...backend import Access
from ...memory import Extent, ExtentPool, Mapping, RowChange, change
from ..growing import Target, map_rows
from ..row_space import RowSpace
from .offer import Offer, checked
from .protocol import BATCH, OFFER_BYTES_MAX, Channel


def import_prefix(
    space: RowSpace,
    socket_path: str | os.PathLike[str],
    *,
    tenant: str | None,
    allowed_uids: Collection[int] | None,
    timeout_s: float,
) -> tuple[int, int, Sequence[int]]:
    """Implement `KVCache.import_prefix`; returns the row, live now, its length and known tokens."""
    space.check_open()
    where = os.fspath(socket_path)
    uids = frozenset((os.geteuid(),) if allowed_uids is None else allowed_uids)
    extents: list[Extent] = []
    try:
        with _connected(where, timeout_s) as channel:
            try:
                channel.check_peer(uids)
                offer = checked(space, channel.receive(OFFER_BYTES_MAX), where)
            except ConfigError as error:
                channel.refuse(str(error))
                raise
            channel.send(json.dumps({"ready": offer.num_extents}).encode())
            _receive(space.pool, channel, offer, extents)
        space.note_stream()
        with space.beginning() as row:
            _fill(space, row, offer, extents, tenant)
    finally:
        # The mappings own the extents from here on; after a failure they are freed.
        space.pool.disown(extents)
    return row, offer.num_tokens, offer.token_ids


def _connected(path: str, timeout_s: float) -> Channel:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        interruptible(connection.connect, path)
        return Channel(connection, timeout_s)
    except BaseException as error:
        connection.close()
        if isinstance(error, BlockingIOError | TimeoutError):  # The exporter's queue is full.
            raise TimeoutError(f"nobody at {path} answers within {timeout_s:g} s") from error
        raise


def _receive(pool: ExtentPool, channel: Channel, offer: Offer, extents: list[Extent]) -> None:
    sizes = (size for group in offer.groups for size in group.sizes_bytes)
    while batch := tuple(islice(sizes, BATCH)):
        fds = channel.receive_descriptors(len(batch))
        try:
            for fd, num_bytes in zip(fds, batch, strict=True):
                handle = pool.backend.mem_import(fd, num_bytes)
                try:
                    extents.append(pool.import_extent(handle, num_bytes))
                except BaseException:
                    pool.backend.mem_release(handle)
                    raise
        finally:
            for fd in fds:
                os.close(fd)
        channel.confirm()


def _fill(
    space: RowSpace, row: int, offer: Offer, extents: Sequence[Extent], tenant: str | None
) -> None:
    """Map the extents at the start of the row, and over-read pages after them."""
    supply = iter(extents)
    changes = []
    for group, theirs in zip(space.groups, offer.groups, strict=True):
        again = []
        page = theirs.first_page
        for extent in islice(supply, len(theirs.sizes_bytes)):
            again.append(Mapping(page, extent, Access.READ))
            page = again[-1].end_page
        changes.append(RowChange(group.table, row, theirs.first_page, again=again))
    with change(space.pool, changes) as made:
        made.map(space.current_stream())
    for group, theirs in zip(space.groups, offer.groups, strict=True):
        group.begin_row(row, theirs.first_token)
    map_rows(space, [Target(row, offer.num_tokens, offer.num_tokens, tenant)])
