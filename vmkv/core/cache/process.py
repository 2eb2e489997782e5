"""Sharing between processes of one user: another process maps a prefix's extents, without a copy.

    exporter                                importer
       | <----------------- connects ---------- |    each checks that the other is of its user
       | --- frame: the offer ----------------> |    compares it with its cache
       | <----------------- one byte ---------- |    asks for a batch, or has the last one
       | --- one byte, with descriptors ------> |    imports it

A frame is a prefix (magic, version, length) and so many bytes of JSON. Extents are mapped whole, so
a prefix is offered as far as extents of every layer group are full of its tokens. The importer
computes the rest.

Exported memory is frozen: it is read-only here as well, and is released rather than recycled,
because nobody can tell when the last importer is gone.

See DESIGN.md, Note [Exported memory is frozen].
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import struct
import threading
import time
from collections import abc
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from ...errors import ClosedError, ConfigError, VMKVError
from ..backend import Access
from ..interrupts import interruptible, uninterrupted
from ..memory import Change, Extent, ExtentPool, RowChange, placed, protect
from ..memory.unix_sockets import Listener, peer_of
from .disk import check_fits, describe_groups
from .growing import Target, map_rows

if TYPE_CHECKING:
    from .kv_cache import KVCache
    from .sequence import Sequence

_LOG = logging.getLogger(__name__)
_MAGIC, _VERSION = b"vmkv", 2
_PREFIX = struct.Struct("<4sII")
#: Descriptors in flight count against their sender's limit on open files, by default 1,024.
_BATCH = 64
#: Pause after a failure, so that an importer that retries does not keep a core busy.
_PAUSE_S = 0.1

# ---- messages ------------------------------------------------------------------------------------


class _Channel:
    """A connected Unix stream socket, which the caller closes, with one deadline for all messages.

    Every method raises `TimeoutError` after the deadline and `ConnectionError` if the other end is
    gone. `ConfigError` if the other end is of another user.
    """

    def __init__(self, connection: socket.socket, timeout_s: float):
        self._connection = connection
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        _, self._peer = peer_of(connection)

    def send(self, message: object) -> None:
        """Send a message as a frame of JSON."""
        data = json.dumps(message).encode()
        frame = _PREFIX.pack(_MAGIC, _VERSION, len(data)) + data
        self._call(self._connection.sendall, frame)

    def receive(self) -> Any:
        """Return the message of the next frame; `ConfigError` for another protocol or version."""
        magic, version, num_bytes = _PREFIX.unpack(self._receive(_PREFIX.size))
        if magic != _MAGIC:
            raise ConfigError(f"{self._peer} does not speak vmkv's protocol: is it another server?")
        if version != _VERSION:
            raise ConfigError(
                f"{self._peer} speaks version {version} of the protocol, and this vmkv {_VERSION}: "
                "run the same vmkv on both sides"
            )
        return json.loads(self._receive(num_bytes))

    def ask(self) -> None:
        """Ask for a batch of descriptors, or confirm the last one."""
        self._call(self._connection.sendall, b"+")

    def await_question(self) -> None:
        """Wait until the other end calls `ask`."""
        self._receive(1)

    def send_descriptors(self, fds: abc.Sequence[int]) -> None:
        """Send a batch; the caller keeps the descriptors and may close them at once."""
        self._call(socket.send_fds, self._connection, [b"+"], fds)

    def receive_descriptors(self) -> list[int]:
        """Return a batch of descriptors, which the caller closes.

        Raises `OSError` if this process has too many open files.
        """
        data, fds, flags, _ = self._call(
            socket.recv_fds, self._connection, 1, _BATCH, socket.MSG_CMSG_CLOEXEC
        )
        if data and not flags & socket.MSG_CTRUNC:
            return list(fds)
        for fd in fds:
            os.close(fd)
        if not data:
            raise self._gone()
        raise OSError(
            errno.EMFILE,
            "this process has too many open files for what it is sent; raise `ulimit -n`",
        )

    def _receive(self, num_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            new = self._call(interruptible, self._connection.recv, num_bytes - len(data))
            if not new:
                raise self._gone()
            data += new
        return bytes(data)

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of the socket within the deadline, and name the peer in its errors."""
        late = TimeoutError(f"{self._peer} took more than {self._timeout_s:g} s")
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise late
        self._connection.settimeout(left_s)
        try:
            return function(*args)
        except TimeoutError:
            raise late from None
        except ConnectionError as error:
            raise self._gone() from error

    def _gone(self) -> ConnectionError:
        return ConnectionResetError(f"{self._peer} closed the connection midway")


