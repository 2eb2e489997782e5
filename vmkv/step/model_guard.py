"""A model's attention implementation, and checks that it still is the model that was captured.

A user may set another attention implementation, train or convert the model between two steps, after
which a step would compute wrong tokens silently. So each step checks, in about 10 us for 32 layers:

  training     each module but linear layers and embeddings, which compute the same in both modes
  type, place  the first and the last parameter; a change in between fails in the model, and the
               error is then explained by a search over all parameters
  addresses    for captured and compiled steps alone: the first parameter of each attention layer,
               the model's first and its last

A captured step therefore does not notice that a single module outside attention was converted, or a
parameter replaced by another object. Values changed in place are read as they are now.
"""

from __future__ import annotations

import contextlib
import hashlib
import operator
import sys
import threading
import warnings
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

from ..errors import ConfigError
from ..units import MiB
from .joined_layers import SiblingLinear

# ---- interface -----------------------------------------------------------------------------------


def register_attention(name: str, attention: Any, mask: Any) -> None:
    """Register an attention function with its mask function, without which it would get no mask."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


PACKED = "vmkv"
"""Attention implementation of packed steps whose layers are not compiled."""


#: The private name: configurations intercept look-ups of the property, over 1 us each.
_ATTENTION = "_attn_implementation_internal"


class _Users:
    """The users of one configuration in order, each with the thread that alone sees it, or None."""

    def __init__(self) -> None:
        self.chosen = ""
        self.names: dict[object, tuple[str, int | None]] = {}


#: Users by the id of the configuration: models may share a configuration.
_USERS: dict[int, _Users] = {}
_LOCK = threading.RLock()


def text_config(model: Any) -> Any:
    """Return the configuration whose attention implementation the decoder reads."""
    text = getattr(model.config, "text_config", None)
    return model.config if text is None else text


def chosen_attention(model: Any) -> str:
    """Return the attention implementation of the model without users of this module."""
    config = text_config(model)
    users = _USERS.get(id(config))
    now = vars(config)[_ATTENTION]
    return str(users.chosen if users is not None and now == _last(users) else now)


def has_users(model: Any) -> bool:
    """Whether `attending_through` has set the model's attention implementation."""
    return id(text_config(model)) in _USERS


def _last(users: _Users) -> str | None:
    return next(reversed(users.names.values()), (None, None))[0]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def seen_attention(config: Any) -> Any:
    """Return a configuration's implementation without users of other threads."""
    with _LOCK:
        now, users = vars(config).get(_ATTENTION), _USERS.get(id(config))
        if users is None or now != _last(users):  # Set by other code.
            return now
        me = threading.get_ident()
        own = [name for name, thread in users.names.values() if thread in (None, me)]
        return own[-1] if own else users.chosen


def _store_attention(config: Any, name: Any) -> None:
    vars(config)[_ATTENTION] = name


#: One object, so that compiled code stays valid; compilers trace a property, not what it calls.
_BY_THREAD = property(lambda config: seen_attention(config), _store_attention)


def _show_by_thread() -> None:
    """Have configurations answer by `seen_attention` while a user is of one thread."""
    if sys.is_finalizing():  # An engine that was never closed; nothing can be imported.
        return
    from transformers import PretrainedConfig

    is_wanted = any(thread for each in _USERS.values() for _, thread in each.names.values())
    if is_wanted and _ATTENTION not in vars(PretrainedConfig):
        setattr(PretrainedConfig, _ATTENTION, _BY_THREAD)
    elif not is_wanted and _ATTENTION in vars(PretrainedConfig):
        delattr(PretrainedConfig, _ATTENTION)


def _set_attention(model: Any, name: str) -> None:
    """Set the decoder's implementation only; vision towers and the like keep theirs."""
    config = text_config(model)
    if vars(config)[_ATTENTION] != name:
        model.set_attn_implementation(name if config is model.config else {"text_config": name})


