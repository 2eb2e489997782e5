"""States of layers in packed steps: each sequence of a step has its own.

Layers with linear attention read and write a state through transformers' cache. In a packed step
the layer's own code runs once for the sequences that decode, as a batch, and once for each other
one, with caches over their states:

    packed tokens   a | b | c | d d d d | e e e
    the layer       [a, b, c]   [d d d d]   [e e e]

Layers whose code is known run once over all tokens of a step (`state_rules.py`).
`splitting` replaces the `forward` of such layers. Outside packed passes they compute as before. A
layer stops where a piece wants a checkpoint, copies its state and goes on, so prompts are not cut
for checkpoints. Steps overwrite states: a step that fails midway has spoilt those of its sequences,
which then go back to a checkpoint or start over.

See DESIGN.md, Note [States beside rows].
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..core.cache import StateGroup, StateShape
from ..errors import ConfigError
from .cache_argument import named_cache
from .row_attention import running
from .state_plan import PackedSequences
from .state_rules import PackedRules, can_pack

if TYPE_CHECKING:
    from .piece import Piece

# ---- layers --------------------------------------------------------------------------------------

Path = tuple[str, Any]
"""Place of a tensor in a cache's layer: an attribute, and a key where that holds a dict."""


def tensors_of(layer: Any) -> dict[Path, torch.Tensor]:
    """Return the tensors of a layer's state in transformers' cache, without keys and values."""
    found: dict[Path, torch.Tensor] = {}
    for name, value in vars(layer).items():
        if name in ("keys", "values"):
            continue
        entries = value.items() if isinstance(value, dict) else [(None, value)]
        found |= {(name, key): each for key, each in entries if isinstance(each, torch.Tensor)}
    return found


def with_tensors(layer: Any, tensors: Mapping[Path, torch.Tensor | None]) -> Any:
    """Return a copy of a layer of transformers' cache that holds these tensors."""
    twin = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            setattr(twin, name, dict(value))
    for (name, key), tensor in tensors.items():
        if key is None:
            setattr(twin, name, tensor)
        else:
            getattr(twin, name)[key] = tensor
    return twin


class StateLayer(NamedTuple):
    """A layer with a state: its part of transformers' cache, before its first tokens and after.

    `cache` is an empty cache of the model. `empty` and `begun` hold no tensors; `shapes` are those
    of one sequence, without the batch. Unless it `is_chunkable`, it forgets its state when it
    gets several tokens at once (Jamba).
    """

    cache: Any
    empty: Any
    begun: Any
    shapes: Mapping[Path, StateShape]
    is_chunkable: bool = True

    @property
    def names(self) -> list[str]:
        """Names of the states in transformers' cache, each as often as there is one."""
        return [name for name, _ in self.shapes]

    def cache_of(self, layer: int, its: Any) -> Any:
        """Return a cache whose layer `layer` is `its`."""
        cache = copy.copy(self.cache)
        cache.layers = [None] * layer + [its]
        return cache


# ---- packed steps --------------------------------------------------------------------------------


