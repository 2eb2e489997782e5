"""A layer's code over packed tokens computes for each sequence what it computes for it alone."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from vmkv.errors import InternalError
from vmkv.step import state_rules
from vmkv.step.piece import Piece, packing_order
from vmkv.step.row_attention import PackedPass, passing
from vmkv.step.state_plan import CHUNK_TOKENS, CapturedSizes, PackedSequences, plan_step
from vmkv.step.state_rules import Call, PackedRules, can_pack

WIDTH, HEADS, DIM, ROWS, SCRATCH = 4, 2, 3, 12, 11
SIZES = CapturedSizes(256, 4, 5, 48)


# A layer as modeling files have it: functions by these names, one of which takes bounds.


def causal_conv1d_fn(
    hidden: torch.Tensor, weight: torch.Tensor, bias: Any = None, activation: Any = None
) -> torch.Tensor:
    size = hidden.shape[-1]
    return functional.conv1d(hidden, weight[:, None], bias, padding=WIDTH - 1, groups=len(weight))[
        ..., :size
    ]


def causal_conv1d_update(
    hidden: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    bias: Any = None,
    activation: Any = None,
) -> torch.Tensor:
    both = torch.cat((state, hidden), -1)
    state.copy_(both[..., -WIDTH:])
    return causal_conv1d_fn(both, weight, bias)[..., -1:]


def recurrent_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    state = torch.zeros(len(query), HEADS, DIM, DIM) if initial_state is None else initial_state
    if use_qk_l2norm_in_kernel:
        query, key = (
            each * torch.rsqrt(each.square().sum(-1, keepdim=True) + 1e-6) for each in (query, key)
        )
    outputs = []
    for at in range(query.shape[1]):
        new = key[:, at, :, :, None] * value[:, at, :, None] * beta[:, at, :, None, None]
        state = state * g[:, at, :, None, None].exp() + new
        outputs.append((state * query[:, at, :, :, None]).sum(-2))
    return torch.stack(outputs, 1), state


def chunk_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the chunks that are listed, as flash-linear-attention does."""
    whole = query, key, value, g, beta
    if cu_seqlens is None:
        return recurrent_rule(*whole, initial_state=initial_state)
    assert chunk_indices is not None
    assert initial_state is not None
    out, state = torch.full_like(value, torch.nan), initial_state.clone()
    for part, number in chunk_indices.tolist():
        start = int(cu_seqlens[part]) + number * CHUNK_TOKENS
        end = min(int(cu_seqlens[part + 1]), start + CHUNK_TOKENS)
        if start < end:
            its = [each[:, start:end] for each in whole]
            out[:, start:end], state[part : part + 1] = recurrent_rule(
                *its, initial_state=state[part : part + 1]
            )
    return out, state


