"""Several engines over one model, which the user changes between their steps.

Everything is real: engines with their runners, `vmkv.generate`, captured `model.generate`, and the
model, a tiny Llama. Each returned token is compared with transformers and an unchanged copy, and
each refusal must be a `ConfigError` while the model is changed, or after its parameters have moved
under captured or compiled steps.
"""

from __future__ import annotations

import copy
import functools
import gc
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

import vmkv
from helpers.random_engine import RandomPlay
from helpers.runners import EAGER, graphs
from helpers.tiny_models import VOCABULARY, tiny_model
from vmkv import Engine, SamplingParams, VMKVCache
from vmkv.errors import ConfigError
from vmkv.serve.request import RequestHandle
from vmkv.step.model_guard import has_users

ENGINES_MAX = 3
_LONGEST_ANSWER, _MAX_TOKENS = 12, 64
#: Options of each kind of engine. Captured steps run padded here, without a GPU.
_KINDS: dict[str, dict[str, Any]] = {
    "eager": EAGER,
    "deterministic": {**EAGER, "deterministic": True},
    "graphs": graphs(compile_layers=False, capture=True, max_graph_tokens=8),
    "compiled": graphs(compile_layers=True, compile_backend="eager", capture=False),
}
KINDS = tuple(_KINDS)
PARTS = ("", "model.layers.1", "model.layers.0.self_attn", "model.layers.1.mlp", "model.norm")
ATTENTIONS = ("eager", "sdpa", "vmkv")


@dataclass(eq=False)
class _Served:
    """An engine and its unfinished requests.

    Attributes:
        may_fail: Whether the model was changed after the requests were added.
        num_moves: Number of conversions of the model before the engine was made.
    """

    engine: Engine
    kind: str
    num_moves: int
    asked: list[tuple[RequestHandle, list[int], int]] = field(default_factory=list)
    may_fail: bool = False

    @property
    def is_fixed(self) -> bool:
        return self.kind in ("graphs", "compiled")


