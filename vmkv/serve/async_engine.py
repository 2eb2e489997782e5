"""An engine with a thread of its own, asked from an event loop.

    engine = AsyncEngine(Engine(model, tokenizer=tokenizer))
    async for output in engine.stream("Once upon a time", SamplingParams(max_tokens=64)):
        ...
    await engine.shutdown()

The thread waits while there is nothing to do, without polling. Before that the engine falls idle;
a request that comes meanwhile does not wait for all of what goes back to the device. What the
thread has for a stream is not queued: a stream is told that there is something new, and takes
everything so far when it comes to it. So a client that never reads costs one flag, and holds nobody
up.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ..errors import ClosedError
from .handle import RequestHandle
from .params import SamplingParams
from .request import RequestOutput

if TYPE_CHECKING:
    from .engine import Engine

_LOG = logging.getLogger(__name__)
#: So many steps in a row fail only where every one does.
_FAILED_STEPS_MAX = 5
#: What running requests wait at most for the commands between two steps, but for the last one.
_COMMANDS_S = 0.01


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


class AsyncEngine:
    """Runs an engine in a thread. Nobody else may work on that engine meanwhile.

    Args:
        engine: The engine; it is closed with this.

    Attributes:
        engine: The same, to ask what never changes.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self._wake = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._is_stopping = False
        self._asked: set[_Stream] = set()  # Whose command to add them was not carried out yet.
        self._death: str | None = None
        # The thread's.
        self._streams: dict[RequestHandle, _Stream] = {}
        self._updated: dict[RequestHandle, None] = {}
        engine.on_update = self._note_update
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
        with self._wake:
            self._is_stopping = True
            if not drain:
                self._commands.append(self.engine.cancel_all)
            self._wake.notify()
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
        num_failed = self.engine.num_failed_steps
        if num_failed >= _FAILED_STEPS_MAX:
            return f"the last {num_failed} steps have failed"
        return None

    def _ask(self, stream: _Stream, command: Callable[[], None]) -> None:
        with self._wake:
            if self._is_stopping:
                raise ClosedError("the engine is shutting down and takes no more requests")
            self._asked.add(stream)
            self._commands.append(command)
            self._wake.notify()

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    # ---- in the engine's thread -----------------------------------------------------------

    def _run(self) -> None:
        try:
            self.engine.use_device()
            while self._wait():
                try:
                    self._obey()
                    self.engine.advance()
                except Exception as error:  # noqa: BLE001  # every request ends with it
                    self.engine.cancel_all(error)
                self._publish()
            self.engine.close()
        except BaseException as error:  # noqa: BLE001  # everybody who asks is told
            self._death = f"{error!r:.200}"
            _LOG.critical("the engine's thread has ended", exc_info=error)
        finally:
            # Whatever has happened, nobody is to wait for a thread that is gone.
            with self._wake:
                self._is_stopping = True
                streams = {*self._asked, *self._streams.values()}
            gone = ClosedError("the engine has stopped")
            for stream in streams:
                _tell(stream.loop, partial(stream.refused, gone))

    def _wait(self) -> bool:
        """Wait for something to do; false to end."""
        self._rest()
        with self._wake:
            while not self._commands and not self.engine.has_unfinished:
                if self._is_stopping:
                    return False
                self._wake.wait()
        return True

    def _rest(self) -> None:
        """Let the engine fall idle, if it may; after `_publish`, so that no client waits for it."""
        try:
            self.engine.fall_idle(is_wanted=self._is_wanted)
        except Exception:  # noqa: BLE001  # no request is left to end with it
            _LOG.exception("the engine could not fall idle")

    def _is_wanted(self) -> bool:
        # Without the lock: whoever comes just after this is seen before the wait.
        return bool(self._commands) or self._is_stopping

    def _obey(self) -> None:
        """Carry out what was asked for; if it is much, the rest after the next step."""
        start_s = time.monotonic()
        while time.monotonic() - start_s < _COMMANDS_S:
            with self._wake:
                if not self._commands:
                    return
                command = self._commands.popleft()
            command()

    def _add(
        self,
        stream: _Stream,
        prompt: str | Sequence[int],
        params: SamplingParams | None,
        priority: int,
    ) -> None:
        with self._wake:
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

    def _note_update(self, handle: RequestHandle) -> None:
        self._updated[handle] = None

    def _publish(self) -> None:
        """Tell the streams that have news, with one call into each event loop."""
        told: dict[asyncio.AbstractEventLoop, list[_Stream]] = {}
        updated, self._updated = self._updated, {}
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
