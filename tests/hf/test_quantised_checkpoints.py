"""Checkpoints whose experts are quantised: what transformers makes of them without the Hub runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.utils import is_kernels_available

import vmkv
from vmkv.step.expert_forms import form_of

moe = pytest.importorskip("transformers.integrations.moe")  # Since transformers 5.
if not hasattr(moe, "_default_apply_gate") or is_kernels_available():
    pytest.skip("experts are modules of another kind, or stay quantised", allow_module_level=True)

from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SIZES = {
    "num_hidden_layers": 2,
    "num_experts_per_tok": 2,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 512,
}


def _saved(model: Any, folder: Path, quantization: dict[str, Any], quantise: Any) -> None:
    model.to(torch.bfloat16).save_pretrained(folder)
    path, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    tensors = load_file(path)
    quantised: dict[str, torch.Tensor] = {}
    for name, each in tensors.items():
        quantised |= quantise(name, each)
    save_file(quantised, path, metadata={"format": "pt"})
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))


def _mxfp4(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Replace experts by random blocks of 32 four-bit numbers, with a scale of 2^-7 each."""
    if not name.endswith(("gate_up_proj", "down_proj")):
        return {name: weight}
    count, rows, columns = weight.shape
    generator = torch.Generator().manual_seed(len(name))
    shape = (count, columns, rows // 32, 16)
    blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    return {f"{name}_blocks": blocks, f"{name}_scales": torch.full(shape[:3], 120).to(torch.uint8)}


def _fp8(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    if not name.endswith("proj.weight"):
        return {name: weight}
    scale = weight.float().abs().max() / 448
    return {
        name: (weight.float() / scale).to(torch.float8_e4m3fn),
        f"{name}_scale_inv": scale.reshape(1, 1),
    }


def _check(model: Any) -> None:
    """All experts are bfloat16 that our kernels can run, and packed steps compute the same."""
    for layer in model.model.layers:
        assert form_of(layer.mlp.experts) is not None
        assert layer.mlp.experts.down_proj.dtype == torch.bfloat16
        assert layer.mlp.experts.down_proj.float().std() > 0
    prompt = torch.tensor([[5, 6, 7, 8]])
    model = model.float()
    options: Any = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    expected = model.generate(prompt, pad_token_id=0, **options)
    found = vmkv.generate(model, prompt.tolist(), budget_bytes=1 << 26, **options)
    assert found == expected.tolist()


def test_mxfp4_is_served_in_bfloat16(tmp_path: Path) -> None:
    """gpt-oss's checkpoints, without the package `kernels`."""
    torch.manual_seed(0)
    model = GptOssForCausalLM(GptOssConfig(num_local_experts=4, **SIZES))
    _saved(model, tmp_path, {"quant_method": "mxfp4"}, _mxfp4)
    _check(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval())


def test_block_fp8_is_served_in_bfloat16_on_request(tmp_path: Path) -> None:
    """With `"dequantize": true` in the checkpoint's configuration."""
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(num_experts=4, moe_intermediate_size=32, **SIZES))
    own = model.model.layers[0].mlp.experts.gate_up_proj.detach().clone()
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "dequantize": True}
    quantization["modules_to_not_convert"] = ["lm_head"]
    _saved(model, tmp_path, quantization, _fp8)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    found = loaded.model.layers[0].mlp.experts.gate_up_proj.float()
    assert (found - own).norm() < 0.05 * own.norm()
    _check(loaded)
