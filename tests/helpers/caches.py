"""Names that most tests of caches share."""

from __future__ import annotations

from collections.abc import Callable

from vmkv import KVCache
from vmkv.core.cache.forking import CostModel
from vmkv.units import KiB

PAGE = 4 * KiB
#: Whole extents of every size are aliased.
ALIASES = CostModel(map_us=0, unmap_us=0)
MakeCache = Callable[..., KVCache]
