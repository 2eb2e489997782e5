"""An idle engine releases memory above the watermark and does not wake up.

The `make_engine` fixture checks for leaks at the end of each test.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest
from helpers.requests import PATIENCE_S, check_said, finish_all, last
from helpers.requests import prompts as prompts_of
from helpers.serving import Watch

from vmkv import ConfigError, HostBackend
from vmkv.cli.arguments import Commands
from vmkv.serve import engine as engine_module
from vmkv.serve.async_engine import AsyncEngine
from vmkv.serve.engine import Engine
from vmkv.serve.engine_loop import Cancel
from vmkv.serve.params import SamplingParams
from vmkv.testing.faults import FaultInjectingBackend
from vmkv.units import GiB, Handle, KiB

MakeEngine = Callable[..., Engine]
GREEDY = SamplingParams(temperature=0, max_tokens=8)


def prompts(count: int, seed: int = 0, *, length: int = 40) -> list[list[int]]:
    return prompts_of(count, shortest=length, longest=length, seed=seed)


def check_burst(engine: Engine, seed: int = 0) -> None:
    """Serve some requests at once."""
    wanted = prompts(6, seed)
    check_said(wanted, engine.generate(wanted, GREEDY))


def physical_bytes(engine: Engine) -> int:
    """Physical memory by the device's accounting."""
    return engine.cache.pool.backend.usage().physical_bytes


# ---- the watermark ----------------------------------------------------------------------------


@pytest.mark.parametrize("slice_bytes", [4 * KiB, 20 * KiB, 1 * GiB])
@pytest.mark.parametrize("watermark_bytes", [0, 4 * KiB, 24 * KiB, 64 * KiB])
def test_memory_above_the_watermark_is_released(
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    watermark_bytes: int,
    slice_bytes: int,
) -> None:
    """After each burst, in slices of any size; later requests map it again."""
    monkeypatch.setattr(engine_module, "_SLICE_BYTES", slice_bytes)
    engine = make_engine(watermark_bytes=watermark_bytes)
    for seed in range(3):
        wanted = prompts(6, seed)
        handles = [engine.add(prompt, GREEDY) for prompt in wanted]
        peak_bytes = 0
        while engine.has_unfinished:
            peak_bytes = max(peak_bytes, physical_bytes(engine))
            engine.step()
        assert peak_bytes > 50 * KiB
        assert watermark_bytes >= physical_bytes(engine)
        # Whole extents are released, with keys and values.
        assert physical_bytes(engine) > watermark_bytes - 24 * KiB
        check_said(wanted, handles)
        engine.cache.check()


def test_without_a_watermark_everything_is_kept(make_engine: MakeEngine) -> None:
    """An engine that falls idle makes no driver calls, and later requests reuse its memory."""
    engine = make_engine(prefix_caching=False)
    check_burst(engine)
    before, kept_bytes = dict(engine.cache.pool.backend.calls), physical_bytes(engine)
    engine.step()
    assert before == dict(engine.cache.pool.backend.calls)
    assert kept_bytes == physical_bytes(engine) > 50 * KiB
    check_burst(engine, seed=1)
    assert before.get("mem_release") == engine.cache.pool.backend.calls.get("mem_release")
    assert kept_bytes == physical_bytes(engine)


def test_recently_used_prefixes_are_kept(make_engine: MakeEngine) -> None:
    """Prefixes that were used longest ago are evicted."""
    engine = make_engine(watermark_bytes=64 * KiB)
    wanted = prompts(6, length=64)
    first = [engine.generate(prompt, GREEDY)[0] for prompt in wanted]
    assert [0] * 6 == [output.num_cached_tokens for output in first]
    cached = []
    for prompt in (wanted[5], wanted[0]):
        [output] = engine.generate(prompt, GREEDY)
        check_said([prompt], [output])
        cached.append(output.num_cached_tokens)
    assert cached[0] >= 48
    assert 0 == cached[1]


