"""Operations as the native executor reads them: records of four 64-bit integers."""

from __future__ import annotations

from struct import Struct

from .base import AccessOp, CopyOp, MapOp, Op

#: Operation, address, bytes, argument; see vmkv/_native/executor.c.
_RECORD = Struct("=QQQQ")
_MAP, _SET_ACCESS, _UNMAP, _SET_CPU_ACCESS = 0, 1, 2, 3
#: Likewise, see vmkv/_native/executor.c.
_COPY, _FILL = 0, 1


def pack(op: Op, native_handle: int = 0) -> bytes:
    """The record of one operation; a map needs the driver's name for its handle."""
    if isinstance(op, MapOp):
        return _RECORD.pack(_MAP, op.address, op.num_bytes, native_handle)
    if isinstance(op, AccessOp):
        number = _SET_CPU_ACCESS if op.for_cpu else _SET_ACCESS
        return _RECORD.pack(number, op.address, op.num_bytes, op.access)
    return _RECORD.pack(_UNMAP, op.address, op.num_bytes, 0)


def pack_copy(op: CopyOp) -> bytes:
    """The record of one copy."""
    return _RECORD.pack(_COPY, op.destination, op.num_bytes, op.source)


def pack_fill(address: int, num_bytes: int, byte: int) -> bytes:
    """The record of one fill."""
    return _RECORD.pack(_FILL, address, num_bytes, byte)
