"""Rollouts of TRL's trainers, by an engine over the very model that is trained.

    trainer = VMKVGRPOTrainer(model=model, reward_funcs=reward, args=config, train_dataset=prompts)
    trainer.train()

The engine is opened at the first rollout and kept. It serves the model during each generation, and
is paused for training otherwise (`Engine.paused`). After a rollout with all its turns, the memory
of keys, values and workspaces is freed (`Engine.sleep`). TRL's templates, tools and loops of
several turns stay: the trainers replace only the generation of completions from token ids.

With DDP each rank has an engine of its own. Sharded weights (FSDP, ZeRO-3), images and
encoder-decoders raise `ConfigError`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from transformers import Trainer
from trl import GRPOTrainer, RLOOTrainer

from .errors import ConfigError
from .phases import without_collections
from .serve.engine import Engine
from .serve.options import EngineOptions
from .serve.params import SamplingParams
from .serve.runner import RunnerOptions
from .step.model_guard import eval_mode

#: Most samples of one request, and requests at once; each of these takes memory of its own.
_SAMPLES_MAX = 256
#: Share of free host memory for keys and values: the CPU's training has no other memory.
_HOST_FRACTION = 0.5
#: Fields of `SamplingParams` that a rollout has to decide.
_DECIDED = {"n", "seed", "logprobs", "prompt_logprobs"}
_GIVEN = {each.name for each in fields(SamplingParams)} - _DECIDED


class Rollouts(contextlib.AbstractContextManager["Rollouts"]):
    """An engine over the model of one TRL trainer at a time, kept from rollout to rollout.

    It is also a `rollout_func`, for use without a subclass: `GRPOTrainer(rollout_func=Rollouts())`
    gets one completion for each prompt, without tools, and TRL then uses the log-probabilities for
    its off-policy mask alone.

    Args:
        engine_options: `EngineOptions` that differ from a rollout's: log-probabilities of the
            distribution that is sampled from; as many requests at once as a batch has completions,
            at most 256, which need half the memory of 512 and 8 % more time (H100, 1B shape);
            cached prefixes for tools' turns alone; few sizes of captured steps, and none with
            prompts, which come at once; with `keep_graphs`, guesses from other samples where few
            requests are left; on the CPU, half of the free memory for keys and values.
        keep_graphs: Whether captured steps keep their memory while the model is trained. Otherwise
            each rollout captures them again.

    Attributes:
        engine: The engine; None before the first rollout.

    Raises:
        ConfigError: An option is impossible.
        TypeError: There is no such option.
    """

    def __init__(
        self, engine_options: Mapping[str, Any] | None = None, *, keep_graphs: bool = True
    ):
        self.engine: Engine | None = None
        self._options = dict(engine_options or {})
        EngineOptions(**self._options)
        self._keep_graphs = keep_graphs
        self._model: Any = None
        self._training = contextlib.ExitStack()

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Complete each prompt once, as TRL asks of a `rollout_func`.

        Raises:
            ConfigError: The trainer has tools, or see `generate`.
        """
        if getattr(trainer, "tools", None):
            raise ConfigError(
                "rollout_func=Rollouts() completes prompts once, so that tools would not be called "
                "through it; use VMKVGRPOTrainer"
            )
        prompt_ids, images, other_fields = trainer._tokenize_prompts(prompts)
        _check_text(images, other_fields)
        try:
            completion_ids, logprobs = self.generate(prompt_ids, trainer)
        finally:
            self.sleep()
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs}

    def generate(
        self, prompt_ids: Sequence[Sequence[int]], trainer: Any
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Complete each prompt with the trainer's sampling parameters.

        Neighbouring prompts that are equal are samples of one request, which computes them once.

        Args:
            prompt_ids: Token ids of each prompt.
            trainer: A GRPO or RLOO trainer of TRL.

        Returns:
            The token ids of each completion, an end token included, and the log-probability of each
            in the distribution that it was drawn from. Draws follow torch's generator.

        Raises:
            ConfigError: The trainer or its model cannot be served, or see `Engine.generate`.
        """
        runs: list[tuple[Sequence[int], int]] = []
        for ids, equal in itertools.groupby(prompt_ids):
            count = len(list(equal))
            runs += [(ids, min(_SAMPLES_MAX, count - at)) for at in range(0, count, _SAMPLES_MAX)]
        params = [sampling_params(trainer, num_samples) for _, num_samples in runs]
        with self._serving(trainer) as engine:
            outputs = engine.generate([ids for ids, _ in runs], params)
        for output in outputs:
            if output.error is not None:
                raise output.error
        samples = [each for output in outputs for each in output.outputs]
        token_ids = [list(each.token_ids) for each in samples]
        return token_ids, [[entry.logprob for entry in each.logprobs or ()] for each in samples]

    @contextlib.contextmanager
    def _serving(self, trainer: Any) -> Iterator[Engine]:
        """Hand the model to the engine, without garbage collection, and back to training."""
        with trainer.accelerator.autocast():
            engine = self._open(trainer)
            try:
                self._training.close()
                with without_collections(freezes=False):
                    yield engine
            finally:
                self._training.enter_context(engine.paused())

    def _open(self, trainer: Any) -> Engine:
        """Return the engine of the trainer's model, paused."""
        model = served_model(trainer)
        if self.engine is not None and model is self._model:
            return self.engine
        self.close()
        args = trainer.args
        num_completions = args.per_device_train_batch_size * args.steps_per_generation
        most = max(num_completions, args.per_device_eval_batch_size)
        defaults = {
            "logprobs_mode": "processed_logprobs",
            "max_num_seqs": min(most, _SAMPLES_MAX),
            "prefix_caching": bool(getattr(trainer, "tools", None)),
            "runner_options": RunnerOptions(max_graph_tokens=0, few_sizes=True),
        }
        # Steps with guesses are many to capture again for each rollout.
        if self._keep_graphs and not self._options.get("deterministic"):
            defaults["speculative_config"] = {"method": "suffix"}
        if model.device.type == "cpu":
            defaults["memory_fraction"] = _HOST_FRACTION / trainer.accelerator.num_processes
        with eval_mode(model):
            options = {**defaults, **self._options}
            self.engine = Engine(model, tokenizer=trainer._tokenizer, **options)
            self._training.enter_context(self.engine.paused())
        self._model = model
        return self.engine

    def sleep(self) -> None:
        """Give the memory of keys, values and workspaces back; nothing before the first rollout."""
        if self.engine is not None:
            self.engine.sleep(graphs=not self._keep_graphs)

    def close(self) -> None:
        """Close the engine; the model stays training's own. The next rollout opens another."""
        if self.engine is not None:
            self.engine.close()
            self._training.close()
            self.engine = self._model = None

    def __exit__(self, *exception: object) -> None:
        self.close()


def served_model(trainer: Any) -> Any:
    """Return the model without wrappers of training; `ConfigError` if it cannot be served."""
    if trainer._dist.is_fsdp or trainer._dist.is_zero3:
        raise ConfigError(
            "each rank's engine serves whole weights, and FSDP and ZeRO-3 shard them; train with "
            "DDP, with LoRA if memory is short, or use TRL's own generation"
        )
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_torch_compile=False)
    if hasattr(model, "active_peft_config"):
        config = model.active_peft_config
        # These are in the wrapper, not in the layers of the model.
        if config.is_prompt_learning or getattr(config, "alora_invocation_tokens", None):
            raise ConfigError(
                f"peft_config={type(config).__name__} changes the model's input, which the engine "
                "does not see; use adapters in the layers, such as LoRA"
            )
        model = model.get_base_model()
    if model.config.is_encoder_decoder:
        raise ConfigError("the model is an encoder-decoder; rollouts are of decoder-only models")
    return model


