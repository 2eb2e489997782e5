"""The fused append: write a step's keys and values, for every sequence, into their rows.

A model produces new keys and values packed, `[Tq, H, D]`; each token goes to the end of its row. On
CUDA one kernel writes both tensors of a layer and finds each token's row itself, where `index_put`
takes two launches and an index vector. On CPU two `index_copy_` calls over the flat view use
indices shared by all layers. Only the new tokens' places are accessed: the rest of the view may not
be mapped.

Compiled code takes three launches a layer: queries, keys, append. A second kernel replaces them and
saves 64 of some 470 kernels in an 8B model's decode step. It pairs the halves of a head,

    out = x * cos + cat(-x[half:], x[:half]) * sin

in float32, rounded once, as compiled code does.

See DESIGN.md, Note [Writes are one launch].
"""

from __future__ import annotations

import functools
import operator
from struct import Struct
from typing import NamedTuple

import torch

from ..core.cache.fp8 import FP8, Scales, encode
from ..errors import ConfigError
from .base import Call, check_new, flat
from .nvrtc import FORMATS, Kernel, addresses, compiled, launch, source

# ---- append cuda ---------------------------------------------------------------------------------

#: Vector type by the bytes that a thread copies at once, widest first.
_VECTOR_TYPES = {16: "uint4", 8: "uint2", 4: "unsigned int", 2: "unsigned short", 1: "char"}
_THREADS = 128
_WORDS = Struct("=23q")
_FP8_CAPABILITY = (8, 9)


class Place(NamedTuple):
    """Addresses of row 0, token 0 of a layer's rows, their strides, and the stored format."""

    keys_address: int
    values_address: int
    row_stride_bytes: int
    token_stride_bytes: int
    stored: torch.dtype
    scales: Scales | None = None

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor, scales: Scales | None) -> Place:
        """Return the place of a layer's views `[rows, row_tokens, H, D]`."""
        row_stride, token_stride = [each * keys.element_size() for each in keys.stride()[:2]]
        addresses = keys.data_ptr(), values.data_ptr()
        return cls(*addresses, row_stride, token_stride, keys.dtype, scales)

    @property
    def inverses(self) -> list[int]:
        """The addresses of the inverse key and value scales; 0 without scales."""
        return addresses(*(self.scales or [None] * 4)[2:])


def append_uniform(
    key: torch.Tensor, value: torch.Tensor, place: Place, first_position: int
) -> None:
    """Write `[B, H, T, D]` at `first_position` of rows 0, 1, 2 …, unchecked; 5 us of host time."""
    batch_size, _, num_tokens, _ = key.shape
    if not batch_size * num_tokens:
        return
    kb, kh, kt, kd = key.stride()
    vb, vh, vt, vd = value.stride()
    if kd != 1 or vd != 1:
        append_uniform(key.contiguous(), value.contiguous(), place, first_position)
        return
    sequences = (num_tokens, first_position, 0, 0, 0)
    strides = (kb, kt, kh), (vb, vt, vh)
    _launch(key, value, strides, place, sequences, batch_size * num_tokens)


def encoded(query: torch.Tensor) -> torch.Tensor:
    """Return `query [T, H, D]` as float8, contiguous; the append kernel encodes it."""
    out = torch.empty(query.shape, dtype=FP8, device=query.device)
    _, num_heads, dim = query.shape
    place = Place(out.data_ptr(), out.data_ptr(), 0, num_heads * dim, FP8)
    new = query.transpose(0, 1)[None], query[:, :0].transpose(0, 1)[None]
    append_uniform(*new, place, 0)
    return out


