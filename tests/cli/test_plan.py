"""The arithmetic of `vmkv plan` equals what a cache maps.

Not covered: models on the Hub (no network), and whether the reserve is right for a GPU.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from vmkv import ConfigError, ExtentPool, HostBackend, KVCache
from vmkv.cli.capacity import (
    AlikeLayers,
    fit,
    kind_bytes,
    model_shape,
    need_bytes,
    sequence_bytes,
)
from vmkv.cli.main import main
from vmkv.cli.models import load_config
from vmkv.core.cache.geometry import LayerShape
from vmkv.units import GiB, KiB, MiB

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "dtype": "bfloat16",
}
#: As published.
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "max_position_embeddings": 163840,
    "dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
#: Older versions of DynamicCache keep the expanded keys and values of latent attention.
CACHES_LATENTS = tuple(int(part) for part in transformers.__version__.split(".")[:2]) >= (5, 23)


@pytest.fixture(scope="module", autouse=True)
def one_pass_per_configuration() -> Iterator[None]:
    """Run each model without weights once, which takes a second."""
    known: dict[tuple[str, str], Any] = {}

    def shape(config: Any, **options: Any) -> Any:
        key = config.to_json_string(), str(options)
        return known.get(key) or known.setdefault(key, model_shape(config, **options))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vmkv.cli.capacity.model_shape", shape)
        yield


@pytest.fixture
def write(tmp_path: Path):
    """A function that writes a configuration and returns its path."""

    def write(config: dict[str, Any]) -> str:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        return str(path)

    return write


def planned(*arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit status and the record of `vmkv plan --json`."""
    out, err = io.StringIO(), io.StringIO()
    status = main(["plan", *arguments, "--json"], out, err)
    assert "" == err.getvalue()
    return status, json.loads(out.getvalue())


def mapped_bytes(kind: AlikeLayers, lengths: list[int]) -> list[int]:
    """What a cache maps for one sequence as it grows to each of `lengths`."""
    pool = ExtentPool(HostBackend(2 * MiB), 4 * GiB, close_when_unused=True)
    sizes = []
    with KVCache(
        pool, max_tokens=max(lengths), max_sequences=1, layers_per_group=kind.num_layers
    ) as cache:
        cache.add_layers(
            range(kind.num_layers),
            num_kv_heads=kind.shape.num_k_heads,
            head_dim=kind.shape.k_dim,
            dtype=torch.float16,
            window_tokens=kind.window_tokens,
        )
        sequence = cache.open()
        for length in lengths:
            cache.grow([(sequence, length)])
            sizes.append(cache.stats().resident_bytes)
    return sizes


@pytest.mark.parametrize("window", [None, 512, 3000])
@pytest.mark.parametrize("num_layers", [2, 24])
def test_plan_is_what_a_cache_maps(window: int | None, num_layers: int) -> None:
    """At each length of a growing sequence, the mapped bytes are within the planned bounds."""
    kind = AlikeLayers(num_layers, LayerShape(8, 128, 8, 128, 2), window)
    lengths = [*range(1, 6000)]
    for length, num_bytes in zip(lengths, mapped_bytes(kind, lengths), strict=True):
        part = kind_bytes(kind, length)
        assert part.prompt_bytes <= num_bytes <= part.most_bytes, length


@given(
    num_tokens=st.integers(1, 20000),
    num_layers=st.integers(1, 32),
    heads=st.integers(1, 8),
)
def test_a_prompt_maps_exactly_what_is_planned(
    num_tokens: int, num_layers: int, heads: int
) -> None:
    kind = AlikeLayers(num_layers, LayerShape(heads, 64, heads, 64, 2), None)
    assert [kind_bytes(kind, num_tokens).prompt_bytes] == mapped_bytes(kind, [num_tokens])


def test_llama_8b(write) -> None:
    """The well-known figures: 128 KiB a token, 16 tokens a page."""
    status, record = planned(
        write(LLAMA_8B), "--users", "40", "--context", "8k", "--device-memory", "80"
    )
    assert 0 == status
    (kind,) = record["kinds"]
    assert 128 * KiB == kind["token_bytes"]
    assert GiB == kind["used_bytes"] == record["sequence"]["block_table_bytes"]
    assert 16 * GiB == record["sequence"]["longest_bytes"]
    assert 8_030_261_248 * 2 == record["model"]["weights_bytes"]
    assert 80 * GiB - 8_030_261_248 * 2 - 4 * GiB == record["budget_bytes"]
    fits = record["fits"]
    assert fits["longest"] == 3
    assert 60 <= fits["vmkv"] <= fits["block_table"] == 61


def test_fp8_halves_the_cache(write) -> None:
    """64 KiB a token, 32 tokens a page; twice as many users, and unchanged weights."""
    line = [write(LLAMA_8B), "--users", "40", "--context", "8k", "--device-memory", "80"]
    wide, narrow = (planned(*line, *more)[1] for more in ([], ["--kv-dtype", "fp8"]))
    assert 64 * KiB == narrow["kinds"][0]["token_bytes"]
    assert "fp8" == narrow["model"]["dtype"]
    assert wide["model"]["weights_bytes"] == narrow["model"]["weights_bytes"]
    assert 2 * wide["fits"]["vmkv"] <= narrow["fits"]["vmkv"] <= 2 * wide["fits"]["vmkv"] + 2


def test_weights_are_counted_unless_they_are_quantized(write) -> None:
    """The size of quantized weights depends on the method."""
    small = {**LLAMA_8B, "num_hidden_layers": 1}
    assert 1_268_789_248 * 2 == model_shape(load_config(write(small))).weights_bytes
    quantized = {**small, "quantization_config": DEEPSEEK_V3["quantization_config"]}
    assert model_shape(load_config(write(quantized))).weights_bytes is None


