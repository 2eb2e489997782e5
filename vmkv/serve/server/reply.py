"""Divides a generated text into reasoning, content and tool calls, as it comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """New text of a tool call; only the first delta of a call has its id and its name.

    Attributes:
        index: Number of the call within its choice.
        id: Identifies the call in the chat's next messages.
        name: The function's name.
        arguments: A piece of the arguments' JSON.
    """

    index: int
    id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class ReplyDelta:
    """New parts of a choice: at most one delta per tool call, in order of the calls."""

    reasoning: str = ""
    content: str = ""
    tool_calls: Sequence[ToolCallDelta] = ()


class ReplyParser(Protocol):
    """Parses the text of one choice."""

    def push(self, text: str, *, is_last: bool) -> ReplyDelta:
        """Return what the next piece of text adds; never raises, whatever the text is.

        The pieces' boundaries do not affect the sum of the deltas. Text that may belong to a
        delimiter is held back until `is_last`.
        """
        ...


#: Makes the parser of a choice, from the end of its prompt that begins the answer.
NewParser: TypeAlias = Callable[[str], ReplyParser]
