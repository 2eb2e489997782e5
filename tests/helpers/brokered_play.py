"""Hybrid engines over one pool that has joined a broker, while other threads evict and want memory.

Each engine has a thread of its own; so have the broker, the pool's membership, another member that
takes memory and gives it back, and a thread that gives idle memory back. Threads interleave as they
like: a seed repeats the requests, not the moments. Every request fits, so every one that is not
cancelled must finish, with the tokens that it gets alone.
"""

from __future__ import annotations

import copy
import random
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from helpers.generate_play import alone
from helpers.members import pool_of
from helpers.random_engine import HYBRIDS, RandomPlay
from helpers.tiny_models import tiny_model
from vmkv import BackendUsage, Engine, ExtentPool, HostBackend, OutOfPagesError, SamplingParams
from vmkv.core.memory import Broker, Extent
from vmkv.serve.request import FinishReason, RequestHandle
from vmkv.serve.scheduler import PreemptionCosts
from vmkv.units import KiB

_PAGE = 4 * KiB
_LONGEST_ANSWER = 12
#: Lengths of the prompts; some share whole blocks of tokens, and end in other tokens.
_LENGTHS = (1, 17, 33, 40, 70)
_STEPS_MAX = 50_000


def _prompt(draw: random.Random) -> tuple[int, ...]:
    """One of few prompts, so that they share prefixes and their outputs are computed once."""
    tokens = random.Random(draw.randrange(3)).choices(range(3, 90), k=70)
    return tuple(tokens[: draw.choice(_LENGTHS)])


