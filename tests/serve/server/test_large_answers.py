"""Large answers are bounded, and encoded in slices that do not block the event loop."""

from __future__ import annotations

import asyncio
import json
import math
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import httpx
import pytest
from helpers.serving import tiny_tokenizer

from vmkv.serve.params import SamplingParams
from vmkv.serve.request import CompletionOutput, FinishReason, RequestOutput, TokenLogprobs, joined
from vmkv.serve.server import Limits, ServerOptions, create_app
from vmkv.serve.server.choices import (
    SLICE_LOGPROBS,
    ChatForm,
    CompletionForm,
    Tokens,
    encoded,
)
from vmkv.serve.server.schema import ChatRequest, CompletionRequest
from vmkv.serve.server.service import in_pieces

NUM_LOGPROBS = 20
COMPLETION = {"model": "tiny", "prompt": [5, 6], "temperature": 1}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "temperature": 1}


class Count:
    """Log-probabilities encoded since the last turn of the event loop; the most; the turns."""

    now = 0
    largest = 0
    num_turns = 0


class Counted(dict[int, float]):
    """Log-probabilities that update a `Count` when they are encoded."""

    count: Count

    def items(self) -> Any:
        self.count.now += 1 + len(self)
        return super().items()


class StandIn:
    """An engine with given outputs, which may be large, as for a client that reads slowly."""

    failure = None

    def __init__(self, num_tokens: Sequence[int]):
        self._num_tokens = num_tokens
        self.count = Count()
        self.outputs: list[RequestOutput] = []

    async def __aenter__(self) -> StandIn:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def _entry(self, at: int) -> TokenLogprobs:
        top = Counted({5 + (at + each) % 300: -each - 1 / 3 for each in range(NUM_LOGPROBS)})
        top.count = self.count
        return TokenLogprobs(5 + at % 300, -1.5, top)

    async def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        priority: int = 0,
        *,
        tenant: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        self.outputs = []
        for number, count in enumerate(self._num_tokens, 1):
            end = FinishReason.LENGTH if number == len(self._num_tokens) else None
            samples = [
                CompletionOutput(
                    index,
                    [5] * count,
                    f'"{number} é\n' * (index != 1),
                    None if params.logprobs is None else [self._entry(at) for at in range(count)],
                    end,
                )
                for index in range(params.n)
            ]
            self.outputs.append(RequestOutput(0, None, prompt, samples))
            yield self.outputs[-1]
            await asyncio.sleep(0)


async def _ask(engine: StandIn, path: str, body: dict[str, Any], limits: Limits) -> httpx.Response:
    app = create_app(engine, tiny_tokenizer(), ServerOptions("tiny", 4096, limits))
    count = engine.count

    async def other_task() -> None:
        while True:
            count.largest, count.now = max(count.largest, count.now), 0
            count.num_turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(other_task())
    try:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.post(path, json=body)
    finally:
        other.cancel()


def new_form(is_completion: bool) -> CompletionForm | ChatForm:
    """A form of one choice."""
    tokens, params = Tokens(tiny_tokenizer()), SamplingParams()
    if is_completion:
        return CompletionForm(tokens, CompletionRequest.model_validate(COMPLETION), params)
    return ChatForm(tokens, ChatRequest.model_validate(CHAT), params)


def ask(
    engine: StandIn, body: dict[str, Any], limits: Limits | None = None
) -> tuple[httpx.Response, Any]:
    """Send a request; return the answer and the form that encodes it."""
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    return asyncio.run(_ask(engine, path, body, limits or Limits())), new_form("prompt" in body)


def logprobs_of(body: dict[str, Any], number: int | None) -> dict[str, Any]:
    """Add log-probabilities to a request."""
    if "prompt" in body or number is None:
        return body | {"logprobs": number}
    return body | {"logprobs": True, "top_logprobs": number}


