"""Ownership of physical memory and of mappings. Free of torch.

`page_table.py` has extents and the mappings of rows, `pool.py` the extent pool, `shelf.py` creation
within a budget and free lists, `change.py` atomic changes of mappings, `host_copy.py` rows whose
contents wait in host memory, `reclaim.py` fences and unmapping, `pressure.py` eviction of parked
rows, `arbiter.py` preemption across engines, `shares.py`, `broker.py` and `member.py` one budget
for several processes, `unix_sockets.py` what these talk over, `submitted.py` and `invariants.py`
the checks.
"""

from .broker import Broker as Broker
from .broker import default_socket_path as default_socket_path
from .change import Change as Change
from .change import RowChange as RowChange
from .change import make_writable as make_writable
from .change import pinned as pinned
from .change import protect as protect
from .host_copy import HostCopy as HostCopy
from .invariants import check_pool as check_pool
from .member import PoolMember as PoolMember
from .page_table import Extent as Extent
from .page_table import PageMapping as PageMapping
from .page_table import PageTable as PageTable
from .page_table import RetiredMapping as RetiredMapping
from .page_table import placed as placed
from .page_table import size_classes as size_classes
from .pool import ExtentPool as ExtentPool
from .pool import Scrub as Scrub
from .pressure import Pressure as Pressure
from .pressure import Victim as Victim
from .submitted import WriteRange as WriteRange