@contextlib.contextmanager
def refusing_waits() -> Iterator[None]:
    """Short context, for all threads, in which torch raises rather than wait for CUDA."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The mode is a prototype.
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextlib.contextmanager
def attending_through(model: Any, name: str, *, in_all_threads: bool = False) -> Iterator[None]:
    """Context in which the model attends through an implementation.

    Contexts may end in any order: the one entered last among the open ones counts, and after the
    last one the model gets its original implementation back. An implementation that other code sets
    meanwhile stays.

    Args:
        model: A transformers model.
        name: The implementation's name in transformers' registry.
        in_all_threads: Whether forward passes of other threads do so too.
    """
    config, user = text_config(model), object()
    with _LOCK:
        users = _USERS.setdefault(id(config), _Users())
        if vars(config)[_ATTENTION] != _last(users):
            users.chosen = str(vars(config)[_ATTENTION])
        users.names[user] = name, None if in_all_threads else threading.get_ident()
        _show_by_thread()
    try:
        with _LOCK:
            _set_attention(model, name)
        yield
    finally:
        with _LOCK:
            is_untouched = vars(config)[_ATTENTION] == _last(users)
            del users.names[user]
            if not users.names:
                _USERS.pop(id(config), None)
            if is_untouched:
                _set_attention(model, _last(users) or users.chosen)
            _show_by_thread()


# ---- model guard ---------------------------------------------------------------------------------

_SAME_IN_BOTH_MODES = (torch.nn.Linear, SiblingLinear, torch.nn.Embedding)
_is_training = operator.itemgetter("training")


class ModelGuard:
    """Remembers a model's state, and the attention implementation that its steps need."""

    def __init__(self, model: torch.nn.Module, attention: str):
        self._model = model
        self._attention = attention
        self._config = text_config(model)
        self._modes = [
            vars(each)
            for each in model.modules()
            if type(each) not in _SAME_IN_BOTH_MODES and "training" in vars(each)
        ]
        parameters = list(model.parameters())
        self._first, self._last = parameters[0], parameters[-1]
        self._kinds = self._kinds_now()
        self._all_kinds = {id(each): (each.dtype, each.device) for each in parameters}
        looked_at = {id(each): each for each in (self._first, self._last)}
        for module, _ in numbered_layers(model):
            looked_at.update((id(each), each) for each in islice(module.parameters(), 1))
        self._looked_at = list(looked_at.values())
        self._addresses = self._addresses_now()

    def check(self, *, is_fixed: bool = False) -> None:
        """Raise `ConfigError` if the model, or with `is_fixed` a parameter's place, has changed."""
        if (
            seen_attention(self._config) != self._attention
            or any(map(_is_training, self._modes))
            or self._kinds_now() != self._kinds
            or (is_fixed and self._addresses_now() != self._addresses)
        ):
            raise ConfigError(self.change() or _MOVED)

    def is_as_captured(self) -> bool:
        """Whether modes and addresses are as captured; ignores the attention implementation."""
        return not any(map(_is_training, self._modes)) and self._addresses_now() == self._addresses

    def change(self) -> str | None:
        """Describe the change found among all modules and parameters, or None."""
        now = seen_attention(self._config)
        if now != self._attention:
            return (
                f"the model's attention implementation is {now!r} now, and steps need "
                f"{self._attention!r}: call model.set_attn_implementation({self._attention!r}), "
                "or close the engine or cache that serves the model and make another"
            )
        for name, module in self._model.named_modules():
            if module.training and type(module) not in _SAME_IN_BOTH_MODES:
                what = f"the model's {name}" if name else "the model"
                return f"{what} is in training mode; call model.eval() first"
        for name, parameter in self._model.named_parameters():
            now, before = (parameter.dtype, parameter.device), self._all_kinds.get(id(parameter))
            if before is not None and now != before:
                return (
                    f"the model's {name} is {now[0]} on {now[1]} now, and was {before[0]} on "
                    f"{before[1]}: convert the model back, or close the engine or cache that "
                    "serves it and make another"
                )
        return None

    def _kinds_now(self) -> tuple[object, ...]:
        first, last = self._first, self._last
        return first.dtype, last.dtype, first.device, last.device

    def _addresses_now(self) -> list[int]:
        return list(map(torch.Tensor.data_ptr, self._looked_at))


_MOVED = (
    "the model's parameters have moved since its steps were captured or compiled: close the engine "
    "or cache that serves the model and make another"
)


#: Attributes of modules that training changes, and serving does not see.
_OF_TRAINING = {"gradient_checkpointing", "_require_grads_hooks", *vars(torch.nn.Module())}
#: Made by transformers and peft with gradient checkpointing; it changes no value.
_GRADIENT_HOOK = "make_inputs_require_grads"
#: Modules whose hooks act in passes that ask for them: `output_hidden_states`, and the proof's.
_IDLE_HOOKS = ("transformers.utils.output_capturing", "vmkv.hf.proof")
_PLAIN = (bool, int, float, str)


