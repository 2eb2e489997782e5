"""Which backend serves a layer: by capability in a fixed order, or by name.

Order, and why (one H200, Llama-3-8B shape, all layers interleaved):

  flash2   decode 221 us a layer; no over-read, so rows need no resident margin
  flash3   decode 207 us and the faster prefill, but its over-read keeps one key tile of every row
           resident (176 tokens at head size 128: 22 MiB a sequence of Llama-3-8B)
  torch    FlashAttention-2 without a package, 371-376 us: its varlen kernel splits less well
  sdpa     anything else, everywhere

Rows in eight bits are read in place by flash3 alone; sdpa decodes them. flash2 and flash3 are
packages of their own, or come from the Hugging Face Hub (`flash_common.py`)

Memory is what this project is for, so the 7 % of decode attention that flash3 would gain are
left to those who name it. `reference` is never chosen, only named: it is an oracle.

Not among them: FlashAttention-4 (`flash-attn-4`, pip alone). Called by hand on rows as pages of a
page table its Hopper kernels prefill as fast as flash3 (917 us for 8,192 tokens, torch 1,723), but
an engine does not get through its compiler, which runs at every first use, and it splits no
sequence's keys. FlashInfer plans every step on the host, 90 to 600 us.

A package can be installed and still lack the one kernel that is asked for (builds are often
narrowed to some head sizes or options), which only a launch can tell. So a CUDA backend that
claims to serve a layer must first prove it on one token, once per process and kind of layer.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from importlib import import_module

import torch

from ..errors import ConfigError
from .base import AttentionBackend, AttentionBatch, AttentionSpec

ORDER = ("flash2", "flash3", "torch", "sdpa")
"""Backends tried by `select` without a name, best first."""


DECODING = ("sdpa", "reference")
"""Backends that read rows in eight bits by way of a tensor of the query's type."""

_LOG = logging.getLogger(__name__)


def _lazy(module: str, name: str) -> Callable[[], AttentionBackend]:
    def factory() -> AttentionBackend:
        backend: AttentionBackend = getattr(import_module(f"vmkv.attention.{module}"), name)()
        return backend

    return functools.cache(factory)


_FACTORIES: dict[str, Callable[[], AttentionBackend]] = {
    "flash3": _lazy("flash3", "Flash3Backend"),
    "flash2": _lazy("flash2", "Flash2Backend"),
    "torch": _lazy("torch_flash", "TorchFlashBackend"),
    "sdpa": _lazy("sdpa", "SdpaBackend"),
    "reference": _lazy("reference", "ReferenceBackend"),
}


def backend_names() -> tuple[str, ...]:
    """Every name `select` and `get` know; whether one can run is for `why_not` to say."""
    return tuple(_FACTORIES)


def register(name: str, factory: Callable[[], AttentionBackend]) -> None:
    """Add a backend of your own, to be selected by name.

    Args:
        name: A new name.
        factory: Called once, at first use.

    Raises:
        ConfigError: The name is taken.
    """
    if name in _FACTORIES:
        raise ConfigError(f"an attention backend named {name!r} exists already")
    _FACTORIES[name] = functools.cache(factory)


def get(name: str) -> AttentionBackend:
    """The backend called `name`, whether or not it can run here.

    Raises:
        ConfigError: There is none; the message lists those there are.
    """
    if name not in _FACTORIES:
        raise ConfigError(
            f"no attention backend is called {name!r}; there are {', '.join(_FACTORIES)}"
        )
    return _FACTORIES[name]()


def why_not(name: str, spec: AttentionSpec) -> str | None:
    """Why backend `name` cannot serve `spec` on this machine, or None when it can.

    Asks the backend, then has it attend to one token on CUDA, once per `spec` and process.

    Raises:
        ConfigError: There is no backend of that name.
    """
    backend = get(name)
    reason = backend.why_not(spec)
    if reason is None and spec.device_type == "cuda":
        reason = _trial(name, spec)
    return reason


def select(spec: AttentionSpec, name: str | None = None) -> AttentionBackend:
    """The backend to serve a layer with.

    Args:
        spec: What the layer asks for.
        name: Take this backend and no other; None takes the first of `ORDER` that can.

    Raises:
        ConfigError: The named backend cannot serve it, or none can. The message says what is
            missing, and which backend would serve it.

    Cost: the first call for a kind of layer may import a package and launch a tiny kernel;
        later ones look in a table. Call it when a model is set up, not in every step, and not
        while a CUDA graph is captured.
    """
    if name is not None:
        reason = why_not(name, spec)
        if reason is None:
            return _chosen(name, spec)
        servers = [other for other in ORDER if other != name and why_not(other, spec) is None]
        would = f"{servers[0]!r} would serve it" if servers else "no backend here would serve it"
        raise ConfigError(f"{name!r} cannot serve {spec}: {reason}; {would}")
    reasons = []
    for candidate in ORDER:
        reason = why_not(candidate, spec)
        if reason is None:
            return _chosen(candidate, spec)
        reasons.append(f"{candidate!r}: {reason}")
    raise ConfigError(f"no attention backend can serve {spec}. " + "; ".join(reasons))


def _chosen(name: str, spec: AttentionSpec) -> AttentionBackend:
    if spec.is_fp8 and name in DECODING:
        _say_that_it_decodes(name, spec.device_type)
    return get(name)


@functools.cache
def _say_that_it_decodes(name: str, device_type: str) -> None:
    _LOG.warning(
        "%r on %s reads no keys and values in eight bits: each layer decodes them into a tensor "
        "that lasts as long as its attention. They take half the memory, and are read more slowly; "
        "'flash3' reads them in place, on Hopper, with vLLM's kernels",
        name,
        device_type,
    )


@functools.cache
def _trial(name: str, spec: AttentionSpec) -> str | None:
    """What the backend says when it is really asked, for one sequence of one token."""
    backend = get(name)
    device = torch.device("cuda", torch.cuda.current_device())
    row_tokens = 1 + backend.overread_tokens(spec.k_dim, spec.v_dim, spec.kv_dtype)

    def zeros(*shape: int, dtype: torch.dtype = spec.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    kv_dtype = spec.kv_dtype or spec.dtype

    batch = AttentionBatch.build([0], [1], [1], row_tokens=row_tokens, num_rows=1, device=device)
    try:
        backend.forward(
            zeros(1, spec.num_query_heads, spec.k_dim),
            zeros(1, row_tokens, spec.num_kv_heads, spec.k_dim, dtype=kv_dtype),
            zeros(1, row_tokens, spec.num_kv_heads, spec.v_dim, dtype=kv_dtype),
            batch,
            scale=1.0,
            window=spec.window,
            softcap=spec.softcap,
            sinks=zeros(spec.num_query_heads) if spec.has_sinks else None,
        )
        torch.cuda.synchronize(device)
    except (RuntimeError, AssertionError) as error:
        return f"its build refuses: {(str(error) or repr(error)).splitlines()[0]}"
    return None
