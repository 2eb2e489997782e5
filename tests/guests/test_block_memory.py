"""Blocks of other engines over mapped memory, with a broker on the host backend."""

from __future__ import annotations

import errno
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest
from helpers import waiting

from vmkv import BackendUsage, CapacityError, ConfigError, HostBackend
from vmkv.core.cache.device_memory import open_member_pool
from vmkv.core.memory import Broker, PoolMember, check_pool, shares
from vmkv.errors import HostDriverError
from vmkv.guests.block_memory import BlockMemory
from vmkv.units import KiB

PAGE = 4 * KiB
BUDGET_PAGES = 48
BLOCK_PAGES = 3  # Not a power of two: a block takes several extents.


@dataclass(eq=False)
class Block:
    """A block of the engine."""

    block_id: int
    num_users: int = 0


class FreeBlocks:
    """An engine's free list, the least recently freed first, as vLLM's."""

    def __init__(self, num_blocks: int):
        self.free = deque(Block(each) for each in range(num_blocks))
        self.free.popleft()  # Block 0 is never used.

    def get_num_free_blocks(self) -> int:
        """Count free blocks."""
        return len(self.free)

    def get_new_blocks(self, num_blocks: int) -> list[Block]:
        """Allocate."""
        its = [self.free.popleft() for _ in range(num_blocks)]
        for each in its:
            assert not each.num_users
            each.num_users = 1
        return its

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        """Free."""
        for each in ordered_blocks:
            each.num_users -= 1
            assert not each.num_users
            self.free.append(each)


class Guest:
    """An engine that writes a number into each of its requests' blocks, and finds it again."""

    def __init__(self, broker: Broker, floor_pages: int = BLOCK_PAGES):
        self.backend = HostBackend(PAGE)
        join = partial(PoolMember.join, broker.socket_path)
        floor_bytes = floor_pages * PAGE
        self.pool = open_member_pool(self.backend, join, name="guest", floor_bytes=floor_bytes)
        assert self.pool.member is not None
        block_bytes = BLOCK_PAGES * PAGE
        num_blocks = self.pool.member.most_bytes // block_bytes
        self.memory = BlockMemory(self.pool, num_blocks, block_bytes)
        self.data = self.memory.tensor().view(num_blocks, block_bytes)
        self.blocks = FreeBlocks(num_blocks)
        self.memory.take_over(self.blocks)
        self.wanted: list[int] = []
        self.running: list[tuple[int, list[Block]]] = []
        self.num_started = 0

    def step(self) -> None:
        """Start the waiting requests that fit, look at the running ones, follow the broker."""
        while self.wanted and self.wanted[0] <= self.blocks.get_num_free_blocks():
            its = self.blocks.get_new_blocks(self.wanted.pop(0))
            self.num_started += 1
            for each in its:
                self.data[each.block_id] = self.num_started % 251
            self.running.append((self.num_started % 251, its))
        for number, its in self.running:
            assert all((self.data[each.block_id] == number).all() for each in its)
        num_blocks = sum(self.wanted) + sum(len(its) for _, its in self.running)
        first = self.wanted[0] if self.wanted and not self.running else 0
        self.memory.balance(num_blocks, first)

    def finish(self, at: int = 0) -> None:
        """End a running request."""
        self.blocks.free_blocks(self.running.pop(at)[1])

    def close(self) -> None:
        """Leave, with nothing left of the backend."""
        del self.data
        self.memory.close()
        self.memory.close()
        assert not self.backend.usage().physical_bytes


def until(claim: Callable[[], bool], *guests: Guest) -> None:
    """Step guests until a claim holds."""

    def holds() -> bool:
        for each in guests:
            each.step()
        return claim()

    waiting.until(holds)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    """Open a broker, whose members have all left in the end."""
    with Broker(tmp_path / "pool.sock", BUDGET_PAGES * PAGE, page_bytes=PAGE) as made:
        yield made
        until(lambda: not made.members())


@pytest.fixture
def guest(broker: Broker) -> Iterator[Guest]:
    """Open a guest, closed in the end."""
    made = Guest(broker)
    yield made
    made.close()


def test_a_guest_starts_with_the_memory_of_one_block(guest: Guest) -> None:
    """Block 0, which engines read where a sequence has no block."""
    assert guest.blocks.get_num_free_blocks() == 0
    assert guest.memory.num_mapped == 1
    assert guest.backend.usage().physical_bytes == BLOCK_PAGES * PAGE
    guest.data[0] = 7


def test_memory_comes_with_requests_and_goes_once_they_have_ended(guest: Guest) -> None:
    """An idle guest comes down to its floor, while the engine goes on stepping it."""
    guest.wanted = [4, 5]
    until(lambda: not guest.wanted, guest)
    assert guest.memory.num_mapped >= 10
    guest.finish()
    guest.finish()
    assert guest.memory.is_above_floor
    until(lambda: not guest.memory.is_above_floor, guest)
    assert guest.memory.num_mapped == 1
    until(lambda: guest.backend.usage().physical_bytes == BLOCK_PAGES * PAGE, guest)


