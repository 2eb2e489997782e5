"""Engines whose pools are checked for leaks at the end of each test."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.hybrids import model_named
from helpers.requests import run

from vmkv import BackendUsage, ExtentPool, HostBackend
from vmkv.serve.engine import Engine
from vmkv.units import KiB, MiB


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine, with a time limit."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture
def options() -> dict[str, Any]:
    """Options of `engine`, which a parameter of a test replaces."""
    return {}


@pytest.fixture
def engine(make_engine: Callable[..., Engine], options: dict[str, Any]) -> Engine:
    """An engine over a tiny Llama."""
    return make_engine(**options)


@pytest.fixture
def make_engine() -> Iterator[Callable[..., Engine]]:
    """Make engines over tiny models; at the end, check that each has released everything."""
    made: list[tuple[Engine, ExtentPool, HostBackend, int]] = []

    def make(
        model: Any = "llama",
        *,
        budget_bytes: int = 16 * MiB,
        host_budget_bytes: int = 0,
        backend: Any = None,
        pool: ExtentPool | None = None,
        **options: Any,
    ) -> Engine:
        host = HostBackend(4 * KiB) if backend is None else backend
        if pool is None:
            pool = ExtentPool(host, budget_bytes, host_budget_bytes=host_budget_bytes)
        if isinstance(model, str):
            model = copy.deepcopy(model_named(model))  # The engine changes how it attends.
        defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_tokens": 128, "seed": 0}
        engine = Engine(model, pool=pool, **{**defaults, **options})
        # A runner may keep a scratch row.
        made.append((engine, pool, host, engine.cache.stats().num_sequences))
        return engine

    yield make
    for engine, pool, host, num_scratch in made:
        if not engine.cache.is_closed:
            assert not engine.has_unfinished
            num_sequences = engine.cache.stats().num_sequences
            assert num_scratch == num_sequences, "a sequence outlived its request"
            engine.cache.check()
        engine.close()
        assert 0 == pool.stats().resident_bytes
        pool.close()
        assert BackendUsage() == host.usage()
