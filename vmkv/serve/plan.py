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


class Admission(NamedTuple):
    """A request that begins in a slot, or comes back to one."""

    request_id: int
    slot: int


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
    resumed: tuple[Admission, ...] = ()
    admitted: tuple[Admission, ...] = ()
    chunks: tuple[PlannedChunk, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(chunk.num_new_tokens for chunk in self.chunks)


@dataclass(eq=False)
class Job:
    """A request, as the scheduler sees it: lengths only.

    Attributes:
        request_id: Which.
        rank: Who goes first: the smallest. Never changes; see `Scheduler`.
        num_prompt_tokens: Tokens of the prompt.
        max_total_tokens: Prompt and output at most.
        waits_for_host: Its next token cannot be computed before the last one was read.
        num_tokens: Tokens that exist, one that is still being computed included.
        num_computed: Tokens whose keys and values are computed, or will be by submitted steps.
        num_unread: Tokens of submitted steps that have not been read.
        state: Where it is.
        slot: While it runs.
        is_on_device: Whether its last token is in its slot on the device.
    """

    request_id: int
    rank: tuple[int, int]
    num_prompt_tokens: int
    max_total_tokens: int
    waits_for_host: bool
    num_tokens: int
    num_computed: int = 0
    num_unread: int = 0
    state: RequestState = RequestState.WAITING
    slot: int = -1
    is_on_device: bool = False

    @property
    def num_left(self) -> int:
        """Tokens to compute before another can be sampled; 0 when all wanted ones exist."""
        return (
            0 if self.num_tokens >= self.max_total_tokens else self.num_tokens - self.num_computed
        )
