"""Items: the parts of a conversation or an answer in the Responses and the Messages API.

A request becomes a `ChatRequest`, so that it passes the checks of a chat and is served as one. The
parts of the reply become items: reasoning, texts and tool calls, one after the other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator, model_validator
from pydantic_core import PydanticCustomError

from ...errors import shown
from ..request import CompletionOutput
from .choices import ChatForm, compact, event
from .errors import invalid
from .formats import Lenient
from .schema import ChatRequest, GenerationRequest, validated

# ---- requests ------------------------------------------------------------------------------------


class TypedItem(Lenient):
    """A part of a body whose `type` says which fields it `needs`; others are ignored."""

    needs: ClassVar[Mapping[str, Sequence[str]]]

    type: str

    @model_validator(mode="after")
    def _check_needs(self) -> TypedItem:
        known = self.needs.get(self.type)
        if known is None:
            of = {"type": shown(self.type), "known": ", ".join(self.needs)}
            raise PydanticCustomError("item_type", "type {type} is not served, only: {known}", of)
        for name in known:
            if getattr(self, name) is None:
                of = {"type": self.type, "name": name}
                raise PydanticCustomError("item_field", "an item of type {type} needs {name}", of)
        return self


class ItemsRequest(GenerationRequest):
    """Parameters of a request that is served as a chat with one choice."""

    chat_template_kwargs: dict[str, Any] | None = None

    def as_chat(self, messages: Sequence[Mapping[str, Any]], **converted: Any) -> ChatRequest:
        """Return a chat with messages, converted parameters and shared ones; raises `ApiError`."""
        if self.n not in (None, 1):
            raise invalid("n: this route makes one answer; use /v1/chat/completions", "n")
        shared = self.model_fields_set & {*GenerationRequest.model_fields, "chat_template_kwargs"}
        given = self.model_dump(include=shared, by_alias=True)
        given |= {name: value for name, value in converted.items() if value is not None}
        return validated({**given, "messages": list(messages)}, ChatRequest)


class FunctionTool(TypedItem):
    """A function that the model may call, or has to."""

    needs: ClassVar[Any] = {"function": ("name",)}

    name: str | None = None
    namespace: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def as_chat(self) -> dict[str, Any]:
        """Return the tool, or the choice of it, as a chat has it."""
        parts = {"name", "description", "parameters", "strict"}
        function = self.model_dump(include=parts, exclude_none=True)
        function["name"] = full_name(self.namespace, self.name)
        return {"type": "function", "function": function}


class TextPart(TypedItem):
    """A text; also one by which the model has refused to answer."""

    text: str | None = None
    refusal: str | None = None


def text_parts(content: str | Sequence[TextPart]) -> list[dict[str, Any]]:
    """Return the content of a chat's message."""
    parts = [TextPart.model_construct(text=content)] if isinstance(content, str) else content
    return [{"type": "text", "text": part.text or part.refusal or ""} for part in parts]


def dropping(kinds: Collection[str]) -> BeforeValidator:
    """Return a validator that drops the items of these types from a list."""

    def kept(found: Any) -> Any:
        is_list = isinstance(found, list)
        return [each for each in found if _type_of(each) not in kinds] if is_list else found

    return BeforeValidator(kept)


def _type_of(item: Any) -> Any:
    return item.get("type") if isinstance(item, dict) else None


def full_name(namespace: str | None, name: str | None) -> str | None:
    """Return the name of a function of a namespace, as in vLLM."""
    return f"{namespace}__{name}" if namespace else name


def add_call(message: dict[str, Any], call_id: str | None, name: str | None, text: str) -> None:
    """Append a tool call with the text of its arguments to a chat's message."""
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}
    message.setdefault("tool_calls", []).append(call)


# ---- answers -------------------------------------------------------------------------------------

Kind: TypeAlias = Literal["reasoning", "text", "call"]
#: A server-sent event; its `type` is its name.
Event: TypeAlias = dict[str, Any]


@dataclass
class Item:
    """A part of an answer; `number` is its place."""

    kind: Kind
    number: int
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The reasoning, the text, or the arguments of the call."""
        return "".join(self.pieces)


#: What happens to an item, and the text by which it grows.
Change: TypeAlias = tuple[Literal["begins", "grows", "ends"], Item, str]


class ItemWriter(ChatForm, ABC):
    """Divides a reply into items, one of which is open; subclasses have an API's format."""

    def __init__(self, *its: Any, **names: Any):
        super().__init__(*its, **names)
        self.items: list[Item] = []
        self._has_begun = False
        #: The delta that ended the answer, and the number of the open item's call.
        self._last: CompletionOutput | None = None
        self._call: int | None = None

    def add(self, delta: CompletionOutput) -> None:
        """See `Form.add`."""
        for _ in self._changes(delta):
            pass

    async def whole(self) -> deque[bytes | bytearray]:
        """See `Form.whole`."""
        return deque([compact(self._answer())])

    def events(self, delta: CompletionOutput) -> bytes:
        """See `Form.events`."""
        told = [] if self._has_begun else list(map(event, self._begin()))
        self._has_begun = True
        for change in self._changes(delta):
            told += map(event, self._tell(*change))
        return b"".join(told)

    def end(self) -> bytes:
        """See `Form.end`."""
        return b"".join(map(event, self._finish()))

    @abstractmethod
    def _answer(self) -> dict[str, Any]:
        """Return the whole answer."""

    @abstractmethod
    def _begin(self) -> Iterator[Event]: ...

    @abstractmethod
    def _tell(self, what: str, item: Item, piece: str) -> Iterator[Event]: ...

    @abstractmethod
    def _finish(self) -> Iterator[Event]: ...

    def _changes(self, delta: CompletionOutput) -> Iterator[Change]:
        reply = self.reply(delta)
        for call in reply.tool_calls:  # Text may follow the rest of a call.
            if call.index == self._call:
                yield from self._grow("call", call.arguments)
        if reply.reasoning:
            yield from self._grow("reasoning", reply.reasoning)
        if reply.content:
            yield from self._grow("text", reply.content)
        for call in reply.tool_calls:
            if call.id is not None:
                yield from self._open("call", call.id, call.name or "")
                self._call = call.index
                if call.arguments:
                    yield from self._grow("call", call.arguments)
        if delta.is_finished:
            self._last = delta
            yield from self._close()

    def _grow(self, kind: Kind, piece: str) -> Iterator[Change]:
        if not self.items or self.items[-1].kind != kind:
            yield from self._open(kind)
        self.items[-1].pieces.append(piece)
        yield "grows", self.items[-1], piece

    def _open(self, kind: Kind, call_id: str = "", name: str = "") -> Iterator[Change]:
        yield from self._close()
        self._call = None
        self.items.append(Item(kind, len(self.items), call_id, name))
        yield "begins", self.items[-1], ""

    def _close(self) -> Iterator[Change]:
        if self.items:
            yield "ends", self.items[-1], ""