def sampling_params(trainer: Any, num_samples: int) -> SamplingParams:
    """Return what a trainer's configuration says of sampling, for one request.

    `generation_kwargs` come first: fields of `SamplingParams`, and transformers' `do_sample` and
    `max_new_tokens`. Raises `ConfigError` for others.
    """
    given = {
        "temperature": trainer.temperature,
        "top_p": trainer.top_p,
        "top_k": trainer.top_k or 0,
        "min_p": trainer.min_p or 0.0,
        "repetition_penalty": trainer.repetition_penalty,
        "max_tokens": trainer.max_completion_length,
        **(trainer.args.generation_kwargs or {}),
    }
    if not given.pop("do_sample", True):
        given["temperature"] = 0.0
    given["max_tokens"] = given.pop("max_new_tokens", given["max_tokens"])
    unknown = sorted(given.keys() - _GIVEN)
    if unknown:
        raise ConfigError(
            f"generation_kwargs: {', '.join(unknown)} cannot be given to a rollout; fields of "
            "vmkv.SamplingParams, do_sample and max_new_tokens can"
        )
    ends = (*given.pop("stop_token_ids", ()), *trainer.eos_token_ids)
    seed = int(torch.randint(1 << 48, ()))
    own = {"n": num_samples, "seed": seed, "logprobs": 0, "detokenize": bool(given.get("stop"))}
    return SamplingParams(**{"ignore_eos": True, **own, **given, "stop_token_ids": ends})


