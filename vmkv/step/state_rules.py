"""Linear attention over packed tokens: one call for the sequences of a step, not one for each.

Layers of Gated DeltaNet, Kimi Delta Attention and short convolutions compute by two or three
functions of their modeling file, and everything else in them is by token:

    causal_conv1d_fn(tokens)           convolution over each channel's last tokens
    chunk_…(q, k, v, g, beta)          the rule, in chunks of tokens
    recurrent_…(q, k, v, g, beta)      the same, token by token

`PackedRules` runs a layer's code once over all tokens, with these functions replaced by operators
that know the sequences: they call the same functions, with states from the rows of a cache and the
bounds of sequences. flash-linear-attention's take such bounds; others are called for each sequence.
Layers run in order, so an operator needs no number: a convolution is the next layer's. To compilers
both are opaque, so such layers are compiled like others.

A checkpoint divides a sequence into parts, which rounds compute one after the other. A captured
step (`mixed_graphs.py`) has two rounds of fixed sizes: chunks of everything, and then token by
token what decodes or follows a checkpoint.

See DESIGN.md, Note [States beside rows].
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ..errors import InternalError
from .piece import Piece, pinned

CHUNK_TOKENS = 64
"""Tokens of a chunk of flash-linear-attention's rules."""
_CONVOLUTION, _UPDATE = "causal_conv1d_fn", "causal_conv1d_update"
_STATES = "conv_states", "recurrent_states"
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
    `targets` are the parts'; with None, all are begun. `kept_from` and `kept_rows [m]` are parts
    with a checkpoint and its row. `indices [c, 2]` lists the chunks: part and number in it.
    """

    is_recurrent: bool
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

    For convolutions each sequence lies behind the last tokens that its state holds: `extended` says
    where these tokens come from, first states and then packed tokens; `own [T]` where the packed
    ones lie there, `tails` which become states, and `kept_tails` those of checkpoints at
    `kept_rows`. With None, and without rounds, each sequence has one more token. `order [T]` has
    the place of each packed token in the rounds' joint output; None if they are in order.
    """

    rows: torch.Tensor
    is_begun: torch.Tensor
    extended: torch.Tensor | None
    own: torch.Tensor
    tails: torch.Tensor
    kept_tails: torch.Tensor
    kept_rows: torch.Tensor
    order: torch.Tensor | None
    rounds: Sequence[Round]

    @classmethod
    def decoding(cls, rows: torch.Tensor) -> PackedSequences:
        """Return sequences with one more token each; nothing on the host depends on the rows."""
        nothing = rows[:0]
        return cls(rows, nothing, None, nothing, nothing, nothing, nothing, None, [])


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
            starts, its_rows, its_begun, *its, indices = (next(fields) for _ in range(7))
            is_begun = None if is_recurrent else its_begun != 0
            targets, kept_from, its_kept = its
            kept = targets, kept_from, its_kept, indices.view(-1, 2)
            rounds.append(Round(is_recurrent, at, starts, its_rows, is_begun, *kept))
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


class _Functions(NamedTuple):
    """Functions of a layer's code that compute from states; rules only where there are some."""

    convolution: Callable[..., torch.Tensor]
    update: Callable[..., torch.Tensor]
    chunks: Callable[..., Any] | None
    recurrent: Callable[..., Any] | None


class _Code(NamedTuple):
    """A layer's code over packed tokens, and the functions that it called before."""

    forward: types.FunctionType
    functions: _Functions


