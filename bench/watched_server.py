"""`vmkv`, with a watch on the server's event loop: how long does a ready callback wait at the most?

    python bench/watched_server.py serve MODEL …

Each new longest wait is a line of the log, after `WAITED`.
"""

from __future__ import annotations

import asyncio
import queue
import socket
import sys
import threading
import time

from vmkv.cli import main
from vmkv.serve.server import run

WAITED = "bench: a ready callback has waited for ms: "


class WatchedServer(run.Server):
    """A server whose event loop is asked every 10 ms to run a callback."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening, and then the watch."""
        await super().startup(sockets)
        loop = asyncio.get_running_loop()
        threading.Thread(target=watch, args=[loop], daemon=True).start()


def watch(loop: asyncio.AbstractEventLoop) -> None:
    """Measure until the loop is closed."""
    longest_ms, ends_s = 0.0, queue.SimpleQueue[float]()
    while not loop.is_closed():
        start_s = time.perf_counter()
        loop.call_soon_threadsafe(lambda: ends_s.put(time.perf_counter()))
        waited_ms = 1e3 * (ends_s.get() - start_s)
        if waited_ms > longest_ms:
            longest_ms = waited_ms
            sys.stderr.write(f"{WAITED}{waited_ms:.1f}\n")
        time.sleep(0.01)


if __name__ == "__main__":
    run.Server = WatchedServer  # type: ignore[misc]
    sys.exit(main.main())
