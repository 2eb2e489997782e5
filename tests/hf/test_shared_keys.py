"""Layers that read another layer's keys and values: found by the proof, served without a copy.

Tokens of these models are compared in the tests of each interface, by `SHARED_KEYS`.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import survey
from helpers.ragged import check_generate, check_padded_engine, random_prompts
from helpers.tiny_models import SHARED_KEYS, redraw_weights, tiny_config, tiny_model
from transformers import AutoModelForCausalLM, cache_utils

import vmkv
from vmkv import ConfigError, Engine
from vmkv.hf.proof import prove
from vmkv.units import MiB

if not SHARED_KEYS:
    pytest.skip("packed steps cannot serve shared keys here", allow_module_level=True)

BUDGET_BYTES = 64 * MiB
SOURCES = {"gemma3n": {2: 0, 3: 1}, "gemma4": {2: 0, 3: 1, 4: 1}}


@pytest.fixture(params=SHARED_KEYS)
def model(request: pytest.FixtureRequest) -> Any:
    return copy.deepcopy(tiny_model(request.param))  # A copy that is not proven yet.


def test_the_proof_finds_whose_keys_a_layer_reads(model: Any) -> None:
    """In float32 and in bfloat16; each layer attends once."""
    for each in (model, copy.deepcopy(model).bfloat16()):
        signatures, calls, _ = prove(each)
        assert SOURCES[model.config.model_type.removesuffix("_text")] == calls.sources
        assert tuple(range(model.config.num_hidden_layers)) == calls.layers
        assert {*calls.layers} == {*signatures, *calls.sources}


def test_only_layers_with_keys_of_their_own_have_rows(model: Any) -> None:
    """A token takes their bytes, and no more."""
    with Engine(model, budget_bytes=BUDGET_BYTES, max_tokens=256) as engine:
        signatures, calls, _ = prove(model)
        assert {*signatures} == {*engine.cache.layers}
        assert not {*calls.sources} & {*engine.cache.layers}


@pytest.mark.parametrize("chunk", [3, 16, 8192])
def test_prompts_in_chunks_of_any_size(model: Any, chunk: int) -> None:
    check_generate(model, random_prompts(40, 1, 13, 25, 9), max_num_batched_tokens=chunk)


@pytest.mark.slow
def test_engines_with_steps_as_for_graphs(model: Any) -> None:
    check_padded_engine(model, random_prompts(40, 1, 13, 25, 9))


@pytest.fixture
def changed_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hand shared keys on as copies, as a model does that transforms them on the way."""
    plain = cache_utils.KVSharingDict.__getitem__

    def copied(self: Any, name: str) -> Any:
        return tuple(each * 1.5 for each in plain(self, name))

    monkeypatch.setattr(cache_utils.KVSharingDict, "__getitem__", copied)


def test_keys_that_are_changed_on_the_way_are_refused(model: Any, changed_keys: None) -> None:
    """No rows hold them."""
    with pytest.raises(ConfigError, match="layer 2 attends to keys that no layer caches"):
        prove(model)


@pytest.mark.parametrize("name", SHARED_KEYS)
def test_a_longer_window_than_that_of_the_rows_is_refused(name: str) -> None:
    """The rows will have lost tokens before theirs; the proof's sequences are too short to tell."""
    config = tiny_config(name)
    config.sliding_window = 100
    model = AutoModelForCausalLM.from_config(config).eval()
    redraw_weights(model, 0)
    prove(model)
    for each in model.modules():
        if getattr(each, "layer_idx", None) == 2 and hasattr(each, "sliding_window"):
            each.sliding_window = 300
    message = "layer 2 is to see 300 tokens of layer 0, which keeps 100 tokens"
    with pytest.raises(ConfigError, match=message):
        prove(copy.deepcopy(model))


def test_heads_wider_than_those_of_kernels_are_attended_plainly() -> None:
    """Gemma 4's global heads of 512 beside local ones of 256."""
    model = survey.model_of("gemma4_text (shared layers, wide global heads)")
    signatures, calls, _ = prove(model)
    assert [256, 512, 256] == [signatures[layer].k_shape[1] for layer in sorted(signatures)]
    assert {3: 1} == calls.sources
    ids = torch.tensor([[5, 6, 7, 8, 9] * 5])
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)[0].tolist()
    assert [expected] == vmkv.generate(
        model, ids, max_new_tokens=6, do_sample=False, budget_bytes=BUDGET_BYTES
    )
