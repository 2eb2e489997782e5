"""A prefix computed once and read by another process, without a copy, even after the first ends.

The first process exports a prompt's pages over a Unix socket. The second maps them read-only at
the start of a row of its own, appends to it, and goes on when the first one has been killed.
"""

import argparse
import subprocess
import sys
import tempfile

import torch

from vmkv import ExtentPool, KVCache, open_backend
from vmkv.units import MiB, format_bytes

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "host")
parser.add_argument("--export-to", metavar="SOCKET", help="be the first process")
arguments = parser.parse_args()
PROMPT = list(range(4096))  # Token ids.


def open_cache() -> KVCache:
    backend = open_backend(arguments.device)
    pool = ExtentPool(backend, 256 * MiB, is_shareable=True, close_when_unused=True)
    cache = KVCache(pool, max_tokens=8192, max_sequences=4)
    cache.add_layers(range(4), num_kv_heads=8, head_dim=128, dtype=torch.float16)
    return cache


if arguments.export_to:
    with open_cache() as cache:
        sequence = cache.open()
        sequence.append(len(PROMPT))
        sequence.keys(layer=0)[:] = 7  # The prefill would write them all.
        sequence.record(PROMPT)
        with sequence.export(arguments.export_to) as exporter:
            print(f"exporting {exporter.num_tokens} tokens", flush=True)
            exporter.start()
            sys.stdin.read()  # Until it is killed.
    sys.exit()

with tempfile.TemporaryDirectory() as folder, open_cache() as cache:
    command = [sys.executable, __file__, "--device", arguments.device]
    command += ["--export-to", f"{folder}/s"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as first:
        print(f"first process: {first.stdout.readline()}", end="")
        sequence = cache.import_prefix(f"{folder}/s")
        imported_bytes = cache.pool.backend.usage().imported_bytes
        print(f"imported {format_bytes(imported_bytes)}, ", end="")
        print(f"with {format_bytes(cache.pool.stats().created_bytes)} of memory of its own")
        first.kill()
    print(f"the first process is gone; token 99 has key {sequence.keys(layer=0)[99, 0, 0]:.0f}")
    sequence.append(100)
    print(f"{sequence.num_tokens} tokens, ", end="")
    print(f"with {format_bytes(cache.pool.stats().created_bytes)} of memory of its own")
    hit = cache.open(prompt=[*PROMPT, 1, 2, 3])  # It is a prefix like any other.
    print(f"another sequence finds {hit.num_cached_tokens} tokens of its prompt")
