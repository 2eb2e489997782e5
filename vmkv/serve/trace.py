"""Trace of every step, for `chrome://tracing` or ui.perfetto.dev.

    engine = Engine(model, observer=ChromeTrace("steps.json"))

The file is Chrome's JSON array format, written as steps happen. The closing bracket is optional, so
the trace of a killed process opens as well.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from pathlib import Path
from typing import IO, Any

from ..errors import ConfigError
from ..units import GiB, format_bytes
from .observer import Event, ObservedCache, RequestRecord, StepRecord

_log = logging.getLogger(__name__)
_STEPS_TRACK = 1
#: Interval of memory samples, which with many rows cost more than all other events.
_SAMPLE_INTERVAL_S = 0.1
#: A JSON array may not end in a comma, so the last event is an empty one.
_END = '{"ph":"M","name":"process_sort_index","args":{}}\n]\n'


class ChromeTrace:
    """Observer that writes steps, requests and memory as trace events.

    A write error, such as a full disk, ends the trace with a warning; the engine goes on.

    Args:
        path: File to write; replaced if it exists.
        max_bytes: Size at which the trace ends, with a valid file.

    Raises:
        ConfigError: The file cannot be opened for writing.

    Cost: about 60 µs per step, in the engine's thread.
    """

    def __init__(self, path: str | Path, *, max_bytes: int = GiB):
        self.path = Path(path)
        self._max_bytes = max_bytes
        self._pid = os.getpid()
        self._num_bytes = 0
        self._sampled_s = float("-inf")
        try:
            # A buffer of one line: the trace of a killed process has all its events.
            self._file: IO[str] | None = self.path.open("w", buffering=1, encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"cannot write a trace to {self.path}: {error.strerror or error}; name a file in a "
                "folder that exists and is writable"
            ) from error
        self._put("[\n")
        self._write("M", "process_name", args={"name": "vmkv engine"})
        self._write("M", "thread_name", tid=_STEPS_TRACK, args={"name": "steps"})

    # ---- observing ------------------------------------------------------------------------

    def on(self, event: Event, cache: ObservedCache) -> None:
        """Draw a request or a step."""
        if isinstance(event, StepRecord):
            self._draw_step(event, cache)
        elif isinstance(event, RequestRecord):
            self._draw_request(event)

    def _draw_request(self, request: RequestRecord) -> None:
        names = ("prompt_tokens", "cached_tokens", "output_tokens")
        arguments: dict[str, Any] = {name: getattr(request, f"num_{name}") for name in names}
        arguments["finish_reason"] = request.finish_reason
        for name, start_s, end_s, args in (
            ("request", request.arrival_s, request.end_s, arguments),
            ("queued", request.arrival_s, request.start_s, {}),
            ("prefill", request.start_s, request.first_token_s, {}),
            ("decode", request.first_token_s, request.end_s, {}),
        ):
            if start_s is not None and end_s is not None:
                common = {"cat": "request", "id": request.request_id}
                self._write("b", name, ts=_us(start_s), args=args, **common)
                self._write("e", name, ts=_us(end_s), **common)

    def _draw_step(self, step: StepRecord, cache: ObservedCache) -> None:
        at_s = start_s = step.start_s
        tokens = {"prefill": step.num_prefill_tokens, "decode": step.num_decode_tokens}
        arguments = {f"{name}_tokens": number for name, number in tokens.items()}
        arguments |= {"swapped": step.num_swapped, "recomputed": step.num_recomputed}
        self._bar("step", start_s, step.total_s, args=arguments)
        for name in ("plan", "map", "submit", "wait"):
            part_s = getattr(step, f"{name}_s")
            self._bar(name, at_s, part_s)
            at_s += part_s
        self._write("C", "tokens", ts=_us(start_s), args=tokens)
        queue = {"running": step.num_running, "waiting": step.num_waiting}
        self._write("C", "requests", ts=_us(start_s), args=queue)
        if start_s - self._sampled_s >= _SAMPLE_INTERVAL_S:
            self._sampled_s, stats = start_s, cache.stats()
            states = ("used", "resident", "parked", "shared")
            sizes = {state: getattr(stats, f"{state}_bytes") for state in states}
            self._write("C", "memory_bytes", ts=_us(at_s), args=sizes)

    # ---- writing --------------------------------------------------------------------------

    def close(self) -> None:
        """Complete the array and close the file. Idempotent."""
        self._put(_END)
        self._close_file()

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()

    def _bar(self, name: str, start_s: float, part_s: float, **fields: Any) -> None:
        self._write("X", name, tid=_STEPS_TRACK, ts=_us(start_s), dur=_us(part_s), **fields)

    def _write(self, phase: str, name: str, **fields: Any) -> None:
        event = {"pid": self._pid, "ph": phase, "name": name, **fields}
        self._put(json.dumps(event, separators=(",", ":")) + ",\n")
        if self._file is not None and self._num_bytes >= self._max_bytes:
            self.close()
            _log.warning(
                "the trace %s has reached %s and ends here; the engine goes on",
                self.path,
                format_bytes(self._max_bytes),
            )

    def _put(self, text: str) -> None:
        try:
            self._num_bytes += 0 if self._file is None else self._file.write(text)
        except OSError as error:
            self._close_file()
            _log.warning("the trace %s ends early: %s; the engine goes on", self.path, error)


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
