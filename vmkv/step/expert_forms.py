"""The computation of a mixture's experts, for modules of transformers that our kernels can run.

A module qualifies by what it has and by what its gate computes, not by its name:

    inner = act(min(gate, limit)) * (clamp(up, -limit, limit) + offset)
    act(x) = x * sigmoid(alpha * x), or the usual approximation of GELU

with weights `[E, 2I, H]` and `[E, H, I]`, or transposed ones, with biases or without; gates and ups
lie in halves or in turn. Its weights are plain parameters of 16-bit floats, and transformers would
run them by `grouped_mm`, its default; other choices of the user's, quantised experts, experts of
expert parallelism, and those with hooks or other parameters do not qualify.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

_WEIGHTS, _BIASES = ("gate_up_proj", "down_proj"), ("gate_up_proj_bias", "down_proj_bias")
_DTYPES = (torch.bfloat16, torch.float16)
#: Names that configurations give to the number of experts that a token chooses.
_TOP_K = ("num_experts_per_tok", "top_k_experts", "moe_topk")
_SLOPE = 1.5957691216057308  # 2 * sqrt(2 / pi)


class Form(NamedTuple):
    """The computation of an experts module; a `limit` of 0 means no limit."""

    is_transposed: bool
    is_interleaved: bool
    is_gelu: bool
    alpha: float
    limit: float
    offset: float


def form_of(module: torch.nn.Module) -> Form | None:
    """Return the form of an experts module that qualifies; None for any other module."""
    its, parameters = vars(module), module._parameters
    config, has_bias = its.get("config"), bool(its.get("has_bias"))
    if (
        not hasattr(type(module), "_apply_gate")
        or "forward" in its
        or getattr(config, "_experts_implementation", None) != "grouped_mm"
        or not its.get("has_gate")
        or its.get("has_post_expert_norm")
        or its.get("_is_expert_parallel")
        or {*parameters} != {*_WEIGHTS, *(_BIASES if has_bias else ())}
        or any(True for each in module.children() for _ in (*each.parameters(), *each.buffers()))
        or module._forward_hooks
        or module._forward_pre_hooks
    ):
        return None
    weights: list[Any] = list(parameters.values())
    first = weights[0]
    for each in weights:
        if each is None or each.dtype not in _DTYPES:
            return None
        is_plain = type(each) is torch.nn.Parameter and each.is_contiguous()
        if not is_plain or (each.dtype, each.device) != (first.dtype, first.device):
            return None
    is_transposed = bool(its.get("is_transposed"))
    shapes = [tuple(each.shape) for each in map(parameters.get, _WEIGHTS) if each is not None]
    if [len(each) for each in shapes] != [3, 3]:
        return None
    (_, *outer), (_, *inner) = shapes
    hidden, double, half = outer[not is_transposed], outer[is_transposed], inner[not is_transposed]
    if (double, hidden, shapes[0][0]) != (2 * half, inner[is_transposed], shapes[1][0]):
        return None
    gate = _gate_of(module)
    return None if gate is None else Form(is_transposed, *gate)


def top_k_of(module: torch.nn.Module) -> int | None:
    """Return the number of experts that a token chooses, by the module's configuration."""
    found = [getattr(vars(module)["config"], name, None) for name in _TOP_K]
    return next((each for each in found if type(each) is int), None)


def apply_gate(gate_up: torch.Tensor, form: Form) -> torch.Tensor:
    """Return what a form computes of gates and ups `[T, 2I]`: `[T, I]`."""
    if form.is_interleaved:
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    else:
        gate, up = gate_up.chunk(2, -1)
    if form.limit:
        gate, up = gate.clamp(max=form.limit), up.clamp(-form.limit, form.limit)
    slope = _SLOPE * (gate + 0.044715 * gate**3) if form.is_gelu else form.alpha * gate
    return gate * torch.sigmoid(slope) * (up + form.offset)


def _gate_of(module: Any) -> tuple[bool, bool, float, float, float] | None:
    """Return the fields of a `Form` that describe a module's gate, found by their results."""
    numbers = {
        name: float(each) for name, each in vars(module).items() if type(each) in (int, float)
    }
    limits = [each for name, each in numbers.items() if "limit" in name and each > 0]
    alphas = [each for name, each in numbers.items() if "alpha" in name]
    generator = torch.Generator().manual_seed(0)
    scale = max([4.0, *limits])
    probe = scale * torch.randn(64, 128, generator=generator, dtype=torch.float32)
    found: torch.Tensor | None = None
    with contextlib.suppress(Exception), torch.no_grad():
        found = module._apply_gate(probe)
    if found is None or found.shape != (64, 64):
        return None
    for fields in _gates([*limits, 0.0], [1.0, *alphas]):
        if torch.allclose(found, apply_gate(probe, Form(False, *fields)), rtol=1e-4, atol=1e-4):
            return fields
    return None


def _gates(
    limits: list[float], alphas: list[float]
) -> Iterator[tuple[bool, bool, float, float, float]]:
    turns = (False, True)
    for is_interleaved, limit, offset in itertools.product(turns, limits, (0.0, 1.0)):
        yield is_interleaved, True, 1.0, limit, offset
        for alpha in alphas:
            yield is_interleaved, False, alpha, limit, offset