def test_free_memory_is_released_before_prefixes(make_engine: MakeEngine) -> None:
    """Retired memory, too: a fence that has not passed evicts no prefix."""
    engine = make_engine(watermark_bytes=48 * KiB)
    prompt = prompts(1, length=100)[0]
    engine.generate(prompt, GREEDY)
    cache, pool = engine.cache, engine.cache.pool
    backend = pool.backend
    assert isinstance(backend, HostBackend)
    other = cache.open()
    cache.grow([(other, 120)])
    engine.add([5, 6, 7], GREEDY)
    while engine.advance():
        pass
    backend.hold_fences()
    fence = pool.reclaimer.new_fence()
    for group in cache.groups:
        group.retire_from(other.row, 0, fence)
    other.close()
    assert pool.stats().retired_bytes > 25 * KiB
    assert physical_bytes(engine) > 48 * KiB
    engine.fall_idle()
    backend.pass_fences()
    assert physical_bytes(engine) <= 48 * KiB
    [output] = engine.generate(prompt, GREEDY)
    check_said([prompt], [output])
    assert output.num_cached_tokens >= 96


def test_memory_of_cancelled_requests_is_released(make_engine: MakeEngine) -> None:
    """By the next step that finds no work."""
    engine = make_engine(watermark_bytes=0)
    handle = engine.add(prompts(1)[0], SamplingParams(temperature=0, max_tokens=60))
    for _ in range(5):
        engine.step()
    assert physical_bytes(engine)
    handle.cancel()
    finish_all(engine)
    engine.step()
    assert 0 == physical_bytes(engine)


def test_a_negative_watermark_is_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(ConfigError, match="watermark_bytes=-1"):
        make_engine(watermark_bytes=-1)


# ---- an engine in a thread --------------------------------------------------------------------


class Waits(queue.SimpleQueue):
    """A queue of commands that records each wait."""

    def __init__(self) -> None:
        self.timeouts: list[float | None] = []
        self.num_wakeups = 0
        self.is_waiting = threading.Event()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if not block:
            return super().get(block)
        self.timeouts.append(timeout)
        self.is_waiting.set()
        command = super().get(block, timeout)
        self.is_waiting.clear()
        self.num_wakeups += 1
        return command


async def idle(watch: Watch) -> None:
    await asyncio.to_thread(watch.wait, lambda: watch.is_idle, "an idle engine")


async def shut_down(engine: AsyncEngine) -> None:
    await asyncio.wait_for(engine.shutdown(), PATIENCE_S)
    assert engine.failure is not None


