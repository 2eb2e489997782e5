"""Rotary embeddings that traced layers leave to the attention operator: only the usual form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.runners import check_compiled

import vmkv.serve.parallel.collectives
import vmkv.step.row_attention  # noqa: F401  # both register operators
from vmkv.step import graph_passes

Tensor = torch.Tensor


def _crossed(x: Tensor, half: int) -> Tensor:
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def _as_models_do(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return (x * cos) + (_crossed(x, x.shape[-1] // 2) * sin)


def _backwards(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    crossed = torch.cat((x[..., half:], -x[..., :half]), dim=-1)
    return (x * cos.unsqueeze(1)) + (crossed * sin.unsqueeze(1))


def _interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    crossed = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return (x * cos.unsqueeze(1)) + (crossed * sin.unsqueeze(1))


def _quarter(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (x * cos.unsqueeze(1)) + (_crossed(x, x.shape[-1] // 4) * sin.unsqueeze(1))


def _scaled(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _as_models_do(x, cos, sin) * 2


def _taken_out(layer: Callable[..., Tensor], *inputs: Tensor) -> tuple[int, list[str]]:
    """Number of embeddings taken out of a traced layer, and the nodes of its graph afterwards."""
    counts: list[int] = []
    nodes: list[str] = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        counts.append(graph_passes.take_out_rotary(module))
        nodes.extend(str(each.target) for each in module.graph.nodes if each.op != "placeholder")
        return lambda *_: (torch.zeros(1),)  # Only the graph is looked at.

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(layer, backend=backend, dynamic=False)(*inputs)
    return sum(counts), nodes


@pytest.mark.parametrize(
    ("of_query", "of_key", "count"),
    [
        (_as_models_do, _as_models_do, 1),
        (_as_models_do, _backwards, 0),
        (_backwards, _backwards, 0),
        (_interleaved, _interleaved, 0),
        (_quarter, _quarter, 0),
        (_as_models_do, _scaled, 0),
        (_as_models_do, lambda x, cos, sin: x, 0),
        (_as_models_do, lambda x, cos, sin: _as_models_do(x, sin, cos), 0),
    ],
    ids=["plain", "keys", "backwards", "interleaved", "quarter", "scaled", "queries", "swapped"],
)
def test_only_the_usual_form_of_rotary_embedding_is_taken_out(
    of_query: Callable[..., Tensor], of_key: Callable[..., Tensor], count: int
) -> None:
    """Queries and keys must have the same form and the same angles."""
    place = torch.tensor([2**40, 0])

    def layer(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned = of_query(query, cos, sin), of_key(key, cos, sin)
        return torch.ops.vmkv.attend_rows(*turned, value, place, None, 1.0, 0, 0.0)

    query, key, value = torch.rand(1, 4, 5, 8), torch.rand(1, 2, 5, 8), torch.rand(1, 2, 5, 8)
    angles = torch.rand(1, 5, 8), torch.rand(1, 5, 8)
    assert count == _taken_out(layer, query, key, value, *angles)[0]


def test_an_in_place_call_without_users_stays_in_the_graph() -> None:
    """Some releases of torch take the reduction over ranks for dead code."""
    place = torch.tensor([2**40, 0])

    def layer(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        torch.ops.vmkv.all_reduce_(key, "nobody")
        turned = _as_models_do(query, cos, sin), _as_models_do(key, cos, sin)
        return torch.ops.vmkv.attend_rows(*turned, key, place, None, 1.0, 0, 0.0)

    tensors = torch.rand(1, 4, 5, 8), torch.rand(1, 2, 5, 8), *torch.rand(2, 1, 5, 8)
    count, nodes = _taken_out(layer, *tensors)
    assert count
    assert ["vmkv.all_reduce_", "vmkv.attend_rows", "output"] == nodes


def test_turned_rotates_as_models_do() -> None:
    """Bit by bit; `turned` is used where no kernel rotates."""
    x, cos, sin = torch.rand(1, 4, 5, 8), torch.rand(1, 5, 8), torch.rand(1, 5, 8)
    expected = _as_models_do(x, cos, sin)[0].transpose(0, 1)
    assert torch.equal(expected, graph_passes.turned(x[0].transpose(0, 1), cos[0], sin[0]))


@pytest.mark.parametrize(
    ("name", "is_usual"), [("llama", True), ("qwen3", True), ("phi3", False), ("gpt_oss", False)]
)
def test_families_with_the_usual_rotary_embedding(
    monkeypatch: pytest.MonkeyPatch, name: str, *, is_usual: bool
) -> None:
    """Only families of the usual form have embeddings taken out; all generate the same tokens."""
    counts: list[int] = []
    own = graph_passes.take_out_rotary
    monkeypatch.setattr(graph_passes, "take_out_rotary", lambda module: counts.append(own(module)))
    check_compiled(name)
    assert is_usual == any(counts)
