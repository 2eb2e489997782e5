"""Fixtures for every test: the backends, and a Python of its own for tests that must crash.

Helpers that tests import live in `tests/helpers`; nothing is imported from here.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from vmkv import Backend, BackendUsage, HostBackend, open_backend
from vmkv.units import KiB, MiB

# Pytest rewrites 30,000 lines of tests, for longer than it collects them, unless it may keep that.
sys.dont_write_bytecode = False

# What every submitted step writes is checked in every test.
os.environ["VMKV_CHECKS"] = "1"

# Every run of `ci` tries the same examples, so that a failure is the change's and not the day's.
settings.register_profile(
    "ci",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=40,
    stateful_step_count=30,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "nightly", settings.get_profile("ci"), derandomize=False, max_examples=2000, print_blob=True
)
settings.load_profile(os.environ.get("VMKV_HYPOTHESIS_PROFILE", "ci"))

_MAKE_BACKEND: dict[str, Callable[[], Backend]] = {
    "host-64KiB": lambda: HostBackend(64 * KiB),
    "host-2MiB": lambda: HostBackend(2 * MiB),
    "cuda": lambda: open_backend("cuda:0"),
}


@functools.cache
def _has_gpu() -> bool:
    # Up to `memory` nothing needs torch, and its tests run where it is not installed.
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.device_count() > 0


def pytest_configure(config: pytest.Config) -> None:
    """Have files given to processes in the order of the tests, which is made below."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with what takes long, and skip what needs a GPU where there is none."""
    if hasattr(config, "workerinput"):
        _put_slow_files_first(items)
    if _has_gpu():
        return
    needs_gpu = pytest.mark.skip(reason="this machine has no NVIDIA GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(needs_gpu)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect tests without the collector: a quarter of the time, for a million objects in use."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _put_slow_files_first(items: list[pytest.Item]) -> None:
    """Of processes that share the tests file by file none shall wait for another's last file.

    Left alone, those with the fewest tests come last, some of which take longest.
    """
    num_tests = Counter(item.path for item in items)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path not in slow, -num_tests[item.path], item.path))


@pytest.fixture(autouse=True)
def same_chances() -> None:
    """What a test draws without a seed of its own is the same every time."""
    random.seed(0)
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        # Where there is none, `manual_seed` keeps for a GPU by whom it was called: a millisecond.
        seed = torch.manual_seed if _has_gpu() else torch.default_generator.manual_seed
        seed(0)


@pytest.fixture(scope="session", autouse=True)
def collected_in_the_end() -> Iterator[None]:
    """What the fixture below keeps out of the collector's sight is in it again at the end."""
    yield
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def cheap_collections() -> None:
    """Keep what was there before a file out of the collector's sight: many tests collect.

    Before each file and not once: compilers, servers and what else the files before have imported
    are a million objects, and each collection of a test would take a third of a second.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def warm_children() -> Iterator[None]:
    """Child processes are forked where they would be spawned, which takes seconds for each.

    Those that `vmkv serve` spawns are tested in tests/cli/test_serve.py.
    """
    from helpers.warm_python import warm_children

    with warm_children():
        yield


@pytest.fixture(params=["host-64KiB", "host-2MiB", pytest.param("cuda", marks=pytest.mark.gpu)])
def make_backend(request: pytest.FixtureRequest) -> Callable[[], Backend]:
    """Opens a backend; a test that asks for it runs once for each kind."""
    return _MAKE_BACKEND[request.param]


@pytest.fixture
def backend(make_backend: Callable[[], Backend]) -> Iterator[Backend]:
    """A backend of each kind, which the test leaves empty."""
    backend = make_backend()
    yield backend
    usage = backend.usage()
    backend.close()
    assert BackendUsage() == usage, "the test left something behind"


@pytest.fixture
def host() -> Iterator[HostBackend]:
    """A host backend with the smallest pages, which the test leaves empty."""
    backend = HostBackend(4 * KiB)
    yield backend
    usage = backend.usage()
    backend.close()
    assert BackendUsage() == usage, "the test left something behind"


# The package without its front door, which imports torch: a child starts in 0.1 s and proves by
# the way that `backend` and `memory` need no torch.
_PRELUDE = """
import sys, types
package = types.ModuleType("vmkv")
package.__path__ = [{path!r}]
sys.modules["vmkv"] = package
"""


@pytest.fixture
def run_python() -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Runs a script in a fresh interpreter with vmkv's torch-free part; for what may crash."""
    path = str(Path(__file__).parents[1] / "vmkv")

    def run(script: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", _PRELUDE.format(path=path) + script],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run
