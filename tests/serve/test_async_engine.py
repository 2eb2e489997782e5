"""An engine on its own, asked from event loops: streams, those who leave, and the end.

In a thread of this process, and as if in a process of its own: the same is promised of both.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
from helpers.hosted import hosted
from helpers.requests import PATIENCE_S, last, prompts, reference, run
from helpers.serving import Watch

from vmkv import ClosedError, ConfigError
from vmkv.serve import AsyncEngine, Engine, FinishReason, RequestOutput, SamplingParams, joined
from vmkv.serve.step_loop import StepLoop

MakeEngine = Callable[..., Engine]
GREEDY = SamplingParams(temperature=0, max_tokens=8)


Serving = Callable[..., AbstractAsyncContextManager[Any]]


@pytest.fixture(params=[AsyncEngine, hosted], ids=["thread", "process"])
def serving(request: pytest.FixtureRequest) -> Serving:
    """Has an engine run on its own, and shuts it down at the end."""

    @asynccontextmanager
    async def serve(engine: Engine, *, drain: bool = True, **options: Any) -> AsyncIterator[Any]:
        it = request.param(engine, **options)
        try:
            yield it
        finally:
            await asyncio.wait_for(it.shutdown(drain=drain), PATIENCE_S)
            assert it.failure is not None

    return serve


def test_many_streams_at_once(make_engine: MakeEngine, serving: Serving) -> None:
    """Each comes to what its prompt gets alone; every output brings something new."""

    async def follow(engine: Any, prompt: list[int]) -> list[RequestOutput]:
        return [output async for output in engine.stream(prompt, GREEDY)]

    async def main() -> list[list[RequestOutput]]:
        async with serving(make_engine()) as engine:
            return await asyncio.gather(*(follow(engine, prompt) for prompt in prompts(20)))

    for prompt, outputs in zip(prompts(20), run(main()), strict=True):
        assert reference(prompt) == list(joined(outputs).outputs[0].token_ids)
        assert outputs[-1].is_finished
        assert all(output.outputs[0].token_ids for output in outputs)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_what_samples_share_is_not_cached(
    make_engine: MakeEngine, serving: Serving, name: str
) -> None:
    """Of a new prompt nothing is reported as cached, however its samples begin."""
    params = SamplingParams(n=3, temperature=0, max_tokens=4)
    prompt, ended = list(range(3, 43)), Watch()

    async def main() -> tuple[list[RequestOutput], RequestOutput]:
        async with serving(make_engine(name, observer=ended)) as engine:
            first = [each async for each in engine.stream(prompt, params)]
            return first, await last(engine.stream(prompt, params))

    first, again = run(main())
    assert {0} == {each.num_cached_tokens for each in first}
    cached = 32 if name == "llama" else again.num_cached_tokens
    assert cached == again.num_cached_tokens
    assert [0, 0, 0, 0, 0, cached] == sorted(each.num_cached_tokens for each in ended.finished)


def test_streams_of_tenants_share_no_prefix(make_engine: MakeEngine, serving: Serving) -> None:
    """The tenant arrives at the engine; anything but a name is refused here."""

    async def main() -> list[int]:
        async with serving(make_engine()) as engine:
            with pytest.raises(ConfigError, match="tenant=7 must be a string"):
                await last(engine.stream([1, 2, 3], GREEDY, tenant=7))
            return [
                (await last(engine.stream([5] * 40, GREEDY, tenant=each))).num_cached_tokens
                for each in ("a", "b", None, "a")
            ]

    assert [0, 0, 0, 32] == run(main())


def test_planning_waits_no_longer_than_it_may(
    make_engine: MakeEngine, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody comes meanwhile; and where somebody does, tokens are what they are."""
    told = [0.002] * 20
    monkeypatch.setattr(
        StepLoop, "spare_s", property(lambda loop: told.pop() if loop._pending and told else 0.0)
    )

    async def main() -> None:
        async with serving(make_engine()) as engine:
            alone = await last(engine.stream(prompts(1)[0], GREEDY))
            several = await asyncio.gather(
                *(last(engine.stream(prompt, GREEDY)) for prompt in prompts(3))
            )
        said = [each.outputs[0].token_ids for each in (alone, *several)]
        assert said == [reference(prompt) for prompt in (prompts(1)[0], *prompts(3))]

    run(main())
    assert not told


def test_who_leaves_is_cancelled(make_engine: MakeEngine, serving: Serving) -> None:
    """Closing the iterator, or cancelling the task, frees the request; others go on."""
    seen = Watch()
    long = SamplingParams(temperature=0, max_tokens=90)

    async def main() -> RequestOutput:
        async with serving(make_engine(observer=seen)) as engine:
            closed = engine.stream(prompts(1)[0], long)
            await anext(closed)
            task = asyncio.create_task(last(engine.stream(prompts(1)[0], long)))
            stays = asyncio.create_task(last(engine.stream(prompts(2)[1], GREEDY)))
            await closed.aclose()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return await stays

    output = run(main())
    assert reference(prompts(2)[1]) == list(output.outputs[0].token_ids)
    # The task may have gone before it had asked at all.
    reasons = sorted(record.finish_reason for record in seen.finished)
    assert reasons in (["cancelled", "cancelled", "length"], ["cancelled", "length"])