# ---- the offer -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _GroupOffer:
    """Extents of a layer group, gapless from `first_page` on; they hold `first_token` and later."""

    first_page: int
    sizes_bytes: abc.Sequence[int]
    first_token: int


@dataclass(frozen=True)
class _Offer:
    """A prefix that can be mapped elsewhere; `token_ids` are its first tokens, if known."""

    backend: str
    page_bytes: int
    layout: abc.Sequence[dict[str, Any]]
    num_tokens: int
    token_ids: abc.Sequence[int]
    groups: abc.Sequence[_GroupOffer]


def _whole_extents(cache: KVCache, row: int, num_tokens: int) -> tuple[_Offer, list[Extent]]:
    """Offer the first `num_tokens` tokens of a row, cut to whole extents. Changes nothing.

    Raises `ConfigError` if no extent is whole, a sliding-window layer has lost tokens that the
    prefix sees, or memory cannot be shared. Locked.
    """
    covered = num_tokens
    cache.check_keeps(row, num_tokens, "export")
    for group in cache.groups:
        mappings = group.whole_mappings(row, group.first_needed_page(num_tokens), num_tokens)
        end_page = mappings[-1].end_page if mappings else 0
        covered = min(covered, group.token_at(end_page))
    if not covered or not cache.groups:
        raise ConfigError(
            f"the first {num_tokens} tokens of row {row} do not fill an extent of every layer "
            "group, and only whole extents can be shared: export more tokens"
        )
    cache.check_keeps(row, covered, "export")
    extents, offers = [], []
    imported = set(map(id, cache.pool.imported_extents()))
    for group in cache.groups:
        first_page, end_page = group.first_needed_page(covered), group.pages_for(covered)
        mappings = group.table.overlapping(row, first_page, end_page)
        for mapping in mappings:
            if id(mapping.extent) in imported:
                raise ConfigError(
                    f"row {row} begins with extents that were imported; export them from the "
                    "process that they came from"
                )
        extents += [mapping.extent for mapping in mappings]
        sizes_bytes = [mapping.extent.num_bytes for mapping in mappings]
        first_token = group.first_kept_token(row, covered)
        offers.append(_GroupOffer(mappings[0].first_page, sizes_bytes, first_token))
    token_ids = list(cache.prefixes.token_ids(row)[:covered])
    layout, page_bytes = describe_groups(cache), cache.pool.page_bytes
    return _Offer(_kind(cache), page_bytes, layout, covered, token_ids, offers), extents


def _kind(cache: KVCache) -> str:
    return cache.pool.backend.name.partition(":")[0]


def _checked(cache: KVCache, values: dict[str, Any], where: str) -> _Offer:
    groups = [_GroupOffer(**each) for each in values.pop("groups")]
    offer = _Offer(**values, groups=groups)
    theirs = f"memory of {offer.backend!r} in pages of {offer.page_bytes} bytes"
    ours = f"memory of {_kind(cache)!r} in pages of {cache.pool.page_bytes} bytes"
    if theirs != ours:
        raise ConfigError(
            f"{where} shares {theirs}, and this cache has {ours}: make both pools on the same "
            "device, with the same page_bytes"
        )
    check_fits(cache, offer.layout, offer.num_tokens, where)
    for group, its in zip(cache.groups, groups, strict=True):
        end_page = its.first_page + sum(its.sizes_bytes) // offer.page_bytes
        if end_page > group.table.row_pages:
            raise ConfigError(
                f"{where} offers extents up to page {end_page}, in rows of "
                f"{group.table.row_pages}: make this cache with a larger max_tokens"
            )
    return offer


# ---- exporting -----------------------------------------------------------------------------------


