"""How fast does memory move between processes that share a GPU, and whom does a bad one hold up?

Question. Two processes share one memory through a broker. How long does a member wait that asks for
10 GiB, all of which another one holds in parked rows, until it has mapped them? And how long is the
longest gap between the steps of a member that others neighbour who are killed, are stopped, or want
more and more?

Prediction. 10 GiB are 160 extents of 64 MiB. To unmap and release one takes 20 us and some 150, to
create and map one 50: with slices of 1 GiB that the giver reports one by one, 160 * 0.22 = 35 ms,
and a message and a decision for each slice, 10 * 0.3 = 3 ms. Members that map within their budgets
talk to nobody, so a neighbour's end changes nothing for them: gaps of some milliseconds, which the
driver's lock may lengthen while it takes back a dead process's memory.

Method. The members are processes over a cache of Llama-3-8B's shape, the broker a thread of this
one. A move lasts from the message that asks until the taker's rows are mapped; the two take turns
in giving. Then a member of 1 GiB appends a token to 16 rows every millisecond, and truncates them
when they have grown by 256, while its neighbour holds the rest of the memory and is killed, is
stopped (for longer than the broker waits for an answer) or asks for all there is; the longest time
between two steps counts, without the millisecond.

Rivals. None: fixed shares move nothing. kvcached moves memory by the way of shared memory segments
that each engine polls; it is not installed here.

Not measured. Kernels beside it (bench_many); the end of a process by itself, which the system takes
some 100 ms for.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness import HAS_GPU, Bench, Figure, Row, on_gpu, quartiles

from vmkv import ExtentPool, HostBackend, KVCache, OutOfPagesError, open_backend
from vmkv.core.memory import Broker, PoolMember
from vmkv.core.memory.shares import HANG_S
from vmkv.units import GiB, KiB, MiB, format_bytes

EVENTS = ("nothing", "killed", "stopped", "growing without bound")
NUM_ROWS = 16


@dataclass(frozen=True)
class Case:
    """Sizes of a run; the shape is layers, heads of keys and values, and their size."""

    shape: tuple[int, int, int]
    moved_bytes: int
    spare_bytes: int
    page_bytes: int
    repeats: int
    seconds: float

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in bfloat16, in all layers."""
        layers, heads, size = self.shape
        return layers * 2 * heads * size * 2

    @property
    def num_new_tokens(self) -> int:
        """Tokens that a row grows by before it is truncated."""
        return self.spare_bytes // (4 * NUM_ROWS * self.token_bytes)


FULL = Case((32, 8, 128), 10 * GiB, 2 * GiB, 2 * MiB, 11, 10.0)
SMALL = Case((4, 2, 16), 4 * MiB, 2 * MiB, 4 * KiB, 2, 0.2)


# ---- a member, in a process of its own -----------------------------------------------------------


