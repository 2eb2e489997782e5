"""Several models on one GPU, asked in bursts by turns: what is memory that follows the load worth?

Question. Two and three models of Llama-3-8B's shape share one GPU. Prompts of 8k to 32k tokens come
in bursts, to one model after another. Which rate is served within 2 s to the first token and 30 ms
per token, both at p99, by models that share the memory for keys and values, and which by models
with a fixed share each? And what do loaded models that nobody asks cost the one that is asked?

Prediction. A request holds its tokens for a prefill and its answer: at the highest rate below, the
hot model's live tokens are twice what a fixed share holds (`expected_live_tokens` and
`share_tokens` in the record; the memory is chosen so). With fixed shares half of a burst waits for
the other half, an answer's time or 15 s: they serve the rates at which live tokens fit the share,
half of the highest. With shared memory the bound is the time of prefills, 0.45 s for 16k tokens.
Idle models submit nothing and poll nothing: the hot one takes as long as alone, within 2 %.

Method. Each server gets the same loads from other processes, with arrivals by a Poisson process and
times from when a request was due (`live_load.py`). For 20 s one model gets the rate, and every
other one a sixteenth of it; then the next. Before, every model answers a request. `hot`: a server
of all models and a server of one run at the same time, and get the lowest rate in turns, for one
model and a phase, three times; medians count.

Rivals. The same server once for each model, with a fixed share of the memory; and vLLM in the same
way, where it can be imported.

Not measured. kvcached, which is not installed here; vLLM's sleep mode, which serves one model at a
time.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

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
from harness import Bench, Figure, Row, on_gpu, print_rows
from live_load import Arrival, Load, Timing, body_of, send
from models import llama_config, token_bytes_of

from vmkv.units import GiB

SHARED, FIXED = "vmkv, shared memory", "vmkv, fixed shares"
HOT, ALONE = "vmkv, one hot model", "vmkv, a model alone"
NUM_ALTERNATIONS = 3
TTFT_MS, TPOT_MS = 2000.0, 30.0
COLD_SHARE = 1 / 16
#: Of one H200, to compute live tokens beforehand: a prefill of 8,192 tokens takes 220 ms.
PREFILL_TOKENS_PER_S, TOKEN_S = 8192 / 0.22, 0.02
WARM_UP = "warm-up"


@dataclass(frozen=True)
class Case:
    """Sizes of a run: bounds of prompts and answers, rates, and phases of so many seconds."""

    prompt_tokens: tuple[int, int]
    new_tokens: tuple[int, int]
    rates_per_s: Sequence[float]
    phase_s: float
    num_phases: int
    max_tokens: int
    vocabulary: int

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
        return max(self.max_tokens, self.expected_live_tokens // 2)

    @property
    def expected_live_tokens(self) -> int:
        """The hot model's live tokens at the highest rate: arrivals times how long they stay."""
        source = random.Random("lengths")
        total = 0.0
        for _ in range(1000):
            prompt, new = self.length(source)
            stay_s = prompt / PREFILL_TOKENS_PER_S + new * TOKEN_S
            total += stay_s * (prompt + new / 2)
        return int(max(self.rates_per_s) * total / 1000)

    def arrivals(self, rate_per_s: float, num_models: int) -> list[tuple[int, Arrival]]:
        """Return the requests of a load with their models, in order; the same every time."""
        source = random.Random(f"{rate_per_s} {num_models}")
        tokens = range(5, self.vocabulary)
        made = []
        for phase in range(self.num_phases * num_models):
            for model in range(num_models):
                rate = rate_per_s * (1 if phase % num_models == model else COLD_SHARE)
                due_s = source.expovariate(rate)
                while due_s < self.phase_s:
                    prompt, new = self.length(source)
                    its = source.choices(tokens, k=prompt)
                    made.append((model, Arrival(phase * self.phase_s + due_s, its, new)))
                    due_s += source.expovariate(rate)
        return sorted(made, key=lambda each: each[1].due_s)


FULL = Case((8192, 32_000), (256, 1024), (0.4, 0.6, 0.8, 1.0, 1.2), 20.0, 2, 34_000, 120_000)
SMALL = Case((32, 128), (4, 8), (4.0, 8.0), 0.5, 1, 256, 128)


