"""An engine as `EngineProcess` asks it, but for the process: it is hosted by a thread."""

from __future__ import annotations

import socket
import threading
from typing import Any

from vmkv import RankError
from vmkv.serve import Engine
from vmkv.serve.engine_loop import EngineLoop
from vmkv.serve.observer import EngineObserver
from vmkv.serve.process import RemoteEngine
from vmkv.serve.process.host import Failed, Ready, Relay, SocketLink


def hosted(
    engine: Engine,
    relay: Relay | None = None,
    observer: EngineObserver | None = None,
    *,
    ends_with_device: bool = False,
    **options: Any,
) -> RemoteEngine:
    """The engine, from the other side of a connection; sockets hold little.

    Args:
        engine: What is hosted.
        relay: Its observer, where there is an `observer` on this side.
        observer: See `RemoteEngine`.
        ends_with_device: See `EngineLoop`.
        options: See `RemoteEngine`.
    """
    ours, theirs = socket.socketpair()
    for each in (ours, theirs):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    ready = Ready(engine.max_tokens, engine.cache.pool.page_bytes, engine.cache.stats())

    link = SocketLink(theirs)

    def run() -> None:
        try:
            EngineLoop(
                engine, link, (relay or Relay()).take, ends_with_device=ends_with_device
            ).run()
        except (RuntimeError, RankError) as error:
            link.end_with(Failed(error))
        finally:
            theirs.close()

    thread = threading.Thread(target=run, name="host")
    thread.start()
    return RemoteEngine(
        ours,
        ready,
        tokenizer=engine.tokenizer,
        wait_for_end=thread.join,
        observer=observer,
        **options,
    )
