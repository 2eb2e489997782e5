"""On a GPU weights leave the device, and captured and compiled steps find them again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.tiny_models import kernel_model

from vmkv import Engine
from vmkv.core.memory import check_pool
from vmkv.serve.params import SamplingParams
from vmkv.serve.runner import RunnerOptions
from vmkv.units import MiB

pytestmark = pytest.mark.gpu
PROMPTS = [list(range(3, 40)), list(range(100, 300)), list(range(50, 60))]
GREEDY = SamplingParams(temperature=0, max_tokens=12)


def make_model() -> Any:
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4}
    return kernel_model(vocab_size=32000, hidden_size=2048, intermediate_size=4096, **heads)


def said_by(engine: Engine) -> list[tuple[int, ...]]:
    return [tuple(each.outputs[0].token_ids) for each in engine.generate(PROMPTS, GREEDY)]


@pytest.mark.slow
@pytest.mark.parametrize("compiles", [False, True], ids=["plain", "compiled"])
def test_captured_steps_find_weights_again(compiles: bool) -> None:
    """The driver gets all of their memory, and prefixes come back with them."""
    options = RunnerOptions(compile_layers=compiles, max_graph_tokens=64, show_progress=False)
    sizes: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 256, "max_tokens": 1024}
    memory: dict[str, Any] = {"budget_bytes": 256 * MiB, "host_budget_bytes": 256 * MiB}
    model = make_model()
    checksums = [each.double().sum().item() for each in model.parameters()]
    with Engine(model, runner_options=options, enable_sleep_mode=True, **sizes, **memory) as engine:
        weights = engine._weights
        assert weights is not None
        expected = said_by(engine)
        graphs = engine.loop.runner.stepper.decode_graphs
        assert graphs is not None
        captured = graphs.captured
        assert captured
        addresses = [each.data_ptr() for each in model.parameters()]
        for turn in range(6):
            # Prompts that are found are computed in other chunks, which rounds otherwise.
            engine.sleep()
            assert expected == said_by(engine)
            free_bytes = torch.cuda.mem_get_info()[0]
            engine.sleep(weights=True, prefixes=turn % 2 == 1)
            assert torch.cuda.mem_get_info()[0] - free_bytes >= weights.num_bytes
            others = torch.full((free_bytes // 2,), 0xFF, dtype=torch.uint8, device="cuda")
            del others  # Its NaN are what a step would read of memory that was not copied.
            torch.cuda.empty_cache()
            outputs = engine.generate(PROMPTS, GREEDY)
            assert (outputs[1].num_cached_tokens > 0) == (turn % 2 == 1)
            if turn % 2 == 0:
                assert expected == [tuple(each.outputs[0].token_ids) for each in outputs]
            assert weights._pool is not None
            check_pool(weights._pool)
            engine.cache.check()
        assert addresses == [each.data_ptr() for each in model.parameters()]
        assert captured == graphs.captured
        engine.sleep(weights=True)
    assert checksums == [each.double().sum().item() for each in model.parameters()]
