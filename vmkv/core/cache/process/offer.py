"""An offer describes a prefix to another process as values that it can verify.

Extents are mapped whole, so a prefix is offered as far as extents of every layer group are full of
its tokens. The importer computes the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ....errors import ConfigError
from ....units import div_ceil, is_power_of_two
from ...backend import MemoryLocation
from ...memory import Mapping
from ..disk import Claims, check_groups, check_length, describe_groups
from ..layer_group import LayerGroup
from ..row_space import RowSpace

_EXTENTS_MAX = 1 << 20
_TOKEN_ID_MAX = (1 << 63) - 1


@dataclass(frozen=True)
class GroupOffer:
    """Extents of a layer group, gapless from `first_page` on; they hold `first_token` and later."""

    first_page: int
    sizes_bytes: Sequence[int]
    first_token: int


@dataclass(frozen=True)
class Offer:
    """A prefix that can be mapped elsewhere; `token_ids` are its first tokens, if known."""

    num_tokens: int
    token_ids: Sequence[int]
    groups: Sequence[GroupOffer]

    @property
    def num_extents(self) -> int:
        """The number of descriptors that go with the offer."""
        return sum(len(each.sizes_bytes) for each in self.groups)


# ---- exporting ----------------------------------------------------------------------------


def whole_extents(space: RowSpace, row: int, num_tokens: int) -> tuple[Offer, list[list[Mapping]]]:
    """Offer the first `num_tokens` tokens of a row, cut to whole extents. Changes nothing.

    Returns the offer, and per layer group its mappings. Raises `ConfigError` if no extent is whole,
    a sliding-window layer has lost tokens that the prefix sees, or memory cannot be shared.
    """
    covered = num_tokens
    for group in space.groups:
        if not group.keeps(row, num_tokens):
            raise _lacks_past(num_tokens)
        mappings = _whole(group, row, group.first_needed_page(num_tokens), num_tokens)
        end_page = mappings[-1].end_page if mappings else 0
        covered = min(covered, group.geometry.whole_tokens_below(end_page))
    if not covered or not space.groups:
        raise ConfigError(
            f"the first {num_tokens} tokens of row {row} do not fill an extent of every layer "
            "group, and only whole extents can be shared: export more tokens"
        )
    chosen, offers = [], []
    imported = set(map(id, space.pool.imported_extents()))
    for group in space.groups:
        end_page = group.geometry.pages_for(covered)
        mappings = [
            mapping
            for mapping in _whole(group, row, group.first_needed_page(covered), num_tokens)
            if mapping.first_page < end_page
        ]
        first_token = _first_token(group, row, mappings, covered)
        for mapping in mappings:
            if id(mapping.extent) in imported:
                raise ConfigError(
                    f"row {row} begins with extents that were imported; export them from the "
                    "process that they came from"
                )
            if mapping.extent.location is not MemoryLocation.DEVICE:
                raise ConfigError(f"some of row {row} is spilled to host memory; unspill() first")
        chosen.append(mappings)
        sizes_bytes = [mapping.extent.num_bytes for mapping in mappings]
        offers.append(GroupOffer(mappings[0].first_page, sizes_bytes, first_token))
    with space.pool.lock:
        token_ids = space.prefixes.token_ids(row)[:covered]
    return Offer(covered, token_ids, offers), chosen


def _whole(group: LayerGroup, row: int, first_page: int, num_tokens: int) -> list[Mapping]:
    end_page = group.geometry.whole_pages_below(num_tokens)
    mappings = group.table.overlapping(row, first_page, end_page)
    return [mapping for mapping in mappings if mapping.end_page <= end_page]


def _first_token(group: LayerGroup, row: int, mappings: Sequence[Mapping], num_tokens: int) -> int:
    needed_page = group.first_needed_page(num_tokens)
    first_token = group.first_kept_token(row, num_tokens)
    is_late = first_token > group.first_seen_token(num_tokens)
    if not mappings or mappings[0].first_page > needed_page or is_late:
        raise _lacks_past(num_tokens)
    return first_token


def _lacks_past(num_tokens: int) -> ConfigError:
    return ConfigError(
        f"cannot export {num_tokens} tokens: a sliding-window layer no longer holds what they "
        "would see (export earlier, or set keeps_past before appending)"
    )


def as_values(space: RowSpace, offer: Offer) -> dict[str, Any]:
    """Return the offer as JSON-serializable values, with the layout that an importer must match."""
    return {
        "backend": _kind(space),
        "page_bytes": space.pool.page_bytes,
        "layout": describe_groups(space),
        "num_tokens": offer.num_tokens,
        "token_ids": list(offer.token_ids),
        "groups": [asdict(each) for each in offer.groups],
    }


def _kind(space: RowSpace) -> str:
    return space.pool.backend.name.partition(":")[0]


# ---- importing ----------------------------------------------------------------------------


def checked(space: RowSpace, values: object, where: str) -> Offer:
    """Return the offer in `values`, or raise `ConfigError` if the cache cannot map it."""
    claims = Claims(values, where)
    if claims.text("backend") != _kind(space):
        raise ConfigError(
            f"{where} shares memory of {claims.text('backend')!r}, and this cache is on "
            f"{space.pool.backend.name}: both must be on the same device"
        )
    page_bytes = claims.integer("page_bytes", 1, 1 << 40)
    if page_bytes != space.pool.page_bytes:
        raise ConfigError(
            f"{where} has pages of {page_bytes} bytes, and this cache of {space.pool.page_bytes}: "
            "make both pools with the same page_bytes"
        )
    check_groups(space, [each.values for each in claims.claims("layout")], where)
    num_tokens = claims.integer("num_tokens", 1, 1 << 31)
    check_length(space, num_tokens, where)
    token_ids = claims.integers("token_ids", -_TOKEN_ID_MAX, _TOKEN_ID_MAX, at_most=num_tokens)
    groups = claims.claims("groups")
    if len(groups) != len(space.groups):
        raise ConfigError(f"{where} offers extents of {len(groups)} layer groups")
    offers = [
        _checked_group(space, group, each, num_tokens, where)
        for group, each in zip(space.groups, groups, strict=True)
    ]
    return Offer(num_tokens, token_ids, offers)


def _checked_group(
    space: RowSpace, group: LayerGroup, claims: Claims, num_tokens: int, where: str
) -> GroupOffer:
    page_bytes, row_pages = space.pool.page_bytes, group.table.row_pages
    first_page = claims.integer("first_page", 0, row_pages)
    first_token = claims.integer("first_token", 0, num_tokens)
    largest_bytes = page_bytes << space.pool.largest_class
    sizes_bytes = claims.integers("sizes_bytes", page_bytes, largest_bytes, at_most=_EXTENTS_MAX)
    are_extents = [
        not each % page_bytes and is_power_of_two(each // page_bytes) for each in sizes_bytes
    ]
    if not all(are_extents):
        raise ConfigError(f"{where} offers extents that are not 2^k pages of {page_bytes} bytes")
    end_page = first_page + sum(sizes_bytes) // page_bytes
    first_mapped = div_ceil(first_page * page_bytes, group.geometry.token_bytes)
    is_enough = (
        first_page <= group.first_needed_page(num_tokens)
        and first_mapped <= first_token <= group.first_seen_token(num_tokens)
        and group.geometry.pages_for(num_tokens) <= end_page <= row_pages
    )
    if not is_enough:
        raise ConfigError(
            f"{where} offers pages {first_page} to {end_page}, of which tokens from {first_token} "
            f"on; for {num_tokens} tokens this cache needs pages "
            f"{group.first_needed_page(num_tokens)} to {group.geometry.pages_for(num_tokens)}, "
            f"in rows of {row_pages}"
        )
    return GroupOffer(first_page, sizes_bytes, first_token)
