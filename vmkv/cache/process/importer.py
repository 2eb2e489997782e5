"""The importing side: another process's prefix at the start of a row, read-only."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Collection, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from ...backend import Access
from ...errors import ConfigError
from ...memory import Extent, Mapping, RowChange, change
from ..portable import note_first_kept_token
from .offer import Offer, checked
from .protocol import BATCH, OFFER_BYTES_MAX, Channel

if TYPE_CHECKING:
    from ..kv_cache import KVCache
    from ..sequence import Sequence as CacheSequence


def import_prefix(
    cache: KVCache,
    socket_path: str | os.PathLike[str],
    *,
    tenant: str | None = None,
    allowed_uids: Collection[int] | None = None,
    timeout_s: float = 10.0,
) -> CacheSequence:
    """See `KVCache.import_prefix`."""
    cache.check_open()
    where = os.fspath(socket_path)
    uids = frozenset((os.geteuid(),) if allowed_uids is None else allowed_uids)
    extents: list[Extent] = []
    try:
        with _connected(where, timeout_s) as channel:
            try:
                channel.check_peer(uids)
                offer = checked(cache, channel.receive(OFFER_BYTES_MAX), where)
            except ConfigError as error:
                channel.refuse(str(error))
                raise
            channel.send(json.dumps({"ready": offer.num_extents}).encode())
            _receive(cache, channel, offer, extents)
        cache.note_stream()
        sequence = cache.begin(
            offer.num_tokens, tenant, lambda row: _fill(cache, row, offer, extents, tenant)
        )
    finally:
        # From here on the mappings hold the extents; after a failure nobody does.
        cache.pool.disown(extents)
    sequence.num_cached_tokens = offer.num_tokens
    cache.record(sequence, offer.token_ids)
    return sequence


def _connected(path: str, timeout_s: float) -> Channel:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(path)
        return Channel(connection, timeout_s)
    except BaseException as error:
        connection.close()
        if isinstance(error, BlockingIOError | TimeoutError):  # Its queue is full.
            raise TimeoutError(f"nobody at {path} answers within {timeout_s:g} s") from error
        raise


def _receive(cache: KVCache, channel: Channel, offer: Offer, extents: list[Extent]) -> None:
    """Import what the offer promises, each extent with one owner; `extents` takes them."""
    pool = cache.pool
    sizes = (size for group in offer.groups for size in group.sizes_bytes)
    while batch := tuple(islice(sizes, BATCH)):
        fds = channel.receive_descriptors(len(batch))
        try:
            for fd, num_bytes in zip(fds, batch, strict=True):
                handle = pool.backend.mem_import(fd, num_bytes)
                try:
                    extents.append(pool.adopt(handle, num_bytes))
                except BaseException:
                    pool.backend.mem_release(handle)
                    raise
        finally:
            for fd in fds:
                os.close(fd)
        channel.confirm()


def _fill(
    cache: KVCache, row: int, offer: Offer, extents: Sequence[Extent], tenant: str | None
) -> None:
    """Map the extents at the start of the row, and what kernels fetch past them behind."""
    supply = iter(extents)
    parts = []
    for group, theirs in zip(cache.groups, offer.groups, strict=True):
        again = []
        page = theirs.first_page
        for extent in islice(supply, len(theirs.sizes_bytes)):
            again.append(Mapping(page, extent, Access.READ))
            page = again[-1].end_page
        parts.append(RowChange(group.table, row, theirs.first_page, again=again))
    with change(cache.pool, parts) as made:
        made.map(cache.current_stream())
    for group, theirs in zip(cache.groups, offer.groups, strict=True):
        note_first_kept_token(group, row, theirs.first_token)
    cache.map_row(row, offer.num_tokens, tenant)
