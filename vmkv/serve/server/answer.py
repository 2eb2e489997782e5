"""Runs one HTTP request through the engine and writes its answer, whole or as events."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import LostError
from ..params import SamplingParams
from ..request import RequestOutput
from .choices import SLICE_LOGPROBS, Delta, Form, Progress, WholeChoice, encoded
from .errors import ApiError, refused
from .limits import Gate
from .prompts import Prompt, Prompts
from .protocol import StreamingEngine
from .streaming import DONE, event, merged
from .tokens import Tokens


@dataclass(frozen=True)
class Answer:
    """Everything that is needed to answer one HTTP request.

    `check_length` raises `ApiError` for a number of prompt tokens that leaves no room for an
    answer; `encoded` is called once the prompts are tokens and releases the request's body. A lower
    `priority` runs first, and `tenant` owns the cached prefixes. `wants_usage` ends a stream with
    the token counts; `wants_running_usage` puts the counts so far into every chunk.
    """

    engine: StreamingEngine
    gate: Gate
    form: Form
    tokens: Tokens
    encoder: Prompts
    model: str
    prompts: Sequence[Prompt]
    check_length: Callable[[int], None]
    encoded: Callable[[], None]
    params: SamplingParams
    priority: int
    tenant: str | None
    wants_usage: bool
    wants_running_usage: bool

    async def whole(self) -> deque[bytes | bytearray]:
        """Compute the answer as JSON, in parts; compute it once more if its replica is lost."""
        try:
            return await self._whole()
        except ApiError as error:
            if not isinstance(error.__cause__, LostError):
                raise
            return await self._whole()  # Nothing was sent.

    async def _whole(self) -> deque[bytes | bytearray]:
        progress = self._new_progress()
        choices = deque(WholeChoice(self.form) for _ in range(len(self.prompts) * self.params.n))
        async with contextlib.aclosing(self._deltas(progress)) as deltas:
            async for delta in deltas:
                choices[delta.index].add(delta)
        head = encoded(self._head(self.form.whole_object))
        parts: deque[bytes | bytearray] = deque([head[:-1] + b',"choices":['])
        while choices:
            parts.extend(choices.popleft().parts())
            parts.append(b"," if choices else b'],"usage":')
            await asyncio.sleep(0)
        parts.append(encoded(progress.usage()) + b"}")
        return parts

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer as server-sent events; raises `ApiError` only before the first event."""
        progress = self._new_progress()
        head = self._head(self.form.chunk_object)
        # With include_usage every chunk has the field, and only the last one a value.
        tail: dict[str, Any] = {"usage": None} if self.wants_usage else {}
        has_begun = False
        try:
            async with contextlib.aclosing(self._deltas(progress)) as deltas:
                async for delta in deltas:
                    if self.wants_running_usage:
                        tail["usage"] = progress.usage()
                    yield event({**head, "choices": [self.form.chunk(delta)], **tail})
                    has_begun = True
        except ApiError as error:
            if not has_begun:
                raise
            yield event(error.body)
        else:
            if self.wants_usage:
                yield event({**head, "choices": [], "usage": progress.usage()})
        yield DONE

    async def _deltas(self, progress: Progress) -> AsyncGenerator[Delta, None]:
        """Yield the deltas of all outputs; the event loop runs other tasks between slices."""
        num_logprobs = 0
        async with contextlib.aclosing(self._outputs()) as outputs:
            async for at, output in outputs:
                for delta in progress.advance(at, output):
                    num_logprobs += delta.num_logprobs
                    if num_logprobs > SLICE_LOGPROBS:
                        num_logprobs = delta.num_logprobs
                        await asyncio.sleep(0)
                    yield delta

    async def _outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        async with self.gate.entered():
            # Tokenise behind the gate: a waiting or abandoned request costs no work.
            prompts = [await self._tokens(prompt) for prompt in self.prompts]
            self.encoded()
            streams = [
                self.engine.stream(prompt, self.params, self.priority, tenant=self.tenant)
                for prompt in prompts
            ]
            try:
                async with contextlib.aclosing(merged(streams)) as outputs:
                    async for each in outputs:
                        yield each
            except Exception as error:
                raise refused(error) from error

    async def _tokens(self, prompt: Prompt) -> Sequence[int]:
        tokens = await self.encoder.tokens(prompt)
        self.check_length(len(tokens))
        return tokens

    def _new_progress(self) -> Progress:
        return Progress(len(self.prompts), self.params.n, self.tokens)

    def _head(self, what: str) -> dict[str, Any]:
        return {
            "id": f"{self.form.id_prefix}{uuid.uuid4().hex}",
            "object": what,
            "created": int(time.time()),
            "model": self.model,
        }
