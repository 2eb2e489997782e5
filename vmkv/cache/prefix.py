"""Which rows hold the beginning of a prompt: chained hashes of token blocks.

    hash(block i) = blake2b(hash(block i - 1), tokens of block i),   hash(block -1) = tenant

so one hash stands for everything up to its block's end, in every process alike (Python's own
`hash` is neither chained nor stable). As in vLLM's automatic prefix caching, but a hit names a
*row*, live or parked, rather than a block: its extents are mapped again for the new sequence, or
the parked row is adopted as it is.

Torch-free, and knows no memory: whether a row still has what it held is its owner's to say
(`truncate`).
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from ..errors import ConfigError

#: Tokens of a block: what a hit can miss by at most. A page of Llama-3-8B holds as many.
BLOCK_TOKENS = 16
_DIGEST_BYTES = 16


class _Holders:
    """Rows that hold blocks, by the blocks' hashes; of each, who came last is found first."""

    def __init__(self) -> None:
        self._rows: dict[bytes, dict[int, None]] = {}

    def add(self, row: int, hashes: Iterable[bytes]) -> None:
        for each in hashes:
            self._rows.setdefault(each, {})[row] = None

    def remove(self, row: int, hashes: Iterable[bytes]) -> None:
        for each in hashes:
            rows = self._rows[each]
            del rows[row]
            if not rows:
                del self._rows[each]

    def __contains__(self, hash_: bytes) -> bool:
        return hash_ in self._rows

    def of(self, hash_: bytes) -> Iterator[int]:
        return reversed(self._rows.get(hash_, {}))


@dataclass
class _Content:
    """What one row is known to hold, from its first token on.

    Attributes:
        tenant: Whose it is.
        holders: Where the row is listed now.
        tokens: What it holds.
        hashes: Those of its whole blocks.
        num_lost: How many of those end where the row can no longer be begun from.
        num_hits: How often it was begun from.
    """

    tenant: str | None
    holders: _Holders
    tokens: array[int] = field(default_factory=lambda: array("q"))
    hashes: list[bytes] = field(default_factory=list)
    num_lost: int = 0
    num_hits: int = 0


_NOTHING: Final = _Content(None, _Holders())


@dataclass(frozen=True)
class Match:
    """Rows that hold the first `num_tokens` tokens of a prompt, and can be begun from."""

    num_tokens: int
    _hash: bytes
    _parked: _Holders
    _live: _Holders

    @property
    def parked(self) -> Iterator[int]:
        """Those parked now, the last one first."""
        return self._parked.of(self._hash)

    @property
    def live(self) -> Iterator[int]:
        """Those live now, the last one first."""
        return self._live.of(self._hash)

    @property
    def rows(self) -> Iterator[int]:
        """All of them now."""
        yield from self.parked
        yield from self.live


