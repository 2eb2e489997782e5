"""What do hostile clients cost the honest ones?

Question. While twenty honest clients stream, others send what no client should: wrong bodies of up
to 16 MiB, random and grown values in every field of every route, grammars that compile for ever,
prompts of mebibytes with nobody left to read the answer, heads that never end, streams
that are never read. How much longer do the honest ones wait for a token at the longest, does
`/health` answer, does anything hang, and does the server's memory stay what it was?

Prediction. What is refused by its head or by a count costs a millisecond; so does the loop's
share of a connection. Receiving a mebibyte takes 2 ms of the interpreter's time in pieces of 0.1,
counting what is in it 2 more; the rest of a large body is never looked at. Streams share the
interpreter with that: steps of 4 ms take up to twice as long, and the longest gap, 30 ms by what
else the machine does, grows by the longest thing that is not cut into pieces, some 20 ms: to 2
times. `/health` takes four turns of the loop, 10 ms each at the 99th percentile: 40 ms. Memory:
the limit on bodies together, 128 MiB, is never reached; what is freed stays with the allocator:
tens of MiB, once.

Method. `vmkv serve` with its default limits as a process of its own, on loopback, with a tiny
model (two layers, 400 tokens in the vocabulary, a context of 4,096). Twenty clients stream, 1,000
tokens at a time, one stream after another. Windows with and without hostile clients take turns; one
without lasts as long as the one before it. Four of five hostile requests have random values in some
fields of a route that `/openapi.json` names; the others are of some thirty kinds
(`hostile_clients.py`), drawn with a fixed seed, 24 at a time, from a process of lower priority, as
they come from elsewhere. A gap is the time between two events of one stream, as its client sees it;
the longest of a window is compared with that of its neighbour, and the median over the pairs is the
figure. `/health` is asked every 50 ms, on a connection of its own each time; the figure is over all
windows. A thread of the server asks its event loop every 10 ms to run a callback, and measures how
long that waits (`watched_server.py`). A hang is a request that has not ended 90 s after it began,
or a stream that breaks or is silent for a minute. Memory is the server's resident set after a
window, with only honest clients connected. The machine has two cores, and others work on it: `load`
is its load average after a window.

Not measured. A GPU, whose steps leave the interpreter alone for longer; a network; more requests
than the server has places for (they get a 429); what a client may ask in earnest.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import ROOT, Bench, Figure, Row, print_rows
from hostile_clients import Target, request
from watched_server import WAITED

NUM_HONEST = 20
NEW_TOKENS = 1000
SMOKE_NEW_TOKENS = 100
SMOKE_HOLD_S = 0.5
NUM_PAIRS = 10
NUM_HOSTILE = 200  # In each window.
FUZZED = 0.8  # The share of them that are bodies with random values.
CONCURRENCY = 24
HEALTH_INTERVAL_S = 0.05
SETTLING_S = 3.0  # For requests that hostile clients have abandoned.
END_S = 60.0


class Server:
    """`vmkv serve`, watched from outside."""

    def __init__(self, model: Path, log: Path):
        script = Path(__file__).with_name("watched_server.py")
        command = [sys.executable, str(script), "serve", str(model), "--port", "0"]
        command += ["--served-model-name", "tiny", "--memory", "0.03", "--device", "cpu"]
        self.log = log
        with log.open("wb") as errors:
            self._child = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, env=environment()
            )
        assert self._child.stdout is not None
        line = self._child.stdout.readline().decode()
        found = re.search(r"http://([\d.]+):(\d+)", line)
        if found is None:
            raise RuntimeError(f"the server does not come up: {log.read_text()}")
        self.target = Target(found[1], int(found[2]))

    def resident_bytes(self) -> int:
        """Memory of the process."""
        text = Path(f"/proc/{self._child.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", text)
        assert found is not None
        return int(found[1]) * 1024

    def num_descriptors(self) -> int:
        """Files and sockets that the process has open."""
        return len(os.listdir(f"/proc/{self._child.pid}/fd"))

    def stop(self) -> int:
        """Drain; the status it ends with."""
        if self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)
        try:
            return self._child.wait(END_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            return self._child.wait()


def environment() -> dict[str, str]:
    """For the processes: this tree, one thread for what torch computes, and no network."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@dataclass
class Window:
    """Measurements of honest clients in one window."""

    gaps_s: list[float] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)
    num_bad_health: int = 0
    seconds: float = 0.0


