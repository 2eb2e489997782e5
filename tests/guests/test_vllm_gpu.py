"""vLLM as a guest of a broker: the answers of vLLM by itself, and memory that comes back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from helpers.ragged import assert_likeliest, random_prompts
from helpers.waiting import until
from transformers import LlamaConfig, LlamaForCausalLM

from vmkv.core.memory import Broker
from vmkv.units import MiB

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.timeout(600),
]

#: A block of 128 tokens takes 2 MiB.
CONFIG = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
#: Tokens of prompts of three batches; those of the second want 160 blocks at the same time.
LENGTHS = [range(61, 61 * 4, 61), range(61, 61 * 25, 61), (5, 700)]
POOL_BLOCKS = 40
NUM_TOKENS = 64

#: Answers, one list a line; waits for a line before each further batch.
PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams
folder, options, batches = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
if __name__ == "__main__":
    llm = LLM(model=folder, skip_tokenizer_init=True, max_model_len=4096, block_size=128,
              attention_config={"backend": "FLASH_ATTN"}, **options)
    params = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True, detokenize=False)
    for prompts in batches:
        prompts = [{"prompt_token_ids": each} for each in prompts]
        made = llm.generate(prompts, params, use_tqdm=False)
        print("answers", json.dumps([list(each.outputs[0].token_ids) for each in made]), flush=True)
        sys.stdin.readline()
"""
PROMPTS = [random_prompts(*its, seed=at) for at, its in enumerate(LENGTHS)]


def _started(folder: Path, options: dict[str, object]) -> subprocess.Popen[str]:
    environment = {**os.environ, "VLLM_USE_V2_MODEL_RUNNER": "0", "HF_HUB_OFFLINE": "1"}
    environment |= {"VLLM_NO_USAGE_STATS": "1"}
    if find_spec("flashinfer") is None:
        environment["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    program = folder / "program.py"
    program.write_text(PROGRAM)
    return subprocess.Popen(
        [sys.executable, program, folder, json.dumps(options), json.dumps(PROMPTS)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _answers(process: subprocess.Popen[str]) -> list[list[int]]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("answers "):
            return list(json.loads(line.removeprefix("answers ")))
    raise AssertionError(f"vLLM has ended with {process.wait()}")


def _go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_two_guests_share_a_pool(tmp_path: Path) -> None:
    """Answers are the model's, also where requests wait for memory that the other guest has."""
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).to("cuda", torch.bfloat16)
    model.save_pretrained(tmp_path)
    with Broker(tmp_path / "pool", POOL_BLOCKS * 2 * MiB) as broker:
        transfer = {
            "kv_connector": "GuestConnector",
            "kv_connector_module_path": "vmkv.guests.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"pool_socket": broker.socket_path},
        }
        worker = "vmkv.guests.vllm.GuestWorker"
        options = {"kv_transfer_config": transfer, "worker_cls": worker}
        guests: list[subprocess.Popen[str]] = []
        try:
            answers = []
            for _ in range(2):  # One after the other: vLLM measures the device's memory.
                guests.append(_started(tmp_path, options))
                answers.append(_answers(guests[-1]))
            for _ in PROMPTS[1:]:
                for each in guests:  # At the same time.
                    _go_on(each)
                answers += [_answers(each) for each in guests]
            for at, its in enumerate(answers):
                texts = [[*a, *b] for a, b in zip(PROMPTS[at // 2], its, strict=True)]
                assert {len(each) for each in its} == {NUM_TOKENS}
                assert_likeliest(model, PROMPTS[at // 2], texts)
            until(lambda: [each.report.budget_bytes for each in broker.members()] == [2 * MiB] * 2)
            for each in guests:
                _go_on(each)
                each.wait(timeout=120)
            until(lambda: not broker.members())
        finally:
            for each in guests:
                each.kill()
                each.communicate()
