"""Cases of a vocabulary head divided over two ranks; see `rank_cases.py`."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from helpers import runners, tiny_models
from helpers.rank_cases import GREEDY, PROMPTS, ROOMY, alone, engine_on, said
from helpers.tiny_models import tiny_model
from vmkv import Engine, SamplingParams
from vmkv.serve.parallel import TensorParallel
from vmkv.serve.parallel.localise import DividedHead, GatheredLinear, head_of

#: On the host, the padded steps of graphs run uncaptured.
PADDED = {**ROOMY, **runners.PADDED}
MIXED = [
    GREEDY,
    SamplingParams(temperature=0, max_tokens=9, logprobs=3),
    SamplingParams(seed=5, max_tokens=7),
    SamplingParams(temperature=0, repetition_penalty=1.4, presence_penalty=0.3, max_tokens=11),
    SamplingParams(seed=6, top_k=5, logprobs=1, max_tokens=6),
    SamplingParams(temperature=0, max_tokens=14),
]
MANY = [*PROMPTS, [3, 3, 50], [90, 4, 4, 4, 18], [60] * 30]


@contextlib.contextmanager
def counting() -> Iterator[list[int]]:
    """Number of rows of each time that parts of logits are put together."""
    counts: list[int] = []
    whole = GatheredLinear.whole

    def counted(linear: GatheredLinear, part: torch.Tensor) -> torch.Tensor:
        counts.append(part[..., 0].numel())
        return whole(linear, part)

    with mock.patch.object(GatheredLinear, "whole", counted):
        yield counts


def space_of(engine: Engine) -> Any:
    """The buffers that an engine's captured steps share."""
    runner: Any = engine._runner
    return getattr(runner, "_runner", runner).stepper._space


def is_greedy(name: str, group: TensorParallel) -> None:
    """No request needs logits, so their parts are not put together."""
    expected = None if group.rank else alone(name, MANY, GREEDY)
    with engine_on(group, copy.deepcopy(tiny_model(name)), **PADDED) as engine:
        if engine is not None:
            assert space_of(engine).logits.shape[1] == space_of(engine).vocab_size // 2
            with counting() as counts:
                assert expected == said(engine.generate(MANY, GREEDY))
            assert [] == counts


def is_mixed(name: str, step_tokens: int, mode: str, group: TensorParallel) -> None:
    """The logits of a step are put together once, if one of its requests needs them."""
    model = copy.deepcopy(tiny_model(name))
    expected = []
    if not group.rank:
        with Engine(copy.deepcopy(model), **ROOMY, logprobs_mode=mode) as engine:
            expected = engine.generate(MANY, MIXED)
    options = {**PADDED, "max_num_batched_tokens": step_tokens, "logprobs_mode": mode}
    with engine_on(group, model, **options) as engine:
        if engine is None:
            return
        num_steps = 0
        with counting() as counts:
            handles = [engine.add(*each) for each in zip(MANY, MIXED, strict=True)]
            while engine.has_unfinished:
                engine.step()
                num_steps += 1
        got = [handle.output() for handle in handles]
        assert said(expected) == said(got)
        # Once in some steps and without padding: at most three requests sample.
        assert 0 < len(counts) < num_steps
        assert max(counts) <= 3
        for theirs, ours in zip(expected, got, strict=True):
            pairs = [each.outputs[0].logprobs or () for each in (theirs, ours)]
            for one, other in zip(*pairs, strict=True):
                assert list(one.top) == list(other.top)
                torch.testing.assert_close(one.logprob, other.logprob, atol=1e-4, rtol=1e-4)


def has_ties(group: TensorParallel) -> None:
    """Both ranks have the same weights, so each token has an equal on the other rank."""
    model: Any = copy.deepcopy(tiny_model("llama"))
    weight = model.lm_head.weight
    half = len(weight) // 2
    with torch.no_grad():
        weight[half:] = weight[:half]
    for options in (PADDED, ROOMY):
        with engine_on(group, copy.deepcopy(model), **options) as engine:
            if engine is not None:
                tokens = said(engine.generate(MANY, GREEDY))
                assert max(max(each[0]) for each in tokens) < half
                if options is PADDED:
                    expected = tokens
                assert expected == tokens


