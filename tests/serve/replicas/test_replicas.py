"""Replicas on Ray, behind the server: answers, routing, failures, metrics.

A real Ray with two engines on the host backend, on this machine; skipped where Ray is not
installed. Not covered: GPUs, several machines, and a Ray that loses its head node.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest
from helpers.serving import MAX_TOKENS, serving, tiny_tokenizer

from vmkv import AsyncEngine, ConfigError, SamplingParams
from vmkv.serve.server import ServerOptions, create_app

from .conftest import Running, tiny_engine

pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.slow]


def prompts(num_prefixes: int, num_tokens: int, seed: int) -> list[list[int]]:
    """Random prompts without common prefixes."""
    rng = random.Random(seed)
    return [[rng.randrange(10, 300) for _ in range(num_tokens)] for _ in range(num_prefixes)]


def test_answers_are_those_of_one_engine(running: Running) -> None:
    """Whole and streamed answers have the same tokens."""
    [prompt] = prompts(1, 40, seed=1)
    app = create_app(
        AsyncEngine(tiny_engine(None)), tiny_tokenizer(), ServerOptions("tiny", MAX_TOKENS)
    )
    with serving(app) as (url, _):
        alone = replace(running, url=url).complete(prompt, max_tokens=12)
    whole = running.complete(prompt, max_tokens=12)
    assert whole.status_code == alone.status_code == 200
    assert whole.json()["choices"] == alone.json()["choices"]
    assert whole.json()["usage"] == alone.json()["usage"]
    streamed = running.complete(prompt, max_tokens=12, stream=True)
    events = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    texts = [json.loads(each)["choices"][0]["text"] for each in events]
    assert "".join(texts) == alone.json()["choices"][0]["text"]


def test_requests_are_routed_to_their_prefix(running: Running) -> None:
    """Each of six prefixes is computed once; both replicas get half of the requests."""
    before = running.counted("vmkv_requests_total")
    prefixes = prompts(6, 160, seed=2)
    num_cached = []
    for turn in range(4):
        for prefix in prefixes:
            done = running.complete([*prefix, 10 + turn, 11, 12], max_tokens=1).json()
            num_cached.append(done["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert num_cached == [0] * 6 + [160] * 18
    after = running.counted("vmkv_requests_total")
    assert sorted(after[each] - before[each] for each in after) == [12, 12]


def test_prefixes_are_not_shared_between_keys(running: Running) -> None:
    """A request hits the prefixes of its own key and salt, whichever replica holds them."""
    from vmkv.serve.replicas.client import ReplicatedEngine

    keys, engine = ["alice-key", "bob-key"], ReplicatedEngine(running.handle)
    options = ServerOptions("tiny", MAX_TOKENS, api_keys=keys)
    [prefix] = prompts(1, 160, seed=5)
    found = []
    with serving(create_app(engine, tiny_tokenizer(), options, engine.metrics)) as (url, _):
        for turn, (key, salt) in enumerate([*itertools.product(keys, (None, "salt"))] * 2):
            body = {"model": "tiny", "prompt": [*prefix, 10 + turn], "max_tokens": 1}
            answer = httpx.post(
                f"{url}/v1/completions",
                json=body | {"cache_salt": salt},
                headers={"Authorization": f"Bearer {key}"},
                timeout=120,
            )
            found.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert found == [0] * 4 + [160] * 4


def test_another_router_learns_prefixes_from_reports(running: Running) -> None:
    """A router that has sent nothing finds sixteen prefixes once replicas have reported them."""
    import ray
    from ray import serve

    @ray.remote(num_cpus=0)
    class Stranger:
        """A process with a router of its own."""

        def __init__(self) -> None:
            self._handle = serve.get_deployment_handle("vmkv-engine", "tiny").options(stream=True)

        def cached_tokens(self, prompt: list[int]) -> int:
            [*_, last] = self._handle.stream.remote(prompt, SamplingParams(max_tokens=1))
            return int(last.num_cached_tokens)

    num_looks = itertools.count(0, 5)
    stranger = Stranger.remote()

    def all_found() -> bool:
        asked = prompts(16, 64, seed=1000 + next(num_looks))
        assert {running.complete(each, max_tokens=1).status_code for each in asked} == {200}
        for _ in range(next(num_looks)):
            running.reports()
        order = random.Random(0).sample(asked, 16)
        found = [ray.get(stranger.cached_tokens.remote([*each, 10])) for each in order]
        return found == [64] * 16

    running.until(all_found, "the reports of all prefixes")
    ray.kill(stranger)


def test_errors_of_an_engine_keep_their_message(running: Running) -> None:
    """Through Ray and HTTP."""
    refused = running.complete([10, 11], max_tokens=100_000)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"

    async def ask() -> None:
        async for _ in running.engine.stream([10**6], SamplingParams()):
            pass

    with pytest.raises(ConfigError, match="1000000"):
        asyncio.run(ask())


def test_a_client_that_leaves_ends_its_request(running: Running) -> None:
    """Its replica counts the request as cancelled."""
    before = running.counted("vmkv_requests_total", finish_reason="cancelled")
    body = {"model": "tiny", "prompt": [10, 11, 12], "max_tokens": 4000, "stream": True}
    with httpx.stream("POST", f"{running.url}/v1/completions", json=body, timeout=60) as response:
        next(response.iter_lines())

    def cancelled() -> bool:
        after = running.counted("vmkv_requests_total", finish_reason="cancelled")
        return sum(after.values()) == sum(before.values()) + 1

    running.until(cancelled, "the request's end")


def test_metrics_are_labelled_by_replica(running: Running) -> None:
    """Reports arrive a few seconds late."""
    names = set(running.reports())
    assert len(names) == 2

    def shown() -> set[Any]:
        page = httpx.get(f"{running.url}/metrics").text
        return {each for each in names if f'vmkv_steps_total{{replica="{each}"}}' in page}

    running.until(lambda: shown() == names, "metrics of both")
    assert (
        'vmkv_http_responses_total{route="/v1/completions",status="200"}'
        in httpx.get(f"{running.url}/metrics").text
    )


def test_killing_a_replica_under_load_loses_no_whole_answer(running: Running) -> None:
    """Whole answers are computed again, streams end with an error, and Ray adds a replica."""
    import ray

    before = set(running.reports())
    actors = ray.util.list_named_actors(all_namespaces=True)
    victim = next(each for each in actors if any(map(each["name"].endswith, before)))

    def ask(prompt: list[int]) -> tuple[int, str]:
        stream = prompt[0] % 2 == 0
        done = running.complete(prompt, max_tokens=60, ignore_eos=True, stream=stream)
        return done.status_code, done.text

    with ThreadPoolExecutor(16) as threads:
        jobs = [threads.submit(ask, prompt) for prompt in prompts(48, 40, seed=4)]
        jobs[7].result()
        ray.kill(ray.get_actor(**victim))
        answers = [job.result() for job in jobs]
    whole = [text for status, text in answers if status == 200 and not text.startswith("data: ")]
    assert all(json.loads(text)["usage"]["completion_tokens"] == 60 for text in whole)
    for status, text in answers:
        assert status == 200 or json.loads(text)["error"]["code"] == "replica_lost"
        if text.startswith("data: "):
            assert text.endswith("data: [DONE]\n\n")
            assert '"finish_reason":"length"' in text or '"code":"replica_lost"' in text
    # No part of a whole answer had been sent: all of them were computed again.
    assert len(whole) == sum(prompt[0] % 2 for prompt in prompts(48, 40, seed=4))

    def is_back() -> bool:
        now = set(running.reports())
        return len(now) == 2 and now != before

    running.until(is_back, "another replica")
    assert {running.complete([10, at], max_tokens=1).status_code for at in range(20)} == {200}


def test_replicas_behind_the_proxy_of_ray(composed: Running) -> None:
    """Answers, errors, routes and streams work; a client that leaves cancels its request."""
    [prompt] = prompts(1, 40, seed=5)
    assert composed.complete(prompt, max_tokens=5).json()["usage"]["completion_tokens"] == 5
    assert composed.complete([], max_tokens=5).status_code == 400
    assert httpx.get(f"{composed.url}/v1/models").json()["data"][0]["id"] == "tiny"
    assert httpx.get(f"{composed.url}/health").json()["status"] == "ok"
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4000, "stream": True}
    with httpx.stream("POST", f"{composed.url}/v1/completions", json=body, timeout=60) as response:
        assert next(response.iter_lines()).startswith("data: {")  # The stream is not buffered.

    def is_cancelled() -> bool:
        return sum(composed.counted("vmkv_requests_total", finish_reason="cancelled").values()) == 1

    composed.until(is_cancelled, "the request's end")


def test_ray_adds_a_replica_under_load(composed: Running) -> None:
    assert len(composed.reports()) == 1
    body = {"model": "tiny", "prompt": [10], "max_tokens": 4000, "stream": True, "ignore_eos": True}
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set():
            with httpx.stream("POST", f"{composed.url}/v1/completions", json=body) as response:
                for _ in response.iter_lines():
                    if is_over.is_set():
                        return

    with ThreadPoolExecutor(4) as threads:
        jobs = [threads.submit(read) for _ in range(4)]
        try:
            composed.until(lambda: len(composed.reports()) == 2, "another replica")
        finally:
            is_over.set()
        for job in jobs:
            job.result()
