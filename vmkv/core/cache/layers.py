"""Layers are added, dropped, and compacted.

A layer that turns out to have another device or shape than expected is dropped and leaves a gap in
every token row. Compaction removes the gaps with one copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from ...errors import ConfigError
from ..interrupts import uninterrupted
from ..memory import asking_broker
from .fp8 import LayerScales, check_layer_scales
from .geometry import Geometry, LayerShape, check_positive
from .growing import Target, map_rows
from .layer_group import LayerGroup, split_layers
from .row_space import RowSpace
from .state_group import StateGroup, StateShape


@uninterrupted
def add_layers(
    space: RowSpace,
    layers: Iterable[int],
    *,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    v_head_dim: int | None = None,
    num_v_heads: int | None = None,
    window_tokens: int | None = None,
    num_past_tokens: int = 0,
    scales: Sequence[LayerScales] | None = None,
) -> list[LayerGroup]:
    """Add layers of one shape; returns the groups made for them.

    Open sequences get memory for the tokens they hold.

    Args:
        space: The cache.
        layers: The caller's numbers for them.
        num_kv_heads: Key heads, and value heads unless `num_v_heads` is given.
        head_dim: Width of a key head, and of a value head unless `v_head_dim` is given.
        dtype: Element type.
        v_head_dim: Width of a value head.
        num_v_heads: Value heads.
        window_tokens: For sliding-window layers, how many tokens a query sees.
        num_past_tokens: Position of the first query in open sequences: tokens before its window are
            not mapped.
        scales: One per layer, for `float8_e4m3fn`; see `fp8.py`. By default 1.

    Raises:
        ConfigError: A size is impossible, a layer was added before, or scales do not fit.
        OutOfPagesError, OutOfAddressSpaceError: No memory or addresses for them.
    """
    layers = list(layers)
    shape = LayerShape(
        num_k_heads=num_kv_heads,
        k_dim=head_dim,
        num_v_heads=num_kv_heads if num_v_heads is None else num_v_heads,
        v_dim=head_dim if v_head_dim is None else v_head_dim,
        itemsize_bytes=dtype.itemsize,
    )
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
        asking_broker(space.pool, partial(map_rows, space, targets, made))
    except BaseException:
        space.pool.reclaimer.close_soon(*(group.close_behind for group in made))
        raise
    space.groups += made
    space.places |= places
    return made


@uninterrupted
def add_states(space: RowSpace, shapes: Mapping[int, Sequence[StateShape]]) -> StateGroup:
    """Add layers with states of fixed size, before any sequence begins; returns their group.

    Args:
        space: The cache.
        shapes: For each layer, as the caller numbers them, the tensors of one sequence's state.

    Raises:
        ConfigError: There are states already, sequences are open, or a size is impossible.
        OutOfAddressSpaceError: No addresses for them.
    """
    space.check_open()
    if space.states is not None or space.live:
        raise ConfigError("states are added once, before any sequence is opened")
    group = StateGroup(space.pool, shapes, space.max_sequences)
    space.states = group
    space.groups.append(group)
    return group


@uninterrupted
def drop_layers(space: RowSpace, layers: Iterable[int]) -> None:
    """Forget layers that were never written; their bytes in the token row stay unused.

    Raises `ConfigError`, and forgets none, for a layer that was not added, and while a sequence is
    swapped out.
    """
    _check_resident(space, "dropping")
    for layer, group in [(layer, space.place(layer)[0]) for layer in dict.fromkeys(layers)]:
        del space.places[layer]
        if not space.members(group):
            space.groups.remove(group)
            space.pool.reclaimer.close_soon(group.close_behind)


@uninterrupted
def compact(space: RowSpace) -> bool:
    """Close the gaps that `drop_layers` left, by copying groups; returns whether any moved.

    Tensors made before keep pointing at the old memory: make new ones. Raises `ConfigError` while a
    sequence is swapped out, `OutOfPagesError` and `OutOfAddressSpaceError` without room for the
    copy.
    """
    _check_resident(space, "moving")
    moved: list[tuple[LayerGroup, LayerGroup]] = []
    try:
        for group in space.groups:
            places = [place for place, _ in space.members(group)]
            if len(places) < group.geometry.num_layers and not group.is_fixed:
                moved.append((group, _without_gaps(space, group, places)))
    except BaseException:
        space.pool.reclaimer.close_soon(*(new.close_behind for _, new in moved))
        raise
    for group, new in moved:
        layers = [layer for _, layer in space.members(group)]
        space.groups[space.groups.index(group)] = new
        space.places |= {layer: (new, place) for place, layer in enumerate(layers)}
    space.pool.reclaimer.close_soon(*(group.close_behind for group, _ in moved))
    return bool(moved)


def _check_resident(space: RowSpace, what: str) -> None:
    space.check_open()
    if not all(each.is_resident for each in space.live.values()):
        raise ConfigError(f"a sequence is swapped out; swap_in() before {what} layers")


def _without_gaps(space: RowSpace, group: LayerGroup, places: Sequence[int]) -> LayerGroup:
    """Make a group of only the layers at `places` of `group`, with the contents of live rows."""
    live = space.live.values()
    geometry = replace(group.geometry, num_layers=len(places))
    scales = None if group.scales is None else [group.scales[at] for at in places]
    new = LayerGroup(group.pool, geometry, group.dtype, group.window_tokens, scales)
    first = {each.row: group.first_mapped_token(each.row, each.num_tokens) for each in live}
    try:
        targets = [Target(each.row, each.num_tokens, first[each.row], each.tenant) for each in live]
        asking_broker(space.pool, partial(map_rows, space, targets, [new]))
        for each in live:
            # The new row starts on another page boundary; both rows hold all needed tokens.
            start = max(first[each.row], new.first_mapped_token(each.row, each.num_tokens))
            new.copy_row(each.row, slice(start, each.num_tokens), group, places)
    except BaseException:
        space.pool.reclaimer.close_soon(new.close_behind)
        raise
    return new
