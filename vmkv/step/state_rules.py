"""Linear attention over packed tokens: one call for the sequences of a step, not one for each.

Layers of Gated DeltaNet, Kimi Delta Attention and short convolutions compute by two or three
functions of their modeling file, and everything else in them is by token:

    causal_conv1d_fn(tokens)           convolution over each channel's last tokens
    chunk_…(q, k, v, g, beta)          the rule, in chunks of tokens
    recurrent_…(q, k, v, g, beta)      the same, token by token

`PackedRules` runs a layer's code once over all tokens, with these functions replaced by ones that
know the sequences: the same functions, with states from the rows of a cache and the bounds of
sequences. flash-linear-attention's take such bounds; others are called for each sequence.

A checkpoint divides a sequence into parts, which rounds compute one after the other. A captured
step (`mixed_graphs.py`) has two rounds of fixed sizes: chunks of everything, and then token by
token what decodes or follows a checkpoint.

See DESIGN.md, Note [States beside rows].
"""

from __future__ import annotations

import functools
import inspect
import itertools
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from .piece import Piece, pinned

CHUNK_TOKENS = 64
"""Tokens of a chunk of flash-linear-attention's rules."""
_CONVOLUTION = "causal_conv1d_fn"
_STATES = "conv_states", "recurrent_states"
#: Arguments of rules that concern states and bounds of sequences.
_OF_STATES = {"initial_state", "output_final_state", "cu_seqlens", "cu_seq_lens_q"}
#: Tolerance of the comparison that tells whether a rule takes bounds of sequences.
_ROUNDING = 0.05

# ---- sequences of a step -------------------------------------------------------------------------


class Part(NamedTuple):
    """Consecutive packed tokens of one sequence in a round.

    Its state comes from `row` unless it begins there, and goes to `target`; also to `kept_row`, a
    checkpoint, unless that is None.
    """

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


class Round(NamedTuple):
    """Parts that a rule computes in one call; tensors are `int64` but for `is_begun`.

    `tokens` selects packed tokens, which `starts [n + 1]` divides; `rows`, `is_begun [n] bool` and
    `targets` are the parts'; `kept_from` and `kept_rows [m]` are parts with a checkpoint and its
    row. `indices [c, 2]` lists the chunks: part and number in it.
    """

    is_recurrent: bool
    tokens: slice | torch.Tensor
    starts: torch.Tensor
    rows: torch.Tensor
    is_begun: torch.Tensor
    targets: torch.Tensor
    kept_from: torch.Tensor
    kept_rows: torch.Tensor
    indices: torch.Tensor


@dataclass(frozen=True)
class PackedSequences:
    """Sequences of a step as layers with states see them; tensors are `int64` but for `is_begun`.

    For convolutions each sequence lies behind the last tokens that its state holds: `extended` says
    where these tokens come from, first states and then packed tokens; `own [T]` where the packed
    ones lie there, `tails` which become states, and `kept_tails` those of checkpoints at
    `kept_rows`. `order [T]` has the place of each packed token in the rounds' joint output; None if
    they are in order.
    """

    rows: torch.Tensor
    is_begun: torch.Tensor
    extended: torch.Tensor
    own: torch.Tensor
    tails: torch.Tensor
    kept_tails: torch.Tensor
    kept_rows: torch.Tensor
    order: torch.Tensor | None
    rounds: Sequence[Round]


class Plan(NamedTuple):
    """Integers of a `PackedSequences`, and by round: whether it is recurrent, and its tokens.

    Tokens of None are among the integers.
    """

    arrays: Sequence[np.ndarray]
    state_tokens: int
    rounds: Sequence[tuple[bool, slice | None]]
    is_in_order: bool

    def send(self, device: torch.device) -> PackedSequences:
        """Copy the plan to the device."""
        host, flat = pinned(sum(map(len, self.arrays)), device)
        np.concatenate(self.arrays, out=flat)
        return self.read(host.to(device, non_blocking=True))

    def read(self, integers: torch.Tensor) -> PackedSequences:
        """Return the sequences from this plan's integers, or those of one of the same sizes."""
        fields = iter(torch.split(integers.long(), [len(each) for each in self.arrays]))
        rows, begun, extended, own, tails, kept_tails, kept_rows = (next(fields) for _ in range(7))
        order = None if self.is_in_order else next(fields)
        rounds = []
        for is_recurrent, tokens in self.rounds:
            at = next(fields) if tokens is None else tokens
            starts, its_rows, its_begun, *others, indices = (next(fields) for _ in range(7))
            its = its_rows, its_begun != 0, *others, indices.view(-1, 2)
            rounds.append(Round(is_recurrent, at, starts, *its))
        tails, kept_tails = [each.view(-1, self.state_tokens) for each in (tails, kept_tails)]
        return PackedSequences(
            rows, begun != 0, extended, own, tails, kept_tails, kept_rows, order, rounds
        )


