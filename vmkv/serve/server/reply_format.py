"""Chooses how a model's answers are parsed: by its response template, or as forced tool calls.

A response template is the tokenizer's own, an option's, or one of `response_templates.json` that
fits the chat template: all texts of its `match` occur there. The first that fits is taken.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import regex

from ...errors import ConfigError, one_line
from ..files import known_templates
from ..params import SamplingParams, StructuredOutputs
from .errors import invalid
from .reply import REASONING_FIELDS, CallPattern, ForcedCalls, NewParser, TemplateParser
from .tools import NamedChoice, forced_schema

if TYPE_CHECKING:
    from .schema import ChatRequest

try:
    from transformers.utils.chat_parsing import ResponseParser, parse_response
    from transformers.utils.chat_parsing.response_templates import load_response_template

    _CAN_PARSE = "tools" in inspect.signature(parse_response).parameters
except ImportError:
    _CAN_PARSE = False

#: Tokens at the end of a prompt that are searched for the beginning of the answer.
_PREFIX_TOKENS = 1024
_NEEDS_RELEASE = "tool calls of the model's own choice need transformers 5.17 or later here"
#: Arguments whose text in the answer is JSON already.
_JSON_ARGUMENTS = ("{content}", {"name": "{name}", "arguments": "{content}"})


class ReplyFormat:
    """A response template, prepared for parsing.

    Raises:
        ConfigError: It is no response template, or the installed transformers cannot parse it.
    """

    def __init__(self, template: Mapping[str, Any]):
        if not _CAN_PARSE:
            raise ConfigError(f"response templates cannot be used: {_NEEDS_RELEASE}")
        try:
            load_response_template(template)
            fields = {name: _bounded(each) for name, each in template["fields"].items()}
            calls = fields.get("tool_calls")
            self.has_reasoning = any(each in fields for each in REASONING_FIELDS)
            self.pattern: CallPattern | None = None
            if calls is not None:
                self.pattern = _call_pattern(template, calls)
                fields["tool_calls"] = _as_text(calls)
            self._template = load_response_template({**template, "fields": fields})
        except Exception as error:
            raise ConfigError(f"no valid response template: {one_line(error)}") from error

    def parser(self, prompt_end: str, **options: Any) -> TemplateParser:
        """Make a `TemplateParser` for the answer to a prompt; `options` are the parser's."""
        begun = self._template.truncate_past_last_anchor(prompt_end)
        begun = "" if begun == prompt_end else begun
        parser = ResponseParser(self._template, prefix=begun)
        return TemplateParser(parser, self.pattern, **options)


#: Characters of one kind, as many as there are, at a pattern's beginning.
_RUN = regex.compile(
    r"\A((?:\((?:\?:|\?P?<\w+>)?)*)(\\.|\[\^?+\]?+(?:\\.|[^]\\])*\]|[^\\[()|])([*+])", regex.DOTALL
)


def _bounded(of: Mapping[str, Any]) -> dict[str, Any]:
    """Return a field whose delimiters are not sought again at each place of one run.

    Otherwise the time grows with the square of an answer's white space. The last alternative, which
    never matches, keeps `regex` from seeking a text that all matches have: that takes the square.
    """
    names = of.keys() & {"open_pattern", "close_pattern"}
    return {**of} | {name: _RUN.sub(r"\1(?:(?<!\2)|\\G)\2\3", of[name]) + "|(?!)" for name in names}


def _call_pattern(template: Mapping[str, Any], calls: Mapping[str, Any]) -> CallPattern:
    only = load_response_template({**template, "fields": {"tool_calls": calls}})

    def whole(text: str, tools: Any) -> list[tuple[str, str]]:
        found = parse_response(text, only, prefix="", tools=tools)["tool_calls"]
        listed = [each for one in found for each in (one if isinstance(one, list) else [one])]
        return [_name_and_arguments(each["function"]) for each in listed]

    form = (calls.get("transform") or {}).get("function")
    is_json = calls.get("content") == "json" and not calls.get("content_args")
    return CallPattern(
        _delimiter(calls, "open"),
        is_json=is_json and form in _JSON_ARGUMENTS,
        closing=_delimiter(calls, "close"),
        whole=whole,
    )


def _delimiter(calls: Mapping[str, Any], name: str) -> str:
    if f"{name}_pattern" in calls:
        return str(calls[f"{name}_pattern"])
    texts = calls.get(name, "")
    texts = [texts] if isinstance(texts, str) else texts
    return "|".join(regex.escape(each) for each in sorted(texts, key=len, reverse=True))


