"""transformers: the cache it takes, in virtual memory. Every version branch is in `compat.py`."""

from .cache import VMKVCache as VMKVCache
