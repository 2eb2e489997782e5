"""Compiles grammars of clients on trial, in a process that can be ended, before the engine does.

llguidance's limits do not bound a compilation: two `multipleOf` in an `allOf` compile for ever, and
take memory meanwhile. So a grammar is compiled, and the beginning of an answer drawn, in a process
with limits on processor time and memory. Needs no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..units import MiB

if TYPE_CHECKING:
    import llguidance

#: Processor time of a compilation, and then of the first tokens of an answer.
TRIAL_S = 0.5
_NUM_TOKENS = 128
#: Memory of a trial, beyond that of the process that it is forked from.
_TRIAL_BYTES = 512 * MiB
#: Longest wait for a verdict, on a machine that is busy with other processes.
_VERDICT_S = 60.0
_VERDICTS_MAX = 256
_TOO_MUCH = (
    f"it takes more than {TRIAL_S:g} s of processor time to compile, or to begin an answer, or "
    f"more than {_TRIAL_BYTES // MiB} MiB: send a smaller or less ambiguous one"
)


def limits() -> llguidance.LLParserLimits:
    """Return the limits of every matcher, in a trial and in the engine."""
    from llguidance import LLParserLimits

    # A mask of an object with 500 optional properties, the most that fit, counts 5,000 items.
    return LLParserLimits(verbose_errors=False, step_max_items=5000)


def compiled(
    vocabulary: llguidance.LLTokenizer, grammar: str, unforced: str
) -> llguidance.LLMatcher | str:
    """Compile `unforced`; returns the error's text for what is wrong, in terms of `grammar`."""
    from llguidance import LLMatcher

    matcher = LLMatcher(vocabulary, unforced, log_level=0, limits=limits())
    # The first mask shows a grammar without an output, and is kept with the lexer's states.
    if not matcher.is_error():
        matcher.compute_bitmask()
        return "no output satisfies the grammar" if matcher.is_error() else matcher
    told = LLMatcher(vocabulary, grammar, log_level=0, limits=limits())  # In the caller's words.
    return str(told.get_error() or matcher.get_error())


class GrammarTrials:
    """Trials for one vocabulary, by default of bytes. From any thread, one trial at a time.

    `text` and `options` are the arguments of `LLTokenizer`. The process starts with the first
    trial, is restarted if it has ended, and ends with this one, however that ends. `verdicts`
    are the reasons of the last refusals, empty for none, by what was asked.
    """

    def __init__(self, text: str = "byte", options: Mapping[str, Any] | None = None):
        self._text, self._options = text, options or {}
        self._lock = threading.Lock()
        self._process: Any = None
        self._is_closed = False
        self.verdicts: OrderedDict[Any, str] = OrderedDict()

    def judge(self, asked: Any, grammar: str, unforced: str) -> str:
        """Return why a grammar is refused; empty if it is not, perhaps by the engine later."""
        with self._lock:
            if asked not in self.verdicts:
                line = json.dumps([grammar, unforced]).encode() + b"\n"
                try:
                    told = self._ask(line)
                except (BrokenPipeError, EOFError):  # Somebody has ended the process.
                    self._end()
                    told = None if self._is_closed else self._ask(line)
                self.verdicts[asked] = _TOO_MUCH if told is None else told
            self.verdicts.move_to_end(asked)
            if len(self.verdicts) > _VERDICTS_MAX:
                self.verdicts.popitem(last=False)
            return self.verdicts[asked]

    def close(self) -> None:
        """End the process; a trial under way ends with a refusal."""
        self._is_closed = True
        self._end()

    def _ask(self, line: bytes) -> str | None:
        process = self._process = self._process or self._start()
        process.stdin.write(line)
        process.stdin.flush()
        poll = select.poll()
        poll.register(process.stdout)
        if not poll.poll(1e3 * _VERDICT_S):
            self._end()
            return None
        if not (answer := process.stdout.readline()):
            raise EOFError
        told: str | None = json.loads(answer)
        return told

    def _start(self) -> Any:
        # A plain program: a process of multiprocessing would run the caller's main module.
        program = f"import sys; sys.path[:] = {sys.path!r}; import {__name__} as it; it.run()"
        process: Any = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl+C is not for it.
        )
        weakref.finalize(self, _kill, process)
        data = self._text.encode()
        process.stdin.write(json.dumps([len(data), self._options]).encode() + b"\n" + data)
        return process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            _kill(process)


def _kill(process: Any) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


# ---- the other process ---------------------------------------------------------------------------


def run() -> None:
    """Answer each line of the input with a verdict, until its end; each trial is a fork."""
    import llguidance

    num_bytes, options = json.loads(sys.stdin.buffer.readline())
    vocabulary = llguidance.LLTokenizer(sys.stdin.buffer.read(num_bytes).decode(), **options)
    for line in sys.stdin.buffer:
        ours, theirs = os.pipe()
        child = os.fork()
        if not child:
            told = _tried(vocabulary, *json.loads(line))
            os.write(theirs, json.dumps(told).encode())
            os._exit(0)
        os.close(theirs)
        with open(ours, "rb") as pipe:
            answer = pipe.read() or b"null"
        os.waitpid(child, 0)
        sys.stdout.buffer.write(answer + b"\n")
        sys.stdout.buffer.flush()


def _tried(vocabulary: llguidance.LLTokenizer, grammar: str, unforced: str) -> str:
    from llguidance import LLMatcher

    with open("/proc/self/statm", encoding="ascii") as file:
        most = int(file.read().split()[0]) * resource.getpagesize() + _TRIAL_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    signal.setitimer(signal.ITIMER_PROF, TRIAL_S)
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=limits())
    if is_error:
        return str(messages[0])
    matcher = compiled(vocabulary, grammar, unforced)
    signal.setitimer(signal.ITIMER_PROF, TRIAL_S)
    if isinstance(matcher, str):
        return ""  # The engine says so.
    draw, some = random.Random(0), re.compile(rb"[^\0]")
    for _ in range(_NUM_TOKENS):
        mask = bytearray(matcher.compute_bitmask())
        for token_id in vocabulary.eos_tokens:  # The answer shall not end.
            mask[token_id // 8] &= ~(1 << token_id % 8)
        found = some.search(mask, draw.randrange(len(mask))) or some.search(mask)
        if found is None or matcher.is_error():
            break
        bits = [bit for bit in range(8) if found[0][0] >> bit & 1]
        matcher.consume_token(8 * found.start() + draw.choice(bits))
    return str(matcher.get_error())
