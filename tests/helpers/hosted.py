"""An `EngineProcess` whose engine runs in a thread instead of a process."""

from __future__ import annotations

import socket
import threading
from typing import Any

from vmkv import RankError
from vmkv.serve.engine import Engine
from vmkv.serve.engine_loop import EngineLoop
from vmkv.serve.observer import EngineObserver
from vmkv.serve.process import EngineProcess
from vmkv.serve.process.host import Failed, Ready, Relay, SocketLink


class _Thread(threading.Thread):
    """A thread with the interface of a process."""

    exitcode = 0

    def kill(self) -> None: ...


class hosted(EngineProcess):  # noqa: N801  # called like a function
    """The engine behind a connection with small socket buffers. It can be started once.

    Args:
        engine: The engine to host.
        relay: The engine's observer, if there is an `observer` on this side.
        observer: See `EngineProcess`.
        ends_with_device: See `EngineLoop`.
        options: See `EngineProcess`.
    """

    def __init__(
        self,
        engine: Engine,
        relay: Relay | None = None,
        observer: EngineObserver | None = None,
        *,
        ends_with_device: bool = False,
        **options: Any,
    ):
        self._engine = engine
        self._relay = relay or Relay()
        self._ends_with_device = ends_with_device
        super().__init__(lambda _: engine, tokenizer=engine.tokenizer, observer=observer, **options)

    def _start(self) -> None:
        engine = self._engine
        ours, theirs = socket.socketpair()
        for each in (ours, theirs):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        link = SocketLink(theirs, self._relay)

        def run() -> None:
            failed = None
            try:
                EngineLoop(engine, link, ends_with_device=self._ends_with_device).run()
            except (RuntimeError, RankError) as error:
                failed = Failed(error)
            finally:
                link.end(failed)
                theirs.close()

        self._worker = _Thread(target=run, name="host")
        self._worker.start()
        pool = engine.cache.pool
        self._use(ours, Ready(engine.max_tokens, pool.page_bytes, engine.cache.stats()))

    async def _start_anew(self) -> None:
        """Do not start again."""
