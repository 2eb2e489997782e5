"""When recycled memory is overwritten before somebody else can read it."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from ..backend import Backend
from ..errors import ConfigError
from ..units import Address
from .extent import Extent


class Scrub(enum.Enum):
    """What happens to memory that held something, before it is used again.

    A sequence reads only what it wrote, so by default nothing does. Against defects and curious
    kernels there is more; it costs a memset, 0.33 ms for a GiB on an H200.
    """

    NEVER = "never"
    #: Zeroed where the next user is another tenant than the last.
    CROSS_TENANT = "cross-tenant"
    #: Zeroed always.
    ALWAYS = "always"
    #: Filled with NaN (of any float type), to find readers of what was never written.
    POISON = "poison"

    @classmethod
    def named(cls, name: Scrub | str) -> Scrub:
        """The member of this name.

        Raises:
            ConfigError: There is none.
        """
        try:
            return cls(name)
        except ValueError:
            names = ", ".join(repr(each.value) for each in cls)
            raise ConfigError(f"scrub={name!r} is unknown; there are {names}") from None

    def byte(self, extent: Extent, tenant: object, contents: object) -> int | None:
        """What `extent` is overwritten with before `tenant` writes `contents` there, or None.

        All ones are a NaN in every float type. What was written as something else is always zeroed:
        kernels fetch past a length what must be a number, and numbers of one type are NaN in
        another.
        """
        if self is Scrub.POISON:
            return 0xFF
        if not extent.is_dirty:
            return None
        is_anothers = self is Scrub.CROSS_TENANT and extent.tenant != tenant
        return 0 if self is Scrub.ALWAYS or is_anothers or extent.contents != contents else None

    def prepare(
        self,
        backend: Backend,
        extents: Iterable[Extent],
        address: int,
        tenant: object,
        stream: int,
        contents: object,
    ) -> bool:
        """Overwrite what extents, mapped one after the other from `address`, hold of others.

        Notes that they are `tenant`'s now, and written as `contents`. Returns whether any was
        overwritten.

        Raises:
            DriverError: Some may have been filled, or be under way.
        """
        is_filled = False
        for extent in extents:
            byte = self.byte(extent, tenant, contents)
            if byte is not None:
                backend.fill(Address(address), extent.num_bytes, byte, stream)
                is_filled = True
            extent.is_dirty, extent.tenant, extent.contents = True, tenant, contents
            address += extent.num_bytes
        return is_filled