class PrefixExporter(AbstractContextManager["PrefixExporter"]):
    """Shares the beginning of a sequence with processes of this user; see `Sequence.export`.

    Use it as a context manager. `serve_one` serves one importer; after `start`, a thread serves all
    that come, one after another. It holds the shared memory until it is closed, and importers as
    long as they need it, even if the sequence or this process ends.

    Args:
        sequence: The sequence; it may go on, and end.
        socket_path: The socket to listen on; its mode is 0600.
        num_tokens: How many tokens. Tokens that do not fill whole extents are left out.
        timeout_s: Deadline for one importer.

    Attributes:
        num_tokens: How many tokens importers get.
        socket_path: The socket to connect to.
        num_served: Importers that got all of it.
        num_failed: Importers that were refused, or failed.

    Raises:
        ConfigError: The pool is not shareable, the path cannot be used, or there is no whole extent
            to share. Nothing changed.
        ClosedError: The sequence is closed.
        DriverError: Nothing is shared; some extents may be read-only already, which is harmless.
        OSError: The socket could not be made. Nothing changed.
    """

    def __init__(
        self,
        sequence: Sequence,
        socket_path: str | os.PathLike[str],
        num_tokens: int,
        timeout_s: float,
    ):
        sequence.check_open()
        cache, row = sequence.cache, sequence.row
        if not 0 < num_tokens <= sequence.num_tokens:
            raise ConfigError(
                f"cannot export {num_tokens} tokens of {sequence}: it holds {sequence.num_tokens}"
            )
        if not cache.pool.is_shareable:
            raise ConfigError(
                "the cache's memory was not made to be shared; make the cache over "
                "ExtentPool(backend, budget_bytes, is_shareable=True)"
            )
        self.socket_path = os.fspath(socket_path)
        self.num_served = 0
        self.num_failed = 0
        self._timeout_s = timeout_s
        self._pool = cache.pool
        self._listener = Listener(self.socket_path)
        try:
            cache.note_stream()
            with self._pool.lock:
                self._offer, self._extents = _whole_extents(cache, row, num_tokens)
                protect(self._pool, self._extents)
                # Importers do not know our streams, so the contents must be complete.
                self._pool.reclaimer.new_fence().wait()
                for extent in self._extents:
                    extent.is_recyclable = False
                self._pool.own(self._extents)
                self._pool.attach()
        except BaseException:
            self._listener.close()
            raise
        self.num_tokens = self._offer.num_tokens
        self._handles = [extent.handle for extent in self._extents]
        self._is_attached = True
        self._is_closed = False
        self._connection: socket.socket | None = None
        self._thread: threading.Thread | None = None

    # ---- serving --------------------------------------------------------------------------

    def serve_one(self, timeout_s: float | None = None) -> None:
        """Wait `timeout_s` (default: for ever) for an importer, and serve it.

        After an error, except for `ClosedError`, the exporter can serve the next importer.

        Raises:
            ConfigError: The importer is another user's; or `start` was called.
            ConnectionError: It disconnected midway, for example because it cannot use the prefix.
            TimeoutError: None came, or it exceeded its deadline.
            DriverError: A descriptor could not be made.
            ClosedError: The exporter is closed.
        """
        self._check_idle()
        self._serve_next(timeout_s)

    def start(self) -> None:
        """Serve importers from a thread until `close`.

        Failures are logged and counted in `num_failed`. Raises `ConfigError` if it has started
        already.
        """
        self._check_idle()
        name = f"export {self.socket_path}"
        self._thread = threading.Thread(target=self._serve_all, name=name, daemon=True)
        self._thread.start()

    def _serve_all(self) -> None:
        while True:
            try:
                self._serve_next(None)
            except ClosedError:
                return
            except (VMKVError, OSError) as error:
                _LOG.warning("%s: %s", self.socket_path, error)
                time.sleep(_PAUSE_S)

    def _serve_next(self, timeout_s: float | None) -> None:
        try:
            self._listener.settimeout(timeout_s)
            connection, _ = self._listener.accept()
        except TimeoutError:
            raise TimeoutError(
                f"nobody came to {self.socket_path} within {timeout_s:g} s"
            ) from None
        except OSError:
            self._check_open()  # It was closed meanwhile.
            raise
        with connection:  # The importer sees its end after it was counted.
            self._connection = connection
            try:
                self._check_open()  # `close` may have looked for a connection before.
                self._serve(_Channel(connection, self._timeout_s))
            except BaseException:
                self.num_failed += 1
                self._check_open()  # `close` ended it, not the importer.
                raise
            finally:
                self._connection = None
            self.num_served += 1

    def _serve(self, channel: _Channel) -> None:
        channel.send(asdict(self._offer))
        handles = iter(self._handles)
        while batch := tuple(islice(handles, _BATCH)):
            channel.await_question()
            fds: list[int] = []
            try:
                for handle in batch:
                    fds.append(self._pool.backend.mem_export(handle))
                channel.send_descriptors(fds)
            finally:
                for fd in fds:
                    os.close(fd)
        channel.await_question()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("this exporter is closed")

    def _check_idle(self) -> None:
        self._check_open()
        if self._thread is not None:
            raise ConfigError("this exporter serves already")

    # ---- closing --------------------------------------------------------------------------

    @uninterrupted
    def close(self) -> None:
        """Stop serving and release the shared memory. Idempotent; repeat after a `DriverError`."""
        if not self._is_closed:
            self._is_closed = True
            for each in (self._connection, self._listener):
                if each is not None:
                    with suppress(OSError):  # It is closed, or nobody was ever connected.
                        each.shutdown(socket.SHUT_RDWR)  # Wakes the thread that waits for it.
            if self._thread is not None:
                self._thread.join()
            self._listener.close()
        extents, self._extents = self._extents, []
        self._pool.disown(extents)
        if self._is_attached:
            self._pool.detach()
            self._is_attached = False

    def __exit__(self, *exception: object) -> None:
        self.close()


