"""What does it cost the host to tell kernels where a decode step's sequences lie?

Question. Before a decode step of one token per sequence, the host tells the device where each
sequence lies and how long it is. What does that cost through block tables and slot mappings, and
what through row indices and lengths?

Prediction. Block tables of 256 sequences of 128k tokens are 256 * 8,192 blocks * 4 B = 8 MiB a
step: 0.16 ms of copy at 50 GB/s, which the host only waits for where memory is not pinned;
vectorised numpy for the slots is ten calls, 15 us; a sixteenth of the rows cross a block's end, 16
rows of Python at 1 us; three copies to launch at 6 us: 50 us. Rows and lengths: 12 bytes a sequence
and one copy, 15 us, if the host counts in numpy. `KVCache.grow` looks at each sequence, 1.5 us, and
where a sixteenth of them grow in every step, planning costs 2 us for each and mapping 4 on the
host: 0.4 ms for 256, slower than block tables, and hidden where the device is the limit.
`AttentionBatch.build` checks every length in Python, some 1 us a sequence: 0.3 ms for 256.

Method. Host time of one step, the device idle before and waited for after, outside the clock. All
ways decode the same sequences (equal lengths, staggered by 7 so that they do not cross blocks
together), and take turns; median and quartiles over steps. On a machine without a GPU "uploading"
is a copy within memory, and is the host's. Ways: "upload": lengths counted in a pinned numpy array,
one copy. "build": `AttentionBatch.build` from Python integers, with all its checks. "grow":
`KVCache.grow` for all sequences, every page resident. "grow and map": the same with 16 tokens a
page, so that a sixteenth of the sequences are grown and mapped in every step, on the host backend.

Rivals. vLLM's way (rivals.BlockTables) at its best: one pinned table no wider than the longest
sequence of the batch will need, kept up incrementally, vectorised slots, three copies of
preallocated buffers; blocks of 16 tokens. `check` proves that its slots are right.

Not measured. What kernels do with either (bench_attention); mapping pages (bench_mapping: 0.5 us a
token and sequence); packing and submitting a whole step; prefix sharing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from harness import Bench, Figure, Row, in_turns, paired_ratio, quartiles, synchronize
from models import CacheShape, close_cache, open_cache
from rivals import BlockTables

from vmkv import ExtentPool, HostBackend, KVCache
from vmkv.attention import AttentionBatch
from vmkv.units import KiB, MiB

STAGGER_TOKENS = 7
INDEX_LIMIT = 2**31
RIVAL = "block table, 16"


def upload_way(lengths: Sequence[int], row_tokens: int, device: torch.device) -> Callable:
    """Lengths counted on the host and copied."""
    batch = AttentionBatch.build(
        range(len(lengths)), lengths, [1] * len(lengths), row_tokens=row_tokens, device=device
    )
    host = torch.tensor(lengths, dtype=torch.int32, pin_memory=device.type == "cuda")
    counted: np.ndarray = host.numpy()

    def prepare_step() -> AttentionBatch:
        np.add(counted, 1, out=counted)
        batch.num_tokens.copy_(host, non_blocking=True)
        longest = int(counted.max())
        return AttentionBatch(
            batch.row_indices, batch.num_tokens, batch.query_starts, 1, longest, row_tokens
        )

    return prepare_step


def build_way(lengths: Sequence[int], row_tokens: int, device: torch.device) -> Callable:
    """A checked batch from Python integers, again for every step."""
    rows, counted, queries = range(len(lengths)), list(lengths), [1] * len(lengths)

    def prepare_step() -> AttentionBatch:
        for at in rows:
            counted[at] += 1
        return AttentionBatch.build(rows, counted, queries, row_tokens=row_tokens, device=device)

    return prepare_step


def grow_way(
    lengths: Sequence[int], num_steps: int, page_tokens: int = 2048, *, is_resident: bool
) -> tuple[KVCache, Callable]:
    """A cache whose sequences grow by a token each, by `KVCache.grow`.

    The cache is on the host backend with two bytes a token, so that any batch fits: planning costs
    the same for any length and size.

    Args:
        lengths: Lengths of sequences; only their number and their offsets matter.
        num_steps: How far they grow.
        page_tokens: Tokens that a page holds.
        is_resident: Whether all pages are mapped already.
    """
    pool = ExtentPool(HostBackend(4 * KiB), 256 * MiB)
    end = num_steps + STAGGER_TOKENS * 16 + 1
    shape = CacheShape("", 1, 1, 2 * KiB // page_tokens)
    options = {"max_tokens": end, "max_sequences": len(lengths)}
    cache = open_cache(pool, shape, torch.uint8, **options)
    sequences = [cache.open() for _ in lengths]
    staggered = [1 + length - min(lengths) for length in lengths]
    if is_resident:
        cache.grow([(sequence, end) for sequence in sequences])
        for sequence, length in zip(sequences, staggered, strict=True):
            sequence.truncate(length)
    else:
        cache.grow(zip(sequences, staggered, strict=True))
    return cache, lambda: cache.grow([(each, each.num_tokens + 1) for each in sequences])


def run(
    device: torch.device, num_sequences: int, past_tokens: int, num_steps: int, warmup_steps: int
) -> list[Row]:
    """One row for each way."""
    total_steps = num_steps + warmup_steps
    lengths = [past_tokens + STAGGER_TOKENS * (at % 16) for at in range(num_sequences)]
    # Rows share one index space of int32; block tables get room for just as much.
    row_tokens = max(lengths) + total_steps
    if num_sequences * row_tokens >= INDEX_LIMIT:
        return []
    tables = BlockTables(lengths, row_tokens, device)
    resident, grow = grow_way(lengths, total_steps, is_resident=True)
    growing, grow_and_map = grow_way(lengths, total_steps, page_tokens=16, is_resident=False)
    ways = {
        RIVAL: tables.prepare_step,
        "vmkv, upload": upload_way(lengths, row_tokens, device),
        "vmkv, build": build_way(lengths, row_tokens, device),
        "vmkv, grow": grow,
        "vmkv, grow and map": grow_and_map,
    }
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for name, at in in_turns(list(ways), num_steps, warmup_steps):
        synchronize()
        start = time.perf_counter()
        ways[name]()
        seconds = time.perf_counter() - start
        samples[name] += [1e6 * seconds] if at >= 0 else []
    tables.check()
    close_cache(resident)
    close_cache(growing)
    rows = []
    for name, taken in samples.items():
        row: Row = {"num_sequences": num_sequences, "past_tokens": past_tokens, "way": name}
        row |= {**quartiles("step_us", taken), "ratio": paired_ratio(taken, samples[RIVAL])}
        row["steps"] = len(taken)
        rows.append(row)
    rows[0]["table_bytes"] = num_sequences * tables.max_blocks * 4
    return rows


def promised(rows: Sequence[Row], num_sequences: int) -> list[Figure]:
    """The time of each way at the predicted batch size, for the worst length."""
    figures = []
    rows = [row for row in rows if row["num_sequences"] == num_sequences]
    rivals = {row["past_tokens"]: row["step_us"] for row in rows if row["way"] == RIVAL}
    for way in dict.fromkeys(row["way"] for row in rows if row["way"] != RIVAL):
        worst = max((row for row in rows if row["way"] == way), key=lambda row: row["ratio"])
        name = f"prepare_ratio_{way.removeprefix('vmkv, ').replace(' ', '_')}"
        what = f"host time to prepare a decode step of {num_sequences} sequences, relative to "
        what += f"block tables, worst length ({way}: {worst['step_us']:.3g} µs)"
        rival = f"{rivals[worst['past_tokens']]:.3g} µs"
        figures.append(Figure(name, what, worst["ratio"], "×", rival=rival))
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write."""
    bench = Bench("block_table", __doc__)
    options = bench.parse(argv)
    counts, lengths, steps = (
        ((2, 8), (64,), (4, 1))
        if options.smoke
        else ((1, 4, 16, 64, 256, 1024), (1024, 8192, 131072), (60, 10))
    )
    rows = []
    for past_tokens in lengths:
        for num_sequences in counts:
            rows += run(options.device, num_sequences, past_tokens, *steps)
    figures = promised(rows, counts[-1] if options.smoke else 256)
    return bench.finish(rows, figures, {"stagger_tokens": STAGGER_TOKENS})


if __name__ == "__main__":
    sys.exit(main())
