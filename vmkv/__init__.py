"""A KV cache in virtual memory for models of transformers, and an engine on it.

    vmkv.Engine("MODEL").generate("Hello")[0].text  # a folder or a Hub name; batches requests
    vmkv.generate(model, [[1, 2, 3], [4, 5]], max_new_tokens=64)  # without padding
    model.generate(**inputs, past_key_values=vmkv.VMKVCache(model.config))  # a new cache each time

`vmkv serve MODEL` serves a model, `vmkv doctor` says what this machine has. `vmkv.KVCache` is the
cache without transformers, `vmkv.viz` draws its pages, `vmkv.testing` is a kit for authors of
backends. Public names are imported when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import attention, core, errors, guests, hf, serve, testing, trl, units, viz
    from .core.backend import Backend as Backend
    from .core.backend import BackendUsage as BackendUsage
    from .core.backend import HostBackend as HostBackend
    from .core.backend import open_backend as open_backend
    from .core.cache import CacheStats as CacheStats
    from .core.cache import CostModel as CostModel
    from .core.cache import KVCache as KVCache
    from .core.cache import Sequence as Sequence
    from .core.cache import call_with_room as call_with_room
    from .core.memory import ExtentPool as ExtentPool
    from .core.memory import Scrub as Scrub
    from .errors import CapacityError as CapacityError
    from .errors import ClosedError as ClosedError
    from .errors import ConfigError as ConfigError
    from .errors import DriverError as DriverError
    from .errors import InternalError as InternalError
    from .errors import LostError as LostError
    from .errors import OutOfAddressSpaceError as OutOfAddressSpaceError
    from .errors import OutOfPagesError as OutOfPagesError
    from .errors import PausedError as PausedError
    from .errors import RankError as RankError
    from .errors import SequenceFullError as SequenceFullError
    from .errors import VMKVError as VMKVError
    from .hf import KVScales as KVScales
    from .hf import RaggedCache as RaggedCache
    from .hf import VMKVCache as VMKVCache
    from .hf import calibrate_kv_scales as calibrate_kv_scales
    from .hf import capture_decoding as capture_decoding
    from .hf import generate as generate
    from .hf import ragged_generate as ragged_generate
    from .serve.async_engine import AsyncEngine as AsyncEngine
    from .serve.engine import Engine as Engine
    from .serve.params import SamplingParams as SamplingParams
    from .serve.params import StructuredOutputs as StructuredOutputs
    from .serve.request import RequestOutput as RequestOutput
    from .serve.request import joined as joined

_HOMES = {
    "core.backend": "Backend BackendUsage HostBackend open_backend",
    "core.cache": "CacheStats CostModel KVCache Sequence call_with_room",
    "core.memory": "ExtentPool Scrub",
    "errors": "CapacityError ClosedError ConfigError DriverError InternalError LostError "
    "OutOfAddressSpaceError OutOfPagesError PausedError RankError SequenceFullError VMKVError",
    "hf": "KVScales RaggedCache VMKVCache calibrate_kv_scales capture_decoding generate "
    "ragged_generate",
    "serve.async_engine": "AsyncEngine",
    "serve.engine": "Engine",
    "serve.params": "SamplingParams StructuredOutputs",
    "serve.request": "RequestOutput joined",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
_MODULES = ["attention", "core", "errors", "guests", "hf", "serve", "testing", "trl"]
_MODULES += ["units", "viz"]

__all__ = sorted(_HOME_OF)
__version__ = "0.1.0"

if not TYPE_CHECKING:  # Type checkers would take any name for an attribute.

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            return importlib.import_module(f".{name}", __name__)
        home = _HOME_OF.get(name)
        if home is None:
            raise AttributeError(f"module 'vmkv' has no attribute {name!r}")
        value = getattr(importlib.import_module(f".{home}", __name__), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