async def test_an_idle_thread_never_wakes_up(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for commands without a timeout."""
    waits, watch = Waits(), Watch()
    engine = make_engine(observer=watch, watermark_bytes=0)
    with monkeypatch.context() as patch:
        patch.setattr(queue, "SimpleQueue", lambda: waits)
        it = AsyncEngine(engine)
    for prompt in prompts(3):
        assert await asyncio.to_thread(waits.is_waiting.wait, PATIENCE_S)
        before = waits.num_wakeups
        for _ in range(1000):
            await asyncio.sleep(0)
        assert before == waits.num_wakeups
        check_said([prompt], [await last(it.stream(prompt, GREEDY))])
    await idle(watch)
    await shut_down(it)
    assert {None} == set(waits.timeouts)
    # Each wake-up has a command: a request, a cancellation or the shutdown. Their number depends
    # on the thread's progress when a command arrives.
    assert 20 >= waits.num_wakeups >= 1
    assert 3 == watch.num_idle  # After each request, and not before the first.


class ReleasesSlowly(HostBackend):
    """Calls `while_releasing` once, within a release."""

    while_releasing: Callable[[], None] | None = None

    def mem_release(self, handle: Handle) -> None:
        call, self.while_releasing = self.while_releasing, None
        if call is not None:
            call()
        super().mem_release(handle)


SlowRelease = tuple[ReleasesSlowly, Watch, Engine]


@pytest.fixture
def slow_release(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> SlowRelease:
    monkeypatch.setattr(engine_module, "_SLICE_BYTES", 4 * KiB)
    backend, watch = ReleasesSlowly(4 * KiB), Watch()
    return backend, watch, make_engine(backend=backend, observer=watch, watermark_bytes=0)


async def test_a_request_interrupts_the_release_of_memory(
    slow_release: SlowRelease, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest is released after the request."""
    backend, watch, engine = slow_release
    bytes_at_start = []
    it = AsyncEngine(engine)
    loop, prompt = asyncio.get_running_loop(), prompts(1, seed=9)[0]
    comes = asyncio.Event()

    def while_releasing() -> None:
        loop.call_soon_threadsafe(comes.set)
        # In the engine's thread, which continues once the request is in the queue.
        assert posted.wait(PATIENCE_S)

    posted = threading.Event()
    real_add = engine.add

    def add(*arguments: Any, **options: Any) -> Any:
        bytes_at_start.append(physical_bytes(engine))
        return real_add(*arguments, **options)

    wanted = prompts(6)
    backend.while_releasing = while_releasing
    outputs = asyncio.gather(*(last(it.stream(each, GREEDY)) for each in wanted))
    # The outputs arrive although the release is not complete.
    check_said(wanted, await outputs)
    await comes.wait()
    assert not watch.is_idle
    monkeypatch.setattr(engine, "add", add)
    late = asyncio.create_task(last(it.stream(prompt, GREEDY)))
    while it._link.commands.empty():
        await asyncio.sleep(0)
    posted.set()
    check_said([prompt], [await late])
    await idle(watch)
    assert 0 == physical_bytes(engine)
    await shut_down(it)
    assert len(bytes_at_start) == 1
    assert bytes_at_start[0] > 80 * KiB


async def test_other_commands_do_not_end_the_release_of_memory(slow_release: SlowRelease) -> None:
    """After a command without a request, the release continues."""
    backend, watch, engine = slow_release
    it = AsyncEngine(engine)
    backend.while_releasing = lambda: it._send(Cancel(10**6))
    check_said(prompts(1), [await last(it.stream(prompts(1)[0], GREEDY))])
    await idle(watch)
    assert 0 == physical_bytes(engine)
    await shut_down(it)


async def test_shutdown_does_not_wait_for_the_release_of_memory(slow_release: SlowRelease) -> None:
    """Closing the engine releases everything anyway."""
    backend, watch, engine = slow_release
    it = AsyncEngine(engine)
    stopping = threading.Event()
    backend.while_releasing = lambda: assert_set(stopping)
    await last(it.stream(prompts(1)[0], GREEDY))
    ending = asyncio.create_task(it.shutdown())
    while not it._is_stopping:
        await asyncio.sleep(0)
    stopping.set()
    await ending
    assert 0 == watch.num_idle


def assert_set(event: threading.Event) -> None:
    assert event.wait(PATIENCE_S)


@pytest.mark.parametrize("call", ["record_fence", "mem_unmap", "mem_release"])
async def test_a_driver_error_during_release_does_not_end_the_thread(
    make_engine: MakeEngine, call: str
) -> None:
    """The memory stays mapped until the engine is idle again; later requests are served."""

    class Faulty(FaultInjectingBackend):
        """Fails every such call while `is_failing`."""

        is_failing = False

        def _fault(self, name: str) -> Any:
            if self.is_failing and name == call:
                self.num_calls, self._fail_at = 0, 1
            return super()._fault(name)

    backend, watch = Faulty(HostBackend(4 * KiB)), Watch()
    engine = make_engine(backend=backend, observer=watch, watermark_bytes=0)

    async def serve(it: AsyncEngine, seed: int, *, fails: bool) -> None:
        prompt = prompts(1, seed)[0]
        real = engine.fall_idle

        def fall_idle(**options: Any) -> None:
            backend.is_failing = fails
            real(**options)

        engine.fall_idle = fall_idle  # type: ignore[method-assign]
        check_said([prompt], [await last(it.stream(prompt, GREEDY))])
        await idle(watch)
        backend.is_failing = False
        engine.fall_idle = real  # type: ignore[method-assign]

    it = AsyncEngine(engine)
    await serve(it, 0, fails=True)
    assert backend.failed_call == call
    assert physical_bytes(engine)
    engine.cache.check()
    backend.arm(0)
    await serve(it, 1, fails=False)
    assert 0 == physical_bytes(engine)
    await shut_down(it)


# ---- the command ------------------------------------------------------------------------------


def test_watermark_is_an_option_in_gib() -> None:
    """By default all memory is kept."""
    import argparse

    from vmkv.cli import serve
    from vmkv.serve.options import EngineOptions

    made: list[dict[str, Any]] = []
    parser = argparse.ArgumentParser()
    commands: Commands = parser.add_subparsers()
    serve.add_parser(commands)
    for options in ([], ["--watermark", "1.5"], ["--watermark", "0"]):
        arguments = parser.parse_args(["serve", "model", *options])
        made.append(serve.chosen(EngineOptions, arguments))
    assert [None, 3 * GiB // 2, 0] == [each["watermark_bytes"] for each in made]
