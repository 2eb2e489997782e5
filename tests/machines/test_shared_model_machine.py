"""Histories of several engines over one model, with transformers' answers as the oracle.

Engines are made, closed and collected, and the model's user sets another attention, changes modes
and converts the model, in any order. What is played is in `helpers.shared_model_play`;
`fuzz_engine.py --play shared` plays it for longer.
"""

from __future__ import annotations

import random

import pytest
from helpers.shared_model_play import (
    ATTENTIONS,
    ENGINES_MAX,
    KINDS,
    PARTS,
    SharedModelPlay,
    random_prompt,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

picks = st.integers(0, ENGINES_MAX - 1)
prompts = st.integers(0, 15).map(lambda seed: random_prompt(random.Random(seed)))
counts = st.integers(1, 12)


class SharedModelMachine(RuleBasedStateMachine):
    """A model, its engines and its user."""

    @initialize(kind=st.sampled_from(KINDS))
    def begin(self, kind: str) -> None:
        self.play = SharedModelPlay()
        self.play.make(kind)

    @rule(kind=st.sampled_from(KINDS))
    def make(self, kind: str) -> None:
        self.play.make(kind)

    @rule(pick=picks)
    def close(self, pick: int) -> None:
        self.play.close(pick)

    @rule(pick=picks, collect=st.booleans())
    def drop(self, pick: int, collect: bool) -> None:
        self.play.drop(pick, collect=collect)

    @rule(pick=picks, prompt=prompts, num_tokens=counts, num_steps=st.sampled_from([0, 1, 5, 40]))
    def ask(self, pick: int, prompt: list[int], num_tokens: int, num_steps: int) -> None:
        self.play.add(pick, prompt, num_tokens)
        self.play.step(pick, num_steps)

    @rule(pick=picks, num_steps=st.sampled_from([1, 5, 40]))
    def step(self, pick: int, num_steps: int) -> None:
        self.play.step(pick, num_steps)

    @rule(prompt=prompts, other=prompts, how=st.integers(0, 2), change_at=st.sampled_from([0, 3]))
    def run_beside(self, prompt: list[int], other: list[int], how: int, change_at: int) -> None:
        if how == 0:
            self.play.generate_alone(prompt, 4)
        elif how == 1:
            self.play.generate_packed([prompt, other], 4)
        else:
            self.play.generate_captured(prompt, 6, change_at)

    @rule(name=st.sampled_from(ATTENTIONS))
    def set_attention(self, name: str) -> None:
        self.play.set_attention(name)

    @rule(part=st.sampled_from(PARTS), mode=st.booleans())
    def train(self, part: str, mode: bool) -> None:
        self.play.train(part, mode=mode)

    @rule(is_back=st.booleans())
    def convert(self, is_back: bool) -> None:
        self.play.convert(is_back=is_back)

    @rule()
    def set_right(self) -> None:
        self.play.set_right()

    def teardown(self) -> None:
        if hasattr(self, "play"):
            self.play.end()


TestSharedModelMachine = pytest.mark.slow(SharedModelMachine.TestCase)
TestSharedModelMachine.pytestmark.append(pytest.mark.timeout(900))  # A failure is shrunk for long.
TestSharedModelMachine.pytestmark += [
    pytest.mark.filterwarnings("ignore:a KVCache was never closed"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
TestSharedModelMachine.settings = settings(
    max_examples=max(5, settings().max_examples // 2), stateful_step_count=30
)