class SharedModelPlay:
    """A model, its engines, and operations of its user.

    Attributes:
        shape: Description for the report of a failure.
        trace: Log of the operations.
        engines: Open engines, oldest first.
        num_steps: Number of engine steps.
        num_refused: Number of requests and calls refused because the model was changed.
        num_right: Number of answers that were compared, and right.
    """

    shape = "several engines over one model"

    def __init__(self) -> None:
        self.trace: list[str] = []
        self.model = copy.deepcopy(_untouched())
        self.chosen = self.model.config._attn_implementation
        self.engines: list[_Served] = []
        self.num_steps = self.num_refused = self.num_right = 0
        self._num_moves = 0
        self._captured: Any = None
        self._cache: VMKVCache | None = None

    # ---- engines --------------------------------------------------------------------------

    def make(self, kind: str) -> None:
        """Make another engine."""
        self.trace.append(f"make({kind!r})")
        if len(self.engines) == ENGINES_MAX or self.model.dtype != torch.float32:
            return  # An engine made now would serve the converted model.
        is_clear = self._is_right_but_for_attention and not (
            any(each.kind == "compiled" for each in self.engines)
            or (kind == "compiled" and has_users(self.model))
        )
        try:
            engine = Engine(
                self.model,
                max_num_seqs=3,
                max_num_batched_tokens=16,
                max_tokens=_MAX_TOKENS,
                budget_bytes=8 << 20,
                **_KINDS[kind],
            )
        except ConfigError as error:
            if is_clear:
                raise AssertionError("refused without a reason") from error
            self.num_refused += 1
            return
        self.engines.append(_Served(engine, kind, self._num_moves))
        self._note_changes()

    def close(self, pick: int) -> None:
        """Close an engine, which cancels its requests."""
        self.trace.append(f"close({pick})")
        if self.engines:
            served = self.engines.pop(pick % len(self.engines))
            served.engine.close()
            self._check_restored()

    def drop(self, pick: int, *, collect: bool) -> None:
        """Drop an engine without `close`, and collect garbage now or later."""
        self.trace.append(f"drop({pick}, collect={collect})")
        if self.engines:
            self.engines.pop(pick % len(self.engines))
            if collect or not self.engines:
                gc.collect()
                self._check_restored()

    def add(self, pick: int, prompt: list[int], num_tokens: int) -> None:
        """Add a request."""
        self.trace.append(f"add({pick}, {prompt}, {num_tokens})")
        if self.engines:
            served = self.engines[pick % len(self.engines)]
            params = SamplingParams(temperature=0, max_tokens=num_tokens)
            served.asked.append((served.engine.add(prompt, params), prompt, num_tokens))
            served.may_fail |= self._is_changed_for(served)

    def step(self, pick: int, num_steps: int) -> None:
        """Run steps of one engine."""
        self.trace.append(f"step({pick}, {num_steps})")
        if self.engines:
            self._run(self.engines[pick % len(self.engines)], num_steps)

    def _run(self, served: _Served, num_steps: int) -> None:
        for _ in range(num_steps):
            if not served.engine.has_unfinished:
                break
            served.engine.step()
            self.num_steps += 1
        for asked in [each for each in served.asked if each[0].is_finished]:
            served.asked.remove(asked)
            self._check(served, *asked)
        if not served.asked:
            served.may_fail = False

    def _check(
        self, served: _Served, handle: RequestHandle, prompt: list[int], num_tokens: int
    ) -> None:
        (request,) = handle.requests
        said, wanted = list(request.output_token_ids), _answer(tuple(prompt))[:num_tokens]
        assert wanted[: len(said)] == said, f"{served.kind}: {said} instead of {wanted}"
        if request.error is None:
            assert len(said) == num_tokens
            self.num_right += 1
        else:
            assert isinstance(request.error, ConfigError), repr(request.error)
            assert served.may_fail, f"{served.kind}: refused without a reason: {request.error}"
            self.num_refused += 1

    # ---- other calls of the model ---------------------------------------------------------

    def generate_alone(self, prompt: list[int], num_tokens: int) -> None:
        """Call `model.generate` as the user does."""
        self.trace.append(f"generate_alone({prompt}, {num_tokens})")
        if self._is_right_but_for_attention and not self._is_compiled:
            assert _answer(tuple(prompt))[:num_tokens] == _generate(self.model, prompt, num_tokens)
            self.num_right += 1

    def generate_packed(self, prompts: list[list[int]], num_tokens: int) -> None:
        """Call `vmkv.generate`, which sets the attention while it runs."""
        self.trace.append(f"generate_packed({prompts}, {num_tokens})")
        if self._is_compiled or self.model.dtype != torch.float32:
            return  # A converted model gives the tokens of its dtype.
        try:
            outputs = vmkv.generate(self.model, prompts, max_new_tokens=num_tokens, do_sample=False)
        except ConfigError as error:
            if self._is_right_but_for_attention:
                raise AssertionError("refused without a reason") from error
            self.num_refused += 1
            return
        finally:
            self._check_restored()
            self._note_changes()
        for prompt, output in zip(prompts, outputs, strict=True):
            assert _answer(tuple(prompt))[:num_tokens] == output[len(prompt) :]
            self.num_right += 1

    def generate_captured(self, prompt: list[int], num_tokens: int, change_at: int) -> None:
        """Call `model.generate` with captured steps; the model may change during the call."""
        self.trace.append(f"generate_captured({prompt}, {num_tokens}, {change_at})")
        if self._is_compiled or not self._is_right_but_for_attention:
            return
        if self._captured is None:
            self._captured = vmkv.capture_decoding(self.model)
        if self._cache is None:
            self._cache = VMKVCache(self.model.config)
        self._cache.reset()

        def change(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if input_ids.shape[1] == len(prompt) + change_at:
                self.convert(is_back=False)
                self.convert(is_back=True)
            return scores

        output = _generate(
            self.model,
            prompt,
            num_tokens,
            past_key_values=self._cache,
            logits_processor=[change] if change_at else [],
        )
        assert _answer(tuple(prompt))[:num_tokens] == output
        self.num_right += 1

    # ---- changes of the model -------------------------------------------------------------

    def set_attention(self, name: str) -> None:
        """Set the attention implementation."""
        self.trace.append(f"set_attention({name!r})")
        self.model.set_attn_implementation(name)
        if not has_users(self.model):
            self.chosen = name
        self._note_changes()

    def train(self, part: str, *, mode: bool) -> None:
        """Set the mode of the model or of a part."""
        self.trace.append(f"train({part!r}, mode={mode})")
        self.model.get_submodule(part).train(mode)
        self._note_changes()

    def convert(self, *, is_back: bool) -> None:
        """Change the dtype of the model; its values are exact in bfloat16."""
        self.trace.append(f"convert(is_back={is_back})")
        before = self.model.dtype
        self.model.to(torch.float32 if is_back else torch.bfloat16)
        self._num_moves += before != self.model.dtype
        self._note_changes()

    def set_right(self) -> None:
        """Undo all changes; every engine that can serve the model then serves it."""
        self.trace.append("set_right()")
        self.model.eval()
        self.convert(is_back=True)
        for served in self.engines:
            wanted = "vmkv_rows" if served.kind == "compiled" else "vmkv"
            self.model.set_attn_implementation(wanted)
        for served in self.engines:
            self._run(served, 1000)
            assert not served.asked
            is_usable = not self._is_changed_for(served)
            prompt = [5, 7, 11, 13, 17]
            (output,) = served.engine.generate(prompt, SamplingParams(temperature=0, max_tokens=4))
            said = list(output.outputs[0].token_ids)
            if is_usable:
                assert _answer(tuple(prompt))[:4] == said, f"{served.kind} says {output}"
                self.num_right += 1
            else:
                assert not said

    def end(self) -> None:
        """Close everything in the order of its creation."""
        self.set_right()
        while self.engines:
            self.close(0)
        if self._captured is not None:
            self._captured.close()
        if self._cache is not None:
            self._cache.close()
        gc.collect()
        assert not has_users(self.model)
        assert [] == [name for name, each in self.model.named_modules() if "forward" in vars(each)]
        prompt = [5, 7, 11, 13, 17]
        assert _answer(tuple(prompt)) == _generate(self.model, prompt, _LONGEST_ANSWER)

    # ---- state of the model ---------------------------------------------------------------

    @property
    def _is_compiled(self) -> bool:
        """Whether layers run compiled, so that the model cannot be called outside its engine."""
        return self.model.config._attn_implementation == "vmkv_rows" or any(
            "forward" in vars(each) for each in self.model.model.layers
        )

    @property
    def _is_right_but_for_attention(self) -> bool:
        is_training = any(each.training for each in self.model.modules())
        return not is_training and self.model.dtype == torch.float32

    def _is_changed_for(self, served: _Served) -> bool:
        wanted = "vmkv_rows" if served.kind == "compiled" else "vmkv"
        return (
            not self._is_right_but_for_attention
            or self.model.config._attn_implementation != wanted
            or (served.is_fixed and served.num_moves != self._num_moves)
        )

    def _note_changes(self) -> None:
        for served in self.engines:
            served.may_fail |= bool(served.asked) and self._is_changed_for(served)

    def _check_restored(self) -> None:
        """Check that the attention is one of the user's if no engine uses the model."""
        if not has_users(self.model):
            assert self.model.config._attn_implementation in ATTENTIONS
            if not self.engines:
                self.chosen = self.model.config._attn_implementation


@functools.cache
def _untouched() -> Any:
    """A model with weights exact in bfloat16, so that a conversion and back changes nothing."""
    model = copy.deepcopy(tiny_model("llama", "sdpa"))
    return model.to(torch.bfloat16).to(torch.float32)


@functools.cache
def _answer(prompt: tuple[int, ...]) -> list[int]:
    return _generate(_untouched(), list(prompt), _LONGEST_ANSWER)


def _generate(model: Any, prompt: list[int], num_tokens: int, **options: Any) -> list[int]:
    ids = torch.tensor([prompt])
    options |= {"attention_mask": torch.ones_like(ids), "do_sample": False}
    output = model.generate(ids, max_new_tokens=num_tokens, **options)
    said: list[int] = output[0, len(prompt) :].tolist()
    return said


# ---- random operations ------------------------------------------------------------------------


def random_prompt(draw: random.Random) -> list[int]:
    """One of few prompts, so that outputs are cached and prefixes are shared."""
    tokens = random.Random(draw.randrange(4)).choices(range(3, VOCABULARY), k=40)
    return tokens[: draw.choice([1, 3, 8, 15, 20, 40])]


_Operation = Callable[[random.Random, SharedModelPlay], object]
_OPERATIONS: dict[str, tuple[float, _Operation]] = {
    "step": (30, lambda draw, play: play.step(draw.randrange(3), draw.choice([1, 2, 5, 20]))),
    "add": (
        20,
        lambda draw, play: play.add(
            draw.randrange(3), random_prompt(draw), draw.randint(1, _LONGEST_ANSWER)
        ),
    ),
    "make": (3, lambda draw, play: play.make(draw.choice(KINDS))),
    "close": (1, lambda draw, play: play.close(draw.randrange(3))),
    "drop": (1, lambda draw, play: play.drop(draw.randrange(3), collect=draw.random() < 0.5)),
    "set_right": (1, lambda draw, play: play.set_right()),
    "alone": (0.5, lambda draw, play: play.generate_alone(random_prompt(draw), 4)),
    "packed": (
        0.5,
        lambda draw, play: play.generate_packed([random_prompt(draw) for _ in range(2)], 4),
    ),
    "captured": (
        0.5,
        lambda draw, play: play.generate_captured(random_prompt(draw), 8, draw.choice([0, 0, 3])),
    ),
    "attention": (1, lambda draw, play: play.set_attention(draw.choice(ATTENTIONS))),
    "train": (1, lambda draw, play: play.train(draw.choice(PARTS), mode=True)),
    "eval": (1.5, lambda draw, play: play.train("", mode=False)),
    "convert": (0.3, lambda draw, play: play.convert(is_back=False)),
    "back": (0.7, lambda draw, play: play.convert(is_back=True)),
}


class RandomSharedModel(RandomPlay):
    """An episode with several engines over one model."""

    operations: ClassVar = {name: operation for name, (_, operation) in _OPERATIONS.items()}
    always: ClassVar = {name: weight for name, (weight, _) in _OPERATIONS.items()}

    def _make(self, draw: random.Random) -> SharedModelPlay:
        play = SharedModelPlay()
        play.make(draw.choice(KINDS))
        return play

    def end(self) -> None:
        self.play.end()

    def abandon(self) -> None:
        """Leave the engines to the garbage collector."""
