"""Loop of an engine in its own thread or process: commands between steps, news after each.

An `AsyncEngine` runs it in a thread, an `EngineProcess` in a process; a `Link` carries commands and
news. The loop never waits for a reader: a link keeps the news that were not read yet.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ..core.cache import CacheStats
from ..errors import CapacityError, DriverError, RankError
from .params import SamplingParams
from .request import FinishReason, RequestHandle, TokenLogprobs

if TYPE_CHECKING:
    from .engine import Engine

# ---- messages ------------------------------------------------------------------------------------

# ---- to the engine ----------------------------------------------------------------------------


class Add(NamedTuple):
    """Add a request under the client's `key`; see `Engine.add`."""

    key: int
    prompt: tuple[int, ...]
    params: SamplingParams
    priority: int
    tenant: str | None = None


class Cancel(NamedTuple):
    """Cancel a request."""

    key: int


class Finish(NamedTuple):
    """End a sample at a stop text, which the client has found."""

    key: int
    sample: int


class Stop(NamedTuple):
    """End the loop: with `drain` after unfinished requests, else by cancelling them."""

    drain: bool


class Look(NamedTuple):
    """Wake the loop to check the engine's ranks. Sent by the engine's own side only."""


class Sleep(NamedTuple):
    """Move the weights to host memory once earlier requests have ended; `aborts` cancels them."""

    key: int
    aborts: bool


class Wake(NamedTuple):
    """Bring the weights back."""

    key: int


class Pause(NamedTuple):
    """Give the model to training until `is_over`, once earlier requests have ended."""

    key: int
    is_over: threading.Event


class Resume(NamedTuple):
    """Wake the loop after a pause; refused if the engine cannot take the model up again."""

    key: int


Command = Add | Cancel | Finish | Stop | Look | Sleep | Wake | Pause | Resume


# ---- from the engine --------------------------------------------------------------------------


class Update(NamedTuple):
    """New tokens of one sample of a request, and its end; fields as in `Request`.

    The first sample has the new log-probabilities of the prompt.
    """

    key: int
    sample: int
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs]
    num_cached_tokens: int
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    error: Exception | None
    prompt_logprobs: Sequence[TokenLogprobs | None]


class News(NamedTuple):
    """Everything new since the last news.

    `refused` are the keys of commands that were not accepted, and why; `done` those of commands
    that were. `events`, pickled, and `stats` are for an observer at the client; a link adds them.
    """

    refused: Sequence[tuple[int, Exception]]
    updates: Sequence[Update]
    num_failed_steps: int
    events: bytes = b""
    stats: CacheStats | None = None
    done: tuple[int, ...] = ()
    is_sleeping: bool = False


# ---- engine loop ---------------------------------------------------------------------------------

_LOG = logging.getLogger(__name__)
#: Consecutive failed steps after which every step is assumed to fail.
FAILED_STEPS_MAX = 5
#: Time budget for commands between two steps; the last command may exceed it.
_COMMANDS_S = 0.01


class Link(Protocol):
    """Transport of commands and news, called from the engine's thread except for `wake`."""

    @property
    def is_broken(self) -> bool:
        """Whether the other side is gone."""

    def receive(self, timeout_s: float | None = 0.0) -> Sequence[Command]:
        """Take the commands that have arrived; wait for one until the timeout, None for ever."""

    def send(self, news: News) -> None:
        """Send `news`, without waiting for a reader."""

    def wake(self) -> None:
        """Enqueue a `Look` command. Callable from any thread."""


