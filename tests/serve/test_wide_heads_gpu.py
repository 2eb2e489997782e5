"""Gemma 4's global layers, whose heads of 512 no flash kernel takes, in captured decode steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import families, survey
from helpers.ragged import assert_likeliest, random_prompts
from helpers.tiny_models import SHARED_KEYS

import vmkv
from vmkv.attention import decode
from vmkv.serve.engine import Engine
from vmkv.serve.params import SamplingParams
from vmkv.serve.runner import RunnerOptions
from vmkv.units import MiB

pytestmark = pytest.mark.gpu

NUM_TOKENS = 24
PROMPTS = random_prompts(40, 1, 13, 25, 2, 9, 70, 3)
BUDGET_BYTES = 512 * MiB
SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_tokens": 256}


@pytest.fixture(params=[name for name in families.surveyed() if "wide global heads" in name])
def model(request: pytest.FixtureRequest) -> Any:
    if "(shared" in request.param and not SHARED_KEYS:
        pytest.skip("packed steps cannot serve shared keys here")
    return survey.model_of(request.param).to("cuda", torch.bfloat16)


@pytest.fixture
def dims(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Head sizes of the kernel's launches, those in captures included."""
    seen: list[int] = []
    plain = decode.decode

    def counting(call: Any) -> Any:
        seen.append(call.query.shape[2])
        return plain(call)

    monkeypatch.setattr(decode, "decode", counting)
    return seen


def test_an_engine_replays_decode_steps(model: Any, dims: list[int]) -> None:
    """Steps with prompts are not captured: their kernel reads lengths on the host."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with Engine(
        model,
        budget_bytes=BUDGET_BYTES,
        **SIZES,
        runner_options=RunnerOptions(show_progress=False),
    ) as engine:
        stepper = engine._runner.stepper
        assert stepper.decode_graphs is not None, "decode steps could not be captured: see the log"
        assert {1, 2, 4} == {width for width, _ in stepper.decode_graphs.captured}
        assert stepper.mixed_graphs is None
        assert "sdpa" in stepper.attention.kernel_names
        assert {512} == {*dims}
        outputs = engine.generate(PROMPTS, params)
        engine.cache.check()
    texts = [
        prompt + list(each.outputs[0].token_ids)
        for prompt, each in zip(PROMPTS, outputs, strict=True)
    ]
    assert_likeliest(model, PROMPTS, texts)


def test_generate_captures_steps_that_recur(model: Any, dims: list[int]) -> None:
    """The kernel is launched from the host for the first steps only."""
    options: dict[str, Any] = {"max_new_tokens": NUM_TOKENS, "do_sample": False}
    vmkv.generate(model, PROMPTS[:1], budget_bytes=BUDGET_BYTES, **options)  # Proves the model.
    dims.clear()
    texts = vmkv.generate(model, PROMPTS, budget_bytes=BUDGET_BYTES, eos_token_id=None, **options)
    num_wide = sum(kind == "full_attention" for kind in model.config.layer_types)
    assert 0 < len(dims) <= 8 * num_wide, "decode steps were not captured"
    assert_likeliest(model, PROMPTS, texts)
