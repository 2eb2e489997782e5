"""An engine in a thread or process of its own: streams, cancellation, failures, shutdown.

Both run in this process here; the process is replaced by a thread.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import numpy as np
import pytest
import torch
from helpers.hosted import hosted
from helpers.requests import PATIENCE_S, check_said, last, prompts, reference
from helpers.serving import Watch, tiny_llama, tiny_tokenizer
from helpers.tiny_models import tiny_model

from vmkv import ClosedError, ConfigError
from vmkv.errors import PausedError
from vmkv.serve.async_engine import AsyncEngine
from vmkv.serve.engine import Engine
from vmkv.serve.params import SamplingParams, tokenised
from vmkv.serve.request import FinishReason, RequestOutput, joined
from vmkv.serve.step_loop import StepLoop

MakeEngine = Callable[..., Engine]
GREEDY = SamplingParams(temperature=0, max_tokens=8)


Serving = Callable[..., AbstractAsyncContextManager[Any]]


@pytest.fixture(params=[AsyncEngine, hosted], ids=["thread", "process"])
def serving(request: pytest.FixtureRequest) -> Serving:
    """Run an engine in a thread or process of its own, and shut it down at the end."""

    @asynccontextmanager
    async def serve(engine: Engine, *, drain: bool = True, **options: Any) -> AsyncIterator[Any]:
        it = request.param(engine, **options)
        try:
            yield it
        finally:
            await asyncio.wait_for(it.shutdown(drain=drain), PATIENCE_S)
            assert it.failure is not None

    return serve


async def test_concurrent_streams_equal_the_reference(
    make_engine: MakeEngine, serving: Serving
) -> None:
    """Every output has a new token."""

    async def follow(engine: Any, prompt: list[int]) -> list[RequestOutput]:
        return [output async for output in engine.stream(prompt, GREEDY)]

    async with serving(make_engine()) as engine:
        found = await asyncio.gather(*(follow(engine, prompt) for prompt in prompts(20)))
    check_said(prompts(20), [joined(outputs) for outputs in found])
    assert all(outputs[-1].is_finished for outputs in found)
    assert all(output.outputs[0].token_ids for outputs in found for output in outputs)


async def test_bad_words_of_text_are_tokenised_off_the_event_loop(
    make_engine: MakeEngine, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def spied(params: SamplingParams, tokenizer: Any) -> SamplingParams:
        if isinstance(params.bad_words[0], str):
            threads.append(threading.current_thread())
        return tokenised(params, tokenizer)

    monkeypatch.setattr("vmkv.serve.engine_client.tokenised", spied)
    engine = make_engine(tiny_llama(), tokenizer=tiny_tokenizer())
    async with serving(engine) as client:
        await last(client.stream([3, 4], SamplingParams(max_tokens=1, bad_words=["a", "b"])))
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


@pytest.mark.parametrize("name", ["llama", "gemma3"])
async def test_samples_of_a_new_prompt_report_no_cached_tokens(
    make_engine: MakeEngine, serving: Serving, name: str
) -> None:
    """The prompt's tokens that samples share do not count as cached."""
    params = SamplingParams(n=3, temperature=0, max_tokens=4)
    prompt, ended = list(range(3, 43)), Watch()
    async with serving(make_engine(name, observer=ended)) as engine:
        first = [each async for each in engine.stream(prompt, params)]
        again = await last(engine.stream(prompt, params))
    assert {0} == {each.num_cached_tokens for each in first}
    cached = 32 if name == "llama" else again.num_cached_tokens
    assert cached == again.num_cached_tokens
    assert [0, 0, 0, 0, 0, cached] == sorted(each.num_cached_tokens for each in ended.finished)


async def test_a_stop_text_that_the_last_text_completes_ends_alike(
    make_engine: MakeEngine, serving: Serving
) -> None:
    """Bytes that form no character become text at the end; `Engine` says the same."""
    (byte,) = (tokenizer := tiny_tokenizer()).convert_tokens_to_ids(["\u00e6"])
    options = {"temperature": 0, "max_tokens": 2, "allowed_token_ids": [byte]}
    params = [SamplingParams(stop=["\ufffd"], **options), SamplingParams(**options)]
    async with serving(make_engine(tiny_llama(), tokenizer=tokenizer)) as engine:
        found = [await last(engine.stream("A row", each)) for each in params]
    streamed = [each.outputs[0] for each in found]
    direct = make_engine(tiny_llama(), tokenizer=tokenizer).generate(["A row"] * 2, params)
    for whole in streamed, [each.outputs[0] for each in direct]:
        ends = [(each.finish_reason, each.stop_reason) for each in whole]
        assert [(FinishReason.STOP, "\ufffd"), (FinishReason.LENGTH, None)] == ends
        assert "" == whole[0].text != whole[1].text


