"""Caches over one pool use its memory from several threads, each without harm to the others.

Forks between caches are tested in test_fork.py.
"""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from helpers.caches import ALIASES, PAGE, MakeCache
from helpers.stamps import append, assert_holds

from vmkv import ConfigError, ExtentPool, HostBackend, KVCache, OutOfPagesError, Sequence
from vmkv.core.cache import kv_cache
from vmkv.core.memory import PageTable, check_pool


@pytest.fixture
def pool(host: HostBackend) -> ExtentPool:
    """A pool of 64 device pages and 64 host pages."""
    return ExtentPool(host, 64 * PAGE, host_budget_bytes=64 * PAGE, close_when_unused=True)


def _say(cache: KVCache, tokens: range) -> Sequence:
    sequence = cache.open()
    append(sequence, tokens)
    sequence.record(tokens)
    return sequence


def _end(cache: KVCache, tokens: range) -> None:
    _say(cache, tokens).close()


# ---- many threads -------------------------------------------------------------------------

NUM_THREADS = 8


class _Worker:
    """One thread's cache, its sequences, and the stamps that each must hold."""

    def __init__(self, pool: ExtentPool, number: int):
        self.cache = KVCache(
            pool, max_tokens=120, max_sequences=6, layers_per_group=2, cost_model=ALIASES
        )
        self.cache.add_layers(range(2), num_kv_heads=2, head_dim=32, dtype=torch.float32)
        self.number = number
        self.random = random.Random(number)
        self.live: list[tuple[Sequence, list[int]]] = []
        self.num_refused = 0
        self.num_forks = 0
        self.num_hits = 0
        self._next = number * 100_000  # No other thread uses these stamps.

    def _fresh(self, num_tokens: int) -> list[int]:
        self._next += num_tokens
        return list(range(self._next - num_tokens, self._next))

    def open(self) -> None:
        """Open an empty sequence, or one whose prompt begins with a live sequence's tokens."""
        if self.live and self.random.random() < 0.5:
            _, said = self.random.choice(self.live)
            sequence = self.cache.open(prompt=[*said, 1])
            self.num_hits += sequence.num_cached_tokens > 0
            self.live.append((sequence, said[: sequence.num_tokens]))
        else:
            self.live.append((self.cache.open(), []))

    def append(self) -> None:
        sequence, stamps = self.random.choice(self.live)
        new = self._fresh(min(self.random.randint(1, 30), 120 - len(stamps)))
        sequence.append(len(new))
        stamps += new
        for at, layer in enumerate(self.cache.layers):
            for value, tensor in enumerate((sequence.keys(layer), sequence.values(layer))):
                fresh = torch.tensor(new, dtype=torch.float32) * 16 + 2 * at + value
                tensor[len(stamps) - len(new) :] = fresh[:, None, None]
        sequence.record(stamps[self.cache.prefixes.num_recorded(sequence.row) :])

    def fork(self) -> None:
        sequence, stamps = self.random.choice(self.live)
        num_tokens = self.random.randint(0, len(stamps))
        self.live.append((sequence.fork(num_tokens), stamps[:num_tokens]))
        self.num_forks += 1

    def truncate(self) -> None:
        sequence, stamps = self.random.choice(self.live)
        num_tokens = self.random.randint(0, len(stamps))
        sequence.truncate(num_tokens)
        del stamps[num_tokens:]

    def reorder(self) -> None:
        (first, its), (second, others) = (
            self.random.choice(self.live),
            self.random.choice(self.live),
        )
        if first is not second and len(its) == len(others):
            self.cache.reorder([first, second], [1, 0])
            its[:], others[:] = others[:], its[:]

    def close(self) -> None:
        sequence, _ = self.live.pop(self.random.randrange(len(self.live)))
        sequence.close()

    def run(self, num_steps: int, barrier: threading.Barrier) -> None:
        """Do random operations, and check all sequences after each."""
        barrier.wait()
        for _ in range(num_steps):
            steps = [self.append] * 4 + [self.fork, self.truncate, self.reorder, self.close]
            steps = [self.open, *steps] if len(self.live) < 5 else [self.append, self.close]
            step = self.random.choice(steps) if self.live else self.open
            try:
                step()
            except OutOfPagesError:
                self.num_refused += 1
                if self.live:
                    self.close()
            for sequence, stamps in self.live:
                assert_holds(sequence, stamps)
        while self.live:
            self.close()


@pytest.mark.parametrize("use", ["make", "stats", "check", "close", "compact"])
def test_parked_rows_are_read_under_the_pools_lock(
    pool: ExtentPool, make_cache: MakeCache, use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another cache's thread may evict them at any moment."""
    cache = make_cache(pool)
    _end(cache, range(64))
    was_held: list[bool] = []

    def watch(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def watched(*arguments: Any) -> Any:
            was_held.append(pool.lock._is_owned())
            return function(*arguments)

        monkeypatch.setattr(owner, name, watched)

    for owner, name in (
        (pool.pressure, "add_source"),
        (pool.pressure, "remove_source"),
        (PageTable, "retire_back"),
        (pool, "stats"),
        (kv_cache, "check_pool"),
    ):
        watch(owner, name)
    if use == "make":
        make_cache(pool)
    elif use == "stats":
        cache.stats()
    elif use == "check":
        cache.check()
    elif use == "close":
        cache.close()
    else:
        cache.drop_layers([0])
        cache.compact()
    assert was_held
    assert all(was_held)


@pytest.mark.slow
@pytest.mark.parametrize("budget_pages", [8 * 5 * 30 * 2, 300], ids=["plenty", "short"])
def test_threads_with_a_cache_each(host: HostBackend, budget_pages: int) -> None:
    """Eight threads on one pool read their own bytes; none is refused where memory is plenty."""
    pool = ExtentPool(host, budget_pages * PAGE, close_when_unused=True)
    workers = [_Worker(pool, number) for number in range(NUM_THREADS)]
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        barrier = threading.Barrier(NUM_THREADS)
        ends = [threads.submit(worker.run, 120, barrier) for worker in workers]
    for end in ends:
        end.result()
    assert all(worker.num_forks and worker.num_hits for worker in workers)
    if budget_pages > 1000:
        assert 0 == sum(worker.num_refused for worker in workers)
    for worker in workers:
        worker.cache.check()
    check_pool(pool)
    for worker in workers:
        worker.cache.close()


def test_budget_changes_under_way(host: HostBackend) -> None:
    """One thread moves the budget up and down while two others open, fork and close."""
    pool = ExtentPool(host, 400 * PAGE, close_when_unused=True)
    workers = [_Worker(pool, number) for number in range(2)]
    budgets = 0
    with ThreadPoolExecutor(2) as threads:
        barrier = threading.Barrier(3)
        ends = [threads.submit(worker.run, 120, barrier) for worker in workers]
        barrier.wait()
        while not all(end.done() for end in ends):
            try:
                pool.set_budget((60 + 40 * (budgets % 9)) * PAGE)
            except ConfigError:
                pass  # More than that is in use.
            budgets += 1
            stats = pool.stats()
            assert stats.created_bytes <= stats.budget_bytes
    for end in ends:
        end.result()
    check_pool(pool)
    for worker in workers:
        worker.cache.close()
