"""Geometry: the offset of every byte, rounding to pages and tokens, and refused values."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmkv import ConfigError
from vmkv.core.cache import Geometry, LayerShape
from vmkv.core.cache.geometry import fitting_rows
from vmkv.core.cache.layers import split_layers
from vmkv.units import GiB, KiB, MiB

LLAMA_3_8B = LayerShape(num_k_heads=8, k_dim=128, num_v_heads=8, v_dim=128, itemsize_bytes=2)


def _geometry(**changes: Any) -> Geometry:
    values: dict[str, Any] = {
        "num_layers": 32,
        "shape": LLAMA_3_8B,
        "page_bytes": 2 * MiB,
        "max_tokens": 8192,
        "num_rows": 32,
    }
    return Geometry(**{**values, **changes})


shapes = st.builds(
    LayerShape,
    num_k_heads=st.integers(1, 9),
    k_dim=st.sampled_from([1, 8, 24, 64, 128, 192, 576]),
    num_v_heads=st.integers(1, 9),
    v_dim=st.sampled_from([1, 8, 64, 128, 512]),
    itemsize_bytes=st.sampled_from([1, 2, 4, 8]),
)
geometries = st.builds(
    Geometry,
    num_layers=st.integers(1, 40),
    shape=shapes,
    page_bytes=st.sampled_from([4 * KiB, 64 * KiB, 2 * MiB]),
    max_tokens=st.integers(1, 5000),
    num_rows=st.integers(1, 9),
)


# ---- examples -----------------------------------------------------------------------------


def test_llama_3_8b() -> None:
    """32 layers x (K and V) x 8 heads x 128 x 2 B; a 2 MiB page holds 16 tokens of all layers.

    Layer l starts 4 KiB after layer l - 1, its values 2 KiB after its keys. A row of 8,192 tokens
    is 512 pages, and 32 rows reserve 32 GiB of addresses.
    """
    geometry = _geometry()
    assert 128 * KiB == geometry.token_bytes
    assert (4 * KiB, 2 * KiB) == (geometry.layer_bytes, geometry.v_offset_bytes)
    pages = [geometry.pages_for(num_tokens) for num_tokens in (0, 16, 17, 8192)]
    assert [0, 1, 2, 512] == pages
    assert (1 * GiB, 512, 8192) == (geometry.row_bytes, geometry.row_pages, geometry.row_tokens)
    assert 32 * GiB == geometry.reserved_bytes


def test_latent_attention_has_two_widths() -> None:
    """DeepSeek's latents: 512 + 64 for keys, 512 for values, in bf16: 2,176 B a layer."""
    shape = LayerShape(num_k_heads=1, k_dim=576, num_v_heads=1, v_dim=512, itemsize_bytes=2)
    geometry = _geometry(num_layers=61, shape=shape)
    assert 2176 == geometry.layer_bytes
    assert 61 * 2176 <= geometry.token_bytes < 61 * 2176 + 128


def test_rows_end_on_a_page_and_on_a_token() -> None:
    """Tokens of 384 B and pages of 4 KiB meet every 32 tokens, so rows are multiples of that."""
    shape = LayerShape(num_k_heads=1, k_dim=48, num_v_heads=1, v_dim=48, itemsize_bytes=4)
    geometry = _geometry(num_layers=1, shape=shape, page_bytes=4 * KiB, max_tokens=33)
    assert (384, 64, 6) == (geometry.token_bytes, geometry.row_tokens, geometry.row_pages)


# ---- properties ---------------------------------------------------------------------------


@given(geometries)
def test_rows_are_whole_pages_and_whole_tokens(geometry: Geometry) -> None:
    """A row starts on a page and on a token, so one flat tensor addresses all rows."""
    assert geometry.row_tokens >= geometry.max_tokens
    assert geometry.row_tokens * geometry.token_bytes == geometry.row_bytes
    assert geometry.row_pages * geometry.page_bytes == geometry.row_bytes
    assert geometry.num_rows * geometry.row_bytes == geometry.reserved_bytes


@given(geometries)
def test_layers_do_not_overlap_and_are_aligned(geometry: Geometry) -> None:
    """Keys and values of all layers lie in order, at multiples of 16 B, inside the token row."""
    shape = geometry.shape
    cursor = 0
    for layer in range(geometry.num_layers):
        for start, size in (
            (layer * geometry.layer_bytes, shape.k_bytes),
            (layer * geometry.layer_bytes + geometry.v_offset_bytes, shape.v_bytes),
        ):
            assert start >= cursor
            assert 0 == start % 16
            cursor = start + size
    assert cursor <= geometry.token_bytes
    assert 0 == geometry.token_bytes % shape.itemsize_bytes


