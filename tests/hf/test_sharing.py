"""A VMKVCache shares common memory of its batch entries and of its copies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.tiny_models import (
    assert_same_contents,
    dynamic_cache,
    forward,
    generate,
    prompt,
    tiny_config,
    tiny_model,
)

from vmkv import ConfigError

NewCache = Callable[..., Any]


def _append(caches: list[Any], num_tokens: int, *, batch_size: int, seed: int = 0) -> None:
    config = tiny_config("llama")
    generator = torch.Generator().manual_seed(seed)
    heads, dim = config.num_key_value_heads, config.head_dim
    for layer in range(config.num_hidden_layers):
        keys = torch.randn(batch_size, heads, num_tokens, dim, generator=generator)
        values = torch.randn(batch_size, heads, num_tokens, dim, generator=generator)
        for cache in caches:
            cache.update(keys, values, layer)


@pytest.mark.parametrize(("name", "num_beams"), [("llama", 4), ("gemma2", 2), ("mistral", 2)])
def test_beam_search_shares_extents_and_matches_dynamic_cache(
    name: str, num_beams: int, new_cache: NewCache
) -> None:
    """With long prompts, so that beams have whole extents in common."""
    model = tiny_model(name)
    inputs = prompt(name, batch_size=2)
    inputs["input_ids"] = inputs["input_ids"].repeat(1, 70)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    options = {"num_beams": num_beams, "max_new_tokens": 12}
    expected = generate(model, inputs, dynamic_cache(model.config), **options)
    cache = new_cache(model.config)
    assert expected.tolist() == generate(model, inputs, cache, **options).tolist()
    cache.check()
    # A model of sliding layers only has too few tokens to share extents.
    assert (cache.stats().sharing.aliased_bytes > 0) == (name != "mistral")


def test_reordering_to_one_beam_leaves_one_prompt(new_cache: NewCache) -> None:
    """As in the first step of a beam search: all rows become forks of the first."""
    cache, expected = new_cache(tiny_config("llama")), dynamic_cache(tiny_config("llama"))
    _append([cache, expected], 3200, batch_size=4)
    before = cache.stats()
    for each in (cache, expected):
        each.reorder_cache(torch.zeros(4, dtype=torch.long))
    cache._store.cores[0].pool.reclaimer.wait()
    after = cache.stats()
    assert after.resident_bytes <= 0.35 * before.resident_bytes
    calls = dict(after.driver_calls)
    for seed in range(5):
        _append([cache, expected], 1, batch_size=4, seed=seed)
        order = torch.randint(4, (4,), generator=torch.Generator().manual_seed(seed))
        for each in (cache, expected):
            each.reorder_cache(order)
        cache.check()
    assert calls["mem_unmap"] == cache.stats().driver_calls["mem_unmap"], "tails are copied"
    assert_same_contents(expected, cache)  # Reading copies what is shared.


def test_repeated_entries_are_forks(new_cache: NewCache) -> None:
    """Beams and `num_return_sequences` share the memory of one prompt."""
    cache, expected = new_cache(tiny_config("llama")), dynamic_cache(tiny_config("llama"))
    _append([cache, expected], 3200, batch_size=2)
    before = cache.stats()
    for each in (cache, expected):
        each.batch_repeat_interleave(3)
    assert cache.stats().resident_bytes < 1.35 * before.resident_bytes
    assert_same_contents(expected, cache)
    _append([cache, expected], 3, batch_size=6)
    assert_same_contents(expected, cache)


@torch.no_grad()
def test_a_prompt_cache_serves_many_continuations(new_cache: NewCache) -> None:
    """With one deepcopy for each, as transformers documents it."""
    model = tiny_model("llama")
    ids = torch.randint(5, 100, (1, 3000), generator=torch.Generator().manual_seed(1))
    cache = new_cache(model.config)
    forward(model, ids, cache)
    one = cache.stats().resident_bytes
    prompt_cache = dynamic_cache(model.config)
    forward(model, ids, prompt_cache)
    for seed in range(3):
        question = torch.randint(5, 100, (1, 4), generator=torch.Generator().manual_seed(seed))
        expected = forward(model, question, copy.deepcopy(prompt_cache))
        with copy.deepcopy(cache) as twin:
            assert torch.equal(expected, forward(model, question, twin))
            stats = twin.stats()
            assert stats.resident_bytes - stats.shared_bytes <= 1.1 * one
            assert twin.stats().sharing.copied_bytes < 0.2 * one


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_edits_in_place_stay_in_their_cache(name: str, new_cache: NewCache) -> None:
    """Also where memory was shared: between copies, and between entries that were repeated."""
    cache, expected = new_cache(tiny_config(name)), dynamic_cache(tiny_config(name))
    _append([cache, expected], 3200, batch_size=2)
    with copy.deepcopy(cache) as twin:
        assert twin.stats().sharing.aliased_bytes > 0
        pairs = [(cache, expected), (twin, copy.deepcopy(expected))]
        for factor, pair in enumerate(pairs, 2):
            for each in pair:
                each.batch_repeat_interleave(2)
                for layer in (layer for layer in each.layers if layer.is_initialized):
                    layer.keys[::2, :, -2].mul_(factor)
                    layer.values -= factor
        for ours, theirs in pairs:
            assert_same_contents(theirs, ours)
            ours.check()
    _append([cache, expected], 3, batch_size=4)
    assert_same_contents(expected, cache)
    assert cache.stats().sharing.copied_on_write_bytes > 0


@pytest.mark.parametrize("method", ["reorder_cache", "batch_select_indices"])
def test_one_layer_cannot_be_rearranged(method: str, new_cache: NewCache) -> None:
    """All layers of an entry are in one row; the error proposes the cache's method."""
    cache = new_cache(tiny_config("llama"))
    _append([cache], 8, batch_size=2)
    with pytest.raises(ConfigError, match="call them on the cache"):
        getattr(cache.layers[0], method)(torch.tensor([1, 0]))
    cache.check()
