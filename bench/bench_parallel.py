"""What do two GPUs give that share a model, against one?

Question. A plain transformers model, divided between two GPUs: how long do many mixed prompts (W1)
and much decoding (W4) take, against one GPU? How long is a decode step of one sequence, and of 32
sequences of 4,096 tokens? And what does it cost to add the parts of a layer's output, and to make
the next norm of it? A model that one GPU does not hold: how far is a decode step from what its
bytes take?

Prediction. A step has 65 sums, two a layer and one for the embedding, and gathers logits once. In a
graph NCCL takes 6 us for 8 KiB and 26 us for 2 MiB; one kernel takes 4 and 10: a message, and a
crossing of the link. A norm of its own is 3 and 4 us more, in the same kernel 1: the residual and
the norm are read and written while parts travel; of 64 MiB it is 80 us apart and 45 together. A
decode step of one reads 15 GB of weights:
4.1 ms on one GPU, half of that and 0.6 ms on two, 0.67 of the time. With 32 sequences of 4,096
tokens it reads 32 GB: 8.8 ms, and 0.65 of that. W1's
344k prompt tokens are bound by arithmetic, which halves, and by sums of 8 KiB a token and layer,
180 GB in all, 0.6 s: with decoding, 0.6 of one GPU's 10 s. W4 decodes: 0.65. So two replicas serve
more requests in the same time than these two GPUs; what they gain is time for each. Of 60 of 70B's
layers a step reads 52 GB of weights and 16 GB of keys and values on each rank: 16 ms, and 1.2 times
that.

Method. Llama-3-8B's shape from transformers' own class, random weights, bfloat16, greedy, no end
of sequence, prompts as in `bench_serve`, after the engine was warmed up; seconds are the better of
two rounds, as vLLM's. A decode step is the median time between steps that decode all sequences and
nothing else. Sums are timed as 100 of them in one CUDA graph, the best of five replays, beside
NCCL's; with a norm beside NCCL's and a kernel for the norm. Each rank makes all weights and keeps
its part. The first tokens of both engines are compared, so that nothing wrong is measured: with
bfloat16 a few may differ. `--large` is a run of its own, on four GPUs.

Rivals. One GPU with the same engine; with `--vllm-json` vLLM 0.26.0 on the same two GPUs, as
`vllm_workloads.py --tensor-parallel-size 2` has just measured it.

Not measured. All 80 layers of 70B, whose whole weights no GPU makes beside anything else; more than
two GPUs, several hosts; serving under arrivals; NVLink multicast, which is off here.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_serve import (
    COPY_BYTES_PER_S,
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    MIXED,
    Steps,
    Workload,
    serve,
)
from harness import Bench, Figure, Row, print_rows
from models import llama_config, make_model, reset_memory
from transformers import LlamaConfig

from vmkv import Engine, SamplingParams
from vmkv.serve.parallel import Ranks, TensorParallel
from vmkv.serve.parallel.collectives import all_reduce
from vmkv.serve.parallel.engine import open_parallel_engine
from vmkv.serve.parallel.one_shot import norm_after_sum

#: NVLink multicast stays off: not every machine that is lent has it.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

WORKLOADS = (
    Workload("decode 1", 1, (4096,), 128, 1),
    Workload("decode 32", 32, (4096,), 128, 1),
    Workload("W1", 256, MIXED, 128),
    Workload("W4", 256, (512,), 512),
)
#: Of the larger shape: its step is compared with what its bytes take.
LARGE = Workload("70B, decode 32", 32, (4096,), 64, 1)
LARGE_LAYERS = 60
SMOKE_WORKLOADS = (Workload("decode 1", 1, (9,), 8, 1), Workload("W1", 4, (5, 20), 6, 1))
HIDDEN = 4096
NUM_SUMS = 100


def make_part(smoke: bool, is_large: bool, group: TensorParallel | None = None) -> Any:
    """All weights, of which a rank keeps its part."""
    device = torch.device("cpu" if smoke else "cuda")
    return make_model(config_of(smoke=smoke, is_large=is_large), device)


def config_of(*, smoke: bool, is_large: bool) -> LlamaConfig:
    """Llama-3-8B's shape, or so many layers of Llama-3-70B's as one GPU can make at once."""
    if not is_large:
        return llama_config(smoke=smoke)
    if smoke:
        return llama_config(smoke=True, num_hidden_layers=3)
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
    return llama_config(smoke=False, num_hidden_layers=LARGE_LAYERS, **sizes)


def engine_options(*, smoke: bool) -> dict[str, Any]:
    """Options that all engines have."""
    if smoke:
        return {"max_num_seqs": 4, "max_num_batched_tokens": 64, "budget_bytes": 2**26}
    return {
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
        "max_tokens": 8192,
        "prefix_caching": False,
    }


@contextmanager
def engine_of(num_gpus: int, steps: Steps, *, smoke: bool, is_large: bool = False):
    """An engine on so many GPUs."""
    options = engine_options(smoke=smoke)
    if num_gpus == 1:
        with Engine(make_part(smoke, is_large), observer=steps, **options) as engine:
            yield engine
        return
    device = "cpu" if smoke else "cuda"
    with open_parallel_engine(
        partial(make_part, smoke, is_large),
        num_gpus,
        device_type=device,
        observer=steps,
        timeout_s=180.0,
        **options,
    ) as engine:
        yield engine


def first_tokens(engine: Engine, vocabulary: int) -> list[int]:
    """An engine's first tokens for 16 prompts."""
    prompts = Workload("first", 16, (64,), 1).prompts(vocabulary)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    return [each.outputs[0].token_ids[0] for each in engine.generate(prompts, params)]


