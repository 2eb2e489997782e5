"""Sequences over contiguous virtual memory ranges, usable without transformers.

`sequence.py` and `kv_cache.py` are the user's interface. `layer_group.py` is what all kinds of
layers have in common, `kv_group.py` keys and values, `state_group.py` states. `geometry.py`
computes byte offsets, `fp8.py` converts to eight bits. `rows.py` says which rows are empty, live or
parked. `layers.py`, `growing.py`, `forking.py` and `swap.py` change what rows hold; `prefix.py`
indexes their tokens; `disk.py` and `process.py` save and share them.
"""

from .device_memory import call_with_room as call_with_room
from .forking import CostModel as CostModel
from .geometry import Geometry as Geometry
from .geometry import LayerShape as LayerShape
from .kv_cache import KVCache as KVCache
from .kv_group import KVGroup as KVGroup
from .layer_group import LayerGroup as LayerGroup
from .sequence import Sequence as Sequence
from .sequence import begun_checkpoint as begun_checkpoint
from .sequence import close_idle as close_idle
from .state_group import StateGroup as StateGroup
from .state_group import StateShape as StateShape
from .stats import CacheStats as CacheStats
