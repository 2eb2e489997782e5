"""The asking side: an engine that is somewhere else, with `AsyncEngine`'s manners.

engine = EngineProcess(make)          # `make(observer)` is called there
async for output in engine.stream([1, 2, 3], SamplingParams(max_tokens=64)):
    ...
await engine.shutdown()
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import socket
from collections.abc import AsyncIterator, Callable, Sequence

from ...cache import CacheStats
from ...errors import ClosedError, ConfigError
from ..engine_loop import failure_of
from ..handle import output_of
from ..observer import EngineObserver
from ..params import SamplingParams
from ..request import Request, RequestOutput
from .host import MakeEngine, run_engine
from .messages import (
    Accepted,
    Add,
    Failed,
    Leave,
    News,
    Ready,
    Stop,
    Unpacker,
    Update,
    packed,
)

_READ_BYTES = 1 << 16
#: How long a process may take to end once nobody asks it any more.
_END_S = 10.0


class _Snapshot:
    """The cache as it was looked at last, for observers."""

    def __init__(self, stats: CacheStats):
        self._stats = stats

    def stats(self) -> CacheStats:
        return self._stats


class _Stream:
    """A request as it is known here: a copy of the engine's own."""

    def __init__(self, prompt: str | Sequence[int], params: SamplingParams):
        tokens = () if isinstance(prompt, str) else prompt
        self.prompt = prompt if isinstance(prompt, str) else None
        self.requests = [Request(index, tokens, params) for index in range(params.n)]
        self.has_news = asyncio.Event()
        self.error: Exception | None = None

    @property
    def is_finished(self) -> bool:
        """Whether every sample has ended."""
        return all(each.is_finished for each in self.requests)

    def update(self, update: Update) -> None:
        """Take what is new."""
        request = self.requests[update.sample]
        request.output_token_ids += update.token_ids
        request.text = request.text[: update.text_start] + update.text
        request.logprobs += update.logprobs
        request.num_cached_tokens = update.num_cached_tokens
        request.stop_reason, request.error = update.stop_reason, update.error
        request.finish_reason = update.finish_reason
        self.has_news.set()

    def fail(self, error: Exception) -> None:
        """Nothing will come any more."""
        self.error = error
        self.has_news.set()


