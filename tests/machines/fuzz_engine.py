"""Plays the engine at random for a given time, and prints how to repeat a failure.

    make fuzz FUZZ_SECONDS=600
    python tests/machines/fuzz_engine.py --seconds 600 --jobs 2
    python tests/machines/fuzz_engine.py --play brokered --steps 100000 --seconds 100000
    python tests/machines/fuzz_engine.py --seed 4711 --episodes 1 --verbose      # repeats one

An episode is an engine, a `RaggedCache`, or several engines over one model or one pool, and some
hundred operations on it, all drawn from its seed (see `helpers.random_plays`). Each runs in a
process of its own, so that an episode that ends by a signal is a failure with a seed too. Runs
until a failure, unless `--keep-going` is given.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import re
import signal
import struct
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
# Episodes are forks of this process, and a fork does not have torch's other threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from helpers.random_plays import PLAYS, play_episode

_TIMEOUT_S = 120


# ---- episodes in processes of their own -------------------------------------------------------


@dataclass
class Episode:
    """An episode that is running.

    Attributes:
        seed: Seed of all its draws.
        pid: Its process.
        pipe: Read end of the pipe for its number of steps.
        start_s: When it began.
        log: File with its output.
    """

    seed: int
    pid: int
    pipe: int
    start_s: float
    log: Path


def begin(seed: int, options: argparse.Namespace, log: Path) -> Episode:
    """Fork a process for an episode."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write_end)
        return Episode(seed, pid, read_end, time.monotonic(), log)
    status = 1
    try:
        signal.alarm(_TIMEOUT_S)
        with log.open("w", buffering=1) as lines:
            os.dup2(lines.fileno(), 1)
            os.dup2(lines.fileno(), 2)
            faulthandler.enable(lines)
            faulthandler.register(signal.SIGALRM, lines, chain=True)
            status = _run(seed, options, write_end)
    finally:
        os._exit(status)


def _run(seed: int, options: argparse.Namespace, pipe: int) -> int:
    try:
        num_steps = play_episode(
            options.play, seed, options.operations, options.without, is_verbose=options.verbose
        )
    except Exception:  # noqa: BLE001  # printed, and counted
        traceback.print_exc()
        return 1
    os.write(pipe, struct.pack("q", num_steps))
    return 0


def end(episode: Episode, status: int) -> tuple[int, str | None]:
    """The number of steps of an episode that has ended, and its failure if there is one."""
    with os.fdopen(episode.pipe, "rb") as pipe:
        said = pipe.read()
    if status == 0:
        return struct.unpack("q", said)[0], None
    text = episode.log.read_text(errors="replace").strip()
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGALRM:
        return 0, f"{text}\nit did not end within {_TIMEOUT_S} s"
    return 0, text if code > 0 else f"{text}\nended by signal {signal.Signals(-code).name}"


def _cause(failure: str) -> str:
    """The last line of a failure without its numbers, which failures of one kind have in common."""
    last = failure.splitlines()[-1] if failure else "nothing was said"
    return re.sub(r"\[.*?\]|\d+", "#", last)[:150]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--play", choices=sorted(PLAYS), default="engine")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--steps", type=int, default=None, help="end after this many")
    parser.add_argument("--episodes", type=int, default=None)
    parser.add_argument("--operations", type=int, default=300, help="number per episode")
    parser.add_argument(
        "--without", nargs="*", default=[], metavar="OPERATION", help="leave operations out"
    )
    parser.add_argument("--seed", type=int, default=None, help="of the first episode")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--keep-going", action="store_true", help="count failures, by their cause")
    parser.add_argument("--verbose", action="store_true", help="print all operations")
    parser.add_argument("--out", type=Path, default=Path("out/fuzz"), help="for logs")
    options = parser.parse_args()
    first = random.SystemRandom().getrandbits(31) if options.seed is None else options.seed
    print(f"seed {first}", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)

    start_s, seed, num_steps = time.monotonic(), first, 0
    running: dict[int, Episode] = {}
    causes: Counter[str] = Counter()
    seeds: dict[str, list[int]] = {}

    def goes_on() -> bool:
        is_over = bool(causes) and not options.keep_going
        is_over |= options.steps is not None and num_steps >= options.steps
        is_over |= options.episodes is not None and seed - first >= options.episodes
        return not is_over and time.monotonic() - start_s < options.seconds

    while running or goes_on():
        while len(running) < options.jobs and goes_on():
            log = options.out / f"episode-{len(running)}-{os.getpid()}-{seed}.log"
            episode = begin(seed, options, log)
            running[episode.pid] = episode
            seed += 1
        pid, status = os.wait()
        episode = running.pop(pid)
        its_steps, failure = end(episode, status)
        num_steps += its_steps
        if failure is None and not options.verbose:
            episode.log.unlink()
            continue
        if options.verbose:
            print(episode.log.read_text(errors="replace"))
        if failure is None:
            continue
        cause = _cause(failure)
        causes[cause] += 1
        if cause not in seeds:
            print(f"after {num_steps} steps, seed {episode.seed}: {cause}", flush=True)
        seeds.setdefault(cause, []).append(episode.seed)
        if not options.keep_going:
            print(failure)
            print(
                f"again: python {sys.argv[0]} --play {options.play} --seed {episode.seed} "
                f"--operations {options.operations} --episodes 1 --verbose"
            )
    seconds = time.monotonic() - start_s
    print(
        f"{num_steps} steps in {seed - first} episodes and {seconds:.0f} s; {causes.total()} failed"
    )
    for cause, count in causes.most_common():
        print(f"{count:6} x {cause}   seeds {seeds[cause][:6]}")
    return 1 if causes else 0


if __name__ == "__main__":
    sys.exit(main())
