"""Models with latent attention: rows hold latents, and every request gets the tokens of generate.

Tokens are compared with `model.generate` alone, in float32: in batches, chunks of prompts, over
prefixes, after preemption, swaps and evictions to host memory, and for samples that fork.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.latents import FAMILIES, RANK, ROPE_DIM, latent_model
from helpers.ragged import alone, check_generate, random_prompts
from helpers.runners import PADDED, TRACED

import vmkv
from vmkv.core.cache.fp8 import FP8
from vmkv.hf.compat import cache_argument
from vmkv.hf.proof import prove
from vmkv.serve.engine import Engine
from vmkv.serve.params import SamplingParams
from vmkv.serve.request import RequestHandle
from vmkv.serve.scheduler import PreemptionCosts
from vmkv.units import KiB, MiB

if not FAMILIES:
    pytest.skip("this release has no models that cache latents", allow_module_level=True)

MakeEngine = Callable[..., Engine]
NUM_TOKENS = 8
LONG = 70
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
PROMPTS = random_prompts(40, 1, 13, 25, 2, 9)
#: Without layers that keep states, which captured steps of transformers' loop do not take.
ALL_LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "axk1", "youtu")
#: With a latent layer only, and beside layers that keep states.
NAMES = [name for name in ("deepseek_v3", "kimi_linear") if name in FAMILIES]


def _check(
    engine: Engine, model: Any, prompts: list[list[int]] = PROMPTS, **options: Any
) -> list[RequestHandle]:
    """Greedy requests, each checked to be as alone; the cache is checked after each step."""
    params = dataclasses.replace(GREEDY, **options)
    handles = [engine.add(prompt, params) for prompt in prompts]
    while engine.has_unfinished:
        engine.step()
        engine.cache.check()
    for prompt, handle in zip(prompts, handles, strict=True):
        expected = alone(
            model, prompt, max_new_tokens=params.max_tokens, do_sample=False, eos_token_id=None
        )
        for sample in handle.output().outputs:
            assert expected == [*prompt, *sample.token_ids]
    return handles


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_hold_latents(make_engine: MakeEngine, name: str) -> None:
    """In chunks of 16 tokens, beside each other and again from the prefix cache."""
    engine = make_engine(copy.deepcopy(latent_model(name)), prefix_caching=True)
    for _ in range(2):
        handles = _check(engine, latent_model(name))
    assert any(each.output().num_cached_tokens for each in handles)
    groups = [group for group in engine.cache.groups if not group.is_fixed]
    assert {4 * (RANK + ROPE_DIM)} == {group.geometry.layer_bytes for group in groups}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_batch_without_an_engine(name: str) -> None:
    """Prompts of `vmkv.generate`, two of which begin alike."""
    check_generate(latent_model(name), [*PROMPTS, [*PROMPTS[0][:30], 3, 4]])


@pytest.mark.parametrize("name", [name for name in FAMILIES if name in ALL_LATENT])
def test_captured_steps_of_transformers_own_loop(name: str) -> None:
    """Left-padded prompts over a `VMKVCache`: it holds latents, to which steps attend."""
    model, prompts = copy.deepcopy(latent_model(name)), PROMPTS[:4]
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(each)) + each for each in prompts])
    mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in prompts])
    options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None}
    with (
        contextlib.closing(vmkv.capture_decoding(model)) as capture,
        contextlib.closing(vmkv.VMKVCache(model.config, budget_bytes=16 * MiB)) as cache,
    ):
        its: dict[str, Any] = {cache_argument(model): cache}
        rows = model.generate(ids, attention_mask=mask, **its, **options).tolist()
        assert capture.num_steps == NUM_TOKENS - 1, capture.refusals
    for prompt, row in zip(prompts, rows, strict=True):
        expected = alone(latent_model(name), prompt, **options)
        assert expected == row[longest - len(prompt) :]


@pytest.mark.parametrize("options", [PADDED, TRACED], ids=["padded", "compiled"])
@pytest.mark.parametrize("name", NAMES)
def test_steps_as_for_graphs(make_engine: MakeEngine, name: str, options: Any) -> None:
    """Padded, and traced once for a kind of layer; the model is as before afterwards."""
    model = copy.deepcopy(latent_model(name))
    kinds = [type(each) for each in model.modules()]
    engine = make_engine(model, prefix_caching=True, **options)
    stepper = engine._runner.stepper
    assert stepper.attention.keeps_latents
    for _ in range(2):
        _check(engine, latent_model(name))
    with engine.paused():
        assert kinds == [type(each) for each in model.modules()]
        with torch.no_grad():  # The model's own pass, which expands.
            model(torch.tensor([PROMPTS[0]]))
    _check(engine, latent_model(name))
    engine.close()
    assert kinds == [type(each) for each in model.modules()]


@pytest.mark.parametrize("host_bytes", [0, 16 * MiB], ids=["recomputed", "swapped"])
@pytest.mark.parametrize("name", NAMES)
def test_preempted_requests(make_engine: MakeEngine, name: str, host_bytes: int) -> None:
    """Latents go to host memory and come back, or are computed again."""
    model = copy.deepcopy(latent_model(name))
    view = make_engine(copy.deepcopy(model))._view
    engine = make_engine(
        model,
        budget_bytes=(3 * view.peak_pages(1) + view.peak_pages(13 + LONG)) * 4 * KiB,
        host_budget_bytes=host_bytes,
        preemption_costs=PreemptionCosts(flops_per_s=1.0 if host_bytes else 1e30),
    )
    prompts = PROMPTS[1:3] + PROMPTS[4:]
    handles = _check(engine, latent_model(name), prompts, max_tokens=LONG)
    assert any(handle.requests[0].num_preemptions for handle in handles)
    assert bool(host_bytes) == bool(engine.cache.sharing.swapped_in_bytes)


def test_prefixes_come_back_from_host_memory(make_engine: MakeEngine) -> None:
    """Evicted blocks of latents serve the prompts that begin with their tokens."""
    engine = make_engine(
        copy.deepcopy(latent_model("deepseek_v3")),
        budget_bytes=64 * KiB,
        host_budget_bytes=4 * MiB,
        prefix_caching=True,
    )
    prompts = random_prompts(64, 64, 64, 64, seed=3)
    for _ in range(2):
        for prompt in prompts:
            (handle,) = _check(engine, latent_model("deepseek_v3"), [prompt])
            engine.cache.check()
    assert engine.cache.host_blocks.num_bytes
    assert handle.output().num_cached_tokens


@pytest.mark.parametrize("name", NAMES)
def test_samples_fork(make_engine: MakeEngine, name: str) -> None:
    """Three samples of each prompt share its latents."""
    engine = make_engine(copy.deepcopy(latent_model(name)), prefix_caching=True)
    _check(engine, latent_model(name), PROMPTS[:3], n=3)


def test_rows_follow_the_weights(make_engine: MakeEngine) -> None:
    """Both halves of the projection are views of its weight, so a change of it counts at once."""
    model = copy.deepcopy(latent_model("deepseek_v3"))
    engine = make_engine(model, prefix_caching=False)
    _check(engine, latent_model("deepseek_v3"))
    changed = copy.deepcopy(latent_model("deepseek_v3"))
    with torch.no_grad():
        for its in (model, changed):
            for layer in its.model.layers:
                layer.self_attn.kv_b_proj.weight.mul_(-1.5)
    _check(engine, changed)


def test_what_fails_the_proof_attends_to_expanded_keys(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """A layer whose expansion is not the projection alone is served as any other."""
    model = copy.deepcopy(latent_model("deepseek_v3"))
    kind: Any = type(model.model.layers[0].self_attn)

    class Scaled(kind):  # type: ignore[misc]
        """Expands several tokens by more than its projection, which a few do not show."""

        def expand_kv(self, latent: torch.Tensor, shared: torch.Tensor) -> Any:
            key, value = super().expand_kv(latent, shared)
            return key, value if value.abs().max() < 0.5 else value * 1.5

    plain = copy.deepcopy(model)
    for its in (model, plain):
        for layer in its.model.layers:
            layer.self_attn.__class__ = Scaled
            layer.self_attn.kv_b_proj.weight.data.mul_(0.2)
            layer.self_attn.kv_a_layernorm.weight.data.mul_(20)
    with caplog.at_level(logging.WARNING, "vmkv.hf.proof"):
        proof = prove(model)
    assert "expanded keys" in caplog.text
    assert not proof.calls.latents
    _check(make_engine(model), plain)


def _rounding(model: Any) -> Any:
    """A copy of a model that attends to expanded keys and values as eight bits hold them."""
    model = copy.deepcopy(model)
    for module in model.modules():
        kind: Any = type(module)
        if hasattr(kind, "expand_kv"):

            class Rounding(kind):  # type: ignore[misc]
                def expand_kv(self, latent: torch.Tensor, shared: torch.Tensor) -> Any:
                    both = super().expand_kv(latent, shared)
                    return tuple(each.to(FP8).to(each.dtype) for each in both)

            module.__class__ = Rounding
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_eight_bits_hold_expanded_keys_and_values(make_engine: MakeEngine, name: str) -> None:
    """In an engine and in `vmkv.generate`, also of a model that was proven with latents before."""
    model, rounded = copy.deepcopy(latent_model(name)), _rounding(latent_model(name))
    greedy = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None}
    assert prove(model).calls.latents
    with vmkv.RaggedCache(model.config, kv_dtype="fp8", budget_bytes=16 * MiB) as cache:
        texts = vmkv.generate(model, PROMPTS, cache=cache, **greedy)
    assert texts == [alone(rounded, each, **greedy) for each in PROMPTS]
    engine = make_engine(model, kv_dtype="fp8", prefix_caching=True)
    assert not engine._runner.stepper.attention.keeps_latents
    for _ in range(2):
        _check(engine, rounded)
    groups = [group for group in engine.cache.groups if not group.is_fixed]
    assert {FP8} == {group.dtype for group in groups}
    num_heads = model.config.num_attention_heads
    assert {num_heads} == {group.geometry.shape.num_k_heads for group in groups}
    with engine.paused():
        pass
    _check(engine, rounded)


@pytest.mark.skipif("deepseek_v3" not in FAMILIES, reason="this release has no such models")
def test_latents_of_eight_bits_are_read_by_the_model_itself() -> None:
    """A `VMKVCache` holds them; steps over it are not captured."""
    model = copy.deepcopy(latent_model("deepseek_v3"))
    options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None}
    texts = []
    for captures in False, True:
        with contextlib.ExitStack() as stack:
            its: dict[str, Any] = {"kv_dtype": "fp8", "budget_bytes": 16 * MiB}
            cache = stack.enter_context(vmkv.VMKVCache(model.config, **its))
            if captures:
                capture = stack.enter_context(contextlib.closing(vmkv.capture_decoding(model)))
            given = {cache_argument(model): cache}
            texts.append(alone(model, PROMPTS[0], **given, **options))
    assert texts[0] == texts[1]
    assert not capture.num_steps
    assert ["it caches something else than the keys and values it attends to"] == capture.refusals
