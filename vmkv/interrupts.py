"""Hold SIGINT back while the books change, so that Ctrl+C comes between operations.

Python runs the handler of SIGINT, which raises KeyboardInterrupt, between any two instructions of
the main thread. No order of writes makes an operation of several steps safe against that, its
error handling included. So every public operation that changes the books is `uninterrupted`: a
handler that only takes a note is installed for its duration, and what was noted is delivered to
the previous handler at its end. A handler that raises nothing, such as a server's, runs as late.

Only the main thread runs handlers: elsewhere this does nothing. See Note [Interrupts] in DESIGN.md.
"""

from __future__ import annotations

# `signal.signal` takes 5 µs to look its arguments up in enumerations, and is this otherwise.
import _signal  # type: ignore[import-not-found]
import functools
from collections.abc import Callable
from threading import get_ident, main_thread
from types import FrameType
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")
_SIGINT = _signal.SIGINT


class _Section:
    """An uninterrupted operation of the main thread.

    Args:
        previous: The handler that was installed before.

    Attributes:
        is_pending: Whether SIGINT has come, and the previous handler has not been called.
        is_open: Whether the previous handler is called at once.
    """

    __slots__ = ("is_open", "is_pending", "previous")

    def __init__(self, previous: Callable[[int, FrameType | None], object]):
        self.previous = previous
        self.is_pending = self.is_open = False

    def note(self, number: int, frame: FrameType | None) -> None:
        """The handler of SIGINT."""
        global _current
        if not self.is_open:
            self.is_pending = True
            return
        # First: the previous handler raises, and what runs then must not be interrupted again.
        self.is_open, _current = False, self
        self.previous(number, frame)
        self.is_open, _current = True, None

    def deliver(self) -> None:
        """Call the previous handler if SIGINT has come."""
        if self.is_pending:
            self.is_pending = False
            self.previous(_SIGINT, None)


#: The section that holds SIGINT back now.
_current: _Section | None = None


def uninterrupted(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Hold SIGINT back while `function` runs; it is delivered when it returns or raises.

    A `function` that runs within another one has nothing to do. A resource that was made for a
    caller who is interrupted, and so never gets it, is closed.

    Cost: about 1 µs, within another one 0.1 µs.
    """

    @functools.wraps(function)
    def held(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        global _current
        if _current is not None or get_ident() != main_thread().ident:
            return function(*args, **kwargs)
        previous = _signal.getsignal(_SIGINT)
        if not callable(previous):  # Ignored, or the end of the process.
            return function(*args, **kwargs)
        section, result = _Section(previous), None
        note = section.note
        _signal.signal(_SIGINT, note)
        try:
            _current = section
            result = function(*args, **kwargs)
            return result
        finally:
            _current = None
            if _signal.getsignal(_SIGINT) == note:
                _signal.signal(_SIGINT, previous)
            try:
                section.deliver()
            except BaseException:
                if result is not None and hasattr(result, "close"):
                    result.close()
                raise

    return held


def interruptible(function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Call a function that may take long, and that may be interrupted, within an uninterrupted one.

    SIGINT that has come already is delivered first.
    """
    global _current
    section = _current
    if section is None or get_ident() != main_thread().ident:
        return function(*args, **kwargs)
    try:
        section.is_open, _current = True, None
        section.deliver()
        return function(*args, **kwargs)
    finally:
        section.is_open, _current = False, section
