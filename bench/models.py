"""Models and caches that benches measure: shapes, random weights, and caches without a model."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from harness import HAS_GPU, synchronize
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from vmkv import ExtentPool, HostBackend, KVCache, open_backend
from vmkv.units import MiB

SEED = 0
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class CacheShape:
    """A model's keys and values."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers, in bfloat16."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * DTYPE.itemsize

    def add_layers(self, cache: KVCache, dtype: torch.dtype = DTYPE) -> Any:
        """Add the layers to a cache; their groups."""
        layers, heads = range(self.num_layers), self.num_kv_heads
        return cache.add_layers(layers, num_kv_heads=heads, head_dim=self.head_dim, dtype=dtype)


LLAMA_3_8B = CacheShape("Llama-3-8B", 32, 8, 128)
LLAMA_3_70B_TP8 = CacheShape("Llama-3-70B, TP 8", 80, 1, 128)


def open_pool(
    budget_bytes: int | None, *, smoke: bool, host_budget_bytes: int = 0, page_bytes: int = 2 * MiB
) -> ExtentPool:
    """A pool on the GPU; on the host for a small run, or where there is no GPU.

    Args:
        budget_bytes: What it may create; by default all that is free.
        smoke: Whether it is a small run.
        host_budget_bytes: Host memory for swapping.
        page_bytes: Of the host's backend.
    """
    use_gpu = HAS_GPU and not smoke
    backend = open_backend("cuda:0") if use_gpu else HostBackend(page_bytes)
    if budget_bytes is None:
        budget_bytes = max(page_bytes, backend.free_memory_bytes())
    return ExtentPool(backend, budget_bytes, host_budget_bytes=host_budget_bytes)


def open_cache(
    pool: ExtentPool, shape: CacheShape, dtype: torch.dtype = DTYPE, **options: Any
) -> KVCache:
    """A cache for the shape, by default with all layers side by side in a token row."""
    cache = KVCache(pool, **{"layers_per_group": shape.num_layers, **options})
    shape.add_layers(cache, dtype)
    return cache


def close_cache(cache: KVCache) -> None:
    """Check the cache's books, then close it and its pool."""
    cache.check()
    cache.close()
    cache.pool.close()


def llama_config(*, smoke: bool, **changed: Any) -> LlamaConfig:
    """Llama-3-8B's shape, or a tiny one, but for what is `changed`."""
    sizes = {
        "vocab_size": 128 if smoke else 128256,
        "hidden_size": 32 if smoke else 4096,
        "intermediate_size": 64 if smoke else 14336,
        "num_hidden_layers": 2 if smoke else 32,
        "num_attention_heads": 4 if smoke else 32,
        "num_key_value_heads": 2 if smoke else 8,
        "max_position_embeddings": 512 if smoke else 16384,
    }
    return LlamaConfig(**sizes | changed)


_SMOKE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
_SMOKE_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def _config(kind: str, sizes: tuple[int, ...], *, smoke: bool, **others: Any) -> Any:
    """A configuration of `kind`: its sizes in the order of `_SMOKE`, or tiny."""
    chosen = _SMOKE if smoke else dict(zip(_SMOKE, sizes, strict=True))
    positions = 512 if smoke else 16384
    return AutoConfig.for_model(kind, **{"max_position_embeddings": positions, **chosen, **others})


def _qwen3_next(*, smoke: bool) -> Any:
    """Qwen3-Next's layers without its mixtures, 9 GB: 36 of Gated DeltaNet, 12 of attention.

    One layer keeps a small mixture, because vLLM refuses a model without any.
    """
    others: dict[str, Any] = {"mlp_only_layers": list(range(3 if smoke else 47))}
    for what, num, small in (("key", 16, 2), ("value", 32, 4)):
        others[f"linear_num_{what}_heads"] = small if smoke else num
        others[f"linear_{what}_head_dim"] = 8 if smoke else 128
    width = 16 if smoke else 512
    others |= {"moe_intermediate_size": width, "shared_expert_intermediate_size": width}
    others |= {"num_experts": 4 if smoke else 8, "num_experts_per_tok": 2}
    if smoke:
        others |= {"num_hidden_layers": 4, "intermediate_size": 64}
    sizes = (151936, 2048, 8192, 48, 16, 2, 256)
    return _config("qwen3_next", sizes, smoke=smoke, **others)


def _qwen3_moe(*, smoke: bool) -> Any:
    """Half of Qwen3-30B-A3B's layers, 29 GB."""
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    others = {**_SMOKE_EXPERTS, "intermediate_size": 64} if smoke else experts
    sizes = (151936, 2048, 6144, 24, 32, 4, 128)
    return _config("qwen3_moe", sizes, smoke=smoke, norm_topk_prob=True, **others)


