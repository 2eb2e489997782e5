"""120 clients send 600 requests: valid, invalid, and some that disconnect early.

Each ends in an answer or a known error, and the fixture checks that everything is released.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter
from typing import Any

import pytest
from helpers.serving import MAX_TOKENS, TEXT

from vmkv.serve.server import Limits

NUM_CLIENTS = 120
REQUESTS_EACH = 5
WORDS = " ".join(TEXT).split()

pytestmark = [
    pytest.mark.slow,
    # OpenAI's client leaves the generator of an abandoned stream to the garbage collector.
    pytest.mark.filterwarnings(
        "ignore:Exception ignored in. <async_generator:pytest.PytestUnraisableExceptionWarning"
    ),
]


def random_request(generator: random.Random) -> dict[str, Any]:
    """A random request, sometimes invalid."""
    request: dict[str, Any] = {
        "model": "tiny",
        "prompt": " ".join(generator.choices(WORDS, k=generator.randint(1, 40))),
        "max_tokens": generator.randint(1, 24),
        "temperature": generator.choice([0, 0.7, 1.3]),
        "n": generator.choice([1, 1, 1, 2, 3]),
        "stream": generator.random() < 0.5,
    }
    request |= generator.choice(
        [
            {},
            {"top_p": 0.9, "seed": generator.randint(0, 99)},
            {"logprobs": generator.randint(0, 5)},
            {"stop": [generator.choice(WORDS)]},
            {"presence_penalty": 1.0, "extra_body": {"top_k": 5, "repetition_penalty": 1.2}},
            {"extra_body": {"priority": generator.randint(-3, 3), "ignore_eos": True}},
            {"prompt": [generator.randint(2, 300) for _ in range(generator.randint(1, 300))]},
            {"prompt": generator.choices(TEXT, k=3)},
        ]
    )
    if generator.random() < 0.15:
        request |= generator.choice(
            [
                {"max_tokens": MAX_TOKENS * 2},
                {"model": "other"},
                {"temperature": -1},
                {"prompt": [10**6]},
                {"prompt": "a " * 3 * MAX_TOKENS},
                {"extra_body": {"nonsense": 1}},
                {"echo": True},
            ]
        )
    return request


async def one(client: Any, generator: random.Random) -> str:
    """Send one request, perhaps disconnect early; return the outcome."""
    import openai

    request = random_request(generator)
    leaves_after = generator.choice([None, None, None, 0, 1, 3])
    try:
        if request["stream"]:
            num_pieces, ended = 0, 0
            async with await client.completions.create(**request) as stream:
                async for piece in stream:
                    ended += sum(choice.finish_reason is not None for choice in piece.choices)
                    num_pieces += 1
                    if leaves_after is not None and num_pieces > leaves_after:
                        return "left"
            prompts = request["prompt"]
            several = isinstance(prompts, list) and isinstance(prompts[0], str)
            assert ended == request["n"] * (len(prompts) if several else 1)
            return "streamed"
        sending = asyncio.ensure_future(client.completions.create(**request))
        if leaves_after is not None:
            done, _ = await asyncio.wait({sending}, timeout=0.01 * leaves_after)
            if not done:
                sending.cancel()
                await asyncio.wait({sending})
                return "left"
        answer = await sending
        assert all(choice.finish_reason in ("stop", "length") for choice in answer.choices)
        return "answered"
    except openai.APIStatusError as error:
        # Only an error of OpenAI's shape has a `type`.
        return str(error.status_code) if error.type else f"{error.status_code} of unknown shape"


def test_hundreds_of_requests(run_server) -> None:
    """Each request ends as expected; the server then answers another one."""
    openai = pytest.importorskip("openai")

    async def client(server: Any, number: int) -> Counter[str]:
        generator = random.Random(number)
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=240
        ) as mine:
            return Counter([await one(mine, generator) for _ in range(REQUESTS_EACH)])

    async def everybody(server: Any) -> Counter[str]:
        found: Counter[str] = Counter()
        for each in await asyncio.gather(*(client(server, n) for n in range(NUM_CLIENTS))):
            found += each
        return found

    with run_server(Limits(max_concurrent=64, max_queued=1000, max_priority=3)) as server:
        # A collection in the engine's thread would finalise abandoned streams there, and their
        # errors would keep that thread's frames. The streams belong to the loop of this thread.
        gc.disable()
        try:
            found = asyncio.run(everybody(server))
        finally:
            gc.enable()
        assert NUM_CLIENTS * REQUESTS_EACH == found.total()
        assert found["answered"] > 120
        assert found["streamed"] > 60
        assert found["left"] > 60
        assert found["400"] > 30
        assert {"answered", "streamed", "left", "400", "404"} == found.keys()
        reasons = Counter(each.finish_reason for each in server.watch.finished)
        assert {"stop", "length", "cancelled"} >= reasons.keys()
        answer = server.client().completions.create(model="tiny", prompt="A row", max_tokens=2)
        assert answer.choices[0].finish_reason in ("stop", "length")
