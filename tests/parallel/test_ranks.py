"""Two ranks return what one process returns, also if one of them is slow or lacks memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from helpers import rank_cases as cases
from helpers.hybrids import HYBRIDS
from helpers.latents import FAMILIES as LATENTS
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
    """Two ranks for all cases that do not end them."""
    pair = cases.Pair()
    yield pair
    pair.close()


CASES = [
    *(partial(cases.generates, name) for name in ("llama", "qwen3", "mistral", "gemma2")),
    *(partial(cases.generates, name) for name in ("gemma3", "phi3", "mixtral")),
    partial(cases.serves, "llama", "eager", 1 * MiB),
    partial(cases.serves, "gemma2", "graphs", 0),
    partial(cases.serves, "mixtral", "graphs", 1 * MiB),
    *(
        partial(cases.serves_states, name, runner)
        for name, runner in (("qwen3_next", "graphs"), ("granitemoehybrid", "eager"))
        if name in HYBRIDS
    ),
    *(
        partial(cases.serves_latents, kind)
        for kind in ("eager", "graphs")
        if "deepseek_v3" in LATENTS
    ),
    partial(cases.scores_prompts, "llama", "eager"),
    partial(cases.scores_prompts, "mixtral", "graphs"),
    partial(cases.compiles, "eager"),
    partial(cases.compiles, "aot_eager"),
    cases.adds_with_norms,
    cases.has_uneven_parts,
    cases.runs_out_of_memory,
    cases.is_late,
    partial(cases.obeys, 1, 120),
    *(partial(cases.ends_samples, what) for what in ("finish", "cancel")),
    *(partial(cases.lacks_slot_memory, failing_rank) for failing_rank in (0, 1)),
    *(partial(cases.has_a_processor_that_fails, failing_rank) for failing_rank in (0, 1)),
    *(partial(cases.follows_grammars, kind) for kind in ("eager", "graphs")),
    *(partial(cases.guesses, kind) for kind in ("eager", "graphs")),
    *(partial(cases.sleeps, kind) for kind in ("eager", "graphs")),
    *(partial(cases.shares_memory, host_bytes) for host_bytes in (0, 1 * MiB)),
    cases.lends_its_weights_memory,
    cases.is_not_asked,
]


@pytest.mark.parametrize("case", CASES, ids=cases.name_of)
def test_two_ranks(pair: cases.Pair, case: cases.Case) -> None:
    pair.run(case)


def test_each_rank_loads_its_part(pair: cases.Pair, tmp_path: Path) -> None:
    """A model that transformers divides while it loads it from disk."""
    tiny_model("llama").save_pretrained(tmp_path)
    pair.run(partial(cases.loads, str(tmp_path)))


@pytest.mark.filterwarnings("ignore:DTensor random operators")
def test_weights_that_are_not_on_disk_are_missed(pair: cases.Pair, tmp_path: Path) -> None:
    """By each rank, instead of serving random ones."""
    model = tiny_model("llama")
    weights = model.state_dict()
    del weights["lm_head.weight"]
    model.save_pretrained(tmp_path, state_dict=weights)
    pair.run(partial(cases.lacks_a_weight, str(tmp_path)))


def test_a_slow_rank_is_waited_for(pair: cases.Pair, tmp_path: Path) -> None:
    """Within the time limit."""
    os.mkfifo(tmp_path / "fifo")
    pair.run(partial(cases.is_slow, str(tmp_path / "fifo")))


def test_a_second_group_of_ranks_in_a_process_is_refused(pair: cases.Pair) -> None:
    """torch.distributed has one default group per process."""
    with pytest.raises(ConfigError, match="ranks already"):
        Ranks(2, "cpu", cases.is_not_asked)
