"""Histories of a `RaggedCache` between calls of `vmkv.generate`, with transformers as the oracle.

Prompts begin as others did, rows and memory are few, are taken by others and given back, and
driver calls fail. Every call says what transformers says of each prompt alone.

What is played is in `helpers.generate_play`; `fuzz_engine.py --play generate` plays it for longer.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from helpers.generate_play import GeneratePlay, GenerateShape
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

shapes = st.builds(
    GenerateShape,
    name=st.sampled_from(["llama", "mistral", "gemma3"]),
    max_batch_size=st.sampled_from([3, 2, 5]),
    budget_pages=st.sampled_from([90, 60, 150]),
    max_num_batched_tokens=st.sampled_from([64, 7, 400]),
    alias_pages=st.sampled_from([0, 2]),
    protects_shared=st.booleans(),
    keep_free_pages=st.sampled_from([None, 0]),
)
fault_calls = st.sampled_from([0, 0, 0, 1, 2, 3, 5, 8])
beginnings = st.tuples(
    st.integers(0, 5),  # Of which text, said last first.
    st.one_of(st.just(200), st.integers(0, 150)),  # How much of it.
    st.one_of(st.integers(1, 10), st.integers(1, 100)),  # How much is new.
)


class GenerateMachine(RuleBasedStateMachine):
    """One cache and what surrounds it."""

    play: GeneratePlay | None = None

    @initialize(shape=shapes)
    def make(self, shape: GenerateShape) -> None:
        self.play = GeneratePlay(shape)

    def _do(self, operation: Callable[[GeneratePlay], object], fail_at: int = 0) -> None:
        play = self.play
        assert play is not None
        try:
            if fail_at:
                play.fault(fail_at, is_out_of_memory=False)
            operation(play)
        except BaseException:
            self.play = None
            play.abandon()
            raise

    @rule(
        asked=st.lists(beginnings, min_size=1, max_size=3),
        num_new=st.sampled_from([1, 3, 12]),
        prefix_caching=st.sampled_from([True, True, True, False]),
        tenant=st.sampled_from([None, None, "one"]),
        fail_at=fault_calls,
    )
    def generate(
        self,
        asked: list[tuple[int, int, int]],
        num_new: int,
        prefix_caching: bool,
        tenant: str | None,
        fail_at: int,
    ) -> None:
        play = self.play
        assert play is not None
        longest = play.shape.max_tokens - num_new
        prompts = []
        for pick, cut, length in asked[: play.shape.max_batch_size]:
            said = play.said[-1 - pick] if pick < len(play.said) else []
            draw = random.Random(length)
            tail = [draw.randrange(3, 100) for _ in range(length)]
            prompts.append([*said[:cut], *tail][:longest])
        self._do(
            lambda play: play.generate(
                prompts, num_new, prefix_caching=prefix_caching, tenant=tenant
            ),
            fail_at,
        )

    @rule(num_pages=st.integers(4, 160), fail_at=fault_calls)
    def set_budget(self, num_pages: int, fail_at: int) -> None:
        self._do(lambda play: play.set_budget(num_pages), fail_at)

    @rule(num_pages=st.none() | st.integers(0, 20), fail_at=fault_calls)
    def trim(self, num_pages: int | None, fail_at: int) -> None:
        self._do(lambda play: play.trim(num_pages), fail_at)

    @rule(num_tokens=st.integers(0, 40), is_new=st.booleans(), fail_at=fault_calls)
    def another_cache_grows(self, num_tokens: int, is_new: bool, fail_at: int) -> None:
        self._do(lambda play: play.other_append(num_tokens, is_new), fail_at)

    @rule(is_all=st.booleans())
    def another_cache_shrinks(self, is_all: bool) -> None:
        self._do(lambda play: play.other_close(is_all))

    def teardown(self) -> None:
        if self.play is not None:
            self._do(lambda play: play.close())


TestGenerateMachine = pytest.mark.slow(GenerateMachine.TestCase)
TestGenerateMachine.settings = settings(
    max_examples=settings().max_examples // 2, stateful_step_count=15
)