class Holder:
    """A cache that has joined the broker; carries out one line of its input after another."""

    def __init__(self, path: str, name: str, *, smoke: bool):
        self.case = SMALL if smoke else FULL
        use_gpu = HAS_GPU and not smoke
        backend = open_backend("cuda:0") if use_gpu else HostBackend(self.case.page_bytes)
        member = PoolMember.join(path, name=name, device=backend.name, free_bytes=0)
        self.member, self.pool = member, ExtentPool(backend, member.budget_bytes)
        member.bind(self.pool)
        self.token_bytes = self.case.token_bytes
        layers, heads, size = self.case.shape
        most_tokens = 2 * (self.case.moved_bytes + self.case.spare_bytes) // self.token_bytes
        self.cache = KVCache(
            self.pool,
            max_tokens=most_tokens,
            max_sequences=2 * NUM_ROWS,
            layers_per_group=layers,
        )
        its = {"num_kv_heads": heads, "head_dim": size, "dtype": torch.bfloat16}
        self.cache.add_layers(range(layers), **its)
        self.sequences: list[Any] = []
        self.idle()

    def idle(self) -> None:
        """Have no live rows, but work: what is parked stays."""
        for each in self.sequences:
            each.close()
        self.sequences.clear()
        self.member.ask(0, 0, is_busy=True)

    def take(self, num_bytes: int) -> float:
        """Grow a row to so much memory, asking as an engine does; returns the seconds."""
        start_s = time.perf_counter()
        self.sequences.append(self.cache.open())
        self._grow_first(num_bytes, num_bytes // self.token_bytes - 1)
        took_s = time.perf_counter() - start_s
        self.member.ask(0, 0, is_busy=True)
        return took_s

    def _grow_first(self, num_bytes: int, num_tokens: int) -> None:
        """Ask for a budget, wait for it, and grow all rows; an order on its way may lower it."""
        self.member.ask(num_bytes, num_bytes, is_busy=True)
        while True:
            budget_bytes = self.pool.budget_bytes
            if budget_bytes >= num_bytes:
                with suppress(OutOfPagesError):
                    self.cache.grow([(each, num_tokens) for each in self.sequences])
                    return
            self.member.wait(0.02, budget_bytes)

    def steps(self, seconds: float) -> list[float]:
        """Append to rows every millisecond for so long; returns each step's seconds."""
        room, num_new = self.case.spare_bytes // 4, self.case.num_new_tokens
        self.sequences = [self.cache.open() for _ in range(NUM_ROWS)]
        self._grow_first(2 * room, 1)
        taken: list[float] = []
        end_s = last_s = time.perf_counter()
        end_s += seconds
        never = threading.Event()
        while last_s < end_s:
            never.wait(0.001)
            num_tokens = 1 + self.sequences[0].num_tokens % num_new
            if num_tokens == 1:
                for each in self.sequences:
                    each.truncate(0)
            self.cache.grow([(each, num_tokens) for each in self.sequences])
            now_s = time.perf_counter()
            taken.append(now_s - last_s - 0.001)
            last_s = now_s
        self.idle()
        return taken

    def want_all(self) -> None:
        """Ask for more than there is, and fill what comes, for ever."""
        while True:
            self.member.ask(self.pool.most_bytes, 0, is_busy=True)
            room = self.pool.budget_bytes - self.pool.withheld_bytes
            room -= self.pool.stats().resident_bytes
            if room > 4 * self.token_bytes * NUM_ROWS and len(self.sequences) < NUM_ROWS:
                self.sequences.append(self.cache.open(room // self.token_bytes // 2))
                self.sequences[-1].append(room // self.token_bytes // 2)
            self.member.wait(0.005, self.pool.budget_bytes)


def obey(pipe: Any, path: str, name: str, *, smoke: bool) -> None:
    """Be a member, from the first command on."""
    holder = None
    while True:
        command, *values = pipe.recv()
        holder = holder or Holder(path, name, smoke=smoke)
        pipe.send(getattr(holder, command)(*values))


class Child:
    """A member's process; forked for a small run, since imports would take most of its time."""

    def __init__(self, path: str, name: str, *, smoke: bool):
        context = multiprocessing.get_context("fork" if smoke else "spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=obey, args=(theirs, path, name), kwargs={"smoke": smoke}, daemon=True
        )
        self.process.start()
        self.send = self.pipe.send
        self.answer = self.pipe.recv

    def call(self, *command: object) -> Any:
        """Carry a command out."""
        self.send(command)
        return self.answer()

    def end(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.join()


# ---- measuring -----------------------------------------------------------------------------------


def moves(children: Sequence[Child], case: Case) -> Row:
    """Move memory to and fro between two members."""
    taken = []
    for at in range(-1, case.repeats):
        taker = children[at % 2]
        seconds = taker.call("take", case.moved_bytes)
        taken += [1e3 * seconds] if at >= 0 else []
        taker.call("idle")
    row = {"what": "a move", "moved_bytes": case.moved_bytes, "repeats": case.repeats}
    return {**row, **quartiles("move_ms", taken), "longest_ms": max(taken)}


def gaps(stepper: Child, neighbour: Child, case: Case, event: str) -> Row:
    """Step beside a neighbour to which something happens."""
    neighbour.call("take", case.moved_bytes)
    stepper.send(("steps", case.seconds))
    threading.Event().wait(0.2 * case.seconds)
    if event == "killed":
        neighbour.process.kill()
    elif event == "stopped":
        os.kill(neighbour.process.pid, signal.SIGSTOP)
    elif event == "growing without bound":
        neighbour.send(("want_all",))
    steps = stepper.answer()
    if event == "nothing":
        neighbour.call("idle")
    else:
        neighbour.end()
    ordered = sorted(1e3 * each for each in steps)
    figures = {"steps": len(steps), "p99_ms": ordered[int(0.99 * len(ordered))]}
    return {"what": f"steps beside a neighbour: {event}", **figures, "longest_ms": ordered[-1]}


def promised(rows: Sequence[Row], case: Case) -> list[Figure]:
    """The time of a move, and the longest gap beside each neighbour."""
    move, *others = rows
    what = f"moving {format_bytes(case.moved_bytes)} from one member to another"
    figures = [Figure("pool_move_ms", what, move["move_ms"], "ms", at_most=on_gpu(150))]
    undisturbed = f"{others[0]['longest_ms']:.3g} ms (nothing happens)"
    for row in others[1:]:
        event = row["what"].rpartition(": ")[2]
        name = f"pool_gap_{event.split()[0]}_ms"
        what = f"longest gap of others, a member {event}"
        bound = on_gpu(200)
        figures.append(
            Figure(name, what, row["longest_ms"], "ms", at_most=bound, rival=undisturbed)
        )
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write."""
    bench = Bench("pool", __doc__, needs_gpu=True)
    smoke = bench.parse(argv).smoke
    case = SMALL if smoke else FULL
    budget_bytes = case.moved_bytes + case.spare_bytes
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pool.sock"
        names = ("stepper", "first", "second", "third")
        children = [Child(str(path), name, smoke=smoke) for name in names]
        with Broker(path, budget_bytes, page_bytes=case.page_bytes):
            try:
                rows = [moves(children[:2], case)]
                stepper, *neighbours = children
                for event, neighbour in zip(EVENTS, (children[1], *neighbours), strict=True):
                    rows.append(gaps(stepper, neighbour, case, event))
            finally:
                for each in children:
                    each.end()
    constants = {"budget_bytes": budget_bytes, "seconds": case.seconds, "hang_s": HANG_S}
    return bench.finish(rows, promised(rows, case), constants)


if __name__ == "__main__":
    sys.exit(main())
