"""Sampling parameters that requests leave out come from the model's generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vmkv import ConfigError
from vmkv.cli.models import load_sampling_defaults


def configured(folder: Path, **values: Any) -> str:
    """A folder with a generation_config.json."""
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(values))
    return str(folder)


def test_the_file_has_names_of_its_own(tmp_path: Path) -> None:
    """Null is none, and other members are not for requests."""
    its = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.01, "do_sample": True}
    its |= {"repetition_penalty": 1.05, "max_new_tokens": 512, "eos_token_id": [1, 2]}
    model, other = configured(tmp_path / "a", **its), configured(tmp_path / "b", top_k=None)
    expected = {name: its[name] for name in ("temperature", "top_p", "top_k", "min_p")}
    expected |= {"repetition_penalty": 1.05, "max_tokens": 512}
    assert expected == load_sampling_defaults(model, "auto")
    assert expected == load_sampling_defaults(other, model)
    assert {} == load_sampling_defaults(other, "auto") == load_sampling_defaults(model, "vllm")
    assert {} == load_sampling_defaults(str(tmp_path), "auto"), "there is no such file"


@pytest.mark.parametrize("text", ['{"top_p": 7}', '{"top_k": "x"}', "{", "[]", "\xff"])
def test_what_cannot_be_used_is_refused(tmp_path: Path, text: str) -> None:
    """The message says how to serve without it."""
    (tmp_path / "generation_config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"generation_config\.json .*--generation-config vllm"):
        load_sampling_defaults(str(tmp_path), "auto")


def test_a_folder_without_the_file_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigError, match=r"generation_config\.json"):
            load_sampling_defaults(configured(tmp_path / "model"), str(folder))
