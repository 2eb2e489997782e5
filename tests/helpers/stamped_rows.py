"""Rows whose every byte depends on the tokens that it was computed from.

The keys and values that a model computes for a token depend on the token and on all tokens before
it. So does a stamp: a hash of the sequence up to its token, different for each layer and for keys
and values. Only equal prefixes have equal stamps, in any row, so a test detects memory of another
sequence, another position or another time, and a missing copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from helpers.device import Device
from vmkv import KVCache
from vmkv.core.backend import Access
from vmkv.core.cache import LayerGroup, StateGroup, StateShape
from vmkv.core.memory import PageMapping

#: As `vmkv.step.Piece.checkpoints`.
Checkpoints = Sequence[tuple[int, int]]

_LONGEST = 4096
_BITS = (1 << 64) - 1
_FACTOR = 0x9E3779B97F4A7C15  # Odd, so that it has an inverse.
_POWERS = np.array([pow(_FACTOR, at, 1 << 64) for at in range(_LONGEST)], np.uint64)
_INVERSES = np.array(
    [pow(pow(_FACTOR, -1, 1 << 64), at, 1 << 64) for at in range(_LONGEST)], np.uint64
)


class History:
    """The tokens of one sequence, and a hash of the prefix up to each token."""

    def __init__(self, tokens: Iterable[int] = ()):
        self.tokens = list(tokens)
        terms = np.array(self.tokens, np.uint64) + np.uint64(1)
        count = len(terms)
        self._hashes = np.zeros(max(64, 2 * count), np.uint64)
        self._hashes[:count] = np.cumsum(terms * _INVERSES[:count], dtype=np.uint64)
        self._hashes[:count] *= _POWERS[:count]

    def __len__(self) -> int:
        return len(self.tokens)

    def append(self, token: int) -> None:
        count = len(self.tokens)
        if count == len(self._hashes):
            self._hashes = np.concatenate([self._hashes, np.zeros_like(self._hashes)])
        last = int(self._hashes[count - 1]) if count else 0
        self._hashes[count] = (last * _FACTOR + token + 1) & _BITS
        self.tokens.append(token)

    def truncate(self, num_tokens: int) -> None:
        del self.tokens[num_tokens:]

    def hashes(self, start: int, end: int) -> np.ndarray:
        """Hashes of the prefixes up to each token, uint64 `[end - start]`."""
        return self._hashes[start:end]

    def digest(self) -> int:
        """The hash of all tokens."""
        return int(self._hashes[len(self.tokens) - 1])


class _Layer:
    """Keys and values of one layer, as integers: `[rows, tokens, width]` each."""

    def __init__(self, cache: KVCache, layer: int):
        self.group, _ = cache.place(layer)
        self.window_tokens = self.group.window_tokens
        self.tensors = [cache.keys(layer).numpy()[:, :, 0], cache.values(layer).numpy()[:, :, 0]]
        self._factors = [np.uint64(_mixed(4 * layer + at + 1) | 1) for at in range(2)]
        self._lanes = [
            np.array([_mixed(1000 * at + lane) for lane in range(tensor.shape[2])], np.uint64)
            for at, tensor in enumerate(self.tensors)
        ]

    def stamps(self, at: int, hashes: np.ndarray) -> np.ndarray:
        """Keys (0) or values (1) of these tokens, int64 `[tokens, width]`."""
        return (hashes[:, None] * self._factors[at] ^ self._lanes[at]).view(np.int64)

    def first_seen(self, num_past: int) -> int:
        """The first token that a query after `num_past` tokens sees."""
        return 0 if self.window_tokens is None else max(0, num_past - self.window_tokens + 1)


class _States:
    """States as integers, `[rows, width]`: a stamp of all tokens of a sequence."""

    def __init__(self, group: StateGroup):
        [layer] = group.shapes
        [self.tensor] = (each.numpy() for each in group.tensors(layer))
        width = self.tensor.shape[1]
        self._lanes = np.array([_mixed(5000 + lane) for lane in range(width)], np.uint64)

    def stamp(self, history: History, num_tokens: int) -> np.ndarray:
        """The state after `num_tokens`, int64 `[width]`."""
        [digest] = history.hashes(num_tokens - 1, num_tokens)
        return (digest ^ self._lanes).view(np.int64)


class Claim:
    """The memory that a submitted step will write: ranges, with their handles at submission."""

    def __init__(self, ranges: list[tuple[int, int, list[int]]]):
        self.ranges = ranges


class StampedRows:
    """A cache whose layers hold stamps, with its device.

    Args:
        cache: Layers of one int64 head each.
        device: The cache's device.
        underread_tokens: Tokens that kernels fetch before a window.
    """

    def __init__(self, cache: KVCache, device: Device, underread_tokens: int = 0):
        self.cache = cache
        self.device = device
        self._underread_tokens = underread_tokens
        self._layers = [_Layer(cache, layer) for layer in cache.layers]
        self._states = None if cache.states is None else _States(cache.states)

    def close(self) -> None:
        """Drop the views of the rows, and close the cache."""
        self._layers.clear()
        self._states = None
        self.cache.close()

    # ---- at submission --------------------------------------------------------------------

    def claim(
        self, what: str, row: int, start: int, end: int, checkpoints: Checkpoints = ()
    ) -> Claim:
        """Check that tokens `[start, end)`, and checkpoints, are in memory only for them to write.

        It reads the page table directly, without the code under test.

        Raises:
            IllegalAccessError: They are not.
        """
        ranges = []
        places = [(group, row) for group in self.cache.groups]
        places += [(self.cache.states, at) for _, at in checkpoints]
        for group, row in places:
            page_bytes, token_bytes = group.page_bytes, group.token_bytes
            page, end_page = start * token_bytes // page_bytes, -(-end * token_bytes // page_bytes)
            if group is self.cache.states:
                page, end_page = 0, token_bytes // page_bytes
            address, first_page = group.table.page_address(row, page), page
            why = "not mapped"
            for mapping in group.table.overlapping(row, page, end_page):
                if mapping.first_page > page:
                    break
                found = _why_not_written(mapping)
                if found is not None:
                    why = found
                    break
                page = mapping.end_page
            if page < end_page:
                begun = "after what it holds" if start else "from its beginning"
                self.device.fail(
                    f"{what} is to write {begun} into memory that is {why}: tokens [{start}, "
                    f"{end}) of row {row}, {list(group.table.rows[row].mappings)}"
                )
            num_bytes = (end_page - first_page) * page_bytes
            ranges.append((address, num_bytes, self.device.handles(address, num_bytes)))
        return Claim(ranges)

    # ---- at execution ---------------------------------------------------------------------

    def write(
        self,
        what: str,
        row: int,
        history: History,
        start: int,
        claim: Claim,
        checkpoints: Checkpoints = (),
    ) -> None:
        """Write the tokens of `history` from `start` on, and its checkpoints.

        Raises:
            IllegalAccessError: The range is not mapped to the memory of the claim.
        """
        for address, num_bytes, handles in claim.ranges:
            self.device.check_access(f"{what} writes", address, num_bytes, Access.READ_WRITE)
            if handles != self.device.handles(address, num_bytes):
                self.device.fail(f"{what} writes row {row} from {start}: other memory is there now")
        hashes = history.hashes(start, len(history))
        for layer in self._layers:
            for at, tensor in enumerate(layer.tensors):
                tensor[row, start : len(history)] = layer.stamps(at, hashes)
        if self._states is not None:
            for num_tokens, at in (*checkpoints, (len(history), row)):
                self._states.tensor[at] = self._states.stamp(history, num_tokens)

    def read(self, what: str, row: int, history: History, num_past: int, end: int) -> None:
        """Read as a kernel for queries at `[num_past, end)` does, and check the visible tokens.

        Raises:
            IllegalAccessError: They are not mapped, or not this sequence's.
        """
        for group in self.cache.groups:
            self._check_readable(what, group, row, num_past, end)
        for layer in self._layers:
            self._compare(what, layer, row, history, layer.first_seen(num_past), num_past)
        if num_past:
            self.compare_state(what, row, history, num_past)

    def compare_state(self, what: str, at: int, history: History, num_tokens: int) -> None:
        """Check that a row of the states has that after `num_tokens`, if there are states.

        Raises:
            IllegalAccessError: It has not.
        """
        if self._states is not None:
            group = self.cache.states
            address, num_bytes = group.table.page_address(at, 0), group.token_bytes
            self.device.check_access(f"{what} reads", address, num_bytes, Access.READ)
            if (self._states.tensor[at] != self._states.stamp(history, num_tokens)).any():
                self.device.fail(
                    f"{what} reads a state in row {at} that is not that after {num_tokens} tokens"
                )

    def compare(self, what: str, row: int, history: History, firsts: Sequence[int]) -> None:
        """Check that `row` holds `history`, in each layer from its entry of `firsts` on.

        Raises:
            IllegalAccessError: It does not.
        """
        for layer, first in zip(self._layers, firsts, strict=True):
            if first < len(history):
                address, num_bytes = _range(layer.group, row, first, len(history))
                self.device.check_access(f"{what} reads", address, num_bytes, Access.READ)
                self._compare(what, layer, row, history, first, len(history))

    def firsts_mapped(self, row: int, num_tokens: int) -> list[int]:
        """The first token of `num_tokens` that is mapped and was written, in each layer."""
        return [layer.group.first_readable_token(row, num_tokens) for layer in self._layers]

    def _check_readable(
        self, what: str, group: LayerGroup, row: int, num_past: int, end: int
    ) -> None:
        first = 0
        if group is self.cache.states:
            return  # See `compare_state`.
        if group.window_tokens is not None:
            first = max(0, num_past - group.window_tokens + 1 - self._underread_tokens)
        last = min(end + self.cache.overread_tokens, group.row_tokens)
        address, num_bytes = _range(group, row, first, last)
        self.device.check_access(f"{what} reads", address, num_bytes, Access.READ)

    def _compare(
        self, what: str, layer: _Layer, row: int, history: History, first: int, end: int
    ) -> None:
        wanted = history.hashes(first, end)
        for at, tensor in enumerate(layer.tensors):
            wrong = tensor[row, first:end] != layer.stamps(at, wanted)
            if wrong.any():
                positions = (np.flatnonzero(wrong.any(1)) + first).tolist()
                kind = "values" if at else "keys"
                self.device.fail(
                    f"{what} reads {kind} that are not its own: row {row} up to token {end} at "
                    f"{positions}, window {layer.window_tokens}"
                )


def _why_not_written(mapping: PageMapping) -> str | None:
    """Reason why a row may not write a mapping; None if it may."""
    extent = mapping.extent
    if extent.num_live_mappings > 1:
        return "shared"
    if extent.num_owners:
        return "kept for others"
    if not extent.is_recyclable:
        return "other processes'"
    return None if mapping.access is Access.READ_WRITE else "read-only"


def _range(group: LayerGroup, row: int, start: int, end: int) -> tuple[int, int]:
    """Address and number of bytes of tokens `[start, end)` of a row."""
    token_bytes = group.token_bytes
    return group.table.page_address(row, 0) + start * token_bytes, (end - start) * token_bytes


def _mixed(number: int) -> int:
    """A 64-bit hash of `number` (splitmix64)."""
    number = (number * _FACTOR) & _BITS
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _BITS
    return number ^ (number >> 31)


def mixed(number: int) -> int:
    """A 64-bit hash of any integer."""
    return _mixed(number & _BITS)


#: Dtype of the layers of a stamped cache.
DTYPE = torch.int64
#: States of 5 KiB, in an extra layer.
STATES = {1000: [StateShape((640,), DTYPE)]}
