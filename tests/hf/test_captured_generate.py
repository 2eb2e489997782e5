"""transformers' own loop gives the same tokens with captured steps as without.

On the host the same steps run uncaptured. `capture_decoding` counts them: generation of n tokens
is one pass over the prompt and n - 1 steps. Captures themselves are in
`test_captured_generate_gpu.py`.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from helpers.recorded import SYNCS, recorded
from helpers.tiny_models import (
    INPUTS,
    SHARED_KEYS,
    STRATEGIES,
    VERSION,
    VOCABULARY,
    dynamic_cache,
    forward,
    generate,
    left_padded_prompt,
    model_from,
    prompt,
    redraw_weights,
    tiny_model,
    tiny_shape,
    unsupported_because,
)
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import _disable_current_modes

import vmkv
from vmkv import ClosedError, ConfigError, VMKVCache
from vmkv.attention import get
from vmkv.step.graphs import BatchGraphs
from vmkv.step.joined_layers import SiblingLinear

NewCache = Callable[..., Any]
Captured = Callable[..., tuple[Any, Any]]
NEW_TOKENS = 12


@pytest.fixture
def captured() -> Iterator[Callable[..., Any]]:
    """Make models that decode by captured steps; each is a copy."""
    made = []

    def make(name: str = "llama", attention: str = "eager") -> tuple[Any, Any]:
        model = copy.deepcopy(tiny_model(name, attention))
        made.append(vmkv.capture_decoding(model))
        return model, made[-1]

    yield make
    for each in made:
        each.close()


def _tokens(count: int, batch_size: int = 1, seed: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch_size, count), generator=generator)


def _step(model: Any, cache: Any, token: torch.Tensor, **options: Any) -> torch.Tensor:
    """The logits of one more token, without `generate`."""
    if VERSION < (5, 0):
        num_past = cache.get_seq_length()
        options.setdefault("cache_position", torch.arange(num_past, num_past + token.shape[1]))
    with torch.no_grad():
        return model(input_ids=token, past_key_values=cache, use_cache=True, **options).logits


def _check_tokens(model: Any, inputs: dict[str, Any], cache: Any, **options: Any) -> None:
    """Check that a model with `cache` gives the tokens of an eager model with a DynamicCache."""
    plain = options.pop("plain", None) or tiny_model("llama")
    expected = generate(plain, inputs, dynamic_cache(plain.config), **options)
    assert expected.tolist() == generate(model, inputs, cache, **options).tolist()


# ---- equal tokens -----------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_tokens_are_those_of_a_dynamic_cache(
    name: str, kind: str, strategy: str, captured: Captured, new_cache: NewCache
) -> None:
    """Greedy, sampling and beams; one prompt and several; with and without padding and windows."""
    inputs, options = INPUTS[kind](), STRATEGIES[strategy]
    model, capture = captured(name)
    cache = new_cache(model.config)
    _check_tokens(model, inputs, cache, plain=tiny_model(name), **options)
    assert NEW_TOKENS - 1 == capture.num_steps
    assert inputs["input_ids"].shape[1] + NEW_TOKENS - 1 == cache.get_seq_length()


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        *((name, "eager") for name in ("mistral", "gpt_oss", "qwen3", "mixtral", *SHARED_KEYS)),
        # Latent keys where they are cached, shared keys in 4.57, linear-attention states.
        *((name, "eager") for name in ("deepseek_v3", "gemma3n", "qwen3_next")),
        ("llama", "sdpa"),
        ("llama", "vmkv"),
    ],
)
def test_families_decode_by_captured_steps(
    name: str, attention: str, captured: Captured, new_cache: NewCache
) -> None:
    """In a padded batch; any attention is kept. Some kinds of layers need steps of the model."""
    if unsupported_because(name):
        pytest.skip("its cache is not DynamicCache on this release")
    model, capture = captured(name, attention)
    _check_tokens(model, left_padded_prompt(), new_cache(model.config), plain=tiny_model(name))
    assert attention == model.config._attn_implementation
    if name == "qwen3_next":
        assert 0 == capture.num_steps
    elif name in SHARED_KEYS or name not in ("deepseek_v3", "gemma3n"):
        assert NEW_TOKENS - 1 == capture.num_steps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend"),
    [("llama", "aot_eager"), *((name, "eager") for name in ("gemma3", *SHARED_KEYS[-1:]))],
)
def test_compiled_layers_are_used_by_captured_steps_only(
    name: str, backend: str, new_cache: NewCache
) -> None:
    """Prompts and other caches run the plain model, which `close` restores."""
    model, plain = copy.deepcopy(tiny_model(name, "sdpa")), tiny_model(name)
    options = {"compile_layers": True, "compile_backend": backend}
    with vmkv.capture_decoding(model, **options) as capture:
        for inputs in (prompt(name), left_padded_prompt()):
            expected = generate(plain, inputs, dynamic_cache(plain.config)).tolist()
            assert expected == generate(model, inputs, new_cache(model.config)).tolist()
            assert expected == generate(model, inputs, dynamic_cache(model.config)).tolist()
        assert 2 * (NEW_TOKENS - 1) == capture.num_steps
        with pytest.raises(ConfigError, match="compile_layers"):
            vmkv.capture_decoding(model)
    assert "sdpa" == model.config._attn_implementation
    assert not any("forward" in vars(each) for each in model.modules())
    assert all(type(each) is not SiblingLinear for each in model.modules())


@pytest.mark.slow
def test_ragged_generation_uses_the_compiled_layers() -> None:
    """For prompts and decoding; a second call compiles nothing more."""
    model, plain = copy.deepcopy(tiny_model("llama", "sdpa")), tiny_model("llama")
    prompts = [[5, 9, 13, 7], [8] * 21, [3, 4]]
    expected = vmkv.generate(plain, prompts, max_new_tokens=6, do_sample=False)
    counters.clear()
    with (
        vmkv.capture_decoding(model, compile_layers=True, compile_backend="aot_eager"),
        contextlib.closing(vmkv.RaggedCache(model.config)) as cache,
    ):
        for _ in range(2):
            assert expected == vmkv.generate(
                model, prompts, max_new_tokens=6, do_sample=False, cache=cache
            )
        assert counters["stats"]["unique_graphs"] > 0
        num_graphs = counters["stats"]["unique_graphs"]
        assert expected == vmkv.generate(model, prompts, max_new_tokens=6, do_sample=False)
        assert num_graphs == counters["stats"]["unique_graphs"]
    assert expected == vmkv.generate(model, prompts, max_new_tokens=6, do_sample=False)


def test_logits_of_a_step_are_not_overwritten_by_the_next_step(
    captured: Captured, new_cache: NewCache
) -> None:
    model, _ = captured()
    plain, inputs = tiny_model("llama"), prompt("llama", batch_size=2)
    options = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}
    expected = generate(plain, inputs, dynamic_cache(plain.config), **options)
    actual = generate(model, inputs, new_cache(model.config), **options)
    assert type(expected) is type(actual)
    for theirs, ours in zip(expected.logits, actual.logits, strict=True):
        torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=1e-4)
    cache = new_cache(model.config)
    _step(model, cache, _tokens(5))
    first = _step(model, cache, _tokens(1))
    kept = first.clone()
    _step(model, cache, _tokens(1, seed=4))
    assert torch.equal(kept, first)


@pytest.mark.parametrize("inference", [False, True])
def test_captured_steps_work_in_and_outside_inference_mode(
    inference: bool, captured: Captured, new_cache: NewCache
) -> None:
    """Steps prepared in one mode are used in the other."""
    model, capture = captured()
    cache = new_cache(model.config)
    for mode in (inference, not inference):
        cache.reset()
        with torch.inference_mode(mode):
            _check_tokens(model, left_padded_prompt(), cache)
    assert 2 * (NEW_TOKENS - 1) == capture.num_steps


# ---- mixtures with other calls ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_captured_steps_mix_with_any_other_use_of_the_cache(
    name: str, captured: Captured, new_cache: NewCache
) -> None:
    """Prompts, steps, chunks, reordering, crop and a smaller batch give DynamicCache's contents."""
    model, capture = captured(name)
    plain = tiny_model(name)
    cache, reference = new_cache(model.config), dynamic_cache(plain.config)

    def both(tokens: torch.Tensor) -> None:
        expected, actual = forward(plain, tokens, reference), forward(model, tokens, cache)
        torch.testing.assert_close(expected, actual, atol=1e-4, rtol=1e-4)

    with torch.no_grad():
        both(_tokens(5, 3))
        both(_tokens(1, 3))
        both(_tokens(1, 3, seed=4))
        both(_tokens(4, 3))
        both(_tokens(1, 3))
        for each in (cache, reference):
            each.reorder_cache(torch.tensor([2, 0, 0]))
        both(_tokens(1, 3, seed=5))
        if name == "llama":  # A window cannot restore tokens that left it.
            for each in (cache, reference):
                each.crop(-3)
        both(_tokens(1, 3, seed=6))
        for each in (cache, reference):
            each.batch_select_indices(torch.tensor([1, 2]))
        both(_tokens(1, 2, seed=7))
        both(_tokens(12, 2, seed=8))
        both(_tokens(1, 2, seed=9))
    assert 7 == capture.num_steps
    cache.check()
    for theirs, ours in zip(reference.layers, cache.layers, strict=True):
        torch.testing.assert_close(theirs.keys, ours.keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(theirs.values, ours.values, atol=1e-4, rtol=1e-4)


def test_captured_steps_of_layers_with_different_shapes(
    captured: Captured, new_cache: NewCache
) -> None:
    """After the first pass the layer groups close their gaps; captured steps use the new layout."""
    model, capture = captured()
    attention = model.model.layers[-1].self_attn
    for name in ("k_proj", "v_proj"):
        attention.register_module(name, torch.nn.Linear(32, 32, bias=False))
    attention.num_key_value_groups = 1
    redraw_weights(model, 0)
    cache = new_cache(model.config, layers_per_group=64)
    for _ in range(2):
        _check_tokens(model, left_padded_prompt(), cache, plain=model)
        cache.check()
        cache.reset()
    assert 2 * (NEW_TOKENS - 1) == capture.num_steps


def test_assisted_decoding_gives_the_same_tokens(captured: Captured, new_cache: NewCache) -> None:
    """The model checks the candidates, and rejected tokens are cropped."""
    model, _ = captured()
    plain, inputs = tiny_model("llama"), prompt("llama")
    expected = generate(plain, inputs, dynamic_cache(plain.config))
    assistant = tiny_model("llama", seed=1)
    never = VOCABULARY  # 4.57 needs an end token for prompt lookup.
    for options in ({"assistant_model": assistant}, {"prompt_lookup_num_tokens": 3}):
        actual = generate(model, inputs, new_cache(model.config), eos_token_id=never, **options)
        assert expected.tolist() == actual.tolist()


def test_other_caches_do_not_use_captured_steps(captured: Captured) -> None:
    model, capture = captured()
    _check_tokens(model, prompt("llama"), dynamic_cache(model.config))
    assert 0 == capture.num_steps


def test_a_captured_step_stores_the_same_fp8_bytes_as_an_eager_step(
    captured: Captured, new_cache: NewCache
) -> None:
    """Compared in the first layer, whose keys do not depend on attention."""
    model, capture = captured()
    plain, inputs = tiny_model("llama"), left_padded_prompt()
    expected, actual = (new_cache(model.config, kv_dtype="fp8") for _ in range(2))
    tokens = generate(plain, inputs, expected)
    assert tokens.tolist() == generate(model, inputs, actual).tolist()
    assert NEW_TOKENS - 1 == capture.num_steps
    for name in ("keys", "values"):
        theirs, ours = (getattr(each.layers[0], name) for each in (expected, actual))
        assert torch.equal(theirs.view(torch.uint8), ours.view(torch.uint8))


# ---- arguments of the caller ------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["unpadded", "padded"])
def test_positions_of_the_caller_are_used(
    kind: str, captured: Captured, new_cache: NewCache
) -> None:
    """Without positions, captured steps count tokens; in a padded batch the model does."""
    model, capture = captured()
    plain, inputs = tiny_model("llama"), INPUTS[kind]()
    logits = []
    for each, cache in (
        (plain, dynamic_cache(plain.config)),
        (model, new_cache(model.config)),
    ):
        mask = inputs["attention_mask"]
        _step(each, cache, inputs["input_ids"], attention_mask=mask)
        found = []
        for position in (None, 13, 40):
            mask = torch.cat([mask, mask.new_ones(3, 1)], 1)
            given = {} if position is None else {"position_ids": torch.tensor([[position]] * 3)}
            found.append(_step(each, cache, _tokens(1, 3), attention_mask=mask, **given))
        logits.append(torch.cat(found, 1))
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)
    assert {"unpadded": 3, "padded": 2}[kind] == capture.num_steps


