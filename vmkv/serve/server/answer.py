"""One request to the engine and its answer, whole or as events."""

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
    """What is needed to answer one HTTP request.

    Attributes:
        engine: Who computes it.
        gate: Who is inside.
        form: How it is written.
        tokens: Tokens' texts.
        encoder: Makes tokens of its prompts, once it is inside.
        model: The model's name.
        prompts: Its prompts.
        check_length: Raises `ApiError` for a prompt of so many tokens that no answer fits.
        encoded: Called when its prompts are tokens: what they came from is let go of.
        params: How to sample.
        priority: Lower runs first.
        tenant: The owner of its prefixes.
        wants_usage: Whether a stream ends with the token counts.
        wants_running_usage: Whether its chunks carry those so far.
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
        """The answer as JSON, in parts. Computed once more if its replica is lost.

        Raises `ApiError`: the request failed.
        """
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
        """The answer as server-sent events.

        Raises `ApiError`: there is none, and no event was given yet. Later ones are events.
        """
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
        """The deltas of all outputs; the event loop gets its turn between slices of them."""
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
        """The engine's outputs with the number of their prompt, from behind the gate."""
        async with self.gate.entered():
            # Only now: what waits, or has left, costs no work.
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
