"""Ownership of physical memory and of mappings. Free of torch.

`extent.py` has extents and mappings, `pool.py` the extent pool, `shelf.py` creation within a budget
and free lists, `page_table.py` the mappings of rows, `change.py` atomic changes of mappings,
`reclaim.py` fences and unmapping, `pressure.py` eviction of parked rows, `arbiter.py` preemption
across engines, `submitted.py` and `invariants.py` the checks.
"""

from .change import RowChange as RowChange
from .change import change as change
from .change import make_writable as make_writable
from .change import pinned as pinned
from .change import protect as protect
from .change import staged as staged
from .extent import Extent as Extent
from .extent import MappedRows as MappedRows
from .extent import Mapping as Mapping
from .extent import RowPages as RowPages
from .extent import size_classes as size_classes
from .invariants import check_pool as check_pool
from .page_table import PageTable as PageTable
from .page_table import Placement as Placement
from .pool import ExtentPool as ExtentPool
from .pool import Scrub as Scrub
from .pressure import EvictionPolicy as EvictionPolicy
from .pressure import LeastRecentlyUsed as LeastRecentlyUsed
from .pressure import Pressure as Pressure
from .pressure import Victim as Victim
from .reclaim import Reclaimer as Reclaimer
from .reclaim import RecordedFence as RecordedFence
from .reclaim import RetiredMapping as RetiredMapping
from .shelf import PoolStats as PoolStats
from .submitted import WriteRange as WriteRange