@pytest.mark.skipif(VERSION < (5, 0), reason="4.57 lacks mm_token_type_ids")
def test_a_step_without_positions_after_an_image_runs_the_model(new_cache: NewCache) -> None:
    """An image takes fewer positions than tokens, and only the model knows how many."""
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4}
    config = transformers.Qwen2VLConfig(
        text_config=tiny_shape(rope_parameters=rope),
        vision_config=vision,
        image_token_id=90,
        video_token_id=91,
        vision_start_token_id=92,
        vision_end_token_id=93,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    redraw_weights(model, 0)
    ids = torch.tensor([[5, 6, 92, *[90] * 16, 93, 7, 8]])
    image = {
        "pixel_values": torch.randn(64, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 8, 8]]),
        "mm_token_type_ids": (ids == 90).int(),
    }
    logits = []
    for make in (dynamic_cache, new_cache):
        cache = make(config)
        with vmkv.capture_decoding(model) as capture:
            _step(model, cache, ids, **image)
            step = _step(model, cache, _tokens(1))
            positions = cache.get_seq_length() + model.model.rope_deltas
            given = _step(model, cache, _tokens(1), position_ids=positions)
            logits.append(torch.cat([step, given], 1))
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)
    assert capture.num_steps == 1  # Positions that were given are used.


