"""Layers that only the model's calls of its cache name, and values in other pairs with keys.

Zamba's attention is shared by several layers, HRM's by several cycles; DiffLlama attends twice to
its keys, with either half of its values.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import families, survey
from helpers.ragged import check_generate, check_padded_engine, random_prompts
from transformers import cache_utils

import vmkv
from vmkv import ConfigError, Engine, KVScales, SamplingParams
from vmkv.core.cache.fp8 import LayerScales
from vmkv.hf.proof import prove
from vmkv.serve.runner import RunnerOptions
from vmkv.units import MiB

if not hasattr(cache_utils, "LinearAttentionLayer"):
    pytest.skip("this release keeps other caches for these models", allow_module_level=True)

NAMES = [
    name for name in ("zamba", "zamba2", "diffllama", "hrm_text") if name in families.surveyed()
]
BUDGET_BYTES = 64 * MiB
PROMPTS = random_prompts(40, 1, 13, 25)
GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture(params=NAMES)
def model(request: pytest.FixtureRequest) -> Any:
    return survey.model_of(request.param)


@pytest.mark.parametrize("chunk", [3, 8192])
def test_prompts_in_chunks_of_any_size(model: Any, chunk: int) -> None:
    check_generate(model, PROMPTS, max_num_batched_tokens=chunk)


@pytest.mark.slow
def test_engines_with_steps_as_for_graphs(model: Any) -> None:
    check_padded_engine(model, PROMPTS)


def test_the_proof_finds_named_layers(model: Any) -> None:
    """Also where no model has them: those of all others say their number."""
    assert prove(model).calls.is_named
    assert not prove(copy.deepcopy(survey.model_of("llama"))).calls.is_named


def test_values_in_other_pairs_are_kept_once() -> None:
    """A layer's rows hold its own keys and values, whatever is attended to how often."""
    model = survey.model_of("diffllama")
    signatures, calls, _ = prove(model)
    heads, size = model.config.num_key_value_heads, model.config.head_dim
    assert {(heads, size)} == {each.k_shape for each in signatures.values()}
    assert {(heads, size)} == {each.v_shape for each in signatures.values()}
    assert {layer: [[0, 0], [1, 1]] for layer in signatures} == calls.regrouped
    assert [0, 0, 1, 1] == list(calls.layers)


def test_a_heads_scale_in_eight_bits_goes_with_its_values() -> None:
    """Scales of powers of two lose nothing, so tokens are those without."""
    model = survey.model_of("diffllama")
    layers = LayerScales((0.5, 0.25), (0.25, 1.0)), LayerScales((1.0, 0.5), (0.125, 0.5))
    said = []
    for scales in (None, KVScales("diffllama", layers)):
        with Engine(
            model, kv_dtype="fp8", kv_scales=scales, max_num_seqs=4, budget_bytes=BUDGET_BYTES
        ) as engine:
            outputs = engine.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=8))
        said.append([each.outputs[0].token_ids for each in outputs])
    assert said[0] == said[1]


def test_values_that_the_model_changes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No head of the layer's values is what the second call attends to."""
    model = survey.model_of("diffllama")
    chunk = torch.chunk

    def changed(values: torch.Tensor, *options: Any, **more: Any) -> Any:
        first, second = chunk(values, *options, **more)
        return first, second * 2

    monkeypatch.setattr(torch, "chunk", changed)
    with pytest.raises(ConfigError, match="attends more than once in a pass"):
        prove(model)


def test_layers_that_share_a_module_cannot_be_compiled() -> None:
    """One compiled layer has one number."""
    options = RunnerOptions(compile_layers=True, show_progress=False)
    with pytest.raises(ConfigError, match="layers that share their modules"):
        Engine(
            survey.model_of("diffllama"),
            runner="graphs",
            runner_options=options,
            budget_bytes=BUDGET_BYTES,
        )


def test_decoded_tokens_are_compared_with_those_of_the_models_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Zamba 2 bounds time steps only where tokens are several: a plain pass gives others."""
    model = survey.model_of("zamba2")
    heard = vmkv.hf.proof._heard_pass
    in_cache: list[int] = []

    def hear(model: Any, ids: torch.Tensor, after: torch.Tensor | None = None) -> Any:
        if after is not None:
            in_cache.append(after.shape[1])
        return heard(model, ids, after)

    monkeypatch.setattr(vmkv.hf.proof, "_heard_pass", hear)
    prove(model)
    assert [3, 7, 9, 12, 15] == in_cache
