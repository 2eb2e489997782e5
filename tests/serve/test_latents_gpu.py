"""Latent attention on a GPU: captured steps, with prompts and without, over rows of latents."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers.latents import FAMILIES, latent_model
from helpers.ragged import assert_likeliest, random_prompts

import vmkv
from vmkv import VMKVCache
from vmkv.serve.engine import Engine
from vmkv.serve.params import SamplingParams
from vmkv.serve.runner import RunnerOptions
from vmkv.units import MiB

pytestmark = pytest.mark.gpu
NAME = "deepseek_v3"
if NAME not in FAMILIES:
    pytest.skip("this release has no models that cache latents", allow_module_level=True)

NUM_TOKENS = 24
PROMPTS = random_prompts(40, 1, 13, 25, 2, 9, 70, 3)
BUDGET_BYTES = 512 * MiB
SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_tokens": 256}


@pytest.fixture
def model() -> Any:
    """Two layers whose latents have the widths that kernels are made for."""
    widths = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64, "qk_head_dim": 192}
    widths |= {"qk_nope_head_dim": 128, "v_head_dim": 128}
    return copy.deepcopy(latent_model(NAME, **widths)).to("cuda", torch.bfloat16)


def _likeliest(model: Any, outputs: list[Any]) -> None:
    texts = [
        prompt + list(each.outputs[0].token_ids)
        for prompt, each in zip(PROMPTS, outputs, strict=True)
    ]
    assert_likeliest(model, PROMPTS, texts)


@pytest.mark.parametrize("compile_layers", [False, True])
def test_an_engine_replays_steps(model: Any, compile_layers: bool) -> None:
    """On Hopper with FlashAttention-3, steps with prompts are captured as well."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    options = RunnerOptions(show_progress=False, compile_layers=compile_layers)
    with Engine(model, budget_bytes=BUDGET_BYTES, **SIZES, runner_options=options) as engine:
        stepper = engine._runner.stepper
        assert stepper.attention.keeps_latents
        if "flash3" in stepper.attention.kernel_names:
            assert stepper.decode_graphs is not None, "decode steps could not be captured"
            assert {1, 2, 4} == {width for width, _ in stepper.decode_graphs.captured}
            assert stepper.mixed_graphs is not None
        outputs = [engine.generate(PROMPTS, params) for _ in range(2)]
        engine.cache.check()
    for each in outputs:  # Until the engine is closed, compiled layers attend in its steps only.
        _likeliest(model, each)


def test_generate_captures_steps_that_recur(model: Any) -> None:
    """`vmkv.generate`, over latents too."""
    options: dict[str, Any] = {"max_new_tokens": NUM_TOKENS, "do_sample": False}
    texts = vmkv.generate(model, PROMPTS, budget_bytes=BUDGET_BYTES, eos_token_id=None, **options)
    assert_likeliest(model, PROMPTS, texts)


def test_model_generate_with_a_cache(model: Any) -> None:
    """The loop of transformers, left-padded; captured steps attend to the cache's latents."""
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (longest - len(each)) + each for each in PROMPTS], device="cuda")
    mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in PROMPTS])
    capture = vmkv.capture_decoding(model)
    with VMKVCache(config=model.config, budget_bytes=BUDGET_BYTES) as cache:
        out = model.generate(
            ids,
            attention_mask=mask.to("cuda"),
            past_key_values=cache,
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
        )
    assert capture.refusals or capture.num_steps == NUM_TOKENS - 1
    capture.close()
    texts = [row[longest - len(each) :] for row, each in zip(out.tolist(), PROMPTS, strict=True)]
    assert_likeliest(model, PROMPTS, texts)
