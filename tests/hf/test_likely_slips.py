"""Likely mistakes are refused in the caller's words; what is clear is served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tiny_models import VOCABULARY, tiny_config, tiny_model

import vmkv
from vmkv import ConfigError, SamplingParams
from vmkv.units import MiB

_OPTIONS: dict[str, Any] = {"budget_bytes": 64 * MiB}


@pytest.fixture
def model() -> Any:
    return tiny_model("llama")


def _engine(given: Any) -> Any:
    return vmkv.Engine(given, **_OPTIONS)


@pytest.mark.parametrize("given", ["/no/gpt2", Path("/no/gpt2"), tiny_config("llama"), None])
@pytest.mark.parametrize(
    "call",
    [
        _engine,
        lambda given: vmkv.generate(given, [[1, 2]], **_OPTIONS),
        lambda given: vmkv.capture_decoding(given),
    ],
    ids=["Engine", "generate", "capture_decoding"],
)
def test_what_is_no_model_is_refused(call: Callable[[Any], Any], given: Any) -> None:
    """The error names its type and how to get a model; an engine loads one by its name."""
    expected = f"model is a {type(given).__name__}, not a model.*from_pretrained"
    if isinstance(given, str | Path) and call is _engine:
        expected = "cannot load /no/gpt2: "
    with pytest.raises(ConfigError, match=expected):
        call(given)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"memory_fraction": 2.0}, "memory_fraction=2.0 is a share"),
        ({"memory_fraction": 0.0}, "memory_fraction=0.0 is a share"),
        ({"budget_bytes": 1 << 50}, "^budget_bytes of 1024 TiB is beyond the "),
        ({"host_budget_bytes": 1 << 50}, "host_budget_bytes of 1024 TiB is beyond the "),
    ],
)
def test_more_memory_than_there_is_is_refused(model: Any, options: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        vmkv.Engine(model, **{**_OPTIONS, **options})


def test_a_ragged_cache_in_model_generate_is_refused(model: Any) -> None:
    """By `generate` and by the model itself; the error names the right cache."""
    ids = torch.tensor([[5, 6, 7]])
    with vmkv.RaggedCache(model.config, **_OPTIONS) as cache:
        for call in (model, model.generate):
            with pytest.raises(ConfigError, match=r"=VMKVCache\(model.config\)"):
                call(input_ids=ids, past_key_values=cache)
        assert not hasattr(cache, "no_such_attribute")


@pytest.mark.parametrize(
    "prompt",
    [
        [np.int64(5), np.int32(6), 7],
        np.array([5, 6, 7]),
        torch.tensor([5, 6, 7]),
        list(torch.tensor([5, 6, 7])),
        (5, 6, 7),
    ],
    ids=["numpy integers", "array", "tensor", "torch integers", "tuple"],
)
def test_integers_of_other_libraries_are_tokens(prompt: Any, model: Any) -> None:
    """Alone and as a tensor, for `generate` and for an engine, beside those of Python."""
    ids = torch.tensor([[5, 6, 7]])
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)[0].tolist()
    options = {"max_new_tokens": 4, "do_sample": False, **_OPTIONS}
    assert [expected, expected] == vmkv.generate(model, [prompt, [5, 6, 7]], **options)
    with vmkv.Engine(model, **_OPTIONS) as engine:
        [output] = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=4))
    assert expected == [*output.prompt_token_ids, *output.outputs[0].token_ids]


@pytest.mark.parametrize(
    "token", [True, np.bool_(True), torch.tensor(True), np.float32(1), np.int64(VOCABULARY), None]
)
def test_what_is_no_integer_of_the_vocabulary_is_no_token(token: Any, model: Any) -> None:
    """Flags and floats are no tokens, whoever made them."""
    with pytest.raises(ConfigError, match="is no token of a vocabulary"):
        vmkv.generate(model, [[5, token]], **_OPTIONS)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["eager", "sdpa", "vmkv"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_compiled_forward_takes_a_cache(name: str, attention: str) -> None:
    """The compiler leaves out what it cannot trace: the cache, and attention in place."""
    model = tiny_model(name, attention, seed=3)
    compiled = torch.compile(model.forward, backend="eager")
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    with torch.no_grad(), vmkv.VMKVCache(model.config, **_OPTIONS) as cache:
        parts = [
            compiled(input_ids=part, past_key_values=cache, use_cache=True).logits
            for part in ids.split([4, 1, 1], dim=1)
        ]
        expected = model(ids, use_cache=False).logits
    torch.compiler.reset()
    torch.testing.assert_close(torch.cat(parts, 1), expected, atol=1e-5, rtol=1e-5)
