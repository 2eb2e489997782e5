"""The prefix index: which rows hold the beginning of a prompt, in whole blocks of tokens.

vLLM's automatic prefix caching finds blocks; here a hit is a *row*, live or parked, whose extents
are mapped again or which is adopted. A tree of token blocks finds it by comparing tokens. For other
processes a chained hash, unlike Python's the same everywhere, stands for all tokens up to a block's
end:

    hash(block i) = blake2b(hash(block i - 1), tokens of block i),   hash(block -1) = tenant

Needs no torch and knows no memory: the owner calls `truncate` when a row loses tokens. Guarded by
the pool's lock.

See DESIGN.md, Note [Parked rows are the prefix cache].
"""

from __future__ import annotations

import ctypes
import enum
import hashlib
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from ...errors import ConfigError
from .._native import pack_token_ids

# ---- prefix tree ---------------------------------------------------------------------------------


class Where(enum.IntEnum):
    """The state of a row in the index."""

    PARKED = 0
    LIVE = 1
    #: Not offered to new sequences.
    AWAY = 2


class Node:
    """A run of whole blocks in the tree; `rows` lists its rows by `Where`, oldest first.

    `end_bytes` is the length from the root to its end. Splits and joins leave it as it is, so that
    threads without the lock can ask a row for its length.
    """

    __slots__ = ("children", "end_bytes", "key", "parent", "rows", "run")

    def __init__(self, parent: Node | None, key: bytes, run: bytes | bytearray = b""):
        self.parent = parent
        self.key = key
        self.run = bytearray(run)
        self.end_bytes: int = len(run) + (parent.end_bytes if parent is not None else 0)
        self.rows: tuple[dict[int, None], ...] = ({}, {}, {})
        self.children: dict[bytes, Node] = {}

    @property
    def start_bytes(self) -> int:
        """Bytes from the root to its start."""
        return self.end_bytes - len(self.run)

    @property
    def above(self) -> Node:
        """The parent of a node other than the root."""
        assert self.parent is not None
        return self.parent


@dataclass
class Path:
    """The recorded tokens of a row: whole blocks in the tree, root to `end`, and the tail behind.

    The first `lost_bytes` are listed as `AWAY`. `hashes` are those of the first blocks.
    """

    row: int
    tenant: bytes
    where: Where
    end: Node
    lost_bytes: int = 0
    tail: bytes = b""
    hashes: list[bytes] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """The number of recorded tokens."""
        return (self.end.end_bytes + len(self.tail)) // _TOKEN_BYTES


