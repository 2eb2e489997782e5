"""Moving a layer group whose token rows have gaps into one without.

Gaps arise where layers were expected to look like the first and did not: another device,
another shape. Their share of every page would be wasted for good; moving costs one copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from .layer_group import LayerGroup
from .transaction import Target


def without_gaps(
    group: LayerGroup,
    places: Sequence[int],
    lengths: Sequence[tuple[int, int, object]],
    grow: Callable[[list[Target], list[LayerGroup]], None],
) -> LayerGroup:
    """A group of only the layers at `places` of `group`, with their contents.

    Args:
        group: The group to copy from; the caller closes it.
        places: Which of its layers to keep, in order.
        lengths: `(row, num_tokens, tenant)` of each live sequence.
        grow: Maps targets in groups, all or nothing.

    Raises:
        OutOfPagesError, OutOfAddressSpaceError: Nothing changed.
    """
    geometry = replace(group.geometry, num_layers=len(places))
    scales = None if group.scales is None else [group.scales[at] for at in places]
    new = LayerGroup(group.pool, geometry, group.dtype, group.window_tokens, scales)
    first = {row: group.first_mapped_token(row, num_tokens) for row, num_tokens, _ in lengths}
    try:
        grow([Target(row, to, first[row], tenant) for row, to, tenant in lengths], [new])
    except BaseException:
        new.close()
        raise
    for row, num_tokens, _ in lengths:
        # The new row starts on another page boundary; both hold what is still needed.
        start = max(first[row], new.first_mapped_token(row, num_tokens))
        new.copy_row(row, slice(start, num_tokens), group, places)
    return new