class PrefixIndex:
    """From prompts to rows.

    Who holds a block is listed by whether it is parked, live, or away: swapped out, or a window
    no longer holds what a sequence that begins there would see. So to find one of a kind costs the
    same however many there are.

    Attributes:
        num_hits: Sequences that began with tokens found here.
        num_misses: Those that looked and found none.
        num_hit_tokens: Tokens found, over all hits.
    """

    def __init__(self) -> None:
        self.num_hits = 0
        self.num_misses = 0
        self.num_hit_tokens = 0
        self._contents: dict[int, _Content] = {}
        self._parked, self._live, self._away = _Holders(), _Holders(), _Holders()

    # ---- what rows hold -------------------------------------------------------------------

    def record(self, row: int, token_ids: Sequence[int], tenant: str | None = None) -> None:
        """`row`, which is live, now holds `token_ids` after those recorded before.

        Args:
            row: The row.
            token_ids: What was appended.
            tenant: Whose they are: only the same tenant finds them.

        Raises:
            ConfigError: They are not token ids. Nothing changed.

        Cost: about 1 µs per block of 16 tokens.
        """
        content = self._contents.get(row, _Content(tenant, self._live))
        self._record(row, content, _as_array(token_ids), [])

    def _record(
        self, row: int, content: _Content, tokens: array[int], known: Sequence[bytes]
    ) -> None:
        """`row` holds `content`, and behind it `tokens`, of whose hashes the first are `known`."""
        if not tokens:
            return
        self._contents[row] = content
        first_new = len(content.hashes)
        content.tokens.extend(tokens)
        content.hashes.extend(known)
        content.hashes.extend(_chain(content.tokens, content.hashes, content.tenant))
        content.holders.add(row, content.hashes[first_new:])

    def truncate(self, row: int, num_tokens: int = 0) -> None:
        """`row` holds `num_tokens` tokens at most from now on."""
        content = self._contents.get(row)
        if content is None or len(content.tokens) <= num_tokens:
            return
        del content.tokens[num_tokens:]
        num_blocks = num_tokens // BLOCK_TOKENS
        first_listed = max(content.num_lost, num_blocks)
        content.holders.remove(row, content.hashes[first_listed:])
        self._away.remove(row, content.hashes[num_blocks:first_listed])
        del content.hashes[num_blocks:]
        content.num_lost = min(content.num_lost, num_blocks)
        if not num_tokens:
            del self._contents[row]

    def lose_short(self, row: int, num_tokens: int) -> None:
        """Of `row`, nobody can begin with fewer than `num_tokens` tokens any more."""
        content = self._contents.get(row)
        num_lost = max(0, num_tokens - 1) // BLOCK_TOKENS
        if content is not None and content.num_lost < num_lost:
            lost = content.hashes[content.num_lost : num_lost]
            content.holders.remove(row, lost)
            self._away.add(row, lost)
            content.num_lost += len(lost)

    def copy(self, moves: Iterable[tuple[int, int, str | None]], num_tokens: int) -> None:
        """Each target, which is live, holds what its source does now of its first `num_tokens`.

        Args:
            moves: `(source, target, tenant)`: two rows, and whose the target is.
            num_tokens: How much of it.
        """
        found = [(self._contents.get(source), target, tenant) for source, target, tenant in moves]
        copies = [
            (target, tenant, content.tenant, content.tokens[:num_tokens], content.hashes[:])
            for content, target, tenant in found
            if content is not None
        ]
        for _, target, _ in found:
            self.truncate(target)
        for target, tenant, owner, tokens, hashes in copies:
            known = hashes[: len(tokens) // BLOCK_TOKENS] if tenant == owner else []
            self._record(target, _Content(tenant, self._live), tokens, known)

    def num_recorded(self, row: int) -> int:
        """Tokens that `row` is known to hold."""
        return len(self._contents.get(row, _NOTHING).tokens)

    def token_ids(self, row: int) -> list[int]:
        """The tokens that `row` is known to hold."""
        return self._contents.get(row, _NOTHING).tokens.tolist()

    def hashes(self, row: int) -> list[bytes]:
        """The hashes of the whole blocks that `row` is known to hold."""
        return list(self._contents.get(row, _NOTHING).hashes)

    def hits_of(self, row: int) -> int:
        """How often a sequence has started from `row`, as it is now."""
        return self._contents.get(row, _NOTHING).num_hits

    # ---- where they are -------------------------------------------------------------------

    def park(self, row: int) -> None:
        """`row` is parked now. Cost: as of `record`, or less."""
        self._list(row, self._parked)

    def take(self, row: int) -> None:
        """`row` is live now, and in device memory."""
        self._list(row, self._live)

    def hide(self, row: int) -> None:
        """`row` is swapped out: it holds what it did, and nobody can begin with it."""
        self._list(row, self._away)

    def _list(self, row: int, holders: _Holders) -> None:
        content = self._contents.get(row)
        if content is not None and content.holders is not holders:
            listed = content.hashes[content.num_lost :]
            content.holders.remove(row, listed)
            holders.add(row, listed)
            content.holders = holders

    # ---- finding them ---------------------------------------------------------------------

    def matches(self, token_ids: Sequence[int], tenant: str | None = None) -> Iterator[Match]:
        """Rows that hold a beginning of `token_ids`, the longest beginnings first.

        Cost: one hash per block, as far as they are found.
        """
        found = []
        for each in _chain(_as_array(token_ids), [], tenant):
            if each not in self._live and each not in self._parked and each not in self._away:
                break
            found.append(each)
        for num_blocks in range(len(found), 0, -1):
            hash_ = found[num_blocks - 1]
            if hash_ in self._parked or hash_ in self._live:
                yield Match(num_blocks * BLOCK_TOKENS, hash_, self._parked, self._live)

    def beginnings(self, num_blocks: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """What a sequence can begin with now, of so many blocks, with the hash of the last one.

        What several rows hold comes as often.

        Args:
            num_blocks: Lengths to look at, ascending.

        Cost: 0.1 µs for each row and length.
        """
        for content in self._contents.values():
            if content.holders is self._away:
                continue
            for each in num_blocks:
                if each > len(content.hashes):
                    break
                if each > content.num_lost:
                    yield each, content.hashes[each - 1]

    def note_hit(self, row: int, num_tokens: int) -> None:
        """A sequence began with `num_tokens` tokens of `row`."""
        self.num_hits += 1
        self.num_hit_tokens += num_tokens
        if row in self._contents:
            self._contents[row].num_hits += 1

    def note_miss(self) -> None:
        """A sequence found nothing to begin with."""
        self.num_misses += 1


def block_hashes(token_ids: Sequence[int], tenant: str | None = None) -> Iterator[bytes]:
    """The hashes of the whole blocks of `token_ids`, in every process the same.

    Raises:
        ConfigError: They are not token ids.

    Cost: about 1 µs per block of 16 tokens.
    """
    return _chain(_as_array(token_ids), [], tenant)


def _chain(tokens: array[int], known: Sequence[bytes], tenant: str | None) -> Iterator[bytes]:
    """The hashes of the whole blocks of `tokens` that come after the `known` ones."""
    parent = known[-1] if known else _digest(b"vmkv prefix 1" + (tenant or "").encode())
    first = len(known) * BLOCK_TOKENS
    new = tokens[first:]
    if sys.byteorder == "big":
        new.byteswap()
    data, block_bytes = new.tobytes(), BLOCK_TOKENS * new.itemsize
    for start in range(0, len(data) - block_bytes + 1, block_bytes):
        parent = _digest(parent + data[start : start + block_bytes])
        yield parent


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def _as_array(token_ids: Sequence[int]) -> array[int]:
    try:
        # Iterated, because an array would take bytes for the memory of other integers.
        return array("q", iter(token_ids))
    except (TypeError, OverflowError) as error:
        raise ConfigError(f"token ids must be integers: {error}") from error
