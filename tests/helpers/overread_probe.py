"""A process that faults if a backend touches memory past a row's margin.

Run as `python -m helpers.overread_probe JSON` with the keys `device`, `name`, `dtype`, `kv_dtype`,
`dim` and `margin`. It places a row so that mapped memory ends `margin` tokens after its length,
for every length up to a few key tiles, and runs every kind of launch on it, beside a longer
sequence (in a batch of one, a backend that cuts the view to the longest would never reach past it).

Exit status 0: no fault. Otherwise the last line printed names the launch at fault.
"""

from __future__ import annotations

import json
import sys

import torch

from helpers.vm_range import MappedUpTo
from vmkv.attention import AttentionBatch, Call, append, get

LENGTHS = range(1, 401)
LONGER_TOKENS = 600
ROW_TOKENS = 1024
HEADS, KV_HEADS = 4, 1
# Launch name: queries per sequence, and options.
LAUNCHES = {
    "decode": (1, {}),
    "chunk": (17, {}),
    "window": (17, {"window": 70}),
    "decode window": (1, {"window": 70}),
    "mixed": (None, {}),
}


def make_batch(length: int, queries: int | None, device: str) -> AttentionBatch:
    """Row 1 holds `length` tokens, row 0 more; with None the numbers of queries differ."""
    longer = LONGER_TOKENS
    asked = [33, min(5, length)] if queries is None else [min(queries, length)] * 2
    return AttentionBatch.build(
        [0, 1], [longer, length], asked, row_tokens=ROW_TOKENS, num_rows=2, device=device
    )


def main(arguments: dict) -> None:
    """Run all launches; see the module's docstring."""
    device = "cpu" if arguments["device"] == "host" else arguments["device"]
    dtype, dim, margin = getattr(torch, arguments["dtype"]), arguments["dim"], arguments["margin"]
    kv_dtype = getattr(torch, arguments["kv_dtype"])
    torch.zeros(1, device=device)  # Makes torch's CUDA context.
    generator = torch.Generator().manual_seed(0)
    memory = MappedUpTo(arguments["device"], kv_dtype)
    memory.fill(generator)
    for launch, (queries, options) in LAUNCHES.items():
        for length in LENGTHS if device != "cpu" else LENGTHS[::16]:
            print(f"{launch}, {length} tokens", flush=True)
            keys, values = memory.rows(2, ROW_TOKENS, KV_HEADS, dim, length + margin)
            batch = make_batch(length, queries, device)
            total = batch.spans[-1].query_end
            query = torch.randn(total, HEADS, dim, generator=generator).to(device, dtype)
            new = query[:, :KV_HEADS].contiguous()
            call = Call(query, keys, values, batch, scale=dim**-0.5, **options)
            append(call, (new, new))
            out = get(arguments["name"]).attend(call)
            assert torch.isfinite(out).all(), "not finite"
    if device != "cpu":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
