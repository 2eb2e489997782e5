"""A sequence: some tokens in a row, and the right to more."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..errors import ClosedError, ConfigError

if TYPE_CHECKING:
    from .kv_cache import KVCache


class Sequence:
    """One sequence of tokens, contiguous in virtual memory in every layer.

    Made by `KVCache.open`. Not thread-safe; one thread works on a cache at a time.

    Attributes:
        row: Its row in every layer group: what FlashAttention calls `cache_batch_idx`.
        num_tokens: How many tokens it holds.
    """

    def __init__(self, cache: KVCache, row: int):
        self._cache = cache
        self.row = row
        self.num_tokens = 0
        self.is_closed = False

    def append(self, num_tokens: int) -> None:
        """Make room for `num_tokens` more tokens; the caller then writes their keys and values.

        Tokens already present keep their addresses. Appending 0 tokens does nothing.

        Args:
            num_tokens: How many tokens the next forward pass will write.

        Raises:
            OutOfPagesError: The pool cannot supply the pages. The sequence is unchanged.
            SequenceFullError: The row ends before that. The sequence is unchanged.
            ClosedError: The sequence or its cache is closed.

        Cost: nothing while the last extent has room (most decode steps); else one map and one
            access call per extent.
        Ordering: host-synchronous; safe while kernels read earlier tokens.
        """
        self._cache.grow([(self, self.num_tokens + _checked(num_tokens))])

    def truncate(self, num_tokens: int) -> None:
        """Forget all but the first `num_tokens` tokens; their memory stays for new ones.

        Raises:
            ConfigError: The sequence holds fewer, or they have left the window of a
                sliding-window layer. The sequence is unchanged.
            ClosedError: The sequence or its cache is closed.
        """
        self._cache.truncate(self, _checked(num_tokens))

    def keys(self, layer: int) -> torch.Tensor:
        """The keys of `layer`: `[num_tokens, k_heads, k_dim]`, a view to read and write.

        Valid until the sequence is closed or truncated. Never copied.
        """
        self.check_open()
        return self._cache.keys(layer)[self.row, : self.num_tokens]

    def values(self, layer: int) -> torch.Tensor:
        """The values of `layer`: `[num_tokens, v_heads, v_dim]`, a view like `keys`."""
        self.check_open()
        return self._cache.values(layer)[self.row, : self.num_tokens]

    def close(self) -> None:
        """End the sequence; its row is parked for the next one. Idempotent. No driver call."""
        if not self.is_closed:
            self._cache.park(self)

    def check_open(self) -> None:
        """Raise `ClosedError` if the sequence has ended."""
        if self.is_closed:
            raise ClosedError(f"the sequence in row {self.row} is closed")

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else f"{self.num_tokens} tokens"
        return f"Sequence(row={self.row}, {state})"


def _checked(num_tokens: int) -> int:
    if isinstance(num_tokens, bool) or not isinstance(num_tokens, int) or num_tokens < 0:
        raise ConfigError(f"num_tokens={num_tokens!r} must be an integer, zero or more")
    return num_tokens
