"""Keys and values in eight bits: encoding, scales, compatible caches, and memory free of NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import moves
from helpers.caches import MakeCache

from vmkv import ConfigError, ExtentPool, HostBackend, KVCache, Sequence
from vmkv.core.cache import fp8
from vmkv.core.cache.fp8 import FP8, LayerScales, Scales
from vmkv.units import KiB

HEADS, DIM = 2, 32
SCALES = [LayerScales((0.5, 2.0), (1.0, 0.25)), LayerScales((3.0, 1.0), (1.0, 1.0))]
CPU = torch.device("cpu")


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeCache]:
    """Makes a cache with two layers in eight bits, over shareable memory of its own."""
    caches: list[KVCache] = []

    def make(pool: Any = None, **options: Any) -> KVCache:
        if pool is None:
            pool = ExtentPool(
                HostBackend(4 * KiB),
                1024 * KiB,
                host_budget_bytes=256 * KiB,
                is_shareable=True,
                close_when_unused=True,
            )
        cache = KVCache(pool, max_tokens=400, max_sequences=4, layers_per_group=2)
        caches.append(cache)
        options = {"dtype": FP8, **options}
        cache.add_layers(range(2), num_kv_heads=HEADS, head_dim=DIM, **options)
        return cache

    yield make
    for cache in caches:
        cache.check()
        cache.close()


def _filled(cache: KVCache, num_tokens: int = 112) -> Sequence:
    """A recorded sequence, with noise in every place."""
    sequence = cache.open()
    sequence.append(num_tokens)
    generator = torch.Generator().manual_seed(0)
    for layer in cache.layers:
        for view in (sequence.keys(layer), sequence.values(layer)):
            view.copy_(fp8.encode(torch.randn(view.shape, generator=generator)))
    sequence.record(range(num_tokens))
    return sequence


def _bits(sequence: Sequence) -> list[bytes]:
    return [
        view.contiguous().view(torch.uint8).numpy().tobytes()
        for layer in sequence.cache.layers
        for view in (sequence.keys(layer), sequence.values(layer))
    ]


# ---- numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_number_of_the_format_survives(dtype: torch.dtype) -> None:
    """All 254 finite numbers survive a conversion to a wider type and back; others are rounded."""
    stored = torch.arange(256, dtype=torch.uint8)[:, None].view(FP8)
    numbers = fp8.decode(stored, None, dtype)
    real = numbers.isfinite()
    assert 254 == int(real.sum())
    assert torch.equal(numbers[real], fp8.decode(fp8.encode(numbers[real]), None, dtype))
    between = torch.linspace(-440, 440, 9999)[:, None]
    error = fp8.decode(fp8.encode(between), None, torch.float32) - between
    assert bool((error.abs() <= between.abs() / 16 + 2.0**-10).all())


def test_large_numbers_saturate() -> None:
    """Infinity becomes 448, and NaN stays NaN."""
    numbers = torch.tensor([449.0, 1e9, torch.inf, -1e9, torch.nan])[:, None]
    stored = fp8.decode(fp8.encode(numbers), None, torch.float32)[:, 0]
    assert [448.0, 448.0, 448.0, -448.0] == stored[:4].tolist()
    assert bool(stored[4].isnan())


@pytest.mark.parametrize(("heads_at", "shape"), [(-2, (5, HEADS, DIM)), (-3, (4, HEADS, 5, DIM))])
def test_scales_belong_to_heads(heads_at: int, shape: tuple[int, ...]) -> None:
    """With a scale per head, heads of very different magnitudes keep their precision."""
    scales = Scales.of(LayerScales((64.0, 2.0**-9), (1.0, 1.0)), CPU)
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    by_head = numbers.movedim(heads_at, 0)
    by_head[0] *= 5000
    by_head[1] *= 0.01
    stored = fp8.encode(numbers, scales.inverse_keys, heads_at=heads_at)
    back = fp8.decode(stored, scales.keys, torch.float32, heads_at=heads_at)
    large = numbers.abs() > 2.0**-6 * scales.keys.view(-1, *[1] * (-heads_at - 1))
    assert bool(((back - numbers).abs() <= numbers.abs() / 16)[large].all())
    assert int(large.sum()) > numbers.numel() / 2


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf"), 1e-30, 1e30, True, "1"])
def test_scales_are_positive_numbers(wrong: Any) -> None:
    for keys, values in (((1.0, wrong), (1.0,)), ((1.0,), (wrong,))):
        with pytest.raises(ConfigError, match="positive numbers"):
            LayerScales(keys, values)


# ---- rows ---------------------------------------------------------------------------------


def test_a_page_holds_twice_the_tokens_of_bfloat16(make: MakeCache) -> None:
    wide, narrow = make(dtype=torch.bfloat16), make()
    of_page = [each.groups[0].token_at(1) for each in (wide, narrow)]
    assert [8, 16] == of_page


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scales": SCALES[:1]}, "1 layers have scales, and 2"),
        ({"scales": [SCALES[0], LayerScales((1.0,), (1.0, 1.0))]}, "layer 1 has 2 key"),
        ({"scales": SCALES, "dtype": torch.bfloat16}, "what is stored as torch.bfloat16 has none"),
    ],
)
def test_scales_that_do_not_fit_are_refused(
    make: MakeCache, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**options)


def _found(sequence: Sequence, folder: Path) -> Sequence:
    sequence.close()
    found = sequence.cache.open(prompt=range(113))
    assert 112 == found.num_cached_tokens
    return found


@pytest.mark.parametrize("happens", [moves.swapped, moves.saved, moves.forked, _found])
def test_bytes_survive_every_move(
    make: MakeCache, tmp_path: Path, happens: Callable[[Sequence, Path], Sequence]
) -> None:
    """Swap, save and load, fork and a prefix hit keep every byte."""
    sequence = _filled(make(scales=SCALES))
    expected = _bits(sequence)
    assert expected == _bits(happens(sequence, tmp_path))


OTHERS = {
    "dtype": ({"dtype": torch.bfloat16}, "kv_dtype"),
    "scales": ({"scales": SCALES[::-1]}, "kv_scales"),
    "no scales": ({}, "kv_scales"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_file_of_another_format_is_refused(make: MakeCache, tmp_path: Path, other: str) -> None:
    """Another type, or other scales: the error names the option, and no sequence is opened."""
    options, remedy = OTHERS[other]
    _filled(make(scales=SCALES)).save(tmp_path / "kv")
    cache = make(**options)
    with pytest.raises(ConfigError, match=f"make the cache with the same .*{remedy}"):
        cache.load(tmp_path / "kv")
    assert 0 == cache.stats().num_sequences


@pytest.mark.parametrize("other", OTHERS)
def test_import_of_another_format_is_refused(make: MakeCache, tmp_path: Path, other: str) -> None:
    """A cache with the same type and scales imports the prefix."""
    options, remedy = OTHERS[other]
    sequence = _filled(make(scales=SCALES))
    expected = _bits(sequence)
    like, unlike = make(scales=SCALES), make(**options)
    with sequence.export(tmp_path / "s") as exporter:
        exporter.start()
        with pytest.raises(ConfigError, match=remedy):
            unlike.import_prefix(tmp_path / "s")
        imported = like.import_prefix(tmp_path / "s")
    for got, wanted in zip(_bits(imported), expected, strict=True):
        assert wanted.startswith(got)
        assert got


def test_caches_of_other_scales_do_not_fork_from_each_other(make: MakeCache) -> None:
    """With other scales the same bytes are other numbers, also in caches over one pool."""
    pool = ExtentPool(HostBackend(4 * KiB), 1024 * KiB)
    first, like, unlike = make(pool, scales=SCALES), make(pool, scales=SCALES), make(pool)
    sequence = _filled(first)
    assert _bits(sequence) == _bits(like.fork(sequence, 112))
    with pytest.raises(ConfigError):
        unlike.fork(sequence, 112)
    for cache in (first, like, unlike):
        cache.close()
    pool.close()


def test_layers_that_move_keep_their_scales(make: MakeCache) -> None:
    """Layer 1 moves when the cache is compacted after layer 0 was dropped."""
    cache = make(scales=SCALES)
    cache.drop_layers([0])
    assert cache.compact()
    scales = cache.scales(1)
    assert scales is not None
    assert [3.0, 1.0] == scales.keys.tolist()


def test_memory_of_another_type_is_never_nan(make: MakeCache) -> None:
    """Kernels over-read, so bytes that another type has left past a length are overwritten."""
    pool = ExtentPool(HostBackend(4 * KiB), 64 * KiB)
    wide, narrow = make(pool, dtype=torch.bfloat16), make(pool)
    for _ in range(2):
        sequence = wide.open()
        sequence.append(100)
        for layer in (0, 1):
            sequence.keys(layer).fill_(-1.9921875)  # 0xBFFF, whose second byte is a NaN here.
            sequence.values(layer).fill_(-1.9921875)
        sequence.close()
        wide.trim(0)
        while wide.make_room(4 * KiB):  # Parked rows are evicted; the pool keeps the memory.
            pass
        fresh = narrow.open()
        fresh.append(1)
        group = narrow.groups[0]
        seen = group.token_at(group.table.rows[fresh.row].end_page)
        for view in (group.views.keys, group.views.values):
            assert bool(view[:, fresh.row, :, 1:seen].float().isfinite().all())
        fresh.close()
        narrow.trim()
    for cache in (wide, narrow):
        cache.close()
    pool.close()
