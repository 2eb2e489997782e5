"""What does it cost a stock attention kernel to read vmkv's rows?

Question. The same kernel, over the same sequences, in different memory: an ordinary tensor, vmkv
rows with all layers interleaved (or 8, or one) and their pages scattered, and block tables of 16
to 256 tokens. How much longer does it take than on the ordinary tensor?

Prediction. Decode reads every key and value once: Llama-3-8B, 64 sequences of 4,096 tokens, is
64 * 4096 * 8 heads * 2 * 128 * 2 B = 1.07 GB a layer, 250 us at the 4.3 TB/s of a copy.
Interleaving leaves runs of 8 heads * 128 * 2 B = 2 KiB, longer than a DRAM burst, and 2 MiB pages
are what the TLB holds anyway, so rows should cost at most 3 % over a tensor, and FlashAttention-2
should read them at 3.6 TB/s or more. Prefill computes: a row should cost nothing (1 %), while a
block of 16 tokens makes FlashAttention-3 compute addresses instead of using TMA: 8 % or more over
vmkv. Heads of 512 (Gemma 4's global layers, "sdpa"): 32 sequences of 8,192 tokens are three blocks
on each processor with 16 KiB of keys and of values of each under way, so vmkv's own kernel reads at
85 % of the memory's peak, 1.2 times the floor. FlashAttention has no such kernel; the rivals keep
512 sums of each query in one block, which leaves one on a processor: 1.6 times or more.

Method. One layout per line, all layouts of a case resident at once. A timing is one CUDA graph of
calls that walk over layers whose keys exceed the L2 cache together (or over all there are); the
graph excludes the host.
Layouts take turns within each of REPEATS repeats (PREFILL_REPEATS for prefill), in a seeded random
order, and a ratio is taken within its repeat; medians and interquartile ranges are reported.
The floor is the time that the memory takes to read keys and values once, at the peak of its clock.
Sequences are ragged and seeded. (The record of 2026-11-21 still went round in turn: the dense
tensor always followed a block table, which lets the clock rise, and gained 1 % in prefill by it.)

Two layouts are there to explain the rest: an ordinary tensor with all layers interleaved (where it
is not too large), which costs what rows cost if it is the stride that costs; and rows whose tokens
lie 2 KiB further apart, so that their stride is no power of two.

Rivals. FlashAttention's own block tables, 16/64/128/256 tokens (FlashAttention-2 allows 256 only),
with blocks shuffled; and a tensor whose strides are no powers of two, which is the fairer dense.
For heads of 512, over the dense tensor with sequences of one length: compiled FlexAttention, and
torch's SDPA with a group's query heads as queries.

Not measured. The host's cost of preparing a step (bench_block_table), growth while kernels run,
windows and soft caps (Gemma-2 is run without), backward, anything but bfloat16.
"""

from __future__ import annotations

import functools
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from attention_layouts import (
    PAD_BYTES,
    SKEW_TOKENS,
    Layout,
    ModelShape,
    block_tables,
    dense_interleaved,
    dense_rows,
    vm_layer_views,
)
from harness import HAS_GPU, Bench, Figure, Row, print_rows
from models import DTYPE, reset_memory
from torch.nn import functional

from vmkv import open_backend
from vmkv.attention import AttentionBatch, AttentionSpec, Call, get, why_not

REPEATS = 15
PREFILL_REPEATS = 31  # clocks wander by 3 % under load
REPEAT_MS = 4.0  # about how long one timing lasts
INPUT_BYTES = 256 * 2**20  # what a timing walks over, at least: five times the L2 cache
KV_BYTES_MAX = 40 * 2**30  # of all layers; larger cases are skipped. All layouts: about 110 GiB
INTERLEAVED_BYTES_MAX = 16 * 2**30  # the interleaved tensor is as large again

