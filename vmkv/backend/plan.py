"""Operations as the native executor reads them: records of four 64-bit integers."""

from __future__ import annotations

from struct import Struct

from .base import AccessOp, MapOp, Op

#: Operation, address, bytes, argument; see vmkv/_native/executor.h.
_RECORD = Struct("=QQQQ")
_MAP, _SET_ACCESS, _UNMAP = 0, 1, 2


def pack(op: Op) -> bytes:
    """The record of one operation."""
    if isinstance(op, MapOp):
        return _RECORD.pack(_MAP, op.address, op.num_bytes, op.handle)
    if isinstance(op, AccessOp):
        return _RECORD.pack(_SET_ACCESS, op.address, op.num_bytes, op.access)
    return _RECORD.pack(_UNMAP, op.address, op.num_bytes, 0)
