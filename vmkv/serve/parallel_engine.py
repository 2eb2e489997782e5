"""An engine whose other ranks this process starts, watches and ends.

with open_parallel_engine("meta-llama/Llama-3.1-8B", 2) as engine:
    engine.generate(...)
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ..parallel import Ranks, TensorParallel
from ..parallel.loading import load
from .engine import Engine

_LOG = logging.getLogger(__name__)
#: Time for the other ranks to free what they hold, once rank 0 has closed its engine.
_END_S = 30.0


@contextlib.contextmanager
def open_parallel_engine(
    model: str | Callable[[TensorParallel], Any],
    num_ranks: int,
    *,
    device_type: str = "cuda",
    dtype: str | None = None,
    timeout_s: float = 60.0,
    all_reduce: str = "nccl",
    observer: Any = None,
    **options: Any,
) -> Iterator[Engine]:
    """Rank 0's engine, with all others in processes of their own.

    If one of them ends, so do all: whoever is asking gets a `RankError`, and another engine can be
    opened once this one is closed.

    Args:
        model: A folder or a name on the Hub; or a function that makes the model on each rank, and
            can be pickled.
        num_ranks: How many GPUs.
        device_type: "cuda" or "cpu".
        dtype: Of the weights; by default as they were saved.
        timeout_s: See `TensorParallel`.
        all_reduce: Likewise.
        observer: Who is told what happens on rank 0.
        options: What every `Engine` is made with; they are pickled.

    Raises:
        ConfigError: There are not so many devices, or the model cannot be divided among them.
        RankError: A rank has ended; also from every call of the engine.
        Whatever `Engine` raises.
    """
    make = partial(load, model, dtype=dtype) if isinstance(model, str) else model
    ranks = Ranks(
        num_ranks,
        device_type,
        _follow,
        (make, options),
        timeout_s=timeout_s,
        all_reduce=all_reduce,
    )
    with ranks:
        assert ranks.group is not None  # It is there once all ranks are.
        with Engine(
            make(ranks.group), tensor_parallel=ranks.group, observer=observer, **options
        ) as engine:
            yield engine
        if ranks.group.failure is None and not ranks.wait(_END_S):
            _LOG.warning("a rank did not end by itself, and was killed")


def _follow(
    group: TensorParallel, make: Callable[[TensorParallel], Any], options: dict[str, Any]
) -> None:
    with Engine(make(group), tensor_parallel=group, **options) as engine:
        engine.follow()
