"""`vmkv serve --replicas` as a process."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from helpers.serving import tiny_tokenizer
from helpers.tiny_models import kernel_model

COMMAND = [sys.executable, "-m", "vmkv.cli", "serve"]
REPLICAS = ["--replicas", "2", "--device", "cpu", "--port", "0"]


@contextlib.contextmanager
def serving(
    folder: Path, log: Path, *options: str, **environment: str
) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """Yield a server's process, the line that it prints and its URL; SIGTERM must end it."""
    command = [*COMMAND, str(folder), *options]
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **environment},
        ) as child,
    ):
        try:
            assert child.stdout is not None
            line = child.stdout.readline()
            found = re.search(r"http://[\d.]+:\d+", line)
            assert found, log.read_text()
            yield child, line, found.group(0)
            child.send_signal(signal.SIGTERM)
            assert 0 == child.wait(60), log.read_text()
        finally:
            child.kill()


@pytest.mark.ray
@pytest.mark.slow
def test_replicas_serve_and_end_on_sigterm(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    psutil = pytest.importorskip("psutil")
    options = [*REPLICAS, "--served-model-name", "tiny", "--memory", "0.0625"]
    with serving(model, tmp_path / "log", *options, HOME=str(tmp_path)) as (child, line, url):
        assert "with 2 replicas" in line
        body = {"model": "tiny", "prompt": "A row", "max_tokens": 4, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 4
        processes = [psutil.Process(child.pid), *psutil.Process(child.pid).children(recursive=True)]
        its = [each for process in processes for each in process.net_connections("inet")]
        heard = {each.laddr.ip.removeprefix("::ffff:") for each in its if each.status == "LISTEN"}
        assert {"127.0.0.1"} == heard
        assert 0o600 == stat.S_IMODE((tmp_path / ".ray" / "auth_token").stat().st_mode)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has no second GPU")
def test_each_replica_has_a_gpu(tmp_path: Path) -> None:
    """Both answer, with the same tokens, and SIGTERM frees both devices."""
    pytest.importorskip("ray")
    kernel_model("cpu").save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    before = [torch.cuda.mem_get_info(at)[0] for at in (0, 1)]
    options = ["--replicas", "2", "--port", "0", "--memory", "0.5", "--max-model-len", "256"]
    with serving(tmp_path / "model", tmp_path / "log", *options) as (_, _, url):
        taken = [free - torch.cuda.mem_get_info(at)[0] for at, free in enumerate(before)]
        assert min(taken) > 2**28, taken  # A context at least.
        with httpx.Client(base_url=url, timeout=120) as client:
            name = client.get("/v1/models").json()["data"][0]["id"]
            body = {"model": name, "max_tokens": 30, "temperature": 0, "ignore_eos": True}

            def ask(first: int) -> str:
                response = client.post("/v1/completions", json={**body, "prompt": [first, 9]})
                return str(response.json()["choices"][0]["text"])

            with ThreadPoolExecutor(16) as threads:
                told = [list(threads.map(ask, range(5, 40))) for _ in range(2)]
            assert told[0] == told[1]
            page = client.get("/metrics").text
        assert 2 == len(set(re.findall(r'vmkv_steps_total\{replica="([^"]+)"\}', page))), page


@pytest.mark.ray
@pytest.mark.slow
def test_replicas_that_cannot_start_give_a_one_line_error(model: Path, tmp_path: Path) -> None:
    """With the message of the engine, which cannot load its weights."""
    pytest.importorskip("ray")
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    (folder / "model.safetensors").write_bytes(b"")
    command = [*COMMAND, str(folder), *REPLICAS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("vmkv: the replicas could not be started: ")
    assert "cannot load" in last
