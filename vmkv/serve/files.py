"""Reads the files that options of a server name, before torch is imported."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from ..errors import ConfigError, one_line, shown


def read_api_keys(file: Path | None, variable: str | None) -> list[str]:
    """Collect keys from a file, one per line, and from an environment variable's value.

    Skips empty lines and lines that begin with `#`. Raises `ConfigError` if the file cannot be
    read, or holds no key, or if the variable is set and blank, which would admit everybody.
    """
    if variable is not None and not variable.strip():
        raise ConfigError("the variable with an API key is blank; fill it in, or unset it")
    keys = [] if variable is None else [variable.strip()]
    if file is None:
        return keys
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {file}: {error}") from error
    stripped = [line.strip() for line in lines]
    from_file = [line for line in stripped if line and not line.startswith("#")]
    if not from_file:
        raise ConfigError(f"--api-key-file {file} holds no key; write one per line")
    return keys + from_file


def read_template(path: str) -> str:
    """Read and parse a chat template; raises `ConfigError` if it cannot."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        jinja2.Environment().parse(text)
    except (OSError, UnicodeDecodeError, jinja2.TemplateError) as error:
        raise ConfigError(f"chat template {path}: {error}") from error
    return text


@functools.cache
def known_templates() -> dict[str, Any]:
    """Return the response templates that come with vmkv, each by its name."""
    path = Path(__file__).parent / "server/response_templates.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def read_response_template(name: str) -> Mapping[str, Any]:
    """Return a response template of vmkv by its name, or the contents of a JSON file.

    Raises `ConfigError` if there is neither.
    """
    known = known_templates().get(name)
    if known is not None:
        return known["template"]  # type: ignore[no-any-return]
    try:
        return json.loads(Path(name).read_text(encoding="utf-8"))  # type: ignore[no-any-return]
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"response template {shown(name)} is none of {', '.join(known_templates())}, and no "
            f"JSON file: {one_line(error)}"
        ) from error
