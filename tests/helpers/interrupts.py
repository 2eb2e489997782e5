"""SIGINT at a chosen bytecode offset: the signal itself, not an exception in its place.

Python runs a signal's handler between two instructions. Here the signal is raised while an
instruction is traced, so the handler runs there and its exception appears in the traced code.
"""

from __future__ import annotations

import gc
import itertools
import os
import signal
import sys
import zlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import vmkv

ROOT = Path(vmkv.__file__).parent
#: The code that changes the books.
BOOKS = (str(ROOT / "core"),)
assert all(Path(each).exists() for each in BOOKS)  # Otherwise no code would be interrupted.
#: Distance of the tested offsets. With 1 an operation takes minutes: raise the time limit too.
STRIDE = int(os.environ.get("VMKV_INTERRUPT_STRIDE", "997"))


def offsets(name: str) -> Iterator[int]:
    """The offsets to test in the operation `name`; the first depends on the name."""
    return itertools.count(zlib.crc32(name.encode()) % STRIDE, STRIDE)


def interrupted(
    function: Callable[[], object],
    at: int,
    *,
    skipped_calls: int | None = None,
    names: Collection[str] = (),
) -> tuple[bool, bool]:
    """Call `function`, with one SIGINT before the `at`-th bytecode of this package.

    No garbage is collected meanwhile: an exception in the `__del__` of an earlier test's object is
    lost, and its bytecodes are none of the operation's.

    Args:
        function: The function to call.
        at: Number of the bytecode, counted from 0.
        skipped_calls: Count the executed bytecodes after this number of calls, in the whole
            package. By default count every offset of a function under `BOOKS` once.
        names: Count only bytecodes of functions with these names, in the whole package.

    Returns:
        Whether SIGINT was sent, and whether the call was interrupted.
    """
    seen: set[tuple[CodeType, int]] = set()
    under = BOOKS if skipped_calls is None and not names else (str(ROOT),)
    num_calls, num_left, is_sent = skipped_calls or 0, at, False

    def is_counted(code: CodeType) -> bool:
        return code.co_filename.startswith(under) and (not names or code.co_name in names)

    def trace_opcode(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal num_left, is_sent
        if event == "opcode" and not is_sent:
            if skipped_calls is None:
                place = frame.f_code, frame.f_lasti
                if place in seen:
                    return trace_opcode
                seen.add(place)
            if not num_left:
                is_sent = True
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
            num_left -= 1
        return trace_opcode

    def trace_call(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal num_calls
        if is_sent or not is_counted(frame.f_code):
            return None
        num_calls -= 1
        if num_calls >= 0:
            return None
        caller: FrameType | None = frame
        # Trace the callers after this call returns.
        while caller is not None and caller.f_trace is None:
            if is_counted(caller.f_code):
                caller.f_trace, caller.f_trace_opcodes = trace_opcode, True
            caller = caller.f_back
        return trace_opcode

    before, handler = sys.gettrace(), signal.signal(signal.SIGINT, signal.default_int_handler)
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        sys.settrace(trace_call)
        function()
        return is_sent, False
    except KeyboardInterrupt as interrupt:
        interrupt.__traceback__ = None  # Its frames hold views of caches.
        return is_sent, True
    finally:
        sys.settrace(before)
        if is_collecting:
            gc.enable()
        its = signal.signal(signal.SIGINT, handler)
        assert its is signal.default_int_handler
