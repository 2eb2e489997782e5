"""`vmkv.generate` with prefix caching: common prefixes are computed once, with exact results.

The reference is `model.generate` of the same eager model, one prompt at a time, on a
`DynamicCache`. Tests count tokens at the model's input. All memory comes from one pool of host
pages, whose books are checked when each test ends.

Not covered: the passes (`test_prefill_passes.py`), the index (`tests/cache/test_prefix.py`),
ragged batches without common prefixes (`test_ragged_generate.py`).
"""

from __future__ import annotations

import copy
import functools
import gc
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.ragged import FAMILIES, Collects, alone, random_tokens
from helpers.tiny_models import redraw_weights, tiny_model
from transformers import LogitsProcessor, LogitsProcessorList

import vmkv
from vmkv import ClosedError, ConfigError, ExtentPool, HostBackend, RaggedCache
from vmkv.core.cache.prefix import BLOCK_TOKENS
from vmkv.hf.proof import prove
from vmkv.hf.store import Store
from vmkv.units import KiB, MiB

NEW_TOKENS = 6
SYSTEM_TOKENS = 410  # More than a window of 8, the tokens kept before it, and a page.
SHARED_TOKENS = SYSTEM_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS


SYSTEM = random_tokens(SYSTEM_TOKENS, 0)
PROMPTS = [SYSTEM + random_tokens(count, count) for count in (13, 3, 30, 7, 21)]
STRANGER = random_tokens(40, 99)


_options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
_alone = functools.partial(alone, **_options)
_generate = functools.partial(vmkv.generate, **_options)


def _assert_exact(model: Any, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    actual = _generate(model, prompts, **options)
    assert [_alone(model, prompt) for prompt in prompts] == actual
    return actual


NewCache = Callable[..., RaggedCache]


@pytest.fixture
def new_cache(pool: ExtentPool) -> Iterator[NewCache]:
    """Make caches over the pool; check and close them at the end."""
    made = []

    def make(model: Any, **options: Any) -> RaggedCache:
        made.append(RaggedCache(model.config, pool=pool, **options))
        return made[-1]

    yield make
    for cache in made:
        if not cache.store.is_closed:
            cache.check()
            assert cache.stats().num_sequences == 0
        cache.close()


@contextmanager
def _passes(model: Any) -> Iterator[list[int]]:
    """Number of tokens of each pass through the model, after the proof."""
    sizes: list[int] = []

    def note(module: Any, arguments: Any, keywords: dict[str, Any]) -> None:
        sizes.append(keywords["input_ids"].numel())

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    prove(model)
    sizes.clear()
    yield sizes
    handle.remove()


def _num_prefilled(sizes: list[int], num_prompts: int) -> int:
    """Number of prompt tokens that went through the model."""
    return sum(sizes) - num_prompts * (NEW_TOKENS - 1)


def _llama(new_cache: NewCache) -> tuple[Any, RaggedCache]:
    model = tiny_model("llama")
    return model, new_cache(model)


def _assert_computed(num_tokens: int, model: Any, prompts: list[list[int]], **options: Any) -> None:
    """Check that a call is exact, and how many tokens of its prompts go through the model."""
    expected = [_alone(model, prompt) for prompt in prompts]
    with _passes(model) as sizes:
        assert expected == _generate(model, prompts, **options)
    assert num_tokens == _num_prefilled(sizes, len(prompts))


# ---- within a call ------------------------------------------------------------------------------


@pytest.mark.parametrize("max_num_batched_tokens", [8192, 150])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_common_system_prompt_is_computed_once(
    name: str, max_num_batched_tokens: int, pool: ExtentPool
) -> None:
    """In whole blocks of 16; everything else, and a prompt without it, is computed in full."""
    model = tiny_model(name)
    prompts = [*PROMPTS[:2], STRANGER, *PROMPTS[2:]]
    expected = [_alone(model, prompt) for prompt in prompts]
    options = {"pool": pool, "max_num_batched_tokens": max_num_batched_tokens}
    with _passes(model) as sizes:
        assert expected == _generate(model, prompts, **options)
    once = sum(map(len, prompts)) - (len(PROMPTS) - 1) * SHARED_TOKENS
    assert once == _num_prefilled(sizes, len(prompts))
    assert max(sizes) <= max_num_batched_tokens


@pytest.mark.parametrize(
    ("prompts", "passes"),
    [
        # An extra pass would cost more than the shared tokens, so all prompts run together.
        (
            [random_tokens(BLOCK_TOKENS, 1) + random_tokens(5, seed) for seed in range(4)],
            [4 * (BLOCK_TOKENS + 5), *[4] * (NEW_TOKENS - 1)],
        ),
        # The last token of each prompt gives its logits, so the block with it is computed.
        ([SYSTEM[:96]] * 6, [96, 5 * BLOCK_TOKENS, *[6] * (NEW_TOKENS - 1)]),
    ],
    ids=["few shared tokens", "equal prompts"],
)
def test_passes_over_prompts_with_common_tokens(
    prompts: list[list[int]], passes: list[int], pool: ExtentPool
) -> None:
    model = tiny_model("llama")
    expected = [_alone(model, prompt) for prompt in prompts]
    with _passes(model) as sizes:
        assert expected == _generate(model, prompts, pool=pool)
    assert passes == sizes


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "gpt_oss"])
def test_sharing_saves_memory(name: str, new_cache: NewCache) -> None:
    """The system prompt is resident once, because its extents are mapped into each row."""
    model = tiny_model(name)
    expected = [_alone(model, prompt) for prompt in PROMPTS]
    # Makes aliases of one page cheaper than copies.
    cost = vmkv.CostModel(map_us=0.0, unmap_us=0.0)
    most = {}
    for prefix_caching in (True, False):
        cache = new_cache(model)
        _generate(model, PROMPTS[:1], cache=cache, max_new_tokens=1)
        cache.store.cores[0].cost_model = cost
        cache.trim()
        assert expected == _generate(model, PROMPTS, cache=cache, prefix_caching=prefix_caching)
        most[prefix_caching] = cache.stats().resident_bytes
        assert (cache.stats().sharing.aliased_bytes > 0) == prefix_caching
        cache.check()
        cache.close()
    # Sliding layers keep part of each prompt, and each fork copies a tail.
    assert most[True] < most[False] * (0.8 if cache.has_windows else 0.5)


