"""The attention implementation "vmkv": right tokens for every model, in place if possible.

A spy, an attention backend registered as by a user, records the path: it is called exactly when a
layer is attended in place. Numbers are compared with `eager` over a `DynamicCache`, which is
independent of vmkv.

Not covered: GPU kernels (`tests/attention`), ragged batches (`test_ragged_generate.py`).
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from helpers import survey
from helpers.tiny_models import (
    INPUTS,
    STRATEGIES,
    VERSION,
    VOCABULARY,
    dynamic_cache,
    forward,
    generate,
    left_padded_prompt,
    model_from,
    prompt,
    tiny_model,
    tiny_shape,
)
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, DynamicCache, StaticCache, masking_utils
from transformers.masking_utils import AttentionMaskInterface

from vmkv import ConfigError, VMKVCache
from vmkv.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    Call,
    get,
    register,
    registry,
)
from vmkv.hf import attention as hf_attention
from vmkv.hf import compat
from vmkv.step.row_attention import LayerCall
from vmkv.units import MiB

NewCache = Callable[..., Any]

#: Every family that is attended in place.
IN_PLACE = (
    "llama",
    "mistral",
    "gemma2",
    "gemma3",
    "gemma3n",
    "qwen3",
    "gpt_oss",
    "mixtral",
    "phi3",
)
FAMILIES = (*IN_PLACE, "deepseek_v3")


class _Spy(AttentionBackend):
    """An attention backend that records its calls and answers with `sdpa`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.overread = 0
        self.specs: list[AttentionSpec] = []
        self.batches: list[AttentionBatch] = []
        self.windows: list[int | None] = []
        self.before_launch: Callable[[], None] = lambda: None
        self.is_busy = False

    def overread_tokens(self, spec: AttentionSpec) -> int:
        return self.overread

    def why_not(self, spec: AttentionSpec) -> str | None:
        self.specs.append(spec)
        return None

    def attend(self, call: Call) -> torch.Tensor:
        self.before_launch()
        self.batches.append(call.batch)
        self.windows.append(call.window)
        self.is_busy = True  # Excludes reads by `sdpa` from `_Questions`.
        out = get("sdpa").attend(call)
        self.is_busy = False
        return out


@pytest.fixture
def spy() -> Iterator[_Spy]:
    """A registered backend; there is no public way to unregister it."""
    spy = _Spy("spy-of-hf-attention")
    register(spy.name, lambda: spy)
    yield spy
    del registry._FACTORIES[spy.name]


def _unpadded(batch_size: int = 3) -> dict[str, Any]:
    return prompt("llama", batch_size=batch_size)


def _check_same(logits: Callable[[str], torch.Tensor]) -> None:
    """Check that attention "vmkv" gives the logits of "eager"."""
    with torch.no_grad():
        expected, actual = logits("eager"), logits("vmkv")
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def _cache(attention: str, config: Any, new_cache: NewCache, **options: Any) -> Any:
    """A cache of vmkv for attention "vmkv", of transformers for "eager"."""
    return new_cache(config, **options) if attention == "vmkv" else dynamic_cache(config)


# ---- generate ---------------------------------------------------------------------------------


@functools.cache
def _expected(name: str, kind: str, strategy: str) -> list[list[int]]:
    model = tiny_model(name, "eager")
    tokens = generate(model, INPUTS[kind](), dynamic_cache(model.config), **STRATEGIES[strategy])
    return tokens.tolist()


@pytest.mark.parametrize(
    ("name", "kind", "strategy"),
    [
        *itertools.product(FAMILIES, ["padded"], ["beams"]),
        *itertools.product(FAMILIES, ["unpadded"], ["greedy"]),
        *itertools.product(["llama", "gemma2", "gpt_oss"], ["alone", "unmasked"], ["greedy"]),
        *itertools.product(["llama", "gemma2"], ["padded"], ["sampling"]),
    ],
)
def test_generate_matches_eager_with_a_dynamic_cache(
    name: str, kind: str, strategy: str, new_cache: NewCache
) -> None:
    """Every family and decoding strategy gives the tokens of eager attention."""
    model = tiny_model(name, "vmkv")
    actual = generate(model, INPUTS[kind](), new_cache(model.config), **STRATEGIES[strategy])
    assert _expected(name, kind, strategy) == actual.tolist()


