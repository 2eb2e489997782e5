"""Layers are added, dropped, and compacted.

A layer that turns out to have another device or shape than expected is dropped and leaves a gap in
every token row. Compaction removes the gaps with one copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from ...errors import ConfigError
from ...units import div_ceil
from .fp8 import LayerScales, check_layer_scales
from .geometry import Geometry, LayerShape, check_positive
from .growing import Target, map_rows
from .kv_group import KVGroup

if TYPE_CHECKING:
    from .kv_cache import KVCache


def split_layers(num_layers: int, layers_per_group: int | None) -> list[range]:
    """Divide `num_layers` layers into runs of at most `layers_per_group`, as even as possible."""
    if layers_per_group is None or layers_per_group >= num_layers:
        return [range(num_layers)]
    num_groups = div_ceil(num_layers, layers_per_group)
    bounds = [num_layers * at // num_groups for at in range(num_groups + 1)]
    return [range(start, end) for start, end in pairwise(bounds)]


def add_layers(
    cache: KVCache,
    layers: Sequence[int],
    shape: LayerShape,
    dtype: torch.dtype,
    window_tokens: int | None,
    num_past_tokens: int,
    scales: Sequence[LayerScales] | None,
) -> list[KVGroup]:
    """Implement `KVCache.add_layers`."""
    taken = [layer for layer in layers if layer in cache.places]
    if taken or not layers or len(set(layers)) != len(layers):
        raise ConfigError(f"layers {taken or layers} are in the cache already, or none is named")
    if window_tokens is not None:
        check_positive("window_tokens", window_tokens)
    if scales is not None:
        check_layer_scales(scales, layers, shape, dtype)
    made: list[KVGroup] = []
    places: dict[int, tuple[KVGroup, int]] = {}
    try:
        for members in split_layers(len(layers), cache.layers_per_group):
            geometry = Geometry(
                len(members), shape, cache.pool.page_bytes, cache.max_tokens, cache.max_sequences
            )
            theirs = None if scales is None else [scales[each] for each in members]
            made.append(KVGroup(cache.pool, geometry, dtype, window_tokens, theirs))
            places |= {layers[each]: (made[-1], at) for at, each in enumerate(members)}
        targets = [
            Target(each.row, each.num_tokens, num_past_tokens, each.tenant)
            for each in cache.live.values()
        ]
        cache.pool.asking_broker(partial(map_rows, cache, targets, made))
    except BaseException:
        cache.pool.reclaimer.close_soon(*(group.close_behind for group in made))
        raise
    cache.groups += made
    cache.places |= places
    return made


def drop_layers(cache: KVCache, layers: Iterable[int]) -> None:
    """Implement `KVCache.drop_layers`."""
    _check_resident(cache, "dropping")
    for layer, group in [(layer, cache.place(layer)[0]) for layer in dict.fromkeys(layers)]:
        del cache.places[layer]
        if not cache.members(group):
            cache.groups.remove(group)
            cache.pool.reclaimer.close_soon(group.close_behind)


def compact(cache: KVCache) -> bool:
    """Implement `KVCache.compact`."""
    _check_resident(cache, "moving")
    moved: list[tuple[KVGroup, KVGroup]] = []
    try:
        for group in cache.groups:
            places = [place for place, _ in cache.members(group)]
            if isinstance(group, KVGroup) and len(places) < group.geometry.num_layers:
                moved.append((group, _without_gaps(cache, group, places)))
    except BaseException:
        cache.pool.reclaimer.close_soon(*(new.close_behind for _, new in moved))
        raise
    for group, new in moved:
        layers = [layer for _, layer in cache.members(group)]
        cache.groups[cache.groups.index(group)] = new
        cache.places |= {layer: (new, place) for place, layer in enumerate(layers)}
    cache.pool.reclaimer.close_soon(*(group.close_behind for group, _ in moved))
    return bool(moved)


def _check_resident(cache: KVCache, what: str) -> None:
    cache.check_open()
    if not all(each.is_resident for each in cache.live.values()):
        raise ConfigError(f"a sequence is swapped out; swap_in() before {what} layers")


def _without_gaps(cache: KVCache, group: KVGroup, places: Sequence[int]) -> KVGroup:
    """Make a group of only the layers at `places` of `group`, with the contents of live rows."""
    live = cache.live.values()
    geometry = replace(group.geometry, num_layers=len(places))
    scales = None if group.scales is None else [group.scales[at] for at in places]
    new = KVGroup(group.pool, geometry, group.dtype, group.window_tokens, scales)
    first = {each.row: group.first_mapped_token(each.row, each.num_tokens) for each in live}
    try:
        targets = [Target(each.row, each.num_tokens, first[each.row], each.tenant) for each in live]
        cache.pool.asking_broker(partial(map_rows, cache, targets, [new]))
        for each in live:
            # The new row starts on another page boundary; both rows hold all needed tokens.
            start = max(first[each.row], new.first_mapped_token(each.row, each.num_tokens))
            new.copy_row(each.row, slice(start, each.num_tokens), group, places)
    except BaseException:
        cache.pool.reclaimer.close_soon(new.close_behind)
        raise
    return new
