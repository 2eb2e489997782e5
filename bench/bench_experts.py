"""How long do a layer's experts take, beside reading the chosen ones once?

Question. For the experts of Qwen3-30B-A3B and of gpt-oss-20b, from one token to 8,192: how long do
vmkv's kernels take, transformers' `grouped_mm` compiled, and vLLM's kernels?

Prediction. Written after a first sweep of tiles: few tokens are bound by reading the experts that
they chose: 1.15 x of that time from 8 to 256 tokens, more for one, whose three launches take 6 us
of 18. Thousands of tokens are bound by products, at two thirds of the 790 TFLOP/s that the largest
products reach. `grouped_mm` takes twice as long, since gathers, activation and weighted sums are
launches of their own.

Method. One layer of random weights, bfloat16, a uniform random choice of experts. Each time is that
of a captured graph of calls with different tokens and choices, by their number, the least of five
replays. The floor is the bytes of the experts that were chosen, by the bandwidth at which torch
adds up 4 GiB. Errors are norms of differences from float64, of the first 64 tokens.

Rivals. transformers' `grouped_mm` under torch.compile, as vmkv ran it before; `fused_experts` of
vLLM where it is installed, for experts without biases.

Not measured. Routers, shared experts, skewed choices, quantised experts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from harness import HAS_GPU, Bench, Figure, Row, seconds_of
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from vmkv.step import experts
from vmkv.step.expert_forms import apply_gate, form_of
from vmkv.units import GiB

REPLAYS = 5
COMPARED_TOKENS = 64
TOKENS = (1, 8, 64, 256, 2048, 8192)


def make_experts(name: str, device: torch.device, *, smoke: bool) -> tuple[Any, int]:
    """The experts of a layer with random weights, and how many of them a token chooses."""
    if name == "gpt-oss-20b":
        count, top_k, width, inner = (4, 2, 32, 32) if smoke else (32, 4, 2880, 2880)
        options = {"num_local_experts": count, "intermediate_size": inner}
        config: Any = GptOssConfig(hidden_size=width, num_experts_per_tok=top_k, **options)
        kind: Any = GptOssExperts
    else:
        count, top_k, width, inner = (4, 2, 32, 32) if smoke else (128, 8, 2048, 768)
        options = {"num_experts": count, "moe_intermediate_size": inner}
        config = Qwen3MoeConfig(hidden_size=width, num_experts_per_tok=top_k, **options)
        kind = Qwen3MoeExperts
    config._experts_implementation = "grouped_mm"
    with torch.device(device):
        module = kind(config).to(torch.bfloat16).eval().requires_grad_(requires_grad=False)
    for each in module.parameters():
        each.normal_(0, 0.02)
    return module, top_k


def microseconds(calls: Sequence[Callable[[], object]]) -> float:
    """The time of a call, of those that one captured graph holds."""
    for call in calls:
        call()
    if not HAS_GPU:
        return 1e6 * min(seconds_of(lambda: [call() for call in calls]) for _ in range(REPLAYS))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    seconds = min(seconds_of(graph.replay) for _ in range(REPLAYS))
    return 1e6 * seconds / len(calls)


def read_us_per_byte(device: torch.device, *, smoke: bool) -> float:
    """Microseconds in which the device reads a byte: torch adds up 4 GiB."""
    size = 2**20 if smoke else 4 * GiB
    memory = torch.ones(size // 4, device=device)  # Sums of integers are slower than memory.
    return microseconds([memory.sum]) / size


def exact(module: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Any:
    """The experts' sum in float64."""
    form, out = form_of(module), torch.zeros(hidden.shape, dtype=torch.float64, device=ids.device)
    for expert in ids.unique().tolist():
        tokens, slots = torch.where(ids == expert)
        its = hidden[tokens].double()
        for name in ("gate_up_proj", "down_proj"):
            weight, bias = (
                getattr(module, name)[expert].double(),
                getattr(module, f"{name}_bias", None),
            )
            its = its @ (weight if form.is_transposed else weight.T)
            its = its if bias is None else its + bias[expert].double()
            its = apply_gate(its, form) if name == "gate_up_proj" else its
        out.index_add_(0, tokens, its * weights[tokens, slots, None].double())
    return out


