"""What vmkv takes from the packages of FlashAttention 2 and 3."""

from . import flash_attn_interface
from .flash_attn_interface import flash_attn_varlen_func, flash_attn_with_kvcache

__all__ = ["flash_attn_interface", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
