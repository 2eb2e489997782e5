"""Blocks of evicted prefixes in host memory, below the rows on the device.

    parked row --keep--> blocks in host memory --extend--> the row of a new sequence
                                               '--begin_beside--> a parked row, to be adopted

When a parked row loses memory, the blocks that it loses are copied to host memory first, each once:
a block is named by the hash of all tokens up to its end (`prefix.py`), so rows that share a
beginning, and the later turns of a conversation, share its blocks. A sequence that begins with a
prompt gets the blocks that follow what rows on the device hold. Of sliding windows only the blocks
that the window still sees exist and are needed; of states (linear attention) only those that were
kept after a whole number of blocks.

Host memory comes in slabs (`block_places.py`), of which blocks that rows hold give way first.
Sequences that are swapped out have precedence: they take slabs away. Both directions run on the
cache's side stream, so each copy is behind those submitted before.

See DESIGN.md, Note [Evicted prefixes go to host memory].
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import CapacityError, ConfigError, DriverError
from ...units import Address, MiB
from ..backend import CopyOp, Fence, MemoryLocation
from ..memory import Victim
from ..memory.host_slabs import HostSlabs
from ..memory.slab_files import memory_at
from . import growing
from .block_files import BlockFiles, Reading
from .block_places import BlockKey, BlockPlaces, Place
from .layer_group import LayerGroup
from .prefix import BLOCK_TOKENS, as_bytes, block_hashes, tenant_bytes
from .stats import BelowStats
from .swap import side_stream

if TYPE_CHECKING:
    from . import sequence
    from .kv_cache import KVCache

_HOST = MemoryLocation.HOST
#: Slabs of a full budget, at least, so that groups find their shares.
_NUM_SLABS_MIN = 16
#: Memory is short below this part of the budget; then each step copies so much ahead of evictions.
_SHORT_DIVISOR, _AHEAD_BYTES = 4, 256 * MiB
#: In full host memory, other blocks give way only for rows of this part of the budget, those that
#: are evicted next.
_AHEAD_DIVISOR = 32
_SLAB_BYTES = 64 * MiB
#: Prompts whose hashes are remembered.
_NUM_PROMPTS_HASHED = 16


class Loading(NamedTuple):
    """A parked row that is being filled from host memory; `tick` is when it was parked."""

    row: int
    tick: int
    fence: Fence
    begun_s: float


class HostBlocks:
    """Blocks of a cache's prefixes in the host memory of its pool; none without such a budget.

    Guarded by the pool's lock.
    """

    def __init__(self, cache: KVCache):
        self._cache = cache
        #: Slabs that are taken and in no books.
        self._spare_slabs: list[int] = []
        self.places = BlockPlaces(
            self._make_slab, self._spare_slabs.append, lambda: cache.rows.now_s
        )
        #: Rows whose blocks are all here, and the ticks at which they were parked.
        self._kept_at: dict[int, int] = {}
        self._memory: HostSlabs | None = None
        # Requests are looked up in each step until they begin.
        self._hashes_of = lru_cache(_NUM_PROMPTS_HASHED)(_hashes_of)
        self._num_loads, self._load_s = 0, 0.0
        #: Blocks in files, with `open_files`.
        self.files: BlockFiles | None = None
        cache.pool.host_pressure.add_source(self.victims)

    def open_files(
        self, folder: str | os.PathLike[str], budget_bytes: int, identity: bytes
    ) -> None:
        """Keep blocks in the files of a folder too, and find those that are there.

        `identity` stands for the model and its weights; the cache has its layers. Cost: some 2 µs
        for each block there.

        Raises:
            ConfigError: The pool has no host memory; or another cache has the folder, other users
                may read it, or it cannot be used.
        """
        if not self._cache.pool.host_budget_bytes:
            raise ConfigError("disk_folder needs host_budget_bytes: blocks go to files through it")
        with self._cache.pool.lock:
            try:
                self.files = BlockFiles(self._cache, self, folder, budget_bytes, identity)
            except OSError as error:
                raise ConfigError(f"{folder} cannot hold files of blocks: {error}") from error

    @property
    def num_bytes(self) -> int:
        """Host memory that it holds."""
        return 0 if self._memory is None else self._memory.num_bytes

    @property
    def is_empty(self) -> bool:
        """Whether neither host memory nor files hold blocks."""
        return not self.places.blocks and not self._in_files

    @property
    def _in_files(self) -> Collection[BlockKey]:
        files = self.files  # Closing sets it to None without the lock.
        return () if files is None else files.places.blocks

    def stats(self) -> dict[str, BelowStats]:
        """Return statistics of host memory, and of files where there are any. Locked."""
        loaded_bytes = self._cache.sharing.loaded_bytes
        found = {"host": BelowStats(self.num_bytes, self._num_loads, loaded_bytes, self._load_s)}
        if self.files is not None:
            found["files"] = self.files.stats()
        return found

    # ---- keeping --------------------------------------------------------------------------

    def keep(self, row: int, num_tokens: int = 0, most_bytes: int | None = None) -> None:
        """Copy blocks of a parked row behind its first `num_tokens` tokens, unless they are here.

        Call it before the row loses them. With `most_bytes` it does not lose them yet: only so many
        are copied, the last ones first, and while the row has them the copies give way before
        others. Cannot fail: blocks that find no room, and the blocks behind them, are lost. Cost:
        1 µs for each block of the row, and an asynchronous copy for each run of blocks.
        """
        cache = self._cache
        if not cache.pool.host_budget_bytes or cache.is_closing:
            return
        tick, hashes = cache.rows.parked[row], cache.prefixes.hashes(row)
        ops: list[CopyOp] = []
        made: list[BlockKey] = []
        places, files, in_files = self.places, self.files, self._in_files
        tenant, until_s = cache.prefixes.tenant(row), cache.rows.kept_until_s(row)
        with suppress(CapacityError, DriverError):
            is_all = True
            for group in cache.groups:
                # From the last block to the first one, which is then the last to give way.
                for end, source in self._kept_blocks(group, row, len(hashes)):
                    if end * BLOCK_TOKENS <= num_tokens:
                        break
                    key = (group, hashes[end - 1])
                    if key in places.blocks:
                        if most_bytes is None:
                            places.touch(key, is_elsewhere=key in in_files)
                    else:
                        size = _block_bytes(group)
                        if most_bytes is not None and (most_bytes := most_bytes - size) < 0:
                            is_all = False
                            break
                        place = places.take(group)
                        if place is None:
                            break
                        made.append(key)
                        places.add(key, place, tenant)
                        _add(ops, CopyOp(self._address(place, size), source, size))
                        if most_bytes is not None or key in in_files:
                            places.note_elsewhere(key)
                    if until_s > cache.rows.now_s:
                        places.keep(key, until_s)
                    if files is not None:
                        files.want(key, tenant)
            if ops:
                cache.note_stream()
                side = side_stream(cache)
                cache.rows.wait_for(row, side)
                try:
                    cache.pool.backend.copy_many(ops, side)
                finally:
                    cache.rows.note_read(row)
                cache.sharing.offloaded_bytes += sum(op.num_bytes for op in ops)
                made.clear()
            if is_all and not num_tokens:
                self._kept_at[row] = tick
        for key in made:  # Their copies were not submitted.
            if key in places.blocks:
                places.drop(key)
        if files is not None:
            files.write()

    def keep_ahead(self) -> None:
        """While memory is short, keep some of the row that is evicted next and not here yet.

        An eviction then has nothing left to copy. Once rows hold half of the budget, threads make
        host memory for as much as they hold. Call it while the device works, and when it falls
        idle: then files get what rows hold, while host memory has room.
        """
        pool, rows = self._cache.pool, self._cache.rows
        if not pool.host_budget_bytes or not self._cache.groups:
            return
        available_bytes = pool.available_bytes
        used_bytes = pool.budget_bytes - available_bytes
        if used_bytes > max(available_bytes, self.num_bytes):
            with pool.lock:
                if (memory := self._host_memory()) is not None:
                    memory.make_ready(used_bytes)
        if available_bytes < pool.budget_bytes // _SHORT_DIVISOR:
            with pool.lock:
                self.keep_next(pushes=True)
        elif self.files is not None and rows.parked and self.has_room:
            with pool.lock:
                if rows.parked and self._is_unkept(*next(reversed(rows.parked.items()))):
                    self.files.write()

    def keep_next(self, *, pushes: bool) -> None:
        """Keep some of the next row, if there is room, or by pushing others out. Locked."""
        if not pushes and not self.has_room:
            return
        rows = self._cache.rows
        left_bytes = self._cache.pool.budget_bytes // _AHEAD_DIVISOR
        for row in rows.in_order():
            if self._is_unkept(row, rows.parked[row]):
                self.keep(row, most_bytes=_AHEAD_BYTES)
                break
            left_bytes -= rows.unshared_bytes(row)
            if left_bytes <= 0 and not self.has_room:
                break

    def _is_unkept(self, row: int, tick: int) -> bool:
        return self._kept_at.get(row) != tick

    @property
    def has_room(self) -> bool:
        """Whether blocks find room without pushing others out."""
        return self._memory is None or self._memory.has_more

    def _kept_blocks(
        self, group: LayerGroup, row: int, num_blocks: int
    ) -> Iterator[tuple[int, Address]]:
        """Yield `(end, address)` of the blocks of a parked row that hold its tokens, last first."""
        address = group.table.page_address
        if group.is_fixed:
            at_rest = self._cache.states.at_rest(row) if self._cache.states is not None else {}
            for num_tokens, at in sorted(at_rest.items(), reverse=True):
                is_whole = not num_tokens % BLOCK_TOKENS
                is_whole &= 0 < num_tokens <= num_blocks * BLOCK_TOKENS
                if is_whole and group.table.rows[at].mappings:
                    yield num_tokens // BLOCK_TOKENS, address(at, 0)
            return
        num_tokens = min(num_blocks * BLOCK_TOKENS, group.resident_tokens(row))
        first = group.first_readable_token(row, num_tokens)
        start, size = address(row, 0), _block_bytes(group)
        for at in range(num_tokens // BLOCK_TOKENS - 1, -(-first // BLOCK_TOKENS) - 1, -1):
            yield at + 1, Address(start + at * size)

    def forget(self, *, with_files: bool = True) -> None:
        """Forget all blocks; their memory stays for others. Locked."""
        self._kept_at.clear()
        if self.files is not None and with_files:
            self.files.forget()
        for key in tuple(self.places.blocks):
            self.places.drop(key)

    # ---- loading --------------------------------------------------------------------------

    def find(
        self,
        prompt: Any,
        tenant: str | None,
        num_there: int,
        *,
        most_tokens: int | None = None,
        with_files: bool = False,
    ) -> int:
        """Return how many tokens of `prompt` a sequence can begin with, if rows hold `num_there`.

        At most `most_tokens`. With `with_files` it can once they are read. Whole blocks, without
        the prompt's last token. Changes nothing. Locked.
        """
        here, below = self.places.blocks, (self._in_files if with_files else ())
        if not here and not below:
            return num_there
        others: list[LayerGroup] = []
        most = max(0, len(prompt) - 1) if most_tokens is None else most_tokens
        most //= BLOCK_TOKENS
        there = num_there // BLOCK_TOKENS
        hashes = self._hashes(prompt, tenant)
        for group in self._cache.groups:
            if self._sees_all(group):
                end = there
                while end < most and ((key := (group, hashes[end])) in here or key in below):
                    end += 1
                most = end
            else:
                others.append(group)
        for num_blocks in range(most, there, -1):
            needed = [(group, self._needed(group, there, num_blocks)) for group in others]
            keys = ((group, hashes[at]) for group, its in needed for at in its)
            if all(key in here or key in below for key in keys):
                return num_blocks * BLOCK_TOKENS
        return num_there

    def held(self, hashes: Iterable[bytes]) -> Iterator[bytes]:
        """Yield those hashes whose blocks host memory or files hold. Locked.

        The blocks of all groups that keep every token count; without such groups, those of all.
        Cost: 1 µs each.
        """
        groups = [group for group in self._cache.groups if self._sees_all(group)]
        groups = groups or self._cache.groups
        here, below = self.places.blocks, self._in_files
        for each in hashes if here or below else ():
            if all([(group, each) in here or (group, each) in below for group in groups]):
                yield each

    def _hashes(self, prompt: Any, tenant: str | None) -> Sequence[bytes]:
        return self._hashes_of(as_bytes(prompt), tenant)

    @staticmethod
    def _sees_all(group: LayerGroup) -> bool:
        return not group.is_fixed and group.window_tokens is None

    def _needed(self, group: LayerGroup, there: int, num_blocks: int) -> range:
        """The blocks from `there` on that a query after `num_blocks` blocks sees, as indices."""
        if group.is_fixed:
            return range(num_blocks - 1, num_blocks)
        first = 0
        if group.window_tokens is not None:
            first = max(0, num_blocks * BLOCK_TOKENS - group.window_tokens + 1) // BLOCK_TOKENS
        return range(max(first, there), num_blocks)

    def read(
        self, prompt: Any, tenant: str | None, num_there: int, token_s: float
    ) -> Reading | None:
        """Begin to read what files hold of a prompt, of which rows hold `num_there` tokens. Locked.

        None if that is nothing, or takes much longer than computing it, at `token_s` each.
        """
        if self.files is None:
            return None
        num_tokens = self.find(prompt, tenant, num_there, with_files=True)
        num_here = self.find(prompt, tenant, num_there)
        if num_tokens <= num_here:
            return None
        hashes, keys = self._hashes(prompt, tenant), []
        for group in self._cache.groups:
            needed = self._needed(group, num_there // BLOCK_TOKENS, num_tokens // BLOCK_TOKENS)
            keys += [(at, (group, hashes[at])) for at in needed]
        keys.sort(key=lambda each: each[0])  # A part of them is of use, too.
        compute_s = (num_tokens - num_here) * token_s
        return self.files.read([key for _, key in keys], tenant_bytes(tenant), compute_s)

    def memory(self, key: BlockKey, place: Place) -> memoryview:
        """Return the memory of a block's place, or of a place that was taken for it."""
        size = _block_bytes(key[0])
        return memory_at(self._address(place, size), size)

    def extend(self, beginning: sequence.Sequence, prompt: Any) -> None:
        """Add the tokens of `prompt` that are here to a sequence that begins with those before.

        The current stream waits for the copies, the caller does not. Where memory is short, or
        the driver maps none, the sequence stays as it is. Raises `DriverError` if copies fail; then
        it is closed.
        """
        cache, row, tenant = self._cache, beginning.row, beginning.tenant
        there = beginning.num_tokens
        with cache.pool.lock:
            wanted = self.find(prompt, tenant, there)
        if wanted <= there:
            return
        try:
            growing.unshare_from(cache, beginning, there - there % BLOCK_TOKENS)
            past = there or wanted  # Of a window only what the next query sees.
            target = growing.Target(row, wanted, past, tenant)
            cache.pool.asking_broker(partial(growing.map_rows, cache, [target]))
        except (CapacityError, DriverError):
            return  # Nothing was mapped.
        with cache.pool.lock:
            # Making room may have taken some of the blocks, and reading may have added some.
            num_tokens = self.find(prompt, tenant, there, most_tokens=wanted)
            has_windows = any(group.window_tokens is not None for group in cache.groups)
            if num_tokens < wanted and not there and has_windows:
                # What is mapped of a window is what a query after `wanted` tokens sees.
                cache.rows.begin_anew(row, cache.pool.pressure.tick())
                num_tokens = 0
            if num_tokens <= there:
                return
            try:
                self._load(row, self._hashes(prompt, tenant), there, num_tokens)
            except BaseException:
                cache.prefixes.truncate(row)  # States may be overwritten.
                beginning.close()
                raise
            beginning.num_tokens = beginning.num_cached_tokens = num_tokens
            cache.prefixes.record(row, prompt[there:num_tokens], tenant)

    def begin_beside(self, prompt: Any, tenant: str | None) -> sequence.Sequence:
        """Begin a sequence with the tokens of a prompt that rows and host memory hold.

        As `KVCache.open`, except that no stream waits for the copies: close the sequence, and call
        `loading`, before its row is used. The rest of the prompt is mapped too, if there is room.
        """
        cache = self._cache
        current, side = cache.current_stream, side_stream(cache)
        cache.current_stream = lambda: side
        try:
            begun = cache.begin(len(prompt), None, prompt, tenant)
            if all(group.window_tokens is None for group in cache.groups):
                target = growing.Target(begun.row, len(prompt), begun.num_tokens, tenant)
                with suppress(CapacityError, DriverError):
                    growing.map_rows(cache, [target])
            return begun
        finally:
            cache.current_stream = current

    def loading(self, row: int) -> Loading:
        """Return the copies to the parked row of a sequence of `begin_beside`."""
        fence = self._cache.pool.backend.record_fence(side_stream(self._cache))
        return Loading(row, self._cache.rows.idle_since(row), fence, time.perf_counter())

    def has_loaded(self, loading: Loading) -> bool:
        """Whether the copies are complete, and no stream need wait for them."""
        if not loading.fence.has_passed():
            return False
        self._cache.rows.note_idle(loading.row, loading.tick)
        self._load_s += time.perf_counter() - loading.begun_s
        return True

    def _load(self, row: int, hashes: Sequence[bytes], there: int, num_tokens: int) -> None:
        cache, backend = self._cache, self._cache.pool.backend
        side, current = side_stream(cache), cache.current_stream()
        ops: list[CopyOp] = []
        for group in cache.groups:
            size, start = _block_bytes(group), group.table.page_address(row, 0)
            needed = self._needed(group, there // BLOCK_TOKENS, num_tokens // BLOCK_TOKENS)
            for at in reversed(needed):
                target = start if group.is_fixed else Address(start + at * size)
                source = self._address(self.places.blocks[group, hashes[at]], size)
                _add(ops, CopyOp(target, source, size))
            for at in needed:  # Rows hold these now; the last block goes before all others.
                self.places.touch_first((group, hashes[at]))
            if group.window_tokens is not None and needed.start * BLOCK_TOKENS > there:
                # A kernel may fetch unused tokens before the window, which must not be NaN.
                first = needed.start * BLOCK_TOKENS
                pages = group.table.rows[row]
                unused = group.table.page_address(row, pages.first_page)
                unused = max(unused, Address(start + group.bytes_for(there)))
                num_bytes = start + group.bytes_for(first) - unused
                if pages.mappings and num_bytes > 0:
                    backend.fill(unused, num_bytes, 0, current)
                group.begin_row(row, first)
        if current != side:  # What was submitted to the row before.
            backend.stream_wait(side, current)
        try:
            backend.copy_many(ops, side)
        finally:
            cache.rows.touch(row)
        if current != side:
            backend.stream_wait(current, side)
        self._num_loads += 1
        cache.sharing.loaded_bytes += sum(op.num_bytes for op in ops)

    # ---- memory ---------------------------------------------------------------------------

    def _address(self, place: Place, block_bytes: int) -> Address:
        assert self._memory is not None
        return Address(self._memory.address(place.slab) + place.at * block_bytes)

    def _make_slab(self, group: LayerGroup) -> tuple[int, int] | None:
        memory, slab = self._host_memory(), None
        if memory is None:
            return None
        num_places = memory.slab_bytes // _block_bytes(group)
        if num_places:  # A group that was added later may have blocks larger than a slab.
            slab = self._spare_slabs.pop() if self._spare_slabs else memory.take()
        return None if slab is None else (slab, num_places)

    def _host_memory(self) -> HostSlabs | None:
        pool = self._cache.pool
        if self._memory is None:
            num_bytes = min(pool.host_budget_bytes // _NUM_SLABS_MIN, _SLAB_BYTES)
            num_bytes = max(num_bytes, pool.page_bytes, *map(_block_bytes, self._cache.groups))
            num_bytes = -(-num_bytes // pool.page_bytes) * pool.page_bytes
            with suppress(OSError):
                self._memory = HostSlabs(pool, pool.host_budget_bytes // num_bytes, num_bytes)
        return self._memory

    def victims(self) -> Iterator[Victim]:
        """Yield its memory as a victim of sequences that need host memory."""
        yield Victim(last_used=0, freeable_bytes=self.num_bytes, evict=self._give)

    def _give(self, num_bytes: int) -> int:
        """Give memory back, and wait for the copies that use it; returns its bytes."""
        given_bytes, memory = 0, self._memory
        if memory is None:
            return 0
        while given_bytes < num_bytes and (ahead_bytes := memory.give_unused()):
            given_bytes += ahead_bytes
        slabs = self.places.slabs
        if slabs and given_bytes < num_bytes:
            self._cache.pool.backend.record_fence(side_stream(self._cache)).wait()
        unused = [slab for slab, its in slabs.items() if not its.tenants and not its.num_pending]
        while given_bytes < num_bytes:
            victim = self.places.next_to_go()
            if unused:
                slab = unused.pop()
            elif victim is None:
                break
            elif slabs[slab := self.places.blocks[victim].slab].num_pending:
                self.places.drop(victim)
                continue
            memory.give(slab)
            self.places.drop_slab(slab)
            given_bytes += memory.slab_bytes
        return given_bytes

    def check(self) -> None:
        """Raise `InternalError` where the books disagree. Locked."""
        self.places.check()
        if self.files is not None:
            self.files.places.check()

    def close_files(self) -> None:
        """Leave the folder of the files to others; what is there stays. Without the lock."""
        if self.files is not None:
            self.files.close()
            self.files = None

    def save(self) -> None:
        """Write what rows hold to files, if there are any and as far as there is time."""
        if self.files is not None:
            self.files.save()

    def close(self) -> None:
        """Give its memory back, once the copies submitted so far are complete.

        Raises `DriverError`; another call continues.
        """
        self.close_files()
        with self._cache.pool.lock:
            self._cache.pool.host_pressure.remove_source(self.victims)
            self.places.clear()
            if self._memory is not None:
                self._cache.pool.backend.record_fence(side_stream(self._cache)).wait()
                self._memory.close()
            self._memory = None


def _block_bytes(group: LayerGroup) -> int:
    return group.bytes_for(BLOCK_TOKENS)


def _hashes_of(tokens: bytes, tenant: str | None) -> Sequence[bytes]:
    return [*block_hashes(memoryview(tokens).cast("q"), tenant)]


def _add(ops: list[CopyOp], op: CopyOp) -> None:
    """Append a copy, or lengthen the last one to the front if both ranges are contiguous."""
    if ops:
        last = ops[-1]
        if (
            op.destination + op.num_bytes == last.destination
            and op.source + op.num_bytes == last.source
        ):
            ops[-1] = CopyOp(op.destination, op.source, op.num_bytes + last.num_bytes)
            return
    ops.append(op)
