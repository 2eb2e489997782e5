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

Where flash-linear-attention is installed, sequences that decode change their states in place: with
copies, such a step would read and write three times as much.

See DESIGN.md, Note [States beside rows].
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import itertools
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import InternalError
from .compiled_layers import with_own_code
from .piece import Piece
from .row_attention import running
from .state_plan import Kind, PackedSequences, Round, plan_step

_CONVOLUTION, _UPDATE = "causal_conv1d_fn", "causal_conv1d_update"
_STATES = "conv_states", "recurrent_states"
#: Tolerance of the comparison that tells whether a rule takes bounds of sequences.
_ROUNDING = 0.05

# ---- a layer's code ------------------------------------------------------------------------------


class _Code(NamedTuple):
    """A layer's code over packed tokens, and the functions that it called before."""

    forward: types.FunctionType
    convolution: Callable[..., torch.Tensor]
    update: Callable[..., torch.Tensor]
    chunks: Callable[..., Any] | None
    recurrent: Callable[..., Any] | None


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
    its = [rules[name] for name in (*chunks, *recurrent)] or [None, None]
    return _Code(with_own_code(forward, names), known[_CONVOLUTION], known[_UPDATE], *its)


@functools.cache
def _packed_class(of: Any, code: _Code) -> Any:
    """Return the class of a known class's layers over packed tokens, the same for all of them."""
    return type(f"Packed{of.__name__}", (of,), {"forward": code.forward})


