"""Options that are wrong regardless of the model's weights are refused before anything is started.

By the same checks for an engine in a process, for ranks, and for replicas. The values that each
option takes are in `test_mistakes.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

Complaint = Callable[..., str]

WAYS = {
    "an engine": [],
    "ranks": ["--tensor-parallel", "2"],
    "replicas": ["--replicas", "2"],
}
#: Wrong options, with a part of the message. The model has two layers.
WRONG = [
    (["--skip-layers", "1"], "are for --kv-dtype"),
    (["--kv-scales", "{scales}"], "are for --kv-dtype"),
    (["--kv-dtype", "fp8", "--skip-layers", "1,2"], "--skip-layers names [2]"),
    (["--kv-dtype", "fp8", "--kv-scales", "/nowhere"], "No such file"),
    (["--kv-dtype", "fp8", "--kv-scales", "{scales}"], "calibrate this one"),
    (["--max-num-seqs", "64", "--max-num-batched-tokens", "63"], "64"),
    (["--attention-backend", "flash9"], "no attention backend is called"),
    (["--tokenizer", "/nowhere"], "no tokenizer"),
    (["--chat-template", "/nowhere"], "/nowhere"),
    (["--generation-config", "/nowhere"], "/nowhere"),
    (["--response-template", "qwen"], "'qwen' is none of harmony, "),
    (["--response-template", "{scales}"], "no valid response template"),
    (["--api-key-file", "/nowhere"], "/nowhere"),
    (["--sleep-keeps-prefixes", "--swap", "1"], "needs --sleep-after"),
    (["--disk", "files", "--swap", "1"], "--disk and --disk-size go together"),
    (["--speculative-config", '{"method": "draft_model", "model": "/nowhere"}'], "/nowhere"),
    (["--disk", "files", "--disk-size", "1"], "needs --swap"),
    (["--sleep-keeps-prefixes", "--sleep-after", "9"], "--swap"),
]


@pytest.fixture(scope="module")
def names(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A model, and the scales of another one."""
    folder = tmp_path_factory.mktemp("scales")
    scales = {"format": "vmkv kv scales", "version": 1, "model": "another", "layers": []}
    (folder / "scales.json").write_text(json.dumps(scales))
    return {"{scales}": str(folder / "scales.json"), "{model}": str(model)}


@pytest.fixture(autouse=True)
def nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if a process is started; hide Ray, which the checks do not need."""

    def start(*_: object, **__: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr("multiprocessing.process.BaseProcess.start", start)
    monkeypatch.setattr(subprocess.Popen, "__init__", start)
    # The process that makes an engine meanwhile is ended by the error.
    nothing = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr("vmkv.serve.start.start_process", lambda make: nothing)
    monkeypatch.setitem(sys.modules, "ray", None)


@pytest.mark.parametrize("way", WAYS)
def test_wrong_options_are_refused_before_the_start(
    complaint: Complaint, names: dict[str, str], way: str
) -> None:
    """In one line, the same for each way to serve."""
    common = ["serve", "{model}", "--port", "0", "--device", "cpu", *WAYS[way]]
    for options, words in WRONG:
        assert words in complaint(*[names.get(word, word) for word in [*common, *options]])


def test_impossible_ranks_are_refused_before_the_start(
    complaint: Complaint, names: dict[str, str], tmp_path: Path
) -> None:
    """Scales of all heads, an indivisible model, and devices that are not the first ones."""
    scales = json.loads(Path(names["{scales}"]).read_text())
    layer = {"keys": [1.0], "values": [1.0]}
    scales |= {"model": Path(names["{model}"]).name, "layers": [layer, layer]}
    (tmp_path / "own.json").write_text(json.dumps(scales))
    common = ["serve", names["{model}"], "--port", "0", "--device", "cpu", "--tensor-parallel"]
    eight_bits = ["--kv-dtype", "fp8", "--kv-scales", str(tmp_path / "own.json")]
    assert "of all heads" in complaint(*common, "2", *eight_bits)
    assert "cannot be divided" in complaint(*common, "3")
    assert "the first GPUs" in complaint(*common, "2", "--device", "cuda:1")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_gpus_of_a_ray_cluster_are_not_checked_locally(
    complaint: Complaint, names: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server may run on a machine without GPUs."""
    line = ["serve", names["{model}"], "--port", "0", "--device", "cuda", "--replicas", "2"]
    assert "torch sees no CUDA device" in complaint(*line)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert "pip install 'vmkv[ray]'" in complaint(*line)


def test_a_missing_ray_is_named_with_the_command_that_installs_it(
    complaint: Complaint, names: dict[str, str]
) -> None:
    line = ["serve", names["{model}"], "--port", "0", "--device", "cpu", "--replicas", "2"]
    assert "pip install 'vmkv[ray]'" in complaint(*line)
