"""Kernels for mixtures of experts, in Triton: two grouped products, and what is around them.

A pair is a token and one expert that was chosen for it; pair `token * TOP_K + slot`. The first
product computes gate and up of each pair and applies the activation, the second one computes down,
and a sum over the pairs of a token weighs them. Each block of programs reads the weights of one
expert once:

  direct   few tokens: a block for each pair whose expert no earlier pair has; it multiplies all
           tokens, and keeps those that chose the expert. Nothing is sorted.
  sorted   pairs in order of their experts; a block for at most BLOCK_M pairs of one expert

Grids depend on the number of tokens alone, so that launches can be captured. Sums are in float32,
in a fixed order.
"""

from __future__ import annotations

import math
import subprocess
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..units import div_ceil
from .expert_forms import Form


class Tile(NamedTuple):
    """Sizes of one product's programs; `is_direct` ones take at most `block_m` tokens.

    With `is_swapped`, weights are the left operand, whose rows fill the tensor cores' tile.
    """

    is_direct: bool
    block_m: int
    block_n: int
    block_k: int
    is_swapped: bool
    num_warps: int
    num_stages: int


DOES_NOT_FIT = triton.runtime.errors.OutOfResources
"""Raised by a launch whose tiles need more memory than a multiprocessor of this device has."""

FAILURES = (triton.TritonError, RuntimeError, OSError, subprocess.SubprocessError)
"""Raised where kernels cannot be compiled or run."""

#: By `block_m`: `block_n`, `block_k`, `is_swapped`, warps and stages of tiles worth timing (H200).
_TILES = {
    16: [
        (16, 64, True, 4, 6),
        (16, 128, True, 4, 4),
        (32, 64, True, 4, 5),
        (32, 128, True, 4, 4),
        (64, 64, True, 4, 5),
        (64, 128, True, 4, 3),
    ],
    32: [(64, 64, True, 4, 5), (64, 128, True, 4, 3), (128, 64, True, 8, 4)],
    64: [(64, 64, False, 4, 4), (128, 64, False, 4, 3), (128, 64, True, 8, 3)],
    128: [
        (64, 64, False, 4, 3),
        (128, 64, False, 8, 3),
        (128, 64, False, 8, 4),
        (256, 64, False, 8, 3),
    ],
}
#: Of `block_m` pairs: the mean numbers of pairs of an expert between which they are timed.
_PAIRS = {16: (0, 10), 32: (4, 40), 64: (12, 100), 128: (40, math.inf)}
_MOST_DIRECT = 16


def candidates(num_tokens: int, pairs_per_expert: float, *, is_gated: bool) -> list[Tile]:
    """Return the tiles to choose from for a product of `num_tokens`."""
    kinds = [(True, 16)] if num_tokens <= _MOST_DIRECT else []
    if num_tokens > _MOST_DIRECT // 4:
        kinds += [(False, m) for m, (low, high) in _PAIRS.items() if low < pairs_per_expert <= high]
    narrowest, widest = (16, 128) if is_gated else (64, 256)
    return [
        Tile(is_direct, block_m, *its)
        for is_direct, block_m in kinds
        for its in _TILES[block_m]
        if narrowest <= its[0] <= widest
    ]


