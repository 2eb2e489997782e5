"""The bench of rollouts runs in a small form, by TRL's own generation and by ours.

Smoke runs only. Not covered: vLLM, and whatever needs a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "bench" / "bench_rollout.py"


def run(path: Path, *options: object) -> tuple[dict[str, Any], subprocess.CompletedProcess[str]]:
    """Its record, and what it said."""
    command = [sys.executable, str(SCRIPT), "--smoke", "--json", str(path), *map(str, options)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text()), done


@pytest.mark.parametrize(
    ("shape", "ways"),
    [("1b", ["generate", "continuous_batching", "vmkv"]), ("8b", ["generate", "vmkv"])],
)
def test_each_way_trains_with_the_same_sizes(tmp_path: Path, shape: str, ways: list[str]) -> None:
    """Each completion has the tokens that were asked for, or the bench would fail."""
    record, done = run(tmp_path / "record.json", "--shape", shape, "--ways", *ways)
    assert [row["way"] for row in record["rows"]] == ways
    for row in record["rows"]:
        assert "failed" not in row, done.stdout
        parts = row["generation_s"] + row["scoring_s"] + row["training_s"]
        assert row["step_s"] == pytest.approx(parts)
    (figure,) = record["figures"]
    *rivals, ours = (row["step_s"] for row in record["rows"])
    assert figure["got"] == pytest.approx(ours / min(rivals))


def test_a_way_that_fails_says_why_and_leaves_the_others(tmp_path: Path) -> None:
    """A vLLM that cannot be loaded; and a second run adds to the record of the first."""
    broken, logs = tmp_path / "packages" / "vllm", tmp_path / "logs"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise OSError('libcuda.so.9: no such file')")
    options = ("--vllm-path", broken.parent, "--logs", logs)
    first, done = run(tmp_path / "first.json", "--ways", "vllm", "generate", *options)
    failed, plain = first["rows"]
    assert "libcuda.so.9" in failed["failed"]
    assert "Traceback" in done.stderr
    assert "Traceback" in (logs / "1b-vllm-0.3.log").read_text()
    assert "step_s" in plain
    assert not first["figures"]
    second, _ = run(tmp_path / "second.json", "--ways", "vmkv", "--after", tmp_path / "first.json")
    assert first["rows"] == second["rows"][:2]
    (figure,) = second["figures"]
    assert figure["got"] == pytest.approx(second["rows"][2]["step_s"] / plain["step_s"])


def test_ways_without_time_are_left_out(tmp_path: Path) -> None:
    record, _ = run(tmp_path / "record.json", "--ways", "vmkv", "generate", "--total-s", 1)
    assert ["no time was left"] * 2 == [row["stopped"] for row in record["rows"]]