def _launch(
    key: torch.Tensor,
    value: torch.Tensor,
    strides: tuple[tuple[int, ...], tuple[int, ...]],
    place: Place,
    sequences: tuple[int, ...],
    num_tokens: int,
) -> None:
    """Launch the kernel; `strides` are of sequence, token, head; `sequences` its arguments."""
    item, stored_item, index = key.element_size(), place.stored.itemsize, key.device.index
    source = (
        *(key.data_ptr(), *[stride * item for stride in strides[0]]),
        *(value.data_ptr(), *[stride * item for stride in strides[1]]),
    )
    k_head_bytes, v_head_bytes = key.shape[-1] * stored_item, value.shape[-1] * stored_item
    heads = (key.shape[1], k_head_bytes, value.shape[1], v_head_bytes)
    # A thread handles as many bytes or numbers at once as every address, stride and size is a
    # multiple of; numbers must be aligned both as source numbers and as stored bytes.
    source_bits = functools.reduce(operator.or_, source)
    target_bits = functools.reduce(operator.or_, (*place[:4], k_head_bytes, v_head_bytes))
    if place.stored != FP8:
        joined = source_bits | target_bits
        kernel = _kernel(index, min(16, joined & -joined))
    else:
        count = min(16 // item, (source_bits & -source_bits) // item, target_bits & -target_bits)
        kernel = _numbers_kernel("append", index, key.dtype, count, encodes=True)
    words = _WORDS.pack(*source, *place[:4], *heads, *sequences, *place.inverses)
    launch(kernel, num_tokens, _THREADS, words)


@functools.cache
def _kernel(device_index: int, vector_bytes: int) -> Kernel:
    option = f"-DVECTOR={_VECTOR_TYPES[vector_bytes]}"
    return compiled(source("rows", "append"), "append", device_index, option)


@functools.cache
def _numbers_kernel(
    name: str, device_index: int, dtype: torch.dtype, count: int, encodes: bool
) -> Kernel:
    """Compile the kernel `name` for `count` numbers at a time, stored as float8 if it `encodes`."""
    reason = why_not_fp8(torch.device("cuda", device_index), dtype) if encodes else None
    if reason is not None:
        raise ConfigError(reason)
    options = [f"-DFORMAT={FORMATS[dtype]}", f"-DCOUNT={count}", *["-DENCODES"] * encodes]
    return compiled(source("numbers", "rows", name), name, device_index, *options)


def why_not_fp8(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why keys and values of `dtype` cannot be stored as float8, or None."""
    if torch.cuda.get_device_capability(device) < _FP8_CAPABILITY:
        return (
            f"{torch.cuda.get_device_name(device)} makes no {FP8}: that needs compute capability "
            '8.9 or newer; leave kv_dtype at "auto"'
        )
    if dtype not in FORMATS:
        return (
            f"keys and values in {dtype} cannot be stored in eight bits; load the model in bfloat16"
        )
    return None


# ---- append --------------------------------------------------------------------------------------


def append(call: Call, new: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Write keys and values of the call's query tokens at the ends of their rows.

    Token i of a sequence goes to position `num_tokens - query_tokens + i`. Padding tokens, whose
    positions are negative, are not written.

    Args:
        call: The layer's rows, which are written, and this step's batch, whose `num_tokens` include
            the new tokens.
        new: Keys `[Tq, H, Dk]` and values `[Tq, H, Dv]`, packed as the call's queries; any strides.

    Raises:
        ConfigError: Shapes, dtypes or devices do not fit. Nothing was written.

    Cost: one launch on CUDA; elsewhere two operations, and a few per batch. Ordering: on the
    current stream, before any attention launched on it later.
    """
    key, value = new
    keys, values, batch, scales = call.keys, call.values, call.batch, call.scales
    check_new(key, value, keys, values)
    if key.is_cuda:
        key, value = (each if each.stride(2) == 1 else each.contiguous() for each in new)
        vectors = addresses(batch.row_indices, batch.num_tokens, batch.query_starts)
        strides = (0, *key.stride()[:2]), (0, *value.stride()[:2])
        place, sequences = Place.of(keys, values, scales), (batch.batch_size, 0, *vectors)
        _launch(key, value, strides, place, sequences, key.shape[0])
        return
    positions = batch.flat_positions
    if positions.numel() and int(positions.min()) < 0:
        is_real = positions >= 0
        positions, key, value = positions[is_real], key[is_real], value[is_real]
    if keys.dtype == FP8:
        # Copied as bytes: torch has no index_copy_ for float8.
        key = encode(key, None if scales is None else scales.inverse_keys).view(torch.uint8)
        value = encode(value, None if scales is None else scales.inverse_values)
        keys, values, value = (each.view(torch.uint8) for each in (keys, values, value))
    flat(keys).index_copy_(0, positions, key)
    flat(values).index_copy_(0, positions, value)


# ---- rotate and append ---------------------------------------------------------------------------

_ROTATED_WORDS = Struct("=29q")
_ROTATED_DTYPES = (torch.bfloat16, torch.float16)


def can_rotate(
    call: Call, new: tuple[torch.Tensor, torch.Tensor], cos: torch.Tensor, sin: torch.Tensor
) -> bool:
    """Whether `append_rotated` takes these tensors: 16-bit numbers on CUDA, aligned to 16 bytes."""
    query = call.query
    dim, dtype = query.shape[2], query.dtype
    if not query.is_cuda or dtype not in _ROTATED_DTYPES or dim % 16 or call.values.shape[3] % 8:
        return False
    if cos.shape != (query.shape[0], dim):
        return False
    sources = (query, *new, cos, sin)
    if any(each.dtype != dtype or each.stride(-1) != 1 for each in sources):
        return False
    strided = [(each, each.stride()[:-1]) for each in sources]
    strided += [(view, view.stride()[:2]) for view in (call.keys, call.values)]
    bits = 0
    for each, strides in strided:
        bits |= each.data_ptr()
        for stride in strides:
            bits |= stride * each.element_size()
    return not bits % 16


def append_rotated(
    call: Call,
    new: tuple[torch.Tensor, torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    keep_keys: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotate queries and new keys by `cos`, `sin [Tq, D]`, and append, in one launch; unchecked.

    Returns new queries `[Tq, Hq, D]` and, with `keep_keys`, the rotated keys `[Tq, H, D]`.
    """
    query, (key, value), batch = call.query, new, call.batch
    keys, values = call.keys, call.values
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    kept = torch.empty(key.shape, dtype=key.dtype, device=key.device) if keep_keys else None
    place = Place.of(keys, values, call.scales)
    decodes = batch.max_query_tokens == 1 and batch.is_uniform(query.shape[0])
    starts = None if decodes else batch.query_starts
    words = _ROTATED_WORDS.pack(
        *(query.data_ptr(), *query.stride()[:2], query.shape[1]),
        *(key.data_ptr(), *key.stride()[:2]),
        *(value.data_ptr(), *value.stride()[:2]),
        *(cos.data_ptr(), cos.stride(0), sin.data_ptr(), sin.stride(0)),
        *addresses(out, kept),
        *place[:4],
        *(key.shape[1], query.shape[2], value.shape[2]),
        *addresses(batch.row_indices, batch.num_tokens, starts),
        batch.batch_size,
        *place.inverses,
    )
    index = query.device.index
    kernel = _numbers_kernel("append_rotated", index, query.dtype, 8, encodes=keys.dtype == FP8)
    launch(kernel, query.shape[0], _THREADS, words)
    return out, kept
