"""An engine in a thread of its own, used from an event loop.

    async with AsyncEngine(Engine(model, tokenizer=tokenizer)) as engine:
        async for output in engine.stream("Once upon a time", SamplingParams(max_tokens=64)):
            ...

The thread runs an `EngineLoop`; `AsyncEngine` is its client.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any

from .engine_client import EngineClient
from .engine_loop import Command, EngineLoop, Look, News, Pause, Resume

if TYPE_CHECKING:
    from .engine import Engine

_LOG = logging.getLogger(__name__)


class _ThreadLink:
    is_broken = False

    def __init__(self, take: Callable[[News], None]):
        self._take = take
        self.loop: asyncio.AbstractEventLoop | None = None
        self.commands: queue.SimpleQueue[Command] = queue.SimpleQueue()

    def receive(self, timeout_s: float | None = 0.0) -> Sequence[Command]:
        commands: list[Command] = []
        with contextlib.suppress(queue.Empty):
            commands.append(self.commands.get(timeout_s != 0, timeout_s))
            while not self.commands.empty():
                commands.append(self.commands.get())
        return commands

    def send(self, news: News) -> None:
        self.call(functools.partial(self._take, news))

    def wake(self) -> None:
        self.commands.put(Look())

    def call(self, callback: Callable[[], None]) -> None:
        if self.loop is not None:
            with contextlib.suppress(RuntimeError):
                self.loop.call_soon_threadsafe(callback)


class AsyncEngine(EngineClient):
    """Runs `engine` in a thread; the engine must not be used otherwise, and is closed at shutdown.

    `options` are keyword arguments of `EngineClient`.
    """

    def __init__(self, engine: Engine, **options: Any):
        super().__init__(engine.tokenizer, **options)
        self.engine = engine
        self._link = _ThreadLink(self._take)
        self._end_notice = "the engine's thread has ended: it was shut down"
        self._loop = EngineLoop(engine, self._link)
        self._worker = threading.Thread(target=self._run, name="vmkv-engine", daemon=True)
        self._worker.start()

    def _run(self) -> None:
        try:
            self._loop.run()
        except BaseException as error:  # noqa: BLE001  # reported to every client
            self._end_notice = f"the engine's thread has ended: {error!r:.200}"
            _LOG.critical("the engine's thread has ended", exc_info=error)
        # Streams must not wait for a thread that has ended.
        self._link.call(self._end)

    def _end(self) -> None:
        self._lose(self._end_notice)

    @contextlib.asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Context in which the model can be trained, as `Engine.paused`.

        It begins once all earlier requests have finished; later requests, and other calls of
        `paused`, wait until it ends. Within it, `sleep()` of the `Engine` given to this object may
        be called. The caller's autocast is not active in the engine's thread.

        Raises:
            ConfigError: As `Engine.paused` at its beginning and end.
            ClosedError: The engine is shutting down or has ended.
        """
        is_over = threading.Event()
        try:
            await self._ask(lambda key: Pause(key, is_over))
            yield
        finally:
            is_over.set()
            if not self._is_stopping:
                await self._ask(Resume)

    async def _connect(self) -> None:
        self._link.loop = asyncio.get_running_loop()
        if not self._worker.is_alive():
            self._end()

    def _send(self, command: Command) -> None:
        self._link.commands.put(command)

    async def _wait_for_end(self) -> None:
        await asyncio.to_thread(self._worker.join)
        self._end()