def can_pack(module: torch.nn.Module, names: Collection[str]) -> bool:
    """Whether a layer with states of these names, each as often as it is kept, has a known code."""
    kind: Any = type(module)
    code = None if "forward" in vars(module) else _code_of(kind)
    if code is None:
        return False
    return sorted(names) == [*_STATES[: 1 if code.chunks is None else 2]]


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
        self._is_in_place: dict[Callable[..., Any], bool] = {}
        self._sequences: PackedSequences  # Of the pass.
        self._num_run = 0  # Layers that have run in the pass.
        self._modules: dict[int, Any] = dict(sorted(modules.items()))
        self._codes: dict[int, _Code] = {}
        for layer, module in self._modules.items():
            code = _code_of(module.__class__)
            assert code is not None  # As of any layer that runs packed.
            self._codes[layer] = code
        self.layers = tuple(self._modules)
        widths = {states[layer][_STATES[0]].shape[-1] for layer in self.layers}
        if len(widths) > 1:
            self.layers = ()
        #: Tokens in the state of a convolution; 0 without layers.
        self.state_tokens = int(widths.pop()) if self.layers else 0

    def close(self) -> None:
        """Drop the states, whose tensors keep addresses reserved."""
        self._states = {}

    def begin(self, sequences: PackedSequences) -> None:
        """Let the next pass be of these sequences."""
        self._sequences, self._num_run = sequences, 0

    def end(self) -> None:
        """Drop the sequences, whose memory may be that of captured steps."""
        vars(self).pop("_sequences", None)

    def plan(self, pieces: Sequence[Piece], device: torch.device) -> PackedSequences:
        """Return the sequences of a step of `pieces` in `packing_order`."""
        if all(each.decodes and each.num_past_tokens and not each.checkpoints for each in pieces):
            rows = torch.tensor([each.row for each in pieces])
            return PackedSequences.decoding(rows.to(device, non_blocking=True))
        return plan_step(pieces, self.state_tokens).send(device)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Context in which layers have a class for packed tokens, the same to compilers for all."""
        for layer in self.layers:
            module = self._modules[layer]
            module.__class__ = _packed_class(module.__class__, self._codes[layer])
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
        code = functools.partial(self._codes[layer].forward, self._modules[layer])
        return forward(hidden, None, code)

    def convolve(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: Any
    ) -> torch.Tensor:
        """Convolve `[1, T, C]` by sequence, for the next layer."""
        layer, sequences = self.layers[self._num_run], self._sequences
        self._num_run += 1
        self._called.append(layer)
        code, states = self._codes[layer], self._states[layer][_STATES[0]]
        given = states.index_select(0, sequences.rows)
        if sequences.near is None:
            out = code.update(hidden[0, :, :, None], given, weight, bias, activation)
            states.index_copy_(0, sequences.rows, given)
            return out[None, :, :, 0].contiguous()
        given = given.masked_fill(~sequences.is_begun[:, None, None], 0).to(hidden.dtype)
        near = hidden[0].index_select(0, sequences.near)
        sources = torch.cat((given.transpose(1, 2).flatten(0, 1), near))
        sources = sources.index_select(0, sequences.sources)
        num_ends = (len(sequences.rows) + len(sequences.kept_rows)) * self.state_tokens
        extended, ends = sources[:-num_ends], sources[-num_ends:]
        ends = ends.view(-1, self.state_tokens, hidden.shape[2]).transpose(1, 2).to(states.dtype)
        states.index_copy_(0, sequences.rows, ends[: len(sequences.rows)])
        states.index_copy_(0, sequences.kept_rows, ends[len(sequences.rows) :])
        convolved = [
            code.convolution(each, weight, bias, activation=activation)[0].T.contiguous()
            for each in (hidden.transpose(1, 2), extended.T[None])
        ]
        heads = convolved[1].index_select(0, sequences.own)
        return convolved[0].index_copy_(0, sequences.heads, heads)[None]

    def apply(self, whole: Call) -> torch.Tensor:
        """Apply the rules of the layer that has convolved, round by round; store the states."""
        layer, sequences = self.layers[self._num_run - 1], self._sequences
        code, states = self._codes[layer], self._states[layer][_STATES[1]]
        if sequences.near is None:
            return self._decode(layer, whole, sequences.rows).contiguous()
        outputs = []
        for each in sequences.rounds:
            call = whole.of(each.tokens)
            if each.kind is Kind.DECODE:
                outputs.append(self._decode(layer, call, each.rows, each.starts))
                if each.kept_rows.numel():
                    kept = each.rows.index_select(0, each.kept_from)
                    states.index_copy_(0, each.kept_rows, states.index_select(0, kept))
                continue
            rule = code.chunks if each.kind is Kind.CHUNKS else code.recurrent
            assert rule is not None  # The code calls none otherwise.
            given = states.index_select(0, each.rows)
            if each.is_begun is not None:
                given = given.masked_fill(~each.is_begun[:, None, None, None], 0)
            out, made = self._compute(rule, call, given, each)
            made = made.to(states.dtype)
            if each.kept_rows.numel():
                states.index_copy_(0, each.kept_rows, made.index_select(0, each.kept_from))
            states.index_copy_(0, each.targets, made)
            outputs.append(out)
        if sequences.places is None:
            return torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0].contiguous()
        has_all = outputs[0].shape[1] == whole.value.shape[1]
        joint = outputs.pop(0).contiguous() if has_all else torch.empty_like(whole.value)
        late = torch.cat((*outputs, joint[:, :1]), 1).index_select(1, sequences.taken)
        return joint.index_copy_(1, sequences.places, late)

    def _decode(
        self, layer: int, call: Call, rows: torch.Tensor, starts: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute one more token of each row, `[1, n, H, D]`, or none where `starts` says so."""
        rule, states = self._codes[layer].recurrent, self._states[layer][_STATES[1]]
        assert rule is not None  # The code calls none otherwise.
        if rule not in self._is_in_place:
            self._is_in_place[rule] = _is_in_place(rule, call.of(slice(0, 1)), states)
        if self._is_in_place[rule]:
            return call.compute_in_place(states, rows, starts)
        out, made = call.as_batch().compute(rule, states.index_select(0, rows))
        states.index_copy_(0, rows, made.to(states.dtype))
        return out.transpose(0, 1)

    def _compute(
        self, rule: Callable[..., Any], call: Call, given: torch.Tensor, its: Round
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if rule not in self._takes_starts and call.query.shape[1] >= 3:
            self._takes_starts[rule] = _takes_starts(rule, call, given[:1])
        if self._takes_starts.get(rule):
            return call.compute(rule, given, cu_seqlens=its.starts, chunk_indices=its.indices)
        return _one_by_one(rule, call, given, its.starts)


class Call(NamedTuple):
    """A rule's arguments for packed tokens `[1, T, …]`, without states and bounds."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor

    def of(self, tokens: slice | torch.Tensor) -> Call:
        """Return the arguments for some of the tokens."""

        def part(whole: torch.Tensor) -> torch.Tensor:
            return whole[:, tokens] if isinstance(tokens, slice) else whole.index_select(1, tokens)

        return Call(*map(part, self))

    def as_batch(self) -> Call:
        """Return the call with each token as a batch entry `[T, 1, …]`."""
        return Call(*(each.transpose(0, 1) for each in self))

    def compute(
        self, rule: Callable[..., Any], given: torch.Tensor, **bounds: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output and the states after the tokens, from those `given`."""
        bounds |= {"initial_state": given}
        out, made = rule(*self[:3], g=self.g, beta=self.beta, output_final_state=True, **bounds)
        return out, made

    def compute_in_place(
        self, states: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor | None
    ) -> torch.Tensor:
        """Compute a token of each of `rows`, or none by `starts`, in `states [rows, H, K, V]`."""
        call = self.as_batch() if starts is None else self
        gates = (
            call.g if call.g.ndim == 4 else call.g[..., None].expand(*call.g.shape, states.shape[2])
        )
        tensors = [each.contiguous() for each in (*call[:3], gates, call.beta)]
        out: torch.Tensor
        out, _ = _rule_in_place()(
            *tensors,
            initial_state=states,
            inplace_final_state=True,
            cu_seqlens=starts,
            ssm_state_indices=rows,
        )
        return out if starts is not None else out.transpose(0, 1)


@functools.cache
def _rule_in_place() -> Any:
    """Return flash-linear-attention's rule for one token that changes states in place, or None."""
    try:
        return importlib.import_module("fla.ops.kda.fused_recurrent").fused_recurrent_kda_fwd
    except (ImportError, AttributeError):
        return None


def _is_in_place(rule: Callable[..., Any], call: Call, states: torch.Tensor) -> bool:
    """Whether the rule that changes states in place computes the same as `rule`."""
    if _rule_in_place() is None:
        return False
    given = torch.linspace(-1, 1, states[0].numel(), device=states.device).view(states[:1].shape)
    there = torch.cat((given, given)).to(states.dtype)
    row = torch.ones(1, dtype=torch.int64, device=states.device)
    try:
        out = call.compute_in_place(there, row, None)
    except Exception:  # noqa: BLE001  # of another version, or on a device that it does not know
        return False
    expected, made = call.as_batch().compute(rule, given)
    return _is_close(out, expected.transpose(0, 1)) and _is_close(there, torch.cat((given, made)))


def _is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.shape == expected.shape and torch.allclose(
        found.float(), expected.float(), rtol=_ROUNDING, atol=_ROUNDING
    )


def _one_by_one(
    rule: Callable[..., Any], call: Call, given: torch.Tensor, starts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    out, made = torch.zeros_like(call.value), given.clone()
    for at, (start, end) in enumerate(itertools.pairwise(starts.tolist())):
        if start < end:
            its = call.of(slice(start, end)).compute(rule, given[at : at + 1])
            out[:, start:end], made[at : at + 1] = its
    return out, made


def _takes_starts(rule: Callable[..., Any], call: Call, given: torch.Tensor) -> bool:
    """Whether a rule computes several sequences, one of them empty, in one call."""
    few, states = call.of(slice(0, 3)), torch.cat((given, given / 2, given))
    starts = torch.tensor([0, 1, 3, 3], device=given.device)
    indices = torch.tensor([[0, 0], [1, 0], [2, 0]], device=given.device)
    try:
        found = few.compute(rule, states, cu_seqlens=starts, chunk_indices=indices)
    except Exception:  # noqa: BLE001  # whatever it says of arguments that it does not know
        return False
    return all(map(_is_close, found, _one_by_one(rule, few, states, starts)))


# ---- operators -----------------------------------------------------------------------------------

_LIBRARY: Any = torch.library.Library("vmkv", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("convolve_rows(Tensor x, Tensor weight, Tensor? bias, str? activation) -> Tensor")
_LIBRARY.define("apply_rule(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta) -> Tensor")


def _rules() -> PackedRules:
    rules = running().rules
    if rules is None:
        raise InternalError("a layer with a state was run outside a step")
    return rules


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty(tensor.shape)


for _key in ("CPU", "CUDA"):  # Like `attend_rows`, they declare no mutation of rows.
    _LIBRARY.impl("convolve_rows", lambda *each: _rules().convolve(*each), _key)
    _LIBRARY.impl("apply_rule", lambda *each: _rules().apply(Call(*each)), _key)
torch.library.register_fake("vmkv::convolve_rows", lambda hidden, *_: _like(hidden), lib=_LIBRARY)
torch.library.register_fake("vmkv::apply_rule", lambda *each: _like(each[2]), lib=_LIBRARY)


def _convolved(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: object,
) -> Any:
    """Take the place of a convolution in a layer's code."""
    hidden = hidden.transpose(1, 2)
    return torch.ops.vmkv.convolve_rows(hidden, weight, bias, activation).transpose(1, 2)


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
    if use_qk_l2norm_in_kernel:
        query, key = _normalized(query), _normalized(key)
    return torch.ops.vmkv.apply_rule(query, key, value.contiguous(), g, beta), None


def _normalized(vectors: torch.Tensor) -> torch.Tensor:
    """Normalize as flash-linear-attention's rules do; compiled, that costs one kernel."""
    wide = vectors.float()
    scale = torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)
    return (wide * scale).to(vectors.dtype)
