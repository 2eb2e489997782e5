"""What does it cost the host to tell kernels where a decode step's sequences lie?

Question. Before a decode step of one token per sequence, the host tells the device where each
sequence lies and how long it is. What does that cost through block tables and slot mappings, and
what through row indices and lengths?

Prediction. Block tables of 256 sequences of 128k tokens are 256 * 8,192 blocks * 4 B = 8 MiB a
step: 0.16 ms of copy at 50 GB/s, which the host only waits for where memory is not pinned;
vectorised numpy for the slots is ten calls, 15 us; a sixteenth of the rows cross a block's end, 16
rows of Python at 1 us; three copies to launch at 6 us: 50 us. Rows and lengths: 12 bytes a sequence
and one copy, 15 us, if the host counts in numpy. What vmkv does before it replays a captured step
starts from Python integers instead, because sequences come and go: a look at how far each row may
be written, 1.5 us a sequence, a piece for each, 1 us, and the numbers into one pinned array: 0.8 ms
for 256, slower than block tables, and hidden where the device is the limit. Where a sixteenth of
the sequences grow in every step, planning costs 2 us for each and mapping 4 on the host: 0.1 ms
more. `AttentionBatch.build` checks every length in Python, some 1 us a sequence: 0.3 ms for 256.

Method. Host time of one step, the device idle before and waited for after, outside the clock. All
ways decode the same sequences (equal lengths, staggered by 7 so that they do not cross blocks
together), and take turns; median and quartiles over steps. On a machine without a GPU "uploading"
is a copy within memory, and is the host's.

Ways. "step": all that vmkv.generate and the engine do before they replay a captured decode step
(KVCache.grow, pieces, DecodeGraphs.fill, one copy), every page resident, as the block tables'
blocks are. "step, growing": the same with 16 tokens a page, none resident yet, so that a sixteenth
of the sequences are grown and mapped in every step (on the host backend). "upload": lengths counted
in a pinned numpy array, one copy. "build": AttentionBatch.build from Python integers, with all its
checks. "grow": KVCache.grow for all sequences where every page is resident.

Rivals. vLLM's way (rivals.BlockTables) at its best: one pinned table no wider than the longest
sequence of the batch will need, kept up incrementally, vectorised slots, three copies of
preallocated buffers; blocks of 16 tokens. `check` proves that its slots are right.

Not measured. What kernels do with either (bench_attention); mapping pages (bench_mapping: 0.5 us a
token and sequence); prefix sharing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from common import spread, write_result
from report import Figure, Row, bench_parser, make_record, print_figures, print_rows
from rivals import BlockTables

from vmkv import HostBackend, KVCache
from vmkv.attention import AttentionBatch
from vmkv.memory import ExtentPool
from vmkv.step import Piece
from vmkv.step.decode_graphs import DecodeGraphs
from vmkv.step.graphs import GraphSpace, Scratch
from vmkv.step.row_attention import RowAttention
from vmkv.units import KiB, MiB

NUM_SEQUENCES = (1, 4, 16, 64, 256, 1024)
PAST_TOKENS = (1024, 8192, 131072)
STEPS = 60
WARMUP_STEPS = 10
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
    """A checked batch from Python integers, anew for every step."""
    rows, counted, queries = range(len(lengths)), list(lengths), [1] * len(lengths)

    def prepare_step() -> AttentionBatch:
        for at in rows:
            counted[at] += 1
        return AttentionBatch.build(rows, counted, queries, row_tokens=row_tokens, device=device)

    return prepare_step


class Rows:
    """Sequences of a KVCache on the host backend; two bytes a token, so that any batch fits.

    Planning costs the same for any length and size.

    Args:
        lengths: Only how many there are matters, and how they are staggered.
        num_steps: They can grow so much.
        page_tokens: Tokens that a page holds.
        is_resident: Whether all pages are mapped already.
    """

    def __init__(
        self, lengths: Sequence[int], num_steps: int, page_tokens: int = 2048, *, is_resident: bool
    ):
        self._pool = ExtentPool(HostBackend(4 * KiB), 256 * MiB)
        end = num_steps + STAGGER_TOKENS * 16 + 1
        self.core = KVCache(
            self._pool, max_tokens=end, max_sequences=len(lengths), layers_per_group=1
        )
        dim = 2 * KiB // page_tokens
        self.core.add_layers(range(1), num_kv_heads=1, head_dim=dim, dtype=torch.uint8)
        self.sequences = [self.core.open() for _ in lengths]
        staggered = [1 + length - min(lengths) for length in lengths]
        if is_resident:
            self.core.grow([(sequence, end) for sequence in self.sequences])
            for sequence, length in zip(self.sequences, staggered, strict=True):
                sequence.truncate(length)
        else:
            self.core.grow(zip(self.sequences, staggered, strict=True))

    def grow_all(self) -> None:
        """All sequences, one token longer."""
        self.core.grow([(each, each.num_tokens + 1) for each in self.sequences])

    def close(self) -> None:
        self.core.close()
        self._pool.close()


class StepWay:
    """What vmkv does before it replays a captured decode step."""

    def __init__(self, lengths: Sequence[int], row_tokens: int, device: torch.device, rows: Rows):
        self._rows, self._lengths = rows, list(lengths)
        count = len(lengths)
        space = GraphSpace(
            _no_model,
            RowAttention([]),
            rows.core,
            torch.zeros(count + 1, dtype=torch.int64, device=device),
            vocab_size=1,
            dtype=torch.float32,
            max_num_seqs=count,
            scratch=Scratch(count, 0),
        )
        self._graphs = DecodeGraphs(space, split_below=1)
        self._bucket = (count, row_tokens)
        self._input = self._graphs.empty(self._bucket).to(device)
        self._num_steps = 0

    def prepare_step(self) -> None:
        sequences = self._rows.sequences
        self._rows.grow_all()
        self._num_steps += 1
        pieces = [
            Piece(at, sequence.row, length + self._num_steps, 1, None)
            for at, (sequence, length) in enumerate(zip(sequences, self._lengths, strict=True))
        ]
        self._input.copy_(self._graphs.fill(self._bucket, pieces), non_blocking=True)

    def check(self) -> None:
        """The device is told what the host has counted.

        Raises:
            AssertionError: Then the time means nothing.
        """
        past = self._input.view(-1, len(self._lengths))[2]
        assert past.tolist() == [length + self._num_steps for length in self._lengths]


def _no_model(*_: object) -> torch.Tensor:
    raise AssertionError("no step is run here")


def host_us(work: Callable[[], object]) -> float:
    """Host microseconds of `work`, without the device's."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return 1e6 * seconds


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
    resident, growing, grow = (
        Rows(lengths, total_steps, is_resident=True),
        Rows(lengths, total_steps, page_tokens=16, is_resident=False),
        Rows(lengths, total_steps, is_resident=True),
    )
    steps = [StepWay(lengths, row_tokens, device, rows) for rows in (resident, growing)]
    ways = {
        RIVAL: tables.prepare_step,
        "vmkv, step": steps[0].prepare_step,
        "vmkv, step, growing": steps[1].prepare_step,
        "vmkv, upload": upload_way(lengths, row_tokens, device),
        "vmkv, build": build_way(lengths, row_tokens, device),
        "vmkv, grow": grow.grow_all,
    }
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for step in range(total_steps):
        names = list(ways)
        at = step % len(names)
        for name in names[at:] + names[:at]:
            taken = host_us(ways[name])
            if step >= warmup_steps:
                samples[name].append(taken)
    for each in (tables, *steps):
        each.check()
    for each in (resident, growing, grow):
        each.close()
    rows = []
    for name, taken in samples.items():
        values = spread(taken)
        ratios = [mine / theirs for mine, theirs in zip(taken, samples[RIVAL], strict=True)]
        row = {
            "num_sequences": num_sequences,
            "past_tokens": past_tokens,
            "way": name,
            "step_us": values["median"],
            "step_us_q1": values["q1"],
            "step_us_q3": values["q3"],
            "ratio": spread(ratios)["median"],
            "steps": len(taken),
        }
        if name == RIVAL:
            row["table_bytes"] = num_sequences * tables.max_blocks * 4
        rows.append(row)
    return rows


