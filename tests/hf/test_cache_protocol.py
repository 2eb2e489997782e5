"""The interface of VMKVCache for transformers and users.

The reference for contents is `DynamicCache(config=...)` after the same calls; random tensors
stand in for a model. Whole generations are in `test_generate_parity.py`, memory over time in
`test_memory.py`.
"""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tiny_models import (
    HEADS,
    VERSION,
    WIDTH,
    WINDOW,
    append,
    assert_same_contents,
    contents,
    dynamic_cache,
    forward,
    generate,
    keys_of,
    llama_config,
    make_cache,
    model_from,
    parts_of,
    prompt,
    tiny_config,
    tiny_model,
)
from hypothesis import given
from hypothesis import strategies as st
from transformers import PretrainedConfig
from transformers.cache_utils import DynamicSlidingWindowLayer

import vmkv
from vmkv import (
    BackendUsage,
    ClosedError,
    ConfigError,
    DriverError,
    HostBackend,
    OutOfPagesError,
    RaggedCache,
    SequenceFullError,
    VMKVCache,
)
from vmkv.testing import FaultInjectingBackend
from vmkv.units import KiB

NewCache = Callable[..., Any]
RECORDS_PAST = hasattr(DynamicSlidingWindowLayer, "activate_past_recording")


def _pair(new_cache: NewCache, name: str = "llama") -> tuple[Any, Any]:
    """A cache of transformers, the reference, and one of vmkv."""
    config = tiny_config(name)
    return dynamic_cache(config), new_cache(config)


@torch.no_grad()
def _mixed_cache(new_cache: NewCache) -> Any:
    """A cache with 13 tokens in layers of attention and, behind each, of linear attention."""
    config = tiny_config("qwen3_next")
    config.layer_types = ["full_attention", "linear_attention"] * 2
    config.num_hidden_layers = 4
    cache = new_cache(config)
    forward(model_from(config), prompt("qwen3_next")["input_ids"], cache)
    return cache


def _assert_unchanged(before: list[Any], cache: Any) -> None:
    for old, new in zip(before, contents(cache), strict=True):
        assert old is new is None or all(map(torch.equal, old, new))


def _used_bytes(cache: Any, batch_size: int) -> int:
    """Bytes that the tokens of a batch need, by the documented definition."""
    length = cache.get_seq_length()
    num_kept = sum(min(length, WINDOW - 1) if sliding else length for sliding in cache.is_sliding)
    return batch_size * num_kept * 2 * HEADS * WIDTH * 4


def _mask_sizes(cache: Any, num_tokens: int, index: int) -> tuple[int, int]:
    if VERSION < (5, 4):
        start = cache.get_seq_length()
        return cache.get_mask_sizes(torch.arange(start, start + num_tokens), index)
    return cache.get_mask_sizes(num_tokens, index)


# ---- update -----------------------------------------------------------------------------------


@pytest.mark.parametrize("layers_per_group", [1, 8])
def test_update_returns_views_of_exact_length_without_copy(
    layers_per_group: int, new_cache: NewCache
) -> None:
    """Every update of a layer returns the same memory, one run longer, with unit stride last."""
    cache = new_cache(tiny_config("llama"), layers_per_group=layers_per_group)
    first = append(cache, 5, seed=1)
    second = append(cache, 1, seed=2)
    third = append(cache, 40, seed=3)
    for index, (early, late, last) in enumerate(zip(first, second, third, strict=True)):
        for before, after, at_end in zip(early, late, last, strict=True):
            assert before.shape == (2, HEADS, 5, WIDTH)
            assert after.shape == (2, HEADS, 6, WIDTH)
            assert at_end.shape == (2, HEADS, 46, WIDTH)
            assert before.data_ptr() == after.data_ptr() == at_end.data_ptr()
            assert before.stride() == at_end.stride()
            assert at_end.stride(-1) == 1
            storage = at_end.untyped_storage()
            assert storage.data_ptr() == before.untyped_storage().data_ptr()
            offset = at_end.data_ptr() - storage.data_ptr()
            assert 0 <= offset < storage.nbytes() <= cache.stats().reserved_bytes
        keys, values = last
        layer = cache.layers[index]
        assert keys.data_ptr() == layer.keys.data_ptr()
        assert values.data_ptr() == layer.values.data_ptr()
        keys[1, 1, 7, 3] = 77.0
        assert layer.keys[1, 1, 7, 3] == 77.0, "what update returned is not the cache's memory"


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_mask_sizes_are_those_of_the_next_update(name: str, new_cache: NewCache) -> None:
    """`get_mask_sizes` before an update returns the length of the updated keys."""
    expected, cache = _pair(new_cache, name)
    for seed, num_tokens in enumerate((1, 3, 2, 1, 1, 5, 12, 1)):
        sizes = [_mask_sizes(cache, num_tokens, index) for index in range(len(cache.layers))]
        assert [
            _mask_sizes(expected, num_tokens, index) for index in range(len(expected.layers))
        ] == sizes
        returned = append(cache, num_tokens, seed=seed)
        append(expected, num_tokens, seed=seed)
        assert [length for length, _ in sizes] == [keys.shape[-2] for keys, _ in returned]


