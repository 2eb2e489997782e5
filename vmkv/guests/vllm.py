r"""vLLM 0.26 as a member of a broker (`vmkv pool`).

    VLLM_USE_V2_MODEL_RUNNER=0 vllm serve MODEL --worker-cls vmkv.guests.vllm.GuestWorker \
        --kv-transfer-config '{"kv_connector": "GuestConnector", "kv_role": "kv_both",
            "kv_connector_module_path": "vmkv.guests.vllm"}'

The connector asks for blocks that hold all layers; the worker puts mapped memory under their one
tensor. Options in "kv_connector_extra_config": `pool_socket` (by default that of `vmkv pool`),
`floor_bytes`, `limit_bytes` and `weight`. vLLM's `--block-size` must make a block whole pages of
2 MiB: 16 tokens of Llama 3 8B.

See DESIGN.md, Note [Engines of others are members].
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)
from vllm.v1.worker.gpu_worker import Worker

from ..core.cache.device_memory import open_member_pool
from ..core.memory import PoolMember, default_socket_path
from ..errors import ConfigError
from ..units import div_ceil
from .block_memory import BlockMemory

#: Tokens for which a running request's memory is asked ahead.
_AHEAD_TOKENS = 64


class GuestWorker(Worker):  # type: ignore[misc]
    """A worker whose cache lies in mapped memory; one GPU, without vLLM's sleep mode."""

    def init_device(self) -> None:
        """Check the configuration: `ConfigError` says what to change."""
        config = self.vllm_config
        if config.parallel_config.world_size > 1 or config.use_v2_model_runner:
            raise ConfigError(
                "a guest of a pool needs one GPU and vLLM's first model runner: leave "
                "--tensor-parallel-size out, and set VLLM_USE_V2_MODEL_RUNNER=0"
            )
        self.cache_config.gpu_memory_utilization = 0.01  # The broker says what there is.
        super().init_device()

    def determine_available_memory(self) -> int:
        """Join the broker; the cache is as large as its budget could ever be."""
        extra = self.vllm_config.kv_transfer_config.kv_connector_extra_config
        block_bytes = sum(each.page_size_bytes for each in self.get_kv_cache_spec().values())
        self._pool = open_member_pool(
            str(self.device),
            partial(PoolMember.join, extra.get("pool_socket", default_socket_path())),
            name=f"vLLM, {self.model_config.model}",
            floor_bytes=max(block_bytes, int(extra.get("floor_bytes", 0))),
            limit_bytes=extra.get("limit_bytes"),
            weight=float(extra.get("weight", 1)),
        )
        assert self._pool.member is not None
        self.cache_config.kv_cache_memory_bytes = self._pool.member.most_bytes
        return int(super().determine_available_memory())

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Make the cache over mapped memory."""
        runner, connector = self.model_runner, None
        allocate = runner.allocate_uniform_kv_caches

        def allocated(config: Any, groups: Any, dtype: Any, device: Any, sizes: Any) -> Any:
            nonlocal connector
            shapes = allocate(config, groups, dtype, torch.device("meta"), sizes)
            num_bytes = shapes[1].nbytes // config.num_blocks
            connector = get_kv_transfer_group()
            connector.memory = BlockMemory(self._pool, config.num_blocks, num_bytes)
            return _over(connector.memory.tensor(), *shapes)

        runner.allocate_uniform_kv_caches = allocated
        super().initialize_from_config(kv_cache_config)
        if connector is None:
            raise ConfigError(
                "vLLM did not make one tensor of all layers, as a guest needs: all layers must be "
                "alike, and the attention backend FlashAttention"
            )


def _over(data: torch.Tensor, caches: dict[str, Any], whole: Any, backend: Any) -> tuple[Any, ...]:
    """Make over `data` the tensors that were made without memory."""

    def made(meta: Any) -> torch.Tensor:
        return data.view(whole.dtype).as_strided(meta.size(), meta.stride(), meta.storage_offset())

    return {name: made(each) for name, each in caches.items()}, made(whole), backend


class _NoMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """What vLLM sends to the worker's connector; memory has been mapped already."""


class GuestConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Follows the broker between steps; loads and saves nothing.

    vLLM makes one for its worker, which has the memory, and one for its scheduler, which has the
    blocks. Both are in one process, and its main thread calls them.
    """

    prefer_cross_layer_blocks = True
    memory: BlockMemory | None = None

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self._requests: dict[str, Any] = {}
        self._block_tokens = vllm_config.cache_config.block_size
        self._max_tokens = vllm_config.model_config.max_model_len

    # ---- the scheduler's ------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Take the blocks that have no memory out of the free list."""
        self.memory = get_kv_transfer_group().memory
        assert self.memory is not None
        self.memory.take_over(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        """Ask for memory at once, not after the next step."""
        self._requests[request.request_id] = request
        self._balance()

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """Forget a request."""
        self._requests.pop(request.request_id, None)
        return False, None

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Follow the broker after each plan: all earlier steps have been submitted."""
        self._balance()
        return _NoMetadata()

    def has_pending_push_work(self) -> bool:
        """Keep vLLM stepping until the broker has taken its memory back."""
        return self.memory is not None and self.memory.is_above_floor

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Nothing can be loaded."""
        return 0, False

    def _balance(self) -> None:
        assert self.memory is not None
        needed = [self._num_blocks(each) for each in self._requests.values()]
        has_running = any(each.num_computed_tokens for each in self._requests.values())
        self.memory.balance(sum(needed), 0 if has_running or not needed else needed[0])

    def _num_blocks(self, request: Any) -> int:
        num_tokens = min(request.num_tokens + _AHEAD_TOKENS, self._max_tokens)
        return div_ceil(num_tokens, self._block_tokens)

    # ---- of both --------------------------------------------------------------------------

    def _do_nothing(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is loaded, and nothing is saved."""

    update_state_after_alloc = start_load_kv = wait_for_layer_load = _do_nothing
    save_kv_layer = wait_for_save = _do_nothing

    def shutdown(self) -> None:
        """Leave the broker."""
        if self.memory is not None:
            self.memory.close()
