"""Several users of one model: they close in any order, and notice changes of the model."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.runners import EAGER, graphs
from helpers.tiny_models import tiny_model
from transformers import AttentionInterface

import vmkv
from vmkv import Engine, SamplingParams, VMKVCache
from vmkv.core.backend import BackendUsage
from vmkv.errors import ConfigError
from vmkv.hf.attention import vmkv_attention
from vmkv.hf.proof import prove
from vmkv.step import Stepper
from vmkv.step.model_guard import PACKED, attending_through, has_users

PROMPT, GREEDY = list(range(5, 30)), SamplingParams(temperature=0, max_tokens=8)
CAPTURED = graphs(compile_layers=False, capture=True, max_graph_tokens=8)
COMPILED = graphs(compile_layers=True, compile_backend="eager", capture=False)
MakeEngine = Callable[..., Engine]
RUNNERS = pytest.mark.parametrize(
    "options", [EAGER, CAPTURED, COMPILED], ids=["eager", "captured", "compiled"]
)


@pytest.fixture
def model() -> Any:
    """A model of the test, whose weights are exact in bfloat16."""
    return copy.deepcopy(tiny_model("llama", "sdpa")).to(torch.bfloat16).to(torch.float32)


@pytest.fixture
def make(model: Any) -> Iterator[Callable[..., Engine]]:
    """Make engines over the model."""
    engines: list[Engine] = []

    def engine(options: dict[str, Any]) -> Engine:
        sizes: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 32}
        engines.append(Engine(model, max_tokens=100, budget_bytes=8 << 20, **sizes, **options))
        return engines[-1]

    yield engine
    for each in engines:
        each.close()


def expected(model: Any) -> list[int]:
    """The tokens of transformers after the prompt, with an untouched copy."""
    untouched = copy.deepcopy(model)
    untouched.set_attn_implementation("sdpa")
    ids = torch.tensor([PROMPT])
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False}
    said: list[int] = untouched.generate(ids, max_new_tokens=8, **options)[
        0, len(PROMPT) :
    ].tolist()
    return said


@pytest.fixture
def wanted(model: Any) -> list[int]:
    """What engines of the model must say."""
    return expected(model)


@pytest.fixture
def engine(wanted: list[int], make: MakeEngine, options: dict[str, Any]) -> Engine:
    """An engine of the model, made after `wanted`; eager unless a test chooses another runner."""
    return make(options or EAGER)


def said_by(engine: Engine) -> list[int]:
    (output,) = engine.generate(PROMPT, GREEDY)
    return list(output.outputs[0].token_ids)


def refused_by(engine: Engine, num_tokens: int = 0) -> ConfigError:
    """The error of a request, which has `num_tokens` output tokens."""
    handle = engine.add(PROMPT, GREEDY)
    while not handle.is_finished:
        engine.step()
    (request,) = handle.requests
    assert num_tokens == len(request.output_token_ids)
    assert isinstance(request.error, ConfigError)
    return request.error


@pytest.mark.parametrize("options", [EAGER, CAPTURED], ids=["eager", "captured"])
def test_engines_over_one_model_close_in_any_order(
    model: Any, make: MakeEngine, options: dict[str, Any]
) -> None:
    """The second one's tokens do not change, and the last one restores the model."""
    wanted = expected(model)
    first, second = make(EAGER), make(options)
    assert wanted == said_by(second)
    first.close()
    assert wanted == said_by(second)
    third = make(EAGER)
    second.close()
    assert wanted == said_by(third)
    third.close()
    assert "sdpa" == model.config._attn_implementation
    assert not has_users(model)


def test_a_collected_engine_does_not_affect_the_next_one(model: Any, make: MakeEngine) -> None:
    """As when a notebook's cell is run twice; the one after that gets the first one's memory."""
    wanted = expected(model)
    engine = Engine(model, max_num_seqs=2, max_num_batched_tokens=32, max_tokens=100)
    assert wanted == said_by(engine)
    backend = engine.cache.pool.backend
    engine = make(EAGER)
    with pytest.warns(ResourceWarning, match="Engine was never closed"):
        gc.collect()
    assert wanted == said_by(engine)
    assert backend.usage().num_handles
    make(EAGER)
    assert BackendUsage() == backend.usage()
    engine.close()
    assert wanted == said_by(make(EAGER))


