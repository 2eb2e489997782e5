"""All random plays, and an episode of one."""

from __future__ import annotations

import random
from collections.abc import Collection

from helpers.brokered_play import RandomBrokered
from helpers.engines_play import RandomEngines
from helpers.random_engine import (
    HYBRIDS,
    RandomEngine,
    RandomHybridEngine,
    RandomModelEngine,
    RandomModelTiers,
    RandomPlay,
    RandomTiers,
)
from helpers.random_generate import RandomGenerate
from helpers.shared_model_play import RandomSharedModel
from helpers.speculation_play import RandomSpeculation
from vmkv.errors import CapacityError, ConfigError

PLAYS: dict[str, type[RandomPlay]] = {
    "engine": RandomEngine,
    "tiers": RandomTiers,
    "model": RandomModelEngine,
    "speculation": RandomSpeculation,
    "model_tiers": RandomModelTiers,
    **({"hybrid": RandomHybridEngine, "brokered": RandomBrokered} if HYBRIDS else {}),
    "generate": RandomGenerate,
    "shared": RandomSharedModel,
    "engines": RandomEngines,
}


def play_episode(
    name: str,
    seed: int,
    num_operations: int,
    without: Collection[str] = (),
    *,
    is_verbose: bool = False,
) -> int:
    """Play the episode of a seed, print its operations, and return the number of steps.

    Args:
        name: Key of `PLAYS`.
        seed: Seed of all random choices.
        num_operations: Operations of the episode.
        without: Operations to leave out.
        is_verbose: Print all operations instead of the last 40.
    """
    try:
        episode = PLAYS[name](random.Random(seed), without)
    except (CapacityError, ConfigError):  # The budget does not hold one token of this shape.
        return 0
    try:
        for _ in range(num_operations):
            episode.operate()
        episode.end()
    except BaseException:
        episode.abandon()
        raise
    finally:
        trace = episode.play.trace
        print(episode.shape, *(trace if is_verbose else ["…", *trace[-40:]]), sep="\n")
    return int(episode.play.num_steps)
