"""The proof refuses models that compute something else in packed batches.

Tests put one defect at a time into a model that is served otherwise. `test_families.py` tries real
families.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import transformers
from helpers import families
from helpers.tiny_models import VERSION, tiny_model

import vmkv
from vmkv import BackendUsage, ConfigError, HostBackend
from vmkv.hf import proof, store
from vmkv.hf.proof import prove
from vmkv.units import KiB, MiB

TYPES = [torch.float32, torch.bfloat16, torch.float16]


def _model(name: str = "llama", dtype: torch.dtype = torch.float32) -> Any:
    """A copy of a tiny model, which the test may change."""
    return copy.deepcopy(tiny_model(name)).to(dtype)


@contextmanager
def _passes(model: Any) -> Iterator[list[tuple[int, ...]]]:
    """Shapes of the inputs of the model, recorded without a hook."""
    shapes: list[tuple[int, ...]] = []

    def note(forward: Any, *args: Any, **kwargs: Any) -> Any:
        shapes.append(tuple(kwargs["input_ids"].shape))
        return forward(*args, **kwargs)

    _wrap(model.model, note)
    yield shapes
    del model.model.forward


# ---- defects ------------------------------------------------------------------------------------


def _wrap(module: Any, around: Callable[..., Any]) -> None:
    """Replace the module's forward by `around(forward, *args, **kwargs)`."""
    forward = module.forward
    module.forward = lambda *args, **kwargs: around(forward, *args, **kwargs)


