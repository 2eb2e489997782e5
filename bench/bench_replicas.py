"""Do replicas keep their prefixes when there are several of them?

Question. Behind one address stand two or four engines with a prefix index each. How much of what
could be found in them is found, does each get as many requests, and what becomes of requests when a
replica is killed?

Prediction. A router that knows what each replica holds computes every prefix once, wherever:
all that could be found is found, but for what moves because a replica is far ahead of the others.
Chance finds a prefix where it was computed before: of 10 requests with a prefix over n replicas,
n (1 - (1 - 1/n)^10) compute it: 2 of 2, 3.8 of 4, so 0.89 and 0.69 of what could be found. Prefixes
are given out one by one to whoever was sent the least, and are as many: a spread of 1.0. A killed
replica's requests run again elsewhere: none is refused but streams that had begun.

Method. `vmkv.serve.replicas` on Ray Serve, on this machine, with a tiny model (two layers) on the
host backend; the server's routes in front of it, asked in process. 200 requests, ten for each of
20 prefixes of 256 tokens, with 16 tokens of their own, in a random order, eight at a time, 4 new
tokens each; every replica has memory for all of them. The best possible is one miss for each
prefix. The spread is the most requests that a replica had, over the fewest. Beside it the same
requests with a router that chooses at random, and with Ray's own, which takes the less loaded of
two. Then, with two replicas and the same load all the time, 160 new tokens each and half of the
answers streams, one is killed: what its clients are told, how long until there are two again, and
how many requests are answered in between.

Not measured. GPUs, networks, several machines, more than one server in front, and whether a
controller of Ray's keeps up with many replicas.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from harness import ROOT, Bench, Figure, Row

NUM_PREFIXES = 20
PREFIX_TOKENS = 256
OWN_TOKENS = 16
NEW_TOKENS = 4
CONCURRENCY = 8
MAX_TOKENS = 1024
VOCABULARY = 360
ROUTERS = ("prefixes", "random", "Ray's own")
LOOK_S = 0.2
#: Tokens of an answer while a replica is killed: more, so that requests are running.
KILL_NEW_TOKENS = 160


def tiny_engine(observer: Any) -> Any:
    """The engine of a replica, in its process."""
    import torch
    from helpers.serving import tiny_llama, tiny_tokenizer

    from vmkv.serve.engine import Engine
    from vmkv.units import MiB

    torch.set_num_threads(1)
    return Engine(
        tiny_llama(),
        tokenizer=tiny_tokenizer(),
        max_num_seqs=256,  # Rows for all requests of all prefixes.
        max_num_batched_tokens=512,
        max_tokens=MAX_TOKENS,
        budget_bytes=256 * MiB,
        observer=observer,
        seed=0,
    )


def deploy(router: str, num_replicas: int, name: str) -> Any:
    """Replicas behind one of the routers: a handle to them.

    Handles to applications of one name share a router in this process, whatever it was told.
    """
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    from vmkv.serve.replicas.choice import Routing
    from vmkv.serve.replicas.deployment import engine_deployment

    options: dict[str, Any] = {"num_replicas": num_replicas, "ray_actor_options": {"num_cpus": 0.1}}
    if router == "random":
        options["request_router_config"] = RequestRouterConfig(
            request_router_class="random_router.RandomRouter"
        )
    elif router == "Ray's own":
        options["request_router_config"] = RequestRouterConfig()
    deployment = engine_deployment(Routing(), **options)
    return serve.run(deployment.bind(tiny_engine), name=name, route_prefix=None)


def prompts(num_requests: int, num_prefixes: int) -> list[list[int]]:
    """Equally many requests for each prefix, in random order."""
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(10, VOCABULARY - 10) for _ in range(count)]

    prefixes = [tokens(PREFIX_TOKENS) for _ in range(num_prefixes)]
    found = [prefixes[at % num_prefixes] + tokens(OWN_TOKENS) for at in range(num_requests)]
    rng.shuffle(found)
    return found


async def served_by(handle: Any) -> Counter[str]:
    """How many requests each replica has ended."""
    from prometheus_client.parser import text_string_to_metric_families

    counts: Counter[str] = Counter()
    reports = await handle.broadcast("report").results_async(return_exceptions=True)
    for report in reports:
        if isinstance(report, Exception):
            continue
        counts[report.replica] = 0
        for family in text_string_to_metric_families(report.metrics.decode()):
            for sample in family.samples:
                if sample.name == "vmkv_requests_total":
                    counts[report.replica] += int(sample.value)
    return counts


async def each_at_once(jobs: Sequence[Any], concurrency: int) -> list[Any]:
    """Results of jobs, in order; at most `concurrency` run at a time."""
    places = asyncio.Semaphore(concurrency)

    async def run(job: Any) -> Any:
        async with places:
            return await job()

    return await asyncio.gather(*map(run, jobs))


async def measure_hits(handle: Any, requests: Sequence[Sequence[int]]) -> Row:
    """Prefix hits, and the requests of each replica."""
    from vmkv import SamplingParams
    from vmkv.serve.replicas.client import ReplicatedEngine

    engine = ReplicatedEngine(handle)
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0)

    async def ask(prompt: Sequence[int]) -> int:
        async for output in engine.stream(prompt, params):
            cached_tokens = output.num_cached_tokens
        return min(cached_tokens, PREFIX_TOKENS)

    start_s = time.perf_counter()
    found = await each_at_once([lambda each=each: ask(each) for each in requests], CONCURRENCY)
    seconds = time.perf_counter() - start_s
    counts = (await served_by(handle)).values()
    await engine.shutdown()
    num_prefixes = len({tuple(each[:PREFIX_TOKENS]) for each in requests})
    best_tokens = (len(requests) - num_prefixes) * PREFIX_TOKENS
    return {
        "requests": len(requests),
        "found_tokens": sum(found),
        "best_tokens": best_tokens,
        "found_share": sum(found) / best_tokens,
        "most_requests": max(counts),
        "fewest_requests": min(counts),
        "spread": max(counts) / max(1, min(counts)),
        "seconds": seconds,
    }


async def measure_death(handle: Any, seconds: float) -> Row:
    """A replica is killed while clients ask without pause; half of them read streams."""
    import httpx
    from helpers.serving import tiny_tokenizer

    from vmkv.serve.replicas.client import ReplicatedEngine
    from vmkv.serve.server import ServerOptions, create_app

    engine = ReplicatedEngine(handle)
    app = create_app(engine, tiny_tokenizer(), ServerOptions("tiny", MAX_TOKENS), engine.metrics)
    outcomes: Counter[str] = Counter()
    longest_s = 0.0
    is_over = asyncio.Event()
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:

        async def ask_on(number: int) -> None:
            nonlocal longest_s
            for prompt in itertools.cycle(prompts(20, 20)):
                if is_over.is_set():
                    return
                body = {"model": "tiny", "prompt": prompt, "max_tokens": KILL_NEW_TOKENS}
                body |= {"stream": number % 2 == 0, "ignore_eos": True}
                start_s = time.perf_counter()
                response = await client.post("/v1/completions", json=body, timeout=120)
                longest_s = max(longest_s, time.perf_counter() - start_s)
                outcomes[outcome_of(response)] += 1

        clients = [asyncio.create_task(ask_on(number)) for number in range(CONCURRENCY)]
        before = await served_by(handle)
        await asyncio.sleep(seconds)
        kill_one(set(before))
        killed_s = time.perf_counter()
        num_before = outcomes.total()
        while True:
            now = set(await served_by(handle))
            if len(now) == len(before) and now != set(before):
                break
            await asyncio.sleep(LOOK_S)
        back_s = time.perf_counter() - killed_s
        num_meanwhile = outcomes.total() - num_before
        await asyncio.sleep(seconds)
        is_over.set()
        await asyncio.gather(*clients)
    await engine.shutdown()
    return {
        "requests": outcomes.total(),
        "answered": outcomes["answered"],
        "refused_in_words": outcomes["refused in words"],
        "lost": outcomes["lost"],
        "answered_while_one_was_gone": num_meanwhile,
        "longest_s": longest_s,
        "two_again_after_s": back_s,
    }


def outcome_of(response: Any) -> str:
    """The outcome of a request, as its client sees it."""
    text = response.text
    if response.status_code != 200:
        return "refused in words" if response.json()["error"]["message"] else "lost"
    if not text.startswith("data: "):
        is_whole = response.json()["usage"]["completion_tokens"] == KILL_NEW_TOKENS
        return "answered" if is_whole else "lost"
    events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    if len(events) < 2 or events[-1] != "[DONE]":
        return "lost"
    last = json.loads(events[-2])
    if "error" in last:
        return "refused in words" if last["error"]["message"] else "lost"
    return "answered" if last["choices"][0]["finish_reason"] == "length" else "lost"


def kill_one(names: set[str]) -> None:
    """End the process of one of the replicas, whatever it is doing."""
    import ray

    actors = ray.util.list_named_actors(all_namespaces=True)
    victim = next(each for each in actors if any(map(each["name"].endswith, names)))
    ray.kill(ray.get_actor(**victim))


def figures_of(rows: Sequence[Row]) -> list[Figure]:
    """The promised figures."""
    figures = []
    hits = {(row["router"], row["replicas"]): row for row in rows if "router" in row}
    for (router, count), row in hits.items():
        if router != "prefixes":
            continue
        rival = hits.get(("random", count), {}).get("found_share")
        said = "" if rival is None else f"chosen at random: {100 * rival:.1f} %"
        of, name = f"{count} replicas, {row['requests']} requests", f"replicas_{count}"
        what, got = f"{of}: prefix tokens found, of all that could be", row["found_share"]
        figures.append(Figure(f"{name}_found_share", what, got, "%", at_least=0.9, rival=said))
        what = f"{of}: the most that one had, over the fewest"
        figures.append(Figure(f"{name}_spread", what, row["spread"], "×", 1.2))
    for row in rows:
        if "lost" in row:
            what = "one of two replicas killed: requests neither answered nor refused in words"
            figures.append(Figure("replicas_lost", what, row["lost"], "requests", 0))
            what = "one of two replicas killed: until there are two again"
            figures.append(Figure("replicas_again_s", what, row["two_again_after_s"], "s"))
    return figures


def rows_of(*, smoke: bool) -> list[Row]:
    """All measurements, on a Ray of its own."""
    import ray
    from ray import serve

    from vmkv.units import MiB

    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ray.init(
        address="local",
        num_cpus=2,
        object_store_memory=100 * MiB,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": environment},
    )
    rows: list[Row] = []
    try:
        cases = [("prefixes", 2)] if smoke else itertools.product(ROUTERS, (2, 4))
        requests = prompts(20, 5) if smoke else prompts(200, NUM_PREFIXES)
        for number, (router, num_replicas) in enumerate(cases):
            name = f"case-{number}"
            handle = deploy(router, num_replicas, name)
            row = asyncio.run(measure_hits(handle, requests))
            rows.append({"router": router, "replicas": num_replicas, **row})
            print(rows[-1], flush=True)
            serve.delete(name)
        if not smoke:
            handle = deploy("prefixes", 2, "death")
            rows.append({"replicas": 2, **asyncio.run(measure_death(handle, 5.0))})
            print(rows[-1], flush=True)
    finally:
        serve.shutdown()
        ray.shutdown()
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench."""
    bench = Bench("replicas", __doc__)
    smoke = bench.parse(argv).smoke
    sys.path.insert(0, str(ROOT / "tests"))
    rows = rows_of(smoke=smoke)
    constants = {"prefix_tokens": PREFIX_TOKENS, "own_tokens": OWN_TOKENS}
    constants |= {"new_tokens": NEW_TOKENS, "concurrency": CONCURRENCY}
    constants["new_tokens_when_killed"] = KILL_NEW_TOKENS
    return bench.finish(rows, figures_of(rows), constants)


if __name__ == "__main__":
    sys.exit(main())
