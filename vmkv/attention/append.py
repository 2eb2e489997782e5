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
from .nvrtc import FORMATS, NUMBERS, Kernel, addresses, compiled, launch

# ---- append cuda ---------------------------------------------------------------------------------

#: Vector type by the bytes that a thread copies at once, widest first.
_VECTOR_TYPES = {16: "uint4", 8: "uint2", 4: "unsigned int", 2: "unsigned short", 1: "char"}
_THREADS = 128
_WORDS = Struct("=23q")
_FP8_CAPABILITY = (8, 9)

# The beginning of every kernel's source. Conversion saturates at the largest float8 value. A thread
# moves one VECTOR of bytes at a time or, where NUMBERS stands before, COUNT numbers.
_ROWS = r"""
typedef long long word;

__device__ unsigned short encode(float low, float high) {
  unsigned short two;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(high), "f"(low));
  return two;
}

// The last of the sequences that starts at or before the token.
__device__ word sequence_of(word token, const int* query_starts, word num_sequences) {
  word low = 0, high = num_sequences;
  while (high - low > 1) {
    const word middle = (low + high) / 2;
    if (query_starts[middle] <= token) low = middle; else high = middle;
  }
  return low;
}

#ifdef VECTOR
typedef VECTOR Numbers;
#else
struct alignas(sizeof(number) * COUNT) Numbers { number at[COUNT]; };
#endif

#ifdef ENCODES
struct alignas(COUNT) Stored { unsigned char at[COUNT]; };
__device__ Stored stored(Numbers numbers, float by) {
  Stored out;
  for (int at = 0; at < COUNT; at += 2) {
    const int next = at + 1 < COUNT ? at + 1 : at;
    const unsigned short two = encode(as_float(numbers.at[at]) * by,
                                      as_float(numbers.at[next]) * by);
    out.at[at] = two & 0xff;
    out.at[next] = next > at ? two >> 8 : out.at[at];
  }
  return out;
}
#else
typedef Numbers Stored;
__device__ Stored stored(Numbers numbers, float) { return numbers; }
#endif

__device__ float scale_of(const float* inverse, word head) {
  return inverse == nullptr ? 1.0f : inverse[head];
}
"""
# Strides and head sizes are in bytes; head sizes count stored bytes. Arguments are 64-bit words,
# see vmkv/core/_native/launch.c.
_APPEND = r"""
__device__ void put_token(const char* from, word from_head_stride, const float* inverse, char* to,
                          word heads, word head_bytes) {
  const word per_head = head_bytes / sizeof(Stored);
  for (word i = threadIdx.x; i < heads * per_head; i += blockDim.x) {
    const char* source = from + (i / per_head) * from_head_stride;
    reinterpret_cast<Stored*>(to)[i] = stored(
        reinterpret_cast<const Numbers*>(source)[i % per_head], scale_of(inverse, i / per_head));
  }
}

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
  } else {  // Packed, and `tokens_per_sequence` is how many sequences there are.
    const word low = sequence_of(token, query_starts, tokens_per_sequence);
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
    """Write `key [B, H, T, Dk]` and `value [B, H, T, Dv]` at `first_position` of rows 0, 1, 2 ….

    Nothing is checked; 5 us of host time.
    """
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
    """Launch the copying kernel, or the one that encodes.

    `strides` are those of a sequence, a token and a head in `key` and `value`, in numbers, and
    `sequences` the kernel's arguments from `tokens_per_sequence` to `query_starts`.
    """
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
    return compiled(_ROWS + _APPEND, "append", device_index, option)


@functools.cache
def _numbers_kernel(
    name: str, device_index: int, dtype: torch.dtype, count: int, encodes: bool
) -> Kernel:
    """Compile the kernel `name` for `count` numbers at a time, stored as float8 if it `encodes`."""
    reason = why_not_fp8(torch.device("cuda", device_index), dtype) if encodes else None
    if reason is not None:
        raise ConfigError(reason)
    source = NUMBERS + _ROWS + (_APPEND if name == "append" else _ROTATE)
    options = [f"-DFORMAT={FORMATS[dtype]}", f"-DCOUNT={count}", *["-DENCODES"] * encodes]
    return compiled(source, name, device_index, *options)


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

# Strides are in numbers; those of rows are in bytes.
_ROTATE = r"""
__device__ void turn(Numbers& low, Numbers& high, const Numbers& c0, const Numbers& c1,
                     const Numbers& s0, const Numbers& s1) {
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float x = as_float(low.at[i]), y = as_float(high.at[i]);
    low.at[i] = as_number(x * as_float(c0.at[i]) - y * as_float(s0.at[i]));
    high.at[i] = as_number(y * as_float(c1.at[i]) + x * as_float(s1.at[i]));
  }
}

