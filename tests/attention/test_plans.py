"""Flash3's plan, computed once for all layers of a step, gives the outputs of a plan per layer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers.dense_rows import skip_unless_served

from vmkv.attention import AttentionBatch, AttentionSpec, Call, flash3, get
from vmkv.core.cache.fp8 import FP8

HEADS, KV_HEADS, DIM, ROW_TOKENS, NUM_ROWS = 32, 8, 128, 4096, 40
pytestmark = pytest.mark.gpu

#: Keys and queries of each sequence.
STEPS = {
    "one": ([3000], [1]),
    "decode": ([17, 3000, 1, 700, 64], [1] * 5),
    "many": ([100 + 97 * i for i in range(40)], [1] * 40),
    "mixed": ([17, 900, 333], [1, 64, 33]),
    "uniform": ([700, 900, 333], [4, 4, 4]),
}


@pytest.fixture(params=[torch.bfloat16, FP8], ids=str)
def rows(request: pytest.FixtureRequest) -> list[torch.Tensor]:
    """Keys and values of three layers."""
    spec = AttentionSpec("cuda", torch.bfloat16, HEADS, KV_HEADS, DIM, DIM, kv_dtype=request.param)
    skip_unless_served("flash3", spec)
    if flash3._planner() is None:
        pytest.skip("this release has no planner")
    margin = get("flash3").overread_tokens(spec)
    generator = torch.Generator("cuda").manual_seed(3)
    shape = (NUM_ROWS, ROW_TOKENS + margin, KV_HEADS, DIM)
    made = (torch.randn(shape, generator=generator, device="cuda") for _ in range(6))
    return [each.to(request.param) for each in made]


def layers(
    query: torch.Tensor, rows: list[torch.Tensor], batch: Callable[[], AttentionBatch], window: int
) -> list[torch.Tensor]:
    """Attention outputs of three layers."""
    return [
        get("flash3").attend(
            Call(query, rows[layer], rows[layer + 3], batch(), 0.1, window=window or None)
        )
        for layer in range(3)
    ]


@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize("step", STEPS)
def test_layers_share_a_plan(rows: list[torch.Tensor], step: str, window: int) -> None:
    """The outputs are bit for bit those of a separate launch plan for each layer."""
    lengths, queries = STEPS[step]

    def batch() -> AttentionBatch:
        places = list(reversed(range(NUM_ROWS)))[: len(lengths)]
        return AttentionBatch.build(
            places, lengths, queries, row_tokens=rows[0].shape[1], device="cuda"
        )

    generator = torch.Generator("cuda").manual_seed(4)
    query = torch.randn(sum(queries), HEADS, DIM, generator=generator, device="cuda")
    query = query.to(torch.bfloat16)
    shared = batch()
    together = layers(query, rows, lambda: shared, window)
    assert 1 == len(shared.plans)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash3, "_planner", lambda: None)
        alone = layers(query, rows, batch, window)
    for got, expected in zip(together, alone, strict=True):
        assert torch.equal(got, expected)


def test_a_graph_plans_anew(rows: list[torch.Tensor]) -> None:
    """Lengths change between replays, and with them the distribution of work."""
    vectors = [torch.zeros(8, dtype=torch.int32, device="cuda") for _ in range(2)]
    places, lengths = vectors
    starts = torch.arange(9, dtype=torch.int32, device="cuda")
    generator = torch.Generator("cuda").manual_seed(5)
    query = torch.randn(8, HEADS, DIM, generator=generator, device="cuda").to(torch.bfloat16)

    def batch() -> AttentionBatch:
        return AttentionBatch(places, lengths, starts, 1, ROW_TOKENS, rows[0].shape[1])

    places.copy_(torch.arange(8))
    lengths.fill_(5)
    layers(query, rows, batch, 0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        shared = batch()
        together = layers(query, rows, lambda: shared, 0)
    source = torch.Generator().manual_seed(6)
    for longest in (6, 4000, 40, 2000):
        lengths.copy_(torch.randint(1, longest, (8,), generator=source))
        places.copy_(torch.randperm(NUM_ROWS, generator=source)[:8])
        graph.replay()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(flash3, "_planner", lambda: None)
            alone = layers(query, rows, batch, 0)
        for got, expected in zip(together, alone, strict=True):
            assert torch.equal(got, expected), longest
