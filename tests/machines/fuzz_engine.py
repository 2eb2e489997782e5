"""Plays the engine at random for as long as it is told, and says how to play a failure again.

    make fuzz FUZZ_SECONDS=600
    python tests/machines/fuzz_engine.py --seconds 600 --jobs 2
    python tests/machines/fuzz_engine.py --seed 4711 --episodes 1 --verbose      # one again

An episode is an engine of a random shape and some hundred operations on it, all drawn from its
seed (see `helpers.engine_play`). Each is played in a process of its own, so that one that ends by a
signal is a failure with a seed like any other. Runs until a failure, unless told to go on.
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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.engine_play import MISHAPS, EnginePlay, Shape, wait_for_host
from helpers.stamp_runner import VOCABULARY

from vmkv import SamplingParams

_TIMEOUT_S = 120


# ---- what an episode does ---------------------------------------------------------------------


def random_shape(draw: random.Random) -> Shape:
    """An engine; memory is short in most of them."""
    windows = draw.choice([(None,), (None,), (None, 8), (None, 3), (8,), (20, None), (None, 1)])
    max_num_seqs = draw.choice([1, 2, 2, 3, 5])
    return Shape(
        windows=windows,
        layers_per_group=draw.choice([1, 1, 2]),
        head_dim=draw.choice([32, 32, 24, 16]),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw.choice([0, 4, 16, 60]),
        max_tokens=draw.choice([48, 96, 96]),
        budget_pages=draw.choice([20, 30, 40, 60, 120]) * len(windows),
        host_pages=draw.choice([0, 8, 30, 200]),
        prefix_caching=draw.random() < 0.8,
        deterministic=draw.random() < 0.1,
        swaps=draw.random() < 0.7,
        alias_pages=draw.choice([0, 0, 2, 100]),
        overread_tokens=draw.choice([0, 0, 3, 9]),
        is_late=draw.random() < 0.5,
        protects_shared=draw.random() < 0.2,
        keep_free_pages=draw.choice([None, None, 0, 4]),
        watermark_pages=draw.choice([None, None, 0, 10]),
    )


def random_prompt(draw: random.Random, play: EnginePlay) -> list[int]:
    """A fresh one, or one that begins as something said before."""
    longest = play.shape.max_tokens - 2
    head: list[int] = []
    if play.said and draw.random() < 0.7:
        said = draw.choice(play.said)
        head = said[: draw.choice([len(said), draw.randint(0, len(said))])]
    most = max(0, longest - len(head))
    tail_tokens = min(most, draw.choice([0, 1, draw.randint(0, 8), draw.randint(0, longest)]))
    tail = [draw.randrange(1, VOCABULARY) for _ in range(tail_tokens)]
    return (head + tail)[:longest] or [1]


def random_params(draw: random.Random) -> SamplingParams:
    """Greedy ones mostly, so that answers are said again."""
    max_tokens = draw.choice([1, 2, draw.randint(1, 12), draw.randint(1, 60), None])
    waits = draw.random() < 0.1
    return SamplingParams(
        n=draw.choice([1, 1, 1, 2, 3]),
        temperature=draw.choice([0, 0, 1.0]),
        seed=draw.choice([None, 1, 2]),
        max_tokens=max_tokens,
        min_tokens=draw.choice([0, 0, 1 if max_tokens is None else max_tokens // 2]),
        ignore_eos=draw.random() < 0.6,
        logits_processors=[wait_for_host] if waits else [],
    )


Operation = Callable[[random.Random, EnginePlay], object]


def _add(draw: random.Random, play: EnginePlay) -> None:
    play.add(random_prompt(draw, play), random_params(draw), draw.choice([0, 0, 0, -1, 1]))


def _some_pages(draw: random.Random, play: EnginePlay) -> int:
    return draw.randint(4, play.shape.budget_pages * 3 // 2)


def _with_fault(draw: random.Random, play: EnginePlay) -> None:
    play.fault(draw.choice([1, 2, 3, 5, 8, 13]), is_out_of_memory=draw.random() < 0.3)
    random_operation(draw, {"step": 6, "add": 1, "set_budget": 1, "trim": 1, "guest": 2})(
        draw, play
    )


def _guest(draw: random.Random, play: EnginePlay) -> None:
    pick = draw.randrange(4)
    draw.choice(
        [
            lambda: play.guest_open(random_prompt(draw, play)),
            lambda: play.guest_append(pick, draw.randint(0, 20)),
            lambda: play.guest_fork(pick, draw.randint(0, 60)),
            lambda: play.guest_swap(pick, draw.random() < 0.5),
            lambda: play.guest_swap(pick, draw.random() < 0.5),
            lambda: play.guest_close(pick),
        ]
    )()


def _trim(draw: random.Random, play: EnginePlay) -> None:
    play.trim(draw.choice([None, draw.randint(0, 20)]))


OPERATIONS: dict[str, Operation] = {
    "step": lambda draw, play: play.step(draw.choice([1, 1, 2, 5, 20])),
    "add": _add,
    "cancel": lambda draw, play: play.cancel(draw.randrange(50)),
    "cancel_all": lambda draw, play: play.cancel_all(),
    "drain": lambda draw, play: play.drain(),
    "set_budget": lambda draw, play: play.set_budget(_some_pages(draw, play)),
    "restore_budget": lambda draw, play: play.set_budget(play.shape.budget_pages),
    "trim": _trim,
    "other_append": lambda draw, play: play.other_append(draw.randint(0, 40), draw.random() < 0.4),
    "other_close": lambda draw, play: play.other_close(draw.random() < 0.2),
    "catch_up": lambda draw, play: play.catch_up(draw.randint(1, 20)),
    "guest": _guest,
    "fault": _with_fault,
    "mishap": lambda draw, play: play.mishap(draw.choice(MISHAPS)),
}
#: What every episode does, and what only some do; how often.
_ALWAYS = {"step": 30, "add": 14, "drain": 0.5}
_SOMETIMES = {
    "cancel": 2,
    "cancel_all": 0.3,
    "set_budget": 1,
    "restore_budget": 1,
    "trim": 0.7,
    "other_append": 2,
    "other_close": 1.5,
    "catch_up": 2,
    "guest": 3,
    "fault": 1,
    "mishap": 0.4,
}


def random_operation(draw: random.Random, weights: dict[str, float]) -> Operation:
    """One of those named, as often as they say."""
    [name] = draw.choices(list(weights), list(weights.values()))
    return OPERATIONS[name]


def play_episode(
    seed: int, num_operations: int, without: list[str], trace: Callable[[list[str]], None]
) -> int:
    """Play an engine of the seed's shape; returns the steps that it submitted.

    Args:
        seed: Of everything.
        num_operations: How many.
        without: Operations to leave out.
        trace: Given what was done, also where it fails.
    """
    draw = random.Random(seed)
    shape = random_shape(draw)
    weights = _ALWAYS | {name: much for name, much in _SOMETIMES.items() if draw.random() < 0.35}
    for name in without:
        weights.pop(name, None)
    trace([f"{shape}", f"{sorted(weights)}"])
    try:
        play = EnginePlay(shape)
    except (MemoryError, ValueError):  # The budget does not hold one token of that shape.
        return 0
    try:
        for _ in range(num_operations):
            random_operation(draw, weights)(draw, play)
        play.close()
    finally:
        trace(play.trace)
    return play.runner.num_steps


# ---- episodes in processes of their own -------------------------------------------------------


@dataclass
class Episode:
    """One that runs.

    Attributes:
        seed: Of everything in it.
        pid: Its process.
        pipe: Where it says how many steps it made.
        start_s: When it began.
        log: What it printed.
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
    def trace(lines: list[str]) -> None:
        for line in lines if options.verbose else lines[-40:]:
            print(line)

    try:
        num_steps = play_episode(seed, options.operations, options.without, trace)
    except Exception:  # noqa: BLE001  # printed, and counted
        traceback.print_exc()
        return 1
    os.write(pipe, struct.pack("q", num_steps))
    return 0


