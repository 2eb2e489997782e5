"""What a user holds without transformers: sequences over contiguous virtual ranges.

`geometry.py` where bytes lie; `growth.py` how much to map; `layer_group.py` one reservation;
`rows.py` who gets which row; `sequence.py` and `kv_cache.py` the objects; `views.py` torch.
"""

from .geometry import Geometry as Geometry
from .geometry import LayerShape as LayerShape
from .kv_cache import KVCache as KVCache
from .layer_group import LayerGroup as LayerGroup
from .sequence import Sequence as Sequence
from .stats import CacheStats as CacheStats
