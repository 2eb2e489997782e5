"""Continuous batching: many requests of different lengths on one device.

`params.py` and `request.py` what is asked and answered; `scheduler.py` who runs, as pure logic;
`memory_view.py` what it knows of the cache; `runner/` how tokens are chosen after a step, which
`vmkv.step` runs; `engine.py` all of that together. `engine_loop.py` runs it on its own, in the
thread of `async_engine.py` or the process of `process/`; `engine_client.py` asks it then, in the
words of `engine_loop.py`.
"""

from .async_engine import AsyncEngine as AsyncEngine
from .engine import Engine as Engine
from .params import SamplingParams as SamplingParams
from .request import CompletionOutput as CompletionOutput
from .request import FinishReason as FinishReason
from .request import RequestHandle as RequestHandle
from .request import RequestOutput as RequestOutput
from .request import joined as joined
