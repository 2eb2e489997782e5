"""Thousands of sequences with forks and prefixes leave no memory or handles behind.

Growth is measured after a warm-up in which every cache and list reaches its size.
"""

from __future__ import annotations

import gc
import os
import random
import resource
from dataclasses import replace

import pytest
import torch
from helpers.caches import PAGE

from vmkv import BackendUsage, ExtentPool, HostBackend, KVCache
from vmkv.core.cache.forking import CostModel
from vmkv.core.memory import check_pool
from vmkv.units import MiB

NUM_SEQUENCES = 4_000
NUM_WARM_UP = 1_000
BUDGET_PAGES = 600
#: Measured in ten runs: 0.1 MiB. If each of 3,000 sequences leaked its object it would be 0.8 MiB,
#: its list of tokens 1.5, a tensor over it 2, a page 12.
_GROWTH_BYTES_MAX = 0.75 * MiB


def _resident_bytes() -> int:
    """Resident memory of this process, mapped files included."""
    with open("/proc/self/statm") as line:
        return int(line.read().split()[1]) * resource.getpagesize()


class _Churn:
    """Opens, continues, forks, truncates and closes random sequences, as a server does."""

    def __init__(self, cache: KVCache):
        self.cache = cache
        self.random = random.Random(8)
        self.systems = [[10_000 * at + i for i in range(48)] for at in range(3)]
        self.live: list[tuple[object, list[int]]] = []
        self.num_begun = 0
        self._next = 1_000_000

    def _fresh(self, num_tokens: int) -> list[int]:
        self._next += num_tokens
        return list(range(self._next - num_tokens, self._next))

    def _grow(self, sequence, said: list[int], new: list[int]) -> None:
        sequence.append(len(new))
        said += new
        sequence.keys(0)[-len(new) :] = torch.tensor([float(t % 9973) for t in new])[:, None, None]
        sequence.record(said[self.cache.prefixes.num_recorded(sequence.row) :])

    def begin(self) -> None:
        """Open a prompt that begins with one of three system prompts."""
        tenant = self.random.choice([None, "a"])
        prompt = self.random.choice(self.systems) + self._fresh(self.random.randint(1, 40))
        sequence = self.cache.open(len(prompt), prompt=prompt, tenant=tenant)
        said = prompt[: sequence.num_tokens]
        self._grow(sequence, said, prompt[sequence.num_tokens :])
        self.live.append((sequence, said))
        self.num_begun += 1

    def fork(self) -> None:
        sequence, said = self.random.choice(self.live)
        num_tokens = self.random.randint(0, len(said))
        fork, its = sequence.fork(num_tokens), said[:num_tokens]
        self._grow(fork, its, self._fresh(self.random.randint(1, 10)))
        self.live.append((fork, its))
        self.num_begun += 1

    def rewind(self) -> None:
        """Truncate a sequence, possibly into its shared part, and append to it."""
        sequence, said = self.random.choice(self.live)
        keep = self.random.randint(1, len(said))
        sequence.truncate(keep)
        del said[keep:]
        self._grow(sequence, said, self._fresh(3))

    def end(self) -> None:
        sequence, said = self.live.pop(self.random.randrange(len(self.live)))
        wanted = torch.tensor([float(token % 9973) for token in said])
        assert torch.equal(wanted, sequence.keys(0)[:, 0, 0])
        sequence.close()

    def run(self, num_sequences: int) -> None:
        """Play until `num_sequences` have begun in all, then close the live ones."""
        while self.num_begun < num_sequences:
            if len(self.live) >= 6:
                self.end()
            elif not self.live or self.random.random() < 0.6:
                self.begin()
            else:
                self.random.choice([self.fork, self.rewind])()
        while self.live:
            self.end()


@pytest.mark.slow
def test_nothing_grows_over_thousands_of_sequences() -> None:
    """Driver objects, descriptors, index entries and the process's memory do not grow."""
    backend = HostBackend(PAGE)
    pool = ExtentPool(backend, BUDGET_PAGES * PAGE, scrub="cross-tenant", close_when_unused=True)
    cost = CostModel(map_us=0, unmap_us=0)
    cache = KVCache(pool, max_tokens=160, max_sequences=16, layers_per_group=2, cost_model=cost)
    cache.add_layers(range(2), num_kv_heads=2, head_dim=32, dtype=torch.float32)
    churn = _Churn(cache)

    def settled() -> tuple[BackendUsage, int, int, int]:
        """Usage at rest: no live or parked rows, no free memory."""
        cache.check()
        cache.trim()
        gc.collect()
        index = cache.prefixes
        index_entries = len(index._tree.root.children) + len(index._contents)
        num_descriptors = len(os.listdir("/proc/self/fd"))
        return backend.usage(), num_descriptors, index_entries, _resident_bytes()

    churn.run(NUM_WARM_UP)
    usage, num_descriptors, index_entries, resident_bytes = settled()
    empty = BackendUsage(num_reservations=1, reserved_bytes=usage.reserved_bytes)
    assert (empty, 0) == (usage, index_entries)
    peaks = []
    for num_sequences in range(NUM_WARM_UP + 500, NUM_SEQUENCES + 1, 500):
        churn.run(num_sequences)
        peaks.append(backend.usage())
    after = settled()
    assert (usage, num_descriptors, 0) == after[:3]
    assert after[3] - resident_bytes < _GROWTH_BYTES_MAX
    # With parked rows: within the budget, and without a trend.
    assert max(each.physical_bytes for each in peaks) <= BUDGET_PAGES * PAGE
    assert max(each.num_mappings for each in peaks) <= 16 * 40
    assert {usage.num_reservations} == {each.num_reservations for each in peaks}
    stats = cache.stats()
    assert min(stats.num_prefix_hits, stats.sharing.num_forks) > 800
    assert min(stats.sharing.aliased_bytes, stats.sharing.copied_on_write_bytes) > 0
    check_pool(pool)
    cache.close()
    assert replace(usage, num_reservations=0, reserved_bytes=0) == backend.usage()
