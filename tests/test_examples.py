"""Every example runs, prints its key lines and closes everything; README.md's code runs too.

Each runs in its own process, as a reader would run it. Not covered: how long they take.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from helpers import warm_python
from helpers.serving import save_tiny_model, tiny_llama
from helpers.tiny_models import llama_config

import vmkv

ROOT = Path(__file__).parents[1]

#: Lines that each example must print, in this order.
KEY_LINES = {
    "engine.py": [
        "11 began with a prefix that was there, 13200 tokens not computed again",
        "two samples of one prompt: [6, 6] tokens",
        "the cancelled one ended as 'cancelled'",
        "at the end: 0 B in use by requests",
    ],
    "share_between_processes.py": [
        "exporting 4096 tokens",
        "with 0 B of memory",
        "the first process is gone; token 99 has key 7",
        "4196 tokens",
        "finds 4096 tokens",
    ],
    "map_a_page.py": ["1. reserve", "physical 0 B", "b'hello'", "7. free the addresses"],
    "two_addresses_one_page.py": [
        "allowed: READ_WRITE",
        "allowed: READ\n",
        "b'one page'",
        "the page is not: b'one page'",
        "both are gone: 0 B",
    ],
    "without_transformers.py": ["prompt of 500", "same address: True", "closed", "adopted"],
    "fork.py": [
        "A sequence\nlayers 0-3",
        "tokens #############\n",
        "Its fork",
        "tokens AAAAAAAABBBB##.\n",
        "tokens AAAAAAAABBBB###\n",
        "goes back to token",
        "tokens AAAAAAAA######\n",
        "tokens AAAAAAAA##....\n",
        "copied on write",
        "source holds [1.0, 2.0], fork holds [1.0, 4.0]",
        "fork still holds [1.0, 4.0]",
    ],
    "shared_prompt.py": [
        "64 requests, 1024 tokens in common",
        "without sharing",
        "68,096 tokens computed, 0 prefix hits",
        "with sharing",
        "3,584 tokens computed, 63 prefix hits",
        "mapped beyond",
    ],
    "swap.py": [
        "does not fit: needs 32 MiB",
        "row 0 swapped 4096 tokens ~~~~",
        "row 2 live 4096 tokens ####",
        "the first is back",
        "row 0 live 4096 tokens ####",
        "32 MiB came back to the same address: True, with the same contents: True",
    ],
    "ragged_rows.py": ["row tokens", "padded to the longest", "resident", "of padded"],
}
OWN_BACKEND_LINES = [
    "SmallDevice passes all",
    "HelpfulDevice fails check",
    "cannot grow: needs",
    "host has no more memory",
    "It is as it was",
]
SMALL = ["--layers=2", "--width=128", "--batch=2", "--prompt-tokens=20", "--new-tokens=24"]

DEVICES = ["host", pytest.param("cuda", marks=pytest.mark.gpu)]


def start_script(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a script to its end, without network and display."""
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "MPLBACKEND": "Agg",
        "OMP_NUM_THREADS": "1",  # More threads than cores would wait for each other.
        "PYTHONPATH": str(ROOT),
    }
    return warm_python.run(*arguments, cwd=cwd, env=environment, resource_warnings=True)