extern "C" __global__ void append_rotated(
    const number* query, word query_token_stride, word query_head_stride, word query_heads,
    const number* key, word key_token_stride, word key_head_stride,
    const number* value, word value_token_stride, word value_head_stride,
    const number* cosine, word cosine_stride, const number* sine, word sine_stride,
    number* out_query, number* out_key,
    char* keys, char* values, word row_stride, word token_stride,
    word heads, word dim, word value_dim,
    const int* row_indices, const int* num_tokens, const int* query_starts, word num_sequences,
    const float* inverse_keys, const float* inverse_values) {
  const word token = blockIdx.x;
  const int half = (int)dim / 2, per_head = half / 8, at = threadIdx.x % per_head;
  const int first_head = threadIdx.x / per_head, step = blockDim.x / per_head;
  const bool turns = first_head < step;
  const Numbers* cosines = reinterpret_cast<const Numbers*>(cosine + token * cosine_stride) + at;
  const Numbers* sines = reinterpret_cast<const Numbers*>(sine + token * sine_stride) + at;
  const Numbers c0 = cosines[0], c1 = cosines[per_head], s0 = sines[0], s1 = sines[per_head];

  for (int head = first_head; turns && head < query_heads; head += step) {
    const number* from = query + token * query_token_stride + head * query_head_stride;
    Numbers first = reinterpret_cast<const Numbers*>(from)[at];
    Numbers second = reinterpret_cast<const Numbers*>(from + half)[at];
    turn(first, second, c0, c1, s0, s1);
    Numbers* to = reinterpret_cast<Numbers*>(out_query + (token * query_heads + head) * dim) + at;
    to[0] = first;
    to[per_head] = second;
  }

  word low = token;
  if (query_starts != nullptr) low = sequence_of(token, query_starts, num_sequences);
  const word behind = query_starts == nullptr ? 1 : query_starts[low + 1] - token;
  const word position = num_tokens[low] - behind;
  const bool is_real = position >= 0;  // Of padding, nothing is written to a row.
  const word target = row_indices[low] * row_stride + position * token_stride;
  for (int head = first_head; turns && head < heads; head += step) {
    const number* from = key + token * key_token_stride + head * key_head_stride;
    Numbers first = reinterpret_cast<const Numbers*>(from)[at];
    Numbers second = reinterpret_cast<const Numbers*>(from + half)[at];
    turn(first, second, c0, c1, s0, s1);
    if (out_key != nullptr) {
      Numbers* to = reinterpret_cast<Numbers*>(out_key + (token * heads + head) * dim) + at;
      to[0] = first;
      to[per_head] = second;
    }
    if (is_real) {
      Stored* to = reinterpret_cast<Stored*>(keys + target) + head * 2 * per_head + at;
      const float by = scale_of(inverse_keys, head);
      to[0] = stored(first, by);
      to[per_head] = stored(second, by);
    }
  }
  const int per_value = (int)value_dim / 8;
  for (int part = threadIdx.x; is_real && part < (int)heads * per_value; part += blockDim.x) {
    const int head = part / per_value;
    const number* from = value + token * value_token_stride + head * value_head_stride;
    reinterpret_cast<Stored*>(values + target)[part] =
        stored(reinterpret_cast<const Numbers*>(from)[part % per_value],
               scale_of(inverse_values, head));
  }
}
"""


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
    """Rotate queries and new keys by `cos`, `sin` `[Tq, D]`; append keys and values to the rows.

    `new` are keys and values `[Tq, H, D]` of the call's query tokens. Unchecked, see `can_rotate`.
    Returns the rotated queries `[Tq, Hq, D]` and, with `keep_keys`, the rotated keys `[Tq, H, D]`;
    new tensors. One launch.
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
