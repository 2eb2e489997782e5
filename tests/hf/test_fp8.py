"""FP8 keys and values behind transformers' cache: tokens, stored bytes and refusals.

The reference is transformers' own cache with numbers that torch has rounded to FP8. Kernels are in
`tests/attention`, real weights in `tests/real_weights`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny_models import (
    SERVED_LATELY,
    dynamic_cache,
    forward,
    generate,
    left_padded_prompt,
    prompt,
    tiny_config,
    tiny_model,
    unsupported_because,
)

import vmkv
from vmkv import ConfigError, Engine, HostBackend, KVScales, RaggedCache, SamplingParams, VMKVCache
from vmkv.core.cache.fp8 import FP8, LayerScales
from vmkv.hf.attention import vmkv_attention
from vmkv.units import KiB, MiB

FAMILIES = ("llama", "mistral", "gemma2", "gemma3", "gpt_oss", "deepseek_v3", *SERVED_LATELY)


def _cache(name: str, **options: Any) -> VMKVCache:
    options = {"kv_dtype": "fp8", "backend": HostBackend(4 * KiB), **options}
    return VMKVCache(tiny_config(name), **options)


def _rounded_cache(name: str, scales: KVScales | None = None) -> Any:
    """Transformers' cache, with keys and values rounded to FP8."""
    return _rounded(dynamic_cache(tiny_config(name)), scales)


def _rounded(cache: Any, scales: KVScales | None = None) -> Any:
    num_layers = len(cache.layers if scales is None else scales.layers)
    for index, layer in enumerate(cache.layers):
        if index == num_layers:
            break  # The others read another layer's keys.
        of_layer = None if scales is None else scales.layers[index]
        layer.update = _rounding(layer.update, of_layer)
    return cache


