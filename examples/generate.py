"""One model, two caches: the same tokens, and what each cache does with memory meanwhile.

    python examples/generate.py                    # a small random Llama: no download, no GPU
    python examples/generate.py --model ./llama    # your own model, from a local folder
    python examples/generate.py --model $(python examples/real_model.py)

Generates greedily through transformers' DynamicCache and through VMKVCache, compares the tokens,
shows their text, and draws what each cache holds after every step; what a StaticCache would hold
beside them.
"""

import argparse
import textwrap
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch
import transformers
from tqdm import tqdm

from vmkv import VMKVCache
from vmkv.units import MiB, format_bytes

PROMPTS = [
    "Tell me a story about a lighthouse.",
    "Why is the sky blue?",
    "How do I bake bread?",
    "What is a library for?",
]
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#666666"  # Okabe and Ito's, for colour-blind readers.


class Sample(NamedTuple):
    """A cache after one step; sizes in bytes."""

    seconds: float  # Time of the sample.
    address: int  # Of the first layer's keys.
    used: int  # Memory that the tokens need.
    held: int  # Memory that the cache holds.
    replaced: int  # The last tensor: `torch.cat` of the next step holds it beside the new one.


class Run(NamedTuple):
    """A generation through one cache; lists have an entry per step, in bytes."""

    name: str
    tokens: torch.Tensor
    seconds: float
    step_seconds: float  # The median, without the prompt.
    used: list[int]
    held: list[int]
    peak: list[int]  # The most at any moment of the step.
    copied: list[int]  # So far, when the cache moved its tensors.
    num_moves: int  # How often the first layer's keys changed their address.


class Sampler(transformers.LogitsProcessor):
    """Logits processor that samples the cache after every forward pass, and leaves logits alone."""

    def __init__(self, cache: transformers.Cache, bar: tqdm):
        self.cache, self.bar = cache, bar
        self.samples: list[Sample] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        now, layers = time.perf_counter(), self.cache.layers
        address = layers[0].keys.data_ptr()
        if isinstance(self.cache, VMKVCache):
            stats = self.cache.stats()
            sample = Sample(now, address, stats.used_bytes, stats.resident_bytes, 0)
        else:
            held = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
            sample = Sample(now, address, held, held, layers[-1].values.nbytes)
        self.samples.append(sample)
        self.bar.update()
        return scores


def generate(model: Any, inputs: dict[str, torch.Tensor], cache: Any, **lengths: int) -> Run:
    """Generate through `cache`, and sample it after every step."""
    name, total = type(cache).__name__, lengths["max_new_tokens"]
    with tqdm(total=total, desc=name, unit="token", leave=False, disable=None) as bar:
        sampler = Sampler(cache, bar)
        start = time.perf_counter()
        tokens = model.generate(
            **inputs,
            **lengths,
            do_sample=False,
            logits_processor=[sampler],
            past_key_values=cache,  # All it takes to use vmkv.
        ).cpu()
        seconds = time.perf_counter() - start

    used, held = [each.used for each in sampler.samples], [each.held for each in sampler.samples]
    gaps = [b.seconds - a.seconds for a, b in pairwise(sampler.samples)]
    peak, copied, moves = [held[0]], [0], 0
    for old, new in pairwise(sampler.samples):
        moved = old.address != new.address
        peak.append(new.held + old.replaced)
        copied.append(copied[-1] + moved * old.held)
        moves += moved
    return Run(name, tokens, seconds, median(gaps or [seconds]), used, held, peak, copied, moves)


