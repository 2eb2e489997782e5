"""A conversation waits in host memory while others talk, and goes on at the same addresses.

The device holds two conversations here. A third one comes; the first, whose user is thinking,
gives way to it and comes back later: not recomputed, and not moved as far as tensors can tell.
"""

import argparse

import torch

from vmkv import KVCache, OutOfPagesError, Sequence, open_backend
from vmkv.units import format_bytes
from vmkv.viz import page_map

NUM_TOKENS, NUM_LAYERS, KV_HEADS, HEAD_DIM = 4096, 4, 8, 64
CONVERSATION_BYTES = NUM_TOKENS * NUM_LAYERS * 2 * KV_HEADS * HEAD_DIM * torch.float16.itemsize

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "host")


def talk(sequence: Sequence, num_tokens: int) -> None:
    """Append tokens with noise for keys: no model, this is about memory."""
    sequence.append(num_tokens)
    for layer in range(NUM_LAYERS):
        sequence.keys(layer)[-num_tokens:].normal_()


with KVCache(
    open_backend(parser.parse_args().device),
    max_tokens=2 * NUM_TOKENS,
    max_sequences=3,
    budget_bytes=2 * CONVERSATION_BYTES,
    host_budget_bytes=CONVERSATION_BYTES,
) as cache:
    cache.add_layers(
        range(NUM_LAYERS), num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=torch.float16
    )
    first, second, third = (cache.open() for _ in range(3))
    talk(first, NUM_TOKENS)
    talk(second, NUM_TOKENS)
    try:
        talk(third, NUM_TOKENS)
    except OutOfPagesError as error:
        print(f"A third conversation does not fit: {error}\n")

    keys = first.keys(layer=0)
    said, address = keys.clone(), keys.data_ptr()
    first.swap_out()
    talk(third, NUM_TOKENS)
    print(f"The first in host memory, the third in its place\n{page_map(cache)}\n")

    third.close()
    first.swap_in()
    print(f"The third has ended, the first is back\n{page_map(cache)}\n")
    moved_bytes = cache.stats().sharing.swapped_in_bytes
    print(f"{format_bytes(moved_bytes)} came back to the same address: ", end="")
    print(f"{first.keys(layer=0).data_ptr() == address}, with the same contents: ", end="")
    print(f"{torch.equal(keys, said)}, as the tensor from before shows")  # Not a new view.
