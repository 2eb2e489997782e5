"""What does drawing a token cost beside taking the likeliest one?

Question. Logits of 128,256 tokens in bfloat16, for batches of 1, 32, 64 and 256 requests: how long
does `Sampler.sample` take with temperature 0.8 and top-p 0.95, with other filters, and how much of
it is the host's?

Prediction. The kernel reads a row twice in parts, 16 bytes a thread at once, and in three of ten
rows once more by the one block that finishes last. Rows are 250 KiB and stay in the L2 cache: 3 us
for the parts of 32 rows, 8 us for each whole row by one block, 2 us for the launch: 15 us for 1 to
64 rows. 256 rows are 64 MiB, 14 us at 4.6 TB/s; some 30 instructions per token for masses and noise
make it 50 us. Top-k takes three more readings by one block: 45 us. Greedy decoding takes 12 us for
64 rows (two launches of an argmax in parts). Sorting takes a millisecond for 32 rows, and 30
launches. The host spends 30 us with the kernel: a launch, a tensor, and which features the slots
need.

Method. Normal logits, with a few likely tokens in each row, as a language model has. `us` is the
time of a call by the device: a window of calls, enqueued one after another, by its number of calls.
`host_us` is the time until the calls of the window have returned, by their number; where it is the
longer one, `us` shows the host. Subjects take turns; medians of windows.

Rivals. `likeliest`, which greedy requests use, and the path in torch, which sorts.

Not measured. The model; transfers of sampled tokens.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

import torch
from harness import Bench, Figure, Row, in_turns, on_gpu, quartiles, synchronize

from vmkv.serve.params import SamplingParams
from vmkv.serve.sampler import Sampler
from vmkv.step.piece import likeliest

VOCABULARY = 128_256
BATCHES = (1, 32, 64, 256)
FILTERS = {
    "temperature": {"temperature": 0.8},
    "top-p": {"temperature": 0.8, "top_p": 0.95},
    "min-p": {"temperature": 0.8, "min_p": 0.05},
    "top-k": {"temperature": 0.7, "top_k": 20},
    "top-k, top-p": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
}


def some_logits(rows: int, vocabulary: int, device: torch.device) -> torch.Tensor:
    """Logits of which few are likely."""
    generator = torch.Generator(device).manual_seed(0)
    options = {"generator": generator, "device": device}
    logits = torch.randn(rows, vocabulary, **options) * 2
    logits += 18 * torch.rand(rows, vocabulary, **options) ** 3000
    return logits.bfloat16()


def sampling(
    logits: torch.Tensor, params: dict[str, float], *, sorts: bool
) -> Callable[[], torch.Tensor]:
    """Return a call that samples from all rows, by the kernel or by sorting in torch."""
    rows, vocabulary = logits.shape
    sampler = Sampler(rows, vocabulary, logits.device)
    if sorts:
        sampler._kernel = None
    for slot in range(rows):
        sampler.set_slot(slot, SamplingParams(**params, seed=slot), [])
    slots, slot_ids = torch.arange(rows, device=logits.device), range(rows)
    return lambda: sampler.sample(logits, slots, slot_ids).token_ids


def microseconds(call: Callable[[], torch.Tensor], calls: int) -> tuple[float, float]:
    """Return the time of a call until the device has done it, and until it has returned."""
    synchronize()
    start_s = time.perf_counter()
    for _ in range(calls):
        call()
    returned_s = time.perf_counter()
    synchronize()
    end_s = time.perf_counter()
    return 1e6 * (end_s - start_s) / calls, 1e6 * (returned_s - start_s) / calls


def measured(
    rows: int, vocabulary: int, windows: int, calls: int, device: torch.device
) -> list[Row]:
    """Measure all filters over one batch."""
    logits = some_logits(rows, vocabulary, device)
    subjects: dict[tuple[str, str], Callable[[], torch.Tensor]] = {
        ("greedy", "argmax"): lambda: likeliest(logits)
    }
    for name, params in FILTERS.items():
        for path in ("kernel", "torch") if device.type == "cuda" else ("torch",):
            subjects[name, path] = sampling(logits, params, sorts=path == "torch")
    taken: dict[tuple[str, str], list[tuple[float, float]]] = {each: [] for each in subjects}
    for subject, at in in_turns(list(subjects), windows, warmup=1):
        found = microseconds(subjects[subject], calls if subject[1] != "torch" else 2)
        if at >= 0:
            taken[subject].append(found)
    return [
        {"requests": rows, "filter": name, "path": path}
        | quartiles("us", [each[0] for each in samples])
        | quartiles("host_us", [each[1] for each in samples])
        for (name, path), samples in taken.items()
    ]


def promised(rows: Sequence[Row]) -> list[Figure]:
    """Figures of top-p 0.95, the kernel beside sorting and greedy decoding."""
    us = {(row["requests"], row["filter"], row["path"]): row["us"] for row in rows}
    figures = []
    for requests, bound in ((1, 60), (32, 60), (64, 80), (256, 200)):
        mine = us.get((requests, "top-p", "kernel"))
        if mine is not None:
            rival = f"sorting {us[requests, 'top-p', 'torch']:,.0f} µs, "
            rival += f"greedy {us[requests, 'greedy', 'argmax']:,.0f} µs"
            what = f"sampling for {requests} requests with top-p 0.95, of 128,256 tokens"
            name = f"sampling_{requests}_us"
            figures.append(Figure(name, what, mine, "µs", at_most=on_gpu(bound), rival=rival))
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write the record."""
    bench = Bench("sampling", __doc__ or "", needs_gpu=True)
    options = bench.parse(argv)
    batches, vocabulary, windows, calls = BATCHES, VOCABULARY, 9, 50
    if options.smoke:
        batches, vocabulary, windows, calls = (1, 2), 500, 1, 1
    rows: list[Row] = []
    with torch.no_grad():
        for batch in batches:
            rows += measured(batch, vocabulary, windows, calls, options.device)
    return bench.finish(rows, promised(rows), {"vocabulary": vocabulary, "dtype": "bfloat16"})


if __name__ == "__main__":
    sys.exit(main())
