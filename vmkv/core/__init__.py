"""Allocator and cache: virtual memory, physical memory, sequences. Free of transformers."""
