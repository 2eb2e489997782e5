"""Steps as CUDA graphs over stable addresses: captured once per bucket, replayed for any content.

A graph is captured for sizes, and replayed whatever sequences, rows and lengths it is then given:
those lie in one small buffer that every step overwrites, and pages are mapped and unmapped under
the graph without its knowing. What a step leaves empty of its sizes works on the scratch slot and
the scratch row.

`decode_graphs.py` and `mixed_graphs.py` say what their steps are. Where there is no CUDA, the same
padded steps run uncaptured, one operation after the other.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from ..core.cache import KVCache
from .logits import HeadInParts, likeliest
from .row_attention import RowAttention, row_capacities

Key = TypeVar("Key")
_TIMED_REPLAYS = 3


class Scratch(NamedTuple):
    """What empty entries work on, and nobody else: a slot, and a row of the cache."""

    slot: int
    row: int


class GraphSpace:
    """What all graphs of a stepper share: the model, their input and output, and their memory.

    Graphs run one after the other, so each may use the memory of those before it.

    Args:
        forward: From token ids `[T] int64`, positions `[T] int64` and the places to keep
            `[n] int64` (None for all) to logits `[n, vocabulary]`.
        attention: What the model's layers attend through.
        cache: Its rows.
        last_tokens: `[slots] int64`, the token sampled last in each slot; read and written.
        vocab_size: Columns of the logits.
        dtype: Theirs.
        max_num_seqs: The most sequences of a step.
        scratch: See there.
        agree: The largest of all ranks' values: what each measures by itself must not part them.
        stream: What to capture on; by default one of its own. Libraries keep a workspace of tens of
            MiB for each stream that they ever saw.
        head: The model's output head, where ranks have parts of it that are not to be put together
            in every step.

    Attributes:
        logits: `[max_num_seqs, vocabulary]`, the last step's, or `head`'s part of them;
            overwritten by the next.
        token_ids: `[max_num_seqs] int64`, their argmax; likewise.
    """

    def __init__(
        self,
        forward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor],
        attention: RowAttention,
        cache: KVCache,
        last_tokens: torch.Tensor,
        *,
        vocab_size: int,
        dtype: torch.dtype,
        max_num_seqs: int,
        scratch: Scratch,
        agree: Callable[[int], int] = int,
        stream: torch.cuda.Stream | None = None,
        head: HeadInParts | None = None,
    ):
        self.agree = agree
        self.head = head
        self.vocab_size = vocab_size
        self._forward = forward
        self.attention = attention
        self.last_tokens = last_tokens
        self.max_num_seqs = max_num_seqs
        self.max_tokens = cache.max_tokens
        self.capacities = row_capacities(cache)
        self.scratch = scratch
        self.device = last_tokens.device
        num_columns = vocab_size if head is None else head.num_columns
        self.logits = torch.empty((max_num_seqs, num_columns), dtype=dtype, device=self.device)
        self.token_ids = torch.zeros(max_num_seqs, dtype=torch.int64, device=self.device)
        self._pool: Any = None
        self._stream = stream

    def capture(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """`step` as a graph; nothing of it runs.

        Other threads may call CUDA meanwhile; the device's work goes on.
        """
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        if self._stream is None:
            # torch leaves its constructor untyped.
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        # Not `torch.cuda.graph`: that collects garbage and waits for the device each time.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                step()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self.device).wait_stream(self._stream)
        return graph

    def keep_whole(self) -> None:
        """Have steps put all ranks' logits together; nothing is captured yet."""
        self.head = None
        self.logits = self.logits.new_empty((self.max_num_seqs, self.vocab_size))

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor | None
    ) -> torch.Tensor:
        """The model's logits, or `head`'s part of them; see the argument."""
        if self.head is None:
            return self._forward(token_ids, positions, keep)
        with self.head.in_part(self.logits):
            return self._forward(token_ids, positions, keep)

    def take(self, logits: torch.Tensor, slots: torch.Tensor) -> None:
        """Choose greedily, and leave logits and tokens where the next step and the host look.

        Args:
            logits: `[n, vocabulary]`, or `head`'s part of them.
            slots: `[n] int64`, whose tokens those are.
        """
        num_kept = logits.shape[0]
        if logits.data_ptr() != self.logits.data_ptr():  # A part may have been computed there.
            self.logits[:num_kept].copy_(logits)
        chosen = likeliest(logits) if self.head is None else self.head.likeliest(logits)
        self.token_ids[:num_kept].copy_(chosen)
        self.last_tokens.index_copy_(0, slots, chosen)


