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
import threading
from pathlib import Path
from typing import IO, Any

from ..errors import ConfigError
from ..units import GiB, format_bytes
from .observer import Event, Idle, ObservedCache, RequestRecord, StepRecord

_log = logging.getLogger(__name__)
_STEPS_TRACK = 1
#: Interval of memory samples, which with many rows cost more than all other events.
_SAMPLE_INTERVAL_S = 0.1


class ChromeTrace:
    """Observer that writes steps, requests and memory as trace events.

    A write error, such as a full disk, ends the trace with a warning; the engine goes on.

    Args:
        path: File to write; replaced if it exists.
        max_bytes: Size at which the trace ends, with a valid file.

    Raises:
        ConfigError: The file cannot be opened for writing.

    Cost: about 20 µs per step, in the engine's thread.
    """

    def __init__(self, path: str | Path, *, max_bytes: int = GiB):
        self.path = Path(path)
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._num_bytes = 0
        self._sampled_s = float("-inf")
        try:
            self._file: IO[str] | None = self.path.open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"cannot write a trace to {self.path}: {error.strerror or error}; name a file in a "
                "folder that exists and is writable"
            ) from error
        self._put("[\n")
        self._write({"ph": "M", "name": "process_name", "args": {"name": "vmkv engine"}})
        self._write(
            {"ph": "M", "name": "thread_name", "tid": _STEPS_TRACK, "args": {"name": "steps"}}
        )

    # ---- observing ------------------------------------------------------------------------

    def on(self, event: Event, cache: ObservedCache) -> None:
        """Draw a request or a step; flush the file when the engine is idle."""
        if isinstance(event, StepRecord):
            self._draw_step(event, cache)
        elif isinstance(event, RequestRecord):
            self._draw_request(event)
        elif isinstance(event, Idle):
            with self._lock:
                if self._file is not None:
                    try:
                        self._file.flush()
                    except OSError as error:
                        self._give_up(error)

    def _draw_request(self, request: RequestRecord) -> None:
        """Draw the request as bars from its arrival to its end."""
        common = {"cat": "request", "id": request.request_id}
        bars = [("request", request.arrival_s, request.end_s)]
        if request.start_s is not None:
            bars.append(("queued", request.arrival_s, request.start_s))
            if request.first_token_s is not None:
                bars.append(("prefill", request.start_s, request.first_token_s))
                bars.append(("decode", request.first_token_s, request.end_s))
        for name, start_s, end_s in bars:
            arguments: dict[str, Any] = {}
            if name == "request":
                arguments = {
                    "prompt_tokens": request.num_prompt_tokens,
                    "cached_tokens": request.num_cached_tokens,
                    "output_tokens": request.num_output_tokens,
                    "finish_reason": request.finish_reason,
                }
            begin = {"ph": "b", "name": name, "ts": _us(start_s), "args": arguments}
            self._write(common | begin)
            self._write(common | {"ph": "e", "name": name, "ts": _us(end_s)})

    def _draw_step(self, step: StepRecord, cache: ObservedCache) -> None:
        """Draw the step's parts one after another, and its tokens and queue as curves."""
        arguments = {
            "prefill_tokens": step.num_prefill_tokens,
            "decode_tokens": step.num_decode_tokens,
            "swapped": step.num_swapped,
            "recomputed": step.num_recomputed,
        }
        self._bar("step", step.start_s, step.total_s, arguments)
        at_s = step.start_s
        for name, part_s in (
            ("plan", step.plan_s),
            ("map", step.map_s),
            ("submit", step.submit_s),
            ("make ready", step.ready_s),
            ("wait", step.wait_s),
        ):
            self._bar(name, at_s, part_s)
            at_s += part_s
        self._curve(
            "tokens",
            step.start_s,
            {"prefill": step.num_prefill_tokens, "decode": step.num_decode_tokens},
        )
        self._curve(
            "requests", step.start_s, {"running": step.num_running, "waiting": step.num_waiting}
        )
        if step.start_s - self._sampled_s >= _SAMPLE_INTERVAL_S:
            self._sampled_s = step.start_s
            stats = cache.stats()
            self._curve(
                "memory_bytes",
                at_s,
                {
                    "used": stats.used_bytes,
                    "resident": stats.resident_bytes,
                    "parked": stats.parked_bytes,
                    "shared": stats.shared_bytes,
                },
            )

    # ---- writing --------------------------------------------------------------------------

    def close(self) -> None:
        """Complete the array and close the file. Idempotent."""
        with self._lock:
            self._end()

    def _bar(
        self, name: str, start_s: float, part_s: float, arguments: dict[str, int] | None = None
    ) -> None:
        event: dict[str, Any] = {"ph": "X", "name": name, "tid": _STEPS_TRACK}
        event |= {"ts": _us(start_s), "dur": _us(part_s)}
        if arguments:
            event["args"] = arguments
        self._write(event)

    def _curve(self, name: str, at_s: float, values: dict[str, int]) -> None:
        self._write({"ph": "C", "name": name, "ts": _us(at_s), "args": values})

    def _write(self, event: dict[str, Any]) -> None:
        text = json.dumps({"pid": self._pid, **event}, separators=(",", ":"))
        with self._lock:
            self._put(text + ",\n")
            if self._file is not None and self._num_bytes >= self._max_bytes:
                self._end()
                _log.warning(
                    "the trace %s has reached %s and ends here; the engine goes on",
                    self.path,
                    format_bytes(self._max_bytes),
                )

    def _put(self, text: str) -> None:
        if self._file is None:
            return
        try:
            self._num_bytes += self._file.write(text)
        except OSError as error:
            self._give_up(error)

    def _end(self) -> None:
        if self._file is None:
            return
        # A JSON array may not end in a comma, so the last event is an empty one.
        last = {"pid": self._pid, "ph": "M", "name": "process_sort_index", "args": {}}
        self._put(json.dumps(last) + "\n]\n")
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()
        _log.warning("the trace %s ends early: %s; the engine goes on", self.path, error)


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
