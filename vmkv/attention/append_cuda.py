"""The fused append as one CUDA kernel: a step's keys and values into their rows.

One block writes one token: its keys, then its values, each as one run of heads. In a uniform
batch the token's sequence follows by division; in a ragged one the block finds it by bisecting
`query_starts`, log2(B) dependent loads that hide behind other blocks.

Why a kernel of our own, when `copy_` exists: rows lie gigabytes apart, so torch splits a copy
over B rows into B launches (its iterators index 32 bits), 132 us for a batch of 16 where
`torch.cat`'s rival update takes 17. `index_copy_` takes two launches and 14 us. This launch takes
3 us (see nvrtc.py).
"""

from __future__ import annotations

import functools
from struct import Struct

import torch

from .nvrtc import Kernel, compiled, launch

#: Bytes that a thread moves at once, widest first.
_VECTOR_TYPES = {16: "uint4", 8: "uint2", 4: "unsigned int", 2: "unsigned short", 1: "char"}
_THREADS = 128
_WORDS = Struct("=21q")

# Strides and head sizes are in bytes. Arguments are 64-bit words, see vmkv/_native/launch.c.
_SOURCE = r"""
typedef long long word;

__device__ void copy_token(const char* from, word from_head_stride, char* to, word heads,
                           word head_bytes) {
  const word per_head = head_bytes / sizeof(VECTOR);
  for (word i = threadIdx.x; i < heads * per_head; i += blockDim.x) {
    const char* source = from + (i / per_head) * from_head_stride;
    reinterpret_cast<VECTOR*>(to)[i] = reinterpret_cast<const VECTOR*>(source)[i % per_head];
  }
}

extern "C" __global__ void append(
    const char* key, word key_sequence_stride, word key_token_stride, word key_head_stride,
    const char* value, word value_sequence_stride, word value_token_stride, word value_head_stride,
    char* keys, char* values, word row_stride, word token_stride,
    word k_heads, word k_head_bytes, word v_heads, word v_head_bytes,
    word tokens_per_sequence, word first_slot,
    const int* row_indices, const int* num_tokens, const int* query_starts) {
  const word token = blockIdx.x;
  word sequence, at, row, slot;
  if (row_indices == nullptr) {  // Row b is sequence b, and all are equally long.
    sequence = token / tokens_per_sequence;
    at = token % tokens_per_sequence;
    row = sequence;
    slot = first_slot + at;
  } else {  // Packed: the last sequence that starts at or before the token.
    word low = 0, high = tokens_per_sequence;  // Here: how many sequences there are.
    while (high - low > 1) {
      const word middle = (low + high) / 2;
      if (query_starts[middle] <= token) low = middle; else high = middle;
    }
    sequence = 0;
    at = token;
    row = row_indices[low];
    slot = num_tokens[low] - (query_starts[low + 1] - token);
    if (slot < 0) return;  // Padding.
  }
  const word target = row * row_stride + slot * token_stride;
  copy_token(key + sequence * key_sequence_stride + at * key_token_stride, key_head_stride,
             keys + target, k_heads, k_head_bytes);
  copy_token(value + sequence * value_sequence_stride + at * value_token_stride, value_head_stride,
             values + target, v_heads, v_head_bytes);
}
"""


def append_uniform(
    key: torch.Tensor,
    value: torch.Tensor,
    keys_address: int,
    values_address: int,
    row_stride_bytes: int,
    token_stride_bytes: int,
    first_slot: int,
    stream: int,
) -> None:
    """Write `key` and `value` at `first_slot` of rows 0, 1, 2 … of a layer.

    Args:
        key: `[B, H, T, Dk]`, any strides whose last is 1, on the current device.
        value: `[B, H, T, Dv]`, likewise.
        keys_address: Where the layer's keys of row 0, token 0 lie.
        values_address: Likewise for values.
        row_stride_bytes: From one row to the next.
        token_stride_bytes: From one token to the next.
        first_slot: The position of the first new token.
        stream: Raw handle of the stream to launch on.

    Raises:
        CudaDriverError: The launch was refused. Nothing was written.

    Cost: 3 us of host time for the launch, 2 us for its arguments. Nothing is checked here.
    """
    batch_size, k_heads, num_tokens, k_dim = key.shape
    v_heads, v_dim = value.shape[1], value.shape[3]
    if not batch_size * num_tokens:
        return
    item = key.element_size()
    kb, kh, kt, kd = key.stride()
    vb, vh, vt, vd = value.stride()
    if kd != 1 or vd != 1:
        append_uniform(
            key.contiguous(),
            value.contiguous(),
            keys_address,
            values_address,
            row_stride_bytes,
            token_stride_bytes,
            first_slot,
            stream,
        )
        return
    words = (
        key.data_ptr(),
        kb * item,
        kt * item,
        kh * item,
        value.data_ptr(),
        vb * item,
        vt * item,
        vh * item,
        keys_address,
        values_address,
        row_stride_bytes,
        token_stride_bytes,
        k_heads,
        k_dim * item,
        v_heads,
        v_dim * item,
        num_tokens,
        first_slot,
        0,
        0,
        0,
    )
    _launch(key.device.index, words, batch_size * num_tokens, stream)


def append_ragged(
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    row_indices: torch.Tensor,
    num_tokens: torch.Tensor,
    query_starts: torch.Tensor,
) -> None:
    """Write packed tokens behind what their rows hold; arguments as `append`, checked there."""
    key = key if key.stride(2) == 1 else key.contiguous()
    value = value if value.stride(2) == 1 else value.contiguous()
    item = key.element_size()
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
        keys.stride(0) * item,
        keys.stride(1) * item,
        key.shape[1],
        key.shape[2] * item,
        value.shape[1],
        value.shape[2] * item,
        row_indices.shape[0],
        0,
        row_indices.data_ptr(),
        num_tokens.data_ptr(),
        query_starts.data_ptr(),
    )
    index = key.device.index
    _launch(index, words, key.shape[0], torch._C._cuda_getCurrentRawStream(index))


def _launch(device_index: int, words: tuple[int, ...], num_blocks: int, stream: int) -> None:
    # Every address, stride and size must be a multiple of what a thread moves at once.
    joined = words[0] | words[1] | words[2] | words[3] | words[4] | words[5] | words[6] | words[7]
    joined |= words[8] | words[9] | words[10] | words[11] | words[13] | words[15]
    vector_bytes = min(16, joined & -joined)
    launch(_kernel(device_index, vector_bytes), num_blocks, _THREADS, stream, _WORDS.pack(*words))


@functools.cache
def _kernel(device_index: int, vector_bytes: int) -> Kernel:
    return compiled(_SOURCE, "append", device_index, f"-DVECTOR={_VECTOR_TYPES[vector_bytes]}")
