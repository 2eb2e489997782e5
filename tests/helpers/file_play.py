"""Files of blocks in plays: their threads run when the play says so, and files are spoilt.

Work runs in a thread of its own, which goes on only while the play waits for it, up to the next
block. So the engine works while a block is half written or half read, and a failure repeats.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

from vmkv import KVCache
from vmkv.core.cache import block_files
from vmkv.core.memory import slab_files
from vmkv.serve import memory_view


class _AbandonedError(BaseException):
    """Ends a thread whose play has failed."""


class _Work(threading.Thread):
    """Work of a thread, which runs while the play waits in `go_on`."""

    def __init__(self, call: Callable[[], Any]):
        super().__init__(daemon=True)
        self.future: Future[Any] = Future()
        self._call = call
        self._turns = threading.Semaphore(0), threading.Semaphore(0)
        self.is_abandoned = self.has_ended = False

    def go_on(self) -> None:
        """Run it up to its next block, or to its end."""
        if self.ident is None:
            self.start()
        else:
            self._turns[0].release()
        self._turns[1].acquire()

    def pause(self) -> None:
        """Let the play go on."""
        self._turns[1].release()
        self._turns[0].acquire()
        if self.is_abandoned:
            raise _AbandonedError

    def run(self) -> None:
        try:
            self.future.set_result(self._call())
        except _AbandonedError:
            pass
        except BaseException as error:  # noqa: BLE001  # raised by `Files.check`
            self.future.set_exception(error)
        self.has_ended = True
        self._turns[1].release()


class _Threads:
    """Stands in for a `ThreadPoolExecutor`."""

    def __init__(self, files: Files):
        self._files, self.works = files, deque[_Work]()
        files.threads.append(self)

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        self.works.append(_Work(lambda: work(*args)))
        return self.works[-1].future

    def map(self, call: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._files.pause()
            yield call(item)
        self._files.pause()

    def run(self) -> None:
        """Run the first work for a while."""
        work = self.works[0]
        work.go_on()
        if work.has_ended:
            self.works.popleft()
            if error := work.future.exception():
                self._files.errors.append(error)

    def shutdown(self) -> None:
        while self.works:
            self.run()


class Files:
    """The files of a play's cache, in a folder that `close` removes.

    Args:
        cache: A cache with its layers, and a host budget.
        num_bytes: Budget of the files.
        seed: Seed of the order of threads.

    Attributes:
        threads: What stands in for threads.
        errors: What threads have raised.
    """

    def __init__(self, cache: KVCache, num_bytes: int, seed: int):
        self._cache, self._num_bytes, self._draw = cache, num_bytes, random.Random(seed)
        self._root = Path(tempfile.mkdtemp(prefix="vmkv-play-"))
        self._num_folders, self._snapshot = 0, None
        self.threads: list[_Threads] = []
        self.errors: list[BaseException] = []
        self._is_full, self._write = False, slab_files._write
        self._patches = ExitStack()
        for module, name, value in (
            (block_files, "ThreadPoolExecutor", lambda *_: _Threads(self)),
            (block_files, "_SAVE_S", 0.0),
            (block_files, "_BATCH_BYTES", 64 << 10),
            (memory_view, "_READ_WAIT_S", 0.0),
            (slab_files, "_write", self._write_or_fail),
        ):
            self._patches.enter_context(mock.patch.object(module, name, value))
        self._folder = self._new_folder()
        self._open()

    def _new_folder(self) -> Path:
        self._num_folders += 1
        return self._root / str(self._num_folders)

    def _open(self) -> None:
        self._cache.host_blocks.open_files(self._folder, self._num_bytes, b"play")

    def _write_or_fail(self, fd: int, data: memoryview, offset: int) -> None:
        if self._is_full:
            self._write(fd, data[: len(data) // 2], offset)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._write(fd, data, offset)

    # ---- threads --------------------------------------------------------------------------

    def pause(self) -> None:
        """Let the play go on, in one of the threads."""
        work = threading.current_thread()
        if isinstance(work, _Work):
            work.pause()

    def run(self, num_times: int = 1) -> None:
        """Run some of the threads for a while."""
        for _ in range(num_times):
            busy = [each for each in self.threads if each.works]
            if not busy:
                return
            self._draw.choice(busy).run()
        self.check()

    def check(self) -> None:
        """Raise what a thread has raised."""
        if self.errors:
            raise AssertionError("a thread of the files failed") from self.errors[0]

    # ---- what files suffer ----------------------------------------------------------------

    def spoil(self, draw: random.Random) -> str:
        """Damage a file, and return how."""
        found = sorted(self._folder.glob("slab-*"))
        if not found:
            return "nothing"
        path, how = draw.choice(found), draw.choice(["torn", "flipped", "flipped", "vanished"])
        size = path.stat().st_size
        if how == "torn":
            os.truncate(path, draw.randrange(size + 1))
        elif how == "vanished":
            path.unlink()
        elif size:
            # Tables are small, and so are hit rarely otherwise.
            at = draw.choice([draw.randrange(size), draw.randrange(min(size, 8192))])
            data = bytearray(path.read_bytes())
            data[at] ^= 1 << draw.randrange(8)
            path.write_bytes(data)
        return f"{how} {path.name}"

    def fill_disk(self) -> None:
        """Let writing fail until the next restart."""
        self._is_full = True

    def snapshot(self) -> None:
        """Keep the folder as a process leaves it that is killed now."""
        self._snapshot = self._new_folder()
        shutil.copytree(self._folder, self._snapshot)

    def restart(self) -> None:
        """Close the files and open those of the last snapshot, or the same again."""
        self._cache.host_blocks.close_files()
        self.check()
        self._is_full, self.threads = False, []
        self._folder, self._snapshot = self._snapshot or self._folder, None
        self._open()

    # ---- end ------------------------------------------------------------------------------

    def close(self) -> None:
        """Remove the folder; the cache is closed."""
        self.check()
        self.abandon()

    def abandon(self) -> None:
        """End threads that have not ended, and remove the folder. Idempotent."""
        for each in self.threads:
            for work in each.works:
                work.is_abandoned = True
                if work.ident is not None and not work.has_ended:
                    work.go_on()
        self.threads.clear()
        self._patches.close()
        shutil.rmtree(self._root, ignore_errors=True)
