"""TRL's trainers with vmkv's rollouts compute what they compute with their own.

Run by `make rollouts`, which installs TRL; skipped without it. Not covered: several ranks.
"""

from __future__ import annotations

import copy
import gc
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.runners import EAGER, TRACED
from helpers.tiny_models import llama_config
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from vmkv import Engine, StructuredOutputs
from vmkv.errors import ConfigError
from vmkv.serve.metrics import Metrics
from vmkv.serve.runner import RunnerOptions

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    trl = pytest.importorskip("trl")
    peft = pytest.importorskip("peft")
    datasets = pytest.importorskip("datasets")
    from accelerate.state import AcceleratorState

    from vmkv.trl import Rollouts, VMKVGRPOTrainer, VMKVRLOOTrainer, sampling_params

# TRL's, accelerate's and datasets' own business.
pytestmark = pytest.mark.filterwarnings("ignore")

ROOT = Path(__file__).parents[2]
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 :?"
TEMPLATE = "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + '?' }}{% endfor %}"
GREEDY: dict[str, Any] = {"do_sample": False}
RUNNERS = pytest.mark.parametrize(
    "engine_options",
    [
        EAGER,
        pytest.param(TRACED, marks=pytest.mark.slow, id="traced"),
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
    ends = {"bos_token_id": None, "eos_token_id": 1, "initializer_range": 0.3}
    shape = {"intermediate_size": 64, "max_position_embeddings": 256, **ends, **changes}
    config = llama_config(**{"vocab_size": len(LETTERS) + 2, **shape})
    return transformers.LlamaForCausalLM(config)


def share_of_digits(completions: list[str], **_: Any) -> list[float]:
    return [sum(each.isdigit() for each in text) / max(1, len(text)) for text in completions]


@pytest.fixture
def trainer_of(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Makes a trainer of a class, with changes of its configuration; closes its engine."""
    made: list[Any] = []

    def make(kind: Any, model: Any = None, **changes: Any) -> Any:
        AcceleratorState._reset_state(reset_partial_state=True)  # It remembers the last precision.
        options = {key: changes.pop(key) for key in tuple(changes) if key in OF_TRAINERS}
        is_grpo = issubclass(kind, trl.GRPOTrainer)
        config = (trl.GRPOConfig if is_grpo else trl.RLOOConfig)(
            output_dir=str(tmp_path),
            use_cpu=True,
            bf16=changes.pop("bf16", False),
            report_to="none",
            disable_tqdm=True,
            **{
                "save_strategy": "no",
                "per_device_train_batch_size": 4,
                "num_generations": 2,
                "max_completion_length": 8,
                "max_steps": 1,
                "learning_rate": 1e-2,
                "beta": 0.0,
                **changes,
            },
        )
        trainer = kind(
            model=model or tiny_llama(),
            reward_funcs=share_of_digits,
            args=config,
            train_dataset=datasets.Dataset.from_dict({"prompt": PROMPTS}),
            **{"processing_class": tokenizer(), **options},
        )
        if hasattr(trainer, "rollouts"):
            made.append(trainer)
        return trainer

    yield make
    for trainer in made:
        trainer.rollouts.close()


def test_rollouts_capture_few_steps_and_hold_no_row(trainer_of: Any) -> None:
    """By their own options, which say how steps are captured wherever they are."""
    trainer = trainer_of(VMKVGRPOTrainer, engine_options={"runner": "eager"})
    trainer._generate([[{"role": "user", "content": text}] for text in PROMPTS])
    engine = trainer.rollouts.engine
    assert RunnerOptions(max_graph_tokens=0, few_sizes=True) == engine.options.runner_options
    assert not engine.options.prefix_caching, "no turn follows that would find prefixes"
    assert 0 == engine.cache.pool.backend.usage().physical_bytes


OF_TRAINERS = {
    "engine_options",
    "eval_dataset",
    "keep_graphs",
    "peft_config",
    "rollout_func",
    "tools",
    "processing_class",
}
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


@TRAINERS
@RUNNERS
def test_greedy_tokens_are_those_of_the_plain_trainer(
    trainer_of: Any, ours: Any, theirs: Any, engine_options: Any
) -> None:
    """Before and after steps of the optimizer, which change the answers."""
    model = tiny_llama()
    trainer = trainer_of(ours, model, generation_kwargs=GREEDY, engine_options=engine_options)
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


def test_samples_are_guessed_from_each_other(trainer_of: Any) -> None:
    """The tokens stay those of a rollout without guesses; two options leave these out."""
    long = {"generation_kwargs": GREEDY, "max_completion_length": 100}
    trainer, plain = (
        trainer_of(VMKVGRPOTrainer, engine_options=its, **long)
        for its in ({}, {"speculative_config": None})
    )
    tokens_of(trainer)
    metrics = trainer.rollouts.engine.loop._observer = Metrics()
    assert tokens_of(plain) == tokens_of(trainer)
    values = {each.name: each.value for its in metrics.families() for each in its.samples}
    assert 0 < values["vmkv_spec_decode_num_accepted_tokens_total"]
    for its in ({"engine_options": {"deterministic": True}}, {"keep_graphs": False}):
        same = trainer_of(VMKVGRPOTrainer, **its)
        tokens_of(same)
        assert same.rollouts.engine.options.speculation is None


@RUNNERS
def test_log_probabilities_are_the_trainers_own(trainer_of: Any, engine_options: Any) -> None:
    """At the temperature of training, which both divide logits by."""
    trainer = trainer_of(
        VMKVGRPOTrainer, temperature=0.7, max_completion_length=24, engine_options=engine_options
    )
    completion_ids, logprobs = one_turn(trainer)
    prompts = [trainer.processing_class(text)["input_ids"] for text in PROMPTS for _ in range(2)]
    assert any(each != completion_ids[0] for each in completion_ids)
    for prompt, said, told in zip(prompts, completion_ids, logprobs, strict=True):
        ids = torch.tensor([[*prompt, *said]])
        its, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, torch.ones_like(ids), len(said)
        )
        assert len(told) == len(said)
        assert (its[0] - torch.tensor(told)).abs().max() < 1e-4


def gradients_of_step(trainer: Any, rollout: Any) -> dict[str, torch.Tensor]:
    """Gradients of one step with given completions, rewards and weights."""
    kept: dict[str, torch.Tensor] = {}

    def keep(optimizer: Any, *_: Any) -> None:
        for name, each in trainer.model.named_parameters():
            if each.grad is not None:
                kept[name.replace("_orig_mod.", "")] = each.grad.clone()

    trainer._generate_single_turn = rollout(trainer)
    torch.manual_seed(1)
    trainer.create_optimizer_and_scheduler(1)
    trainer.optimizer.register_step_pre_hook(keep)
    trainer.train()
    return kept


@TRAINERS
@pytest.mark.parametrize("corrects", [True, False])
def test_gradients_of_a_step_are_the_plain_trainers(
    trainer_of: Any, ours: Any, theirs: Any, corrects: bool
) -> None:
    """A step over the same completions; the correction's ratio is one but for rounding."""
    if ours is VMKVRLOOTrainer and corrects:
        pytest.skip("RLOO has no correction")
    said: list[Any] = []

    def recorded(trainer: Any) -> Any:
        generate = trainer._generate_single_turn

        def call(*args: Any, **options: Any) -> Any:
            said.append(generate(*args, **options))
            return said[-1]

        return call

    def repeated(trainer: Any) -> Any:
        its = said[0][0] if isinstance(trainer, trl.GRPOTrainer) else said[0]
        return lambda *_, **__: (its, None) if isinstance(trainer, trl.GRPOTrainer) else its

    corrected = {}
    if issubclass(ours, trl.GRPOTrainer):
        corrected = {"vllm_importance_sampling_correction": corrects}
    model = tiny_llama()
    plain = copy.deepcopy(model)
    trainer = trainer_of(ours, model, temperature=0.7, **corrected)
    got = gradients_of_step(trainer, recorded)
    expected = gradients_of_step(trainer_of(theirs, plain, temperature=0.7), repeated)
    assert got.keys() == expected.keys()
    assert max(each.abs().max() for each in expected.values()) > 1e-3
    for name, each in expected.items():
        torch.testing.assert_close(got[name], each, rtol=1e-4, atol=1e-6, msg=name)
    names = {name for entry in trainer.state.log_history for name in entry}
    assert corrects == ("sampling/importance_sampling_ratio/mean" in names)


def test_adapters_are_served_as_they_are_trained(trainer_of: Any) -> None:
    """The engine serves the model inside; steps change adapters alone."""
    config = peft.LoraConfig(
        target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False
    )
    options = {"generation_kwargs": GREEDY, "peft_config": config}
    trainer = trainer_of(VMKVGRPOTrainer, **options)
    model, said = trainer.model, []
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], 0.1)
    for _ in range(3):
        plain = trainer_of(trl.GRPOTrainer, copy.deepcopy(model), generation_kwargs=GREEDY)
        said.append(tokens_of(trainer))
        assert tokens_of(plain) == said[-1]
        ids = torch.tensor([trainer.processing_class(PROMPTS[0])["input_ids"]])
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len({str(each) for each in said}) > 1, "the steps change no answer"


@pytest.mark.parametrize("adapts", [False, True])
@pytest.mark.parametrize("ours", [VMKVGRPOTrainer, VMKVRLOOTrainer])
def test_a_model_in_float32_trains_in_bfloat16(trainer_of: Any, ours: Any, adapts: bool) -> None:
    """TRL's default: accelerate's autocast is around each pass, the engine's included.

    With adapters it is in the wrapper's `forward`, which the engine does not call.
    """
    told: list[list[float]] = []
    peft_config = peft.LoraConfig(target_modules=["q_proj"]) if adapts else None
    trainer = trainer_of(ours, bf16=True, max_steps=2, logging_steps=1, peft_config=peft_config)
    assert trainer.accelerator.mixed_precision == "bf16"
    generate = trainer.rollouts.generate

    def watched(*args: Any) -> Any:
        found = generate(*args)
        assert trainer.rollouts.engine.cache.groups[0].dtype == torch.bfloat16
        told.extend(found[1])
        return found

    trainer.rollouts.generate = watched
    trainer.train()
    assert trainer.rollouts.engine is None
    assert all(math.isfinite(each) for logprobs in told for each in logprobs)
    if ours is VMKVGRPOTrainer:
        differences = [
            entry["sampling/sampling_logp_difference/mean"]
            for entry in trainer.state.log_history
            if "loss" in entry
        ]
        assert len(differences) == 2
        assert max(differences) < 0.02


def test_samples_of_a_prompt_are_one_request(trainer_of: Any) -> None:
    """Two prompts twice compute two prompts; draws follow torch's seed."""
    trainer = trainer_of(VMKVGRPOTrainer, temperature=1.0)
    torch.manual_seed(5)
    first = tokens_of(trainer)
    engine = trainer.rollouts.engine
    assert first[0] != first[1]
    asked: list[Any] = []
    generate = engine.generate

    def watched(prompts: Any, params: Any) -> Any:
        asked.extend((len(prompts), *(each.n for each in params)))
        return generate(prompts, params)

    engine.generate = watched
    torch.manual_seed(5)
    assert tokens_of(trainer) == first
    assert asked == [2, 2, 2]
    assert tokens_of(trainer) != first
    assert trainer.rollouts.engine is engine


def test_memory_is_given_back_while_the_model_is_trained(trainer_of: Any) -> None:
    """What stays is the page of the row for padding, and no prefix of other weights."""
    held: list[int] = []
    trainer = trainer_of(VMKVGRPOTrainer, max_steps=2)
    compute_loss = trainer.compute_loss

    def watched(*args: Any, **options: Any) -> Any:
        cache = trainer.rollouts.engine.cache
        held.append(cache.pool.stats().created_bytes)
        assert not cache.prefixes.recorded
        return compute_loss(*args, **options)

    trainer.compute_loss = watched
    trainer.train()
    assert held == [0, 0]


def test_turns_of_a_rollout_find_the_earlier_ones_cached(trainer_of: Any) -> None:
    """Tools make several turns under the same weights, whose conversations go on."""
    trainer = trainer_of(VMKVGRPOTrainer, engine_options={"prefix_caching": True})
    one_turn(trainer)
    engine = trainer.rollouts.engine
    prompt = trainer.processing_class(PROMPTS[0])["input_ids"]
    with trainer.rollouts._serving(trainer):
        (output,) = engine.generate(prompt)
    assert output.num_cached_tokens > 0
    with torch.no_grad():
        trainer.model.lm_head.weight.mul_(1.5)
    with trainer.rollouts._serving(trainer):
        (output,) = engine.generate(prompt)
    assert output.num_cached_tokens == 0


def test_a_rollout_func_trains_without_a_subclass(trainer_of: Any) -> None:
    with Rollouts({"runner": "eager"}) as rollouts:
        trainer = trainer_of(trl.GRPOTrainer, rollout_func=rollouts, generation_kwargs=GREEDY)
        plain = trainer_of(trl.GRPOTrainer, generation_kwargs=GREEDY)
        found = rollouts(PROMPTS, trainer)
        assert found["completion_ids"] == tokens_of(plain)[::2]
        assert [len(each) for each in found["logprobs"]] == [
            len(each) for each in found["completion_ids"]
        ]
        trainer.train()
        assert trainer.state.global_step == 1
        trainer.tools = [len]
        with pytest.raises(ConfigError, match="tools would not be called through it; use VMKVGRPO"):
            rollouts(PROMPTS, trainer)


def test_evaluation_closes_the_engine_outside_of_training(trainer_of: Any) -> None:
    trainer = trainer_of(
        VMKVGRPOTrainer,
        max_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        num_generations_eval=1,
        eval_dataset=datasets.Dataset.from_dict({"prompt": PROMPTS}),
    )
    found = trainer.evaluate()
    assert 0 <= found["eval_reward"] <= 1
    assert trainer.rollouts.engine is None
    evaluate, kept = trainer.evaluate, []

    def watched(*args: Any, **options: Any) -> Any:
        result = evaluate(*args, **options)
        kept.append(trainer.rollouts.engine)
        return result

    trainer.evaluate = watched
    trainer.train()
    first, second = kept
    assert first is not None
    assert first is second


def test_a_failed_rollout_leaves_the_model_to_training(
    trainer_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next rollout uses the same engine. Python collects garbage again after each."""
    trainer, generate, collects = trainer_of(VMKVGRPOTrainer), Engine.generate, []

    def watched(*args: Any) -> Any:
        collects.append(gc.isenabled())
        return generate(*args)

    monkeypatch.setattr(Engine, "generate", watched)
    before = tokens_of(trainer)
    assert gc.isenabled()
    with pytest.raises(ConfigError, match="leaves no room"):
        trainer._generate_single_turn([[3] * 256], None, {}, 1)
    assert gc.isenabled()
    assert [False, False] == collects
    assert all(module.training for module in trainer.model.modules())
    ids = torch.tensor([trainer.processing_class(PROMPTS[0])["input_ids"]])
    trainer.model(input_ids=ids, labels=ids).loss.backward()
    assert trainer.model.lm_head.weight.grad is not None
    assert [len(each) for each in tokens_of(trainer)][:1]
    assert len(before) == 4


def letters_of_qwen() -> Any:
    """A token for each byte, and Qwen3's template, by which TRL parses calls."""
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    words = [*marks, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    inner = Tokenizer(models.BPE({word: at for at, word in enumerate(words)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(marks)
    template = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token=marks[0],
        eos_token=marks[2],
        chat_template=template.read_text(),
    )


def test_tools_are_called_and_their_results_are_read(trainer_of: Any) -> None:
    """Each turn is forced to call the tool; the second begins with what the first computed."""
    called: list[int] = []

    def double(number: int) -> int:
        """Double a number.

        Args:
            number: The number.

        Returns:
            Twice the number.
        """
        called.append(number)
        return 2 * number

    call = '<tool_call>\n{"name": "double", "arguments": {"number": 21}}\n</tool_call>'
    inner = letters_of_qwen()
    trainer = trainer_of(
        VMKVGRPOTrainer,
        tiny_llama(vocab_size=len(inner), max_position_embeddings=4096, eos_token_id=2),
        processing_class=inner,
        tools=[double],
        max_tool_calling_iterations=2,
        max_completion_length=400,
        generation_kwargs={"structured_outputs": StructuredOutputs(choice=[call])},
    )
    chats = [[{"role": "user", "content": "double 21"}]] * 2
    # TRL makes these for each batch, before it generates.
    trainer._sync_tool_dicts, trainer._async_tool_dicts = [{"double": double}] * 2, [{}] * 2
    _, completion_ids, tool_mask, completions, logprobs, *_ = trainer._generate(chats)
    assert called == [21] * 4
    assert trainer.rollouts.engine.options.prefix_caching
    roles = [message["role"] for message in completions[0]]
    assert roles == ["assistant", "tool", "assistant", "tool", "assistant"]
    for ids, mask, told in zip(completion_ids, tool_mask, logprobs, strict=True):
        assert len(ids) == len(mask) == len(told)
        assert all(each == 0.0 for each, is_said in zip(told, mask, strict=True) if not is_said)
        assert inner.decode(ids).count(call) == 3


def test_chats_follow_the_template(trainer_of: Any) -> None:
    trainer = trainer_of(VMKVGRPOTrainer, generation_kwargs=GREEDY)
    plain = trainer_of(trl.GRPOTrainer, generation_kwargs=GREEDY)
    chats = [[{"role": "user", "content": text}] for text in PROMPTS]
    assert trainer._generate(chats)[:2] == plain._generate(chats)[:2]


@pytest.mark.slow
def test_a_checkpoint_has_the_weights_of_training(trainer_of: Any, tmp_path: Path) -> None:
    """Also where the engine keeps weights of joined projections side by side."""
    options = {"save_strategy": "steps", "save_steps": 1, "engine_options": TRACED}
    trainer = trainer_of(VMKVGRPOTrainer, max_steps=2, **options)
    trainer.train()
    folder = tmp_path / "checkpoint-2"
    saved = transformers.LlamaForCausalLM.from_pretrained(folder).state_dict()
    for name, each in trainer.model.state_dict().items():
        assert torch.equal(each, saved[name]), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_vllm": True}, "use_vllm=True asks for another generator"),
        (
            {"use_transformers_continuous_batching": True},
            "use_transformers_continuous_batching=True asks for another generator",
        ),
        ({"rollout_func": len}, "rollout_func takes the place of VMKVGRPOTrainer's rollouts"),
        ({"generation_kwargs": {"num_beams": 2, "n": 3}}, "generation_kwargs: n, num_beams cannot"),
        ({"engine_options": {"nothing": 1}}, "nothing"),
        (
            {
                "peft_config": peft.PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
                "gradient_checkpointing": False,
            },
            "peft_config=PrefixTuningConfig changes the model's input",
        ),
    ],
)
def test_what_cannot_be_is_refused(trainer_of: Any, changes: Any, message: str) -> None:
    """In the words of the option, before anything is generated."""
    with pytest.raises((ConfigError, TypeError), match=message):
        trainer_of(VMKVGRPOTrainer, **changes)


def test_shards_images_and_encoder_decoders_are_refused(trainer_of: Any) -> None:
    trainer = trainer_of(VMKVGRPOTrainer)
    with pytest.raises(ConfigError, match="prompts have images"):
        trainer._generate_single_turn([[3]], [["an image"]], {}, 1)
    with pytest.raises(ConfigError, match="prompts have images"):
        trainer._generate_single_turn([[3]], None, {"pixel_values": [[0.0]]}, 1)
    for name, value in (("fsdp_version", 2), ("zero_stage", 3)):
        before = getattr(trainer._dist, name)
        setattr(trainer._dist, name, value)
        with pytest.raises(ConfigError, match="FSDP and ZeRO-3 shard them; train with DDP"):
            one_turn(trainer)
        setattr(trainer._dist, name, before)
    trainer.model.config.is_encoder_decoder = True
    with pytest.raises(ConfigError, match="rollouts are of decoder-only models"):
        one_turn(trainer)


@pytest.mark.parametrize(
    ("changes", "corrects"),
    [
        ({}, True),
        ({"vllm_importance_sampling_correction": False}, False),
        ({"loss_type": "vespo"}, False),
        ({"top_k": 5}, False),
        ({"generation_kwargs": {"top_p": 0.9}}, False),
        ({"top_k": 5, "vllm_importance_sampling_mode": "token_truncate"}, True),
        ({"loss_type": "vespo", "vllm_importance_sampling_mode": "token_mask"}, True),
    ],
)
def test_rollouts_are_corrected_for_as_the_configuration_says(
    trainer_of: Any, changes: Any, corrects: bool
) -> None:
    trainer = trainer_of(VMKVGRPOTrainer, **changes)
    trainer.train()
    names = {name for entry in trainer.state.log_history for name in entry}
    assert corrects == ("sampling/importance_sampling_ratio/mean" in names)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"temperature": 0.7, "top_k": 0, "min_p": 0.0, "max_tokens": 8, "detokenize": False}),
        ({"do_sample": False, "max_new_tokens": 3}, {"temperature": 0.0, "max_tokens": 3}),
        ({"stop": ["."], "temperature": 0.2}, {"detokenize": True, "temperature": 0.2}),
        ({"stop_token_ids": [7]}, {"stop_token_ids": (7, 1)}),
    ],
)
def test_sampling_follows_the_configuration(trainer_of: Any, given: Any, expected: Any) -> None:
    trainer = trainer_of(VMKVGRPOTrainer, temperature=0.7, generation_kwargs=given)
    params = sampling_params(trainer, 3)
    assert {"n": 3, "logprobs": 0, "ignore_eos": True, **expected}.items() <= vars(params).items()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_a_reward_of_digits_rises(trainer_of: Any, seed: int) -> None:
    """The mean of the last 5 of 60 updates is above that of the first 5."""
    trainer = trainer_of(
        VMKVGRPOTrainer,
        tiny_llama(seed, initializer_range=0.05),
        seed=seed,
        max_steps=60,
        per_device_train_batch_size=16,
        num_generations=8,
        learning_rate=3e-3,
        logging_steps=1,
    )
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert len(rewards) == 60
    assert sum(rewards[-5:]) > sum(rewards[:5])


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with this environment's packages to its end."""
    environment = os.environ | {"MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT), *sys.path))
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.slow
def test_each_rank_has_an_engine(tmp_path: Path) -> None:
    """Two ranks of DDP draw different completions, and end with equal weights."""
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = start(*ranks, __file__, str(tmp_path))
    assert done.returncode == 0, done.stderr
    one, other = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert one["said"] != other["said"]
    assert all(torch.equal(each, other["weights"][name]) for name, each in one["weights"].items())


@pytest.mark.slow
def test_the_example_draws_its_reward(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "rollouts.py")
    done = start(script, "--updates", "5", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "reward of the first 5: 0." in done.stdout
    assert (tmp_path / "rollouts.png").stat().st_size > 5000


def train_as_a_rank(folder: Path) -> None:
    """What each rank of `test_each_rank_has_an_engine` does: one group of samples for each."""
    config = trl.GRPOConfig(
        output_dir=str(folder / "out"),
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        per_device_train_batch_size=4,
        num_generations=8,
        max_completion_length=8,
        max_steps=2,
        learning_rate=1e-2,
    )
    trainer = VMKVGRPOTrainer(
        model=tiny_llama(),
        reward_funcs=share_of_digits,
        args=config,
        train_dataset=datasets.Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=tokenizer(),
    )
    said: list[Any] = []
    generate = trainer.rollouts.generate

    def watched(*args: Any) -> Any:
        said.append(generate(*args))
        return said[-1]

    trainer.rollouts.generate = watched  # type: ignore[method-assign]
    trainer.train()
    weights = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    name = f"{trainer.accelerator.process_index}.pt"
    torch.save({"said": said[0][0], "weights": weights}, folder / name)


if __name__ == "__main__":
    train_as_a_rank(Path(sys.argv[1]))
