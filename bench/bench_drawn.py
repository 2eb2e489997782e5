"""Is a chat whose tokens are drawn as fast as a greedy one, and how long does a start take?

Question. `vmkv serve` answers a chat of 24 requests/s, with temperature 0.8 and top-p 0.95, or
greedily: how much longer is the time per token? And how long does a start of the server take until
`/health` is 200, the first on a machine and the second?

Prediction. One launch draws from 32 rows of 128,256 logits in some 15 us of a step of 8 ms, and the
host does 100 us more of work in a step, most of which it hides: 1.02 times. A second start compiles
and times nothing: 25 s, most of it weights, tracing and captures.

Method. Llama-3-8B's shape with random weights, saved in a folder. The same arrivals, greedy and
drawn in turn, after one of each for warm-up; the figure is the ratio of the medians of the medians.

Rivals. The greedy chat.

Not measured. FlashInfer's sampler in vLLM, which cannot be brought beside vLLM without a network.
"""

from __future__ import annotations

import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench_live import apply, chat, row_of, save_model, serving, smoke_loads
from harness import Bench, Figure, Row, in_turns, on_gpu

SECOND_START_S, RATIO = 25.0, 1.08


def figures_of(rows: Sequence[Row]) -> list[Figure]:
    """Starts, and medians of drawn chats relative to greedy ones."""
    figures = []
    for row in rows:
        if row["what"] == "start":
            at_most = on_gpu(SECOND_START_S) if row["number"] == 2 else None
            name, said = f"start_{row['number']}_s", f"start number {row['number']} until healthy"
            figures.append(Figure(name, said, row["seconds"], "s", at_most))
    for key in ("ttft_p50_ms", "tpot_p50_ms", "tpot_p99_ms"):
        its: dict[str, list[float]] = {"greedy": [], "drawn": []}
        for row in rows:
            if row["what"] in its and row[key] is not None:
                its[row["what"]].append(row[key])
        if all(its.values()):
            greedy, drawn = (statistics.median(each) for each in its.values())
            at_most = on_gpu(RATIO) if key == "tpot_p50_ms" else None
            what = re.sub("_", " ", key.removesuffix("_ms"))
            said, rival = f"{what} of a drawn chat, of a greedy one's", f"{greedy:.4g} ms"
            figures.append(Figure(f"drawn_{key}", said, drawn / greedy, "×", at_most, rival=rival))
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write."""
    bench = Bench("drawn", __doc__, needs_gpu=True)
    bench.option("--rounds", type=int, default=3, help="of each, after one for warm-up")
    bench.option("--seconds", type=float, default=15.0, help="of a chat")
    bench.option("--folder", type=Path, help="keeps the model; by default a temporary one")
    options = bench.parse(argv)
    load = smoke_loads()["chat24"] if options.smoke else chat(24, options.seconds)
    loads = {"greedy": load, "drawn": replace(load, temperature=0.8, top_p=0.95)}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder, logs = options.folder or Path(temporary, "model"), Path(temporary)
        if not (folder / "config.json").exists():
            save_model(folder, smoke=options.smoke)
        for number in (1, 2):
            start_s = time.perf_counter()
            told = ("--log-level", "info", "--no-log-requests")
            with serving("vmkv", folder, logs, None, smoke=options.smoke, told=told) as url:
                rows.append(
                    {"what": "start", "number": number, "seconds": time.perf_counter() - start_s}
                )
                rounds = 0 if number == 1 else 1 if options.smoke else options.rounds
                for name, at in in_turns(list(loads), rounds, warmup=min(1, rounds)):
                    row = row_of(loads[name], "vmkv", apply(loads[name], url))
                    if at >= 0:
                        rows.append({"what": name, **row})
            for log in logs.glob("vmkv-*.log"):  # Where the time of the start went.
                print(log.read_text()[:2500], flush=True)
                log.unlink()
            status = bench.finish(rows, figures_of(rows))
    return status


if __name__ == "__main__":
    sys.exit(main())
