"""transformers: the cache it takes, attention in place, and generation without padding.

`cache.py` and `layers.py` are the cache; `store.py`, `device_rows.py` and `step.py` its memory;
`kv_format.py` and `kv_scales.py` what it is stored as;
`attention.py` the implementation "vmkv"; `ragged_cache.py`, `ragged.py` and `forward.py` packed
passes; `proof.py` which models they serve; `prefill.py`, `prepared.py`, `token_state.py` and
`generation.py` generation over them; `compat.py` every version branch.
Importing this package registers "vmkv" with transformers.
"""

from .attention import register
from .cache import VMKVCache as VMKVCache
from .generation import generate as generate
from .generation import ragged_generate as ragged_generate
from .kv_scales import KVScales as KVScales
from .kv_scales import calibrate_kv_scales as calibrate_kv_scales
from .ragged_cache import RaggedCache as RaggedCache

register()
