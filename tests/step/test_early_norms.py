"""Compiled layers compute the next layer's first norm and pass it on."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.tiny_models import tiny_model

from vmkv.step.compiled_layers import CompiledLayers
from vmkv.step.early_norms import EarlyNorm

NAME = "counts_roots"
PROMPT = torch.tensor([[5, 9, 13, 7, 30]])


@pytest.fixture
def roots(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Number of norms that each traced graph computes."""
    found: list[int] = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        found.append(sum("rsqrt" in str(node.target) for node in module.graph.nodes))
        return module.forward

    registry = torch._dynamo.backends.registry
    lookup = registry.lookup_backend
    monkeypatch.setattr(
        registry, "lookup_backend", lambda name: backend if name == NAME else lookup(name)
    )
    torch._dynamo.reset()
    yield found
    torch._dynamo.reset()


def own_model(name: str = "llama") -> Any:
    """Copy of a tiny model, which the test may change."""
    return copy.deepcopy(tiny_model(name))


def logits(model: Any, prompt: torch.Tensor = PROMPT) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(prompt, use_cache=False).logits
    return found


def check_compiled(model: Any) -> None:
    """Compare the logits with and without compiled layers."""
    expected = logits(model)
    layers = CompiledLayers(model, backend=NAME)
    assert torch.allclose(expected, logits(model), atol=1e-5)
    layers.close()
    assert torch.equal(expected, logits(model))


def test_no_norm_is_computed_twice(roots: list[int]) -> None:
    """The first norm has its own graph; one graph with two norms serves all layers and lengths."""
    model = own_model()
    expected = [logits(model), logits(model, PROMPT[:, :3])]
    layers = CompiledLayers(model, backend=NAME)
    assert torch.allclose(expected[0], logits(model), atol=1e-5)
    assert torch.allclose(expected[1], logits(model, PROMPT[:, :3]), atol=1e-5)
    assert [1, 2] == roots
    layers.close()
    assert not any(isinstance(each, EarlyNorm) for each in model.modules())
    assert torch.equal(expected[0], logits(model))


def test_a_layer_that_norms_another_tensor_than_its_input_computes_the_norm(
    roots: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The precomputed norm is the norm of the layer's input; this layer norms twice its input."""
    model = own_model()
    kind = type(model.model.layers[0])
    plain = kind.forward

    def doubled(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return plain(self, hidden_states * 2, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", doubled)
    check_compiled(model)
    assert 3 in roots


def test_a_precomputed_norm_is_not_used_for_a_replaced_tensor(roots: list[int]) -> None:
    """A hook replaces the output of layer 0 before layer 1 gets it."""
    model = own_model()
    model.model.layers[1].register_forward_pre_hook(
        lambda module, args, kwargs: (tuple(each * 2 for each in args), kwargs), with_kwargs=True
    )
    check_compiled(model)


def test_a_precomputed_norm_is_not_used_by_another_layer(roots: list[int]) -> None:
    """The layers run in another order than at the time of compilation."""
    model = own_model()
    for at, layer in enumerate(model.model.layers):
        with torch.no_grad():
            layer.input_layernorm.weight.fill_(1.0 + at)
    middle = model.model.layers[0]
    model.model.layers[0], model.model.layers[1] = model.model.layers[1], middle
    layers = CompiledLayers(model, backend=NAME)
    model.model.layers[0], model.model.layers[1] = middle, model.model.layers[0]
    got = logits(model)
    layers.close()
    assert torch.allclose(logits(model), got, atol=1e-5)


def test_a_precomputed_norm_is_not_used_after_a_write_to_its_input(roots: list[int]) -> None:
    """A hook changes the output of layer 0 in place before layer 1 gets it."""
    model = own_model()

    def shifts(module: Any, args: Any, kwargs: Any) -> None:
        (*args, *kwargs.values())[0].add_(1)

    model.model.layers[1].register_forward_pre_hook(shifts, with_kwargs=True)
    check_compiled(model)


@pytest.mark.parametrize("name", ["gemma2", "phi3", "mixtral", "qwen3"])
def test_other_families_compute_the_same(roots: list[int], name: str) -> None:
    """With norms that follow norms, and with layers that return tuples."""
    model = own_model(name)
    check_compiled(model)
