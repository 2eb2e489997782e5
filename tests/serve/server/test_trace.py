"""A trace opens in a browser, also if its process ended early or could not write it all."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from helpers.serving import tiny_llama, tiny_tokenizer

from vmkv import ConfigError
from vmkv.serve.engine import Engine
from vmkv.serve.params import SamplingParams
from vmkv.serve.trace import ChromeTrace
from vmkv.units import MiB


def run_engine(trace: ChromeTrace, num_requests: int = 3) -> None:
    """Run some requests on an engine with this trace."""
    engine = Engine(
        tiny_llama(),
        tokenizer=tiny_tokenizer(),
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_tokens=256,
        budget_bytes=16 * MiB,
        observer=trace,
    )
    try:
        engine.generate(
            [[5 + number, 6, 7] for number in range(num_requests)],
            SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
        )
    finally:
        engine.close()


def test_a_trace_has_steps_requests_and_memory(tmp_path: Path) -> None:
    trace = ChromeTrace(tmp_path / "trace.json")
    run_engine(trace)
    trace.close()
    events = json.loads((tmp_path / "trace.json").read_text())
    steps = [each for each in events if each["ph"] == "X" and each["name"] == "step"]
    assert len(steps) >= 6
    for step in steps:
        inside = [
            each
            for each in events
            if each["ph"] == "X"
            and each["name"] in ("plan", "map", "submit", "wait")
            and step["ts"] <= each["ts"] <= step["ts"] + step["dur"] + 0.01
        ]
        assert len(inside) >= 4
    assert 9 == sum(step["args"]["prefill_tokens"] for step in steps)
    begun = [each for each in events if each["ph"] == "b" and each["name"] == "request"]
    assert 3 == len(begun)
    assert all(each["args"]["output_tokens"] == 6 for each in begun)
    ends = [each for each in events if each["ph"] == "e"]
    assert len(ends) == len([each for each in events if each["ph"] == "b"])
    assert [each for each in events if each["ph"] == "C" and each["name"] == "memory_bytes"]


def test_an_unfinished_trace_is_readable(tmp_path: Path) -> None:
    """The file is a JSON array without its closing bracket, which the format allows."""
    trace = ChromeTrace(tmp_path / "trace.json")
    run_engine(trace)
    text = (tmp_path / "trace.json").read_text()
    assert len(json.loads(text.rstrip().rstrip(",") + "]")) > 10
    trace.close()
    trace.close()


def test_a_trace_ends_at_max_bytes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The file is complete then, and the engine continues."""
    trace = ChromeTrace(tmp_path / "trace.json", max_bytes=2000)
    with caplog.at_level(logging.WARNING):
        run_engine(trace)
    assert "has reached 1.953 KiB and ends here" in caplog.text
    json.loads((tmp_path / "trace.json").read_text())
    assert (tmp_path / "trace.json").stat().st_size < 3000
    trace.close()


def test_a_full_disk_ends_the_trace_but_not_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    trace = ChromeTrace("/dev/full")
    with caplog.at_level(logging.WARNING):
        run_engine(trace, num_requests=40)
        trace.close()
    assert "ends early" in caplog.text
    assert "No space left" in caplog.text


def test_a_trace_in_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write a trace to"):
        ChromeTrace(tmp_path / "nowhere" / "trace.json")
