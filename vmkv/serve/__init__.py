"""Continuous batching: requests of different lengths served together on one device.

`engine.py` is the engine. `scheduler.py` plans steps from lengths and pages, `step_loop.py` carries
them out, `memory_view.py` has the cache and the requests' sequences, `runner.py` and `sampler.py`
run the model and choose tokens. `async_engine.py` (a thread) and `process/` serve an
event loop; both share `engine_loop.py` and `engine_client.py`. `start.py` begins before torch is
imported, so names are imported when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .async_engine import AsyncEngine as AsyncEngine
    from .engine import Engine as Engine
    from .params import SamplingParams as SamplingParams
    from .params import StructuredOutputs as StructuredOutputs
    from .request import CompletionOutput as CompletionOutput
    from .request import FinishReason as FinishReason
    from .request import RequestHandle as RequestHandle
    from .request import RequestOutput as RequestOutput
    from .request import joined as joined

_HOMES = {
    "async_engine": "AsyncEngine",
    "engine": "Engine",
    "params": "SamplingParams StructuredOutputs",
    "request": "CompletionOutput FinishReason RequestHandle RequestOutput joined",
}


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names.split():
            return getattr(importlib.import_module(f".{home}", __name__), name)
    raise AttributeError(f"module 'vmkv.serve' has no attribute {name!r}")