def test_a_client_that_never_reads_holds_nobody_up(
    make_engine: MakeEngine, serving: Serving
) -> None:
    """Its request ends all the same, and what it finds later is everything."""

    async def main() -> tuple[RequestOutput, list[RequestOutput]]:
        async with serving(make_engine()) as engine:
            lazy = engine.stream(prompts(1)[0], GREEDY)
            first = await anext(lazy)
            others = await asyncio.gather(
                *(last(engine.stream(prompt, GREEDY)) for prompt in prompts(6, seed=1))
            )
            outputs = [output async for output in lazy]
            assert len(outputs) <= 2
            return joined([first, *outputs]), others

    lazy, others = run(main())
    assert reference(prompts(1)[0]) == list(lazy.outputs[0].token_ids)
    for prompt, output in zip(prompts(6, seed=1), others, strict=True):
        assert reference(prompt) == list(output.outputs[0].token_ids)


def test_bad_requests_fail_by_themselves(make_engine: MakeEngine, serving: Serving) -> None:
    """With the engine's own error, at the first iteration."""

    async def main() -> None:
        async with serving(make_engine()) as engine:
            for prompt, message in (([], "empty"), ([1] * 200, "no room"), ("text", "tokenizer")):
                with pytest.raises(ConfigError, match=message):
                    await anext(engine.stream(prompt, GREEDY))
            assert (await last(engine.stream([1, 2], GREEDY))).is_finished

    run(main())


@pytest.mark.parametrize("drain", [True, False])
def test_shutdown(make_engine: MakeEngine, serving: Serving, drain: bool) -> None:
    """What is under way ends, by itself or cancelled; what comes after is refused."""
    params = SamplingParams(temperature=0, max_tokens=60)

    async def main() -> list[RequestOutput]:
        async with serving(make_engine(), drain=drain) as engine:
            streams = [engine.stream(prompt, params) for prompt in prompts(6)]
            tasks = [asyncio.create_task(last(stream)) for stream in streams[1:]]
            await anext(streams[0])
            # Not before the last has been asked for.
            while len(engine._streams) + sum(each.done() for each in tasks) < len(streams):
                await asyncio.sleep(0)
            stopping = asyncio.create_task(engine.shutdown(drain=drain))
            tasks.append(asyncio.create_task(last(streams[0])))
            await stopping
            with pytest.raises(ClosedError):
                await anext(engine.stream([1, 2], params))
            return await asyncio.gather(*tasks)

    reasons = {output.outputs[0].finish_reason for output in run(main())}
    assert reasons == {FinishReason.LENGTH} if drain else FinishReason.CANCELLED in reasons


def test_an_idle_engine_sleeps(make_engine: MakeEngine, serving: Serving) -> None:
    """When nothing is left to do no step is run, until a request comes."""
    seen = Watch()

    async def main() -> None:
        async with serving(make_engine(observer=seen)) as engine:
            for _ in range(2):
                await last(engine.stream([1, 2, 3], GREEDY))
                await asyncio.to_thread(seen.wait, lambda: seen.is_idle, "an idle engine")
                before = seen.num_steps
                for _ in range(1000):
                    await asyncio.sleep(0)
                assert before == seen.num_steps

    run(main())


def test_engine_errors_end_requests_and_not_the_thread(
    make_engine: MakeEngine, serving: Serving
) -> None:
    """An error that is no request's own ends those that run; later ones are served."""
    engine = make_engine()
    real = engine.cache.grow
    broken = threading.Event()

    def grow(wanted: Any) -> None:
        if broken.is_set():
            broken.clear()
            raise LookupError("something nobody expects")
        real(wanted)

    engine.cache.grow = grow  # type: ignore[method-assign]

    async def main() -> RequestOutput:
        async with serving(engine) as it:
            broken.set()
            failed = await last(it.stream([1, 2, 3], GREEDY))
            assert FinishReason.ERROR is failed.outputs[0].finish_reason
            assert "nobody expects" in str(failed.error)
            return await last(it.stream([1, 2, 3], GREEDY))

    assert reference([1, 2, 3]) == list(run(main()).outputs[0].token_ids)


