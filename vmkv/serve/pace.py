"""How long the step on the device still takes, and so who can still be in the next one.

The next step is planned while one runs. Planned as soon as it can be, it leaves out whoever comes
meanwhile: they wait for both, with prompts in them some 30 ms each. So an engine that serves
arrivals plans it as late as the device allows (`EngineLoop`).

Steps of about the same size take about the same time, and larger ones no less: the shortest of the
last few says how long one takes at least. Only what is certain counts as known: a step's time is
taken where it began and ended while the host watched. Nobody waits for long without asking the
device again, so a wrong thought costs two milliseconds and the host's own part. A step that was
waited for and had ended before the next was submitted has all steps of its kind measured anew, and
more of them before the next thought: times that cannot be told from sizes are not waited for.

What is given away is the slack of one step: where the host stalls, the device has nothing to do.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .runner import PendingStep

#: Shorter steps are not worth it: what the host needs for the next one is most of them.
_LONG_S = 0.004
#: Of the shortest time known: sizes that are taken for the same differ by a sixteenth.
_SURE_SHARE = 0.95
#: Of what the host needed lately.
_HOST_FACTOR = 1.25
#: How fast a slow step of the host is forgotten.
_HOST_DECAY = 0.9
#: For so long nobody asks whether the step has ended. Links count no less than the second.
_SLICE_S, _SPARE_MIN_S = 0.002, 0.001
#: So many times must be known, and so many more after each wrong thought; twice as many are looked
#: at. With each step that goes well fewer are.
_NEEDED_MIN, _NEEDED_MAX, _NEEDED_FACTOR, _NEEDED_DECAY = 2, 32, 2, 0.99


@dataclass(frozen=True)
class SubmittedStep:
    """A step on the device.

    Attributes:
        pending: Its tokens to come.
        request_ids: Whose chunks it has.
        sampling_ids: Those that sample, in order.
        num_tokens: How many it computes.
        submitted_s: Since when.
    """

    pending: PendingStep
    request_ids: Sequence[int]
    sampling_ids: Sequence[int]
    num_tokens: int
    submitted_s: float

    @property
    def kind(self) -> bool:
        """Whether it has prompts: their time does not depend on the same things."""
        return self.num_tokens > len(self.request_ids)

    @property
    def size(self) -> int:
        """The same for numbers of tokens that differ by a sixteenth at most."""
        shift = max(0, self.num_tokens.bit_length() - 5)
        return self.num_tokens >> shift << shift


class Pace:
    """What steps took, by kind and size.

    Args:
        clock: Seconds; by default of `time.perf_counter`.
    """

    def __init__(self, clock: Callable[[], float] | None = None):
        self._clock = clock or time.perf_counter
        self._took_s: dict[bool, dict[int, deque[float]]] = {False: {}, True: {}}
        self._needed = {False: float(_NEEDED_MIN), True: float(_NEEDED_MIN)}
        self._host_s = {False: 0.0, True: 0.0}
        # When the device had done what was submitted before; what else was submitted before
        # `_unsure_s` began nobody knows when.
        self._free_s = self._unsure_s = -math.inf
        # The step that planning has waited for, as long as it is on the device, and until when it
        # was to.
        self._held: SubmittedStep | None = None
        self._due_s = 0.0

    def submitted(
        self, step: SubmittedStep, before: SubmittedStep | None, start_s: float, *, begins: bool
    ) -> None:
        """A step was submitted.

        Args:
            step: The step.
            before: The one that should still be running.
            start_s: Since when the host has been busy with it.
            begins: Whether requests begin with it, which takes the host three times as long.
        """
        was_held = before is not None and self._held is before
        # Who wakes up late is late with all that follows.
        host_s = step.submitted_s - (min(start_s, self._due_s) if was_held else start_s)
        self._host_s[begins] = max(host_s, _HOST_DECAY * self._host_s[begins])
        if before is None:
            return
        needed, kind = self._needed, before.kind
        if not before.pending.has_ended:
            needed[kind] = max(_NEEDED_MIN, _NEEDED_DECAY * needed[kind])
        elif was_held:
            needed[kind] = min(_NEEDED_MAX, _NEEDED_FACTOR * needed[kind])
            self._took_s[kind].clear()

    def wait(self, step: SubmittedStep) -> None:
        """Wait for a step, the last to be waited for.

        Raises:
            Exception: See `PendingStep.wait`; `lost` is to be called.
        """
        began_s = self._began_s(step)
        had_ended = step.pending.has_ended
        step.pending.wait()
        self._held, self._free_s = None, self._clock()
        if had_ended or self._unsure_s == math.inf:
            self._unsure_s = self._free_s
        elif began_s is not None:
            sizes = self._took_s[step.kind]
            took_s = sizes.setdefault(step.size, deque(maxlen=2 * _NEEDED_MAX))
            took_s.append(self._free_s - began_s)

    def lost(self) -> None:
        """Steps that were submitted will not be waited for: the device may be busy with them."""
        self._held, self._unsure_s = None, math.inf  # Until the next is waited for.

    def spare_s(self, step: SubmittedStep, *, begins: bool) -> float:
        """How long planning may wait while a step runs, the last to be waited for, and ask again.

        Args:
            step: The step.
            begins: Whether a request is there that may begin.

        Returns:
            Seconds; 0 where it may not, or nobody knows.
        """
        sizes, needed = self._took_s[step.kind], math.ceil(self._needed[step.kind])
        known = [each for each in sizes if each <= step.size]
        took_s = list(sizes[max(known)])[-2 * needed :] if known else []
        if len(took_s) < needed or min(took_s) < _LONG_S or step.pending.has_ended:
            return 0.0
        began_s = self._began_s(step)
        end_s = (step.submitted_s if began_s is None else began_s) + _SURE_SHARE * min(took_s)
        host_s = max(self._host_s.values()) if begins else self._host_s[False]
        due_s, now_s = end_s - _HOST_FACTOR * host_s, self._clock()
        if due_s - now_s <= _SPARE_MIN_S:
            return 0.0
        self._held, self._due_s = step, due_s
        return min(_SLICE_S, due_s - now_s)

    def _began_s(self, step: SubmittedStep) -> float | None:
        """When the device began a step, those before it being waited for; None if nobody knows."""
        is_sure = step.submitted_s >= self._unsure_s
        return max(step.submitted_s, self._free_s) if is_sure else None
