"""Copy-on-write: what is shared cannot be written, and is copied before it would be.

That the hardware enforces it is shown in a process of its own, because writing there ends it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
from helpers import warm_python
from helpers.stamps import append, assert_holds

from vmkv import KVCache
from vmkv.core.backend import Access
from vmkv.core.cache.cost import CostModel
from vmkv.units import KiB

ALIASES = CostModel(map_us=0, unmap_us=0)
MakeCache = Callable[..., KVCache]


@pytest.fixture
def cache(make_cache: MakeCache) -> KVCache:
    """Four rows, four tokens in a page; everything whole is shared."""
    return make_cache(cost_model=ALIASES)


def _accesses(cache: KVCache, row: int) -> list[Access]:
    return [mapping.access for mapping in cache.groups[0].table.rows[row].mappings]


# ---- the hardware's word ------------------------------------------------------------------

_WRITE = """
import sys, torch
from vmkv import ExtentPool, KVCache, open_backend
from vmkv.core.cache.cost import CostModel
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


def _write(device: str, writer: str, token: int) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return warm_python.run("-c", _WRITE, device, writer, str(token), env=environment)


FAULTS = [
    # who writes, where, and whether that faults
    ("fork", 0, True),
    ("fork", 7, True),
    ("fork", 8, False),  # The tail is the fork's own.
    ("parent", 0, False),
]


@pytest.mark.slow
@pytest.mark.parametrize(("writer", "token", "faults"), FAULTS)
def test_write_to_a_shared_page_faults(writer: str, token: int, faults: bool) -> None:
    """Through a raw view, on the host: a segmentation fault, after it could be read."""
    child = _write("host", writer, token)
    assert "read True" in child.stdout, child.stderr
    assert (-signal.SIGSEGV if faults else 0) == child.returncode, child.stderr
    assert faults != ("wrote" in child.stdout)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(("writer", "token", "faults"), FAULTS)
def test_cuda_write_to_a_shared_page_faults(writer: str, token: int, faults: bool) -> None:
    """The same on a GPU: the kernel faults, and its context is over."""
    child = _write("cuda:0", writer, token)
    assert "read True" in child.stdout, child.stderr
    assert (3 if faults else 0) == child.returncode, child.stdout + child.stderr
    assert faults != ("wrote" in child.stdout)


# ---- who is protected ---------------------------------------------------------------------


def test_by_default_the_parent_keeps_its_right(cache: KVCache) -> None:
    """Which saves a wait for the device at each fork."""
    parent = cache.open()
    append(parent, range(98))
    fork = parent.fork()
    assert "record_fence" not in cache.stats().driver_calls
    assert {Access.READ_WRITE} == set(_accesses(cache, parent.row))
    assert Access.READ in _accesses(cache, fork.row)


# ---- writing to what was shared -----------------------------------------------------------


def test_only_what_is_kept_is_copied(cache: KVCache) -> None:
    """98 tokens are extents of 16, 8 and 1 pages; the second is shared and keeps 6 tokens."""
    parent = cache.open()
    append(parent, range(98))
    parent.fork()
    parent.truncate(70)
    append(parent, range(500, 502))
    assert 6 * KiB == cache.stats().sharing.copied_on_write_bytes


def test_a_second_append_copies_nothing(cache: KVCache) -> None:
    """What was copied is the writer's own from then on."""
    parent = cache.open()
    append(parent, range(98))
    parent.fork()
    parent.truncate(70)
    append(parent, [500])
    before = cache.stats().driver_calls, cache.stats().sharing
    append(parent, [501])
    assert before == (cache.stats().driver_calls, cache.stats().sharing)


@pytest.mark.parametrize("writer", ["parent", "fork"])
def test_sole_holder_writes_in_place(cache: KVCache, writer: str) -> None:
    """Once the other one is gone there is nothing to copy: the right to write comes back."""
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
def test_writing_what_was_shared_is_ordered_behind_every_stream(
    cache: KVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork that has ended, and given way, may still be read on another one."""
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
    assert 1 == len(joined), "nothing is shared any more"


def test_nothing_appended_is_nothing_copied(cache: KVCache) -> None:
    """Appending 0 tokens, or growing to a length already reached, leaves what is shared alone."""
    parent = cache.open()
    append(parent, range(98))
    parent.fork()
    parent.truncate(70)
    before = cache.stats().driver_calls, cache.stats().sharing
    parent.append(0)
    cache.grow([(parent, 60)])
    assert before == (cache.stats().driver_calls, cache.stats().sharing)
