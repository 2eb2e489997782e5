"""Scrubbing: a sequence reads nothing that another tenant has left in its memory.

A sequence gets memory in two ways: by new mappings, and by adopting a parked row. The tests read
old bytes in tokens that were appended and not written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.caches import ALIASES, PAGE, MakeCache
from helpers.stamps import append, assert_holds

from vmkv import ExtentPool, HostBackend, KVCache, Sequence

SECRET = 777.0
MakeScrubbed = Callable[..., KVCache]


@pytest.fixture
def make_scrubbed(host: HostBackend, make_cache: MakeCache) -> MakeScrubbed:
    """Makes a cache whose pool scrubs in this mode."""

    def make(scrub: str, *, pages: int = 400) -> KVCache:
        pool = ExtentPool(host, pages * PAGE, scrub=scrub, close_when_unused=True)
        return make_cache(pool, cost_model=ALIASES)

    return make


def _write(sequence: Sequence, value: float = SECRET) -> None:
    for layer in sequence.cache.layers:
        sequence.keys(layer)[:] = value
        sequence.values(layer)[:] = value


def _leave_secret(cache: KVCache, tenant: str | None, num_tokens: int = 30) -> Sequence:
    """Fill a sequence of `tenant` with the secret, and close it."""
    sequence = cache.open(tenant=tenant)
    sequence.append(num_tokens)
    _write(sequence)
    sequence.close()
    return sequence


def _contents(sequence: Sequence) -> torch.Tensor:
    """All keys and values of a sequence."""
    return torch.stack(
        [
            tensor
            for layer in sequence.cache.layers
            for tensor in (sequence.keys(layer), sequence.values(layer))
        ]
    )


def _read_unwritten(cache: KVCache, way: str, tenant: str | None) -> torch.Tensor:
    """Contents of tokens that a new sequence has appended and not written."""
    if way == "mapped":
        for row in range(4):
            if row in cache.rows.parked:
                cache.rows.retire_parked(row)
        cache.pool.reclaimer.wait()
        created = cache.stats().driver_calls["mem_create"]
    sequence = cache.open(30, tenant=tenant)
    sequence.append(30)
    if way == "mapped":
        assert created == cache.stats().driver_calls["mem_create"], "memory was not recycled"
    found = _contents(sequence).clone()
    sequence.close()
    return found


WAYS = ["mapped", "adopted"]
STRANGERS = [("a", "b"), ("a", None), (None, "a")]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("scrub", "tenants", "reads_secret"),
    [
        ("never", ("a", "b"), True),  # So the others look in the right place.
        *((mode, its, False) for mode in ("cross-tenant", "always") for its in STRANGERS),
        ("cross-tenant", ("a", "a"), True),
        ("always", ("a", "a"), False),
    ],
)
def test_bytes_of_another_tenant_are_not_read(
    make_scrubbed: MakeScrubbed,
    scrub: str,
    tenants: tuple[str | None, str | None],
    reads_secret: bool,
    way: str,
) -> None:
    """No tenant, None, is a tenant like any other; `always` scrubs for the same one too."""
    cache = make_scrubbed(scrub)
    _leave_secret(cache, tenants[0])
    found = _read_unwritten(cache, way, tenants[1])
    assert (found == SECRET).any() if reads_secret else not found.any()


@pytest.mark.parametrize("way", WAYS)
def test_third_tenant_does_not_read_the_first(make_scrubbed: MakeScrubbed, way: str) -> None:
    """Memory belongs to the tenant that it was scrubbed for, even if that tenant writes nothing."""
    cache = make_scrubbed("cross-tenant")
    _leave_secret(cache, "a")
    assert not _read_unwritten(cache, way, "b").any()
    assert not _read_unwritten(cache, way, "a").any()
    _leave_secret(cache, "a")
    assert not _read_unwritten(cache, way, "c").any()


@pytest.mark.parametrize("way", WAYS)
def test_poison_is_nan(make_scrubbed: MakeScrubbed, way: str) -> None:
    """Both recycled and new memory are filled."""
    cache = make_scrubbed("poison")
    first = cache.open()
    first.append(30)
    assert _contents(first).isnan().all()
    _write(first)
    first.close()
    assert _read_unwritten(cache, way, None).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_memory_of_another_type_is_zeroed(host: HostBackend, dtype: torch.dtype) -> None:
    """Its bytes may be NaN in the new type, so every mode zeroes it; of the same type it stays."""
    pool = ExtentPool(host, 100 * PAGE)
    for its_dtype in (torch.float16, dtype):
        created = pool.backend.calls["mem_create"]
        with KVCache(pool, max_tokens=50, max_sequences=1) as cache:
            cache.add_layers([0], num_kv_heads=2, head_dim=32, dtype=its_dtype)
            sequence = cache.open()
            sequence.append(20)
            found = _contents(sequence).clone()
            _write(sequence)
    assert created == pool.backend.calls["mem_create"], "memory was not recycled"
    assert bool(found.any()) == (dtype is torch.float16)
    pool.close()


# ---- shared and copied memory -------------------------------------------------------------


@pytest.mark.parametrize("scrub", ["cross-tenant", "always"])
@pytest.mark.parametrize("adopted", ["source", "fork"])
@pytest.mark.parametrize("when", ["before", "after", "in between"])
def test_adopted_row_with_shared_extents_is_scrubbed(
    make_scrubbed: MakeScrubbed, scrub: str, adopted: str, when: str
) -> None:
    """Read-only memory cannot be scrubbed when it is adopted; it is when it becomes writable.

    The other holder ends before the adoption, after the new sequence has grown, or between the two,
    when the shared extents become the new sequence's alone.
    """
    cache = make_scrubbed(scrub)
    source = cache.open(tenant="a")
    source.append(32)
    _write(source)
    fork = source.fork()
    mine, other = (source, fork) if adopted == "source" else (fork, source)

    def end_other() -> None:
        other.close()
        cache.rows.retire_parked(other.row)
        cache.pool.reclaimer.wait()

    mine.close()
    if when == "before":
        end_other()
    stranger = cache.open(row=mine.row, tenant="b")
    if when == "in between":
        end_other()
    stranger.append(32)
    cache.check()
    assert not _contents(stranger).any()
    if when == "after":
        assert (_contents(other) == SECRET).all()


def _fork_a_tail(cache: KVCache) -> list[tuple[Sequence, int]]:
    source = cache.open(tenant="b")
    append(source, range(16))
    append(source, range(16, 18))
    fork = source.fork()
    fork.append(2)
    assert_holds(source, range(18))
    return [(fork, 18)]


def _write_into_a_fork(cache: KVCache) -> list[tuple[Sequence, int]]:
    source = cache.open(tenant="b")
    append(source, range(64))
    fork = source.fork()
    fork.truncate(6)
    fork.append(6)
    return [(fork, 6)]


def _reorder_beams(cache: KVCache) -> list[tuple[Sequence, int]]:
    beams = [cache.open(tenant="b") for _ in range(3)]
    for beam in beams:
        append(beam, range(66))
    cache.reorder(beams, [1, 2, 0])
    cache.grow([(beam, 100) for beam in beams])
    return [(beam, 66) for beam in beams]


@pytest.mark.parametrize(
    ("copy", "num_tokens", "pages"),
    [(_fork_a_tail, 4, 20), (_write_into_a_fork, 8, 400), (_reorder_beams, 100, 400)],
    ids=["tail of a fork", "copy-on-write", "reordered beams"],
)
def test_memory_behind_copied_tokens_is_scrubbed(
    make_scrubbed: MakeScrubbed, copy: Callable[..., Any], num_tokens: int, pages: int
) -> None:
    """The copy is made in memory that has held another tenant's tokens."""
    cache = make_scrubbed("cross-tenant", pages=pages)
    _leave_secret(cache, "a", num_tokens)
    cache.rows.retire_parked(0)
    cache.pool.reclaimer.wait()
    for sequence, num_kept in copy(cache):
        assert not _contents(sequence)[:, num_kept:].any()
        kept = (sequence.keys(0)[:num_kept, 0, 0] / 16).tolist()
        assert list(range(num_kept)) == kept