class StepGraphs(abc.ABC, Generic[Key]):
    """The graphs of one kind of step.

    Args:
        space: What they share with others.
        num_integers: What the widest of them takes as input.

    Attributes:
        name: What messages call such steps.
    """

    name: str

    def __init__(self, space: GraphSpace, num_integers: int):
        self.space = space
        self._input = torch.zeros(num_integers, dtype=torch.int32, device=space.device)
        self._graphs: dict[Key, torch.cuda.CUDAGraph | None] = {}

    @abc.abstractmethod
    def keys(self) -> Sequence[Key]:
        """All there can be, the largest first, so that the later ones find memory to share."""

    @abc.abstractmethod
    def empty(self, key: Key) -> torch.Tensor:
        """The input of a step in which nothing happens, on the host."""

    @abc.abstractmethod
    def step(self, key: Key, integers: torch.Tensor) -> None:
        """What is captured: from `integers`, on the device, to `GraphSpace.take`."""

    @property
    def captured(self) -> Sequence[Key]:
        """Those there are."""
        return tuple(self._graphs)

    def replay(self, key: Key, integers: torch.Tensor) -> None:
        """Run a step, capturing its graph first if it is new. Never waits.

        Args:
            key: The bucket.
            integers: Its input, as `empty` but with something in it.
        """
        if key not in self._graphs:
            self.capture(key)
        self._send(integers)
        graph = self._graphs[key]
        if graph is None:
            self._run(key)
        else:
            graph.replay()

    def capture_all(self, captured: Callable[[], object]) -> None:
        """Capture every graph; `captured` is called after each.

        Raises:
            RuntimeError, ConfigError: A graph cannot be captured. Those that were are there.
        """
        for key in self.keys():
            if not self.captured or self.needs_warm_up(key):
                self.warm_up(key)
            self.capture(key)
            captured()

    def needs_warm_up(self, key: Key) -> bool:
        """Whether the step of `key` does what no step before it has done."""
        return False

    def capture(self, key: Key) -> None:
        """Capture the graph of `key`; the model has run before."""
        self._send(self.empty(key))
        is_cuda = self.space.device.type == "cuda"
        self._graphs[key] = self.space.capture(lambda: self._run(key)) if is_cuda else None

    def drop(self, key: Key) -> None:
        """Forget the graph of `key`, and free its memory; the device has finished with it."""
        graph = self._graphs.pop(key)
        if graph is not None:
            graph.reset()

    def replay_ms(self, key: Key, integers: torch.Tensor) -> float:
        """What the device takes for a step of `key` with such an input. Waits for it."""
        graph = self._graphs[key]
        assert graph is not None  # Asked of devices that capture.
        self._send(integers)
        times_ms = []
        for _ in range(_TIMED_REPLAYS):
            start, end = (
                # torch leaves its constructor untyped.
                torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                for _ in range(2)
            )
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times_ms.append(float(start.elapsed_time(end)))
        return min(times_ms)

    def warm_up(self, key: Key) -> None:
        """Run the step of `key` with nothing in it: compiles, tunes and loads what it needs."""
        self.run(key, self.empty(key))

    def run(self, key: Key, integers: torch.Tensor) -> None:
        """Run a step uncaptured; see `replay`."""
        self._send(integers)
        self._run(key)

    def _send(self, integers: torch.Tensor) -> None:
        self._input[: integers.shape[0]].copy_(integers, non_blocking=True)

    def _run(self, key: Key) -> None:
        try:
            self.step(key, self._input)
        finally:
            self.space.attention.steps = None

    def close(self) -> None:
        """Drop the graphs and their memory. Idempotent; the caller has waited for the device."""
        for key in self.captured:
            self.drop(key)