async def test_tenants_share_no_prefix(make_engine: MakeEngine, serving: Serving) -> None:
    """A tenant that is not a string is refused."""
    async with serving(make_engine()) as engine:
        with pytest.raises(ConfigError, match="priority='low' must be an integer"):
            await anext(engine.stream([1], priority="low"))  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="tenant=7 must be a string"):
            await last(engine.stream([1, 2, 3], GREEDY, tenant=7))
        found = [
            (await last(engine.stream([5] * 40, GREEDY, tenant=each))).num_cached_tokens
            for each in ("a", "b", None, "a")
        ]
    assert [0, 0, 0, 32] == found


async def test_waiting_before_planning_does_not_change_tokens(
    make_engine: MakeEngine, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without other requests that arrive meanwhile."""
    told = [0.002] * 20
    monkeypatch.setattr(
        StepLoop, "spare_s", property(lambda loop: told.pop() if loop._pending and told else 0.0)
    )
    async with serving(make_engine()) as engine:
        alone = await last(engine.stream(prompts(1)[0], GREEDY))
        several = await asyncio.gather(
            *(last(engine.stream(prompt, GREEDY)) for prompt in prompts(3))
        )
    check_said([*prompts(1), *prompts(3)], [alone, *several])
    assert not told


async def test_leaving_a_stream_cancels_its_request(
    make_engine: MakeEngine, serving: Serving
) -> None:
    """By closing the iterator or cancelling the task; other requests continue."""
    seen = Watch()
    long = SamplingParams(temperature=0, max_tokens=90)
    async with serving(make_engine(observer=seen)) as engine:
        closed = engine.stream(prompts(1)[0], long)
        await anext(closed)
        task = asyncio.create_task(last(engine.stream(prompts(1)[0], long)))
        stays = asyncio.create_task(last(engine.stream(prompts(2)[1], GREEDY)))
        await closed.aclose()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        output = await stays
    check_said(prompts(2)[1:], [output])
    # The task may be cancelled before it has sent its request.
    reasons = sorted(record.finish_reason for record in seen.finished)
    assert reasons in (["cancelled", "cancelled", "length"], ["cancelled", "length"])


async def test_a_client_that_does_not_read_delays_no_other(
    make_engine: MakeEngine, serving: Serving
) -> None:
    """Its request ends, and it later gets all tokens in at most two outputs."""
    async with serving(make_engine()) as engine:
        lazy = engine.stream(prompts(1)[0], GREEDY)
        first = await anext(lazy)
        others = await asyncio.gather(
            *(last(engine.stream(prompt, GREEDY)) for prompt in prompts(6, seed=1))
        )
        outputs = [output async for output in lazy]
    assert len(outputs) <= 2
    check_said([*prompts(1), *prompts(6, seed=1)], [joined([first, *outputs]), *others])


async def test_invalid_requests_raise_config_errors(
    make_engine: MakeEngine, serving: Serving
) -> None:
    async with serving(make_engine()) as engine:
        for prompt, message in (([], "empty"), ([1] * 200, "no room"), ("text", "tokenizer")):
            with pytest.raises(ConfigError, match=message):
                await anext(engine.stream(prompt, GREEDY))
        assert (await last(engine.stream([np.int64(1), 2], GREEDY))).is_finished


@pytest.mark.parametrize("drain", [True, False])
async def test_shutdown(make_engine: MakeEngine, serving: Serving, drain: bool) -> None:
    """Draining finishes requests, otherwise they are cancelled; new requests are refused."""
    params = SamplingParams(temperature=0, max_tokens=60)
    async with serving(make_engine(), drain=drain) as engine:
        streams = [engine.stream(prompt, params) for prompt in prompts(6)]
        tasks = [asyncio.create_task(last(stream)) for stream in streams[1:]]
        await anext(streams[0])
        # All requests must have been sent.
        while len(engine._streams) + sum(each.done() for each in tasks) < len(streams):
            await asyncio.sleep(0)
        stopping = asyncio.create_task(engine.shutdown(drain=drain))
        tasks.append(asyncio.create_task(last(streams[0])))
        await stopping
        with pytest.raises(ClosedError):
            await anext(engine.stream([1, 2], params))
        found = await asyncio.gather(*tasks)
    reasons = {output.outputs[0].finish_reason for output in found}
    assert reasons == {FinishReason.LENGTH} if drain else FinishReason.CANCELLED in reasons


async def test_an_idle_engine_runs_no_steps(make_engine: MakeEngine, serving: Serving) -> None:
    seen = Watch()
    async with serving(make_engine(observer=seen)) as engine:
        for _ in range(2):
            await last(engine.stream([1, 2, 3], GREEDY))
            await asyncio.to_thread(seen.wait, lambda: seen.is_idle, "an idle engine")
            before = seen.num_steps
            for _ in range(1000):
                await asyncio.sleep(0)
            assert before == seen.num_steps


async def test_engine_errors_end_requests_and_not_the_thread(
    engine: Engine, serving: Serving
) -> None:
    """Later requests are served."""
    real = engine.cache.grow
    broken = threading.Event()

    def grow(wanted: Any) -> None:
        if broken.is_set():
            broken.clear()
            raise LookupError("an unexpected error")
        real(wanted)

    engine.cache.grow = grow  # type: ignore[method-assign]
    async with serving(engine) as it:
        broken.set()
        failed = await last(it.stream([1, 2, 3], GREEDY))
        assert FinishReason.ERROR is failed.outputs[0].finish_reason
        assert "an unexpected error" in str(failed.error)
        found = await last(it.stream([1, 2, 3], GREEDY))
    check_said([[1, 2, 3]], [found])


async def test_requests_fail_when_the_thread_has_ended(engine: Engine) -> None:
    """Running, waiting and new ones; `failure` has the reason."""
    may_die = threading.Event()

    def advance() -> bool:
        assert may_die.wait(PATIENCE_S)
        raise SystemExit("something ends the thread")

    it = AsyncEngine(engine)
    assert it.failure is None
    engine.advance = advance  # type: ignore[method-assign]
    asked = [asyncio.create_task(last(it.stream([1, 2, 3], GREEDY))) for _ in range(3)]
    await asyncio.sleep(0)  # All requests are sent; the thread has taken at most one.
    may_die.set()
    for each in await asyncio.gather(*asked, return_exceptions=True):
        assert isinstance(each, ClosedError)
    await it.shutdown()
    assert "SystemExit" in str(it.failure)
    with pytest.raises(ClosedError):
        await anext(it.stream([1, 2], GREEDY))
    engine.close()


async def test_five_failed_steps_in_a_row_are_a_failure(engine: Engine, serving: Serving) -> None:
    """A step that succeeds ends the failure."""
    real = engine._runner.submit

    def submit(chunks: Any) -> Any:
        raise RuntimeError("the device is gone")

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


async def test_a_request_cancelled_before_it_is_taken_is_not_added(
    engine: Engine, serving: Serving
) -> None:
    added: list[Any] = []
    real, may_go_on = engine.add, threading.Event()

    def add(prompt: Any, *arguments: Any, **options: Any) -> Any:
        added.append(list(prompt))
        assert may_go_on.wait(PATIENCE_S)
        return real(prompt, *arguments, **options)

    engine.add = add  # type: ignore[method-assign]
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
    assert [[1], [3]] == added


async def test_a_silent_engine_with_work_is_a_failure(engine: Engine, serving: Serving) -> None:
    """Until it continues; an idle engine is not, however long it is idle."""
    now_s, is_inside, may_go_on = [0.0], threading.Event(), threading.Event()
    submit = engine._runner.submit

    def hanging(chunks: Any) -> Any:
        is_inside.set()
        assert may_go_on.wait(PATIENCE_S)
        return submit(chunks)

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


@pytest.mark.parametrize(
    ("num_prompt_tokens", "num_tokens"), [(3, 6), (100, 1)], ids=["decoding", "a long prompt"]
)
async def test_each_step_resets_the_silence(
    engine: Engine, serving: Serving, num_prompt_tokens: int, num_tokens: int
) -> None:
    """Together, steps may take longer than `silence_max_s`, also if they give no token."""
    now_s: list[float] = [0.0]
    failures: list[str | None] = []
    submit = engine._runner.submit
    loop = asyncio.get_running_loop()
    async with serving(engine, silence_max_s=30.0, clock=lambda: now_s[0]) as it:

        async def look() -> None:
            for _ in range(3):  # The news of earlier steps are taken first.
                await asyncio.sleep(0)
            failures.append(it.failure)

        def slow(pieces: Any) -> Any:
            now_s[0] += 20
            asyncio.run_coroutine_threadsafe(look(), loop).result(PATIENCE_S)
            return submit(pieces)

        engine._runner.submit = slow  # type: ignore[method-assign]
        params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
        assert (await last(it.stream([3] * num_prompt_tokens, params))).error is None
    assert len(failures) > 5
    assert set(failures) == {None}


# ---- training --------------------------------------------------------------------------------


async def test_training_has_the_model_between_requests(make_engine: MakeEngine) -> None:
    """Requests before finish first; those made meanwhile are served with the weights after."""
    watch = Watch()
    model, (prompt, other) = copy.deepcopy(tiny_model("llama")), prompts(2)
    engine = make_engine(model, observer=watch)
    it = AsyncEngine(engine)
    before = asyncio.create_task(last(it.stream(prompt, GREEDY)))
    await asyncio.to_thread(watch.wait, lambda: bool(watch.added), "a request")
    async with it.paused():
        assert 1 == len(watch.finished)
        model.train()
        ids = torch.tensor([prompt])
        model(input_ids=ids, labels=ids).loss.backward()
        assert model.lm_head.weight.grad is not None
        during = asyncio.create_task(last(it.stream(other, GREEDY)))
        with torch.no_grad():
            for each in model.parameters():
                each.mul_(-1.5)
        engine.sleep()
        for _ in range(5):
            await asyncio.sleep(0)
        assert 1 == len(watch.added)
        plain = copy.deepcopy(model).eval()
    check_said([prompt], [await before])
    wanted = plain.generate(torch.tensor([other]), max_new_tokens=8, do_sample=False)
    assert wanted[0, len(other) :].tolist() == list((await during).outputs[0].token_ids)
    assert wanted[0, len(other) :].tolist() != reference(other)
    await it.shutdown()


async def test_pauses_take_turns(make_engine: MakeEngine) -> None:
    """One that is cancelled while it waits is none, and leaves the others theirs."""
    engine, order = make_engine(), []
    it = AsyncEngine(engine)

    async def pause(name: str) -> None:
        async with it.paused():
            order.append(name)
            for _ in range(9):
                await asyncio.sleep(0)
            order.append(name)

    async with it.paused():
        tasks = [asyncio.create_task(pause(name)) for name in ("first", "gone", "last")]
        for _ in range(5):
            await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.sleep(0)
        assert not order
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert [None, None] == ended[::2]
    assert isinstance(ended[1], asyncio.CancelledError)
    assert ["first", "first", "last", "last"] == order
    with pytest.raises(ZeroDivisionError):
        async with it.paused():
            raise ZeroDivisionError
    check_said(prompts(1), [await last(it.stream(prompts(1)[0], GREEDY))])
    await it.shutdown()
    with pytest.raises(ClosedError):
        async with it.paused():
            order.append("closed")
    assert 4 == len(order)


async def test_a_cancelled_pause_holds_no_requests_up(make_engine: MakeEngine) -> None:
    """Those that came after it do not wait for those before."""
    watch, may_go_on = Watch(), threading.Event()
    engine = make_engine(observer=watch)
    submit = engine._runner.submit

    def held(pieces: Any) -> Any:
        assert may_go_on.wait(PATIENCE_S)
        return submit(pieces)

    engine._runner.submit = held  # type: ignore[method-assign]
    it = AsyncEngine(engine)

    async def pause() -> None:
        async with it.paused():
            raise AssertionError

    async def begin(call: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(call)
        for _ in range(5):
            await asyncio.sleep(0)
        return task

    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    long = await begin(last(it.stream([1, 2, 3], params)))
    await asyncio.to_thread(watch.wait, lambda: bool(watch.added), "a request")
    pausing = await begin(pause())
    pausing.cancel()
    short = await begin(last(it.stream([4, 5], SamplingParams(max_tokens=1))))
    may_go_on.set()
    await asyncio.gather(long, short)
    assert pausing.cancelled()
    await it.shutdown()
    assert [1, 60] == [each.num_output_tokens for each in watch.finished]


async def test_a_model_that_cannot_be_served_after_a_pause(make_engine: MakeEngine) -> None:
    """Whoever paused is told so; requests are refused until another pause mends the model."""
    model, (prompt,) = copy.deepcopy(tiny_model("llama")), prompts(1)
    engine = make_engine(model)
    it = AsyncEngine(engine)
    with pytest.raises(ConfigError, match="other keys and values"):
        async with it.paused():
            model.to(torch.bfloat16)
    with pytest.raises(PausedError, match=r"paused\(\)"):
        await last(it.stream(prompt, GREEDY))
    async with it.paused():
        model.to(torch.float32)
        plain = copy.deepcopy(model)
    wanted = plain.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
    output = await last(it.stream(prompt, GREEDY))
    assert wanted[0, len(prompt) :].tolist() == list(output.outputs[0].token_ids)
    await it.shutdown()


async def test_a_shutdown_ends_a_pause(make_engine: MakeEngine) -> None:
    model = copy.deepcopy(tiny_model("llama"))
    before = model.config._attn_implementation
    engine = make_engine(model)
    assert before != model.config._attn_implementation
    it = AsyncEngine(engine)
    async with it.paused():
        model.train()
        await it.shutdown()
        assert before == model.config._attn_implementation
        assert all(module.training for module in model.modules())
