"""Divides a generated text into reasoning, content and tool calls, as it comes.

transformers' `ResponseParser` finds the regions of a text by a response template. A region of tool
calls is read here: arguments in JSON are passed on as they come, and others once they are whole.
A region that is no tool call, such as broken JSON, becomes content.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import regex


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """New text of the arguments of call `index`; only a call's first delta has its id and name."""

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

        Text that may belong to a delimiter is held back until `is_last`.
        """


#: Makes the parser of a choice of a prompt, given the prompt's tokens.
NewParser: TypeAlias = Callable[[Sequence[int]], ReplyParser]


# ---- text ----------------------------------------------------------------------------------------


class _CleanText:
    """Text without special tokens, and without white space beside a delimiter of regions."""

    def __init__(self, special_tokens: Any):
        self._special_tokens = special_tokens  # A pattern, or None to keep them.
        self._held = ""  # The beginning of a special token.
        self._spaces = ""  # Dropped if a delimiter follows them, and no more text.
        self._has_begun = False
        self._is_delimited = False  # Whether a delimiter has come since the last text.

    def delimit(self) -> None:
        self._is_delimited = True

    def push(self, text: str, *, is_last: bool) -> str:
        text = self._held + text
        clean, end = "", len(text)
        if self._special_tokens is not None:
            at = 0
            while (found := self._special_tokens.search(text, at, partial=not is_last)) is not None:
                if found.partial:
                    end = found.start()
                    break
                clean, at = clean + text[at : found.start()], found.end()
            self._held, text = text[end:], text[at:end]
        text = self._spaces + clean + text
        out = text if is_last and not self._is_delimited else text.rstrip()
        self._spaces = text[len(out) :]
        if self._is_delimited and not self._has_begun:
            out = out.lstrip()
        if out:
            self._has_begun, self._is_delimited = True, False
        return out

    def drop_held(self) -> None:
        self._held = self._spaces = ""


class _ObjectEnd:
    _STRUCTURE = regex.compile(r'\\.|["{}\[\]]', regex.DOTALL)

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = False

    def push(self, text: str) -> int | None:
        at = int(self._is_escaped and bool(text))
        self._is_escaped = self._is_escaped and not text
        for found in self._STRUCTURE.finditer(text, at):
            char = found[0]
            if char == '"':
                self._in_string = not self._in_string
            elif not self._in_string and len(char) == 1:
                self._depth += 1 if char in "{[" else -1
                if self._depth <= 0:
                    return int(found.end())
            at = found.end()
        # The rest has no escape but perhaps its first half.
        self._is_escaped = self._is_escaped or text.endswith("\\", at)
        return None


# ---- tool calls ----------------------------------------------------------------------------------

#: Beginning of a call as an object, up to its arguments, perhaps in a list of calls.
_HEAD = (
    r'\s*(?:\[\s*)?\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"(?P<json_name>[^"\\]+)"'
    r'\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


class CallPattern:
    """How regions of tool calls begin, and how a region that is whole becomes calls.

    The group `name` of `opening` is the function's name. `whole` may raise anything.
    """

    def __init__(
        self,
        opening: str,
        *,
        is_json: bool,
        closing: str = "",
        whole: Callable[[str, Any], list[tuple[str, str]]] = lambda text, tools: [],
    ):
        begins = r"(?(name)\s*(?=\{)|" + _HEAD + ")" if "(?P<name>" in opening else _HEAD
        first = f"(?>{opening}){begins}"  # Atomic: white space at its end is read once.
        self.is_json = is_json
        self.closed = regex.compile(rf"(?:{closing})\s*\Z", regex.DOTALL)
        self.first = regex.compile(first, regex.DOTALL)
        self.next = regex.compile(rf"{first}|,{_HEAD}|(?!)", regex.DOTALL)
        self.whole = whole


class _Region:
    """Reads the calls of one region; yields `(name, arguments)`, where None continues the call."""

    def __init__(self, pattern: CallPattern, tools: Any):
        self._pattern, self._tools = pattern, tools
        self._raw: list[str] = []
        self._unread = ""
        self._object: _ObjectEnd | None = None
        self._has_calls = self._is_opaque = False

    def push(self, text: str) -> Iterator[tuple[str | None, str]]:
        self._raw.append(text)
        self._unread += text
        while self._unread and self._pattern.is_json and not self._is_opaque:
            if self._object is not None:
                end = self._object.push(self._unread)
                yield None, self._unread[:end]
                self._unread = "" if end is None else self._unread[end:]
                self._object = None if end is not None else self._object
                continue
            if self._has_calls:
                found = self._pattern.next.search(self._unread, partial=True)
            else:
                found = self._pattern.first.match(self._unread, partial=True)
                self._is_opaque = found is None
            if found is None or found.partial:
                if self._has_calls:
                    self._unread = self._unread[found.start() :] if found else ""
                return
            groups = found.groupdict()
            yield groups.get("name") or groups["json_name"], ""
            self._unread = self._unread[found.end() :]
            self._has_calls, self._object = True, _ObjectEnd()

    def close(self, *, is_cut: bool) -> tuple[list[tuple[str, str]], str]:
        """Return calls that were not yielded, and the text of a region without calls."""
        if self._has_calls:
            return [], ""
        text = "".join(self._raw)
        calls = []
        try:
            if self._pattern.is_json or not is_cut:
                calls = self._pattern.whole(text, self._tools)
        except Exception:  # noqa: BLE001  # The model may have written anything.
            pass
        return calls, "" if calls else text


class _Calls:
    """Numbers the calls of a choice, and joins the deltas of each within a piece of text."""

    def __init__(self, *, is_parallel: bool):
        self._is_parallel = is_parallel
        self._num = 0
        self._new: dict[int, ToolCallDelta] = {}

    def add(self, name: str | None, arguments: str) -> None:
        self._num += name is not None
        index = self._num - 1
        if index and not self._is_parallel:
            return
        last = self._new.get(index)
        if last is None:
            # Templates of Mistral's models take ids of nine letters and digits only.
            call_id = None if name is None else uuid.uuid4().hex[:9]
            last = ToolCallDelta(index, call_id, name, "")
        self._new[index] = ToolCallDelta(index, last.id, last.name, last.arguments + arguments)

    def take(self) -> tuple[ToolCallDelta, ...]:
        # A piece that ended before the arguments continue adds nothing.
        new = tuple(each for each in self._new.values() if each.id is not None or each.arguments)
        self._new.clear()
        return new


# ---- parsers -------------------------------------------------------------------------------------

_TAIL_CHARS = 256
#: Names of the field that holds reasoning, in response templates.
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")


class TemplateParser:
    """Parses a text in the model's own format by transformers' `ResponseParser`.

    Its field `tool_calls` is plain text. `special_tokens` is a pattern of texts to leave out.
    """

    def __init__(
        self,
        parser: Any,
        pattern: CallPattern | None,
        tools: Sequence[Mapping[str, Any]],
        special_tokens: Any,
        *,
        is_parallel: bool = True,
    ):
        self._parser: Any = parser
        self._pattern, self._tools = pattern, tools
        self._reasoning = _CleanText(special_tokens)
        self._content = _CleanText(special_tokens)
        self._calls = _Calls(is_parallel=is_parallel)
        self._region: _Region | None = None
        #: The last characters, as many as the end of a region may have.
        self._tail = ""
        self._is_cut = False
        self._read(parser.initial_events)  # An answer that the prompt begins.
        self._calls.take()
        self._reasoning.drop_held()
        self._content.drop_held()
        self._reasoning.delimit()

    def push(self, text: str, *, is_last: bool) -> ReplyDelta:
        """See `ReplyParser.push`."""
        self._tail = (self._tail + text)[-_TAIL_CHARS:]
        reasoning, content = self._read(self._events(text))
        if is_last:
            # Regions that end here may be cut; those before have ended with a delimiter.
            self._is_cut = self._pattern is not None and not self._pattern.closed.search(self._tail)
            more = self._read(self._events(None))
            reasoning += more[0] + self._reasoning.push("", is_last=True)
            content += more[1] + self._content.push("", is_last=True)
        return ReplyDelta(reasoning, content, self._calls.take())

    def _events(self, text: str | None) -> list[dict[str, Any]]:
        """Return events of the next text, or of the end; once the parser fails, all is content."""
        try:
            if (it := self._parser) is not None:
                events: list[Any] = it.finalize()[1] if text is None else it.feed(text)
                return events
        except Exception:  # noqa: BLE001  # A field that the text does not fit, or that it lacks.
            self._parser = None
        return [] if text is None else [{"type": "region_chunk", "field": "content", "text": text}]

    def _read(self, events: list[dict[str, Any]]) -> tuple[str, str]:
        reasoning = content = ""
        for event in events:
            kind, field, text = event["type"], event["field"], event.get("text", "")
            if field == "tool_calls" and self._pattern is not None:
                if kind == "region_open":
                    self._region = _Region(self._pattern, self._tools)
                    self._content.delimit()
                    self._reasoning.delimit()
                assert self._region is not None
                for name, arguments in self._region.push(text):
                    self._calls.add(name, arguments)
                if kind == "region_close":
                    calls, rest = self._region.close(is_cut=self._is_cut)
                    for each in calls:
                        self._calls.add(*each)
                    content += self._content.push(rest, is_last=False)
            elif field in REASONING_FIELDS:
                self._content.delimit()
                reasoning += self._reasoning.push(text, is_last=False)
            elif field == "content":
                self._reasoning.delimit()
                content += self._content.push(text, is_last=False)
        return reasoning, content


class ForcedCalls:
    """Parses JSON of guided decoding: arguments of the function `name`, or a list of calls."""

    _PATTERN = CallPattern("", is_json=True)

    def __init__(self, name: str | None, *, is_parallel: bool = True):
        self._name = name
        self._has_begun = False
        self._calls = _Calls(is_parallel=is_parallel)
        self._region = _Region(self._PATTERN, ())

    def push(self, text: str, *, is_last: bool) -> ReplyDelta:
        """See `ReplyParser.push`."""
        if self._name is None:
            for name, arguments in self._region.push(text):
                self._calls.add(name, arguments)
            content = self._region.close(is_cut=False)[1] if is_last else ""
            return ReplyDelta("", content, self._calls.take())
        if text:
            self._calls.add(None if self._has_begun else self._name, text)
            self._has_begun = True
        return ReplyDelta(tool_calls=self._calls.take())
