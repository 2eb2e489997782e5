"""Options of engines with each kind of runner."""

from __future__ import annotations

import copy
from typing import Any

from helpers.tiny_models import tiny_model
from vmkv import Engine, SamplingParams
from vmkv.serve.runner import RunnerOptions


def graphs(**options: Any) -> dict[str, Any]:
    """Options of an engine with the graph runner; without a GPU its steps run uncaptured."""
    return {"runner": "graphs", "runner_options": RunnerOptions(show_progress=False, **options)}


EAGER: dict[str, Any] = {"runner": "eager"}
#: Steps have the sizes of graphs.
PADDED = graphs(capture=True)
COMPILED = graphs(compile_layers=True, compile_backend="eager", capture=True)
TRACED = graphs(compile_layers=True, compile_backend="aot_eager", capture=True)


def check_compiled(name: str) -> None:
    """Check that compiled layers of a tiny model give the tokens of eager ones."""
    said = []
    for options in (EAGER, graphs(compile_layers=True, compile_backend="eager")):
        model = copy.deepcopy(tiny_model(name))
        with Engine(model, max_num_seqs=2, max_num_batched_tokens=16, **options) as engine:
            prompts = [[5, 9, 13, 7, 30], [8, 2]]
            outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=6))
            said.append([each.outputs[0].token_ids for each in outputs])
    assert said[0] == said[1]