def ways_of(module: Any) -> dict[str, Callable[..., Any]]:
    """Ways to compute the experts of tokens, by name."""
    kind = type(module)
    compiled = torch.compile(lambda *its: kind.forward(module, *its), dynamic=True)
    ways: dict[str, Callable[..., Any]] = {"grouped_mm": compiled}
    if HAS_GPU and experts.fuse(torch.nn.ModuleList([module])):
        fused = type(module)
        module.__class__ = kind
        ways["vmkv"] = torch.compile(lambda *its: fused.forward(module, *its), dynamic=True)
    if form_of(module) is not None and not module.has_bias:
        try:
            from vllm.model_executor.layers.fused_moe import fused_experts
        except ImportError:
            return ways
        ways["vLLM"] = lambda x, ids, weights: fused_experts(
            x, module.gate_up_proj, module.down_proj, weights.float(), ids.int()
        )
    return ways


def measure(name: str, device: torch.device, per_byte_us: float, *, smoke: bool) -> list[Row]:
    """A row for each number of tokens."""
    module, top_k = make_experts(name, device, smoke=smoke)
    ways = ways_of(module)
    count = len(module.gate_up_proj)
    expert_bytes = 2 * (module.gate_up_proj[0].numel() + module.down_proj[0].numel())
    hidden = module.gate_up_proj.shape[1 if module.is_transposed else 2]
    rows = []
    for num_tokens in (1, 8) if smoke else TOKENS:
        calls = []
        for _ in range(8 if num_tokens <= 64 else 3):
            scores, ids = torch.rand(num_tokens, count, device=device).topk(top_k)
            x = torch.randn(num_tokens, hidden, device=device).to(torch.bfloat16)
            calls.append((x, ids, scores.to(torch.bfloat16)))
        chosen = sum(len(ids.unique()) for _, ids, _ in calls) / len(calls)
        first = [each[:COMPARED_TOKENS] for each in calls[0]]
        wanted = exact(module, *first)
        row: Row = {"experts": name, "tokens": num_tokens, "chosen": chosen}
        row["floor_us"] = chosen * expert_bytes * per_byte_us
        for way, run in ways.items():
            key = way.lower()
            row[f"{key}_us"] = microseconds([lambda its=its, run=run: run(*its) for its in calls])
            found = run(*calls[0])[:COMPARED_TOKENS].double()
            row[f"{key}_error"] = float((found - wanted).norm() / wanted.norm())
        rows.append(row)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Measure both shapes."""
    bench = Bench("experts", __doc__ or "", needs_gpu=True)
    options = bench.parse(argv)
    per_byte_us = read_us_per_byte(options.device, smoke=options.smoke)
    rows: list[Row] = []
    with torch.no_grad():
        for name in ("Qwen3-30B-A3B", "gpt-oss-20b"):
            rows += measure(name, options.device, per_byte_us, smoke=options.smoke)
    figures = []
    for row in rows:
        if "vmkv_us" in row:
            what = f"{row['experts']}'s experts, {row['tokens']} tokens"
            key = f"{row['experts']}_{row['tokens']}".replace("-", "_").replace(".", "_").lower()
            over = row["vmkv_us"] / row["floor_us"]
            bound = 1.15 if row["tokens"] <= 256 else None
            text = f"{what}, over reading the chosen ones once"
            figures.append(Figure(f"{key}_over_floor", text, over, "×", at_most=bound))
            ratio = row["vmkv_us"] / row["grouped_mm_us"]
            figures.append(
                Figure(f"{key}_over_grouped", f"{what}, over grouped_mm", ratio, "×", at_most=1.0)
            )
    return bench.finish(rows, figures, {"read_tb_s": 1e-6 / per_byte_us})


if __name__ == "__main__":
    sys.exit(main())
