"""Steps as CUDA graphs over stable addresses: captured once per bucket, replayed for any content.

A graph is captured for sizes. Sequences, rows and lengths lie in one small buffer that every step
overwrites; pages are mapped and unmapped without recapture. Unused entries of a step work on the
scratch slot and the scratch row. Without CUDA, the same padded steps run eagerly.
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
    """The slot and the row of the cache that padding entries use, and no sequence."""

    slot: int
    row: int


class GraphSpace:
    """Model, input, output and memory that all graphs of a stepper share.

    Graphs run one after the other, so each may reuse the memory of those before it. `forward` maps
    token ids `[T]`, positions `[T]` and indices to keep `[n]` or None, all `int64`, to logits;
    `head` is the output head if it is divided among ranks. `agree` returns the maximum of a value
    over all ranks, so that they decide alike. `stream` is for captures: libraries keep a workspace
    of tens of MiB for every stream that they have seen.
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
        self.last_tokens = last_tokens  # `[slots]`: the token sampled last in each slot.
        self.max_num_seqs = max_num_seqs
        self.max_tokens = cache.max_tokens
        self.capacities = row_capacities(cache)
        self.scratch = scratch
        self.device = last_tokens.device
        num_columns = vocab_size if head is None else head.num_columns
        # The last step's logits (or `head`'s part) and their argmax; each step overwrites them.
        self.logits = torch.empty((max_num_seqs, num_columns), dtype=dtype, device=self.device)
        self.token_ids = torch.zeros(max_num_seqs, dtype=torch.int64, device=self.device)
        self._pool: Any = None
        self._stream = stream

    def capture(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture `step` as a graph without running it; other threads may use CUDA meanwhile."""
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        # `torch.cuda.graph` would collect garbage and wait for the device each time.
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
        """Have every step gather all ranks' logits; call before any capture."""
        self.head = None
        self.logits = self.logits.new_empty((self.max_num_seqs, self.vocab_size))

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the model's logits, or this rank's part of them."""
        if self.head is None:
            return self._forward(token_ids, positions, keep)
        with self.head.in_part(self.logits):
            return self._forward(token_ids, positions, keep)

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

    @abc.abstractmethod
    def keys(self) -> Sequence[Key]:
        """Return all buckets, the largest first, so that the later ones find memory to share."""

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
            self._run(key)
        else:
            graph.replay()

    def capture_all(self, captured: Callable[[], object]) -> None:
        """Capture every graph; `captured` is called after each.

        A graph that cannot be captured raises `RuntimeError` or `ConfigError`; earlier ones are
        kept.
        """
        for key in self.keys():
            if not self.captured or self.needs_warm_up(key):
                self.warm_up(key)
            self.capture(key)
            captured()

    def needs_warm_up(self, key: Key) -> bool:
        """Whether the step of `key` uses code that no step before it has run."""
        return False

    def capture(self, key: Key) -> None:
        """Capture the graph of `key`; the model has run before."""
        self._send(self.empty(key))
        is_cuda = self.space.device.type == "cuda"
        self._graphs[key] = self.space.capture(lambda: self._run(key)) if is_cuda else None

    def drop(self, key: Key) -> None:
        """Free the graph of `key`; the device has finished with it."""
        graph = self._graphs.pop(key)
        if graph is not None:
            graph.reset()

    def replay_ms(self, key: Key, integers: torch.Tensor) -> float:
        """Return the shortest device time in ms of some replays with this input. Waits."""
        graph = self._graphs[key]
        assert graph is not None  # Only called on CUDA.
        self._send(integers)
        times_ms = []
        for _ in range(_TIMED_REPLAYS):
            start, end = (
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
        """Run the step of `key` on padding: compiles, tunes and loads its kernels."""
        self.run(key, self.empty(key))

    def run(self, key: Key, integers: torch.Tensor) -> None:
        """Run a step without a graph."""
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
