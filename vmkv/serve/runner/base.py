"""What executes a step: the contract between the engine and its runners.

The engine plans from lengths alone and is one step ahead: it submits step k + 1 before it reads
the tokens of step k. So a decode token goes from one step to the next on the device, by its
slot, and `PendingStep` is the only place where the host waits. A slot is a request's own
as long as it runs; one that was preempted may come back in another, after another `set_slot`.

    runner.set_slot(3, params, prompt)                  # before the slot's first piece
    pending = runner.submit([Piece(slot=3, row=7, num_past_tokens=0, num_new_tokens=len(prompt),
                                   token_ids=prompt), ...])
    later = runner.submit([Piece(slot=3, row=7, num_past_tokens=len(prompt), num_new_tokens=1,
                                 token_ids=None), ...])
    pending.result().token_ids
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ...errors import VMKVError
from ...step import Piece
from ..params import SamplingParams
from ..request import TokenLogprobs


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step sampled.

    Attributes:
        token_ids: One per piece that samples, in the order of the pieces.
        logprobs: Likewise; None for those that did not ask.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs | None]


class SlotError(VMKVError):
    """What is one request's alone has failed; the others of its step are not to blame.

    Attributes:
        slot: The request's slot.
    """

    def __init__(self, slot: int, error: Exception, what: str = "a logits processor"):
        super().__init__(f"{what} failed: {error!r}")
        self.slot = slot


class PendingStep(Protocol):
    """A step that was submitted."""

    @property
    def has_ended(self) -> bool:
        """Whether the device is done with it, well or not. Never waits, never raises."""

    def wait(self) -> None:
        """Wait until it is. May be called again.

        Raises:
            Exception: As `result`.
        """

    def result(self) -> StepResult:
        """Wait for the step. May be called once, in the order of submission; again if interrupted.

        Raises:
            Exception: The step failed on the device. Its tokens do not exist.
        """


class Runner(Protocol):
    """Executes steps over the rows of one cache, in the order of submission."""

    def set_slot(
        self,
        slot: int,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int] = (),
    ) -> None:
        """A request begins in `slot`, or goes on there after a preemption.

        Everything the slot held is forgotten. Steps submitted before are not affected.

        Args:
            slot: The slot.
            params: Resolved by the engine: `seed` is set, and `stop_token_ids` holds the model's
                end-of-sequence tokens unless they are to be ignored. They must not be chosen
                before `min_tokens` tokens.
            prompt_token_ids: The prompt, for the repetition penalty.
            output_token_ids: What was generated before the preemption: counts for penalties and
                `min_tokens`, and the generator goes on after so many draws, so that a preempted
                request says what it would have said. Token i of a request is drawn from
                `(seed, i)` alone.
        """

    def submit(self, pieces: Sequence[Piece]) -> PendingStep:
        """Launch a step: the model over all pieces, then sampling. Never waits for the device.

        Raises:
            Exception: Nothing was sampled and no slot has moved on; a `SlotError` where the code
                of one request alone is the cause. Keys and values of the
                new tokens may have been written, which is harmless: submitting the same pieces
                again writes the same.
        """

    def close(self) -> None:
        """Wait for submitted steps, and free what the runner holds. Idempotent."""
