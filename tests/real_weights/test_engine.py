"""With real weights the engine gives the tokens of transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from vmkv import Engine, ExtentPool, HostBackend, SamplingParams
from vmkv.serve.scheduler import PreemptionCosts
from vmkv.units import KiB, MiB

pytestmark = [pytest.mark.real_weights, pytest.mark.slow]

GREEDY = SamplingParams(temperature=0, max_tokens=16)
SYSTEM = (
    "You are the keeper of a small museum on an island. It opens at nine and closes at five, "
    "except on Mondays, when it is closed. A ticket costs four euros. There is an old lamp of "
    "the lighthouse, a boat that was found in the ice, and a room about birds. The ferry leaves "
    "every hour. Answer what visitors ask, politely and in one sentence."
)


@contextmanager
def _engine(
    real: Any, *, budget_bytes: int = 256 * MiB, host_budget_bytes: int = 0, **options: Any
) -> Iterator[Engine]:
    backend = HostBackend(4 * KiB)
    pool = ExtentPool(backend, budget_bytes, host_budget_bytes=host_budget_bytes)
    options = {
        "kv_dtype": real.kv_dtype,
        "max_num_seqs": 4,
        "max_tokens": 512,
        "seed": 0,
        **options,
    }
    with Engine(real.model, tokenizer=real.tokenizer, pool=pool, **options) as engine:
        yield engine
        engine.cache.check()
    pool.close()


def _tokens(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(each.outputs[0].token_ids) for each in engine.generate(prompts, GREEDY)]


def test_more_requests_than_run_at_once(real: Any, prompts: list[list[int]]) -> None:
    """Prefilled in chunks; the text is the decoded tokens."""
    expected = [real.expected(prompt) for prompt in prompts]
    with _engine(real, max_num_seqs=3, max_num_batched_tokens=16) as engine:
        outputs = engine.generate(prompts, GREEDY)
    assert expected == [list(each.outputs[0].token_ids) for each in outputs]
    assert [real.text(each) for each in expected] == [each.outputs[0].text for each in outputs]


def test_requests_with_a_common_system_prompt(real: Any) -> None:
    """It is computed once."""
    questions = ("What does a ticket cost?", "Is the museum open on Mondays?", "What is the boat?")
    prompts = [real.chat(question, system=SYSTEM) for question in questions]
    expected = [real.expected(prompt, 8) for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=8)
    with _engine(real) as engine:
        engine.generate(prompts[:1], params)
        outputs = engine.generate(prompts, params)
        assert expected == [list(each.outputs[0].token_ids) for each in outputs]
        stats = engine.cache.stats()
    assert 3 == stats.num_prefix_hits
    assert stats.num_prefix_hit_tokens > 3 * 80


def test_requests_that_are_swapped_out(real: Any, prompts: list[list[int]]) -> None:
    """The device has memory for two requests; the others wait in host memory."""
    expected = [real.expected(prompt) for prompt in prompts]
    with _engine(
        real,
        budget_bytes=7 * MiB * real.stored_bytes // 4,
        host_budget_bytes=32 * MiB,
        prefix_caching=False,
        # Makes swapping cheaper than recomputation.
        preemption_costs=PreemptionCosts(flops_per_s=1.0),
    ) as engine:
        assert expected == _tokens(engine, prompts)
        assert engine.cache.stats().sharing.swapped_in_bytes > 0
