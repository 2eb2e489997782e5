"""What of eight bits only a GPU can show, in one run: tests, tiles, sums, accuracy and times.

    python bench/check_fp8.py                  everything, some 15 minutes on an H200
    python bench/check_fp8.py tests sums       parts of it, in this order: kernels tests sums
                                               tiles memory serve accuracy

Each part ends with a line `PART ... ok` or `PART ... FAILED`; the last lines repeat them. Results
of benches are written to bench/results, as ever.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
DIMS = (64, 96, 128, 192, 256)
MEASURED_DIMS = (64, 128)  # The tests look at all.
TILE_STEP = 16


def run(*command: object, timeout_s: float = 900) -> bool:
    """Run a command in the project's root, with its output here."""
    print("$", *command, flush=True)
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    done = subprocess.run(
        list(map(str, command)),
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        timeout=timeout_s,
        check=False,
    )
    return done.returncode == 0


def kernels() -> bool:
    """Which kernels there are, and why not."""
    from vmkv.attention import AttentionSpec, backend_names, select, why_not
    from vmkv.cache.fp8 import FP8

    print("device", torch.cuda.get_device_name(0), "torch", torch.__version__)
    is_there = False
    for dim in DIMS:
        spec = AttentionSpec("cuda", torch.bfloat16, 32, 8, dim, dim, kv_dtype=FP8)
        for name in backend_names():
            print(f"head size {dim}, {name}: {why_not(name, spec) or 'serves it'}")
        is_there |= select(spec).name == "flash3"
    return is_there


def tests() -> bool:
    """Those that are marked for a GPU and concern eight bits, and their neighbours."""
    chosen = "fp8 or eight_bits or encoded or tiles or append or rows_in"
    options = ("-q", "-m", "gpu", "-k", chosen, "-p", "no:cacheprovider")
    places = ("tests/attention", "tests/serve/test_runner_gpu.py")
    return run(sys.executable, "-m", "pytest", *options, *places)


def sums() -> bool:
    """How exactly a kernel adds up: means of many positive numbers, of which narrow sums lose."""
    from vmkv.attention import AttentionBatch, get
    from vmkv.attention.flash3 import _fp8_library_kernel, _fp8_package_kernel
    from vmkv.cache.fp8 import FP8

    for name, kernel in (("library", _fp8_library_kernel()), ("package", _fp8_package_kernel())):
        print(f"{name}: {kernel if isinstance(kernel, str) else 'there'}")
    is_exact = True
    for num_tokens in (1024, 8192, 32_768, 131_072):
        row_tokens = num_tokens + 256
        keys = torch.zeros(1, row_tokens, 8, 128, device="cuda").to(FP8)
        values = torch.rand(keys.shape, device="cuda").to(FP8)
        # So many queries that the keys are not split.
        batch = AttentionBatch.build([0], [num_tokens], [640], row_tokens=row_tokens, device="cuda")
        query = torch.zeros(640, 32, 128, dtype=torch.bfloat16, device="cuda")
        out = get("flash3").forward(query, keys, values, batch, scale=1.0)[-1].float()
        mean = values[0, :num_tokens].float().mean(0).repeat_interleave(4, 0)
        error = ((out - mean).abs() / mean).max().item()
        print(f"{num_tokens} tokens: off by {error:.2e} at most")
        is_exact &= error < 2.0**-7
        del keys, values
    return is_exact


def tiles() -> bool:
    """The least margin past a length with which nothing faults, by head size."""
    from vmkv.attention import get
    from vmkv.cache.fp8 import FP8

    is_enough = True
    for dim in MEASURED_DIMS:
        declared = get("flash3").overread_tokens(dim, dim, FP8)
        low, high = 0, 320  # Faults below; whether 320 does is seen first.
        if not _survives(dim, high):
            print(f"head size {dim}: even {high} tokens are too few")
            is_enough = False
            continue
        while high - low > TILE_STEP:
            middle = (low + high) // (2 * TILE_STEP) * TILE_STEP
            if middle in (low, high):
                break
            low, high = (low, middle) if _survives(dim, middle) else (middle, high)
        print(f"head size {dim}: {high} tokens are enough, {low} are not; declared {declared}")
        is_enough &= declared >= high
    return is_enough


def _survives(dim: int, margin: int) -> bool:
    arguments = {"device": "cuda:0", "name": "flash3", "dtype": "bfloat16", "dim": dim}
    arguments |= {"margin": margin, "kv_dtype": "float8_e4m3fn"}
    done = subprocess.run(
        [sys.executable, "-m", "helpers.overread_probe", json.dumps(arguments)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))},
        capture_output=True,
        text=True,
        check=False,
    )
    last = (done.stdout.splitlines() or ["(nothing ran)"])[-1]
    print(f"  margin {margin}: {last if done.returncode else 'ok'}", flush=True)
    return done.returncode == 0


def memory() -> bool:
    """Forks, prefixes, swaps, and how many sequences fit."""
    return run(sys.executable, "bench/bench_fp8.py", "--only", "memory")


def serve() -> bool:
    """Decode steps and prefill of an 8B model's shape."""
    return run(sys.executable, "bench/bench_fp8.py", "--only", "serve")


def accuracy() -> bool:
    """A real model, through the kernel."""
    return run(sys.executable, "bench/bench_fp8_accuracy.py")


PARTS: dict[str, Callable[[], bool]] = {
    each.__name__: each for each in (kernels, tests, sums, tiles, memory, serve, accuracy)
}


def main() -> int:
    """Run the parts; 1 where one has failed."""
    wanted = sys.argv[1:] or list(PARTS)
    if unknown := [name for name in wanted if name not in PARTS]:
        sys.exit(f"no part is called {unknown}; there are {', '.join(PARTS)}")
    lines = []
    for name in wanted:
        start = time.perf_counter()
        try:
            is_right = PARTS[name]()
        except Exception as error:  # noqa: BLE001  # the other parts are to run
            print(f"{type(error).__name__}: {error}")
            is_right = False
        taken = time.perf_counter() - start
        lines.append(f"PART {name}: {'ok' if is_right else 'FAILED'} ({taken:.0f} s)")
        print(lines[-1], flush=True)
    print("\n" + "\n".join(lines))
    return int(any("FAILED" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