@pytest.mark.parametrize("body", [COMPLETION, CHAT], ids=["completion", "chat"])
@pytest.mark.parametrize("logprobs", [None, NUM_LOGPROBS])
@pytest.mark.parametrize("num_tokens", [[0], [3], [1, 0, 2], [1, 500, 2]], ids=str)
def test_a_sliced_answer_equals_an_answer_encoded_at_once(
    body: dict[str, Any], logprobs: int | None, num_tokens: list[int]
) -> None:
    """Byte for byte."""
    engine = StandIn(num_tokens)
    answer, form = ask(engine, logprobs_of(body, logprobs) | {"n": 3})
    assert 200 == answer.status_code
    assert int(answer.headers["content-length"]) == len(answer.content)
    assert "application/json" == answer.headers["content-type"]
    choices = [form.choice(each) for each in joined(engine.outputs).outputs]
    found = answer.json()
    assert choices == found["choices"]
    assert 3 * sum(num_tokens) == found["usage"]["completion_tokens"]
    again = json.dumps(found | {"choices": choices}, ensure_ascii=False, separators=(",", ":"))
    assert again.encode() == answer.content


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", [COMPLETION, CHAT], ids=["completion", "chat"])
def test_other_tasks_run_between_slices(body: dict[str, Any], stream: bool) -> None:
    """No turn of the event loop encodes more than a slice, however large an output is."""
    engine = StandIn([1000, 1, 1, 700])
    answer, _ = ask(engine, logprobs_of(body, NUM_LOGPROBS) | {"n": 4, "stream": stream})
    assert 200 == answer.status_code
    assert engine.count.largest <= SLICE_LOGPROBS
    assert engine.count.num_turns > 4 * 1702 * (1 + NUM_LOGPROBS) // SLICE_LOGPROBS
    if stream:
        lines = [line[6:] for line in answer.text.split("\n\n")[:-2]]
        ends = [each["choices"][0] for each in map(json.loads, lines)]
        assert 4 == sum(each["finish_reason"] is not None for each in ends)
        name = "tokens" if "prompt" in body else "content"
        assert 4 * 1702 == sum(len(each["logprobs"][name]) for each in ends)


@pytest.mark.parametrize("body", [COMPLETION, CHAT], ids=["completion", "chat"])
def test_log_probabilities_of_an_answer_are_bounded(body: dict[str, Any]) -> None:
    """The request does not reach the engine; the error says which options to lower."""
    engine = StandIn([3])
    limits = Limits(max_answer_logprobs=100_000)
    for options in ({"n": 128}, {"n": 100, "max_tokens": 48}, {"n": 2}):
        many = logprobs_of(body, NUM_LOGPROBS) | {"max_tokens": 4000} | options
        answer, _ = ask(engine, many, limits)
        assert 400 == answer.status_code
        error = answer.json()["error"]
        assert "max_tokens" == error["param"]
        assert "max_answer_logprobs=" in error["message"]
        assert "(n), tokens (max_tokens) or log-probabilities" in error["message"]
    assert not engine.outputs
    for options in (
        {"n": 128, "max_tokens": 4000},
        logprobs_of({}, None) | {"n": 128, "max_tokens": 4000},
    ):
        assert 200 == ask(engine, body | options, limits)[0].status_code
    for number, options in ((NUM_LOGPROBS, {"max_tokens": 4000}), (0, {"n": 20})):
        few = logprobs_of(body, number) | options
        assert 200 == ask(engine, {"max_tokens": 4000} | few, limits)[0].status_code


def test_large_bodies_are_sent_in_pieces() -> None:
    """Parts are removed from the queue as they are sent."""
    parts = deque([b"a", bytearray(b"b" * (3 << 20)), b"c"])

    async def run() -> list[bytes]:
        return [piece async for piece in in_pieces(parts)]

    pieces = asyncio.run(run())
    assert b"a" + b"b" * (3 << 20) + b"c" == b"".join(pieces)
    assert max(map(len, pieces)) <= 1 << 19
    assert not parts


@pytest.mark.parametrize("is_completion", [True, False])
def test_a_token_without_probability_is_valid_json(is_completion: bool) -> None:
    entry = TokenLogprobs(5, -math.inf, {6: -1.0, 7: -math.inf})
    delta = CompletionOutput(0, [5], "x", [entry], FinishReason.LENGTH)
    text = encoded(new_form(is_completion).choice(delta))
    # The token's own, in completions also among the likeliest, and the second alternative's.
    assert (3 if is_completion else 2) == text.count(b"-9999.0")