def _counts_positions(model: Any) -> None:
    def around(forward: Any, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    _wrap(model.model, around)


def _has_a_mask_of_its_own(model: Any) -> None:
    def around(forward: Any, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        count = kwargs["hidden_states"].shape[1]
        mask = torch.ones(count, count, dtype=torch.bool).tril()[None, None]
        mask = torch.zeros(mask.shape, dtype=model.dtype).masked_fill(~mask, -1e4)
        return forward(*args, attention_mask=mask, **kwargs)

    _wrap(model.model.layers[1].self_attn, around)


def _attends_twice(model: Any) -> None:
    def around(forward: Any, *args: Any, **kwargs: Any) -> Any:
        forward(*args, **kwargs)
        return forward(*args, **kwargs)

    _wrap(model.model.layers[1].self_attn, around)


def _attends_by_itself(model: Any) -> None:
    def around(forward: Any, *args: Any, **kwargs: Any) -> Any:
        hidden = kwargs["hidden_states"]
        count = torch.arange(1, hidden.shape[1] + 1, dtype=hidden.dtype)[:, None]
        return hidden.cumsum(1) / count, None

    _wrap(model.model.layers[1].self_attn, around)


def _looks_at_the_token_before(model: Any) -> None:
    def around(forward: Any, hidden: torch.Tensor) -> Any:
        return forward(hidden + 0.3 * torch.nn.functional.pad(hidden, (0, 0, 1, 0))[:, :-1])

    _wrap(model.model.layers[1].mlp, around)


def _raises(model: Any) -> None:
    def around(forward: Any, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        if attention_mask is not None and attention_mask.ndim != 2:
            raise ValueError(f"a mask of {attention_mask.ndim} dimensions")
        return forward(*args, attention_mask=attention_mask, **kwargs)

    _wrap(model.model, around)


def _keeps_other_logits(model: Any) -> None:
    def around(forward: Any, *args: Any, logits_to_keep: Any = 0, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if isinstance(logits_to_keep, torch.Tensor):
            output.logits = output.logits[:, : len(logits_to_keep)]
        return output

    _wrap(model, around)


DEFECTS = {
    _counts_positions: r"packed, sequences that (go on|decode|begin)",
    _has_a_mask_of_its_own: "layer 1 attends with a mask of the model's own",
    _attends_twice: "layer 1 attends more than once in a pass",
    _attends_by_itself: r"layers \[1\] do not attend through transformers' attention interface",
    _looks_at_the_token_before: r"packed, sequences that (go on|decode|begin)",
    _raises: r"does not run on packed tokens \(ValueError: a mask of 4 dimensions\)",
    _keeps_other_logits: r"packed, sequences that (go on|decode|begin)",
}


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("spoil", DEFECTS, ids=lambda spoil: spoil.__name__.strip("_"))
def test_a_model_with_a_defect_is_refused(spoil: Any, dtype: torch.dtype) -> None:
    """By every interface that runs packed batches; the error has the reason and an alternative."""
    model = _model(dtype=dtype)
    spoil(model)
    message = f"LlamaForCausalLM cannot be served in a packed batch: .*{DEFECTS[spoil]}.*VMKVCache"
    for serve in (
        lambda: prove(model),
        lambda: vmkv.generate(model, [[5, 6, 7], [8]], max_new_tokens=2),
        lambda: model.generate(torch.tensor([[5, 6]]), custom_generate=vmkv.ragged_generate),
        lambda: vmkv.Engine(model, max_num_seqs=2, budget_bytes=MiB),
    ):
        with pytest.raises(ConfigError, match=message):
            serve()
    assert model.config._attn_implementation == "eager"


@pytest.mark.skipif(VERSION < (5, 23), reason="before 5.23 Moshi attends by itself")
def test_a_window_that_the_mask_does_not_have_is_refused() -> None:
    """Also a window longer than the proof: rows would free tokens that the mask still shows."""
    config = families.tiny_config("moshi")
    config.sliding_window = 3000
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ConfigError, match=r"layer 0 is to see 3000 tokens by .* all tokens by its"):
        prove(model)
    model = _model("mistral")
    model.config.sliding_window = 3000
    prove(model)


def test_logits_of_minus_infinity_are_equal() -> None:
    """They do not hide other differences."""

    def around(forward: Any, hidden: torch.Tensor) -> Any:
        logits = forward(hidden)
        logits[..., 10:20] = -torch.inf
        return logits

    model = _model()
    _wrap(model.lm_head, around)
    prove(model)
    model = _model()
    _wrap(model.lm_head, around)
    _keeps_other_logits(model)
    with pytest.raises(ConfigError, match="packed, sequences that"):
        prove(model)


def test_the_error_names_vmkv_cache_only_if_it_serves_the_model() -> None:
    """Mamba has no cache of keys and values."""
    config = transformers.MambaConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, state_size=4
    )
    model = transformers.MambaForCausalLM(config).eval()
    with pytest.raises(
        ConfigError, match=r"MambaForCausalLM .* use model\.generate without"
    ) as error:
        vmkv.generate(model, [[5, 6]], max_new_tokens=2)
    assert "VMKVCache" not in str(error.value)


# ---- experts at a tie ---------------------------------------------------------------------------


def _flip_experts(model: Any, share: float) -> None:
    """In packed passes, route this share of each layer's tokens to another expert."""
    if VERSION < (5, 0):
        pytest.skip("before 5.x the router is a part of the experts' code")

    def around(forward: Any, hidden: torch.Tensor) -> Any:
        logits, weights, chosen = forward(hidden)
        count = hidden.shape[0]
        if packed:
            flipped = torch.arange(count) * 7 % count < share * count
            chosen = torch.where(flipped[:, None], (chosen + 1) % model.config.num_experts, chosen)
        return logits, weights, chosen

    packed: list[bool] = []

    def begin(module: Any, arguments: Any, keywords: dict[str, Any]) -> None:
        packed[:] = [True] if keywords["input_ids"].shape[0] == 1 else []

    model.register_forward_pre_hook(begin, with_kwargs=True)
    for layer in model.model.layers:
        _wrap(layer.mlp.gate, around)


@pytest.mark.parametrize(
    ("dtype", "share", "is_refused"),
    [
        # Rounding of a coarse dtype decides the choice for a third of the tokens of each layer.
        (torch.bfloat16, 0.3, False),
        (torch.float16, 0.3, False),
        (torch.bfloat16, 0.8, True),
        (torch.float16, 0.8, True),
        (torch.float32, 0.1, True),
    ],
    ids=str,
)
def test_routers_may_choose_differently_at_ties(
    dtype: torch.dtype, share: float, is_refused: bool
) -> None:
    """Most tokens are not at a tie; in float32 none is."""
    model = _model("mixtral", dtype)
    _flip_experts(model, share)
    refused = pytest.raises(ConfigError, match="packed, sequences that")
    with refused if is_refused else nullcontext():
        prove(model)


@pytest.mark.parametrize(
    ("name", "dtype", "attention"),
    [
        *(
            (name, dtype, "eager")
            for name in ("llama", "gemma2", "gpt_oss", "mixtral", "deepseek_v3")
            for dtype in TYPES
        ),
        # Eager attention of transformers has float32 weights, whose rounding is no defect.
        *(("llama", torch.float64, attention) for attention in ("eager", "sdpa")),
    ],
    ids=str,
)
def test_served_models_pass_the_proof_in_every_dtype(
    name: str, dtype: torch.dtype, attention: str
) -> None:
    """Windows, soft-capping, sinks, experts, keys and values of different widths."""
    model = _model(name, dtype)
    model.set_attn_implementation(attention)
    prove(model)


# ---- repetition and side effects ----------------------------------------------------------------


def test_a_model_is_proven_once() -> None:
    """By all interfaces together; again for another kernel, another dtype and a copy."""
    model = _model()
    vmkv.generate(model, [[5, 6, 7]], max_new_tokens=1)
    with _passes(model) as shapes:
        prove(model)
        vmkv.generate(model, [[5, 6, 7]], max_new_tokens=1)
        assert [(1, 3)] == shapes
        shapes.clear()
        with vmkv.Engine(model, max_num_seqs=2, budget_bytes=MiB):
            assert not shapes
        prove(model, "sdpa")
        assert shapes, "the proof holds for one kernel"
        shapes.clear()
        model.bfloat16()
        prove(model)
        assert shapes
    model = copy.deepcopy(model)
    with _passes(model) as shapes:
        prove(model)
        assert shapes


def test_a_refused_model_is_proven_again() -> None:
    """The model may have been corrected."""
    model = _model()
    forward = model.model.forward
    _counts_positions(model)
    with pytest.raises(ConfigError):
        prove(model)
    model.model.forward = forward
    prove(model)


def test_a_changed_model_is_proven_again() -> None:
    """Changes: a hook that is wrong for packed batches, and a removed layer."""
    model = _model()
    prove(model)

    def steer(layer: Any, arguments: Any, hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat([hidden[:, :-1], hidden[:, -1:].flip(-1)], 1)

    handle = model.model.layers[1].register_forward_hook(steer)
    with pytest.raises(ConfigError, match="packed, sequences that"):
        prove(model)
    handle.remove()
    prove(model)
    del model.model.layers[1]
    model.config.num_hidden_layers = 1
    assert [0] == sorted(prove(model).signatures)


def test_the_proof_does_not_keep_the_model_alive() -> None:
    model = _model()
    prove(model)
    gone = weakref.ref(model)
    gc.collect()
    before = len(proof._proven)
    del model
    gc.collect()
    assert gone() is None
    assert len(proof._proven) == before - 1


@pytest.mark.parametrize(
    "spoil", [None, _raises, _counts_positions], ids=["served", "raises", "off"]
)
def test_the_proof_has_no_side_effects(spoil: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On random generators, modes, hooks, attention and memory, also if the model is refused."""
    backends: list[HostBackend] = []
    monkeypatch.setattr(
        store, "open_backend", lambda device: backends.append(HostBackend(4 * KiB)) or backends[-1]
    )
    model = _model()
    if spoil is not None:
        spoil(model)
    model.train()
    model.model.layers[1].eval()
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    modes = [module.training for module in model.modules()]
    attributes = [set(vars(module)) for module in model.modules()]
    if spoil is None:
        prove(model)
    else:
        with pytest.raises(ConfigError):
            prove(model)
    assert modes == [module.training for module in model.modules()]
    assert attributes == [set(vars(module)) for module in model.modules()]
    assert all(not module._forward_pre_hooks for module in model.modules())
    assert model.config._attn_implementation == "eager"
    assert torch.equal(expected, torch.rand(1))
    assert backends or spoil is _raises  # `_raises` fails before memory is needed.
    assert {backend.usage() for backend in backends} <= {BackendUsage()}


def test_a_model_in_training_mode_is_proven_without_dropout() -> None:
    model = _model()
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    prove(model.train())


@pytest.mark.parametrize("attention", ["eager", "sdpa", "vmkv"])
def test_the_proof_compares_with_the_models_own_attention(attention: str) -> None:
    """A model that attends through vmkv is compared with eager attention."""
    model = _model()
    model.set_attn_implementation(attention)
    seen = []

    def note(*_: Any) -> None:
        seen.append(model.config._attn_implementation)

    model.model.register_forward_pre_hook(note)
    prove(model)
    assert seen[0] == ("eager" if attention == "vmkv" else attention)
    assert {"vmkv"} == set(seen[1:])
    assert attention == model.config._attn_implementation


def test_out_of_memory_during_the_proof_is_no_refusal() -> None:
    """The error is passed on, and the next call proves the model again."""
    model = _model()

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory (played)")

    handle = model.get_input_embeddings().register_forward_hook(full)
    with pytest.raises(torch.OutOfMemoryError, match="played"):
        prove(model)
    handle.remove()
    prove(model)


def test_the_proof_does_not_compile_the_model() -> None:
    """Its shapes come only once."""
    compiled = []

    def backend(module: Any, inputs: Any) -> Any:
        compiled.append(module)
        return module.forward

    model = _model()
    model.compile(backend=backend)
    prove(model)
    assert not compiled


def test_the_proof_does_not_use_special_tokens() -> None:
    """For example padding and placeholders of images."""
    model = _model()
    model.config.image_token_id = 40
    model.config.eos_token_id = [7, 8]
    with _passes(model) as shapes:
        prove(model)
    assert shapes
    for attempt in range(3):
        tokens = set(proof._token_ids(model, attempt).flatten().tolist())
        assert not tokens & {0, 1, 7, 8, 40}
        assert len(tokens) > 60
