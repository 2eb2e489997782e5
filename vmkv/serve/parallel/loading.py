"""Loads models of which every rank reads only its part."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from ...errors import CapacityError, ConfigError, one_line
from ...hf import compat, probe
from . import sharding
from .group import TensorParallel
from .localise import localise


def check_config(config: Any, size: int) -> None:
    """Check within seconds that a model can be divided; raises `ConfigError` otherwise."""
    plan = sharding.plan_of(probe.build_without_weights(config, torch.bfloat16))
    sharding.check_heads(config, plan, size)


def load(path: str, group: TensorParallel, *, dtype: str | None = None) -> Any:
    """Load a causal language model in eval mode, reduced to this rank's part; all ranks call it.

    `path` is a folder or a Hub name; `dtype` is of the weights, by default as saved. Raises
    `ConfigError` if the model does not exist or cannot be divided, `CapacityError` if a part does
    not fit its device.
    """
    in_parts = compat.in_parts(group.size)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype or "auto",
            trust_remote_code=False,
            **in_parts,
        )
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"a part of the weights of {path} does not fit its device: {one_line(error)}"
        ) from error
    except Exception as error:  # a folder or the Hub may hold anything
        raise ConfigError(f"cannot load {path}: {one_line(error)}") from error
    localise(model, group)
    return model.eval()
