"""Helpers that the backend checks share."""

from __future__ import annotations

from ..core.backend import Access, Backend
from ..errors import DriverError
from ..units import Address, Handle
from .access import write_bytes

RW = Access.READ_WRITE


def expect(wanted: object, got: object, what: str) -> None:
    """Raise unless `wanted == got`."""
    if wanted != got:
        raise AssertionError(f"{what}: wanted {wanted}, got {got}")


def expect_refusal(
    backend: Backend, call: str, what: str, *args: object, by: str = "", **options: object
) -> None:
    """Raise unless `call`, or the method `by` that makes it, is refused and changes nothing."""
    before = backend.usage()
    try:
        getattr(backend, by or call)(*args, **options)
    except DriverError as error:
        expect(call, error.call, f"the primitive that the refusal names ({what})")
    else:
        raise AssertionError(f"{call} must refuse {what}")
    expect(before, backend.usage(), f"usage after {call} refused {what}")


def reserve(backend: Backend, num_pages: int) -> tuple[Address, int]:
    """Reserve `num_pages`; returns the address and the size in bytes."""
    num_bytes = num_pages * backend.granularity_bytes
    return backend.address_reserve(num_bytes), num_bytes


def mapped(backend: Backend, address: Address, num_pages: int, access: Access = RW) -> Handle:
    """Create memory of `num_pages` and map it at `address` with `access`."""
    num_bytes = num_pages * backend.granularity_bytes
    handle = backend.mem_create(num_bytes)
    backend.mem_map(address, num_bytes, handle)
    backend.mem_set_access(address, num_bytes, access)
    return handle


def at_page(backend: Backend, address: Address, page: int) -> Address:
    """Address of page `page` from `address`."""
    return Address(address + page * backend.granularity_bytes)


def filled(backend: Backend, address: int, value: int, num_bytes: int) -> bytes:
    """Fill `num_bytes` at `address` with one byte value; returns the expected bytes."""
    data = bytes([value]) * num_bytes
    write_bytes(backend, address, data)
    return data