def plan_step(pieces: Sequence[Piece], state_tokens: int) -> Plan:
    """Plan a step of `pieces` in `packing_order`; a convolution's state has `state_tokens`.

    One round decodes; then comes one for the parts of prompts up to the first checkpoint, and one
    for each further part.
    """
    rounds: list[tuple[bool, list[Part]]] = []
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
            at = 0 if decodes else number + bool(rounds and rounds[0][0])
            if at == len(rounds):
                rounds.append((decodes, []))
            rounds[at][1].append(Part.of(piece, start, first, stop, kept_row))
            first = stop
        start += piece.num_new_tokens
    tokens = [_tokens(parts) for _, parts in rounds]
    joint = np.concatenate(tokens)
    is_in_order = bool((np.diff(joint) == 1).all())
    arrays = _convolution_arrays(pieces, state_tokens, kept)
    if not is_in_order:
        arrays.append(np.argsort(joint))
    kinds: list[tuple[bool, slice | None]] = []
    for (is_recurrent, parts), its in zip(rounds, tokens, strict=True):
        is_run = bool((np.diff(its) == 1).all())
        kinds.append((is_recurrent, slice(int(its[0]), int(its[-1]) + 1) if is_run else None))
        arrays += [] if is_run else [its]
        arrays += _round_arrays(parts, 0)
    return Plan(arrays, state_tokens, kinds, is_in_order)


class CapturedSizes(NamedTuple):
    """Sizes of a captured step: tokens, entries that decode, pieces, and tokens after checkpoints.

    The last piece is padding.
    """

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
        recurrent = [
            Part.of(each, min(at, num_decode), each.num_past_tokens, each.num_tokens, None)
            for at, each in enumerate(sequences[: self.num_decode])
        ]
        chunks: list[Part] = []
        kept: list[tuple[int, int, int]] = []
        start = num_decode
        for index, each in enumerate(prompts, self.num_decode):
            stop, kept_row = (*each.checkpoints, (each.num_tokens, scratch_row))[0]
            kept.append((index, stop, kept_row))
            tail = Part.of(each, start, stop, each.num_tokens, None)
            recurrent.append(tail._replace(is_begun=True))
            chunks.append(Part.of(each, start, each.num_past_tokens, stop, kept_row))
            chunks.append(tail._replace(target=scratch_row))  # Computed again, from its state.
            start += each.num_new_tokens
        tokens = _tokens(recurrent)
        order = np.arange(self.num_tokens)
        order[tokens] = self.num_tokens + np.arange(len(tokens))
        unused = self.num_decode + self.num_tail_tokens - len(tokens)
        tokens = np.concatenate([tokens, np.zeros(unused, np.int64)])
        num_chunks = self.num_tokens // CHUNK_TOKENS + len(chunks)
        arrays = _convolution_arrays(sequences, state_tokens, kept)
        arrays += [order, *_round_arrays(chunks, num_decode, num_chunks)]
        arrays += [tokens, *_round_arrays(recurrent, 0, 0)]
        kinds = [(False, slice(None)), (True, None)]
        return Plan(arrays, state_tokens, kinds, is_in_order=False)


def _tokens(parts: Sequence[Part]) -> np.ndarray:
    """Return the packed tokens of parts, one part after the other."""
    return np.concatenate([np.arange(each.start, each.start + each.num_tokens) for each in parts])


def _round_arrays(
    parts: Sequence[Part], start: int, num_chunks: int | None = None
) -> list[np.ndarray]:
    """Return the integers of a round over tokens from `start`, with so many chunks.

    Chunks beyond those of the parts are of the last part, which has no tokens then.
    """
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
    sequences: Sequence[Piece], state_tokens: int, kept: Sequence[tuple[int, int, int]]
) -> list[np.ndarray]:
    """Return the integers for convolutions; `kept` has sequence, tokens and row of checkpoints."""
    count = len(sequences)
    past, new = np.array([(each.num_past_tokens, each.num_new_tokens) for each in sequences]).T
    starts = np.cumsum(new) - new
    extended_starts = starts + state_tokens * np.arange(count)
    sequence = np.repeat(np.arange(count), new + state_tokens)
    offset = np.arange(len(sequence)) - extended_starts[sequence]
    from_state = sequence * state_tokens + offset
    from_tokens = count * state_tokens + starts[sequence] + offset - state_tokens
    own = np.arange(new.sum()) + state_tokens * (1 + np.repeat(np.arange(count), new))
    last = np.arange(state_tokens)
    which, stops, rows = np.array(kept, int).reshape(-1, 3).T
    return [
        np.array([each.row for each in sequences]),
        past > 0,
        np.where(offset < state_tokens, from_state, from_tokens),
        own,
        np.add.outer(extended_starts + new, last).ravel(),
        np.add.outer((extended_starts - past)[which] + stops, last).ravel(),
        rows,
    ]