def promised(rows: Sequence[Row], num_sequences: int) -> list[Figure]:
    """Each way at the promised batch, in its worst length."""
    figures = []
    for way in dict.fromkeys(row["way"] for row in rows if row["way"] != RIVAL):
        mine = [row for row in rows if row["way"] == way and row["num_sequences"] == num_sequences]
        worst = max(mine, key=lambda row: row["ratio"])
        rival = next(
            row["step_us"]
            for row in rows
            if row["way"] == RIVAL
            and row["num_sequences"] == num_sequences
            and row["past_tokens"] == worst["past_tokens"]
        )
        figures.append(
            Figure(
                f"prepare_ratio_{way.removeprefix('vmkv, ').replace(', ', '_')}",
                f"host time to prepare a decode step of {num_sequences} sequences, relative to "
                f"block tables, worst length ({way}: {worst['step_us']:.3g} µs)",
                worst["ratio"],
                "×",
                rival=f"{rival:.3g} µs",
            )
        )
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write."""
    options = bench_parser(__doc__).parse_args(argv)
    counts, lengths, num_steps, warmup_steps = (
        ((2, 8), (64,), 4, 1)
        if options.smoke
        else (NUM_SEQUENCES, PAST_TOKENS, STEPS, WARMUP_STEPS)
    )
    use_gpu = torch.cuda.is_available() and not options.smoke
    device = torch.device("cuda" if use_gpu else "cpu")
    rows = []
    for past_tokens in lengths:
        for num_sequences in counts:
            rows += run(device, num_sequences, past_tokens, num_steps, warmup_steps)
    figures = promised(rows, counts[-1] if options.smoke else 256)
    print_rows(rows)
    print_figures(figures)
    if options.json is not None or not options.smoke:
        constants = {"warmup_steps": warmup_steps, "stagger_tokens": STAGGER_TOKENS}
        record = make_record(__doc__, rows, figures, constants)
        print("wrote", write_result("block_table", record, options.json))
    return 0


if __name__ == "__main__":
    sys.exit(main())
