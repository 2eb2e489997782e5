"""Selection of the backend that serves a layer: by capability in a fixed order, or by name.

The order, with measurements (one H200, Llama-3-8B shape, all layers interleaved):

  flash2   decode 221 us a layer; no over-read, so rows need no resident margin
  flash3   decode 207 us and the faster prefill, but its over-read keeps one key tile of every row
           resident (176 tokens at head size 128: 22 MiB a sequence); memory takes precedence
  torch    FlashAttention-2 without a package, 371-376 us: its varlen kernel splits less well
  sdpa     any other layer, on any device

flash3 reads float8 rows in place; sdpa decodes them, except in decode batches on CUDA.
FlashAttention-4 (`flash-attn-4`) prefills as fast as flash3
on Hopper, but its compiler fails in an engine, and it splits no sequence's keys; FlashInfer plans
every step on the host, 90 to 600 us.

An installed package may lack the kernel for a layer (builds are often narrowed to some head sizes
or options), which only a launch reveals. So a CUDA backend that claims to serve a layer must first
attend to one token, once per process and kind of layer.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pkgutil import resolve_name

import torch

from ..errors import ConfigError
from .base import AttentionBackend, AttentionBatch, AttentionSpec, Call

ORDER = ("flash2", "flash3", "torch", "sdpa")
"""Backends tried by `select` without a name, best first."""

_LOG = logging.getLogger(__name__)


def _lazy(place: str) -> Callable[[], AttentionBackend]:
    return functools.cache(lambda: resolve_name(f"vmkv.attention.{place}")())


_FACTORIES: dict[str, Callable[[], AttentionBackend]] = {
    "flash3": _lazy("flash3:Flash3Backend"),
    "flash2": _lazy("flash2:Flash2Backend"),
    "torch": _lazy("flash2:TorchFlashBackend"),
    "sdpa": _lazy("sdpa:SdpaBackend"),
}


def backend_names() -> tuple[str, ...]:
    """Return the names that `select` and `get` accept, whether or not the backends can run here."""
    return tuple(_FACTORIES)


def register(name: str, factory: Callable[[], AttentionBackend]) -> None:
    """Add a backend, to be selected by name.

    Args:
        name: A new name.
        factory: Makes the backend; called once, at first use.

    Raises:
        ConfigError: The name is taken.
    """
    if name in _FACTORIES:
        raise ConfigError(f"an attention backend named {name!r} exists already")
    _FACTORIES[name] = functools.cache(factory)


def get(name: str) -> AttentionBackend:
    """Return the backend called `name`, whether or not it can run here.

    Raises:
        ConfigError: There is none; the message lists the known names.
    """
    if name not in _FACTORIES:
        raise ConfigError(
            f"no attention backend is called {name!r}; there are {', '.join(_FACTORIES)}"
        )
    return _FACTORIES[name]()


def why_not(name: str, spec: AttentionSpec) -> str | None:
    """Return why backend `name` cannot serve `spec` on this machine, or None if it can.

    On CUDA the backend also attends to one token, once per `spec` and process.

    Raises:
        ConfigError: There is no backend of that name.
    """
    backend = get(name)
    if backend.needs_cuda and spec.device_type != "cuda":
        return f"it runs on CUDA, not on {spec.device_type}"
    reason = backend.why_not(spec)
    if reason is None and spec.device_type == "cuda":
        reason = _trial(name, spec)
    return reason


def select(spec: AttentionSpec, name: str | None = None) -> AttentionBackend:
    """Return the backend to serve a layer with.

    Args:
        spec: The layer.
        name: Name of the only acceptable backend; None for the first of `ORDER` that can serve it.

    Raises:
        ConfigError: The named backend cannot serve the layer, or none can; the message gives the
            reasons and, for a named one, an alternative.

    Cost: the first call for a kind of layer may import a package and launch a tiny kernel;
        later ones look in a table. Call it when a model is set up, never in a CUDA graph capture.
    """
    reasons = {}
    for candidate in ORDER if name is None else (name,):
        reason = why_not(candidate, spec)
        if reason is None:
            if spec.is_fp8 and candidate == "sdpa":
                _say_that_it_decodes(spec.device_type)
            return get(candidate)
        reasons[candidate] = reason
    if name is None:
        told = "; ".join(f"{candidate!r}: {reason}" for candidate, reason in reasons.items())
        raise ConfigError(f"no attention backend can serve {spec}. {told}")
    servers = [other for other in ORDER if other != name and why_not(other, spec) is None]
    would = f"{servers[0]!r} would serve it" if servers else "no backend here would serve it"
    raise ConfigError(f"{name!r} cannot serve {spec}: {reasons[name]}; {would}")


def select_for_new(spec: AttentionSpec) -> AttentionBackend | None:
    """Return the best backend to attend to new keys alone, by `attend_new`; None if there is none.

    On Hopper flash3, elsewhere flash2 at half its speed. None for float8 rows: a prompt that
    attends to keys before rounding would give other results than one continued from a prefix or
    computed in chunks. The first call may load a kernel library.
    """
    if not spec.is_fp8:
        for name in ("flash3", "flash2"):
            if why_not(name, spec) is None and get(name).reads_new:
                return get(name)
    return None


@functools.cache
def _say_that_it_decodes(device_type: str) -> None:
    _LOG.warning(
        "'sdpa' on %s reads no keys and values in eight bits: each layer decodes them into a "
        "tensor that lasts as long as its attention. They take half the memory, and are read more "
        "slowly; 'flash3' reads them in place, on Hopper, with vLLM's kernels",
        device_type,
    )


@functools.cache
def _trial(name: str, spec: AttentionSpec) -> str | None:
    backend = get(name)
    device = torch.device("cuda", torch.cuda.current_device())
    row_tokens = 1 + backend.overread_tokens(spec)

    def zeros(*shape: int, dtype: torch.dtype = spec.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    kv_dtype = spec.kv_dtype or spec.dtype
    batch = AttentionBatch.build([0], [1], [1], row_tokens=row_tokens, num_rows=1, device=device)
    keys = zeros(1, row_tokens, spec.num_kv_heads, spec.k_dim, dtype=kv_dtype)
    values = zeros(1, row_tokens, spec.num_kv_heads, spec.v_dim, dtype=kv_dtype)
    call = Call(
        zeros(1, spec.num_query_heads, spec.k_dim),
        keys,
        keys[..., : spec.v_dim] if spec.is_latent else values,
        batch,
        scale=1.0,
        window=spec.window,
        softcap=spec.softcap,
        sinks=zeros(spec.num_query_heads) if spec.has_sinks else None,
    )
    try:
        backend.attend(call)
        torch.cuda.synchronize(device)
    except (RuntimeError, AssertionError) as error:
        return f"its build refuses: {(str(error) or repr(error)).splitlines()[0]}"
    return None
