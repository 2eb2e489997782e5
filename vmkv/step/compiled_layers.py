"""Compiled decoder layers: one compilation per kind of layer, for any number of tokens.

Layers of a kind run the same code over different weights, so one compilation serves them all:
seconds where the whole model would take minutes. The compiler fuses norms, rotary embeddings,
activations and residuals, some twenty-five kernels, into a few. There are two variants:

  one token   products with a single row are dot products, fused with the norm before and the
              residual after, and tuned to read weights at full speed
  many        the number of tokens is a symbol, so that nothing is recompiled; products are the
              library's

Where ranks add within a layer, the norm that follows is fused with the sum (`graph_passes.py`).
The last norm is compiled too; embedding, rotary angles and head run eagerly.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from ..errors import ConfigError
from ..phases import part
from . import experts, graph_passes, joined_layers
from .row_attention import autocast_dtype

_Compiled = Callable[..., Any]
#: A kernel from a worker process is tuned again in each start: triton's `Config` loses the mark of
#: tuned ones when it is pickled. Worker processes also import torch first.
_IN_PROCESS = {"compile_threads": 1}
#: Torch 2.11's static launcher tunes kernels that have one configuration again in each process.
_KEEPS_TUNED = {"use_static_cuda_launcher": False} if torch.__version__.startswith("2.11.") else {}


class CompiledLayers:
    """Makes a model's layers run compiled, until `stand_aside` or `close`.

    `backend` is one of `torch.compile`; "inductor" searches for the fastest tiling of the one-token
    products, tens of seconds once. Raises `ConfigError`, with the model unchanged, if the decoder's
    layers are not found or one's `forward` is wrapped.
    """

    def __init__(self, model: Any, *, backend: str = "inductor"):
        self._model = model
        layers = decoder_layers(model)
        if any("forward" in vars(layer) for layer in layers):
            raise ConfigError(
                f"the forward of {type(model).__name__}'s layers is wrapped, so they "
                "cannot be compiled; serve it with compile_layers=False"
            )
        #: Modules, and the classes and attributes that `pause` took from them.
        self._paused: list[tuple[Any, Any, dict[str, Any]]] = []
        self._autocast = autocast_dtype(next(model.parameters()).device)
        joined_layers.join(model, self._autocast)
        experts.fuse(model)
        tuning = {"coordinate_descent_tuning": True, **_KEEPS_TUNED}
        self._one = _compiler(backend, {**_IN_PROCESS, **tuning})
        self._many = _compiler(backend, _IN_PROCESS)
        self._variants: dict[tuple[Any, bool], _Compiled] = {}
        self._compiled = [*layers, *_last_norm(model)]
        self._thread: int | None = None  # The only one whose layers run compiled.
        self._step_in()

    def _step_in(self) -> None:
        for module in self._compiled:
            module.forward = functools.partial(self._run, module)

    def stand_aside(self) -> None:
        """Let the layers run eagerly outside `in_place`; compiled code is kept."""
        for module in self._compiled:
            if getattr(vars(module).get("forward"), "func", None) == self._run:
                del vars(module)["forward"]

    @property
    def are_in_place(self) -> bool:
        """Whether layers run compiled now."""
        return any("forward" in vars(each) for each in self._compiled)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Context in which layers that stand aside run compiled in this thread."""
        self._thread = threading.get_ident()
        self._step_in()
        try:
            yield
        finally:
            self.stand_aside()

    def pause(self) -> None:
        """Let all modules be the model's own until `resume`; weights stay joined in memory."""
        self.stand_aside()
        experts.restore(self._model.modules())
        self._drop_classes(self._model.modules())

    def _drop_classes(self, modules: Iterable[torch.nn.Module]) -> None:
        for module in [each for each in modules if isinstance(each, joined_layers.SiblingLinear)]:
            its = {name: each for name, each in vars(module).items() if name.startswith("_vmkv_")}
            self._paused.append((module, type(module), its))
            module.__class__ = torch.nn.Linear  # type: ignore[assignment]
            for name in its:
                del vars(module)[name]

    def drop_copies(self) -> None:
        """Within `pause`, separate all joined weights if copies of adapters lie beside them."""
        modules = self._have_classes()
        kind = joined_layers.SiblingLinear
        try:
            if any(isinstance(each, kind) and joined_layers.is_copied(each) for each in modules):
                joined_layers.separate(self._model, modules)
        finally:
            self._drop_classes(modules)

    def resume(self) -> None:
        """Undo `pause` and `drop_copies`, of a model with the same modules; renew the copies."""
        self._have_classes()
        joined_layers.join(self._model, self._autocast)
        experts.fuse(self._model)
        self._step_in()

    def _have_classes(self) -> list[Any]:
        """Undo `pause` of the modules that nobody has changed meanwhile, and return these."""
        paused, self._paused = self._paused, []
        unchanged = [each for each in paused if type(each[0]) is torch.nn.Linear]
        for module, kind, its in unchanged:
            module.__class__ = kind
            vars(module).update(its)
        return [module for module, *_ in unchanged]

    def _run(self, layer: Any, *args: Any, **kwargs: Any) -> Any:
        if self._thread not in (None, threading.get_ident()):
            return type(layer).forward(layer, *args, **kwargs)
        hidden, args = (args[0], args[1:]) if args else (kwargs.pop("hidden_states"), ())
        variant = self._variant(type(layer), hidden.shape[-2] == 1)
        return variant(layer, hidden, *args, **kwargs)

    def _variant(self, kind: Any, is_one: bool) -> _Compiled:
        variant = self._variants.get((kind, is_one))
        if variant is None:
            forward = with_own_code(kind.forward)
            variant = self._variants[kind, is_one] = torch.compile(
                forward, dynamic=True, backend=self._one if is_one else self._many
            )
        return variant

    def close(self) -> None:
        """Restore the model's own layers. Idempotent."""
        self.stand_aside()
        experts.restore(self._model.modules())
        modules = self._have_classes() if self._paused else list(self._model.modules())
        joined_layers.separate(self._model, modules)


