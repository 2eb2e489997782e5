"""What does a client of the server feel while others come and go, next to vLLM's server?

Question. Requests arrive by a Poisson process and are answered in streams. How long does a client
wait for its first token, and between tokens, at 4, 12 and 24 arrivals a second, with 512 at once,
and with a prefix that all prompts have? How much of it is the engine, and how much HTTP?

Prediction. A chat's prompt has 700 tokens on average and costs the device 23 us each, 16 ms; its
answer has 190, and a decode step of 30 sequences takes 5.5 ms. A request comes in the middle of a
step, and the next one is already planned: 3 + 6 ms, and its own step of 22 ms: a first token after
31 ms, at 4/s as at 12/s. At 24/s prompts are 0.4 s of every second, so that half of the arrivals
meet a step with another prompt in it: 40 ms, and 110 ms for the unlucky ones (p99), behind two long
prompts. The other 0.6 s are decode steps: TPOT 5.5 ms at 4/s, 6.7 at 12/s, 8.5 at 24/s; p99 one and
a half times that. HTTP costs an event 70 us of Python, 4,000 of them a second at 24/s, on the lock
that the engine wants too: 2 ms of TPOT, 5 ms of the first token. 512 at once: 361k prompt tokens
are 8.3 s of the device, and 256 sequences decode in 16 ms: 6,000 tokens/s, first tokens after 5 s
in the median. A prefix of 2,048 is mapped, 64 tokens are computed: a step of 7 ms, a first token
after 15. (Written when the next step was planned
as soon as one ran, on the lock of the HTTP side. Planned late, it saves a first token some 6 ms.)

Method. Llama-3-8B's shape, random weights, bfloat16, saved with `save_pretrained` beside a
tokenizer of as many entries, all of them text; greedy, no end of sequence. The servers run one
after the other on the same machine, as subprocesses, with the options that both have: 256
sequences, 16,384 tokens, prefix cache on. Four processes send what `live_load.py` describes:
prompts as token ids, log-normal (chat: median 512, 16 to 4,096; answers median 150, 8 to 512), the
same for both servers, those of one load or round never those of another. Times are counted from
when a request was due. TTFT is the time to the first event with text, TPOT that between the first
and the last over the tokens between; a gap is the longest time between two events of a request.
`engine`: the same arrivals into `Engine.add` between two steps, in this process, without HTTP; its
rows also say what its steps were like. `quarter`: the same with 24 GiB, of four times as many, for
512 at once, so that memory of ended requests must be evicted. `tiers`: the same server with 48 GiB
of host memory, and as much in files, below memory that holds all of it.

Rivals. vLLM 0.26.0's `vllm.entrypoints.openai.api_server` as it comes, where it can be imported
(`--vllm-path` names its folders).

Not measured. Clients that misbehave (bench_hostile), text prompts, sampling, stop texts, several
samples, priorities, TLS, other machines' networks.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness import HAS_GPU, VLLM_CONFIG, VLLM_ENVIRONMENT, Bench, Figure, Row, environment
from live_load import Load, Timing
from models import SHAPES, make_model, reset_memory

from vmkv import Engine, SamplingParams
from vmkv.serve.observer import Event, StepRecord

HERE = Path(__file__).resolve().parent
MODEL = "m"
MAX_NUM_SEQS = 256
MAX_TOKENS = 16384
CONSTANTS = {"max_num_seqs": MAX_NUM_SEQS, "max_tokens": MAX_TOKENS}
START_TIMEOUT_S = 450.0
END_TIMEOUT_S = 60.0
LOAD_TIMEOUT_S = 300.0
VMKV, VLLM, ENGINE = "vmkv", "vLLM", "vmkv, engine alone"
QUARTER = "vmkv, engine alone, a quarter of the memory"
QUARTER_GIB = 24
TIERS, TIERS_GIB = "vmkv, host memory and files", 48
SERVERS = {"vmkv": VMKV, "vllm": VLLM, "engine": ENGINE, "quarter": QUARTER, "tiers": TIERS}


def chat(rate_per_s: float, seconds: float) -> Load:
    """The load of a chat."""
    name = f"chat {rate_per_s:g}/s"
    return Load(name, rate_per_s, max(1, round(rate_per_s * seconds)), 120_000)


def loads_of(seconds: float) -> dict[str, Load]:
    """All loads, by the names that `--loads` knows."""
    count = round(30 * min(20.0, seconds))
    fixed = {"prompt_tokens": (64, 64, 64), "new_tokens": (64, 64, 64), "spreads": (0, 0)}
    return {
        **{f"chat{rate}": chat(rate, seconds) for rate in (4, 12, 24)},
        "burst": Load("chat, 512 at once", 0, 512, 120_000),
        "prefix": Load("prefix of 2,048, 30/s", 30, count, 120_000, prefix_tokens=2048, **fixed),
    }


ENGINE_LOADS = {ENGINE: ("chat24",), QUARTER: ("burst",)}


def smoke_loads() -> dict[str, Load]:
    """Tiny versions of the loads."""
    small = Load("", 0, 6, 128, (4, 8, 24), (2, 4, 8), lead_s=0.2)
    return {
        "chat24": replace(small, name="chat 24/s", rate_per_s=24),
        "burst": replace(small, name="chat, at once"),
    }


# ---- a model in a folder ----------------------------------------------------------------------


def save_model(
    folder: Path, *, smoke: bool, shape: str = "llama-8b", max_tokens: int | None = None
) -> None:
    """A model with random weights, and a tokenizer, as `from_pretrained` reads them."""
    config = SHAPES[shape](smoke=smoke)
    config.max_position_embeddings = max_tokens or config.max_position_embeddings
    config.bos_token_id, config.eos_token_id = 0, 1
    make_tokenizer(config.vocab_size).save_pretrained(folder)
    model = make_model(config, torch.device("cuda" if HAS_GPU and not smoke else "cpu"))
    model.save_pretrained(folder)
    del model
    reset_memory()


def make_tokenizer(vocab_size: int) -> Any:
    """A tokenizer of so many entries, each of which is text by itself.

    One trained on text would take a minute, and have halves of characters among its tokens: an
    answer of random ones then comes when the other half does, and not token by token.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    consonants, vowels = "bcdfghjklmnpqrstvwxyz", "aeiou"
    vocabulary = ["<s>", "</s>", "Ġ", *consonants, *vowels]
    syllables = list(itertools.product(consonants, vowels))
    pairs = itertools.product(map("".join, syllables), repeat=2)
    longer = itertools.product(("".join(pair) for pair in pairs), map("".join, syllables))
    again = itertools.product(map("".join, syllables), repeat=2)
    merges = [*syllables, *again, *longer][: vocab_size - len(vocabulary)]
    vocabulary += ["".join(merge) for merge in merges]
    numbers = {entry: number for number, entry in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.BPE(vocab=numbers, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )


# ---- servers ----------------------------------------------------------------------------------


def free_port() -> int:
    """A free TCP port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def command_of(server: str, folder: Path, port: int, *, smoke: bool) -> list[str]:
    """The command that starts a server, with the options that both have."""
    tokens = str(512 if smoke else MAX_TOKENS)
    sequences = str(8 if smoke else MAX_NUM_SEQS)
    if server == VMKV:
        command = [sys.executable, "-m", "vmkv.cli", "serve", str(folder)]
        command += ["--max-model-tokens", tokens, "--log-level", "warning"]
        command += ["--memory", "0.0625"] if smoke else []
    else:
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(folder), "--max-model-len", tokens]
        command += ["--gpu-memory-utilization", "0.85"]
        command += ["--additional-config", json.dumps(VLLM_CONFIG)]
    command += ["--served-model-name", MODEL, "--max-num-seqs", sequences]
    return [*command, "--host", "127.0.0.1", "--port", str(port)]


def environment_of(server: str, path: str | None) -> dict[str, str]:
    """A server's environment; without a path vmkv is this checkout's, and vLLM is installed."""
    paths = os.environ.get("PYTHONPATH", "")
    if server == VMKV:
        return {**os.environ, "PYTHONPATH": os.pathsep.join([path or str(HERE.parent), paths])}
    return {**os.environ, **VLLM_ENVIRONMENT, "PYTHONPATH": path or paths}


def has_vllm(vllm_path: str | None) -> bool:
    """Whether vLLM can be imported where its server would be started."""
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    environment = environment_of(VLLM, vllm_path)
    return not subprocess.run([sys.executable, "-c", code], env=environment).returncode


@contextlib.contextmanager
def serving(
    server: str,
    folder: Path,
    logs: Path,
    path: str | None,
    *,
    smoke: bool,
    told: Sequence[str] = (),
) -> Iterator[Running]:
    """Run a server; its output goes to `logs`, and `told` are further options."""
    port = free_port()
    command = [*command_of(server, folder, port, smoke=smoke), *told]
    log = logs / f"{server}-{port}.log"
    with running(server, command, environment_of(server, path), log, port) as server_there:
        yield server_there


class Running(NamedTuple):
    """A server that is healthy."""

    url: str
    process: subprocess.Popen[bytes]


@contextlib.contextmanager
def running(
    server: str, command: Sequence[str], environment: dict[str, str], log: Path, port: int
) -> Iterator[Running]:
    """Run a server's command, and yield once it is healthy."""
    start = time.perf_counter()
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=log.parent,  # Python's -m looks here first, before a checkout that is named.
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # vLLM has processes of its own, which must end with it.
        )
        try:
            url = f"http://127.0.0.1:{port}"
            await_health(url, process, log)
            print(f"{server} is up after {time.perf_counter() - start:.0f} s", flush=True)
            yield Running(url, process)
        finally:
            process.terminate()
            try:
                process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                print(f"{server} does not end, and is killed")
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def await_health(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until a server is healthy.

    Raises:
        RuntimeError: It has ended, or takes too long.
    """
    end = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end and process.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
        except OSError:  # Not listening yet, or not healthy.
            time.sleep(0.2)
        else:
            return
    raise RuntimeError(f"the server is not up; it said:\n{log.read_text()[-4000:]}")


def apply(load: Load, url: str) -> list[Timing]:
    """Put a load on a server, from processes that do nothing else."""
    done = subprocess.run(
        [sys.executable, str(HERE / "live_load.py"), url, MODEL],
        input=json.dumps(asdict(load)),
        stdout=subprocess.PIPE,
        text=True,
        timeout=LOAD_TIMEOUT_S,
        check=True,
    )
    return [Timing(**each) for each in json.loads(done.stdout)]


# ---- the engine alone -------------------------------------------------------------------------


@dataclass
class Steps:
    """Observer that keeps the records of all steps."""

    records: list[StepRecord] = field(default_factory=list)

    def on(self, event: Event, cache: Any) -> None:
        """Keep the record of a step."""
        if isinstance(event, StepRecord):
            self.records.append(event)

    def row(self) -> Row:
        """Statistics of steps with and without prompts."""
        mixed = [each for each in self.records if each.num_prefill_tokens]
        decode = [each for each in self.records if not each.num_prefill_tokens]
        tokens = [each.num_prefill_tokens for each in mixed]
        row: Row = {
            "steps": len(self.records),
            "mixed_steps": len(mixed),
            "mixed_prompt_tokens_p50": percentile(tokens, 0.5),
            "mixed_prompt_tokens_p90": percentile(tokens, 0.9),
        }
        for name, steps in (("mixed", mixed), ("decode", decode)):
            parts = {
                "plan_map": [each.plan_s + each.map_s for each in steps],
                "submit": [each.submit_s for each in steps],
                "wait": [each.wait_s for each in steps],
            }
            for part, times_s in parts.items():
                row[f"{name}_{part}_p50_ms"] = milliseconds(times_s, 0.5)
                row[f"{name}_{part}_p99_ms"] = milliseconds(times_s, 0.99)
        return row


class Pauses:
    """The longest pause of this process by garbage collection."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._start_s = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        """Callback for `gc.callbacks`."""
        now_s = time.perf_counter()
        if phase == "start":
            self._start_s = now_s
        else:
            self.longest_s = max(self.longest_s, now_s - self._start_s)


def serve_alone(engine: Engine, load: Load) -> list[Timing]:
    """Serve a load without a server: its requests are added between the steps of an engine."""
    arrivals = load.arrivals()
    timings = [Timing(each.due_s) for each in arrivals]
    theirs: dict[Any, Timing] = {}
    start_s = time.perf_counter()

    def updated(handle: Any) -> None:
        timing, request = theirs[handle], handle.requests[0]
        if len(request.output_token_ids) > timing.num_tokens:
            timing.num_tokens = len(request.output_token_ids)
            timing.came(time.perf_counter() - start_s)
        if request.error is not None:
            timing.error = repr(request.error)[:200]

    engine.on_update = updated
    at = 0
    while at < len(arrivals) or engine.has_unfinished:
        now_s = time.perf_counter() - start_s
        while at < len(arrivals) and arrivals[at].due_s <= now_s:
            params = SamplingParams(
                temperature=0, max_tokens=arrivals[at].new_tokens, ignore_eos=True
            )
            handle = engine.add(arrivals[at].prompt, params)
            timings[at].sent_s, theirs[handle] = now_s, timings[at]
            at += 1
        # As `EngineLoop` does: a request that arrives during a step joins the next one.
        spare_s = engine.loop.spare_s if engine.has_unfinished else math.inf
        if not spare_s:
            engine.step()
        else:
            due_s = arrivals[at].due_s if at < len(arrivals) else math.inf
            time.sleep(max(0.0, min(due_s - now_s, spare_s)))
    return timings


def engine_rows(server: str, folder: Path, loads: Iterable[Load], *, smoke: bool) -> Iterator[Row]:
    """The engine that `vmkv serve` would make: its latencies and its steps."""
    from vmkv.cli.main import make_parser
    from vmkv.cli.serve import chosen
    from vmkv.hf.compat import load_model
    from vmkv.serve.options import EngineOptions

    command = command_of(VMKV, folder, 0, smoke=smoke)[3:]  # Without `python -m vmkv.cli`.
    if server == QUARTER and not smoke:
        command += ["--memory", str(QUARTER_GIB)]
    arguments = make_parser().parse_args(command)
    device = "cuda" if HAS_GPU and not smoke else "cpu"
    model, steps, pauses = load_model(str(folder), device=device, dtype=None), Steps(), Pauses()
    with Engine(model, observer=steps, **chosen(EngineOptions, arguments)) as engine:
        gc.collect()
        gc.freeze()
        gc.callbacks.append(pauses)
        serve_alone(engine, replace(next(iter(smoke_loads().values())), name="warm-up"))
        for load in loads:
            steps.records.clear()
            pauses.longest_s = 0.0
            timings = serve_alone(engine, load)
            collected = {"longest_collection_ms": 1e3 * pauses.longest_s}
            yield row_of(load, server, timings) | steps.row() | collected
        gc.callbacks.remove(pauses)


# ---- results ----------------------------------------------------------------------------------


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value that `share` of the values do not exceed; None for an empty list."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def milliseconds(times_s: Sequence[float], share: float) -> float | None:
    """Likewise, for seconds."""
    found = percentile(times_s, share)
    return None if found is None else 1e3 * found


def row_of(load: Load, server: str, timings: Sequence[Timing]) -> Row:
    """The latencies of a load's clients."""
    good = [each for each in timings if not each.error and each.first_s is not None]
    for error in sorted({each.error for each in timings if each.error})[:3]:
        print(f"{server}, {load.name}: {error}", file=sys.stderr)
    tokens = sum(each.num_tokens for each in good)
    seconds = max((each.last_s or 0.0 for each in good), default=0.0)
    several = [each for each in good if each.num_tokens > 1]
    series = {
        "ttft": [each.first_s - each.due_s for each in good if each.first_s is not None],
        "tpot": [(each.last_s - each.first_s) / (each.num_tokens - 1) for each in several],
        "gap": [each.gap_s for each in several],
        "late": [each.sent_s - each.due_s for each in timings],
    }
    return {
        "load": load.name,
        "server": server,
        "requests": len(timings),
        "failed": len(timings) - len(good),
        "seconds": seconds,
        "output_tokens": tokens,
        "output_tokens_per_s": tokens / seconds if seconds else None,
        **{
            f"{name}_p{round(100 * share)}_ms": milliseconds(values, share)
            for name, values in series.items()
            for share in (0.5, 0.99)
        },
        "events_per_token": sum(each.num_chunks for each in good) / tokens if tokens else None,
    }


def place_of(row: Row) -> tuple[Any, ...]:
    """What a row is of: its load, server and round."""
    return tuple(row.get(key) for key in ("load", "server", "round"))


def figures_of(rows: Sequence[Row]) -> list[Figure]:
    """The promised figures: of the best round, nothing is slower than vLLM in the same run."""
    by_place: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        by_place.setdefault((row["load"], row["server"]), []).append(row)

    def best(pick: Callable[..., Any], load: str, server: str, key: str) -> float | None:
        found = [row[key] for row in by_place.get((load, server), ()) if row[key] is not None]
        return pick(found, default=None)

    figures = []
    for load in (load for load, server in by_place if server == VMKV):
        slug = "".join(letter if letter.isalnum() else "_" for letter in load)
        for key in ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms"):
            got, bound = (best(min, load, server, key) for server in (VMKV, VLLM))
            if got is not None:
                name, share, _ = key.split("_")
                what = f"{load}: {name.upper()}, {share}"
                rival = "" if bound is None else f"vLLM {bound:.3g} ms"
                figures.append(Figure(f"live_{slug}_{key}", what, got, "ms", bound, rival=rival))
        got, bound = (best(max, load, server, "output_tokens_per_s") for server in (VMKV, VLLM))
        if got is not None:
            name, what = f"live_{slug}_tokens_per_s", f"{load}: output tokens"
            rival = "" if bound is None else f"vLLM {bound:,.0f} tokens/s"
            figures.append(Figure(name, what, got, "tokens/s", None, bound, rival))
        for key in ("ttft_p50_ms", "tpot_p50_ms"):
            got, without = (best(min, load, server, key) for server in (TIERS, VMKV))
            if got is not None and without:
                name, rival = f"live_{slug}_tiers_{key[:4]}", f"without {without:.3g} ms"
                what = f"{load}: {key[:4].upper()}, p50, with host memory and files over without"
                figures.append(Figure(name, what, got / without, "×", 1.02, rival=rival))
    failed = sum(row["failed"] for row in rows if row["server"] != VLLM)
    what = "requests that failed, of all loads"
    figures.append(Figure("live_failed", what, failed, "requests", at_most=0))
    for row in rows:
        if row["server"] == QUARTER:
            what = f"{row['load']}, with {QUARTER_GIB} GiB: planning and mapping of a step with "
            what, got = f"{what}prompt tokens, median", row["mixed_plan_map_p50_ms"]
            figures.append(Figure("live_quarter_plan_map_ms", what, got, "ms", 2.0))
    return figures


# ---- main -------------------------------------------------------------------------------------


def server_rows(
    server: str, folder: Path, loads: dict[str, Load], options: argparse.Namespace
) -> Iterator[Row]:
    """All loads on one server."""
    path = options.vllm_path if server == VLLM else None
    kind = VMKV if server == TIERS else server
    below_gib = 0.0625 if options.smoke else TIERS_GIB
    with contextlib.ExitStack() as stack:
        its: dict[str, Any] = {"smoke": options.smoke}
        if server == TIERS:
            files = stack.enter_context(tempfile.TemporaryDirectory(dir=options.logs))
            its["told"] = ["--swap", str(below_gib), "--disk", files, "--disk-size", str(below_gib)]
        url, _ = stack.enter_context(serving(kind, folder, options.logs, path, **its))
        # Warm-up, with prompts of no load: vLLM compiles kernels for each size that it meets.
        first = next(iter(loads.values()))
        for rate_per_s, num_requests in ((0, 8), (12, 8 if options.smoke else 60)):
            its = {"rate_per_s": rate_per_s, "num_requests": num_requests}
            apply(replace(first, name="warm-up", **its), url)
        for number, load in itertools.product(range(options.rounds), loads.values()):
            timings = apply(replace(load, round=number), url)
            yield row_of(load, server, timings) | ({"round": number + 1} if number else {})


def rows_of(folder: Path, loads: dict[str, Load], options: argparse.Namespace) -> Iterator[Row]:
    """All loads on all servers that were asked for."""
    for name in options.servers:
        server = SERVERS[name]
        if server in ENGINE_LOADS:
            wanted = [loads[each] for each in ENGINE_LOADS[server] if each in loads]
            if wanted:
                yield from engine_rows(server, folder, wanted, smoke=options.smoke)
        elif server in (VMKV, TIERS) or (not options.smoke and has_vllm(options.vllm_path)):
            yield from server_rows(server, folder, loads, options)
        else:
            print("vLLM cannot be imported here: vmkv is measured alone")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write."""
    bench = Bench("live", __doc__, needs_gpu=True)
    names, add = list(loads_of(1.0)), bench.option
    add("--loads", nargs="+", choices=names, default=names, help="by default all")
    add("--servers", nargs="+", choices=SERVERS, default=list(SERVERS), help="by default all")
    add("--seconds", type=float, default=30.0, help="of each chat load")
    add("--rounds", type=int, default=1, help="of each load; the best of each figure counts")
    add("--append", action="store_true", help="to what the file of --json holds already")
    add("--folder", type=Path, help="keeps the model; by default a temporary one")
    said = "of the model; the result of another than the first is called after it"
    add("--shape", choices=SHAPES, default="llama-8b", help=said)
    add("--vllm-path", help="PYTHONPATH of vLLM, where it is not installed")
    add("--logs", type=Path, help="a folder for what servers say")
    options = bench.parse(argv)
    if options.shape != "llama-8b":
        bench.name = f"live_{options.shape.replace('-', '_')}"
    loads = smoke_loads() if options.smoke else loads_of(options.seconds)
    loads = {name: load for name, load in loads.items() if name in options.loads}
    places: dict[tuple[Any, ...], Row] = {}
    if options.append:
        if options.json is None:
            bench.error("--append needs --json")
        earlier = json.loads(options.json.read_text())
        if earlier["environment"] != environment():
            bench.error("--append: that was measured elsewhere, or of something else")
        places = {place_of(row): row for row in earlier["rows"]}
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary) / "model"
        options.logs = options.logs or Path(temporary)
        options.logs.mkdir(parents=True, exist_ok=True)
        if not (folder / "config.json").exists():
            save_model(folder, smoke=options.smoke, shape=options.shape)
        for row in rows_of(folder, loads, options):
            places[place_of(row)] = row
            rows = list(places.values())  # Written at once: an interrupted run keeps what it has.
            bench.finish(rows, figures_of(rows), CONSTANTS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
