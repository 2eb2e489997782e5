"""Fixtures for every test: the backends, and a fresh Python for tests that may crash.

Helpers that tests import are in `tests/helpers`; nothing is imported from here.
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

# Without bytecode files, pytest rewrites the assertions of 30,000 lines in every run.
sys.dont_write_bytecode = False

# Every test checks the writes of every submitted step.
os.environ["VMKV_CHECKS"] = "1"

# Every run of `ci` tries the same examples, so that a failure comes from the change.
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
    # Packages up to `core/memory` do not need torch, and their tests run without it.
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.device_count() > 0


def pytest_configure(config: pytest.Config) -> None:
    """Let xdist distribute files in the order of the tests, which `_put_slow_files_first` sets."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put slow files first, and skip tests that need a GPU on a machine without one."""
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
    """Collect tests without garbage collection, in a quarter of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _put_slow_files_first(items: list[pytest.Item]) -> None:
    """Sort files so that parallel pytest processes finish at about the same time.

    By default, files with few tests run last, and some of those files take longest.
    """
    num_tests = Counter(item.path for item in items)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path not in slow, -num_tests[item.path], item.path))


@pytest.fixture(autouse=True)
def same_chances() -> None:
    """Seed the random generators before each test."""
    random.seed(0)
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        # Without a GPU, `torch.manual_seed` records a stack trace, which takes a millisecond.
        seed = torch.manual_seed if _has_gpu() else torch.default_generator.manual_seed
        seed(0)


@pytest.fixture(scope="session", autouse=True)
def own_kept_files(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep compiled kernels and measured sizes for this run only, its child processes included."""
    os.environ["VMKV_CACHE_DIR"] = str(tmp_path_factory.mktemp("kept"))


@pytest.fixture(scope="session", autouse=True)
def collected_in_the_end() -> Iterator[None]:
    """Undo `gc.freeze` at the end of the session."""
    yield
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def cheap_collections() -> None:
    """Freeze all existing objects before each file, because many tests call `gc.collect`.

    The modules that earlier files imported are a million objects; without the freeze, each
    collection in a test would take a third of a second.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def warm_children() -> Iterator[None]:
    """Fork child processes from a warm Python instead of spawning them, which takes seconds.

    tests/cli/test_serve.py tests the processes that `vmkv serve` spawns.
    """
    from helpers.warm_python import warm_children

    with warm_children():
        yield


@pytest.fixture(params=["host-64KiB", "host-2MiB", pytest.param("cuda", marks=pytest.mark.gpu)])
def make_backend(request: pytest.FixtureRequest) -> Callable[[], Backend]:
    """Open a backend; a test with this fixture runs once for each kind of backend."""
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


# An empty `vmkv` package instead of `vmkv/__init__.py`, which imports torch: a child starts in
# 0.1 s, and its imports of `backend` and `memory` fail if they need torch.
_PRELUDE = """
import sys, types
package = types.ModuleType("vmkv")
package.__path__ = [{path!r}]
sys.modules["vmkv"] = package
"""


@pytest.fixture
def run_python() -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Run a script that may crash in a fresh interpreter with vmkv's torch-free part."""
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
