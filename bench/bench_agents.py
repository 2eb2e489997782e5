"""Do agents find their conversations again, when these exceed the device's memory?

Question. Sessions ask, let a tool run, and ask again with all that was said. Together their
contexts have 2.8 times the tokens that the device holds. How many tokens of a later turn's prompt
are found, how long does its first token take, and how long does everything take, with host memory
below the device's, with files below that, and without either? What do the tiers cost where all
sessions fit?

Prediction. 24 GiB hold 196,000 tokens of Llama-3-8B's shape, which 14 sessions of 14,000 fill; the
other 26 lie in 48 GiB of host memory. A turn's prompt has 87 % of its tokens from the turns before;
of these nearly all are found. They are 1.7 GiB, 33 ms on the bus at 53 GB/s, beside the other
sessions' steps; the 1,600 new tokens take 37 ms. First tokens come after 0.15 s in the median, and
after some 0.6 s where six sessions ask at once. Without tiers 15 % are found, each turn computes
its 14,000 tokens in 0.32 s, and as 40 sessions ask every 4 s these queue: 7 s. The tool's times
alone are 5 x 4 s and the answers 6 x 1.2 s; the session that thinks longest takes 60 s. Of 60
sessions some 16 lie in files: 1.7 GiB at 2 GB/s are 0.9 s, against 0.32 s computed, and the disk
decides whether files pay.

Method. Llama-3-8B's shape, random weights, bfloat16, with positions for 32,768 tokens, and a
tokenizer of as many entries, all of them text; greedy, no end of sequence. The servers run one
after the other on the same machine with 256 sequences, 32,768 tokens and the same memory for keys
and values on the device. Four processes run the sessions of `agent_load.py`: 2,000 tokens that all
begin with, 4,200 to 9,800 of their own, six turns, 450 to 2,550 tokens of a tool's result, answers
of 150, an exponential think time of 4 s. Found tokens are `cached_tokens` of the usage, of turns
after the first. TTFT and TPOT are of these turns as well.

With `--killed` a server with files is killed by SIGKILL after the third turns, and started again
over the same folder; the fourth turns are asked of it. What files held is the disk space that they
take.

Rivals. vLLM 0.26.0 as it comes, and with `--kv-offloading-size`, where it can be imported
(`--vllm-path` names its folders).

Not measured. Tenants that compete (tests/cache/test_host_blocks.py and test_eviction.py have
them); several GPUs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from agent_load import Agents, Turn, least_s
from bench_live import (
    HERE,
    MODEL,
    VLLM,
    VMKV,
    has_vllm,
    milliseconds,
    percentile,
    save_model,
    serving,
)
from harness import Bench, Figure, Row
from live_load import Timing
from models import SHAPES
from transformers import AutoConfig

from vmkv.units import GiB

MAX_TOKENS = 32768
#: Of each server the kind, and the tiers below the device.
SERVERS = {
    "vmkv": (VMKV, "host"),
    "vmkv-disk": (VMKV, "disk"),
    "vmkv-alone": (VMKV, "none"),
    "vllm": (VLLM, "host"),
    "vllm-alone": (VLLM, "none"),
}
LOADS = {
    "agents": Agents("agents", 40),
    "fits": Agents("agents that fit", 12),
    "files": Agents("more agents", 60),
}
#: A turn whose prompt is all there but for the tool's result, on a device without other work.
TURN_S = 1.3
#: A server with files is killed after so many turns of all sessions, and started again.
KILLED, TURNS_BEFORE = "agents, server killed", 3
SMOKE = Agents(
    "agents",
    3,
    2,
    128,
    shared_tokens=20,
    start_tokens=40,
    tool_tokens=20,
    new_tokens=4,
    think_s=0.2,
)


def options_of(name: str, options: argparse.Namespace, disk: Path) -> list[str]:
    """The options of a server: its memory on the device, and below."""
    kind, tiers = SERVERS[name]
    device_gib, host_gib = (
        (0.0625, 0.0625) if options.smoke else (options.device_gib, options.host_gib)
    )
    if kind == VLLM:
        told = ["--max-model-len", str(MAX_TOKENS), "--enable-prompt-tokens-details"]
        told += ["--kv-cache-memory-bytes", str(int(device_gib * GiB))]
        return told + (["--kv-offloading-size", str(host_gib)] if tiers == "host" else [])
    told = ["--memory", str(device_gib)]
    told += [] if options.smoke else ["--max-model-tokens", str(MAX_TOKENS)]
    told += ["--swap", str(host_gib)] if tiers != "none" else []
    return told + (["--disk", str(disk), "--disk-size", str(options.disk_gib)] * (tiers == "disk"))


def row_of(load: Agents, name: str, turns: Sequence[Turn]) -> Row:
    """What the turns after the first were like."""
    for error in sorted({each.timing.error for each in turns if each.timing.error})[:3]:
        print(f"{name}, {load.name}: {error}", file=sys.stderr)
    good = [each for each in turns if not each.timing.error and each.timing.first_s is not None]
    later = [each for each in good if each.number]
    prompts = sum(each.num_prompt_tokens for each in later)
    found = sum(each.timing.num_cached_tokens for each in later)
    ttft_s = [(each.timing.first_s or 0.0) - each.timing.due_s for each in later]
    tpot_s = [
        ((each.timing.last_s or 0.0) - (each.timing.first_s or 0.0)) / (each.timing.num_tokens - 1)
        for each in later
        if each.timing.num_tokens > 1
    ]
    return {
        "load": load.name,
        "server": name,
        "turns": len(turns),
        "missing": load.num_sessions * (load.num_turns - load.first_turn) - len(good),
        "found_share": found / prompts if prompts else None,
        "prompt_tokens_p50": percentile([each.num_prompt_tokens for each in later], 0.5),
        "ttft_p50_ms": milliseconds(ttft_s, 0.5),
        "ttft_p90_ms": milliseconds(ttft_s, 0.9),
        "ttft_p99_ms": milliseconds(ttft_s, 0.99),
        "tpot_p50_ms": milliseconds(tpot_s, 0.5),
        "seconds": max((each.timing.last_s or 0.0 for each in good), default=None),
        "least_s": least_s(load, TURN_S),
    }


def figures_of(rows: Sequence[Row]) -> list[Figure]:
    """The promised figures."""
    by_place = {(row["load"], row["server"]): row for row in rows}
    agents = LOADS["agents"].name
    bounds = {
        "ttft_p50_ms": ("TTFT of later turns, p50", "ms", 250.0),
        "ttft_p99_ms": ("TTFT of later turns, p99", "ms", 1000.0),
    }
    figures = []
    ours, theirs = by_place.get((agents, "vmkv")), by_place.get((agents, "vllm"))
    if ours is not None:
        rival = "" if theirs is None else f"vLLM {theirs['found_share']:.3f}"
        missed = None if ours["found_share"] is None else 1 - ours["found_share"]
        what = "agents beyond the device: tokens of later prompts that are not found"
        figures.append(Figure("agents_missed", what, missed, "%", 0.15, rival=rival))
        for key, (what, unit, bound) in bounds.items():
            rival = "" if theirs is None else f"vLLM {theirs[key]:,.0f} {unit}"
            what = f"agents beyond the device: {what}"
            figures.append(Figure(f"agents_{key}", what, ours[key], unit, bound, rival=rival))
        over = ours["seconds"] and ours["seconds"] / ours["least_s"]
        rival = "" if theirs is None else f"vLLM {theirs['seconds'] / theirs['least_s']:.3f} ×"
        what = f"agents beyond the device: all of it, over think times and turns of {TURN_S} s"
        figures.append(Figure("agents_seconds", what, over, "×", 1.15, rival=rival))
    if killed := by_place.get((KILLED, "vmkv-disk")):
        missed = None if killed["found_of_held"] is None else 1 - killed["found_of_held"]
        what = "agents, server killed: tokens in files that the next turns do not find"
        figures.append(Figure("agents_killed_missed", what, missed, "%", 0.2))
    fits = LOADS["fits"].name
    if (with_tiers := by_place.get((fits, "vmkv"))) and (
        alone := by_place.get((fits, "vmkv-alone"))
    ):
        for key in ("ttft_p50_ms", "tpot_p50_ms"):
            what = f"agents that fit: {key[:4].upper()} with host memory over that without"
            got = with_tiers[key] / alone[key] if alone[key] else None
            figures.append(Figure(f"agents_fit_{key[:4]}", what, got, "×", 1.02))
    return figures


def rows_of(folder: Path, options: argparse.Namespace) -> Iterator[Row]:
    """All loads on all servers that were asked for."""
    if options.killed or options.smoke:
        yield killed_row(folder, options)
    for name in options.servers[: 1 if options.smoke else None]:
        kind, _ = SERVERS[name]
        if kind == VLLM and (options.smoke or not has_vllm(options.vllm_path)):
            print("vLLM cannot be imported here: vmkv is measured alone")
            continue
        path = options.vllm_path if kind == VLLM else None
        for each in options.loads[:1] if options.smoke else options.loads:
            load = SMOKE if options.smoke else LOADS[each]
            with tempfile.TemporaryDirectory(dir=options.disk) as disk:
                told = options_of(name, options, Path(disk))
                its = {"smoke": options.smoke, "told": told}
                with serving(kind, folder, options.logs, path, **its) as (url, _):
                    yield row_of(load, name, apply(load, url))


def killed_row(folder: Path, options: argparse.Namespace) -> Row:
    """The first turns that a server with files is asked after it was killed."""
    load = replace(SMOKE if options.smoke else LOADS["agents"], name=KILLED)
    before_turns = 1 if options.smoke else TURNS_BEFORE
    before = replace(load, num_turns=before_turns)
    after = replace(load, first_turn=before_turns, num_turns=before_turns + 1)
    with tempfile.TemporaryDirectory(dir=options.disk) as disk:
        its = {"smoke": options.smoke, "told": options_of("vmkv-disk", options, Path(disk))}
        with serving(VMKV, folder, options.logs, None, **its) as (url, process):
            asked = apply(before, url)
            process.kill()
            process.wait()
        held_bytes = sum(512 * each.stat().st_blocks for each in Path(disk).glob("slab-*"))
        start_s = time.perf_counter()
        with serving(VMKV, folder, options.logs, None, **its) as (url, _):
            started_s = time.perf_counter() - start_s
            turns = apply(after, url)
    row = row_of(after, "vmkv-disk", turns)
    shared_tokens = load.shared_tokens  # All sessions find these in the same blocks.
    found_tokens = shared_tokens + sum(
        max(0, each.timing.num_cached_tokens - shared_tokens) for each in turns
    )
    held_tokens = held_bytes // token_bytes(folder)
    row |= {"start_s": started_s, "held_bytes": held_bytes, "asked_turns": len(asked)}
    return row | {"found_of_held": found_tokens / held_tokens if held_tokens else None}


def token_bytes(folder: Path) -> int:
    """Bytes of a token's keys and values, which every layer of the model in `folder` keeps."""
    config = AutoConfig.from_pretrained(folder)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    num_values = 2 * config.num_hidden_layers * config.num_key_value_heads * size
    return num_values * config.dtype.itemsize