class RemoteEngine(asyncio.Protocol):
    """An engine on the other side of a connection, for one event loop.

    Args:
        connection: To an `EngineHost`.
        ready: What it said first.
        wait_for_end: Returns when the other side has ended.
        observer: Who is told what happens there, from the event loop.

    Attributes:
        max_tokens, page_bytes: As `Ready` says.
        stats: The cache when it was last looked at.
    """

    def __init__(
        self,
        connection: socket.socket,
        ready: Ready,
        wait_for_end: Callable[[], None],
        observer: EngineObserver | None = None,
    ):
        self.max_tokens, self.page_bytes, self.stats = ready
        self._socket = connection
        self._wait_for_end = wait_for_end
        self._observer = observer
        self._unpacker = Unpacker()
        self._connecting = asyncio.Lock()
        self._transport: asyncio.Transport | None = None
        self._keys = itertools.count()
        self._streams: dict[int, _Stream] = {}
        self._num_failed_steps = 0
        self._is_stopping = False
        self._death: str | None = None
        self._gone = asyncio.Event()

    # ---- asking ---------------------------------------------------------------------------

    async def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """See `AsyncEngine.stream`.

        Raises:
            ConfigError: The request can never be served. Raised by the first iteration.
            ClosedError: The engine is shutting down, or gone. Likewise.
        """
        await self._connect()
        if self._is_stopping or self._death is not None:
            raise ClosedError(self._death or "the engine is shutting down: it takes no requests")
        params = params or SamplingParams()
        key, stream = next(self._keys), _Stream(prompt, params)
        try:
            asked = packed(Add(key, prompt, params, priority))
        except Exception as error:
            raise ConfigError(f"the request cannot be sent to a process: {error}") from error
        self._send(asked)
        self._streams[key] = stream
        is_finished = False
        try:
            while not is_finished:
                await stream.has_news.wait()
                stream.has_news.clear()
                if stream.error is not None:
                    raise stream.error
                output = output_of(stream.requests, stream.prompt)
                is_finished = output.is_finished
                if is_finished or any(each.token_ids for each in output.outputs):
                    yield output
        finally:
            del self._streams[key]
            if not is_finished and stream.error is None:
                self._send(packed(Leave(key)))

    async def shutdown(self, drain: bool = True) -> None:
        """See `AsyncEngine.shutdown`."""
        await self._connect()
        self._is_stopping = True
        self._send(packed(Stop(drain)))
        await asyncio.to_thread(self._wait_for_end)
        await self._gone.wait()  # What it said last has been read.

    @property
    def is_running(self) -> bool:
        """Whether the other side is there."""
        return self._death is None

    @property
    def failure(self) -> str | None:
        """See `AsyncEngine.failure`."""
        return self._death or failure_of(self._num_failed_steps)

    async def _connect(self) -> None:
        async with self._connecting:
            if self._transport is None:
                loop = asyncio.get_running_loop()
                self._transport, _ = await loop.create_unix_connection(
                    lambda: self, sock=self._socket
                )

    def _send(self, command: bytes) -> None:
        if self._transport is not None and self._death is None:
            self._transport.write(command)

    # ---- what comes back ------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        for message in self._unpacker.feed(data):
            if isinstance(message, News):
                self._take(message)
            elif isinstance(message, Failed):
                self._death = f"the engine has ended: {message.error!r:.200}"

    def _take(self, news: News) -> None:
        self._num_failed_steps = news.num_failed_steps
        for accepted in news.accepted:
            self._note_accepted(accepted)
        for update in news.updates:
            stream = self._streams.get(update.key)
            if stream is not None:  # Whoever asked has not left.
                stream.update(update)
        self.stats = news.stats or self.stats
        if self._observer is not None:
            cache = (_Snapshot(self.stats),)
            for name, arguments in news.events:
                sees_cache = name in ("step_finished", "idle")
                getattr(self._observer, name)(*arguments, *(cache if sees_cache else ()))

    def _note_accepted(self, accepted: Accepted) -> None:
        stream = self._streams.get(accepted.key)
        if stream is None:
            return
        if accepted.error is not None:
            stream.fail(accepted.error)
        elif accepted.prompt_token_ids:
            for request in stream.requests:
                request.prompt_token_ids = accepted.prompt_token_ids

    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._death = self._death or "the engine has ended: it was shut down or killed"
        for stream in self._streams.values():
            if not stream.is_finished:
                stream.fail(ClosedError("the engine has stopped"))
        self._gone.set()


class EngineProcess(RemoteEngine):
    """An engine in a process of its own, which ends with this one.

    Args:
        make: Called there with the engine's observer; gives the engine, for as long as it lasts.
            A function that can be pickled, with all it holds.
        observer: Who is told what happens there, from the event loop.

    Raises:
        Exception: What `make` raised there.
    """

    def __init__(self, make: MakeEngine, observer: EngineObserver | None = None):
        ours, theirs = socket.socketpair()
        # A copy of this process would have its threads' locks, and nobody to release them.
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=run_engine, args=(make, theirs), name="vmkv-engine")
        self._process.start()
        theirs.close()
        try:
            ready = _first_message(ours)
        except BaseException:
            ours.close()
            self._process.kill()
            self._process.join()
            raise
        super().__init__(ours, ready, self._process.join, observer)

    @property
    def failure(self) -> str | None:
        """See `AsyncEngine.failure`."""
        if not self._process.is_alive():  # Nobody may have been connected to it yet.
            return super().failure or "the engine's process has ended"
        return super().failure

    def close(self) -> None:
        """End the process, if nobody has; what is under way there is cancelled. Idempotent.

        For when no event loop runs any more: `shutdown` ends it in good order.
        """
        self._socket.close()
        self._process.join(_END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _first_message(connection: socket.socket) -> Ready:
    """Wait for the engine to be there.

    Raises:
        Exception: What it failed with.
    """
    unpacker = Unpacker()
    while True:
        data = connection.recv(_READ_BYTES)
        if not data:
            raise ClosedError("the engine's process ended before its engine was there")
        for message in unpacker.feed(data):
            if isinstance(message, Failed):
                raise message.error
            ready: Ready = message
            return ready
