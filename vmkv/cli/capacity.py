"""A model's memory, from its configuration, and the sequences that fit in it.

Sizes are those of `core.cache.geometry`, so they are what a `KVCache` maps (tests compare the two).
Layers in transformers' own tensors and states of fixed size count by their contents. Not counted:
windows kept while a prompt's chunk is computed, parked rows, which are evicted when memory is
short, and transformers' second copy of a layer while it appends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from ..core.cache.fp8 import FP8
from ..core.cache.geometry import Geometry, LayerShape, check_positive
from ..core.cache.layer_group import (
    UNDERREAD_TOKENS,
    growth_quantum_class,
    largest_class_for_window,
)
from ..errors import ConfigError
from ..hf import compat, probe
from ..hf.configuration import stated_max_tokens
from ..serve.parallel import sharding
from ..units import DTYPES, MiB, div_ceil

#: Page size: the driver's granularity on every NVIDIA GPU so far.
PAGE_BYTES = 2 * MiB
#: Class of the pool's largest extents: 64 MiB in pages of 2 MiB.
_LARGEST_CLASS = 5
#: Default block size of paged caches.
_BLOCK_TOKENS = 16

# ---- model ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AlikeLayers:
    """Layers that keep the same bytes of a token for the same time.

    `is_paged` is False for layers in transformers' tensors, which may keep `extra_token_bytes`
    more.
    """

    num_layers: int
    shape: LayerShape
    window_tokens: int | None
    is_paged: bool = True
    extra_token_bytes: int = 0

    @property
    def cached_token_bytes(self) -> int:
        """Bytes of a token in all of these layers in transformers' own cache."""
        shape = self.shape
        return self.num_layers * (shape.k_bytes + shape.v_bytes + self.extra_token_bytes)


@dataclass(frozen=True)
class ModelShape:
    """Properties of a model, or of one rank's part, that determine its capacity.

    `idle_layers` keep no keys and values; `state_bytes` of a sequence do not depend on its length;
    `weights_bytes` is None for quantized parameters, whose size is unknown.
    """

    name: str
    kinds: tuple[AlikeLayers, ...]
    idle_layers: int
    state_bytes: int
    max_context_tokens: int | None
    weights_bytes: int | None
    dtype: str


def model_shape(
    config: Any, *, dtype: str | None = None, kv_dtype: str = "auto", num_ranks: int = 1
) -> ModelShape:
    """Derive a model's memory from its configuration, in seconds and without memory for weights.

    `dtype` is by default the configuration's, or bfloat16; for `kv_dtype` see `VMKVCache`. Raises
    `ConfigError` for an encoder, no key-value cache, an unknown `dtype`, a model that transformers
    cannot build, or one that cannot be divided among `num_ranks`.
    """
    if config.is_encoder_decoder:
        raise ConfigError(
            f"a {config.model_type} model has an encoder, whose keys and values depend on its "
            "input; vmkv plan knows decoders only"
        )
    decoder = compat.text_config(config)
    named = dtype or getattr(decoder, "dtype", None) or getattr(config, "dtype", None)
    dtype_name = str(named or "bfloat16").removeprefix("torch.")
    if dtype_name not in DTYPES:
        raise ConfigError(f"dtype {dtype_name!r} is none of {', '.join(DTYPES)}")
    model = probe.build_without_weights(config, getattr(torch, dtype_name))
    weights_bytes, divisor = sum(each.nbytes for each in model.parameters()), 1
    if num_ranks > 1:
        plan = sharding.plan_of(model)
        sharding.check_heads(config, plan, num_ranks)
        weights_bytes = sharding.bytes_per_rank(model, plan, num_ranks)
        divisor = num_ranks if sharding.divides_heads(plan) else 1
    layers, kinds = probe.served_layers(model, kv_dtype), Counter[Any]()
    for each in layers:
        if each.shape is not None:
            stored = _stored(each.shape, divisor, is_fp8=kv_dtype == "fp8" and each.is_paged)
            kinds[stored, each.window_tokens, each.is_paged, each.extra_token_bytes] += 1
    ordered = sorted(kinds.items(), key=lambda item: (not item[0][2], item[0][1] or 0))
    is_quantized = getattr(model.config, "quantization_config", None) is not None
    return ModelShape(
        name=str(config.model_type),
        kinds=tuple(AlikeLayers(number, *kind) for kind, number in ordered),
        idle_layers=sum(layer.shape is None for layer in layers),
        state_bytes=sum(layer.fixed_bytes for layer in layers),
        max_context_tokens=stated_max_tokens(decoder),
        weights_bytes=None if is_quantized else weights_bytes,
        dtype=dtype_name if kv_dtype == "auto" else kv_dtype,
    )