class BrokeredPlay:
    """Engines over one pool, a broker, and threads that evict.

    Args:
        draw: Source of the requests and the options.
        num_engines: Number of engines.

    Attributes:
        trace: Log of the operations.
        num_steps: Steps of all engines.
        num_finished: Requests that finished with the right tokens.
    """

    def __init__(self, draw: random.Random, num_engines: int):
        self._draw, self.shape = draw, f"{num_engines} hybrid engines over one pool with a broker"
        self.trace: list[str] = []
        self.num_steps = self.num_finished = 0
        self._folder = tempfile.TemporaryDirectory()
        self._interval_s = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        self._broker = Broker(Path(self._folder.name) / "socket", 600 * _PAGE, page_bytes=_PAGE)
        self._backends: list[HostBackend] = []
        self.pool, self._other = self._join(draw.choice([0, 200])), self._join(0)
        self.engines = [self._make_engine() for _ in range(num_engines)]
        self._asked: list[tuple[Engine, RequestHandle]] = []
        self._workers = ThreadPoolExecutor(num_engines)
        self._is_ended = threading.Event()
        self._errors: list[BaseException] = []
        works = (self._evict, self._want)
        self._threads = [threading.Thread(target=self._repeat, args=(each,)) for each in works]
        for thread in self._threads:
            thread.start()

    def _join(self, host_pages: int) -> ExtentPool:
        memory = {"host_budget_bytes": host_pages * _PAGE}
        pool = pool_of(self._broker.socket_path, timeout_s=0.05, memory=memory)
        pool.attach()
        self._backends.append(pool.backend)
        return pool

    def _make_engine(self) -> Engine:
        draw = self._draw
        return Engine(
            copy.deepcopy(tiny_model(HYBRIDS[0])),
            pool=self.pool,
            runner="eager",
            seed=0,
            max_num_seqs=draw.choice([1, 2, 4]),
            max_num_batched_tokens=draw.choice([8, 32, 128]),
            max_tokens=96,
            prefix_caching=draw.random() < 0.8,
            preemption_costs=PreemptionCosts(flops_per_s=draw.choice([1.0, 1e30])),
        )

    # ---- threads --------------------------------------------------------------------------

    def _repeat(self, work: Callable[[random.Random], None]) -> None:
        draw = random.Random(self._draw.random())
        try:
            while not self._is_ended.wait(0.001):
                work(draw)
        except BaseException as error:  # noqa: BLE001  # raised by `check`
            self._errors.append(error)

    def _evict(self, draw: random.Random) -> None:
        self.pool.give_back(draw.choice([_PAGE, 20 * _PAGE, None]))

    def _want(self, draw: random.Random) -> None:
        """Take memory that the broker gives, as much as there is, and give it back."""
        extents: list[Extent] = []
        with suppress(OutOfPagesError):
            for _ in range(draw.choice([1, 100, 300])):
                extents += self._other.asking_broker(lambda: self._other.acquire([0]))
        self._other.disown(extents)

    # ---- operations -----------------------------------------------------------------------

    def operate(self) -> None:
        """Add and cancel requests, then step all engines at once, each in its thread."""
        draw = self._draw
        for engine in self.engines:
            while draw.random() < 0.5 and len(self._asked) < 12:
                self._add(engine)
        if self._asked and draw.random() < 0.1:
            _, handle = draw.choice(self._asked)
            self.trace.append(f"cancel {handle}")
            handle.cancel()
        self._run([draw.choice([1, 3, 10, 40]) for _ in self.engines])
        self.check()

    def _add(self, engine: Engine) -> None:
        draw, prompt = self._draw, _prompt(self._draw)
        params = SamplingParams(
            n=draw.choice([1, 1, 2, 3]), temperature=0, max_tokens=draw.randint(1, _LONGEST_ANSWER)
        )
        self.trace.append(f"add {len(prompt)} tokens, {params.n} x {params.max_tokens}")
        handle = engine.add(list(prompt), params, draw.choice([0, 0, -1, 1]))
        self._asked.append((engine, handle))

    def _run(self, num_steps: list[int]) -> None:
        self.trace.append(f"step {num_steps}")
        for each in list(self._workers.map(self._step, self.engines, num_steps)):
            self.num_steps += each

    def _step(self, engine: Engine, num_steps: int) -> int:
        for at in range(num_steps):
            if not engine.has_unfinished:
                return at
            engine.step()
        return num_steps

    def check(self) -> None:
        """Check the threads, the books, and the requests that have finished."""
        if self._errors:
            raise AssertionError("a thread failed") from self._errors[0]
        for engine in self.engines:
            engine.cache.check()
        for each in [each for each in self._asked if each[1].is_finished]:
            self._asked.remove(each)
            for request in each[1].requests:
                said, prompt = request.output_token_ids, tuple(request.prompt_token_ids)
                reason, most = request.finish_reason, request.params.max_tokens
                wanted = alone(HYBRIDS[0], prompt, _LONGEST_ANSWER)[len(prompt) :][:most]
                if reason is FinishReason.CANCELLED:
                    wanted = wanted[: len(said)]
                assert reason is not FinishReason.ERROR, f"failed: {request.error!r}"
                assert wanted == said
                self.num_finished += 1

    # ---- close ----------------------------------------------------------------------------

    def close(self) -> None:
        """Run all engines to their ends, close everything, and check that no memory is left."""
        num_steps = self.num_steps
        while self._asked:
            self._run([50] * len(self.engines))
            self.check()
            assert self.num_steps < num_steps + _STEPS_MAX, "the engines do not come to an end"
        self._end_threads()
        self.check()
        for engine in self.engines:
            engine.close()
        for pool in (self.pool, self._other):
            pool.detach()
            pool.close()
        self._broker.close()
        self._folder.cleanup()
        for backend in self._backends:
            assert BackendUsage() == backend.usage()

    def abandon(self) -> None:
        """End the threads after a failure."""
        self._end_threads()
        self._broker.close()

    def _end_threads(self) -> None:
        self._is_ended.set()
        for thread in self._threads:
            thread.join()
        self._workers.shutdown()
        sys.setswitchinterval(self._interval_s)


class RandomBrokered(RandomPlay):
    """An episode with one to three engines."""

    operations: ClassVar = {"operate": lambda draw, play: play.operate()}
    always: ClassVar = {"operate": 1.0}

    def _make(self, draw: random.Random) -> BrokeredPlay:
        return BrokeredPlay(draw, draw.choice([1, 2, 2, 3]))
