"""An answer in one piece is computed again if its request was lost; a stream ends with an error.

The engine is real and loses some requests after their first output. Without Ray.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest
from helpers.serving import serving, tiny_llama, tiny_tokenizer

from vmkv import AsyncEngine, Engine
from vmkv.errors import LostError
from vmkv.serve.request import RequestOutput
from vmkv.serve.server import ServerOptions, create_app


class LosingEngine(AsyncEngine):
    """Loses the next `num_to_lose` requests after their first text."""

    num_to_lose = 0
    num_streams = 0

    async def stream(self, *arguments: Any, **options: Any) -> AsyncIterator[Any]:
        self.num_streams += 1
        is_lost, self.num_to_lose = self.num_to_lose > 0, max(0, self.num_to_lose - 1)
        async with contextlib.aclosing(super().stream(*arguments, **options)) as outputs:
            async for each in outputs:
                yield unfinished(each) if is_lost else each
                # Some tokens are no text yet, and a client has not heard of them.
                if is_lost and any(sample.text for sample in each.outputs):
                    raise LostError("the replica is gone")


def unfinished(output: RequestOutput) -> RequestOutput:
    """The output without its ends: a fast engine may send every token in the first one."""
    samples = [dataclasses.replace(each, finish_reason=None) for each in output.outputs]
    return dataclasses.replace(output, outputs=samples)


Ask = Callable[..., tuple[httpx.Response, int]]


@pytest.fixture
def ask(make_engine: Callable[..., Engine]) -> Iterator[Ask]:
    """Request a completion that is lost `num_lost` times; the answer and the number of runs."""
    engine = LosingEngine(make_engine(tiny_llama(), tokenizer=tiny_tokenizer()))
    app = create_app(engine, tiny_tokenizer(), ServerOptions("tiny", 128))
    with serving(app) as (url, _):

        def completion(num_lost: int, **options: Any) -> tuple[httpx.Response, int]:
            engine.num_to_lose, engine.num_streams = num_lost, 0
            body = {"model": "tiny", "prompt": [40, 41, 42], "max_tokens": 8, "temperature": 0}
            body |= {"ignore_eos": True, **options}
            response = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
            return response, engine.num_streams

        yield completion


def test_a_lost_whole_answer_is_computed_again(ask: Ask) -> None:
    """It equals the answer of an undisturbed run."""
    undisturbed, _ = ask(0)
    again, num_streams = ask(1)
    assert num_streams == 2
    assert again.status_code == 200
    assert again.json()["choices"] == undisturbed.json()["choices"]
    assert again.json()["usage"]["completion_tokens"] == 8


def test_a_whole_answer_that_is_lost_twice_is_503(ask: Ask) -> None:
    lost, num_streams = ask(2)
    assert num_streams == 2
    assert lost.status_code == 503
    assert lost.headers["Retry-After"] == "1"
    assert lost.json()["error"]["code"] == "replica_lost"


def test_a_lost_stream_ends_with_an_error_event(ask: Ask) -> None:
    """Its request is not run again."""
    lost, num_streams = ask(1, stream=True)
    assert num_streams == 1
    assert lost.status_code == 200
    assert '"code":"replica_lost"' in lost.text
    assert lost.text.endswith("data: [DONE]\n\n")
