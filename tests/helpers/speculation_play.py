"""An engine that guesses tokens, compared with one that decodes them one by one.

Guesses come from texts, from the true answer with random mistakes, or at random, or from a draft
model, in any number, so that every number of them is accepted in every state of the engine.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from helpers.serving import TEXT, tiny_llama, tiny_tokenizer
from helpers.tiny_models import tiny_model
from vmkv import ExtentPool, HostBackend, SamplingParams
from vmkv.serve.draft_model import ModelDrafter
from vmkv.serve.drafts import Drafter
from vmkv.serve.engine import Engine
from vmkv.serve.params import StructuredOutputs
from vmkv.serve.request import Request, RequestHandle, RequestOutput
from vmkv.serve.runner import RunnerOptions
from vmkv.serve.scheduler import PreemptionCosts
from vmkv.units import KiB, MiB

#: Models with full attention, windows, chunks and latents.
MODELS = ("text", "text", "llama", "mistral", "gemma3", "llama4", "deepseek_v3", "gpt_oss")
_ANSWER_TOKENS = 40
_CHOICES: tuple[dict[str, Any], ...] = (
    {"json_object": True},
    {"regex": "(the |and |of |a ){2,9}"},
    {"choice": ["the world", "a word of it", "another"]},
    {
        "json": '{"type": "object", "properties": {"name": {"enum": ["abc", "abd"]}}, '
        '"required": ["name"], "additionalProperties": false}'
    },
)


class PlayedDrafter(Drafter):
    """A drafter that guesses more than would pay, whatever the time of steps.

    `answers` are the true outputs by request.
    """

    def __init__(self, drafter: Drafter, draw: random.Random):
        vars(self).update(vars(drafter))
        self.draw = draw
        self.answers: dict[Request, Sequence[int]] = {}

    def numbers(self, requests: Sequence[Request], *, skipped: int = 0) -> Mapping[Request, int]:
        return {each: 1 for each in requests if self.draw.random() < 0.5}

    def drafts(self, requests: Sequence[Request]) -> Mapping[Request, Sequence[int]]:
        draw, found = self.draw, {}
        for each in requests:
            count = draw.randint(0, self.room(each))
            known = len(each.output_token_ids)
            guesses = [*self.answers.get(each, ())[known : known + count]]
            if draw.random() < 0.3 and each in self._texts:
                guesses = self._texts[each].guesses(count)
            guesses = [draw.randrange(90) if draw.random() < 0.15 else each for each in guesses]
            if each.matcher is not None:
                guesses = [*self._grammars.fitting(each, guesses)]
            if guesses:
                found[each] = guesses
        return found


class PlayedModelDrafter(ModelDrafter):
    """A draft model that guesses more than would pay; it may guess again for a lost row."""

    def __init__(self, drafter: ModelDrafter, draw: random.Random):
        vars(self).update(vars(drafter))
        self.draw = draw

    def numbers(self, requests: Sequence[Request], *, skipped: int = 0) -> Mapping[Request, int]:
        draw, found = self.draw, {}
        for each in requests:
            if self._held.get(each, 0) < 0 and draw.random() < 0.5:
                del self._held[each]
            count = draw.randint(0, self.room(each)) if self._chances(each, 0) else 0
            if count and draw.random() < 0.8:
                found[each] = count
        self._tally.right[0] = self._tally.tries[0]  # Chances stay high.
        return found


def other_weights(model: Any, draw: random.Random) -> Any:
    """Return a copy of a model with some noise in its weights, so that some guesses are wrong."""
    model = copy.deepcopy(model)
    source = torch.Generator().manual_seed(draw.getrandbits(32))
    share = draw.choice([0.0, 0.02, 0.3])
    with torch.no_grad():
        for each in model.parameters():
            noise = torch.empty_like(each).normal_(generator=source)
            each += share * each.std(correction=0) * noise
    return model


@dataclass
class _Asked:
    handle: RequestHandle
    truth: RequestOutput
    is_cancelled: bool = False


@dataclass
class SpeculationPlay:
    """Two engines over copies of one model; the drafting one is short of memory."""

    name: str
    draw: random.Random
    options: dict[str, Any]
    budget_bytes: int
    host_bytes: int
    trace: list[str] = field(default_factory=list)
    num_steps: int = 0

    def __post_init__(self) -> None:
        has_text = self.name == "text"
        self.tokenizer = tiny_tokenizer() if has_text else None
        model = tiny_llama() if has_text else tiny_model(self.name)
        self._closing = contextlib.ExitStack()
        plain: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64}
        for key in ("max_tokens", "logprobs_mode", "kv_dtype"):
            plain[key] = self.options[key]
        self.plain = self._engine(copy.deepcopy(model), 64 * MiB, 0, plain)
        options = {**self.options, "preemption_costs": PreemptionCosts(flops_per_s=1.0)}
        asked: dict[str, Any] = {"method": "suffix"}
        if self.draw.random() < 0.4:
            asked = {"method": "draft_model", "model": other_weights(model, self.draw)}
        asked["num_speculative_tokens"] = self.draw.choice([1, 3, 5, 8])
        options["speculative_config"] = asked
        budgets = self.budget_bytes, self.host_bytes
        self.engine = self._engine(copy.deepcopy(model), *budgets, options)
        drafter = self.engine.loop._drafter
        assert drafter is not None
        self.drafter: Drafter
        if isinstance(drafter, ModelDrafter):
            self.drafter = PlayedModelDrafter(drafter, self.draw)
        else:
            self.drafter = PlayedDrafter(drafter, self.draw)
        self.engine.loop._drafter = self.drafter
        self.num_padding = [len(each.live) for each in self.drafter.caches]
        self.asked: list[_Asked] = []
        self.num_guesses = self.num_accepted = 0
        self.said: list[list[int]] = []

    def _engine(self, model: Any, budget: int, host: int, options: dict[str, Any]) -> Engine:
        backend = HostBackend(4 * KiB)
        pool = ExtentPool(backend, budget, host_budget_bytes=host)
        self._closing.callback(pool.close)
        if options.get("runner") == "graphs":
            its = RunnerOptions(capture=True, compile_layers=False, show_progress=False)
            options = {**options, "runner_options": its}
        engine = Engine(model, tokenizer=self.tokenizer, pool=pool, seed=0, **options)
        self._closing.callback(engine.close)
        return engine

    def add(self) -> None:
        draw, longest = self.draw, self.options["max_tokens"] - _ANSWER_TOKENS - 1
        head = draw.choice(self.said) if self.said and draw.random() < 0.6 else []
        if self.tokenizer is not None and draw.random() < 0.7:
            tail = self.tokenizer.encode(draw.choice(TEXT)[: draw.randint(1, 40)])
        else:
            tail = [draw.randrange(2, 90) for _ in range(draw.randint(1, 20))]
        prompt = (head[: draw.randint(0, 40)] + tail)[-longest:]
        params = random_params(draw, has_text=self.tokenizer is not None)
        self.trace.append(f"add {prompt} {params}")
        handle = self.engine.add(prompt, params, priority=draw.randint(-1, 1))
        told = self.plain.add(prompt, params)
        while not told.is_finished:
            self.plain.step()
        truth = told.output()
        self.said += [[*prompt, *each.token_ids] for each in truth.outputs]
        for request, output in zip(handle.requests, truth.outputs, strict=True):
            if isinstance(self.drafter, PlayedDrafter):
                self.drafter.answers[request] = output.token_ids
        self.asked.append(_Asked(handle, truth))

    def step(self, count: int) -> None:
        self.trace.append(f"step {count}")
        for _ in range(count):
            if not self.engine.has_unfinished:
                break
            self.engine.step()
            self.num_steps += 1
            _, num_guesses, num_accepted = self.engine.loop._guessed
            self.num_guesses += num_guesses
            self.num_accepted += num_accepted
            self.engine.loop._guessed = [0, 0, 0]
        for cache in (self.engine.cache, *self.drafter.caches):
            cache.check()
        assert self.num_padding == [len(each.live) for each in self.drafter.caches]
        self.check()

    def cancel(self) -> None:
        live = [each for each in self.asked if not each.handle.is_finished]
        if live:
            asked = self.draw.choice(live)
            self.trace.append(f"cancel {asked.handle.request_id}")
            asked.is_cancelled = True
            self.engine.cancel(asked.handle)

    def pause(self) -> None:
        self.end()
        self.trace.append("pause")
        with self.engine.paused():
            pass

    def sleep(self) -> None:
        self.end()
        self.trace.append("sleep")
        self.engine.sleep(graphs=self.draw.random() < 0.5, prefixes=self.draw.random() < 0.5)

    def check(self) -> None:
        """Compare what has ended with what decoding gives."""
        left = []
        for asked in self.asked:
            output = asked.handle.output()
            for found, true in zip(output.outputs, asked.truth.outputs, strict=True):
                count = len(found.token_ids)
                assert found.token_ids == true.token_ids[:count], (found, true)
                if asked.is_cancelled or not found.is_finished:
                    continue
                same = ("token_ids", "text", "finish_reason", "stop_reason")
                assert [getattr(found, x) for x in same] == [getattr(true, x) for x in same]
                assert (found.logprobs is None) == (true.logprobs is None)
                for ours, theirs in zip(found.logprobs or (), true.logprobs or (), strict=True):
                    assert ours.token_id == theirs.token_id
                    torch.testing.assert_close(ours.logprob, theirs.logprob, atol=2e-3, rtol=1e-3)
                    assert len(ours.top) == len(theirs.top)
            if output.is_finished:
                assert str(output.error) == str(asked.truth.error)
            else:
                left.append(asked)
        self.asked = left

    def end(self) -> None:
        self.step(10_000)
        assert not self.asked

    def close(self) -> None:
        self._closing.close()


def random_params(draw: random.Random, *, has_text: bool) -> SamplingParams:
    """Draw parameters with a few of all options."""
    its: dict[str, Any] = {
        "temperature": draw.choice([0, 0, 0.3, 0.8, 1.5]),
        "max_tokens": draw.randint(1, _ANSWER_TOKENS),
        "seed": draw.randrange(1 << 40),
        "n": draw.choice([1, 1, 1, 2, 3]),
    }
    more: list[dict[str, Any]] = [
        {"top_k": draw.randint(1, 30)},
        {"top_p": draw.uniform(0.1, 1.0)},
        {"min_p": draw.uniform(0.0, 0.4)},
        {"repetition_penalty": draw.uniform(0.8, 1.5)},
        {"presence_penalty": draw.uniform(-1, 2), "frequency_penalty": draw.uniform(-1, 2)},
        {"logit_bias": {draw.randrange(90): draw.uniform(-20, 20) for _ in range(3)}},
        {"allowed_token_ids": [draw.randrange(90) for _ in range(30)]},
        {"bad_words": [[draw.randrange(90)] for _ in range(5)]},
        {"bad_words": [[draw.randrange(90), draw.randrange(90)]]},
        {"stop_token_ids": [draw.randrange(90) for _ in range(6)]},
        {
            "stop_token_ids": [draw.randrange(90) for _ in range(6)],
            "min_tokens": draw.randint(0, its["max_tokens"]),
        },
        {"logprobs": draw.choice([0, 1, 3])},
        {"prompt_logprobs": 1},
        {"ignore_eos": True},
    ]
    for each in draw.sample(more, draw.choice([0, 0, 1, 2, 3])):
        its |= each
    if has_text and draw.random() < 0.3:
        its["stop"] = [draw.choice(["e", "th", "a ", "ing", "xyz"])]
    if has_text and draw.random() < 0.4:
        its["structured_outputs"] = StructuredOutputs(**draw.choice(_CHOICES))
        its.pop("allowed_token_ids", None)
        its.pop("bad_words", None)
    return SamplingParams(**its)


class RandomSpeculation:
    """A random play, for `helpers.random_plays`."""

    def __init__(self, draw: random.Random, without: Collection[str] = ()):
        self.draw = draw
        name = draw.choice(MODELS)
        max_num_seqs = draw.choice([1, 2, 4, 6])
        options: dict[str, Any] = {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_seqs + draw.choice([0, 5, 20, 60]),
            "max_num_mixed_tokens": draw.choice([None, 8]),
            "max_tokens": 96,
            "prefix_caching": draw.random() < 0.8,
            "runner": draw.choice(["eager", "graphs"]),
            "logprobs_mode": draw.choice(["raw_logprobs", "processed_logprobs"]),
            "kv_dtype": draw.choice(["auto", "auto", "fp8"])
            if name in ("llama", "text")
            else "auto",
        }
        budget, host = (
            draw.choice([128 * KiB, 256 * KiB, 512 * KiB, 16 * MiB]),
            draw.choice([0, 256 * KiB]),
        )
        self.shape = (name, options, budget, host)
        self.play = SpeculationPlay(name, draw, options, budget, host)
        kinds = {"add": 3, "step": 5, "cancel": 0.3, "pause": 0.1, "sleep": 0.1}
        self.kinds = {name: weight for name, weight in kinds.items() if name not in without}

    def operate(self) -> None:
        kind = self.draw.choices([*self.kinds], [*self.kinds.values()])[0]
        arguments = (self.draw.choice([1, 2, 5, 20]),) if kind == "step" else ()
        if kind != "add" or len(self.play.asked) < 8:
            getattr(self.play, kind)(*arguments)

    def end(self) -> None:
        self.play.end()
        self.play.close()

    def abandon(self) -> None:
        with contextlib.suppress(Exception):
            self.play.close()
