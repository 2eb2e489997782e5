"""Which rows hold the beginning of a prompt, in whole blocks of tokens.

As in vLLM's automatic prefix caching, but a hit names a *row*, live or parked, rather than a block:
its extents are mapped again for the new sequence, or the parked row is adopted as it is. Found by
comparing tokens (`prefix.py`), since each row knows its own.

Other processes know a beginning by a chained hash, so that one stands for everything up to its
block's end:

    hash(block i) = blake2b(hash(block i - 1), tokens of block i),   hash(block -1) = tenant

Python's own `hash` is neither chained nor stable.

Torch-free, and knows no memory: whether a row still has what it held is its owner's to say
(`truncate`). To be changed, and searched, under the pool's lock.
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
    """Where a row is, for who looks for one."""

    PARKED = 0
    LIVE = 1
    #: Nobody can begin with it.
    AWAY = 2


class Node:
    """A run of whole blocks.

    Attributes:
        parent: What comes before; None for the root.
        key: What it is found by there.
        end_bytes: How much there is up to its end. Stays, where the node is split or joined: who
            does not hold the lock may ask a row how much it holds.
        run: The blocks.
        rows: By `Where`, the rows that hold it; the last to come is the last.
        children: What comes behind, by the first block.
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
        """How much comes before."""
        return self.end_bytes - len(self.run)

    @property
    def above(self) -> Node:
        """The parent of what has one."""
        assert self.parent is not None
        return self.parent


@dataclass
class Path:
    """Where a row is listed: at the nodes from the root to `end`.

    Attributes:
        row: The row.
        tenant: Whose it is: what has another one is never found.
        where: Where the row is.
        end: Where what it holds ends.
        lost_bytes: Up to there it is `AWAY`, wherever the row is.
    """

    row: int
    tenant: bytes
    where: Where
    end: Node
    lost_bytes: int = 0


class PrefixTree:
    """The tree of what rows hold, in blocks of `block_bytes`.

    Attributes:
        num_cuts: How often a node was split, joined or removed. While it stays, a node that was
            found holds what it did, and perhaps more behind.
    """

    def __init__(self, block_bytes: int):
        self.block_bytes = block_bytes
        self.num_cuts = 0
        self._root = Node(None, b"")

    # ---- what rows hold -------------------------------------------------------------------

    def path(self, row: int, tenant: bytes) -> Path:
        """The path of a live row that holds nothing yet."""
        return Path(row, tenant, Where.LIVE, self._root)

    def extend(self, path: Path, blocks: bytes) -> None:
        """The row holds `blocks`, all of them whole, behind what it held.

        Cost: a comparison for each node that holds some of them, and a copy of what none holds.
        """
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
        """The row, which held nothing, holds the first `num_bytes`, whole blocks, of another.

        Cost: of each node.
        """
        node = other.end
        while node.start_bytes >= num_bytes and node is not self._root:
            node = node.above
        if node.end_bytes > num_bytes:
            node = self._split(node, num_bytes - node.start_bytes)
        path.end = node
        while node is not self._root:
            node.rows[path.where][path.row] = None
            node = node.above

    def cut(self, path: Path, num_bytes: int) -> None:
        """The row holds `num_bytes`, whole blocks, at most."""
        while path.end.end_bytes > num_bytes:
            node = path.end
            if node.start_bytes < num_bytes:
                self._split(node, num_bytes - node.start_bytes)
            path.end = node.above
            self._unlist(node, path.row)
        path.lost_bytes = min(path.lost_bytes, num_bytes)

    def move(self, path: Path, where: Where) -> None:
        """The row is somewhere else now, with what is not lost of it."""
        if where is not path.where:
            self._relist(path, path.lost_bytes, path.end.end_bytes, where)
            path.where = where

    def lose(self, path: Path, num_bytes: int) -> None:
        """Nobody can begin with `num_bytes`, whole blocks, of the row or less any more."""
        lost_bytes = min(num_bytes, path.end.end_bytes)
        if lost_bytes > path.lost_bytes:
            self._relist(path, path.lost_bytes, lost_bytes, Where.AWAY)
            path.lost_bytes = lost_bytes

    def _relist(self, path: Path, start_bytes: int, end_bytes: int, where: Where) -> None:
        """List the row as being `where` from here to there, both between blocks."""
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
        """What the row holds from here to there."""
        runs: list[memoryview] = []
        node = path.end
        while node.end_bytes > start_bytes:
            if node.start_bytes < end_bytes:
                start = max(0, start_bytes - node.start_bytes)
                runs.append(memoryview(node.run)[start : end_bytes - node.start_bytes])
            node = node.above
        return b"".join(reversed(runs))

    # ---- finding them ---------------------------------------------------------------------

    def find(self, tenant: bytes, data: bytes, num_bytes: int) -> list[tuple[Node, int]]:
        """The nodes that hold a beginning of the first `num_bytes` of `data`, from the root on.

        Each with how much of `data` is held up to its end, in whole blocks. Only of the last one
        more may be held than that.

        Cost: a comparison for each node.
        """
        found: list[tuple[Node, int]] = []
        node, at = self._root, 0
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
        """What the child of `node` is found by that holds `data` from `at` on."""
        block = data[at : at + self.block_bytes]
        return tenant + block if node is self._root else block

    def _common_bytes(self, node: Node, data: bytes, start: int, end: int) -> int:
        """How much of `node`, in whole blocks, is what `data` has from `start` on."""
        run, unit = node.run, self.block_bytes
        if data.startswith(run, start, end):  # Mostly all of it agrees.
            return len(run)
        view = memoryview(data)
        differs = min(len(run), end - start) // unit + 1
        # Otherwise: `same` blocks do, and not all of `differs` do.
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
        """Whether nothing comes behind `node`, and only this row holds it, all in one place."""
        return (
            not node.children
            and sum(map(len, node.rows)) == 1
            and path.row in node.rows[path.where]
            and node.start_bytes >= path.lost_bytes
        )

    def _split(self, node: Node, num_bytes: int) -> Node:
        """Make a node of the first `num_bytes` of `node`, which keeps the rest; returns it.

        So whoever ends at `node` still does.
        """
        self.num_cuts += 1
        first = Node(node.parent, node.key, node.run[:num_bytes])
        first.rows = tuple(map(dict, node.rows))
        node.above.children[node.key] = first
        del node.run[:num_bytes]
        node.parent, node.key = first, bytes(node.run[: self.block_bytes])
        first.children[node.key] = node
        return first

    def _unlist(self, node: Node, row: int) -> None:
        """`row`, which ends before it, does not hold `node` any more."""
        for rows in node.rows:
            rows.pop(row, None)
        if not any(node.rows):
            self.num_cuts += 1
            del node.above.children[node.key]
        elif len(node.children) == 1:
            [child] = node.children.values()
            # Those who hold the child hold the node. With as many in each place, none ends here.
            if [*map(len, node.rows)] == [*map(len, child.rows)]:
                self.num_cuts += 1
                child.run[:0] = node.run
                child.parent, child.key = node.above, node.key
                node.above.children[node.key] = child


# ---- prefix --------------------------------------------------------------------------------------

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
