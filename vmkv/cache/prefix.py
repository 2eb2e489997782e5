"""Which rows hold the beginning of a prompt, in whole blocks of tokens.

As in vLLM's automatic prefix caching, but a hit names a *row*, live or parked, rather than a block:
its extents are mapped again for the new sequence, or the parked row is adopted as it is. Found by
comparing tokens (`prefix_tree.py`), since each row knows its own.

Other processes know a beginning by a chained hash, so that one stands for everything up to its
block's end:

    hash(block i) = blake2b(hash(block i - 1), tokens of block i),   hash(block -1) = tenant

Python's own `hash` is neither chained nor stable.

Torch-free, and knows no memory: whether a row still has what it held is its owner's to say
(`truncate`). To be changed, and searched, under the pool's lock.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from .._native import pack_token_ids
from ..errors import ConfigError
from .prefix_tree import Node, Path, PrefixTree, Where

#: Tokens of a block: what a hit can miss by at most. A page of Llama-3-8B holds as many.
BLOCK_TOKENS = 16
_TOKEN_BYTES = 8
_DIGEST_BYTES = 16


@dataclass
class _Content:
    """What one row is known to hold, from its first token on.

    Attributes:
        tenant: Whose it is.
        path: Where its whole blocks are in the tree.
        tail: The tokens behind those.
        hashes: Of its first whole blocks, as far as somebody has asked.
        num_hits: How often it was begun from.
    """

    tenant: str | None
    path: Path
    tail: bytes = b""
    hashes: list[bytes] = field(default_factory=list)
    num_hits: int = 0

    @property
    def num_tokens(self) -> int:
        """How many tokens it holds."""
        return (self.path.end.end_bytes + len(self.tail)) // _TOKEN_BYTES


class Match:
    """Rows that hold the first `num_tokens` tokens of a prompt, and can be begun from.

    Args:
        tree: Where they were found.
        tenant: Whose the prompt is.
        tokens: The prompt.
        found: The node that holds the last of those tokens, and how much is held up to there.
    """

    __slots__ = ("_found", "_num_cuts", "_tenant", "_tokens", "_tree", "num_tokens")

    def __init__(self, tree: PrefixTree, tenant: bytes, tokens: bytes, found: tuple[Node, int]):
        self.num_tokens = found[1] // _TOKEN_BYTES
        self._tree = tree
        self._tenant = tenant
        self._tokens = tokens
        self._found = found
        self._num_cuts = tree.num_cuts

    @property
    def parked(self) -> Iterator[int]:
        """Those parked now, the last one first."""
        return self._rows(Where.PARKED)

    @property
    def live(self) -> Iterator[int]:
        """Those live now, the last one first."""
        return self._rows(Where.LIVE)

    @property
    def rows(self) -> Iterator[int]:
        """All of them now."""
        yield from self.parked
        yield from self.live

    def _rows(self, where: Where) -> Iterator[int]:
        node, num_bytes = self._found
        if self._tree.num_cuts != self._num_cuts:
            found = self._tree.find(self._tenant, self._tokens, num_bytes)
            if not found or found[-1][1] != num_bytes:
                return iter(())
            node = found[-1][0]
        return reversed(node.rows[where])


class PrefixIndex:
    """From prompts to rows.

    Who holds something is listed by whether it is parked, live, or away: swapped out, or a window
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
        self._tree = PrefixTree(BLOCK_TOKENS * _TOKEN_BYTES)

    # ---- what rows hold -------------------------------------------------------------------

    def record(self, row: int, token_ids: Sequence[int], tenant: str | None = None) -> None:
        """`row`, which is live, now holds `token_ids` after those recorded before.

        Args:
            row: The row.
            token_ids: What was appended.
            tenant: Whose they are: only the same tenant finds them.

        Raises:
            ConfigError: They are not token ids. Nothing changed.

        Cost: about 10 ns per token.
        """
        self._record(row, tenant, _as_bytes(token_ids))

    def _record(self, row: int, tenant: str | None, tokens: bytes) -> None:
        """`row` holds `tokens` behind what it held."""
        if not tokens:
            return
        content = self._contents.get(row)
        if content is None:
            content = _Content(tenant, self._tree.path(row, _tenant_bytes(tenant)))
            self._contents[row] = content
        tokens = content.tail + tokens
        whole_bytes = self._whole_bytes(len(tokens))
        self._tree.extend(content.path, tokens[:whole_bytes])
        content.tail = tokens[whole_bytes:]

    def truncate(self, row: int, num_tokens: int = 0) -> None:
        """`row` holds `num_tokens` tokens at most from now on."""
        content = self._contents.get(row)
        if content is None or content.num_tokens <= num_tokens:
            return
        num_bytes = num_tokens * _TOKEN_BYTES
        whole_bytes = self._whole_bytes(num_bytes)
        content.tail = self._held(content, whole_bytes, num_bytes)
        self._tree.cut(content.path, whole_bytes)
        del content.hashes[whole_bytes // self._tree.block_bytes :]
        if not num_tokens:
            del self._contents[row]

    def lose_short(self, row: int, num_tokens: int) -> None:
        """Of `row`, nobody can begin with fewer than `num_tokens` tokens any more."""
        content = self._contents.get(row)
        if content is not None:
            num_bytes = max(0, num_tokens - 1) * _TOKEN_BYTES
            self._tree.lose(content.path, self._whole_bytes(num_bytes))

    def copy(self, moves: Iterable[tuple[int, int, str | None]], num_tokens: int) -> None:
        """Each target, which is live, holds what its source does now of its first `num_tokens`.

        Args:
            moves: `(source, target, tenant)`: two rows, and whose the target is.
            num_tokens: How much of it.
        """
        num_bytes = num_tokens * _TOKEN_BYTES
        found = [(self._contents.get(source), target, tenant) for source, target, tenant in moves]
        targets = {target for _, target, _ in found}
        copies: list[tuple[int, str | None, _Content | bytes]] = []
        for content, target, tenant in found:
            if content is not None:
                # Whose source stays is listed beside it, without a look at tokens.
                stays = content.path.row not in targets and content.tenant == tenant
                source = content if stays else self._held(content, 0, num_bytes)
                copies.append((target, tenant, source))
        for target in targets:
            self.truncate(target)
        for target, tenant, source in copies:
            if isinstance(source, bytes):
                self._record(target, tenant, source)
            elif num_bytes:
                self._contents[target] = self._beside(source, target, num_bytes)

    def begin(self, row: int, source: int, num_tokens: int, tenant: str | None) -> None:
        """`row`, which is live and held nothing, holds what `source` does of so many tokens.

        Args:
            row: The row.
            source: Another row.
            num_tokens: How many of its first tokens.
            tenant: Whose `row` is.
        """
        content, num_bytes = self._contents.get(source), num_tokens * _TOKEN_BYTES
        if content is None or not num_bytes:
            return
        if content.tenant == tenant:
            # Listed beside it, without a look at tokens.
            self._contents[row] = self._beside(content, row, num_bytes)
        else:
            self._record(row, tenant, self._held(content, 0, num_bytes))

    def _beside(self, source: _Content, row: int, num_bytes: int) -> _Content:
        """What `row`, which held nothing, holds if that is the first `num_bytes` of `source`."""
        path = self._tree.path(row, source.path.tenant)
        self._tree.follow(path, source.path, self._whole_bytes(num_bytes))
        whole_bytes = path.end.end_bytes
        tail = self._held(source, whole_bytes, num_bytes) if num_bytes > whole_bytes else b""
        hashes = source.hashes[: whole_bytes // self._tree.block_bytes]
        return _Content(source.tenant, path, tail, hashes)

    def num_recorded(self, row: int) -> int:
        """Tokens that `row` is known to hold."""
        content = self._contents.get(row)
        return 0 if content is None else content.num_tokens

    @property
    def recorded(self) -> Set[int]:
        """The rows of which that is any."""
        return self._contents.keys()  # Without tokens nothing is kept there.

    def token_ids(self, row: int) -> list[int]:
        """The tokens that `row` is known to hold."""
        content = self._contents.get(row)
        return [] if content is None else array("q", self._held(content)).tolist()

    def hashes(self, row: int) -> list[bytes]:
        """The hashes of the whole blocks that `row` is known to hold.

        Cost: about 1 µs per block that nobody has asked about.
        """
        content = self._contents.get(row)
        return [] if content is None else list(self._hashed(content))

    def hits_of(self, row: int) -> int:
        """How often a sequence has started from `row`, as it is now."""
        content = self._contents.get(row)
        return 0 if content is None else content.num_hits

    def _hashed(self, content: _Content) -> list[bytes]:
        """The hashes of all its whole blocks, which it knows from now on."""
        known = content.hashes
        blocks = self._tree.held(content.path, len(known) * self._tree.block_bytes)
        known.extend(_chain(blocks, known[-1] if known else _first_parent(content.tenant)))
        return known

    def _held(self, content: _Content, start_bytes: int = 0, end_bytes: int = sys.maxsize) -> bytes:
        """Its tokens from here to there."""
        whole_bytes = content.path.end.end_bytes
        tail = content.tail[max(0, start_bytes - whole_bytes) : max(0, end_bytes - whole_bytes)]
        return self._tree.held(content.path, start_bytes, end_bytes) + tail

    def _whole_bytes(self, num_bytes: int) -> int:
        """How much of it is whole blocks."""
        return num_bytes // self._tree.block_bytes * self._tree.block_bytes

    # ---- where they are -------------------------------------------------------------------

    def park(self, row: int) -> None:
        """`row` is parked now."""
        self._move(row, Where.PARKED)

    def take(self, row: int) -> None:
        """`row` is live now, and in device memory."""
        self._move(row, Where.LIVE)

    def hide(self, row: int) -> None:
        """`row` is swapped out: it holds what it did, and nobody can begin with it."""
        self._move(row, Where.AWAY)

    def _move(self, row: int, where: Where) -> None:
        content = self._contents.get(row)
        if content is not None:
            self._tree.move(content.path, where)

    # ---- finding them ---------------------------------------------------------------------

    def matches(
        self,
        token_ids: Sequence[int],
        tenant: str | None = None,
        max_tokens: int | None = None,
    ) -> Iterator[Match]:
        """Rows that hold a beginning of `token_ids`, the longest beginnings first.

        What happens to rows meanwhile is seen.

        Args:
            token_ids: A prompt.
            tenant: Whose it is.
            max_tokens: How long a beginning may be; by default all of it.

        Raises:
            ConfigError: They are not token ids.

        Cost: about 5 ns per token, and a comparison of memory for each place where rows part.
        """
        whose, tokens = _tenant_bytes(tenant), _as_bytes(token_ids)
        num_bytes = len(tokens) if max_tokens is None else max_tokens * _TOKEN_BYTES
        while num_bytes:
            for found in reversed(self._tree.find(whose, tokens, num_bytes)):
                node, end_bytes = found
                if node.rows[Where.PARKED] or node.rows[Where.LIVE]:
                    yield Match(self._tree, whose, tokens, found)
                    num_bytes = end_bytes - self._tree.block_bytes
                    break
            else:
                break

    def beginnings(self, num_blocks: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """What a sequence can begin with now, of so many blocks, with the hash of the last one.

        What several rows hold comes as often.

        Args:
            num_blocks: Lengths to look at, ascending.

        Cost: 0.1 µs for each row and length, and 1 µs for each block that nobody has asked about.
        """
        for content in self._contents.values():
            if content.path.where is Where.AWAY:
                continue
            hashes, lost_bytes = self._hashed(content), content.path.lost_bytes
            for each in num_blocks:
                if each > len(hashes):
                    break
                if each * self._tree.block_bytes > lost_bytes:
                    yield each, hashes[each - 1]

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
    return _chain(_as_bytes(token_ids), _first_parent(tenant))


def _chain(tokens: bytes, parent: bytes) -> Iterator[bytes]:
    """The hashes of the whole blocks of `tokens`, which come after the block of hash `parent`."""
    if sys.byteorder == "big":
        swapped = array("q", tokens)
        swapped.byteswap()
        tokens = swapped.tobytes()
    block_bytes = BLOCK_TOKENS * _TOKEN_BYTES
    for start in range(0, len(tokens) - block_bytes + 1, block_bytes):
        parent = _digest(parent + tokens[start : start + block_bytes])
        yield parent


def _first_parent(tenant: str | None) -> bytes:
    return _digest(b"vmkv prefix 1" + _tenant_bytes(tenant))


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def _tenant_bytes(tenant: str | None) -> bytes:
    """Different for each; nobody in particular is not who has no name."""
    return b"" if tenant is None else b"." + tenant.encode(errors="surrogatepass")


def _as_bytes(token_ids: Any) -> bytes:
    """Eight bytes for each, as the machine has them; what lies so in memory is taken as it is."""
    try:
        if isinstance(token_ids, array):
            token_ids = memoryview(token_ids)
        if isinstance(token_ids, memoryview) and token_ids.format == "q":
            whole = token_ids.obj
            if isinstance(whole, bytes) and len(whole) == token_ids.nbytes:
                return whole
            return token_ids.tobytes()
        if hasattr(token_ids, "data_ptr"):  # A tensor; iterated over, each number would be one.
            return _bytes_of_tensor(token_ids)
        return pack_token_ids(*token_ids)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"token ids must be integers: {error}") from error


def _bytes_of_tensor(token_ids: Any) -> bytes:
    """Through its address: by way of numpy it takes as long as everything else in a hit."""
    if token_ids.is_floating_point() or token_ids.ndim != 1:
        raise TypeError(f"a tensor of {token_ids.dtype} and shape {tuple(token_ids.shape)}")
    whole = token_ids.cpu().long().contiguous()
    return ctypes.string_at(whole.data_ptr(), _TOKEN_BYTES * len(whole))
