"""A replica's outputs, reports and health, without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from vmkv import ClosedError, Engine, SamplingParams
from vmkv.serve.observer import Idle
from vmkv.serve.replicas.prefixes import HeldPrefixes, names_of, told_names
from vmkv.serve.replicas.replica import EngineReplica
from vmkv.serve.request import joined

MakeEngine = Callable[..., Engine]


@contextlib.asynccontextmanager
async def replica_of(engine: Engine, **options: Any) -> AsyncIterator[EngineReplica]:
    """A replica of this engine; it is shut down at the end."""
    replica = EngineReplica(lambda _: contextlib.nullcontext(engine), "one", **options)
    yield replica
    await replica._engine.shutdown()


async def test_only_the_first_output_has_the_prompt(make_engine: MakeEngine) -> None:
    """The size of later outputs does not depend on the prompt."""
    prompt = [3 + at % 50 for at in range(1000)]
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, prompt_logprobs=0)
    engine = make_engine(max_tokens=1024, max_num_batched_tokens=1024)
    async with replica_of(engine) as replica:
        first, *others = [each async for each in replica.stream(prompt, params)]
    assert others
    assert list(first.prompt_token_ids) == prompt
    assert max(len(pickle.dumps(each)) for each in others) < len(prompt)
    whole = joined([first, *others])
    assert list(whole.prompt_token_ids) == prompt
    assert len(whole.outputs[0].token_ids) == 8
    assert len(whole.prompt_logprobs or ()) == 1000


async def test_replicas_report_and_hit_prefixes_per_tenant(make_engine: MakeEngine) -> None:
    prompt, params = list(range(3, 67)), SamplingParams(max_tokens=1)

    def held_tokens(replica: EngineReplica, tenant: str) -> int:
        told = told_names(replica.record_routing_stats())
        return max((each for each, name in names_of(prompt, tenant) if name in told), default=0)

    async with contextlib.AsyncExitStack() as stack:
        for tenant, other in (("a", "b"), ("b", "a")):
            prefixes = HeldPrefixes()
            engine = make_engine(observer=prefixes)
            replica = await stack.enter_async_context(replica_of(engine))
            replica._prefixes = prefixes
            asked = [each async for each in replica.stream(prompt, params, tenant=tenant)]
            assert 0 == asked[-1].num_cached_tokens
            prefixes.on(Idle(), engine.cache)
            assert (64, 0) == (held_tokens(replica, tenant), held_tokens(replica, other))
            for whose, expected in ((other, 0), (tenant, 48)):
                asked = [each async for each in replica.stream(prompt, params, tenant=whose)]
                assert expected == asked[-1].num_cached_tokens


async def test_a_replica_that_hangs_is_unhealthy(make_engine: MakeEngine) -> None:
    """Ray then replaces it; an idle replica is healthy."""
    engine = make_engine()
    is_inside, may_go_on = threading.Event(), threading.Event()
    submit = engine._runner.submit

    def hanging(pieces: Any) -> Any:
        is_inside.set()
        assert may_go_on.wait(60)
        return submit(pieces)

    async with replica_of(engine, silence_max_s=1e-9) as replica:
        replica.check_health()
        engine._runner.submit = hanging  # type: ignore[method-assign]
        asked = asyncio.ensure_future(anext(replica.stream([1, 2, 3])))
        await asyncio.to_thread(is_inside.wait, 60)
        with pytest.raises(ClosedError, match="has said nothing"):
            replica.check_health()
        may_go_on.set()
        await asked
