"""CUDA graphs of steps with prompts: pieces of prompts, together with decoding sequences.

A piece is cut into tiles of at most `TILE_TOKENS` queries. To attention each tile is a sequence:
its row, with a length up to the tile's last query. So kernels see the same small bound of queries
for any mix of pieces, and their grid is proportional to the work. The rest of a bucket is filled
with tiles without keys at the scratch row, for which nothing is written or attended to.

Steps in which sequences have guesses for their next tokens (`Piece.num_drafted`) are captured for
tiles of that size, one for each sequence, and keep the logits of every token.

Decoding sequences come first, with a launch of their own over a fixed number of entries; unused
entries see no keys, and their output is dropped. Layers with states see pieces, not tiles
(`state_plan.py`).
"""

from __future__ import annotations

import functools
import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from ..attention import AttentionBatch
from ..core.cache.prefix import BLOCK_TOKENS
from ..units import div_ceil
from .graphs import GraphSpace, StepGraphs
from .piece import Piece, pinned
from .row_attention import StepParts, batches
from .state_plan import CapturedSizes, Plan

TILE_TOKENS = 128
"""Most queries of a tile: the block size of kernels, so that tiling repeats no work."""
#: Spare tiles of a bucket, beyond those that its tokens fill: one per so many tokens, and at least
#: so many. Steps of more and shorter pieces take a larger bucket.
_SPARE_TILE_TOKENS, _NUM_SPARE_TILES_MIN = 32, 4
#: Pieces of a step whose layers keep states: one per so many tokens, and at most so many.
_PIECE_TOKENS, _NUM_PIECES_MAX = 128, 8
#: A size is dropped if its step takes longer than this factor of a larger size's.
_SLOWER_MAX = 1.1
_TIMED_REPLAYS = 3
DRAFT_ROWS_MAX = 320
"""Most rows of logits of a step with guesses, unless there are more slots."""
#: Every so many bounds of rows' lengths have a step with guesses, where kernels split rows.
_DRAFT_BOUND_STEP = 4


class Bucket(NamedTuple):
    """The sizes of a step."""

    num_tokens: int  # Tokens of the whole step.
    num_decode: int  # Decode entries.
    # More tiles than full ones could fill, so that kernels never take the batch for uniform.
    num_tiles: int
    draft_tokens: int = 0  # Most queries of a sequence in a step with guesses; 0 without any.
    bound_tokens: int = 0  # Most tokens of a row in a step with guesses.

    @property
    def tile_tokens(self) -> int:
        """Most queries of a tile."""
        return self.draft_tokens or min(TILE_TOKENS, self.num_tokens)

    @property
    def states(self) -> CapturedSizes:
        """The sizes that layers with states see."""
        num_pieces = min(1 + div_ceil(self.num_tokens, _PIECE_TOKENS), _NUM_PIECES_MAX)
        tail_tokens = num_pieces * BLOCK_TOKENS
        return CapturedSizes(self.num_tokens, self.num_decode, 1 + num_pieces, tail_tokens)


class Fields(NamedTuple):
    """The input of a step in order, or its views: decode entries, then tiles."""

    token_ids: Any  # `[num_tokens]`; -1 if a token is on the device already.
    positions: Any  # `[num_tokens]`.
    rows: Any  # `[num_decode + num_tiles]`.
    lengths: Any  # `[num_decode + num_tiles]`: tokens up to the last query; 0 for padding.
    starts: Any  # `[num_decode + num_tiles + 1]`: offset of each sequence's queries.
    slots: Any  # `[num_decode]`: slots of the tokens on the device.
    ends: Any  # `[samples]`: offsets of the tokens to sample from.
    sampling_slots: Any  # `[samples]`: slots to sample into.
    count: Any  # `[1]`: number of decoding sequences.
    states: Any  # The integers of a `Plan`; none if no layer keeps a state.


class _Like(NamedTuple):
    """Facts that the input of a bucket depends on, beside the bucket."""

    max_num_seqs: int
    state_tokens: int
    scratch_row: int


@functools.cache
def _padding(bucket: Bucket, like: _Like) -> Plan:
    return bucket.states.plan([], 0, like.state_tokens, like.scratch_row)


