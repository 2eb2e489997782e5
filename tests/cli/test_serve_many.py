"""`vmkv serve A B`: models behind one address, each with an engine, which share one memory."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
from pathlib import Path

import httpx
import pytest
import torch
import transformers
from helpers.serving import engines_of, serving_process, tiny_llama, tiny_tokenizer
from helpers.tiny_models import VERSION

from vmkv.cli.main import main

ROOT = Path(__file__).parents[2]
MEMORY = "0.0625"


@pytest.fixture(scope="module")
def models(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two models with other weights and lengths, as folders."""
    other = tmp_path_factory.mktemp("other")
    changed = tiny_llama()
    with torch.no_grad():
        changed.lm_head.weight[2:] = changed.lm_head.weight[2:].flip(0).clone()
    changed.config.max_position_embeddings = 512
    changed.save_pretrained(other)
    tiny_tokenizer().save_pretrained(other)
    return [str(model), str(other)]


def plain(name: str, prompt: list[int]) -> list[int]:
    """Return the tokens that transformers generates."""
    model = transformers.AutoModelForCausalLM.from_pretrained(name)
    answer = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
    return answer[0, len(prompt) :].tolist()


def asked(client: httpx.Client, url: str, **body: object) -> httpx.Response:
    """Ask for eight likeliest tokens."""
    its = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    return client.post(f"{url}/v1/completions", json={**its, "ignore_eos": True, **body})


@pytest.mark.slow
def test_models_are_chosen_by_name_and_do_not_disturb_each_other(
    models: list[str], tmp_path: Path
) -> None:
    """Names, lengths, metrics, files and `vmkv top` by model; an engine that dies starts anew."""
    expected = [plain(name, [5, 6, 7]) for name in models]
    assert expected[0] != expected[1]
    its = [*models, "--memory", MEMORY, "--enable-sleep-mode", "--swap", MEMORY]
    its += ["--disk", str(tmp_path), "--disk-size", MEMORY]
    with serving_process(*its, drains=True) as (child, url), httpx.Client(timeout=60) as client:
        assert re.fullmatch(
            r"other programs join its memory at /\S+/pool.sock\n", child.stdout.readline()
        )
        listed = client.get(f"{url}/v1/models").json()["data"]
        assert models == [each["id"] for each in listed]
        assert listed[1]["max_model_len"] == 512
        for name, tokens in (*zip(models, expected, strict=True), (None, expected[0])):
            choice = asked(client, url, model=name).json()["choices"][0]
            assert choice["token_ids"] == tokens
        answer = asked(client, url, model="third")
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"
        assert f"{models[0]!r} and {models[1]!r} are" in answer.json()["error"]["message"]
        body = {"prompt": "ab", "model": models[1]}
        assert client.post(f"{url}/tokenize", json=body).json()["max_model_len"] == 512

        assert client.post(f"{url}/sleep", params={"model": models[1]}).status_code == 200
        sleeping = [
            client.get(f"{url}/is_sleeping", params=its).json()["is_sleeping"]
            for its in ({}, {"model": models[0]}, {"model": models[1]})
        ]
        assert sleeping == [False, False, True]
        assert client.post(f"{url}/sleep", params={"model": "third"}).status_code == 404
        answer = asked(client, url, model=models[1])
        assert answer.json()["choices"][0]["token_ids"] == expected[1]

        text = client.get(f"{url}/metrics").text
        for number, name in zip((2, 2), models, strict=True):
            label = f'finish_reason="length",model_name="{name}"'
            assert f"vmkv_requests_total{{{label}}} {number}.0" in text
            assert f'vllm:num_requests_running{{model_name="{name}"}} 0.0' in text
            assert re.search(rf'vmkv_pool_bytes{{member="{name}",state="given"}} \d', text)
        assert text.count("# TYPE vllm:num_requests_running ") == 1
        out = io.StringIO()
        assert main(["top", url, "--once"], out) == 0
        assert f"model {models[0]}\n" in out.getvalue()
        assert out.getvalue().count("\nrequests ") == 2

        first, second = engines_of(child.pid)
        os.kill(first, signal.SIGKILL)
        while asked(client, url, model=models[0]).status_code == 200:
            pass
        assert asked(client, url, model=models[1]).status_code == 200
        health = client.get(f"{url}/health")
        assert health.status_code == 200
        assert health.json()["reason"].startswith(f"{models[0]}: the engine has ended")
        while client.get(f"{url}/health").json()["reason"] is not None:
            assert asked(client, url, model=models[1]).status_code == 200
        assert asked(client, url, model=models[0]).json()["choices"][0]["token_ids"] == expected[0]
        assert second in engines_of(child.pid)
        folders = {each.name for each in tmp_path.iterdir()}
        assert folders == {f"model-{name.replace('/', '--')}" for name in models}
        for folder in folders:
            assert (tmp_path / folder / "lock").exists()


@pytest.mark.slow
def test_lazy_models_are_loaded_by_their_first_requests(models: list[str], tmp_path: Path) -> None:
    """A model that cannot be loaded fails its requests, and no others; the next one tries again."""
    broken = tmp_path / "broken"
    shutil.copytree(models[1], broken)
    weights = broken / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:100])
    its = [models[0], str(broken)]
    with (
        serving_process(*its, "--lazy", "--memory", MEMORY, drains=True) as (child, url),
        httpx.Client(timeout=100) as client,
    ):
        assert engines_of(child.pid) == []
        assert client.get(f"{url}/health").status_code == 200
        assert len(client.get(f"{url}/v1/models").json()["data"]) == 2
        answer = asked(client, url, model=str(broken))
        assert answer.status_code == 503
        assert "the model could not be loaded" in answer.json()["error"]["message"]
        assert asked(client, url).status_code == 200
        assert len(engines_of(child.pid)) == 1
        weights.write_bytes(data)
        assert asked(client, url, model=str(broken)).status_code == 200
        assert len(engines_of(child.pid)) == 2


@pytest.mark.slow
@pytest.mark.skipif(VERSION < (5, 17), reason="transformers has no plans to divide models by")
def test_each_of_several_models_may_have_ranks(models: list[str]) -> None:
    """Each answers as alone, sleeps on all its ranks, and wakes with the next request."""
    expected = [plain(name, [5, 6, 7]) for name in models]
    its = [*models, "--tensor-parallel", "2", "--memory", MEMORY, "--enable-sleep-mode"]
    with serving_process(*its, drains=True) as (_, url), httpx.Client(timeout=60) as client:
        for at in (0, 1, 0, 1):
            for _ in range(2):
                answer = asked(client, url, model=models[at])
                assert answer.status_code == 200, answer.text
                assert answer.json()["choices"][0]["token_ids"] == expected[at]
            assert client.post(f"{url}/sleep", params={"model": models[at]}).status_code == 200
        text = client.get(f"{url}/metrics").text
        for name in models:
            assert f'vmkv_pool_bytes{{member="{name}, weights",state="created"}} 0.0' in text
