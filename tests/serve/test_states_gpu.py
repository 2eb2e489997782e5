"""Decode steps of models whose layers keep states, captured as CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import families, survey
from helpers.hybrids import HYBRIDS
from helpers.ragged import assert_likeliest, random_prompts

import vmkv
from vmkv.serve.engine import Engine
from vmkv.serve.params import SamplingParams
from vmkv.serve.runner import RunnerOptions
from vmkv.units import MiB

pytestmark = pytest.mark.gpu

NUM_TOKENS = 24
PROMPTS = random_prompts(40, 1, 13, 25, 2, 9, 70, 3, 5)
BUDGET_BYTES = 512 * MiB
SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_tokens": 256}


@pytest.fixture(
    params=[each for each in HYBRIDS if each in ("qwen3_next", "granitemoehybrid", "lfm2")]
)
def model(request: pytest.FixtureRequest) -> Any:
    model = survey.model_of(request.param).to("cuda", torch.bfloat16)
    for module in model.modules():
        if hasattr(module, "top_k"):  # All experts: rounding would choose others now and then.
            module.top_k = families.NUM_EXPERTS
    return model


def _count_passes(model: Any) -> list[int]:
    """Append the tokens of each pass of the model's code; installs no hook."""
    counts: list[int] = []
    forward = model.model.forward

    def counting(*arguments: Any, **options: Any) -> Any:
        counts.append(options["input_ids"].shape[1])
        return forward(*arguments, **options)

    model.model.forward = counting
    return counts


def _check(model: Any, texts: list[list[int]]) -> None:
    assert {NUM_TOKENS} == {
        len(text) - len(prompt) for prompt, text in zip(PROMPTS, texts, strict=True)
    }
    assert_likeliest(model, PROMPTS, texts)


def test_an_engine_replays_decode_steps(model: Any) -> None:
    """The model's code runs for steps with prompts only, and requests join and leave."""
    options = RunnerOptions(show_progress=False)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with Engine(
        model,
        budget_bytes=BUDGET_BYTES,
        **SIZES,
        runner_options=options,
    ) as engine:
        graphs = engine._runner.stepper.decode_graphs
        assert graphs is not None, "decode steps could not be captured: see the log"
        assert {1, 2, 4} == {width for width, _ in graphs.captured}
        counts = []
        stepper = engine._runner.stepper
        run_eagerly = stepper.run_eagerly

        def counted(packed: Any, *arguments: Any) -> torch.Tensor:
            counts.append(
                any(each.num_new_tokens > 1 or not each.num_past_tokens for each in packed)
            )
            return run_eagerly(packed, *arguments)

        stepper.run_eagerly = counted
        for _ in range(2):
            outputs = engine.generate(PROMPTS, params)
        assert counts
        assert all(counts), "a decode step was not replayed"
        engine.cache.check()
    texts = [
        prompt + list(each.outputs[0].token_ids)
        for prompt, each in zip(PROMPTS, outputs, strict=True)
    ]
    _check(model, texts)


def test_generate_captures_steps_that_recur(model: Any) -> None:
    """A batch of one size: its passes are those of prompts, and few of its decode steps."""
    options: dict[str, Any] = {"max_new_tokens": NUM_TOKENS, "do_sample": False}
    vmkv.generate(model, PROMPTS[:1], budget_bytes=BUDGET_BYTES, **options)  # Proves the model.
    counts = _count_passes(model)
    texts = vmkv.generate(model, PROMPTS, budget_bytes=BUDGET_BYTES, **options)
    # The prompts, one step before the logits' shape is known, and two rehearsals with their runs
    # before the capture.
    assert len(counts) <= 8, "decode steps were not captured"
    _check(model, texts)
