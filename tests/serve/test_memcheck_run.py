"""The program for the memory checker uses every operation on memory."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


@pytest.mark.slow
def test_every_operation_on_memory_happens() -> None:
    path = Path(__file__).with_name("engine_under_memcheck.py")
    spec = importlib.util.spec_from_file_location("engine_under_memcheck", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    happened = module.main("cpu")
    assert all(happened.values()), happened
