"""Captured steps on a GPU see updates of the weights, and are captured again after `sleep`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers.tiny_models import kernel_model

from vmkv import Engine
from vmkv.serve.params import SamplingParams
from vmkv.serve.runner import RunnerOptions
from vmkv.units import MiB

pytestmark = pytest.mark.gpu
PROMPTS = [list(range(3, 40)), list(range(100, 300)), list(range(50, 60))]
GREEDY = SamplingParams(temperature=0, max_tokens=12)


def make_model() -> Any:
    sizes = {"vocab_size": 512, "hidden_size": 512, "intermediate_size": 1024}
    return kernel_model(**sizes, num_attention_heads=8)


def open_engine(model: Any, *, compiles: bool) -> Engine:
    options = RunnerOptions(compile_layers=compiles, max_graph_tokens=64, show_progress=False)
    sizes: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 256, "max_tokens": 1024}
    return Engine(model, budget_bytes=256 * MiB, runner_options=options, **sizes)


def said_by(engine: Engine) -> list[tuple[int, ...]]:
    return [tuple(each.outputs[0].token_ids) for each in engine.generate(PROMPTS, GREEDY)]


@pytest.mark.slow
@pytest.mark.parametrize("graphs", [False, True], ids=["kept", "dropped"])
@pytest.mark.parametrize("compiles", [False, True], ids=["plain", "compiled"])
def test_captured_steps_see_updates(compiles: bool, graphs: bool) -> None:
    """As an engine of a copy; with graphs dropped, little of the device is the engine's."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    with open_engine(model, compiles=compiles) as engine:
        runner, seen = engine.loop.runner, set()
        for _ in range(3):
            with engine.paused():
                model.train()
                for prompt in PROMPTS:
                    ids = torch.tensor([prompt], device="cuda")
                    model(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                engine.sleep(graphs=graphs)
                assert 0 == engine.cache.pool.stats().created_bytes
                fresh = copy.deepcopy(model).eval()
            with open_engine(fresh, compiles=compiles) as other:
                wanted = said_by(other)
            assert wanted == said_by(engine)
            assert runner is engine.loop.runner
            engine.cache.check()
            seen.add(tuple(wanted))
        assert len(seen) > 1, "the updates are too small to tell"


def test_little_is_held_while_a_model_is_trained() -> None:
    """Nothing of the pool; of torch's memory the graphs', then tables of the sampler and steps."""
    model = make_model()
    ids = torch.tensor([PROMPTS[0]], device="cuda")
    model(input_ids=ids, labels=ids).loss.backward()  # Libraries have their workspaces.
    model.zero_grad()
    before = torch.cuda.memory_allocated()
    with open_engine(model, compiles=False) as engine:
        said = said_by(engine)
        for graphs, most_bytes in ((False, 128 * MiB), (True, 2 * MiB)):
            with engine.paused():
                engine.sleep(graphs=graphs)
                assert 0 == engine.cache.pool.stats().created_bytes
                assert torch.cuda.memory_allocated() - before < most_bytes
            assert said == said_by(engine)


def test_workspaces_keep_no_segment_while_a_model_is_trained() -> None:
    """CuBLAS's workspaces lie in any free block of torch's memory, whose segment then stays."""
    with open_engine(make_model(), compiles=False) as engine:
        said_by(engine)
        with engine.paused():
            engine.sleep()
            before = torch.cuda.memory_reserved()
            large = torch.empty(512 * MiB, dtype=torch.uint8, device="cuda")
            del large
            matrix = torch.ones(64, 64, device="cuda")
            _ = matrix @ matrix
            torch.cuda.empty_cache()
            assert torch.cuda.memory_reserved() - before > 500 * MiB, "no workspace is there"
            del matrix, _
            engine.sleep()
            assert torch.cuda.memory_reserved() - before < 8 * MiB
        said_by(engine)
