"""Several models on one GPU, asked in bursts by turns: what is memory that follows the load worth?

Question. Two and three models of Llama-3-8B's shape share one GPU. Prompts of 8k to 32k tokens come
in bursts, to one model after another. Which rate is served within 2 s to the first token and 30 ms
per token, both at p99, by models that share the memory for keys and values, and which by models
with a fixed share each? And what do loaded models that nobody asks cost the one that is asked?

Prediction. A request holds its tokens for a prefill and its answer: in a burst at the highest rate
below, the hot model's live tokens reach twice what a fixed share holds (`peak_live_tokens` and
`share_tokens` in the record; the memory is chosen so). With fixed shares requests of a burst wait
for others' answers to end, 3 to 10 s: they serve the rates at which the tokens of two or three
requests fit the share, a third of the highest. With shared memory the bound is the time of
prefills, 0.45 s for 16k tokens and 1.15 s for 32k, twice that while another model decodes. Idle
models submit nothing and poll nothing: the hot one takes as long as alone, within 2 %.

Method. Each server gets the same loads from other processes, with arrivals by a Poisson process and
times from when a request was due (`live_load.py`). For 20 s one model gets the rate, and every
other one a sixteenth of it; 10 s later, when most answers have ended, the next; each model has two
such phases. Before, every model answers a request. `hot`: a server of all models and a server of
one, each with the memory of all shares, run at the same time, and get 0.4 requests a second in
turns, for one model and a phase, three times; medians count. On a device that cannot hold the
weights and the keys and values of both, the second server starts after the first has had its three
loads and has ended.

Why this load. In an earlier one bursts followed one another at once, and a share held 122k tokens,
half of what is live at 1.2/s. There no memory was short at the rates that anyone served: prompts of
32k tokens missed 2 s at 0.3/s on all servers, because two models computed at the same time.

A second after each load on a server of several models, `idle_bytes` is the most that any of them
has created for keys and values, by the broker's books: its floor, and the row that padding writes
to, with a kernel's tile past its end.

A part is one load on one server. The record is written after each part, and `--after` adds the
parts of another call, so that a run can be divided between calls by `--models`, `--servers` and
`--rates`. The memory follows from the highest of the four default rates, so it is the same for all
calls. Two servers are compared over the rates that both had.

Rivals. The same server once for each model, with a fixed share of the memory; and vLLM in the same
way, where it can be imported. `guests` are the same servers of vLLM as members of a `vmkv pool`,
which gives them the memory of all fixed shares.

Not measured. kvcached, which is not installed here; vLLM's sleep mode, which serves one model at a
time.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from bench_live import (
    VLLM,
    VMKV,
    environment_of,
    free_port,
    has_vllm,
    milliseconds,
    running,
    save_model,
)
from harness import HAS_GPU, Bench, Figure, Row, on_gpu, print_rows
from live_load import Arrival, Load, Timing, body_of, send
from models import llama_config, token_bytes_of
from prometheus_client.parser import text_string_to_metric_families

from vmkv.core.memory import Broker
from vmkv.units import GiB, MiB

SHARED, FIXED = "vmkv, shared memory", "vmkv, fixed shares"
GUESTS = "vLLM, guests of a pool"
HOT, ALONE = "vmkv, one hot model", "vmkv, a model alone"
NUM_ALTERNATIONS = 3
TTFT_MS, TPOT_MS = 2000.0, 30.0
COLD_SHARE = 1 / 16
#: Of one H200, to compute live tokens beforehand: a prefill of 8,192 tokens takes 220 ms.
PREFILL_TOKENS_PER_S, TOKEN_S = 8192 / 0.22, 0.01
WARM_UP = "warm-up"
#: Of the device's memory, for weights, keys and values; the rest is for activations and graphs.
HELD_SHARE = 0.9
GUEST = {
    "kv_connector": "GuestConnector",
    "kv_connector_module_path": "vmkv.guests.vllm",
    "kv_role": "kv_both",
}


class Part(NamedTuple):
    """One load on one server of so many models; `hot` has several rounds of a load."""

    models: int
    server: str
    rate_per_s: float
    round: int = 1

    @property
    def num_asked(self) -> int:
        """How many of the models get requests."""
        return 1 if self.server in (HOT, ALONE) else self.models


@dataclass(frozen=True)
class Case:
    """Sizes of a run: bounds of prompts and answers, rates, and phases that begin with a burst.

    `start_s` is the time that a start is expected to take for each model.
    """

    prompt_tokens: tuple[int, int]
    new_tokens: tuple[int, int]
    rates_per_s: Sequence[float]
    hot_rate_per_s: float
    burst_s: float
    phase_s: float
    num_phases: int
    max_tokens: int
    vocabulary: int
    start_s: float

    def length(self, source: random.Random) -> tuple[int, int]:
        """Draw a prompt's and an answer's tokens, uniformly by their logarithms."""
        prompt, new = (
            int(low * (high / low) ** source.random())
            for low, high in (self.prompt_tokens, self.new_tokens)
        )
        return prompt, new

    @property
    def share_tokens(self) -> int:
        """Tokens of a fixed share: half of the hot model's live ones, but at least one request."""
        return max(self.max_tokens, self.peak_live_tokens // 2)

    @functools.cached_property
    def peak_live_tokens(self) -> int:
        """The most live tokens in a burst at the highest rate, where none waits: a mean of 1000."""
        source = random.Random("lengths")
        return int(statistics.mean(self._peak_of_a_burst(source) for _ in range(1000)))

    def _peak_of_a_burst(self, source: random.Random) -> int:
        changes = []
        for due_s in self._due(source, max(self.rates_per_s)):
            prompt, new = self.length(source)
            end_s = due_s + prompt / PREFILL_TOKENS_PER_S + new * TOKEN_S
            changes += [(due_s, prompt + new), (end_s, -prompt - new)]
        return max(itertools.accumulate((tokens for _, tokens in sorted(changes)), initial=0))

    def _due(self, source: random.Random, rate_per_s: float) -> Iterator[float]:
        """Yield the times of a burst's arrivals."""
        due_s = source.expovariate(rate_per_s)
        while due_s < self.burst_s:
            yield due_s
            due_s += source.expovariate(rate_per_s)

    def phases_of(self, part: Part) -> int:
        """How many phases a part has: `num_phases` for each model, or one with `hot`."""
        return 1 if part.server in (HOT, ALONE) else self.num_phases * part.models

    def seconds_of(self, part: Part) -> float:
        """How long a part takes at most, if an answer waits for the end of another one."""
        return self.phases_of(part) * self.phase_s + 4 * self.new_tokens[1] * TOKEN_S

    def arrivals(self, part: Part) -> list[tuple[int, Arrival]]:
        """Return the requests of a part with their models, in order; the same every time.

        At a higher rate the same requests come closer together, and more come within a burst.
        Each part has prompts of its own, which no server has in its cache.
        """
        made = []
        for phase, model in itertools.product(range(self.phases_of(part)), range(part.num_asked)):
            rate_per_s = part.rate_per_s * (1 if phase % part.num_asked == model else COLD_SHARE)
            source = random.Random(f"{part.round} {phase} {model}")
            for due_s in self._due(source, rate_per_s):
                prompt, new = self.length(source)
                ids = random.Random(f"{part.rate_per_s} {part.round} {phase} {model} {due_s}")
                its = ids.choices(range(5, self.vocabulary), k=prompt)
                made.append((model, Arrival(phase * self.phase_s + due_s, its, new)))
        return sorted(made, key=lambda each: each[1].due_s)


FULL = Case(
    (8192, 32_000), (256, 1024), (0.05, 0.1, 0.15, 0.3), 0.4, 20.0, 30.0, 2, 34_000, 120_000, 40.0
)
SMALL = Case((32, 128), (4, 8), (4.0, 8.0), 4.0, 0.5, 0.5, 1, 256, 128, 5.0)


# ---- servers -------------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(
    server: str, folders: Sequence[Path], num_shares: int, options: argparse.Namespace
) -> Iterator[list[str]]:
    """Serve the models with so many shares of memory in all, and yield the address of each.

    Fixed shares have a server each.
    """
    smoke, case = options.smoke, case_of(options)
    share_tokens, token_bytes = case.share_tokens, token_bytes_of(llama_config(smoke=smoke))
    is_vllm = server in (VLLM, GUESTS)
    path = options.vllm_path if is_vllm else None
    environment = environment_of(VLLM if is_vllm else VMKV, path)
    sequences, extra = ["--max-num-seqs", "8" if smoke else "128"], {}

    def command(names: Sequence[Path], port: int) -> list[str]:
        address = ["--host", "127.0.0.1", "--port", str(port)]
        lengths = ["--max-model-len", str(case.max_tokens), *sequences, *address]
        if is_vllm:
            program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
            its = ["--num-gpu-blocks-override", str(share_tokens // 16)]
            its += ["--gpu-memory-utilization", f"{0.9 / len(folders):.3f}"]
            if server == GUESTS:
                its = ["--worker-cls", "vmkv.guests.vllm.GuestWorker"]
                its += ["--kv-transfer-config", json.dumps({**GUEST, **extra})]
            folder = str(names[0].resolve())  # One folder: later starts find compiled code.
            return [*program, folder, "--served-model-name", str(names[0]), *its, *lengths]
        its_shares = num_shares / len(groups)
        memory = 1 / 16 if smoke else its_shares * share_tokens * token_bytes / GiB
        its = ["--memory", f"{memory:.6f}", "--log-level", "warning"]
        return [sys.executable, "-m", "vmkv.cli", "serve", *map(str, names), *its, *lengths]

    groups = [folders] if server in (SHARED, HOT) else [[each] for each in folders]
    with contextlib.ExitStack() as stack:
        if server == GUESTS:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            broker = Broker(f"{folder}/pool", num_shares * share_tokens * token_bytes)
            extra = {"kv_connector_extra_config": {"pool_socket": broker.socket_path}}
            environment["VLLM_USE_V2_MODEL_RUNNER"] = "0"
            stack.enter_context(broker)
        urls: list[str] = []
        for names in groups:
            port = free_port()
            log = options.logs / f"{server.replace(', ', '-').replace(' ', '-')}-{port}.log"
            running_one = running(server, command(names, port), environment, log, port)
            urls += [stack.enter_context(running_one).url] * len(names)
        yield urls


def apply(
    case: Case, urls: Sequence[str], names: Sequence[Path], arrivals: list[tuple[int, Arrival]]
) -> list[Timing]:
    """Put a load on the servers, from a process for each model."""
    load = Load("", 0, 0, case.vocabulary)
    work: list[list[tuple[float, bytes]]] = [[] for _ in names]
    for model, each in arrivals:
        work[model].append((each.due_s, body_of(load, each, str(names[model]))))
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(len(names), mp_context=context) as pool:
        start_s = time.perf_counter() + 1.5
        parts = [pool.submit(send, url, its, start_s) for url, its in zip(urls, work, strict=True)]
        return [timing for part in parts for timing in part.result()]


def rows_of(
    parts: Sequence[Part], folders: Sequence[Path], options: argparse.Namespace, end_s: float
) -> Iterator[Row]:
    """Run the servers of these parts at the same time; parts that would not fit are left out."""
    case = case_of(options)

    def fits(seconds: float) -> bool:
        return time.monotonic() + seconds < end_s

    names = {part.server: folders[: 1 if part.server == ALONE else part.models] for part in parts}
    starts_s = case.start_s * sum(map(len, names.values()))
    urls: dict[str, list[str]] = {}
    with contextlib.ExitStack() as stack:
        if fits(starts_s + case.seconds_of(parts[0])):
            for server, its in names.items():
                urls[server] = stack.enter_context(serving(server, its, parts[0].models, options))
                warm_up(case, urls[server], its)
        for part in parts:
            if not urls or not fits(case.seconds_of(part)):
                row = {**part._asdict(), "stopped": "no time was left"}
            else:
                asked = slice(part.num_asked)
                places = urls[part.server][asked], names[part.server][asked]
                row = row_of(part, apply(case, *places, case.arrivals(part)))
                if part.server in (SHARED, HOT):
                    time.sleep(1.0)
                    row["idle_bytes"] = most_created_bytes(urls[part.server][0])
            print_rows([row])
            yield row


def most_created_bytes(url: str) -> float:
    """The most that a member of the server's pool has created, by the broker's books."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    samples = [each for family in families for each in family.samples]
    of_members = [each for each in samples if each.name == "vmkv_pool_bytes"]
    return max(each.value for each in of_members if each.labels["state"] == "created")


def parts_of(
    server: str, num_models: int, options: argparse.Namespace, weights_bytes: int
) -> list[list[Part]]:
    """The parts of a server, in lists of those whose servers run at the same time."""
    case = case_of(options)
    if server != HOT:
        return [[Part(num_models, server, rate) for rate in options.rates or case.rates_per_s]]
    rounds = range(1, NUM_ALTERNATIONS + 1)
    parts = [
        [Part(num_models, each, case.hot_rate_per_s, at) for at in rounds] for each in (HOT, ALONE)
    ]
    cache_bytes = case.share_tokens * token_bytes_of(llama_config(smoke=options.smoke))
    needed_bytes = (num_models + 1) * weights_bytes + 2 * num_models * cache_bytes
    if needed_bytes > HELD_SHARE * device_bytes():
        return parts
    return [list(itertools.chain(*zip(*parts, strict=True)))]


def device_bytes() -> float:
    """The device's memory; without a device, memory has no bound here."""
    return torch.cuda.get_device_properties(0).total_memory if HAS_GPU else float("inf")


def case_of(options: argparse.Namespace) -> Case:
    """The sizes that were asked for."""
    case = SMALL if options.smoke else FULL
    return replace(case, num_phases=options.phases or case.num_phases)


def warm_up(case: Case, urls: Sequence[str], names: Sequence[Path]) -> None:
    """Have every model answer a request."""
    source = random.Random(WARM_UP)
    prompt = source.choices(range(5, case.vocabulary), k=case.prompt_tokens[0])
    apply(case, urls, names, [(at, Arrival(0.0, prompt, 4)) for at in range(len(names))])


def row_of(part: Part, timings: Sequence[Timing]) -> Row:
    """Latencies of a load's clients."""
    good = [each for each in timings if not each.error and each.first_s is not None]
    for error in sorted({each.error for each in timings if each.error})[:3]:
        print(f"{part.server}, {part.rate_per_s}/s: {error}", file=sys.stderr)
    ttft = [each.first_s - each.due_s for each in good if each.first_s is not None]
    tpot = [
        (each.last_s - each.first_s) / (each.num_tokens - 1)
        for each in good
        if each.num_tokens > 1 and each.first_s is not None and each.last_s is not None
    ]
    row: Row = {**part._asdict(), "requests": len(timings), "failed": len(timings) - len(good)}
    for name, values in (("ttft", ttft), ("tpot", tpot)):
        for share in (0.5, 0.99):
            row[f"{name}_p{round(100 * share)}_ms"] = milliseconds(values, share)
    is_slow = (row["ttft_p99_ms"] or 1e9) > TTFT_MS or (row["tpot_p99_ms"] or 1e9) > TPOT_MS
    row["is_served"] = not row["failed"] and not is_slow
    return row


def figures_of(rows: Sequence[Row]) -> list[Figure]:
    """The highest rate served against each rival, and first tokens at the rate that it serves."""
    figures = []
    rows = [row for row in rows if "stopped" not in row]
    for models in sorted({row["models"] for row in rows}):
        mine = [row for row in rows if row["models"] == models]
        for key in ("ttft_p50_ms", "tpot_p50_ms"):
            hot, alone = (
                [row[key] for row in mine if row["server"] == each and row[key] is not None]
                for each in (HOT, ALONE)
            )
            if hot and alone:
                ours, theirs = statistics.median(hot), statistics.median(alone)
                what = f"{models} models, one asked: {key[:4].upper()}, of the model's alone"
                name, said = f"many_{models}_hot_{key[:4]}", f"{theirs:.4g} ms"
                at_most = on_gpu(1.05)
                figures.append(Figure(name, what, ours / theirs, "×", at_most, rival=said))
        idle = [row["idle_bytes"] / MiB for row in mine if row.get("idle_bytes") is not None]
        if idle:
            what = f"{models} models: memory for keys and values of an idle one, a second later"
            at_most = on_gpu(64 + 2)
            figures.append(Figure(f"many_{models}_idle", what, max(idle), "MiB", at_most))
        by_rate = {
            server: {row["rate_per_s"]: row for row in mine if row["server"] == server}
            for server in (SHARED, FIXED, VLLM, GUESTS)
        }
        shared = by_rate[SHARED]
        if not shared:
            continue
        what = f"{models} models: highest rate served within {TTFT_MS / 1e3:g} s and {TPOT_MS:g} ms"
        figures.append(Figure(f"many_{models}_rate", what, highest(shared), "requests/s"))
        for rival, slug in ((VLLM, "vllm"), (FIXED, "fixed"), (GUESTS, "guests")):
            its = {rate: row for rate, row in by_rate[rival].items() if rate in shared}
            theirs = highest(its)
            if not theirs:
                continue
            best = highest({rate: shared[rate] for rate in its})
            bound = on_gpu(1.5) if rival == VLLM else None
            said = f"{rival}: {theirs:g}/s"
            name, what = f"many_{models}_rate_{slug}", f"{models} models: that rate, of {rival}'s"
            figures.append(Figure(name, what, best / theirs, "×", at_least=bound, rival=said))
            ours, other = shared[theirs]["ttft_p99_ms"], its[theirs]["ttft_p99_ms"]
            if ours is None:  # No request was answered.
                continue
            what = f"{models} models: TTFT at p99, at the highest rate of {rival}"
            bound, said = (on_gpu(0.8) if rival == VLLM else None), f"{other:.4g} ms"
            name = f"many_{models}_ttft_{slug}"
            figures.append(Figure(name, what, ours / other, "×", at_most=bound, rival=said))
    return figures


def highest(by_rate: dict[float, Row]) -> float:
    """The highest rate that is served; 0 without one."""
    return max((rate for rate, row in by_rate.items() if row["is_served"]), default=0.0)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write."""
    bench = Bench("many", __doc__, needs_gpu=True)
    bench.option("--models", nargs="+", type=int, default=[2, 3], help="by default 2 and 3")
    servers = {"hot": HOT, "shared": SHARED, "fixed": FIXED, "vllm": VLLM, "guests": GUESTS}
    said = "arrivals a second, by default four; `hot` always has 0.4"
    bench.option("--rates", nargs="+", type=float, help=said)
    bench.option("--phases", type=int, help="of each model, but for `hot`; by default two")
    bench.option("--servers", nargs="+", choices=servers, default=list(servers))
    bench.option("--total-s", type=float, help="for all parts; those without time are left out")
    bench.option("--after", type=Path, help="record of the same sizes: its other parts are kept")
    bench.option("--folder", type=Path, help="keeps the model; by default a temporary one")
    bench.option("--vllm-path", help="PYTHONPATH of vLLM, where it is not installed")
    bench.option("--logs", type=Path, help="a folder for what servers say")
    options = bench.parse(argv)
    smoke, case = options.smoke, case_of(options)
    end_s = time.monotonic() + (options.total_s or float("inf"))
    constants = {
        "peak_live_tokens": case.peak_live_tokens,
        "share_tokens": case.share_tokens,
        "token_bytes": token_bytes_of(llama_config(smoke=smoke)),
        "phases": case.num_phases,
    }
    before = bench.rows_before(options.after, constants)
    results = {Part(*(row[name] for name in Part._fields)): row for row in before}
    with tempfile.TemporaryDirectory() as made:
        options.logs = options.logs or Path(made)
        options.logs.mkdir(parents=True, exist_ok=True)
        model = options.folder or Path(made, "model")
        if not (model / "config.json").exists():
            save_model(model, smoke=smoke, max_tokens=case.max_tokens)
        weights_bytes = sum(each.stat().st_size for each in model.glob("*.safetensors"))
        wanted = options.models[:1] if smoke else options.models
        folders = [Path(made, f"model-{at}") for at in range(max(wanted))]
        for each in folders:
            each.symlink_to(model.resolve())  # The same weights under several names.
        for num_models, name in itertools.product(wanted, options.servers):
            server = servers[name]
            if smoke and server not in (SHARED, HOT):  # A start takes seconds.
                continue
            if server in (VLLM, GUESTS) and not has_vllm(options.vllm_path):
                print("vLLM cannot be imported here")
                continue
            for parts in parts_of(server, num_models, options, weights_bytes):
                for part, row in zip(parts, rows_of(parts, folders, options, end_s), strict=True):
                    is_kept = "stopped" in row and part in results
                    results[part] = results[part] if is_kept else row
                    rows = [results[each] for each in sorted(results)]
                    bench.finish(rows, figures_of(rows), constants)
    return 0


if __name__ == "__main__":
    sys.exit(main())
