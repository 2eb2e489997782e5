"""Writes the phases of a starting server to stderr, as lines."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TypeVar

HandlerT = TypeVar("HandlerT", bound=logging.Handler)


class Progress(logging.Handler):
    """Writes a line when a phase of the start begins, with the seconds since `began_s`.

    `began_s` is a `time.monotonic`, which all processes of a machine share. `summary` has the
    seconds of each phase that has ended.
    """

    def __init__(self, began_s: float):
        super().__init__(logging.INFO)
        self._began_s = began_s
        self._took_s: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Write the beginning of a phase, and note its end."""
        name = getattr(record, "phase", None)
        if name is None:
            self.write(record.getMessage())
        else:
            self._took_s[name] = self._took_s.get(name, 0.0) + getattr(record, "phase_s", 0.0)

    def write(self, text: str) -> None:
        """Write a line to stderr; a closed stderr is no error."""
        with contextlib.suppress(OSError, ValueError):
            if sys.stderr is not None:
                passed_s = time.monotonic() - self._began_s
                sys.stderr.write(f"[{passed_s:6.1f} s] {text}\n")
                sys.stderr.flush()

    def summary(self) -> str:
        """Return the ended phases with their seconds."""
        return ", ".join(f"{name} {took_s:.1f} s" for name, took_s in self._took_s.items())


@contextlib.contextmanager
def handling(name: str, handler: HandlerT) -> Iterator[HandlerT]:
    """Context in which a handler alone has the records of a logger, from info on."""
    log = logging.getLogger(name)
    before = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield handler
    finally:
        log.removeHandler(handler)
        log.setLevel(before[0])
        log.propagate = before[1]


def on_stderr(name: str) -> AbstractContextManager[logging.Handler]:
    """Context in which the records of a logger are shown on stderr with their time."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    return handling(name, handler)
