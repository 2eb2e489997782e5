"""Copy-on-write: shared memory is read-only, and is copied before a write.

The hardware's protection is tested in a child process, because a forbidden write ends the process.
"""

from __future__ import annotations

import os
import signal
import sys

import pytest
from helpers import warm_python
from helpers.stamps import append, assert_holds

from vmkv import KVCache
from vmkv.core.backend import Access
from vmkv.units import KiB


def _accesses(cache: KVCache, row: int) -> list[Access]:
    return [mapping.access for mapping in cache.groups[0].table.rows[row].mappings]


# ---- protection by hardware ---------------------------------------------------------------

_WRITE = """
import sys, torch
from vmkv import ExtentPool, KVCache, open_backend
from vmkv.core.cache.forking import CostModel
device, writer, token = sys.argv[1:]
backend = open_backend(device)
page_bytes = backend.granularity_bytes
pool = ExtentPool(backend, 64 * page_bytes)
cost = CostModel(map_us=0, unmap_us=0)
cache = KVCache(pool, max_tokens=64, max_sequences=2, cost_model=cost)
cache.add_layers([0], num_kv_heads=2, head_dim=page_bytes // 64, dtype=torch.float32)
parent = cache.open()
parent.append(9)  # Four tokens are a page: two pages are shared, the third is copied.
parent.keys(0)[:] = parent.values(0)[:] = 5
fork = parent.fork()
assert 2 * page_bytes == cache.stats().shared_bytes
view = {"parent": parent, "fork": fork}[writer].keys(0)
print("read", int(view[int(token)].sum()) == view[0].numel() * 5, flush=True)
try:
    view[int(token)] = 7
    if view.is_cuda:
        torch.cuda.synchronize()
except Exception as error:
    print("fault", error)
    sys.exit(3)
print("wrote", flush=True)
"""


FAULTS = [
    # writer, token, whether the write faults
    ("fork", 0, True),
    ("fork", 7, True),
    ("fork", 8, False),  # The tail is the fork's own.
    ("parent", 0, False),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "status"),
    [("host", -signal.SIGSEGV), pytest.param("cuda:0", 3, marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize(("writer", "token", "faults"), FAULTS)
def test_write_to_a_shared_page_faults(
    device: str, status: int, writer: str, token: int, faults: bool
) -> None:
    """A write through a tensor view is a segmentation fault; on a GPU the context is lost."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    child = warm_python.run("-c", _WRITE, device, writer, str(token), env=environment)
    assert "read True" in child.stdout, child.stderr
    assert (status if faults else 0) == child.returncode, child.stdout + child.stderr
    assert faults != ("wrote" in child.stdout)


# ---- access after a fork ------------------------------------------------------------------


def test_fork_leaves_the_parent_its_write_access(cache: KVCache) -> None:
    """Revoking the access would need a wait for the device at each fork."""
    parent = cache.open()
    append(parent, range(98))
    fork = parent.fork()
    assert "record_fence" not in cache.stats().driver_calls
    assert {Access.READ_WRITE} == set(_accesses(cache, parent.row))
    assert Access.READ in _accesses(cache, fork.row)


# ---- writes to shared memory --------------------------------------------------------------


def test_only_kept_tokens_are_copied_and_only_once(cache: KVCache) -> None:
    """98 tokens are extents of 16, 8 and 1 pages; the second is shared and keeps 6 tokens.

    Nothing is copied by an append of no token, by a growth to a length that is reached already, or
    by a second append.
    """
    parent = cache.open()
    append(parent, range(98))
    parent.fork()
    parent.truncate(70)
    before = cache.stats().driver_calls, cache.stats().sharing
    parent.append(0)
    cache.grow([(parent, 60)])
    assert before == (cache.stats().driver_calls, cache.stats().sharing)
    append(parent, [500])
    before = cache.stats().driver_calls, cache.stats().sharing
    assert 6 * KiB == before[1].copied_on_write_bytes
    append(parent, [501])
    assert before == (cache.stats().driver_calls, cache.stats().sharing)


@pytest.mark.parametrize("writer", ["parent", "fork"])
def test_sole_holder_writes_in_place(cache: KVCache, writer: str) -> None:
    """When the other sequence has ended, its memory becomes writable again without a copy."""
    parent = cache.open()
    append(parent, range(98))
    fork = parent.fork()
    mine, other = (parent, fork) if writer == "parent" else (fork, parent)
    other.close()
    cache.trim()
    mine.truncate(70)
    append(mine, range(500, 510))
    assert 0 == cache.stats().sharing.copied_on_write_bytes
    assert_holds(mine, [*range(70), *range(500, 510)])


@pytest.mark.usefixtures("no_underread")
def test_first_write_after_sharing_joins_all_streams(
    cache: KVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another stream may still read the memory for the fork that was closed and trimmed."""
    joined: list[int] = []
    monkeypatch.setattr(cache.pool.backend, "join_streams", joined.append)
    parent = cache.open()
    append(parent, range(40))
    parent.fork().close()
    cache.trim()
    parent.truncate(8)
    joined.clear()
    parent.append(1)
    assert [cache.current_stream()] == joined
    parent.append(20)
    assert 1 == len(joined), "joined again although nothing is shared"
