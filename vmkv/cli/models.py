"""Loads a model's configuration and sampling defaults by its name or folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers
from transformers.utils import cached_file

from ..errors import ConfigError, one_line
from ..hf import compat
from ..hf.configuration import default_max_tokens, stated_max_tokens
from .folders import check_folder

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


def load_config(model: str, **source: Any) -> Any:
    """Load the configuration of a folder, file or Hub name; raises `ConfigError` if it cannot."""
    check_folder(model)
    try:
        source.setdefault("trust_remote_code", False)
        config = transformers.AutoConfig.from_pretrained(model, **source)
        num_layers = getattr(compat.text_config(config), "num_hidden_layers", 1)
    except Exception as error:  # a file or the Hub may hold anything
        raise ConfigError(_why_no_config(model, error)) from error
    if not isinstance(num_layers, int) or not 0 < num_layers <= _LAYERS_MAX:
        raise ConfigError(f"{model} has {num_layers} layers; 1 to {_LAYERS_MAX:,} are possible")
    return config


def _why_no_config(model: str, error: Exception) -> str:
    reason = one_line(error)
    if "trust_remote_code" in reason:
        return (
            f"{model} comes with code of its own: read it, and pass --trust-remote-code to run it"
        )
    if Path(model).exists():
        return f"{model} is no configuration that the installed transformers can read: {reason}"
    if "gated repo" in reason.lower():
        return (
            f"{model} is gated on the Hub: accept its terms there, and log in (hf auth login, or "
            "HF_TOKEN in the environment)"
        )
    return (
        f"no model {model!r}: neither a folder or file here, nor loadable from the Hub ({reason})"
    )


def check_servable(model: str, config: Any) -> None:
    """Raise `ConfigError` for a kind of model that has no decoder to serve."""
    if config.is_encoder_decoder:
        raise ConfigError(
            f"{model} is a {config.model_type} model, with an encoder; decoders are served, and "
            "generate runs it with VMKVCache.for_encoder_decoder"
        )
    compat.auto_class(config)


def longest_request(config: Any, max_tokens: int | None) -> int:
    """Return the tokens of the longest request; raises `ConfigError` beyond the model's."""
    decoder = compat.text_config(config)
    stated = stated_max_tokens(decoder)
    if max_tokens is not None and stated is not None and max_tokens > stated:
        raise ConfigError(
            f"--max-model-tokens {max_tokens}: the model was made for {stated} tokens at most"
        )
    return max_tokens or default_max_tokens(decoder, past_stated=False)


def load_sampling_defaults(
    model: str, source: str, *, revision: str | None = None
) -> dict[str, Any]:
    """Read defaults of sampling parameters from a generation_config.json, as vLLM does.

    `source` is "auto" for the model's file, if any, "vllm" for no file, or a folder with one.
    Raises `ConfigError` if it cannot be read, or a value is none of `SamplingParams`.
    """
    from ..serve.params import SamplingParams

    if source == "vllm":
        return {}
    name = model if source == "auto" else source
    kinds = ("missing_entries", "gated_repo", "connection_errors")
    options: dict[str, Any] = {f"_raise_exceptions_for_{kind}": False for kind in kinds}
    options["revision"] = revision if source == "auto" else None
    try:
        path = cached_file(name, _GENERATION_CONFIG, **options)
        told = {} if path is None else json.loads(Path(path).read_text(encoding="utf-8"))
        pairs = _SAMPLING.items()
        defaults = {param: told[key] for param, key in pairs if told.get(key) is not None}
        SamplingParams(**defaults)
    except (OSError, ValueError, AttributeError) as error:
        hint = "--generation-config vllm serves without it"
        raise ConfigError(f"{_GENERATION_CONFIG} of {name}: {one_line(error)}; {hint}") from error
    if path is None and source != "auto":
        raise ConfigError(f"--generation-config {source} has no {_GENERATION_CONFIG}")
    return defaults
