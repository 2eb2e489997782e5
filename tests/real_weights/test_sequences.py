"""Swaps, saves and forks in the middle of an answer do not change the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import moves
from helpers.sequence_cache import add_layers, sequence_cache

from vmkv import ExtentPool, HostBackend, KVCache, Sequence
from vmkv.units import KiB, MiB

pytestmark = [pytest.mark.real_weights, pytest.mark.slow]


@pytest.fixture
def cache(real: Any) -> Iterator[KVCache]:
    """Rows for the model's layers, with host memory, in a shareable pool."""
    pool = ExtentPool(
        HostBackend(4 * KiB),
        64 * MiB,
        host_budget_bytes=64 * MiB,
        is_shareable=True,
        page_bytes=64 * KiB,
        close_when_unused=True,
    )
    with KVCache(pool, max_tokens=512, max_sequences=4, layers_per_group=30) as cache:
        yield add_layers(cache, real.model.config, real.kv_dtype)
        cache.check()


@pytest.mark.parametrize(
    "happens",
    [moves.swapped, moves.saved, moves.saved_while_swapped_out, moves.forked],
    ids=lambda happens: happens.__name__,
)
def test_answer_goes_on(
    real: Any,
    prompts: list[list[int]],
    cache: KVCache,
    tmp_path: Path,
    happens: Callable[[Sequence, Path], Sequence],
) -> None:
    """Half of the answer is generated before the change, half after it."""
    prompt = prompts[2]
    expected = real.expected(prompt)
    sequence = cache.open()
    first = real.generate(prompt, sequence_cache(sequence), 8)[0].tolist()
    assert expected[:8] == first[len(prompt) :]
    sequence = happens(sequence, tmp_path)
    whole = real.generate(first, sequence_cache(sequence), 8)[0].tolist()
    assert expected == whole[len(prompt) :]
