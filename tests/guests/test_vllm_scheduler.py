"""vLLM's scheduler with the connector, over a broker on the host backend; runs where vLLM is."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.waiting import until

from vmkv import HostBackend
from vmkv.core.cache.device_memory import open_member_pool
from vmkv.core.memory import Broker, PoolMember, check_pool
from vmkv.guests.block_memory import BlockMemory
from vmkv.units import KiB

pytest.importorskip("vllm", reason="vLLM is not installed", exc_type=ImportError)

from vllm import platforms
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

PAGE = 4 * KiB
BLOCK_TOKENS = 16
NUM_BLOCKS = 64
#: Of a request, 17 blocks at most.
POOL_BLOCKS = 40
NUM_REQUESTS = 120
MAX_TOKENS = 1024
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 1024,
    "max_position_embeddings": MAX_TOKENS,
}


class Guest:
    """A scheduler whose steps write to the blocks of their requests; unmapped ones would fault."""

    def __init__(self, folder: Path, broker: Broker):
        (folder / "config.json").write_text(json.dumps(CONFIG))
        transfer = KVTransferConfig(
            kv_connector="GuestConnector",
            kv_role="kv_both",
            kv_connector_module_path="vmkv.guests.vllm",
            kv_connector_extra_config={"pool_socket": broker.socket_path},
        )
        config = VllmConfig(
            model_config=ModelConfig(str(folder), skip_tokenizer_init=True, dtype="bfloat16"),
            cache_config=CacheConfig(block_size=BLOCK_TOKENS),
            scheduler_config=SchedulerConfig(
                max_num_seqs=16,
                max_num_batched_tokens=512,
                max_model_len=MAX_TOKENS,
                is_encoder_decoder=False,
                async_scheduling=False,
            ),
            kv_transfer_config=transfer,
        )
        config.cache_config.num_gpu_blocks = NUM_BLOCKS
        spec = FullAttentionSpec(BLOCK_TOKENS, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
        caches = KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
        make = KVConnectorFactory.create_connector
        workers = make(config, KVConnectorRole.WORKER, caches)
        kv_transfer_state._KV_CONNECTOR_AGENT = workers
        self.backend = HostBackend(PAGE)
        join = partial(PoolMember.join, broker.socket_path)
        self.pool = open_member_pool(self.backend, join, name="guest")
        self.memory = workers.memory = BlockMemory(self.pool, NUM_BLOCKS, PAGE)
        self.data = self.memory.tensor().view(NUM_BLOCKS, PAGE)
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self.scheduler = Scheduler(
            config, caches, StructuredOutputManager(config), BLOCK_TOKENS, BLOCK_TOKENS
        )

    def add(self, number: int, prompt: list[int], max_tokens: int) -> None:
        """Add a request."""
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        its: dict[str, Any] = {"pooling_params": None, "block_hasher": self.hasher}
        self.scheduler.add_request(Request(str(number), prompt, params, **its))

    def step(self) -> None:
        """Plan a step, write to its blocks, and answer."""
        scheduler = self.scheduler
        plan = scheduler.schedule()
        its = list(plan.num_scheduled_tokens)
        for each in its:
            for block in scheduler.kv_cache_manager.get_block_ids(each)[0]:
                self.data[block] += 1
        requests = [scheduler.requests[each] for each in its]
        said = [[7] if each.num_computed_tokens >= each.num_tokens else [] for each in requests]
        order = {each: at for at, each in enumerate(its)}
        scheduler.update_from_output(plan, ModelRunnerOutput(its, order, said))
        with self.pool.lock:  # The member's thread changes the books, too.
            check_pool(self.pool)

    def close(self) -> None:
        """Leave, with nothing left of the backend."""
        del self.data
        self.scheduler.shutdown()
        kv_transfer_state._KV_CONNECTOR_AGENT = None
        assert not self.backend.usage().physical_bytes


@pytest.fixture
def guest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Guest]:
    """Open a guest whose pool holds few of its requests."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    if platforms.current_platform.is_unspecified():
        from vllm.platforms.cpu import CpuPlatform

        monkeypatch.setattr(platforms, "_current_platform", CpuPlatform())
    with Broker(tmp_path / "pool", POOL_BLOCKS * PAGE, page_bytes=PAGE) as broker:
        made = Guest(tmp_path, broker)
        yield made
        made.close()


def test_random_requests(guest: Guest) -> None:
    """All end, prefixes are found, and an idle guest comes down to one block."""
    source = random.Random(1)
    scheduler = guest.scheduler
    num_added = 0

    def play() -> bool:
        nonlocal num_added
        if num_added < NUM_REQUESTS and source.random() < 0.2:
            prompt = [5] * source.choice((0, 32, 64))
            prompt += source.choices(range(5, 900), k=source.randint(3, 200))
            guest.add(num_added, prompt, source.randint(1, 40))
            num_added += 1
        if scheduler.has_requests():
            guest.step()
        return num_added == NUM_REQUESTS and not scheduler.has_requests()

    until(play)
    assert guest.memory.num_mapped == 1
    until(lambda: guest.backend.usage().physical_bytes == PAGE)