def _rounding(update: Callable[..., Any], scales: LayerScales | None) -> Callable[..., Any]:
    def rounded(keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        both = []
        for each, name in ((keys, "keys"), (values, "values")):
            by = torch.ones(1) if scales is None else torch.tensor(getattr(scales, name))
            by = by.view(-1, 1, 1)
            stored = (each * (1 / by)).clamp(-448, 448).to(torch.float8_e4m3fn)
            both.append(stored.to(each.dtype) * by)
        return update(*both, *args, **kwargs)

    return rounded


def _scales(name: str) -> KVScales:
    """Scales calibrated with a tiny model."""
    texts = [prompt(name, seed=seed)["input_ids"][0].tolist() for seed in (1, 2)]
    return vmkv.calibrate_kv_scales(tiny_model(name), texts)


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    """Disable gradients, which do not flow through rounded keys."""
    with torch.no_grad():
        yield


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    if reason := unsupported_because(request.param):
        pytest.skip(reason)
    return str(request.param)


# ---- tokens -------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["eager", "vmkv"])
@pytest.mark.parametrize("way", ["greedy", "padded", "beams"])
def test_tokens_match_a_cache_of_rounded_numbers(family: str, attention: str, way: str) -> None:
    """Greedy, padded and with beams; decoded by the cache, or read in place."""
    inputs = left_padded_prompt() if way == "padded" else prompt(family)
    options = {"num_beams": 3} if way == "beams" else {}
    expected = generate(tiny_model(family), inputs, _rounded_cache(family), **options)
    with _cache(family) as cache:
        tokens = generate(tiny_model(family, attention), inputs, cache, **options)
        assert {FP8} == {group.dtype for core in cache._store.cores for group in core.groups}
        cache.check()
    assert expected.tolist() == tokens.tolist()


def test_rounding_changes_the_logits() -> None:
    """Otherwise the tests above would pass without FP8."""
    tokens = prompt("llama", num_tokens=40)["input_ids"]
    with _cache("llama") as cache:
        rounded = forward(tiny_model("llama"), tokens, cache)
    exact = forward(tiny_model("llama"), tokens, dynamic_cache(tiny_config("llama")))
    assert 0.01 < (rounded - exact).abs().max() < 2


@pytest.mark.parametrize("attention", ["eager", "vmkv"])
def test_scales_are_applied(family: str, attention: str) -> None:
    """The scales of each head of each layer, to reads and writes."""
    scales, inputs = _scales(family), prompt(family, batch_size=2)
    expected = generate(tiny_model(family), inputs, _rounded_cache(family, scales))
    with _cache(family, kv_scales=scales) as cache:
        tokens = generate(tiny_model(family, attention), inputs, cache)
        cache.check()
    assert expected.tolist() == tokens.tolist()


def test_a_4d_mask_of_the_caller_is_applied() -> None:
    """No kernel reads rows with such a mask, so `"vmkv"` attention decodes them."""
    tokens = prompt("llama")["input_ids"]
    size = tokens.shape[1]
    mask = torch.ones(size, size, dtype=torch.bool).tril()
    mask[:, 3] = mask[:, 5] = False
    mask.fill_diagonal_(True)
    logits = []
    for model, cache in (
        (tiny_model("llama"), _rounded_cache("llama")),
        (tiny_model("llama", "vmkv"), _cache("llama")),
    ):
        bias = torch.zeros(size, size).masked_fill(~mask, torch.finfo(torch.float32).min)
        logits.append(forward(model, tokens, cache, bias[None, None]))
    torch.testing.assert_close(*logits)
    cache.close()


def test_fp8_keys_without_their_scales_are_refused() -> None:
    """Of models that change keys between the cache and attention; the error proposes "auto"."""
    keys = torch.zeros(1, 2, 5, 8).to(FP8)
    module = torch.nn.Module()
    with pytest.raises(ConfigError, match='leave kv_dtype at "auto"'):
        vmkv_attention(module, torch.zeros(1, 4, 1, 8), keys, keys, None)


def test_deep_copies_keep_dtype_and_scales() -> None:
    """A copy and its source give equal logits, and are independent."""
    model, inputs = tiny_model("llama", "vmkv"), prompt("llama")
    tokens, scales = inputs["input_ids"], _scales("llama")
    with _cache("llama", kv_scales=scales) as cache:
        forward(model, tokens, cache)
        with copy.deepcopy(cache) as twin:
            expected = forward(model, tokens[:, :1], cache)
            assert torch.equal(expected, forward(model, tokens[:, :1], twin))
            twin.check()
        cache.check()


@pytest.mark.parametrize("is_scaled", [False, True])
def test_all_interfaces_give_the_same_tokens(is_scaled: bool) -> None:
    """`generate`, ragged batches with and without a found prefix, and the engine in chunks."""
    model, config = tiny_model("llama"), tiny_config("llama")
    scales = _scales("llama") if is_scaled else None
    prompts = [prompt("llama", num_tokens=n, seed=n)["input_ids"][0].tolist() for n in (40, 7, 23)]
    options: dict[str, Any] = {"kv_dtype": "fp8", "kv_scales": scales}
    expected = [
        generate(model, {"input_ids": torch.tensor([each])}, _rounded_cache("llama", scales))
        for each in prompts
    ]
    wanted = [tokens[0].tolist() for tokens in expected]
    with RaggedCache(config, budget_bytes=16 * MiB, **options) as cache:
        for _ in range(2):
            outputs = vmkv.generate(model, prompts, cache=cache, max_new_tokens=12, do_sample=False)
            assert wanted == outputs
        assert cache.stats().num_prefix_hits
        cache.check()
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "budget_bytes": 16 * MiB}
    with Engine(model, **sizes, **options) as engine:
        for _ in range(2):
            said = [list(each.outputs[0].token_ids) for each in engine.generate(prompts, params)]
            assert wanted == [each + tokens for each, tokens in zip(prompts, said, strict=True)]
        assert engine.cache.stats().num_prefix_hits
        assert engine.cache.scales(0) is None or is_scaled
        engine.cache.check()