class Honest:
    """Twenty clients that stream and one that asks for the server's health, in a loop."""

    def __init__(self, target: Target, new_tokens: int = NEW_TOKENS):
        self._target = target
        self._new_tokens = new_tokens
        self.window = Window()
        self.num_broken = 0
        self.num_streams = 0
        self._is_over = False
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        """Start the clients."""
        self._tasks = [asyncio.create_task(self._stream(at)) for at in range(NUM_HONEST)]
        self._tasks.append(asyncio.create_task(self._ask_health()))

    async def end(self) -> None:
        """Let the clients finish their streams, and stop."""
        self._is_over = True
        await asyncio.gather(*self._tasks)

    async def _stream(self, number: int) -> None:
        while not self._is_over:
            body = {"model": "tiny", "prompt": [5 + number, 6, 7]}
            body |= {"max_tokens": self._new_tokens}
            body |= {"stream": True, "ignore_eos": True, "seed": number}
            connection = await self._target.connect()
            try:
                await connection.send(request(body))
                whole = await self._read(connection)
            except (OSError, asyncio.TimeoutError):
                whole = False
            finally:
                connection.leave()
            self.num_streams += 1
            self.num_broken += not whole

    async def _read(self, connection: Any) -> bool:
        """Read a stream to its end; return whether it was complete."""
        last_s = 0.0
        ends = b'"finish_reason":"length"'
        has_ended = False
        while True:
            line = await asyncio.wait_for(connection.reader.readline(), END_S)
            if not line or line.startswith(b"data: [DONE]"):
                return has_ended and bool(line)
            if line.startswith(b'data: {"id"'):
                now_s = time.perf_counter()
                if last_s:
                    self.window.gaps_s.append(now_s - last_s)
                last_s = now_s
                has_ended |= ends in line

    async def _ask_health(self) -> None:
        while not self._is_over:
            start_s = time.perf_counter()
            window = self.window
            try:
                connection = await self._target.connect()
                await connection.send(
                    b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
                )
                status = await asyncio.wait_for(connection.status(), END_S)
                connection.leave()
            except (OSError, asyncio.TimeoutError):
                status = "none"
            window.health_s.append(time.perf_counter() - start_s)
            window.num_bad_health += status != "200"
            await asyncio.sleep(HEALTH_INTERVAL_S)


class Attackers:
    """A process of hostile clients, ready to begin."""

    def __init__(self, target: Target, seed: int, count: int):
        self._command = [sys.executable, str(Path(__file__).with_name("hostile_clients.py"))]
        numbers = (target.port, target.hold_s, seed, count, CONCURRENCY, FUZZED)
        self._command += [target.host, *map(str, numbers)]

    async def __aenter__(self) -> Attackers:
        pipe = asyncio.subprocess.PIPE
        self._child = await asyncio.create_subprocess_exec(
            *self._command, stdin=pipe, stdout=pipe, env=environment(), limit=1 << 20
        )
        assert self._child.stdout is not None
        assert await self._child.stdout.readline() == b"ready\n"
        return self

    async def run(self) -> dict[str, Any]:
        """Run the hostile clients; return their outcomes."""
        told, _ = await self._child.communicate(b"go\n")
        return json.loads(told)

    async def __aexit__(self, *exception: object) -> None:
        if self._child.returncode is None:
            self._child.kill()
            await self._child.wait()


async def measure(
    server: Server,
    num_pairs: int = NUM_PAIRS,
    num_hostile: int = NUM_HOSTILE,
    settling_s: float = SETTLING_S,
    new_tokens: int = NEW_TOKENS,
) -> tuple[list[Row], list[float], Row]:
    """Windows with and without hostile clients, times of `/health`, and leftovers."""
    honest = Honest(server.target, new_tokens)
    honest.begin()
    await asyncio.sleep(settling_s)
    rows: list[Row] = []
    ends: dict[str, Counter[str]] = {}
    health_s: list[float] = []
    first_descriptors = server.num_descriptors()
    for pair in range(num_pairs):
        async with Attackers(server.target, pair, num_hostile) as attackers:
            honest.window = Window()
            told = await attackers.run()
        health_s += honest.window.health_s
        row = row_of(pair, "hostile", honest.window, told["seconds"])
        for name, how in told["ends"].items():
            ends.setdefault(name, Counter()).update(how)
        await asyncio.sleep(settling_s)
        rows.append(row | {"resident_bytes": server.resident_bytes()})
        honest.window = Window()
        await asyncio.sleep(max(told["seconds"], 1.0))
        row = row_of(pair, "honest alone", honest.window, told["seconds"])
        rows.append(row | {"resident_bytes": server.resident_bytes()})
        print_rows(rows[-2:])
    last_descriptors = server.num_descriptors()
    await honest.end()
    for name, how in sorted(ends.items()):
        print(f"{name}: {dict(how)}")
    waits_ms = re.findall(f"{WAITED}(.+)", server.log.read_text(errors="replace"))
    left = {
        "num_hostile": sum(how.total() for how in ends.values()),
        "num_kinds": len(ends),
        "hangs": sum(how["hangs"] for how in ends.values()) + honest.num_broken,
        "internal_errors": sum(how["500"] for how in ends.values()),
        "honest_streams": honest.num_streams,
        "descriptors_first": first_descriptors,
        "descriptors_last": last_descriptors,
        "log_bytes": server.log.stat().st_size,
        "loop_longest_ms": float(waits_ms[-1]),
    }
    return rows, health_s, left


