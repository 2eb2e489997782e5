"""Moving a layer group whose token rows have gaps into one without.

Gaps arise where layers were expected to look like the first and did not: another device,
another shape. Their share of every page would be wasted for good; moving costs one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .growing import Target, map_rows
from .layer_group import LayerGroup
from .row_space import RowSpace


def without_gaps(space: RowSpace, group: LayerGroup, places: Sequence[int]) -> LayerGroup:
    """A group of only the layers at `places` of `group`, with what live rows hold of them.

    The caller closes the other.

    Raises:
        OutOfPagesError, OutOfAddressSpaceError: Nothing changed.
    """
    live = space.live.values()
    geometry = replace(group.geometry, num_layers=len(places))
    new = LayerGroup(group.pool, geometry, group.dtype, group.window_tokens)
    first = {each.row: group.first_mapped_token(each.row, each.num_tokens) for each in live}
    try:
        targets = [Target(each.row, each.num_tokens, first[each.row], each.tenant) for each in live]
        map_rows(space, targets, [new])
    except BaseException:
        new.close()
        raise
    for each in live:
        # The new row starts on another page boundary; both hold what is still needed.
        start = max(first[each.row], new.first_mapped_token(each.row, each.num_tokens))
        new.copy_row(each.row, slice(start, each.num_tokens), group, places)
    return new
