"""Sums in one kernel between GPUs with peer access."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from helpers import rank_cases as cases

from vmkv import RankError

NUM_GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS < 2, reason="this machine has no second GPU"),
]


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[cases.Pair]:
    """Ranks for all cases that do not end them."""
    if request.param > NUM_GPUS:
        pytest.skip(f"this machine has {NUM_GPUS} GPUs")
    ranks = cases.Pair("cuda", request.param)
    assert ranks.group._sums is not None, "these GPUs have no link"
    yield ranks
    ranks.close()


def test_sums_are_exact(ranks: cases.Pair) -> None:
    """For every size and type, whichever rank comes first."""
    ranks.run(cases.adds)


def test_graphs_with_sums_replay(ranks: cases.Pair) -> None:
    """The turns continue between replays."""
    ranks.run(cases.adds_in_graphs)


def test_sums_with_norms(ranks: cases.Pair) -> None:
    """The residual is equal bit by bit; the norm is compared, too."""
    ranks.run(cases.adds_with_norms)


def test_graphs_with_norms_replay(ranks: cases.Pair) -> None:
    """Each replay has other numbers."""
    ranks.run(cases.adds_with_norms_in_graphs)


def test_a_missing_part_is_an_error() -> None:
    """After the time limit, on the rank that waits for it."""
    ranks = cases.Pair("cuda", timeout_s=15.0)
    with pytest.raises(RankError, match="rank 1 of 2 did not answer within 15 s"):
        ranks.run(cases.is_alone)
    ranks.close()