def _gpt_oss(*, smoke: bool) -> Any:
    """Half of gpt-oss-20b's layers, 21 GB in bfloat16."""
    count, chosen = (4, 2) if smoke else (32, 4)
    sizes = (201088, 2880, 2880, 12, 64, 8, 64)
    experts = {"num_local_experts": count, "num_experts_per_tok": chosen}
    return _config("gpt_oss", sizes, smoke=smoke, **experts)


def _latent(kind: str, sizes: tuple[int, ...], *, smoke: bool, **others: Any) -> Any:
    """A model with latent attention; its heads' widths are `qk_nope`, `qk_rope` and `v_head`."""
    experts = {"first_k_dense_replace": 1, "n_shared_experts": 1, "kv_lora_rank": 512}
    experts |= {"qk_rope_head_dim": 64, "n_group": 1, "topk_group": 1}
    small = {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
    small |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    its = {**experts, **others, **(small if smoke else {}), "num_key_value_heads": sizes[4]}
    names = [name for name in _SMOKE if name not in ("head_dim", "num_key_value_heads")]
    chosen = (
        {name: _SMOKE[name] for name in names} if smoke else dict(zip(names, sizes, strict=True))
    )
    if smoke:
        its["num_key_value_heads"] = _SMOKE["num_attention_heads"]
    positions = 512 if smoke else 16384
    return AutoConfig.for_model(kind, **{"max_position_embeddings": positions, **chosen, **its})


def _v2_lite(*, smoke: bool) -> Any:
    """DeepSeek-V2-Lite, 31 GB."""
    others = {"n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408}
    others |= {"qk_nope_head_dim": 128, "v_head_dim": 128, "q_lora_rank": None}
    sizes = (102400, 2048, 10944, 27, 16)
    return _latent("deepseek_v2", sizes, smoke=smoke, **others | {"n_shared_experts": 2})


def _glm_4_7_flash(*, smoke: bool) -> Any:
    """Half of GLM-4.7-Flash's layers, 31 GB."""
    others = {"n_routed_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1536}
    others |= {"qk_nope_head_dim": 192, "v_head_dim": 256, "q_lora_rank": 32 if smoke else 768}
    return _latent("glm4_moe_lite", (154880, 2048, 10240, 24, 20), smoke=smoke, **others)


#: Shapes by name; the first is what benches measure by default.
SHAPES: dict[str, Callable[..., Any]] = {
    "llama-8b": llama_config,
    "qwen3-next": _qwen3_next,
    "qwen3-moe": _qwen3_moe,
    "gpt-oss": _gpt_oss,
    "v2-lite": _v2_lite,
    "glm-4.7-flash": _glm_4_7_flash,
}


def make_model(config: Any, device: torch.device, dtype: torch.dtype = DTYPE) -> Any:
    """Random weights, by default in bfloat16, made on the device."""
    torch.manual_seed(SEED)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config)
    finally:
        torch.set_default_dtype(default)
    return model.eval().requires_grad_(requires_grad=False)


def token_bytes_of(config: LlamaConfig) -> int:
    """Bytes of a token's keys and values in bfloat16."""
    head_dim = config.hidden_size // config.num_attention_heads
    layers, heads = config.num_hidden_layers, config.num_key_value_heads
    return CacheShape("", layers, heads, head_dim).token_bytes


def random_prompts(model: Any, batch: int, num_tokens: int) -> torch.Tensor:
    """Seeded token ids, `[batch, num_tokens]`, on the model's device."""
    generator = torch.Generator().manual_seed(SEED)
    shape = (batch, num_tokens)
    return torch.randint(1, model.config.vocab_size, shape, generator=generator).to(model.device)


def reserved_bytes(*, peak: bool = False) -> int:
    """What torch's allocator has reserved on the device, now or at most."""
    if not HAS_GPU:
        return 0
    return torch.cuda.max_memory_reserved() if peak else torch.cuda.memory_reserved()


def free_device_bytes() -> int:
    """What the driver says is free."""
    return torch.cuda.mem_get_info()[0] if HAS_GPU else 0


def reset_memory() -> None:
    """Give torch's cached memory back, with cuBLAS's workspaces in it, and restart its peak."""
    gc.collect()
    if HAS_GPU:
        torch._C._cuda_clearCublasWorkspaces()  # Else their segments would be kept.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    synchronize()


def created_bytes(cache: Any) -> int:
    """All memory that the pool of a `VMKVCache` has created."""
    stats = cache.stats()
    return stats.resident_bytes + stats.free_bytes + stats.retired_bytes


@torch.inference_mode()
def initialise(model: Any) -> None:
    """Give a model the random weights that transformers gives a Llama."""
    deviation = LlamaConfig().initializer_range
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, deviation)
        else:
            parameter.fill_(1)
