"""Phases of a start: loading, compiling, capturing. Logged at info by the logger `vmkv.phases`."""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Iterator

_LOG = logging.getLogger(__name__)


@contextlib.contextmanager
def phase(what: str) -> Iterator[None]:
    """Log `what` now, and at its end a record with the attributes `phase` and `phase_s`."""
    _LOG.info("%s", what)
    with part(what):
        yield


@contextlib.contextmanager
def part(what: str) -> Iterator[None]:
    """Log only the end, as `phase` does; for repeated work, and parts of a phase."""
    start_s = time.monotonic()
    yield
    seconds = time.monotonic() - start_s
    _LOG.info("%s took %.1f s", what, seconds, extra={"phase": what, "phase_s": seconds})


@contextlib.contextmanager
def without_collections(*, freezes: bool = True) -> Iterator[None]:
    """Context without garbage collection, which takes a fifth of the time of imports.

    It would visit objects that are made by the million again and again. With `freezes`, objects
    that live at its end are excluded from later collections.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        if freezes:
            gc.freeze()
    finally:
        if was_enabled:
            gc.enable()