class _Masks(TorchFunctionMode):
    """Notes whether each call of SDPA has a mask, and whether it is causal without one."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[bool, bool]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.seen.append((args[3] is not None, args[5]))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["padded", "unpadded"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_pass_without_a_cache_needs_no_mask(name: str, kind: str) -> None:
    """Unless tokens are hidden, by padding or by a window: SDPA then takes its faster kernels."""
    inputs = INPUTS[kind]()
    expected = tiny_model(name)(**inputs, use_cache=False).logits
    with _Masks() as masks:
        actual = tiny_model(name, "vmkv")(**inputs, use_cache=False).logits
    needs_mask = (kind, name) != ("unpadded", "llama")
    assert {(needs_mask, not needs_mask)} == {*masks.seen}
    kept = inputs["attention_mask"].bool()
    torch.testing.assert_close(expected[kept], actual[kept])


@pytest.mark.parametrize("kind", ["padded", "unpadded"])
@pytest.mark.parametrize(
    ("name", "kind_of_cache"),
    [
        *((name, DynamicCache) for name in ("llama", "gemma2", "deepseek_v3")),
        ("llama", StaticCache),
    ],
)
def test_another_cache_matches_eager(name: str, kind_of_cache: Any, kind: str) -> None:
    """Vmkv cannot read it in place; a static one has keys past the tokens so far."""
    model = tiny_model(name, "vmkv")
    options = {"max_cache_len": 64} if kind_of_cache is StaticCache else {}
    cache = kind_of_cache(config=model.config, **options)
    actual = generate(model, INPUTS[kind](), cache, disable_compile=True)
    assert _expected(name, kind, "greedy") == actual.tolist()


@pytest.mark.parametrize(
    ("name", "kind"), [("t5", "unpadded"), ("t5", "padded"), ("whisper", "unpadded")]
)
def test_encoder_decoder_models_match_eager(name: str, kind: str, new_cache: NewCache) -> None:
    """Bidirectional, cross and biased attention use the fallback."""
    inputs = INPUTS[kind]() if name == "t5" else prompt(name, batch_size=2)
    reference, model = tiny_model(name, "eager"), tiny_model(name, "vmkv")
    expected = generate(reference, inputs, dynamic_cache(reference.config))
    for cache in (new_cache(model.config), dynamic_cache(model.config)):
        assert expected.tolist() == generate(model, inputs, cache).tolist()


@pytest.mark.parametrize(
    "parts",
    [[(0, 5, 5), (5, 6, 6), (6, 13, 13)], [(0, 6, 13)]],
    ids=["chunks", "a mask for tokens to come"],
)
@pytest.mark.parametrize("kind", ["padded", "unpadded"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_prefill_in_chunks_matches_eager(
    name: str, kind: str, parts: list[tuple[int, int, int]], new_cache: NewCache
) -> None:
    """Chunks attend to a longer past, with their part of the mask; padding is not compared."""
    inputs = INPUTS[kind]()
    ids, mask = inputs["input_ids"], inputs["attention_mask"]

    def logits(attention: str) -> torch.Tensor:
        model = tiny_model(name, attention)
        cache = _cache(attention, model.config, new_cache)
        out = [forward(model, ids[:, at:end], cache, mask[:, :until]) for at, end, until in parts]
        return torch.cat(out, 1)[mask[:, : parts[-1][1]].bool()]

    _check_same(logits)


# ---- models that pass incomplete arguments ------------------------------------------------------


@pytest.mark.parametrize("has_our_cache", [True, False])
@pytest.mark.skipif(VERSION < (5, 0), reason="4.57's Qwen2-MoE has attention of its own")
def test_a_window_is_taken_from_the_mask(has_our_cache: bool, new_cache: NewCache) -> None:
    """A sliding layer whose model does not pass `sliding_window`."""
    config = transformers.Qwen2MoeConfig(
        **tiny_shape(),
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=0,
        layer_types=["sliding_attention"] * 2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_experts=2,
        num_experts_per_tok=1,
    )

    def logits(attention: str) -> torch.Tensor:
        cache = _cache(attention if has_our_cache else "eager", config, new_cache)
        return forward(model_from(config, attention), _unpadded()["input_ids"], cache)

    _check_same(logits)


@pytest.mark.parametrize("kind", ["padded", "unpadded"])
def test_gpt2_matches_eager(kind: str, new_cache: NewCache) -> None:
    """GPT-2 passes `is_causal` according to whether its mask is already causal."""
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, eos_token_id=None
    )
    inputs = INPUTS[kind]()
    mask = inputs["attention_mask"]

    def logits(attention: str) -> torch.Tensor:
        cache = _cache(attention, config, new_cache)
        out = forward(model_from(config, attention), inputs["input_ids"], cache, mask)
        return out[mask.bool()]

    _check_same(logits)


# ---- in place, or not ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["padded", "unpadded", "alone", "unmasked"])
@pytest.mark.parametrize("name", IN_PLACE)
def test_every_layer_of_every_step_is_attended_in_place(
    name: str, kind: str, spy: _Spy, new_cache: NewCache
) -> None:
    """Prefill and decode read the rows through the chosen backend."""
    model = tiny_model(name, "vmkv")
    cache = new_cache(model.config, attention_backend=spy.name)
    generate(model, INPUTS[kind](), cache, max_new_tokens=4)
    assert len(spy.batches) == 4 * model.config.num_hidden_layers
    assert {spec.left_pad for spec in spy.specs} == {kind == "padded"}
    if kind == "padded":
        assert {tuple(batch.left_pad.tolist()) for batch in spy.batches} == {(0, 4, 9)}


def test_models_that_transform_cached_keys_are_not_attended_in_place(
    spy: _Spy, new_cache: NewCache
) -> None:
    """DeepSeek expands the keys that the cache returns (since 5.17)."""
    model = tiny_model("deepseek_v3", "vmkv")
    cache = new_cache(model.config, attention_backend=spy.name)
    generate(model, left_padded_prompt(), cache, max_new_tokens=3)
    keeps_latents = tuple(cache.layers[0].keys.shape[1::2]) == (1, 16)
    assert bool(spy.batches) != keeps_latents


def _right_padded() -> torch.Tensor:
    mask = torch.ones(3, 13, dtype=torch.long)
    mask[1, 8:] = 0
    mask[2, 12:] = 0
    return mask


def _holey() -> torch.Tensor:
    mask = left_padded_prompt()["attention_mask"]
    mask[0, 5] = 0
    mask[1, 7:9] = 0
    return mask


def _causal_but(hidden: int) -> torch.Tensor:
    mask = torch.ones(13, 13, dtype=torch.bool).tril()
    mask[hidden + 1 :, hidden] = False
    return mask[None, None].expand(3, 1, 13, 13)


def _additive(mask: torch.Tensor) -> torch.Tensor:
    zeros = torch.zeros(mask.shape)
    return zeros.masked_fill(~mask, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma2"])
@pytest.mark.parametrize("form", ["right-padded", "holey", "bool-4d", "float-4d"])
def test_other_masks_fall_back_to_the_right_numbers(
    name: str, form: str, spy: _Spy, new_cache: NewCache
) -> None:
    """Right padding, holes and 4-dimensional masks are not attended in place."""
    ids = _unpadded()["input_ids"]
    if form in ("right-padded", "holey"):
        theirs = ours = _right_padded() if form == "right-padded" else _holey()
        real = ours.bool()
    else:
        theirs = _additive(_causal_but(3))  # Eager attention needs an additive mask.
        ours = _causal_but(3) if form == "bool-4d" else theirs
        real = torch.ones_like(ids, dtype=torch.bool)
    reference, model = tiny_model(name, "eager"), tiny_model(name, "vmkv")
    with torch.no_grad():
        expected = forward(reference, ids, dynamic_cache(reference.config), theirs)
        cache = new_cache(model.config, attention_backend=spy.name)
        actual = forward(model, ids, cache, ours)
    torch.testing.assert_close(actual[real], expected[real], rtol=1e-4, atol=1e-4)
    assert not spy.batches


def test_decoding_after_right_padding_matches_eager(spy: _Spy, new_cache: NewCache) -> None:
    """Later steps do not attend to the padding in the past."""
    ids, mask = _unpadded()["input_ids"], _right_padded()

    def logits(attention: str) -> torch.Tensor:
        model = tiny_model("llama", attention)
        cache = _cache(attention, model.config, new_cache, attention_backend=spy.name)
        forward(model, ids, cache, mask)
        return forward(model, ids[:, :1], cache, torch.cat([mask, mask.new_ones(3, 1)], 1))

    _check_same(logits)
    assert not spy.batches


def _mask_of_transformers(model: Any, ids: torch.Tensor, cache: Any, **overlay: Any) -> Any:
    """The mask that the model would get from transformers, with an overlay of the caller."""
    embeddings = model.get_input_embeddings()(ids)
    parameters = inspect.signature(masking_utils.create_causal_mask).parameters
    known: dict[str, Any] = {
        "config": model.config,
        "input_embeds": embeddings,
        "inputs_embeds": embeddings,
        "attention_mask": torch.ones_like(ids),
        "past_key_values": cache,
        "cache": cache,
        "position_ids": None,
        "cache_position": torch.arange(ids.shape[1]),
    }
    arguments = {name: value for name, value in known.items() if name in parameters}
    if "inputs_embeds" in arguments:
        arguments.pop("input_embeds", None)
    return masking_utils.create_causal_mask(**arguments, **overlay)


def _sees_backwards(batch_idx: int, head_idx: int, q_idx: int, kv_idx: int) -> bool:
    """Tokens 2 to 6 see each other in both directions, as an image's tokens do."""
    return (q_idx >= 2) & (q_idx <= 6) & (kv_idx >= 2) & (kv_idx <= 6)


