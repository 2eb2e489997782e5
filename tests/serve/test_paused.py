"""Training takes turns with the engine: the model is its own inside, and seen as it is after."""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.interrupts import interrupted
from helpers.runners import EAGER, PADDED, TRACED
from helpers.serving import tiny_llama, tiny_tokenizer
from helpers.tiny_models import VOCABULARY, tiny_model

from vmkv.errors import ClosedError, ConfigError, PausedError
from vmkv.serve import training_turns
from vmkv.serve.engine import Engine
from vmkv.serve.params import SamplingParams, StructuredOutputs
from vmkv.serve.request import FinishReason
from vmkv.step import joined_layers
from vmkv.step.joined_layers import SiblingLinear
from vmkv.step.model_guard import checksums_of

RUNNERS = pytest.mark.parametrize(
    "options",
    [EAGER, PADDED, pytest.param(TRACED, marks=pytest.mark.slow)],
    ids=["eager", "padded", "traced"],
)
MakeEngine = Callable[..., Engine]
#: Longer than a block of the prefix cache, which is what is looked up.
PROMPT = torch.randint(3, VOCABULARY, (40,), generator=torch.Generator().manual_seed(1)).tolist()
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "fused": functools.partial(torch.optim.AdamW, fused=True),
    "foreach": functools.partial(torch.optim.AdamW, foreach=True),
    "plain": functools.partial(torch.optim.AdamW, foreach=False),
}


@pytest.fixture
def model() -> Any:
    """A model that a test may change."""
    return copy.deepcopy(tiny_model("llama", "sdpa"))


@pytest.fixture
def engine(model: Any, make_engine: MakeEngine, options: dict[str, Any]) -> Engine:
    """An engine of the model."""
    return make_engine(model, **options)


def said_by(engine: Engine) -> list[int]:
    (output,) = engine.generate(PROMPT, GREEDY)
    return list(output.outputs[0].token_ids)


def num_cached(engine: Engine) -> int:
    (output,) = engine.generate(PROMPT, GREEDY)
    return int(output.num_cached_tokens)


def expected(model: Any) -> list[int]:
    """Tokens of transformers, with the weights as they are; call it inside `paused`."""
    untouched = copy.deepcopy(model).eval()
    ids = torch.tensor([PROMPT])
    its = {"attention_mask": torch.ones_like(ids), "do_sample": False, "use_cache": False}
    said: list[int] = untouched.generate(ids, max_new_tokens=6, **its)[0, len(PROMPT) :].tolist()
    return said


def loss_of(model: Any) -> torch.Tensor:
    ids = torch.tensor([PROMPT])
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def trained(model: Any) -> dict[str, torch.Tensor]:
    """Gradients of one batch, in training mode."""
    model.zero_grad()
    loss_of(model).backward()
    return {name: each.grad.clone() for name, each in model.named_parameters()}


def as_seen(model: Any) -> list[tuple[object, ...]]:
    """What code around a model can see of its modules."""
    return [
        (type(module), module.training, sorted(vars(module)), sorted(module._forward_pre_hooks))
        for module in model.modules()
    ]


def change(model: Any, *, moves: bool) -> None:
    """Change all weights, in place or to other addresses."""
    for each in model.parameters():
        if moves:
            each.data = each.data * -1.5
        else:
            each.data.mul_(-1.5)