def test_lengths_are_python_integers(new_cache: NewCache) -> None:
    """For every kind of layer, also after a crop by a tensor, as assisted decoding of 5.17 does."""
    cache = new_cache(tiny_config("gemma2"))
    assert cache.get_seq_length() == 0
    append(cache, 6)
    cache.crop(torch.tensor(-2))
    append(cache, 40, seed=1)
    for index in range(len(cache.layers)):
        assert type(cache.get_seq_length(index)) is int
        assert cache.get_seq_length(index) == 44


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_update_keeps_every_dtype(dtype: torch.dtype, new_cache: NewCache) -> None:
    """Arguments of other releases are ignored."""
    cache = new_cache(tiny_config("llama"))
    keys, values = keys_of(2, 6, 0, dtype=dtype), keys_of(2, 6, 1, dtype=dtype)
    returned = cache.layers[0].update(keys, values, {"cache_position": torch.arange(6)}, extra=1)
    assert dtype == returned[0].dtype == cache.layers[0].values.dtype
    assert torch.equal(keys, returned[0])
    assert torch.equal(values, returned[1])


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize(
    ("first", "second"),
    [(torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode)],
)
def test_inference_mode_and_no_grad_mix(
    name: str, first: Any, second: Any, new_cache: NewCache
) -> None:
    """A cache filled in one mode is continued, reordered and cropped in the other."""
    model = tiny_model(name)
    tokens = prompt(name, batch_size=2, num_tokens=6)["input_ids"]
    results = []
    for cache in (dynamic_cache(model.config), new_cache(model.config)):
        with first():
            forward(model, tokens[:, :4], cache)
        with second():
            cache.reorder_cache(torch.tensor([1, 0]))
            cache.crop(-1)
            forward(model, tokens[:, 4:5], cache)
        with first():
            cache.batch_repeat_interleave(2)
            logits = forward(model, tokens[:, 5:].repeat_interleave(2, dim=0), cache)
        results.append(logits.clone())
    assert torch.equal(results[0], results[1])


# ---- the interface of transformers ------------------------------------------------------------


def test_cache_is_a_dynamic_cache_of_the_installed_release(new_cache: NewCache) -> None:
    """Code that asks for DynamicCache, layer kinds or compileability gets the right answers."""
    expected, cache = _pair(new_cache, "gemma2")
    assert vmkv.VMKVCache is VMKVCache
    assert isinstance(cache, type(expected))
    assert len(expected) == len(cache)
    assert expected.is_sliding == cache.is_sliding
    assert not cache.is_compileable
    for theirs, ours in zip(expected.layers, cache.layers, strict=True):
        assert isinstance(ours, type(theirs))
        assert type(theirs) is not type(ours)
    for name in ("get_max_length", "get_max_cache_shape"):
        if hasattr(expected, name):
            assert getattr(expected, name)() == getattr(cache, name)()
    append(cache, 3)
    assert "VMKV" in repr(cache)
    assert cache.is_initialized


def test_iteration_shows_what_dynamic_cache_shows(new_cache: NewCache) -> None:
    """Iterating over the cache yields every layer's keys and values, as this release does."""
    expected, cache = _pair(new_cache, "gemma2")
    append(expected, 12)
    append(cache, 12)
    for theirs, ours in zip(list(expected), list(cache), strict=True):
        assert len(theirs) == len(ours)
        for their, our in zip(theirs, ours, strict=True):
            assert (their is None) == (our is None)
            assert their is None or torch.equal(their, our)
    if VERSION < (5, 0):  # 5.x has no indexing of caches.
        assert all(map(torch.equal, expected[1], cache[1]))
        for theirs, ours in zip(expected.to_legacy_cache(), cache.to_legacy_cache(), strict=True):
            assert all(map(torch.equal, theirs, ours))


# ---- crop -------------------------------------------------------------------------------------


