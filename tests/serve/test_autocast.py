"""Models in float32 under autocast: rows are of the type that attention computes in."""

from __future__ import annotations

import contextlib
import copy
import itertools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.runners import EAGER, PADDED, TRACED
from helpers.tiny_models import VOCABULARY, tiny_model
from torch._dynamo.utils import counters
from torch.nn.functional import linear

from vmkv.errors import ConfigError
from vmkv.serve.engine import Engine
from vmkv.serve.params import SamplingParams
from vmkv.step import graphs, stepper

MakeEngine = Callable[..., Engine]
RUNNERS = {"eager": EAGER, "padded": PADDED, "traced": TRACED}
ASKED = SamplingParams(max_tokens=8, temperature=0.0, logprobs=VOCABULARY)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in (5, 21, 33)]


def wrapped(model: Any) -> Any:
    """A model as accelerate prepares it: its `forward` computes under autocast."""
    forward = torch.autocast("cpu", torch.bfloat16)(type(model).forward)
    model.forward = types.MethodType(forward, model)
    return model


def check_tokens(model: Any, engine: Engine) -> None:
    """Each token is as likely as to a pass of the model over the whole sequence."""
    for prompt, output in zip(prompts(), engine.generate(prompts(), ASKED), strict=True):
        completion = output.outputs[0]
        assert "length" == completion.finish_reason
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        wanted = logits.log_softmax(-1)
        assert completion.logprobs is not None
        for row, entry in zip(wanted, completion.logprobs, strict=True):
            got = torch.tensor([entry.top[at] for at in range(VOCABULARY)])
            # Some units in the last place of bfloat16, of logits up to 20.
            assert (got - row).abs().mean() < 0.1
            assert row.max() - row[entry.token_id] < 0.5


@pytest.mark.parametrize("way", ["around", "wrapped"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *itertools.product(("llama", "qwen3", "gemma3", "gpt_oss"), ("eager", "padded")),
        # Not gpt_oss: rounded otherwise, its router may choose another expert.
        *(
            pytest.param(name, "traced", marks=pytest.mark.slow)
            for name in ("llama", "qwen3", "gemma3")
        ),
    ],
)
def test_a_model_in_float32_is_served_under_autocast(
    make_engine: MakeEngine, name: str, way: str, options: str
) -> None:
    """Autocast is around the engine when it is made, or in the model's `forward`."""
    model = copy.deepcopy(tiny_model(name))
    around: Any = torch.autocast("cpu", torch.bfloat16)
    if way == "wrapped":
        wrapped(model)
        around = contextlib.nullcontext()
    with around:
        engine = make_engine(model, **RUNNERS[options])
    assert {torch.bfloat16} == {group.dtype for group in engine.cache.groups}
    with engine.paused():
        plain = copy.deepcopy(model)
    check_tokens(plain, engine)
    with around, engine.paused():
        ids = torch.tensor([prompts()[1]])
        model.train()(input_ids=ids, labels=ids).loss.backward()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.step()
        plain = copy.deepcopy(model).eval()
    check_tokens(plain, engine)


@pytest.mark.parametrize("options", ["eager", "traced"])
def test_adapters_in_float32_are_served_under_autocast(
    make_engine: MakeEngine, options: str
) -> None:
    """Compiled layers read copies of them, which are renewed after training and when told.

    While training has the model, the copies are freed with the graphs.
    """
    peft = pytest.importorskip("peft")
    model = copy.deepcopy(tiny_model("llama")).to(torch.bfloat16)
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).eval()
    adapters = [each for each in model.parameters() if each.requires_grad]
    assert {torch.float32} == {each.dtype for each in adapters}
    with torch.autocast("cpu", torch.bfloat16):
        engine = make_engine(model, **RUNNERS[options])
    seen: list[list[int]] = []

    def check() -> None:
        seen.append(engine.generate(prompts(), ASKED)[2].outputs[0].token_ids)
        with engine.paused():
            plain = copy.deepcopy(model)
        check_tokens(plain, engine)

    check()
    with torch.autocast("cpu", torch.bfloat16), engine.paused():
        ids = torch.tensor([prompts()[1]])
        adapted.train()(input_ids=ids, labels=ids).loss.backward()
        torch.optim.SGD(adapters, lr=1.0).step()
    check()
    runner, num_graphs = engine.loop.runner, counters["stats"]["unique_graphs"]
    for _ in range(2):
        with engine.paused():
            engine.sleep(graphs=True)
            for each in model.parameters():
                assert each.untyped_storage().nbytes() == each.numel() * each.itemsize
            adapters[-1].data.mul_(-1)
        check()
    assert runner is engine.loop.runner
    assert num_graphs == counters["stats"]["unique_graphs"], "layers were compiled again"
    for each in adapters:
        each.data = each.data.flip(0)
    engine.weights_changed()
    check()
    for first in adapters[::2]:
        first.data.mul_(-1)
    engine.weights_changed()
    check()
    assert len({*map(tuple, seen)}) == len(seen) - 1


