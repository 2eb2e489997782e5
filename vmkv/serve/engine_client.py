"""Client side of an engine that runs in another thread or process, used from an event loop.

    async for output in engine.stream("Once upon a time", SamplingParams(max_tokens=64)):
        print(output.outputs[0].text, end="")

The engine sends tokens only; they become text here. A stream takes everything new in one piece
when it is read, so a slow client holds nobody up.
"""

from __future__ import annotations

import abc
import asyncio
import copy
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ClosedError
from ..hf.compat import as_integers
from .engine_loop import (
    FAILED_STEPS_MAX,
    Add,
    Cancel,
    Command,
    Finish,
    News,
    Sleep,
    Stop,
    Update,
    Wake,
)
from .params import SamplingParams, tokenised
from .request import (
    FinishReason,
    Request,
    RequestHandle,
    RequestOutput,
    check_queued,
    detokenizer_of,
    token_ids_of,
)

if TYPE_CHECKING:
    from typing_extensions import Self

#: Longest silence of an engine with work, which sends news after each step. Steps take seconds at
#: most, but the first of a size may compile kernels.
SILENCE_MAX_S = 60.0


class _Stream(RequestHandle):
    def __init__(self, key: int, prompt: Any, params: SamplingParams, tokenizer: Any):
        tokens = tuple(as_integers(token_ids_of(prompt, tokenizer)))
        detokenizers = [detokenizer_of(tokenizer, tokens, params) for _ in range(params.n)]
        requests = [Request(key, tokens, params, detokenizer=each) for each in detokenizers]
        super().__init__(requests, prompt if isinstance(prompt, str) else None)
        self.prompt = tokens
        self.has_news = asyncio.Event()
        self.error: Exception | None = None

    @property
    def is_finished(self) -> bool:
        return self.error is not None or super().is_finished

    def update(self, update: Update) -> bool:
        """Add new tokens; returns whether the sample ends here and the engine must be told."""
        request = self.requests[update.sample]
        self.has_news.set()
        if request.finish_reason is not None:
            return False
        num_tokens = len(update.token_ids)
        reason, request.stop_reason = update.finish_reason, update.stop_reason
        # The text of a stop token, always the last, is not part of the output.
        tokens = update.token_ids[: num_tokens - (reason is FinishReason.STOP)]
        end, reason, request.error = request.add_text(tokens, reason, update.error)
        num_tokens = num_tokens if end is None else end
        request.finish_reason = reason
        request.num_cached_tokens = update.num_cached_tokens
        request.output_token_ids += update.token_ids[:num_tokens]
        request.logprobs += update.logprobs[:num_tokens]
        request.prompt_logprobs += update.prompt_logprobs
        return reason is not None and update.finish_reason is None

    def fail(self, error: Exception) -> None:
        self.error = error
        self.has_news.set()

    def take(self) -> RequestOutput:
        output = self.output()
        for request in self.requests:
            for column in (request.output_token_ids, request.logprobs, request.texts):
                column.clear()
            request.prompt_logprobs.clear()
        return output