def apply(load: Agents, url: str) -> list[Turn]:
    """Put a load on a server, from processes that do nothing else."""
    done = subprocess.run(
        [sys.executable, str(HERE / "agent_load.py"), url, MODEL],
        input=json.dumps(asdict(load)),
        stdout=subprocess.PIPE,
        text=True,
        timeout=load.limit_s + 120,
        check=True,
    )
    found = json.loads(done.stdout)
    return [Turn(**{**each, "timing": Timing(**each["timing"])}) for each in found]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write."""
    bench = Bench("agents", __doc__, needs_gpu=True)
    add = bench.option
    add("--loads", nargs="+", choices=LOADS, default=["agents", "fits"], help="by default two")
    add("--servers", nargs="*", choices=SERVERS, default=["vmkv", "vmkv-alone", "vllm"])
    add("--killed", action="store_true", help="also kill a server with files, and start it again")
    add("--device-gib", type=float, default=24.0, help="GiB of the device for keys and values")
    add("--host-gib", type=float, default=48.0, help="GiB of host memory below it")
    add("--disk-gib", type=float, default=64.0, help="GiB of files below that")
    add(
        "--disk",
        type=Path,
        help="where a folder for files is made; else a temporary one",
    )
    add("--folder", type=Path, help="keeps the model; by default a temporary one")
    add("--shape", choices=SHAPES, default="llama-8b", help="of the model")
    add("--vllm-path", help="PYTHONPATH of vLLM, where it is not installed")
    add("--logs", type=Path, help="a folder for what servers say")
    options = bench.parse(argv)
    if options.shape != "llama-8b":
        bench.name = f"agents_{options.shape.replace('-', '_')}"
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary) / "model"
        options.logs = options.logs or Path(temporary)
        options.logs.mkdir(parents=True, exist_ok=True)
        if not (folder / "config.json").exists():
            tokens = None if options.smoke else MAX_TOKENS
            save_model(folder, smoke=options.smoke, shape=options.shape, max_tokens=tokens)
        rows: list[Row] = []
        for row in rows_of(folder, options):
            rows.append(row)  # Written at once: an interrupted run keeps what it has.
            constants = {"device_gib": options.device_gib, "host_gib": options.host_gib}
            bench.finish(rows, figures_of(rows), constants)
    return 0


if __name__ == "__main__":
    sys.exit(main())
