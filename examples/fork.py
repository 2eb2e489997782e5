"""Fork and copy-on-write: a second sequence over the same memory, and what happens on a write.

A fork maps the whole extents of its source a second time, read-only, and copies only the tail
that both will write. Both stay contiguous tensors. What is shared is copied when it must be
written: here because the fork is truncated and continues with other tokens.
"""

import argparse

import torch

from vmkv import KVCache, Sequence
from vmkv.units import format_bytes
from vmkv.viz import page_map

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "host")


def write(sequence: Sequence, num_tokens: int, value: float) -> None:
    """Append tokens whose keys are all `value`: no model, this is about memory."""
    sequence.append(num_tokens)
    for layer in sequence.cache.layers:
        sequence.keys(layer)[-num_tokens:] = value


with KVCache(parser.parse_args().device, max_tokens=65_536, max_sequences=4) as cache:
    groups = cache.add_layers(range(4), num_kv_heads=8, head_dim=64, dtype=torch.float16)
    page_tokens = groups[0].token_at(1)

    source = cache.open()
    write(source, 12 * page_tokens + page_tokens // 2, value=1)
    print(f"A sequence\n{page_map(cache)}\n")

    fork = source.fork()
    write(source, page_tokens, value=2)
    write(fork, 2 * page_tokens, value=3)
    print(f"Its fork, and each goes on by itself\n{page_map(cache)}\n")

    fork.truncate(9 * page_tokens)  # Within a shared extent, which the next write copies.
    write(fork, page_tokens, value=4)
    print(f"The fork goes back to token {9 * page_tokens} and writes\n{page_map(cache)}\n")

    sharing = cache.stats().sharing
    print(f"mapped again    {format_bytes(sharing.aliased_bytes):>10}")
    print(f"tails copied    {format_bytes(sharing.copied_bytes):>10}")
    print(f"copied on write {format_bytes(sharing.copied_on_write_bytes):>10}")

    def values(sequence: Sequence) -> list[float]:
        """The different values of its keys, in the order of its tokens."""
        return torch.unique_consecutive(sequence.keys(layer=3)[:, 0, 0]).tolist()

    print(f"source holds {values(source)}, fork holds {values(fork)}")
    source.close()
    cache.trim()  # Gives back what only the source held.
    print(f"the source has ended, fork still holds {values(fork)}")