def ways_to_add(part: torch.Tensor, group: str) -> dict[str, Callable[[], object]]:
    """A sum by one kernel and by NCCL, and both with the residual and the norm that follow."""
    residual, weight = torch.zeros_like(part), torch.ones_like(part[0])
    nccl = torch.distributed.all_reduce
    return {
        "sum_us": lambda: all_reduce(part, group),
        "nccl_us": lambda: nccl(part),
        "with_norm_us": lambda: torch.ops.vmkv.norm_of_sum_(part, residual, weight, 1e-5, group),
        "nccl_and_norm_us": lambda: (nccl(part), norm_after_sum(part, residual, weight, 1e-5)),
    }


def sums(path: str, group: TensorParallel) -> None:
    """Time of a sum in microseconds, by its bytes; rank 0 writes it to `path`."""
    found = []
    for num_tokens in (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 8192):
        num_sums = NUM_SUMS if num_tokens <= 2048 else NUM_SUMS // 5
        part = torch.ones(num_tokens, HIDDEN, dtype=torch.bfloat16, device="cuda")
        assert torch.equal(all_reduce(part.clone(), group.name), part * group.size)
        part.zero_()  # The sums are repeated in place and would overflow.
        row = {"workload": "sum", "gpus": group.size, "sum_bytes": part.nbytes}
        for what, add in ways_to_add(part, group.name).items():
            add()  # A kernel is compiled before it is captured.
            graph = torch.cuda.CUDAGraph()
            # NCCL's own thread asks CUDA for events meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                for _ in range(num_sums):
                    add()
            times = []
            for _ in range(5):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                times.append(1e3 * start.elapsed_time(end) / num_sums)
            row[what] = min(times)
            del graph
        found.append(row)
    if not group.rank:
        Path(path).write_text(json.dumps(found))