@functools.cache
def _code_of(kind: Any) -> _Code | None:
    """Return the code of a class of layers that compute by known functions; else None."""
    forward = inspect.unwrap(kind.forward)
    if not isinstance(forward, types.FunctionType):
        return None
    known = {
        name: forward.__globals__[name]
        for name in forward.__code__.co_names
        if callable(forward.__globals__.get(name))
    }
    rules = {
        name: each
        for name, each in known.items()
        if "initial_state" in inspect.signature(each).parameters
    }
    chunks = [name for name in rules if "chunk" in name]
    recurrent = [name for name in rules if "recurrent" in name]
    if not {_CONVOLUTION, _UPDATE} <= known.keys() or len(rules) > 2:
        return None
    if len(rules) != len(chunks) + len(recurrent) or len(chunks) != len(recurrent):
        return None
    replaced = {_CONVOLUTION: _convolved, **dict.fromkeys(rules, _ruled)}
    names = forward.__globals__ | replaced
    del names["__name__"]  # By which a compiler would find the module's own functions.
    made = types.FunctionType(
        forward.__code__,
        names,
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    made.__kwdefaults__ = forward.__kwdefaults__
    its = [rules[name] for name in (*chunks, *recurrent)] or [None, None]
    return _Code(made, _Functions(known[_CONVOLUTION], known[_UPDATE], *its))


@functools.cache
def _packed_class(of: Any) -> Any:
    """Return the class of a known class's layers over packed tokens, the same for all of them."""
    code = _code_of(of)
    assert code is not None  # As of any layer that runs packed.
    return type(f"Packed{of.__name__}", (of,), {"forward": code.forward})


def can_pack(module: torch.nn.Module, names: Collection[str]) -> bool:
    """Whether a layer with states of these names in transformers' cache has a known code.

    A name comes as often as the layer has such a state.
    """
    kind: Any = type(module)
    code = None if "forward" in vars(module) else _code_of(kind)
    if code is None:
        return False
    return sorted(names) == [*_STATES[: 1 if code.functions.chunks is None else 2]]


class PackedRules:
    """Runs layers over packed tokens in one call, with the states of rows.

    `modules` are layers that `can_pack`; `states` their tensors `[rows, …]` by name in
    transformers' cache. `called` receives each of `layers` that runs.
    """

    def __init__(
        self,
        modules: Mapping[int, torch.nn.Module],
        states: Mapping[int, Mapping[str, torch.Tensor]],
        called: list[int],
    ):
        self._states = states
        self._called = called
        self._takes_starts: dict[Callable[..., Any], bool] = {}
        self._sequences: PackedSequences | None = None
        self._num_run = 0  # Layers that have run in this pass.
        self._modules: dict[int, torch.nn.Module] = {}
        self._functions: dict[int, _Functions] = {}
        for layer, module in sorted(modules.items()):
            self._modules[layer] = module
            self._functions[layer] = self._code(layer).functions
        self.layers = tuple(self._modules)
        widths = {states[layer][_STATES[0]].shape[-1] for layer in self.layers}
        if len(widths) > 1:
            self.layers = ()
        #: Tokens in the state of a convolution; 0 without layers.
        self.state_tokens = int(widths.pop()) if self.layers else 0

    def close(self) -> None:
        """Drop the states, whose tensors keep addresses reserved."""
        self._states = {}

    @contextlib.contextmanager
    def step(self, sequences: PackedSequences) -> Iterator[None]:
        """Context in which passes of this thread are of these sequences."""
        self._sequences, self._num_run = sequences, 0
        token = _RULES.set(self)
        try:
            yield
        finally:
            _RULES.reset(token)
            self._sequences = None

    def plan(self, pieces: Sequence[Piece], device: torch.device) -> PackedSequences:
        """Return the sequences of a step of `pieces` in `packing_order`."""
        if all(each.decodes and each.num_past_tokens and not each.checkpoints for each in pieces):
            rows = torch.tensor([each.row for each in pieces])
            return PackedSequences.decoding(rows.to(device, non_blocking=True))
        return plan_step(pieces, self.state_tokens).send(device)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Context in which the layers are of a class whose code is the packed one.

        Unlike another `forward`, a class is the same for all layers to a compiler.
        """
        for layer in self.layers:
            module: Any = self._modules[layer]
            module.__class__ = _packed_class(module.__class__)
        try:
            yield
        finally:
            for layer in self.layers:
                module = self._modules[layer]
                module.__class__ = module.__class__.__mro__[1]

    def run(self, layer: int, forward: Callable[..., Any], hidden: torch.Tensor) -> Any:
        """Run a layer over `[1, T, D]`; `forward` takes these, a cache, and the code to run."""
        if layer != self.layers[self._num_run]:
            raise InternalError(f"layer {layer} runs before layer {self.layers[self._num_run]}")
        code = functools.partial(self._code(layer).forward, self._modules[layer])
        return forward(hidden, None, code)

    def _code(self, layer: int) -> _Code:
        module: Any = self._modules[layer]
        code = _code_of(module.__class__)
        assert code is not None  # As of any layer that runs packed.
        return code

    def convolve(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: Any
    ) -> torch.Tensor:
        """Convolve `[1, C, T]` by sequence, for the next layer."""
        layer, sequences = self.layers[self._num_run], self._now
        self._num_run += 1
        self._called.append(layer)
        functions, states = self._functions[layer], self._states[layer][_STATES[0]]
        given = states.index_select(0, sequences.rows)
        if sequences.extended is None:
            by_sequence = hidden[0].T[:, :, None]
            out = functions.update(by_sequence, given, weight, bias, activation)
            states.index_copy_(0, sequences.rows, given)
            return out[:, :, 0].contiguous().T[None]
        given = given.masked_fill(~sequences.is_begun[:, None, None], 0).to(hidden.dtype)
        by_token = torch.cat((given.transpose(1, 2).flatten(0, 1), hidden[0].T))
        extended = by_token.index_select(0, sequences.extended)
        for tails, rows in (
            (sequences.tails, sequences.rows),
            (sequences.kept_tails, sequences.kept_rows),
        ):
            made = extended.index_select(0, tails.flatten())
            made = made.view(*tails.shape, extended.shape[1]).transpose(1, 2)
            states.index_copy_(0, rows, made.to(states.dtype))
        out = functions.convolution(extended.T[None], weight, bias, activation=activation)
        return out[0].T.index_select(0, sequences.own).T[None]

    def apply(self, whole: _Call) -> torch.Tensor:
        """Apply the rules of the layer that has convolved, round by round; store the states."""
        layer, sequences = self.layers[self._num_run - 1], self._now
        functions, states = self._functions[layer], self._states[layer][_STATES[1]]
        if sequences.extended is None and functions.recurrent is not None:
            given = states.index_select(0, sequences.rows)
            out, made = whole.as_batch().compute(functions.recurrent, given)
            states.index_copy_(0, sequences.rows, made.to(states.dtype))
            return out.transpose(0, 1).contiguous()
        outputs = []
        for each in sequences.rounds:
            rule = functions.recurrent if each.is_recurrent else functions.chunks
            assert rule is not None  # The code calls none otherwise.
            given = states.index_select(0, each.rows)
            if each.is_begun is not None:
                given = given.masked_fill(~each.is_begun[:, None, None, None], 0)
            out, made = self._compute(rule, whole.of(each.tokens), given, each)
            made = made.to(states.dtype)
            if each.kept_rows.numel():
                states.index_copy_(0, each.kept_rows, made.index_select(0, each.kept_from))
            states.index_copy_(0, each.targets, made)
            outputs.append(out)
        joint = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
        if sequences.order is not None:
            joint = joint.index_select(1, sequences.order)
        return joint.contiguous()

    @property
    def _now(self) -> PackedSequences:
        if self._sequences is None:
            raise InternalError("a layer with a state was run outside a step")
        return self._sequences

    def _compute(
        self, rule: Callable[..., Any], call: _Call, given: torch.Tensor, its: Round
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute parts from states `[n, …]`; returns `[1, t, H, D]` and the states after them."""
        if rule not in self._takes_starts and call.query.shape[1] >= 3:
            self._takes_starts[rule] = _takes_starts(rule, call, given[:1])
        if self._takes_starts.get(rule):
            return call.compute(rule, given, cu_seqlens=its.starts, chunk_indices=its.indices)
        return _one_by_one(rule, call, given, its.starts)


class _Call(NamedTuple):
    """A rule's arguments for packed tokens `[1, T, …]`, without states and bounds."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    normalizes: bool

    def of(self, tokens: slice | torch.Tensor) -> _Call:
        """Return the call for some of its tokens."""

        def part(whole: torch.Tensor) -> torch.Tensor:
            return whole[:, tokens] if isinstance(tokens, slice) else whole.index_select(1, tokens)

        query, key, value, g, beta, normalizes = self
        return _Call(part(query), part(key), part(value), part(g), part(beta), normalizes)

    def as_batch(self) -> _Call:
        """Return the call with each token as a batch entry `[T, 1, …]`."""
        query, key, value, g, beta = [each.transpose(0, 1) for each in self[:-1]]
        return _Call(query, key, value, g, beta, self.normalizes)

    def compute(
        self, rule: Callable[..., Any], given: torch.Tensor, **bounds: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output and the states after the tokens, from those `given`."""
        out, made = rule(
            self.query,
            self.key,
            self.value,
            g=self.g,
            beta=self.beta,
            initial_state=given,
            output_final_state=True,
            use_qk_l2norm_in_kernel=self.normalizes,
            **bounds,
        )
        return out, made


def _one_by_one(
    rule: Callable[..., Any], call: _Call, given: torch.Tensor, starts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the parts of a round with a call for each."""
    out, made = torch.zeros_like(call.value), given.clone()
    for at, (start, end) in enumerate(itertools.pairwise(starts.tolist())):
        if start < end:
            its = call.of(slice(start, end)).compute(rule, given[at : at + 1])
            out[:, start:end], made[at : at + 1] = its
    return out, made


def _takes_starts(rule: Callable[..., Any], call: _Call, given: torch.Tensor) -> bool:
    """Whether a rule computes several sequences, one of them empty, in one call."""
    few, states = call.of(slice(0, 3)), torch.cat((given, given / 2, given))
    starts = torch.tensor([0, 1, 3, 3], device=given.device)
    indices = torch.tensor([[0, 0], [1, 0], [2, 0]], device=given.device)
    try:
        found = few.compute(rule, states, cu_seqlens=starts, chunk_indices=indices)
    except Exception:  # noqa: BLE001  # whatever it says of arguments that it does not know
        return False
    expected = _one_by_one(rule, few, states, starts)
    return all(
        each.shape == wanted.shape
        and torch.allclose(each.float(), wanted.float(), rtol=_ROUNDING, atol=_ROUNDING)
        for each, wanted in zip(found, expected, strict=True)
    )


# ---- operators -----------------------------------------------------------------------------------

#: The rules of the step that runs in this thread.
_RULES: ContextVar[PackedRules | None] = ContextVar("vmkv_rules", default=None)

_LIBRARY: Any = torch.library.Library("vmkv", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "convolve_rows(Tensor hidden, Tensor weight, Tensor? bias, str? activation) -> Tensor"
)
_LIBRARY.define(
    "apply_rule(Tensor query, Tensor key, Tensor value, Tensor g, Tensor beta, bool normalizes) "
    "-> Tensor"
)


def _running() -> PackedRules:
    rules = _RULES.get()
    if rules is None:
        raise InternalError("a layer with a state was run outside a step")
    return rules


def _convolve_rows(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    """Convolve; like `attend_rows`, the operator declares no mutation of rows."""
    return _running().convolve(hidden, weight, bias, activation)


def _apply_rule(*arguments: Any) -> torch.Tensor:
    return _running().apply(_Call(*arguments))


def _like_convolved(hidden: torch.Tensor, *_: Any) -> torch.Tensor:
    return hidden.new_empty((1, hidden.shape[2], hidden.shape[1])).transpose(1, 2)


def _like_ruled(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> Any:
    return value.new_empty(value.shape)


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("convolve_rows", _convolve_rows, _key)
    _LIBRARY.impl("apply_rule", _apply_rule, _key)
torch.library.register_fake("vmkv::convolve_rows", _like_convolved, lib=_LIBRARY)
torch.library.register_fake("vmkv::apply_rule", _like_ruled, lib=_LIBRARY)


def _convolved(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: object,
) -> Any:
    """Take the place of a convolution in a layer's code."""
    return torch.ops.vmkv.convolve_rows(hidden, weight, bias, activation)


def _ruled(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    **_: object,
) -> tuple[Any, None]:
    """Take the place of a rule in a layer's code; the states stay in their rows."""
    out = torch.ops.vmkv.apply_rule(query, key, value, g, beta, use_qk_l2norm_in_kernel)
    return out, None