def run_script(*arguments: str, cwd: Path) -> str:
    """The output of a script, with single spaces; it must succeed and close everything."""
    done = start_script(*arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr
    assert "ResourceWarning" not in done.stderr, done.stderr
    return re.sub(" +", " ", done.stdout)


def check_lines(output: str, key_lines: list[str]) -> None:
    """Check that all `key_lines` appear in this order."""
    at = 0
    for line in key_lines:
        found = output.find(line, at)
        assert found >= 0, f"{line!r} is missing, or comes too early, in:\n{output}"
        at = found + len(line)


def check_plot(path: Path) -> None:
    """Check that the plot exists, is large enough, and has the curves of both caches."""
    from matplotlib.image import imread

    pixels = imread(path)[..., :3]
    height, width, _ = pixels.shape
    assert height > 500
    assert width > 800
    for color in ((0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)):
        distance = np.abs(pixels - np.array(color) / 255).sum(axis=-1)
        assert (distance < 0.05).sum() > 200, f"no curve in {color}"


# ---- examples -----------------------------------------------------------------------------


def test_all_examples_are_tested():
    """A new example needs key lines here."""
    names = {path.name for path in (ROOT / "examples").glob("*.py")}
    elsewhere = {"your_own_backend.py", "generate.py", "real_model.py", "rollouts.py"}
    assert {*KEY_LINES, *elsewhere} == names


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        ("", 0, ""),
        ("cache = KVCache(HostBackend(), max_tokens=8, max_sequences=1)", 0, "never closed"),
        ("raise ValueError('no')", 1, "ValueError: no"),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('so it is')", 1, "so it is"),
        ("os.kill(os.getpid(), 9)", -9, ""),
    ],
)
def test_start_script_reports_exit_status_and_errors(end, status, said, tmp_path):
    """Also warnings about unclosed objects, which the interpreter writes last."""
    done = start_script("-c", f"import os, sys\nfrom vmkv import *\n{end}", cwd=tmp_path)
    assert (status, "") == (done.returncode, done.stdout)
    assert said in done.stderr
    assert bool(said) == bool(done.stderr), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", KEY_LINES)
def test_example_prints_its_key_lines(name, device, tmp_path):
    output = run_script(str(ROOT / "examples" / name), "--device", device, cwd=tmp_path)
    check_lines(output, KEY_LINES[name])


@pytest.mark.slow
def test_own_backend_example_checks_both_backends(tmp_path):
    """The good backend passes, the bad one is found, and a cache on the small one gets full."""
    output = run_script(str(ROOT / "examples/your_own_backend.py"), cwd=tmp_path)
    check_lines(output, OWN_BACKEND_LINES)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_example_is_short(path):
    """60 lines at most, except for the main example."""
    assert len(path.read_text().splitlines()) <= (270 if path.name == "generate.py" else 60)


# ---- the main example ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", "float32"),
        ("cpu", "bfloat16"),
        pytest.param("cuda", "float32", marks=pytest.mark.gpu),
    ],
)
def test_generate_compares_and_plots(device, dtype, tmp_path):
    """It prints equal tokens and a table of three caches, and saves a plot."""
    output = run_script(
        str(ROOT / "examples/generate.py"),
        *("--device", device, "--dtype", dtype, "--out", "plots"),
        *SMALL,
        cwd=tmp_path,
    )
    check_lines(
        output,
        [
            "Generating 24 tokens for 2 prompts",
            # In half precision tokens may differ, which the output says.
            "The tokens are equal, all 88 of them" if dtype == "float32" else "bfloat16",
            "held at end",
            "DynamicCache",
            "23 times",
            "VMKVCache",
            "0 B 0 times",
            "StaticCache",
            "not run",
            "reserved",
            str(tmp_path / "plots" / "generate.png"),
            "Below:",
        ],
    )
    check_plot(tmp_path / "plots" / "generate.png")


@pytest.mark.slow
def test_generate_uses_a_local_model(tmp_path):
    """With `--model`, weights and tokenizer come from the folder, and prompts are padded."""
    words = ["<pad>", "</s>", "<unk>", "Once", "A", "cache", "is", "The", "memory", "of", "a"]
    vocabulary = tokenizers.models.WordLevel({word: at for at, word in enumerate(words)}, "<unk>")
    tokenizer = tokenizers.Tokenizer(vocabulary)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder = tmp_path / "model"
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>"
    ).save_pretrained(folder)
    transformers.LlamaForCausalLM(llama_config(vocab_size=len(words))).save_pretrained(folder)
    output = run_script(
        str(ROOT / "examples/generate.py"),
        *("--model", str(folder), "--device", "cpu", "--batch", "3", "--new-tokens", "12"),
        cwd=tmp_path,
    )
    answers = ["The tokens are equal", "> Tell me a story", "> Why is", "> How do I"]
    check_lines(output, [f"with {folder} on", *answers, "held at end", "generate.png"])
    check_plot(tmp_path / "out" / "generate.png")


