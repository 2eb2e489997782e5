"""The cache never waits for the device, and `update` copies only the new tokens.

On the CPU, tests record the operations that torch dispatches: reads of a value (`.item()`,
`nonzero`, `equal`, …) are among them. On a GPU, torch raises an error on synchronization.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.recorded import SYNCS, recorded
from helpers.tiny_models import dynamic_cache, forward, generate, prompt, tiny_config, tiny_model

from vmkv import VMKVCache

NewCache = Callable[..., Any]
HEADS, WIDTH = 2, 8
#: Operations that make views.
VIEWS = {"slice", "select", "unbind", "as_strided", "alias", "view", "detach"}
VIEWS |= {"unsqueeze", "transpose"}


def _append(cache: Any, keys: torch.Tensor) -> None:
    for index in range(len(cache.layers)):
        cache.update(keys, keys, index)


@pytest.mark.parametrize("layers_per_group", [1, 8])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_update_only_makes_views_and_copies_new_tokens(
    name: str, layers_per_group: int, new_cache: NewCache
) -> None:
    """In 200 decode steps, only the two copies per layer move data."""
    cache = new_cache(tiny_config(name), layers_per_group=layers_per_group)
    prefill, decode = torch.randn(2, HEADS, 50, WIDTH), torch.randn(2, HEADS, 1, WIDTH)
    with recorded() as calls:
        _append(cache, prefill)
        for _ in range(200):
            _append(cache, decode)
    num_copies = calls.pop("copy_")
    # No other copies or reads, such as cat, clone, index or item.
    assert set(calls) <= VIEWS, calls
    assert 201 * len(cache.layers) * 2 == num_copies


def test_update_makes_views_once_per_step_and_group(new_cache: NewCache) -> None:
    """The number of view calls of a step does not grow with the number of layers in a group."""
    cache = new_cache(tiny_config("llama"), layers_per_group=8)
    decode = torch.randn(1, HEADS, 1, WIDTH)
    _append(cache, decode)
    with recorded() as calls:
        _append(cache, decode)
    del calls["copy_"]
    assert sum(calls.values()) <= 16, calls


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize(
    "change",
    [
        lambda cache: cache.get_seq_length(),
        lambda cache: cache.crop(-1),
        lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
        lambda cache: cache.batch_select_indices(torch.tensor([1])),
        lambda cache: cache.batch_repeat_interleave(2),
        lambda cache: cache.reset(),
        lambda cache: cache.stats(),
        lambda cache: cache.trim(),
        lambda cache: cache.check(),
        lambda cache: cache.layers[0].keys,
    ],
    ids=[
        "length",
        "crop",
        "reorder",
        "select",
        "repeat",
        "reset",
        "stats",
        "trim",
        "check",
        "keys",
    ],
)
def test_cache_operations_do_not_synchronize(
    name: str, change: Callable[[Any], Any], new_cache: NewCache
) -> None:
    """Beam steps, rollback, batch changes and statistics read no value of the device."""
    cache = new_cache(tiny_config(name))
    with torch.no_grad():
        _append(cache, torch.randn(2, HEADS, 5, WIDTH))
    with recorded() as calls:
        change(cache)
    assert not SYNCS & set(calls), calls


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_a_model_synchronizes_no_more_than_with_dynamic_cache(
    name: str, attention: str, new_cache: NewCache
) -> None:
    """A decode step has two calls of cat fewer per layer and no additional reads."""
    model = tiny_model(name, attention)
    tokens = prompt(name, batch_size=2)["input_ids"]
    counts = []
    for cache in (dynamic_cache(model.config), new_cache(model.config)):
        with torch.no_grad():
            forward(model, tokens[:, :-1], cache)
        with recorded() as calls:
            forward(model, tokens[:, -1:], cache)
        counts.append(calls)
    theirs, ours = counts
    assert ours["cat"] == theirs["cat"] - 2 * len(model.model.layers)
    for sync in SYNCS:
        assert ours[sync] <= theirs[sync], sync


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_update_does_not_synchronise_the_gpu(name: str) -> None:
    """Decode steps, beam reorders and rollbacks, while torch forbids synchronization.

    The reorder gets its order on the host; it reads an order that is on the device.
    """
    with VMKVCache(tiny_config(name)) as cache, torch.no_grad():
        _append(cache, torch.randn(4, HEADS, 50, WIDTH, device="cuda"))
        decode = torch.randn(4, HEADS, 1, WIDTH, device="cuda")
        order = torch.tensor([3, 0, 0, 1])
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3000):
                _append(cache, decode)
            cache.reorder_cache(order)
            if name == "llama":
                cache.crop(-1)
            _append(cache, decode)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        cache.check()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_decode_step_of_a_model_does_not_synchronise_the_gpu() -> None:
    """A forward pass of the whole model, while torch forbids synchronization."""
    model = copy.deepcopy(tiny_model("llama", "sdpa")).cuda()
    tokens = prompt("llama")["input_ids"].cuda()
    with VMKVCache(model.config) as cache, torch.no_grad():
        options = {"past_key_values": cache, "use_cache": True, "attention_mask": None}
        model(tokens[:, :-1], **options)
        model(tokens[:, -1:], **options)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(200):
                model(tokens[:, -1:], **options)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("num_beams", [1, 4])
def test_generate_on_the_gpu_matches_dynamic_cache(name: str, num_beams: int) -> None:
    """With a cache made from the configuration only."""
    model = copy.deepcopy(tiny_model(name)).cuda()
    inputs = {key: value.cuda() for key, value in prompt(name, batch_size=2).items()}
    expected = generate(model, inputs, dynamic_cache(model.config), num_beams=num_beams)
    with VMKVCache(model.config) as cache:
        actual = generate(model, inputs, cache, num_beams=num_beams)
    assert expected.tolist() == actual.tolist()
