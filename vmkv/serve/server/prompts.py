"""Text to tokens, in a thread of its own: a long prompt must not stop other clients' streams."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jinja2

from ...errors import ConfigError
from .errors import invalid

#: Names that a template's caller may not set: they are arguments of `apply_chat_template`.
_RESERVED = frozenset(
    {"conversation", "tokenize", "chat_template", "return_tensors", "return_dict", "padding"}
    | {"truncation", "max_length", "tokenizer_kwargs", "continue_final_message"}
)


class Prompts:
    """Makes tokens of prompts and chats.

    Args:
        tokenizer: A transformers tokenizer.
        chat_template: Instead of the tokenizer's own.
    """

    def __init__(self, tokenizer: Any, chat_template: str | None = None):
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        # One thread: tokenizers hold state (truncation, padding) that two would fight over.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vmkv-tokenizer")

    async def encode(self, prompt: str, *, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text."""
        return await self._run(self._encode, prompt, add_special_tokens)

    async def encode_chat(
        self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool, options: Any
    ) -> list[int]:
        """The tokens of a chat, by the tokenizer's template.

        Raises `ApiError`: there is no template, or it refuses such a chat.
        """
        return await self._run(self._encode_chat, messages, add_generation_prompt, options)

    def check_token_ids(self, token_ids: Sequence[int]) -> None:
        """Raise `ApiError` where a client sent tokens that do not exist."""
        num_tokens = len(self._tokenizer)
        wrong = next((each for each in token_ids if not 0 <= each < num_tokens), None)
        if wrong is not None:
            raise invalid(f"token {wrong} is none of the model's {num_tokens} tokens", "prompt")

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run(self, function: Any, *arguments: Any) -> list[int]:
        loop = asyncio.get_running_loop()
        tokens: list[int] = await loop.run_in_executor(self._thread, function, *arguments)
        return tokens

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            # `verbose`: it would warn of lengths that are for the server to judge.
            encoded = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
        except (UnicodeError, TypeError) as error:  # Half a surrogate pair is no text.
            raise invalid(f"the tokenizer cannot read this text: {error}", "prompt") from error
        return list(encoded["input_ids"])

    def _encode_chat(
        self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool, options: Any
    ) -> list[int]:
        extra = dict(options or {})
        taken = sorted(_RESERVED & extra.keys())
        if taken:
            raise invalid(f"chat_template_kwargs may not set {taken}", "chat_template_kwargs")
        if self._chat_template is None and not self._tokenizer.chat_template:
            raise invalid(
                "this model's tokenizer has no chat template: use /v1/completions, or start the "
                "server with --chat-template FILE",
                "messages",
            )
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                chat_template=self._chat_template,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **extra,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise invalid(
                f"the model's chat template refuses these messages: {error}", "messages"
            ) from error
        return self._encode(text, False)


def read_template(path: str) -> str:
    """A chat template from a file.

    Raises:
        ConfigError: It cannot be read, or is no template.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        jinja2.Environment().parse(text)
    except (OSError, UnicodeDecodeError, jinja2.TemplateError) as error:
        raise ConfigError(f"chat template {path}: {error}") from error
    return text
