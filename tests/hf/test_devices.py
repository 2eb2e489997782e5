"""Layers of different shapes, and models spread over devices.

Several devices need several GPUs; layers of different shapes use the same code on one device.
"""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.tiny_models import dynamic_cache, tiny_config, tiny_model

from vmkv import VMKVCache


def _states(heads: int, width: int, num_tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(2, heads, num_tokens, width, generator=torch.Generator().manual_seed(seed))


def test_layers_of_other_shapes_get_groups_of_their_own_and_leave_no_gap() -> None:
    """The first group was laid out for all layers; after one pass it holds only its own."""
    config = tiny_config("llama")
    shapes = [(2, 8), (2, 8), (4, 16), (4, 16)][: config.num_hidden_layers]
    shapes[-1] = (4, 16)
    with VMKVCache(config, layers_per_group=99) as cache:
        expected = dynamic_cache(config)
        used_bytes = []
        for step, num_tokens in enumerate((40, 1, 1)):
            for layer, (heads, width) in enumerate(shapes):
                keys = _states(heads, width, num_tokens, 100 * step + layer)
                values = _states(heads, width, num_tokens, 200 * step + layer)
                ours = cache.update(keys, values, layer)
                theirs = expected.update(keys, values, layer)
                assert torch.equal(theirs[0], ours[0])
                assert torch.equal(theirs[1], ours[1])
            cache.check()
            used_bytes.append(cache.stats().used_bytes)
        floats = sum(heads * width for heads, width in shapes)
        assert used_bytes[-1] == 2 * 42 * 2 * 4 * floats
        assert used_bytes[0] > 2 * 40 * 2 * 4 * floats, "there was a gap to close"


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_model_spread_over_two_gpus_matches_dynamic_cache(name: str) -> None:
    """Each device has a cache, as large as its layers need."""
    from accelerate import dispatch_model

    model = copy.deepcopy(tiny_model(name, "sdpa"))
    num_layers = model.config.num_hidden_layers
    places = {"model.embed_tokens": 0, "model.norm": 1, "lm_head": 1, "model.rotary_emb": 0}
    places |= {f"model.layers.{at}": at * 2 // num_layers for at in range(num_layers)}
    model = dispatch_model(model, places)
    ids = torch.randint(3, 90, (3, 30), generator=torch.Generator().manual_seed(0)).to("cuda:0")
    options = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 20,
        "do_sample": False,
        "eos_token_id": None,
    }
    for extra in ({}, {"num_beams": 3}):
        expected = model.generate(
            ids, past_key_values=dynamic_cache(model.config), **options, **extra
        )
        with VMKVCache(model.config) as cache:
            actual = model.generate(ids, past_key_values=cache, **options, **extra)
            assert expected.tolist() == actual.tolist()
            cache.check()
            cores = {str(core.device): core for core in cache._store.cores}
            assert {"cuda:0", "cuda:1"} == set(cores)
            for core in cores.values():
                for group in core.groups:
                    members = [layer for layer in core.layers if core.place(layer)[0] is group]
                    assert len(members) == group.geometry.num_layers, "a gap was left"


def test_a_deep_copy_shares_rows_that_have_a_gap() -> None:
    """After one pass the first group still has the places of layers that turned out to differ."""
    config = tiny_config("llama")
    shapes = [(2, 8)] * (config.num_hidden_layers - 1) + [(4, 16)]
    with VMKVCache(config, layers_per_group=99) as cache:
        for layer, (heads, width) in enumerate(shapes):
            cache.update(*(_states(heads, width, 40, seed) for seed in (layer, 9 + layer)), layer)
        with copy.deepcopy(cache) as twin:
            before = [layer.keys.clone() for layer in cache.layers]
            for layer, (heads, width) in enumerate(shapes):
                assert torch.equal(before[layer], twin.layers[layer].keys)
                twin.update(*(_states(heads, width, 1, seed) for seed in (50, 60)), layer)
            twin.check()
            assert all(map(torch.equal, before, [layer.keys for layer in cache.layers]))
            assert 41 == twin.get_seq_length()
        cache.check()
