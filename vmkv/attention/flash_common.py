"""Code that all FlashAttention kernels share: limits, window convention, sinks, the Hub's packages.

No kernel is imported here.
"""

from __future__ import annotations

import abc
import functools
import importlib
import logging
from collections.abc import Callable
from types import ModuleType
from typing import TypeVar

import torch

from ..errors import ConfigError, one_line
from .base import AttentionBackend, AttentionSpec, Call

_LOG = logging.getLogger(__name__)
DTYPES = (torch.float16, torch.bfloat16)
T = TypeVar("T")


@functools.cache
def load(repository: str, version: int) -> ModuleType | str:
    """Return a kernel package of the Hugging Face Hub, or why there is none; downloads it once."""
    kernels = package("kernels", f"kernels, for {repository},")
    if isinstance(kernels, str):
        return kernels
    try:
        module: ModuleType = kernels.get_kernel(repository, version=version)
    except Exception as error:  # noqa: BLE001  # no network, no build for this machine, …
        return f"{repository} cannot be loaded from the Hub: {one_line(error)}"
    _LOG.info("attention takes %s, version %d, from the Hugging Face Hub", repository, version)
    return module


def package(name: str, label: str | None = None) -> ModuleType | str:
    """Return an installed package, or why there is none; `label` is its name in that message."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # noqa: BLE001  # a wheel for another torch fails in its own ways
        return f"package {label or name} cannot be imported: {one_line(error)}"


def first_found(*sources: Callable[[], T | str]) -> T | str:
    """Return what the first source with anything has, or the reasons why there is nothing."""
    reasons = []
    for source in sources:
        found = source()
        if not isinstance(found, str):
            return found
        reasons.append(found)
    return "; ".join(reasons)


def reason(found: object) -> str | None:
    """Return why a kernel was not found; None if it was."""
    return found if isinstance(found, str) else None


def usable(name: str, found: T | str) -> T:
    """Return a kernel of the backend `name`; `ConfigError` with the reason if it was not found."""
    if isinstance(found, str):
        raise ConfigError(f"{name!r} cannot run: {found}")
    return found


def why_not_flash(spec: AttentionSpec, generation: int) -> str | None:
    """Return which limit of a FlashAttention generation, 2 or 3, `spec` exceeds, or None."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if spec.dtype not in DTYPES:
        return f"it computes in float16 and bfloat16, not in {spec.dtype}"
    if spec.is_fp8 and generation < 3:
        return f"it reads no keys and values in {spec.kv_dtype}"
    step = 16 if spec.is_fp8 else 8
    for dim in (spec.k_dim, spec.v_dim):
        if dim % step or dim > 256:
            return f"head sizes are multiples of {step} up to 256, not {dim}"
    if spec.k_dim != spec.v_dim and generation < 3:
        return f"keys and values must have one head size, not {spec.k_dim} and {spec.v_dim}"
    if torch.cuda.get_device_capability() < (8, 0):
        return "it needs compute capability 8.0 or newer"
    return None


class FlashBackend(AttentionBackend):
    """A FlashAttention kernel as a backend; sinks are applied from its log-sum-exp."""

    needs_cuda = True

    def attend(self, call: Call) -> torch.Tensor:
        """Launch the kernel and apply the sinks."""
        return with_sinks(call, *self.launch(call))

    @abc.abstractmethod
    def launch(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output `[Tq, Hq, Dv]` and its log-sum-exp, `[Hq, Tq]` or `[B, Hq, t]`."""


def window_bounds(window: int | None) -> tuple[int, int]:
    """Return the kernels' `(left, right)` of a window, which holds the query; -1 is unbounded."""
    return (-1, -1) if window is None else (window - 1, 0)


def with_sinks(call: Call, out: torch.Tensor, logsumexp: torch.Tensor) -> torch.Tensor:
    """Return an output with the call's sinks, if any, given its log-sum-exp; it may be overwritten.

    A sink s joins the softmax's denominator, exp(lse), and no numerator:

        out * exp(lse) / (exp(lse) + exp(s)) = out * sigmoid(lse - s)

    Queries that see nothing stay zero. Three elementwise launches.
    """
    if call.sinks is None:
        return out
    by_token = logsumexp.transpose(-2, -1)  # [Tq, Hq], or [B, t, Hq].
    by_token = by_token if by_token.ndim == 2 else by_token.flatten(0, 1)
    weight = torch.sigmoid(by_token - call.sinks.float())
    out = out.clone() if out.requires_grad else out  # Backward needs it as it is.
    return out.mul_(weight.unsqueeze(-1))  # Computed in float32.
