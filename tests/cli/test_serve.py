"""`vmkv serve` as a process: start, serving, SIGTERM, and the loss of its engine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TypeAlias

import httpx
import pytest
from helpers.serving import MAX_TOKENS, engines_of, serving_process
from helpers.tiny_models import VERSION
from helpers.warm_python import Child
from transformers import AutoConfig

from vmkv.cli.main import main

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow

Serving: TypeAlias = contextlib.AbstractContextManager[tuple[Child, str]]


def serving(model: Path, *options: str, status: int = 0) -> Serving:
    """Serve the model as `tiny`; see `serving_process`."""
    its = [str(model), "--served-model-name", "tiny", "--memory", "0.0625", *options]
    return serving_process(*its, status=status)


def test_sigterm_drains(model: Path, tmp_path: Path) -> None:
    """A running stream ends with all its tokens, and then the server with status 0."""
    openai = pytest.importorskip("openai")
    keys, trace = tmp_path / "keys", tmp_path / "trace.json"
    keys.write_text("secret\n")
    options = ["--api-key-file", str(keys), "--trace", str(trace), "--max-concurrent", "2"]
    options += ["--kv-dtype", "fp8", "--skip-layers", "0"]
    with serving(model, *options) as (child, url):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0, timeout=120)
        assert MAX_TOKENS == client.models.list().data[0].model_dump()["max_model_len"]
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()
        stream = client.completions.create(
            model="tiny",
            prompt="A row",
            max_tokens=100,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        pieces = iter(stream)
        first = next(pieces)
        host, port = url.removeprefix("http://").split(":")
        child.send_signal(signal.SIGTERM)
        rest = list(pieces)
        assert first.choices[0].finish_reason is None
        assert "length" == rest[-2].choices[0].finish_reason
        assert 100 == rest[-1].usage.completion_tokens
        assert 0 == child.wait(60)
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((host, int(port)), timeout=5)
    events = json.loads(trace.read_text())
    assert 100 <= len([each for each in events if each["name"] == "step"])


def test_the_start_is_shown_and_an_idle_server_ends_on_sigint(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Phases with seconds, a summary, and a warning of memory that shortens requests.

    On stderr, which is no terminal here. A second server on the port is refused.
    """
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = 65536
    (folder / "config.json").write_text(json.dumps(config))
    with serving(folder, "--memory", "0.004") as (child, url):
        (served,) = httpx.get(f"{url}/v1/models").json()["data"]
        assert 4096 < served["max_model_len"] < 65536
        body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4}
        httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert "ok" == httpx.get(f"{url}/health").json()["status"]
        assert 2 == main(["serve", str(model), "--port", url.rsplit(":", 1)[1]])
        assert "is another server running?" in capsys.readouterr().err
        child.send_signal(signal.SIGINT)
        said = child.stderr.read()
    for line in (
        r"\[ *[\d.]+ s\] importing torch and transformers\n",
        r"\[ *[\d.]+ s\] loading weights\n",
        r"the engine is ready: .*loading the tokenizer [\d.]+ s",
        r"the engine is ready: .*loading weights [\d.]+ s",
        r"\[ *[\d.]+ s\] listening\n",
        r"the model takes up to 65536: raise --memory",
        r"POST /v1/completions 200 prompt=3 cached=0 output=\d ",
    ):
        assert re.search(line, said), said


def wait_for_end(pid: int) -> None:
    """Wait until a process has ended; it need not be a child of this one."""
    with contextlib.suppress(ProcessLookupError):
        poll = select.poll()
        poll.register(os.pidfd_open(pid), select.POLLIN)
        assert poll.poll(60_000), "the process does not end"


def test_a_killed_engine_is_restarted_and_ends_with_its_server(model: Path) -> None:
    """Health and requests get 503 until then; no process keeps the memory of a killed server."""
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4}
    with (
        serving(model, status=-signal.SIGKILL) as (child, url),
        httpx.Client(timeout=60) as client,
    ):
        [engine] = engines_of(child.pid)
        os.kill(engine, signal.SIGKILL)
        wait_for_end(engine)
        health = client.get(f"{url}/health")
        assert health.status_code == 503
        assert "ended" in health.json()["reason"]
        assert client.post(f"{url}/v1/completions", json=body).status_code == 503
        while health.status_code == 503:
            health = client.get(f"{url}/health")
        answer = client.post(f"{url}/v1/completions", json=body)
        assert answer.json()["usage"]["completion_tokens"] == 4
        [engine] = engines_of(child.pid)
        child.kill()
        wait_for_end(engine)