class PrefixTree:
    """The tree of token blocks that rows hold; `num_cuts` counts splits, joins and removals."""

    def __init__(self, block_bytes: int):
        self.block_bytes = block_bytes
        self.num_cuts = 0
        self.root = Node(None, b"")

    # ---- contents -------------------------------------------------------------------------

    def extend(self, path: Path, blocks: bytes) -> None:
        """Add whole `blocks` to the row's end. Cost: a comparison for each node that holds some."""
        at = 0
        while at < len(blocks):
            node = path.end
            key = self._key(node, path.tenant, blocks, at)
            child = node.children.get(key)
            if child is None:
                rest = blocks[at:]
                if self._is_the_rows_alone(node, path):
                    node.run += rest
                    node.end_bytes += len(rest)
                    return
                child = node.children[key] = Node(node, key, rest)
            else:
                common_bytes = self._common_bytes(child, blocks, at, len(blocks))
                if common_bytes < len(child.run):
                    child = self._split(child, common_bytes)
            child.rows[path.where][path.row] = None
            path.end = child
            at += len(child.run)

    def follow(self, path: Path, other: Path, num_bytes: int) -> None:
        """List a row that held nothing at the first `num_bytes` (whole blocks) of another."""
        node = other.end
        while node.start_bytes >= num_bytes and node is not self.root:
            node = node.above
        if node.end_bytes > num_bytes:
            node = self._split(node, num_bytes - node.start_bytes)
        path.end = node
        while node is not self.root:
            node.rows[path.where][path.row] = None
            node = node.above

    def cut(self, path: Path, num_bytes: int) -> None:
        """Shorten the row to `num_bytes`, whole blocks."""
        while path.end.end_bytes > num_bytes:
            node = path.end
            if node.start_bytes < num_bytes:
                self._split(node, num_bytes - node.start_bytes)
            path.end = node.above
            self._unlist(node, path.row)
        path.lost_bytes = min(path.lost_bytes, num_bytes)

    def move(self, path: Path, where: Where) -> None:
        """List a row where rows of its new state are found; what it has lost stays lost."""
        if where is not path.where:
            self._relist(path, path.lost_bytes, path.end.end_bytes, where)
            path.where = where

    def lose(self, path: Path, num_bytes: int) -> None:
        """Stop offering the row's prefixes of up to `num_bytes`, a multiple of a block."""
        lost_bytes = min(num_bytes, path.end.end_bytes)
        if lost_bytes > path.lost_bytes:
            self._relist(path, path.lost_bytes, lost_bytes, Where.AWAY)
            path.lost_bytes = lost_bytes

    def _relist(self, path: Path, start_bytes: int, end_bytes: int, where: Where) -> None:
        node = path.end
        while node.end_bytes > start_bytes:
            if node.start_bytes < end_bytes:
                if node.end_bytes > end_bytes:
                    node = self._split(node, end_bytes - node.start_bytes)
                if node.start_bytes < start_bytes:
                    self._split(node, start_bytes - node.start_bytes)
                del node.rows[path.where][path.row]
                node.rows[where][path.row] = None
            node = node.above

    def held(self, path: Path, start_bytes: int = 0, end_bytes: int = sys.maxsize) -> bytes:
        """Return the row's bytes in a range."""
        runs: list[memoryview] = []
        node = path.end
        while node.end_bytes > start_bytes:
            if node.start_bytes < end_bytes:
                start = max(0, start_bytes - node.start_bytes)
                runs.append(memoryview(node.run)[start : end_bytes - node.start_bytes])
            node = node.above
        return b"".join(reversed(runs))

    # ---- lookup ---------------------------------------------------------------------------

    def find(self, tenant: bytes, data: bytes, num_bytes: int) -> list[tuple[Node, int]]:
        """Return the nodes that hold a beginning of `data[:num_bytes]`, from the root on.

        Each comes with the end of its match in `data`, in whole blocks; only the last node can hold
        more than its match. Cost: a comparison for each node.
        """
        found: list[tuple[Node, int]] = []
        node, at = self.root, 0
        while at + self.block_bytes <= num_bytes and at == node.end_bytes:
            child = node.children.get(self._key(node, tenant, data, at))
            if child is None:
                break
            node = child
            at += self._common_bytes(node, data, at, num_bytes)
            found.append((node, at))
        return found

    # ---- nodes ----------------------------------------------------------------------------

    def _key(self, node: Node, tenant: bytes, data: bytes, at: int) -> bytes:
        block = data[at : at + self.block_bytes]
        return tenant + block if node is self.root else block

    def _common_bytes(self, node: Node, data: bytes, start: int, end: int) -> int:
        """Bytes, in whole blocks, that the run of `node` has in common with `data[start:end]`."""
        run, unit = node.run, self.block_bytes
        if data.startswith(run, start, end):  # The common case: the whole run agrees.
            return len(run)
        view = memoryview(data)
        differs = min(len(run), end - start) // unit + 1
        # Binary search: the first `same` blocks agree, the first `differs` do not all.
        same, asked = 0, differs - 1
        while same < asked:
            if run.startswith(view[start + same * unit : start + asked * unit], same * unit):
                same = asked
            else:
                differs = asked
            asked = (same + differs) // 2
        return same * unit

    @staticmethod
    def _is_the_rows_alone(node: Node, path: Path) -> bool:
        """Whether `node` is a leaf that no other row holds, and that this row still offers."""
        return (
            not node.children
            and sum(map(len, node.rows)) == 1
            and path.row in node.rows[path.where]
            and node.start_bytes >= path.lost_bytes
        )

    def _split(self, node: Node, num_bytes: int) -> Node:
        """Split off the first `num_bytes` of `node` as its new parent; paths keep their end."""
        self.num_cuts += 1
        first = Node(node.parent, node.key, node.run[:num_bytes])
        first.rows = tuple(map(dict, node.rows))
        node.above.children[node.key] = first
        del node.run[:num_bytes]
        node.parent, node.key = first, bytes(node.run[: self.block_bytes])
        first.children[node.key] = node
        return first

    def _unlist(self, node: Node, row: int) -> None:
        """Remove `row` from `node`; then remove an empty node, or join it with a single child."""
        for rows in node.rows:
            rows.pop(row, None)
        if not any(node.rows):
            self.num_cuts += 1
            del node.above.children[node.key]
        elif len(node.children) == 1:
            [child] = node.children.values()
            # Rows of the child are rows of the node; with equal counts no row ends at the node.
            if [*map(len, node.rows)] == [*map(len, child.rows)]:
                self.num_cuts += 1
                child.run[:0] = node.run
                child.parent, child.key = node.above, node.key
                node.above.children[node.key] = child


