"""What `vmkv plan` measures against transformers' own cache, for every family that can be built.

The measure comes from a pass without weights; the comparison adds up the tensors in the cache of
`generate` on the CPU. An engine may keep more of a token: see `test_plan_engine.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.families import UNBUILDABLE, causal_families, tiny_config, tiny_model

from vmkv import ConfigError
from vmkv.cli.capacity import AlikeLayers, kind_bytes, model_shape
from vmkv.cli.models import load_config
from vmkv.hf import compat, probe

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
#: One is shorter than every window of the tiny models, one is longer.
LENGTHS = (5, 40)
#: Families that are refused, with a part of the message. All others must be planned.
REFUSED = {
    "blt": "cannot tell the layers",
    "dory": "run without weights it fails",
    "deepseek_v4": "neither grows with every token nor stays",
    "falcon_mamba": "take no key-value cache",
    "gemma3n": "timm",
    "gemma4_assistant": "hidden_size_per_layer_input must be 0",
    "gemma4_unified_assistant": "different than the set of layer types|take no key-value cache",
    "mamba": "take no key-value cache",
    "mamba2": "take no key-value cache",
    "minimax": "uses cache of its own|take no key-value cache",
    "musicgen": "has an encoder",
    "musicgen_melody": "has an encoder",
    "openai-gpt": "take no key-value cache",
    "reformer": "take no key-value cache",
    "rwkv": "take no key-value cache",
    "xlm": "take no key-value cache",
    "xlnet": "take no key-value cache",
    "xlstm": "take no key-value cache",
}


_NOT_CACHED = (transformers.PretrainedConfig, torch.nn.Module)


def tensors(thing: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Every tensor with dimensions that an object holds, once, at any depth."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        if thing.ndim:
            yield thing
    elif isinstance(thing, dict):
        for each in thing.values():
            yield from tensors(each, seen)
    elif isinstance(thing, list | tuple):
        for each in thing:
            yield from tensors(each, seen)
    elif type(thing).__module__.startswith("transformers") and not isinstance(thing, _NOT_CACHED):
        yield from tensors(getattr(thing, "__dict__", {}), seen)


def cached_bytes(model_type: str, num_tokens: int) -> int:
    """The size of transformers' own cache after a text."""
    model = tiny_model(model_type)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 100, (1, num_tokens), generator=generator)
    with torch.no_grad():
        output = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=1,
            use_cache=True,
            do_sample=False,
            return_dict_in_generate=True,
        )
    cache = output.past_key_values
    compat.drop_shared_layers(cache)  # VMKVCache drops them, too.
    return sum(tensor.nbytes for tensor in tensors(cache, set()))


def planned_bytes(layers: list[probe.KeptLayer], num_tokens: int) -> int:
    """The measured size for a text of this length, before rounding up to pages."""
    total = sum(each.fixed_bytes for each in layers)
    for each in layers:
        if each.shape is not None:
            of_token = each.window_tokens, each.is_paged, each.extra_token_bytes
            kind = AlikeLayers(1, each.shape, *of_token)
            total += kind_bytes(kind, num_tokens).kept_tokens * kind.cached_token_bytes
    return total


def planned(model_type: str, folder: Path) -> list[probe.KeptLayer]:
    """The layers of a family that can be planned, from a config.json alone."""
    path = folder / "config.json"
    if model_type in UNBUILDABLE:
        path.write_text(json.dumps({"model_type": model_type}))
    else:
        tiny_config(model_type).to_json_file(path)
    config = load_config(str(path))
    model_shape(config, dtype="float32")  # Refuses what cannot be planned.
    return probe.kept_layers(probe.build_without_weights(config, torch.float32))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", causal_families())
def test_plan_is_what_transformers_caches(model_type: str, tmp_path: Path) -> None:
    """Byte for byte, within windows and beyond them; or the family is refused with a message."""
    if VERSION >= (5, 23) and model_type in REFUSED:
        with pytest.raises(ConfigError, match=REFUSED[model_type]) as refused:
            planned(model_type, tmp_path)
        assert "\n" not in str(refused.value)
        return
    try:
        layers = planned(model_type, tmp_path)
        tiny_model(model_type)
    except Exception as error:
        if VERSION >= (5, 23):
            raise
        pytest.skip(f"tiny configurations are of transformers 5.23; {type(error).__name__}")
    for num_tokens in LENGTHS:
        assert cached_bytes(model_type, num_tokens) == planned_bytes(layers, num_tokens), num_tokens
