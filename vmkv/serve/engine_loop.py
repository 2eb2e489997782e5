"""The loop around an engine that runs on its own: commands between steps, news after each.

Whoever has an engine run by itself, in a thread or in a process, runs this there, and brings the
commands and takes the news as it likes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from .handle import RequestHandle

if TYPE_CHECKING:
    from .engine import Engine

_LOG = logging.getLogger(__name__)
#: So many steps in a row fail only where every one does.
_FAILED_STEPS_MAX = 5
#: What running requests wait at most for the commands between two steps, but for the last one.
_COMMANDS_S = 0.01


class Inbox(Protocol):
    """Where the commands come from. Asked from the engine's thread."""

    def wait(self) -> bool:
        """Wait for a command; false where none will come any more."""

    def take(self) -> Callable[[], None] | None:
        """The next command; None where there is none now."""

    def is_wanted(self) -> bool:
        """Whether there is a command, or it is over."""


class EngineLoop:
    """Runs an engine until its inbox says that it is over.

    Args:
        engine: The engine; nobody else may work on it meanwhile.
        inbox: Brings commands.
        publish: Called after every step, with the requests that have something new.
    """

    def __init__(
        self,
        engine: Engine,
        inbox: Inbox,
        publish: Callable[[Iterable[RequestHandle]], None],
    ):
        self._engine = engine
        self._inbox = inbox
        self._publish = publish
        self._updated: dict[RequestHandle, None] = {}
        engine.on_update = self._note_update

    def run(self) -> None:
        """Run; closes the engine at the end.

        The thread waits while there is nothing to do, without polling. Before that the engine falls
        idle; a command that comes meanwhile does not wait for all of what goes back to the device.
        """
        self._engine.use_device()
        while self._wait():
            try:
                self._obey()
                self._engine.advance()
            except Exception as error:  # noqa: BLE001  # every request ends with it
                self._engine.cancel_all(error)
            updated, self._updated = self._updated, {}
            self._publish(updated)
        self._engine.close()

    def _wait(self) -> bool:
        """Wait for something to do; false to end."""
        # After publishing, so that no client waits for it.
        try:
            self._engine.fall_idle(is_wanted=self._inbox.is_wanted)
        except Exception:  # noqa: BLE001  # no request is left to end with it
            _LOG.exception("the engine could not fall idle")
        return self._engine.has_unfinished or self._inbox.wait()

    def _obey(self) -> None:
        """Carry out what was asked for; if it is much, the rest after the next step."""
        start_s = time.monotonic()
        while time.monotonic() - start_s < _COMMANDS_S:
            command = self._inbox.take()
            if command is None:
                return
            command()

    def _note_update(self, handle: RequestHandle) -> None:
        self._updated[handle] = None


def failure_of(num_failed_steps: int) -> str | None:
    """Why a device that failed in so many steps in a row serves nobody; None while it may."""
    if num_failed_steps < _FAILED_STEPS_MAX:
        return None
    return f"the last {num_failed_steps} steps have failed"
