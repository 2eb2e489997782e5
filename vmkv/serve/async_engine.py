"""An engine with a thread of its own, asked from an event loop.

    engine = AsyncEngine(Engine(model, tokenizer=tokenizer))
    async for output in engine.stream("Once upon a time", SamplingParams(max_tokens=64)):
        ...
    await engine.shutdown()

`engine_loop.py` is what the thread does. What it has for a stream is not queued: a stream is told
that there is something new, and takes everything so far when it comes to it. So a client that never
reads costs one flag, and holds nobody up.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ..errors import ClosedError
from .engine_loop import EngineLoop, failure_of
from .handle import RequestHandle
from .params import SamplingParams
from .request import RequestOutput

if TYPE_CHECKING:
    from .engine import Engine

_LOG = logging.getLogger(__name__)


class _Stream:
    """One request as its event loop sees it. What the engine's thread may touch is said.

    Attributes:
        is_left: Whether nobody reads it any more. That thread may look.
        request: What the engine knows it by. That thread's own.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self.has_news = asyncio.Event()
        self.handle: RequestHandle | None = None
        self.error: BaseException | None = None
        self.is_left = False
        self.request: RequestHandle | None = None

    def accepted(self, handle: RequestHandle) -> None:
        """The engine has taken the request."""
        self.handle = handle
        self.has_news.set()

    def refused(self, error: BaseException) -> None:
        """The engine has not."""
        self.error = error
        self.has_news.set()


class _Inbox:
    """Commands for the engine's thread, from any other. Implements `Inbox`."""

    def __init__(self) -> None:
        self.wake = threading.Condition()
        self.commands: deque[Callable[[], None]] = deque()
        self.is_stopping = False

    def wait(self) -> bool:
        with self.wake:
            while not self.commands:
                if self.is_stopping:
                    return False
                self.wake.wait()
        return True

    def take(self) -> Callable[[], None] | None:
        with self.wake:
            return self.commands.popleft() if self.commands else None

    def is_wanted(self) -> bool:
        # Without the lock: whoever comes just after this is seen before the wait.
        return bool(self.commands) or self.is_stopping


class AsyncEngine:
    """Runs an engine in a thread. Nobody else may work on that engine meanwhile.

    Args:
        engine: The engine; it is closed with this.

    Attributes:
        engine: The same, to ask what never changes.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self._inbox = _Inbox()
        self._asked: set[_Stream] = set()  # Whose command to add them was not carried out yet.
        self._death: str | None = None
        self._streams: dict[RequestHandle, _Stream] = {}  # The thread's.
        self._loop = EngineLoop(engine, self._inbox, self._publish)
        self._thread = threading.Thread(target=self._run, name="vmkv-engine", daemon=True)
        self._thread.start()

    # ---- in an event loop -----------------------------------------------------------------

    async def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of one request as they grow, the last one finished.

        Each holds everything so far; who reads slowly sees fewer of them. Closing the iterator,
        or cancelling the task that reads it, cancels the request.

        Args:
            prompt: As of `Engine.add`, as for the rest.
            params: Likewise.
            priority: Likewise.

        Raises:
            ConfigError: The request can never be served. Raised by the first iteration.
            ClosedError: The engine is shutting down. Likewise.
        """
        stream = _Stream(asyncio.get_running_loop())
        self._ask(stream, partial(self._add, stream, prompt, params, priority))
        is_finished = False
        try:
            while not is_finished:
                await stream.has_news.wait()
                stream.has_news.clear()
                if stream.error is not None:
                    raise stream.error
                if stream.handle is None:
                    continue
                output = stream.handle.output()
                is_finished = output.is_finished
                if is_finished or any(each.token_ids for each in output.outputs):
                    yield output
        finally:
            if not is_finished and stream.error is None:
                stream.is_left = True
                self._post(partial(self._abandon, stream))

    async def shutdown(self, drain: bool = True) -> None:
        """Stop: after the requests that are under way, or with `drain=False` cancelling them.

        New requests are refused from now on. Returns when the thread has ended and everything is
        freed. Idempotent.
        """
        inbox = self._inbox
        with inbox.wake:
            inbox.is_stopping = True
            if not drain:
                inbox.commands.append(self.engine.cancel_all)
            inbox.wake.notify()
        await asyncio.to_thread(self._thread.join)

    @property
    def is_running(self) -> bool:
        """Whether the engine's thread is there."""
        return self._thread.is_alive()

    @property
    def failure(self) -> str | None:
        """Why no request can be served; None as long as one can.

        A thread that has ended, or a device that has failed in every step of late. Requests are
        tried all the same: the next step that succeeds is the end of it.
        """
        if not self._thread.is_alive():
            return f"the engine's thread has ended: {self._death or 'it was shut down'}"
        return failure_of(self.engine.num_failed_steps)

    def _ask(self, stream: _Stream, command: Callable[[], None]) -> None:
        inbox = self._inbox
        with inbox.wake:
            if inbox.is_stopping:
                raise ClosedError("the engine is shutting down and takes no more requests")
            self._asked.add(stream)
            inbox.commands.append(command)
            inbox.wake.notify()

    def _post(self, command: Callable[[], None]) -> None:
        with self._inbox.wake:
            self._inbox.commands.append(command)
            self._inbox.wake.notify()

    # ---- in the engine's thread -----------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run()
        except BaseException as error:  # noqa: BLE001  # everybody who asks is told
            self._death = f"{error!r:.200}"
            _LOG.critical("the engine's thread has ended", exc_info=error)
        finally:
            # Whatever has happened, nobody is to wait for a thread that is gone.
            with self._inbox.wake:
                self._inbox.is_stopping = True
                streams = {*self._asked, *self._streams.values()}
            gone = ClosedError("the engine has stopped")
            for stream in streams:
                _tell(stream.loop, partial(stream.refused, gone))

    def _add(
        self,
        stream: _Stream,
        prompt: str | Sequence[int],
        params: SamplingParams | None,
        priority: int,
    ) -> None:
        with self._inbox.wake:
            self._asked.discard(stream)
        if stream.is_left:
            return  # Nothing is done for those who left before their turn.
        try:
            handle = self.engine.add(prompt, params, priority)
        except Exception as error:  # noqa: BLE001  # the caller's, who waits for it
            _tell(stream.loop, partial(stream.refused, error))
            return
        stream.request = handle
        self._streams[handle] = stream
        _tell(stream.loop, partial(stream.accepted, handle))

    def _abandon(self, stream: _Stream) -> None:
        if stream.request is not None and self._streams.pop(stream.request, None) is not None:
            self.engine.cancel(stream.request)

    def _publish(self, updated: Iterable[RequestHandle]) -> None:
        """Tell the streams that have news, with one call into each event loop."""
        told: dict[asyncio.AbstractEventLoop, list[_Stream]] = {}
        for handle in updated:
            stream = self._streams.get(handle)
            if stream is not None:
                told.setdefault(stream.loop, []).append(stream)
                if handle.is_finished:
                    del self._streams[handle]
        for loop, streams in told.items():
            _tell(loop, partial(_wake_all, streams))


def _wake_all(streams: Iterable[_Stream]) -> None:
    for stream in streams:
        stream.has_news.set()


def _tell(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:  # The loop is closed: nobody is left to be told.
        return
