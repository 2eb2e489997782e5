"""A model proves itself before it is served: packed, it must compute what it computes as it is.

What makes a model fit for packed batches cannot be read off its code: it must attend through
transformers' interface, once in each layer, take the positions it is given, and leave masks to
the attention. So it is measured. A few short sequences go through the model as it is, and then
packed, as they would be served: some begin, one goes on, some decode, one begins beside them.

Both are compared layer by layer. Each layer of a packed pass is handed the input that it had in
the plain pass, so that roundings do not add up, and a router of experts that falls the other way
at a tie changes what its own layer makes of that token, and nothing else:

    plain    tokens -> embedding -> h0 -> layer 0 -> h1 -> layer 1 -> h2 -> ... -> logits
                                    ?                ?                ?              ?
    packed   tokens -> embedding -> .  h0 -> layer 0 -> .  h1 -> layer 1 -> .  ...-> logits

See Note [A model proves itself] in DESIGN.md.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import VMKVError
from . import compat
from .attention import vmkv_attention
from .forward import attending_through, forward_packed
from .ragged import Piece, RaggedCache, RaggedStep
from .ragged_cache import layer_kinds
from .store import LayerKind, Settings
from .unservable import UnservableError
from .vocabulary import num_embeddings

#: Tokens of each sequence: more than the windows of models that are made for tests.
_NUM_TOKENS = 16
_NUM_SEQUENCES = 7
#: The packed passes. In the second nobody is where a model that counts by itself would think.
_PASSES = (
    (Piece(0, 0, 5), *(Piece(at, 0, past) for at, past in enumerate((3, 7, 9, 12, 15), 1))),
    (
        *(Piece(1, 3, 1), Piece(0, 5, 11), Piece(2, 7, 1), Piece(6, 0, 16)),
        *(Piece(3, 9, 1), Piece(4, 12, 1), Piece(5, 15, 1)),
    ),
)
#: How often a model may try, each time with other tokens: ties fall elsewhere, defects do not.
_NUM_ATTEMPTS = 3
#: A unit in the last place below which no model meets a tie by chance.
_FINE_EPS = 1e-4

# Which models have proven themselves, and as what. An entry dies with its model.
_proven: weakref.WeakKeyDictionary[Any, set[tuple[object, ...]]] = weakref.WeakKeyDictionary()


def prove(model: Any, attention_backend: str | None = None) -> None:
    """Refuse a model whose packed passes do not compute what its plain pass computes.

    Once for each model object, its device, its dtype and the kernel; after that, a look-up.

    Args:
        model: A decoder-only causal language model.
        attention_backend: The kernel that is to read the rows; see `VMKVCache`.

    Raises:
        ConfigError: It is to be refused; the message says why, and what to use instead. Or its
            cache cannot be made, or there is no such kernel.
        CapacityError, torch.OutOfMemoryError: There is no memory for it.
        Whatever is raised, the model and the random generators are as before.

    Cost: a plain pass over 112 tokens and two packed passes, in a cache of seven short rows.
    """
    weight = model.get_input_embeddings().weight
    served_as = (weight.device, weight.dtype, attention_backend)
    if served_as in _proven.get(model, ()):
        return
    try:
        kinds = layer_kinds(model.config)
        with torch.no_grad(), _undisturbed(model):
            _check_passes(model, attention_backend)
            _check_windows(model, kinds)
    except UnservableError as error:
        raise error.of(model) from error.__cause__
    _proven.setdefault(model, set()).add(served_as)


def _check_passes(model: Any, attention_backend: str | None) -> None:
    """Compare packed passes with a plain one.

    Raises:
        ConfigError: They differ with whichever tokens, or do not run.
    """
    differences: list[_Difference] = []
    for attempt in range(_NUM_ATTEMPTS):
        plain = _plain_pass(model, _token_ids(model, attempt))
        differences = _packed_passes(model, attention_backend, plain)
        if not differences:
            return
    raise UnservableError(_why_different(model, max(differences)))


# ---- the passes ---------------------------------------------------------------------------------


class _PlainPass(NamedTuple):
    """What a plain pass over all sequences computed; of each token, whichever it is among them.

    Attributes:
        token_ids: `[n * T]`.
        inputs: What each layer was given, in the order of the calls: `[n * T, …]`.
        logits: `[n * T, vocabulary]`.
    """

    token_ids: torch.Tensor
    inputs: list[torch.Tensor]
    logits: torch.Tensor


def _plain_pass(model: Any, token_ids: torch.Tensor) -> _PlainPass:
    """Run the model as it is over `[n, T]` tokens."""
    inputs: list[torch.Tensor] = []

    def keep(hidden: torch.Tensor) -> None:
        if hidden.shape[:2] == token_ids.shape:
            inputs.append(hidden.flatten(0, 1).clone())

    before = compat.attention_settings(model)[0]
    # One that attends through "vmkv" already is compared with what transformers does.
    reference = "eager" if before == "vmkv" else before
    with attending_through(model, reference), _before_layers(model, keep):
        try:
            output = model(input_ids=token_ids, use_cache=False, return_dict=True)
            logits = output.logits.flatten(0, 1)
        except Exception as error:
            raise _explained(error, "it does not run on token ids alone") from error
    return _PlainPass(token_ids.flatten(), inputs, logits)


def _packed_passes(
    model: Any, attention_backend: str | None, plain: _PlainPass
) -> list[_Difference]:
    """Run the packed passes over the same tokens, in a cache of their own."""
    settings = Settings(
        compat.text_config(model.config),
        max_tokens=_NUM_TOKENS,
        max_batch_size=_NUM_SEQUENCES,
        attention_backend=attention_backend,
    )
    eps = _eps(model)
    differences: list[_Difference] = []
    with (
        contextlib.closing(RaggedCache(model.config, settings)) as cache,
        attending_through(model),
    ):
        for pieces in _PASSES:
            differences += _packed_pass(model, RaggedStep(cache, pieces), pieces, plain, eps)
    return differences


def _packed_pass(
    model: Any, step: RaggedStep, pieces: Sequence[Piece], plain: _PlainPass, eps: float
) -> list[_Difference]:
    """Run one packed pass; what of it roundings do not explain."""
    places = torch.cat(
        [
            torch.arange(piece.num_past_tokens, piece.num_tokens) + piece.sequence_id * _NUM_TOKENS
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
        return expected[None].clone()  # Some layers add to what they are given, in place.

    tokens = plain.token_ids[places.to(plain.token_ids.device)]
    with _before_layers(model, compare):
        try:
            # The first one's are left out, to see that the model keeps those it is asked for.
            logits = forward_packed(model, step, tokens, list(range(1, len(kinds))))
        except Exception as error:
            raise _explained(error, "it does not run on packed tokens") from error
    expected = plain.logits[places.to(plain.logits.device)[1:]]
    finite = expected.where(expected.isfinite(), 0)  # Some models rule tokens out with -inf.
    made = finite - finite.mean(-1, keepdim=True)
    return differences + _differences(logits, expected, made, kinds[1:], eps)


def _kind(piece: Piece) -> str:
    """What a sequence does, in words of a message."""
    if not piece.num_past_tokens:
        return "begin" if piece in _PASSES[0] else "begin beside others that go on"
    return "decode" if piece.num_new_tokens == 1 else "go on"


# ---- windows ------------------------------------------------------------------------------------


def _check_windows(model: Any, kinds: Sequence[LayerKind]) -> None:
    """See that rows keep what the model's masks let its layers see.

    Windows are longer than what the passes above can afford, so they are asked for by number.

    Raises:
        ConfigError: A layer's mask has another window than its rows.
    """
    asked = _WindowsAsked()
    token_ids = _token_ids(model, 0)[:1, :2]
    with attending_through(model):
        try:
            model(input_ids=token_ids, use_cache=False, return_dict=True, vmkv_batch=asked)
        except Exception as error:
            raise _explained(error, "it does not run on token ids alone") from error
    for kind in kinds:
        given, masked = asked.windows.get(kind.index, (None, kind.window_tokens))
        kept = kind.window_tokens if given is None else given
        if kept != masked:
            raise UnservableError(
                f"its layer {kind.index} is to see {_window(kept)} by its configuration, and "
                f"{_window(masked)} by its mask"
            )


class _WindowsAsked:
    """Stands where a step would, and hears what the layers ask for.

    Attributes:
        windows: Of each layer that attends within a plain mask: its own window, and the mask's.
    """

    def __init__(self) -> None:
        self.windows: dict[int, tuple[int | None, int | None]] = {}

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float,
        sinks: torch.Tensor | None,
        mask: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend without a cache; arguments as `RaggedStep.attend`."""
        recipe = getattr(mask, "_vmkv_recipe", None)
        if recipe is not None:
            self.windows[int(vars(module)["layer_idx"])] = (window, recipe.window)
        out, _ = vmkv_attention(
            module, query, key, value, mask, scale, 0.0, window, softcap, sinks, position_bias=bias
        )
        return out


