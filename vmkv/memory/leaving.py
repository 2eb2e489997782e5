"""Extents that are released, not recycled, when nobody needs them: other processes may see them.

Those made here and exported, and those made elsewhere and imported. Guarded by the pool's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .._native import count_references
from ..backend import Backend
from ..units import Handle
from .extent import Extent


class Leaving:
    """Those of one pool.

    Args:
        backend: The device.
        release: Releases one that was made here.

    Attributes:
        imported: Extents of memory that other processes made.
        extents: What nobody needs any more, and is not released yet.
    """

    def __init__(self, backend: Backend, release: Callable[[Extent], None]):
        self.imported: list[Extent] = []
        self.extents: list[Extent] = []
        self._backend = backend
        self._release = release

    def import_extent(self, size_class: int, num_bytes: int, handle: Handle) -> Extent:
        """An imported extent, with one owner."""
        extent = Extent(-1, size_class, num_bytes, handle)
        extent.is_recyclable = False
        count_references([extent], 0, 0, 1)
        self.imported.append(extent)
        return extent

    def release(self, more: Iterable[Extent] = ()) -> None:
        """Release these and what is left; after a failure they are tried again next time.

        Raises:
            DriverError: Some are left.
        """
        self.extents += more
        while self.extents:
            extent = self.extents[-1]
            if extent in self.imported:
                self._backend.mem_release(extent.handle)
                self.imported.remove(extent)
            else:
                self._release(extent)
            self.extents.pop()
