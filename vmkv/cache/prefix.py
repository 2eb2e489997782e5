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

from ..errors import ConfigError

#: Tokens of a block: what a hit can miss by at most. A page of Llama-3-8B holds as many.
BLOCK_TOKENS = 16
_DIGEST_BYTES = 16


@dataclass
class _Content:
    """What one row is known to hold, from its first token on."""

    tenant: str | None
    tokens: array[int] = field(default_factory=lambda: array("q"))
    hashes: list[bytes] = field(default_factory=list)  # Of its whole blocks.
    num_hits: int = 0


@dataclass(frozen=True)
class Match:
    """Rows that hold the first `num_tokens` tokens of a prompt."""

    num_tokens: int
    rows: tuple[int, ...]


class PrefixIndex:
    """From prompts to rows.

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
        self._rows: dict[bytes, dict[int, None]] = {}

    # ---- what rows hold -------------------------------------------------------------------

    def record(self, row: int, token_ids: Sequence[int], tenant: str | None = None) -> None:
        """`row` now holds `token_ids` after those recorded before.

        Args:
            row: The row.
            token_ids: What was appended.
            tenant: Whose they are: only the same tenant finds them.

        Raises:
            ConfigError: They are not token ids. Nothing changed.

        Cost: about 1 µs per block of 16 tokens.
        """
        content = self._contents.get(row, _Content(tenant))
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
        for each in content.hashes[first_new:]:
            self._rows.setdefault(each, {})[row] = None

    def truncate(self, row: int, num_tokens: int = 0) -> None:
        """`row` holds `num_tokens` tokens at most from now on."""
        content = self._contents.get(row)
        if content is None or len(content.tokens) <= num_tokens:
            return
        del content.tokens[num_tokens:]
        num_blocks = num_tokens // BLOCK_TOKENS
        for gone in content.hashes[num_blocks:]:
            holders = self._rows[gone]
            del holders[row]
            if not holders:
                del self._rows[gone]
        del content.hashes[num_blocks:]
        if not num_tokens:
            del self._contents[row]

    def copy(self, moves: Iterable[tuple[int, int, str | None]], num_tokens: int) -> None:
        """Each target holds what its source does now, of its first `num_tokens` tokens.

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
            self._record(target, _Content(tenant), tokens, known)

    def num_recorded(self, row: int) -> int:
        """Tokens that `row` is known to hold."""
        content = self._contents.get(row)
        return 0 if content is None else len(content.tokens)

    def token_ids(self, row: int) -> list[int]:
        """The tokens that `row` is known to hold."""
        content = self._contents.get(row)
        return [] if content is None else content.tokens.tolist()

    def hits_of(self, row: int) -> int:
        """How often a sequence has started from `row`, as it is now."""
        content = self._contents.get(row)
        return 0 if content is None else content.num_hits

    # ---- finding them ---------------------------------------------------------------------

    def matches(self, token_ids: Sequence[int], tenant: str | None = None) -> Iterator[Match]:
        """Rows that hold a beginning of `token_ids`, the longest beginnings first.

        Cost: one hash per block, as far as they are found.
        """
        found = []
        for each in _chain(_as_array(token_ids), [], tenant):
            rows = self._rows.get(each)
            if rows is None:
                break
            found.append(tuple(rows))
        for num_blocks in range(len(found), 0, -1):
            yield Match(num_blocks * BLOCK_TOKENS, found[num_blocks - 1])

    def note_hit(self, row: int, num_tokens: int) -> None:
        """A sequence began with `num_tokens` tokens of `row`."""
        self.num_hits += 1
        self.num_hit_tokens += num_tokens
        if row in self._contents:
            self._contents[row].num_hits += 1

    def note_miss(self) -> None:
        """A sequence found nothing to begin with."""
        self.num_misses += 1


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
