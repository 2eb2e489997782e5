"""Number of attention launches of a step; `test_stepper` tests what they compute.

A kernel that mixes takes all queries of a step in one launch, unless a sequence decodes over a
long row. No host backend mixes, so `helpers/mixing.py` makes one of torch's kernel.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.mixing import BACKENDS
from helpers.reference_backend import ReferenceBackend

import vmkv.step.row_attention as row_attention
from vmkv import HostBackend, Sequence
from vmkv.attention import AttentionBackend, AttentionSpec, Call, register
from vmkv.core.cache import KVCache
from vmkv.step import Piece
from vmkv.step.piece import pack, packing_order
from vmkv.step.row_attention import LayerCall, PackedPass, RowAttention, passing, row_capacities

HEADS, KV_HEADS, DIM, LAYERS = 4, 2, 16, (None, 24)
SCALE = DIM**-0.5


@pytest.fixture
def cache() -> Iterator[KVCache]:
    """A cache of two layers, one of them with a sliding window."""
    with KVCache(HostBackend(4096), max_tokens=500, max_sequences=8) as cache:
        for layer, window in enumerate(LAYERS):
            cache.add_layers(
                [layer],
                num_kv_heads=KV_HEADS,
                head_dim=DIM,
                dtype=torch.float32,
                window_tokens=window,
            )
        yield cache


def begun(cache: KVCache, spans: list[tuple[int, int]]) -> tuple[list[Sequence], list[Piece]]:
    """Grown sequences, and their pieces in packing order, for each `(past, new)` tokens."""
    rows = [cache.open() for _ in spans]
    cache.grow([(row, past + new) for row, (past, new) in zip(rows, spans, strict=True)])
    pieces = [
        Piece(slot, row.row, past, new, [1] * new)
        for slot, (row, (past, new)) in enumerate(zip(rows, spans, strict=True))
    ]
    pieces = [pieces[at] for at in packing_order(pieces)]
    return rows, pieces


def attended(
    cache: KVCache, backend: str, spans: list[tuple[int, int]]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs of both layers for each `(past, new)` tokens, and the exact outputs."""
    rows, pieces = begun(cache, spans)
    device = torch.device("cpu")
    step = pack(pieces, row_capacities(cache), device).parts
    attention = RowAttention([cache], backend)
    attention.steps = {device: step}
    got, exact = [], []
    total = sum(new for _, new in spans)
    for layer, window in enumerate(LAYERS):
        keys, values = cache.keys(layer), cache.values(layer)
        for each in (keys, values):
            for piece in pieces:
                each[piece.row, : piece.num_tokens].normal_()
        query, key, value = (
            torch.randn(total, count, DIM).transpose(0, 1)[None]
            for count in (HEADS, KV_HEADS, KV_HEADS)
        )
        out = attention.attend(layer, LayerCall(query, key, value, SCALE))
        got.append(out[0])
        batch = step.everything[keys.shape[1]]
        exact.append(
            ReferenceBackend(torch.float64).attend(
                Call(query[0].transpose(0, 1), keys, values, batch, SCALE, window)
            )
        )
    attention.close()
    for row in rows:
        row.close()
    return got, exact


class _LikeQueries(ReferenceBackend):
    """Lays its results out as torch's kernels do."""

    name = "like queries"

    def attend(self, call: Call) -> torch.Tensor:
        return torch.empty_like(call.query).copy_(super().attend(call))


register("like queries", _LikeQueries)


@pytest.mark.parametrize("spans", [[(0, 30)], [(40, 1), (41, 1)], [(40, 1), (0, 30)]])
def test_the_operator_returns_the_layout_that_compilers_expect(
    cache: KVCache, spans: list[tuple[int, int]]
) -> None:
    """Whatever that of queries is: rotary embeddings put heads first."""
    _, pieces = begun(cache, spans)
    device, total = torch.device("cpu"), sum(new for _, new in spans)
    attention = RowAttention([cache], "like queries")
    attention.steps = {device: pack(pieces, row_capacities(cache), device).parts}
    its: list[Any] = [torch.randn(1, each, total, DIM) for each in (HEADS, KV_HEADS, KV_HEADS)]
    with passing(PackedPass(rows=attention)):
        its += [torch.tensor([0]), None, SCALE, 0, 0.0]
        out = torch.ops.vmkv.attend_rows(*its)
    wanted = row_attention._shape_of_attend_rows(*its)
    assert (out.shape, out.stride()) == (wanted.shape, wanted.stride())
    attention.close()


@pytest.mark.parametrize("longest", [16_384, 300])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_has_one_launch_or_one_for_decode_and_one_for_prompts(
    cache: KVCache, backend: str, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every combination of queries gives exact outputs in the fewest launches.

    Prompts that begin and that continue share a launch: no host kernel is for beginnings only.
    """
    monkeypatch.setattr(row_attention, "_LONG_ROW_TOKENS", longest)
    kinds = {"short": (40, 1), "long": (400, 1), "begins": (0, 30), "continues": (33, 21)}
    generator = random.Random(0)
    chosen = [list(names) for size in (1, 2, 3, 4) for names in itertools.combinations(kinds, size)]
    watched = BACKENDS[backend]
    for names in chosen:
        generator.shuffle(names)
        watched.launches.clear()
        watched.written = 0
        got, exact = attended(cache, backend, [kinds[name] for name in names])
        for ours, right in zip(got, exact, strict=True):
            torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-5)
        decode = [name for name in names if name in ("short", "long")]
        prompts = [name for name in names if name not in decode]
        is_long = "long" in names and longest < 400
        whole = backend == "mixing" and not is_long
        parts = [names] if whole or not prompts else [each for each in (decode, prompts) if each]
        expected = [(sum(kinds[name][1] for name in part), len(part)) for part in parts]
        assert watched.launches == expected * len(LAYERS), names
        is_in_parts = not whole and bool(prompts)
        assert watched.written == (len(expected) * len(LAYERS) if is_in_parts else 0), names


def test_a_backend_of_a_user_needs_only_why_not_and_attend(cache: KVCache) -> None:
    class Plain(AttentionBackend):
        name = "plain"

        def why_not(self, spec: AttentionSpec) -> None:
            return None

        def attend(self, call: Call) -> torch.Tensor:
            return ReferenceBackend().attend(call)

    register("plain", Plain)
    got, exact = attended(cache, "plain", [(40, 1), (0, 30), (33, 21)])
    for ours, right in zip(got, exact, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-5)