# ---- prefix_caching=False -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_without_prefix_caching_all_prompts_are_computed(name: str, new_cache: NewCache) -> None:
    """Such calls neither find prefixes nor leave any."""
    model = tiny_model(name)
    cache, whole = new_cache(model), sum(map(len, PROMPTS))
    for _ in range(2):
        _assert_computed(whole, model, PROMPTS, cache=cache, prefix_caching=False)
    assert cache.stats().num_prefix_hits == cache.stats().num_prefix_misses == 0
    _assert_computed(whole - 4 * SHARED_TOKENS, model, PROMPTS, cache=cache)
    stats = cache.stats()
    assert (stats.num_prefix_hits, stats.num_prefix_misses) == (4, 1)
    assert stats.num_prefix_hit_tokens == 4 * SHARED_TOKENS
    _assert_computed(whole, model, PROMPTS, cache=cache, prefix_caching=False)


# ---- across calls -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_repeated_calls_compute_the_system_prompt_once(name: str, new_cache: NewCache) -> None:
    """With sliding layers, at most once per call."""
    model = tiny_model(name)
    cache = new_cache(model)
    _generate(model, PROMPTS[:1], cache=cache)
    for turn in range(3):
        prompts = [SYSTEM + random_tokens(9, 100 + 10 * turn + at) for at in range(4)]
        expected = [_alone(model, prompt) for prompt in prompts]
        with _passes(model) as sizes:
            assert expected == _generate(model, prompts, cache=cache)
        num_passes, num_found = len(sizes) - (NEW_TOKENS - 1), 4 * SHARED_TOKENS
        if cache.has_windows and num_passes == 2:
            # The windows have passed the end of the system prompt.
            num_found = 3 * SHARED_TOKENS
        else:
            assert num_passes == 1
        assert sum(map(len, prompts)) - num_found == _num_prefilled(sizes, 4)
        cache.check()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_continued_conversation_computes_only_its_new_tokens(
    name: str, new_cache: NewCache
) -> None:
    """Turn after turn, in the same row, with other conversations in between."""
    model = tiny_model(name)
    cache = new_cache(model)
    said = _assert_exact(model, [STRANGER, PROMPTS[0]], cache=cache)
    hits = 0
    for turn in range(3):
        prompts = [tokens + random_tokens(5, turn) for tokens in said]
        expected = [_alone(model, prompt) for prompt in prompts]
        with _passes(model) as sizes:
            said = _generate(model, prompts, cache=cache)
        assert said == expected
        hits, before = cache.stats().num_prefix_hits, hits
        # All tokens but the last were computed, and their whole blocks are found.
        known = [(len(prompt) - 6) // BLOCK_TOKENS * BLOCK_TOKENS for prompt in prompts]
        # In the longer conversation a window may have passed the end of the last whole block.
        found = known[: hits - before] if cache.has_windows else known
        assert found
        assert sum(map(len, prompts)) - sum(found) == _num_prefilled(sizes, 2)
        assert cache.stats().sharing.num_forks == 0, "a conversation was forked to another row"
        _generate(model, [random_tokens(50, 7 + turn)], cache=cache, tenant="another")
        cache.check()


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_adopting_a_conversation_makes_no_driver_call(name: str, new_cache: NewCache) -> None:
    """The row is adopted; while its last page has room, nothing is mapped."""
    model = tiny_model(name)
    cache = new_cache(model)
    (said,) = _generate(model, [STRANGER], cache=cache)  # 45 tokens; a page holds 32.
    before = cache.stats()
    (said,) = _generate(model, [[*said, 5, 6, 7]], cache=cache)
    assert len(said) == 55
    calls, calls_before = (
        # Without the fences of the checks on submitted steps.
        {name: count for name, count in each.driver_calls.items() if name != "record_fence"}
        for each in (cache.stats(), before)
    )
    assert calls == calls_before
    assert cache.stats().resident_bytes == before.resident_bytes
    assert cache.stats().num_prefix_hit_tokens == 32


def test_another_tenant_never_gets_old_bytes() -> None:
    """The pool scrubs a row for another tenant, before its first pass too."""
    model = tiny_model("llama")
    backend = HostBackend(4 * KiB)
    pool = ExtentPool(backend, 64 * MiB, scrub="cross-tenant")
    with RaggedCache(model.config, pool=pool, max_batch_size=1) as cache:
        _generate(model, PROMPTS[:1], cache=cache, tenant="a")
        _generate(model, [STRANGER], cache=cache, tenant="b")
        (core,) = cache.store.cores
        (group, *_) = core.groups
        held = group.resident_tokens(0)
        assert held >= len(PROMPTS[0])
        assert not group.views.keys[0, 0, :, len(STRANGER) + NEW_TOKENS : held].any()
    pool.close()


# ---- through model.generate ---------------------------------------------------------------------


def test_copies_are_refused(new_cache: NewCache) -> None:
    """They would hold no prefixes."""
    cache = new_cache(tiny_model("llama", "sdpa"))
    for act in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(ConfigError, match="cannot be copied"):
            act(cache)


def test_custom_generate_takes_a_cache(new_cache: NewCache) -> None:
    """Left-padded batches through `model.generate`, one after another, with its options."""
    model, cache = _llama(new_cache)
    width = max(map(len, PROMPTS))
    inputs = {
        "input_ids": torch.tensor([[0] * (width - len(each)) + each for each in PROMPTS]),
        "attention_mask": torch.tensor(
            [[0] * (width - len(each)) + [1] * len(each) for each in PROMPTS]
        ),
    }
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    expected = model.generate(**inputs, **options)
    options |= {"custom_generate": vmkv.ragged_generate, "vmkv_cache": cache}
    for num_found in (4 * SHARED_TOKENS, sum((len(p) - 1) // 16 * 16 for p in PROMPTS)):
        with _passes(model) as sizes:
            assert torch.equal(expected, model.generate(**inputs, **options))
        assert sum(map(len, PROMPTS)) - num_found == _num_prefilled(sizes, len(PROMPTS))
    with _passes(model) as sizes:
        assert torch.equal(expected, model.generate(**inputs, **options, vmkv_tenant="other"))
    assert sum(map(len, PROMPTS)) - 4 * SHARED_TOKENS == _num_prefilled(sizes, len(PROMPTS))
    with _passes(model) as sizes:
        model.generate(**inputs, **options, vmkv_prefix_caching=False)
    assert sum(map(len, PROMPTS)) == _num_prefilled(sizes, len(PROMPTS))


def test_sequences_that_end_early_are_found_with_their_generated_tokens(
    new_cache: NewCache,
) -> None:
    """An end-of-sequence token parks the row during decode."""
    model, cache = _llama(new_cache)
    plain = [_alone(model, prompt) for prompt in PROMPTS]
    end = plain[0][len(PROMPTS[0]) + 2]
    said = _generate(model, PROMPTS, cache=cache, eos_token_id=end)
    assert said == [_alone(model, prompt, eos_token_id=end) for prompt in PROMPTS]
    assert len(said[0]) <= len(PROMPTS[0]) + 3
    assert len({len(a) - len(b) for a, b in zip(said, PROMPTS, strict=True)}) > 1
    prompts = [tokens + random_tokens(20, 3) for tokens in said]
    known = sum((len(tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for tokens in said)
    _assert_computed(sum(map(len, prompts)) - known, model, prompts, cache=cache)


def test_a_streamer_gets_the_whole_prompt_of_a_prefix_hit(new_cache: NewCache) -> None:
    """Including the tokens that are not computed."""
    model, cache = _llama(new_cache)
    for _ in range(2):
        streamer = Collects()
        (expected,) = _generate(model, PROMPTS[:1], cache=cache, streamer=streamer)
        assert expected == [token for part in streamer.got for token in part]


# ---- errors during generation -------------------------------------------------------------------


class _Fails(LogitsProcessor):
    """Raises in its fourth call, during decode."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        if self.num_calls == 4:
            raise ZeroDivisionError
        return scores


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_an_error_ends_the_sequences_and_leaves_the_cache(name: str, new_cache: NewCache) -> None:
    """The next call finds the prompts that were computed before the error."""
    model = tiny_model(name)
    cache = new_cache(model)
    expected = [_alone(model, prompt) for prompt in PROMPTS]
    for _ in range(2):
        fails = LogitsProcessorList([_Fails()])
        with pytest.raises(ZeroDivisionError):
            _generate(model, PROMPTS, cache=cache, logits_processor=fails)
        assert model.config._attn_implementation == "eager"
        assert cache.stats().num_sequences == 0
        cache.check()
    with _passes(model) as sizes:
        assert expected == _generate(model, PROMPTS, cache=cache)
    known = sum((len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for prompt in PROMPTS)
    if cache.has_windows:  # Some windows have passed the end of the last whole block.
        known = len(PROMPTS) * SHARED_TOKENS
    assert sum(map(len, PROMPTS)) - known >= _num_prefilled(sizes, len(PROMPTS))


def test_trim_forgets_all_prefixes(new_cache: NewCache) -> None:
    """Weights may change between calls then."""
    model = copy.deepcopy(tiny_model("llama"))
    cache = new_cache(model)
    _assert_exact(model, PROMPTS, cache=cache)
    redraw_weights(model, 7)
    cache.trim()
    _assert_exact(model, PROMPTS, cache=cache)


# ---- host memory and files ----------------------------------------------------------------------


def _tiers(folder: Path | None = None) -> dict[str, Any]:
    disk = {"disk_folder": folder, "disk_budget_bytes": 32 * MiB} if folder else {}
    return {"backend": HostBackend(4 * KiB), "host_budget_bytes": 8 * MiB, **disk}


@pytest.mark.parametrize("name", FAMILIES)
def test_prefixes_come_back_from_host_memory(name: str) -> None:
    """What `trim` takes from the device is found; after a change of weights nothing is."""
    model = copy.deepcopy(tiny_model(name))
    with RaggedCache(model.config, **_tiers()) as cache:
        _assert_exact(model, PROMPTS, cache=cache)
        cache.trim()
        with _passes(model) as sizes:
            _assert_exact(model, PROMPTS, cache=cache)
        assert _num_prefilled(sizes, len(PROMPTS)) < 2 * sum(map(len, PROMPTS)) - SYSTEM_TOKENS
        cache.check()
        redraw_weights(model, 7)
        cache.forget_prefixes()
        _assert_exact(model, PROMPTS, cache=cache)


def test_files_outlive_a_cache(tmp_path: Path) -> None:
    """A later cache of the same weights finds the prompts, one of other weights does not."""
    model, other = tiny_model("llama"), tiny_model("llama", seed=1)
    blocks = (len(PROMPTS[0]) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    for is_found in (False, True):
        with RaggedCache(model.config, **_tiers(tmp_path / "files")) as cache:
            num_tokens = len(PROMPTS[0]) - is_found * blocks
            _assert_computed(num_tokens, model, PROMPTS[:1], cache=cache)
    with RaggedCache(other.config, **_tiers(tmp_path / "files")) as cache:
        _assert_computed(len(PROMPTS[0]), other, PROMPTS[:1], cache=cache)
        with (
            RaggedCache(other.config, **_tiers(tmp_path / "files")) as second,
            pytest.raises(ConfigError, match="in use by another"),
        ):
            _generate(other, PROMPTS[:1], cache=second)


def test_files_of_all_devices_are_opened_or_none(tmp_path: Path) -> None:
    """After a refusal the same call can be made again."""
    model, folder = tiny_model("llama"), tmp_path / "files"
    with RaggedCache(model.config, **_tiers()) as one, RaggedCache(model.config, **_tiers()) as two:
        for cache in (one, two):
            _generate(model, PROMPTS[:1], cache=cache)
        cores = [cache.store.cores[0] for cache in (one, two)]
        store: Any = SimpleNamespace(cores=cores)
        (folder / "device-1").mkdir(0o755, parents=True)
        with pytest.raises(ConfigError, match="chmod 700"):
            Store.open_files(store, model, folder, 32 * MiB)
        assert [core.host_blocks.files for core in cores] == [None, None]
        (folder / "device-1").chmod(0o700)
        Store.open_files(store, model, folder, 32 * MiB)
        assert None not in [core.host_blocks.files for core in cores]


def test_tiers_are_refused_by_halves(pool: ExtentPool) -> None:
    """Files need host memory and a size, and a pool brings its own host memory."""
    model = tiny_model("llama")
    with pytest.raises(ConfigError, match="go together"):
        RaggedCache(model.config, disk_folder="files")
    with pytest.raises(ConfigError, match="a pool has its own host_budget_bytes"):
        RaggedCache(model.config, pool=pool, host_budget_bytes=MiB)
    its = {"disk_folder": "files", "disk_budget_bytes": MiB}
    with (
        RaggedCache(model.config, pool=pool, **its) as cache,
        pytest.raises(ConfigError, match="needs host_budget_bytes"),
    ):
        _generate(model, PROMPTS[:1], cache=cache)


# ---- refusals -----------------------------------------------------------------------------------


def test_a_cache_of_another_model_is_refused(new_cache: NewCache) -> None:
    """A model with other layers, and another model with the same layers."""
    model, other, same = tiny_model("llama"), tiny_model("gemma2"), tiny_model("llama", seed=1)
    with pytest.raises(ConfigError, match="other layers"):
        _generate(other, PROMPTS[:1], cache=new_cache(model))
    cache = new_cache(model)
    _generate(model, PROMPTS[:1], cache=cache)
    for wrong in (other, same):
        with pytest.raises(ConfigError, match="another model"):
            _generate(wrong, PROMPTS[:1], cache=cache)
    _assert_exact(model, PROMPTS[:2], cache=cache)


def test_a_cache_of_the_model_in_another_dtype_is_refused(new_cache: NewCache) -> None:
    """The error names both dtypes."""
    model = tiny_model("llama", "sdpa", seed=2)
    cache = new_cache(model)
    _generate(model, PROMPTS[:1], cache=cache)
    model.to(torch.bfloat16)
    try:
        with pytest.raises(ConfigError, match=r"bfloat16.*float32.*make a new one"):
            _generate(model, PROMPTS[:1], cache=cache)
        assert cache.stats().num_sequences == 0
    finally:
        model.to(torch.float32)
    with _passes(model) as sizes:
        _generate(model, PROMPTS[:1], cache=cache)
    assert _num_prefilled(sizes, 1) < BLOCK_TOKENS + 1


def test_more_prompts_than_rows_are_refused(new_cache: NewCache) -> None:
    """The error names the number of rows; fewer prompts are served."""
    model = tiny_model("llama")
    cache = new_cache(model, max_batch_size=4)
    for _ in range(2):
        with pytest.raises(ConfigError, match="5 prompts do not fit the 4 rows"):
            _generate(model, PROMPTS, cache=cache)
        _generate(model, PROMPTS[:4], cache=cache)


def test_a_busy_or_closed_cache_is_refused(new_cache: NewCache) -> None:
    """A cache is busy while a streamer of the running call calls `generate`."""
    model, cache = _llama(new_cache)

    class Nests(Collects):
        def put(self, value: torch.Tensor) -> None:
            _generate(model, PROMPTS[:1], cache=cache)

    with pytest.raises(ConfigError, match="serves another call"):
        # The streamer gets the prompt before the cache is busy, and the first token while it is.
        _generate(model, PROMPTS[:1], cache=cache, streamer=Nests())
    _generate(model, PROMPTS[:1], cache=cache)
    cache.close()
    cache.close()
    with pytest.raises(ClosedError, match="this RaggedCache is closed"):
        _generate(model, PROMPTS[:1], cache=cache)
    for call in (cache.trim, cache.forget_prefixes):
        with pytest.raises(ClosedError, match="this RaggedCache is closed"):
            call()


def test_an_unclosed_cache_warns_and_is_freed_by_the_next(pool: ExtentPool) -> None:
    """The memory is freed when another cache is made, as with `VMKVCache`."""
    model = tiny_model("llama")
    cache = RaggedCache(model.config, pool=pool)
    _generate(model, PROMPTS[:1], cache=cache)
    caches = [cache]
    del cache
    with pytest.warns(ResourceWarning, match="RaggedCache was never closed"):
        caches.clear()
    gc.collect()
    RaggedCache(model.config, pool=pool).close()
    assert pool.stats().resident_bytes == 0
