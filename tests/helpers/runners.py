"""Options of engines with each kind of runner."""

from __future__ import annotations

from typing import Any

from vmkv.serve.runner import RunnerOptions


def graphs(**options: Any) -> dict[str, Any]:
    """Options of an engine with the graph runner; without a GPU its steps run uncaptured."""
    return {"runner": "graphs", "runner_options": RunnerOptions(show_progress=False, **options)}


EAGER: dict[str, Any] = {"runner": "eager"}
#: Steps have the sizes of graphs.
PADDED = graphs(capture=True)
COMPILED = graphs(compile_layers=True, compile_backend="eager", capture=True)
TRACED = graphs(compile_layers=True, compile_backend="aot_eager", capture=True)
