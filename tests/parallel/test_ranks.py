"""Two ranks say what one process says, whatever befalls one of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from helpers import rank_cases as cases
from helpers.tiny_models import VERSION, tiny_model

from vmkv import ConfigError
from vmkv.serve.parallel import Ranks
from vmkv.units import MiB

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(VERSION < (5, 17), reason="transformers has no plans to divide models by"),
]


@pytest.fixture(scope="module")
def pair(warm_children: None) -> Iterator[cases.Pair]:
    """Two ranks, for all cases that they survive."""
    pair = cases.Pair()
    yield pair
    pair.close()


@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "mixtral"]
)
def test_generation_is_as_with_one_process(pair: cases.Pair, name: str) -> None:
    """With transformers' `generate` over a cache, and without padding."""
    pair.run(partial(cases.generates, name))


@pytest.mark.parametrize(
    ("name", "runner", "host_bytes"),
    [("llama", "eager", 1 * MiB), ("gemma2", "graphs", 0), ("mixtral", "graphs", 1 * MiB)],
)
def test_serving_is_as_with_one_process(
    pair: cases.Pair, name: str, runner: str, host_bytes: int
) -> None:
    """With preemption by both ways, prefixes, samples and seeds, in steps of both kinds."""
    pair.run(partial(cases.serves, name, runner, host_bytes))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_layers_in_parts_are_compiled(pair: cases.Pair, backend: str) -> None:
    """An operator is all that a compiler sees of the other ranks."""
    pair.run(partial(cases.compiles, backend))


def test_norms_of_sums_are_those_of_modules(pair: cases.Pair) -> None:
    """Bit by bit."""
    pair.run(cases.adds_with_norms)


def test_each_rank_loads_its_part(pair: cases.Pair, tmp_path: Path) -> None:
    """As transformers divides a model on disk."""
    tiny_model("llama").save_pretrained(tmp_path)
    pair.run(partial(cases.loads, str(tmp_path)))


def test_parts_may_be_uneven(pair: cases.Pair) -> None:
    """Of whatever is no head."""
    pair.run(cases.has_uneven_parts)


def test_all_go_on_with_less_where_one_is_out_of_memory(pair: cases.Pair) -> None:
    """The capacity was agreed, and one device does not have it."""
    pair.run(cases.runs_out_of_memory)


def test_a_device_that_runs_behind_parts_nobody(pair: cases.Pair) -> None:
    """What is free is told by steps, not by what a driver has seen."""
    pair.run(cases.is_late)


def test_a_slow_rank_is_waited_for(pair: cases.Pair, tmp_path: Path) -> None:
    """However long that is, within the time limit."""
    os.mkfifo(tmp_path / "fifo")
    pair.run(partial(cases.is_slow, str(tmp_path / "fifo")))


def test_ranks_stay_together_whatever_is_asked(pair: cases.Pair) -> None:
    """Requests, ends of single samples, budgets, refusals, idleness and faults, in any order."""
    pair.run(partial(cases.obeys, 1, 120))


@pytest.mark.parametrize("what", ["finish", "cancel"])
def test_samples_end_after_the_first_one(pair: cases.Pair, what: str) -> None:
    """On every rank, although the first sample has ended."""
    pair.run(partial(cases.ends_samples, what))


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_all_try_again_where_one_has_no_memory_for_a_slot(
    pair: cases.Pair, failing_rank: int
) -> None:
    """No rank waits for another one until the time limit."""
    pair.run(partial(cases.lacks_slot_memory, failing_rank))


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_processor_that_fails_on_one_rank_ends_its_request(
    pair: cases.Pair, failing_rank: int
) -> None:
    """On all ranks; other requests go on."""
    pair.run(partial(cases.has_a_processor_that_fails, failing_rank))


def test_only_rank_0_is_asked(pair: cases.Pair) -> None:
    """And what cannot reach the others is refused."""
    pair.run(cases.is_not_asked)


def test_this_process_has_no_ranks_twice(pair: cases.Pair) -> None:
    """What torch knows of ranks is the process's."""
    with pytest.raises(ConfigError, match="ranks already"):
        Ranks(2, "cpu", cases.is_not_asked)
