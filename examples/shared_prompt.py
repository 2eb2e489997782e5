"""One system prompt over 64 requests: computed once, held once, and still contiguous in each.

A sequence that says which tokens it holds (`record`) can be found by the next one with the same
beginning (`open(prompt=...)`). That one maps the same extents, read-only, and computes its own
tokens only. There is no second copy, and no block table to find the first one through.
"""

import argparse
import random

import torch

from vmkv import CacheStats, KVCache, Sequence
from vmkv.units import format_bytes
from vmkv.viz import draw

NUM_REQUESTS, SYSTEM_TOKENS, OWN_TOKENS = 64, 1024, 40
random.seed(0)
SYSTEM_PROMPT = [random.randrange(2048) for _ in range(SYSTEM_TOKENS)]
QUESTIONS = [[random.randrange(2048) for _ in range(OWN_TOKENS)] for _ in range(NUM_REQUESTS)]

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "host")
parser.add_argument("--draw", metavar="PNG", help="a picture of who maps what (needs matplotlib)")
options = parser.parse_args()


def compute(sequence: Sequence, prompt: list[int]) -> int:
    """Compute the tokens that are not cached, as a model would; returns their number."""
    missing = prompt[sequence.num_tokens :]
    sequence.append(len(missing))
    for layer in sequence.cache.layers:
        new = torch.tensor(missing, device=sequence.cache.device)[:, None, None]
        sequence.keys(layer)[-len(missing) :] = new  # No model: the token itself for its key.
    return len(missing)


def serve(*, shares: bool) -> tuple[int, CacheStats]:
    """Answer all requests side by side: tokens computed, and what the cache says then."""
    with KVCache(options.device, max_tokens=8192, max_sequences=NUM_REQUESTS) as cache:
        cache.add_layers(range(4), num_kv_heads=8, head_dim=64, dtype=torch.float16)
        num_computed = 0
        for prompt in (SYSTEM_PROMPT + question for question in QUESTIONS):
            sequence = cache.open(prompt=prompt if shares else None)
            num_computed += compute(sequence, prompt)
            sequence.record(prompt[sequence.num_cached_tokens :])
            assert sequence.keys(layer=3)[:, 0, 0].tolist() == prompt  # As if it were alone.
        if shares and options.draw:
            draw(cache, options.draw)
        return num_computed, cache.stats()


print(f"{NUM_REQUESTS} requests, {SYSTEM_TOKENS} tokens in common, {OWN_TOKENS} of their own each")
for name, shares in (("without sharing", False), ("with sharing", True)):
    num_computed, stats = serve(shares=shares)
    print(f"{name:<15} {format_bytes(stats.resident_bytes):>9} resident, ", end="")
    print(f"{num_computed:>7,} tokens computed, {stats.num_prefix_hits} prefix hits")
print(f"mapped beyond the memory that is there: {format_bytes(stats.shared_bytes)}")