# ---- stored bytes -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "skipped", "wide"),
    [
        ("llama", [1], {1}),
        ("gemma2", "sliding", {0, 2}),
        ("gemma2", ["sliding", 1], {0, 1, 2}),
    ],
)
def test_skipped_layers_keep_the_models_dtype(name: str, skipped: Any, wide: set[int]) -> None:
    """Skipped by number or as sliding layers; the tokens are right."""
    inputs = prompt(name)
    reference = dynamic_cache(tiny_config(name))
    for index, layer in enumerate(reference.layers):
        if index not in wide:
            layer.update = _rounding(layer.update, None)
    expected = generate(tiny_model(name), inputs, reference)
    with _cache(name, skip_layers=skipped, layers_per_group=8) as cache:
        tokens = generate(tiny_model(name, "vmkv"), inputs, cache)
        core = cache._store.cores[0]
        assert wide == {at for at in core.layers if core.place(at)[0].dtype == torch.float32}
        cache.check()
    assert expected.tolist() == tokens.tolist()


def test_rows_take_a_quarter_of_float32() -> None:
    """The tiny models have 32-bit weights."""
    used = []
    for kv_dtype in ("auto", "fp8"):
        with _cache("llama", kv_dtype=kv_dtype) as cache:
            forward(tiny_model("llama"), prompt("llama", num_tokens=200)["input_ids"], cache)
            used.append(cache.stats().used_bytes)
    assert used[0] == 4 * used[1]


# ---- refusals -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_dtype": "fp8_e5m2"}, 'is none of "auto" and "fp8"'),
        ({"kv_dtype": "auto", "skip_layers": [0]}, "are for kv_dtype="),
        ({"kv_dtype": "auto", "kv_scales": "x.json"}, "are for kv_dtype="),
        ({"skip_layers": "wide"}, r"skip_layers names \['wide'\]"),
        ({"skip_layers": [-1]}, r"skip_layers names \[-1\]"),
        ({"skip_layers": [True]}, r"skip_layers names \[True\]"),
        (
            {"skip_layers": [0, 7]},
            r"skip_layers names \[7\]; .* layers \[0, 1\]",
        ),
        ({"kv_scales": KVScales("another", ())}, "scales are of another, and the model is llama"),
        ({"kv_scales": KVScales("llama", ())}, "scales are of 0 layers, and the model has 2"),
        (
            {"kv_scales": KVScales("llama", (LayerScales((1.0,) * 2, (1.0,) * 2),) * 4)},
            "scales are of 4 layers, and the model has 2",
        ),
    ],
)
@pytest.mark.parametrize("make", [VMKVCache, RaggedCache])
def test_invalid_arguments_are_refused(
    make: Callable[..., Any], options: dict[str, Any], message: str
) -> None:
    """Before anything is allocated."""
    with pytest.raises(ConfigError, match=message):
        make(tiny_config("llama"), **{"kv_dtype": "fp8", **options})


def test_engine_refuses_before_it_takes_memory() -> None:
    """Another engine can serve the model afterwards."""
    model = tiny_model("llama")
    with pytest.raises(ConfigError, match="is none of"):
        Engine(model, kv_dtype="int8", budget_bytes=MiB)
    with Engine(model, kv_dtype="fp8", budget_bytes=MiB, max_num_seqs=2, max_tokens=64):
        pass


def test_scales_that_do_not_fit_the_rows_are_refused() -> None:
    """At the first update, which shows the number of heads; the cache stays empty."""
    scales = KVScales("llama", (LayerScales((1.0,) * 3, (1.0,) * 3),) * 2)
    with _cache("llama", kv_scales=scales) as cache:
        with pytest.raises(ConfigError, match="layer 0 has 2 key and 2 value heads"):
            forward(tiny_model("llama"), prompt("llama")["input_ids"], cache)
        assert 0 == cache.get_seq_length()
        assert 0 == cache.stats().used_bytes


