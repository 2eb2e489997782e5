"""The engine and its server say, with real weights, what transformers says, whatever happens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from helpers.serving import serving

from vmkv import Engine, ExtentPool, HostBackend, SamplingParams
from vmkv.serve import AsyncEngine
from vmkv.serve.metrics import Metrics
from vmkv.serve.preemption import PreemptionCosts
from vmkv.serve.server import ServerOptions, create_app
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


def test_requests_in_company(real: Any, prompts: list[list[int]]) -> None:
    """More than run at once, prefilled in chunks; their text is what their tokens say."""
    expected = [real.expected(prompt) for prompt in prompts]
    with _engine(real, max_num_seqs=3, max_num_batched_tokens=16) as engine:
        outputs = engine.generate(prompts, GREEDY)
    assert expected == [list(each.outputs[0].token_ids) for each in outputs]
    assert [real.text(each) for each in expected] == [each.outputs[0].text for each in outputs]


def test_requests_that_begin_alike(real: Any) -> None:
    """What they have in common is computed once, and read by all."""
    questions = ("When do you open?", "What does a ticket cost?", "What can I see here?")
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


def test_several_samples_of_a_prompt(real: Any, prompts: list[list[int]]) -> None:
    """The likeliest tokens are everybody's; drawn ones are as if asked for one by one."""
    expected = real.expected(prompts[1], 8)
    drawn = {"temperature": 0.9, "top_p": 0.95, "max_tokens": 8}
    with _engine(real) as engine:
        two = engine.generate([prompts[1]], SamplingParams(temperature=0, max_tokens=8, n=2))
        assert [expected, expected] == [list(each.token_ids) for each in two[0].outputs]
        both = engine.generate([prompts[1]], SamplingParams(seed=5, n=2, **drawn))[0].outputs
        singly = [
            engine.generate([prompts[1]], SamplingParams(seed=seed, **drawn))[0].outputs[0]
            for seed in (5, 6)
        ]
    assert [list(each.token_ids) for each in singly] == [list(each.token_ids) for each in both]
    assert len({each.text for each in both}) == 2, "this tests nothing"


def test_requests_that_are_swapped(real: Any, prompts: list[list[int]]) -> None:
    """With memory for two of them, they take turns, by way of the host's."""
    expected = [real.expected(prompt) for prompt in prompts]
    with _engine(
        real,
        budget_bytes=7 * MiB * real.stored_bytes // 4,
        host_budget_bytes=32 * MiB,
        prefix_caching=False,
        preemption_costs=PreemptionCosts(flops_per_s=1.0),  # Moving is cheaper than that.
    ) as engine:
        assert expected == _tokens(engine, prompts)
        assert engine.cache.stats().sharing.swapped_in_bytes > 0


def test_chat_over_http(real: Any) -> None:
    """OpenAI's client gets the text that transformers makes of the same conversation."""
    openai = pytest.importorskip("openai")
    question = real.questions[2]
    messages: Any = [{"role": "user", "content": question}]
    expected = real.text(real.expected(real.chat(question)))
    with _engine(real) as engine:
        metrics = Metrics()
        metrics.bind_pages(engine.cache.pool.page_bytes)
        app = create_app(AsyncEngine(engine), real.tokenizer, ServerOptions("real", 58), metrics)
        with serving(app) as (url, _):
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
            asked = {"model": "real", "messages": messages, "temperature": 0, "max_tokens": 16}
            whole = client.chat.completions.create(**asked)
            pieces = list(client.chat.completions.create(stream=True, **asked))
    assert expected == whole.choices[0].message.content
    assert expected == "".join(each.choices[0].delta.content or "" for each in pieces)
    assert "length" == whole.choices[0].finish_reason == pieces[-1].choices[0].finish_reason