def _stored(shape: LayerShape, divisor: int, *, is_fp8: bool) -> LayerShape:
    size_bytes = FP8.itemsize if is_fp8 else shape.itemsize_bytes
    # Every rank has all latents, which count as one head.
    heads = {
        name: max(1, getattr(shape, name) // divisor) for name in ("num_k_heads", "num_v_heads")
    }
    return replace(shape, itemsize_bytes=size_bytes, **heads)


# ---- sequences -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class KindBytes:
    """Memory of one kind of layers in one sequence, under several memory layouts.

    Attributes:
        kind: The layers.
        token_bytes: Bytes of a token in all of these layers.
        kept_tokens: Tokens inside the window.
        used_bytes: Bytes of the kept tokens.
        prompt_bytes: Bytes mapped after a prompt of that length.
        most_bytes: Most bytes mapped at that length during growth by single tokens.
        vmkv_bytes: Bytes mapped on average during growth.
        shared_bytes: Bytes of a shared common prefix.
        block_table_bytes: In blocks of 16 tokens with a block table.
        longest_bytes: In one tensor with room for the longest sequence.
    """

    kind: AlikeLayers
    token_bytes: int
    kept_tokens: int
    used_bytes: int
    prompt_bytes: int
    most_bytes: int
    vmkv_bytes: int
    shared_bytes: int
    block_table_bytes: int
    longest_bytes: int


def kind_bytes(
    kind: AlikeLayers, num_tokens: int, *, shared_tokens: int = 0, longest_tokens: int = 0
) -> KindBytes:
    """Compute the memory of one kind of layers in one sequence; `ConfigError` for no tokens."""
    check_positive("num_tokens", num_tokens)
    longest_tokens = max(longest_tokens, num_tokens)
    window = kind.window_tokens
    kept_tokens = num_tokens if window is None else min(num_tokens, window - 1)
    token_bytes = kind.cached_token_bytes
    prompt_bytes = most_bytes = kept_tokens * token_bytes
    shared_bytes = 0
    if kind.is_paged:
        geometry = Geometry(kind.num_layers, kind.shape, PAGE_BYTES, num_tokens, 1)
        token_bytes = geometry.token_bytes
        largest_class, first_page, lagging_pages = _LARGEST_CLASS, 0, 0
        if window is not None:
            largest_class = largest_class_for_window(geometry.pages_for(window), _LARGEST_CLASS)
            first_page = _first_page(geometry, window, num_tokens)
            # A growth retires the pages that the window had left behind before it.
            before = _first_page(geometry, window, num_tokens - 1)
            lagging_pages = first_page - before
            if before:  # An extent is freed once the window has passed it.
                lagging_pages += (1 << largest_class) - 1
        pages = geometry.pages_for(num_tokens) - first_page
        late_pages = (1 << growth_quantum_class(pages, largest_class)) - 1
        prompt_bytes = pages * PAGE_BYTES
        most_bytes = (pages + lagging_pages + late_pages) * PAGE_BYTES
        # A sequence as long as its window has left the prefix behind, so it is not shared.
        if window is None or num_tokens < window:
            # The last token is always computed, for its logits.
            shared_pages = geometry.whole_pages_below(min(shared_tokens, num_tokens - 1))
            shared_bytes = min(shared_pages, pages) * PAGE_BYTES
    blocks = div_ceil(num_tokens, _BLOCK_TOKENS)
    if window is not None:  # Blocks that the window has passed are freed.
        blocks = min(blocks, div_ceil(kept_tokens, _BLOCK_TOKENS) + 1)
    return KindBytes(
        kind,
        token_bytes,
        kept_tokens,
        used_bytes=kept_tokens * token_bytes,
        prompt_bytes=prompt_bytes,
        most_bytes=most_bytes,
        vmkv_bytes=(prompt_bytes + most_bytes) // 2,
        shared_bytes=shared_bytes,
        block_table_bytes=blocks * _BLOCK_TOKENS * token_bytes,
        longest_bytes=token_bytes * min(longest_tokens, window or longest_tokens),
    )


def _first_page(geometry: Geometry, window_tokens: int, num_tokens: int) -> int:
    first_seen = num_tokens - window_tokens + 1
    return geometry.whole_pages_below(max(0, first_seen - UNDERREAD_TOKENS))


def sequence_bytes(parts: list[KindBytes], *, state_bytes: int = 0) -> dict[str, int]:
    """Add up all kinds of layers, by the fields of `KindBytes`; `state_bytes` is never shared."""
    names = [each.name for each in fields(KindBytes)[3:]]
    total = {name: state_bytes + sum(getattr(part, name) for part in parts) for name in names}
    return total | {"shared_bytes": total["shared_bytes"] - state_bytes}


def fit(sequence: Mapping[str, int], budget_bytes: int, swap_bytes: int = 0) -> dict[str, int]:
    """Compute how many sequences fit `budget_bytes`, by memory layout.

    `vmkv_shared` maps the common prefix once; `vmkv_swapped` adds idle sequences in `swap_bytes`.
    """
    layouts = ("longest", "block_table", "vmkv")
    fits = {name: budget_bytes // sequence[f"{name}_bytes"] for name in layouts}
    own_bytes = max(1, sequence["vmkv_bytes"] - sequence["shared_bytes"])
    shared = max(0, budget_bytes - sequence["shared_bytes"]) // own_bytes
    return fits | {"vmkv_shared": shared, "vmkv_swapped": shared + swap_bytes // own_bytes}


def need_bytes(sequence: Mapping[str, int], num_users: int) -> int:
    """Compute the memory of `num_users` sequences that share their prefix."""
    shared_bytes = sequence["shared_bytes"]
    return shared_bytes + num_users * (sequence["vmkv_bytes"] - shared_bytes)
