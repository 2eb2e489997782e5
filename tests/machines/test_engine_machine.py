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
from typing import Any

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
fault_calls = st.sampled_from([0, 0, 0, 0, 1, 2, 3, 5, 8])


def operations(**named: st.SearchStrategy[object] | tuple[st.SearchStrategy[object], ...]) -> Any:
    """One of the play's operations, by its name, with its arguments."""
    return st.one_of(
        st.tuples(st.just(name), st.tuples(*its) if isinstance(its, tuple) else its)
        for name, its in named.items()
    )


memory = operations(
    set_budget=(st.integers(4, 120),),
    trim=(st.none() | st.integers(0, 20),),
    make_ready=(st.sampled_from([1, 8, 40]), st.sampled_from([0, 30])),
    other_append=(st.integers(0, 40), st.booleans()),
    other_close=(st.booleans(),),
)
guests = operations(
    guest_append=(picks, st.integers(0, 20)),
    guest_fork=(picks, lengths),
    guest_truncate=(picks, st.integers(0, 60)),
    guest_swap=(picks, st.booleans()),
    guest_spill=(picks, st.integers(0, 5)),
    guest_close=(picks,),
)
trouble = operations(
    cancel=(picks,),
    cancel_all=(),
    mishap=(st.sampled_from(MISHAPS),),
    catch_up=(st.integers(1, 9),),
)


class EngineMachine(RuleBasedStateMachine):
    """One engine and what surrounds it."""

    play: EnginePlay | None = None

    @initialize(shape=shapes)
    def make(self, shape: Shape) -> None:
        self.play = EnginePlay(shape)

    def _do(self, name: str, *arguments: object, fail_at: int = 0) -> None:
        """Carry something out; after a failure nothing can be expected of what is left."""
        play = self.play
        assert play is not None
        try:
            if fail_at:
                play.fault(fail_at, is_out_of_memory=fail_at % 2 == 0)
            getattr(play, name)(*arguments)
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

    @rule(length=lengths, params=all_params, num_steps=st.sampled_from([1, 0, 4, 60]))
    def a_new_prompt(self, length: int, params: SamplingParams, num_steps: int) -> None:
        self._do("add", self._prompt(0, 0, length), params)
        self._do("step", num_steps)

    @rule(
        pick=st.integers(0, 6),
        cut=lengths,
        length=lengths,
        params=all_params,
        priority=st.sampled_from([0, 0, -1, 1]),
        num_steps=st.sampled_from([1, 0, 4, 60]),
    )
    def a_prompt_that_begins_alike(
        self,
        pick: int,
        cut: int,
        length: int,
        params: SamplingParams,
        priority: int,
        num_steps: int,
    ) -> None:
        self._do("add", self._prompt(pick, cut, length), params, priority)
        self._do("step", num_steps)

    @rule(
        pick=st.integers(0, 6),
        params=all_params,
        length=st.sampled_from([0, 1, 9]),
        num_steps=st.sampled_from([1, 0, 4, 60]),
    )
    def a_conversation_goes_on(
        self, pick: int, params: SamplingParams, length: int, num_steps: int
    ) -> None:
        self._do("add", self._prompt(pick, 1000, length), params)
        self._do("step", num_steps)

    @rule(num_steps=st.sampled_from([1, 2, 5, 20]), fail_at=fault_calls)
    def step(self, num_steps: int, fail_at: int) -> None:
        self._do("step", num_steps, fail_at=fail_at)

    @rule(operation=memory, fail_at=fault_calls)
    def memory(self, operation: tuple[str, tuple[object, ...]], fail_at: int) -> None:
        name, arguments = operation
        self._do(name, *arguments, fail_at=fail_at)

    @rule()
    def everything_ends(self) -> None:
        assert self.play is not None
        self._do("set_budget", self.play.shape.budget_pages)
        self._do("drain")

    @rule(operation=trouble)
    def trouble(self, operation: tuple[str, tuple[object, ...]]) -> None:
        name, arguments = operation
        self._do(name, *arguments)

    @rule(pick=st.integers(0, 6), cut=lengths, length=st.integers(0, 12), fail_at=fault_calls)
    def a_guest_comes(self, pick: int, cut: int, length: int, fail_at: int) -> None:
        self._do("guest_open", self._prompt(pick, cut, length), fail_at=fail_at)

    @precondition(lambda self: self.play is not None and self.play.guests)
    @rule(operation=guests, fail_at=fault_calls)
    def a_guest(self, operation: tuple[str, tuple[object, ...]], fail_at: int) -> None:
        name, arguments = operation
        self._do(name, *arguments, fail_at=fail_at)

    def teardown(self) -> None:
        if self.play is not None:
            self._do("close")


TestEngineMachine = pytest.mark.slow(EngineMachine.TestCase)
TestEngineMachine.pytestmark.append(pytest.mark.timeout(900))  # A failure is shrunk for long.
TestEngineMachine.settings = settings(
    max_examples=2 * settings().max_examples, stateful_step_count=50
)