def decoder_layers(model: Any) -> Sequence[Any]:
    """Return the decoder's layers, in order; `ConfigError` if no list matches the configuration."""
    decoder = model.get_decoder()
    wanted = decoder.config.get_text_config(decoder=True).num_hidden_layers
    for module in decoder.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == wanted:
            return list(module)
    raise ConfigError(
        f"{type(model).__name__} has no list of its {wanted} decoder layers, so they cannot be "
        "compiled; serve it with compile_layers=False"
    )


def _last_norm(model: Any) -> list[Any]:
    """Return the norm after the layers, in a list; empty if there is none by the usual name."""
    norm = getattr(model.get_decoder(), "norm", None)
    is_plain = isinstance(norm, torch.nn.Module) and not list(norm.children())
    return [norm] if is_plain and "forward" not in vars(norm) else []


def with_own_code(forward: Any, names: dict[str, Any] | None = None) -> Any:
    """Copy a function with a code object of its own, and with other global `names` if given.

    torch.compile counts compilations by code object and gives up silently after eight; models of
    the same class served earlier in the process must not use them up.
    """
    if not isinstance(forward, types.FunctionType):
        return forward
    clone = types.FunctionType(
        forward.__code__.replace(),
        forward.__globals__ if names is None else names,
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    clone.__kwdefaults__ = forward.__kwdefaults__
    return clone


def _compiler(backend: str, patches: dict[str, Any]) -> Callable[..., Any]:
    """Return a new `torch.compile` backend that applies vmkv's graph passes, then `backend`."""

    def compiled(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        joined_layers.merge_equal_products(module)
        graph_passes.take_out_rotary(module)
        graph_passes.take_in_sums(module)
        graph_passes.skip_reshapes(module)
        graph_passes.choose_by_kernel(module)
        if backend == "inductor":
            from torch._inductor.compile_fx import compile_fx

            with part("loading or generating kernels"):
                return compile_fx(module, inputs, config_patches=patches)
        from torch._dynamo.backends.registry import lookup_backend

        return lookup_backend(backend)(module, inputs)

    return compiled
