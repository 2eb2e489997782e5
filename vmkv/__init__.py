"""vmkv: a KV cache in virtual memory.

General layout; imports point left only, and a test proves it:

    errors, units <- _native, backend <- memory <- cache <- attention <- hf <- serve

`backend` talks to drivers, `memory` owns physical memory, `cache` gives sequences contiguous
ranges, `attention` reads them with stock kernels, `hf` speaks transformers. `testing` is a
public kit for those who write backends; nothing here imports it.
"""

from .backend import Backend as Backend
from .backend import BackendUsage as BackendUsage
from .backend import HostBackend as HostBackend
from .backend import open_backend as open_backend
from .cache import CacheStats as CacheStats
from .cache import KVCache as KVCache
from .cache import Sequence as Sequence
from .errors import CapacityError as CapacityError
from .errors import ClosedError as ClosedError
from .errors import ConfigError as ConfigError
from .errors import DriverError as DriverError
from .errors import InternalError as InternalError
from .errors import OutOfAddressSpaceError as OutOfAddressSpaceError
from .errors import OutOfPagesError as OutOfPagesError
from .errors import SequenceFullError as SequenceFullError
from .errors import VMKVError as VMKVError
from .hf import VMKVCache as VMKVCache
from .memory import ExtentPool as ExtentPool
