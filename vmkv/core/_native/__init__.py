"""The native core: a lock-free free list, driver calls in bulk, tensor views, tokens as bytes.

Built when vmkv is installed; needs a C11 compiler and a POSIX system, but neither CUDA nor a GPU.
``_core.pyi`` documents each name, ``README.md`` in this folder the correctness argument.
"""

from ._core import FreeList as FreeList
from ._core import References as References
from ._core import ViewCounter as ViewCounter
from ._core import count_references as count_references
from ._core import execute as execute
from ._core import host_free as host_free
from ._core import host_functions as host_functions
from ._core import host_reserve as host_reserve
from ._core import host_restoring as host_restoring
from ._core import launch as launch
from ._core import pack_token_ids as pack_token_ids
from ._core import transfer as transfer
from ._core import view_capsule as view_capsule