def _sees_no_third(batch_idx: int, head_idx: int, q_idx: int, kv_idx: int) -> bool:
    return (kv_idx != 3) | (q_idx == 3)


@pytest.mark.parametrize(
    "overlay", [{"or_mask_function": _sees_backwards}, {"and_mask_function": _sees_no_third}]
)
def test_overlays_fall_back_to_the_right_numbers(
    overlay: dict[str, Any], spy: _Spy, new_cache: NewCache
) -> None:
    """A mask that a model composes from its own functions is made in full and applied."""
    ids = _unpadded()["input_ids"]

    def logits(attention: str) -> torch.Tensor:
        model = tiny_model("llama", attention)
        cache = _cache(attention, model.config, new_cache, attention_backend=spy.name)
        mask = _mask_of_transformers(model, ids, cache, **overlay)
        assert mask.ndim == 4
        found = forward(model, ids, cache, mask)
        plain = forward(model, ids, dynamic_cache(model.config))
        assert not torch.allclose(found, plain, atol=1e-2), "the overlay changes nothing"
        return found

    _check_same(logits)
    assert not spy.batches


@pytest.mark.parametrize("kind", ["padded", "unpadded"])
def test_bidirectional_encoders_match_eager(kind: str) -> None:
    """Attention is not made causal."""
    torch.manual_seed(0)
    model = transformers.BertModel._from_config(transformers.BertConfig(**tiny_shape())).eval()
    inputs = INPUTS[kind]()

    def hidden(attention: str) -> torch.Tensor:
        model.set_attn_implementation(attention)
        return model(**inputs).last_hidden_state[inputs["attention_mask"].bool()]

    _check_same(hidden)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_packed_sequences_without_a_cache_match_eager(name: str) -> None:
    """Sequences in one row, separated by their positions, do not attend to each other."""
    ids = _unpadded(1)["input_ids"]
    positions = torch.tensor([[*range(6), *range(7)]])

    def logits(attention: str) -> torch.Tensor:
        model = tiny_model(name, attention)
        alone = model(input_ids=ids[:, 6:], use_cache=False).logits
        packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        torch.testing.assert_close(packed[:, 6:], alone, rtol=1e-4, atol=1e-4)
        return packed

    _check_same(logits)


