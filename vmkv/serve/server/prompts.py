"""Converts text to tokens in threads, so that a long prompt does not block other streams."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ...units import div_ceil
from ..grammar_trial import GrammarTrials
from ..guided import is_fast, vocabulary_of
from ..params import SamplingParams, StructuredOutputs, tokenised
from .errors import full_context, invalid
from .formats import checked
from .reply_format import is_mistral_common

if TYPE_CHECKING:
    from .schema import ChatBody

#: Names that a request's template arguments may not use: arguments of `apply_chat_template`.
_RESERVED = frozenset(
    {"conversation", "tokenize", "chat_template", "return_tensors", "return_dict", "padding"}
    | {"truncation", "max_length", "tokenizer_kwargs", "continue_final_message"}
    | {"add_generation_prompt", "tools"}
)
#: Roles of instructions.
SYSTEMS = ("system", "developer")
#: A longer text takes more than some 50 ms, and goes to the thread for long texts.
_LONG_CHARS = 1 << 16


@dataclass(frozen=True)
class TextPrompt:
    """A text to be continued."""

    text: str
    add_special_tokens: bool = True

    @property
    def num_chars(self) -> int:
        """Characters to tokenise."""
        return len(self.text)

    num_read_chars = num_chars


T = TypeVar("T")
Prompt: TypeAlias = "TextPrompt | ChatBody | Sequence[int]"


class Prompts:
    """Tokenises prompts and chats of at most `max_tokens` tokens, in threads.

    Control tokens that a client's text spells out become real ones, as with vLLM.
    """

    def __init__(self, tokenizer: Any, max_tokens: int, chat_template: str | None = None):
        # One for short texts and one for long ones: a call changes a tokenizer's truncation.
        self._tokenizers = [copy.deepcopy(tokenizer) for _ in range(2)]
        self._tokenizer = self._tokenizers[0]
        self._max_tokens = max_tokens
        self._chat_template = chat_template
        self._num_tokens = len(tokenizer)
        # An upper bound on the characters of `max_tokens` tokens.
        self._max_chars = max_tokens * max(map(len, tokenizer.get_vocab()), default=1)
        # Short prompts do not wait for long ones, and none for a grammar.
        self._threads = [
            ThreadPoolExecutor(1, thread_name_prefix=f"vmkv-tokenizer-{name}")
            for name in ("short", "long", "grammar")
        ]
        # Now, since it holds the interpreter.
        self._trials = GrammarTrials(*(vocabulary_of(tokenizer) if is_fast(tokenizer) else ()))

    def check(self, prompt: Prompt) -> None:
        """Raise `ApiError` for a prompt that is surely too long or has an unknown token."""
        if not isinstance(prompt, Sequence):
            self._check_chars(prompt.num_chars)
            return
        if len(prompt) > self._max_tokens:
            raise full_context(len(prompt), self._max_tokens)
        if prompt and not 0 <= min(prompt) <= max(prompt) < self._num_tokens:
            wrong = next(each for each in prompt if not 0 <= each < self._num_tokens)
            raise invalid(
                f"token {wrong} is none of the model's {self._num_tokens} tokens", "prompt"
            )

    async def tokens(self, prompt: Prompt, num_kept: int | None = None) -> Sequence[int]:
        """Return a prompt's tokens, or its last `num_kept` ones; `ApiError` if it is refused."""
        if isinstance(prompt, Sequence):
            if num_kept is not None:
                prompt = prompt[-num_kept:]
                self.check(prompt)
            return prompt
        is_long = prompt.num_read_chars > _LONG_CHARS
        return await self._in_thread(is_long, self._encode_prompt, prompt, num_kept, is_long)

    async def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        is_long = len(token_ids) > _LONG_CHARS
        return await self._in_thread(is_long, self._tokenizer.decode, list(token_ids))

    async def grammar(self, form: StructuredOutputs) -> StructuredOutputs:
        """Return a grammar that compiles, see `checked`. One that is known waits for no other."""
        if self._trials.verdicts.get(form) == "":
            return form
        return await self._in_thread(2, checked, form, self._trials)

    async def tokenised(self, params: SamplingParams) -> SamplingParams:
        """Return parameters with bad words as tokens; raises `ConfigError`."""
        if not params.bad_words:
            return params
        return await self._in_thread(1, tokenised, params, self._tokenizers[1])

    async def _in_thread(self, number: int, call: Callable[..., T], *arguments: Any) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads[number], call, *arguments)

    def strings(self, token_ids: Sequence[int]) -> list[str]:
        """Return the vocabulary's entries of tokens."""
        found: list[str] = self._tokenizer.convert_ids_to_tokens(list(token_ids))
        return found

    def close(self) -> None:
        """Stop the threads, and the process of grammars."""
        for thread in self._threads:
            thread.shutdown(wait=False, cancel_futures=True)
        self._trials.close()

    def _encode_prompt(
        self, prompt: TextPrompt | ChatBody, num_kept: int | None, is_long: bool
    ) -> list[int]:
        if isinstance(prompt, TextPrompt):
            text, param = prompt.text, "prompt"
        else:
            text, param = self._render(prompt), "messages"
            if not isinstance(text, str):
                return self._cut(list(text), num_kept)
            if num_kept is None:
                self._check_chars(len(text))
        if num_kept is not None:
            text = text[-self._max_chars :]  # The tokens need no more.
        try:
            encoded = self._tokenizers[is_long](
                text,
                add_special_tokens=bool(prompt.add_special_tokens),
                verbose=False,
            )
        except (UnicodeError, TypeError) as error:  # Half a surrogate pair is no text.
            raise invalid(f"the tokenizer cannot read this text: {error}", param) from error
        return self._cut(list(encoded["input_ids"]), num_kept)

    def _render(self, chat: ChatBody) -> Any:
        extra = chat.chat_template_kwargs or {}
        taken = sorted(_RESERVED & extra.keys())
        if taken:
            raise invalid(f"chat_template_kwargs may not set {taken}", "chat_template_kwargs")
        is_mistral = is_mistral_common(self._tokenizer)
        if chat.reasoning_effort == "none" and not is_mistral:
            extra = {"enable_thinking": False, "thinking": False} | extra
        if chat.reasoning_effort is not None:
            extra = {"reasoning_effort": chat.reasoning_effort} | extra
        if not (is_mistral or self._chat_template or self._tokenizer.chat_template):
            raise invalid(
                "this model's tokenizer has no chat template: use /v1/completions, or start the "
                "server with --chat-template FILE",
                "messages",
            )
        extra = extra if is_mistral else extra | {"chat_template": self._chat_template}
        found: list[Any] = []
        errors: list[Exception] = []
        for num_systems in (None, 1, 0):
            if found and not num_systems:
                break
            try:
                try:
                    text, systems = self._apply(chat, extra, num_systems, as_text=is_mistral)
                except TypeError:  # Some templates join the arguments' text with others.
                    if is_mistral or not any(each.tool_calls for each in chat.messages or ()):
                        raise
                    text, systems = self._apply(chat, extra, num_systems, as_text=True)
            except Exception as error:  # noqa: BLE001  # A template is a program.
                errors.append(error)
                continue
            if is_mistral or all(each in text for each in systems):
                return text
            found.append(text)
        if found:  # None has every system message.
            return found[0]
        reason = f"{type(errors[0]).__name__}: {errors[0]}"
        raise invalid(
            f"the model's chat template refuses these messages: {reason}", "messages"
        ) from errors[0]

    def _apply(
        self, chat: ChatBody, options: dict[str, Any], num_systems: int | None, *, as_text: bool
    ) -> tuple[Any, list[str]]:
        """Return the template's text, and the late system messages that it must contain.

        At most `num_systems` stay messages, as many templates take one, or none.
        """
        own = getattr(self._tokenizer, "chat_template", "")
        knows = "developer" in str(options.get("chat_template") or own)
        messages = chat.conversation(as_text=as_text, knows_developer=knows)
        # The first one may be changed, as by templates that take options from it.
        systems = [each["content"].strip() for each in messages[1:] if each["role"] in SYSTEMS]
        rendered = self._tokenizer.apply_chat_template(
            messages if num_systems is None else _folded(messages, num_systems),
            tools=chat.template_tools,
            add_generation_prompt=chat.begins_answer,
            continue_final_message=chat.continue_final_message,
            tokenize=is_mistral_common(self._tokenizer),
            return_dict=False,
            **options,
        )
        return rendered, systems

    def _cut(self, token_ids: list[int], num_kept: int | None) -> list[int]:
        if num_kept is not None:
            return token_ids[-num_kept:]
        if len(token_ids) > self._max_tokens:
            raise full_context(len(token_ids), self._max_tokens)
        return token_ids

    def _check_chars(self, num_chars: int) -> None:
        if num_chars > self._max_chars:
            num_tokens = div_ceil(num_chars * self._max_tokens, self._max_chars)
            raise full_context(num_tokens, self._max_tokens, least="at least ")


def _folded(messages: Sequence[dict[str, Any]], num_systems: int) -> list[dict[str, Any]]:
    """Make system messages parts of their neighbours, all but a first one if `num_systems` is 1."""
    found: list[dict[str, Any]] = []
    is_open = False  # Whether the last one was made here, and the next one of the user joins it.
    for each in messages:
        is_part = each["role"] in SYSTEMS and bool(found or not num_systems)
        own = {"role": "user", "content": each["content"]} if is_part else each
        joins = is_part and found and found[-1]["role"] != "assistant"
        if joins or (is_open and each["role"] == "user"):
            own = {**found[-1], "content": f"{found[-1]['content']}\n\n{each['content']}"}
            found.pop()
        is_open = is_part and (is_open or not joins)
        found.append(own)
    return found