# ---- kernels -------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_pairs"])
def _sort_pairs(ids, order, starts, num_pairs, NUM_EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """Write the pairs of one expert to `order`, and to `starts` where they begin."""
    expert = tl.program_id(0)
    start = tl.zeros((), tl.int32)
    for first in range(0, num_pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        its = tl.load(ids + pair, mask=pair < num_pairs, other=NUM_EXPERTS)
        start += tl.sum((its < expert).to(tl.int32))
    tl.store(starts + expert, start)
    if expert == NUM_EXPERTS - 1:
        tl.store(starts + NUM_EXPERTS, num_pairs)
    for first in range(0, num_pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        its = tl.load(ids + pair, mask=pair < num_pairs, other=NUM_EXPERTS)
        is_its = (its == expert).to(tl.int32)
        tl.store(order + start + tl.cumsum(is_its) - 1, pair, mask=is_its > 0)
        start += tl.sum(is_its)


@triton.jit
def _activate(
    gate, up, GELU: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr
):
    if LIMIT > 0:  # NaN stays.
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if GELU else gate * ALPHA
    return gate * tl.sigmoid(inner) * (up + OFFSET)


@triton.jit
def _direct_rows(
    ids, num_tokens, block, TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, ALL_PAIRS: tl.constexpr
):
    """Return a block's expert, pairs, tokens, which are rows, and whether the block is used."""
    expert = tl.load(ids + block).to(tl.int64)
    earlier = tl.arange(0, ALL_PAIRS)
    same = tl.load(ids + earlier, mask=earlier < block, other=-1) == expert
    token = tl.arange(0, BLOCK_M)
    slot = tl.full((BLOCK_M,), -1, tl.int32)
    for each in tl.static_range(TOP_K):
        its = tl.load(ids + token * TOP_K + each, mask=token < num_tokens, other=-1)
        slot = tl.where(its == expert, each, slot)
    return expert, token * TOP_K + slot, token, slot >= 0, tl.sum(same.to(tl.int32)) == 0


@triton.jit
def _sorted_rows(
    order,
    starts,
    block,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ALL_EXPERTS: tl.constexpr,
):
    """Return the same as `_direct_rows`, of sorted pairs."""
    expert = tl.arange(0, ALL_EXPERTS)
    start = tl.load(starts + expert, mask=expert < NUM_EXPERTS, other=0)
    end = tl.load(starts + expert + 1, mask=expert < NUM_EXPERTS, other=0)
    blocks = (end - start + BLOCK_M - 1) // BLOCK_M
    is_before = tl.cumsum(blocks) <= block
    found = tl.sum(is_before.to(tl.int32))
    is_used = found < NUM_EXPERTS
    expert = tl.minimum(found, NUM_EXPERTS - 1)
    place = tl.load(starts + expert) + tl.arange(0, BLOCK_M)
    place += BLOCK_M * (block - tl.sum(tl.where(is_before, blocks, 0)))
    is_row = place < tl.load(starts + expert + 1)
    pair = tl.load(order + place, mask=is_row & is_used, other=0)
    return expert.to(tl.int64), pair, pair // TOP_K, is_row, is_used


@triton.jit
def _columns(
    tile,
    N: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    IN_TURN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Return the columns that a tile computes of `out`, and of the weights for each of these."""
    column = tl.arange(0, WIDTH)
    if GATED and INTERLEAVED:
        column += tile * WIDTH
        local = column // 2
    elif GATED:
        part = column % 2 if IN_TURN else column // BLOCK_N
        local = tile * BLOCK_N + (column // 2 if IN_TURN else column % BLOCK_N)
        column = local + N * part
    else:
        column += tile * BLOCK_N
        local = column
    return local, column


@triton.jit
def _multiply(
    x_at,
    weight_at,
    is_row,
    is_column,
    N: tl.constexpr,
    K: tl.constexpr,
    STEP: tl.constexpr,
    SWAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Return the product `[BLOCK_M, WIDTH]` over K; `STEP` weights lie between blocks of K."""
    k = tl.arange(0, BLOCK_K)
    if SWAPPED:
        sums = tl.zeros((WIDTH, BLOCK_M), tl.float32)
    else:
        sums = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    for first in range(0, K, BLOCK_K):
        if K % BLOCK_K:
            left = tl.load(x_at, mask=is_row[:, None] & (first + k < K)[None, :], other=0.0)
            is_weight = (first + k < K)[:, None]
            if N % BLOCK_N:
                is_weight = is_weight & is_column[None, :]
            right = tl.load(weight_at, mask=is_weight, other=0.0)
        elif N % BLOCK_N:
            left = tl.load(x_at, mask=is_row[:, None], other=0.0)
            right = tl.load(weight_at, mask=is_column[None, :], other=0.0)
        else:
            left = tl.load(x_at, mask=is_row[:, None], other=0.0)
            right = tl.load(weight_at)
        if SWAPPED:
            sums = tl.dot(tl.trans(right), tl.trans(left), sums)
        else:
            sums = tl.dot(left, right, sums)
        x_at += BLOCK_K
        weight_at += STEP
    if SWAPPED:
        sums = tl.trans(sums)
    return sums


@triton.jit(do_not_specialize=["num_tokens"])
def _product(
    x,  # [tokens, K] if GATED, else [pairs, K]
    weight,  # [experts, COLUMNS, K], or [experts, K, COLUMNS] if TRANSPOSED
    bias,  # [experts, COLUMNS], or None
    out,  # [pairs, N]
    ids,  # [tokens, TOP_K]
    order,  # [pairs], and where experts begin in it, [experts + 1]; None if DIRECT
    starts,
    num_tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    GELU: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    DIRECT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAPPED: tl.constexpr,
    ALL_PAIRS: tl.constexpr,
    ALL_EXPERTS: tl.constexpr,
):
    tile = tl.program_id(0)
    block = tl.program_id(1)
    if DIRECT:
        expert, pair, token, is_row, is_used = _direct_rows(
            ids, num_tokens, block, TOP_K, BLOCK_M, ALL_PAIRS
        )
    else:
        expert, pair, token, is_row, is_used = _sorted_rows(
            order, starts, block, NUM_EXPERTS, TOP_K, BLOCK_M, ALL_EXPERTS
        )
    if not is_used:
        return
    # Columns of the tile; with gates, twice as many: gate and up in turn, or all gates first.
    COLUMNS: tl.constexpr = 2 * N if GATED else N
    WIDTH: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    IN_TURN: tl.constexpr = INTERLEAVED or not TRANSPOSED
    local, column = _columns(tile, N, GATED, INTERLEAVED, IN_TURN, BLOCK_N, WIDTH)
    k = tl.arange(0, BLOCK_K)
    row = token if GATED else pair
    x_at = x + row.to(tl.int64)[:, None] * K + k[None, :]
    weight_at = weight + expert * (COLUMNS * K)
    if TRANSPOSED:
        weight_at = weight_at + k[:, None] * COLUMNS + column[None, :]
    else:
        weight_at = weight_at + k[:, None] + column[None, :] * K
    is_column = local < N
    STEP: tl.constexpr = BLOCK_K * COLUMNS if TRANSPOSED else BLOCK_K
    sums = _multiply(
        x_at, weight_at, is_row, is_column, N, K, STEP, SWAPPED, BLOCK_M, BLOCK_N, BLOCK_K, WIDTH
    )
    if bias is not None:
        added = tl.load(bias + expert * COLUMNS + column, mask=is_column, other=0.0)
        sums += added.to(tl.float32)[None, :]
    if GATED:
        if IN_TURN:
            gate, up = tl.split(tl.reshape(sums, (BLOCK_M, BLOCK_N, 2)))
        else:
            gate, up = tl.split(tl.permute(tl.reshape(sums, (BLOCK_M, 2, BLOCK_N)), (0, 2, 1)))
        sums = _activate(gate, up, GELU, ALPHA, LIMIT, OFFSET)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    sums = sums.to(out.dtype.element_ty)
    out_at = out + pair.to(tl.int64)[:, None] * N + n[None, :]
    if DIRECT and not GATED:  # A token may have chosen an expert twice.
        for each in tl.static_range(TOP_K):
            its = tl.load(ids + token * TOP_K + each, mask=token < num_tokens, other=-1)
            out_at = out + (token * TOP_K + each)[:, None] * N + n[None, :]
            tl.store(out_at, sums, mask=(its == expert)[:, None] & (n < N)[None, :])
    else:
        tl.store(out_at, sums, mask=is_row[:, None] & (n < N)[None, :])


@triton.jit
def _weighted_sum(pairs, weights, out, N: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(TOP_K):
        pair = token * TOP_K + slot
        its = tl.load(pairs + pair * N + n, mask=n < N, other=0.0).to(tl.float32)
        total += its * tl.load(weights + pair).to(tl.float32)
    tl.store(out + token * N + n, total.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def _top_k(x, values, indices, N: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    rest = tl.load(x + row * N + n, mask=n < N, other=-float("inf"))
    is_left = n < N
    for each in tl.static_range(K):
        # The first of the largest that are left; NaN is the largest, as in torch.
        rank = tl.where(rest != rest, float("inf"), rest.to(tl.float32))
        best = tl.max(tl.where(is_left, rank, -float("inf")), 0)
        at = tl.min(tl.where(is_left & (rank == best), n, N), 0)
        its = n == at
        tl.store(values + row * K + each + n * 0, rest, mask=its)
        tl.store(indices + row * K + each, at.to(tl.int64))
        is_left = is_left & (n != at)


# ---- launches ------------------------------------------------------------------------------------


def sort_pairs(ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pairs in order of their experts, and where each expert's begin: `[E + 1]`, int32."""
    order = ids.new_empty(ids.numel(), dtype=torch.int32)
    starts = ids.new_empty(num_experts + 1, dtype=torch.int32)
    block = 1024 if ids.numel() <= 1024 else 4096  # Two kernels, which can be loaded in advance.
    _sort_pairs[(num_experts,)](
        ids, order, starts, ids.numel(), num_experts, block, num_warps=8 if block > 1024 else 4
    )
    return order, starts


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    ids: torch.Tensor,
    placed: tuple[torch.Tensor | None, torch.Tensor | None],
    form: Form,
    tile: Tile,
    *,
    is_gated: bool,
) -> torch.Tensor:
    """Multiply tokens, or pairs, with their experts' weights: `[pairs, N]`."""
    num_tokens, top_k = ids.shape
    num_experts, k, columns = weight.shape
    if not form.is_transposed:
        columns, k = k, columns
    num_pairs, n = ids.numel(), columns // 2 if is_gated else columns
    out = x.new_empty(num_pairs, n)
    if tile.is_direct:
        num_blocks = num_pairs
    else:
        num_blocks = min(num_pairs, (num_pairs + num_experts * (tile.block_m - 1)) // tile.block_m)
    all_pairs = triton.next_power_of_2(tile.block_m * top_k) if tile.is_direct else 1
    _product[(div_ceil(n, tile.block_n), num_blocks)](
        *(x, weight, bias, out, ids, *placed, num_tokens),
        *(n, k, num_experts, top_k, is_gated, form.is_transposed, form.is_interleaved),
        *(form.is_gelu, form.alpha, form.limit, form.offset, tile.is_direct),
        *(tile.block_m, tile.block_n, tile.block_k, tile.is_swapped, all_pairs),
        triton.next_power_of_2(num_experts),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def weighted_sum(pairs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Add the rows of each token's pairs `[pairs, N]`, weighted: `[tokens, N]`."""
    (num_tokens, top_k), n = weights.shape, pairs.shape[1]
    out = pairs.new_empty(num_tokens, n)
    block = min(1024, triton.next_power_of_2(n))
    _weighted_sum[(num_tokens, div_ceil(n, block))](pairs, weights, out, n, top_k, block)
    return out


def top_k(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `k` largest numbers of each row `[T, N]`, and their places; the first of equal."""
    (rows, n), block = x.shape, triton.next_power_of_2(x.shape[1])
    values, indices = x.new_empty(rows, k), x.new_empty(rows, k, dtype=torch.int64)
    _top_k[(rows,)](x, values, indices, n, k, block, num_warps=1 if block <= 256 else 4)
    return values, indices


def run(
    inputs: Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor | None],
    form: Form,
    tiles: Sequence[Tile],
) -> torch.Tensor:
    """Compute the experts of tokens with given tiles: `[T, H]`.

    `inputs` are tokens `[T, H]`, their experts `[T, k]` and weights; `tensors` gate and up, their
    bias, down, and its bias.
    """
    (hidden, ids, weights), (gate_up, gate_up_bias, down, down_bias) = inputs, tensors
    assert gate_up is not None
    assert down is not None
    placed: Any = (None, None)
    if not all(each.is_direct for each in tiles):
        placed = sort_pairs(ids, gate_up.shape[0])
    inner = product(hidden, gate_up, gate_up_bias, ids, placed, form, tiles[0], is_gated=True)
    outer = product(inner, down, down_bias, ids, placed, form, tiles[1], is_gated=False)
    return weighted_sum(outer, weights)