def test_prefix_hit_of_the_same_tenant_is_not_scrubbed(make_scrubbed: MakeScrubbed) -> None:
    """The tokens behind the prefix are scrubbed in mode `always`."""
    cache = make_scrubbed("always")
    sequence = cache.open(tenant="a")
    append(sequence, range(98))
    sequence.record(range(98))
    sequence.close()
    hit = cache.open(prompt=[*range(98), 5], tenant="a")
    assert_holds(hit, range(96))
    hit.append(2)
    assert not _contents(hit)[:, 96:].any()


def test_tokens_kept_past_the_length_belong_to_the_tenant(make_scrubbed: MakeScrubbed) -> None:
    """Memory mapped for over-reads is later written by the sequence's tenant."""
    cache = make_scrubbed("cross-tenant")
    sequence = cache.open(tenant="a")
    append(sequence, range(16))
    cache.keep_resident(20)
    sequence.append(16)
    _write(sequence)
    sequence.close()
    stranger = cache.open(32)
    stranger.append(32)
    assert not _contents(stranger).any()


def test_compacted_layers_belong_to_the_tenant(host: HostBackend) -> None:
    """Memory to which compaction moves a layer is scrubbed for the next tenant."""
    pool = ExtentPool(host, 400 * PAGE, scrub="cross-tenant", close_when_unused=True)
    with KVCache(pool, max_tokens=100, max_sequences=2, layers_per_group=2) as cache:
        cache.add_layers(range(2), num_kv_heads=2, head_dim=32, dtype=torch.float32)
        sequence = cache.open(tenant="a")
        sequence.append(30)
        _write(sequence)
        cache.drop_layers([1])
        assert cache.compact()
        sequence.close()
        stranger = cache.open(30)
        stranger.append(30)
        assert not _contents(stranger).any()
