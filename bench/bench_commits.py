"""Is this checkout as fast as an older one?

Question. For the workloads of `bench_serve` and the chat of `bench_live`: how long does this
checkout take, of what an older checkout takes on the same GPU in the same minutes?

Prediction. The same, within 3 % or the spread of the older one's own rounds, unless a commit
between them says that it makes something faster.

Method. An engine of each checkout lives in a process of its own, with half of the memory, started
one after the other, since a start chooses the fastest tiles. The two serve each workload in turn,
the older one first, as often as `--rounds` says. Then a server of
each, and the same chat arrives at them in turn. Both engines are warmed up; the one that is not
asked waits on a condition. Ratios are those of the medians; the spread is the older one's greatest
less its least, of its median. The older checkout needs its native module, built in place.

Rivals. The older checkout.

Not measured. Engines that have the GPU for themselves.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness import ROOT, Bench, Figure, Row, seconds_of
from models import llama_config, make_model

CHAT_S = 15.0
#: Relative difference that counts as equal, unless the older checkout's rounds differ by more.
EQUAL = 0.03
CHAT_KEYS = ("ttft_p50_ms", "tpot_p50_ms", "tpot_p99_ms")
# Engines run in checkouts whose benches differ, so they import no bench.

# ---- engines ----------------------------------------------------------------------------------


def serve_lines(options: argparse.Namespace) -> int:
    """In a process of a checkout: serve the requests of each line of stdin, and print seconds."""
    import vmkv
    from vmkv import Engine, SamplingParams

    engine = Engine(
        make_model(llama_config(smoke=options.smoke), options.device),
        max_num_seqs=256,
        max_num_batched_tokens=16384,
        max_tokens=256 if options.smoke else 16384,
        budget_bytes=int(options.memory * 2**30),
        prefix_caching=False,
    )
    print(json.dumps(vmkv.__file__), flush=True)
    for line in sys.stdin:
        prompts, new_tokens = json.loads(line)
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        serve = functools.partial(engine.generate, prompts, params)
        print(json.dumps(seconds_of(serve)), flush=True)
    engine.close()
    return 0


@contextlib.contextmanager
def engine_of(root: Path, options: argparse.Namespace) -> Iterator[subprocess.Popen[str]]:
    """A process with the engine of a checkout."""
    command = [sys.executable, __file__, "--worker", "--memory", str(options.memory)]
    paths = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        command + ["--smoke"] * options.smoke,
        env={**os.environ, "PYTHONPATH": paths},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:  # Its stdin is closed at the end, so it ends.
        yield process


def answer(process: subprocess.Popen[str]) -> Any:
    """The next line that is JSON; libraries print others."""
    assert process.stdout is not None
    for line in process.stdout:
        with contextlib.suppress(ValueError):
            return json.loads(line)
    raise RuntimeError(f"an engine has ended with status {process.wait()}")


def engine_rows(roots: dict[str, Path], options: argparse.Namespace) -> Iterator[Row]:
    """Each workload, by each engine in turn."""
    from bench_serve import SMOKE_CASES, WORKLOADS, is_wanted

    vocab_size = llama_config(smoke=options.smoke).vocab_size
    with contextlib.ExitStack() as stack:
        engines = {}
        for root in {*roots.values()}:  # One after the other: a start times tiles of products.
            engines[root] = engine = stack.enter_context(engine_of(root, options))
            assert root in Path(answer(engine)).parents, f"another vmkv serves than that of {root}"
        workloads = SMOKE_CASES[0].workloads if options.smoke else WORKLOADS
        for workload in (each for each in workloads if is_wanted(each.name, options.only)):
            line = json.dumps([workload.prompts(vocab_size), workload.new_tokens])
            for number in range(-1, options.rounds):  # The first may have to compile.
                for name, root in roots.items():
                    print(line, file=engines[root].stdin, flush=True)
                    seconds = answer(engines[root])
                    if number >= 0:
                        yield {"what": workload.name, "checkout": name, "seconds": seconds}


# ---- servers ----------------------------------------------------------------------------------


def chat_rows(roots: dict[str, Path], options: argparse.Namespace) -> Iterator[Row]:
    """Each chat, to each server in turn."""
    from bench_live import apply, chat, row_of, save_model, serving

    told = ["--no-prefix-caching", "--memory", str(options.memory)]
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        folder, logs = Path(temporary, "model"), Path(temporary)
        save_model(folder, smoke=False)
        urls = {}
        for name, root in roots.items():
            server = serving("vmkv", folder, logs, str(root), smoke=False, told=told)
            urls[name] = stack.enter_context(server).url
        for load in (chat(rate, CHAT_S) for rate in (12, 24)):
            for number in range(-1, options.rounds):
                for name, url in urls.items():
                    row = row_of(load, name, apply(load, url))
                    if number >= 0:
                        felt = {key: row[key] for key in (*CHAT_KEYS, "failed")}
                        yield {"what": load.name, "checkout": name, **felt}


def figures_of(rows: Sequence[Row]) -> list[Figure]:
    """Medians of this checkout relative to those of the older one."""
    taken: dict[tuple[str, str], dict[str, list[float]]] = {}
    for row in rows:
        for key in ("seconds", *CHAT_KEYS):
            if row.get(key):
                of_both = taken.setdefault((row["what"], key), {"older": [], "this": []})
                of_both[row["checkout"]].append(row[key])
    figures = []
    for (what, key), of_both in taken.items():
        older, this = (statistics.median(each) for each in of_both.values())
        spread = (max(of_both["older"]) - min(of_both["older"])) / older
        name = "commits_" + re.sub(r"\W+", "_", f"{what} {key}")
        said, rival = f"{what}, {key}, of the older checkout's", f"{older:.4g}"
        bound = 1 + max(EQUAL, spread)
        figures.append(Figure(name, said, this / older, "×", bound, rival=rival))
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write."""
    bench = Bench("commits", __doc__, needs_gpu=True)
    said = "a checkout, in a folder called after its commit; by default this one"
    bench.option("--older", type=Path, default=ROOT, help=said)
    bench.option("--rounds", type=int, default=3, help="of each, after one for warm-up")
    bench.option("--only", nargs="+", metavar="NAME", help="W0 … W4, chat; by default all")
    bench.option("--memory", type=float, default=40, help="GiB for keys and values of each engine")
    bench.option("--worker", action="store_true", help="serve lines of stdin: for its own use")
    options = bench.parse(argv)
    if options.smoke:
        options.memory, options.rounds = 0.0625, 1
    if options.worker:
        return serve_lines(options)
    roots, rows = {"older": options.older.resolve(), "this": ROOT}, []
    has_chat = not options.smoke and (not options.only or "chat" in options.only)
    for measure in (engine_rows, chat_rows) if has_chat else (engine_rows,):
        for row in measure(roots, options):
            rows.append(row)
            print(json.dumps(row), flush=True)
        bench.finish(rows, figures_of(rows), {"older": options.older.resolve().name})
    return 0


if __name__ == "__main__":
    sys.exit(main())
