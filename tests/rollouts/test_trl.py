"""TRL's trainers with vmkv's rollouts compute what they compute with their own.

Run by `make rollouts`, which installs TRL; skipped without it. Not covered: several ranks.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from vmkv.errors import ConfigError
from vmkv.serve.runner import RunnerOptions

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    trl = pytest.importorskip("trl")
    peft = pytest.importorskip("peft")
    datasets = pytest.importorskip("datasets")
    from vmkv.trl import Rollouts, VMKVGRPOTrainer, VMKVRLOOTrainer, sampling_params

# TRL's, accelerate's and datasets' own business.
pytestmark = pytest.mark.filterwarnings("ignore")

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 :?"
TEMPLATE = "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + '?' }}{% endfor %}"
GREEDY: dict[str, Any] = {"do_sample": False}
_TRACED = RunnerOptions(
    compile_layers=True, compile_backend="aot_eager", capture=True, show_progress=False
)
RUNNERS = pytest.mark.parametrize(
    "engine_options",
    [
        {"runner": "eager"},
        pytest.param(
            {"runner": "graphs", "runner_options": _TRACED}, marks=pytest.mark.slow, id="traced"
        ),
    ],
)
#: Two groups of two samples, longer than a block of the prefix cache.
PROMPTS = ["tell me of numbers and of words: " * 2, "0123456789 " * 6]


def tokenizer() -> Any:
    """A token for each letter."""
    words = ["<pad>", "</s>", *LETTERS]
    inner = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, "<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="</s>", chat_template=TEMPLATE
    )


def tiny_llama(seed: int = 0, **changes: Any) -> Any:
    """A model of 40 tokens in float32, whose answers differ from prompt to prompt."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=len(LETTERS) + 2,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        **{"initializer_range": 0.3, **changes},
    )
    return transformers.LlamaForCausalLM(config)


def share_of_digits(completions: list[str], **_: Any) -> list[float]:
    return [sum(each.isdigit() for each in text) / max(1, len(text)) for text in completions]


@pytest.fixture
def trainer_of(tmp_path: Path) -> Callable[..., Any]:
    """Makes a trainer of a class, with changes of its configuration."""

    def make(kind: Any, model: Any = None, **changes: Any) -> Any:
        options = {key: changes.pop(key) for key in tuple(changes) if key in OF_TRAINERS}
        is_grpo = issubclass(kind, trl.GRPOTrainer)
        config = (trl.GRPOConfig if is_grpo else trl.RLOOConfig)(
            output_dir=str(tmp_path),
            use_cpu=True,
            bf16=changes.pop("bf16", False),
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            **{
                "per_device_train_batch_size": 4,
                "num_generations": 2,
                "max_completion_length": 8,
                "max_steps": 1,
                "learning_rate": 1e-2,
                "beta": 0.0,
                **changes,
            },
        )
        return kind(
            model=model or tiny_llama(),
            reward_funcs=share_of_digits,
            args=config,
            train_dataset=datasets.Dataset.from_dict({"prompt": PROMPTS}),
            processing_class=tokenizer(),
            **options,
        )

    return make


OF_TRAINERS = {"engine_options", "keep_graphs", "peft_config", "rollout_func", "tools"}
TRAINERS = pytest.mark.parametrize(
    ("ours", "theirs"),
    [(VMKVGRPOTrainer, trl.GRPOTrainer), (VMKVRLOOTrainer, trl.RLOOTrainer)],
    ids=["grpo", "rloo"],
)


def one_turn(trainer: Any) -> Any:
    """Completions of each prompt twice, as TRL asks for them; and log-probabilities for GRPO."""
    ids = [each for text in PROMPTS for each in [trainer.processing_class(text)["input_ids"]] * 2]
    more = (2,) if isinstance(trainer, trl.GRPOTrainer) else ()
    return trainer._generate_single_turn(ids, None, {}, *more)


def tokens_of(trainer: Any) -> list[list[int]]:
    found = one_turn(trainer)
    return found[0] if isinstance(trainer, trl.GRPOTrainer) else found


@pytest.fixture
def opened() -> Any:
    """Trainers whose engines are closed after the test."""
    found: list[Any] = []
    yield found
    for trainer in found:
        trainer.rollouts.close()


@TRAINERS
@RUNNERS
def test_greedy_tokens_are_those_of_the_plain_trainer(
    trainer_of: Any, opened: list[Any], ours: Any, theirs: Any, engine_options: Any
) -> None:
    """Before and after steps of the optimizer, which change the answers."""
    model = tiny_llama()
    trainer = trainer_of(ours, model, generation_kwargs=GREEDY, engine_options=engine_options)
    opened.append(trainer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    said = []
    for _ in range(4):
        plain = trainer_of(theirs, copy.deepcopy(model), generation_kwargs=GREEDY)
        said.append(tokens_of(trainer))
        assert tokens_of(plain) == said[-1]
        assert trainer.model.training
        ids = torch.tensor([trainer.processing_class(PROMPTS[0])["input_ids"]])
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len({str(each) for each in said}) > 1, "the steps change no answer"