class EngineClient(abc.ABC):
    """Client of an engine that runs on its own, for one event loop at a time.

    As an async context manager it drains and shuts down the engine on exit. `failure` reports an
    engine that has work and sends no news for `silence_max_s` seconds of `clock`.
    """

    _worker: Any  # The engine's thread or process.
    _end_notice = "the engine's process has ended"

    def __init__(
        self,
        tokenizer: Any = None,
        *,
        silence_max_s: float = SILENCE_MAX_S,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._tokenizer = tokenizer
        self._silence_max_s = silence_max_s
        self._clock = clock
        self._heard_s = clock()  # Last news, or the start of the current work.
        self._new_keys = itertools.count()
        self._streams: dict[int, _Stream] = {}
        self._asked: dict[int, asyncio.Future[None]] = {}  # Commands that wait for an answer.
        self._num_failed_steps = 0
        #: Whether the engine sleeps, as its last news said.
        self.is_sleeping = False
        self._is_stopping = False
        self._death: str | None = None

    async def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        priority: int = 0,
        *,
        tenant: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield outputs of one request as they grow, the last one finished.

        Each output holds what is new since the previous one; `joined` concatenates them. Slow
        readers see fewer, larger outputs. Closing the iterator, or cancelling the reading task,
        cancels the request. Arguments are those of `Engine.add`.

        Raises:
            ConfigError: The request can never be served. Raised by the first iteration.
            ClosedError: The engine is shutting down or has ended.
        """
        params = params or SamplingParams()
        if any(isinstance(each, str) for each in params.bad_words):
            params = await asyncio.to_thread(tokenised, params, self._tokenizer)
        await self._connect()
        self._check_open()
        check_queued(priority, tenant)
        key = next(self._new_keys)
        params = tokenised(params, self._tokenizer)
        stream = _Stream(key, prompt, params, self._tokenizer)
        if not self.has_work:
            self._heard_s = self._clock()  # An idle engine is silent.
        sent = copy.copy(params)  # Not `replace`, which would check every value again.
        vars(sent).update(stop=(), detokenize=False)
        self._send(Add(key, stream.prompt, sent, priority, tenant))
        self._streams[key] = stream
        try:
            while True:
                await stream.has_news.wait()
                stream.has_news.clear()
                if stream.error is not None:
                    raise stream.error
                output = stream.take()
                has_tokens = any(each.token_ids for each in output.outputs)
                if has_tokens or output.prompt_logprobs or output.is_finished:
                    yield output
                if output.is_finished:
                    return
        finally:
            del self._streams[key]
            if not stream.is_finished:
                self._send(Cancel(key))

    async def sleep(self, *, aborts: bool = False) -> None:
        """Let the engine sleep with its weights; returns once it does. Raises as `Engine.sleep`.

        Earlier requests finish first, or with `aborts` are cancelled. Later ones wait, and wake it.
        """
        await self._ask(lambda key: Sleep(key, aborts))

    async def wake(self) -> None:
        """Wake the engine, as a request does. Raises as `Engine.wake`, and if the engine ends."""
        await self._ask(Wake)

    async def _ask(self, command: Callable[[int], Command]) -> None:
        await self._connect()
        self._check_open()
        key = next(self._new_keys)
        answer = self._asked[key] = asyncio.get_running_loop().create_future()
        try:
            self._send(command(key))
            await answer
        finally:
            del self._asked[key]

    def _check_open(self) -> None:
        if self._is_stopping or self._death is not None:
            raise ClosedError(self._death or "the engine is shutting down: it takes no requests")

    async def shutdown(self, drain: bool = True) -> None:
        """Stop the engine, after unfinished requests or, with `drain=False`, cancelling them.

        New requests are refused at once. Returns when everything is freed. Idempotent.
        """
        self._is_stopping = True
        await self._connect()
        self._send(Stop(drain))
        await self._wait_for_end()

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended."""
        return not all(each.is_finished for each in self._streams.values())

    @property
    def failure(self) -> str | None:
        """Why no request can be served; None while requests are served.

        If the last steps have failed or the engine is silent, requests are still accepted, and a
        step that succeeds clears it.
        """
        if self._death is not None:
            return self._death
        if not self._worker.is_alive():  # It may have ended while no event loop was running.
            return self._end_notice
        if self._num_failed_steps >= FAILED_STEPS_MAX:
            return f"the last {self._num_failed_steps} steps have failed"
        if self.silent_s > self._silence_max_s:
            return f"the engine has work and has said nothing for {self.silent_s:.0f} s"
        return None

    @property
    def silent_s(self) -> float:
        """Seconds since an engine with work has sent news; 0 without work."""
        return self._clock() - self._heard_s if self.has_work else 0.0

    async def __aenter__(self) -> Self:
        await self._connect()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.shutdown()

    # ---- the other side -------------------------------------------------------------------

    @abc.abstractmethod
    async def _connect(self) -> None:
        """Deliver news to the running event loop from now on."""

    @abc.abstractmethod
    def _send(self, command: Command) -> None:
        """Send a command, unless the engine has ended; `ConfigError` if it cannot be serialized."""

    @abc.abstractmethod
    async def _wait_for_end(self) -> None:
        """Wait until the engine has ended and its last news was taken."""

    def _take(self, news: News) -> None:
        self._heard_s = self._clock()
        self._num_failed_steps, self.is_sleeping = news.num_failed_steps, news.is_sleeping
        for key, error in news.refused:
            if key in self._streams:
                self._streams[key].fail(error)
            elif key in self._asked and not self._asked[key].done():
                self._asked[key].set_exception(error)
        for key in news.done:
            if key in self._asked and not self._asked[key].done():
                self._asked[key].set_result(None)
        for update in news.updates:
            stream = self._streams.get(update.key)
            # The client may have cancelled the request.
            if stream is not None and stream.update(update):
                self._send(Finish(update.key, update.sample))

    def _lose(self, reason: str) -> None:
        self._death, self.is_sleeping = self._death or reason, False
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(ClosedError(self._death))
        for stream in self._streams.values():
            if not stream.is_finished:
                stream.fail(ClosedError("the engine has stopped"))