def _as_text(calls: Mapping[str, Any]) -> dict[str, Any]:
    text = {each: calls[each] for each in ("close", "close_pattern") if each in calls}
    text |= {"content": "text", "content_args": {"strip": False}, "repeats": True}
    pattern = f"(?={_delimiter(calls, 'open')})"
    return text | {"open_pattern": regex.sub(r"\(\?P<\w+>", "(?:", pattern)}


def _name_and_arguments(function: Mapping[str, Any]) -> tuple[str, str]:
    name = function["name"]
    if not isinstance(name, str):
        raise TypeError("the name of a function is no text")
    arguments = function.get("arguments", function.get("parameters", {}))
    is_text = isinstance(arguments, str)
    return name, arguments if is_text else json.dumps(arguments, ensure_ascii=False)


# ---- choice --------------------------------------------------------------------------------------


def _found(tokenizer: Any, chat_template: str | None) -> Mapping[str, Any] | None:
    own: Mapping[str, Any] | None = getattr(tokenizer, "response_template", None)
    if own is not None:
        return own
    text: Any = chat_template or tokenizer.chat_template or ""
    if is_mistral_common(tokenizer):
        text = "".join(tokenizer.all_special_tokens)
    elif isinstance(text, dict):
        text = "".join(text.values())
    for each in known_templates().values():
        if all(part in text for part in each["match"]):
            return each["template"]  # type: ignore[no-any-return]
    return None


def is_mistral_common(tokenizer: Any) -> bool:
    """Whether a tokenizer is mistral-common's, which has no chat template."""
    return type(tokenizer).__name__.startswith("MistralCommon")


def _special_tokens(tokenizer: Any) -> Any:
    texts = set(tokenizer.all_special_tokens)
    if not is_mistral_common(tokenizer):
        added = tokenizer.added_tokens_decoder.values()
        texts |= {str(each.content) for each in added if each.special}
    ordered = sorted((each for each in texts if each), key=len, reverse=True)
    return regex.compile("|".join(map(regex.escape, ordered))) if ordered else None


class Replies:
    """Says how the answers of a model are parsed.

    Raises `ConfigError` if a response template, given or the tokenizer's own, is invalid.
    """

    def __init__(
        self,
        tokenizer: Any,
        chat_template: str | None = None,
        response_template: Mapping[str, Any] | None = None,
    ):
        self._tokenizer = tokenizer
        self._format: ReplyFormat | None = None
        #: The same without tool calls, for requests without tools.
        self._reasoning_only: ReplyFormat | None = None
        template = response_template
        if template is None and _CAN_PARSE:
            template = _found(tokenizer, chat_template)
        if template is not None:
            self._format = ReplyFormat(template)
            if self._format.has_reasoning:
                fields = {k: v for k, v in template["fields"].items() if k != "tool_calls"}
                self._reasoning_only = ReplyFormat({**template, "fields": fields})
        self._special_tokens = _special_tokens(tokenizer)

    def plan(
        self, body: ChatRequest, params: SamplingParams
    ) -> tuple[SamplingParams, NewParser | None]:
        """Return the parameters of a chat, and what parses each choice, if anything.

        Raises `ApiError` if the request has tools and the model's format of tool calls is unknown.
        """
        choice, is_parallel = body.effective_tool_choice, body.parallel_tool_calls is not False
        if choice == "required" or isinstance(choice, NamedChoice):
            schema = forced_schema(body.tools or (), choice, is_parallel=is_parallel)
            name = choice.function.name if isinstance(choice, NamedChoice) else None
            params = replace(params, structured_outputs=StructuredOutputs(json=schema))
            return params, lambda _: ForcedCalls(name, is_parallel=is_parallel)
        has_tools = choice == "auto"
        form = self._format if has_tools else self._reasoning_only
        if has_tools and (form is None or form.pattern is None):
            raise invalid(
                _NEEDS_RELEASE
                if not _CAN_PARSE
                else "the format of this model's tool calls is unknown: start the server with "
                "--response-template, or send tool_choice required, none or a function",
                "tools",
            )
        if form is None or params.structured_outputs:
            return params, None
        special = self._special_tokens if params.skip_special_tokens else None
        tools = body.template_tools or [] if has_tools else []

        def new_parser(prompt_token_ids: Sequence[int]) -> TemplateParser:
            end = list(prompt_token_ids[-_PREFIX_TOKENS:])
            text = self._tokenizer.decode(end, skip_special_tokens=False)
            return form.parser(text, tools=tools, special_tokens=special, is_parallel=is_parallel)

        return replace(params, skip_special_tokens=False), new_parser
