"""An open-loop load of streamed completions on an OpenAI server, from processes of its own.

    python bench/live_load.py URL MODEL < load.json > timings.json

Requests are sent when they are due, whatever became of those before. A request's times are counted
from when it was due, so a late client counts against the server; its delay is reported, too.
Prompts are token ids; a load's come from its name alone, so every server gets the same, and no load
gets another's.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import multiprocessing
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import httpx

NUM_PROCESSES = 4


@dataclass(frozen=True)
class Load:
    """Requests, and when they come.

    Attributes:
        name: Its name, and with `round` the seed of all that is random in it.
        rate_per_s: Arrivals, by a Poisson process; 0 for all at once.
        num_requests: How many there are.
        vocabulary: Prompts are drawn below this.
        prompt_tokens: Least, median and most tokens of a prompt, or of its own part of it.
        new_tokens: The same of its answer.
        spreads: Standard deviation of the logarithm of each; 0 for the medians alone.
        prefix_tokens: Tokens that all prompts begin with.
        lead_s: Between starting the client processes and the first arrival.
        temperature, top_p: How tokens are drawn.
        round: Each has other requests.
    """

    name: str
    rate_per_s: float
    num_requests: int
    vocabulary: int
    prompt_tokens: tuple[int, int, int] = (16, 512, 4096)
    new_tokens: tuple[int, int, int] = (8, 150, 512)
    spreads: tuple[float, float] = (0.8, 0.7)
    prefix_tokens: int = 0
    lead_s: float = 1.5
    temperature: float = 0.0
    top_p: float = 1.0
    round: int = 0

    def arrivals(self) -> list[Arrival]:
        """The requests, in order. The same every time."""
        source = random.Random(self.name + (f", {self.round}" if self.round else ""))
        tokens = range(5, self.vocabulary)
        prefix = source.choices(tokens, k=self.prefix_tokens)
        due_s, made = 0.0, []
        for _ in range(self.num_requests):
            if self.rate_per_s:
                due_s += source.expovariate(self.rate_per_s)
            length = _drawn(source, self.prompt_tokens, self.spreads[0])
            count = _drawn(source, self.new_tokens, self.spreads[1])
            made.append(Arrival(due_s, prefix + source.choices(tokens, k=length), count))
        return made


def _drawn(source: random.Random, bounds: tuple[int, int, int], spread: float) -> int:
    least, median, most = bounds
    return int(min(most, max(least, median * math.exp(source.gauss(0, spread)))))


@dataclass(frozen=True)
class Arrival:
    """A request: when it is due, its prompt, and how many tokens it gets."""

    due_s: float
    prompt: list[int]
    new_tokens: int


@dataclass
class Timing:
    """What became of a request, in seconds from the load's start.

    Attributes:
        due_s, sent_s: When it should have been sent, and was.
        first_s, last_s: When its first and its last token came; None where none did.
        num_tokens: As the server counts them.
        num_cached_tokens: Tokens of the prompt that the server had in its cache.
        num_chunks: In so many events with text.
        gap_s: The longest time between two of them.
        error: What went wrong.
    """

    due_s: float
    sent_s: float = 0.0
    first_s: float | None = None
    last_s: float | None = None
    num_tokens: int = 0
    num_cached_tokens: int = 0
    num_chunks: int = 0
    gap_s: float = 0.0
    error: str = ""

    def came(self, now_s: float) -> None:
        """Record that one or more tokens have arrived."""
        if self.first_s is None or self.last_s is None:
            self.first_s = now_s
        else:
            self.gap_s = max(self.gap_s, now_s - self.last_s)
        self.last_s = now_s
        self.num_chunks += 1


# ---- one request ------------------------------------------------------------------------------


def body_of(load: Load, arrival: Arrival, model: str) -> bytes:
    """The request as it is sent."""
    body = {
        "model": model,
        "prompt": arrival.prompt,
        "max_tokens": arrival.new_tokens,
        "temperature": load.temperature,
        "top_p": load.top_p,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(body).encode()


async def events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream."""
    rest = b""
    async for piece in response.aiter_raw():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and not line.startswith(b"data: [DONE]"):
                yield json.loads(line[5:])


async def ask(client: httpx.AsyncClient, body: bytes, due_s: float, start_s: float) -> Timing:
    """Send a request, and read its answer as it comes."""
    timing = Timing(due_s, time.perf_counter() - start_s)
    try:
        async with client.stream("POST", "/v1/completions", content=body) as response:
            if response.status_code != 200:
                timing.error = f"{response.status_code}: {(await response.aread())[:200]!r}"
                return timing
            async for event in events(response):
                if event.get("choices"):
                    timing.came(time.perf_counter() - start_s)
                if event.get("usage"):
                    timing.num_tokens = event["usage"]["completion_tokens"]
                    details = event["usage"].get("prompt_tokens_details") or {}
                    timing.num_cached_tokens = details.get("cached_tokens") or 0
                if event.get("error"):
                    timing.error = str(event["error"])[:200]
    except httpx.HTTPError as error:
        timing.error = repr(error)[:200]
    return timing


# ---- a load -----------------------------------------------------------------------------------


def new_client(url: str) -> httpx.AsyncClient:
    """A client without limits of its own."""
    transport = httpx.AsyncHTTPTransport(
        verify=False,  # Certificates take a tenth of a second to load, and none is needed.
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
    )
    headers = {"Content-Type": "application/json"}
    return httpx.AsyncClient(base_url=url, transport=transport, timeout=None, headers=headers)


async def send_all(url: str, work: Sequence[tuple[float, bytes]], start_s: float) -> list[Timing]:
    """Send each body when it is due."""
    async with new_client(url) as client:
        await client.get("/health")  # The first request imports modules.
        tasks = []
        for due_s, body in work:
            await asyncio.sleep(max(0.0, start_s + due_s - time.perf_counter()))
            tasks.append(asyncio.create_task(ask(client, body, due_s, start_s)))
        return list(await asyncio.gather(*tasks))


def send(url: str, work: Sequence[tuple[float, bytes]], start_s: float) -> list[Timing]:
    gc.freeze()  # A garbage collection would count against the server.
    return asyncio.run(send_all(url, work, start_s))


def apply(load: Load, url: str, model: str) -> list[Timing]:
    """Put a load on a server; return the timings of each request."""
    work = [(each.due_s, body_of(load, each, model)) for each in load.arrivals()]
    count = min(NUM_PROCESSES, len(work))
    context = multiprocessing.get_context("fork")  # Nothing here has threads yet.
    with ProcessPoolExecutor(count, mp_context=context) as pool:
        start_s = time.perf_counter() + load.lead_s
        parts = [pool.submit(send, url, work[at::count], start_s) for at in range(count)]
        return [timing for part in parts for timing in part.result()]


def main(argv: Sequence[str] | None = None) -> int:
    """Read a load, apply it, write timings."""
    url, model = argv or sys.argv[1:]
    timings = apply(Load(**json.load(sys.stdin)), url, model)
    json.dump([asdict(each) for each in timings], sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