def _check_text(images: Any, other_fields: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for prompts of images."""
    if images or not other_fields.keys() <= {"token_type_ids", "mm_token_type_ids"}:
        raise ConfigError("prompts have images or other inputs; rollouts are of text alone")


class RolloutMixin(Trainer):  # type: ignore[misc]
    """Lets a TRL trainer generate with vmkv; goes before the trainer among the bases.

    Args:
        *args: Those of the trainer.
        engine_options, keep_graphs: See `Rollouts`.
        **kwargs: Those of the trainer.

    Attributes:
        rollouts: The engine, which is closed after `train`, and after `evaluate` outside of it.

    Raises:
        ConfigError: The configuration asks for another way to generate, or the model cannot be
            served; what only a pass of the model shows is raised by the first rollout.
    """

    def __init__(
        self,
        *args: Any,
        engine_options: Mapping[str, Any] | None = None,
        keep_graphs: bool = True,
        **kwargs: Any,
    ):
        for config in (*args, kwargs.get("args")):
            for name in ("use_vllm", "use_transformers_continuous_batching"):
                if getattr(config, name, False):
                    raise ConfigError(
                        f"{name}=True asks for another generator beside vmkv's engine; leave it "
                        "out, or use TRL's own trainer"
                    )
        if kwargs.get("rollout_func") is not None:
            raise ConfigError(
                f"rollout_func takes the place of {type(self).__name__}'s rollouts; leave it out, "
                "or use TRL's own trainer"
            )
        super().__init__(*args, **kwargs)
        self.rollouts = Rollouts(engine_options, keep_graphs=keep_graphs)
        served_model(self)
        sampling_params(self, 1)

    def _generate_single_turn(
        self, prompt_ids: Any, images: Any, multimodal_fields: Any, *_: Any, **__: Any
    ) -> Any:
        """TRL's hook. TRL repeats a prompt for each of its samples."""
        _check_text(images, multimodal_fields)
        return self.rollouts.generate(prompt_ids, self)

    def _generate(self, prompts: list[Any]) -> Any:
        try:
            return super()._generate(prompts)
        finally:
            self.rollouts.sleep()  # Not before: later turns find the earlier ones cached.

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, and close the engine. Arguments and result are the trainer's."""
        try:
            return super().train(*args, **kwargs)
        finally:
            self.rollouts.close()

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate, and close the engine outside of `train`; otherwise as the trainer does."""
        try:
            return super().evaluate(*args, **kwargs)
        finally:
            if not self.is_in_train:
                self.rollouts.close()


class VMKVGRPOTrainer(RolloutMixin, GRPOTrainer):  # type: ignore[misc]
    """`trl.GRPOTrainer` whose completions vmkv's engine generates; see `RolloutMixin`.

    `vllm_importance_sampling_correction` and its modes hold for these rollouts too, as TRL has them
    for vLLM's, with its metrics, at the cost of a forward pass over each batch. The modes of
    sequences are left out for `loss_type="vespo"`, which weighs tokens, and where top-p, top-k,
    min-p or penalties cut the distribution: ratios of whole completions are then near zero.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        params = sampling_params(self, 1)
        cuts = params.top_p < 1 or params.top_k or params.min_p or params.has_penalties
        is_by_token = self.vllm_importance_sampling_mode.startswith("token")
        # TRL corrects where this is set. It says nothing else once vLLM is neither made nor called.
        self.use_vllm = self.vllm_importance_sampling_correction and (
            is_by_token or not (cuts or self.loss_type == "vespo")
        )
        self.vllm_mode = None


class VMKVRLOOTrainer(RolloutMixin, RLOOTrainer):  # type: ignore[misc]
    """`trl.RLOOTrainer` whose completions vmkv's engine generates; see `RolloutMixin`."""

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        completion_ids, _ = super()._generate_single_turn(*args, **kwargs)
        return completion_ids