@pytest.mark.parametrize("argument", [0, 5, 12, 50])
def test_crop_to_a_length_follows_the_release(argument: int, new_cache: NewCache) -> None:
    """Positive arguments mean a length until 5.17, and are refused since."""
    expected, cache = _pair(new_cache)
    for each in (expected, cache):
        append(each, 12)
    if VERSION >= (5, 20) and argument > 0:
        for each in (expected, cache):
            with pytest.raises(ValueError, match="negative"):
                each.crop(argument)
    else:
        expected.crop(argument)
        cache.crop(argument)
    assert_same_contents(expected, cache)


@pytest.mark.skipif(not RECORDS_PAST, reason="this release cannot record a window's past")
def test_crop_beyond_what_was_recorded_is_refused(new_cache: NewCache) -> None:
    """Tokens that left a window before the recording began are lost; the cache is unchanged."""
    expected, cache = _pair(new_cache, "gemma2")
    for each in (expected, cache):
        append(each, 1000)
        append(each, 500, seed=1)  # The memory of the first tokens is freed by now.
        each.activate_past_recording()
        append(each, 12, seed=2)
    with pytest.raises(RuntimeError, match="window"):
        cache.crop(-1400)
    assert_same_contents(expected, cache)
    for each in (expected, cache):
        each.crop(-12)
        append(each, 3, seed=3)
    assert_same_contents(expected, cache)


@pytest.mark.skipif(not RECORDS_PAST, reason="this release cannot record a state's past")
def test_a_crop_that_a_linear_attention_layer_refuses_changes_nothing(new_cache: NewCache) -> None:
    """Layers of transformers' own classes are cropped first."""
    cache = _mixed_cache(new_cache)
    with pytest.raises(RuntimeError, match="crop"), torch.no_grad():
        cache.crop(-2)
    assert [13, 13] == [cache.get_seq_length(index) for index in (0, 2)]


# ---- the batch --------------------------------------------------------------------------------