def test_a_padded_step_without_positions_runs_the_model(new_cache: NewCache) -> None:
    """OPT does not count padding in positions, Llama does, so only the model knows."""
    inputs, logits = left_padded_prompt(), []
    config = transformers.OPTConfig(**tiny_shape(), word_embed_proj_dim=32, ffn_dim=48)
    model = model_from(config)
    for cache in (dynamic_cache(config), new_cache(config)):
        mask = inputs["attention_mask"]
        with vmkv.capture_decoding(model):
            _step(model, cache, inputs["input_ids"], attention_mask=mask)
            mask = torch.cat([mask, mask.new_ones(3, 1)], 1)
            logits.append(_step(model, cache, _tokens(1, 3), attention_mask=mask))
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)


def test_a_step_with_a_mask_that_is_no_left_padding_runs_the_model(
    captured: Captured, new_cache: NewCache
) -> None:
    """The logits are right from the first such step; after a crop steps are captured again."""
    model, capture = captured()
    plain, inputs = tiny_model("llama"), prompt("llama", batch_size=3)
    logits = []
    for each, cache in ((plain, dynamic_cache(plain.config)), (model, new_cache(model.config))):
        mask = inputs["attention_mask"]
        _step(each, cache, inputs["input_ids"], attention_mask=mask)
        mask = torch.cat([mask, mask.new_ones(3, 1)], 1)
        mask[1, 5] = 0
        found = []
        for _ in range(3):
            found.append(_step(each, cache, _tokens(1, 3), attention_mask=mask))
            mask = torch.cat([mask, mask.new_ones(3, 1)], 1)
        mask[1, 5] = 1
        cache.crop(-1)
        found.append(_step(each, cache, _tokens(1, 3), attention_mask=mask[:, :-1]))
        logits.append(torch.cat(found, 1))
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)
    assert 1 == capture.num_steps


