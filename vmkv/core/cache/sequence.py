"""The user's interface to one sequence in a row of a cache."""

from __future__ import annotations

import os
from collections import abc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch

from ...errors import ClosedError, ConfigError
from ..interrupts import uninterrupted
from ..memory import HostCopy
from .disk import save
from .forking import fork
from .process import PrefixExporter
from .swap import swap_in, swap_out

if TYPE_CHECKING:
    from .kv_cache import KVCache


class Sequence:
    """A sequence of tokens, contiguous in virtual memory in every layer.

    Made by `KVCache.open` and `fork`. Not thread-safe; one thread works on a cache at a time. After
    an error the sequence is as it was, unless a method says otherwise. `ClosedError` means that it
    or its cache is closed, `DriverError` that a driver call failed.

    Attributes:
        cache: Its cache.
        row: Its row in every layer group: FlashAttention's `cache_batch_idx`.
        num_tokens: How many tokens it holds.
        num_cached_tokens: How many of them were there when it began (a prefix hit).
        tenant: Its owner.
        kept_until_s: Its prefix gives way after those of the tenant's other sequences, until
            `KVCache.rows.now_s` reaches this time.
        swapped: The host copy while the sequence is swapped out, else None.
    """

    def __init__(self, cache: KVCache, row: int, num_tokens: int, tenant: str | None):
        self.cache = cache
        self.row = row
        self.num_tokens = num_tokens
        self.num_cached_tokens = 0
        self.tenant = tenant
        self.swapped: HostCopy | None = None
        self.kept_until_s = 0.0
        self.is_closed = False
        cache.live[row] = self

    def append(self, num_tokens: int) -> None:
        """Make room for `num_tokens` more tokens; the caller then writes their keys and values.

        Tokens already present keep their addresses. Appending 0 tokens does nothing.

        Raises:
            OutOfPagesError: The pool cannot supply the pages.
            SequenceFullError: The row ends before that.

        Cost: nothing while the last extent has room (most decode steps); else one map and one
            access call per extent.
        Ordering: host-synchronous; safe while kernels read earlier tokens.
        """
        self.cache.grow([(self, self.num_tokens + _checked(num_tokens))])

    @uninterrupted
    def truncate(self, num_tokens: int) -> None:
        """Forget all but the first `num_tokens` tokens; their memory stays for new ones.

        Raises `ConfigError` if it holds fewer, they have left a sliding window, or layers keep
        states and none after so many tokens (see `checkpoint`). Later work on the current stream
        waits for all work submitted so far.
        """
        self.cache.check_open()
        self.check_open()
        if _checked(num_tokens) > self.num_tokens:
            raise ConfigError(
                f"the sequence in row {self.row} holds {self.num_tokens} tokens, fewer than the "
                f"{num_tokens} to keep"
            )
        if num_tokens < self.num_tokens:
            # A fork on another stream may still copy tokens that will be overwritten.
            self.cache.pool.backend.join_streams(self.cache.current_stream())
        with self.cache.pool.lock:
            self.cache.check_keeps(self.row, num_tokens, "go back to")
            for group in self.cache.groups if num_tokens < self.num_tokens else ():
                stream, fence = self.cache.current_stream(), self.cache.pool.reclaimer.new_fence
                group.go_back(self.row, num_tokens, stream, fence)
            if not num_tokens:  # Last of what may fail: until then the row holds its tokens.
                self.cache.rows.begin_anew(self.row, self.cache.pool.pressure.tick())
                self.cache.rows.touch(self.row)
            self.cache.prefixes.truncate(self.row, num_tokens)
        self.num_tokens = num_tokens

    @uninterrupted
    def checkpoint(self) -> None:
        """Keep a copy of the layers' states after the present tokens; nothing without such layers.

        `truncate` and `fork` go back to it, and prompts that begin with the recorded tokens begin
        there. A sequence keeps at most two: its first and its latest. They are dropped when their
        tokens are, or when memory is short.

        Raises:
            OutOfPagesError: The pool cannot supply the pages.

        Cost: a mapping of the states and a copy.
        Ordering: after work submitted so far on the current stream.
        """
        self.check_open()
        cache, states = self.cache, self.cache.states
        if states is None or not self.num_tokens:
            return
        try:
            with begun_checkpoint(self, self.num_tokens) as at:
                if at is not None:
                    states.copy(self.row, at, cache.current_stream())
        except BaseException:
            with cache.pool.lock:
                states.drop_checkpoints(self.row, self.num_tokens - 1)
            raise

    @uninterrupted
    def fork(self, num_tokens: int | None = None) -> Sequence:
        """Return a second sequence with the first `num_tokens` tokens of this one (default: all).

        Whole extents are shared, read-only for the fork; the rest is copied. Both can go on, and
        end, on their own; both stay contiguous. Recorded tokens are recorded for the fork, too.

        Raises:
            ConfigError: There are fewer tokens, a sliding-window layer no longer holds the window
                there, or layers keep no states after so many tokens.
            OutOfPagesError, OutOfAddressSpaceError: No memory for the tail, or no row.

        Cost: one mapping per shared extent (35 µs on an H200), and a copy of at most an extent.
        Ordering: after all work submitted so far on the current stream and others.
        """
        num_tokens = self.num_tokens if num_tokens is None else _checked(num_tokens)
        return Sequence(self.cache, fork(self.cache, self, num_tokens), num_tokens, self.tenant)

    @uninterrupted
    def record(self, token_ids: abc.Sequence[int]) -> None:
        """Record ids of appended and computed tokens, so that other sequences share them.

        `token_ids` follow the `num_recorded` ids recorded before. Raises `ConfigError` for more ids
        than the sequence holds tokens, or for values that are not token ids. Cost: about 10 ns per
        token.
        """
        self.check_open()
        prefixes = self.cache.prefixes
        with self.cache.pool.lock:
            recorded = prefixes.num_recorded(self.row)
            if recorded + len(token_ids) > self.num_tokens:
                raise ConfigError(
                    f"{self} cannot have {len(token_ids)} tokens recorded after {recorded}: "
                    "append first"
                )
            prefixes.record(self.row, token_ids, self.tenant)

    # ---- host memory ----------------------------------------------------------------------

    @uninterrupted
    def swap_out(self) -> None:
        """Move the sequence to host memory; it keeps its row, its addresses and its length.

        Returns when its device memory is free. Until `swap_in` it can only be saved or closed.
        Extents shared with others stay in device memory.

        Raises:
            ConfigError: It is swapped out already.
            OutOfPagesError: No host memory is left (`host_budget_bytes`).
            OutOfAddressSpaceError: No staging addresses are left.
            DriverError: Nothing changed; or, in the last step, it is swapped out, its contents
                intact, and `swap_in` brings it back.

        Ordering: after all work submitted so far; host-synchronous.
        """
        self.check_open()
        swap_out(self)

    @uninterrupted
    def swap_in(self) -> None:
        """Bring the sequence back to the same addresses. Does nothing if it is resident.

        Views of it and CUDA graphs captured over it are valid again. Without device memory
        (`OutOfPagesError`) it stays swapped out. Later work on the current stream waits for the
        copies; the caller does not.
        """
        self._check_not_closed()
        if self.swapped is not None:
            self.cache.pool.asking_broker(partial(swap_in, self, self.swapped))
            self.swapped = None

    # ---- other processes ------------------------------------------------------------------

    @uninterrupted
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the sequence to a file, from which `KVCache.load` restores it in any process.

        It may be swapped out, and may be closed afterwards. The file's mode is 0600; it takes its
        name when it is complete, so after an error (`OSError`, `OutOfPagesError`) an old file is
        still there. `ConfigError` for a path that is no regular file's.

        Cost: what the disk takes; 1 MiB of memory.
        Ordering: after all work submitted so far on the current stream and others;
            host-synchronous.
        """
        self._check_not_closed()
        save(self, self.swapped, path)

    @uninterrupted
    def export(
        self,
        socket_path: str | os.PathLike[str],
        num_tokens: int | None = None,
        *,
        timeout_s: float = 10.0,
    ) -> PrefixExporter:
        """Share the first `num_tokens` tokens (or all) with this user's processes.

        They call `KVCache.import_prefix`. Only whole extents are shared, which are read-only from
        now on, here as well; truncating into them and appending copies first. `PrefixExporter`
        documents arguments and errors.
        """
        self.cache.check_stateless("export")
        num_tokens = self.num_tokens if num_tokens is None else _checked(num_tokens)
        return PrefixExporter(self, socket_path, num_tokens, timeout_s)

    @property
    def writable_tokens(self) -> int:
        """The length up to which tokens can be written without a driver call or a copy.

        Memory from `num_tokens` to there is mapped, unshared and unprotected, and kernels'
        over-read past it is mapped. `append` extends it. 0 while the sequence is swapped out.
        """
        return self.cache.writable_tokens([self])[0]

    @property
    def num_recorded(self) -> int:
        """How many of its tokens are recorded. 0 once closed."""
        return 0 if self.is_closed else self.cache.prefixes.num_recorded(self.row)

    @property
    def is_resident(self) -> bool:
        """Whether kernels can read it: it is not swapped out."""
        return self.swapped is None

    def first_token(self, layer: int) -> int:
        """Return the first token present in `layer`; `num_tokens` if none is.

        0 except for sliding-window layers, which drop tokens that no query will see. Earlier tokens
        have no memory, and only a kernel that is told the window may be given their addresses.
        """
        self.check_open()
        group, _ = self.cache.place(layer)
        return group.first_readable_token(self.row, self.num_tokens)

    def keys(self, layer: int) -> torch.Tensor:
        """Return the keys of `layer`: `[num_tokens, k_heads, k_dim]`, a view to read and write.

        Row i is token i. Writing to what forks share, before `KVCache.unshare_all`, ends the
        process. So does touching tokens of a sliding-window layer before `first_token(layer)`,
        which are unmapped. Eight-bit keys are as stored: see `fp8.encode`, `KVCache.scales`. Never
        copied; valid until the sequence is closed or truncated.
        """
        self.check_open()
        return self.cache.keys(layer)[self.row, : self.num_tokens]

    def values(self, layer: int) -> torch.Tensor:
        """Return the values of `layer`: `[num_tokens, v_heads, v_dim]`, a view like `keys`."""
        self.check_open()
        return self.cache.values(layer)[self.row, : self.num_tokens]

    @uninterrupted
    def close(self) -> None:
        """End the sequence; its row is parked for the next one. Idempotent.

        After a `DriverError` the sequence is open; call `close` again.
        """
        close_idle(self, None)

    def drop_host_copy(self) -> None:
        """Release the host copy of a sequence that ends."""
        if self.swapped is not None:
            self.swapped.drop()
            self.swapped = None

    def check_open(self) -> None:
        """Raise `ClosedError` if the sequence has ended, `ConfigError` if it is swapped out."""
        self._check_not_closed()
        if not self.is_resident:
            raise ConfigError(f"the sequence in row {self.row} is swapped out; swap_in() first")

    def _check_not_closed(self) -> None:
        if self.is_closed:
            raise ClosedError(f"the sequence in row {self.row} is closed")

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else f"{self.num_tokens} tokens"
        if not self.is_resident:
            state += ", swapped out"
        return f"Sequence(row={self.row}, {state})"


@uninterrupted
def close_idle(sequence: Sequence, idle_since: int | None) -> None:
    """Close a sequence; only copies for forks have used it since the tick `idle_since`.

    With None, eviction of its row waits for all work submitted so far.
    """
    if not sequence.is_closed:
        cache, row = sequence.cache, sequence.row
        with cache.pool.lock:
            if sequence.swapped is not None:
                cache.prefixes.truncate(row, cache.rows.resident_tokens(row))
            now = cache.pool.pressure.tick()  # One fence for all: nothing fails half-way.
            kept_until_s = sequence.kept_until_s
            cache.rows.park(row, sequence.num_tokens, now, idle_since, kept_until_s)
            del cache.live[row]
            sequence.drop_host_copy()
        sequence.is_closed = True


@contextmanager
def begun_checkpoint(sequence: Sequence, num_tokens: int) -> Iterator[int | None]:
    """Map memory for the states of `sequence` after `num_tokens`, and pin it in the block.

    The block submits the work that writes it. Yields the row of the cache's `states`; None if there
    is such a checkpoint, or nothing to keep. A block that fails must be followed by `truncate` or
    `close`. Raises as `Sequence.checkpoint`; to be called in an uninterrupted operation.
    """
    cache, at = sequence.cache, None
    if cache.states is not None:
        cache.note_stream()
        its = sequence.row, num_tokens, sequence.tenant, cache.current_stream()
        at = cache.pool.asking_broker(partial(cache.states.begin_checkpoint, *its))
    try:
        if at is not None:
            cache.rows.touch(sequence.row)
        yield at
    finally:
        if cache.states is not None and at is not None:
            cache.states.end_checkpoint(at)


def _checked(num_tokens: int) -> int:
    if isinstance(num_tokens, bool) or not isinstance(num_tokens, int) or num_tokens < 0:
        raise ConfigError(f"num_tokens={num_tokens!r} must be an integer, zero or more")
    return num_tokens