# ---- reads from the device ----------------------------------------------------------------------

_QUESTIONS = {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero"}


class _Questions(TorchFunctionMode):
    """Counts reads of a tensor's value by code of vmkv, without those of the spy's `sdpa`."""

    def __init__(self, spy: _Spy) -> None:
        super().__init__()
        self.spy = spy
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _QUESTIONS and not self.spy.is_busy:
            caller = sys._getframe(1)
            self.count += "/vmkv/hf/" in caller.f_code.co_filename
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("layers_per_group", [1, 64])
@pytest.mark.parametrize(
    ("name", "num_masks"),
    [
        ("llama", 1),
        ("mistral", 1),
        # Sliding and full layers get separate masks.
        ("gemma2", 2),
    ],
)
def test_each_mask_is_read_once_per_step(
    name: str,
    num_masks: int,
    layers_per_group: int,
    spy: _Spy,
    new_cache: NewCache,
) -> None:
    """By all layers together."""
    model = tiny_model(name, "vmkv")
    options = {"attention_backend": spy.name, "layers_per_group": layers_per_group}
    cache = new_cache(model.config, **options)
    inputs = left_padded_prompt()
    mask = inputs["attention_mask"]
    counts = []
    with torch.no_grad():
        forward(model, inputs["input_ids"], cache, mask)
        for _ in range(4):
            mask = torch.cat([mask, torch.ones(3, 1, dtype=torch.long)], 1)
            with _Questions(spy) as questions:
                forward(model, inputs["input_ids"][:, :1], cache, mask)
            counts.append(questions.count)
    assert spy.batches  # Attended in place, and at least one read is counted:
    assert all(1 <= count <= num_masks for count in counts), counts


@pytest.mark.parametrize("undo", ["reset", "crop"])
def test_a_mask_that_is_rewritten_is_read_again(undo: str, new_cache: NewCache) -> None:
    """One tensor holds the masks of several batches of the same shape."""
    reference, model = tiny_model("llama", "eager"), tiny_model("llama", "vmkv")
    ids = _unpadded()["input_ids"]
    cache, mask = new_cache(model.config), torch.empty(ids.shape, dtype=torch.bool)
    for num_padding in (0, 3, 5):
        mask[:], mask[1, :num_padding] = True, False
        with torch.no_grad():
            expected = forward(reference, ids, dynamic_cache(reference.config), mask)
            actual = forward(model, ids, cache, mask)
        torch.testing.assert_close(actual[mask], expected[mask], rtol=1e-4, atol=1e-4)
        if undo == "reset":
            cache.reset()
        else:
            cache.crop(-ids.shape[1])


# ---- over-read ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_the_overread_is_mapped_before_each_launch(
    name: str, spy: _Spy, new_cache: NewCache
) -> None:
    spy.overread = 300
    model = tiny_model(name, "vmkv")
    cache = new_cache(model.config, attention_backend=spy.name)
    ends = []

    def check_pages() -> None:
        (core,) = cache._store.cores
        for sequence in core.live.values():
            for group in core.groups:
                table, geometry = group.table.rows[sequence.row], group.geometry
                wanted = min(sequence.num_tokens + spy.overread, geometry.row_tokens)
                assert table.first_page <= group.first_needed_page(sequence.num_tokens)
                assert table.end_page >= geometry.pages_for(wanted)
                ends.append(table.end_page)

    spy.before_launch = check_pages
    generate(model, left_padded_prompt(), cache, max_new_tokens=40)
    assert len(set(ends)) > 1  # Rows grew between launches.


