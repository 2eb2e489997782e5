"""Plans of packed steps for layers with states: which tokens are computed together, and from what.

A checkpoint divides a sequence into parts, which rounds compute one after the other. A captured
step (`mixed_graphs.py`) has three rounds of fixed sizes: chunks of everything, then what decodes,
then token by token what follows a checkpoint. Plans are made on the host, sent as one array of
integers, and read by `PackedRules`.

See DESIGN.md, Note [States beside rows].
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from .piece import Piece, pinned

CHUNK_TOKENS = 64
"""Tokens of a chunk of flash-linear-attention's rules."""

# ---- sequences of a step -------------------------------------------------------------------------


class Part(NamedTuple):
    """Packed tokens of a sequence in a round; their state goes to `target` and `kept_row`."""

    row: int
    start: int
    num_tokens: int
    is_begun: bool
    target: int
    kept_row: int | None = None

    @classmethod
    def of(cls, piece: Piece, start: int, first: int, end: int, kept_row: int | None) -> Part:
        """Return the part of a piece, at packed token `start`, from token `first` to `end`."""
        at = start + first - piece.num_past_tokens
        return cls(piece.row, at, end - first, first > 0, piece.row, kept_row)


class Kind(enum.Enum):
    """How a round computes: in chunks, token by token, or at most one token of each part."""

    CHUNKS = enum.auto()
    TOKENS = enum.auto()
    DECODE = enum.auto()


class Round(NamedTuple):
    """Parts that a rule computes in one call; tensors are `int64` but for `is_begun`.

    `tokens` selects packed tokens, which `starts [n + 1]` divides; `rows`, `is_begun [n] bool` and
    `targets` are the parts'; with None, all are begun. `kept_from` and `kept_rows [m]` are parts
    with a checkpoint and its row. `indices [c, 2]` lists the chunks: part and number in it.
    """

    kind: Kind
    tokens: slice | torch.Tensor
    starts: torch.Tensor
    rows: torch.Tensor
    is_begun: torch.Tensor | None
    targets: torch.Tensor
    kept_from: torch.Tensor
    kept_rows: torch.Tensor
    indices: torch.Tensor


@dataclass(frozen=True)
class PackedSequences:
    """Sequences of a step as layers with states see them; tensors are `int64` but for `is_begun`.

    A convolution runs over all packed tokens at once, which is wrong for the first tokens of each
    sequence, `heads [h]`. A second convolution computes them, behind the tokens in the states. Its
    input and the new states are gathered by `sources` from a table: the states of `rows`, then the
    packed tokens `near`. The last of the gathered tokens are the new states, of `rows` and then of
    checkpoints at `kept_rows`. The others are the input; it has the heads at `own [h]`.

    If `places` is None, the result is the outputs of the rounds, one after the other. Otherwise the
    output of packed token `places [m]` is at index `taken [m]` of these outputs. If the first round
    computes all tokens, its output is the result for all other tokens; the indices then count the
    outputs of the later rounds, followed by that of packed token 0. If `near` is None, there are no
    rounds, and each sequence decodes one token.
    """

    rows: torch.Tensor
    is_begun: torch.Tensor
    near: torch.Tensor | None
    sources: torch.Tensor
    own: torch.Tensor
    heads: torch.Tensor
    kept_rows: torch.Tensor
    places: torch.Tensor | None
    taken: torch.Tensor
    rounds: Sequence[Round]

    @classmethod
    def decoding(cls, rows: torch.Tensor) -> PackedSequences:
        """Return sequences with one more token each; nothing on the host depends on the rows."""
        nothing = rows[:0]
        return cls(rows, nothing, None, nothing, nothing, nothing, nothing, None, nothing, [])


class Plan(NamedTuple):
    """Integers of a `PackedSequences`, and each round's kind and tokens, None if listed there."""

    arrays: Sequence[np.ndarray]
    rounds: Sequence[tuple[Kind, slice | None]]
    is_in_order: bool

    def send(self, device: torch.device) -> PackedSequences:
        """Copy the plan to the device."""
        host, flat = pinned(sum(map(len, self.arrays)), device)
        np.concatenate(self.arrays, out=flat)
        return self.read(host.to(device, non_blocking=True))

    def read(self, integers: torch.Tensor) -> PackedSequences:
        """Return the sequences from this plan's integers, or those of one of the same sizes."""
        fields = iter(torch.split(integers.long(), [len(each) for each in self.arrays]))
        rows, begun, near, sources, own, heads, kept_rows = (next(fields) for _ in range(7))
        places, taken = (None, rows) if self.is_in_order else (next(fields), next(fields))
        rounds = []
        for kind, tokens in self.rounds:
            at = next(fields) if tokens is None else tokens
            starts, its_rows, its_begun, *its = (next(fields) for _ in range(7))
            is_begun = its_begun != 0 if kind is Kind.CHUNKS else None
            its[-1] = its[-1].view(-1, 2)  # The chunks.
            rounds.append(Round(kind, at, starts, its_rows, is_begun, *its))
        return PackedSequences(
            rows, begun != 0, near, sources, own, heads, kept_rows, places, taken, rounds
        )