def settings_of(model: torch.nn.Module) -> list[object]:
    """Return what a captured step depends on apart from tensors: modules, hooks, attributes."""
    configs = {id(each): each for module in model.modules() if (each := _config_of(module))}
    chosen = [
        (name, repr(value))
        for config in configs.values()
        for name, value in vars(config).items()
        if name != "use_cache" and not name.startswith("_") and _is_plain(value)
    ]
    return chosen + [
        (
            id(module),
            id(vars(module).get("forward")),
            *hooks_of(module),
            *(
                (name, repr(value))
                for name, value in vars(module).items()
                if name not in _OF_TRAINING and _is_plain(value)
            ),
        )
        for module in model.modules()
    ]


def _config_of(module: torch.nn.Module) -> Any:
    config = vars(module).get("config")
    return config if hasattr(config, "__dict__") else None


def hooks_of(module: torch.nn.Module) -> list[int]:
    """Return the numbers of a module's forward hooks, without those that change no step."""
    if not (module._forward_pre_hooks or module._forward_hooks):
        return []
    return [
        number
        for hooks in (module._forward_pre_hooks, module._forward_hooks)
        for number, hook in list(hooks.items())
        if getattr(hook, "__module__", "") not in _IDLE_HOOKS
        and getattr(hook, "__name__", "") != _GRADIENT_HOOK
    ]


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple | set):
        return all(isinstance(each, _PLAIN) for each in value)
    return isinstance(value, _PLAIN)


def eval_mode(model: torch.nn.Module) -> contextlib.ExitStack:
    """Put all modules in eval mode; closing the result restores training mode where it was set."""
    undo = contextlib.ExitStack()
    for module in model.modules():
        if module.training:
            module.training = False
            undo.callback(setattr, module, "training", True)
    return undo


def unmerge_disabled(model: Any) -> None:
    """Unmerge peft's adapters that are merged and disabled, as the model's next call would."""
    for module in model.modules():
        if getattr(module, "merged", False) and getattr(module, "disable_adapters", False):
            module.unmerge()


def _tensors_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return what a forward reads: parameters, buffers, and tensors that are plain attributes."""
    plain = (each for module in model.modules() for each in vars(module).items())
    others = [its for name, its in plain if isinstance(its, torch.Tensor) and name[:5] != "_vmkv"]
    return [*model.parameters(), *model.buffers(), *others]


def places_of(model: torch.nn.Module) -> list[object]:
    """Return the type, the device and the address of each tensor that a forward reads."""
    return [(id(each), each.dtype, each.device, each.data_ptr()) for each in _tensors_of(model)]


#: Values of a tensor that count for its checksum.
_NUM_SAMPLES = 4096
#: Bytes of a tensor that are added at a time.
_PART_BYTES = 64 * MiB


@torch.no_grad()
def checksums_of(model: torch.nn.Module) -> list[int]:
    """Return a checksum of sampled values of each tensor; `AdamW(fused=True)` raises no version."""
    sums: dict[torch.device, list[torch.Tensor]] = {}
    weights: dict[torch.device, torch.Tensor] = {}
    for tensor in _tensors_of(model):
        flat = tensor.detach().reshape(-1)
        # Odd, so that it does not stay in one column.
        samples = flat[:: flat.numel() // _NUM_SAMPLES | 1].contiguous().view(torch.uint8)
        known = weights.get(samples.device)
        if known is None or len(known) < len(samples):
            # Odd numbers, in arithmetic that wraps: a change of one byte changes the sum.
            places = torch.arange(len(samples), device=samples.device)
            known = weights[samples.device] = places * 0x5851F42D4C957F2D * 2 + 1
        sums.setdefault(samples.device, []).append((samples * known[: len(samples)]).sum())
    return [each for its in sums.values() for each in torch.stack(its).tolist()]


def fingerprint_of(model: torch.nn.Module) -> bytes:
    """Return 32 bytes for all weights: a hash of sums of their bytes, by rows and by columns.

    Cost: one read of the weights, on their device.
    """
    digest = hashlib.sha256()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        digest.update(f"{name} {tensor.dtype} {[*tensor.shape]}".encode())
        data = tensor.detach().reshape(-1).view(torch.uint8)
        for part in data.split(_PART_BYTES):  # type: ignore[no-untyped-call]
            words = part[: len(part) // 4096 * 4096].clone().view(torch.int64).view(-1, 512)
            sums = torch.cat([words.sum(0), words.sum(1)]).cpu()
            digest.update(sums.numpy().data)
            digest.update(part[words.numel() * 8 :].cpu().numpy().data)
    return digest.digest()


def numbered_layers(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, int]]:
    """Yield modules that have a layer index, decoder layers included."""
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int):
            yield module, layer
