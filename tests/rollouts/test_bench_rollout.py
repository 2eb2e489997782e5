"""The bench of rollouts runs in a small form, by TRL's own generation and by ours.

Smoke runs only. Not covered: vLLM, and whatever needs a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "bench" / "bench_rollout.py"


@pytest.mark.parametrize(
    ("shape", "ways"),
    [("1b", ["generate", "continuous_batching", "vmkv"]), ("8b", ["generate", "vmkv"])],
)
def test_each_way_trains_with_the_same_sizes(tmp_path: Path, shape: str, ways: list[str]) -> None:
    """Each completion has the tokens that were asked for, or the bench would fail."""
    path = tmp_path / "record.json"
    command = [sys.executable, str(SCRIPT), "--smoke", "--json", str(path), "--shape", shape]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--ways", *ways], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(path.read_text())
    assert [row["way"] for row in record["rows"]] == ways
    for row in record["rows"]:
        assert "failed" not in row, done.stdout
        parts = row["generation_s"] + row["scoring_s"] + row["training_s"]
        assert row["step_s"] == pytest.approx(parts)
    (figure,) = record["figures"]
    *rivals, ours = (row["step_s"] for row in record["rows"])
    assert figure["got"] == pytest.approx(ours / min(rivals))
