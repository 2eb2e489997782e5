"""Which runner serves a model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch

from ...errors import ConfigError
from ..served_rows import ServedRows, fit_budget
from .base import Runner
from .model_runner import ModelRunner, RunnerOptions

#: Fraction of the device's memory that the budget leaves free, for kernels that load later.
_SPARE_FRACTION = 0.02


def make_runner(
    kind: str,
    model: Any,
    rows: ServedRows,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    deterministic: bool,
    attention_backend: str | None = None,
    options: Any = None,
) -> Runner:
    """A runner, warmed up.

    Args:
        kind: "auto", "eager" or "graphs".
        model: The model.
        rows: Its rows.
        max_num_seqs: Slots.
        max_num_batched_tokens: The largest step.
        deterministic: Whether requests must not depend on each other; only "eager" can do that.
        attention_backend: See `ModelRunner`.
        options: For "graphs", `RunnerOptions`.

    Raises:
        ConfigError: There is no such runner, or it cannot do what is asked.
    """
    if kind == "auto":
        kind = "graphs" if rows.cache.device.type == "cuda" and not deterministic else "eager"
    if kind not in ("eager", "graphs"):
        raise ConfigError(f'runner={kind!r} is none of "auto", "eager" and "graphs"')
    if deterministic and kind != "eager":
        raise ConfigError('deterministic needs runner="eager": leave the runner out')
    options = options or RunnerOptions()
    if kind == "eager":
        options = replace(options, compile_layers=False, capture=False)
    runner = ModelRunner(
        model,
        rows.cache,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        attention_backend=attention_backend,
        calls=rows.calls,
        options=options,
        deterministic=deterministic,
    )
    try:
        if kind == "graphs":
            runner.warm_up()
        if rows.cache.device.type == "cuda":
            total_bytes = torch.cuda.get_device_properties(rows.cache.device).total_memory
            fit_budget(rows.cache.pool, int(total_bytes * _SPARE_FRACTION))
    except BaseException:
        runner.close()
        raise
    return cast("Runner", options.wrap(runner))
