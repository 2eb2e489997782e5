"""Ownership of physical memory and of mappings. Free of torch.

`extent.py` what is owned; `pool.py` by whom; `shelf.py` where it comes from, within which budget;
`page_table.py` where it is mapped, `mapping.py` what it says of it; `change.py` what stays while it
is read; `reclaim.py` when it may go, `leaving.py` for good; `pressure.py` which parked rows give
memory back, `arbiter.py` which engine preempts a request; `scrub.py` what is left in it;
`submitted.py` what steps write; `invariants.py` what always holds.
"""

from .access import make_writable as make_writable
from .access import protect as protect
from .change import RowChange as RowChange
from .change import change as change
from .change import pinned as pinned
from .extent import Extent as Extent
from .extent import size_classes as size_classes
from .invariants import check_pool as check_pool
from .mapping import MappedRows as MappedRows
from .mapping import Mapping as Mapping
from .mapping import RowPages as RowPages
from .page_table import PageTable as PageTable
from .page_table import Placement as Placement
from .pool import ExtentPool as ExtentPool
from .pressure import EvictionPolicy as EvictionPolicy
from .pressure import LeastRecentlyUsed as LeastRecentlyUsed
from .pressure import Pressure as Pressure
from .pressure import Victim as Victim
from .reclaim import Reclaimer as Reclaimer
from .reclaim import RecordedFence as RecordedFence
from .reclaim import RetiredMapping as RetiredMapping
from .scrub import Scrub as Scrub
from .shelf import PoolStats as PoolStats
from .staging import staged as staged
from .submitted import WriteRange as WriteRange