def test_a_killed_engine_leaves_conversations_in_files(model: Path, tmp_path: Path) -> None:
    """The engine that is started in its place finds them."""
    body = {"model": "tiny", "prompt": [5, 6, 7] * 20, "max_tokens": 4, "temperature": 0}
    disk = ["--disk", str(tmp_path / "files"), "--disk-size", "0.0625"]
    with (
        serving(model, "--swap", "0.0625", *disk) as (child, url),
        httpx.Client(timeout=60) as client,
    ):
        told = client.post(f"{url}/v1/completions", json=body).json()
        written = re.compile(r'vmkv_sharing_bytes_total{how="written"} (\S+)')
        config = AutoConfig.from_pretrained(model)
        token_bytes = 8 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        found = None  # A conversation is written from its end: the first block is the last one.
        while found is None or float(found[1]) < 48 * token_bytes:
            client.post(f"{url}/v1/completions", json={**body, "prompt": [9, 8]})
            found = written.search(client.get(f"{url}/metrics").text)
        [engine] = engines_of(child.pid)
        os.kill(engine, signal.SIGKILL)
        wait_for_end(engine)
        while client.get(f"{url}/health").status_code == 503:
            pass
        again = client.post(f"{url}/v1/completions", json=body).json()
        assert told["choices"][0]["text"] == again["choices"][0]["text"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 40
        loads = 'vmkv_tier_loads_total{tier="files"} 1.0'  # Statistics may be a second old.
        while loads not in client.get(f"{url}/metrics").text:
            client.post(f"{url}/v1/completions", json={**body, "prompt": [9, 8]})
        child.send_signal(signal.SIGTERM)


def test_an_idle_model_sleeps_until_a_request(model: Path) -> None:
    """With a line in the log for each, and a gauge."""
    body = {"model": "tiny", "prompt": [5, 6, 7] * 20, "max_tokens": 4, "temperature": 0}
    options = ["--sleep-after", "0.05", "--swap", "0.0625", "--sleep-keeps-prefixes"]
    with serving(model, *options) as (child, url), httpx.Client(timeout=60) as client:
        told = []
        for _ in range(2):
            answer = client.post(f"{url}/v1/completions", json=body).json()
            told.append(answer["choices"][0]["text"])
            while not client.get(f"{url}/is_sleeping").json()["is_sleeping"]:
                pass
            assert client.get(f"{url}/health").status_code == 200
            assert "\nvmkv_sleeping 1.0\n" in client.get(f"{url}/metrics").text
        assert told[0] == told[1]
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached > 40, "the prefix has slept as well"
        assert client.post(f"{url}/wake_up").status_code == 200
        child.send_signal(signal.SIGTERM)
        log = child.stderr.read()
    assert re.search(r"the engine sleeps: [\d.]+ KiB of weights, ", log)
    assert 1 < log.count("the engine wakes: ") <= log.count("the engine sleeps: ")


@pytest.mark.skipif(VERSION < (5, 17), reason="transformers has no plans to divide models by")
def test_ranks_do_not_print_progress_bars(model: Path) -> None:
    """Transformers shows a bar while it loads weights."""
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4}
    with serving(model, "--tensor-parallel", "2") as (child, url):
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 4
        child.send_signal(signal.SIGTERM)
        said = child.stderr.read()
    assert "Loading weights" not in said


def test_sigterm_during_the_start_ends_the_engine(model: Path, tmp_path: Path) -> None:
    """The engine's process ends before the server, whose status is the signal."""
    trace = tmp_path / "trace"
    os.mkfifo(trace)
    command = [sys.executable, "-m", "vmkv.cli", "serve", str(model), "--port", "0"]
    child = subprocess.Popen([*command, "--device", "cpu", "--trace", str(trace)])
    try:
        with trace.open("rb"):  # The engine's process has opened the file.
            [engine] = engines_of(child.pid)
            child.send_signal(signal.SIGTERM)
            assert -signal.SIGTERM == child.wait(60)
            assert not Path(f"/proc/{engine}").exists()
    finally:
        child.kill()
        child.wait()


_LOSES_AN_EXCEPTION = """
import contextlib, signal, sys
from vmkv.cli.main import main

class Loses:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            with contextlib.suppress(BaseException):
                signal.raise_signal({number})

# A job in the background of a shell is started with SIGINT ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Loses())
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_imports_ends_the_server(model: Path, number: signal.Signals) -> None:
    """Imports may suppress the exception of the signal's handler."""
    code = _LOSES_AN_EXCEPTION.format(number=int(number))
    options = ["serve", str(model), "--port", "0", "--device", "cpu"]
    child = subprocess.Popen([sys.executable, "-c", code, *options], stderr=subprocess.PIPE)
    try:
        _, said = child.communicate(timeout=120)
    finally:
        child.kill()
    assert {signal.SIGTERM: -signal.SIGTERM, signal.SIGINT: 130}[number] == child.returncode
    assert b"Traceback" not in said


def test_sampling_defaults_are_the_models(model: Path, tmp_path: Path) -> None:
    """With top_k=1 four samples are equal; a request may have values of its own."""
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    its = {"eos_token_id": 1, "top_k": 1, "max_new_tokens": 9}
    (folder / "generation_config.json").write_text(json.dumps(its))
    with serving(folder) as (child, url), httpx.Client(base_url=url, timeout=60) as client:
        line = child.stdout.readline()
        assert line.startswith("default sampling parameters: top_k=1, max_tokens=9")
        for own, expected in (({}, (1, 9)), ({"top_k": 0, "max_tokens": 12}, (4, 12))):
            body = {"prompt": "A row", "n": 4, "ignore_eos": True, "seed": 1} | own
            answer = client.post("/v1/completions", json=body).json()
            texts = {each["text"] for each in answer["choices"]}
            assert expected == (len(texts), answer["usage"]["completion_tokens"] // 4)
        chat = {"messages": [{"role": "user", "content": "a"}], "ignore_eos": True}
        answer = client.post("/v1/chat/completions", json=chat).json()
        assert 9 == answer["usage"]["completion_tokens"]
        child.send_signal(signal.SIGTERM)
