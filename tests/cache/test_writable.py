"""How far a row may be written: `writable_tokens`, and the check of I10 at each submission."""

from __future__ import annotations

import pytest
from helpers.caches import PAGE, MakeCache
from helpers.stamps import append

from vmkv import ExtentPool, HostBackend, KVCache, Sequence
from vmkv.core.cache.forking import CostModel
from vmkv.core.cache.growing import surplus_bytes
from vmkv.errors import ConfigError, InternalError, OutOfPagesError


@pytest.fixture
def cache(make_cache: MakeCache) -> KVCache:
    """Four rows, four tokens in a page; all whole extents are aliased."""
    return make_cache(cost_model=CostModel(map_us=0, unmap_us=0), host_budget_bytes=64 * PAGE)


def _written(cache: KVCache, num_tokens: int) -> Sequence:
    sequence = cache.open()
    append(sequence, range(num_tokens))
    return sequence


def test_new_memory_is_writable_to_its_end(cache: KVCache) -> None:
    sequence = cache.open()
    assert 0 == sequence.writable_tokens
    sequence.append(5)
    assert 8 == sequence.writable_tokens
    calls = dict(cache.pool.backend.calls)
    sequence.append(3)
    assert calls == cache.pool.backend.calls
    sequence.append(1)
    assert sequence.writable_tokens >= 9


def test_writable_tokens_leave_the_over_read_mapped(cache: KVCache) -> None:
    sequence = _written(cache, 5)
    cache.keep_resident(6)
    assert 5 <= sequence.writable_tokens <= cache.groups[0].resident_tokens(sequence.row) - 6


def test_fork_is_writable_behind_its_shared_pages(cache: KVCache) -> None:
    parent = _written(cache, 9)
    fork = parent.fork()
    assert fork.writable_tokens >= 9
    assert parent.writable_tokens >= 9
    for each in (parent, fork):
        each.truncate(6)
        assert each.writable_tokens < 7, "the second page is shared"


def test_last_holder_of_a_page_may_write_after_its_next_append(cache: KVCache) -> None:
    """The page stays read-only when the other row is gone, until something is appended."""
    parent = _written(cache, 8)
    fork = parent.fork()
    fork.truncate(6)
    parent.close()
    cache.trim()
    assert fork.writable_tokens < 7
    fork.append(1)
    assert 8 == fork.writable_tokens


def test_adopted_row_is_not_writable_where_it_shares(cache: KVCache) -> None:
    parent = _written(cache, 12)
    parent.fork()
    row = parent.row
    parent.close()
    adopted = cache.open(row=row)
    assert 0 == adopted.writable_tokens
    append(adopted, range(12))
    assert adopted.writable_tokens >= 12
    cache.check()


def test_swapped_sequences_are_not_writable(cache: KVCache) -> None:
    sequence = _written(cache, 9)
    sequence.swap_out()
    assert 0 == sequence.writable_tokens
    sequence.swap_in()
    assert sequence.writable_tokens >= 9


def test_pages_beyond_the_length_go_to_another_row(make_cache: MakeCache) -> None:
    """A row that holds more than it needs does not make another row's growth fail."""
    cache = make_cache(budget_bytes=8 * PAGE)
    first = _written(cache, 28)
    first.truncate(1)
    assert 28 == first.writable_tokens
    assert 3 * PAGE == surplus_bytes(cache), "extents of two pages and of one, behind one of four"
    second = _written(cache, 16)
    assert 16 == first.writable_tokens
    with pytest.raises(OutOfPagesError):
        cache.grow([(first, 20), (second, 17)])
    assert (1, 16) == (first.num_tokens, second.num_tokens)
    cache.check()


def test_write_to_shared_or_unmapped_memory_is_refused_at_submission(cache: KVCache) -> None:
    parent = _written(cache, 9)
    fork = parent.fork()
    fork.append(2)
    submitted = []
    with cache.submitting([(fork.row, 9, 11)]):
        submitted.append("behind")
    for row, start, end in ((fork.row, 7, 9), (parent.row, 0, 1), (fork.row, 9, 400)):
        with pytest.raises(InternalError, match="I10"), cache.submitting([(row, start, end)]):
            submitted.append("shared, or not mapped")
    assert ["behind"] == submitted


def test_submitted_writes_stay_mapped_until_their_fence(host: HostBackend, cache: KVCache) -> None:
    sequence = _written(cache, 12)
    table = cache.groups[0].table
    host.hold_fences()
    with cache.submitting([(sequence.row, 0, 12)]):
        pass
    table.retire_back(sequence.row, 2, cache.pool.reclaimer.new_fence())
    cache.pool.submitted.check([table])  # Retired, and still there.
    retired = cache.pool.reclaimer.retired_mappings()
    cache.pool.reclaimer.retired_mappings = list  # type: ignore[method-assign]  # As if unmapped.
    with pytest.raises(InternalError, match="I10"):
        cache.pool.submitted.check([table])
    del cache.pool.reclaimer.retired_mappings
    assert retired == cache.pool.reclaimer.retired_mappings()
    sequence.truncate(4)
    host.pass_fences()
    cache.check()


def test_checks_can_be_switched_off(host: HostBackend, make_cache: MakeCache) -> None:
    pool = ExtentPool(host, 100 * PAGE, checks=False, close_when_unused=True)
    cache = make_cache(pool)
    with cache.submitting([(0, 0, 400)]):  # Not checked.
        pass
    with pytest.raises(ConfigError):
        cache.open(row=99)
