"""A model's weights at addresses that stay, so that they can leave the device and return.

Captured steps and compiled layers hold addresses of weights. Parameters and buffers therefore
become views of one reservation, before layers are compiled. To sleep, the weights are copied to
host memory and their extents go to the driver; to wake, other extents are mapped at the same
addresses. The reservation has a pool of its own, over a second backend of the device.

Where a broker shares the device's memory, this pool is a member of it, so that others use what the
weights leave.

See DESIGN.md, Note [Weights sleep in host memory].
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NoReturn

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..core import _native
from ..core.backend import Backend, MemoryLocation
from ..core.cache.device_memory import open_member_pool
from ..core.cache.layer_group import bytes_over, stream_getter
from ..core.interrupts import uninterrupted
from ..core.memory import Extent, ExtentPool, HostCopy, PageTable, PoolMember, size_classes
from ..core.memory.host_copy import Part
from ..errors import CapacityError, ConfigError, DriverError, OutOfPagesError
from ..step.joined_layers import AWAY, join, separate
from ..step.model_guard import has_users
from ..units import align_up, div_ceil, format_bytes

_LOG = logging.getLogger(__name__)
#: torch's own alignment of storages.
_ALIGNMENT_BYTES = 512
#: Share in a broker's memory, relative to that of keys and values: nothing runs without weights.
_WEIGHT = 1000.0

#: Tensors of one storage.
_Sharing = list[torch.Tensor]


class Weights:
    """Holds the weights of a model between `hold` and `close`.

    A model that is called by itself while it sleeps raises `ConfigError`, since its tensors have no
    memory. Tensors that were made from the weights meanwhile are invalid after `close`.

    Args:
        model: The model, on one device.
        open_memory: Opens a further backend of the model's device.
        agree: Returns the maximum of a number over all ranks.
        beside: A member of the broker to join; None for none.
    """

    def __init__(
        self,
        model: Any,
        open_memory: Callable[[], Backend],
        agree: Callable[[int], int] = int,
        beside: PoolMember | None = None,
    ):
        self._model = model
        self._beside = beside
        #: Device memory of the weights, whether they are there or not.
        self.num_bytes = 0
        self._open_memory = open_memory
        self._agree = agree
        self._device: torch.device = model.get_input_embeddings().weight.device
        self._counter = _native.ViewCounter()
        self._pool: ExtentPool | None = None
        self._side_stream = 0
        self._away: list[HostCopy] = []

    @property
    def are_away(self) -> bool:
        """Whether they are in host memory."""
        return bool(self._away)

    @property
    def is_closed(self) -> bool:
        """Whether the weights are in torch's memory."""
        return self._pool is None

    def has_outside_views(self) -> bool:
        """Whether `close` must wait for tensors: never, since it moves the weights."""
        return False

    # ---- holding --------------------------------------------------------------------------

    @uninterrupted
    def hold(self, *, joins: bool = False) -> None:
        """Move the weights into extents; weights held before first move back to torch's memory.

        With `joins`, siblings are joined before, as compiled layers do; see `joined_layers`. Never
        needs the device memory of all weights twice: what has been moved waits in host memory if
        necessary.

        Raises:
            ConfigError: The model is served already, by steps that hold addresses.
            CapacityError: Neither device nor host has the memory. The model is as before.
            TimeoutError: The broker cannot give a page. Likewise.
        """
        self.close()
        if has_users(self._model):
            raise ConfigError(
                "this model is served already, and its weights cannot move meanwhile: close what "
                "serves it first, or leave enable_sleep_mode and sleep_after_s out"
            )
        with contextlib.ExitStack() as undo:
            if joins:
                join(self._model)
                undo.callback(separate, self._model)
            backend = self._open_memory()
            undo.callback(backend.close)
            sharing = [*_by_storage(self._model, self._device).values()]
            sizes = [
                align_up(each[0].untyped_storage().nbytes(), _ALIGNMENT_BYTES) for each in sharing
            ]
            *starts, end_bytes = accumulate(sizes, initial=0)
            page_bytes = backend.granularity_bytes
            num_pages = self._agree(div_ceil(end_bytes, page_bytes))
            num_bytes = num_pages * page_bytes
            pool = self._open_pool(backend, num_bytes)
            undo.callback(pool.close)
            # Consecutive rows, so that each moves by itself.
            row_pages = min(num_pages, 1 << pool.largest_class)
            self._table = PageTable(pool, div_ceil(num_pages, row_pages), row_pages)
            undo.callback(self._table.close, lambda: False)
            self._side_stream = backend.new_stream()
            undo.pop_all()
            self._pool, self._current_stream = pool, stream_getter(backend)
            self.num_bytes = num_bytes
            undo.callback(self.close)  # Separates joined weights, too.
            self._has_budget()  # Without it `acquire` fails.
            self._fill(sharing, starts)
            self.come_back()
            torch.cuda.empty_cache()
            undo.pop_all()

    def _open_pool(self, backend: Backend, num_bytes: int) -> ExtentPool:
        if self._beside is None:
            return ExtentPool(
                backend, num_bytes, host_budget_bytes=num_bytes, on_pressure=torch.cuda.empty_cache
            )
        return open_member_pool(
            backend,
            self._beside.join_again,
            host_budget_bytes=num_bytes,
            name=f"{self._model.config.name_or_path or type(self._model).__name__}, weights",
            weight=_WEIGHT,
            brought_bytes=num_bytes,
        )

    def _has_budget(self) -> bool:
        pool = self._table.pool
        while pool.member is not None and pool.budget_bytes < self.num_bytes:
            if not pool.member.grow(self.num_bytes - pool.budget_bytes):
                return False
        return True

    def _fill(self, sharing: Sequence[_Sharing], starts: Sequence[int]) -> None:
        """Map row after row, and copy each storage's part in it; a storage moves once copied."""
        views = [self._view(its, start) for its, start in zip(sharing, starts, strict=True)]
        try:
            at = 0
            for row in range(self._table.num_rows):
                begin, end = self._map(row)
                while at < len(views) and starts[at] < end:
                    first = max(0, begin - starts[at])
                    last = min(len(views[at]), end - starts[at])
                    source = _bytes_of(sharing[at][0].untyped_storage())
                    views[at][first:last].copy_(source[first:last])
                    if last < len(views[at]):
                        break
                    _move(sharing[at], views[at])
                    at += 1
        finally:
            views.clear()  # An error's traceback would keep their addresses reserved.

    def _map(self, row: int) -> tuple[int, int]:
        table, extents = self._table, self._acquire(row)
        try:
            table.map(row, 0, extents)
        finally:
            table.pool.disown(extents)
        begin = row * table.row_bytes
        return begin, begin + sum(extent.num_bytes for extent in extents)

    def _acquire(self, row: int) -> list[Extent]:
        """Take the extents of a row; if memory is short, earlier rows move to host memory."""
        pool, classes = self._table.pool, self._classes(row)
        try:
            return pool.acquire(classes)
        except OutOfPagesError:
            if not any(pages.mappings for pages in self._table.rows):
                raise
            if not self._away:  # Rows on the host return only once all weights have left torch.
                rows = range(self._table.num_rows)
                every = [each for row in rows for each in self._classes(row)]
                pool.disown(pool.acquire(every, MemoryLocation.HOST))
            self._send_away()
        return pool.acquire(classes)

    def _classes(self, row: int) -> list[int]:
        table, pool = self._table, self._table.pool
        left_pages = self.num_bytes // pool.page_bytes - row * table.row_pages
        return size_classes(min(table.row_pages, left_pages), pool.largest_class)

    def _view(self, its: _Sharing, start: int) -> torch.Tensor:
        address, num_bytes = self._table.address + start, its[0].untyped_storage().nbytes()
        with torch.inference_mode(mode=False):
            return bytes_over(self._table.pool.backend, address, num_bytes, self._counter)

    # ---- sleeping -------------------------------------------------------------------------

    @uninterrupted
    def leave(self) -> None:
        """Copy the weights to host memory, and give their device memory to the driver.

        All or nothing: `OutOfPagesError` or `DriverError` leave the weights where they were. Waits
        for the device.
        """
        vars(self._model)[AWAY] = self._model.register_forward_pre_hook(_refuse)
        try:
            self._send_away()
        except BaseException:
            self.come_back()
            raise

    def _send_away(self) -> None:
        pool, backend = self._table.pool, self._table.pool.backend
        backend.note_stream(self._current_stream())
        backend.join_streams(self._side_stream)
        parts = [
            Part(self._table, row, each.first_page, each.extent.size_class, each.extent.num_bytes)
            for row, pages in enumerate(self._table.rows)
            for each in pages.mappings
        ]
        copy = HostCopy(pool, parts, self._side_stream)
        copy.leave()
        self._away.append(copy)
        pool.reclaimer.wait()
        pool.trim()

    @uninterrupted
    def come_back(self) -> None:
        """Map memory at the weights' addresses, and submit the copies back. Idempotent.

        The current stream waits for the copies, the caller does not. Raises as
        `HostCopy.coming_back`; another call then tries again.
        """
        if self._away and not self._has_budget():
            raise CapacityError(
                f"the model's weights need {format_bytes(self.num_bytes)}, and other members of "
                "the pool hold the memory: call again once they use less"
            )
        while self._away:
            with self._away[0].coming_back(self._side_stream, self._current_stream()):
                pass
            del self._away[0]
        if hook := vars(self._model).pop(AWAY, None):
            hook.remove()

    # ---- end ------------------------------------------------------------------------------

    @uninterrupted
    def close(self) -> None:
        """Move the weights back to torch's memory, and free the extents. Idempotent.

        Weights that the device has no memory for move to the CPU instead; those that sleep and
        cannot come back are lost, and become empty. Both are logged.
        """
        if self._pool is None:
            return
        pool, table = self._pool, self._table
        try:
            self.come_back()
        except (CapacityError, DriverError) as error:
            _LOG.error("weights could not come back and are lost, load the model: %s", error)
            while self._away:
                self._away.pop().drop()
            self.come_back()  # As none is away now, the model alone: it may be called again.
        pool.backend.note_stream(self._current_stream())  # Which reads what moves out.
        num_free = 0
        for address, its in sorted(_by_storage(self._model, self._device).items()):
            if 0 <= address - table.address < table.reserved_bytes:  # Else it has moved elsewhere.
                num_done = self._move_out(its, address - table.address) // table.row_bytes
                if num_free < num_done:
                    fence = pool.reclaimer.new_fence()
                    for row in range(num_free, num_done):
                        table.retire_back(row, 0, fence)
                    num_free = num_done
                    pool.reclaimer.wait()
                    pool.trim()
        separate(self._model)  # An engine that was collected while it slept could not.
        counter = self._counter
        table.close(lambda: counter.live > 0)
        if self._side_stream:
            pool.backend.stream_destroy(self._side_stream)
            self._side_stream = 0
        pool.close()
        self._pool, self.num_bytes = None, 0

    def _move_out(self, its: _Sharing, start: int) -> int:
        data, table = _bytes_of(its[0].untyped_storage()), self._table
        rows = range(start // table.row_bytes, div_ceil(start + len(data), table.row_bytes))
        if not all(table.rows[row].mappings for row in rows):
            for each in its:
                each.data = each.data.new_empty(0)
            return start
        with torch.inference_mode(mode=False):
            try:
                _move(its, data.clone())
            except torch.OutOfMemoryError:
                what = format_bytes(len(data))
                _LOG.error("%s has no memory left: %s of weights are on the CPU", data.device, what)
                _move(its, data.cpu())
        return start + len(data)


def check_awake(model: Any) -> None:
    """Raise `ConfigError` if the model's weights are in host memory."""
    if AWAY in vars(model):
        _refuse(model, ())


def _refuse(model: Any, args: Any) -> NoReturn:
    raise ConfigError(
        "this model sleeps, its weights are in host memory: call wake() of its engine first, or "
        "make another engine if that one is gone"
    )


def _tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    for module in model.modules():
        for held in (module._parameters, module._buffers, vars(module)):
            yield from (each for each in held.values() if isinstance(each, torch.Tensor))


def _by_storage(model: torch.nn.Module, device: torch.device) -> dict[int, _Sharing]:
    found: dict[int, dict[int, torch.Tensor]] = {}
    each: Any
    for each in _tensors(model):
        if each.device == device and not is_traceable_wrapper_subclass(each):
            storage = each.untyped_storage()
            if storage.nbytes():
                found.setdefault(storage.data_ptr(), {})[id(each)] = each
    return {address: [*its.values()] for address, its in found.items()}


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@torch.no_grad()
def _move(sharing: _Sharing, target: torch.Tensor) -> None:
    storage = target.untyped_storage()
    for each in sharing:
        empty = torch.empty(0, dtype=each.dtype, device=storage.device)
        each.data = empty.set_(storage, each.storage_offset(), each.size(), each.stride())