# ---- a layer's code ------------------------------------------------------------------------------


class _NoPast:
    """Cache of a layer's code whose functions have the states already."""

    def has_previous_state(self, *_: object, **__: object) -> bool:
        return False

    def get_conv_state(self, *_: object, **__: object) -> None:
        return None

    get_recurrent_state = get_conv_state

    def update_conv_state(self, states: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return states

    update_recurrent_state = update_conv_state


class _Code(NamedTuple):
    """A layer's code, and the names of its functions that compute from states."""

    forward: types.FunctionType
    chunks: str | None
    recurrent: str | None


def _code_of(module: torch.nn.Module) -> _Code | None:
    """Return the code of a layer that computes by known functions; None if it does otherwise."""
    forward = inspect.unwrap(type(module).forward)
    if "forward" in vars(module) or not isinstance(forward, types.FunctionType):
        return None
    known = {name for name in forward.__code__.co_names if callable(forward.__globals__.get(name))}
    rules = [
        name
        for name in sorted(known)
        if "initial_state" in inspect.signature(forward.__globals__[name]).parameters
    ]
    chunks = [name for name in rules if "chunk" in name]
    recurrent = [name for name in rules if "recurrent" in name]
    if _CONVOLUTION not in known or (len(chunks), len(recurrent)) not in ((0, 0), (1, 1)):
        return None
    if len(rules) != len(chunks) + len(recurrent):
        return None
    return _Code(forward, next(iter(chunks), None), next(iter(recurrent), None))


class PackedRules:
    """Runs layers over packed tokens in one call, with the states of rows.

    `modules` are the layers; `tensors` their states `[rows, …]`, by name in transformers' cache.
    Layers whose code is not known are left out of `layers`.
    """

    def __init__(
        self,
        modules: Mapping[int, torch.nn.Module],
        tensors: Mapping[int, Mapping[str, torch.Tensor]],
    ):
        self._states = tensors
        self._forwards: dict[int, Callable[..., Any]] = {}
        self._by_class: dict[type, Callable[..., Any] | None] = {}
        self._takes_starts: dict[Callable[..., Any], bool] = {}
        self._now: tuple[PackedSequences, int] | None = None  # And the layer that runs.
        widths = {each[_STATES[0]].shape[-1] for each in tensors.values() if _STATES[0] in each}
        self.state_tokens: int = widths.pop() if len(widths) == 1 else 0
        for layer, module in modules.items():
            if type(module) not in self._by_class:
                self._by_class[type(module)] = self._replaced(_code_of(module), tensors[layer])
            forward = self._by_class[type(module)]
            if forward is not None and self.state_tokens:
                self._forwards[layer] = functools.partial(forward, module)

    @property
    def layers(self) -> frozenset[int]:
        """Layers that run packed."""
        return frozenset(self._forwards)

    def close(self) -> None:
        """Drop the layers, whose code refers to this object, and their states."""
        self._forwards.clear()
        self._by_class.clear()
        self._states = {}

    def _replaced(
        self, code: _Code | None, states: Mapping[str, torch.Tensor]
    ) -> Callable[..., Any] | None:
        if code is None or set(states) != {*_STATES[: 1 if code.chunks is None else 2]}:
            return None
        forward: types.FunctionType = code[0]  # As an attribute, it would be taken for a method.
        its = dict(forward.__globals__)
        convolution = its[_CONVOLUTION]
        its[_CONVOLUTION] = lambda *args, **options: self._convolve(convolution, *args, **options)
        if code.chunks is not None and code.recurrent is not None:
            rules = its[code.chunks], its[code.recurrent]
            its[code.chunks] = lambda *args, **options: self._apply(rules, args, options)
            its[code.recurrent] = its[code.chunks]
        made = types.FunctionType(
            forward.__code__, its, forward.__name__, forward.__defaults__, forward.__closure__
        )
        made.__kwdefaults__ = forward.__kwdefaults__
        return made

    def run(
        self,
        layer: int,
        sequences: PackedSequences,
        forward: Callable[..., Any],
        hidden: torch.Tensor,
    ) -> Any:
        """Run a layer over `[1, T, D]`; `forward` takes these, a cache and the code to run."""
        self._now = sequences, layer
        try:
            return forward(hidden, _NoPast(), self._forwards[layer])
        finally:
            self._now = None

    def _convolve(
        self,
        convolution: Callable[..., torch.Tensor],
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **_: object,
    ) -> torch.Tensor:
        """Convolve `[1, C, T]` by sequence."""
        assert self._now is not None  # Set by `run`.
        sequences, layer = self._now
        states = self._states[layer][_STATES[0]]
        given = states.index_select(0, sequences.rows).to(hidden.dtype)
        given = given.masked_fill(~sequences.is_begun[:, None, None], 0)
        by_token = torch.cat((given.transpose(1, 2).flatten(0, 1), hidden[0].T))
        extended = by_token.index_select(0, sequences.extended)
        for tails, rows in (
            (sequences.tails, sequences.rows),
            (sequences.kept_tails, sequences.kept_rows),
        ):
            made = extended.index_select(0, tails.flatten()).view(*tails.shape, extended.shape[1])
            states.index_copy_(0, rows, made.transpose(1, 2).to(states.dtype))
        out = convolution(extended.T[None], weight, bias, activation=activation)
        return out.index_select(2, sequences.own)

    def _apply(
        self,
        rules: tuple[Callable[..., Any], Callable[..., Any]],
        args: Sequence[Any],
        options: Mapping[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply rules to packed tokens `[1, T, H, …]`, round by round; the states are stored."""
        assert self._now is not None  # Set by `run`.
        sequences, layer = self._now
        states = self._states[layer][_STATES[1]]
        whole = _Call(args, {name: options[name] for name in options.keys() - _OF_STATES})
        outputs = []
        for each in sequences.rounds:
            call = whole.of(each.tokens)
            given = states.index_select(0, each.rows)
            given = given.masked_fill(~each.is_begun[:, None, None, None], 0)
            out, made = self._compute(rules[each.is_recurrent], call, given, each)
            made = made.to(states.dtype)
            if each.kept_rows.numel():
                states.index_copy_(0, each.kept_rows, made.index_select(0, each.kept_from))
            states.index_copy_(0, each.targets, made)
            outputs.append(out)
        joint = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
        if sequences.order is not None:
            joint = joint.index_select(1, sequences.order)
        return joint, states[:1]

    def _compute(
        self, rule: Callable[..., Any], call: _Call, given: torch.Tensor, its: Round
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute parts from states `[n, …]`; returns `[1, t, H, D]` and the states after them."""
        if rule not in self._takes_starts and call.num_tokens >= 3:
            self._takes_starts[rule] = _takes_starts(rule, call, given[:1])
        if self._takes_starts.get(rule):
            return call.compute(rule, given, cu_seqlens=its.starts, chunk_indices=its.indices)
        return _one_by_one(rule, call, given, its.starts)


class _Call(NamedTuple):
    """A rule's arguments for packed tokens `[1, T, …]`, without states and bounds."""

    args: Sequence[Any]
    options: Mapping[str, Any]

    @property
    def num_tokens(self) -> int:
        return int(self.args[0].shape[1])

    def of(self, tokens: slice | torch.Tensor) -> _Call:
        """Return the call for some of its tokens."""
        shape = self.args[0].shape[:2]

        def part(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.ndim < 3 or value.shape[:2] != shape:
                return value
            return value[:, tokens] if isinstance(tokens, slice) else value.index_select(1, tokens)

        options = {name: part(each) for name, each in self.options.items()}
        return _Call([part(each) for each in self.args], options)

    def compute(
        self, rule: Callable[..., Any], given: torch.Tensor, **bounds: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output and the states after the tokens, from those `given`."""
        options = {**self.options, "initial_state": given, "output_final_state": True, **bounds}
        out, made = rule(*self.args, **options)
        return out, made


def _one_by_one(
    rule: Callable[..., Any], call: _Call, given: torch.Tensor, starts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the parts of a round with a call for each."""
    out, made = None, given.clone()
    for at, (start, end) in enumerate(itertools.pairwise(starts.tolist())):
        if start < end:
            its, made[at : at + 1] = call.of(slice(start, end)).compute(rule, given[at : at + 1])
            if out is None:
                out = its.new_zeros((1, call.num_tokens, *its.shape[2:]))
            out[:, start:end] = its
    if out is None:  # All of it is padding.
        its, _ = call.of(slice(0, 1)).compute(rule, given[:1])
        out = its.expand(1, call.num_tokens, *its.shape[2:])
    return out, made


def _takes_starts(rule: Callable[..., Any], call: _Call, given: torch.Tensor) -> bool:
    """Whether a rule computes several sequences, one of them empty, in one call."""
    few, states = call.of(slice(0, 3)), torch.cat((given, given / 2, given))
    starts = torch.tensor([0, 1, 3, 3], device=given.device)
    indices = torch.tensor([[0, 0], [1, 0], [2, 0]], device=given.device)
    try:
        found = few.compute(rule, states, cu_seqlens=starts, chunk_indices=indices)
    except Exception:  # noqa: BLE001  # whatever it says of arguments that it does not know.
        return False
    expected = _one_by_one(rule, few, states, starts)
    return all(
        each.shape == wanted.shape
        and torch.allclose(each.float(), wanted.float(), rtol=_ROUNDING, atol=_ROUNDING)
        for each, wanted in zip(found, expected, strict=True)
    )