def test_a_floor_stays_with_an_idle_guest(broker: Broker) -> None:
    """What the broker has promised is not asked back."""
    guest = Guest(broker, floor_pages=5 * BLOCK_PAGES)
    guest.wanted = [10]
    until(lambda: not guest.wanted, guest)
    guest.finish()
    until(lambda: not guest.memory.is_above_floor, guest)
    assert guest.memory.num_mapped == 5
    guest.close()


def test_free_blocks_of_one_guest_go_to_another(broker: Broker) -> None:
    """Blocks of running requests stay."""
    one, other = Guest(broker), Guest(broker)
    one.wanted = [3, 9]
    until(lambda: not one.wanted, one, other)
    one.finish(1)
    other.wanted = [9]
    until(lambda: not other.wanted, one, other)
    assert one.memory.num_mapped < 9
    one.close()
    other.close()


def test_what_waits_for_running_requests_gets_their_memory(broker: Broker) -> None:
    """A guest cannot be made to preempt: the other waits until its request has ended."""
    one, other = Guest(broker), Guest(broker)
    one.wanted = [12]
    until(lambda: not one.wanted, one, other)
    other.wanted = [8]
    for _ in range(50):
        one.step()
        other.step()
    assert other.wanted
    one.finish()
    until(lambda: not other.wanted, one, other)
    one.close()
    other.close()


def test_a_guest_whose_broker_has_ended_keeps_what_it_has(tmp_path: Path) -> None:
    """And it need not step for orders that will not come."""
    with Broker(tmp_path / "pool.sock", BUDGET_PAGES * PAGE, page_bytes=PAGE) as broker:
        guest = Guest(broker)
        guest.wanted = [6]
        until(lambda: not guest.wanted, guest)
    until(lambda: not guest.memory.is_above_floor, guest)
    guest.finish()
    guest.wanted = [6]
    guest.step()
    assert not guest.wanted
    guest.close()


def test_the_engines_tensor_may_outlive_its_memory(broker: Broker) -> None:
    """As where the engine ends in another order; its addresses stay reserved."""
    guest = Guest(broker)
    data = guest.data
    guest.close()
    assert guest.backend.usage().reserved_bytes == data.numel()


def refused(*args: object, **options: object) -> NoReturn:
    """Fail as a driver without memory."""
    raise HostDriverError("mem_create", errno.ENOMEM, "ENOMEM", is_out_of_memory=True)


@pytest.mark.parametrize("has_memory", [True, False])
def test_a_guest_that_cannot_begin_leaves(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, has_memory: bool
) -> None:
    """Its block is no whole pages, and the message says what to change; or there is no memory."""
    backend = HostBackend(PAGE)
    pool = open_member_pool(backend, partial(PoolMember.join, broker.socket_path), name="guest")
    if has_memory:
        with pytest.raises(ConfigError, match="choose a block size"):
            BlockMemory(pool, 4, PAGE + 512)
    else:
        monkeypatch.setattr(backend, "mem_create", refused)
        with pytest.raises(CapacityError):
            BlockMemory(pool, 4, PAGE)
    assert backend.usage() == BackendUsage()


def test_a_device_without_memory_is_asked_again(
    guest: Guest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where torch has taken what the broker gave: the guest goes on with what it has."""
    guest.wanted = [4]
    with monkeypatch.context() as patch:
        patch.setattr(guest.backend, "mem_create", refused)
        until(lambda: guest.pool.budget_bytes >= 5 * BLOCK_PAGES * PAGE, guest)
        guest.step()
        assert guest.memory.num_mapped == 1
        assert guest.wanted
    until(lambda: not guest.wanted, guest)


def test_a_failing_fence_loses_no_block(guest: Guest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step fails, and a later one gives the memory back."""
    guest.wanted = [6]
    until(lambda: not guest.wanted, guest)
    guest.finish()
    num_free = guest.blocks.get_num_free_blocks()
    with monkeypatch.context() as patch:
        patch.setattr(guest.backend, "record_fence", refused)
        with pytest.raises(HostDriverError):
            until(lambda: False, guest)
    assert guest.blocks.get_num_free_blocks() == num_free
    until(lambda: guest.memory.num_mapped == 1, guest)


def test_random_play(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three guests whose requests come and go; nobody finds another's number, or none."""
    monkeypatch.setattr(shares, "IDLE_S", 0.005)
    source = random.Random(11)
    guests = [Guest(broker) for _ in range(3)]

    def play() -> bool:
        each = source.choice(guests)
        if source.random() < 0.4 and len(each.wanted) < 3:
            each.wanted.append(source.randint(1, 9))
        if each.running and source.random() < 0.5:
            each.finish(source.randrange(len(each.running)))
        each.step()
        with each.pool.lock:  # The member's thread changes the books, too.
            check_pool(each.pool)
        made = [each.backend.usage().physical_bytes for each in guests]
        assert sum(made) <= BUDGET_PAGES * PAGE
        return all(each.num_started >= 40 for each in guests)

    until(play)
    for each in guests:
        each.wanted.clear()
        while each.running:
            each.finish()
    until(lambda: not any(each.memory.is_above_floor for each in guests), *guests)
    for each in guests:
        each.close()