@functools.cache
def _places(bucket: Bucket, like: _Like) -> Fields:
    num_sequences = bucket.num_decode + bucket.num_tiles
    num_samples = min(like.max_num_seqs, num_sequences)
    if bucket.draft_tokens:
        num_samples = bucket.num_tokens
    num_states = sum(map(len, _padding(bucket, like).arrays)) if like.state_tokens else 0
    of_tokens, of_sequences = [bucket.num_tokens] * 2, [num_sequences] * 2
    of_samples = [num_samples] * 2
    sizes = [*of_tokens, *of_sequences, num_sequences + 1, bucket.num_decode, *of_samples, 1]
    sizes.append(num_states)
    return Fields(*(slice(*pair) for pair in pairwise(accumulate(sizes, initial=0))))


class MixedGraphs(StepGraphs[Bucket]):
    """The mixed graphs of one stepper; `slow_sizes` are left out, or found by timing if None."""

    name = "steps with prompts"
    slow_sizes: frozenset[int] | None = None

    def __init__(
        self,
        space: GraphSpace,
        max_step_tokens: int,
        num_processors: int,
        *,
        max_drafted: int = 0,
    ):
        self._max_drafted = max_drafted
        #: Buckets in use, by size.
        self._buckets = [
            Bucket(num_tokens, width, _num_tiles(num_tokens, num_processors))
            for num_tokens in (token_buckets(max_step_tokens) if max_step_tokens > 1 else ())
            for width in decode_widths(space.max_num_seqs)
            if width <= num_tokens
        ]
        if max_drafted:
            drafting = _draft_buckets(space, max_drafted + 1, num_processors)
            self._buckets = sorted([*self._buckets, *drafting])
        self._like = _Like(space.max_num_seqs, space.stepper.state_tokens, space.scratch.row)
        sizes = [_places(each, self._like).states.stop for each in self._buckets]
        super().__init__(space, max(sizes, default=0))

    def key(self, pieces: Sequence[Piece]) -> Bucket | None:
        """Return the smallest bucket that fits `pieces`, or None."""
        num_decode = sum(piece.decodes for piece in pieces)
        total = sum(piece.num_new_tokens for piece in pieces)
        num_tiles = sum(
            div_ceil(piece.num_new_tokens, TILE_TOKENS) for piece in pieces if not piece.decodes
        )
        drafts = self._max_drafted > 0 and any(piece.num_drafted for piece in pieces)
        longest = max(piece.num_tokens for piece in pieces) if drafts else 0
        for bucket in self._buckets[bisect_left(self._buckets, (total,)) :]:
            if drafts != (bucket.draft_tokens > 0) or longest > bucket.bound_tokens:
                continue
            padding = div_ceil(bucket.num_tokens - total, bucket.tile_tokens)
            is_wide = num_decode <= bucket.num_decode and num_tiles + padding <= bucket.num_tiles
            if is_wide and (not self._like.state_tokens or bucket.states.fits(pieces, num_decode)):
                return bucket
        return None

    def keys(self) -> Sequence[Bucket]:
        """Return all buckets, the largest first."""
        return self._buckets[::-1]

    def capture_all(self, captured: Callable[[], object]) -> None:
        """Capture all useful graphs, and use no others; raises if the first one cannot be captured.

        One graph of each number of tokens is timed: on an H200, 448 tokens of an 8B model take 14.9
        ms, 480 tokens 11.0.
        """
        in_use: list[Bucket] = []
        known, slow, shortest_ms = self.slow_sizes, set[int](), math.inf
        for num_tokens, group in itertools.groupby(self.keys(), lambda bucket: bucket.num_tokens):
            buckets = list(group)[::-1]
            is_of_use = known is None or num_tokens not in known
            for bucket in buckets:
                if is_of_use and self._try(bucket):
                    if known is None and bucket is buckets[0]:
                        step_ms = self._step_ms(bucket)
                        is_of_use = step_ms < _SLOWER_MAX * shortest_ms
                        shortest_ms = min(shortest_ms, step_ms)
                    if is_of_use:
                        in_use.append(bucket)
                    else:
                        slow.add(num_tokens)
                        self.drop(bucket)
                captured()
        self._buckets = sorted(in_use)
        self.slow_sizes = frozenset(slow) if known is None else known

    def _try(self, bucket: Bucket) -> bool:
        is_short = False
        try:
            # Rules of states may be compiled for each size.
            self.rehearse_and_capture(bucket, is_new=self._like.state_tokens > 0)
        except torch.OutOfMemoryError:
            is_short = True
        if not self.space.agree(int(is_short)):
            return True
        if not is_short:
            self.drop(bucket)
        return False

    def _step_ms(self, bucket: Bucket) -> float:
        """Return the shortest of some replays of a graph in ms; its tokens without a graph."""
        graph = self._graphs[bucket]
        if graph is None:
            return bucket.num_tokens
        self._send(self.unlike_tokens(bucket))
        times_ms, stream = [], torch.cuda.current_stream(self.space.device)
        for _ in range(_TIMED_REPLAYS):
            start, end = (
                torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                for _ in range(2)
            )
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times_ms.append(float(start.elapsed_time(end)))
        return self.space.agree(round(1e3 * min(times_ms))) / 1e3

    def unlike_tokens(self, bucket: Bucket) -> torch.Tensor:
        """Return the input of a padding step with differing tokens: equal ones multiply faster."""
        integers = self.empty(bucket)
        tokens = torch.arange(bucket.num_tokens, dtype=torch.int32) % self.space.vocab_size
        integers[_places(bucket, self._like).token_ids] = tokens
        return integers

    def fill(self, bucket: Bucket, pieces: Sequence[Piece]) -> torch.Tensor:
        """Return the input of a step of `pieces`, decoding ones first, on the host."""
        places = _places(bucket, self._like)
        host, flat = pinned(places.states.stop, self.space.device)
        fields = Fields(*(flat[place] for place in places))
        num_decode = sum(piece.decodes for piece in pieces)
        _fill_decode(fields, pieces[:num_decode], bucket, self.space)
        total = _fill_tiles(fields, pieces[num_decode:], num_decode, bucket, self.space)
        ends = accumulate(piece.num_new_tokens for piece in pieces)
        sampling = [
            (end - 1, piece.slot) for end, piece in zip(ends, pieces, strict=True) if piece.samples
        ]
        if bucket.draft_tokens:
            sampling = self._guessed(sampling, pieces)
        if self._like.state_tokens:
            plan = bucket.states.plan(pieces, num_decode, *self._like[1:])
            np.concatenate(plan.arrays, out=fields.states)
        fields.token_ids[total:] = 0
        fields.positions[total:] = 0
        fields.ends[:] = 0
        fields.sampling_slots[:] = self.space.scratch.slot
        if sampling:
            fields.ends[: len(sampling)], fields.sampling_slots[: len(sampling)] = zip(
                *sampling, strict=True
            )
        return host

    def _guessed(
        self, sampling: Sequence[tuple[int, int]], pieces: Sequence[Piece]
    ) -> list[tuple[int, int]]:
        """Return the rows of all tokens to verify; the host reads them, so no slot takes them."""
        spare, found = self.space.scratch.slot, []
        its = [each.num_drafted for each in pieces if each.samples]
        for (end, slot), num_drafted in zip(sampling, its, strict=True):
            found += [(at, spare) for at in range(end - num_drafted, end + (num_drafted > 0))]
            found += [(end, slot)] * (not num_drafted)
        return found

    def empty(self, key: Bucket) -> torch.Tensor:
        """Return the input of a step of padding, on the host."""
        return self.fill(key, [])

    def step(self, key: Bucket, integers: torch.Tensor) -> None:
        """Run the step: tokens from the host or the slots, to `GraphSpace.take`."""
        space = self.space
        fields = Fields(*(integers[place] for place in _places(key, self._like)))
        token_ids = fields.token_ids.long()
        told = token_ids[: key.num_decode]
        torch.where(told < 0, space.last_tokens[fields.slots.long()], told, out=told)
        positions, ends = fields.positions.long(), fields.ends.long()
        states = None
        if self._like.state_tokens:
            states = _padding(key, self._like).read(fields.states)
        logits = space.forward(token_ids, positions, ends, self._parts(key, fields), states)
        space.take(logits, fields.sampling_slots.long())

    def _parts(self, bucket: Bucket, fields: Fields) -> StepParts:
        width = bucket.num_decode

        def part(sequences: slice, starts: torch.Tensor, most: int) -> dict[int, AttentionBatch]:
            vectors = fields.rows[sequences], fields.lengths[sequences], starts
            whole = AttentionBatch(*vectors, most, bucket.bound_tokens or self.space.max_tokens, 0)
            return batches(self.space.capacities, whole)

        entries = self.space.starts[: width + 1]
        return StepParts(
            width,
            0,
            everything=part(slice(None), fields.starts, bucket.tile_tokens),
            decode=part(slice(width), entries, 1),
            prompts=part(slice(width, None), fields.starts[width:], bucket.tile_tokens),
            is_decode=(entries[:width] < fields.count)[:, None, None],
        )


