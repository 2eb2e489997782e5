"""What a step is to do, in numbers: what the scheduler decides and the engine carries out."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from .request import RequestState


class PreemptionMethod(enum.Enum):
    """What becomes of a preempted request's keys and values."""

    SWAP = "swap"  # They go to host memory, and come back.
    RECOMPUTE = "recompute"  # They are dropped, and computed again.

    @property
    def leaves(self) -> RequestState:
        """Where it leaves the request."""
        return RequestState.SWAPPED if self is self.SWAP else RequestState.WAITING


class PlannedChunk(NamedTuple):
    """What one request does in a step.

    Attributes:
        request_id: Which.
        slot: Its slot.
        num_past_tokens: Tokens it has computed.
        num_new_tokens: Tokens it computes now.
        from_device: Whether the one new token is the last that was sampled in its slot.
        samples: Whether a token is sampled.
    """

    request_id: int
    slot: int
    num_past_tokens: int
    num_new_tokens: int
    from_device: bool
    samples: bool

    @property
    def num_tokens(self) -> int:
        """Tokens in its row after the step."""
        return self.num_past_tokens + self.num_new_tokens


class Preemption(NamedTuple):
    """A request that gives way."""

    request_id: int
    method: PreemptionMethod


@dataclass(frozen=True)
class StepPlan:
    """One step. To be carried out in the order of the attributes.

    Attributes:
        preempted: Requests that give way first.
        resumed: Requests whose memory comes back from the host; before any that begins takes a
            row, and all that is mapped there.
        admitted: Requests that begin, or begin again after their memory was dropped.
        chunks: What is computed, best-placed request first; empty if nothing can be.
    """

    preempted: tuple[Preemption, ...] = ()
    resumed: tuple[int, ...] = ()
    admitted: tuple[int, ...] = ()
    chunks: tuple[PlannedChunk, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(chunk.num_new_tokens for chunk in self.chunks)
