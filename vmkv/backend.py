"""Public path of the backend contract, for authors of backends."""

from .core.backend import Access as Access
from .core.backend import AccessOp as AccessOp
from .core.backend import Backend as Backend
from .core.backend import BackendUsage as BackendUsage
from .core.backend import CopyOp as CopyOp
from .core.backend import Fence as Fence
from .core.backend import HostBackend as HostBackend
from .core.backend import MapOp as MapOp
from .core.backend import MemoryLocation as MemoryLocation
from .core.backend import Op as Op
from .core.backend import UnmapOp as UnmapOp
from .core.backend import open_backend as open_backend
