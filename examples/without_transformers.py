"""`KVCache` by itself: for your own decoding loop, with stock attention over plain views.

A sequence's keys of one layer are one tensor at one address, however long it becomes: there is
no block table to pass to a kernel and nothing to gather before calling one.
"""

import argparse

import torch
from torch.nn.functional import scaled_dot_product_attention

from vmkv import KVCache, Sequence

NUM_LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM = 4, 8, 4, 64


def forward(sequence: Sequence, num_tokens: int) -> torch.Tensor:
    """What a model does with its cache for `num_tokens` new tokens, with noise for numbers."""
    sequence.append(num_tokens)  # Memory first: from here on the views include the new tokens.
    for layer in range(NUM_LAYERS):
        keys, values = sequence.keys(layer), sequence.values(layer)  # [tokens, heads, dim]
        keys[-num_tokens:].normal_()
        values[-num_tokens:].normal_()
        query = torch.randn(1, QUERY_HEADS, 1, HEAD_DIM, device=keys.device)
        output = scaled_dot_product_attention(
            query, keys.transpose(0, 1)[None], values.transpose(0, 1)[None], enable_gqa=True
        )
    return output


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "host")

with KVCache(parser.parse_args().device, max_tokens=32_768, max_sequences=8) as cache:
    cache.add_layers(
        range(NUM_LAYERS), num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=torch.float32
    )
    print(f"nothing yet         {cache.stats()}")

    first = cache.open()
    forward(first, num_tokens=500)
    address = first.keys(layer=0).data_ptr()
    print(f"prompt of 500       {cache.stats()}")
    for _ in range(300):
        forward(first, num_tokens=1)
    print(f"300 tokens later    {cache.stats()}")
    print(f"  the keys still start at the same address: {first.keys(0).data_ptr() == address}")

    first.truncate(600)  # Say, the last 200 were a draft that was rejected.
    print(f"cut to 600          {cache.stats()}")

    first.close()  # Its row is parked: memory stays mapped for the next sequence.
    print(f"closed              {cache.stats()}")
    second = cache.open(num_tokens=700)
    forward(second, num_tokens=700)
    print(f"700 tokens, adopted {cache.stats()}")