def rule_in_place(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: torch.Tensor,
    ssm_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Change states at rows, with a gate for each key, as flash-linear-attention's rule does."""
    assert options == {"inplace_final_state": True}
    whole = [each.flatten(0, 1)[:, None] for each in (query, key, value, g[..., 0], beta)]
    count = len(ssm_state_indices)
    starts = list(range(count + 1)) if cu_seqlens is None else cu_seqlens.tolist()
    out = torch.full_like(whole[2], torch.nan)
    for row, start, end in zip(ssm_state_indices.tolist(), starts, starts[1:], strict=False):
        assert end - start in (0, 1)
        if start < end:
            its = [each[start:end] for each in whole]
            out[start:end], made = recurrent_rule(*its, initial_state=initial_state[row : row + 1])
            initial_state[row : row + 1] = made
    return out.view(value.shape), initial_state


def rule_of_another_version(*tensors: torch.Tensor, initial_state: torch.Tensor) -> Any:
    """Take no rows."""
    return recurrent_rule(*tensors, initial_state=initial_state)


class Layer(torch.nn.Module):
    """Convolves, and applies a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = torch.nn.Linear(5, 3 * HEADS * DIM + 2 * HEADS, bias=False)
        self.weight = torch.nn.Parameter(torch.randn(3 * HEADS * DIM, WIDTH))

    def forward(self, hidden: torch.Tensor, cache: Any = None) -> torch.Tensor:
        mixed, g, beta = self.mix(hidden).split((3 * HEADS * DIM, HEADS, HEADS), -1)
        mixed = mixed.transpose(1, 2)
        if cache is None:
            mixed = causal_conv1d_fn(mixed, self.weight)
        else:
            mixed = causal_conv1d_update(mixed, cache[0], self.weight)
        query, key, value = mixed.transpose(1, 2).unflatten(-1, (3 * HEADS, DIM)).chunk(3, 2)
        rule = chunk_rule if cache is None else recurrent_rule
        given = None if cache is None else cache[1]
        out, state = rule(
            query,
            key,
            value,
            g=-g.abs(),
            beta=beta,
            initial_state=given,
            use_qk_l2norm_in_kernel=True,
        )
        if cache is not None:
            cache[1] = state
        return out


def _alone(layer: Layer, hidden: torch.Tensor, states: list[torch.Tensor]) -> torch.Tensor:
    """Run a sequence `[T, 5]` token by token from its states, which it changes."""
    outputs = []
    for token in hidden:
        cache = [each[None].clone() for each in states]
        outputs.append(layer(token[None, None], cache)[0, 0])
        for each, made in zip(states, cache, strict=True):
            each.copy_(made[0])
    return torch.stack(outputs)


def _draw(seed: int, *, captured: bool) -> list[Piece]:
    """Pieces of a step; of one that is captured, at most one checkpoint each."""
    draw = random.Random(seed)
    rows = draw.sample(range(8), draw.randint(1, 6))
    kept = iter((8, 9, 10, 8, 9, 10) if captured else (8, 9, 10))
    pieces = []
    for row in rows:
        decodes = draw.random() < 0.4
        past = draw.choice((0, 5)) if not decodes else 7
        new = 1 if decodes else draw.choice((2, 3, 16, 40, 70))
        if not captured and not past and draw.random() < 0.3:
            new = 1  # Packed with those that decode, and begins all the same.
        checkpoints = []
        if not decodes and draw.random() < 0.5:
            count = 1 if captured else draw.randint(1, 2)
            least = max(1, new - 12) if captured else 1
            stops = sorted({past + draw.randint(least, new) for _ in range(count)})
            checkpoints = [(stop, at) for stop, at in zip(stops, kept, strict=False)]
        pieces.append(Piece(0, row, past, new, [0] * new, checkpoints=checkpoints))
    if captured:
        taken: set[int] = set()
        for at, each in enumerate(pieces):  # A row of a checkpoint is written once in a step.
            if each.checkpoints and each.checkpoints[0][1] in taken:
                pieces[at] = replace(each, checkpoints=())
            taken |= {row for _, row in each.checkpoints}
    return [pieces[at] for at in packing_order(pieces)]


def _check(rules: PackedRules, layer: Layer, pieces: list[Piece], planned: PackedSequences) -> None:
    total = sum(each.num_new_tokens for each in pieces)
    size = SIZES.num_tokens if planned.rounds and planned.rounds[0].tokens == slice(None) else total
    hidden = torch.randn(size, 5)
    tensors = list(rules._states[0].values())
    for each in tensors:
        each.normal_()
    before = [each.clone() for each in tensors]
    rules.begin(planned)
    with passing(PackedPass(rules=rules)), rules.in_place():
        found = layer(hidden[None])[0]
    assert type(layer) is Layer
    is_there = state_rules._rule_in_place() is rule_in_place
    assert rules._is_in_place in ({}, {recurrent_rule: is_there})
    decoding = [each for each in pieces if each.decodes and each.num_past_tokens]
    assert rules._is_in_place or not decoding
    start = 0
    for piece in pieces:
        states = [each[piece.row].clone() for each in before]
        if not piece.num_past_tokens:
            states = [torch.zeros_like(each) for each in states]
        past = piece.num_past_tokens
        for stop, kept_row in (*piece.checkpoints, (piece.num_tokens, piece.row)):
            end = start + stop - past
            if start < end:
                expected = _alone(layer, hidden[start:end], states)
                torch.testing.assert_close(found[start:end], expected, rtol=1e-4, atol=1e-5)
            for each, state in zip(tensors, states, strict=True):
                torch.testing.assert_close(each[kept_row], state, rtol=1e-4, atol=1e-5)
            start, past = end, stop
    touched = {row for each in pieces for row in (each.row, *(at for _, at in each.checkpoints))}
    others = [row for row in range(ROWS) if row not in touched | {SCRATCH}]
    for each, was in zip(tensors, before, strict=True):
        assert torch.equal(each[others], was[others])


@pytest.fixture
def layer() -> Layer:
    torch.manual_seed(0)
    return Layer().requires_grad_(requires_grad=False)


@pytest.fixture(params=[None, rule_in_place, rule_of_another_version])
def rules(
    layer: Layer, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> PackedRules:
    """Rules where flash-linear-attention has none that changes states in place, one, or another."""
    monkeypatch.setattr(state_rules, "_rule_in_place", lambda: request.param)
    torch.manual_seed(1)
    states = {
        "conv_states": torch.zeros(ROWS, 3 * HEADS * DIM, WIDTH),
        "recurrent_states": torch.zeros(ROWS, HEADS, DIM, DIM),
    }
    made = PackedRules({0: layer}, {0: states}, [])
    assert (0,) == made.layers
    assert WIDTH == made.state_tokens
    return made


@pytest.mark.parametrize("seed", range(40))
def test_each_sequence_as_alone(rules: PackedRules, layer: Layer, seed: int) -> None:
    """With checkpoints, sequences that begin, and ones that decode; other rows are unchanged."""
    pieces = _draw(seed, captured=False)
    _check(rules, layer, pieces, rules.plan(pieces, torch.device("cpu")))


@pytest.mark.parametrize("seed", range(16))
def test_steps_of_fixed_sizes(rules: PackedRules, layer: Layer, seed: int) -> None:
    """From a plan of the same sizes, whatever the step."""
    pieces = _draw(seed, captured=True)
    num_decode = sum(each.decodes for each in pieces)
    if not SIZES.fits(pieces, num_decode):
        assert len(pieces) - num_decode >= 5 or num_decode > 4
        return
    plan = SIZES.plan(pieces, num_decode, WIDTH, SCRATCH)
    like = SIZES.plan([], 0, WIDTH, SCRATCH)
    assert [each.shape for each in like.arrays] == [each.shape for each in plan.arrays]
    integers = torch.cat([torch.from_numpy(each).long() for each in plan.arrays])
    _check(rules, layer, pieces, like.read(integers))
    assert rules._takes_starts == {chunk_rule: True, recurrent_rule: False}


def test_what_does_not_fit(rules: PackedRules) -> None:
    """Two checkpoints of a prompt, one of a decoding sequence, and a first token by itself."""
    prompt, decode = Piece(0, 0, 0, 30, None), Piece(0, 1, 5, 1, None)
    assert SIZES.fits([decode, prompt], 1)
    assert not SIZES.fits([decode, replace(prompt, checkpoints=((16, 8), (20, 9)))], 1)
    assert not SIZES.fits([replace(decode, checkpoints=((6, 8),)), prompt], 1)
    assert not SIZES.fits([replace(decode, num_past_tokens=0), prompt], 1)
    assert not SIZES.fits([prompt] * 5, 0)
    assert not SIZES.fits([Piece(0, 0, 0, 60, None, checkpoints=((8, 8),))], 0)


def test_a_chunk_is_of_one_part() -> None:
    """Chunks are listed by part, and number in it."""
    pieces = [Piece(0, 0, 0, 130, None), Piece(0, 1, 5, 3, None)]
    (its,) = plan_step(pieces, WIDTH).send(torch.device("cpu")).rounds
    assert [[0, 0], [0, 1], [0, 2], [1, 0]] == its.indices.tolist()


def test_chunks_go_over_all_tokens_unless_a_part_follows_a_checkpoint() -> None:
    """Their output then has room for that of decoding tokens, which is computed afterwards."""
    decode, prompt = Piece(0, 1, 5, 1, None), Piece(0, 0, 0, 70, None)
    planned = plan_step([decode, prompt], WIDTH).send(torch.device("cpu"))
    assert [slice(0, 71), slice(0, 1)] == [each.tokens for each in planned.rounds]
    assert [1, 71] == planned.rounds[0].starts.tolist()
    assert planned.places is not None
    assert [0] == planned.places.tolist() == planned.taken.tolist()
    two_parts = replace(prompt, checkpoints=((64, 8),))
    planned = plan_step([decode, two_parts], WIDTH).send(torch.device("cpu"))
    assert [slice(0, 1), slice(1, 65), slice(65, 71)] == [each.tokens for each in planned.rounds]
    assert planned.places is None


def test_outside_a_step(rules: PackedRules, layer: Layer) -> None:
    with rules.in_place(), pytest.raises(InternalError, match="outside a step"):
        layer(torch.zeros(1, 2, 5))


def test_layers_that_compute_otherwise() -> None:
    """By other functions, or with other states."""
    assert can_pack(Layer(), {"conv_states", "recurrent_states"})
    assert not can_pack(Layer(), {"conv_states"})
    assert not can_pack(Layer(), ["conv_states", "conv_states", "recurrent_states"])
    assert not can_pack(torch.nn.Linear(2, 2), {"conv_states"})


@pytest.mark.gpu
@pytest.mark.parametrize("is_by_key", [False, True])
def test_states_change_where_they_lie(is_by_key: bool) -> None:
    """As by the rule on copies; an entry without a token changes nothing."""
    name = "kda" if is_by_key else "gated_delta_rule"
    rule = getattr(pytest.importorskip(f"fla.ops.{name}"), f"fused_recurrent_{name}")
    torch.manual_seed(0)
    on_gpu: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    query, key = functional.normalize(torch.randn(2, 1, 5, 2, 64, **on_gpu), dim=-1)
    value = torch.randn(1, 5, 4, 64, **on_gpu)
    g = -torch.rand((1, 5, 4, 64) if is_by_key else (1, 5, 4), device="cuda")
    if is_by_key:
        query, key = query.repeat_interleave(2, 2), key.repeat_interleave(2, 2)
    call = Call(query, key, value, g, torch.rand(1, 5, 4, **on_gpu))
    states, rows = torch.randn(9, 4, 64, 64, device="cuda"), torch.tensor([7, 0, 3, 8, 2]).cuda()
    expected, made = call.as_batch().compute(rule, states[rows])
    whole = states.clone()
    found = call.compute_in_place(whole, rows, None)
    torch.testing.assert_close(found, expected.transpose(0, 1), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(whole, states.index_copy(0, rows, made), rtol=1e-4, atol=1e-4)
    part = states.clone()
    starts = torch.tensor([0, 1, 2, 3, 3, 3]).cuda()
    found = call.of(slice(0, 4)).compute_in_place(part, rows, starts)
    torch.testing.assert_close(found[0, :3], expected[:3, 0], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(part[rows[:3]], made[:3], rtol=1e-4, atol=1e-4)
    untouched = torch.tensor([1, 2, 4, 5, 6, 8]).cuda()
    assert torch.equal(part[untouched], states[untouched])
