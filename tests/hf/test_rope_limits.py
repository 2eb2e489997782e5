"""Rotary embeddings that depend on the longest sequence of a pass.

"longrope" and "dynamic" embeddings change the angles of all sequences in a pass once one sequence
is longer than the model's original limit. Up to it packed sequences are exact; longer ones are
refused before anything runs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from helpers.tiny_models import VERSION, VOCABULARY, llama_config, model_from, tiny_shape

import vmkv
from vmkv import ConfigError, Engine, SamplingParams
from vmkv.hf import compat
from vmkv.units import MiB

LIMIT = 32
_ROPE = "rope_parameters" if VERSION >= (5, 0) else "rope_scaling"


def _config(kind: str) -> Any:
    theta = {"rope_theta": 10000.0} if VERSION >= (5, 0) else {}
    if kind == "dynamic":
        rope = {"rope_type": "dynamic", "factor": 4.0, **theta}
        return llama_config(max_position_embeddings=LIMIT, **{_ROPE: rope})
    rope = {"short_factor": [1.0] * 4, "long_factor": [1.0, 3.0, 6.0, 9.0], **theta}
    rope["type" if VERSION < (5, 0) else "rope_type"] = "longrope"
    if VERSION >= (5, 0):
        rope["original_max_position_embeddings"] = LIMIT
    return transformers.Phi3Config(
        **tiny_shape(max_position_embeddings=8 * LIMIT),
        original_max_position_embeddings=LIMIT,
        **{_ROPE: rope},
    )


def _prompt(count: int) -> list[int]:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()


def _alone(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": count}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0].tolist()


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_sequences_up_to_the_limit_are_exact(kind: str) -> None:
    """With `generate`, and with an engine, whose default `max_tokens` is the limit."""
    model = model_from(_config(kind))
    prompts = [_prompt(5), _prompt(20)]
    expected = [_alone(model, prompt, 12) for prompt in prompts]
    assert expected == vmkv.generate(model, prompts, max_new_tokens=12, do_sample=False)
    with Engine(model, max_num_seqs=2, budget_bytes=16 * MiB) as engine:
        assert engine.max_tokens == LIMIT
        outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=12))
        assert [list(each.outputs[0].token_ids) for each in outputs] == [
            tokens[len(prompt) :] for tokens, prompt in zip(expected, prompts, strict=True)
        ]


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_a_sequence_beyond_the_limit_is_refused(kind: str) -> None:
    """The error names the limit, and VMKVCache, which serves longer sequences."""
    model = model_from(_config(kind))
    message = f"beyond {LIMIT} tokens, .* may reach 33: .*VMKVCache"
    with pytest.raises(ConfigError, match=message):
        vmkv.generate(model, [_prompt(5), _prompt(21)], max_new_tokens=12)
    ids = torch.tensor([_prompt(21)])
    with pytest.raises(ConfigError, match=message):
        model.generate(ids, max_new_tokens=12, custom_generate=vmkv.ragged_generate)
    with pytest.raises(ConfigError, match=message):
        Engine(model, max_num_seqs=2, max_tokens=33, budget_bytes=16 * MiB)
    with vmkv.VMKVCache(model.config, budget_bytes=16 * MiB) as cache:
        options = {"do_sample": False, "max_new_tokens": 12, "past_key_values": cache}
        said = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0].tolist()
    assert _alone(model, _prompt(21), 12) == said


def test_default_rotary_embeddings_have_no_limit() -> None:
    """A model with several kinds of layers has the limit of any of them."""
    assert compat.rope_limit_tokens(llama_config()) is None
    if VERSION >= (5, 0):
        config = transformers.Gemma3TextConfig(max_position_embeddings=64)
        assert compat.rope_limit_tokens(config) is None
        config.rope_parameters["full_attention"] = {"rope_type": "dynamic", "factor": 2.0}
        assert compat.rope_limit_tokens(config) == 64
