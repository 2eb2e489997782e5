"""Ownership of physical memory and of mappings. Free of torch.

`extent.py` what is owned; `pool.py` by whom, within which budget; `page_table.py` where it is
mapped; `reclaim.py` when it may go; `invariants.py` what always holds.
"""

from .extent import Extent as Extent
from .extent import size_classes as size_classes
from .invariants import check_pool as check_pool
from .page_table import Mapping as Mapping
from .page_table import PageTable as PageTable
from .page_table import Placement as Placement
from .page_table import RowPages as RowPages
from .pool import ExtentPool as ExtentPool
from .pool import PoolStats as PoolStats
from .reclaim import Reclaimer as Reclaimer
from .reclaim import RetiredMapping as RetiredMapping
