"""How long the step on the device still takes, and so who can still be in the next one.

The next step is planned while one runs. Planned as soon as it can be, it leaves out whoever comes
meanwhile: they wait for both, with prompts in them some 30 ms each. So an engine that serves
arrivals plans it as late as the device allows (`EngineLoop`).

Steps of about the same size take about the same time, and larger ones no less: the shortest of the
last few says how long one takes at least. A step that had ended before the host came for its tokens
says that what was thought of its size was too long, and that is forgotten: the next is measured.
"""

from __future__ import annotations

from collections import deque

#: Shorter steps are not worth it: what the host needs for the next one is most of them.
_LONG_S = 0.004
#: Of the shortest time known: sizes that are taken for the same differ by a sixteenth.
_SURE_SHARE = 0.95
#: Of what the host needed lately.
_HOST_FACTOR = 1.25
#: How fast a slow step of the host is forgotten.
_HOST_DECAY = 0.9
#: Who waits for tokens for a shorter time may have come too late to know when the step ended.
_WAITED_S = 0.0003
_NUM_KEPT = 4


class Pace:
    """What steps took, by size. All times are of one clock, in seconds."""

    def __init__(self) -> None:
        self._took_s: dict[int, deque[float]] = {}
        self._free_s = float("-inf")  # Since when the device has had nothing older to do.
        self._host_s = {False: 0.0, True: 0.0}

    def submitted(self, host_s: float, *, begins: bool) -> None:
        """A step was submitted, for which the host took so long; with requests that begin, or not.

        Those take it three times as long, since their rows are mapped.
        """
        self._host_s[begins] = max(host_s, _HOST_DECAY * self._host_s[begins])

    def read(self, num_tokens: int, submitted_s: float, now_s: float, waited_s: float) -> None:
        """The tokens of a step are there, for which the host waited so long; in order."""
        took_s = now_s - max(submitted_s, self._free_s)
        self._free_s = now_s
        size = _size(num_tokens)
        if waited_s < _WAITED_S:
            self._took_s.pop(size, None)
        else:
            self._took_s.setdefault(size, deque(maxlen=_NUM_KEPT)).append(took_s)

    def spare_s(self, num_tokens: int, submitted_s: float, now_s: float, *, begins: bool) -> float:
        """How long planning may wait while a step runs, the last to be read; 0 or less: not.

        Args:
            num_tokens: Of the step that runs.
            submitted_s: When it was submitted.
            now_s: The time.
            begins: Whether a request is there that may begin.
        """
        known = [each for each in self._took_s if each <= _size(num_tokens)]
        took_s = min(self._took_s[max(known)]) if known else 0.0
        if took_s < _LONG_S:
            return 0.0
        end_s = max(submitted_s, self._free_s) + _SURE_SHARE * took_s
        host_s = max(self._host_s.values()) if begins else self._host_s[False]
        return end_s - _HOST_FACTOR * host_s - now_s


def _size(num_tokens: int) -> int:
    """The same for numbers of tokens that differ by a sixteenth at most."""
    shift = max(0, num_tokens.bit_length() - 5)
    return num_tokens >> shift << shift