# ---- prefix --------------------------------------------------------------------------------------

#: Tokens of a block; hits are cut to whole blocks. A 2 MiB page of Llama-3-8B holds as many.
BLOCK_TOKENS = 16
_TOKEN_BYTES = 8
_DIGEST_BYTES = 16


@dataclass(frozen=True)
class Match:
    """Rows that hold the first `num_tokens` tokens of a prompt; looks again if the tree changes."""

    num_tokens: int
    _tree: PrefixTree
    _tenant: bytes
    _tokens: bytes
    _node: Node
    _num_cuts: int

    def rows(self, *states: Where) -> Iterator[int]:
        """Yield the rows in these states, or parked and then live ones; last listed first."""
        for where in states or (Where.PARKED, Where.LIVE):
            node = self._node
            if self._tree.num_cuts != self._num_cuts:
                num_bytes = self.num_tokens * _TOKEN_BYTES
                found = self._tree.find(self._tenant, self._tokens, num_bytes)
                if not found or found[-1][1] != num_bytes:
                    continue
                node = found[-1][0]
            yield from reversed(node.rows[where])


class PrefixIndex:
    """The index from prompts to rows.

    Each row is listed by state: parked, live, or away (swapped out, or without the window that a
    new sequence would see), so that finding one of a kind costs the same for any number of rows.
    """

    def __init__(self) -> None:
        self.num_hits = 0
        self.num_misses = 0
        self.num_hit_tokens = 0
        self._contents: dict[int, Path] = {}
        self._tree = PrefixTree(BLOCK_TOKENS * _TOKEN_BYTES)

    def count(self, num_tokens: int) -> None:
        """Count a sequence that began with `num_tokens` tokens of its prompt."""
        self.num_hits += num_tokens > 0
        self.num_misses += not num_tokens
        self.num_hit_tokens += num_tokens

    # ---- contents -------------------------------------------------------------------------

    def record(self, row: int, token_ids: Sequence[int], tenant: str | None = None) -> None:
        """Record that a live row holds `token_ids` after those recorded before, for a tenant."""
        tokens = as_bytes(token_ids)
        if not tokens:
            return
        content = self._contents.get(row)
        if content is None:
            content = self._contents[row] = self._empty(row, tenant_bytes(tenant))
        tokens = content.tail + tokens
        whole_bytes = self._whole_bytes(len(tokens))
        self._tree.extend(content, tokens[:whole_bytes])
        content.tail = tokens[whole_bytes:]

    def truncate(self, row: int, num_tokens: int = 0) -> None:
        """Forget the tokens of `row` after the first `num_tokens`."""
        content = self._contents.get(row)
        if content is None or content.num_tokens <= num_tokens:
            return
        num_bytes = num_tokens * _TOKEN_BYTES
        whole_bytes = self._whole_bytes(num_bytes)
        content.tail = self._held(content, whole_bytes, num_bytes)
        self._tree.cut(content, whole_bytes)
        del content.hashes[whole_bytes // self._tree.block_bytes :]
        if not num_tokens:
            del self._contents[row]

    def lose_short(self, row: int, num_tokens: int) -> None:
        """Stop offering prefixes of `row` that are shorter than `num_tokens`."""
        content = self._contents.get(row)
        if content is not None:
            self._tree.lose(content, self._whole_bytes(max(0, num_tokens - 1) * _TOKEN_BYTES))

    def copy(self, moves: Iterable[tuple[int, int, str | None]], num_tokens: int) -> None:
        """Record sources' first `num_tokens` for targets; moves are `(source, target, tenant)`."""
        num_bytes = num_tokens * _TOKEN_BYTES
        found = [(self._contents.get(source), target, tenant) for source, target, tenant in moves]
        targets = {target for _, target, _ in found}
        copies: list[tuple[int, str | None, Path | memoryview]] = []
        for content, target, tenant in found:
            if content is not None:
                # If the source keeps its tokens, its path is followed without comparing tokens.
                if content.row not in targets and content.tenant == tenant_bytes(tenant):
                    copies.append((target, tenant, content))
                else:
                    held = memoryview(self._held(content, 0, num_bytes))
                    copies.append((target, tenant, held.cast("q")))
        for target in targets:
            self.truncate(target)
        for target, tenant, source in copies:
            if isinstance(source, memoryview):
                self.record(target, source, tenant)
            elif num_bytes:
                self._contents[target] = self._beside(source, target, num_bytes)

    def _beside(self, source: Path, row: int, num_bytes: int) -> Path:
        content = self._empty(row, source.tenant)
        self._tree.follow(content, source, self._whole_bytes(num_bytes))
        whole_bytes = content.end.end_bytes
        content.tail = self._held(source, whole_bytes, num_bytes)
        content.hashes = source.hashes[: whole_bytes // self._tree.block_bytes]
        return content

    def _empty(self, row: int, tenant: bytes) -> Path:
        return Path(row, tenant, Where.LIVE, self._tree.root)

    def num_recorded(self, row: int) -> int:
        """The number of recorded tokens of `row`."""
        content = self._contents.get(row)
        return 0 if content is None else content.num_tokens

    @property
    def recorded(self) -> Set[int]:
        """The rows with recorded tokens."""
        return self._contents.keys()  # Rows without tokens have no entry.

    def holds(self, row: int, token_ids: Sequence[int], start: int, end: int) -> bool:
        """Whether the tokens `[start, end)` of `row` are recorded, and those of `token_ids`."""
        start_bytes, end_bytes = start * _TOKEN_BYTES, end * _TOKEN_BYTES
        wanted = as_bytes(token_ids)[start_bytes:end_bytes]
        return self._held(self._contents[row], start_bytes, end_bytes) == wanted

    def token_ids(self, row: int) -> list[int]:
        """The recorded tokens of `row`."""
        content = self._contents.get(row)
        return [] if content is None else array("q", self._held(content)).tolist()

    def tenant(self, row: int) -> bytes:
        """The tenant of the recorded tokens of `row`; b"" without any."""
        content = self._contents.get(row)
        return b"" if content is None else content.tenant

    def hashes(self, row: int) -> Sequence[bytes]:
        """The hashes of the whole blocks of recorded tokens of `row`. Cost: 1 µs per new one."""
        content = self._contents.get(row)
        return () if content is None else self._hashed(content)

    def _hashed(self, content: Path) -> list[bytes]:
        known = content.hashes
        blocks = self._tree.held(content, len(known) * self._tree.block_bytes)
        known.extend(_chain(blocks, known[-1] if known else _first_parent(content.tenant)))
        return known

    def _held(self, content: Path, start_bytes: int = 0, end_bytes: int = sys.maxsize) -> bytes:
        whole_bytes = content.end.end_bytes
        tail = content.tail[max(0, start_bytes - whole_bytes) : max(0, end_bytes - whole_bytes)]
        return self._tree.held(content, start_bytes, end_bytes) + tail

    def _whole_bytes(self, num_bytes: int) -> int:
        return num_bytes // self._tree.block_bytes * self._tree.block_bytes

    # ---- states ---------------------------------------------------------------------------

    def move(self, row: int, where: Where) -> None:
        """Change the state of `row`. Tokens of a row that is away stay recorded, but unfound."""
        content = self._contents.get(row)
        if content is not None:
            self._tree.move(content, where)

    # ---- lookup ---------------------------------------------------------------------------

    def matches(
        self, token_ids: Sequence[int], tenant: str | None = None, max_tokens: int | None = None
    ) -> Iterator[Match]:
        """Yield matches of rows that hold a beginning of `token_ids`, the longest first.

        Changes to rows between two matches are seen. Cost: about 5 ns per token, and a comparison
        for each place where rows part.
        """
        whose, tokens = tenant_bytes(tenant), as_bytes(token_ids)
        num_bytes = len(tokens) if max_tokens is None else max_tokens * _TOKEN_BYTES
        while num_bytes:
            for node, end_bytes in reversed(self._tree.find(whose, tokens, num_bytes)):
                if node.rows[Where.PARKED] or node.rows[Where.LIVE]:
                    num_tokens, num_cuts = end_bytes // _TOKEN_BYTES, self._tree.num_cuts
                    yield Match(num_tokens, self._tree, whose, tokens, node, num_cuts)
                    num_bytes = end_bytes - self._tree.block_bytes
                    break
            else:
                break

    def num_matched(self, token_ids: Sequence[int], tenant: str | None = None) -> int:
        """Return how many of the tokens, in whole blocks and without the last, some row holds."""
        match = next(self.matches(token_ids, tenant, max(0, len(token_ids) - 1)), None)
        return 0 if match is None else match.num_tokens

    def beginnings(self, num_blocks: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """Yield `(length, last hash)` of beginnings on offer, for the ascending `num_blocks`.

        Cost: about 1 µs per new hash.
        """
        for content in self._contents.values():
            if content.where is Where.AWAY:
                continue
            hashes, lost_bytes = self._hashed(content), content.lost_bytes
            for each in num_blocks:
                if each > len(hashes):
                    break
                if each * self._tree.block_bytes > lost_bytes:
                    yield each, hashes[each - 1]


def block_hashes(token_ids: Sequence[int], tenant: str | None = None) -> Iterator[bytes]:
    """Yield the hashes of the whole blocks of `token_ids`, in every process the same."""
    return _chain(as_bytes(token_ids), _first_parent(tenant_bytes(tenant)))


def _chain(tokens: bytes, parent: bytes) -> Iterator[bytes]:
    """Yield the hashes of the whole blocks of `tokens`, which follow a block of hash `parent`."""
    if sys.byteorder == "big":
        swapped = array("q", tokens)
        swapped.byteswap()
        tokens = swapped.tobytes()
    block_bytes = BLOCK_TOKENS * _TOKEN_BYTES
    for start in range(0, len(tokens) - block_bytes + 1, block_bytes):
        parent = _digest(parent + tokens[start : start + block_bytes])
        yield parent


def _first_parent(tenant: bytes) -> bytes:
    return _digest(b"vmkv prefix 1" + tenant)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def tenant_bytes(tenant: str | None) -> bytes:
    """Encode a tenant so that None differs from the empty name."""
    return b"" if tenant is None else b"." + tenant.encode(errors="surrogatepass")


def as_bytes(token_ids: Any) -> bytes:
    """Convert token ids to native 64-bit integers; contiguous memory is used as it is."""
    try:
        if isinstance(token_ids, array):
            token_ids = memoryview(token_ids)
        if isinstance(token_ids, memoryview) and token_ids.format == "q":
            whole = token_ids.obj
            if isinstance(whole, bytes) and len(whole) == token_ids.nbytes:
                return whole
            return token_ids.tobytes()
        if hasattr(token_ids, "data_ptr"):  # A tensor: iterating would make a tensor per number.
            return _bytes_of_tensor(token_ids)
        return pack_token_ids(*token_ids)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"token ids must be integers: {error}") from error


def _bytes_of_tensor(token_ids: Any) -> bytes:
    """Read a tensor through its address; numpy would take as long as the rest of a hit."""
    if token_ids.is_floating_point() or token_ids.ndim != 1:
        raise TypeError(f"a tensor of {token_ids.dtype} and shape {tuple(token_ids.shape)}")
    whole = token_ids.cpu().long().contiguous()
    return ctypes.string_at(whole.data_ptr(), _TOKEN_BYTES * len(whole))
