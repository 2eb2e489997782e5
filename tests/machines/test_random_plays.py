"""Random episodes of engines and caches, checked by contents; `fuzz_engine.py` plays more.

Requests arrive, share prefixes, run beside each other, are cancelled, preempted and resumed, while
memory is short, taken by other users, freed and refused; driver calls and steps fail; the device
runs behind. Every step reads what an attention kernel would read, and fails unless these are tokens
of its own request; it may write memory of its row only. A request's output is a hash of all that it
has read, or the output of transformers, and must be the same as without other requests.
"""

from __future__ import annotations

import gc

import pytest
from helpers.random_plays import PLAYS, play_episode

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Engine was never closed"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.mark.parametrize(
    ("name", "num_episodes", "num_operations"),
    [
        ("engine", 40, 100),
        ("tiers", 8, 60),
        ("model", 2, 50),
        ("speculation", 5, 30),
        ("model_tiers", 2, 25),
        *[("hybrid", 4, 50), ("brokered", 2, 20)] * ("hybrid" in PLAYS),
        ("generate", 3, 25),
        ("shared", 6, 40),
        ("engines", 4, 60),
    ],
)
def test_random_episodes_end_with_the_right_tokens(
    name: str, num_episodes: int, num_operations: int
) -> None:
    """Books are checked after each operation; a failure prints the operations."""
    num_steps = sum(play_episode(name, seed, num_operations) for seed in range(num_episodes))
    assert num_steps > num_episodes
    gc.collect()  # Engines that were dropped warn now, not in another test.
