"""Defaults that an engine takes from the model: maximum length, end of sequence; and refusals."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from helpers import families
from helpers.tiny_models import tiny_model

from vmkv import ConfigError, Engine, SamplingParams
from vmkv.hf.configuration import default_max_tokens
from vmkv.units import MiB

GREEDY = SamplingParams(temperature=0, max_tokens=10)
PROMPT = [5, 9, 13, 7]


def _alone(model: Any, count: int = 10) -> list[int]:
    ids = torch.tensor([PROMPT])
    options = {"do_sample": False, "max_new_tokens": count}
    said = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return said[0, len(PROMPT) :].tolist()


def _said(engine: Engine) -> list[int]:
    return list(engine.generate(PROMPT, GREEDY)[0].outputs[0].token_ids)


def test_max_tokens_defaults_to_the_models_positions() -> None:
    """Not to twice as many, as in `generate`; the model's head dimension differs between layers."""
    config = families.tiny_config("gemma4_text")
    config.num_kv_shared_layers = 0
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    assert len({config.per_layer_config[at].head_dim for at in range(4)}) == 2
    with Engine(model, max_num_seqs=2, budget_bytes=64 * MiB) as engine:
        assert engine.max_tokens == config.max_position_embeddings == 256
        assert _alone(model) == _said(engine)


@pytest.mark.parametrize("name", ["max_position_embeddings", "n_positions"])
def test_default_max_tokens_knows_several_names(name: str) -> None:
    """Without any of them, there is a default."""

    class Config:
        pass

    config = Config()
    config.get_text_config = lambda decoder: config  # type: ignore[attr-defined]
    assert default_max_tokens(config, past_stated=False) == 32 * 1024
    setattr(config, name, 100)
    assert default_max_tokens(config, past_stated=False) == 100
    assert default_max_tokens(config) == 32 * 1024


@pytest.mark.parametrize("where", ["config", "generation_config", "nowhere"])
def test_the_generation_config_sets_the_end_of_sequence(where: str) -> None:
    """Also if it has no end of sequence and the model's config has one."""
    model = copy.deepcopy(tiny_model("llama"))
    end = _alone(model)[4]
    if where == "config":
        model.config.eos_token_id = end
    elif where == "generation_config":
        model.generation_config.eos_token_id = [end]
    expected = _alone(model)
    assert len(expected) == (_alone(model).index(end) + 1 if where == "generation_config" else 10)
    with Engine(model, max_num_seqs=2, budget_bytes=16 * MiB) as engine:
        assert expected == _said(engine)
        if where == "generation_config":
            [output] = engine.generate(PROMPT, GREEDY)
            assert ("stop", None) == (
                output.outputs[0].finish_reason,
                output.outputs[0].stop_reason,
            )
            [output] = engine.generate(PROMPT, replace(GREEDY, ignore_eos=True))
            assert 10 == len(output.outputs[0].token_ids)


def test_the_config_sets_the_end_without_a_generation_config() -> None:
    model = copy.deepcopy(tiny_model("llama"))
    end = _alone(model)[4]
    model.config.eos_token_id = end
    model.generation_config = None
    with Engine(model, max_num_seqs=2, budget_bytes=16 * MiB) as engine:
        assert end == _said(engine)[-1]


def test_a_model_with_a_mask_of_its_own_is_refused() -> None:
    config = families.tiny_config("doge")
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ConfigError, match=r"a mask of the model's own.*VMKVCache"):
        Engine(model, max_num_seqs=2, budget_bytes=16 * MiB)
