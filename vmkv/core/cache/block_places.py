"""Places for blocks in the slabs of a tier, and the order in which blocks give way.

The books of host memory and of files. A slab holds blocks of one layer group. The tenant that has
the most blocks gives way: first blocks that are elsewhere too, then the least recently used ones,
last those that are kept for a time. A group takes the places of its own blocks, unless it has far
fewer slabs than its share of the places that were taken lately: then a slab of another group.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from ...errors import InternalError
from .layer_group import LayerGroup

#: A group with less than this part of its share takes slabs of others, with all blocks in them.
_SHARE_MIN = 0.75
#: The group and the hash of a block.
BlockKey = tuple[LayerGroup, bytes]


class Place(NamedTuple):
    """The `at`-th place of a slab. Each block has an object of its own, equal to earlier ones."""

    slab: int
    at: int


@dataclass(eq=False)
class Slab:
    """A slab in use: the group of its blocks, and the tenant of each.

    `num_pending` of its places are being filled.
    """

    group: LayerGroup
    num_places: int
    tenants: dict[BlockKey, bytes] = field(default_factory=dict)
    num_pending: int = 0


class _Order(NamedTuple):
    """Blocks of a tenant in the order in which they give way, one part after the other."""

    elsewhere: OrderedDict[BlockKey, None]
    only_here: OrderedDict[BlockKey, None]
    kept: OrderedDict[BlockKey, float]  # Until these times.

    @property
    def num_blocks(self) -> int:
        return len(self.elsewhere) + len(self.only_here) + len(self.kept)

    def remove(self, key: BlockKey) -> None:
        """Take a block out."""
        for part in self:
            part.pop(key, None)


class BlockPlaces:
    """The books of one tier. Guarded by its user.

    `make_slab` makes a slab for a group, and returns its number and its places; None where there is
    no room. `free_slab` makes room by a slab that is not in the books any more. `now_s` tells the
    time until which blocks are kept.
    """

    def __init__(
        self,
        make_slab: Callable[[LayerGroup], tuple[int, int] | None],
        free_slab: Callable[[int], None],
        now_s: Callable[[], float],
    ):
        self.blocks: dict[BlockKey, Place] = {}
        self.slabs: dict[int, Slab] = {}
        self._make_slab, self._free_slab, self._now_s = make_slab, free_slab, now_s
        self._orders: defaultdict[bytes, _Order] = defaultdict(
            lambda: _Order(OrderedDict(), OrderedDict(), OrderedDict())
        )
        self._free: defaultdict[LayerGroup, list[Place]] = defaultdict(list)
        self._num_slabs: Counter[LayerGroup] = Counter()
        #: Slabs of places that each group took; halved from time to time, so lately.
        self._taken_slabs: defaultdict[LayerGroup, float] = defaultdict(float)

    def take(self, group: LayerGroup, spared: Collection[BlockKey] = ()) -> Place | None:
        """Take a place for a block of `group`, then `add` the block or `give_back` the place.

        None if there is no room without those of `spared`.
        """
        free = self._free[group]
        while not free:
            made = self._make_slab(group)
            if made is not None:
                self.add_slab(*made, group)
                continue
            victim = self.next_to_go(spared)
            if victim is None:
                return None
            if victim[0] is not group and self._has_share(group):
                victim = self.next_to_go(spared, group) or victim
            place = self.blocks[victim]
            if victim[0] is group or self.slabs[place.slab].num_pending:
                self.drop(victim)
            else:
                self.drop_slab(place.slab)
                self._free_slab(place.slab)
        place = free.pop()
        slab = self.slabs[place.slab]
        slab.num_pending += 1
        self._taken_slabs[group] += 1 / slab.num_places
        if sum(self._taken_slabs.values()) > 2 * len(self.slabs):
            for each in self._taken_slabs:
                self._taken_slabs[each] /= 2
        return place

    def has_free(self, group: LayerGroup) -> bool:
        """Whether a slab of a group has a free place."""
        return bool(self._free[group])

    def _has_share(self, group: LayerGroup) -> bool:
        """Whether a group has its share of the slabs, by the places that were taken lately."""
        taken, num_slabs = self._taken_slabs, self._num_slabs[group]
        wanted = _SHARE_MIN * taken[group] * len(self.slabs)
        return num_slabs > 0 and num_slabs * sum(taken.values()) >= wanted

    def add(self, key: BlockKey, place: Place, tenant: bytes) -> None:
        """Enter a block, whose place was taken; it gives way last."""
        slab = self.slabs[place.slab]
        slab.num_pending -= 1
        slab.tenants[key] = tenant
        self.blocks[key] = place
        self._orders[tenant].only_here[key] = None

    def give_back(self, place: Place) -> None:
        """Give back a place that was taken; does nothing if its slab has gone."""
        slab = self.slabs.get(place.slab)
        if slab is not None:
            slab.num_pending -= 1
            self._free[slab.group].append(Place(*place))

    def drop(self, key: BlockKey) -> None:
        """Forget a block; its place is free."""
        place = self.blocks[key]
        self._forget(key, self.slabs[place.slab].tenants.pop(key))
        self._free[key[0]].append(Place(*place))

    def _forget(self, key: BlockKey, tenant: bytes) -> None:
        del self.blocks[key]
        order = self._orders[tenant]
        order.remove(key)
        if not order.num_blocks:
            del self._orders[tenant]

    # ---- order ----------------------------------------------------------------------------

    def tenant(self, key: BlockKey) -> bytes:
        """The tenant of a block."""
        return self.slabs[self.blocks[key].slab].tenants[key]

    def touch(self, key: BlockKey, *, is_elsewhere: bool = False) -> None:
        """Let a block give way last, of those that are elsewhere too or of those that are not."""
        order = self._orders[self.tenant(key)]
        order.remove(key)
        (order.elsewhere if is_elsewhere else order.only_here)[key] = None

    def keep(self, key: BlockKey, until_s: float) -> None:
        """Let a block give way after the tenant's others, until a time, or until it is touched."""
        order = self._orders[self.tenant(key)]
        order.remove(key)
        order.kept[key] = until_s

    def kept_until_s(self, key: BlockKey) -> float:
        """The time until which a block is kept; 0 for others."""
        return self._orders[self.tenant(key)].kept.get(key, 0.0)

    def note_elsewhere(self, key: BlockKey) -> None:
        """Note that a block is elsewhere too."""
        if key in self._orders[self.tenant(key)].only_here:
            self.touch(key, is_elsewhere=True)

    def touch_first(self, key: BlockKey) -> None:
        """Let a block that is elsewhere too give way before all others."""
        self.touch(key, is_elsewhere=True)
        self._orders[self.tenant(key)].elsewhere.move_to_end(key, last=False)

    def next_to_go(
        self, spared: Collection[BlockKey] = (), group: LayerGroup | None = None
    ) -> BlockKey | None:
        """Return the block that gives way next, of the tenant that has the most blocks.

        None of `spared`, and of `group` only if it is given.
        """
        if not self.blocks:
            return None
        most, now_s = max(self._orders.values(), key=lambda order: order.num_blocks), self._now_s()
        while most.kept and next(iter(most.kept.values())) <= now_s:
            key, _ = most.kept.popitem(last=False)
            most.only_here[key] = None
            most.only_here.move_to_end(key, last=False)
        left = (key for part in most for key in part if key not in spared)
        return next((key for key in left if group in (None, key[0])), None)

    # ---- slabs ----------------------------------------------------------------------------

    def add_slab(
        self, slab: int, num_places: int, group: LayerGroup, taken: Collection[int] = ()
    ) -> None:
        """Enter a slab for blocks of `group`, whose places are free but for those `taken`.

        The first free one is taken last.
        """
        self.slabs[slab] = Slab(group, num_places, num_pending=len(taken))
        self._num_slabs[group] += 1
        self._free[group] += [Place(slab, at) for at in range(num_places) if at not in taken]

    def drop_slab(self, slab: int) -> None:
        """Forget a slab with its blocks and its places."""
        its = self.slabs.pop(slab)
        self._num_slabs[its.group] -= 1
        for key, tenant in its.tenants.items():
            self._forget(key, tenant)
        self._free[its.group] = [each for each in self._free[its.group] if each.slab != slab]

    def clear(self) -> None:
        """Forget all slabs."""
        books = (self.blocks, self.slabs, self._orders, self._free)
        for each in (*books, self._num_slabs, self._taken_slabs):
            each.clear()

    def check(self) -> None:
        """Raise `InternalError` where the books disagree."""
        ordered = [key for order in self._orders.values() for part in order for key in part]
        listed = {key: at for at, slab in self.slabs.items() for key in slab.tenants}
        if not set(ordered) == listed.keys() == self.blocks.keys() or len(ordered) > len(listed):
            raise InternalError("blocks, their order and the lists of slabs disagree")
        if Counter(slab.group for slab in self.slabs.values()) != +self._num_slabs:
            raise InternalError("the slabs of a group were counted wrongly")
        used = [*self.blocks.values(), *(each for free in self._free.values() for each in free)]
        in_use = Counter(place.slab for place in used)
        for at, slab in self.slabs.items():
            if in_use.pop(at, 0) + slab.num_pending != slab.num_places:
                raise InternalError(f"slab {at} has lost or gained places")
        if in_use or len(set(used)) < len(used):
            raise InternalError("a place is used twice, or in a slab that has gone")
