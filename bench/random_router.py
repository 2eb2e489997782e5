"""The rival of `bench_replicas.py`: any replica, whatever it holds. Ray imports it by name."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import RequestRouter


class RandomRouter(RequestRouter):
    """Chooses at random."""

    async def choose_replicas(
        self, candidate_replicas: Sequence[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        """See Ray."""
        order = random.sample(list(candidate_replicas), len(candidate_replicas))
        return [[each] for each in order]