def test_other_users_of_the_model_do_not_affect_an_engine(model: Any, make: MakeEngine) -> None:
    """A user that begins before the engine and ends before it, and calls of `vmkv.generate`."""
    wanted = expected(model)
    with attending_through(model, PACKED):
        engine = make(EAGER)
    assert wanted == said_by(engine)
    assert wanted == vmkv.generate(model, [PROMPT], max_new_tokens=8)[0][len(PROMPT) :]
    assert wanted == said_by(engine)
    with attending_through(model, "sdpa"):
        assert "sdpa" == model.config._attn_implementation
    assert wanted == said_by(engine)


def test_models_may_share_a_configuration(model: Any, make: MakeEngine) -> None:
    """Their attention implementation is one setting; closing one engine leaves it to the other."""
    wanted, other = expected(model), copy.deepcopy(model)
    other.config = model.config
    for module in other.modules():
        if hasattr(module, "config"):
            module.config = model.config
    engine = make(EAGER)
    Engine(other, max_num_seqs=2, max_num_batched_tokens=32, max_tokens=100).close()
    assert wanted == said_by(engine)


def test_an_attention_set_by_the_user_is_kept(model: Any, make: MakeEngine) -> None:
    """Closing the engine does not undo it."""
    engine = make(EAGER)
    model.set_attn_implementation("eager")
    engine.close()
    assert "eager" == model.config._attn_implementation


@pytest.mark.parametrize("options", [EAGER, CAPTURED], ids=["eager", "captured"])
def test_compiled_layers_exclude_a_second_engine(
    model: Any, make: MakeEngine, options: dict[str, Any]
) -> None:
    """Whichever engine is the first; its tokens do not change."""
    wanted = expected(model)
    first = make(options)
    with pytest.raises(ConfigError, match="close what serves it first"):
        make(COMPILED)
    assert wanted == said_by(first)
    first.close()
    compiled = make(COMPILED)
    with pytest.raises(ConfigError, match="another runner"):
        make(options)
    assert wanted == said_by(compiled)


@pytest.mark.filterwarnings("ignore:Engine was never closed")
def test_a_collected_engine_leaves_no_compiled_layers(model: Any) -> None:
    """The model is restored and can be compiled again."""
    attributes = [set(vars(each)) for each in model.modules()]
    for _ in range(2):
        engine = Engine(
            model, max_num_seqs=2, max_num_batched_tokens=32, max_tokens=100, **COMPILED
        )
        del engine
        gc.collect()
        assert attributes == [set(vars(each)) for each in model.modules()]
        assert "sdpa" == model.config._attn_implementation


# ---- a model that changes ---------------------------------------------------------------------


@RUNNERS
def test_a_change_of_attention_is_noticed(model: Any, wanted: list[int], engine: Engine) -> None:
    """The request's error says what to call, and then the engine serves again."""
    serving = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    assert f"set_attn_implementation({serving!r})" in str(refused_by(engine))
    model.set_attn_implementation(serving)
    assert wanted == said_by(engine)
    assert 0 == engine.num_failed_steps


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (EAGER, ""),
        (EAGER, "model.layers.1"),
        (EAGER, "model.layers.0.self_attn"),
        (CAPTURED, "model.layers.0.self_attn"),
        (COMPILED, "model.norm"),
    ],
)
def test_training_mode_is_noticed(model: Any, part: str, wanted: list[int], engine: Engine) -> None:
    """The error names the module in training mode."""
    model.get_submodule(part).train()
    assert f"{part} is in training mode" in str(refused_by(engine))
    model.eval()
    assert wanted == said_by(engine)


@RUNNERS
def test_a_conversion_is_noticed(
    model: Any, wanted: list[int], engine: Engine, make: MakeEngine, options: dict[str, Any]
) -> None:
    """Eager engines serve once the model is converted back; others must be made anew."""
    model.to(torch.bfloat16)
    assert "bfloat16" in str(refused_by(engine))
    model.to(torch.float32)
    if options is EAGER:
        assert wanted == said_by(engine)
        return
    # The step of the prompt is not captured.
    assert "moved" in str(refused_by(engine, num_tokens=int(options is CAPTURED)))
    engine.close()
    assert wanted == said_by(make(options))


