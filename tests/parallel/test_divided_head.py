"""The likeliest token of a divided head is the argmax of all logits."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from unittest import mock

import pytest
import torch
from helpers import head_cases as cases
from helpers.rank_cases import Case, Pair, name_of
from helpers.tiny_models import VERSION

from vmkv.serve.parallel.localise import DividedHead, GatheredLinear
from vmkv.units import div_ceil

#: The function of this name hides the module.
localising = importlib.import_module("vmkv.serve.parallel.localise")
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def _head(rank: int, size: int, vocab_size: int) -> DividedHead:
    """The head of one rank, without a model."""
    linear = torch.nn.Linear(1, vocab_size, bias=False)
    linear.weight = torch.nn.Parameter(linear.weight[: div_ceil(vocab_size, size)])
    linear.__class__ = GatheredLinear
    vars(linear).update(_vmkv_group="nobody", _vmkv_rank=rank, _vmkv_size=size)
    return DividedHead(linear)


def _likeliest(logits: torch.Tensor, size: int) -> torch.Tensor:
    """The tokens that ranks find for logits `[n, vocabulary]`, divided and padded with zeros."""
    vocab_size = logits.shape[1]
    columns = div_ceil(vocab_size, size)
    filled_up = logits.new_zeros((logits.shape[0], size * columns))
    filled_up[:, :vocab_size] = logits
    parts = filled_up.split(columns, 1)
    heads = [_head(rank, size, vocab_size) for rank in range(size)]
    told: list[torch.Tensor] = []

    def all_ranks(reduce: Callable[[torch.Tensor], torch.Tensor]) -> Sequence[torch.Tensor]:
        with mock.patch.object(localising, "all_reduce", lambda part, group: reduce(part)):
            return [each.likeliest(part) for each, part in zip(heads, parts, strict=True)]

    all_ranks(lambda part: (told.append(part.clone()), part)[1])
    found = all_ranks(lambda part: torch.stack(told).sum(0))
    assert all(torch.equal(found[0], each) for each in found)
    return found[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("size", "vocab_size"), [(2, 64), (2, 9), (3, 10), (4, 5), (4, 2), (1, 7)])
def test_ranks_find_the_argmax(size: int, vocab_size: int, dtype: torch.dtype) -> None:
    """With few different values, so that most rows have ties, of any sign; and with random ones."""
    chances = torch.Generator().manual_seed(size * vocab_size)
    numbers = torch.tensor(
        [-math.inf, -3.5, -1.0, -0.0, 0.0, 6e-5, 1.0, 2.5, 300.0, math.inf], dtype=dtype
    )
    for most in range(1, len(numbers) + 1):
        drawn = torch.randint(0, most, (200, vocab_size), generator=chances)
        logits = numbers[drawn]
        assert torch.equal(_likeliest(logits, size), logits.argmax(-1))
    logits = torch.randn((300, vocab_size), generator=chances).to(dtype)
    assert torch.equal(_likeliest(logits, size), logits.argmax(-1))
    assert torch.equal(_likeliest(-logits.abs() - 1, size), (-logits.abs() - 1).argmax(-1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_first_nan_is_the_argmax(dtype: torch.dtype) -> None:
    nan = torch.tensor([math.nan, -math.nan], dtype=dtype)
    for size in (2, 3):
        for places in ([0], [4], [8], [3, 5], [8, 4], [1, 6]):
            logits = torch.full((1, 9), math.inf, dtype=dtype)
            logits[0, places] = nan[: len(places)]
            assert _likeliest(logits, size).tolist() == [min(places)]


def test_large_token_ids_are_exact() -> None:
    """They are exchanged without rounding, although the logits have half precision."""
    for at in (2049, 128_255, 150_001):
        logits = torch.zeros((1, 150_002), dtype=torch.bfloat16)
        logits[0, at] = 1.0
        assert _likeliest(logits, 2).tolist() == [at]


def test_logits_that_exceed_the_buffer_get_a_tensor_of_their_own() -> None:
    """Some models return the logits of all tokens."""
    head = _head(1, 2, 7)
    linear = head._linear
    hidden, room = torch.ones(1, 5, 1), torch.zeros(4, 4)
    with torch.no_grad(), head.in_part(room):
        assert torch.equal(linear(hidden)[0], linear.weight.T.expand(5, 4))
        assert not room.any()
        assert linear(hidden[:, :4]).data_ptr() == room.data_ptr()
        assert torch.equal(room, linear.weight.T.expand(4, 4))


# ---- two ranks -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(warm_children: None) -> Iterator[Pair]:
    """Two ranks for all cases."""
    pair = Pair()
    yield pair
    pair.close()


CASES = [
    *(partial(cases.is_greedy, name) for name in ("llama", "gemma2", "mixtral")),
    partial(cases.is_mixed, "llama", 48, "raw_logprobs"),
    partial(cases.is_mixed, "gemma2", 48, "processed_logprobs"),
    partial(cases.is_mixed, "llama", 3, "raw_logprobs"),
    cases.has_ties,
    partial(cases.finds_again_and_again, "cpu"),
    cases.is_filled_up,
    cases.depends_on_place,
]


@pytest.mark.slow
@pytest.mark.skipif(VERSION < (5, 17), reason="transformers has no plans to divide models by")
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_two_ranks(pair: Pair, case: Case) -> None:
    pair.run(case)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has no second GPU")
def test_captured_argmax_follows_its_input() -> None:
    """The exchange between ranks is in the graph."""
    pair = Pair("cuda")
    pair.run(partial(cases.finds_again_and_again, "cuda"))
    pair.close()
