"""The values of a JSON body are counted before the body is parsed."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmkv.serve.server.errors import ApiError
from vmkv.serve.server.schema import check_structure

texts = st.text(st.sampled_from('a"\\,:[]{}é🙂\n'), max_size=8)
documents = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(texts, inner, max_size=5),
    max_leaves=30,
)


def counted(document: Any) -> int:
    """Count commas, and eight for each list, object and key."""
    if isinstance(document, dict):
        inner, num_nested = list(document.values()), 1 + len(document)
    elif isinstance(document, list):
        inner, num_nested = document, 1
    else:
        return 0
    return max(0, len(inner) - 1) + 8 * num_nested + sum(map(counted, inner))


@given(document=documents, pad=st.integers(0, 3), piece=st.integers(1, 9))
def test_the_count_matches_the_parsed_document(document: Any, pad: int, piece: int) -> None:
    """Characters within strings do not count, wherever the body is split into pieces."""
    body = json.dumps(document, ensure_ascii=bool(pad % 2), indent=pad or None).encode()
    num_values = 1 + counted(document)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vmkv.serve.server.schema._PIECE_BYTES", piece)
        asyncio.run(check_structure(body, num_values))
        if num_values > 1:
            with pytest.raises(ApiError, match=f"more than {num_values - 1} values"):
                asyncio.run(check_structure(body, num_values - 1))


@pytest.mark.parametrize(
    ("body", "may_be_infinite"),
    [
        (b"[1e999]", True),
        (b"[-2.5E+400, 1]", True),
        (b"9" * 309 + b".5", True),
        (b'{"a\\"": 7e1000}', True),
        (b'["1e999", 1e99, 1e-999, 0.1]', False),
        (b"9" * 308, False),
    ],
)
@pytest.mark.parametrize("piece", [1, 7, 1 << 16])
def test_numbers_that_may_be_infinite_are_found(
    monkeypatch, body: bytes, may_be_infinite: bool, piece: int
) -> None:
    """Wherever the body is split into pieces, and not within texts."""
    monkeypatch.setattr("vmkv.serve.server.schema._PIECE_BYTES", piece)
    assert may_be_infinite == asyncio.run(check_structure(body, 1000))


@given(body=st.binary(max_size=60) | st.text(st.sampled_from('"\\[{,:')).map(str.encode))
def test_counting_invalid_json_ends(body: bytes) -> None:
    """Counting raises no error but `ApiError` for too many values."""
    asyncio.run(check_structure(body, 1000))
    for limit in (1, 3):
        with contextlib.suppress(ApiError):
            asyncio.run(check_structure(body, limit))


@pytest.mark.parametrize("body", [b"x" * (1 << 22), b"\\" * (1 << 22)], ids=["text", "escapes"])
def test_other_tasks_run_while_a_large_body_is_counted(body: bytes) -> None:
    """Counting yields to the event loop after each piece."""

    async def scenario() -> int:
        counting = asyncio.ensure_future(check_structure(body, 10))
        num_turns = 0
        while not counting.done():
            num_turns += 1
            await asyncio.sleep(0)
        return num_turns

    assert asyncio.run(scenario()) >= 1 << 4