class PackedStates:
    """Runs layers with states of a cache's rows over packed tokens, and notes each in `called`."""

    def __init__(
        self,
        group: StateGroup,
        layers: Mapping[int, StateLayer],
        called: list[int],
        modules: Mapping[int, torch.nn.Module],
    ):
        self.layers = layers
        self._called = called
        self._rows = {layer: group.tensors(layer) for layer in layers}
        named = {
            layer: {path[0]: its for path, its in zip(each.shapes, self._rows[layer], strict=True)}
            for layer, each in layers.items()
        }
        known = {
            layer: module
            for layer, module in modules.items()
            if can_pack(module, layers[layer].names)
        }
        self.rules = PackedRules(known, named, called)
        self._pieces: Sequence[Piece] = ()
        self._num_batched = 0  # The first pieces, one token each after others of their sequence.
        self._batched_rows: torch.Tensor | None = None

    def begin(self, packed: Sequence[Piece], device: torch.device) -> None:
        """Let the next pass compute these pieces, in their order."""
        self._pieces = packed
        batched = itertools.takewhile(lambda each: each.decodes and each.num_past_tokens, packed)
        self._num_batched, self._batched_rows = len(list(batched)), None
        if self.rules.layers:
            self.rules.begin(self.rules.plan(packed, device))

    def begin_decoding(self, rows: torch.Tensor) -> None:
        """Let the next pass decode a token of each of `rows [n]`; it may be captured."""
        self._pieces, self._num_batched, self._batched_rows = (), len(rows), rows.long()
        self.rules.begin(PackedSequences.decoding(self._batched_rows))

    def clear(self, row: int) -> None:
        """Zero a mapped row."""
        for its in self._rows.values():
            for each in its:
                each[row].zero_()

    def close(self) -> None:
        """Drop the tensors, which keep addresses reserved."""
        self._rows.clear()
        self.rules.close()

    def run(self, layer: int, forward: Callable[..., Any], hidden: torch.Tensor) -> Any:
        """Run a layer over `[1, T, D]`; `forward` takes hidden states, a cache, and code."""
        if layer in self.rules.layers:
            return self.rules.run(layer, forward, hidden)
        self._called.append(layer)
        count = self._num_batched
        if count == 1 and self._pieces:  # Its state needs no copy.
            count = 0
        outputs = []
        if count:
            outputs.append(_transposed(self._run_batch(layer, forward, hidden[0, :count, None])))
        start = count
        for piece in self._pieces[count:]:
            end = start + piece.num_new_tokens
            outputs += self._run_piece(layer, forward, hidden[:, start:end], piece)
            start = end
        if len(outputs) == 1:
            return outputs[0]
        if isinstance(outputs[0], tuple):  # Weights beside the output, which nobody reads here.
            return (torch.cat([each[0] for each in outputs], 1), *outputs[0][1:])
        return torch.cat(outputs, 1)

    def _run_batch(self, layer: int, forward: Callable[..., Any], hidden: torch.Tensor) -> Any:
        """Run the batched pieces, `[n, 1, D]`, on copies of their states."""
        if self._batched_rows is None:
            rows = [piece.row for piece in self._pieces[: self._num_batched]]
            self._batched_rows = torch.tensor(rows).to(hidden.device, non_blocking=True)
        at = self._batched_rows
        given = [each.index_select(0, at) for each in self._rows[layer]]
        made, states = self._run_on(layer, forward, hidden, given)
        for each, state in zip(self._rows[layer], states, strict=True):
            each.index_copy_(0, at, state)
        for piece in self._pieces[: self._num_batched]:
            for _, kept_row in piece.checkpoints:
                self._keep(layer, piece.row, kept_row)
        return made

    def _run_piece(
        self, layer: int, forward: Callable[..., Any], hidden: torch.Tensor, piece: Piece
    ) -> list[Any]:
        """Run a piece, `[1, T, D]`, on its row's states; returns the outputs of its parts."""
        rows = [each[piece.row : piece.row + 1] for each in self._rows[layer]]
        past, outputs = piece.num_past_tokens, []
        for stop, kept_row in (*piece.checkpoints, (piece.num_tokens, None)):
            start, end = past - piece.num_past_tokens, stop - piece.num_past_tokens
            one_by_one = past > 0 and not self.layers[layer].is_chunkable
            size = 1 if one_by_one else max(1, end - start)
            for part in torch.split(hidden[:, start:end], size, 1):
                if not part.shape[1]:
                    continue  # The last checkpoint is the piece's end.
                made, states = self._run_on(layer, forward, part, rows if past else None)
                for row, state in zip(rows, states, strict=True):
                    if state is not row:
                        row.copy_(state)
                outputs.append(made)
                past += part.shape[1]
            if kept_row is not None:
                self._keep(layer, piece.row, kept_row)
        return outputs

    def _keep(self, layer: int, row: int, kept_row: int) -> None:
        for each in self._rows[layer]:
            each[kept_row].copy_(each[row])

    def _run_on(
        self,
        layer: int,
        forward: Callable[..., Any],
        hidden: torch.Tensor,
        given: Sequence[torch.Tensor] | None,
    ) -> tuple[Any, list[torch.Tensor]]:
        """Run a layer from `given` states, or from none; returns its output and the states."""
        known = self.layers[layer]
        its = with_tensors(known.empty, {})
        if given is not None:
            its = with_tensors(known.begun, dict(zip(known.shapes, given, strict=True)))
        made = forward(hidden, known.cache_of(layer, its))
        states = tensors_of(its)
        return made, [states[path] for path in known.shapes]