def test_a_missing_real_model_is_reported_in_one_line(tmp_path):
    """`make demo` continues without it, and tests are skipped."""
    block = "import real_model; real_model.PACKAGE = 'no_such_package'; real_model.main()"
    done = start_script("-c", block, cwd=ROOT / "examples")
    assert (1, "") == (done.returncode, done.stdout)
    assert re.fullmatch(r"no real model: .*\n", done.stderr)


@pytest.mark.parametrize("bad", ["--width=100", "--new-tokens=1", "--batch=0"])
def test_generate_refuses_bad_sizes(bad, monkeypatch, capsys):
    """With one line instead of a traceback."""
    monkeypatch.setattr(sys, "argv", ["generate.py", bad])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(ROOT / "examples/generate.py"), run_name="__main__")
    assert "must be" in capsys.readouterr().err


# ---- the README ---------------------------------------------------------------------------


def readme_blocks() -> list[object]:
    """Python blocks of every README, except those that begin with `# needs`."""
    blocks = []
    for path in (ROOT / "README.md", *sorted((ROOT / "vmkv").rglob("README.md"))):
        text = path.read_text()
        for match in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            block = match.group(1)
            if not block.lstrip().startswith("# needs"):
                line = text.count("\n", 0, match.start()) + 1
                blocks.append(pytest.param(block, id=f"{path.parent.name}-{line}"))
    return blocks


@pytest.mark.slow
@pytest.mark.parametrize("block", readme_blocks())
def test_readme_block_runs(block, tmp_path):
    script = tmp_path / "block.py"
    script.write_text(block)
    done = start_script(str(script), cwd=tmp_path)  # Unclosed caches may warn here.
    assert done.returncode == 0, done.stderr


def table_calls() -> list[str]:
    """The calls of the README's table of wants, without those of the shell or with `(...)`."""
    path = ROOT / "README.md"
    text = path.read_text() if path.exists() else ""
    table = text.partition("\n| want | call |\n")[2].partition("\n\n")[0]
    spans = [each for row in table.splitlines()[1:] for each in re.findall("`(.+?)`", row)]
    return [each for each in spans if "(" in each.replace("(...)", "") or "import" in each]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Nothing is closed.
def test_calls_of_the_readmes_table_can_be_pasted(tmp_path, monkeypatch):
    """On the host backend, after `import vmkv` alone."""
    monkeypatch.chdir(tmp_path)
    for name, value in (("TQDM_DISABLE", "1"), ("VMKV_POOL", str(tmp_path / "no pool"))):
        monkeypatch.setenv(name, value)
    model, folder = tiny_llama(), save_tiny_model(tmp_path / "model")
    pool = vmkv.ExtentPool(vmkv.open_backend("host"), 32 << 20, host_budget_bytes=8 << 20)
    rows = vmkv.KVCache(pool, max_tokens=64, max_sequences=4)
    rows.add_layers(range(2), num_kv_heads=2, head_dim=16, dtype=torch.float32)
    engines = []

    class Engine(vmkv.Engine):
        """Is closed at the end, since rows of the table drop theirs."""

        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            engines.append(self)

    monkeypatch.setattr(vmkv, "Engine", Engine)
    engine = vmkv.Engine(model, pool=pool, enable_sleep_mode=True)
    known = {"vmkv": vmkv, "copy": copy, "model": model, "prompts": [[5, 6, 7]], "f": int}
    known |= {"engine": engine, "pool": pool, "cache": rows, "num_bytes": 4096, "path": "saved"}
    calls = table_calls()
    assert len(calls) > 20
    for call in calls:
        with contextlib.closing(rows.open()) as sequence:
            sequence.append(10)
            names = {**known, "sequence": sequence, "model": tiny_llama()}
            if "copy" in call:
                names["cache"] = vmkv.VMKVCache(model.config)
            if "cache=cache" in call:
                names["cache"] = vmkv.RaggedCache(model.config)
            call = call.replace('"MODEL"', repr(str(folder))).replace("cuda:0", "host")
            exec(call.replace(" << 30", " << 20"), names)  # A few MiB instead of GiB.
    assert len(engines) > 2
    for each in (*engines, rows, pool):
        each.close()
    names.clear()
    gc.collect()  # Caches that were dropped warn now, not in another test.