class EngineLoop:
    """Runs an engine until a `Stop` command, or until the link breaks.

    With `ends_with_device` the loop ends once every step fails, or the driver refuses to wake the
    engine, so that a new process can take over. The engine sleeps after `sleep_after_s` seconds of
    `clock` without requests.
    """

    def __init__(
        self,
        engine: Engine,
        link: Link,
        *,
        ends_with_device: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._engine = engine
        self._link = link
        self._ends_with_device = ends_with_device
        self._commands: deque[Command] = deque()
        self._is_stopping = False
        self._to_add: set[int] = set()  # Requests that have come, were not cancelled, and wait.
        self._handles: dict[int, RequestHandle] = {}
        self._keys: dict[RequestHandle, int] = {}
        self._refused: list[tuple[int, Exception]] = []
        self._updated: dict[RequestHandle, None] = {}
        self._clock = clock
        self._active_s = clock()  # The last time with requests.
        self._rest: Sleep | Pause | None = None  # Waits until no request is left.
        self._held: list[Command] = []  # Commands that came after `_rest`, and wait for it.
        self._compiling: list[Add] = []  # Wait for their grammar; a `Look` tells that one is there.
        self._cancelled: list[Update] = []  # Ends of those that were cancelled meanwhile.
        self._done: list[int] = []
        self._lost: Exception | None = None  # Why the engine could not wake.
        self._unpaused: Exception | None = None  # Why the last pause failed.
        engine.on_update = lambda handle: self._updated.update({handle: None})
        engine.when_lost(link.wake)

    def run(self) -> None:
        """Run until stopped, then close the engine; with `ends_with_device` it may raise before."""
        self._engine.use_device()
        while self._wait():
            failure = None
            try:
                self._obey()
                self._hold()
                self._engine.advance()
            except Exception as error:  # noqa: BLE001  # fails every request
                failure = error
                self._engine.cancel_all(error)
            self._publish()
            if self._ends_with_device and self._lost is not None:
                raise RuntimeError(f"the weights could not come back from the host: {self._lost}")
            if self._ends_with_device and self._engine.num_failed_steps >= FAILED_STEPS_MAX:
                if isinstance(failure, RankError):
                    raise failure
                raise RuntimeError(f"the last {FAILED_STEPS_MAX} steps have failed")
        self._engine.close()
        self._publish()

    def _wait(self) -> bool:
        try:
            self._engine.fall_idle(is_wanted=self._is_wanted)
        except RankError:
            pass  # The next step or `Look` reports it.
        except Exception:  # noqa: BLE001  # no request is left to fail
            _LOG.exception("the engine could not fall idle")
        if self._engine.has_unfinished:
            self._active_s = self._clock()
            return True
        if self._rest is not None and not self._is_compiling:
            if isinstance(self._rest, Pause):
                self._pause(self._rest)
            else:
                self._answer(self._rest.key, self._fall_asleep)
            self._end_rest()
        self._publish()  # Includes the observers' idle event.
        while not self._is_wanted() or (self._is_compiling and not self._commands):
            left_s = self._awake_s()
            if left_s is None or left_s > 0:
                self._is_wanted(left_s)
            else:
                self._fall_asleep_alone()
        return bool(self._commands)

    def _end_rest(self) -> None:
        self._rest = None
        self._commands.extendleft(reversed(self._held))
        self._held.clear()

    # ---- sleep ----------------------------------------------------------------------------

    def _awake_s(self) -> float | None:
        after_s = self._engine.options.sleep_after_s
        if self._is_compiling:
            self._active_s = self._clock()
            return None
        if after_s is None or self._engine.is_sleeping:
            return None
        return self._active_s + after_s - self._clock()

    def _fall_asleep(self) -> None:
        self._engine.sleep(weights=True, prefixes=self._engine.options.sleep_keeps_prefixes)

    def _fall_asleep_alone(self) -> None:
        self._active_s = self._clock()  # After a failure, `sleep_after_s` passes again.
        try:
            self._fall_asleep()
        except RankError:
            pass  # The next step or `Look` reports it.
        except Exception as error:  # noqa: BLE001  # no request is left to fail
            _LOG.warning("the engine could not sleep: %s", error)
        self._publish()

    def _answer(self, key: int, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001  # reported to the client
            self._refuse(key, error)
        else:
            self._done.append(key)

    def _refuse(self, key: int, error: Exception) -> None:
        self._refused.append((key, error))
        if self._engine.is_sleeping and isinstance(error, DriverError | RankError):
            self._lost = error

    # ---- training -------------------------------------------------------------------------

    def _pause(self, asked: Pause) -> None:
        self._unpaused = None
        try:
            with self._engine.paused():
                self._done.append(asked.key)
                self._publish()
                while not (asked.is_over.is_set() or self._is_stopping):
                    self._is_wanted(None)
                if not asked.is_over.is_set():  # The model stays training's.
                    self._engine.close()
        except Exception as error:  # noqa: BLE001  # reported to the client
            self._unpaused = error
            self._refuse(asked.key, error)
        self._active_s = self._clock()

    def _check_pause(self) -> None:
        if self._unpaused is not None:
            raise self._unpaused

    # ---- commands -------------------------------------------------------------------------

    def _is_wanted(self, timeout_s: float | None = 0.0) -> bool:
        """Take arrived commands, or wait for some; true if any are left, or the loop ends."""
        for command in self._link.receive(timeout_s):
            if isinstance(command, Add):
                self._to_add.add(command.key)
            elif isinstance(command, Cancel):
                self._to_add.discard(command.key)  # Cancelled before it was added.
            self._is_stopping |= isinstance(command, Stop)
            self._commands.append(command)
        if self._link.is_broken and not self._is_stopping:
            self._is_stopping = True
            self._commands.append(Stop(drain=False))
        return bool(self._commands) or self._is_stopping

    def _obey(self, most_s: float = _COMMANDS_S) -> None:
        start_s = time.monotonic()
        while (self._commands or self._is_wanted()) and self._commands:
            command = self._commands.popleft()
            if self._rest is not None and isinstance(command, Add | Sleep | Wake | Pause):
                if isinstance(command, Sleep) and command.aborts and isinstance(self._rest, Sleep):
                    self._cancel_all()
                    command = Sleep(command.key, aborts=False)
                self._held.append(command)
            elif isinstance(command, Sleep | Pause):
                self._rest = command
                if isinstance(command, Sleep) and command.aborts:
                    self._cancel_all()
            elif isinstance(command, Resume):
                if isinstance(self._rest, Pause) and self._rest.is_over.is_set():  # Cancelled.
                    self._end_rest()
                self._answer(command.key, self._check_pause)
            elif isinstance(command, Wake):
                self._active_s = self._clock()
                self._answer(command.key, self._engine.wake)
            elif isinstance(command, Add):
                self._add(command)
            elif isinstance(command, Look):
                compiling, self._compiling = self._compiling, []
                for each in compiling:
                    self._add(each)
            elif isinstance(command, Cancel | Finish) and command.key in self._handles:
                handle = self._handles[command.key]
                if isinstance(command, Finish):
                    self._engine.finish(handle, command.sample)
                else:
                    self._forget(handle)
                    self._engine.cancel(handle)
            elif isinstance(command, Stop):
                self._rest, held, self._held = None, self._held, []
                if command.drain:
                    self._commands.extendleft(reversed(held))
                else:
                    self._cancel_all()
            if time.monotonic() - start_s >= most_s:
                return

    def _hold(self) -> None:
        while not self._is_stopping and (spare_s := self._engine.loop.spare_s) > 0:
            if not self._commands:
                self._is_wanted(spare_s)
            self._obey(min(spare_s, _COMMANDS_S))

    def _add(self, asked: Add) -> None:
        if asked.key not in self._to_add:
            return
        form, grammars = asked.params.structured_outputs, self._engine.grammars
        if form is not None and not grammars.is_ready(form, asked.params.n, self._link.wake):
            self._compiling.append(asked)
            return
        self._to_add.discard(asked.key)
        try:
            handle = self._engine.add(
                asked.prompt, asked.params, asked.priority, tenant=asked.tenant
            )
        except Exception as error:  # noqa: BLE001  # reported to the client
            self._refuse(asked.key, error)
            if isinstance(error, CapacityError) and self._engine.is_sleeping:
                self._refuse_waiting(error)
            return
        self._handles[asked.key], self._keys[handle] = handle, asked.key

    def _refuse_waiting(self, error: Exception) -> None:
        self._is_wanted()
        for key in sorted(self._to_add):
            self._refuse(key, error)
        self._to_add.clear()

    @property
    def _is_compiling(self) -> bool:
        return any(each.key in self._to_add for each in self._compiling)

    def _cancel_all(self) -> None:
        self._engine.cancel_all()
        for each in self._compiling:
            if each.key in self._to_add:
                self._to_add.remove(each.key)
                end = (0, FinishReason.CANCELLED, None, None, ())
                self._cancelled += [
                    Update(each.key, at, (), (), *end) for at in range(each.params.n)
                ]
        self._compiling.clear()

    def _forget(self, handle: RequestHandle) -> None:
        del self._handles[self._keys.pop(handle)]
        self._updated.pop(handle, None)

    # ---- what is new ----------------------------------------------------------------------

    def _publish(self) -> None:
        refused, self._refused = self._refused, []
        done, self._done = tuple(self._done), []
        news = News(refused, self._take_updates(), self._engine.num_failed_steps, done=done)
        self._link.send(news._replace(is_sleeping=self._engine.is_sleeping))

    def _take_updates(self) -> list[Update]:
        handles = [handle for handle in self._updated if handle in self._keys]
        self._updated.clear()
        updates, self._cancelled = self._cancelled, []
        for handle in handles:
            for sample, request in enumerate(handle.requests):
                num_sent = request.num_sent
                token_ids = request.output_token_ids[num_sent:]
                told = request.prompt_logprobs
                if told:
                    told = told[request.num_prompt_sent :]
                    request.num_prompt_sent += len(told)
                if not token_ids and not told and request.finish_reason is None:
                    continue
                request.num_sent += len(token_ids)
                new = (token_ids, request.logprobs[num_sent:], request.num_cached_tokens)
                end = (request.finish_reason, request.stop_reason, request.error)
                updates.append(Update(self._keys[handle], sample, *new, *end, told))
            if handle.is_finished:
                self._forget(handle)
        return updates