def _fill_decode(
    fields: Fields, pieces: Sequence[Piece], bucket: Bucket, space: GraphSpace
) -> None:
    count, width = len(pieces), bucket.num_decode
    entries = [
        (each.row, each.num_past_tokens + 1, at, each.slot) for at, each in enumerate(pieces)
    ]
    entries += [(space.scratch.row, 0, count, space.scratch.slot)] * (width - count)
    sequences = fields.rows, fields.lengths, fields.starts, fields.slots
    for field, values in zip(sequences, zip(*entries, strict=True), strict=True):
        field[:width] = values
    fields.token_ids[:count] = [
        -1 if each.token_ids is None else each.token_ids[0] for each in pieces
    ]
    fields.positions[:count] = [piece.num_past_tokens for piece in pieces]
    fields.count[0] = count


def _fill_tiles(
    fields: Fields, pieces: Sequence[Piece], start: int, bucket: Bucket, space: GraphSpace
) -> int:
    """Cut pieces, from token `start` on, and padding into tiles; return where padding begins."""
    tile_tokens = bucket.tile_tokens
    tiles: list[tuple[int, int, int]] = []
    for piece in pieces:
        end = start + piece.num_new_tokens
        fields.token_ids[start:end] = piece.token_ids
        fields.positions[start:end] = np.arange(piece.num_past_tokens, piece.num_tokens)
        for done in range(0, piece.num_new_tokens, tile_tokens):
            length = min(piece.num_past_tokens + done + tile_tokens, piece.num_tokens)
            tiles.append((piece.row, length, start + done))
        start = end
    row, total = space.scratch.row, bucket.num_tokens
    tiles += [(row, 0, at) for at in range(start, total, tile_tokens)]
    tiles += [(row, 0, total)] * (bucket.num_tiles - len(tiles))
    first = bucket.num_decode
    fields.rows[first:], fields.lengths[first:], fields.starts[first:-1] = zip(*tiles, strict=True)
    fields.starts[-1] = total
    return start


