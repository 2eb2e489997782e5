"""Which rows hold which beginnings: a radix tree over blocks, as SGLang's RadixAttention has one.

    root --- system prompt --+-- question --- answer     row 0
                             +-- question                rows 1, 2

A node is a run of whole blocks that the same rows hold: where rows part, or one of them ends, a
node ends. A row is listed at every node from the root to where it ends. So what it costs to list a
row, or to find one, counts nodes, not blocks: that a run agrees is one comparison of memory. What
is compared is what is held, so nothing is found that is not equal.

Knows bytes and blocks, not what they mean. Not locked: see `prefix.py`.
"""

from __future__ import annotations

import enum
import sys
from dataclasses import dataclass


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