# ---- importing -----------------------------------------------------------------------------------


def import_prefix(
    cache: KVCache, socket_path: str | os.PathLike[str], tenant: str | None, timeout_s: float
) -> tuple[int, int, abc.Sequence[int]]:
    """Implement `KVCache.import_prefix`; returns the row, live now, its length and known tokens."""
    cache.check_open()
    where = os.fspath(socket_path)
    extents: list[Extent] = []
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            try:
                interruptible(connection.connect, where)
            except (BlockingIOError, TimeoutError) as error:  # The exporter's queue is full.
                raise TimeoutError(f"{where} did not answer within {timeout_s:g} s") from error
            channel = _Channel(connection, timeout_s)
            offer = _checked(cache, channel.receive(), where)
            _receive(cache.pool, channel, offer, extents)
        cache.note_stream()
        with cache.rows.beginning() as row:
            _fill(cache, row, offer, extents, tenant)
    finally:
        # The mappings own the extents from here on; after a failure they are freed.
        cache.pool.disown(extents)
    return row, offer.num_tokens, offer.token_ids


def _receive(pool: ExtentPool, channel: _Channel, offer: _Offer, extents: list[Extent]) -> None:
    sizes = (size for group in offer.groups for size in group.sizes_bytes)
    while batch := tuple(islice(sizes, _BATCH)):
        channel.ask()
        fds = channel.receive_descriptors()
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
    channel.ask()


def _fill(
    cache: KVCache, row: int, offer: _Offer, extents: abc.Sequence[Extent], tenant: str | None
) -> None:
    """Map the extents at the start of the row, and over-read pages after them."""
    supply = iter(extents)
    changes = []
    for group, theirs in zip(cache.groups, offer.groups, strict=True):
        again = placed(theirs.first_page, islice(supply, len(theirs.sizes_bytes)), Access.READ)
        changes.append(RowChange(group.table, row, theirs.first_page, again=again))
    with Change(cache.pool, changes) as made:
        made.map(cache.current_stream())
    for group, theirs in zip(cache.groups, offer.groups, strict=True):
        group.begin_row(row, theirs.first_token)
    targets = [Target(row, offer.num_tokens, offer.num_tokens, tenant)]
    cache.pool.asking_broker(partial(map_rows, cache, targets))
