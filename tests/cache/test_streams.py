"""Several streams: whatever copies what rows hold waits for all of them first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.stamps import append

from vmkv import ExtentPool, HostBackend, KVCache, Sequence
from vmkv.cache.cost import CostModel
from vmkv.units import KiB

PAGE = 4 * KiB
COPIES = CostModel(map_us=1e9)


@pytest.fixture
def beams(host: HostBackend, make_cache: Callable[..., KVCache]) -> list[Sequence]:
    """Two sequences of ten tokens in a cache that may use host memory."""
    pool = ExtentPool(
        host, 64 * PAGE, host_budget_bytes=64 * PAGE, page_bytes=PAGE, close_when_unused=True
    )
    cache = make_cache(pool, cost_model=COPIES)
    beams = [cache.open(), cache.open()]
    for beam in beams:
        append(beam, range(10))
    return beams


@pytest.mark.parametrize(
    "copy",
    [
        lambda beams, path: beams[0].fork(),
        lambda beams, path: beams[0].cache.reorder(beams, [1, 0]),
        lambda beams, path: beams[0].swap_out(),
        lambda beams, path: beams[0].swap_out(wait=False),
        lambda beams, path: beams[0].spill(PAGE),
        lambda beams, path: beams[0].save(path),
    ],
    ids=["fork", "reorder", "swap out", "begin to swap out", "spill", "save"],
)
def test_copies_wait_for_every_stream(
    beams: list[Sequence],
    copy: Callable[[list[Sequence], Path], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On another stream somebody may be writing what is read, or reading what is overwritten."""
    backend = beams[0].cache.pool.backend
    joined: list[int] = []
    copied: list[int] = []
    copy_many = backend.copy_many

    def noted(ops: Any, stream: int) -> None:
        if ops:
            assert stream in joined, f"a copy on stream {stream}, which has not joined the others"
            copied.append(stream)
        copy_many(ops, stream)

    monkeypatch.setattr(backend, "join_streams", joined.append)
    monkeypatch.setattr(backend, "copy_many", noted)
    copy(beams, tmp_path / "saved")
    assert copied