def test_sharing_and_swapping_make_room(write) -> None:
    """A common prefix is mapped once; swapped sequences are in host memory."""
    path = write(LLAMA_8B)
    common = ("--context", "8k", "--device-memory", "80")
    _, alone = planned(path, *common)
    _, shared = planned(path, *common, "--share-prefix", "4096")
    _, swapped = planned(path, *common, "--share-prefix", "4096", "--swap", "64")
    assert GiB // 2 == shared["sequence"]["shared_bytes"]
    assert alone["fits"]["vmkv"] < shared["fits"]["vmkv_shared"] < swapped["fits"]["vmkv_swapped"]
    _, many = planned(path, *common, "--share-prefix", "4096", "--users", "10")
    own = many["sequence"]["vmkv_bytes"] - GiB // 2
    assert GiB // 2 + 10 * own == many["needed_bytes"]


@given(
    budget=st.integers(0, 200 * GiB), num_tokens=st.integers(1, 30000), shared=st.integers(0, 30000)
)
def test_the_number_that_fits_is_exact(budget: int, num_tokens: int, shared: int) -> None:
    """The sequences that fit need at most the budget, and one more needs more than the budget."""
    kind = AlikeLayers(32, LayerShape(8, 128, 8, 128, 2), None)
    part = kind_bytes(kind, num_tokens, shared_tokens=min(shared, num_tokens))
    sequence = sequence_bytes([part])
    number = fit(sequence, budget)["vmkv_shared"]
    assert not number or need_bytes(sequence, number) <= budget
    assert need_bytes(sequence, number + 1) > budget


def test_too_many_users_give_exit_status_1(write) -> None:
    """The text says how many users fit."""
    arguments = ["--users", "1000", "--context", "8k", "--device-memory", "80"]
    assert 1 == planned(write(LLAMA_8B), *arguments)[0]
    out = io.StringIO()
    assert 1 == main(["plan", write(LLAMA_8B), *arguments], out)
    assert "1,000 users do not fit, 60 do" in out.getvalue()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{tmp}/absent.json", "--context", "1k"], "there is no file"),
        (["{tmp}", "--context", "1k"], "holds no config.json"),
        (["{config}", "--context", "1k", "--share-prefix", "2k"], "longer than --context"),
        (["{config}", "--context", "1k", "--device-memory", "10"], "leave nothing of 10 GiB"),
        (["{int3}", "--context", "1k"], "'int3' is none of"),
        (["{t5}", "--context", "1k"], "has an encoder"),
        pytest.param(
            ["{states}", "--context", "1k"],
            "bamba models with this configuration take no key-value cache",
            marks=pytest.mark.skipif(not CACHES_LATENTS, reason="it has a cache of its own"),
        ),
        (["{endless}", "--context", "1k"], "has 1000000 layers; 1 to 10,000 are possible"),
        (
            ["{broken}", "--context", "1k"],
            "is no configuration that the installed",
        ),
    ],
)
def test_mistakes_give_a_one_line_error(
    complaint, write, tmp_path: Path, arguments: list[str], words: str
) -> None:
    config = write(LLAMA_8B)
    (tmp_path / "other").mkdir()
    broken = tmp_path / "broken.json"
    broken.write_text('{"model_type": "no such model"}')
    encoder = tmp_path / "t5.json"
    encoder.write_text('{"model_type": "t5", "is_encoder_decoder": true}')
    names = {"tmp": tmp_path / "other", "config": config, "broken": broken, "t5": encoder}
    for name, changed in (
        ("int3", {**LLAMA_8B, "dtype": "int3"}),
        ("endless", {**LLAMA_8B, "num_hidden_layers": 1_000_000}),
        ("states", {"model_type": "bamba", "num_hidden_layers": 1}),
    ):
        names[name] = tmp_path / f"{name}.json"
        names[name].write_text(json.dumps(changed))
    assert words in complaint("plan", *(each.format(**names) for each in arguments))


def test_lengths_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="num_tokens=0"):
        kind_bytes(AlikeLayers(1, LayerShape(1, 8, 1, 8, 2), None), 0)


def _plan_llama(tmp_path: Path, *options: str) -> tuple[dict[str, Any], str]:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    command = ["plan", str(tmp_path), "--context", "8k", "--device-memory", "80", *options]
    as_json, as_text = io.StringIO(), io.StringIO()
    assert 0 == main([*command, "--json"], as_json) == main(command, as_text)
    return json.loads(as_json.getvalue()), as_text.getvalue()


def test_a_rank_is_planned_with_its_part(tmp_path: Path) -> None:
    """With two ranks, each has half of the heads and of the weights."""
    whole, _ = _plan_llama(tmp_path)
    rank, text = _plan_llama(tmp_path, "--tensor-parallel", "2")
    assert whole["kinds"][0]["token_bytes"] == 2 * rank["kinds"][0]["token_bytes"]
    # Every rank has all norms.
    assert 0 <= 2 * rank["model"]["weights_bytes"] - whole["model"]["weights_bytes"] < MiB
    assert 2 * whole["fits"]["vmkv"] < rank["fits"]["vmkv"]
    assert "on each of 2 GPUs" in text


def test_a_plan_that_divides_a_head_is_refused(write) -> None:
    config = load_config(write(LLAMA_8B))
    with pytest.raises(ConfigError, match="8 key-value heads cannot be divided among 3"):
        model_shape(config, num_ranks=3)