def plan_step(pieces: Sequence[Piece], state_tokens: int) -> Plan:
    """Plan pieces in `packing_order`: a round that decodes, one per part of prompts."""
    rounds: list[tuple[Kind, list[Part]]] = []
    kept: list[tuple[int, int, int]] = []
    start = 0
    for index, piece in enumerate(pieces):
        decodes = piece.decodes and piece.num_past_tokens > 0
        stops: list[tuple[int, int | None]] = [*piece.checkpoints]
        kept += [(index, stop, row) for stop, row in piece.checkpoints]
        if not stops or stops[-1][0] < piece.num_tokens:
            stops.append((piece.num_tokens, None))
        first = piece.num_past_tokens
        for number, (stop, kept_row) in enumerate(stops):
            at = 0 if decodes else number + bool(rounds and rounds[0][0] is Kind.DECODE)
            if at == len(rounds):
                rounds.append((Kind.DECODE if decodes else Kind.CHUNKS, []))
            rounds[at][1].append(Part.of(piece, start, first, stop, kept_row))
            first = stop
        start += piece.num_new_tokens
    is_whole = [kind for kind, _ in rounds] == [Kind.DECODE, Kind.CHUNKS]
    if is_whole:
        rounds.reverse()  # The output of chunks has room for that of decoding tokens.
    tokens = [_tokens(parts) for _, parts in rounds]
    joint = np.concatenate(tokens[is_whole:])
    is_in_order = not is_whole and bool((np.diff(joint) == 1).all())
    arrays = _convolution_arrays(pieces, state_tokens, kept)
    if not is_in_order:
        arrays += [joint, np.arange(len(joint))]
    kinds: list[tuple[Kind, slice | None]] = []
    for (kind, parts), its in zip(rounds, tokens, strict=True):
        is_run = bool((np.diff(its) == 1).all())
        first = 0 if is_whole else int(its[0])
        kinds.append((kind, slice(first, int(its[-1]) + 1) if is_run else None))
        arrays += [] if is_run else [its]
        arrays += _round_arrays(parts, int(its[0]) - first)
    return Plan(arrays, kinds, is_in_order)


class CapturedSizes(NamedTuple):
    """Sizes of a captured step; the last piece is padding, and tail tokens follow checkpoints."""

    num_tokens: int
    num_decode: int
    num_pieces: int
    num_tail_tokens: int

    def fits(self, pieces: Sequence[Piece], num_decode: int) -> bool:
        """Whether a step of `pieces`, the first `num_decode` of which decode, has these sizes."""
        decoding, prompts = pieces[:num_decode], pieces[num_decode:]
        tails = [each.num_tokens - each.checkpoints[0][0] for each in prompts if each.checkpoints]
        return (
            len(prompts) < self.num_pieces
            and sum(tails) <= self.num_tail_tokens
            and all(len(each.checkpoints) < 2 for each in prompts)
            and all(each.num_past_tokens and not each.checkpoints for each in decoding)
        )

    def plan(
        self, pieces: Sequence[Piece], num_decode: int, state_tokens: int, scratch_row: int
    ) -> Plan:
        """Plan a step that `fits`; padding is of `scratch_row`."""
        total = sum(each.num_new_tokens for each in pieces)
        nothing = Piece(0, scratch_row, 1, 0, None)
        padding = Piece(0, scratch_row, 0, self.num_tokens - total, None)
        num_nothing = self.num_decode - num_decode
        prompts = [*pieces[num_decode:], padding]
        prompts += [nothing] * (self.num_pieces - len(prompts))
        sequences = [*pieces[:num_decode], *[nothing] * num_nothing, *prompts]
        decoding = [
            Part.of(each, min(at, num_decode), each.num_past_tokens, each.num_tokens, None)
            for at, each in enumerate(sequences[: self.num_decode])
        ]
        chunks, tails = list[Part](), list[Part]()
        kept: list[tuple[int, int, int]] = []
        start = num_decode
        for index, each in enumerate(prompts, self.num_decode):
            stop, kept_row = (*each.checkpoints, (each.num_tokens, scratch_row))[0]
            kept.append((index, stop, kept_row))
            tail = Part.of(each, start, stop, each.num_tokens, None)
            tails.append(tail)
            chunks.append(Part.of(each, start, each.num_past_tokens, stop, kept_row))
            chunks.append(tail._replace(target=scratch_row))  # Computed again, from its state.
            start += each.num_new_tokens
        tokens = _tokens(tails)
        num_late = self.num_decode + self.num_tail_tokens
        places = np.concatenate([np.arange(num_decode), tokens])
        taken = np.concatenate([np.arange(num_decode), self.num_decode + np.arange(len(tokens))])
        late = np.stack([places, taken]) if len(places) else np.array([[0], [num_late]])
        late = np.pad(late, ((0, 0), (0, num_late - late.shape[1])), "edge")
        tokens = np.concatenate([tokens, np.zeros(self.num_tail_tokens - len(tokens), np.int64)])
        num_chunks = self.num_tokens // CHUNK_TOKENS + len(chunks)
        num_heads = self.num_decode + len(prompts) * state_tokens
        arrays = _convolution_arrays(sequences, state_tokens, kept, num_heads)
        arrays += [*late, *_round_arrays(chunks, num_decode, num_chunks)]
        arrays += [*_round_arrays(decoding, 0, 0), tokens, *_round_arrays(tails, 0, 0)]
        kinds = [
            (Kind.CHUNKS, slice(None)),
            (Kind.DECODE, slice(self.num_decode)),
            (Kind.TOKENS, None),
        ]
        return Plan(arrays, kinds, is_in_order=False)


