"""A second thread that evicts over a pool, handed control where the first one's lock is free.

Another engine over the pool, or the thread of a broker's member, evicts between any two holds of
the pool's lock. Here it does so before the first thread takes the lock, or after it has released
it; the moments are drawn from a seed, and the first thread waits meanwhile, so a failure repeats.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import partial
from unittest import mock

from vmkv import ExtentPool
from vmkv.errors import DriverError


class Evictor:
    """Evicts over a pool before and after some holds of its lock by the evictor's own thread.

    Args:
        make_pool: Makes the pool.
        seed: Seed of the moments.
        share: Share of the moments at which it evicts.

    Attributes:
        pool: The pool.
        num_evictions: Evictions that retired something.
        errors: What the second thread raised, except errors of the driver.
    """

    def __init__(self, make_pool: Callable[[], ExtentPool], seed: int = 0, share: float = 0.1):
        self._draw, self.share = random.Random(seed), share
        self._owner = threading.get_ident()
        self._is_evicting = True  # Until there is a pool.
        self.num_evictions = 0
        self.errors: list[BaseException] = []
        with mock.patch.object(threading, "RLock", partial(_Lock, self)):
            self.pool = make_pool()
        self._is_evicting = False

    def note_free(self) -> None:
        """Evict, perhaps, from another thread: this one does not hold the lock."""
        is_owner = threading.get_ident() == self._owner and not self._is_evicting
        if is_owner and self._draw.random() < self.share:
            self._is_evicting = True
            thread = threading.Thread(target=self._evict, args=(self._draw.choice([1, 1 << 40]),))
            thread.start()
            thread.join()
            self._is_evicting = False

    def _evict(self, num_bytes: int) -> None:
        """Evict without waiting for the device, and release what is free."""
        try:
            with self.pool.lock:
                if self.pool._is_closed:
                    return
                self.num_evictions += bool(self.pool.pressure.evict(num_bytes))
                self.pool.trim()
        except DriverError:  # A fault that was meant for the first thread.
            pass
        except BaseException as error:  # noqa: BLE001  # reported by the first thread
            self.errors.append(error)

    def check(self) -> None:
        """Raise what the second thread has raised."""
        if self.errors:
            raise AssertionError("the evicting thread failed") from self.errors[0]


class _Lock:
    """A reentrant lock that tells an evictor when a thread is about to take it or has left it."""

    def __init__(self, evictor: Evictor):
        self._evictor = evictor
        # Made by the class itself, since `threading.RLock` is patched.
        self._lock = threading._CRLock()  # type: ignore[attr-defined]

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not self._lock._is_owned():
            self._evictor.note_free()
        acquired: bool = self._lock.acquire(blocking, timeout)
        return acquired

    def release(self) -> None:
        self._lock.release()
        if not self._lock._is_owned():
            self._evictor.note_free()

    def _is_owned(self) -> bool:
        owned: bool = self._lock._is_owned()
        return owned

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def __getattr__(self, name: str) -> object:  # For `threading.Condition`.
        return getattr(self._lock, name)
