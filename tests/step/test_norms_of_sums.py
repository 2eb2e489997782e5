"""Fusion of rank sums with residuals and norms in traced layers: only the usual form is fused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import vmkv.serve.parallel.collectives  # registers operators
from vmkv.step import graph_passes

Tensor = torch.Tensor
Norm = Callable[[Tensor, Tensor], Tensor]


def _usual(hidden: Tensor, weight: Tensor, power: float = 2, epsilon: float = 1e-5) -> Tensor:
    wide = hidden.to(torch.float32)
    mean = wide.pow(power).mean(-1, keepdim=True)
    return weight * (wide * torch.rsqrt(mean + epsilon)).to(hidden.dtype)


def _weighted_first(hidden: Tensor, weight: Tensor) -> Tensor:
    wide = hidden.to(torch.float32)
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return (weight * scaled).to(hidden.dtype)


def _of_another_axis(hidden: Tensor, weight: Tensor) -> Tensor:
    wide = hidden.to(torch.float32)
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-2, keepdim=True) + 1e-5)
    return weight * scaled.to(hidden.dtype)


def _of_other_squares(hidden: Tensor, weight: Tensor) -> Tensor:
    wide = hidden.to(torch.float32)
    scaled = wide * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-5)
    return weight * scaled.to(hidden.dtype)


def _with_scale_used_again(hidden: Tensor, weight: Tensor) -> Tensor:
    wide = hidden.to(torch.float32)
    root = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return weight * (wide * root).to(hidden.dtype) + root.to(hidden.dtype)


def _one_more(hidden: Tensor, weight: Tensor) -> Tensor:
    return _usual(hidden, weight + 1)


def _fused(layer: Callable[..., Any], *inputs: Tensor) -> tuple[int, list[str]]:
    """Number of fused places in a traced layer, and the calls in its graph afterwards."""
    counts: list[int] = []
    nodes: list[str] = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        counts.append(graph_passes.take_in_sums(module))
        called = [each for each in module.graph.nodes if each.op.startswith("call_")]
        nodes.extend(str(each.target) for each in called)
        return module.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(layer, backend=lambda module, x: _without_ranks(backend(module, x)))(*inputs)
    return sum(counts), nodes


def _without_ranks(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `forward` that computes nothing, because no ranks exist here."""
    return lambda *_: (torch.zeros(1), torch.zeros(1))


@pytest.mark.parametrize(
    ("norm", "count"),
    [
        (_usual, 1),
        (_one_more, 1),
        (lambda hidden, weight: _usual(hidden, weight, power=3), 0),
        (_weighted_first, 0),
        (_of_another_axis, 0),
        (_of_other_squares, 0),
        (_with_scale_used_again, 0),
        (lambda hidden, weight: hidden * weight, 0),
    ],
    ids=["plain", "shifted", "cubes", "wide", "axis", "squares", "scale", "none"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_only_the_usual_form_of_norm_is_fused(norm: Norm, count: int, dtype: torch.dtype) -> None:
    """The layer still returns the new residual."""

    def layer(part: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        part = part * 2
        torch.ops.vmkv.all_reduce_(part, "nobody")
        hidden = residual + part
        return norm(hidden, weight), hidden

    if dtype == torch.float32 and norm in (_weighted_first, _of_other_squares):
        pytest.skip("in float32 this form is the usual one")
    tensors = (torch.rand(each).to(dtype) for each in ((1, 3, 8), (1, 3, 8), (8,)))
    taken, nodes = _fused(layer, *tensors)
    assert taken == count
    assert ("vmkv.norm_of_sum_" in nodes) == bool(count)
    assert ("vmkv.all_reduce_" in nodes) != bool(count), "each part is added once"


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_a_product_of_one_token_is_fused_as_a_strided_view(num_tokens: int) -> None:
    """Otherwise the compiler would write the product of one token twice."""
    product = torch.nn.Linear(8, 8, bias=False)

    def layer(hidden: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        hidden = residual + vmkv.serve.parallel.collectives.all_reduce(product(hidden), "nobody")
        return _usual(hidden, weight), hidden

    shape = 1, num_tokens, 8
    taken, nodes = _fused(layer, torch.rand(shape), torch.rand(shape), torch.rand(8))
    assert (taken, "as_strided" in nodes) == (1, num_tokens == 1)


@pytest.mark.parametrize("what", ["part", "twice", "shape", "early"])
def test_a_sum_with_another_use_is_not_fused(what: str) -> None:
    """Other uses: of the part, a second reduction, another shape, a use before the norm."""

    def layer(part: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        part, residual = part * 2, residual[:, :1] if what == "shape" else residual
        torch.ops.vmkv.all_reduce_(part, "nobody")
        if what == "twice":
            torch.ops.vmkv.all_reduce_(part, "nobody")
        hidden = residual + part
        other = part.sum() if what == "part" else residual.sum()
        if what == "early":
            other = hidden.sum()
            weight = weight + other
        return _usual(hidden, weight), other

    tensors = torch.rand(1, 3, 8), torch.rand(1, 3, 8), torch.rand(8)
    taken, nodes = _fused(layer, *tensors)
    assert (taken, nodes.count("vmkv.all_reduce_")) == (0, 2 if what == "twice" else 1)


@pytest.mark.parametrize(
    "what", ["weight", "itself", "view", "input", "seen", "written", "epsilon", "another's"]
)
def test_a_sum_that_the_operator_would_compute_differently_is_not_fused(what: str) -> None:
    """For example a weight for each token, or a residual in the memory of the part."""

    def layer(part: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        product = part if what == "input" else part * 2
        part = product.view(1, -1, 8) if what in ("view", "seen") else product
        residual = residual * 2
        if what == "view":
            residual = product.view(1, -1, 8)
        if what == "another's":
            torch.ops._c10d_functional.all_reduce_(part, "sum", "nobody")
        else:
            torch.ops.vmkv.all_reduce_(part, "nobody")
        hidden = part + part if what == "itself" else residual + part
        if what == "written":
            residual.zero_()
        epsilon: Any = weight.sum() if what == "epsilon" else 1e-5
        out = _usual(hidden, residual + 1 if what == "weight" else weight, epsilon=epsilon)
        return out, product + 1 if what == "seen" else hidden

    tensors = torch.rand(1, 3, 8), torch.rand(1, 3, 8), torch.rand(8)
    taken, nodes = _fused(layer, *tensors)
    assert not taken
    assert any("all_reduce_" in each for each in nodes)