@pytest.mark.parametrize(("call", "at"), [("cat", 1), ("cat", 3), ("clone", 1), ("clone", 4)])
def test_memory_that_runs_out_leaves_the_model_to_training(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, call: str, at: int
) -> None:
    """Where copies of adapters are freed or made again; the engine goes on after another pause."""
    peft = pytest.importorskip("peft")
    model = copy.deepcopy(tiny_model("llama")).to(torch.bfloat16)
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).eval()
    own = [type(each) for each in model.modules()], model.config._attn_implementation
    with torch.autocast("cpu", torch.bfloat16):
        engine = make_engine(model, **RUNNERS["traced"])
    runner, owner = engine.loop.runner, torch if call == "cat" else torch.Tensor
    real, calls = getattr(owner, call), itertools.count(1)

    def short(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == at:
            raise torch.OutOfMemoryError
        return real(*args, **kwargs)

    def check_own() -> None:
        assert own == ([type(each) for each in model.modules()], model.config._attn_implementation)
        adapted.zero_grad()
        ids = torch.tensor([prompts()[1]])
        adapted.train()(input_ids=ids, labels=ids).loss.backward()
        assert all(each.grad is not None for each in model.parameters() if each.requires_grad)

    def turn() -> None:
        with engine.paused():
            if call == "clone":
                monkeypatch.setattr(owner, call, short)
            engine.sleep(graphs=True)
            monkeypatch.setattr(owner, call, short)

    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(torch.OutOfMemoryError):
            turn()
        monkeypatch.undo()
        if call == "cat":
            check_own()
        with engine.paused():
            check_own()
            plain = copy.deepcopy(model).eval()
    check_tokens(plain, engine)
    assert (runner is engine.loop.runner) == (at == 1), "weights have moved unnoticed"


@pytest.mark.parametrize("options", ["eager", "padded"])
def test_a_large_head_is_converted_in_slices(
    make_engine: MakeEngine, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven of them here, of which the last is smaller; the head is as before afterwards."""
    model = copy.deepcopy(tiny_model("llama"))
    plain, (size, width) = copy.deepcopy(model), model.lm_head.weight.shape
    monkeypatch.setattr(stepper, "_SLICE_BYTES", 2 * width * -(-size // 7))
    seen: list[int] = []
    monkeypatch.setattr(stepper, "linear", lambda *its: seen.append(len(its[1])) or linear(*its))
    take, copied = graphs.GraphSpace.take, []

    def note(self: Any, logits: torch.Tensor, slots: torch.Tensor) -> None:
        copied.append(logits.data_ptr() != self.logits.data_ptr())
        take(self, logits, slots)

    monkeypatch.setattr(graphs.GraphSpace, "take", note)
    with torch.autocast("cpu", torch.bfloat16):
        engine = make_engine(model, **RUNNERS[options])
    seen.clear()
    check_tokens(plain, engine)
    assert size == sum(seen[:7])
    assert max(seen) == -(-size // 7)
    assert "forward" not in vars(model.lm_head)
    assert (options == "padded") == bool(copied)
    assert not any(copied), "captured steps compute logits where they are kept"


@pytest.mark.parametrize("options", RUNNERS)
def test_weights_converted_by_autocast_are_not_kept(make_engine: MakeEngine, options: str) -> None:
    """As TRL has it: autocast in the model's `forward`, which keeps conversions, and around it."""
    model = wrapped(copy.deepcopy(tiny_model("llama")))
    with torch.autocast("cpu", torch.bfloat16):
        engine = make_engine(model, **RUNNERS[options])
        before = [each.outputs[0].token_ids for each in engine.generate(prompts(), ASKED)]
        with engine.paused(), torch.no_grad():
            for parameter in model.parameters():
                assert parameter.requires_grad
                parameter.copy_(parameter.flip(0))
            plain = copy.deepcopy(model)
        after = [each.outputs[0].token_ids for each in engine.generate(prompts(), ASKED)]
    assert before != after
    check_tokens(plain, engine)
    del plain.forward
    with torch.autocast("cpu", torch.bfloat16):
        fresh = make_engine(plain, **RUNNERS[options])
        assert after == [each.outputs[0].token_ids for each in fresh.generate(prompts(), ASKED)]


def test_an_engine_keeps_the_autocast_it_was_made_in(make_engine: MakeEngine) -> None:
    """Whatever surrounds a step, since rows are of one type."""
    engine = make_engine(prefix_caching=False)
    plain = [each.outputs[0].token_ids for each in engine.generate(prompts(), ASKED)]
    with torch.autocast("cpu", torch.bfloat16):
        again = [each.outputs[0].token_ids for each in engine.generate(prompts(), ASKED)]
        cast = make_engine(prefix_caching=False)
        inside = cast.generate(prompts(), ASKED)
    assert plain == again
    outside = cast.generate(prompts(), ASKED)
    assert [each.outputs for each in inside] == [each.outputs for each in outside]
    assert torch.float32 == engine.cache.groups[0].dtype


def test_a_forward_that_is_wrapped_later_is_proven_again(
    make_engine: MakeEngine,
) -> None:
    model = copy.deepcopy(tiny_model("llama"))
    engine = make_engine(model)
    with pytest.raises(ConfigError, match="other keys and values"), engine.paused():
        wrapped(model)
    with engine.paused():
        del model.forward
    assert 3 == len(engine.generate(prompts(), ASKED))