# ---- scales -------------------------------------------------------------------------------


def test_calibrated_scales_have_twice_the_measured_range() -> None:
    """Each head has its own scale; the past of sliding layers is included."""
    for name in ("llama", "gemma2"):
        scales, model = _scales(name), tiny_model(name)
        reach = [0.0] * len(scales.layers)
        cache = dynamic_cache(model.config)
        for index, layer in enumerate(cache.layers):
            layer.update = _watching(layer.update, reach, index)
        forward(model, prompt(name, seed=1)["input_ids"], cache)
        for seen, each in zip(reach, scales.layers, strict=True):
            assert seen <= 448 * max(each.keys) / 2 * 1.0001
        assert len({scale for each in scales.layers for scale in each.keys}) > 2


def _watching(update: Callable[..., Any], reach: list[float], index: int) -> Callable[..., Any]:
    def watched(keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        reach[index] = max(reach[index], keys.abs().max().item())
        return update(keys, values, *args, **kwargs)

    return watched


def test_calibration_needs_texts_and_numbers() -> None:
    """No texts, and keys that are NaN, are refused."""
    model = copy.deepcopy(tiny_model("llama"))
    with pytest.raises(ConfigError, match="pass some texts"):
        vmkv.calibrate_kv_scales(model, [])
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0, 0] = torch.nan
    with pytest.raises(ConfigError, match="reach nan"):
        vmkv.calibrate_kv_scales(model, [[1, 2, 3]])


def test_scales_are_saved_and_read(tmp_path: Path) -> None:
    """To the bit; a cache also takes the path of the file."""
    scales = _scales("llama")
    scales.save(tmp_path / "scales.json")
    assert scales == KVScales.load(tmp_path / "scales.json")
    with _cache("llama", kv_scales=tmp_path / "scales.json") as cache:
        forward(tiny_model("llama"), prompt("llama")["input_ids"], cache)
        layer = cache._store.cores[0].scales(1)
        assert layer is not None
        assert list(scales.layers[1].keys) == layer.keys.tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values.update(format="another"), "is of format 'another'"),
        (lambda values: values.update(version=2), "is of format 'vmkv kv scales', 2"),
        (lambda values: values.pop("layers"), "holds no scales"),
        (lambda values: values.update(layers=[{"keys": 3, "values": []}]), "holds no scales"),
        (lambda values: values["layers"][1]["keys"].__setitem__(0, 0), "of head 0 is 0;"),
        (lambda values: values["layers"][0]["values"].__setitem__(1, -2.5), "of head 1 is -2.5;"),
        (lambda values: values["layers"][0]["values"].__setitem__(1, float("nan")), "is nan;"),
        (lambda values: values["layers"][0]["values"].__setitem__(1, "2"), "is '2';"),
    ],
)
def test_files_with_invalid_scales_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    """The error has the path and what is wrong."""
    path = tmp_path / "scales.json"
    _scales("llama").save(path)
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=message) as error:
        VMKVCache(tiny_config("llama"), kv_dtype="fp8", kv_scales=path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff", b"[" * 100_000])
def test_files_without_scales_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "scales.json"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="holds no scales of keys and values"):
        KVScales.load(path)


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_cross_attention_keeps_the_models_dtype(name: str) -> None:
    """The model reads cross-attention keys itself; the keys of self-attention are FP8."""
    model = tiny_model(name)
    pair = VMKVCache.for_encoder_decoder(model.config, budget_bytes=64 * MiB, kv_dtype="fp8")
    with pair.self_attention_cache as own, pair.cross_attention_cache as cross:
        said = generate(model, prompt(name), pair)
        assert [FP8, torch.float32] == [each.layers[0].keys.dtype for each in (own, cross)]
        expected = dynamic_cache(model.config)
        _rounded(expected.self_attention_cache)
        assert generate(model, prompt(name), expected).tolist() == said.tolist()