@pytest.mark.parametrize("num_more", [0, 2])
def test_the_model_computes_steps_whose_mask_hides_more(
    num_more: int, captured: Captured, new_cache: NewCache
) -> None:
    """The first such step too, be it the last one; after the next prompt steps are captured."""
    model, capture = captured()
    logits = []
    for each, cache in (
        (tiny_model("llama"), dynamic_cache(model.config)),
        (model, new_cache(model.config)),
    ):
        mask = torch.ones(2, 9, dtype=torch.long)
        _step(each, cache, _tokens(5, 2), attention_mask=mask[:, :5])
        found = [_step(each, cache, _tokens(1, 2), attention_mask=mask[:, :6])]
        mask[0, 2:4] = mask[1, 0] = 0
        for end in range(7, 8 + num_more):
            found.append(_step(each, cache, _tokens(1, 2), attention_mask=mask[:, :end]))
        logits.append(torch.cat(found, 1))
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)
    assert 1 == capture.num_steps
    assert bool(num_more) == bool(capture.refusals)
    cache.reset()
    _step(model, cache, _tokens(5, 2))
    _step(model, cache, _tokens(1, 2))
    assert 2 == capture.num_steps


def test_steps_of_m_rope_are_captured_while_its_axes_are_alike(new_cache: NewCache) -> None:
    """As in text; the model computes others itself."""
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    config = transformers.Qwen2_5_VLConfig(
        text_config=tiny_shape(hidden_size=64, rope_scaling=rope, eos_token_id=2),
        vision_config={"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64},
        **dict.fromkeys(("image_token_id", "video_token_id", "vision_start_token_id"), 3),
    )
    model = transformers.Qwen2_5_VLForConditionalGeneration(config).eval()
    redraw_weights(model, 0)
    options = {"attention_mask": torch.ones(1, 5, dtype=torch.long), "do_sample": False}
    options |= {"max_new_tokens": 6, "eos_token_id": None}
    ids = torch.arange(5, 10)[None]
    plain, wanted = dynamic_cache(config), model.generate(ids, **options)
    with vmkv.capture_decoding(model) as capture:
        assert (
            wanted.tolist()
            == model.generate(ids, past_key_values=new_cache(config), **options).tolist()
        )
        assert 5 == capture.num_steps
        cache, logits = new_cache(config), []
        for each in (plain, cache):
            _step(model, each, ids)
            for axes in ([5, 5, 5], [6, 8, 7], [9, 9, 9]):
                positions = torch.tensor(axes).view(3, 1, 1)
                logits.append(_step(model, each, _tokens(1), position_ids=positions))
    torch.testing.assert_close(logits[:3], logits[3:], atol=1e-4, rtol=1e-4)
    assert 6 == capture.num_steps


@pytest.mark.parametrize(
    "asked",
    [
        {"output_hidden_states": True},
        {"output_attentions": True},
        {"labels": torch.tensor([[5]])},
        {"attention_mask": torch.zeros(1, 1, 1, 6)},
    ],
    ids=["hidden-states", "attentions", "labels", "mask"],
)
def test_steps_with_other_outputs_or_inputs_run_the_model(
    asked: dict[str, Any], captured: Captured, new_cache: NewCache
) -> None:
    """Hidden states, attentions, losses and 4-dimensional masks."""
    model, capture = captured()
    cache = new_cache(model.config)
    _step(model, cache, _tokens(5))
    with torch.no_grad():
        output = model(input_ids=_tokens(1), past_key_values=cache, use_cache=True, **asked)
    assert 0 == capture.num_steps
    assert 6 == cache.get_seq_length()
    name = {"output_hidden_states": "hidden_states", "output_attentions": "attentions"}
    for each in asked:
        assert getattr(output, name.get(each, "logits")) is not None
    cache.reset()  # transformers' hooks for such outputs stay in the model.
    _step(model, cache, _tokens(5))
    _step(model, cache, _tokens(1))
    assert 1 == capture.num_steps


def test_a_model_with_hooks_or_in_training_mode_is_not_captured(
    captured: Captured, new_cache: NewCache
) -> None:
    """Without the hook and in evaluation mode steps are captured again."""
    model, capture = captured()
    inputs, seen, cache = prompt("llama"), [], new_cache(model.config)
    generate(model, inputs, cache)
    assert NEW_TOKENS - 1 == capture.num_steps
    hook = model.model.layers[1].register_forward_hook(lambda *_: seen.append(1))
    cache.reset()
    generate(model, inputs, cache)
    assert NEW_TOKENS == len(seen)
    assert ["a captured step would leave out the forward hooks of its modules"] == capture.refusals
    hook.remove()
    model.train()
    cache.reset()
    generate(model, inputs, cache)
    assert NEW_TOKENS - 1 == capture.num_steps
    model.eval()
    cache.reset()
    generate(model, inputs, cache)
    assert 2 * (NEW_TOKENS - 1) == capture.num_steps


def test_a_model_whose_proof_fails_runs_eagerly_with_one_warning(
    captured: Captured, new_cache: NewCache, caplog: pytest.LogCaptureFixture
) -> None:
    """The tokens are right."""
    model, capture = captured()
    plain = copy.deepcopy(tiny_model("llama"))
    for each in (model, plain):
        layer = each.model.layers[1].mlp
        own = layer.forward
        # Mixes tokens of a batch.
        layer.forward = lambda hidden, own=own: own(hidden) + hidden.mean(1, keepdim=True)
    with caplog.at_level(logging.WARNING, "vmkv"):
        for _ in range(2):
            cache = new_cache(model.config)
            _check_tokens(model, prompt("llama", batch_size=2), cache, plain=plain)
    assert 1 == len([each for each in caplog.records if "captured" in each.getMessage()])
    assert 0 == capture.num_steps
    (reason,) = capture.refusals
    assert "packed batch" in reason


def test_batches_that_the_kernel_cannot_serve_run_the_model(
    captured: Captured,
    new_cache: NewCache,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A kernel without left padding serves unpadded batches only; one warning says so."""
    kernel = get("sdpa")
    monkeypatch.setattr(
        kernel, "why_not", lambda spec: "it knows no padding" if spec.left_pad else None
    )
    model, capture = captured()
    cache = new_cache(model.config, attention_backend="sdpa")
    for kind, num_steps in (("padded", 0), ("unpadded", NEW_TOKENS - 1), ("padded", 0)):
        cache.reset()
        before = capture.num_steps
        with caplog.at_level(logging.WARNING, "vmkv"):
            _check_tokens(model, INPUTS[kind](), cache)
        assert num_steps == capture.num_steps - before
    assert 1 == len([each for each in caplog.records if "captured" in each.getMessage()])


class _RenamesCache(transformers.LlamaForCausalLM):
    """A model of a release with another name for the cache; `kwargs` takes those before."""

    def forward(self, input_ids: Any = None, memory: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids, past_key_values=memory, **kwargs)


def test_models_that_cannot_be_captured_are_refused() -> None:
    """With a cache by an unknown name; an encoder-decoder, for which the error names its pair."""
    model = _RenamesCache(tiny_model("llama").config)
    with pytest.raises(ConfigError, match=r"_RenamesCache\.forward takes no cache by a name"):
        vmkv.capture_decoding(model)
    assert "forward" not in vars(model)
    with pytest.raises(ConfigError, match="for_encoder_decoder"):
        vmkv.capture_decoding(tiny_model("t5"))


# ---- synchronization --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["unpadded", "padded"])
def test_captured_steps_do_not_synchronize(
    kind: str,
    captured: Captured,
    new_cache: NewCache,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a mask in every step, which is read once. Operations inside a graph are not recorded."""
    step = BatchGraphs.step

    def unrecorded(*arguments: Any) -> None:
        with _disable_current_modes():
            step(*arguments)

    monkeypatch.setattr(BatchGraphs, "step", unrecorded)
    model, capture = captured()
    inputs = INPUTS[kind]()
    cache, mask = new_cache(model.config), inputs["attention_mask"]
    _step(model, cache, inputs["input_ids"], attention_mask=mask)
    for at in range(8):
        mask = torch.cat([mask, mask.new_ones(3, 1)], 1)
        token, positions = _tokens(1, 3), mask.sum(1, keepdim=True) - 1
        with recorded() as calls:
            _step(model, cache, token, attention_mask=mask, position_ids=positions)
        if at:
            assert not SYNCS & set(calls), calls
    assert 8 == capture.num_steps


# ---- close ------------------------------------------------------------------------------------


def test_close_restores_the_model(new_cache: NewCache) -> None:
    """A second `capture_decoding` before that returns the same object."""
    model = copy.deepcopy(tiny_model("llama"))
    cache = new_cache(model.config)
    with vmkv.capture_decoding(model) as capture:
        assert vmkv.capture_decoding(model) is capture
        _check_tokens(model, prompt("llama"), cache)
        num_steps = capture.num_steps
    assert "forward" not in vars(model)
    cache.reset()
    _check_tokens(model, prompt("llama"), cache)
    assert num_steps == capture.num_steps
    capture.close()


def test_a_cache_may_be_closed_or_dropped_before_the_capture(
    captured: Captured, new_cache: NewCache
) -> None:
    """A closed cache raises an error; the memory of a dropped one is freed by the next cache."""
    model, _ = captured()
    inputs = prompt("llama")
    cache = new_cache(model.config)
    generate(model, inputs, cache)
    cache.close()
    with pytest.raises(ClosedError):
        _step(model, cache, _tokens(1))

    pool = vmkv.ExtentPool(vmkv.HostBackend(4096), 1 << 24)
    dropped = VMKVCache(model.config, pool=pool)
    generate(model, inputs, dropped)
    assert pool.backend.usage().mapped_bytes > 0
    with pytest.warns(ResourceWarning):
        del dropped
    VMKVCache(model.config, pool=pool).close()
    pool.close()
    assert vmkv.BackendUsage() == pool.backend.usage()


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "file"]
)
def test_a_copied_model_has_no_captured_steps(
    copied: Callable[[Any], Any], captured: Captured, new_cache: NewCache
) -> None:
    """It computes with its own weights."""
    model, capture = captured()
    twin, inputs = copied(model), prompt("llama")
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(0.5)
    _check_tokens(twin, inputs, new_cache(twin.config), plain=twin)
    assert 0 == capture.num_steps
    said = [generate(each, inputs, new_cache(each.config)).tolist() for each in (twin, model)]
    assert said[0] != said[1]