SHAPES = [
    ModelShape("Llama-3-8B", 32, 32, 8, 128),
    ModelShape("Llama-3-70B, TP 8", 80, 8, 1, 128),
    ModelShape("Qwen2.5-7B", 28, 28, 4, 128),
    ModelShape("Gemma-2-9B", 42, 16, 8, 256),
]
WIDE_SHAPES = [
    ModelShape("Gemma-4-26B-A4B, global layers", 5, 16, 2, 512),
    ModelShape("Gemma-4-E2B, global layers", 3, 8, 1, 512),
]
SMOKE_SHAPES = [ModelShape("smoke", 4, 4, 2, 16), ModelShape("smoke, wide", 2, 4, 1, 512)]
BLOCKS = {"flash3": (16, 64, 128, 256), "flash2": (256,)}
KERNELS = ("flash2", "flash3", "torch")


@dataclass(frozen=True)
class Case:
    """A batch: `batch` sequences of `shortest` to `longest` tokens, `queries` new ones each."""

    phase: str
    batch: int
    shortest: int
    longest: int
    queries: int = 1
    first_shape_only: bool = False

    def lengths(self) -> list[int]:
        """Seeded; the longest is always among them, so that capacities agree."""
        rng = random.Random(self.batch * 1_000_003 + self.longest)
        drawn = [rng.randint(self.shortest, self.longest) for _ in range(self.batch - 1)]
        return [self.longest, *drawn]


CASES = [
    Case("decode", 1, 1024, 1024),
    Case("decode", 1, 32768, 32768),
    Case("decode", 8, 1024, 4096),
    Case("decode", 8, 16384, 32768),
    Case("decode", 32, 1024, 4096),
    Case("decode", 64, 2048, 4096),
    Case("decode", 64, 4096, 4096),
    Case("decode", 256, 256, 1024),
    Case("prefill", 1, 8192, 8192, 8192),
    Case("prefill", 1, 32768, 32768, 32768, first_shape_only=True),
    Case("chunk", 4, 8192, 8192, 512),
    Case("chunk", 8, 16384, 16384, 2048, first_shape_only=True),
]
WIDE_CASES = [
    Case("decode", 1, 8192, 8192),
    Case("decode", 32, 1024, 8192),
    Case("decode", 32, 8192, 8192),
    Case("prefill", 1, 8192, 8192, 8192),
]
SMOKE_CASES = [
    Case("decode", 3, 20, 60),
    Case("prefill", 1, 64, 64, 64),
    Case("chunk", 2, 60, 60, 8),
]


def call_rows(kernel: str, layout: Layout, query: torch.Tensor, case: Case) -> list[Callable]:
    """One call per input, through vmkv's own backend."""
    assert layout.rows is not None
    backend, lengths = get(kernel), case.lengths()
    batch = AttentionBatch.build(
        layout.rows,
        lengths,
        [case.queries] * case.batch,
        row_tokens=layout.inputs[0][0].shape[1],
        device=query.device,
    )
    scale = query.shape[2] ** -0.5
    calls = [Call(query, keys, values, batch, scale) for keys, values in layout.inputs]
    return [functools.partial(backend.attend, call) for call in calls]


def call_blocks(kernel: str, layout: Layout, query: torch.Tensor, case: Case) -> list[Callable]:
    """One call per input, with a block table; not something vmkv itself offers."""
    lengths = torch.tensor(case.lengths(), dtype=torch.int32, device=query.device)
    packed = query.unflatten(0, (case.batch, case.queries))
    scale = query.shape[2] ** -0.5
    function = paged_flash2 if kernel == "flash2" else paged_flash3
    return [
        lambda k=keys, v=values: function(packed, k, v, lengths, layout.block_table, scale)
        for keys, values in layout.inputs
    ]


def paged_flash2(query, keys, values, lengths, table, scale):
    from flash_attn import flash_attn_with_kvcache

    return flash_attn_with_kvcache(
        query, keys, values, cache_seqlens=lengths, block_table=table, softmax_scale=scale,
        causal=True,
    )  # fmt: skip


def paged_flash3(query, keys, values, lengths, table, scale):
    try:
        from flash_attn_interface import flash_attn_with_kvcache
    except ImportError:
        from vmkv.attention.flash3 import library_kernel

        kernel = library_kernel()
        return kernel(
            query, keys, values, seqused_k=lengths, page_table=table, scale=scale,
            window=(-1, -1), softcap=0.0,
        )  # fmt: skip
    return flash_attn_with_kvcache(
        query, keys, values, cache_seqlens=lengths, page_table=table, softmax_scale=scale,
        causal=True,
    )  # fmt: skip


