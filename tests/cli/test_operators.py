"""vLLM's option names, a help without empty words, and models refused with their reason."""

from __future__ import annotations

import argparse
import json
import logging
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from vmkv import phases
from vmkv.cli import progress
from vmkv.cli.main import make_parser
from vmkv.cli.models import load_config
from vmkv.cli.serve import chosen, server_options
from vmkv.hf.compat import load_model
from vmkv.serve.options import EngineOptions

Complaint = Callable[..., str]
TEXT = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
EYES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def parsed(*options: str) -> argparse.Namespace:
    return make_parser().parse_args(["serve", "model", *options])


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("--max-model-len 4096", "--max-model-tokens 4096"),
        ("--tensor-parallel-size 2", "--tensor-parallel 2"),
        ("--kv-cache-dtype fp8", "--kv-dtype fp8"),
        ("--no-enable-prefix-caching", "--no-prefix-caching"),
        ("--enable-prefix-caching", ""),
        ("--disable-log-requests", "--no-log-requests"),
        ("--no-enable-log-requests", "--no-log-requests"),
        ("--enable-log-requests", ""),
    ],
)
def test_vllms_names_of_options_mean_ours(theirs: str, ours: str) -> None:
    assert vars(parsed(*theirs.split())) == vars(parsed(*ours.split()))


def test_options_that_vllm_has_reach_the_engine() -> None:
    line = "--gpu-memory-utilization 0.5 --seed 7 --max-num-seqs 9 --no-enable-prefix-caching"
    line += " --logprobs-mode processed_logprobs"
    given = EngineOptions(**chosen(EngineOptions, parsed(*line.split())))
    assert (0.5, 7, 9) == (given.memory_fraction, given.seed, given.max_num_seqs)
    assert not given.prefix_caching
    assert "processed_logprobs" == given.logprobs_mode
    assert EngineOptions(**chosen(EngineOptions, parsed())).prefix_caching


def test_keys_may_stand_on_the_command_line(tmp_path: Path) -> None:
    """Several, and together with those of a file."""
    (tmp_path / "keys").write_text("c\n")
    line = ["--api-key", "a", "--api-key", "b", "--api-key-file", str(tmp_path / "keys")]
    assert ["a", "b", "c"] == server_options(parsed(*line))(128).api_keys


