"""Layers are added, dropped, and compacted.

A layer that turns out to have another device or shape than expected is dropped and leaves a gap in
every token row. Compaction removes the gaps with one copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from ...errors import ConfigError
from .fp8 import LayerScales, check_layer_scales
from .geometry import Geometry, LayerShape, check_positive
from .growing import Target, map_rows
from .layer_group import LayerGroup, split_layers
from .row_space import RowSpace


def add_layers(
    space: RowSpace,
    layers: Sequence[int],
    shape: LayerShape,
    dtype: torch.dtype,
    window_tokens: int | None,
    num_past_tokens: int,
    scales: Sequence[LayerScales] | None,
) -> list[LayerGroup]:
    """Implement `KVCache.add_layers`."""
    space.check_open()
    taken = [layer for layer in layers if layer in space.places]
    if taken or not layers or len(set(layers)) != len(layers):
        raise ConfigError(f"layers {taken or layers} are in the cache already, or none is named")
    if window_tokens is not None:
        check_positive("window_tokens", window_tokens)
    if scales is not None:
        check_layer_scales(scales, layers, shape, dtype)
    made: list[LayerGroup] = []
    places: dict[int, tuple[LayerGroup, int]] = {}
    try:
        for members in split_layers(len(layers), space.layers_per_group):
            geometry = Geometry(
                len(members), shape, space.pool.page_bytes, space.max_tokens, space.max_sequences
            )
            theirs = None if scales is None else [scales[each] for each in members]
            made.append(LayerGroup(space.pool, geometry, dtype, window_tokens, theirs))
            places |= {layers[each]: (made[-1], at) for at, each in enumerate(members)}
        targets = [
            Target(each.row, each.num_tokens, num_past_tokens, each.tenant)
            for each in space.live.values()
        ]
        map_rows(space, targets, made)
    except BaseException:
        space.pool.closer.close_soon(*(group.close_behind for group in made))
        raise
    space.groups += made
    space.places |= places
    return made


def drop_layers(space: RowSpace, layers: Iterable[int]) -> None:
    """Implement `KVCache.drop_layers`."""
    space.check_open()
    for layer in layers:
        group, _ = space.place(layer)
        del space.places[layer]
        if not space.members(group):
            space.groups.remove(group)
            space.pool.closer.close_soon(group.close_behind)


def compact(space: RowSpace) -> bool:
    """Implement `KVCache.compact`."""
    space.check_open()
    if not all(each.is_resident for each in space.live.values()):
        raise ConfigError("a sequence is swapped out; swap_in() before moving layers")
    moved: list[tuple[LayerGroup, LayerGroup]] = []
    try:
        for group in space.groups:
            places = [place for place, _ in space.members(group)]
            if len(places) < group.geometry.num_layers:
                moved.append((group, _without_gaps(space, group, places)))
    except BaseException:
        space.pool.closer.close_soon(*(new.close_behind for _, new in moved))
        raise
    for group, new in moved:
        layers = [layer for _, layer in space.members(group)]
        space.groups[space.groups.index(group)] = new
        space.places |= {layer: (new, place) for place, layer in enumerate(layers)}
    space.pool.closer.close_soon(*(group.close_behind for group, _ in moved))
    return bool(moved)


def _without_gaps(space: RowSpace, group: LayerGroup, places: Sequence[int]) -> LayerGroup:
    """Make a group of only the layers at `places` of `group`, with the contents of live rows."""
    live = space.live.values()
    geometry = replace(group.geometry, num_layers=len(places))
    scales = None if group.scales is None else [group.scales[at] for at in places]
    new = LayerGroup(group.pool, geometry, group.dtype, group.window_tokens, scales)
    first = {each.row: group.first_mapped_token(each.row, each.num_tokens) for each in live}
    try:
        targets = [Target(each.row, each.num_tokens, first[each.row], each.tenant) for each in live]
        map_rows(space, targets, [new])
        for each in live:
            # The new row starts on another page boundary; both rows hold all needed tokens.
            start = max(first[each.row], new.first_mapped_token(each.row, each.num_tokens))
            new.copy_row(each.row, slice(start, each.num_tokens), group, places)
    except BaseException:
        space.pool.closer.close_soon(new.close_behind)
        raise
    return new
