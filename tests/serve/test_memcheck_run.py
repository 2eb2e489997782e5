"""What is run under a memory checker does what it is run for."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


@pytest.mark.slow
def test_all_that_moves_memory_happens() -> None:
    path = Path(__file__).with_name("engine_under_memcheck.py")
    spec = importlib.util.spec_from_file_location("engine_under_memcheck", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    happened = module.main("cpu")
    assert all(happened.values()), happened