def test_the_help_shows_defaults_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    """And no words of the project's own."""
    with pytest.raises(SystemExit):
        make_parser().parse_args(["serve", "--help"])
    said = capsys.readouterr().out
    assert "(default: None)" not in said
    assert "(default: False)" not in said
    assert "(default: 8000)" in said
    for word in ("parked", "retired", "resident", "mixed tokens"):
        assert word not in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["{model}", "--bogus"], "unrecognized arguments"),
        (["{model}", "--api-key-file", "/nowhere/keys"], "--api-key-file /nowhere/keys"),
        (["{model}", "--chat-template", "/nowhere/jinja"], "chat template /nowhere/jinja"),
        (["{model}", "--response-template", "qwen"], "'qwen' is none of harmony, "),
        (["/nowhere/model"], "there is no file or folder"),
        (["{model}", "--port", "{port}"], "is another server running"),
    ],
)
def test_slips_are_found_before_torch_is_imported(
    model: Path, options: list[str], words: str
) -> None:
    """An import of torch would fail here."""
    import socket

    script = "import sys; sys.modules['torch'] = None; from vmkv.cli.main import main; "
    with socket.create_server(("127.0.0.1", 0)) as taken:
        names = {"{model}": str(model), "{port}": str(taken.getsockname()[1])}
        line = ["serve", *(names.get(each, each) for each in options)]
        done = subprocess.run(
            [sys.executable, "-c", f"{script} sys.exit(main({line!r}))"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert 2 == done.returncode, done.stderr
    assert words in done.stderr


def test_too_little_memory_is_found_before_weights_are_loaded(
    complaint: Complaint, model: Path, tmp_path: Path
) -> None:
    """There are none to load here."""
    for file in model.glob("*.json"):
        shutil.copy(file, tmp_path)
    line = ["serve", str(tmp_path), "--port", "0", "--device", "cpu", "--memory"]
    assert "--memory of 1.024 MiB does not hold one token" in complaint(*line, "0.001")


def test_adapters_and_gguf_files_are_refused_with_their_reason(
    complaint: Complaint, tmp_path: Path
) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    settings = {"base_model_name_or_path": "some/base", "peft_type": "LORA"}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    assert "a LoRA adapter for 'some/base'" in complaint("serve", str(adapter))
    (adapter / "adapter_config.json").write_text("{")
    assert "a LoRA adapter, and no whole model" in complaint("serve", str(adapter))
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert "GGUF" in complaint("serve", str(tmp_path / "model.gguf"))
    assert "GGUF" in complaint("serve", str(tmp_path))


@pytest.mark.parametrize(
    ("kind", "words"),
    [("t5", "a t5 model, with an encoder"), ("clip", "a clip model does not continue text")],
)
def test_other_kinds_of_models_are_refused_in_a_short_sentence(
    complaint: Complaint, tmp_path: Path, kind: str, words: str
) -> None:
    transformers.AutoConfig.for_model(kind).save_pretrained(tmp_path)
    said = complaint("serve", str(tmp_path), "--port", "0", "--device", "cpu")
    assert words in said
    assert len(said) < 400


def test_code_of_a_model_is_run_if_it_is_trusted(complaint: Complaint, tmp_path: Path) -> None:
    """Otherwise the option is named."""
    code = "from transformers import LlamaConfig\nclass Own(LlamaConfig):\n    model_type = 'own'\n"
    (tmp_path / "code.py").write_text(code)
    settings = {**TEXT, "model_type": "own", "auto_map": {"AutoConfig": "code.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    line = ["serve", str(tmp_path), "--port", "0", "--device", "cpu"]
    assert "pass --trust-remote-code to run it" in complaint(*line)
    assert "Own" == type(load_config(str(tmp_path), trust_remote_code=True)).__name__


KINDS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "gemma3": lambda: transformers.Gemma3Config(
        text_config={**TEXT, "sliding_window": 8, "query_pre_attn_scalar": 8},
        vision_config=EYES,
        image_token_index=5,
        boi_token_index=6,
        eoi_token_index=7,
        mm_tokens_per_image=4,
    ),
    "mistral3": lambda: transformers.Mistral3Config(
        text_config={**TEXT, "model_type": "mistral"},
        vision_config={**EYES, "model_type": "pixtral", "head_dim": 8},
        image_token_index=5,
    ),
    "llava": lambda: transformers.LlavaConfig(
        text_config={**TEXT, "model_type": "llama"},
        vision_config={**EYES, "model_type": "clip_vision_model", "projection_dim": 16},
        image_token_index=5,
        image_token_id=5,
    ),
    "qwen3_vl": lambda: transformers.Qwen3VLConfig(
        text_config={
            **TEXT,
            "rope_scaling": {
                "rope_type": "default",
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": 32,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 16,
        },
        image_token_id=5,
        video_token_id=6,
        vision_start_token_id=7,
        vision_end_token_id=8,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_models_that_read_images_continue_text(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the tokens of `generate`, from a saved folder; `vmkv plan` counts their layers."""
    from vmkv import Engine, SamplingParams
    from vmkv.cli.main import main

    whole = transformers.AutoModelForImageTextToText.from_config(KINDS[kind]())
    whole.save_pretrained(tmp_path)
    model = load_model(str(tmp_path), device="cpu", dtype=None)
    prompt = [*range(9, 21)]
    expected = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=8)
    with Engine(model, max_num_seqs=2, max_num_batched_tokens=64, budget_bytes=1 << 26) as engine:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        [answer] = engine.generate([prompt], params)
    assert expected[0, len(prompt) :].tolist() == [*answer.outputs[0].token_ids]
    assert 0 == main(["plan", str(tmp_path), "--context", "256"])
    assert kind in capsys.readouterr().out


def test_phases_are_shown_and_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    """With the seconds since the start; not once the start is over."""
    with progress.handling(phases.__name__, progress.Progress(0.0)) as shown:
        with phases.phase("loading weights"):
            assert re.fullmatch(r"\[ *[\d.]+ s\] loading weights\n", capsys.readouterr().err)
        with phases.phase("compiling"), phases.phase("loading weights"):
            pass
    summary = shown.summary()
    assert re.fullmatch(r"loading weights \d+\.\d s, compiling \d+\.\d s", summary)
    capsys.readouterr()
    with phases.phase("later"):
        pass
    assert "" == capsys.readouterr().err
    assert logging.NOTSET == logging.getLogger(phases.__name__).level