def sum_rows(num_gpus: int) -> list[Row]:
    """Rows with the times of sums."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "sums")
        with Ranks(num_gpus, "cuda", partial(sums, path), timeout_s=180.0) as ranks:
            assert ranks.group is not None
            sums(path, ranks.group)
            ranks.wait(30.0)
        rows: list[Row] = json.loads(Path(path).read_text())
        return rows


def measure(num_gpus: int, *, smoke: bool) -> tuple[list[Row], list[int]]:
    """All workloads on one engine."""
    steps, rows = Steps(), []
    vocabulary = llama_config(smoke=smoke).vocab_size
    start = time.perf_counter()
    with engine_of(num_gpus, steps, smoke=smoke) as engine:
        start_s = time.perf_counter() - start
        said = first_tokens(engine, vocabulary)
        for workload in SMOKE_WORKLOADS if smoke else WORKLOADS:
            row, step_ms = serve(engine, steps, workload, vocabulary)
            submit = [1e3 * step.submit_s for step in steps.records]
            rows.append(
                {
                    "workload": workload.name,
                    "gpus": num_gpus,
                    "seconds": row["seconds_best"],
                    "decode_step_ms": step_ms,
                    "submit_ms": statistics.median(submit),
                    "start_s": start_s,
                }
            )
            print_rows(rows[-1:])
    return rows, said


def measure_large(num_gpus: int, *, smoke: bool) -> Row:
    """A decode step of the larger shape, and what reading a rank's bytes takes."""
    steps = Steps()
    config = config_of(smoke=smoke, is_large=True)
    workload = replace(LARGE, lengths=(9,), new_tokens=8) if smoke else LARGE
    if smoke:
        workload = replace(workload, num_requests=4)
    with engine_of(num_gpus, steps, smoke=smoke, is_large=True) as engine:
        row, step_ms = serve(engine, steps, workload, config.vocab_size)
    whole = make_model(config, torch.device("meta"))
    read_bytes = sum(each.nbytes for each in whole.parameters())
    read_bytes -= whole.get_input_embeddings().weight.nbytes
    head_dim = config.hidden_size // config.num_attention_heads
    token_bytes = 4 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    tokens = workload.num_requests * (workload.lengths[0] + workload.new_tokens // 2)
    floor_ms = 1e3 * (read_bytes + tokens * token_bytes) / num_gpus / COPY_BYTES_PER_S
    return {
        "workload": workload.name,
        "gpus": num_gpus,
        "seconds": row["seconds"],
        "decode_step_ms": step_ms,
        "floor_ms": floor_ms,
        "layers": config.num_hidden_layers,
    }


def figures_of(rows: Sequence[Row], vllm_s: Mapping[str, float]) -> list[Figure]:
    """Two GPUs over one, and over vLLM's two."""
    found = []

    def add(name: str, what: str, got: float, bound: float, rival: str = "") -> None:
        found.append(Figure(f"parallel_{name}", what, got, "×", bound, rival=rival))

    for row in rows:
        name = row["workload"]
        if row["gpus"] == 2 and name in vllm_s:
            what, rival = f"{name} on two GPUs: time over vLLM's", f"vLLM: {vllm_s[name]:.4g} s"
            add(f"{name.lower()}_over_vllm", what, row["seconds"] / vllm_s[name], 1.0, rival)
    bounds = {"decode 1": 0.7, "decode 32": 0.65, "W1": 0.625, "W4": 0.625}
    for name, bound in bounds.items():
        is_step = name.startswith("decode")
        column, unit = ("decode_step_ms", "ms") if is_step else ("seconds", "s")
        of = {row["gpus"]: row.get(column) for row in rows if row["workload"] == name}
        alone, together = of.get(1), of.get(2)
        if alone and together:
            what, rival = (
                f"{name}: time on two GPUs, of that on one",
                f"one GPU: {alone:.4g} {unit}",
            )
            add(name.replace(" ", "_").lower(), what, together / alone, bound, rival)
    for row in rows:
        if row.get("floor_ms") and row["decode_step_ms"]:
            step_ms, floor_ms = row["decode_step_ms"], row["floor_ms"]
            what = f"{row['gpus']} GPUs: a decode step of {LARGE.num_requests} sequences of "
            what += f"{LARGE.lengths[0]:,} tokens ({step_ms:.1f} ms), {row['layers']} layers of a "
            what += f"70B model, of each rank's memory floor ({floor_ms:.1f} ms)"
            add(f"70b_over_floor_{row['gpus']}", what, step_ms / floor_ms, 1.35)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write."""
    bench = Bench("parallel", __doc__, needs_gpu=True)
    said = "what vllm_workloads.py has measured with --tensor-parallel-size 2 on this machine"
    bench.option("--vllm-json", type=Path, metavar="FILE", help=said)
    said = "only the larger model, on four GPUs, and sums there"
    bench.option("--large", action="store_true", help=said)
    options = bench.parse(argv)
    smoke, constants = options.smoke, {"model": "Llama-3-8B's shape"}
    vllm_s = json.loads(options.vllm_json.read_text()) if options.vllm_json else {}
    wanted = 4 if options.large else 2
    if not smoke and torch.cuda.device_count() < wanted:
        bench.error(f"this needs {wanted} GPUs; --smoke runs a tiny model on the CPU")
    if options.large and not smoke:
        bench.name = "parallel_large"
        rows = [*sum_rows(4), measure_large(4, smoke=False)]
        return bench.finish(rows, figures_of(rows, vllm_s), constants)
    rows = [] if smoke else sum_rows(2)
    alone, expected = measure(1, smoke=smoke)
    reset_memory()
    together, said = measure(2, smoke=smoke)
    same = sum(map(int.__eq__, expected, said)) / len(said)
    rows += [*alone, *({**row, "same_first_tokens_share": same} for row in together)]
    bench.finish(rows, figures_of(rows, vllm_s), constants)
    # Last, and after the rest is written: it takes nearly all memory there is.
    rows.append(measure_large(1 if smoke else 2, smoke=smoke))
    return bench.finish(rows, figures_of(rows, vllm_s), constants)


if __name__ == "__main__":
    sys.exit(main())
