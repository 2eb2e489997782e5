"""Decode steps as CUDA graphs over stable addresses.

A graph is captured once for a number of sequences and an upper bound of their lengths, and replayed
whatever sequences, rows and lengths it is then given: those lie in one small buffer that every
step overwrites, and pages are mapped and unmapped under the graph without its knowing. Entries
that a step leaves empty work on the scratch row.

The bound on the lengths matters to few sequences only. A kernel that splits a row over the device
cuts it by that bound, so with a bound of 128k a row of 2k would be one split's work; where there
are as many sequences as the device can hold at once nothing is split, and one graph serves any
length.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ...attention import AttentionBatch
from .buffers import DECODE_LINES
from .row_attention import RowAttention, StepParts

_SHORTEST_TOKENS = 1024


class DecodeGraphs:
    """The graphs of one runner.

    Args:
        forward: From token ids `[B] int64` and positions `[B] int64` to logits `[B, vocabulary]`.
        attention: What the model's layers attend through.
        last_tokens: `[slots] int64`, the token sampled last in each slot; read and written.
        vocab_size: Columns of the logits.
        dtype: Theirs.
        max_batch: The most sequences of a step.
        max_tokens: The longest sequence.
        split_below: How many sequences keep the device busy without being split.
        scratch: The slot and the row that empty entries work on.

    Attributes:
        logits: `[max_batch, vocabulary]`, the last replay's; overwritten by the next.
        token_ids: `[max_batch] int64`, their argmax; likewise.
    """

    def __init__(
        self,
        forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        attention: RowAttention,
        last_tokens: torch.Tensor,
        *,
        vocab_size: int,
        dtype: torch.dtype,
        max_batch: int,
        max_tokens: int,
        split_below: int,
        scratch: tuple[int, int],
    ):
        self._forward = forward
        self._attention = attention
        self._last_tokens = last_tokens
        self._max_tokens = max_tokens
        self._split_below = split_below
        self.batch_buckets = batch_buckets(max_batch)
        self.length_buckets = length_buckets(max_tokens)
        device = last_tokens.device
        widest = self.batch_buckets[-1]
        self._lines = torch.zeros(DECODE_LINES * widest, dtype=torch.int32, device=device)
        self._starts = torch.arange(widest + 1, dtype=torch.int32, device=device)
        self._scratch = scratch
        self.logits = torch.empty((widest, vocab_size), dtype=dtype, device=device)
        self.token_ids = torch.zeros(widest, dtype=torch.int64, device=device)
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    # ---- which graph ----------------------------------------------------------------------

    def key(self, batch_size: int, longest: int) -> tuple[int, int]:
        """The graph for so many sequences of at most `longest` tokens: its width and bound."""
        width = self.batch_buckets[bisect_left(self.batch_buckets, batch_size)]
        if width >= self._split_below:
            return width, self._max_tokens
        return width, self.length_buckets[bisect_left(self.length_buckets, longest)]

    def keys(self) -> Iterator[tuple[int, int]]:
        """All there can be, the largest first, so that the later ones find memory to share."""
        for width in reversed(self.batch_buckets):
            if width >= self._split_below:
                yield width, self._max_tokens
            else:
                yield from ((width, bound) for bound in reversed(self.length_buckets))

    @property
    def captured(self) -> Sequence[tuple[int, int]]:
        """Those there are."""
        return tuple(self._graphs)

    # ---- running --------------------------------------------------------------------------

    def replay(self, key: tuple[int, int], lines: torch.Tensor) -> None:
        """Run a step, capturing its graph first if it is new. Never waits.

        Args:
            key: See `key`.
            lines: `decode_lines` of its width.
        """
        graph = self._graphs.get(key)
        if graph is None:
            graph = self.capture(key)
        self._lines[: lines.shape[0]].copy_(lines, non_blocking=True)
        graph.replay()

    def capture(self, key: tuple[int, int]) -> torch.cuda.CUDAGraph:
        """Capture the graph of `key`; the model has run with as many tokens before.

        Other threads may call CUDA meanwhile; the device's work goes on.
        """
        self._point_at_scratch(key[0])
        graph = torch.cuda.CUDAGraph()
        if self._pool is None or self._stream is None:
            self._pool = torch.cuda.graph_pool_handle()
            # torch leaves its constructor untyped.
            self._stream = torch.cuda.Stream(self._lines.device)  # type: ignore[no-untyped-call]
        # Not `torch.cuda.graph`: that collects garbage and waits for the device each time.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                self._step(key)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        self._graphs[key] = graph
        return graph

    def warm_up(self, key: tuple[int, int]) -> None:
        """Run the step of `key` on the scratch row: compiles, tunes and loads what it needs."""
        self._point_at_scratch(key[0])
        self._step(key)

    def _point_at_scratch(self, width: int) -> None:
        lines = self._lines[: DECODE_LINES * width].view(DECODE_LINES, width)
        slot, row = self._scratch
        for line, value in enumerate((slot, row, 0, 1, 0)):
            lines[line].fill_(value)

    def _step(self, key: tuple[int, int]) -> None:
        """What is captured: gather tokens, run the model, choose greedily, hand tokens on."""
        width, bound = key
        lines = self._lines[: DECODE_LINES * width].view(DECODE_LINES, width)
        slots = lines[0].long()
        from_host = lines[4].long()
        token_ids = torch.where(from_host < 0, self._last_tokens[slots], from_host)
        self._attention.step = self._parts(lines, width, bound)
        try:
            logits = self._forward(token_ids, lines[2].long())
        finally:
            self._attention.step = None
        self.logits[:width].copy_(logits)
        chosen = logits.argmax(-1)
        self.token_ids[:width].copy_(chosen)
        self._last_tokens.index_copy_(0, slots, chosen)

    def _parts(self, lines: torch.Tensor, width: int, bound: int) -> StepParts:
        batches = {}
        for capacity in self._attention.row_tokens:
            batch = batches[capacity] = AttentionBatch(
                row_indices=lines[1],
                num_tokens=lines[3],
                query_starts=self._starts[: width + 1],
                max_query_tokens=1,
                max_num_tokens=min(bound, capacity),
                row_tokens=capacity,
            )
            vars(batch)["tokens_before"] = lines[2]
        return StepParts(width, 0, everything=batches, decode=batches)

    def close(self) -> None:
        """Drop the graphs and their memory. Idempotent; the caller has waited for the device."""
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()


def batch_buckets(max_batch: int) -> list[int]:
    """Widths of graphs: powers of two to 8, then steps that waste at most an eighth or so."""
    widths = [1, 2, 4]
    width = 8
    while width < max_batch:
        widths.append(width)
        width += 8 if width < 64 else 16 if width < 256 else 32
    return [each for each in widths if each < max_batch] + [max_batch]


def length_buckets(max_tokens: int) -> list[int]:
    """Bounds of lengths: powers of two and halfway between, to `max_tokens`."""
    bounds, bound = [], _SHORTEST_TOKENS
    while bound < max_tokens:
        bounds += [bound, bound * 3 // 2]
        bound *= 2
    return [each for each in bounds if each < max_tokens] + [max_tokens]
