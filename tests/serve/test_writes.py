"""No request writes what another one's row shows, and none that fits is failed.

Rows that new requests adopt hold more than they need, and may share it: with parked rows whose
prefixes are still found, and with live ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers.tiny_models import tiny_model

from vmkv import SamplingParams
from vmkv.serve import Engine
from vmkv.serve.preemption import PreemptionCosts
from vmkv.units import KiB

PAGE_BYTES = 4 * KiB
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


def _alone(prompt: Sequence[int], num_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = tiny_model("llama").generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return [int(token) for token in out[0, len(prompt) :]]


def _prompt(seed: int, num_tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, tiny_model("llama").config.vocab_size) for _ in range(num_tokens)]


def _run(engine: Engine, prompt: Sequence[int], **options: Any) -> list[list[int]]:
    handle = engine.add(prompt, SamplingParams(**{**GREEDY, **options}))
    while engine.has_unfinished:
        engine.step()
        engine.cache.check()
    output = handle.output()
    assert output.error is None
    return [list(each.token_ids) for each in output.outputs]


@pytest.mark.parametrize("num_others", [3, 4, 5, 6])
def test_rows_that_share_are_not_written_by_who_adopts_them(
    make_engine: Callable[..., Engine], num_others: int
) -> None:
    """Every row holds a prefix: the next prompt gets one whose extents a sibling still shows."""
    engine = make_engine(max_num_seqs=2, max_num_batched_tokens=256)
    first = _prompt(0, 100)
    expected = _alone(first, 8)
    assert [expected, expected] == _run(engine, first, n=2)
    for seed in range(1, num_others + 1):
        other = _prompt(seed, 100)
        assert [_alone(other, 8)] == _run(engine, other)
    assert [expected] == _run(engine, first)


def test_a_prefix_adopted_for_want_of_memory_is_copied_before_it_is_written(
    make_engine: Callable[..., Engine],
) -> None:
    engine = make_engine(max_num_batched_tokens=1024)
    pool, base = engine.cache.pool, _prompt(0, 110)
    first = engine.add(base, SamplingParams(temperature=0, max_tokens=1))
    engine.step()
    engine.add([*base, 5], SamplingParams(temperature=0, max_tokens=4))  # Forks the first one.
    while engine.has_unfinished:
        engine.step()
    assert first.output().error is None
    pool.trim()
    pool.set_budget(pool.stats().created_bytes + 8 * PAGE_BYTES)
    parting = [*base[:50], *_prompt(1, 40)]
    assert [_alone(parting, 8)] == _run(engine, parting)
    assert [_alone([*base[:100], 8], 8)] == _run(engine, [*base[:100], 8])


def test_who_comes_back_from_the_host_is_not_failed_for_what_a_newcomer_adopts(
    make_engine: Callable[..., Engine],
) -> None:
    """The newcomer takes a row, with all that is mapped there, after the memory that was due."""
    engine = make_engine(
        max_num_seqs=2,
        max_num_batched_tokens=256,
        budget_bytes=59 * PAGE_BYTES,
        host_budget_bytes=4096 * PAGE_BYTES,
        max_tokens=512,
        prefix_caching=False,
        preemption_costs=PreemptionCosts(flops_per_s=1.0),  # Swapping is cheaper.
    )
    lengths = [(92, 48), (80, 40), (17, 8)]
    handles = [
        engine.add(_prompt(seed, num), SamplingParams(temperature=0, max_tokens=new))
        for seed, (num, new) in enumerate(lengths)
    ]
    while engine.has_unfinished:
        engine.step()
        engine.cache.check()
    outputs = [handle.output() for handle in handles]
    assert [None] * 3 == [output.error for output in outputs]
    for (_, new), output in zip(lengths, outputs, strict=True):
        assert _alone(output.prompt_token_ids, new) == list(output.outputs[0].token_ids)
