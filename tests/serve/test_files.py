"""Engines find conversations in files, after a restart too, and run other requests meanwhile."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from helpers.hybrids import model_named
from helpers.requests import finish_all
from helpers.requests import reference as said_alone
from helpers.tiny_models import tiny_model, unsupported_because
from helpers.waiting import until

import vmkv
from vmkv import ConfigError, ExtentPool, HostBackend
from vmkv.core.cache import block_files
from vmkv.core.memory.slab_files import SlabFile
from vmkv.serve.engine import Engine
from vmkv.serve.metrics import Metrics
from vmkv.serve.options import EngineOptions
from vmkv.serve.parallel.engine import checked_options
from vmkv.serve.params import SamplingParams
from vmkv.serve.request import RequestHandle, RequestState
from vmkv.units import KiB, MiB

MakeEngine = Callable[..., Engine]
LONG = [1 + at * 7 % 90 for at in range(70)]
OTHER = [3 + at * 5 % 80 for at in range(20)]
NUM_CACHED = 64


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test depends on the speed of this machine."""
    monkeypatch.setattr(block_files, "_SAVE_S", 60.0)


@pytest.fixture
def open_engine(make_engine: MakeEngine, tmp_path: Path) -> MakeEngine:
    """Make engines over one folder; the next one after `close` of the last."""

    def make(name: object = "llama", **options: object) -> Engine:
        disk = {"disk_folder": tmp_path / "files", "disk_budget_bytes": 8 * MiB}
        return make_engine(name, **{"host_budget_bytes": 8 * MiB, **disk, **options})

    return make


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Event:
    """Reading waits until this is set."""
    held, read = Event(), SlabFile.read

    def wait(*args: object) -> bool:
        held.wait(60.0)
        return read(*args)

    monkeypatch.setattr(SlabFile, "read", wait)
    return held


def _greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens)


def _restarted(open_engine: MakeEngine, name: str = "llama", **options: object) -> Engine:
    """An engine whose predecessor has answered a long prompt."""
    before = open_engine(name, **options)
    before.generate([LONG], _greedy(1))
    before.close()
    return open_engine(name, **options)


def _check(handle: RequestHandle, prompt: list[int], num_tokens: int, name: str = "llama") -> None:
    [request] = handle.requests
    assert said_alone(prompt, num_tokens, name) == list(request.output_token_ids)


def _read_bytes(engine: Engine) -> int:
    return engine.cache.stats().below["files"].loaded_bytes


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next"])
def test_a_restarted_engine_finds_conversations(open_engine: MakeEngine, name: str) -> None:
    if because := unsupported_because(name):
        pytest.skip(because)
    engine = _restarted(open_engine, name)
    late = engine.add(LONG, _greedy(5))
    finish_all(engine)
    _check(late, LONG, 5, name)
    assert late.requests[0].num_cached_tokens >= 48
    assert _read_bytes(engine) > 0
    engine.cache.check()


def test_fp8_rows_come_back(open_engine: MakeEngine) -> None:
    """What they answer is what they answer from memory; rows of sixteen bits are others."""
    engine = _restarted(open_engine, kv_dtype="fp8")
    late = engine.generate([LONG], _greedy(5))[0]
    assert _read_bytes(engine) > 0
    assert late.outputs[0].token_ids == engine.generate([LONG], _greedy(5))[0].outputs[0].token_ids
    engine.close()
    other = open_engine()
    assert not other.cache.host_blocks.files.places.blocks


def test_others_run_while_a_prefix_is_read(open_engine: MakeEngine, held: Event) -> None:
    engine = _restarted(open_engine)
    running = engine.add(OTHER, _greedy(40))
    late = engine.add(LONG, _greedy(5))
    for _ in range(10):
        engine.step()
    assert late.requests[0].state is RequestState.WAITING
    assert len(running.requests[0].output_token_ids) > 5
    held.set()
    finish_all(engine)
    _check(running, OTHER, 40)
    _check(late, LONG, 5)
    assert NUM_CACHED == late.requests[0].num_cached_tokens


