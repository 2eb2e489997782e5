"""What a user holds without transformers: sequences over contiguous virtual ranges.

`geometry.py` where bytes lie, and `fp8.py` what they mean in eight bits; `layer_group.py` one
reservation; `row_space.py` all of them, and `row_space.py` who has which row. Over a row space:
`layers.py`; `growing.py` and `geometry.py`; what rows share (`forking.py`, `beginning.py`,
`prefix.py`, `forking.py`, `forking.py`, `cost.py`); memory elsewhere than on the device (`swap.py`,
`swap.py`, `disk.py`, `process/`). `sequence.py` and `kv_cache.py` are what users hold.
"""

from .cost import CostModel as CostModel
from .device_memory import call_with_room as call_with_room
from .geometry import Geometry as Geometry
from .geometry import LayerShape as LayerShape
from .growing import grow_ahead as grow_ahead
from .growing import make_ready as make_ready
from .kv_cache import KVCache as KVCache
from .layer_group import LayerGroup as LayerGroup
from .sequence import Sequence as Sequence
from .stats import CacheStats as CacheStats