def call_torch(function: Callable, layout: Layout, query: torch.Tensor) -> list[Callable]:
    """One call per input of torch's own attention: a query of each sequence, all of one length."""
    return [
        functools.partial(function, query, keys.transpose(1, 2), values.transpose(1, 2))
        for keys, values in layout.inputs
    ]


def torch_sdpa(query, keys, values):
    groups = query.unflatten(1, (keys.shape[1], -1))
    return functional.scaled_dot_product_attention(groups, keys, values)


@functools.cache
def compiled_flex() -> Callable:
    from torch.nn.attention.flex_attention import flex_attention

    # Compiling takes half a minute on a CPU, of which nobody asks for times.
    flex = torch.compile(flex_attention, dynamic=False) if HAS_GPU else flex_attention
    return lambda query, keys, values: flex(query[:, :, None], keys, values, enable_gqa=True)


TORCH_KERNELS = {"torch sdpa": lambda: torch_sdpa, "FlexAttention": compiled_flex}


def peak_bytes_per_s() -> float | None:
    """The memory's peak, from its clock and the width of its bus; None without a GPU."""
    if not HAS_GPU:
        return None
    from cuda.bindings import driver

    def attribute(name: str) -> int:
        wanted = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return driver.cuDeviceGetAttribute(wanted, torch.cuda.current_device())[1]

    clock_khz, bits = attribute("MEMORY_CLOCK_RATE"), attribute("GLOBAL_MEMORY_BUS_WIDTH")
    return 2 * 1e3 * clock_khz * bits / 8


class Timer:
    """Times a list of calls walked over in turn; on CUDA as one graph, without the host."""

    def __init__(self, calls: list[Callable]) -> None:
        self._calls = calls
        self._on_cuda = HAS_GPU
        for call in calls[:2]:
            call()
        one = self._elapsed(lambda: [call() for call in calls], len(calls))
        rounds = max(1, round(REPEAT_MS / 1e3 / (one * len(calls))))
        self._num_calls = rounds * len(calls)
        self._graph = None
        if self._on_cuda:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._walk(rounds)
            self._graph.replay()
        self._rounds = rounds

    def _walk(self, rounds: int) -> None:
        for _ in range(rounds):
            for call in self._calls:
                call()

    def _elapsed(self, work: Callable, num_calls: int) -> float:
        """Seconds per call of `work`, which makes `num_calls`."""
        if not self._on_cuda:
            start = time.perf_counter()
            work()
            return (time.perf_counter() - start) / num_calls
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / num_calls

    def measure(self) -> float:
        """Seconds per call."""
        if self._graph is not None:
            return self._elapsed(self._graph.replay, self._num_calls)
        return self._elapsed(lambda: self._walk(self._rounds), self._num_calls)