# ---- servers -------------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(
    server: str, folders: Sequence[Path], share_tokens: int, options: argparse.Namespace
) -> Iterator[list[str]]:
    """Serve the models, and yield the address of each; fixed shares have a server each."""
    smoke = options.smoke
    case, token_bytes = (SMALL if smoke else FULL), token_bytes_of(llama_config(smoke=smoke))
    path = options.vllm_path if server == VLLM else None
    environment = environment_of(VLLM if server == VLLM else VMKV, path)
    sequences = ["--max-num-seqs", "8" if smoke else "128"]

    def command(names: Sequence[Path], port: int) -> list[str]:
        address = ["--host", "127.0.0.1", "--port", str(port)]
        lengths = ["--max-model-len", str(case.max_tokens), *sequences, *address]
        if server == VLLM:
            program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
            fixed = ["--num-gpu-blocks-override", str(share_tokens // 16)]
            fixed += ["--gpu-memory-utilization", f"{0.9 / len(folders):.3f}"]
            return [*program, str(names[0]), "--served-model-name", str(names[0]), *fixed, *lengths]
        memory = 1 / 16 if smoke else len(names) * share_tokens * token_bytes / GiB
        its = ["--memory", f"{memory:.6f}", "--log-level", "warning"]
        return [sys.executable, "-m", "vmkv.cli", "serve", *map(str, names), *its, *lengths]

    groups = [folders] if server == SHARED else [[each] for each in folders]
    with contextlib.ExitStack() as stack:
        urls: list[str] = []
        for names in groups:
            port = free_port()
            log = options.logs / f"{server.replace(', ', '-').replace(' ', '-')}-{port}.log"
            running_one = running(server, command(names, port), environment, log, port)
            urls += [stack.enter_context(running_one)] * len(names)
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
    server: str, num_models: int, folders: Sequence[Path], options: argparse.Namespace
) -> Iterator[Row]:
    """All rates on one server of so many models."""
    case, names = case_of(options), folders[:num_models]
    with serving(server, names, case.share_tokens, options) as urls:
        warm_up(case, urls, names)
        for rate in case.rates_per_s:
            timings = apply(case, urls, names, case.arrivals(rate, num_models))
            yield row_of(server, num_models, rate, timings)


def hot_rows(
    num_models: int, folders: Sequence[Path], options: argparse.Namespace
) -> Iterator[Row]:
    """The lowest rate for one model, beside loaded models that nobody asks, and alone; in turns."""
    case, names = case_of(options), folders[:num_models]
    rate = min(case.rates_per_s)
    one = replace(case, num_phases=1)
    with (
        serving(SHARED, names, case.share_tokens, options) as shared,
        serving(FIXED, names[:1], case.share_tokens, options) as alone,
    ):
        warm_up(case, shared, names)
        warm_up(case, alone, names[:1])
        for _ in range(NUM_ALTERNATIONS):
            for server, urls in ((HOT, shared), (ALONE, alone)):
                timings = apply(case, urls[:1], names[:1], one.arrivals(rate, 1))
                yield row_of(server, num_models, rate, timings)


def case_of(options: argparse.Namespace) -> Case:
    """The sizes that were asked for."""
    case = SMALL if options.smoke else FULL
    return replace(case, rates_per_s=options.rates) if options.rates else case


def warm_up(case: Case, urls: Sequence[str], names: Sequence[Path]) -> None:
    """Have every model answer a request."""
    source = random.Random(WARM_UP)
    prompt = source.choices(range(5, case.vocabulary), k=case.prompt_tokens[0])
    apply(case, urls, names, [(at, Arrival(0.0, prompt, 4)) for at in range(len(names))])


def row_of(server: str, num_models: int, rate_per_s: float, timings: Sequence[Timing]) -> Row:
    """Latencies of a load's clients."""
    good = [each for each in timings if not each.error and each.first_s is not None]
    for error in sorted({each.error for each in timings if each.error})[:3]:
        print(f"{server}, {rate_per_s}/s: {error}", file=sys.stderr)
    ttft = [each.first_s - each.due_s for each in good if each.first_s is not None]
    tpot = [
        (each.last_s - each.first_s) / (each.num_tokens - 1)
        for each in good
        if each.num_tokens > 1 and each.first_s is not None and each.last_s is not None
    ]
    row: Row = {"server": server, "models": num_models, "rate_per_s": rate_per_s}
    row |= {"requests": len(timings), "failed": len(timings) - len(good)}
    for name, values in (("ttft", ttft), ("tpot", tpot)):
        for share in (0.5, 0.99):
            row[f"{name}_p{round(100 * share)}_ms"] = milliseconds(values, share)
    is_slow = (row["ttft_p99_ms"] or 1e9) > TTFT_MS or (row["tpot_p99_ms"] or 1e9) > TPOT_MS
    row["is_served"] = not row["failed"] and not is_slow
    print_rows([row])
    return row


def figures_of(rows: Sequence[Row]) -> list[Figure]:
    """The highest rate served against each rival, and first tokens at the rate that it serves."""
    figures = []
    for models in sorted({row["models"] for row in rows}):
        mine = [row for row in rows if row["models"] == models]
        its = {(row["server"], row["rate_per_s"]): row for row in mine}

        def highest(server: str, its: dict[tuple[str, float], Row] = its) -> float:
            served = [rate for (name, rate), row in its.items() if name == server]
            return max([each for each in served if its[server, each]["is_served"]], default=0.0)

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
        if not any(row["server"] == SHARED for row in mine):
            continue
        best = highest(SHARED)
        what = f"{models} models: highest rate served within {TTFT_MS / 1e3:g} s and {TPOT_MS:g} ms"
        figures.append(Figure(f"many_{models}_rate", what, best, "requests/s"))
        for rival, slug in ((VLLM, "vllm"), (FIXED, "fixed")):
            theirs = highest(rival)
            if not theirs:
                continue
            bound = on_gpu(1.5) if rival == VLLM else None
            said = f"{rival}: {theirs:g}/s"
            name, what = f"many_{models}_rate_{slug}", f"{models} models: that rate, of {rival}'s"
            figures.append(Figure(name, what, best / theirs, "×", at_least=bound, rival=said))
            ours, other = (its[each, theirs]["ttft_p99_ms"] for each in (SHARED, rival))
            what = f"{models} models: TTFT at p99, at the highest rate of {rival}"
            bound, said = (on_gpu(0.8) if rival == VLLM else None), f"{other:.4g} ms"
            name = f"many_{models}_ttft_{slug}"
            figures.append(Figure(name, what, ours / other, "×", at_most=bound, rival=said))
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write."""
    bench = Bench("many", __doc__, needs_gpu=True)
    bench.option("--models", nargs="+", type=int, default=[2, 3], help="by default 2 and 3")
    servers = {"hot": HOT, "shared": SHARED, "fixed": FIXED, "vllm": VLLM}
    bench.option("--rates", nargs="+", type=float, help="arrivals a second; by default five")
    bench.option("--servers", nargs="+", choices=servers, default=list(servers))
    bench.option("--vllm-path", help="PYTHONPATH of vLLM, where it is not installed")
    bench.option("--logs", type=Path, help="a folder for what servers say")
    options = bench.parse(argv)
    smoke = options.smoke
    case = case_of(options)
    wanted: Iterable[int] = options.models[:1] if smoke else options.models
    constants = {
        "expected_live_tokens": case.expected_live_tokens,
        "share_tokens": case.share_tokens,
        "token_bytes": token_bytes_of(llama_config(smoke=smoke)),
    }
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as made:
        options.logs = options.logs or Path(made)
        folders = [Path(made) / f"model-{at}" for at in range(max(wanted))]
        save_model(folders[0], smoke=smoke)
        for each in folders[1:]:
            each.symlink_to(folders[0])  # The same weights under another name.
        for num_models in wanted:
            for name in options.servers:
                server = servers[name]
                if smoke and server not in (SHARED, HOT):  # A start takes seconds.
                    continue
                if server == VLLM and not has_vllm(options.vllm_path):
                    print("vLLM cannot be imported here")
                    continue
                its = num_models, folders, options
                measured = hot_rows(*its) if server == HOT else rows_of(server, *its)
                for row in measured:
                    rows.append(row)
                    bench.finish(rows, figures_of(rows), constants)
    return bench.finish(rows, figures_of(rows), constants)


if __name__ == "__main__":
    sys.exit(main())
