"""The fused append: write a step's keys and values, for every sequence, into their rows.

A model produces new keys and values packed, `[Tq, H, D]`; each token goes to the end of its row. On
CUDA one kernel writes both tensors of a layer and finds each token's row itself, where `index_put`
takes two launches and an index vector. On CPU two `index_copy_` calls over the flat view use
indices shared by all layers. Only the new tokens' places are accessed: the rest of the view may not
be mapped.

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
from .base import AttentionBatch, check_new, check_rows, check_scales, flat
from .nvrtc import FORMATS, NUMBERS, Kernel, compiled, launch

# ---- append cuda ---------------------------------------------------------------------------------

#: Vector type by the bytes that a thread copies at once, widest first.
_VECTOR_TYPES = {16: "uint4", 8: "uint2", 4: "unsigned int", 2: "unsigned short", 1: "char"}
_THREADS = 128
_WORDS = Struct("=23q")
_FP8_CAPABILITY = (8, 9)

# Strides and head sizes are in bytes; head sizes count stored bytes. Arguments are 64-bit words,
# see vmkv/core/_native/launch.c.
_MOVE = r"""
typedef long long word;

__device__ void put_token(const char* from, word from_head_stride, const float*, char* to,
                          word heads, word head_bytes) {
  const word per_head = head_bytes / sizeof(VECTOR);
  for (word i = threadIdx.x; i < heads * per_head; i += blockDim.x) {
    const char* source = from + (i / per_head) * from_head_stride;
    reinterpret_cast<VECTOR*>(to)[i] = reinterpret_cast<const VECTOR*>(source)[i % per_head];
  }
}
"""
# COUNT numbers at a time, after NUMBERS. Conversion saturates at the largest float8 value.
_ENCODE = r"""
typedef long long word;

__device__ unsigned short encode(float low, float high) {
  unsigned short two;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(high), "f"(low));
  return two;
}

struct alignas(sizeof(number) * COUNT) Numbers { number at[COUNT]; };
struct alignas(COUNT) Stored { unsigned char at[COUNT]; };

__device__ void put_token(const char* from, word from_head_stride, const float* inverse, char* to,
                          word heads, word head_bytes) {
  const word per_head = head_bytes / COUNT;
  for (word i = threadIdx.x; i < heads * per_head; i += blockDim.x) {
    const word head = i / per_head;
    const char* source = from + head * from_head_stride;
    const Numbers numbers = reinterpret_cast<const Numbers*>(source)[i % per_head];
    const float by = inverse == nullptr ? 1.0f : inverse[head];
    Stored stored;
    for (int at = 0; at < COUNT; at += 2) {
      const int next = at + 1 < COUNT ? at + 1 : at;
      const unsigned short two = encode(as_float(numbers.at[at]) * by,
                                        as_float(numbers.at[next]) * by);
      stored.at[at] = two & 0xff;
      stored.at[next] = next > at ? two >> 8 : stored.at[at];
    }
    reinterpret_cast<Stored*>(to)[i] = stored;
  }
}
"""
_APPEND = r"""
extern "C" __global__ void append(
    const char* key, word key_sequence_stride, word key_token_stride, word key_head_stride,
    const char* value, word value_sequence_stride, word value_token_stride, word value_head_stride,
    char* keys, char* values, word row_stride, word token_stride,
    word k_heads, word k_head_bytes, word v_heads, word v_head_bytes,
    word tokens_per_sequence, word first_position,
    const int* row_indices, const int* num_tokens, const int* query_starts,
    const float* inverse_keys, const float* inverse_values) {
  const word token = blockIdx.x;
  word sequence, at, row, position;
  if (row_indices == nullptr) {  // Row b is sequence b, and all are equally long.
    sequence = token / tokens_per_sequence;
    at = token % tokens_per_sequence;
    row = sequence;
    position = first_position + at;
  } else {  // Packed: the last sequence that starts at or before the token.
    word low = 0, high = tokens_per_sequence;  // Here: how many sequences there are.
    while (high - low > 1) {
      const word middle = (low + high) / 2;
      if (query_starts[middle] <= token) low = middle; else high = middle;
    }
    sequence = 0;
    at = token;
    row = row_indices[low];
    position = num_tokens[low] - (query_starts[low + 1] - token);
    if (position < 0) return;  // Padding.
  }
  const word target = row * row_stride + position * token_stride;
  put_token(key + sequence * key_sequence_stride + at * key_token_stride, key_head_stride,
            inverse_keys, keys + target, k_heads, k_head_bytes);
  put_token(value + sequence * value_sequence_stride + at * value_token_stride, value_head_stride,
            inverse_values, values + target, v_heads, v_head_bytes);
}
"""


class Place(NamedTuple):
    """Addresses of row 0, token 0 of a layer's rows, their strides, and the stored format."""

    keys_address: int
    values_address: int
    row_stride_bytes: int
    token_stride_bytes: int
    stored: torch.dtype
    scales: Scales | None = None


def append_uniform(
    key: torch.Tensor, value: torch.Tensor, place: Place, first_position: int, stream: int
) -> None:
    """Write `key [B, H, T, Dk]` and `value [B, H, T, Dv]` at `first_position` of rows 0, 1, 2 ….

    Nothing is checked; 5 us of host time.
    """
    batch_size, k_heads, num_tokens, k_dim = key.shape
    v_heads, v_dim = value.shape[1], value.shape[3]
    if not batch_size * num_tokens:
        return
    item = key.element_size()
    kb, kh, kt, kd = key.stride()
    vb, vh, vt, vd = value.stride()
    if kd != 1 or vd != 1:
        append_uniform(key.contiguous(), value.contiguous(), place, first_position, stream)
        return
    stored_item = place.stored.itemsize
    words = (
        key.data_ptr(),
        kb * item,
        kt * item,
        kh * item,
        value.data_ptr(),
        vb * item,
        vt * item,
        vh * item,
        *place[:4],
        k_heads,
        k_dim * stored_item,
        v_heads,
        v_dim * stored_item,
        num_tokens,
        first_position,
        0,
        0,
        0,
        *inverses(place.scales),
    )
    dtype = key.dtype if place.stored == FP8 else None
    _launch(key.device.index, words, batch_size * num_tokens, stream, dtype)


