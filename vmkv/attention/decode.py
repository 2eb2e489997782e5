"""A CUDA kernel for decoding, one query per sequence: over float8 rows, and over wide heads.

FlashAttention-3 rounds queries to float8 over such rows, and transposes values in shared memory
(one H200, 32 sequences of 8,192 tokens: 3.1 TB/s where the 16-bit kernel reads 4.25, and errors a
hundred times as large). FlashInfer's kernel for bfloat16 queries needs pages and a plan per step.
Flash kernels end at head sizes of 256, and Gemma 4 has layers of 512.

Keys and values go from memory to registers once, 16 bytes per thread, in the operand order of
`mma.m16n8k16`: any assignment of dimensions and tokens to a product's indices is valid if both
operands use it. Float8 becomes float16 (exact for e4m3), as do its queries; sums are float32. A
warp prefetches its next keys. Nothing past a row's end is fetched.

Up to 128 dimensions, each warp of a block takes tokens of its own. The sums of a wide head do not
fit a warp's registers, so its warps share the tokens and take a quarter of the dimensions each;
they add up their scores in shared memory: Note [Heads of 512].

Long rows are cut into parts, so that few sequences occupy the device; the block that finishes last
adds up its sequence's parts (split-K reduction), so there is no second launch.
"""

from __future__ import annotations

import functools
import math
from struct import Struct

import torch

from ..core.cache.fp8 import FP8
from ..units import div_ceil
from .base import Call
from .nvrtc import FORMATS, Kernel, addresses, compiled, launch, source

FP8_HEAD_DIMS = (64, 128, 512)
"""Head sizes of float8 rows that the kernel is compiled for."""
WIDE_HEAD_DIMS = (512,)
"""Head sizes of float16 and bfloat16 rows; stock kernels serve smaller ones."""
MAX_GROUP = 8
"""Most query heads that may share a key head: columns of a product."""
_THREADS = 128
_BLOCKS_PER_PROCESSOR = 3
_MAX_PARTS = 64
_WORDS = Struct("=10q3d11q")


def serves(call: Call) -> bool:
    """Whether the kernel takes this call on a GPU: single queries, float8 or wide heads."""
    needed = (8, 9) if call.keys.dtype == FP8 else (8, 0)
    return takes(call) and torch.cuda.get_device_capability(call.query.device) >= needed


def takes(call: Call) -> bool:
    """Whether the kernel can take this call on a device that supports it."""
    query, keys, values, batch = call.query, call.keys, call.values, call.batch
    dim = query.shape[2]
    token_bytes = keys.stride(1) * keys.itemsize
    return (
        query.dtype in (torch.bfloat16, torch.float16)
        and dim in (FP8_HEAD_DIMS if keys.dtype == FP8 else WIDE_HEAD_DIMS)
        and values.shape[3] == dim
        and query.shape[1] // keys.shape[2] <= MAX_GROUP
        and query.shape[0] == batch.batch_size
        and batch.max_query_tokens == 1
        and keys.stride() == values.stride()
        and not (keys.data_ptr() | values.data_ptr() | token_bytes) % 16
    )


def decode(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output `[B, Hq, D]` and log-sum-exp `[B, Hq, 1]` in one launch; needs `serves`."""
    query, keys, values, batch = call.query, call.keys, call.values, call.batch
    query = query if query.stride()[1:] == (query.shape[2], 1) else query.contiguous()
    size, query_heads, dim = query.shape
    heads = keys.shape[2]
    parts = _num_parts(query.device, size * heads, batch.max_num_tokens, 2 * dim * keys.itemsize)
    out = call.out
    if out is None:
        out = torch.empty((size, query_heads, dim), dtype=query.dtype, device=query.device)
    logsumexp = torch.empty((size, query_heads, 1), dtype=torch.float32, device=query.device)
    words = _WORDS.pack(
        *(query.data_ptr(), query.stride(0), *addresses(keys, values)),
        *(stride * keys.itemsize for stride in keys.stride()[:2]),
        *addresses(batch.row_indices, batch.num_tokens, *(call.scales or [None] * 4)[:2]),
        *(call.scale, call.softcap, math.log2(math.e)),
        *(call.window or 0, parts, heads, query_heads // heads),
        *addresses(out, logsumexp),
        *_scratch(call, parts, size * query_heads, dim, size * heads),
        *(size, *addresses(batch.left_pad)),
    )
    kernel = _kernel(query.device.index, query.dtype, dim, keys.dtype == FP8)
    launch(kernel, size * heads * parts, _THREADS, words)
    return out, logsumexp


def _num_parts(device: torch.device, num_blocks: int, max_num_tokens: int, token_bytes: int) -> int:
    """Return the number of parts to cut rows into.

    The aim is two blocks per processor, all resident, and three where a token of a head takes more
    than half a KiB, with which few tokens are under way; where rows alone give one or two, about
    six, because rows may differ in length. One H200, 32 heads over 8, float8: one sequence of 2,048
    tokens takes 11 us in 8 parts, 14 in 4; 32 chat sequences 28 us in 3, 46 in one.
    """
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    is_wide = token_bytes > 512
    resident = _BLOCKS_PER_PROCESSOR if is_wide else 2
    wanted = resident * processors // num_blocks
    if wanted < 2:
        wanted = round(2 * _BLOCKS_PER_PROCESSOR * processors / num_blocks)
    # The final reduction takes as long as a part of some hundred tokens.
    least = 128 if is_wide else 256
    useful = min(div_ceil(max_num_tokens, least), max(8, div_ceil(max_num_tokens, 2 * least)))
    return max(1, min(wanted, _MAX_PARTS, useful))


def _scratch(
    call: Call, parts: int, num_queries: int, dim: int, num_blocks: int
) -> tuple[int, int, int]:
    """Return the addresses of partial sums, weights and counts, which all layers share in order."""
    if parts == 1:
        return 0, 0, 0
    key = ("decode", parts, num_queries, dim, num_blocks)
    scratch = call.batch.plans.get(key)
    if scratch is None:
        floats = parts * num_queries * (dim + 2) + num_blocks
        scratch = torch.zeros(floats, dtype=torch.float32, device=call.query.device)
        call.batch.plans[key] = scratch
    sums = scratch.data_ptr()
    weights = sums + 4 * parts * num_queries * dim
    return sums, weights, weights + 8 * parts * num_queries


@functools.cache
def _kernel(device_index: int, dtype: torch.dtype, dim: int, is_fp8: bool) -> Kernel:
    its = {"FORMAT": FORMATS[dtype], "EIGHT_BITS": int(is_fp8), "D": dim}
    its["MIN_BLOCKS"] = _BLOCKS_PER_PROCESSOR
    options = [f"-D{name}={value}" for name, value in its.items()]
    text = source("numbers", "decode_instructions", "decode")
    return compiled(text, "decode", device_index, *options)
