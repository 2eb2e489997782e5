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

    @property
    def byte(self) -> int:
        """What memory is filled with. All ones are a NaN in float32, float16 and bfloat16."""
        return 0xFF if self is Scrub.POISON else 0

    def concerns(self, extent: Extent, tenant: object) -> bool:
        """Whether `extent` must be overwritten before `tenant` uses it."""
        if self is Scrub.NEVER or not extent.is_dirty:
            return self is Scrub.POISON
        return self is not Scrub.CROSS_TENANT or extent.tenant != tenant

    def prepare(
        self,
        backend: Backend,
        extents: Iterable[Extent],
        address: int,
        tenant: object,
        stream: int,
    ) -> None:
        """Overwrite what extents, mapped one after the other from `address`, hold of others.

        Notes that they are `tenant`'s now.

        Raises:
            DriverError: Some may have been filled, or be under way.
        """
        for extent in extents:
            if self.concerns(extent, tenant):
                backend.fill(Address(address), extent.num_bytes, self.byte, stream)
            extent.is_dirty, extent.tenant = True, tenant
            address += extent.num_bytes