def _append_ragged(
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: AttentionBatch,
    scales: Scales | None,
) -> None:
    """Write packed tokens into their rows; `append` has checked the arguments."""
    key = key if key.stride(2) == 1 else key.contiguous()
    value = value if value.stride(2) == 1 else value.contiguous()
    item, stored_item = key.element_size(), keys.element_size()
    words = (
        key.data_ptr(),
        0,
        key.stride(0) * item,
        key.stride(1) * item,
        value.data_ptr(),
        0,
        value.stride(0) * item,
        value.stride(1) * item,
        keys.data_ptr(),
        values.data_ptr(),
        keys.stride(0) * stored_item,
        keys.stride(1) * stored_item,
        key.shape[1],
        key.shape[2] * stored_item,
        value.shape[1],
        value.shape[2] * stored_item,
        batch.batch_size,
        0,
        batch.row_indices.data_ptr(),
        batch.num_tokens.data_ptr(),
        batch.query_starts.data_ptr(),
        *inverses(scales),
    )
    index = key.device.index
    dtype = key.dtype if keys.dtype == FP8 else None
    _launch(index, words, key.shape[0], torch._C._cuda_getCurrentRawStream(index), dtype)


def encoded(query: torch.Tensor) -> torch.Tensor:
    """Return `query [T, H, D]` as float8, contiguous; the append kernel encodes it."""
    out = torch.empty(query.shape, dtype=FP8, device=query.device)
    index, (_, num_heads, dim) = query.device.index, query.shape
    place = Place(out.data_ptr(), out.data_ptr(), 0, num_heads * dim, FP8)
    append_uniform(
        query.transpose(0, 1)[None],
        query[:, :0].transpose(0, 1)[None],
        place,
        0,
        torch._C._cuda_getCurrentRawStream(index),
    )
    return out


def inverses(scales: Scales | None) -> tuple[int, int]:
    """Return the addresses of the inverse key and value scales; 0 without scales."""
    if scales is None:
        return 0, 0
    return scales.inverse_keys.data_ptr(), scales.inverse_values.data_ptr()


def _launch(
    device_index: int,
    words: tuple[int, ...],
    num_blocks: int,
    stream: int,
    encodes: torch.dtype | None,
) -> None:
    """Launch the copying variant, or the one that encodes numbers of type `encodes`."""
    # A thread handles as many bytes or numbers at once as every address, stride and size is a
    # multiple of; numbers must be aligned both as source numbers and as stored bytes.
    source = functools.reduce(operator.or_, words[:8])
    target = functools.reduce(operator.or_, (*words[8:12], words[13], words[15]))
    if encodes is None:
        joined = source | target
        kernel = _kernel(device_index, min(16, joined & -joined))
    else:
        item = encodes.itemsize
        count = min(16 // item, (source & -source) // item, target & -target)
        kernel = _encoding_kernel(device_index, encodes, count)
    launch(kernel, num_blocks, _THREADS, stream, _WORDS.pack(*words))


@functools.cache
def _kernel(device_index: int, vector_bytes: int) -> Kernel:
    option = f"-DVECTOR={_VECTOR_TYPES[vector_bytes]}"
    return compiled(_MOVE + _APPEND, "append", device_index, option)


@functools.cache
def _encoding_kernel(device_index: int, dtype: torch.dtype, count: int) -> Kernel:
    check_fp8(device_index, dtype)
    options = (f"-DFORMAT={FORMATS[dtype]}", f"-DCOUNT={count}")
    return compiled(NUMBERS + _ENCODE + _APPEND, "append", device_index, *options)


def check_fp8(device_index: int, dtype: torch.dtype) -> None:
    """Raise `ConfigError` where `why_not_fp8` returns a reason."""
    reason = why_not_fp8(torch.device("cuda", device_index), dtype)
    if reason is not None:
        raise ConfigError(reason)


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


def append(
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: AttentionBatch,
    scales: Scales | None = None,
) -> None:
    """Write new keys and values at positions `num_tokens - query_tokens + i` of their rows.

    Padding tokens, whose positions are negative, are not written.

    Args:
        key: `[Tq, H, Dk]`, packed by `batch.query_starts`; any strides with a last stride of 1.
        value: `[Tq, H, Dv]`, packed as `key` is.
        keys: `[rows, row_tokens, H, Dk]`, the layer's view, in the key's dtype or float8; written.
        values: `[rows, row_tokens, H, Dv]`, the layer's view; written.
        batch: This step's batch; its `num_tokens` include the new tokens.
        scales: Scales of a float8 layer; None for 1.

    Raises:
        ConfigError: Shapes, dtypes or devices do not fit. Nothing was written.

    Cost: one launch on CUDA; elsewhere two operations, and a few per batch. Ordering: on the
    current stream, before any attention launched on it later.
    """
    check_new(key, value, keys, values)
    check_rows(keys, batch.row_tokens)
    check_rows(values, batch.row_tokens)
    if scales is not None:
        check_scales(scales, keys)
    write(key, value, keys, values, batch, scales)


def write(
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: AttentionBatch,
    scales: Scales | None,
) -> None:
    """Append as `append`, without checks."""
    if key.is_cuda:
        _append_ragged(key, value, keys, values, batch, scales)
    else:
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