def row_of(pair: int, condition: str, window: Window, seconds: float) -> Row:
    """The row of a window."""
    health = sorted(window.health_s)
    return {
        "pair": pair,
        "condition": condition,
        "seconds": seconds,
        "tokens_per_s": len(window.gaps_s) / max(seconds, 1e-9),
        "gap_median_ms": 1e3 * statistics.median(window.gaps_s),
        "gap_p99_ms": 1e3 * quantile(sorted(window.gaps_s), 0.99),
        "gap_longest_ms": 1e3 * max(window.gaps_s),
        "health_median_ms": 1e3 * statistics.median(health),
        "health_p99_ms": 1e3 * quantile(health, 0.99),
        "health_longest_ms": 1e3 * health[-1],
        "unhealthy": window.num_bad_health,
        "load": os.getloadavg()[0],
    }


def quantile(ordered: list[float], share: float) -> float:
    """The value that `share` of the values do not exceed."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def figures_of(rows: list[Row], health_s: list[float], left: Row) -> list[Figure]:
    """The promised figures."""
    hostile, alone = rows[::2], rows[1::2]
    ratios = [
        with_["gap_longest_ms"] / without["gap_longest_ms"]
        for with_, without in zip(hostile, alone, strict=True)
    ]
    longest, worst = (max(row["gap_longest_ms"] for row in some) for some in (alone, hostile))
    middle, last = (hostile[at]["resident_bytes"] for at in (len(hostile) // 2, -1))
    what = f"longest gap of {NUM_HONEST} honest streams beside {left['num_hostile']} hostile "
    what += f"requests of {left['num_kinds']} kinds, of that without"
    rival = f"{worst:.0f} ms at the longest; without {longest:.0f} ms"
    ratio = statistics.median(ratios)
    figures = [Figure("hostile_gap_ratio", what, ratio, "×", 3, rival=rival)]
    what, got = "/health meanwhile, 99th percentile", 1e3 * quantile(sorted(health_s), 0.99)
    rival = f"without: {max(row['health_p99_ms'] for row in alone):.0f} ms at worst"
    figures.append(Figure("hostile_health_ms", what, got, "ms", 100, rival=rival))
    what = "the longest wait of a ready callback for the server's event loop"
    rival = f"/health, several turns of the loop: {1e3 * max(health_s):.0f} ms at the longest"
    figures.append(Figure("hostile_loop_ms", what, left["loop_longest_ms"], "ms", 200, rival=rival))
    what = "hostile requests that get a 500"
    figures.append(Figure("hostile_errors", what, left["internal_errors"], "", 0))
    what = "requests that hang, streams that break"
    figures.append(Figure("hostile_hangs", what, left["hangs"], "", 0))
    what = "growth of resident memory over the second half"
    return [*figures, Figure("hostile_memory_mib", what, (last - middle) / 2**20, "MiB", 32)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench."""
    bench = Bench("hostile", __doc__)
    text = "hostile requests in each of the ten windows"
    bench.option("--hostile", type=int, default=NUM_HOSTILE, metavar="N", help=text)
    options = bench.parse(argv)
    smoke = options.smoke
    sys.path.insert(0, str(ROOT / "tests"))
    from helpers.serving import save_tiny_model

    with tempfile.TemporaryDirectory() as folder:
        server = Server(save_tiny_model(Path(folder) / "model"), Path(folder) / "log")
        try:
            if smoke:
                server.target.hold_s = SMOKE_HOLD_S
            sizes = (1, 40, 0.3, SMOKE_NEW_TOKENS) if smoke else (NUM_PAIRS, options.hostile)
            rows, health_s, left = asyncio.run(measure(server, *sizes))
        finally:
            status = server.stop()
    left["exit_status"] = status
    print(left)
    return bench.finish(rows, figures_of(rows, health_s, left), left) or int(status != 0)


if __name__ == "__main__":
    sys.exit(main())
