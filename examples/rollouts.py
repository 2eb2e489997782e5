"""A model learns to answer with digits: TRL trains it, and vmkv's engine generates with it.

    pip install -e ".[trl,bench]"
    python examples/rollouts.py                    # a small random Llama: no download, no GPU
    python examples/rollouts.py --model $(python examples/real_model.py) --updates 25

One set of weights: the engine serves the module that the optimizer changes. The reward of each
update, and the time of its rollout and of its training, are drawn into a PNG.
"""

import argparse
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch
import transformers
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from trl import GRPOConfig

from vmkv.trl import VMKVGRPOTrainer

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,:?"
PROMPTS = ["count for me: ", "what is the number? ", "my house is number ", "the year was "]
BLUE, ORANGE = "#0072B2", "#D55E00"  # Okabe and Ito's, for colour-blind readers.


class Update(NamedTuple):
    """One update of the weights."""

    reward: float  # The mean share of digits.
    rollout_s: float
    training_s: float


def share_of_digits(completions: list[str], **_: Any) -> list[float]:
    return [sum(each.isdigit() for each in text) / max(1, len(text)) for text in completions]


def small_model() -> tuple[Any, Any]:
    """A random Llama of 0.1 million parameters, and a tokenizer with a token for each letter."""
    words = ["<pad>", "</s>", *LETTERS]
    letters = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, "<pad>"))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    letters.decoder = decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=letters, pad_token="<pad>", eos_token="</s>"
    )
    config = transformers.LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    return transformers.LlamaForCausalLM(config), tokenizer


class TimedTrainer(VMKVGRPOTrainer):
    """Notes how long each rollout takes."""

    rollouts_s: list[float]

    def _generate(self, prompts: list[Any]) -> Any:
        start = time.perf_counter()
        result = super()._generate(prompts)
        self.rollouts_s.append(time.perf_counter() - start)
        return result


def train(options: argparse.Namespace, folder: str) -> list[Update]:
    torch.manual_seed(options.seed)
    if options.model:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            options.model, dtype=torch.float32
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    else:
        model, tokenizer = small_model()
    config = GRPOConfig(
        output_dir=folder,
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
        seed=options.seed,
        max_steps=options.updates,
        per_device_train_batch_size=32,
        num_generations=8,
        max_completion_length=16,
        learning_rate=options.learning_rate or (1e-5 if options.model else 3e-3),
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = TimedTrainer(
        model=model,
        reward_funcs=share_of_digits,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=tokenizer,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.rollouts_s = []
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "reward" in entry]
    return [
        Update(entry["reward"], rollout_s, entry["step_time"] - rollout_s)
        for entry, rollout_s in zip(entries, trainer.rollouts_s, strict=True)
    ]


def plot(updates: list[Update], name: str, path: Path) -> None:
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(9, 6), sharex=True, height_ratios=(3, 1.4), layout="constrained"
    )
    steps = range(1, len(updates) + 1)
    rewards = [each.reward for each in updates]
    recent = [rewards[max(0, at - 5) : at] for at in steps]
    top.plot(steps, rewards, ".", color=BLUE, alpha=0.5, label="one update")
    top.plot(steps, [sum(each) / len(each) for each in recent], color=BLUE, label="mean of five")
    top.set(ylabel="reward: share of digits", ylim=(0, 1.02), xlim=(0.5, len(updates) + 0.5))
    top.set_title(f"{name}: GRPO with rollouts of 4 prompts x 8 samples")
    for label, color, times_s in (
        ("training", ORANGE, [each.training_s for each in updates]),
        ("rollout", BLUE, [each.rollout_s for each in updates]),
    ):
        bottom.plot(steps, times_s, color=color, label=label)
    bottom.set(xlabel="update of the weights", ylabel="time (s)", yscale="log")
    for axes in (top, bottom):
        axes.legend(loc="best")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train with rollouts of vmkv's engine.")
    parser.add_argument("--model", help="a local folder; by default a small random Llama")
    parser.add_argument("--updates", type=int, default=60, help="of the weights")
    parser.add_argument("--learning-rate", type=float, help="by default 1e-5, 3e-3 if random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the plot")
    options = parser.parse_args()
    if options.updates < 2:
        parser.error("--updates must be at least 2")
    return options


def main() -> None:
    options = parse_options()
    with TemporaryDirectory() as folder:
        updates = train(options, folder)
    rewards = [each.reward for each in updates]
    some = min(5, len(updates) // 2)
    first, last = sum(rewards[:some]) / some, sum(rewards[-some:]) / some
    print(f"reward of the first {some} updates {first:.2f}, of the last {some} {last:.2f}")
    path = options.out / "rollouts.png"
    name = Path(options.model).name if options.model else "A small random Llama"
    plot(updates, name, path)
    print(f"drawn into {path}")


if __name__ == "__main__":
    main()
