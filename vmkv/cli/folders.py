"""Looks at a model's folder before anything heavy is imported."""

from __future__ import annotations

import json
from pathlib import Path

from ..errors import ConfigError, one_line, shown

_SAVED = "the folder that save_pretrained wrote"


def check_folder(model: str) -> None:
    """Raise `ConfigError` for a path that is no model; names on the Hub are not checked."""
    path = Path(model)
    is_path = model.endswith((".json", ".gguf")) or model.startswith((".", "/", "~"))
    try:
        # Opening a pipe would block, and transformers takes it for a name on the Hub.
        is_folder, is_there = path.is_dir(), path.is_dir() or path.is_file()
        has_config = is_folder and (path / "config.json").is_file()
        has_adapter = is_folder and (path / "adapter_config.json").is_file()
        has_gguf = path.suffix == ".gguf" or (is_folder and any(path.glob("*.gguf")))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{shown(model)} cannot be read: {one_line(error)}") from error
    if is_path and not is_there:
        raise ConfigError(f"there is no file or folder {model}")
    if not is_there or has_config or (not is_folder and not has_gguf):
        return
    if has_adapter:
        raise ConfigError(
            f"{model} is a LoRA adapter{_base_of(path)}, and no whole model: merge it into its "
            "base model (merge_and_unload of peft), and name the folder of the result"
        )
    if has_gguf:
        raise ConfigError(
            f"{model} is in the GGUF format, which is not served: read it with transformers "
            f"(from_pretrained with gguf_file), save it, and name {_SAVED}"
        )
    raise ConfigError(f"{model} holds no config.json; name {_SAVED}")


def _base_of(adapter: Path) -> str:
    try:
        base = json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return f" for {shown(base)}"
