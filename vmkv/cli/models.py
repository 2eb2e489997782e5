"""Loads a model's configuration, weights and tokenizer by its name or folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import cached_file

from ..errors import CapacityError, ConfigError, one_line, shown
from ..hf import compat

#: More layers are a mistake, and would take hours to build.
_LAYERS_MAX = 10_000
_GENERATION_CONFIG = "generation_config.json"
#: Parameters of requests that the file may set; another name in the file is given.
_SAMPLING = {each: each for each in ("temperature", "top_p", "top_k", "min_p")}
_SAMPLING |= {"repetition_penalty": "repetition_penalty", "max_tokens": "max_new_tokens"}


def be_quiet(*, with_progress: bool) -> None:
    """Silence transformers' logging in this process, and its progress bars if not wanted."""
    transformers.logging.set_verbosity_error()
    if not with_progress:
        transformers.logging.disable_progress_bar()


def load_config(model: str) -> Any:
    """Load the configuration of a folder, file or Hub name; raises `ConfigError` if it cannot."""
    path = Path(model)
    is_path = model.endswith(".json") or model.startswith((".", "/", "~"))
    try:
        # Opening a pipe would block, and transformers takes it for a name on the Hub.
        is_folder, is_there = path.is_dir(), path.is_dir() or path.is_file()
        has_config = is_folder and (path / "config.json").is_file()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{shown(model)} cannot be read: {one_line(error)}") from error
    if is_path and not is_there:
        raise ConfigError(f"there is no file or folder {model}")
    if is_folder and not has_config:
        raise ConfigError(
            f"{model} holds no config.json; name the folder that save_pretrained wrote"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(model, trust_remote_code=False)
        num_layers = getattr(compat.text_config(config), "num_hidden_layers", 1)
    except Exception as error:  # a file or the Hub may hold anything
        raise ConfigError(_why_no_config(model, error)) from error
    if not isinstance(num_layers, int) or not 0 < num_layers <= _LAYERS_MAX:
        raise ConfigError(f"{model} names {num_layers} layers; 1 to {_LAYERS_MAX:,} are believed")
    return config


def _why_no_config(model: str, error: Exception) -> str:
    reason = one_line(error)
    if Path(model).exists():
        return f"{model} is no configuration that the installed transformers can read: {reason}"
    return (
        f"no model {model!r}: neither a folder or file here, nor to be had from the Hub ({reason})"
    )


def load_model(model: str, *, device: str, dtype: str | None) -> Any:
    """Load a model with its weights onto a device, in eval mode.

    Raises:
        ConfigError: It is not a causal language model with all its weights, or there is no such
            device.
        CapacityError: Its weights do not fit the device.
    """
    check_device(device)
    loaded = compat.load_causal_lm(model, dtype)
    try:
        return loaded.to(device)
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"the weights of {model} do not fit {device}: {one_line(error)}"
        ) from error


def check_device(device: str) -> None:
    """Check that this machine has a device; raises `ConfigError` otherwise."""
    if not device.startswith("cuda"):
        return
    index = torch.device(device).index or 0
    if not torch.cuda.is_available():
        raise ConfigError("torch sees no CUDA device here; run `vmkv doctor`, or pass --device cpu")
    if index >= torch.cuda.device_count():
        raise ConfigError(f"there is no device cuda:{index}; there are {torch.cuda.device_count()}")


def load_sampling_defaults(model: str, source: str) -> dict[str, Any]:
    """Read what requests leave out from a generation_config.json, as vLLM does.

    `source` is "auto" for the model's, if it has one, "vllm" for none, or a folder that has one.
    Raises `ConfigError` if it cannot be read, or a value is none of `SamplingParams`.
    """
    from ..serve.params import SamplingParams

    if source == "vllm":
        return {}
    name = model if source == "auto" else source
    may_lack = dict.fromkeys(("missing_entries", "gated_repo", "connection_errors"), False)
    options = {f"_raise_exceptions_for_{what}": raises for what, raises in may_lack.items()}
    try:
        path = cached_file(name, _GENERATION_CONFIG, **options)
        told = {} if path is None else json.loads(Path(path).read_text(encoding="utf-8"))
        given = {param: told.get(key) for param, key in _SAMPLING.items()}
        defaults = {param: value for param, value in given.items() if value is not None}
        SamplingParams(**defaults)
    except (OSError, ValueError, AttributeError) as error:
        hint = "--generation-config vllm serves without it"
        raise ConfigError(f"{_GENERATION_CONFIG} of {name}: {one_line(error)}; {hint}") from error
    if path is None and source != "auto":
        raise ConfigError(f"--generation-config {source} has no {_GENERATION_CONFIG}")
    return defaults


def load_tokenizer(name: str) -> Any:
    """Load a model's tokenizer; raises `ConfigError` if it has none."""
    try:
        return transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # a folder or the Hub may hold anything
        raise ConfigError(
            f"no tokenizer for {name}: {one_line(error)}; pass --tokenizer with a folder that has "
            "one"
        ) from error
