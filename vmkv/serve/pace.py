"""How long the step on the device still takes, and so who can still be in the next one.

The next step is planned while one runs. Planned as soon as it can be, it leaves out whoever comes
meanwhile: they wait for both, with prompts in them some 30 ms each. So an engine that serves
arrivals plans it as late as the device allows (`EngineLoop`).

Steps of about the same size take about the same time, and larger ones no less: the shortest of the
last few says how long one takes at least. Only what is certain counts as known: a step's time is
taken where it began and ended while the host watched. One that had ended before the next was
submitted says that what was thought of its size was too long. That is forgotten, with what smaller
ones say, until the size was measured anew; so whatever a wrong thought costs, it costs once.
"""

from __future__ import annotations

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
#: However long a step is thought to take: nobody is held up for longer. Links count no less.
_SPARE_MAX_S, _SPARE_MIN_S = 0.1, 0.001
_NUM_KEPT, _NUM_NEEDED = 4, 2


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
        clock: Seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._took_s: dict[bool, dict[int, deque[float]]] = {False: {}, True: {}}
        self._host_s = {False: 0.0, True: 0.0}
        # When the device had done what was submitted before; what else was submitted before
        # `_unsure_s` began nobody knows when.
        self._free_s = self._unsure_s = float("-inf")

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
        host_s = step.submitted_s - start_s
        self._host_s[begins] = max(host_s, _HOST_DECAY * self._host_s[begins])
        if before is not None and before.pending.has_ended:
            known = self._took_s[before.kind]
            for size in [each for each in known if each <= before.size]:
                del known[size]
            known[before.size] = deque(maxlen=_NUM_KEPT)

    def wait(self, step: SubmittedStep) -> None:
        """Wait for a step, the last to be waited for.

        Raises:
            Exception: See `PendingStep.wait`; `lost` is to be called.
        """
        began_s = self._began_s(step)
        had_ended = step.pending.has_ended
        step.pending.wait()
        self._free_s = self._clock()
        if had_ended:
            self._unsure_s = self._free_s
        elif began_s is not None:
            sizes = self._took_s[step.kind]
            sizes.setdefault(step.size, deque(maxlen=_NUM_KEPT)).append(self._free_s - began_s)

    def lost(self) -> None:
        """Steps that were submitted will not be waited for."""
        self._free_s = self._unsure_s = self._clock()

    def spare_s(self, step: SubmittedStep, *, begins: bool) -> float:
        """How long planning may wait while a step runs, the last to be waited for.

        Args:
            step: The step.
            begins: Whether a request is there that may begin.

        Returns:
            Seconds; 0 where it may not, or nobody knows.
        """
        sizes = self._took_s[step.kind]
        known = [each for each in sizes if each <= step.size]
        took_s = sizes[max(known)] if known else ()
        if len(took_s) < _NUM_NEEDED or min(took_s) < _LONG_S:
            return 0.0
        began_s = self._began_s(step)
        end_s = (step.submitted_s if began_s is None else began_s) + _SURE_SHARE * min(took_s)
        host_s = max(self._host_s.values()) if begins else self._host_s[False]
        spare_s = end_s - _HOST_FACTOR * host_s - self._clock()
        return min(_SPARE_MAX_S, spare_s) if spare_s > _SPARE_MIN_S else 0.0

    def _began_s(self, step: SubmittedStep) -> float | None:
        """When the device began a step, those before it being waited for; None if nobody knows."""
        is_sure = step.submitted_s >= self._unsure_s
        return max(step.submitted_s, self._free_s) if is_sure else None