@pytest.mark.parametrize("options", [EAGER, CAPTURED], ids=["eager", "captured"])
def test_tokens_of_steps_before_a_change_are_kept(
    model: Any, wanted: list[int], engine: Engine
) -> None:
    """A step is checked when it is launched, so its tokens are right."""
    handle = engine.add(PROMPT, GREEDY)
    for _ in range(3):
        engine.step()
    model.layers_are_training = None  # Other attributes are not checked.
    engine.step()
    model.model.layers[1].train()
    while not handle.is_finished:
        engine.step()
    (request,) = handle.requests
    assert isinstance(request.error, ConfigError)
    said = list(request.output_token_ids)
    assert len(said) >= 3
    assert wanted[: len(said)] == said


def test_a_layer_that_does_not_attend_is_noticed(
    model: Any, wanted: list[int], engine: Engine
) -> None:
    attention = model.model.layers[1].self_attn
    attention.forward = lambda hidden_states, **_: (hidden_states, None)
    assert "layer 1 of the model attended 0 times" in str(refused_by(engine))
    del attention.forward
    assert wanted == said_by(engine)


def test_the_error_of_a_converted_module_is_explained(
    model: Any, wanted: list[int], engine: Engine
) -> None:
    """Steps do not check this module; it fails in the model."""
    model.model.layers[1].mlp.to(torch.bfloat16)
    assert "model.layers.1.mlp" in str(refused_by(engine))
    model.to(torch.float32)
    assert wanted == said_by(engine)


@pytest.mark.parametrize("change", ["train", "attention"])
def test_ragged_generation_notices_a_change_between_steps(model: Any, change: str) -> None:
    """It returns no tokens, and the next call is right."""
    wanted = expected(model)

    def processor(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == len(PROMPT) + 3:
            if change == "train":
                model.model.layers[0].train()
            else:
                model.set_attn_implementation("sdpa")
        return scores

    with pytest.raises(ConfigError, match=r"training mode|set_attn_implementation"):
        vmkv.generate(model, [PROMPT], max_new_tokens=8, logits_processor=[processor])
    model.eval()
    assert "sdpa" == model.config._attn_implementation
    assert wanted == vmkv.generate(model, [PROMPT], max_new_tokens=8)[0][len(PROMPT) :]


def test_captured_generation_does_not_replay_a_changed_model(model: Any) -> None:
    """The changed model computes the step itself."""
    wanted, ids = expected(model), torch.tensor([PROMPT])
    cache, changes = VMKVCache(model.config), list[Callable[[], Any]]()
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 8}

    def processor(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == len(PROMPT) + 3:
            changes[-1]()
        return scores

    with vmkv.capture_decoding(model) as captured:
        for change, num_captured in (
            (lambda: None, 7),
            (lambda: model.model.layers[0].train(), 3),
            (lambda: model.eval() and model.set_attn_implementation("eager"), 0),
            (lambda: model.to(torch.bfloat16).to(torch.float32), 3),
        ):
            changes.append(change)
            cache.reset()
            before = captured.num_steps
            output = model.generate(
                ids, past_key_values=cache, logits_processor=[processor], **options
            )
            assert wanted == output[0, len(PROMPT) :].tolist()
            assert num_captured == captured.num_steps - before
    cache.close()


def test_a_proof_counts_the_calls_of_each_layer(model: Any) -> None:
    """A step with more attention calls of a layer is refused."""
    assert (0, 1) == prove(model).calls.layers

    def twice(*args: Any, **kwargs: Any) -> Any:
        vmkv_attention(*args, **kwargs)
        return vmkv_attention(*args, **kwargs)

    with Engine(model, max_num_seqs=2, max_num_batched_tokens=32, max_tokens=100) as engine:
        AttentionInterface.register("vmkv", twice)
        try:
            assert "attended 2 times instead of 1" in str(refused_by(engine))
        finally:
            AttentionInterface.register("vmkv", vmkv_attention)


def test_a_stepper_without_a_proof_expects_one_call_per_layer(model: Any) -> None:
    with Engine(model, max_num_seqs=2, max_num_batched_tokens=32, max_tokens=100) as engine:
        stepper = Stepper(model, [engine.cache], 2)
        assert (0, 1) == stepper.calls
        stepper.close()
