"""An engine in another process: what it has beyond `AsyncEngine`, whose tests run on it, too.

Most tests replace the process by a thread, which takes a thousandth of the time;
`tests/cli/test_serve.py` has the tests of `vmkv serve` as a process.
"""

from __future__ import annotations

import asyncio
import functools
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from helpers.hosted import hosted
from helpers.requests import PATIENCE_S
from helpers.serving import tiny_llama, tiny_tokenizer

from vmkv import ClosedError, ConfigError, OutOfPagesError
from vmkv.serve.async_engine import AsyncEngine
from vmkv.serve.engine import Engine
from vmkv.serve.engine_loop import Add, Look, News, Stop, Update
from vmkv.serve.observer import (
    EngineObserver,
    Event,
    Idle,
    Observers,
    RequestAdded,
    RequestRecord,
)
from vmkv.serve.params import SamplingParams
from vmkv.serve.process import EngineProcess, remote
from vmkv.serve.process.host import Failed, Relay, SocketLink, Unpacker, packed
from vmkv.serve.request import RequestOutput, joined

pytestmark = pytest.mark.usefixtures("warm_children")

MakeEngine = Callable[..., Engine]


async def outputs(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


class Heard:
    """An observer that keeps its events."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.finished = threading.Semaphore(0)
        self.is_idle = threading.Event()
        self.idle_stats: Any = None

    def on(self, event: Event, cache: Any) -> None:
        if isinstance(event, Idle):
            self.idle_stats = cache.stats()
            self.is_idle.set()
            return
        self.events.append(event)
        if isinstance(event, RequestRecord):
            self.finished.release()


async def test_outputs_equal_those_of_an_engine_in_a_thread(make_engine: MakeEngine) -> None:
    """Text, samples, log-probabilities, stop texts, cached tokens: all fields of an output."""
    asked = [
        ("naïve 猫 cat", SamplingParams(temperature=0, max_tokens=20, logprobs=2)),
        ([5, 6, 7, 8] * 8, SamplingParams(temperature=0.8, seed=3, n=3, max_tokens=12)),
        ([5, 6, 7, 8] * 8, SamplingParams(temperature=0, max_tokens=30, stop=["a", "e"])),
        ([5, 6, 7, 8] * 20, SamplingParams(seed=1, n=2, max_tokens=9, prompt_logprobs=2)),
    ]

    async def answers(host: Callable[[Engine], Any]) -> list[RequestOutput]:
        tokenizer = tiny_tokenizer()
        it = host(make_engine(tiny_llama(), tokenizer=tokenizer))
        found = [joined(await outputs(it.stream(*each))) for each in asked]
        await it.shutdown()
        return found

    in_thread, elsewhere = await answers(AsyncEngine), await answers(hosted)
    for here, there in zip(in_thread, elsewhere, strict=True):
        assert here.outputs == there.outputs
        assert list(here.prompt_token_ids) == list(there.prompt_token_ids)
        assert here.prompt_logprobs == there.prompt_logprobs
        assert (here.prompt, here.num_cached_tokens) == (there.prompt, there.num_cached_tokens)
    assert elsewhere[2].num_cached_tokens > 0
    assert any(each.stop_reason for each in elsewhere[2].outputs)
    assert elsewhere[2].prompt_logprobs is None
    told = elsewhere[3].prompt_logprobs
    assert told is not None
    assert [None, 6, 7, 8, *[5, 6, 7, 8] * 19] == [each and each.token_id for each in told]


async def test_a_client_that_does_not_read_does_not_delay_the_engine(
    make_engine: MakeEngine,
) -> None:
    """While its event loop is blocked, the engine finishes all requests; outputs arrive later."""
    heard, relay = Heard(), Relay()
    engine = make_engine(observer=Observers([heard, relay]), max_num_seqs=16)
    draw = random.Random(0)
    prompts = [[draw.randrange(3, 90) for _ in range(8)] for _ in range(24)]
    # The outputs far exceed the sockets' buffers.
    params = SamplingParams(temperature=0, max_tokens=60, logprobs=8)
    it = hosted(engine, relay, Heard())
    tasks = [asyncio.create_task(outputs(it.stream(prompt, params))) for prompt in prompts]
    while sum(isinstance(each, RequestAdded) for each in heard.events) < len(prompts):
        await asyncio.sleep(0)
    for _ in prompts:  # This blocks the event loop, so that nothing is read.
        assert heard.finished.acquire(timeout=PATIENCE_S)
    found = await asyncio.gather(*tasks)
    await it.shutdown()
    for each in found:
        assert len(joined(each).outputs[0].token_ids) == 60
        assert len(joined(each).outputs[0].logprobs) == 60
    assert sum(map(len, found)) < 60 * len(found)  # Accumulated tokens came in one output.


async def test_observers_get_the_events_of_the_process(make_engine: MakeEngine) -> None:
    """All events, in order, and the statistics of the cache when idle."""
    there, here, relay = Heard(), Heard(), Relay()
    it = hosted(make_engine(observer=Observers([there, relay])), relay, here)
    await outputs(it.stream([1, 2, 3], SamplingParams(max_tokens=5)))
    while not here.is_idle.is_set():
        await asyncio.sleep(0)
    assert it.stats == here.idle_stats
    assert here.idle_stats.num_prefix_misses == 1
    await it.shutdown()
    assert {type(each) for each in here.events} == set(get_args(Event)) - {Idle}
    assert here.events == there.events


async def test_an_engine_ends_when_its_connection_breaks(make_engine: MakeEngine) -> None:
    """Its requests are cancelled, and it is closed."""
    heard, engine = Heard(), make_engine(observer=(watch := Heard()), max_tokens=4096)
    it = hosted(engine)
    stream = it.stream([1, 2, 3], SamplingParams(max_tokens=4000, ignore_eos=True))
    await anext(stream)
    it._transport.abort()
    await asyncio.to_thread(it._worker.join)
    assert "ended" in str(it.failure)
    with pytest.raises(ClosedError):
        await outputs(stream)
    with pytest.raises(ClosedError):
        await outputs(it.stream([1, 2], None))
    assert not heard.events
    [record] = [each for each in watch.events if isinstance(each, RequestRecord)]
    assert record.finish_reason == "cancelled"
    with pytest.raises(ClosedError):
        engine.add([1, 2])


async def test_an_engine_whose_steps_all_fail_ends(engine: Engine) -> None:
    """The process can then be restarted with a new context of the device."""

    def submit(chunks: Any) -> Any:
        raise RuntimeError("the device is gone")

    it = hosted(engine, ends_with_device=True)
    engine._runner.submit = submit  # type: ignore[method-assign]
    for _ in range(5):
        failed = joined(await outputs(it.stream([1, 2, 3])))
        assert "gone" in str(failed.error)
    await asyncio.to_thread(it._worker.join)
    await it._gone.wait()
    with pytest.raises(ClosedError, match="the last 5 steps have failed"):
        await outputs(it.stream([1, 2, 3]))


async def test_parameters_that_cannot_be_sent_are_refused(make_engine: MakeEngine) -> None:
    """A function, a number of more than 64 bits, half a character; other requests are served."""
    it = hosted(make_engine())
    params = SamplingParams(logits_processors=[lambda ids, scores: scores])
    for options in ({"params": params}, {"priority": 1 << 70}, {"tenant": "\ud800"}):
        with pytest.raises(ConfigError, match=r"cannot be sent|64 bits"):
            async for _ in it.stream([1, 2], **options):
                pass
    assert (await outputs(it.stream([1, 2], None)))[-1].is_finished
    await it.shutdown()


def test_messages_are_decoded_from_pieces_of_any_size() -> None:
    texts = ["", "x" * 70_000, "y"]
    messages = [Add(1, tuple(range(50_000)), SamplingParams(stop=texts[1:]), 0), Stop(drain=True)]
    messages += [News([], [Update(1, 0, [3], [], 0, None, text, None, [])], 0) for text in texts]
    data = b"".join(map(packed, messages))
    draw = random.Random(1)
    for most in (1000, 40_000, len(data)):
        unpacker, found, at = Unpacker(), [], 0
        while at < len(data):
            size = draw.randint(1, most)
            found += unpacker.feed(data[at : at + size])
            at += size
        assert found == messages


class UnportableError(Exception):
    """An error that can be pickled, but not unpickled."""

    def __init__(self, first: str, second: str):
        super().__init__(first + second)


def test_the_engine_may_look_while_another_thread_wakes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two orders of a broker wake it, and it looks for both before the second call has returned."""
    ours, theirs = socket.socketpair()
    link, write = SocketLink(theirs, Relay()), os.eventfd_write
    looks: list[object] = []

    def written(descriptor: int, value: int) -> None:
        write(descriptor, value)
        looks.append(link.receive())

    with ours, theirs:
        link.wake()
        with monkeypatch.context() as patch:
            patch.setattr(os, "eventfd_write", written)
            link.wake()
        assert looks == [[Look()]]
        assert link.receive() == []
        link.wake()
        assert link.receive() == [Look()]


def test_errors_are_decoded_with_their_attributes() -> None:
    """An error that cannot be unpickled becomes one with its type and message as text."""
    short = OutOfPagesError("too little", needed_bytes=3, free_bytes=2, retired_bytes=1)
    [(again,)] = Unpacker().feed(packed(Failed(short)))
    assert isinstance(again, OutOfPagesError)
    assert (str(again), again.needed_bytes) == ("too little; the pool is out of memory.", 3)
    [(again,)] = Unpacker().feed(packed(Failed(UnportableError("of ", "two"))))
    assert str(again) == "UnportableError: of two"


@contextmanager
def _tiny_engine(tokens: int, observer: EngineObserver) -> Iterator[Engine]:
    with Engine(
        tiny_llama(), max_num_seqs=4, max_tokens=tokens, budget_bytes=1 << 24, observer=observer
    ) as engine:
        yield engine


@pytest.mark.slow
async def test_a_killed_process_is_restarted() -> None:
    """Requests fail, observers see an idle engine, and the new process serves the same tokens."""
    heard = Heard()
    engine = EngineProcess(functools.partial(_tiny_engine, 64), observer=heard)
    assert (engine.max_tokens, engine.failure) == (64, None)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

    async def answers() -> list[list[int]]:
        asked = (outputs(engine.stream([5, 6, at], params)) for at in range(4))
        return [joined(each).outputs[0].token_ids for each in await asyncio.gather(*asked)]

    async with engine:
        before = await answers()
        stream = engine.stream([5], replace(params, max_tokens=63))
        await anext(stream)
        heard.is_idle.clear()
        heard.idle_stats = None
        engine._worker.kill()
        with pytest.raises(ClosedError):
            await outputs(stream)
        assert "ended" in str(engine.failure)
        # Observers see an idle engine even before another one has started.
        assert heard.is_idle.is_set()
        assert heard.idle_stats.num_sequences == heard.idle_stats.resident_bytes == 0
        heard.is_idle.clear()
        with pytest.raises(ClosedError, match="ended"):
            await outputs(engine.stream([5], params))
        assert await asyncio.to_thread(heard.is_idle.wait, PATIENCE_S)
        assert engine.failure is None
        assert before == await answers()
    assert sum(isinstance(each, RequestRecord) for each in heard.events) == 8
    assert not engine._worker.is_alive()
    with pytest.raises(ConfigError, match="max_tokens"):
        EngineProcess(functools.partial(_tiny_engine, -1))


@pytest.mark.slow
async def test_a_hanging_process_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a shutdown without draining; its requests fail, and a draining shutdown ends, too."""
    monkeypatch.setattr(remote, "_CUT_S", 0.05)
    engine = EngineProcess(functools.partial(_tiny_engine, 64))
    async with engine:
        stream = engine.stream([5], SamplingParams(max_tokens=63, ignore_eos=True))
        await anext(stream)
        os.kill(engine._worker.pid, signal.SIGSTOP)
        draining = asyncio.create_task(engine.shutdown())
        await asyncio.wait_for(engine.shutdown(drain=False), PATIENCE_S)
        with pytest.raises(ClosedError):
            await outputs(stream)
        await draining
    assert not engine._worker.is_alive()


@pytest.mark.slow
async def test_a_silent_process_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests fail, and the next process serves."""
    now_s = [0.0]
    monkeypatch.setattr(remote, "_WATCH_S", 0.01)
    make = functools.partial(_tiny_engine, 64)
    engine = EngineProcess(make, silence_max_s=30.0, clock=lambda: now_s[0])
    params = SamplingParams(max_tokens=63, ignore_eos=True)
    async with engine:
        stream = engine.stream([5], params)
        await anext(stream)
        first = engine._worker
        os.kill(first.pid, signal.SIGSTOP)
        now_s[0] += 1000
        with pytest.raises(ClosedError):
            await outputs(stream)
        while engine.failure is not None:
            await asyncio.sleep(0.01)
        assert first is not engine._worker
        assert len(joined(await outputs(engine.stream([5], params))).outputs[0].token_ids) > 0


class FailsAfterwards:
    """Makes an engine once, and leaves a file; fails if the file exists."""

    def __init__(self, mark: Path):
        self._mark = mark

    def __call__(self, observer: EngineObserver) -> Any:
        if self._mark.exists():
            raise OutOfPagesError("no room", needed_bytes=1, free_bytes=0, retired_bytes=0)
        self._mark.touch()
        return _tiny_engine(64, observer)


@pytest.mark.slow
async def test_an_engine_that_cannot_be_restarted_says_why(tmp_path: Path) -> None:
    """The client can still be shut down."""
    engine = EngineProcess(FailsAfterwards(tmp_path / "mark"))
    async with engine:
        engine._worker.kill()
        while "no room" not in str(engine.failure):
            await asyncio.to_thread(engine._worker.join)
    assert not engine._worker.is_alive()


class WaitsForWord:
    """Makes an engine once a word was written to a pipe; fails if it is "fail"."""

    def __init__(self, pipe: Path):
        self.pipe = pipe
        os.mkfifo(pipe)

    def __call__(self, observer: EngineObserver) -> Any:
        if self.pipe.read_text() == "fail":
            raise ConfigError("told to fail")
        return _tiny_engine(64, observer)


@pytest.mark.slow
async def test_clients_may_leave_while_a_lazy_engine_starts(tmp_path: Path) -> None:
    """The others wait for it; after a failure that nobody waited for, the next one tries again."""
    make = WaitsForWord(tmp_path / "pipe")
    engine = EngineProcess(make, is_lazy=True)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)

    async def started() -> asyncio.Task[list[RequestOutput]]:
        asked = asyncio.create_task(outputs(engine.stream([5], params)))
        while engine._worker is None:
            await asyncio.sleep(0)
        return asked

    async def say(word: str) -> None:
        await asyncio.to_thread(make.pipe.write_text, word)

    async with engine:
        first = await started()
        first.cancel()
        opening = engine._opening
        assert opening is not None
        await say("fail")
        await asyncio.wait([opening])
        first = await started()
        patient = asyncio.create_task(outputs(engine.stream([6], params)))
        await asyncio.sleep(0)
        first.cancel()
        await say("go on")
        assert len(joined(await patient).outputs[0].token_ids) == 3
        assert engine.failure is None
    assert not engine._worker.is_alive()
    engine.close()


