"""Division of a model among ranks; invalid divisions leave the model unchanged."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.tiny_models import VERSION, tiny_config, tiny_model

from vmkv import ConfigError
from vmkv.serve.parallel import localise, sharding
from vmkv.serve.parallel.sharding import Share

pytestmark = pytest.mark.skipif(
    VERSION < (5, 17), reason="transformers has no plans to divide models by"
)


def _rank(rank: int, size: int) -> Any:
    """A rank that computes nothing."""
    return SimpleNamespace(rank=rank, size=size, name="nobody")


@pytest.mark.parametrize("length", [1, 4, 5, 7, 8])
@pytest.mark.parametrize("size", [2, 3])
def test_shares_cover_all_indices_in_order(length: int, size: int) -> None:
    """Also if the size does not divide the length."""
    places = [at for rank in range(size) for at in range(length)[Share(rank, size).of(length)]]
    assert list(range(length)) == places


@pytest.mark.parametrize("name", ["llama", "gemma2", "phi3", "mixtral", "deepseek_v3"])
def test_a_part_has_the_planned_bytes(name: str) -> None:
    """The attributes of its layers match its weights."""
    model = copy.deepcopy(tiny_model(name))
    planned = sharding.bytes_per_rank(model, sharding.plan_of(model), 2)
    localise(model, _rank(0, 2))
    assert planned == sum(each.nbytes for each in model.parameters())
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            assert (module.out_features, module.in_features) == tuple(module.weight.shape)


def test_heads_are_not_divided() -> None:
    """The model is left unchanged."""
    model = copy.deepcopy(tiny_model("llama"))
    before = {name: each.shape for name, each in model.named_parameters()}
    with pytest.raises(ConfigError, match="2 key-value heads cannot be divided among 4 ranks"):
        localise(model, _rank(1, 4))
    config = tiny_config("llama")
    config.num_key_value_heads, config.num_attention_heads = 3, 7
    with pytest.raises(ConfigError, match="7 attention heads"):
        sharding.check_heads(config, sharding.plan_of(model), 3)
    assert before == {name: each.shape for name, each in model.named_parameters()}


def test_models_without_a_plan_are_refused() -> None:
    with pytest.raises(ConfigError, match="does not say how to divide a GptOssForCausalLM"):
        localise(tiny_model("gpt_oss"), _rank(0, 2))


def test_unknown_layers_and_styles_are_refused() -> None:
    """Before any layer is changed."""

    class Quantised(torch.nn.Linear):
        pass

    model = copy.deepcopy(tiny_model("llama"))
    model.model.layers[1].mlp.down_proj.__class__ = Quantised
    with pytest.raises(ConfigError, match="a Quantised cannot be divided"):
        localise(model, _rank(0, 2))
    assert model.lm_head.weight.shape == tiny_model("llama").lm_head.weight.shape
    model.tp_plan = {**model.tp_plan, "model.layers.*.mlp.down_proj": "sequence_parallel"}
    with pytest.raises(ConfigError, match="style 'sequence_parallel'"):
        localise(model, _rank(0, 2))