def _tokens(parts: Sequence[Part]) -> np.ndarray:
    return np.concatenate([np.arange(each.start, each.start + each.num_tokens) for each in parts])


def _round_arrays(
    parts: Sequence[Part], start: int, num_chunks: int | None = None
) -> list[np.ndarray]:
    """Return the integers of a round from token `start`, padded to `num_chunks` chunks."""
    new = np.array([each.num_tokens for each in parts])
    starts = start + np.concatenate([[0], np.cumsum(new)])
    counts = -(-new // CHUNK_TOKENS)
    of_part = np.repeat(np.arange(len(parts)), counts)
    in_part = np.arange(len(of_part)) - np.repeat(np.cumsum(counts) - counts, counts)
    indices = np.stack([of_part, in_part], 1)
    if num_chunks is not None:
        padded = np.full((num_chunks, 2), (len(parts) - 1, 0))
        padded[: len(indices)] = indices[:num_chunks]
        indices = padded
    kept = [(at, each.kept_row) for at, each in enumerate(parts) if each.kept_row is not None]
    vectors = zip(*((each.row, each.is_begun, each.target) for each in parts), strict=True)
    return [starts, *map(np.array, vectors), *np.array(kept, int).reshape(-1, 2).T, indices.ravel()]


def _convolution_arrays(
    sequences: Sequence[Piece],
    state_tokens: int,
    kept: Sequence[tuple[int, int, int]],
    num_heads: int | None = None,
) -> list[np.ndarray]:
    """Return the integers for convolutions; `kept` has sequence, tokens and row of checkpoints."""
    past, new = np.array([(each.num_past_tokens, each.num_new_tokens) for each in sequences]).T
    starts = np.cumsum(new) - new
    all_sequences, last = np.arange(len(sequences)), np.arange(-state_tokens, 0)
    which, stops, rows = np.array(kept, int).reshape(-1, 3).T
    # Sequence and token of each source; tokens before 0 are in the sequence's state.
    sequence = np.repeat(all_sequences, state_tokens + np.minimum(new, state_tokens))
    first = np.flatnonzero(np.diff(sequence, prepend=-1))
    token = np.arange(len(sequence)) - first[sequence] - state_tokens
    own = np.flatnonzero(token >= 0)
    heads = starts[sequence[own]] + token[own]
    unused = 0 if num_heads is None else num_heads - len(own)
    padded = np.pad(np.stack([sequence, token]), ((0, 0), (0, unused)), "edge")
    own, heads = np.pad(np.stack([own, heads]), ((0, 0), (0, unused)), "edge")
    ends = np.repeat(np.concatenate([all_sequences, which]), state_tokens)
    end_tokens = np.add.outer(np.concatenate([new, stops - past[which]]), last).ravel()
    sequence, token = np.concatenate([padded, [ends, end_tokens]], 1)
    from_state = sequence * state_tokens + state_tokens + token
    return [
        np.array([each.row for each in sequences]),
        past > 0,
        np.where(token < 0, 0, starts[sequence] + token),
        np.where(token < 0, from_state, len(sequences) * state_tokens + np.arange(len(token))),
        own,
        heads,
        rows,
    ]
