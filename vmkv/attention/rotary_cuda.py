"""Rotary embedding and append fused in one CUDA kernel, one block per token.

Compiled code takes three launches a layer: queries, keys, append. This kernel replaces them, which
saves 64 of some 470 kernels in an 8B model's decode step. It pairs the halves of a head,

    out = x * cos + cat(-x[half:], x[:half]) * sin

in float32, rounded once, as compiled code does.
"""

from __future__ import annotations

import functools
from struct import Struct

import torch

from ..core.cache.fp8 import FP8
from .append import check_fp8, inverses
from .base import Call
from .nvrtc import FORMATS, NUMBERS, Kernel, compiled, launch

_THREADS = 128
_WORDS = Struct("=29q")
_DTYPES = (torch.bfloat16, torch.float16)

# Strides are in numbers; those of rows are in bytes.
_SOURCE = r"""
typedef long long word;
struct alignas(16) Numbers { number at[8]; };

#ifdef ENCODES
struct alignas(8) Stored { unsigned short two[4]; };
__device__ Stored stored(const Numbers& numbers, float by) {
  Stored out;
  for (int at = 0; at < 4; at++)
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out.two[at])
        : "f"(as_float(numbers.at[2 * at + 1]) * by), "f"(as_float(numbers.at[2 * at]) * by));
  return out;
}
#else
typedef Numbers Stored;
__device__ Stored stored(const Numbers& numbers, float) { return numbers; }
#endif

__device__ float scale_of(const float* inverse, word head) {
  return inverse == nullptr ? 1.0f : inverse[head];
}

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

  word low = token;  // Which sequence: the last one that starts at or before the token.
  if (query_starts != nullptr) {
    word high = num_sequences;
    low = 0;
    while (high - low > 1) {
      const word middle = (low + high) / 2;
      if (query_starts[middle] <= token) low = middle; else high = middle;
    }
  }
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
    if not query.is_cuda or dtype not in _DTYPES or dim % 16 or call.values.shape[3] % 8:
        return False
    if cos.shape != (query.shape[0], dim):
        return False
    bits = 0
    for each in (query, *new, cos, sin):
        if each.dtype != dtype or each.stride(-1) != 1:
            return False
        bits |= each.data_ptr()
        for stride in each.stride()[:-1]:
            bits |= stride * each.element_size()
    for view in (call.keys, call.values):
        bits |= view.data_ptr()
        for stride in view.stride()[:2]:
            bits |= stride * view.element_size()
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
    stored_item = keys.element_size()
    is_uniform = batch.is_uniform(query.shape[0])
    words = _WORDS.pack(
        query.data_ptr(),
        *query.stride()[:2],
        query.shape[1],
        key.data_ptr(),
        *key.stride()[:2],
        value.data_ptr(),
        *value.stride()[:2],
        cos.data_ptr(),
        cos.stride(0),
        sin.data_ptr(),
        sin.stride(0),
        out.data_ptr(),
        0 if kept is None else kept.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        keys.stride(0) * stored_item,
        keys.stride(1) * stored_item,
        key.shape[1],
        query.shape[2],
        value.shape[2],
        batch.row_indices.data_ptr(),
        batch.num_tokens.data_ptr(),
        0 if batch.max_query_tokens == 1 and is_uniform else batch.query_starts.data_ptr(),
        batch.batch_size,
        *inverses(call.scales),
    )
    index = query.device.index
    kernel = _kernel(index, query.dtype, keys.dtype == FP8)
    stream = torch._C._cuda_getCurrentRawStream(index)
    launch(kernel, query.shape[0], _THREADS, stream, words)
    return out, kept


@functools.cache
def _kernel(device_index: int, dtype: torch.dtype, encodes: bool) -> Kernel:
    options = [f"-DFORMAT={FORMATS[dtype]}", *(["-DENCODES"] if encodes else [])]
    if encodes:
        check_fp8(device_index, dtype)
    return compiled(NUMBERS + _SOURCE, "append_rotated", device_index, *options)
