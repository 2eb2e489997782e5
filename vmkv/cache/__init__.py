"""What a user holds without transformers: sequences over contiguous virtual ranges.

`geometry.py` where bytes lie; `layer_group.py` one reservation; `rows.py` who gets which row;
`sequence.py` and `kv_cache.py` the objects, the latter on `rowed.py` (beginnings and ends) on
`layered.py` (layers). Growing: `growth.py`, `transaction.py`. Sharing: `forking.py`,
`unshare.py`, `reorder.py`, `prefix.py`, `contents.py`, `access.py`, `cost.py`, `victims.py`.
Elsewhere than in device memory: `swap.py`, `spill.py`, `staging.py`. `views.py`, `fp8.py` and
`elastic.py` know torch.
"""

from .cost import CostModel as CostModel
from .elastic import call_with_room as call_with_room
from .geometry import Geometry as Geometry
from .geometry import LayerShape as LayerShape
from .kv_cache import KVCache as KVCache
from .layer_group import LayerGroup as LayerGroup
from .sequence import Sequence as Sequence
from .stats import CacheStats as CacheStats
