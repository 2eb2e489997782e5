"""A real `vmkv serve` process with a real small model, for client libraries that run without vmkv.

`make clients` runs these tests in environments that have the clients and no vmkv. The variable
VMKV_PYTHON names the interpreter of the environment that has it.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
Serve = Callable[..., AbstractContextManager[str]]
#: Nothing here asks a network: neither a hub, nor a list of prices, nor a collector of traces.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "DO_NOT_TRACK": "1",
}


@pytest.fixture(scope="session")
def python() -> str:
    """The interpreter that has vmkv."""
    found = os.environ.get("VMKV_PYTHON")
    if not found:
        pytest.skip("run by `make clients`, which names the interpreter that has vmkv")
    return found


@pytest.fixture(scope="session")
def model_folder(python: str) -> str:
    """The model, or a skip with the package to install."""
    script = ROOT / "examples" / "real_model.py"
    made = subprocess.run([python, script], capture_output=True, text=True, check=False)
    if made.returncode:
        reason = made.stderr.strip().splitlines()[-1]
        if not reason.startswith("no real model"):
            pytest.fail(made.stderr)
        pytest.skip(reason)
    return made.stdout.strip()


@pytest.fixture(scope="session")
def url(serve: Serve, model_folder: str) -> Iterator[str]:
    """The address of one server for all tests."""
    # The model was taught no format of tool calls, so it is told one, as other servers would be.
    with serve(model_folder, "--response-template", "qwen3") as address:
        yield address


@pytest.fixture(scope="session")
def serve(python: str) -> Serve:
    """Return a context manager that serves a model of a folder, with more options."""
    return partial(_serving, python)


@contextlib.contextmanager
def _serving(python: str, model_folder: str, *options: str) -> Iterator[str]:
    """Serve a model as "smol"; yield the address. The server must end when it is told to."""
    command = [python, "-m", "vmkv.cli", "serve", model_folder, "--served-model-name", "smol"]
    command += ["--port", "0", "--device", "cpu", "--dtype", "float32", "--memory", "1", *options]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert child.stdout is not None
    with child, child.stdout:
        try:
            for line in child.stdout:
                if found := re.search(r"http://[\d.]+:\d+", line):
                    yield found.group(0)
                    break
            else:
                pytest.fail("the server has ended without an address; see its messages above")
            child.terminate()
            assert 0 == child.wait(60)
        finally:
            child.kill()
