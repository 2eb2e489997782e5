"""On a GPU conversations go to files, through pinned memory that threads write from and read to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_models import kernel_model

from vmkv import Engine
from vmkv.core.cache import block_files
from vmkv.core.memory import check_pool
from vmkv.serve.params import SamplingParams
from vmkv.units import MiB

pytestmark = pytest.mark.gpu
PROMPTS = [[3 + at * seed % 250 for at in range(700)] for seed in (7, 11, 13, 17, 19, 23)]
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_a_restarted_engine_finds_conversations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv_dtype: str
) -> None:
    """The blocks read are those written: an engine that finds them in rows says the same."""
    monkeypatch.setattr(block_files, "_SAVE_S", 60.0)
    options: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_tokens": 1024,
        "budget_bytes": 64 * MiB,
        "host_budget_bytes": 64 * MiB,
        "disk_folder": tmp_path / "files",
        "disk_budget_bytes": 512 * MiB,
        "kv_dtype": kv_dtype,
        "runner": "eager",
    }
    with Engine(kernel_model(), **options) as engine:
        for prompt in PROMPTS:
            engine.generate(prompt, GREEDY)
        expected = [engine.generate(each, GREEDY)[0] for each in PROMPTS]
        assert all(each.num_cached_tokens >= 688 for each in expected)
    with Engine(kernel_model(), **options) as again:
        found = again.generate(PROMPTS, GREEDY)
        assert [each.outputs[0].token_ids for each in expected] == [
            each.outputs[0].token_ids for each in found
        ]
        assert all(each.num_cached_tokens >= 688 for each in found)
        assert again.cache.stats().below["files"].loaded_bytes > 0
        check_pool(again.cache.pool)
        again.cache.check()
