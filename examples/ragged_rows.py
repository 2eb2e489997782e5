"""Sequences of different lengths, each in its own row, with no padding between them.

A tensor `[batch, longest, …]` pays for the longest sequence `batch` times. Rows reserve
addresses for the longest, which cost nothing, and map memory for what each one holds.
"""

import argparse

import torch

from vmkv import KVCache
from vmkv.units import format_bytes

LENGTHS = [40, 75, 130, 210, 260, 480, 900, 2100]
NUM_LAYERS, KV_HEADS, HEAD_DIM, DTYPE = 8, 8, 64, torch.float16
TOKEN_BYTES = NUM_LAYERS * 2 * KV_HEADS * HEAD_DIM * DTYPE.itemsize

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "host")

with KVCache(parser.parse_args().device, max_tokens=8192, max_sequences=len(LENGTHS)) as cache:
    cache.add_layers(range(NUM_LAYERS), num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=DTYPE)
    sequences = [cache.open() for _ in LENGTHS]
    cache.grow(zip(sequences, LENGTHS, strict=True))  # All of them get their memory, or none.

    for step in range(100):  # Decode: every row by one token, with one call for all.
        cache.grow([(sequence, sequence.num_tokens + 1) for sequence in sequences])
        for sequence in sequences:
            sequence.keys(layer=0)[-1] = step  # One layer and no model: this is about memory.

    longest = max(sequence.num_tokens for sequence in sequences)
    print("row  tokens  one # per 32 tokens, one . per 32 tokens of padding saved")
    for sequence in sequences:
        held, saved = sequence.num_tokens // 32, (longest - sequence.num_tokens) // 32
        print(f"{sequence.row:>3}  {sequence.num_tokens:>6}  {'#' * held}{'.' * saved}")

    stats = cache.stats()
    padded_bytes = len(sequences) * longest * TOKEN_BYTES
    print(f"\npadded to the longest  {format_bytes(padded_bytes):>10}")
    print(f"vmkv, resident         {format_bytes(stats.resident_bytes):>10}", end="")
    print(f"   {stats.resident_bytes / padded_bytes:.0%} of padded")
    print(f"of that, used          {format_bytes(stats.used_bytes):>10}", end="")
    print(f"   {stats.used_bytes / stats.resident_bytes:.1%} of resident")
