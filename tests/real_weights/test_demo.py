"""`make demo` with a real model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.real_weights, pytest.mark.slow]

ROOT = Path(__file__).parents[2]


def test_demo_shows_what_both_caches_say(loaded: Any, tmp_path: Path) -> None:
    """It prints the model's answers to its questions and saves the plot."""
    command = [sys.executable, ROOT / "examples" / "generate.py", "--model", loaded.folder]
    done = subprocess.run(
        [*command, "--device", "cpu", "--batch", "2", "--new-tokens", "16", "--out", tmp_path],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    assert "The tokens are equal" in done.stdout
    for question in ("Tell me a story about a lighthouse.", "Why is the sky blue?"):
        answer = loaded.text(loaded.expected(loaded.chat(question)))
        assert f"> {question}\n  {answer}" in done.stdout
    assert (tmp_path / "generate.png").stat().st_size > 1000
