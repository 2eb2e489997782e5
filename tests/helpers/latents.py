"""Models with latent attention: every part of a head has a width of its own."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from helpers import families

RANK, ROPE_DIM = 32, 8
_WIDTHS = {
    "kv_lora_rank": RANK,
    "q_lora_rank": 24,
    "qk_rope_head_dim": ROPE_DIM,
    "qk_nope_head_dim": 16,
    "qk_head_dim": 24,
    "v_head_dim": 12,
}
#: Families that hand latents to the cache, and keys and values of their own to attention.
FAMILIES = tuple(
    name
    for name in (
        *("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_linear", "longcat_flash"),
        *("axk1", "youtu", "minicpm3", "bailing_hybrid"),
    )
    if name in families.surveyed()
)


@functools.cache
def latent_model(name: str, **widths: int) -> Any:
    """A tiny model in float32 and eval mode. It is cached: do not change it."""
    config = families.tiny_config(name)
    for field, value in (_WIDTHS | widths).items():
        if hasattr(config, field):
            setattr(config, field, value)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()