def test_steps_are_captured_again_after_a_parameter_is_replaced(
    captured: Captured, new_cache: NewCache
) -> None:
    """With the next prompt."""
    model, _ = captured()
    inputs, cache = prompt("llama"), new_cache(model.config)
    generate(model, inputs, cache)
    known = model.forward._caches[cache].steps
    model.lm_head.weight.data = model.lm_head.weight.data * -1
    cache.reset()
    _check_tokens(model, inputs, cache, plain=model)
    assert known.is_closed


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_batch_may_grow_beyond_the_reserved_rows(name: str, new_cache: NewCache) -> None:
    """By copies of a live batch, and after a reset; captured steps follow the rows."""
    model, logits = copy.deepcopy(tiny_model(name)), []
    plain, cache = dynamic_cache(model.config), new_cache(model.config)
    with vmkv.capture_decoding(model) as capture:
        for each in (plain, cache):
            _step(model, each, _tokens(20, 90))
            _step(model, each, _tokens(1, 90), position_ids=torch.full((90, 1), 20))
            each.batch_repeat_interleave(3)
            logits.append(
                _step(model, each, _tokens(1, 270), position_ids=torch.full((270, 1), 21))
            )
        torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)
        assert 2 == capture.num_steps
        cache.reset()
        found = _step(model, cache, _tokens(5, 600))
    torch.testing.assert_close(
        _step(model, dynamic_cache(model.config), _tokens(5, 600)), found, atol=1e-4, rtol=1e-4
    )
    for core in cache._store.cores:
        core.check()