def test_two_requests_with_one_prefix_read_it_once(open_engine: MakeEngine, held: Event) -> None:
    engine = _restarted(open_engine)
    late = [engine.add(LONG, _greedy(5)), engine.add([*LONG, 9, 8], _greedy(5))]
    engine.step()
    engine.step()
    held.set()
    finish_all(engine)
    _check(late[0], LONG, 5)
    _check(late[1], [*LONG, 9, 8], 5)
    assert sum(group.bytes_for(NUM_CACHED) for group in engine.cache.groups) == _read_bytes(engine)


def test_a_request_is_cancelled_while_its_prefix_is_read(
    open_engine: MakeEngine, held: Event
) -> None:
    engine = _restarted(open_engine)
    running = engine.add(OTHER, _greedy(20))
    late = engine.add(LONG, _greedy(5))
    engine.step()
    engine.cancel(late)
    engine.cache.check()
    held.set()
    finish_all(engine)
    _check(running, OTHER, 20)
    again = engine.add(LONG, _greedy(5))
    finish_all(engine)
    _check(again, LONG, 5)
    engine.cache.check()


def test_tenants_do_not_find_each_others_files(open_engine: MakeEngine) -> None:
    before = open_engine()
    before.generate([LONG], _greedy(1), tenant="a")
    before.close()
    engine = open_engine()
    found = [engine.add(LONG, _greedy(5), tenant=each) for each in ("b", None, "a")]
    finish_all(engine)
    assert [0, 0, NUM_CACHED] == [each.requests[0].num_cached_tokens for each in found]


def test_an_idle_engine_writes_what_rows_hold(open_engine: MakeEngine) -> None:
    """Without a shortage, and without being closed."""
    engine = open_engine()
    engine.generate([LONG], _greedy(1))
    until(lambda: engine.cache.stats().sharing.written_bytes > 0)


def test_other_weights_find_nothing(open_engine: MakeEngine) -> None:
    """One value of one weight is enough."""
    _restarted(open_engine).close()
    model = copy.deepcopy(model_named("llama"))
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight[0, 0] += 1e-3
    engine = open_engine(model)
    assert not engine.cache.host_blocks.files.places.blocks


@pytest.mark.parametrize("trains", [False, True])
def test_changed_weights_forget_files(open_engine: MakeEngine, trains: bool) -> None:
    """Also where no row holds a prefix; pausing alone forgets nothing."""
    engine = open_engine()
    engine.generate([LONG], _greedy(1))
    engine.cache.host_blocks.save()
    engine.cache.trim()
    with engine.paused():
        if trains:
            with torch.no_grad():
                engine._turns.model.model.layers[0].self_attn.k_proj.weight.mul_(2)
    late = engine.add(LONG, _greedy(1))
    finish_all(engine)
    assert (0 if trains else NUM_CACHED) == late.requests[0].num_cached_tokens


def test_files_outlive_sleep(open_engine: MakeEngine) -> None:
    engine = open_engine()
    engine.generate([LONG], _greedy(1))
    engine.cache.host_blocks.save()
    engine.sleep()
    late = engine.add(LONG, _greedy(5))
    finish_all(engine)
    _check(late, LONG, 5)
    assert NUM_CACHED == late.requests[0].num_cached_tokens
    assert _read_bytes(engine) > 0


def test_two_engines_over_one_pool(make_engine: MakeEngine, tmp_path: Path) -> None:
    """Each has a folder of its own. The first one takes the host memory."""
    pool = ExtentPool(HostBackend(4 * KiB), 16 * MiB, host_budget_bytes=4 * MiB)
    for _ in range(2):
        engines = [
            make_engine(pool=pool, disk_folder=tmp_path / each, disk_budget_bytes=8 * MiB)
            for each in ("a", "b")
        ]
        late = [engine.add(prompt, _greedy(5)) for engine in engines for prompt in (LONG, OTHER)]
        for engine in engines:
            finish_all(engine)
        for handle, prompt in zip(late, [LONG, OTHER] * 2, strict=True):
            _check(handle, prompt, 5)
        for engine in engines:
            engine.cache.check()
            engine.close()
    assert [NUM_CACHED, 16] == [each.requests[0].num_cached_tokens for each in late[:2]]