def _num_tiles(num_tokens: int, num_processors: int) -> int:
    """Return tiles with spares, coprime to the processors, to spread each head's first ones."""
    spare = max(_NUM_SPARE_TILES_MIN, num_tokens // _SPARE_TILE_TOKENS)
    count = num_tokens // min(TILE_TOKENS, num_tokens) + spare
    while math.gcd(count, num_processors) > 1:
        count += 1
    return count


def _draft_buckets(space: GraphSpace, most_queries: int, num_processors: int) -> list[Bucket]:
    """Return steps of 1, 2, 4 … sequences with 2, 3, 5 … queries each on average."""
    numbers = {most_queries} | {each for each in (2, 3, 5, 9, 17) if each < most_queries}
    found = []
    for width in {1 << at for at in range(space.max_num_seqs.bit_length())} | {space.max_num_seqs}:
        for num_tokens in (width * each for each in numbers):
            tile_tokens = min(most_queries, num_tokens)
            num_tiles = width + div_ceil(num_tokens, tile_tokens) + 1
            while math.gcd(num_tiles, num_processors) > 1:
                num_tiles += 1
            bounds = {*space.bounds(width)[::_DRAFT_BOUND_STEP], space.max_tokens}
            its = (num_tokens, width, num_tiles, tile_tokens)
            found += [Bucket(*its, each) for each in bounds if num_tokens <= space.num_rows]
    return found


def token_buckets(most: int) -> list[int]:
    """Return token counts up to `most`, 32 apart below 256, and an eighth apart above."""
    sizes, size = [], 0
    while size < most:
        size += 32 if size < 256 else 1 << (size.bit_length() - 4)
        sizes.append(size)
    return [each for each in sizes if each < most] + [most]


def decode_widths(max_num_seqs: int) -> list[int]:
    """Return numbers of decode entries: few sizes, because an empty entry costs almost nothing."""
    return [each for each in (16, 64) if each < max_num_seqs] + [max_num_seqs]