def _operations() -> st.SearchStrategy[list[tuple[str, Any]]]:
    step = st.one_of(
        st.tuples(st.just("append"), st.integers(1, 20)),
        st.tuples(st.just("crop"), st.integers(-6, 0)),
        st.tuples(st.just("reorder"), st.randoms(use_true_random=False)),
        st.tuples(st.just("repeat"), st.integers(1, 3)),
        st.tuples(st.just("select"), st.randoms(use_true_random=False)),
        st.tuples(st.just("copy"), st.none()),
        st.tuples(st.just("reset"), st.none()),
    )
    return st.lists(step, min_size=1, max_size=12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("records_past", [False, True])
@given(operations=_operations(), layers_per_group=st.sampled_from([1, 2, 8]))
def test_any_sequence_of_operations_matches_dynamic_cache(
    name: str, records_past: bool, operations: list[tuple[str, Any]], layers_per_group: int
) -> None:
    """After every operation, contents, lengths and errors are those of DynamicCache."""
    if records_past and not RECORDS_PAST:
        return
    config = tiny_config(name)
    backend = HostBackend(4 * KiB)
    expected = dynamic_cache(config)
    cache = make_cache(config, backend=backend, layers_per_group=layers_per_group)
    closing = [cache]
    batch_size = 2
    if records_past:
        expected.activate_past_recording()
        cache.activate_past_recording()
    try:
        for seed, (operation, argument) in enumerate([("append", 6), *operations]):
            if operation == "append":
                theirs = append(expected, argument, batch_size=batch_size, seed=seed)
                ours = append(cache, argument, batch_size=batch_size, seed=seed)
                for their, our in zip(theirs, ours, strict=True):
                    # A release may return more tokens than its mask covers: compare the last.
                    length = our[0].shape[-2]
                    assert torch.equal(their[0][:, :, -length:], our[0])
                    assert torch.equal(their[1][:, :, -length:], our[1])
            elif operation == "crop":
                if VERSION < (5, 0) and argument == 0:
                    continue  # Means "empty" there, and leaves a sliding layer half empty.
                if -argument >= expected.get_seq_length():
                    continue  # transformers' slices wrap around there.
                try:
                    expected.crop(argument)
                except (ValueError, RuntimeError) as error:
                    before = contents(cache)
                    with pytest.raises(type(error)):
                        cache.crop(argument)
                    _assert_unchanged(before, cache)
                    return  # The reference may be half cropped now.
                cache.crop(argument)
            elif operation == "reorder":
                indices = torch.tensor([argument.randrange(batch_size) for _ in range(batch_size)])
                expected.reorder_cache(indices)
                cache.reorder_cache(indices)
            elif operation == "repeat":
                if batch_size * argument > 24 or not expected.get_seq_length():
                    continue
                batch_size *= argument
                expected.batch_repeat_interleave(argument)
                cache.batch_repeat_interleave(argument)
            elif operation == "select":
                if not expected.get_seq_length():
                    continue
                chosen = [argument.randrange(batch_size) for _ in range(1 + seed % 4)]
                batch_size = len(chosen)
                expected.batch_select_indices(torch.tensor(chosen))
                cache.batch_select_indices(torch.tensor(chosen))
            elif operation == "copy":
                twin = copy.deepcopy(cache)
                closing.append(twin)
                assert_same_contents(cache, twin)
                cache = twin
            else:
                cache.reset()
                # Before 5.23 transformers' full layers keep zeros of the old length instead.
                expected = dynamic_cache(config)
                if records_past:
                    expected.activate_past_recording()
                batch_size = 1 + seed % 3
            assert_same_contents(expected, cache)
            assert expected.get_seq_length() == cache.get_seq_length()
            assert _used_bytes(cache, batch_size) == cache.stats().used_bytes
            cache.check()
        theirs = ours = their = our = None  # Views keep addresses reserved.
    finally:
        for each in closing:
            each.close()
    assert BackendUsage() == backend.usage()


@pytest.mark.parametrize("of", [torch.tensor, list, np.array])
@pytest.mark.parametrize("entries", [[True, False, False, True], [-1, 0, 0]])
def test_batch_select_accepts_what_indexes_a_tensor(
    of: Callable[..., Any], entries: list[Any], new_cache: NewCache
) -> None:
    """Masks and indices, also as lists and arrays, select entries as they do in DynamicCache."""
    expected, cache = _pair(new_cache)
    for each in (expected, cache):
        append(each, 5, batch_size=4)
        each.batch_select_indices(of(entries))
    assert_same_contents(expected, cache)


def test_batch_grows_up_to_max_batch_size(new_cache: NewCache) -> None:
    """A batch or a repetition beyond `max_batch_size` is refused and changes nothing."""
    cache = new_cache(tiny_config("llama"), max_batch_size=6)
    with pytest.raises(ConfigError, match="max_batch_size"):
        append(cache, 3, batch_size=7)
    assert cache.get_seq_length() == 0
    append(cache, 5, batch_size=2)
    cache.batch_repeat_interleave(3)
    before = contents(cache)
    with pytest.raises(ConfigError, match="max_batch_size"):
        cache.batch_repeat_interleave(2)
    _assert_unchanged(before, cache)
    append(cache, 5, batch_size=6)


@pytest.mark.skipif(VERSION < (5, 0), reason="no such model in this release")
@pytest.mark.parametrize(
    ("method", "argument"),
    [("batch_repeat_interleave", 2), ("batch_select_indices", torch.tensor([0]))],
)
def test_a_batch_that_other_layers_cannot_rearrange_is_unchanged(
    method: str, argument: Any, new_cache: NewCache
) -> None:
    """The layers of attention come first here."""
    cache = _mixed_cache(new_cache)
    with torch.no_grad():
        if all(hasattr(each, method) for each in cache.layers):
            pytest.skip("this release can")
        before = contents(cache)
        with pytest.raises(AttributeError):
            getattr(cache, method)(argument)
        _assert_unchanged(before, cache)


@pytest.mark.parametrize(
    "chosen", [torch.tensor([0, 4]), torch.tensor([-5]), torch.tensor([True] * 5)]
)
def test_entries_that_are_not_in_the_batch_are_refused(
    chosen: torch.Tensor, new_cache: NewCache
) -> None:
    """The error is DynamicCache's, and the batch is unchanged."""
    expected, cache = _pair(new_cache)
    for each in (expected, cache):
        append(each, 5, batch_size=4)
        with pytest.raises(IndexError):
            each.batch_select_indices(chosen)
    with pytest.raises(IndexError):
        cache.reorder_cache(chosen)
    assert_same_contents(expected, cache)


def test_batch_operations_on_an_empty_cache_do_nothing(new_cache: NewCache) -> None:
    """As in DynamicCache: the next update sets the batch size."""
    expected, cache = _pair(new_cache)
    for each in (expected, cache):
        if VERSION >= (5, 0):
            each.early_initialization(2, HEADS, WIDTH, torch.float32, torch.device("cpu"))
        each.batch_repeat_interleave(2)
        each.reorder_cache(torch.tensor([1, 0, 3, 2]))
        each.batch_select_indices(torch.tensor([3]))
        append(each, 5, batch_size=3)
    assert_same_contents(expected, cache)


# ---- reset and reuse --------------------------------------------------------------------------


def test_reset_parks_memory_and_reuse_adopts_it(new_cache: NewCache) -> None:
    """A second batch of the same size as the first needs no new memory and no new mapping."""
    cache = new_cache(tiny_config("llama"))
    append(cache, 100)
    before = cache.stats()
    cache.reset()
    parked = cache.stats()
    assert cache.get_seq_length() == 0
    assert parked.used_bytes == 0
    assert parked.parked_bytes == parked.resident_bytes == before.resident_bytes > 0
    append(cache, 100, seed=1)
    after = cache.stats()
    for call in ("mem_create", "mem_map", "mem_unmap", "mem_release"):
        assert before.driver_calls.get(call, 0) == after.driver_calls.get(call, 0), call
    assert after.used_bytes == before.used_bytes
    assert after.parked_bytes == 0


def test_reset_allows_another_shape_and_dtype(new_cache: NewCache) -> None:
    cache = new_cache(tiny_config("llama"))
    append(cache, 9)
    cache.reset()
    keys = torch.randn(3, 5, 4, 16).half()
    returned = cache.update(keys, keys + 1, 0)
    assert torch.equal(keys, returned[0])
    assert torch.equal(keys + 1, returned[1])


# ---- encoder-decoder --------------------------------------------------------------------------


def test_encoder_decoder_pair_is_two_virtual_caches(new_cache: NewCache) -> None:
    """`for_encoder_decoder` makes the pair that T5 needs; one part holds the encoder's keys."""
    model = tiny_model("t5")
    cache = new_cache(model.config)
    assert all(isinstance(part, VMKVCache) for part in parts_of(cache))
    generate(model, prompt("t5", batch_size=2, num_tokens=13), cache, max_new_tokens=6)
    assert cache.get_seq_length() == 6
    assert cache.cross_attention_cache.layers[0].keys.shape == (2, 4, 13, 8)
    cache.crop(-2)
    assert cache.get_seq_length() == 4


# ---- refusals ---------------------------------------------------------------------------------


_ZEROS = torch.zeros(2, HEADS, 4, WIDTH)
_REFUSED_USES: dict[str, tuple[Callable[[Any], object], str]] = {
    "pickle": (pickle.dumps, "deepcopy"),
    "save": (lambda cache: torch.save(cache, io.BytesIO()), "deepcopy"),
    "copy": (copy.copy, "deepcopy"),
    "offload": (lambda cache: cache.layers[0].offload(), "offload"),
    "offloading": (lambda _: VMKVCache(tiny_config("llama"), offloading=True), "offload"),
    "keys": (lambda cache: setattr(cache.layers[0], "keys", _ZEROS), "edit them in place"),
    "values": (lambda cache: setattr(cache.layers[0], "values", _ZEROS), "cannot be replaced"),
}


@pytest.mark.parametrize("use", _REFUSED_USES)
def test_uses_that_one_process_or_one_memory_excludes_are_refused(
    use: str, new_cache: NewCache
) -> None:
    """The memory stays in its process and place; keys may be edited in it."""
    cache = new_cache(tiny_config("llama"))
    append(cache, 4)
    before = contents(cache)
    function, match = _REFUSED_USES[use]
    with pytest.raises(ConfigError, match=match):
        function(cache)
    _assert_unchanged(before, cache)
    layer = cache.layers[0]
    layer.keys += 1
    assert torch.equal(before[0][0] + 1, layer.keys)


_REFUSED = 3
_IN_A_CHILD: dict[str, tuple[Callable[[Any], object], int]] = {
    "close": (VMKVCache.close, 0),
    "reset": (VMKVCache.reset, _REFUSED),
    "another cache": (lambda _: append(make_cache(tiny_config("llama")), 9), 0),
    "append": (lambda cache: append(cache, 1), _REFUSED),
    "trim": (VMKVCache.trim, _REFUSED),
    "copy": (copy.deepcopy, _REFUSED),
}


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("act", _IN_A_CHILD)
def test_a_forked_child_leaves_its_parents_tokens(new_cache: NewCache, act: str) -> None:
    """Both map the same memory; a child may close it and use caches of its own."""
    cache = new_cache(tiny_config("llama"), backend=HostBackend(4 * KiB))  # Closed with its pool.
    append(cache, 40)
    before = contents(cache)
    function, status = _IN_A_CHILD[act]
    child = os.fork()
    if not child:
        got = 1
        try:
            function(cache)
            got = 0
        except ConfigError as error:
            got = _REFUSED if "forked child" in str(error) else 1
        finally:
            os._exit(got)
    assert status == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    _assert_unchanged(before, cache)
    append(cache, 1)
    cache.check()


@pytest.mark.parametrize("what", ["gradients", "dtype", "device"])
def test_a_refused_update_does_not_grow_the_rows(what: str, new_cache: NewCache) -> None:
    """Otherwise the rows would be ahead of their layers and windows would free tokens too early."""
    expected, cache = _pair(new_cache, "mistral")
    keys = keys_of(2, 1000, 0)
    refused = {
        "gradients": keys.clone().requires_grad_(),
        "dtype": keys.double(),
        "device": keys.to("meta"),
    }[what]
    for each in (expected, cache):
        append(each, 20)
    before = cache.stats()
    with pytest.raises(ConfigError, match="gradient" if what == "gradients" else None):
        cache.update(refused, refused, 0)
    assert before == cache.stats()
    for seed in (1, 2):
        for each in (expected, cache):
            append(each, 1500, seed=seed)
        assert_same_contents(expected, cache)


def test_a_layer_whose_window_memory_is_freed_is_refused(new_cache: NewCache) -> None:
    """After passes that failed behind layer 0, layer 1 still needs tokens that left the window."""
    expected, cache = _pair(new_cache, "mistral")
    for num_tokens in (1500, 1):  # Passes that end behind the first layer.
        cache.update(keys_of(2, num_tokens, 0), keys_of(2, num_tokens, 1), 0)
    with pytest.raises(ConfigError, match="reset"):
        cache.update(keys_of(2, 2000, 0), keys_of(2, 2000, 1), 1)
    cache.reset()
    for each in (expected, cache):
        append(each, 30, batch_size=3)
    assert_same_contents(expected, cache)


def test_model_in_training_mode_is_refused(new_cache: NewCache) -> None:
    """The error names `no_grad` and `inference_mode`."""
    model = tiny_model("llama")
    cache = new_cache(model.config)
    with pytest.raises(ConfigError, match=r"no_grad|inference_mode"):
        forward(model, prompt("llama")["input_ids"], cache)


_Pair = tuple[torch.Tensor, torch.Tensor]
_CHANGES: dict[str, Callable[[torch.Tensor, torch.Tensor], _Pair]] = {
    "dtype": lambda keys, values: (keys.double(), values.double()),
    "values' dtype": lambda keys, values: (keys, values.half()),
    "heads": lambda keys, values: (keys[:, :1], values[:, :1]),
    "width": lambda keys, values: (keys[..., :4], values[..., :4]),
    "values' width": lambda keys, values: (keys, values[..., :4]),
    "values' length": lambda keys, values: (keys, torch.cat([values, values], dim=-2)),
    "smaller batch": lambda keys, values: (keys[:1], values[:1]),
    "larger batch": lambda keys, values: (keys.repeat(2, 1, 1, 1), values.repeat(2, 1, 1, 1)),
    "values' batch": lambda keys, values: (keys, values[:1]),
    "device": lambda keys, values: (keys.to("meta"), values.to("meta")),
    "values' device": lambda keys, values: (keys, values.to("meta")),
    "rank": lambda keys, values: (keys[0], values[0]),
}


def _changed(what: str) -> _Pair:
    return _CHANGES[what](keys_of(2, 1, 8), keys_of(2, 1, 9))


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("what", _CHANGES)
def test_tensors_that_change_between_updates_are_refused(
    what: str, layer: int, new_cache: NewCache
) -> None:
    """A layer keeps its shape, dtype and device; after the error it works as before."""
    expected, cache = _pair(new_cache)
    append(expected, 7)
    append(cache, 7)
    if layer == 1:  # The first layer has begun the step, so the second uses prepared tensors.
        for each in (expected, cache):
            each.update(keys_of(2, 1, 0), keys_of(2, 1, 1), 0)
    with pytest.raises(ConfigError):
        cache.update(*_changed(what), layer)
    assert cache.get_seq_length(layer) == 7
    assert_same_contents(expected, cache)
    for index in range(layer, len(cache)):
        for each in (expected, cache):
            each.update(keys_of(2, 1, 2 * index), keys_of(2, 1, 2 * index + 1), index)
    assert_same_contents(expected, cache)


@pytest.mark.parametrize(
    "what", ["values' dtype", "values' length", "values' batch", "device", "values' device", "rank"]
)
def test_a_first_update_with_mismatched_keys_and_values_is_refused(
    what: str, new_cache: NewCache
) -> None:
    """A valid update works afterwards."""
    cache = new_cache(tiny_config("llama"))
    with pytest.raises(ConfigError):
        cache.update(*_changed(what), 0)
    assert cache.get_seq_length() == 0
    append(cache, 5)
    assert cache.get_seq_length() == 5


_OPTIONS: list[tuple[dict[str, Any], str]] = [
    *(
        ({name: value}, name)
        for name in ("max_tokens", "max_batch_size", "budget_bytes", "layers_per_group")
        for value in (0, -1, 2.5, True, "8", float("nan"))
    ),
    ({"attention_backend": "nonesuch"}, "nonesuch"),
    *(
        ({"config": each}, r"model\.config")
        for each in (None, "meta-llama/Llama-3-8B", {"num_hidden_layers": 2}, 7)
    ),
    ({"config": PretrainedConfig()}, "layers"),
    ({"config": llama_config(max_position_embeddings=-5)}, "max_tokens"),
    ({"pool": True, "backend": "host"}, "pool"),
    ({"pool": True, "budget_bytes": 1 << 20}, "a pool has its own budget"),
]


@pytest.mark.parametrize(("options", "match"), _OPTIONS, ids=lambda value: str(value)[:60])
@pytest.mark.parametrize("kind", [VMKVCache, RaggedCache])
def test_options_that_cannot_be_served_are_refused(
    kind: Callable[..., Any], options: dict[str, Any], match: str, pool: vmkv.ExtentPool
) -> None:
    """When the cache is made; the error names the argument, and the value or what to pass."""
    options = {"config": tiny_config("llama"), **options}
    if "pool" in options:
        options["pool"] = pool
    with pytest.raises(ConfigError, match=match):
        kind(options.pop("config"), **options)


def test_budget_below_one_page_is_refused() -> None:
    """By the first update."""
    backend = HostBackend(4 * KiB)
    with VMKVCache(tiny_config("llama"), backend=backend, budget_bytes=100) as cache:
        with pytest.raises(ConfigError, match="budget_bytes"):
            append(cache, 1)
        assert cache.get_seq_length() == 0
    assert BackendUsage() == backend.usage()


# ---- capacity ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_exhausted_budget_leaves_every_sequence_at_its_length(name: str) -> None:
    """All layers keep the same length and can continue from it."""
    config = tiny_config(name)
    expected = dynamic_cache(config)
    backend = HostBackend(4 * KiB)
    with VMKVCache(config, backend=backend, budget_bytes=24 * 4 * KiB) as cache:
        append(expected, 20)
        append(cache, 20)
        with pytest.raises(OutOfPagesError) as error:
            append(cache, 3000, seed=1)
        assert isinstance(error.value, MemoryError)
        assert error.value.needed_bytes > error.value.free_bytes >= 0
        assert "budget" in str(error.value)
        assert [20] * len(cache) == [cache.get_seq_length(i) for i in range(len(cache))]
        assert_same_contents(expected, cache)
        cache.check()
        for each in (expected, cache):
            append(each, 1, seed=2)
        assert_same_contents(expected, cache)
        cache.reset()
        append(cache, 10, seed=3)
    assert BackendUsage() == backend.usage()


@pytest.mark.parametrize("layer", [0, 1])
def test_max_tokens_exceeded_leaves_the_sequence_usable(layer: int, new_cache: NewCache) -> None:
    """Tokens up to `max_tokens` still fit."""
    config = tiny_config("llama")
    expected, cache = dynamic_cache(config), new_cache(config, max_tokens=16)
    for each in (expected, cache):
        append(each, 12)
    with pytest.raises(SequenceFullError, match="max_tokens=16") as error:
        cache.update(keys_of(2, 5, 0), keys_of(2, 5, 1), layer)
    assert error.value.max_tokens == 16
    assert_same_contents(expected, cache)
    for each in (expected, cache):
        append(each, 4, seed=1)
    assert cache.get_seq_length() == 16
    assert_same_contents(expected, cache)


# ---- copies -----------------------------------------------------------------------------------


def test_deepcopy_costs_what_is_used_not_what_is_reserved(new_cache: NewCache) -> None:
    """A copy of a short sequence in a huge reservation is small."""
    cache = new_cache(tiny_config("llama"), max_tokens=1 << 18)
    append(cache, 30)
    with copy.deepcopy(cache) as twin:
        assert twin.stats().resident_bytes <= cache.stats().resident_bytes
        assert twin.stats().reserved_bytes > 100 * twin.stats().resident_bytes


def test_deepcopy_of_an_unused_cache_is_an_unused_cache(new_cache: NewCache) -> None:
    cache = new_cache(tiny_config("llama"))
    with copy.deepcopy(cache) as twin:
        append(twin, 3)
        assert twin.get_seq_length() == 3
    assert cache.get_seq_length() == 0


def test_a_failed_deepcopy_leaves_nothing_behind() -> None:
    """The copy does not fit the budget."""
    backend = HostBackend(4 * KiB)
    with VMKVCache(tiny_config("llama"), backend=backend, budget_bytes=14 * 4 * KiB) as cache:
        append(cache, 50)
        before = contents(cache)
        usage = backend.usage()
        with pytest.raises(OutOfPagesError):
            copy.deepcopy(cache)
        assert usage.num_reservations == backend.usage().num_reservations
        _assert_unchanged(before, cache)
        cache.check()
    assert BackendUsage() == backend.usage()


# ---- close ------------------------------------------------------------------------------------


_USES: dict[str, Callable[[Any], Any]] = {
    "update": lambda cache: append(cache, 1),
    "get_seq_length": lambda cache: cache.get_seq_length(),
    "keys": lambda cache: cache.layers[0].keys,
    "crop": lambda cache: cache.crop(-1),
    "reset": lambda cache: cache.reset(),
    "reorder_cache": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "batch_repeat_interleave": lambda cache: cache.batch_repeat_interleave(2),
    "batch_select_indices": lambda cache: cache.batch_select_indices(torch.tensor([0])),
    "deepcopy": copy.deepcopy,
    "trim": lambda cache: cache.trim(),
}


@pytest.mark.parametrize("use", _USES)
def test_use_after_close_is_refused(use: str, new_cache: NewCache) -> None:
    """Calls on a closed cache raise `ClosedError`; a second `close` does nothing."""
    cache = new_cache(tiny_config("gemma2"))
    append(cache, 4)
    cache.close()
    cache.close()
    assert cache.is_closed
    with pytest.raises(ClosedError):
        _USES[use](cache)


def _drop(caches: list[Any]) -> None:
    caches.clear()
    gc.collect()


@pytest.mark.parametrize("fail_at", [0, 1, 2, 3])
def test_unclosed_cache_warns_and_is_freed_by_the_next_one(
    new_cache: NewCache, fail_at: int
) -> None:
    """The destructor frees nothing; where a call fails, the next cache but one frees the rest."""
    backend = FaultInjectingBackend(HostBackend(4 * KiB))
    caches = [VMKVCache(tiny_config("llama"), backend=backend)]
    append(caches[0], 30)
    held = backend.usage()
    with pytest.warns(ResourceWarning, match="never closed"):
        _drop(caches)
    assert held == backend.usage(), "a destructor freed memory"
    if fail_at:
        backend.arm(fail_at)
        with pytest.raises(DriverError):
            VMKVCache(tiny_config("llama"))
        assert BackendUsage() != backend.usage()
    new_cache(tiny_config("llama"))
    assert BackendUsage() == backend.usage()


def test_an_unclosed_cache_with_live_views_stays_mapped(
    new_cache: NewCache,
) -> None:
    backend = HostBackend(4 * KiB)
    caches = [VMKVCache(tiny_config("llama"), backend=backend)]
    keys = append(caches[0], 30)[1][0]
    expected = keys.clone()
    with pytest.warns(ResourceWarning, match="never closed"):
        _drop(caches)
    new_cache(tiny_config("llama"))
    assert torch.equal(expected, keys)
    del keys
    new_cache(tiny_config("llama"))
    assert BackendUsage() == backend.usage()


def test_unclosed_cache_that_was_never_used_holds_nothing() -> None:
    """A cache allocates memory at its first update."""
    backend = HostBackend(4 * KiB)
    cache = VMKVCache(tiny_config("llama"), backend=backend)
    assert BackendUsage() == backend.usage()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        del cache
        gc.collect()
    assert BackendUsage() == backend.usage()
    backend.close()


def test_a_prompt_after_decoding_is_told_once(
    new_cache: NewCache, caplog: pytest.LogCaptureFixture
) -> None:
    """It continues the cache's tokens, as a chat does; a copy and an emptied cache say nothing."""
    cache = new_cache(tiny_config("llama"))
    for num_tokens in (4, 1, 1):
        append(cache, num_tokens)
    cache.reset()
    for num_tokens in (4, 3, 1):
        append(cache, num_tokens)
    with copy.deepcopy(cache) as twin:
        append(twin, 4)
    assert not caplog.records
    for num_tokens in (4, 1, 4, 1, 4):
        append(cache, num_tokens)
    (record,) = caplog.records
    assert "continue the 8 that" in record.getMessage()
