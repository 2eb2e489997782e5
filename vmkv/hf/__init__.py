"""transformers: the cache it takes, attention in place, and generation without padding.

`cache.py` and `layers.py` are the cache, `store.py` and `group_step.py` its memory, and
`kv_format.py` the stored types; `attention.py` is the implementation "vmkv"; `proof.py` decides
which models packed steps serve; `sampling.py` and `generation.py` generate over such steps;
`capture.py` captures them for transformers' own loop; `compat.py` has every version branch.
Importing this package registers "vmkv" with transformers, and logs a warning if the release of
transformers is newer than the last one tested.
"""

import logging as _logging
from multiprocessing import parent_process as _parent_process

from ..releases import newer_than_tested as _newer_than_tested
from .attention import register
from .cache import VMKVCache as VMKVCache
from .capture import capture_decoding as capture_decoding
from .generation import RaggedCache as RaggedCache
from .generation import generate as generate
from .generation import ragged_generate as ragged_generate
from .kv_format import KVScales as KVScales
from .kv_format import calibrate_kv_scales as calibrate_kv_scales

register()
# Said once: processes that this one starts do not repeat it.
if (_newer := _newer_than_tested()) and _parent_process() is None:
    _logging.getLogger(__name__).warning("%s", _newer)
