"""Joined projections in traced layers: equal products are merged, others are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import vmkv.serve.parallel.collectives  # noqa: F401  # registers operators
from vmkv.step import joined_layers
from vmkv.units import MiB


class _Parent(torch.nn.Module):
    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        self.q_proj = torch.nn.Linear(8, 8, bias=bias)
        self.k_proj, self.v_proj = (torch.nn.Linear(8, 4, bias=bias) for _ in range(2))
        self.apart = torch.nn.Linear(8, 8, bias=False)


def _traced(layer: Any, hidden: torch.Tensor) -> tuple[Any, list[str]]:
    """Output of a layer traced with equal products merged, and the calls in its graph."""
    calls: list[str] = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        joined_layers.merge_equal_products(module)
        calls.extend(
            str(getattr(each.target, "__name__", each.target)) for each in module.graph.nodes
        )
        return module.forward

    torch._dynamo.reset()
    with torch.no_grad():
        return torch.compile(layer, backend=backend, dynamic=False)(hidden), calls


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_joined_projections_share_one_product(num_tokens: int) -> None:
    """With one token the parts are strided views of the product; the numbers are the same."""
    parent = _Parent()
    hidden = torch.rand(1, num_tokens, 8)

    def layer(hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return parent.q_proj(hidden), parent.k_proj(hidden), parent.v_proj(hidden)

    expected = layer(hidden)
    joined_layers.join(parent)
    got, calls = _traced(layer, hidden)
    torch.testing.assert_close(got, expected)
    assert calls.count("linear") == 1
    assert calls.count("as_strided" if num_tokens == 1 else "narrow") == 3
    joined_layers.separate(parent)
    assert _traced(layer, hidden)[1].count("linear") == 3


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_projections_with_adapters_are_joined(
    num_tokens: int, bias: bool, autocast: torch.dtype | None
) -> None:
    """Their base layers are, and the first matrices, whose input each adapter casts.

    With a type of autocast, adapters are copied and stay where they are: a product of the input,
    and one of the first matrices' results.
    """
    peft = pytest.importorskip("peft")
    parent = torch.nn.Sequential(_Parent(bias=bias).to(torch.bfloat16))
    options = peft.LoraConfig(r=2, target_modules=["q_proj", "k_proj", "v_proj", "apart"])
    model = peft.get_peft_model(parent, options).requires_grad_(requires_grad=False)
    its = model.base_model.model[0]
    for each in (its.q_proj, its.k_proj, its.v_proj, its.apart):
        torch.nn.init.normal_(each.lora_B["default"].weight)
    hidden = torch.rand(1, num_tokens, 8, dtype=torch.bfloat16)

    def layer(hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16):
            out = its.q_proj(hidden), its.k_proj(hidden), its.v_proj(hidden)
            return *out, its.apart(hidden)

    expected = layer(hidden)
    adapters = [each for name, each in model.named_parameters() if "lora" in name]
    addresses = [each.data_ptr() for each in adapters]
    joined_layers.join(model, autocast)
    assert (addresses == [each.data_ptr() for each in adapters]) == (autocast is not None)
    assert [torch.equal(*pair) for pair in zip(layer(hidden), expected, strict=True)] == [True] * 4
    got, calls = _traced(layer, hidden)
    torch.testing.assert_close(got, expected)
    # Without copies two joint ones and three second matrices, and three of the last projection.
    assert calls.count("linear") == (8 if autocast is None else 4)
    for each in adapters:
        each.data.mul_(2)
    joined_layers.join(model, autocast)
    torch.testing.assert_close(_traced(layer, hidden)[0], layer(hidden))
    joined_layers.separate(model)
    assert _traced(layer, hidden)[1].count("linear") == 12


def test_adapters_of_dora_are_not_multiplied_with_their_layers() -> None:
    """DoRA applies them to a unit matrix too, whose product with the layer's weight is large."""
    peft = pytest.importorskip("peft")
    parent = torch.nn.Sequential(_Parent().to(torch.bfloat16))
    names = ["q_proj", "k_proj", "v_proj", "apart"]
    options = peft.LoraConfig(r=2, target_modules=names, use_dora=True)
    peft.get_peft_model(parent, options)
    joined_layers.join(parent, torch.bfloat16)
    its = parent[0]
    assert "_vmkv_joint" not in vars(its.apart.base_layer)
    assert its.q_proj.lora_A["default"]._vmkv_joint.shape == (6, 8)


def test_products_that_are_changed_in_place_are_not_merged() -> None:
    parent = _Parent()

    def layer(hidden: torch.Tensor) -> torch.Tensor:
        first, second = parent.apart(hidden), parent.apart(hidden)
        first += 1
        second += 10
        return first + second

    hidden = torch.rand(1, 3, 8)
    expected = layer(hidden)
    got, calls = _traced(layer, hidden)
    torch.testing.assert_close(got, expected)
    assert calls.count("linear") == 2


def _large_layer() -> torch.nn.ModuleDict:
    """Projections of a layer on the GPU, of sizes for which torch has segments of their own."""
    wide = dict.fromkeys(("q_proj", "o_proj"), (4096, 4096))
    narrow = dict.fromkeys(("k_proj", "v_proj"), (4096, 1024))
    mlp = {"gate_proj": (4096, 8192), "up_proj": (4096, 8192), "down_proj": (8192, 4096)}
    options: Any = {"bias": False, "device": "cuda", "dtype": torch.bfloat16}
    shapes = {**wide, **narrow, **mlp}
    return torch.nn.ModuleDict({name: torch.nn.Linear(*shapes[name], **options) for name in shapes})


@pytest.mark.gpu
def test_separated_weights_take_as_much_memory_as_before() -> None:
    """The rest of a freed joint weight, if another weight were cut from it, would stay in use."""
    peft = pytest.importorskip("peft")
    layers = torch.nn.Sequential(*(_large_layer() for _ in range(3)))
    model = peft.get_peft_model(layers, peft.LoraConfig(r=16, target_modules="all-linear"))
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    joined_layers.join(model, torch.bfloat16)
    joined = torch.cuda.memory_reserved()
    joined_layers.separate(model)
    assert before < joined, "nothing was copied"
    assert torch.cuda.memory_reserved() - before <= 4 * MiB * len(layers)
