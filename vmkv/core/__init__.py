"""The allocator and the cache: virtual memory, physical memory, sequences. Free of transformers."""
