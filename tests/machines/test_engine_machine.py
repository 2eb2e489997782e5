"""Histories of the engine, with content as the oracle.

Requests come, begin as others did, run beside each other, are cancelled, give way and come back,
while memory is short, taken by others, given back and refused; driver calls and steps fail; the
device runs behind. Every step reads what an attention kernel would read, and finds the tokens of
its own request or fails; what it writes must be the row's alone. What a request says is a hash of
all that it has read, and must be what it would have said alone.

What is played is in `helpers.engine_play`; `fuzz_engine.py` plays it for longer.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from helpers.engine_play import MISHAPS, EnginePlay, Shape, wait_for_host
from helpers.stamp_runner import VOCABULARY
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from vmkv import SamplingParams

shapes = st.builds(
    Shape,
    windows=st.sampled_from([(None,), (None, 8), (8,), (None, 3)]),
    layers_per_group=st.sampled_from([1, 2]),
    head_dim=st.sampled_from([32, 24]),
    max_num_seqs=st.sampled_from([1, 2, 3]),
    max_num_batched_tokens=st.sampled_from([8, 3, 40]),
    budget_pages=st.sampled_from([60, 40, 80, 120]),
    host_pages=st.sampled_from([0, 8, 200]),
    prefix_caching=st.sampled_from([True, True, False]),
    deterministic=st.sampled_from([False, False, False, True]),
    swaps=st.booleans(),
    alias_pages=st.sampled_from([0, 2, 100]),
    overread_tokens=st.sampled_from([0, 9]),
    is_late=st.booleans(),
    protects_shared=st.booleans(),
    keep_free_pages=st.sampled_from([None, 0]),
    watermark_pages=st.sampled_from([None, 0]),
)
all_params = st.builds(
    SamplingParams,
    n=st.sampled_from([1, 1, 2, 3]),
    temperature=st.sampled_from([0, 1.0]),
    seed=st.sampled_from([1, None]),
    max_tokens=st.sampled_from([1, 4, 30, None]),
    ignore_eos=st.booleans(),
    logits_processors=st.sampled_from([[], [], [], [wait_for_host]]),
)
picks = st.integers(0, 3)
lengths = st.one_of(st.integers(0, 10), st.integers(0, 90))
pages = st.integers(4, 120)
fault_calls = st.sampled_from([0, 0, 0, 1, 2, 3, 5, 8])


class EngineMachine(RuleBasedStateMachine):
    """One engine and what surrounds it."""

    play: EnginePlay | None = None

    @initialize(shape=shapes)
    def make(self, shape: Shape) -> None:
        self.play = EnginePlay(shape)

    def _do(self, operation: Callable[[EnginePlay], object]) -> None:
        """Carry something out; after a failure nothing can be expected of what is left."""
        play = self.play
        assert play is not None
        try:
            operation(play)
        except BaseException:
            self.play = None
            play.abandon()
            raise

    def _prompt(self, pick: int, cut: int, length: int) -> list[int]:
        """Up to `cut` tokens of something said before, and some new ones."""
        play = self.play
        assert play is not None
        head = play.said[-1 - pick][:cut] if pick < len(play.said) else []
        draw = random.Random(length)
        tail = [draw.randrange(1, VOCABULARY) for _ in range(length)]
        return [*head, *tail][: play.shape.max_tokens - 2] or [1]

    # ---- requests -------------------------------------------------------------------------

    @rule(
        pick=st.integers(0, 6),
        cut=st.one_of(st.just(100), lengths),
        length=lengths,
        params=all_params,
        priority=st.sampled_from([0, 0, -1, 1]),
    )
    def add(self, pick: int, cut: int, length: int, params: SamplingParams, priority: int) -> None:
        prompt = self._prompt(pick, cut, length)
        self._do(lambda play: play.add(prompt, params, priority))

    @rule(
        num_steps=st.sampled_from([1, 2, 5, 20]),
        fail_at=fault_calls,
        is_out_of_memory=st.booleans(),
    )
    def step(self, num_steps: int, fail_at: int, is_out_of_memory: bool) -> None:
        def run(play: EnginePlay) -> None:
            if fail_at:
                play.fault(fail_at, is_out_of_memory=is_out_of_memory)
            play.step(num_steps)

        self._do(run)

    @rule()
    def drain(self) -> None:
        self._do(lambda play: play.drain())

    @rule(pick=picks)
    def cancel(self, pick: int) -> None:
        self._do(lambda play: play.cancel(pick))

    @rule()
    def cancel_all(self) -> None:
        self._do(lambda play: play.cancel_all())

    @rule(kind=st.sampled_from(MISHAPS))
    def let_a_step_fail(self, kind: str) -> None:
        self._do(lambda play: play.mishap(kind))

    # ---- memory ---------------------------------------------------------------------------

    @rule(num_pages=pages, fail_at=fault_calls)
    def set_budget(self, num_pages: int, fail_at: int) -> None:
        def set_it(play: EnginePlay) -> None:
            if fail_at:
                play.fault(fail_at, is_out_of_memory=False)
            play.set_budget(num_pages)

        self._do(set_it)

    @rule()
    def restore_budget(self) -> None:
        self._do(lambda play: play.set_budget(play.shape.budget_pages))

    @rule(num_pages=st.none() | st.integers(0, 20), fail_at=fault_calls)
    def trim(self, num_pages: int | None, fail_at: int) -> None:
        def give_back(play: EnginePlay) -> None:
            if fail_at:
                play.fault(fail_at, is_out_of_memory=False)
            play.trim(num_pages)

        self._do(give_back)

    @rule(num_tokens=st.integers(0, 40), is_new=st.booleans())
    def another_cache_grows(self, num_tokens: int, is_new: bool) -> None:
        self._do(lambda play: play.other_append(num_tokens, is_new))

    @rule(is_all=st.booleans())
    def another_cache_shrinks(self, is_all: bool) -> None:
        self._do(lambda play: play.other_close(is_all))

    @precondition(lambda self: self.play is not None and self.play.shape.is_late)
    @rule(num_works=st.integers(1, 20))
    def the_device_catches_up(self, num_works: int) -> None:
        self._do(lambda play: play.catch_up(num_works))

    # ---- others' sequences in the engine's cache ------------------------------------------

    @rule(pick=st.integers(0, 6), cut=lengths, length=st.integers(0, 12))
    def a_guest_comes(self, pick: int, cut: int, length: int) -> None:
        prompt = self._prompt(pick, cut, length)
        self._do(lambda play: play.guest_open(prompt))

    @rule(pick=picks, num_tokens=st.integers(0, 20))
    def a_guest_goes_on(self, pick: int, num_tokens: int) -> None:
        self._do(lambda play: play.guest_append(pick, num_tokens))

    @rule(pick=picks, num_tokens=lengths)
    def a_guest_is_forked(self, pick: int, num_tokens: int) -> None:
        self._do(lambda play: play.guest_fork(pick, num_tokens))

    @rule(pick=picks, wait=st.booleans())
    def a_guest_is_swapped(self, pick: int, wait: bool) -> None:
        self._do(lambda play: play.guest_swap(pick, wait))

    @rule(pick=picks)
    def a_guest_leaves(self, pick: int) -> None:
        self._do(lambda play: play.guest_close(pick))

    def teardown(self) -> None:
        if self.play is not None:
            self._do(lambda play: play.close())


TestEngineMachine = pytest.mark.slow(EngineMachine.TestCase)
TestEngineMachine.settings = settings(
    max_examples=3 * settings().max_examples, stateful_step_count=40
)