def is_filled_up(group: TensorParallel) -> None:
    """101 tokens are padded to 51 on each of two ranks; a bias makes all of them unlikely."""
    config = tiny_models.tiny_config("llama")
    config.vocab_size = 101
    torch.manual_seed(0)
    model: Any = type(tiny_model("llama"))(config).eval()
    tiny_models.redraw_weights(model, 0)
    head = torch.nn.Linear(config.hidden_size, 101).eval()
    with torch.no_grad():
        head.weight.copy_(model.lm_head.weight)
        head.bias.copy_(torch.linspace(-90.0, -90.5, 101))
    model.lm_head = head
    model.generation_config.eos_token_id = None
    prompts = [*MANY, [100, 3, 100]]
    expected = None if group.rank else alone(model, prompts, GREEDY)
    with engine_on(group, model, **PADDED) as engine, counting() as counts:
        if engine is not None:
            assert space_of(engine).logits.shape[1] == 51
            assert expected == said(engine.generate(prompts, GREEDY))
            assert [] == counts
    found = head_of(model)
    assert found is not None
    # Random parts with ties; column 50 of the second rank is padding, and the highest value.
    part = torch.randn((40, 51), generator=torch.Generator().manual_seed(group.rank)) - 90.0
    part[:, 50] = 0.0 if group.rank else -91.0
    part[:20, 7] = -80.0  # A tie of 7 and 58.
    assert torch.equal(found.likeliest(part), found.whole(part).argmax(-1))
    assert found.likeliest(part)[:20].tolist() == [7] * 20


def finds_again_and_again(device_type: str, group: TensorParallel) -> None:
    """A step, captured on a GPU, finds the most likely tokens of each new input."""
    device, dtype = torch.device(device_type), torch.bfloat16
    linear: Any = torch.nn.Linear(64, 1001, bias=False, device=device, dtype=dtype)
    chances = torch.Generator().manual_seed(group.rank)
    weight = torch.randint(-1, 2, (501, 64), generator=chances).to(device, dtype)
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    linear.__class__ = GatheredLinear
    names = {"_vmkv_group": group.name, "_vmkv_rank": group.rank, "_vmkv_size": group.size}
    vars(linear).update(names)
    head = DividedHead(linear)
    room = torch.zeros((40, 501), device=device, dtype=dtype)
    hidden = torch.zeros((1, 32, 64), device=device, dtype=dtype)
    token_ids = torch.zeros(32, dtype=torch.int64, device=device)

    def step() -> None:
        with head.in_part(room):
            part = linear(hidden)[0]
        assert part.data_ptr() == room.data_ptr()
        token_ids.copy_(head.likeliest(part))

    step()
    replay = step
    if device_type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            step()
        replay = graph.replay
    numbers = torch.Generator().manual_seed(7)  # The same on all ranks.
    with torch.no_grad():
        for _ in range(20):
            # Integers, which every kernel multiplies exactly, so that there are ties.
            hidden.copy_(torch.randint(-1, 2, hidden.shape, generator=numbers))
            replay()
            logits = linear(hidden)[0]
            assert logits.shape == (32, 1001)
            assert torch.equal(head.whole(room[:32]), logits)
            assert torch.equal(token_ids, logits.argmax(-1))


def _masking(of: type) -> type:
    """A class that sets some logits to -1e4, as models do that forbid some tokens."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = of.forward(self, *args, **kwargs)  # type: ignore[attr-defined]
        output.logits[..., 10:40] = -1e4
        return output

    return type(of.__name__, (of,), {"forward": forward})


def depends_on_place(group: TensorParallel) -> None:
    """The model changes some columns of the logits, so its head is not divided."""
    model: Any = copy.deepcopy(tiny_model("llama"))
    model.__class__ = _masking(type(model))
    expected = None if group.rank else alone(model, MANY, GREEDY)
    with engine_on(group, model, **PADDED) as engine:
        if engine is not None:
            space = space_of(engine)
            assert space.head is None
            assert space.logits.shape[1] == space.vocab_size
            assert expected == said(engine.generate(MANY, GREEDY))
