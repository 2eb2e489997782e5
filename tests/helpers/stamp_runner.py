"""A runner without a model: it writes stamps, and reads them as an attention kernel would.

It checks its arguments against the contract of the engine (see `vmkv.serve.runner`) and against
the page tables. The next token is a hash of the history, so a wrong history gives a wrong token
even if memory is right.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from helpers.device import Place
from helpers.stamped_rows import Claim, History, StampedRows, mixed
from vmkv.serve.params import SamplingParams
from vmkv.serve.runner import StepResult
from vmkv.step import Piece

#: Token 0 is the end of sequence. So few that unrelated prompts often share a prefix.
VOCABULARY = 8


def next_token(history: History, num_prompt_tokens: int, params: SamplingParams) -> int:
    """The token after `history`: equal for equal histories and, if sampled, equal seeds."""
    seed = 0 if params.temperature == 0 else mixed((params.seed or 0) + 1)
    token = mixed(history.digest() ^ seed) % VOCABULARY
    if len(history) - num_prompt_tokens < params.min_tokens:
        while token in params.stop_token_ids:
            token = (token + 1) % VOCABULARY
    return token


def answer(prompt: Sequence[int], params: SamplingParams, max_tokens: int) -> list[int]:
    """All tokens of a request without failures; `params` are resolved."""
    history = History(prompt)
    while True:
        history.append(next_token(history, len(prompt), params))
        num_said = len(history) - len(prompt)
        is_stop = history.tokens[-1] in params.stop_token_ids and num_said >= params.min_tokens
        if is_stop or num_said == max_tokens:
            return history.tokens[len(prompt) :]


@dataclass
class _Slot:
    """State of a running request on the device."""

    params: SamplingParams
    num_prompt_tokens: int
    history: History


@dataclass
class Mishap:
    """A failure of the next step.

    Attributes:
        error: The error to raise.
        is_late: Raise it in `result` instead of in `submit`.
        is_between: Raise it in `sample`.
        has_written: Write the keys and values of the step nevertheless.
    """

    error: Exception
    is_late: bool = False
    is_between: bool = False
    has_written: bool = False


@dataclass
class _Step:
    """A submitted step, with the interface of `PendingTokens`."""

    runner: StampRunner
    chunks: Sequence[tuple[_Slot, Piece, Claim]]
    error: Exception | None = None
    token_ids: list[int] = field(default_factory=list)
    place: Place | None = None
    is_read: bool = False
    guesses: None = None

    def run(self) -> None:
        for slot, chunk, claim in self.chunks:
            self.runner.compute(slot, chunk, claim)

    def sample(self) -> None:
        for slot, chunk, _ in self.chunks:
            if chunk.samples:
                token = next_token(slot.history, slot.num_prompt_tokens, slot.params)
                slot.history.append(token)
                self.token_ids.append(token)

    @property
    def slots(self) -> list[int]:
        return [chunk.slot for _, chunk, _ in self.chunks if chunk.samples]

    @property
    def has_ended(self) -> bool:
        assert self.place is not None
        return self.runner.rows.device.has_done(self.place)

    def wait(self) -> None:
        assert self.place is not None
        self.runner.rows.device.run_until(self.place)
        if self.error is not None:
            raise self.error

    def result(self) -> StepResult:
        assert not self.is_read
        self.is_read = True
        self.wait()
        return StepResult(self.token_ids, [None] * len(self.token_ids))


class StampRunner:
    """A runner with the interface of `ModelRunner`.

    Args:
        rows: Rows to read and write.

    Attributes:
        num_steps: Number of submitted steps.
        mishap: Failure of the next step, or None.
    """

    def __init__(self, rows: StampedRows):
        self.rows = rows
        self.num_steps = 0
        self.mishap: Mishap | None = None
        self._slots: dict[int, _Slot] = {}

    def set_slot(
        self, slot: int, params: SamplingParams, prompt: Sequence[int], output: Sequence[int] = ()
    ) -> None:
        history = History([*prompt, *output])
        self._slots[slot] = _Slot(params, len(prompt), history)

    def submit(self, chunks: Sequence[Piece]) -> _Step:
        return self.sample(self.launch(chunks))

    def launch(self, chunks: Sequence[Piece]) -> _Step:
        self.rows.cache.note_stream()
        device = self.rows.device
        for name, each in (("slots", "slot"), ("rows", "row")):
            named = [getattr(chunk, each) for chunk in chunks]
            if len(set(named)) < len(named):
                device.fail(f"a step names {name} twice: {named}")
        claimed = [
            (
                self._slots[chunk.slot],
                chunk,
                self.rows.claim(
                    _name(chunk),
                    chunk.row,
                    chunk.num_past_tokens,
                    chunk.num_tokens,
                    chunk.checkpoints,
                ),
            )
            for chunk in chunks
        ]
        mishap = self.mishap
        if mishap is not None and mishap.is_between:
            mishap = None
        else:
            self.mishap = None
        if mishap is not None and not mishap.is_late:
            if mishap.has_written:
                device.submit(lambda: self._write_only(claimed))
            raise mishap.error
        self.num_steps += 1
        step = _Step(self, claimed, None if mishap is None else mishap.error)
        device.submit(step.run)
        return step

    def sample(self, step: _Step, masks: None = None, ended: Collection[int] = ()) -> _Step:
        if self.mishap is not None and self.mishap.is_between:
            mishap, self.mishap = self.mishap, None
            raise mishap.error
        step.place = self.rows.device.submit(step.sample)
        return step

    def close(self) -> None:
        self.rows.device.run_some()

    def compute(self, slot: _Slot, chunk: Piece, claim: Claim) -> None:
        """Do the work of a model for one chunk: read the past, write the new tokens."""
        name, history = _name(chunk), slot.history
        fail = self.rows.device.fail
        start, end = chunk.num_past_tokens, chunk.num_tokens
        if chunk.token_ids is None:
            if (chunk.num_new_tokens, end) != (1, len(history)):
                fail(f"{name} goes on from a token that is not the last of {len(history)}")
        elif list(chunk.token_ids) != history.tokens[start:end] or end == start:
            fail(f"{name} is told {chunk.token_ids}, and has {history.tokens[start:end]}")
        if chunk.samples != (end == len(history)):
            fail(f"{name} samples: {chunk.samples}, and {len(history)} tokens are known")
        self.rows.read(name, chunk.row, history, start, end)
        known = history
        if end < len(history):
            known = History(history.tokens[:end])
        self.rows.write(name, chunk.row, known, start, claim, chunk.checkpoints)

    def _write_only(self, claimed: Sequence[tuple[_Slot, Piece, Claim]]) -> None:
        for slot, chunk, claim in claimed:
            known = History(slot.history.tokens[: chunk.num_tokens])
            past = chunk.num_past_tokens
            self.rows.write(_name(chunk), chunk.row, known, past, claim, chunk.checkpoints)


def _name(chunk: Piece) -> str:
    return (
        f"a chunk ({chunk.num_past_tokens}+{chunk.num_new_tokens} tokens of slot {chunk.slot} in "
        f"row {chunk.row})"
    )
