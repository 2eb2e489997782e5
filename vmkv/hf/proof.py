"""Proof that a model fits packed batches: packed and plain passes must agree.

A model's code does not tell whether it attends through transformers' interface once in each layer,
uses the positions it is given, and leaves masks to the attention. So a few short sequences go
through the model as it is, and then packed: some begin, one continues, some decode.

Both are compared layer by layer. Each layer of a packed pass gets the input that it had in the
plain pass, so that rounding errors do not add up, and a router of experts that breaks a tie
differently changes the output of its own layer for that token only:

    plain    tokens -> embedding -> h0 -> layer 0 -> h1 -> layer 1 -> h2 -> ... -> logits
                                    ?                ?                ?              ?
    packed   tokens -> embedding -> .  h0 -> layer 0 -> .  h1 -> layer 1 -> .  ...-> logits

See Note [A model proves itself] in DESIGN.md.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections import abc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..core.cache import Sequence, StateShape
from ..errors import ConfigError, VMKVError, one_line
from ..step import Piece, Stepper, attending_through
from ..step.latents import Latent, handing_latents, latent_of
from ..step.model_guard import PACKED, chosen_attention, eval_mode, hooks_of, refusing_waits
from ..step.piece import cut_at_chunks, packing_order
from ..step.row_attention import AttentionCalls, LayerCall, PackedPass, autocast_dtype, passing
from ..step.states import StateLayer, StateProbe, splitting, state_modules, tensors_of, with_tensors
from . import compat
from .attention import attend_to_tensors
from .configuration import UnservableError, layer_chunks, layer_windows
from .store import CacheOptions, Signature, Store

_LOG = logging.getLogger(__name__)
#: Tokens of each sequence: more than the windows of models that are made for tests.
_NUM_TOKENS = 16
_NUM_SEQUENCES = 7
#: Kernels need rows that are at least as long as there are query heads per key head.
_ROW_TOKENS = 256


def _piece(at: int, num_past_tokens: int, num_new_tokens: int) -> Piece:
    return Piece(at, at, num_past_tokens, num_new_tokens, None)


#: The packed passes. In the second, no sequence has positions that a model could count by itself.
_PASSES = (
    (_piece(0, 0, 5), *(_piece(at, 0, past) for at, past in enumerate((3, 7, 9, 12, 15), 1))),
    (
        *(_piece(1, 3, 1), _piece(0, 5, 11), _piece(2, 7, 1), _piece(6, 0, 16)),
        *(_piece(3, 9, 1), _piece(4, 12, 1), _piece(5, 15, 1)),
    ),
)
#: Attempts, each with other tokens: ties then fall elsewhere, defects do not.
_NUM_ATTEMPTS = 3
#: The unit in the last place below which ties do not occur by chance.
_FINE_EPS = 1e-4


class Proof(NamedTuple):
    """Properties of a model that has passed its proof.

    `signatures` are of layers with keys; `never_waits` says whether decode steps may be captured.
    """

    signatures: Mapping[int, Signature]
    calls: AttentionCalls
    never_waits: bool


# Per model, what its proofs depend on (`_made_of`), and the proofs. An entry dies with its model.
_proven: weakref.WeakKeyDictionary[
    Any, tuple[tuple[object, ...], dict[tuple[object, ...], Proof]]
] = weakref.WeakKeyDictionary()


class Locks(NamedTuple):
    """Locks of a model: for calls of `vmkv.generate`, and in them for changes of the model."""

    calls: threading.RLock
    proof: threading.RLock


# By embeddings, which wrappers of a model share.
_locks: weakref.WeakKeyDictionary[Any, Locks] = weakref.WeakKeyDictionary()


def locks_of(model: Any) -> Locks:
    """Return the locks of a model, the same for all who ask."""
    return _locks.setdefault(
        model.get_input_embeddings(), Locks(threading.RLock(), threading.RLock())
    )


def prove(model: Any, attention_backend: str | None = None, kv_dtype: str = "auto") -> Proof:
    """Refuse a model whose packed passes and plain pass compute different results.

    Runs once per model object, device, dtype, kernel and `kv_dtype`, while modules and hooks stay;
    after that, looks at each module. Rows of another `kv_dtype` than "auto" hold no latents. The
    `ConfigError` of a refusal names an alternative. Any error, also for want of memory, leaves the
    model and the random generators as before.

    Cost: a plain pass over 112 tokens, two packed passes in a cache of seven short rows, and two
    passes over two tokens; after that torch's unused memory is returned to the device.
    """
    compat.check_model(model)
    weight = model.get_input_embeddings().weight
    kind_of_rows = weight.device, weight.dtype, autocast_dtype(weight.device)
    served_as = (*kind_of_rows, attention_backend, kv_dtype)
    try:
        with locks_of(model).proof:
            windows = layer_windows(model.config)
            kind: Any = type(compat.text_config(model.config))
            if not any(compat.takes_attention(kind)):
                raise UnservableError("it attends by code of its own")
            made_of, proofs = _proven.get(model, ((), {}))
            if made_of != _made_of(model, windows):
                proofs = {}
            if served_as not in proofs:
                with torch.no_grad(), _undisturbed(model):
                    proof = _checked(model, windows, attention_backend, kv_dtype)
                _proven[model] = _made_of(model, windows), proofs | {served_as: proof}
            return _proven[model][1][served_as]
    except UnservableError as error:
        raise error.of(model) from error.__cause__


def _made_of(model: Any, windows: Mapping[int, int | None]) -> tuple[object, ...]:
    modules = [(id(each), *hooks_of(each)) for each in model.modules()]
    return (id(vars(model).get("forward")), *windows.items(), *modules)


def _checked(
    model: Any,
    windows: Mapping[int, int | None],
    attention_backend: str | None,
    kv_dtype: str,
) -> Proof:
    """Compare packed passes with a plain one; refuse if they differ for all tokens tried.

    Latent attention is tried over latents first, and if that fails, over expanded keys and values.
    """
    few = _token_ids(model, 0)[0, :2]
    states = _states_of(model, few)
    with splitting(model, states):
        plain = _plain_pass(model, _token_ids(model, 0), has_states=bool(states))
        layers = layers_of(model, windows, states, few)
        if layers.calls.latents and kv_dtype == "auto":
            try:
                return _compared(model, windows, over_latents(layers), attention_backend, plain)
            except ConfigError as error:
                _LOG.warning("latent attention attends to expanded keys: %s", one_line(error))
        calls = layers.calls._replace(latents={})
        return _compared(model, windows, layers._replace(calls=calls), attention_backend, plain)


def over_latents(layers: Proof) -> Proof:
    """Return layers with the signatures of what rows of latents hold."""
    signatures = dict(layers.signatures)
    for layer, its in layers.calls.latents.items():
        shapes = (1, its.rank), (1, its.rope_dim)
        signatures[layer] = Signature(*shapes, *signatures[layer][2:])
    return layers._replace(signatures=signatures)


def _compared(
    model: Any,
    windows: Mapping[int, int | None],
    layers: Proof,
    attention_backend: str | None,
    plain: _PlainPass,
) -> Proof:
    differences: list[_Difference] = []
    has_states = bool(layers.calls.states)
    for attempt in range(_NUM_ATTEMPTS):
        if attempt:
            plain = _plain_pass(model, _token_ids(model, attempt), has_states=has_states)
        proof, differences = _packed_passes(model, windows, layers, attention_backend, plain)
        if not differences:
            _check_windows(model, windows, proof, _token_ids(model, 0)[0, :2])
            return proof
    raise UnservableError(_why_different(model, max(differences)))


# ---- the passes ---------------------------------------------------------------------------------


class _PlainPass(NamedTuple):
    """Results over n sequences of T tokens, `[n * T, …]`; `inputs` are of the layers as called."""

    token_ids: torch.Tensor
    inputs: list[torch.Tensor]
    logits: torch.Tensor


def _plain_pass(model: Any, token_ids: torch.Tensor, *, has_states: bool) -> _PlainPass:
    """Run the model as it is over `[n, T]` tokens.

    Some layers with states compute a single token in another way than several (Zamba 2 bounds time
    steps of several tokens only). So tokens of pieces that decode are computed alone, after the
    others, with the model's own cache.
    """
    found = _heard_pass(model, token_ids)
    for piece in _PASSES[1] if has_states else ():
        if piece.decodes:
            past = piece.num_past_tokens
            row = token_ids[piece.row, None, : past + 1]
            alone = _heard_pass(model, row[:, past:], row[:, :past])
            at = piece.row * token_ids.shape[1] + past
            found.logits[at] = alone.logits[0]
            for inputs, its in zip(found.inputs, alone.inputs, strict=True):
                inputs[at] = its[0]
    return found


def _heard_pass(
    model: Any, token_ids: torch.Tensor, after: torch.Tensor | None = None
) -> _PlainPass:
    """Run the model over `[n, T]` tokens, `after` others in its own cache."""
    inputs: list[torch.Tensor] = []

    def keep(hidden: torch.Tensor) -> None:
        if hidden.shape[:2] == token_ids.shape:
            inputs.append(hidden.flatten(0, 1).clone())

    chosen = chosen_attention(model)
    # A model that attends through "vmkv" already is compared with eager attention.
    reference = "eager" if chosen == PACKED else chosen
    given: dict[str, Any] = {}
    with attending_through(model, reference):
        if after is not None:
            given[compat.cache_argument(model)] = compat.default_cache(model.config)
            _run(model, after, _NOT_PLAIN, **given)
            # As `generate` does, since a first layer that keeps a state may not count tokens.
            given["position_ids"] = torch.arange(
                after.shape[1], after.shape[1] + token_ids.shape[1], device=after.device
            )[None]
        with _before_layers(model, keep):
            output = _run(model, token_ids, _NOT_PLAIN, **given)
    if not isinstance(getattr(output, "logits", None), torch.Tensor):
        raise UnservableError("it returns no logits")
    return _PlainPass(token_ids.flatten(), inputs, output.logits.flatten(0, 1))


def _packed_passes(
    model: Any,
    windows: Mapping[int, int | None],
    layers: Proof,
    attention_backend: str | None,
    plain: _PlainPass,
) -> tuple[Proof, list[_Difference]]:
    """Run the packed passes in their own cache; returns a proof if there are no differences."""
    options = CacheOptions(
        max_tokens=_ROW_TOKENS, max_batch_size=_NUM_SEQUENCES, attention_backend=attention_backend
    )
    # A wrapped `forward` may compute in another type than weights have.
    eps = max(_eps(model), *(torch.finfo(each.dtype).eps for each in layers.signatures.values()))
    differences: list[_Difference] = []
    with (
        contextlib.closing(Store(model.config, options, windows)) as memory,
        attending_through(model, PACKED),
        handing_latents(model, layers.calls.latents),
    ):
        memory.bind_all(layers.signatures, layers.calls)
        rows = [[core.open(row=at) for at in range(_NUM_SEQUENCES)] for core in memory.cores]
        own: dict[str, Any] = {"attention_backend": attention_backend, "calls": layers.calls}
        stepper = Stepper(model, memory.cores, _NUM_SEQUENCES, **own)
        with contextlib.closing(stepper):
            stepper.calls = None
            for pieces in _PASSES:
                for core, sequences in zip(memory.cores, rows, strict=True):
                    core.grow((sequences[each.row], each.num_tokens) for each in pieces)
                _, parts = cut_at_chunks(pieces, {*layers.calls.chunks.values()})
                packed = [parts[at] for at in packing_order(parts)]
                differences += _packed_pass(model, stepper, packed, plain, eps)
            never_waits = not differences and _never_waits(stepper, rows)
            calls = layers.calls._replace(layers=stepper.calls or ())
            proof = Proof(layers.signatures, calls, never_waits)
    return proof, differences


def _never_waits(stepper: Stepper, rows: abc.Sequence[abc.Sequence[Sequence]]) -> bool:
    """Whether a decode step runs while torch refuses to wait for the device."""
    if not stepper.can_capture:
        return False
    ((row, *_),) = rows
    row.append(1)
    piece = Piece(row.row, row.row, row.num_tokens - 1, 1, [0])
    try:
        stepper.run_eagerly([piece])  # Loading and tuning kernels may wait.
        with refusing_waits():
            stepper.run_eagerly([piece])
    except RuntimeError:
        return False
    return True


def _packed_pass(
    model: Any, stepper: Stepper, pieces: abc.Sequence[Piece], plain: _PlainPass, eps: float
) -> list[_Difference]:
    places = torch.cat(
        [
            torch.arange(piece.num_past_tokens, piece.num_tokens) + piece.row * _NUM_TOKENS
            for piece in pieces
        ]
    )
    kinds = [_kind(piece) for piece in pieces for _ in range(piece.num_new_tokens)]
    differences: list[_Difference] = []
    last: torch.Tensor | None = None
    coming = iter(plain.inputs)

    def compare(hidden: torch.Tensor) -> torch.Tensor | None:
        nonlocal last
        if hidden.shape[:2] != (1, len(kinds)):
            return None
        known = next(coming, None)
        if known is None or known.shape[1:] != hidden.shape[2:]:
            return None
        expected = known[places.to(known.device)].to(hidden.device)
        made = expected
        if last is not None and last.shape == expected.shape:
            made = expected - last.to(expected.device)
        differences.extend(_differences(hidden[0], expected, made, kinds, eps))
        last = expected
        return expected[None].clone()  # Some layers change their input in place.

    rows = plain.token_ids.view(_NUM_SEQUENCES, _NUM_TOKENS).tolist()
    told = [
        replace(piece, token_ids=rows[piece.row][piece.num_past_tokens : piece.num_tokens])
        for piece in pieces
    ]
    elsewhere = [[piece.row for piece in pieces]] * (len(stepper.caches) - 1)
    with _before_layers(model, compare):
        try:
            # All but the first token's, to check that the model returns the requested logits.
            logits = stepper.run_eagerly(told, elsewhere, list(range(1, len(kinds))))
        except Exception as error:
            raise _explained(error, "it does not run on packed tokens") from error
    expected = plain.logits[places.to(plain.logits.device)[1:]]
    finite = expected.where(expected.isfinite(), 0)  # Some models rule tokens out with -inf.
    made = finite - finite.mean(-1, keepdim=True)
    return differences + _differences(logits, expected, made, kinds[1:], eps)


def _kind(piece: Piece) -> str:
    if not piece.num_past_tokens:
        return "begin" if piece in _PASSES[0] else "begin beside others that go on"
    return "decode" if piece.num_new_tokens == 1 else "go on"


# ---- comparison ---------------------------------------------------------------------------------


class _Difference(NamedTuple):
    """Tokens that differ by `excess` times rounding, `share` of the change made."""

    excess: float
    share: float
    kind: str


def _differences(
    actual: torch.Tensor,
    expected: torch.Tensor,
    made: torch.Tensor,
    kinds: abc.Sequence[str],
    eps: float,
) -> list[_Difference]:
    """Return the kinds of sequence whose tokens differ by more than rounding errors explain.

    Tensors are `[tokens, …]`; `made` is the change by the preceding part of the model, and `eps`
    the unit in the last place. Half of the tokens must agree with a coarse type, because ties
    between experts may break differently, and all of them with a fine one.
    """
    actual, expected, made = (each.flatten(1) for each in (actual, expected, made))
    known = expected.isfinite()
    fine = torch.promote_types(expected.dtype, torch.float32)
    error, size, made_size = (
        torch.linalg.vector_norm(each.where(known, 0), dim=1, dtype=fine)
        for each in (actual.to(expected.device) - expected, expected, made)
    )
    allowed = eps**0.5 * made_size + 2 * eps * size
    excess = (error / allowed).where(error != 0, 0).nan_to_num(torch.inf).tolist()
    share = (error / made_size).tolist()
    found = []
    for kind in dict.fromkeys(kinds):
        tokens = [at for at, each in enumerate(kinds) if each == kind]
        tokens.sort(key=lambda at: excess[at])
        typical = tokens[-1 if eps < _FINE_EPS else (len(tokens) - 1) // 2]
        if excess[typical] > 1:
            found.append(_Difference(excess[typical], share[typical], kind))
    return found


def _eps(model: Any) -> float:
    """Return the unit in the last place of the coarsest type that the model computes in."""
    device_type = model.get_input_embeddings().weight.device.type
    types = {each.dtype for each in model.parameters() if each.dtype.is_floating_point}
    if torch.is_autocast_enabled(device_type):
        types.add(torch.get_autocast_dtype(device_type))
    if getattr(model, "is_quantized", False):
        types.add(torch.bfloat16)
    # Types in which float32 products may be computed.
    products = {"highest": torch.float32, "high": torch.float16, "medium": torch.bfloat16}
    if torch.float32 in types:
        types.add(products[torch.get_float32_matmul_precision()])
    # Norms, rotary embeddings and weights of attention are float32 in finer models as well.
    return float(max(torch.finfo(each).eps for each in {torch.float32, *types}))


def _token_ids(model: Any, attempt: int) -> torch.Tensor:
    embedding = model.get_input_embeddings().weight
    special = compat.special_tokens(model.config)
    plain = [each for each in range(min(compat.num_embeddings(model), 8192)) if each not in special]
    count = _NUM_SEQUENCES * _NUM_TOKENS
    # A stride that shares no factor with most vocabularies, so that few tokens come twice.
    ids = [plain[(at + attempt * count) * 7919 % len(plain)] for at in range(count)]
    return torch.tensor(ids, device=embedding.device).view(_NUM_SEQUENCES, _NUM_TOKENS)


# ---- the model ----------------------------------------------------------------------------------


@contextlib.contextmanager
def _undisturbed(model: Any) -> Iterator[None]:
    """Run in eval mode without a compiler; restores modes and generators, frees unused memory."""
    devices = {each.device for each in model.parameters() if each.device.type == "cuda"}
    eager = torch.compiler.set_stance("force_eager")
    with torch.random.fork_rng(devices), eager, eval_mode(model):
        try:
            yield
        finally:
            if devices:
                torch.cuda.empty_cache()  # The logits' memory, a third of a short prompt's rows.


@contextlib.contextmanager
def _before_layers(
    model: Any, look: Callable[[torch.Tensor], torch.Tensor | None]
) -> Iterator[None]:
    """Call `look` with the hidden states before each layer; its result replaces them."""
    thread = threading.get_ident()

    def hook(
        layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if thread != threading.get_ident():
            return None
        hidden = args[0] if args else kwargs.get("hidden_states")
        instead = None
        if isinstance(hidden, torch.Tensor) and hidden.ndim > 2:
            instead = look(hidden)
            if instead is None and hidden.ndim == 4:  # Perhaps streams: `[S, B, T, D]`.
                instead = look(hidden.movedim(0, 2))
                instead = None if instead is None else instead.movedim(2, 0)
        if instead is None:
            return None
        if args:
            return (instead, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": instead}

    num_layers = getattr(compat.text_config(model.config), "num_hidden_layers", None)
    handles = [
        layer.register_forward_pre_hook(hook, with_kwargs=True)
        for layers in model.modules()
        if isinstance(layers, torch.nn.ModuleList) and len(layers) == num_layers
        for layer in layers
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# ---- the layers ---------------------------------------------------------------------------------


def _states_of(model: Any, token_ids: torch.Tensor) -> dict[int, StateLayer]:
    """Return the layers that keep states, from a plain pass with a cache over `[T]` tokens."""
    empty, cache = compat.default_cache(model.config), compat.default_cache(model.config)
    kept = {at: each for at, each in enumerate(cache.layers) if compat.keeps_state(each)}
    if not kept:
        return {}
    missing = sorted(kept.keys() - state_modules(model, kept).keys())
    if missing:
        raise UnservableError(f"its layers {missing} keep states, and take no cache by themselves")
    given = {compat.cache_argument(model): cache}
    _run(model, token_ids[None], "it does not run with a cache", **given)
    states: dict[int, StateLayer] = {}
    for at, layer in kept.items():
        tensors = {path: each for path, each in tensors_of(layer).items() if each.ndim}
        if not tensors or any(len(each) != 1 for each in tensors.values()):
            raise UnservableError(f"its layer {at} keeps a state that is not one for each sequence")
        if len({each.device for each in model.parameters()}) > 1:
            raise UnservableError("its layers keep states, and are on several devices")
        shapes = {at: StateShape(tuple(each.shape[1:]), each.dtype) for at, each in tensors.items()}
        begun = with_tensors(layer, dict.fromkeys(tensors))
        states[at] = StateLayer(empty, empty.layers[at], begun, shapes)
    # Comparing outputs would not do: a lost state fades in a few tokens, and the median hides it.
    probe = StateProbe(states)
    with splitting(model, states), passing(PackedPass(states=probe)):
        _run(model, token_ids[None], _NOT_PLAIN)
    return {at: each._replace(is_chunkable=at in probe.chunkable) for at, each in states.items()}


def layers_of(
    model: Any,
    windows: Mapping[int, int | None],
    states: Mapping[int, StateLayer],
    token_ids: torch.Tensor,
) -> Proof:
    """Return all layers that attend, from a packed pass over `[T]` tokens; nothing is proven."""
    try:
        return _layers_by(model, windows, states, token_ids, is_named=False)
    except UnservableError:
        with contextlib.suppress(UnservableError):
            return _layers_by(model, windows, states, token_ids, is_named=True)
        raise


def _layers_by(
    model: Any,
    windows: Mapping[int, int | None],
    states: Mapping[int, StateLayer],
    token_ids: torch.Tensor,
    *,
    is_named: bool,
) -> Proof:
    """Return layers by what their modules say, or by what the model names to its cache."""
    signatures: dict[int, Signature] = {}
    sources: dict[int, int] = {}
    handed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    regrouped: dict[int, list[list[int]]] = {}
    latents: dict[int, Latent] = {}
    named = _Named(model.config)

    def hear(module: torch.nn.Module, asked: LayerCall) -> torch.Tensor:
        index: Any = named.layer if is_named else getattr(module, "layer_idx", None)
        if index is None:
            raise UnservableError(f"{type(module).__name__} does not say which layer it is")
        index = int(index)
        if is_named and index in signatures and asked.key is handed[index][0]:
            known = regrouped.setdefault(index, [_heads_in(named.value, handed[index][1])])
            known.append(_heads_in(named.value, asked.value))
            signatures[index] = Signature.of(asked.key, named.value)
        elif index in signatures or index in sources:
            raise UnservableError(f"its layer {index} attends more than once in a pass")
        if asked.mask is not None and asked.mask is not placeholder:
            raise UnservableError(f"its layer {index} attends with a mask of the model's own")
        if asked.bias is not None:
            raise UnservableError(f"its layer {index} adds a bias of the model's own to scores")
        if index in windows:
            if index not in regrouped:
                signatures[index] = Signature.of(asked.key, asked.value)
                handed[index] = asked.key, asked.value
                its = None if is_named else latent_of(module, asked.key, asked.value)
                if its is not None:
                    latents[index] = its
        else:
            of = [at for at, (k, v) in handed.items() if k is asked.key and v is asked.value]
            if not of:
                raise UnservableError(f"its layer {index} attends to keys that no layer caches")
            kept = windows[of[0]]
            if kept is not None and asked.window is not None and asked.window > kept:
                raise UnservableError(
                    f"its layer {index} is to see {_window(asked.window)} of layer {of[0]}, which "
                    f"keeps {_window(kept)}"
                )
            sources[index] = of[0]
        # Packed tokens are one causal sequence, whatever the mask.
        return attend_to_tensors(asked._replace(mask=None), causal=True)

    placeholder = torch.empty((1, 1, 1, 1), dtype=torch.bool, device=token_ids.device)
    positions = torch.arange(len(token_ids), device=token_ids.device)
    given: dict[str, Any] = {"position_ids": positions[None], "logits_to_keep": positions}
    given["attention_mask"] = placeholder
    if is_named:
        given[compat.cache_argument(model)] = named.cache
    with attending_through(model, PACKED), passing(PackedPass(hear)):
        _run(model, token_ids[None], "it does not run on packed tokens", **given)
    missing = windows.keys() - signatures.keys()
    if missing:
        raise UnservableError(
            f"its layers {sorted(missing)} do not attend through transformers' attention interface"
        )
    options: dict[str, Any] = {"is_named": is_named, "regrouped": regrouped, "latents": latents}
    calls = AttentionCalls((), sources, layer_chunks(model.config), states, **options)
    return Proof(signatures, calls, never_waits=False)


class _Named:
    """The layer that a model named to its cache last, and the values that it handed over."""

    def __init__(self, config: Any):
        self.layer: int | None = None
        self.value = torch.empty(0)
        self.cache = compat.default_cache(config)
        self._update = self.cache.update
        self.cache.update = self._note

    def _note(self, keys: Any, values: Any, layer_idx: int, *more: Any, **options: Any) -> Any:
        self.layer, self.value = layer_idx, values
        return self._update(keys, values, layer_idx, *more, **options)


def _heads_in(known: torch.Tensor, asked: torch.Tensor) -> list[int]:
    """Return for each head of `asked` the head of `known` that it equals; `[1, H, T, D]` both."""
    if known.shape[2:] == asked.shape[2:]:
        is_same = (asked[0][:, None] == known[0][None]).flatten(2).all(2)
        if bool(is_same.any(1).all()):
            return [int(each) for each in is_same.int().argmax(1)]
    raise UnservableError("it attends several times in a layer, to values of its own")


def _check_windows(
    model: Any, windows: Mapping[int, int | None], proof: Proof, token_ids: torch.Tensor
) -> None:
    """Refuse a model whose masks have windows of other lengths than the rows that are read."""
    heard: dict[int, tuple[int | None, int | None, int | None]] = {}
    named = _Named(model.config)
    options: dict[str, Any] = {}
    if proof.calls.is_named:
        options[compat.cache_argument(model)] = named.cache

    def hear(module: torch.nn.Module, asked: LayerCall) -> torch.Tensor:
        recipe = getattr(asked.mask, "_vmkv_recipe", None)
        if recipe is not None:
            layer: Any = named.layer if proof.calls.is_named else vars(module)["layer_idx"]
            heard[int(layer)] = (asked.window, recipe.window, recipe.chunk)
        return attend_to_tensors(asked, causal=getattr(module, "is_causal", True))

    with attending_through(model, PACKED), passing(PackedPass(hear)):
        # Some models cut the masks of their last layers to the tokens whose logits are wanted.
        keep = torch.arange(len(token_ids), device=token_ids.device)
        _run(model, token_ids[None], _NOT_PLAIN, logits_to_keep=keep, **options)
    read = {layer: windows[source] for layer, source in proof.calls.sources.items()}
    for index, window in (*windows.items(), *read.items()):
        chunk = proof.calls.chunks.get(index)
        given, masked, masked_chunk = heard.get(index, (None, window, chunk))
        if masked_chunk != chunk:
            raise UnservableError(f"its layer {index} attends in other chunks than it states")
        if chunk is not None:
            masked = window  # Rows hold as many tokens as a chunk.
        kept = window if given is None else given
        if kept != masked:
            raise UnservableError(
                f"its layer {index} is to see {_window(kept)} by its configuration, and "
                f"{_window(masked)} by its mask"
            )


def _run(model: Any, token_ids: torch.Tensor, what: str, **given: Any) -> Any:
    """Run the model, without a cache unless given one; an error is explained by `what`."""
    given["use_cache"] = not given.keys().isdisjoint(compat.CACHE_NAMES)
    try:
        return model(input_ids=token_ids, return_dict=True, **given)
    except Exception as error:
        raise _explained(error, what) from error


# ---- messages -----------------------------------------------------------------------------------

_NOT_PLAIN = "it does not run on token ids alone"


def _window(num_tokens: int | None) -> str:
    return "all tokens" if num_tokens is None else f"{num_tokens} tokens"


def _explained(error: Exception, what: str) -> Exception:
    if isinstance(error, (VMKVError, torch.OutOfMemoryError)):
        return error
    message = str(error).partition("\n")[0][:200]
    return UnservableError(f"{what} ({type(error).__name__}{': ' if message else ''}{message})")


def _why_different(model: Any, difference: _Difference) -> str:
    if not compat.takes_positions(model):
        return "it counts positions by itself, so that those of packed sequences are wrong"
    share = f"{difference.share:.0%}" if difference.share >= 0.01 else f"{difference.share:.1g}"
    return (
        f"packed, sequences that {difference.kind} get other hidden states than by "
        f"themselves (off by {share})"
    )
