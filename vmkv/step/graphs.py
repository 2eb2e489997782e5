"""Steps as CUDA graphs over stable addresses: captured once per bucket, replayed for any content.

A graph is captured for sizes. Sequences, rows and lengths lie in one small buffer that every step
overwrites; pages are mapped and unmapped without recapture. Unused entries of a step work on the
scratch slot and the scratch row. Without CUDA, the same padded steps run eagerly.

Decode steps have one new token per sequence. A bucket is a number of sequences and an upper bound
of their lengths: kernels that split rows over the device cut them by that bound, and with a bound
of 128k a row of 2k would be one split. With enough sequences to fill the device nothing is split,
and one graph serves any length.
"""

from __future__ import annotations

import abc
import contextlib
import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from ..attention import AttentionBatch
from ..errors import CapacityError, ConfigError, one_line
from .model_guard import refusing_waits
from .piece import HeadInParts, Piece, likeliest, pinned
from .row_attention import StepParts, batches, row_capacities
from .state_plan import PackedSequences

if TYPE_CHECKING:
    from .stepper import Stepper

_LOG = logging.getLogger(__name__)
Key = TypeVar("Key")


class Scratch(NamedTuple):
    """The slot and the row of the cache that padding entries use, and no sequence."""

    slot: int
    row: int


class GraphSpace:
    """Model, input, output and memory that all graphs of a stepper share.

    Graphs run one after the other, so each may reuse the memory of those before it. `head` is the
    output head if it is divided among ranks. `agree` returns the maximum of a value over all ranks,
    so that they decide alike. `num_rows` is the most rows of logits of a step, by default one for
    each slot. `stream` is for captures, by default one of the stepper's: libraries
    keep a workspace of tens of MiB for every stream that they have seen.
    """

    def __init__(
        self,
        stepper: Stepper,
        vocab_size: int,
        dtype: torch.dtype,
        scratch: Scratch,
        *,
        agree: Callable[[int], int] = int,
        stream: torch.cuda.Stream | None = None,
        head: HeadInParts | None = None,
        num_rows: int = 0,
    ):
        self.agree = agree
        self.head = head
        self.vocab_size = vocab_size
        self.stepper = stepper
        self.last_tokens = stepper.last_tokens
        self.max_num_seqs = stepper.num_slots
        self.num_rows = num_rows or self.max_num_seqs
        self.max_tokens = stepper.caches[0].max_tokens
        self.capacities = row_capacities(stepper.caches[0])
        self.scratch = scratch
        self.device = stepper.device
        num_columns = vocab_size if head is None else head.num_columns
        # The last step's logits (or `head`'s part) and their argmax; each step overwrites them.
        shape = (self.num_rows, num_columns)
        self.logits = torch.empty(shape, dtype=dtype, device=self.device)
        self.token_ids = torch.zeros(self.num_rows, dtype=torch.int64, device=self.device)
        self.starts = torch.arange(self.max_num_seqs + 1, dtype=torch.int32, device=self.device)
        self._pool: Any = None
        self._stream = stream
        # A sequence occupies a processor per key head; kernels split if under 0.8 are occupied.
        groups = stepper.caches[0].kv_groups
        heads = min([group.geometry.shape.num_k_heads for group in groups], default=1)
        self._split_below = int(0.8 * stepper.num_processors / heads) + 1

    def bounds(self, batch_size: int) -> list[int]:
        """Return bounds of the lengths of sequences: one for batches that kernels do not split."""
        is_split = batch_size < self._split_below
        return length_buckets(self.max_tokens) if is_split else [self.max_tokens]

    def capture(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture `step` as a graph without running it; other threads may use CUDA meanwhile."""
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        if self._stream is None:
            self._stream = self.stepper.new_stream()
        # `torch.cuda.graph` would collect garbage and wait for the device each time.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            # cuBLAS then makes a workspace in the graph's memory, which lives as long as the graph.
            torch._C._cuda_clearCublasWorkspaces()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                step()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self.device).wait_stream(self._stream)
        return graph

    def sleep(self) -> None:
        """Free what graphs shared, once they are dropped, until the next capture."""
        self._pool = None
        self.logits = self.logits[:0].clone()

    def wake(self) -> None:
        """Have memory for logits."""
        if not len(self.logits):
            self.logits = self.logits.new_empty((self.num_rows, self.logits.shape[1]))

    def keep_whole(self) -> None:
        """Have every step gather all ranks' logits; call before any capture."""
        self.head = None
        self.logits = self.logits.new_empty((self.num_rows, self.vocab_size))

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        keep: torch.Tensor | None,
        parts: StepParts,
        sequences: PackedSequences | None = None,
    ) -> torch.Tensor:
        """Return the model's logits of a step, or this rank's part of them."""
        stepper, head = self.stepper, self.head
        in_room = stepper.head_in(self.logits) if head is None else head.in_part(self.logits)
        stepper.begin_states(parts, sequences)
        with in_room:
            return stepper.forward(token_ids, positions, keep, {self.device: parts})

    def take(self, logits: torch.Tensor, slots: torch.Tensor) -> None:
        """Choose tokens greedily; store `logits [n, columns]` and the tokens of `slots [n]`."""
        num_kept = logits.shape[0]
        if logits.data_ptr() != self.logits.data_ptr():  # A part may be in place already.
            self.logits[:num_kept].copy_(logits)
        chosen = likeliest(logits) if self.head is None else self.head.likeliest(logits)
        self.token_ids[:num_kept].copy_(chosen)
        self.last_tokens.index_copy_(0, slots, chosen)


