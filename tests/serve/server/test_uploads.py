"""Bodies together hold so much memory; whoever takes longest gives way."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmkv.serve.server import Limits
from vmkv.serve.server.errors import ApiError
from vmkv.serve.server.reading import check_structure
from vmkv.serve.server.streaming import ClientGoneError
from vmkv.serve.server.uploads import Upload, Uploads
from vmkv.units import KiB

LIMITS = Limits(max_body_bytes=200 * KiB, max_held_bytes=300 * KiB)


class Sender:
    """A request whose body comes piece by piece, as a test wants it."""

    def __init__(self, uploads: Uploads):
        self.upload = Upload(uploads)
        self._messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.receive = self._messages.get
        self.body = asyncio.ensure_future(self.upload.receive(self))  # type: ignore[arg-type]

    async def send(self, num_bytes: int, *, is_last: bool = False) -> None:
        """One more piece; returns when it was dealt with."""
        await self._messages.put(
            {"type": "http.request", "body": b"x" * num_bytes, "more_body": not is_last}
        )
        await settle()

    async def leave(self) -> None:
        """Close the connection."""
        await self._messages.put({"type": "http.disconnect"})
        await settle()

    async def status(self) -> int:
        """How it ended."""
        try:
            await self.body
        except ApiError as error:
            return error.status
        return 200


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_small_bodies_count_for_nothing() -> None:
    """However many there are."""

    async def scenario() -> None:
        uploads = Uploads(LIMITS)
        senders = [Sender(uploads) for _ in range(50)]
        for each in senders:
            await each.send(64 * KiB, is_last=True)
        assert [200] * 50 == [await each.status() for each in senders]
        assert 0 == uploads.num_bytes

    asyncio.run(scenario())


def test_who_sends_for_longest_gives_way() -> None:
    """Those who come later get through; what is complete stays until it is let go of."""

    async def scenario() -> None:
        uploads = Uploads(LIMITS)
        slow = Sender(uploads)
        await slow.send(180 * KiB)
        quick = Sender(uploads)
        await quick.send(180 * KiB, is_last=True)
        assert 180 * KiB == len(await quick.body)
        assert not slow.body.done()
        third = Sender(uploads)
        await third.send(180 * KiB, is_last=True)
        assert (429, 200) == (await slow.status(), await third.status())
        assert 2 * (180 - 64) * KiB == uploads.num_bytes
        # Both wait; there is nobody to give way but the one that comes.
        fourth = Sender(uploads)
        await fourth.send(180 * KiB, is_last=True)
        assert 429 == await fourth.status()
        quick.upload.release()
        fifth = Sender(uploads)
        await fifth.send(180 * KiB, is_last=True)
        assert 200 == await fifth.status()
        for each in (quick, third, fifth):
            each.upload.release()
            each.upload.release()
        assert 0 == uploads.num_bytes

    asyncio.run(scenario())


def test_whatever_ends_a_body_nothing_of_it_is_held() -> None:
    """Too large, left, too slow, cancelled."""

    async def scenario() -> None:
        uploads = Uploads(LIMITS)
        large = Sender(uploads)
        await large.send(150 * KiB)
        await large.send(150 * KiB)
        assert 413 == await large.status()
        left = Sender(uploads)
        await left.send(150 * KiB)
        await left.leave()
        with pytest.raises(ClientGoneError):
            await left.body
        cancelled = Sender(uploads)
        await cancelled.send(150 * KiB)
        cancelled.body.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled.body
        assert 0 == uploads.num_bytes
        uploads = Uploads(Limits(body_timeout_s=0.01))
        slow = Sender(uploads)
        await slow.send(150 * KiB)
        assert 408 == await slow.status()
        assert 0 == uploads.num_bytes

    asyncio.run(scenario())


# ---- what a body is made of ---------------------------------------------------------------------

texts = st.text(st.sampled_from('a"\\,:[]{}é🙂\n'), max_size=8)
documents = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(texts, inner, max_size=5),
    max_leaves=30,
)


def counted(document: Any) -> int:
    """Commas, and eight times lists, objects and keys."""
    if isinstance(document, dict):
        inner, num_nested = list(document.values()), 1 + len(document)
    elif isinstance(document, list):
        inner, num_nested = document, 1
    else:
        return 0
    return max(0, len(inner) - 1) + 8 * num_nested + sum(map(counted, inner))


@given(document=documents, pad=st.integers(0, 3), piece=st.integers(1, 9))
def test_values_are_counted_as_a_parser_would(document: Any, pad: int, piece: int) -> None:
    """Not those within texts, wherever the pieces end that it looks at."""
    body = json.dumps(document, ensure_ascii=bool(pad % 2), indent=pad or None).encode()
    num_values = 1 + counted(document)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vmkv.serve.server.reading._PIECE_BYTES", piece)
        check_structure(body, num_values)
        if num_values > 1:
            with pytest.raises(ApiError, match=f"more than {num_values - 1} values"):
                check_structure(body, num_values - 1)


@given(body=st.binary(max_size=60) | st.text(st.sampled_from('"\\[{,:')).map(str.encode))
def test_what_is_no_json_is_counted_to_its_end(body: bytes) -> None:
    """No error but the one for too many, and an end."""
    check_structure(body, 1000)
    for limit in (1, 3):
        with contextlib.suppress(ApiError):
            check_structure(body, limit)