def layouts_of(shape: ModelShape, case: Case, kernels: list[str], vm_backend) -> list[Layout]:
    """Every layout of a case; the first is the dense tensor that ratios refer to."""
    lengths = case.lengths()
    per_layer = sum(lengths) * shape.layer_token_bytes(DTYPE)
    num_inputs = min(shape.layers, max(2, -(-INPUT_BYTES // per_layer)))
    device = torch.device("cuda:0" if HAS_GPU else "cpu")
    common = {"num_inputs": num_inputs, "dtype": DTYPE}
    spec = AttentionSpec(device.type, DTYPE, 1, 1, shape.dim, shape.dim)
    overread = max(get(name).overread_tokens(spec) for name in kernels)
    made = [
        dense_rows(shape, lengths, skew_tokens=skew, device=device, **common)
        for skew in (0, SKEW_TOKENS)
    ]
    padded_tokens = max(lengths) * len(lengths)
    if padded_tokens * shape.layers * shape.layer_token_bytes(DTYPE) <= INTERLEAVED_BYTES_MAX:
        made.append(dense_interleaved(shape, lengths, device=device, **common))
    grouped = dict.fromkeys((shape.layers, min(8, shape.layers), 1))
    for layers, pad_bytes in [(shape.layers, PAD_BYTES), *((layers, 0) for layers in grouped)]:
        options = {"layers_per_group": layers, "pad_bytes": pad_bytes, **common}
        made.append(vm_layer_views(vm_backend, shape, lengths, overread_tokens=overread, **options))
    blocks = {size for name in kernels for size in BLOCKS.get(name, ())}
    return made + [
        block_tables(shape, lengths, block_tokens=size, device=device, **common)
        for size in sorted(blocks)
    ]


def run_case(shape: ModelShape, case: Case, kernels: list[str], vm_backend) -> list[Row]:
    """All kernels over all layouts; one result per pair."""
    layouts = layouts_of(shape, case, kernels, vm_backend)
    size = (case.batch * case.queries, shape.query_heads, shape.dim)
    query = torch.randn(*size, dtype=DTYPE, device=layouts[0].inputs[0][0].device)
    read_bytes = sum(case.lengths()) * shape.layer_token_bytes(DTYPE)
    what = {"shape": shape.name, "phase": case.phase, "batch": case.batch}
    what |= {"queries": case.queries, "tokens": [case.shortest, case.longest]}
    results = []
    is_wide_decode = shape.dim > 256 and case.phase == "decode" and case.shortest == case.longest
    floor_us = None
    if case.phase == "decode" and HAS_GPU:
        floor_us = 1e6 * read_bytes / peak_bytes_per_s()
    for kernel in (*kernels, *(TORCH_KERNELS if is_wide_decode and HAS_GPU else ())):
        timers = {}
        for layout in layouts:
            if kernel in TORCH_KERNELS:
                if layout.name == "dense":
                    try:
                        function = TORCH_KERNELS[kernel]()
                        timers[layout.name] = Timer(call_torch(function, layout, query))
                    except Exception as error:  # noqa: BLE001  # compilers fail in their own ways
                        print(f"skipped: {kernel}, {layout.name}: {error}")
            elif layout.block_table is None:
                timers[layout.name] = Timer(call_rows(kernel, layout, query, case))
            elif layout.inputs[0][0].shape[1] in BLOCKS.get(kernel, ()):
                try:
                    timers[layout.name] = Timer(call_blocks(kernel, layout, query, case))
                except RuntimeError as error:  # a rival's build may lack its block tables
                    print(f"skipped: {kernel}, {layout.name}: {error}")
        samples: dict[str, list[float]] = {name: [] for name in timers}
        rng, names = random.Random(0), list(timers)
        for _ in range(PREFILL_REPEATS if case.phase == "prefill" else REPEATS):
            # In random order, so that no layout always follows one that lets the clock rise.
            rng.shuffle(names)
            for name in names:
                samples[name].append(timers[name].measure())
        for name, seconds in samples.items():
            ratios = [a / b for a, b in zip(seconds, samples["dense"], strict=True)]
            median = statistics.median(seconds)
            row = {**what, "kernel": kernel, "layout": name, "median_us": 1e6 * median}
            row |= {"iqr_us": 1e6 * spread_of(seconds), "ratio_iqr": spread_of(ratios)}
            row["ratio_to_dense"] = statistics.median(ratios)
            row["read_tb_s"] = read_bytes / median / 1e12 if case.phase == "decode" else None
            row["over_floor"] = 1e6 * median / floor_us if floor_us else None
            results.append(row)
        timers.clear()
    for layout in layouts:
        layout.close()
    return results


def figures(results: list[Row]) -> list[Figure]:
    """The figures of the prediction; those that were not measured are absent."""
    found = []

    def worst(phase: str, layout: str, name: str, label: str, bound: float | None) -> None:
        for kernel in KERNELS:
            ratios = [
                row["ratio_to_dense"]
                for row in results
                if (row["phase"], row["kernel"], row["layout"]) == (phase, kernel, layout)
            ]
            if ratios:
                what = f"{phase} with {kernel}, {label} over a dense tensor, worst case"
                middle = f"median of {len(ratios)} cases: {statistics.median(ratios):.3f} ×"
                key = f"{phase}_{kernel}_{name}"
                found.append(Figure(key, what, max(ratios), "×", bound, rival=middle))

    worst("decode", "vmkv, +2 KiB", "padded", "vmkv, +2 KiB", None)
    worst("decode", "dense, interleaved", "interleaved", "dense, interleaved", None)
    worst("decode", "vmkv, all layers", "over_dense", "vmkv rows", 1.03)
    worst("prefill", "vmkv, all layers", "over_dense", "vmkv rows", 1.01)
    by_key = {
        (row["phase"], row["batch"], *row["tokens"], row["kernel"], row["layout"]): row
        for row in results
        if row["shape"] == SHAPES[0].name
    }
    wide = by_key.get(("decode", 64, 4096, 4096, "flash2", "vmkv, all layers"))
    if wide is not None:
        what = "keys and values read in decode, flash2, batch 64, 4k"
        found.append(Figure("flash2_decode_tb_s", what, wide["read_tb_s"], "TB/s", at_least=3.6))
    for tokens in (8192, 32768):
        layouts = ("vmkv, all layers", "block table, 16")
        case = ("prefill", 1, tokens, tokens, "flash3")
        ours, paged = (by_key.get((*case, layout)) for layout in layouts)
        if ours is not None and paged is not None:
            gain = paged["median_us"] / ours["median_us"]
            what = f"prefill of {tokens:,}, flash3: a block table of 16 tokens over vmkv rows"
            found.append(Figure(f"prefill_{tokens}_gain", what, gain, "×", at_least=1.08))
    for shape in WIDE_SHAPES:
        by_kernel = {
            row["kernel"]: row
            for row in results
            if (row["shape"], row["batch"], row["tokens"]) == (shape.name, 32, [8192, 8192])
            and row["layout"] == ("dense" if row["kernel"] in TORCH_KERNELS else "vmkv, all layers")
        }
        ours = by_kernel.pop("sdpa", None)
        if ours is not None and ours["over_floor"] is not None:
            rival = ", ".join(
                f"{each}: {its['over_floor']:.2f} ×" for each, its in by_kernel.items()
            )
            what = f"{shape.name}: decode of 32 x 8k with heads of 512, over the memory floor"
            key = f"wide_decode_{shape.kv_heads}_over_floor"
            found.append(Figure(key, what, ours["over_floor"], "×", 1.4, rival=rival))
    return found


def spread_of(values: list[float]) -> float:
    """The interquartile range."""
    low, _, high = statistics.quantiles(values, n=4)
    return high - low


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write."""
    bench = Bench("attention", __doc__)
    bench.option("--shape", action="append", help="only shapes whose name contains this")
    bench.option("--phase", help="only decode, prefill or chunk")
    options = bench.parse(argv)
    shapes = SMOKE_SHAPES if options.smoke else [*SHAPES, *WIDE_SHAPES]
    if options.shape:
        shapes = [each for each in shapes if any(part in each.name for part in options.shape)]
    vm_backend = open_backend("cuda:0" if HAS_GPU else "host")
    results, skipped = [], []
    for position, shape in enumerate(shapes):
        device = "cuda" if HAS_GPU else "cpu"
        sizes = (shape.query_heads, shape.kv_heads, shape.dim, shape.dim)
        spec = AttentionSpec(device, DTYPE, *sizes)
        reasons = {name: why_not(name, spec) for name in KERNELS}
        kernels = [name for name in KERNELS if reasons[name] is None] or ["sdpa"]
        skipped += [f"{shape.name}, {name}: {why}" for name, why in reasons.items() if why]
        cases = WIDE_CASES if shape.dim > 256 else CASES
        for case in SMOKE_CASES if options.smoke else cases:
            kv_bytes = sum(case.lengths()) * shape.layers * shape.layer_token_bytes(DTYPE)
            if (case.first_shape_only and position) or options.phase not in (None, case.phase):
                continue
            if kv_bytes > KV_BYTES_MAX:
                skipped.append(f"{shape.name}, {case}: {kv_bytes / 2**30:.0f} GiB of keys, values")
                continue
            results += run_case(shape, case, kernels, vm_backend)
            print_rows(results[-1:])
            reset_memory()
    vm_backend.close()
    constants = {"repeats": REPEATS, "prefill_repeats": PREFILL_REPEATS, "dtype": str(DTYPE)}
    constants |= {"input_bytes": INPUT_BYTES, "skipped": skipped}
    return bench.finish(results, figures(results), constants)


if __name__ == "__main__":
    sys.exit(main())