@given(geometries)
def test_token_padding_is_small(geometry: Geometry) -> None:
    """Tokens are padded to a multiple of 128 B, or of a power of two if small; never to double."""
    payload = geometry.num_layers * geometry.layer_bytes
    assert 0 == geometry.token_bytes % min(128, 1 << (payload - 1).bit_length())
    assert payload <= geometry.token_bytes < min(payload + 128, 2 * payload)


@given(geometries, st.integers(0, 5000))
def test_pages_for_is_minimal(geometry: Geometry, num_tokens: int) -> None:
    """One page fewer would be too few; `whole_pages_below` counts full pages only."""
    pages = geometry.pages_for(num_tokens)
    end = num_tokens * geometry.token_bytes
    assert (
        pages - 1
    ) * geometry.page_bytes < end <= pages * geometry.page_bytes or pages == end == 0
    below = geometry.whole_pages_below(num_tokens)
    assert below * geometry.page_bytes <= end < (below + 1) * geometry.page_bytes


@given(st.integers(1, 100), st.none() | st.integers(1, 100))
def test_split_layers_covers_all_evenly(num_layers: int, layers_per_group: int | None) -> None:
    """Every layer once, in order, no group over the limit, sizes one apart at most."""
    parts = split_layers(num_layers, layers_per_group)
    assert list(range(num_layers)) == [layer for part in parts for layer in part]
    sizes = [len(part) for part in parts]
    assert max(sizes) <= (layers_per_group or num_layers)
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 1 << 20), st.integers(1, 1 << 20), st.integers(1, 512))
def test_fitting_rows_is_the_wanted_number_or_fewer(
    token_bytes: int, max_tokens: int, wanted_rows: int
) -> None:
    """There is one row at least, and several rows have fewer than 2^31 positions."""
    rows = fitting_rows(token_bytes, max_tokens, wanted_rows)
    assert 1 <= rows <= wanted_rows
    if rows > 1:
        assert rows * max_tokens < 2**31


# ---- bad input ----------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1, 2.0, 1.5, "4", None, True])
@pytest.mark.parametrize("name", ["num_layers", "page_bytes", "max_tokens", "num_rows"])
def test_geometry_refuses_all_but_positive_integers(name: str, value: object) -> None:
    """The message names the argument and its value."""
    with pytest.raises(ConfigError, match=rf"{name}={value!r} must be a positive integer"):
        _geometry(**{name: value})


@pytest.mark.parametrize("value", [0, -8, 64.0, None])
@pytest.mark.parametrize("name", ["num_k_heads", "k_dim", "num_v_heads", "v_dim", "itemsize_bytes"])
def test_shape_refuses_all_but_positive_integers(name: str, value: object) -> None:
    values: dict[str, Any] = dict.fromkeys(
        ("num_k_heads", "k_dim", "num_v_heads", "v_dim", "itemsize_bytes"), 8
    )
    with pytest.raises(ConfigError, match=f"{name}="):
        LayerShape(**{**values, name: value})


def test_positions_stay_below_2_to_31() -> None:
    """Kernels index tokens with int32; the message says how many rows are possible."""
    small = LayerShape(num_k_heads=1, k_dim=16, num_v_heads=1, v_dim=16, itemsize_bytes=2)
    possible = _geometry(num_layers=1, shape=small, max_tokens=1 << 20, num_rows=2047)
    assert possible.num_rows * possible.row_tokens < 2**31
    with pytest.raises(ConfigError, match=r"2147483648 positions.*at most 2047 rows"):
        _geometry(num_layers=1, shape=small, max_tokens=1 << 20, num_rows=2048)


def test_row_of_2_to_31_tokens_is_refused() -> None:
    small = LayerShape(num_k_heads=1, k_dim=1, num_v_heads=1, v_dim=1, itemsize_bytes=1)
    with pytest.raises(ConfigError, match="lower max_tokens"):
        _geometry(num_layers=1, shape=small, max_tokens=2**31, num_rows=1)


def test_petabytes_of_addresses_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"TiB of addresses"):
        _geometry(max_tokens=1 << 20, num_rows=1000)