def test_metrics_of_tiers(open_engine: MakeEngine) -> None:
    metrics = Metrics()
    engine = _restarted(open_engine)
    engine._observer = engine.loop._observer = metrics
    engine.generate([LONG], _greedy(5))
    metrics._look(engine.cache)
    text = metrics.text().decode()
    assert 'vmkv_tier_loads_total{tier="files"} 1.0' in text
    assert 'vmkv_tier_loads_total{tier="host"} 1.0' in text
    assert 'vmkv_tier_failed{tier="files"} 0.0' in text


def test_mistakes(open_engine: MakeEngine, make_engine: MakeEngine, tmp_path: Path) -> None:
    first = open_engine()
    with pytest.raises(ConfigError, match="in use by another engine"):
        open_engine()
    with pytest.raises(ConfigError, match="needs host_budget_bytes"):
        open_engine(host_budget_bytes=0)
    with pytest.raises(ConfigError, match="go together"):
        EngineOptions(disk_folder="files")
    with pytest.raises(ConfigError, match="disk_budget_bytes=1 holds no file"):
        open_engine(disk_folder=tmp_path / "others", disk_budget_bytes=1)
    with pytest.raises(ConfigError, match="lockstep"):
        checked_options({"disk_folder": "files", "disk_budget_bytes": 1})
    (tmp_path / "a file").write_text("")
    with pytest.raises(ConfigError, match="cannot hold files"):
        open_engine(disk_folder=tmp_path / "a file")
    first.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"host_budget_bytes": "8GiB"},
        {"host_budget_bytes": -1},
        {"disk_budget_bytes": 1e8},
        {"disk_budget_bytes": True},
        {"disk_budget_bytes": None},
        {"disk_folder": 3},
        {"disk_folder": ""},
        {"disk_folder": b"files"},
        {"disk_folder": "a\0b"},
    ],
    ids=str,
)
def test_options_of_other_types_are_refused(wrong: dict[str, Any]) -> None:
    """At once, by the names of the options."""
    [(name, _)] = wrong.items()
    its = {"host_budget_bytes": MiB, "disk_folder": "files", "disk_budget_bytes": 8 * MiB, **wrong}
    with pytest.raises(ConfigError, match=f"{name}=.* must be"):
        EngineOptions(**its)
    with pytest.raises(ConfigError, match=f"{name}=.* must be"):
        vmkv.RaggedCache(tiny_model("llama").config, **its)


_UNCLOSED = """
import sys
sys.path.insert(0, {tests!r})
import vmkv
from helpers.tiny_models import tiny_model
its = {{"budget_bytes": 16 << 20, "host_budget_bytes": 64 << 20, "disk_budget_bytes": 64 << 20}}
cache = vmkv.RaggedCache(tiny_model("llama").config, disk_folder={folders!r} + "/a", **its)
print(vmkv.generate(tiny_model("llama"), [[*range(60)]], max_new_tokens=3, cache=cache))
engine = vmkv.Engine(tiny_model("llama"), disk_folder={folders!r} + "/b", **its)
print(engine.generate([[*range(60)]]))
"""


def test_a_script_may_end_without_closing(tmp_path: Path) -> None:
    """Threads that keep blocks, and contexts of the model, end with the interpreter in silence."""
    script = _UNCLOSED.format(tests=str(Path(__file__).parents[1]), folders=str(tmp_path))
    command = [sys.executable, "-c", script]  # Not from a warm process, which ends otherwise.
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (0, "") == (ended.returncode, ended.stderr)