@pytest.mark.slow
async def test_a_lazy_engine_is_not_started_to_sleep(tmp_path: Path) -> None:
    engine = EngineProcess(WaitsForWord(tmp_path / "pipe"), is_lazy=True)
    await engine.sleep()
    assert engine._worker is None
    assert not engine.page_bytes
    engine.close()


async def test_a_lazy_engine_is_shut_down_while_it_starts(tmp_path: Path) -> None:
    """The request that waits is refused."""
    engine = EngineProcess(WaitsForWord(tmp_path / "pipe"), is_lazy=True)
    asked = asyncio.create_task(outputs(engine.stream([5])))
    while engine._worker is None:
        await asyncio.sleep(0)
    await engine.shutdown()
    with pytest.raises(ClosedError):
        await asked
    engine.close()


_START_CUT_SHORT = """
import os, select, socket, sys
from vmkv.serve.start import be_child, end_child, start_child

def wait_for(end):
    poll = select.poll()
    poll.register(end, select.POLLIN)
    poll.poll()

def arrive(path):
    parent = os.pidfd_open(os.getppid())
    with socket.socket(socket.AF_UNIX) as there:
        there.connect(path)
        there.send(str(os.getpid()).encode())
    wait_for(parent)

class Arriving:
    def __init__(self, path): self.path = path
    def __reduce__(self): return arrive, (self.path,)

def start_rank(connection, path):
    be_child(connection)
    start_child(print, (Arriving(path), bytes(1 << 20)), "rank")  # More than a pipe holds.

if __name__ == "__main__":
    ours, theirs = socket.socketpair()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(sys.argv[1])
        listener.listen()
        engine = start_child(start_rank, (theirs, sys.argv[1]), "engine")
        rank = os.pidfd_open(int(listener.accept()[0].recv(16)))
    end_child(engine)
    wait_for(rank)
"""


def test_a_process_that_ends_while_it_starts_another_leaves_no_traceback(tmp_path: Path) -> None:
    """The rank of an engine that a failed check ends has read only a part of its arguments."""
    script = tmp_path / "script.py"
    script.write_text(_START_CUT_SHORT)
    line = [sys.executable, str(script), str(tmp_path / "socket")]
    child = subprocess.run(line, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (0, "", "") == (child.returncode, child.stdout, child.stderr)