def set_forward(module: Any) -> Any:
    """Wrap a module's `forward` as patches of kernels do, and return the new one."""
    own = type(module).forward

    def forward(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return own(self, hidden_states.roll(1, -1), *args, **kwargs)

    module.forward = types.MethodType(forward, module)
    return module.forward


def are_joined(model: Any) -> bool:
    return any(isinstance(each, SiblingLinear) for each in model.modules())


def run_out_of_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("no memory left")


# ---- the model's own -----------------------------------------------------------------------------


@RUNNERS
@pytest.mark.parametrize("checkpoints", [False, True], ids=["", "checkpointing"])
def test_training_gets_the_model_as_it_was(
    model: Any, make_engine: MakeEngine, options: dict[str, Any], checkpoints: bool
) -> None:
    """Attention, classes, attributes, modes and gradients, in every turn; bit for bit."""
    if checkpoints:
        model.gradient_checkpointing_enable()
    untouched = copy.deepcopy(model)
    before = as_seen(model)
    engine = make_engine(model, **options)
    with engine.paused():
        assert before == as_seen(model)
        assert "sdpa" == model.config._attn_implementation
        model.train()
        model.model.layers[0].mlp.eval()
        before = as_seen(model)
        untouched.train()
        wanted = trained(untouched)
        got = trained(model)
        assert all(torch.equal(each, got[name]) for name, each in wanted.items())
    for _ in range(2):
        assert not any(module.training for module in model.modules())
        said = said_by(engine)
        with engine.paused():
            assert before == as_seen(model)
            assert torch.is_grad_enabled()
            got = trained(model)
            assert all(torch.equal(each, got[name]) for name, each in wanted.items())
            assert expected(model) == said


@pytest.mark.slow
def test_a_training_step_may_be_compiled(model: Any, make_engine: MakeEngine) -> None:
    """Joint weights, which have no gradients, are not seen by the user's own compiler."""
    wanted = trained(copy.deepcopy(model).train())
    engine = make_engine(model, **TRACED)
    assert are_joined(model)
    with engine.paused():
        model.train()
        torch.compile(loss_of, backend="aot_eager")(model).backward()
        for name, each in model.named_parameters():
            torch.testing.assert_close(each.grad, wanted[name])


def test_other_engines_of_the_model_are_paused_too(model: Any, make_engine: MakeEngine) -> None:
    first, second = make_engine(model), make_engine(model)
    said = said_by(second)
    with first.paused(), second.paused():
        assert "sdpa" == model.config._attn_implementation
    with first.paused():
        assert said == said_by(second)
    assert said == said_by(first)


def test_an_attention_that_training_chooses_is_its_own(model: Any, engine: Engine) -> None:
    with engine.paused():
        model.set_attn_implementation("eager")
    said_by(engine)
    with engine.paused():
        assert "eager" == model.config._attn_implementation
    engine.close()
    assert "eager" == model.config._attn_implementation


# ---- what is refused -----------------------------------------------------------------------------


def test_a_paused_engine_does_not_serve(engine: Engine) -> None:
    with engine.paused():
        for use in (
            lambda: engine.add(PROMPT),
            engine.step,
            lambda: engine.generate([PROMPT]),
        ):
            with pytest.raises(PausedError, match=r"paused\(\)"):
                use()
        with pytest.raises(ConfigError, match="already"), engine.paused():
            pass
        with pytest.raises(PausedError):
            engine.step()
    assert 6 == len(said_by(engine))


def test_an_engine_with_requests_cannot_be_paused(engine: Engine) -> None:
    handle = engine.add(PROMPT, GREEDY)
    for _ in range(3):
        engine.step()
    with pytest.raises(ConfigError, match="1 requests are unfinished"), engine.paused():
        pass
    with pytest.raises(ConfigError, match="unfinished"):
        engine.weights_changed()
    engine.cancel(handle)
    with engine.paused():
        pass
    assert 6 == len(said_by(engine))


@RUNNERS
def test_checkpointing_that_comes_and_goes_needs_no_other_runner(
    model: Any, engine: Engine
) -> None:
    """It registers a hook, which makes activations require gradients."""
    said, runner = said_by(engine), engine.loop.runner
    for change in ("enable", "disable", "enable"):
        with engine.paused():
            getattr(model, f"gradient_checkpointing_{change}")()
            model.enable_input_require_grads()
            if change == "disable":
                model.disable_input_require_grads()
            trained(model.train())
        assert said == said_by(engine)
        assert runner is engine.loop.runner


def test_an_error_of_training_gives_the_model_back(engine: Engine) -> None:
    said = said_by(engine)
    with pytest.raises(ZeroDivisionError), engine.paused():
        raise ZeroDivisionError
    assert said == said_by(engine)


@RUNNERS
def test_a_model_that_cannot_be_served_any_more_stays_with_training(
    model: Any, engine: Engine
) -> None:
    said = said_by(engine)
    with pytest.raises(ConfigError, match=r"other keys and values"), engine.paused():
        model.to(torch.bfloat16).train()
    assert model.training
    with pytest.raises(PausedError):
        engine.generate(PROMPT, GREEDY)
    with engine.paused():
        model.to(torch.float32)
        wanted = expected(model)
    assert wanted == said_by(engine)
    assert said != []


@RUNNERS
def test_an_engine_can_be_closed_inside(model: Any, engine: Engine) -> None:
    with engine.paused():
        model.train()
        forward = set_forward(model.model.norm)
        engine.close()
        assert "sdpa" == model.config._attn_implementation
        assert model.training
        assert forward is vars(model.model.norm)["forward"]
    with pytest.raises(ClosedError), engine.paused():
        pass


# ---- what training changes in modules ------------------------------------------------------------


@RUNNERS
@pytest.mark.parametrize("is_layer", [False, True], ids=["norm", "layer"])
def test_a_forward_that_training_sets_stays(
    model: Any, engine: Engine, options: dict[str, Any], is_layer: bool
) -> None:
    """It is served, too, unless it is a compiled layer's."""
    plain = said_by(engine)
    module = model.model.layers[0] if is_layer else model.model.norm
    is_refused = is_layer and options is TRACED
    refused = pytest.raises(ConfigError, match="layers is wrapped")
    with refused if is_refused else contextlib.nullcontext(), engine.paused():
        forward = set_forward(module)
        wanted = expected(model)
    assert plain != wanted
    if not is_refused:
        assert wanted == said_by(engine)
    with engine.paused():
        assert forward is vars(module)["forward"]
        assert wanted == expected(model)
        if is_refused:
            del module.forward
    assert (plain if is_refused else wanted) == said_by(engine)
    engine.close()
    assert is_refused or forward is vars(module)["forward"]


@RUNNERS
def test_layers_that_training_parametrises_stay(model: Any, engine: Engine) -> None:
    """Their classes are torch's, made for each."""
    its = [layer.self_attn.q_proj for layer in model.model.layers]
    with engine.paused():
        for each in its:
            torch.nn.utils.parametrizations.weight_norm(each)
            each.parametrizations.weight.original0.data.mul_(2)
        kinds, wanted = [*map(type, its)], expected(model)
    assert wanted == said_by(engine)
    assert kinds == [*map(type, its)]
    engine.close()
    assert kinds == [*map(type, its)]
    assert wanted == expected(model)


@pytest.mark.slow
def test_a_model_that_is_refused_is_not_left_joined(model: Any, make_engine: MakeEngine) -> None:
    """With sleep mode its weights are joined, and moved, before its layers are compiled."""
    engine = make_engine(model, **TRACED, enable_sleep_mode=True)
    layer = model.model.layers[0]
    with pytest.raises(ConfigError, match="layers is wrapped"), engine.paused():
        set_forward(layer)
    assert not are_joined(model)
    with engine.paused():
        del layer.forward
        wanted = expected(model)
    assert wanted == said_by(engine)


# ---- turns that fail -----------------------------------------------------------------------------


def test_a_pause_can_be_interrupted(engine: Engine) -> None:
    """At every third bytecode; the engine serves, and can be paused again."""
    said, num_entered = said_by(engine), 0

    def pause() -> None:
        nonlocal num_entered
        with engine.paused():
            num_entered += 1

    at, is_sent = 0, True
    while is_sent:
        is_sent, is_interrupted = interrupted(
            pause, at, names={"paused", "_pause", "pause", "_leave"}
        )
        assert is_sent == is_interrupted
        assert said == said_by(engine)
        at += 3
    assert num_entered
    assert 50 < at


def test_an_error_of_the_first_look_at_weights_leaves_the_engine_serving(
    model: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that change in the next turn are noticed as ever."""
    said = said_by(engine)
    with monkeypatch.context() as patch:
        patch.setattr(training_turns, "checksums_of", run_out_of_memory)
        with pytest.raises(torch.OutOfMemoryError), engine.paused():
            pass
    assert said == said_by(engine)
    with engine.paused():
        change(model, moves=False)
        wanted = expected(model)
    assert not num_cached(engine)
    assert wanted == said_by(engine)


@pytest.mark.parametrize("moves", [False, True], ids=["", "moved"])
def test_an_error_of_the_last_look_at_weights_leaves_them_with_training(
    model: Any, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, moves: bool
) -> None:
    changed = copy.deepcopy(model)
    change(changed, moves=False)
    wanted = expected(changed)
    engine = make_engine(model)
    said_by(engine)
    looks = iter((checksums_of, run_out_of_memory))
    with monkeypatch.context() as patch:
        patch.setattr(training_turns, "checksums_of", lambda model: next(looks)(model))
        with pytest.raises(torch.OutOfMemoryError), engine.paused():
            change(model, moves=moves)
    with pytest.raises(PausedError):
        engine.step()
    with engine.paused():
        pass
    assert not num_cached(engine)
    assert wanted == said_by(engine)


@pytest.mark.slow
@pytest.mark.parametrize("sleeps", [False, True], ids=["", "sleep mode"])
def test_without_memory_no_siblings_stay_joined(
    model: Any, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, sleeps: bool
) -> None:
    """At the start, and after a turn that has moved the weights."""
    options = {**TRACED, "enable_sleep_mode": sleeps}
    join = joined_layers._join

    def join_once(*args: Any) -> None:
        run_out_of_memory() if are_joined(model) else join(*args)

    with monkeypatch.context() as patch:
        patch.setattr(joined_layers, "_join", join_once)
        with pytest.raises(torch.OutOfMemoryError):
            make_engine(model, **options)
    assert not are_joined(model)
    engine = make_engine(model, **options)
    assert are_joined(model)
    with monkeypatch.context() as patch:
        patch.setattr(joined_layers, "_join", join_once)
        with pytest.raises(torch.OutOfMemoryError), engine.paused():
            change(model, moves=True)
    assert not are_joined(model)
    with engine.paused():
        assert not are_joined(model)
        wanted = expected(model)
    assert wanted == said_by(engine)


# ---- several engines -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("closes", [False, True], ids=["left", "closed"])
def test_an_engine_that_is_made_inside_outlives_the_first(
    model: Any, make_engine: MakeEngine, closes: bool
) -> None:
    """The first one is closed inside, or cannot serve the model again."""
    first = make_engine(model, **TRACED)
    said = said_by(first)
    refused = pytest.raises(ConfigError, match="another runner already")
    with contextlib.nullcontext() if closes else refused, first.paused():
        second = make_engine(model, **TRACED)
        if closes:
            first.close()
    assert said == said_by(second)
    first.close()
    assert said == said_by(second)
    second.close()
    assert not are_joined(model)
    assert "sdpa" == model.config._attn_implementation


def test_a_model_that_another_engine_let_sleep_is_not_paused(
    model: Any, make_engine: MakeEngine
) -> None:
    """Its weights have no memory; a look at them would end the process."""
    first, second = make_engine(model, enable_sleep_mode=True), make_engine(model)
    said = said_by(second)
    first.sleep(weights=True)
    with pytest.raises(ConfigError, match="this model sleeps"), second.paused():
        pass
    first.wake()
    assert said == said_by(second) == said_by(first)


# ---- weights that change -------------------------------------------------------------------------


@RUNNERS
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_updates_are_seen(model: Any, engine: Engine, kind: str) -> None:
    """Greedy tokens after each update are those of transformers with the same weights."""
    optimizer = OPTIMIZERS[kind](model.parameters(), lr=0.05)
    runner, seen = engine.loop.runner, set()
    for _ in range(6):
        with engine.paused():
            model.train()
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
            wanted = expected(model)
        assert not num_cached(engine), "prefixes of the weights before"
        assert wanted == said_by(engine)
        seen.add(tuple(wanted))
    assert runner is engine.loop.runner, "nothing has moved"
    assert len(seen) > 2, "the updates are too small to tell"


@RUNNERS
@pytest.mark.parametrize("how", ["written", "replaced"])
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_data_that_is_set_is_seen(model: Any, engine: Engine, how: str, where: str) -> None:
    before = said_by(engine)
    if where == "outside":
        change(model, moves=how == "replaced")
        engine.weights_changed()
    with engine.paused():
        if where == "inside":
            change(model, moves=how == "replaced")
        wanted = expected(model)
    assert before != wanted
    assert not num_cached(engine)
    assert wanted == said_by(engine)


@pytest.mark.parametrize("size", [VOCABULARY + 40, VOCABULARY - 40])
def test_a_vocabulary_may_grow_or_shrink(model: Any, make_engine: MakeEngine, size: int) -> None:
    """Tokens that are new are served, and those that are gone refused."""
    engine = make_engine(model, **EAGER)
    with engine.paused():
        model.resize_token_embeddings(size, mean_resizing=False)
    (output,) = engine.generate([size - 1, 5], GREEDY)
    assert 6 == len(output.outputs[0].token_ids)
    with pytest.raises(ConfigError, match=f"vocabulary of {size}"):
        engine.generate([size, 5], GREEDY)


@RUNNERS
@pytest.mark.parametrize("how", ["written", "replaced", "attribute"])
def test_buffers_that_change_are_seen(
    model: Any, make_engine: MakeEngine, options: dict[str, Any], how: str
) -> None:
    """Frequencies of the rotary embedding, which prefixes and captured steps depend on."""
    rotary = model.model.rotary_emb
    if how == "attribute":
        rotary.inv_freq = rotary._buffers.pop("inv_freq")
    engine = make_engine(model, **options)
    before, runner = said_by(engine), engine.loop.runner
    with engine.paused():
        if how == "replaced":
            rotary.inv_freq = rotary.inv_freq * 0.25
        else:
            rotary.inv_freq.mul_(0.25)
        wanted = expected(model)
    assert before != wanted
    assert not num_cached(engine)
    assert wanted == said_by(engine)
    assert (how == "replaced") == (runner is not engine.loop.runner)


def test_settings_of_the_configuration_are_seen(model: Any, engine: Engine) -> None:
    """Some models read them in `forward`; whether a cache is wanted is for steps to say."""
    for setting, is_seen in ({"use_cache": False}, False), ({"final_logit_softcapping": 3.0}, True):
        said_by(engine)
        runner = engine.loop.runner
        with engine.paused():
            vars(model.config).update(setting)
        assert is_seen == (runner is not engine.loop.runner)
        assert is_seen == (not num_cached(engine))


def test_end_tokens_that_change_are_seen(make_engine: MakeEngine) -> None:
    """By requests and by grammars; an impossible one leaves the model with training."""
    model = copy.deepcopy(tiny_llama())
    engine = make_engine(model, tokenizer=tiny_tokenizer())
    form = SamplingParams(structured_outputs=StructuredOutputs(choice=["ab"]), max_tokens=9)
    said = said_by(engine)
    engine.generate(PROMPT, form)
    with pytest.raises(ConfigError, match="eos_token_id"), engine.paused():
        model.generation_config.eos_token_id = "</s>"
    with engine.paused():
        model.generation_config.eos_token_id = said[2]
    assert said[: said.index(said[2]) + 1] == said_by(engine)
    (guided,) = engine.generate(PROMPT, form)
    assert said[2] == guided.outputs[0].token_ids[-1]
    assert FinishReason.STOP is guided.outputs[0].finish_reason
    assert guided.outputs[0].text.endswith("ab")


@RUNNERS
def test_weights_that_have_moved_are_seen_after_a_sleep(model: Any, engine: Engine) -> None:
    said_by(engine)
    with engine.paused():
        change(model, moves=True)
        engine.sleep(graphs=True)
        wanted = expected(model)
    assert wanted == said_by(engine)


def test_prefixes_of_unchanged_weights_are_kept(model: Any, engine: Engine) -> None:
    said_by(engine)
    with engine.paused():
        trained(model.train())
    assert num_cached(engine)


def test_forgotten_prefixes_leave_their_memory(engine: Engine) -> None:
    said_by(engine)
    assert num_cached(engine)
    before = engine.cache.pool.stats()
    engine.weights_changed()
    assert before.resident_bytes == engine.cache.pool.stats().resident_bytes > 0
    engine.cache.check()
    assert not num_cached(engine)
    assert before.created_bytes == engine.cache.pool.stats().created_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_checksum_sees_a_change_of_any_column(dtype: torch.dtype) -> None:
    """Samples of a large matrix are spread over its columns; of a small one they are all."""
    small, large = torch.nn.Linear(16, 16), torch.nn.Linear(4096, 512, bias=False)
    both = torch.nn.ModuleList([small, large]).to(dtype)
    before = checksums_of(both)
    assert before == checksums_of(both)
    for place in range(0, 256, 17):
        changed = copy.deepcopy(both)
        changed[0].weight.data.view(-1)[place] += 1
        assert sum(a != b for a, b in zip(before, checksums_of(changed), strict=True)) == 1
    for column in (0, 1, 777, 4095):
        changed = copy.deepcopy(both)
        changed[1].weight.data[:, column] += 1
        assert sum(a != b for a, b in zip(before, checksums_of(changed), strict=True)) == 1


# ---- adapters ------------------------------------------------------------------------------------


@RUNNERS
def test_adapters_are_seen(model: Any, make_engine: MakeEngine, options: dict[str, Any]) -> None:
    """Attached, trained, merged, unmerged, disabled, and removed, while the engine stays."""
    peft = pytest.importorskip("peft")
    engine = make_engine(model, **options)
    plain = said_by(engine)
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False
    )
    seen: list[list[int]] = []

    def check() -> None:
        assert not num_cached(engine)
        assert seen[-1] == said_by(engine)

    with engine.paused():
        adapted = peft.get_peft_model(model, config)
        seen.append(expected(model))
    check()
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], 0.1)
    with engine.paused():
        adapted.train()
        loss_of(model).backward()
        optimizer.step()
        seen.append(expected(model))
    check()
    for change in ("merge_adapter", "unmerge_adapter", "unload"):
        runner = engine.loop.runner
        with engine.paused():
            getattr(adapted, change)()
            seen.append(expected(model))
        check()
        assert runner is not engine.loop.runner, "captured steps would add a merged adapter again"
    assert plain == seen[-1]
    assert len({*map(tuple, seen)}) >= 3


@RUNNERS
def test_adapters_that_are_merged_and_disabled_are_taken_out(
    model: Any, make_engine: MakeEngine, options: dict[str, Any]
) -> None:
    """As the model's next call would, which changes weights; also within `paused()`."""
    peft = pytest.importorskip("peft")
    plain = expected(model)
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False
    )
    adapted = peft.get_peft_model(model, config).eval()
    with_adapter = expected(model)
    assert plain != with_adapter
    adapted.merge_adapter()
    adapted.base_model.disable_adapter_layers()
    engine = make_engine(model, **options)
    assert plain == said_by(engine)
    with engine.paused():
        adapted.base_model.enable_adapter_layers()
        adapted.merge_adapter()
    assert with_adapter == said_by(engine)
    with engine.paused():
        adapted.base_model.disable_adapter_layers()
    assert plain == said_by(engine)
