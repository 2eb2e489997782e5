"""Fixtures of the command line's tests: no network, and single-threaded tiny models."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import transformers
from helpers.serving import save_tiny_model

from vmkv.cli.main import main

transformers.logging.set_verbosity_error()
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as a folder; tests do not change it."""
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def complaint(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command line that must fail; return its one-line error message."""

    def run(*arguments: str) -> str:
        capsys.readouterr()
        try:
            status = main(arguments)
        except SystemExit as stopped:  # argparse
            status = stopped.code
        out, err = capsys.readouterr()
        assert status in (1, 2), (status, out, err)
        assert "" == out
        lines = [line for line in err.splitlines() if not line.startswith("[")]  # Progress.
        if lines[0].startswith("usage: "):
            lines = [line for line in lines[1:] if not line.startswith(" ")]
        assert 1 == len(lines), err
        assert lines[0].startswith("vmkv"), err
        assert lines[0].isprintable()
        assert len(lines[0]) < 6000  # argparse repeats the wrong argument.
        return lines[0].removeprefix("vmkv: ")

    return run
