"""Engines of two ranks with a GPU each: their tokens are those of one GPU."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
import torch
from helpers import rank_cases as cases
from helpers.requests import finish_all

from vmkv import ConfigError, Engine, SamplingParams
from vmkv.serve.parallel.engine import open_parallel_engine
from vmkv.serve.request import FinishReason, RequestHandle
from vmkv.units import MiB

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has no second GPU"),
]
NUM_ACTIONS = 600
OPTIONS: dict[str, Any] = {"max_num_seqs": 6, "max_num_batched_tokens": 96, "max_tokens": 256}
#: Six pages; six requests take up to 18.
SMALL = {"budget_bytes": 12 * MiB, "host_budget_bytes": 16 * MiB}


def _any_request(choices: random.Random) -> tuple[list[int], SamplingParams]:
    """A prompt, often with the beginning of another one, and greedy or seeded draws."""
    begin = [5, 9, 13, 7] * choices.randrange(0, 30)
    prompt = [*begin, *(choices.randrange(3, 99) for _ in range(choices.randrange(1, 30)))]
    how: dict[str, Any] = {"max_tokens": choices.randrange(1, 60), "ignore_eos": True}
    if choices.random() < 0.5:
        return prompt, SamplingParams(temperature=0, **how)
    how |= {"n": choices.randrange(1, 3), "top_p": choices.choice([0.9, 1.0])}
    return prompt, SamplingParams(seed=choices.randrange(99), **how)


def test_random_requests_get_the_tokens_of_one_gpu() -> None:
    """Under short memory, prefixes, cancels and changes of the budget."""
    choices = random.Random(3)
    handles: list[RequestHandle] = []
    asked: list[tuple[list[int], SamplingParams]] = []
    with open_parallel_engine(cases.exact_part_on_a_gpu, 2, **OPTIONS, **SMALL) as engine:
        for _ in range(NUM_ACTIONS):
            what = choices.random()
            if what < 0.2:
                asked.append(_any_request(choices))
                handles.append(engine.add(*asked[-1]))
            elif what < 0.23 and handles:
                engine.cancel(choices.choice(handles[-6:]))
            elif what < 0.25:
                with contextlib.suppress(ConfigError):
                    engine.set_budget(choices.randrange(4, 9) * 2 * MiB)
            else:
                engine.step()
        finish_all(engine)
        engine.cache.check()
        said = cases.said([handle.output() for handle in handles])
    ended = [
        at
        for at, handle in enumerate(handles)
        if all(each.finish_reason is FinishReason.LENGTH for each in handle.requests)
    ]
    assert len(ended) > NUM_ACTIONS // 10
    with Engine(cases.exact_part_on_a_gpu(None), budget_bytes=256 * MiB, **OPTIONS) as alone:
        prompts, params = zip(*(asked[at] for at in ended), strict=True)
        expected = cases.said(alone.generate(list(prompts), list(params)))
    assert expected == [said[at] for at in ended]


def _used_bytes() -> list[int]:
    return [total - free for free, total in map(torch.cuda.mem_get_info, (0, 1))]


def test_both_gpus_sleep_and_wake() -> None:
    """Both devices get the memory of weights, keys and values back; tokens are as before."""
    options: dict[str, Any] = {**OPTIONS, "budget_bytes": 256 * MiB, "enable_sleep_mode": True}
    prompts = [list(range(3, 40)), list(range(100, 200)), [7, 8, 9]]
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with open_parallel_engine(cases.wide_part_on_a_gpu, 2, **options) as engine:
        expected = cases.said(engine.generate(prompts, greedy))
        for _ in range(3):
            awake = _used_bytes()
            engine.sleep(weights=True)
            assert engine.is_sleeping
            freed = [before - after for before, after in zip(awake, _used_bytes(), strict=True)]
            assert min(freed) > cases.WIDE_BYTES // 2, freed
            assert expected == cases.said(engine.generate(prompts, greedy))
            engine.cache.check()
