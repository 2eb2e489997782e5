"""The exporting side: a prefix on a Unix socket for processes of allowed users.

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
import stat
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from ....errors import ClosedError, ConfigError, VMKVError
from ....interrupts import uninterrupted
from ....units import Handle
from ...backend import Backend
from ...memory import Extent, ExtentPool, MappedRows, Mapping, protect
from ..row_space import LiveRow
from .offer import as_values, whole_extents
from .protocol import ANSWER_BYTES_MAX, BATCH, Channel, Peer

_LOG = logging.getLogger(__name__)
#: Pause after a failure, so that an importer that retries does not keep a core busy.
_PAUSE_S = 0.1
_QUEUE = 64
#: Each may have a batch of descriptors in flight, which count against this process's limit, by
#: default 1,024.
_CONVERSATIONS_MAX = 8


class PrefixExporter:
    """Shares the beginning of a sequence with other processes; see `Sequence.export`.

    Use it as a context manager. `serve_one` serves one importer; after `start`, threads serve eight
    at a time. It holds the shared memory until it is closed, and importers as long as they need it,
    even if the sequence or this process ends.

    Args:
        sequence: The sequence; it may go on, and end.
        socket_path: The socket to listen on; its mode is 0600. If other users are allowed it is
            0666; the kernel then identifies each importer, and a user who is not allowed only gets
            a refusal.
        num_tokens: How many tokens; by default all. Tokens that do not fill whole extents are left
            out.
        allowed_uids: Users that importers may run as; by default only this process's.
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
        sequence: LiveRow,
        socket_path: str | os.PathLike[str],
        *,
        num_tokens: int | None = None,
        allowed_uids: Collection[int] | None = None,
        timeout_s: float = 10.0,
    ):
        sequence.check_open()
        space, row = sequence.cache, sequence.row
        wanted = sequence.num_tokens if num_tokens is None else num_tokens
        if not 0 < wanted <= sequence.num_tokens:
            raise ConfigError(
                f"cannot export {wanted} tokens of {sequence}: it holds {sequence.num_tokens}"
            )
        if not space.pool.is_shareable:
            raise ConfigError(
                "the cache's memory was not made to be shared; make the cache over "
                "ExtentPool(backend, budget_bytes, is_shareable=True)"
            )
        self.allowed_uids = frozenset((os.geteuid(),) if allowed_uids is None else allowed_uids)
        self.socket_path = os.fspath(socket_path)
        self.num_served = 0
        self.num_failed = 0
        self._timeout_s = timeout_s
        self._pool = space.pool
        self._listener = _listen(self.socket_path, 0o666 if self._allows_others() else 0o600)
        try:
            self._identity = _identity(self.socket_path)
            space.note_stream()
            with self._pool.lock:
                offer, chosen = whole_extents(space, row, wanted)
                self._extents = [mapping.extent for mappings in chosen for mapping in mappings]
                _protect(self._pool, self._extents)
                # Importers do not know our streams, so the contents must be complete.
                self._pool.reclaimer.new_fence().wait()
                for extent in self._extents:
                    extent.is_recyclable = False
                self._pool.own(self._extents)
                self._pool.attach()
        except BaseException:
            self._listener.close()
            os.unlink(self.socket_path)
            raise
        self.num_tokens = offer.num_tokens
        self._offer = json.dumps(as_values(space, offer)).encode()
        self._handles = [extent.handle for extent in self._extents]
        self._is_attached = True
        self._is_closed = False
        self._threads: list[threading.Thread] = []
        self._stops = threading.Event()
        self._lock = threading.Lock()  # Guards `_channels`, `num_served`, `num_failed`.
        self._channels: set[Channel] = set()

    def _allows_others(self) -> bool:
        return not self.allowed_uids <= {os.geteuid(), 0}  # File modes do not restrict root.

    # ---- serving --------------------------------------------------------------------------

    def serve_one(self, timeout_s: float | None = None) -> Peer:
        """Wait `timeout_s` (default: for ever) for an importer, serve it, and return its `Peer`.

        After an error, except for `ClosedError`, the exporter can serve the next importer.

        Raises:
            ConfigError: The importer is not allowed, cannot use the prefix, or speaks another
                protocol; or `start` was called.
            ConnectionError: It went away midway.
            TimeoutError: None came, or it exceeded its deadline.
            DriverError: A descriptor could not be made.
            ClosedError: The exporter is closed.
        """
        self._check_open()
        self._check_not_started()
        self._listener.settimeout(timeout_s)
        return self._serve_next(timeout_s)

    def _serve_next(self, timeout_s: float | None) -> Peer:
        try:
            connection, _ = self._listener.accept()
        except TimeoutError:
            raise TimeoutError(
                f"nobody came to {self.socket_path} within {timeout_s:g} s"
            ) from None
        except OSError:
            self._check_open()  # It was closed meanwhile.
            raise
        with Channel(connection, self._timeout_s) as channel, self._talking(channel):
            self._serve(channel)
        return channel.peer

    @contextmanager
    def _talking(self, channel: Channel) -> Iterator[None]:
        """Register a conversation for `close`; count it before the importer sees its end."""
        with self._lock:
            self._check_open()
            self._channels.add(channel)
        try:
            yield
        except BaseException:
            with self._lock:
                self._channels.discard(channel)
                self.num_failed += 1
                self._check_open()  # `close` ended it, not the importer.
            raise
        with self._lock:
            self._channels.discard(channel)
            self.num_served += 1

    def _serve(self, channel: Channel) -> None:
        try:
            channel.check_peer(self.allowed_uids)
        except ConfigError as error:
            channel.refuse(str(error))
            raise
        channel.send(self._offer)
        answer = channel.receive(ANSWER_BYTES_MAX)
        if answer != {"ready": len(self._handles)}:
            raise ConfigError(f"{channel.peer} answers {str(answer)[:80]}, not that it is ready")
        for start in range(0, len(self._handles), BATCH):
            _send(self._pool.backend, channel, self._handles[start : start + BATCH])

    def start(self) -> None:
        """Serve importers from threads, eight at a time, until `close`.

        Further importers wait until one is served or has used up `timeout_s`. Failures are logged
        and counted in `num_failed`. Raises `ConfigError` if it has started already.
        """
        self._check_open()
        self._check_not_started()
        self._listener.settimeout(None)
        for at in range(_CONVERSATIONS_MAX):
            name = f"export {self.socket_path} {at}"
            thread = threading.Thread(target=self._serve_all, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def _serve_all(self) -> None:
        while not self._stops.is_set():
            try:
                self._serve_next(None)
            except ClosedError:
                return
            except (VMKVError, OSError) as error:
                # Logged even if the exporter has been closed since.
                _LOG.warning("%s: %s", self.socket_path, error)
                self._stops.wait(_PAUSE_S)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("this exporter is closed")

    def _check_not_started(self) -> None:
        if self._threads:
            raise ConfigError("this exporter serves already")

    # ---- closing --------------------------------------------------------------------------

    @uninterrupted
    def close(self) -> None:
        """Stop serving and release the shared memory. Idempotent; repeat after a `DriverError`."""
        if not self._is_closed:
            with self._lock:
                self._is_closed = True
                for channel in self._channels:
                    channel.shut_down()
            self._stops.set()
            _shut_down(self._listener)  # Wakes the threads that wait in accept.
            for thread in self._threads:
                thread.join()
            self._listener.close()
            if _identity(self.socket_path) == self._identity:
                os.unlink(self.socket_path)
        extents, self._extents = self._extents, []
        self._pool.disown(extents)
        if self._is_attached:
            self._pool.detach()
            self._is_attached = False

    def __enter__(self) -> PrefixExporter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


# ---- memory -------------------------------------------------------------------------------


def _protect(pool: ExtentPool, extents: Sequence[Extent]) -> None:
    """Revoke write access to `extents` in all mappings. Locked."""
    wanted = set(map(id, extents))
    holders: list[tuple[MappedRows, int, list[Mapping]]] = []
    # Iterate over copies, because other threads may be making tables, or growing rows.
    for table in list(pool.page_tables):
        for row, pages in enumerate(table.rows):
            mappings = [each for each in list(pages.mappings) if id(each.extent) in wanted]
            if mappings:
                holders.append((table, row, mappings))
    protect(pool, holders)


def _send(backend: Backend, channel: Channel, handles: Sequence[Handle]) -> None:
    fds: list[int] = []
    try:
        for handle in handles:
            fds.append(backend.mem_export(handle))
        channel.send_descriptors(fds)
    finally:
        for fd in fds:
            os.close(fd)
    channel.await_confirmation()


# ---- the socket ---------------------------------------------------------------------------


def _listen(path: str, mode: int) -> socket.socket:
    """Listen on a socket at `path`; the socket of a dead exporter is replaced."""
    if _is_abandoned(path):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _bind(listener, path)
        os.chmod(path, mode)  # Before `listen`, so that no connection precedes the mode.
        listener.listen(_QUEUE)
    except BaseException:
        listener.close()
        raise
    return listener


def _bind(listener: socket.socket, path: str) -> None:
    try:
        listener.bind(path)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"{path} exists already; choose another socket_path") from error
        if error.errno is None:  # Python's own check, before the kernel's.
            raise ConfigError(f"socket_path {path!r} cannot be used: {error}") from error
        raise


def _is_abandoned(path: str) -> bool:
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return False
    except OSError:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _shut_down(listener: socket.socket) -> None:
    try:
        listener.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # Nobody was ever connected.