def _window(num_tokens: int | None) -> str:
    return "all tokens" if num_tokens is None else f"{num_tokens} tokens"


# ---- what is compared ---------------------------------------------------------------------------


class _Difference(NamedTuple):
    """Tokens that packed passes computed otherwise than roundings explain.

    Attributes:
        excess: By which factor.
        share: The difference, as a share of what was made there.
        kind: What their sequences did.
    """

    excess: float
    share: float
    kind: str


def _differences(
    actual: torch.Tensor,
    expected: torch.Tensor,
    made: torch.Tensor,
    kinds: Sequence[str],
    eps: float,
) -> list[_Difference]:
    """For each kind of sequence, whether roundings explain what its tokens differ by.

    With a coarse type, half of the tokens must agree: a tie between experts may have fallen the
    other way for the rest. With a fine one, all of them.

    Args:
        actual: `[tokens, …]`.
        expected: Likewise.
        made: What the part of the model before has changed, likewise.
        kinds: Of each token.
        eps: The unit in the last place.
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
    """The unit in the last place of what the model computes in: of its coarsest weights."""
    device_type = model.get_input_embeddings().weight.device.type
    types = {each.dtype for each in model.parameters() if each.dtype.is_floating_point}
    if torch.is_autocast_enabled(device_type):
        types.add(torch.get_autocast_dtype(device_type))
    if getattr(model, "is_quantized", False):
        types.add(torch.bfloat16)
    eps = max((torch.finfo(each).eps for each in types), default=torch.finfo(torch.float32).eps)
    # What products of float32 may be made of.
    products = {"highest": torch.float32, "high": torch.float16, "medium": torch.bfloat16}
    if torch.float32 in types:
        eps = max(eps, torch.finfo(products[torch.get_float32_matmul_precision()]).eps)
    return float(eps)


def _token_ids(model: Any, attempt: int) -> torch.Tensor:
    """`[n, T]` tokens of the vocabulary, none of which means anything to the model."""
    embedding = model.get_input_embeddings().weight
    special = compat.special_tokens(model.config)
    plain = [each for each in range(min(num_embeddings(model), 8192)) if each not in special]
    count = _NUM_SEQUENCES * _NUM_TOKENS
    # A stride that shares no factor with most vocabularies, so that few tokens come twice.
    ids = [plain[(at + attempt * count) * 7919 % len(plain)] for at in range(count)]
    return torch.tensor(ids, device=embedding.device).view(_NUM_SEQUENCES, _NUM_TOKENS)


# ---- the model ----------------------------------------------------------------------------------


@contextlib.contextmanager
def _undisturbed(model: Any) -> Iterator[None]:
    """In eval mode and without a compiler; modes and random generators as before afterwards."""
    training = [module for module in model.modules() if module.training]
    devices = {each.device for each in model.parameters() if each.device.type == "cuda"}
    with torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"):
        for module in training:
            module.training = False
        try:
            yield
        finally:
            for module in training:
                module.training = True


@contextlib.contextmanager
def _before_layers(
    model: Any, look: Callable[[torch.Tensor], torch.Tensor | None]
) -> Iterator[None]:
    """Have `look` see the hidden states before each layer; what it returns goes in instead."""

    def hook(
        layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        hidden = args[0] if args else kwargs.get("hidden_states")
        instead = look(hidden) if isinstance(hidden, torch.Tensor) and hidden.ndim > 2 else None
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


# ---- what is said -------------------------------------------------------------------------------


def _explained(error: Exception, what: str) -> Exception:
    """What to raise where a pass has failed: want of memory and our own words are left alone."""
    if isinstance(error, (VMKVError, torch.OutOfMemoryError)):
        return error
    said = str(error).partition("\n")[0][:200]
    return UnservableError(f"{what} ({type(error).__name__}{': ' if said else ''}{said})")


def _why_different(model: Any, difference: _Difference) -> str:
    if not compat.takes_positions(model):
        return "it counts positions by itself, so that those of packed sequences are wrong"
    share = f"{difference.share:.0%}" if difference.share >= 0.01 else f"{difference.share:.1g}"
    return (
        f"packed, sequences that {difference.kind} get other hidden states than by "
        f"themselves (off by {share})"
    )
