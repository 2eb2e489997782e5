"""Whatever is known to be wrong without a model is answered before anything is started.

By one set of checks for all ways to serve: an engine in a process of its own, ranks that share a
model, and replicas. What each option takes at all is in `test_mistakes.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

Complaint = Callable[..., str]

WAYS = {
    "an engine": [],
    "ranks": ["--tensor-parallel", "2"],
    "replicas": ["--replicas", "2"],
}
#: What is wrong, and a word of what is said. The model has two layers.
WRONG = [
    (["--skip-layers", "1"], "are for kv_dtype"),
    (["--kv-scales", "{scales}"], "are for kv_dtype"),
    (["--kv-dtype", "fp8", "--skip-layers", "1,2"], "skip_layers names [2]"),
    (["--kv-dtype", "fp8", "--kv-scales", "/nowhere"], "No such file"),
    (["--kv-dtype", "fp8", "--kv-scales", "{scales}"], "calibrate this one"),
    (["--max-num-seqs", "64", "--max-num-batched-tokens", "63"], "64"),
    (["--attention-backend", "flash9"], "no attention backend is called"),
    (["--tokenizer", "/nowhere"], "no tokenizer"),
    (["--chat-template", "/nowhere"], "/nowhere"),
    (["--api-key-file", "/nowhere"], "/nowhere"),
]


@pytest.fixture(scope="module")
def names(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What command lines name: a model, and the scales of another."""
    folder = tmp_path_factory.mktemp("scales")
    scales = {"format": "vmkv kv scales", "version": 1, "model": "another", "layers": []}
    (folder / "scales.json").write_text(json.dumps(scales))
    return {"{scales}": str(folder / "scales.json"), "{model}": str(model)}


@pytest.fixture(autouse=True)
def nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes and Ray fail the test; nobody needs Ray to be told that something else is wrong."""

    def start(*_: object, **__: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr("multiprocessing.process.BaseProcess.start", start)
    monkeypatch.setattr(subprocess.Popen, "__init__", start)
    monkeypatch.setitem(sys.modules, "ray", None)


@pytest.mark.parametrize("way", WAYS)
def test_what_is_wrong_is_said_before_anything_is_started(
    complaint: Complaint, names: dict[str, str], way: str
) -> None:
    """In one line, and the same one for each way to serve."""
    common = ["serve", "{model}", "--port", "0", "--device", "cpu", *WAYS[way]]
    for options, words in WRONG:
        assert words in complaint(*[names.get(word, word) for word in [*common, *options]])


def test_ranks_are_not_started_for_scales_of_all_heads(
    complaint: Complaint, names: dict[str, str], tmp_path: Path
) -> None:
    """Nor for a model that cannot be divided among them, nor on devices that are not there."""
    scales = json.loads(Path(names["{scales}"]).read_text())
    layer = {"keys": [1.0], "values": [1.0]}
    scales |= {"model": Path(names["{model}"]).name, "layers": [layer, layer]}
    (tmp_path / "own.json").write_text(json.dumps(scales))
    common = ["serve", names["{model}"], "--port", "0", "--device", "cpu", "--tensor-parallel"]
    eight_bits = ["--kv-dtype", "fp8", "--kv-scales", str(tmp_path / "own.json")]
    assert "of all heads" in complaint(*common, "2", *eight_bits)
    assert "cannot be divided" in complaint(*common, "3")
    assert "the first GPUs" in complaint(*common, "2", "--device", "cuda:1")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--trace", "trace.json"], "--trace is of one engine"),
        (["--device", "cuda:1"], "CUDA_VISIBLE_DEVICES"),
        (["--tensor-parallel", "2"], "take one"),
    ],
)
def test_replicas_refuse_what_is_of_one_engine(
    complaint: Complaint, options: list[str], words: str
) -> None:
    """Before the model's configuration is looked for."""
    line = ["serve", "/nowhere", "--replicas", "2", "--device", "cpu"]
    assert words in complaint(*line, *options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_the_gpus_of_a_cluster_are_not_looked_for_here(
    complaint: Complaint, names: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server may run where there is none: Ray knows what its cluster has."""
    line = ["serve", names["{model}"], "--port", "0", "--device", "cuda", "--replicas", "2"]
    assert "torch sees no CUDA device" in complaint(*line)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert "pip install 'vmkv[ray]'" in complaint(*line)


def test_a_missing_ray_is_named_with_the_command_that_installs_it(
    complaint: Complaint, names: dict[str, str]
) -> None:
    """When all else is right."""
    line = ["serve", names["{model}"], "--port", "0", "--device", "cpu", "--replicas", "2"]
    assert "pip install 'vmkv[ray]'" in complaint(*line)
