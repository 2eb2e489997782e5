"""transformers: the cache it takes, attention in place, and generation without padding.

`cache.py` and `layers.py` are the cache; `store.py`, `group_step.py` and `group_step.py` its
memory; `kv_format.py` and `kv_format.py` what it is stored as; `attention.py` the implementation
"vmkv"; `proof.py` which models packed steps serve; `ragged_cache.py`, `prefill.py`, `prepared.py`,
`token_state.py` and `generation.py` generation over such steps; `capture.py`, `captured_steps.py`
and `group_step.py` transformers' own generation over them; `compat.py` every version branch.
Importing this package registers "vmkv" with transformers.
"""

from .attention import register
from .cache import VMKVCache as VMKVCache
from .capture import capture_decoding as capture_decoding
from .generation import generate as generate
from .generation import ragged_generate as ragged_generate
from .kv_format import KVScales as KVScales
from .kv_format import calibrate_kv_scales as calibrate_kv_scales
from .ragged_cache import RaggedCache as RaggedCache

register()