def test_without_overread_no_more_is_mapped(spy: _Spy, new_cache: NewCache) -> None:
    """A cache for a kernel without over-read needs less memory."""
    model = tiny_model("llama", "vmkv")
    caches = []
    for overread in (0, 300):
        spy.overread = overread
        caches.append(new_cache(model.config, attention_backend=spy.name))
        generate(model, left_padded_prompt(), caches[-1], max_new_tokens=4)
    assert caches[0].stats().resident_bytes < caches[1].stats().resident_bytes


# ---- names --------------------------------------------------------------------------------------


def test_vmkv_is_registered_as_attention_and_as_mask() -> None:
    """Without a mask function, transformers would pass no mask."""
    hf_attention.register()  # Idempotent.
    assert AttentionInterface()["vmkv"] is hf_attention.vmkv_attention
    assert AttentionMaskInterface()["vmkv"] is hf_attention.vmkv_mask


def test_a_model_can_be_switched_back_and_forth(new_cache: NewCache) -> None:
    """By `set_attn_implementation`."""
    model = copy.deepcopy(tiny_model("llama", "eager"))
    inputs = left_padded_prompt()
    expected = _expected("llama", "padded", "greedy")
    model.set_attn_implementation("vmkv")
    assert model.config._attn_implementation == "vmkv"
    assert expected == generate(model, inputs, new_cache(model.config)).tolist()
    model.set_attn_implementation("eager")
    assert expected == generate(model, inputs, new_cache(model.config)).tolist()


def test_a_backend_that_cannot_serve_the_model_is_refused(new_cache: NewCache) -> None:
    """Flash kernels do not support float32; the error names `sdpa`."""
    model = tiny_model("llama", "vmkv")
    cache = new_cache(model.config, attention_backend="flash2")
    with pytest.raises(ConfigError, match="'sdpa' would serve it"):
        generate(model, left_padded_prompt(), cache)


