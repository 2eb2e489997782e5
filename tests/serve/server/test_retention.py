"""Hints of clients say how long a conversation stays cached before others of its tenant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from vmkv import Engine, SamplingParams
from vmkv.serve.server.messages import MessagesRequest
from vmkv.serve.server.responses import ResponsesRequest
from vmkv.serve.server.schema import ChatRequest, CompletionRequest, validated
from vmkv.units import MiB


@pytest.mark.parametrize(
    ("given", "retention_s"),
    [
        ({}, 0),
        ({"prompt_cache_key": "x"}, 600),
        ({"prompt_cache_retention": "24h"}, 24 * 3600),
        ({"prompt_cache_key": "x", "prompt_cache_retention": "in_memory"}, 600),
        ({"prompt_cache_key": "x", "prompt_cache_retention": "of another time"}, 0),
    ],
)
def test_openais_hints_say_how_long_prefixes_stay(given: dict[str, str], retention_s: int) -> None:
    says = {"messages": [{"role": "user", "content": "a"}]}
    for body, kind in (
        (says, ChatRequest),
        ({"prompt": "a"}, CompletionRequest),
        ({"input": "a"}, ResponsesRequest),
    ):
        request = validated({"model": "tiny", **body, **given}, kind)
        chat = request.chat() if isinstance(request, ResponsesRequest) else request
        assert retention_s == chat.sampling_params().retention_s


@pytest.mark.parametrize("ttl", [None, "5m", "1h"])
@pytest.mark.parametrize("place", ["body", "system", "tools", "content", "result"])
def test_anthropics_hints_say_how_long_prefixes_stay(place: str, ttl: str | None) -> None:
    """The longest one counts, where it stands does not."""
    control = {"type": "ephemeral"} if ttl is None else {"type": "ephemeral", "ttl": ttl}
    hint: dict[str, Any] = {"cache_control": control}
    text = {"type": "text", "text": "a"}
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "b"}
    body = {
        "model": "tiny",
        "max_tokens": 5,
        "system": [text | (hint if place == "system" else {})],
        "tools": [{"name": "f", "input_schema": {}} | (hint if place == "tools" else {})],
        "messages": [
            {"role": "user", "content": [text | (hint if place == "content" else {})]},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result | (hint if place == "result" else {})]},
        ],
    } | (hint if place == "body" else {})
    chat = validated(body, MessagesRequest).chat()
    assert (3600 if ttl == "1h" else 300) == chat.sampling_params().retention_s


def test_a_conversation_outlives_later_ones(make_engine: Callable[..., Engine]) -> None:
    """Its memory is taken last, and first again once its time has passed."""
    engine = make_engine(budget_bytes=MiB)
    greedy = SamplingParams(temperature=0, max_tokens=1)
    asked = [list(range(first, first + 40)) for first in range(3, 53, 10)]
    for at, prompt in enumerate(asked):
        engine.generate([prompt], replace(greedy, retention_s=0.0 if at else 3600.0))
    rows = engine.cache.rows
    first, *others = [_row_of(engine, prompt) for prompt in asked]
    assert [*others, first] == rows.in_order()
    engine._tell_time(rows.now_s + 3601)
    assert [first, *others] == rows.in_order()


def _row_of(engine: Engine, prompt: list[int]) -> int:
    (row,) = (
        row
        for row in engine.cache.rows.parked
        if engine.cache.prefixes.token_ids(row)[:40] == prompt
    )
    return row