def test_nobody_waits_for_a_thread_that_has_ended(make_engine: MakeEngine) -> None:
    """Neither those whose requests run nor those that have just asked; and it says why."""
    engine = make_engine()
    may_die = threading.Event()

    def advance() -> bool:
        assert may_die.wait(PATIENCE_S)
        raise SystemExit("something ends the thread")

    async def main() -> None:
        it = AsyncEngine(engine)
        assert it.failure is None
        engine.advance = advance  # type: ignore[method-assign]
        asked = [asyncio.create_task(last(it.stream([1, 2, 3], GREEDY))) for _ in range(3)]
        await asyncio.sleep(0)  # They have asked; the thread has one of them at the most.
        may_die.set()
        for each in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(each, ClosedError)
        await it.shutdown()
        assert "SystemExit" in str(it.failure)
        with pytest.raises(ClosedError):
            await anext(it.stream([1, 2], GREEDY))

    run(main())
    engine.close()


def test_steps_that_fail_again_and_again_are_a_failure(
    make_engine: MakeEngine, serving: Serving
) -> None:
    """Until one succeeds."""
    engine = make_engine()
    real = engine._runner.submit

    def submit(chunks: Any) -> Any:
        raise RuntimeError("the device is gone")

    async def main() -> None:
        async with serving(engine) as it:
            engine._runner.submit = submit  # type: ignore[method-assign]
            for _ in range(5):
                assert it.failure is None
                failed = await last(it.stream([1, 2, 3], GREEDY))
                assert "gone" in str(failed.error)
            assert "the last 5 steps have failed" == it.failure
            engine._runner.submit = real  # type: ignore[method-assign]
            assert (await last(it.stream([1, 2, 3], GREEDY))).error is None
            assert it.failure is None

    run(main())


def test_who_leaves_before_the_turn_comes_costs_nothing(
    make_engine: MakeEngine, serving: Serving
) -> None:
    """The engine never hears of the request."""
    engine = make_engine()
    added: list[Any] = []
    real, may_go_on = engine.add, threading.Event()

    def add(prompt: Any, *arguments: Any, **options: Any) -> Any:
        added.append(list(prompt))
        assert may_go_on.wait(PATIENCE_S)
        return real(prompt, *arguments, **options)

    engine.add = add  # type: ignore[method-assign]

    async def main() -> None:
        async with serving(engine) as it:
            first = asyncio.create_task(last(it.stream([1], GREEDY)))
            while not added:
                await asyncio.sleep(0)
            leaving = asyncio.create_task(last(it.stream([2], GREEDY)))
            await asyncio.sleep(0)
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
            may_go_on.set()
            assert (await first).is_finished
            assert (await last(it.stream([3], GREEDY))).is_finished

    run(main())
    assert [[1], [3]] == added


def test_an_engine_that_hangs_is_a_failure_until_it_goes_on(
    make_engine: MakeEngine, serving: Serving
) -> None:
    """One that has work and says nothing; not one that has nothing to do, however long."""
    engine = make_engine()
    now_s, is_inside, may_go_on = [0.0], threading.Event(), threading.Event()
    submit = engine._runner.submit

    def hanging(chunks: Any) -> Any:
        is_inside.set()
        assert may_go_on.wait(PATIENCE_S)
        return submit(chunks)

    async def main() -> None:
        async with serving(engine, silence_max_s=30.0, clock=lambda: now_s[0]) as it:
            now_s[0] += 1000
            assert it.failure is None
            engine._runner.submit = hanging  # type: ignore[method-assign]
            asked = asyncio.create_task(last(it.stream([1, 2, 3])))
            await asyncio.to_thread(is_inside.wait, PATIENCE_S)
            now_s[0] += 29
            assert it.failure is None
            now_s[0] += 2
            assert "has said nothing for 31 s" in str(it.failure)
            may_go_on.set()
            assert (await asked).error is None
            assert it.failure is None
            now_s[0] += 1000
            assert it.failure is None

    run(main())


@pytest.mark.parametrize(
    ("num_prompt_tokens", "num_tokens"), [(3, 6), (100, 1)], ids=["decoding", "a long prompt"]
)
def test_each_step_is_a_sign_of_life(
    make_engine: MakeEngine, serving: Serving, num_prompt_tokens: int, num_tokens: int
) -> None:
    """Many may take longer than one may, and those that compute a prompt give no token."""
    engine = make_engine()
    now_s: list[float] = [0.0]
    failures: list[str | None] = []
    submit = engine._runner.submit

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with serving(engine, silence_max_s=30.0, clock=lambda: now_s[0]) as it:

            async def look() -> None:
                for _ in range(3):  # What was said before is taken first.
                    await asyncio.sleep(0)
                failures.append(it.failure)

            def slow(pieces: Any) -> Any:
                now_s[0] += 20
                asyncio.run_coroutine_threadsafe(look(), loop).result(PATIENCE_S)
                return submit(pieces)

            engine._runner.submit = slow  # type: ignore[method-assign]
            params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
            assert (await last(it.stream([3] * num_prompt_tokens, params))).error is None

    run(main())
    assert len(failures) > 5
    assert set(failures) == {None}