# ---- plain masks --------------------------------------------------------------------------------


def _chunked() -> Any:
    padding = torch.zeros(1, dtype=torch.int32)
    return masking_utils.chunked_causal_mask_function(4, padding)


def _and_mask(batch_idx: int, head_idx: int, q_idx: int, kv_idx: int) -> bool:
    return True


def _sees_all(batch_idx: int, head_idx: int, q_idx: int, kv_idx: int) -> bool:
    return q_idx >= 0


if hasattr(masking_utils, "bidirectional_mask_function"):  # Not in 4.57.
    _sees_all = masking_utils.bidirectional_mask_function
_and_mask.__name__ = "and_mask"
_causal = masking_utils.causal_mask_function
_window = masking_utils.sliding_window_overlay(4)

NOT_PLAIN: dict[str, Any] = {
    "nothing": None,
    "a function of the caller's": _sees_backwards,
    "one that is only called like them": _and_mask,
    "chunks and something": masking_utils.and_masks(_chunked(), _sees_no_third),
    "everything": _sees_all,
    "everything within a window": masking_utils.and_masks(_window, _sees_all),
    "causal or something": masking_utils.or_masks(_causal, _sees_backwards),
    "a window or causal": masking_utils.or_masks(_window, _causal),
    "causal and something": masking_utils.and_masks(_sees_no_third, _causal),
    "a window and something": masking_utils.and_masks(
        masking_utils.sliding_window_causal_mask_function(4), _sees_no_third
    ),
    "three parts": masking_utils.and_masks(_window, _causal, _sees_no_third),
    "two windows": masking_utils.and_masks(_window, _window),
    "packed": masking_utils.and_masks(
        _causal, masking_utils.packed_sequence_mask_function(torch.zeros(1, 4, dtype=torch.long))
    ),
    "shifted": masking_utils.add_offsets_to_mask_function(_causal, 3, 0),
}


@pytest.mark.parametrize("what", NOT_PLAIN)
def test_other_masks_are_not_plain(what: str) -> None:
    """Only causal masks, in a window, in chunks or without, are plain."""
    assert compat.plain_mask(NOT_PLAIN[what]) is None


@pytest.mark.parametrize("window", [1, 4, 4096])
def test_causal_and_sliding_masks_are_plain(window: int) -> None:
    """As this release composes them; they need no tensor."""
    causal = compat.plain_mask(masking_utils.causal_mask_function)
    assert causal is not None
    assert causal.window is None
    sliding = compat.plain_mask(masking_utils.sliding_window_causal_mask_function(window))
    assert sliding is not None
    assert (window, None) == sliding
    assert (None, 4) == compat.plain_mask(_chunked())


@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 3), (3, 3), (1, 9), (3, 9)])
@pytest.mark.parametrize("window", [None, 2])
def test_the_explicit_mask_is_causal_windowed_and_padded(
    num_queries: int, num_keys: int, window: int | None
) -> None:
    """The mask of the fallback, aligned at the bottom right."""
    query, key = torch.empty(2, 1, num_queries, 1), torch.empty(2, 1, num_keys, 1)
    padding = torch.ones(2, num_keys, dtype=torch.long)
    padding[1, 0] = 0
    mask = hf_attention._explicit_mask(
        LayerCall(query, key, key, 1.0, window, mask=padding), causal=True
    )
    assert mask is not None
    for row, at, other in itertools.product(range(2), range(num_queries), range(num_keys)):
        position = num_keys - num_queries + at
        is_seen = other <= position and bool(padding[row, other])
        is_seen &= window is None or other > position - window
        assert is_seen == bool(mask[row, 0, at, other])


@pytest.mark.parametrize(
    "family",
    [
        "diffllama",  # Attends twice, to recombined values.
        "moshi",  # Has a window in its configuration, but not in its mask.
    ],
)
def test_the_arguments_of_the_model_take_precedence(family: str) -> None:
    """Over the rows and the configuration."""
    model = survey.model_or_skip(family)
    ids = torch.randint(3, 100, (1, 24), generator=torch.Generator().manual_seed(0))
    options = {"max_new_tokens": 20, "do_sample": False}
    wanted = model.generate(ids, **options)
    model.set_attn_implementation("vmkv")
    with VMKVCache(model.config, budget_bytes=64 * MiB) as cache:
        assert torch.equal(wanted, model.generate(ids, past_key_values=cache, **options))
