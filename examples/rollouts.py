"""A model learns to answer with digits: TRL trains it, and the engine generates with its weights.

python examples/rollouts.py    # a small random Llama; needs `pip install -e ".[trl,bench]"`
python examples/rollouts.py --model $(python examples/real_model.py) --updates 25
"""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib.pyplot as plt
import transformers
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from trl import GRPOConfig

from vmkv.trl import VMKVGRPOTrainer

parser = argparse.ArgumentParser(description="Train with rollouts of vmkv's engine, on the CPU.")
parser.add_argument("--model", help="a local folder; by default a small random Llama")
parser.add_argument("--updates", type=int, default=60, help="of the weights; at least 5")
parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the plot")
options = parser.parse_args()


def share_of_digits(completions, **_):
    return [sum(each.isdigit() for each in text) / max(1, len(text)) for text in completions]


sizes = dict.fromkeys(("per_device_train_batch_size", "num_generations"), 8)
how = {"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no"}
if options.model:
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype="float32")
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
else:  # A token for each letter.
    words = {word: at for at, word in enumerate(["pad", "end", *"abcdehimnorstuvwy0123456789 :?"])}
    letters = Tokenizer(models.WordLevel(words, "pad"))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    letters.decoder = decoders.Fuse()
    names = {"pad_token": "pad", "eos_token": "end"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=letters, **names)
    shape = dict.fromkeys(("hidden_size", "intermediate_size", "max_position_embeddings"), 64)
    shape |= {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": len(words)}
    config = transformers.LlamaConfig(**shape, pad_token_id=0, bos_token_id=None, eos_token_id=1)
    model = transformers.LlamaForCausalLM(config)
with TemporaryDirectory() as folder:
    rate = 1e-5 if options.model else 3e-3
    steps = {"max_steps": options.updates, "logging_steps": 1, "max_completion_length": 16}
    args = GRPOConfig(output_dir=folder, learning_rate=rate, **sizes, **steps, **how)
    prompts = Dataset.from_dict({"prompt": ["what is the number? ", "she was born in the year "]})
    trainer = VMKVGRPOTrainer(model, share_of_digits, args, prompts, processing_class=tokenizer)
    trainer.train()
rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
print(
    f"reward of the first 5: {sum(rewards[:5]) / 5:.2f}, of the last: {sum(rewards[-5:]) / 5:.2f}"
)
plt.plot(range(1, len(rewards) + 1), rewards, ".-", color="#0072B2")
plt.gca().set(xlabel="update of the weights", ylabel="reward: share of digits", ylim=(0, 1.02))
options.out.mkdir(parents=True, exist_ok=True)
plt.savefig(options.out / "rollouts.png", dpi=120)