class StateProbe:
    """Runs layers without a state, and finds the `chunkable` ones: a NaN in their state shows."""

    def __init__(self, layers: Mapping[int, StateLayer]):
        self._layers = layers
        self.chunkable: set[int] = set()

    def run(self, layer: int, forward: Callable[..., Any], hidden: torch.Tensor) -> Any:
        """Run a layer over tokens `[B, T, D]`, and once more for each tensor of its state."""
        known = self._layers[layer]
        answers = []
        for wrong in known.shapes:
            tensors = {
                path: hidden.new_full(
                    (len(hidden), *its.shape), torch.nan if path == wrong else 0, dtype=its.dtype
                )
                for path, its in known.shapes.items()
            }
            made = forward(hidden, known.cache_of(layer, with_tensors(known.begun, tensors)))
            made = made[0] if isinstance(made, tuple) else made
            answers.append(bool(made.isnan().any()))
        if all(answers):
            self.chunkable.add(layer)
        return forward(hidden, known.cache_of(layer, with_tensors(known.empty, {})))


def _transposed(made: Any) -> Any:
    if isinstance(made, tuple):
        return (made[0].transpose(0, 1), *made[1:])
    return made.transpose(0, 1)


# ---- the model's layers --------------------------------------------------------------------------

_LOCK = threading.Lock()


class _SplitForward:
    """A layer's `forward` that runs packed steps by sequence, and other calls as they are."""

    def __init__(self, module: torch.nn.Module, layer: int):
        self.num_users = 0
        self._plain = module.forward
        self._before = vars(module).get("forward")  # Another library's, such as accelerate's.
        self._layer = layer
        self._cache_name = str(named_cache(type(module).forward))
        functools.update_wrapper(self, self._plain)

    def restore(self, module: torch.nn.Module) -> None:
        """Give the module its `forward` back."""
        if self._before is None:
            del vars(module)["forward"]
        else:
            vars(module)["forward"] = self._before

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        states = running().states
        if states is None:
            return self._plain(*arguments, **options)
        hidden = arguments[0] if arguments else options.pop("hidden_states")
        if "attention_mask" in options:
            options["attention_mask"] = None  # No token is padding.

        def forward(
            hidden: torch.Tensor, cache: Any, code: Callable[..., Any] = self._plain
        ) -> Any:
            return code(hidden, *arguments[1:], **options | {self._cache_name: cache})

        return states.run(self._layer, forward, hidden)


def state_modules(model: torch.nn.Module, layers: Mapping[int, Any]) -> dict[int, torch.nn.Module]:
    """Return the module of each of `layers` that takes a cache."""
    found: dict[int, torch.nn.Module] = {}
    for module in model.modules():
        layer: Any = getattr(module, "layer_idx", None)
        kind: Any = type(module)
        before: Any = type(found.get(layer, module))
        # The innermost, because those around come before; but not attention beside the layer.
        is_inner = _is_stateful(kind) or not _is_stateful(before)
        if layer in layers and named_cache(kind.forward) and is_inner:
            found[layer] = module
    return found


@functools.cache
def _is_stateful(kind: Any) -> bool:
    """Whether the code of a module's class names states of transformers' cache."""
    methods = [inspect.unwrap(each) for _, each in inspect.getmembers(kind, inspect.isfunction)]
    names = {name for each in methods for name in each.__code__.co_names}
    return any("conv_state" in name or "recurrent_state" in name for name in names)


def run_packed(model: torch.nn.Module, layers: Mapping[int, StateLayer]) -> bool:
    """Whether all layers with states run once for a step, so that they can be compiled."""
    modules = state_modules(model, layers)
    return all(at in modules and can_pack(modules[at], its.names) for at, its in layers.items())


@contextlib.contextmanager
def splitting(model: torch.nn.Module, layers: Mapping[int, Any]) -> Iterator[None]:
    """Context in which layers with states run by sequence; may raise `ConfigError`."""
    modules = state_modules(model, layers)
    missing = sorted(layers.keys() - modules.keys())
    if missing:
        raise ConfigError(f"layers {missing} keep states, and take no cache by themselves")
    with _LOCK:
        for layer, module in modules.items():
            split = vars(module).get("forward")
            if not isinstance(split, _SplitForward):
                split = _SplitForward(module, layer)
                vars(module)["forward"] = split
            split.num_users += 1
    try:
        yield
    finally:
        with _LOCK:
            for module in modules.values():
                split = vars(module).get("forward")
                if isinstance(split, _SplitForward):
                    split.num_users -= 1
                    if not split.num_users:
                        split.restore(module)