def end(episode: Episode, status: int) -> tuple[int, str | None]:
    """The steps of an episode that has ended, and what went wrong."""
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
    """What failures of one kind have in common: their last line without its numbers."""
    last = failure.splitlines()[-1] if failure else "nothing was said"
    return re.sub(r"\[.*?\]|\d+", "#", last)[:150]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--steps", type=int, default=None, help="end after so many submitted ones")
    parser.add_argument("--episodes", type=int, default=None)
    parser.add_argument("--operations", type=int, default=300, help="of an episode")
    parser.add_argument(
        "--without", nargs="*", default=[], choices=sorted(_SOMETIMES), help="operations"
    )
    parser.add_argument("--seed", type=int, default=None, help="of the first episode")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--keep-going", action="store_true", help="count failures, by their cause")
    parser.add_argument("--verbose", action="store_true", help="say all that was done")
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
            print(f"again: python {sys.argv[0]} --seed {episode.seed} --episodes 1 --verbose")
    seconds = time.monotonic() - start_s
    print(
        f"{num_steps} steps in {seed - first} episodes and {seconds:.0f} s; {causes.total()} failed"
    )
    for cause, count in causes.most_common():
        print(f"{count:6} x {cause}   seeds {seeds[cause][:6]}")
    return 1 if causes else 0


if __name__ == "__main__":
    sys.exit(main())