def small_llama(options: argparse.Namespace) -> tuple[Any, dict[str, torch.Tensor], None]:
    """A Llama of random weights, and prompts of random tokens."""
    config = transformers.LlamaConfig(
        num_hidden_layers=options.layers,
        hidden_size=options.width,
        intermediate_size=2 * options.width,
        num_attention_heads=options.width // 64,
        num_key_value_heads=options.width // 128,
        vocab_size=1024,
        max_position_embeddings=32_768,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    ids = torch.randint(1, 1024, (options.batch, options.prompt_tokens))
    model = transformers.LlamaForCausalLM(config)
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, None


def local_model(options: argparse.Namespace) -> tuple[Any, dict[str, torch.Tensor], Any]:
    """The model in a folder, prompts in English, padded on the left, and the tokenizer."""
    path = options.model
    model = transformers.AutoModelForCausalLM.from_pretrained(path, local_files_only=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    prompts = [PROMPTS[at % len(PROMPTS)] for at in range(options.batch)]
    if tokenizer.chat_template:
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
            for prompt in prompts
        ]
    encoded = tokenizer(prompts, padding=True, return_tensors="pt")
    return model, {name: encoded[name] for name in ("input_ids", "attention_mask")}, tokenizer


def compare(expected: torch.Tensor, actual: torch.Tensor, dtype: torch.dtype) -> str:
    """Describe whether tokens are equal; only half precision may differ."""
    if torch.equal(expected, actual):
        return f"The tokens are equal, all {expected.numel()} of them."
    row, position = (expected != actual).nonzero()[0].tolist()
    difference = f"sequence {row} differs from position {position} on"
    assert dtype.itemsize == 2, f"greedy tokens must be equal in {dtype}, but {difference}"
    return f"In {dtype}, which every kernel rounds its own way, {difference}."


def print_answers(run: Run, num_prompt_tokens: int, tokenizer: Any) -> None:
    for prompt, tokens in zip(PROMPTS, run.tokens[:, num_prompt_tokens:], strict=False):
        answer = " ".join(tokenizer.decode(tokens, skip_special_tokens=True).split())
        print(f"\n> {prompt}")
        print(textwrap.fill(answer, 96, initial_indent="  ", subsequent_indent="  "))


def print_table(runs: list[Run], static_bytes: int) -> None:
    line = "{:<13}{:>14}{:>15}{:>17}{:>12}{:>9}{:>9}".format
    print(line("", "held at end", "most at once", "copied to grow", "moved", "time", "a step"))
    for run in runs:
        sizes = map(format_bytes, (run.held[-1], max(run.peak), run.copied[-1]))
        times = f"{run.seconds:.2f} s", f"{1000 * run.step_seconds:.1f} ms"
        print(line(run.name, *sizes, f"{run.num_moves} times", *times))
    static = format_bytes(static_bytes)
    print(line("StaticCache", static, static, "0 B", "0 times", "not run", ""))


def mib(sizes: list[int]) -> list[float]:
    return [num_bytes / MiB for num_bytes in sizes]


def plot(dynamic: Run, vmkv: Run, static_bytes: int, path: Path) -> None:
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(9, 7), sharex=True, height_ratios=(3, 1.4), layout="constrained"
    )
    steps = range(1, len(vmkv.held) + 1)
    top.axhline(static_bytes / MiB, color=GREY, ls="-.", label="StaticCache of just this length")
    top.plot(
        steps, mib(dynamic.peak), ":", color=ORANGE, label="DynamicCache while torch.cat copies"
    )
    top.step(steps, mib(vmkv.held), color=BLUE, where="post", label="VMKVCache, resident")
    top.plot(steps, mib(dynamic.held), "--", color=ORANGE, label="DynamicCache after the step")
    top.fill_between(steps, mib(vmkv.used), color=BLUE, alpha=0.15, lw=0, label="used by tokens")
    top.set(ylabel="key-value cache (MiB)", ylim=(0, None), xlim=(1, len(steps)))
    top.set_title(f"Memory while generating {len(steps)} tokens for {len(vmkv.tokens)} sequences")
    top.legend(loc="lower right")
    for run, style, color in ((dynamic, "--", ORANGE), (vmkv, "-", BLUE)):
        label = f"{run.name}, {format_bytes(run.copied[-1])} in all"
        bottom.plot(steps, mib(run.copied), style, color=color, label=label, lw=2, clip_on=False)
    bottom.set(xlabel="generated tokens per sequence", ylabel="copied so far (MiB)")
    bottom.set_ylim(0, None)
    bottom.legend(loc="upper left")
    for axes in (top, bottom):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def parse_options() -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()  # A GPU's pages are larger, and so is its model.
    parser = argparse.ArgumentParser(description="Generate through DynamicCache and VMKVCache.")
    parser.add_argument("--model", help="a local folder; by default a small random Llama")
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--layers", type=int, default=16 if on_gpu else 4)
    parser.add_argument("--width", type=int, default=1024 if on_gpu else 512, help="n × 128")
    parser.add_argument("--batch", type=int, help="sequences")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, help="by default 1000 on a GPU, else fewer")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the plot")
    options = parser.parse_args()
    if options.batch is None:
        options.batch = len(PROMPTS) if options.model else 8
    if options.new_tokens is None:
        options.new_tokens = 1000 if on_gpu else 128 if options.model else 300
    if options.width < 128 or options.width % 128:
        parser.error(f"--width {options.width} must be a positive multiple of 128")
    if min(options.layers, options.batch, options.prompt_tokens) < 1 or options.new_tokens < 2:
        parser.error("sizes must be positive, and --new-tokens at least 2")
    return options


def main() -> None:
    options = parse_options()
    name = options.model or f"a random Llama of {options.layers} layers"
    print(f"Generating {options.new_tokens} tokens for {options.batch} prompts with {name} on")
    print(
        f"{options.device} in {options.dtype}, through DynamicCache, then through VMKVCache ...\n"
    )

    model, inputs, tokenizer = local_model(options) if options.model else small_llama(options)
    model = model.to(options.device, getattr(torch, options.dtype)).eval()
    inputs = {key: tensor.to(options.device) for key, tensor in inputs.items()}
    if model.num_parameters() < 5e8:
        # Too small to gain from threads, which on a busy machine would wait for each other.
        torch.set_num_threads(1)
    lengths = {"max_new_tokens": options.new_tokens}
    if tokenizer is None:
        lengths["min_new_tokens"] = options.new_tokens  # Random tokens have no end.
    generate(model, inputs, transformers.DynamicCache(), max_new_tokens=2)  # Warm up.
    dynamic = generate(model, inputs, transformers.DynamicCache(), **lengths)
    with VMKVCache(config=model.config) as cache:
        vmkv = generate(model, inputs, cache, **lengths)
        stats = cache.stats()

    print(compare(dynamic.tokens, vmkv.tokens, model.dtype))
    if tokenizer is not None:
        print_answers(vmkv, inputs["input_ids"].shape[1], tokenizer)
    print()
    num_tokens = vmkv.tokens.shape[1]  # The last one was never an input, so it is in no cache.
    static_bytes = dynamic.held[-1] * num_tokens // (num_tokens - 1)
    print_table([dynamic, vmkv], static_bytes)
    print(f"\nVMKVCache: {stats}")

    path = options.out / "generate.png"
    plot(dynamic, vmkv, static_bytes, path)
    print(f"\nThe plot is {path.resolve()}")
    print("Above: VMKVCache follows the tokens page by page. DynamicCache copies all it holds at")
    print("every step, and needs room for that; StaticCache takes the full length from the start.")
    print("Below: what has been copied by then. VMKVCache never moves a token.")


if __name__ == "__main__":
    main()
