"""What executes a step: the contract between the engine and its runners.

The engine plans from lengths alone and is one step ahead: it submits step k + 1 before it reads
the tokens of step k. So a decode token goes from one step to the next on the device, by its
slot, and `PendingStep.result` is the only place where the host waits.

    runner.set_slot(3, params, prompt)                  # before the slot's first chunk
    pending = runner.submit([Chunk(slot=3, row=7, num_past_tokens=0, num_new_tokens=len(prompt),
                                   token_ids=prompt, samples=True), ...])
    later = runner.submit([Chunk(slot=3, row=7, num_past_tokens=len(prompt), num_new_tokens=1,
                                 token_ids=None, samples=True), ...])
    pending.result().token_ids
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ...errors import VMKVError
from ..params import SamplingParams
from ..request import TokenLogprobs


class Chunk(NamedTuple):
    """What one sequence does in a step.

    Attributes:
        slot: `0 <= slot < max_num_seqs`: index of its state on the device (last token, sampling
            parameters, generator, token counts). Its own as long as it runs; a request that was
            preempted may come back in another, and then `set_slot` is called again.
        row: Its row in the `KVCache`, grown to `num_past_tokens + num_new_tokens` and the
            over-read before the step is submitted.
        num_past_tokens: Tokens whose keys and values are in the row.
        num_new_tokens: Tokens of this step.
        token_ids: The new tokens, from the host; None for the token that was sampled last in
            this slot, which is still on the device (then `num_new_tokens` is 1).
        samples: Whether a token is sampled from the last position. False for the early chunks
            of a prompt, and for tokens that are only computed again.
    """

    slot: int
    row: int
    num_past_tokens: int
    num_new_tokens: int
    token_ids: Sequence[int] | None
    samples: bool

    @property
    def num_tokens(self) -> int:
        """Tokens in the row after the step."""
        return self.num_past_tokens + self.num_new_tokens


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step sampled.

    Attributes:
        token_ids: One per chunk that samples, in the order of the chunks.
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

    def result(self) -> StepResult:
        """Wait for the step. May be called once, in the order of submission.

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

    def submit(self, chunks: Sequence[Chunk]) -> PendingStep:
        """Launch a step: the model over all chunks, then sampling. Never waits for the device.

        Several chunks of one step are of different slots and rows.

        Raises:
            Exception: Nothing was sampled and no slot has moved on; a `SlotError` where the code
                of one request alone is the cause. Keys and values of the
                chunks' new tokens may have been written, which is harmless: submitting the same
                chunks again writes the same.
        """

    def close(self) -> None:
        """Wait for submitted steps, and free what the runner holds. Idempotent."""
