"""An engine in a thread of its own, used from an event loop.

    async with AsyncEngine(Engine(model, tokenizer=tokenizer)) as engine:
        async for output in engine.stream("Once upon a time", SamplingParams(max_tokens=64)):
            ...

The thread runs an `EngineLoop`; `AsyncEngine` is its client.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .engine_client import EngineClient
from .engine_loop import Command, EngineLoop, Look, News

if TYPE_CHECKING:
    from .engine import Engine

_LOG = logging.getLogger(__name__)


class _ThreadLink:
    """`Link` between the engine's thread and an event loop, where `take` is called with news."""

    is_broken = False

    def __init__(self, take: Callable[[News], None]):
        self._take = take
        self._changed = threading.Condition()
        self._commands: list[Command] = []
        self._news: News | None = None
        self._waits_to_send = False
        self._loop: asyncio.AbstractEventLoop | None = None

    # ---- in the event loop ----------------------------------------------------------------

    def use(self, loop: asyncio.AbstractEventLoop) -> None:
        """Deliver news in `loop` from now on."""
        if loop is not self._loop:
            self._loop = loop
            self.deliver()  # News that a closed loop did not take.

    def post(self, command: Command) -> None:
        with self._changed:
            self._commands.append(command)
            self._changed.notify()

    def deliver(self) -> None:
        """Take the pending news, and let the engine's thread send more."""
        with self._changed:
            news, self._news = self._news, None
            if self._waits_to_send:
                self._changed.notify()
        if news is not None:
            self._take(news)

    # ---- in the thread --------------------------------------------------------------------

    def receive(self) -> Sequence[Command]:
        if not self._commands:  # Unlocked: a command that arrives now is seen next time.
            return ()
        with self._changed:
            commands, self._commands = self._commands, []
        return commands

    def can_send(self) -> bool:
        return self._news is None

    def send(self, news: News) -> None:
        self._news = news
        self.call(self.deliver)

    def wake(self) -> None:
        self.post(Look())

    def call(self, callback: Callable[[], None]) -> None:
        """Call `callback` in the event loop, unless that is closed."""
        try:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(callback)
        except RuntimeError:  # The loop is closed.
            self._news = None

    def wait(self, *, for_commands: bool, to_send: bool, timeout_s: float | None = None) -> None:
        with self._changed:
            self._waits_to_send = to_send
            self._changed.wait_for(
                lambda: (for_commands and self._commands) or (to_send and self._news is None),
                timeout_s,
            )


class AsyncEngine(EngineClient):
    """Runs `engine` in a thread; the engine must not be used otherwise, and is closed at shutdown.

    `options` are keyword arguments of `EngineClient`.
    """

    def __init__(self, engine: Engine, **options: Any):
        super().__init__(engine.tokenizer, **options)
        self.engine = engine
        self._link = _ThreadLink(self._take)
        self._end_reason = "it was shut down"
        self._loop = EngineLoop(engine, self._link)
        self._thread = threading.Thread(target=self._run, name="vmkv-engine", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._loop.run()
        except BaseException as error:  # noqa: BLE001  # reported to every client
            self._end_reason = f"{error!r:.200}"
            _LOG.critical("the engine's thread has ended", exc_info=error)
        # Streams must not wait for a thread that has ended.
        self._link.call(self._end)

    def _end(self) -> None:
        self._link.deliver()
        self._lose(self._death_notice)

    @property
    def _death_notice(self) -> str:
        return f"the engine's thread has ended: {self._end_reason}"

    @property
    def failure(self) -> str | None:
        """Why no request can be served; None while requests are served. See `EngineClient`."""
        # The thread may have ended before an event loop was connected.
        return super().failure if self._thread.is_alive() else self._death_notice

    async def _connect(self) -> None:
        self._link.use(asyncio.get_running_loop())
        if not self._thread.is_alive():
            self._end()

    def _send(self, command: Command) -> None:
        self._link.post(command)

    async def _wait_for_end(self) -> None:
        await asyncio.to_thread(self._thread.join)
        self._end()
