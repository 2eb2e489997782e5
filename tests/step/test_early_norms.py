"""Layers that are compiled hand on the norm that the next one begins with."""

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
    """How many norms each traced graph computes."""
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
    """One that no other test has."""
    return copy.deepcopy(tiny_model(name))


def logits(model: Any, prompt: torch.Tensor = PROMPT) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(prompt, use_cache=False).logits
    return found


def check_compiled(model: Any) -> None:
    """It computes with compiled layers what it computes without."""
    expected = logits(model)
    layers = CompiledLayers(model, backend=NAME)
    assert torch.allclose(expected, logits(model), atol=1e-5)
    layers.close()
    assert torch.equal(expected, logits(model))


def test_no_norm_is_computed_twice(roots: list[int]) -> None:
    """The first by itself, and then two in each layer, for all layers and lengths in one graph."""
    model = own_model()
    expected = [logits(model), logits(model, PROMPT[:, :3])]
    layers = CompiledLayers(model, backend=NAME)
    assert torch.allclose(expected[0], logits(model), atol=1e-5)
    assert torch.allclose(expected[1], logits(model, PROMPT[:, :3]), atol=1e-5)
    assert [1, 2] == roots
    layers.close()
    assert not any(isinstance(each, EarlyNorm) for each in model.modules())
    assert torch.equal(expected[0], logits(model))


def test_a_layer_that_asks_its_norm_for_something_else_gets_that(
    roots: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was handed on is the norm of the layer's input alone."""
    model = own_model()
    kind = type(model.model.layers[0])
    plain = kind.forward

    def doubled(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return plain(self, hidden_states * 2, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", doubled)
    check_compiled(model)
    assert 3 in roots


def test_a_model_that_changes_what_layers_give_is_taken_at_its_word(roots: list[int]) -> None:
    """A tensor that is not the one before's output was not normed by it."""
    model = own_model()
    model.model.layers[1].register_forward_pre_hook(
        lambda module, args, kwargs: (tuple(each * 2 for each in args), kwargs), with_kwargs=True
    )
    check_compiled(model)


def test_another_layer_than_the_next_has_a_norm_of_its_own(roots: list[int]) -> None:
    """A model may leave layers out, or change in place what one has given."""
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


def test_what_is_written_in_between_is_normed_anew(roots: list[int]) -> None:
    """The same tensor, with something else in it."""
    model = own_model()

    def shifts(module: Any, args: Any, kwargs: Any) -> None:
        (*args, *kwargs.values())[0].add_(1)

    model.model.layers[1].register_forward_pre_hook(shifts, with_kwargs=True)
    check_compiled(model)


@pytest.mark.parametrize("name", ["gemma2", "phi3", "mixtral", "qwen3"])
def test_other_families_are_as_ever(roots: list[int], name: str) -> None:
    """Also where norms follow on norms, or a layer returns more than one thing."""
    model = own_model(name)
    check_compiled(model)