class StepGraphs(abc.ABC, Generic[Key]):
    """The graphs of one kind of step; their input takes at most `num_integers`."""

    name: str

    def __init__(self, space: GraphSpace, num_integers: int):
        self.space = space
        self._input = torch.zeros(num_integers, dtype=torch.int32, device=space.device)
        self._graphs: dict[Key, torch.cuda.CUDAGraph | None] = {}
        self._num_runs: Counter[Key] = Counter()
        self._refused: set[Key] = set()

    @abc.abstractmethod
    def empty(self, key: Key) -> torch.Tensor:
        """Return the input of a step of padding, on the host."""

    @abc.abstractmethod
    def step(self, key: Key, integers: torch.Tensor) -> None:
        """Run the step to be captured: from `integers`, on the device, to `GraphSpace.take`."""

    @property
    def captured(self) -> Sequence[Key]:
        """Buckets that have a graph."""
        return tuple(self._graphs)

    def replay(self, key: Key, integers: torch.Tensor) -> None:
        """Run a step with the input `integers`, first capturing a missing graph. Never waits."""
        if key not in self._graphs:
            self.capture(key)
        self._send(integers)
        graph = self._graphs[key]
        if graph is None:
            self.step(key, self._input)
        else:
            graph.replay()

    def run_recurring(
        self,
        key: Key,
        integers: torch.Tensor,
        context: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> bool:
        """Run a step of a size that may come again, within `context` unless it is replayed.

        The first run is plain, so that kernels are loaded and tuned. The second is plain too, while
        torch refuses to wait for the device, because a failed capture leaves torch's allocator in
        the state of a capture. The third is captured. Where layers keep states, a step of padding
        is run before each plain one, and tells whether it fails.

        Returns False for a size that cannot be captured, then and from then on: the caller computes
        the step otherwise, over the same rows. Errors of plain runs are raised, but for
        `ConfigError` (no kernel), `CapacityError` (no memory for its over-read), and any error of
        compiled layers.
        """
        if self._graphs.get(key) is not None:
            self.replay(key, integers)
            return True
        if key in self._refused:
            return False
        self._num_runs[key] += 1
        is_cuda, count = self.space.device.type == "cuda", self._num_runs[key]
        is_trial = is_cuda and count == 2
        is_plain = (count < 3 and not is_trial) or key in self._graphs
        is_rehearsed = self.space.stepper.has_states and count < 3
        try:
            with context(), refusing_waits() if is_trial else contextlib.nullcontext():
                if is_rehearsed:
                    self.run(key, self.empty(key))
                elif is_plain or is_trial:
                    self.run(key, integers)
                else:
                    if is_cuda and not self._graphs:
                        torch.cuda.empty_cache()  # Graphs cannot use torch's cached memory.
                    self.replay(key, integers)
        except Exception as error:
            is_refusal = isinstance(error, (ConfigError, CapacityError))
            if is_plain and not is_refusal and not self.space.stepper.uses_operator:
                raise
            self._refused.add(key)
            _LOG.warning("%s cannot be captured for %s: %s", self.name, key, one_line(error))
            return False
        if is_rehearsed:
            self.run(key, integers)
        return True

    def capture(self, key: Key) -> None:
        """Capture the graph of `key`; the model has run before."""
        self.space.wake()
        self._send(self.empty(key))
        is_cuda = self.space.device.type == "cuda"
        graph = self.space.capture(lambda: self.step(key, self._input)) if is_cuda else None
        self._graphs[key] = graph

    def drop(self, key: Key) -> None:
        """Free the graph of `key`; the device has finished with it."""
        graph = self._graphs.pop(key)
        if graph is not None:
            graph.reset()

    def run(self, key: Key, integers: torch.Tensor) -> None:
        """Run a step without a graph; on padding, to compile, tune and load its kernels."""
        self._send(integers)
        self.step(key, self._input)

    def rehearse_and_capture(self, key: Key, *, is_new: bool) -> None:
        """Capture a graph, after a step of padding if it `is_new` or the first one.

        On CUDA, before the first one, padding also runs while torch refuses to wait for the device.
        """
        if is_new or not self.captured:
            self.run(key, self.empty(key))
        if not self.captured and self.space.device.type == "cuda":
            with refusing_waits():
                self.run(key, self.empty(key))
        self.capture(key)

    def _send(self, integers: torch.Tensor) -> None:
        self._input[: integers.shape[0]].copy_(integers, non_blocking=True)

    def close(self) -> None:
        """Drop the graphs and their memory. Idempotent; the caller has waited for the device."""
        for key in self.captured:
            self.drop(key)


# ---- decode steps --------------------------------------------------------------------------------

#: Lines of a step's input: slots, rows, tokens before, tokens after, and the token from the host
#: (-1 if it is on the device).
_LINES = 5
_SHORTEST_TOKENS = 1024

Bucket = tuple[int, int]
"""Number of sequences, and the bound of their lengths in tokens."""


class DecodeGraphs(StepGraphs[Bucket]):
    """The decode graphs of one stepper; `few` gives fewer widths, which pad more."""

    name = "decode steps"

    def __init__(self, space: GraphSpace, *, few: bool = False):
        self._widths = batch_buckets(space.max_num_seqs, few=few)
        self._bounds = {width: space.bounds(width) for width in self._widths}
        super().__init__(space, _LINES * self._widths[-1])

    def key(self, batch_size: int, longest: int) -> Bucket:
        """Return the bucket of `batch_size` sequences of at most `longest` tokens."""
        width = self._widths[bisect_left(self._widths, batch_size)]
        bounds = self._bounds[width]
        return width, bounds[bisect_left(bounds, longest)]

    def keys(self) -> Sequence[Bucket]:
        """Return all buckets, the largest first, so that the later ones find memory to share."""
        widths = reversed(self._widths)
        return [(width, bound) for width in widths for bound in reversed(self._bounds[width])]

    def capture_all(self, captured: Callable[[], object]) -> None:
        """Capture every graph, each followed by `captured`; raises if one cannot be."""
        for key in self.keys():
            # Layers are compiled and tuned separately for one sequence, and others for each size.
            self.rehearse_and_capture(key, is_new=key[0] == 1 or self.space.stepper.has_states)
            captured()

    def fill(self, key: Bucket, pieces: Sequence[Piece]) -> torch.Tensor:
        """Return a step's input for decoding `pieces`, on the host."""
        width, count = key[0], len(pieces)
        host, flat = pinned(_LINES * width, self.space.device)
        columns = [
            (
                *(each.slot, each.row, each.num_past_tokens, each.num_past_tokens + 1),
                -1 if each.token_ids is None else each.token_ids[0],
            )
            for each in pieces
        ]
        columns += [(*self.space.scratch, 0, 1, 0)] * (width - count)
        flat.reshape(_LINES, width)[:] = np.array(columns, np.int32).T
        return host

    def empty(self, key: Bucket) -> torch.Tensor:
        """Return the input of a step of padding, on the host."""
        return self.fill(key, [])

    def step(self, key: Bucket, integers: torch.Tensor) -> None:
        """Run the step: tokens from the host or the slots, to `GraphSpace.take`."""
        width, bound = key
        slots, rows, before, after, from_host = integers[: _LINES * width].view(_LINES, width)
        space = self.space
        slots, from_host = slots.long(), from_host.long()
        token_ids = torch.where(from_host < 0, space.last_tokens[slots], from_host)
        parts = _decode_parts(space, rows, before, after, bound)
        space.take(space.forward(token_ids, before.long(), None, parts), slots)


def _decode_parts(
    space: GraphSpace,
    rows: torch.Tensor,
    past_tokens: torch.Tensor,
    num_tokens: torch.Tensor,
    max_num_tokens: int,
    left_pad: torch.Tensor | None = None,
) -> StepParts:
    """Describe a step in which every sequence decodes; vectors are `[B] int32` on the device."""
    width = rows.shape[0]
    vectors = rows, num_tokens, space.starts[: width + 1]
    whole = AttentionBatch(*vectors, 1, max_num_tokens, 0, left_pad, past_tokens)
    return StepParts(width, 0, batches(space.capacities, whole))


def batch_buckets(max_batch: int, *, few: bool = False) -> list[int]:
    """Return graph widths to `max_batch`: powers of two to 8, or to 64 if `few`, then finer."""
    widths, width = [], 1
    while width < max_batch:
        widths.append(width)
        if width < (64 if few else 8):
            width *= 2
        elif few:
            width += 1 << width.bit_length() - 2
        else:
            width += 8 if width < 64 else 16 if width < 256 else 32
    return [*widths, max_batch]


def length_buckets(max_tokens: int) -> list[int]:
    """Return bounds of lengths: powers of two and midpoints, up to `max_tokens`."""
    bounds, bound = [], _SHORTEST_TOKENS
    while bound < max_tokens:
        bounds += [bound, bound * 3 // 2]
        bound *= 2
    return [each for each in bounds if each < max_tokens] + [max_tokens]


#: Lines of a step's input: tokens before, and tokens after.
_BATCH_LINES = 2


class BatchBucket(NamedTuple):
    """Key of a batch graph: the bound of the rows' lengths, and whether `left_pad` applies."""

    max_num_tokens: int
    is_padded: bool


class BatchGraphs(StepGraphs[BatchBucket]):
    """The decode graphs of a fixed batch; the caller writes `positions` and `left_pad` before."""

    name = "decode steps of a batch"

    def __init__(self, space: GraphSpace):
        width = space.max_num_seqs
        super().__init__(space, _BATCH_LINES * width)
        self._bounds = space.bounds(width)
        # `[B]`: positions of the new tokens.
        self.positions = torch.zeros(width, dtype=torch.int64, device=space.device)
        # `[B]`: leading tokens of each row that are not attended to.
        self.left_pad = torch.zeros(width, dtype=torch.int32, device=space.device)

    def key(self, num_tokens: int, *, is_padded: bool) -> BatchBucket:
        """Return the bucket of rows that hold `num_tokens` after the step."""
        return BatchBucket(self._bounds[bisect_left(self._bounds, num_tokens)], is_padded)

    def fill(self, num_tokens: int) -> torch.Tensor:
        """Return the input of a step after which rows hold `num_tokens`, on the host."""
        width = self.space.max_num_seqs
        host, flat = pinned(_BATCH_LINES * width, self.space.device)
        flat[:width], flat[width:] = num_tokens - 1, num_tokens
        return host

    def empty(self, key: BatchBucket) -> torch.Tensor:
        """Return an input for capturing; it is never run."""
        return self.fill(1)

    def step(self, key: BatchBucket, integers: torch.Tensor) -> None:
        """Run the step: logits go to `GraphSpace.logits`, and no token is chosen."""
        space = self.space
        width = space.max_num_seqs
        before, after = integers.view(_BATCH_LINES, width)
        left_pad = self.left_pad if key.is_padded else None
        rows = space.starts[:width]
        parts = _decode_parts(space, rows, before, after, key.max_num_tokens, left_pad)
        space.logits.copy_(space.forward(space.last_tokens[:width], self.positions, None, parts))
