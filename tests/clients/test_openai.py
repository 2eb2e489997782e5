"""OpenAI's client: completions, chats, structured output, tools, responses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from helpers import client_cases as cases

pytestmark = pytest.mark.clients
GREEDY: dict[str, Any] = {"model": cases.MODEL, "temperature": 0, "max_tokens": cases.MAX_TOKENS}
CHAT = GREEDY | {"messages": cases.MESSAGES}
NAMED = {"type": "function", "function": {"name": "get_time"}}
SCHEMA = {"name": "city", "strict": True, "schema": cases.City.model_json_schema()}


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def plain(client: Any) -> str:
    """The greedy answer to the question."""
    return client.chat.completions.create(**CHAT).choices[0].message.content


def tokens_of(url: str, text: str) -> list[int]:
    """The tokens of a text without special ones."""
    body = {"model": cases.MODEL, "prompt": text, "add_special_tokens": False}
    return httpx.post(f"{url}/tokenize", json=body, timeout=60).raise_for_status().json()["tokens"]


# ---- text ----------------------------------------------------------------------------------------


def test_models(client: Any) -> None:
    assert [cases.MODEL] == [each.id for each in client.models.list()]
    assert cases.MODEL == client.models.retrieve(cases.MODEL).id


def test_chat(client: Any) -> None:
    answer = client.chat.completions.create(**CHAT)
    assert cases.ANSWER in answer.choices[0].message.content
    assert "stop" == answer.choices[0].finish_reason
    assert not answer.choices[0].message.tool_calls
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 0 < usage.completion_tokens <= cases.MAX_TOKENS


def test_stream(client: Any, plain: str) -> None:
    """A stream has the same text, and its usage at the end where that is asked for."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = client.chat.completions.create(**CHAT, **options)
    assert plain == "".join(each.choices[0].delta.content or "" for each in chunks)
    assert "stop" == chunks[-1].choices[0].finish_reason
    assert [] == last.choices
    assert last.usage.completion_tokens > 0


def test_logprobs(client: Any, plain: str) -> None:
    answer = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=3)
    found = answer.choices[0].logprobs.content
    assert b"".join(bytes(each.bytes) for each in found).decode().startswith(plain)
    assert all(3 == len(each.top_logprobs) and each.logprob <= 0 for each in found)
    assert all(each.token == each.top_logprobs[0].token for each in found), "it is greedy"


def test_samples_and_seed(client: Any) -> None:
    """Several samples differ from each other, and a seed repeats them."""
    asked = CHAT | {"n": 3, "seed": 7, "temperature": 1.5, "max_tokens": 16}
    first, second = (client.chat.completions.create(**asked) for _ in range(2))
    texts = [each.message.content for each in first.choices]
    assert [0, 1, 2] == [each.index for each in first.choices]
    assert len(set(texts)) > 1
    assert texts == [each.message.content for each in second.choices]


def test_completion(client: Any) -> None:
    asked = GREEDY | {"prompt": "The capital of France is", "max_tokens": 8}
    whole = client.completions.create(**asked).choices[0].text
    assert cases.ANSWER in whole
    stream = client.completions.create(**asked, stream=True)
    assert whole == "".join(each.choices[0].text for each in stream)


def test_more_than_four_stop_strings(client: Any, plain: str) -> None:
    stops = ["§1", "§2", "§3", "§4", "§5", "§6", "§7", cases.ANSWER]
    answer = client.chat.completions.create(**CHAT, stop=stops)
    assert plain.partition(cases.ANSWER)[0] == answer.choices[0].message.content
    assert "stop" == answer.choices[0].finish_reason


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_with_logprobs(client: Any, max_tokens: int) -> None:
    """The first token of a prompt has no log-probability; evaluation harnesses read the others."""
    prompt = "The capital of France is Paris"
    asked = GREEDY | {"prompt": prompt, "max_tokens": max_tokens, "echo": True, "logprobs": 1}
    answer = client.completions.create(**asked)
    choice, found = answer.choices[0], answer.choices[0].logprobs
    assert choice.text.startswith(prompt)
    assert (max_tokens > 0) == (choice.text != prompt)
    assert max_tokens == (answer.usage.completion_tokens or 0)
    assert choice.text == "".join(found.tokens)
    assert answer.usage.prompt_tokens + max_tokens == len(found.tokens) == len(found.token_logprobs)
    assert found.token_logprobs[0] is None
    assert all(each <= 0 for each in found.token_logprobs[1:])
    at = found.text_offset.index(prompt.index(" Paris"))
    assert found.token_logprobs[at] == max(found.top_logprobs[at].values()) > -1


def test_echo_of_token_prompts(client: Any, url: str) -> None:
    """Several prompts of tokens, as lm-eval sends them."""
    prompts = [tokens_of(url, text) for text in ("one two three four", "red green blue")]
    asked = {"max_tokens": 1, "echo": True, "logprobs": 1, "seed": 1234}
    answer = client.completions.create(**GREEDY | asked, prompt=prompts)
    found = [choice.logprobs for choice in answer.choices]
    assert [len(each) + 1 for each in prompts] == [len(each.token_logprobs) for each in found]


def test_logit_bias(client: Any, url: str, plain: str) -> None:
    """A biased token is always or never drawn."""
    [token] = tokens_of(url, " banana")
    always = CHAT | {"logit_bias": {str(token): 100}, "max_tokens": 3}
    answer = client.chat.completions.create(**always)
    assert " banana" * 3 == answer.choices[0].message.content
    never = {str(each): -100 for text in ("Paris", " Paris") for each in tokens_of(url, text)}
    answer = client.chat.completions.create(**CHAT, logit_bias=never)
    assert cases.ANSWER in plain
    assert cases.ANSWER not in answer.choices[0].message.content


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_effort": "low"},
        {"verbosity": "low", "service_tier": "auto", "store": False, "user": "me"},
        {"metadata": {"a": "b"}, "prompt_cache_key": "x", "safety_identifier": "me"},
        {"extra_body": {"cache_prompt": True, "keep_alive": 5, "session_id": "s", "provider": {}}},
        {"extra_body": {"thinking": {"type": "disabled"}, "request_id": "r", "top_k": -1}},
    ],
    ids=lambda fields: next(iter(fields.get("extra_body", fields))),
)
def test_fields_without_an_effect_here(client: Any, plain: str, fields: dict[str, Any]) -> None:
    answer = client.chat.completions.create(**CHAT, **fields)
    assert plain == answer.choices[0].message.content


def test_texts_as_parts(client: Any) -> None:
    content = [{"type": "text", "text": cases.QUESTION}]
    answer = client.chat.completions.create(
        **GREEDY, messages=[{"role": "user", "content": content}]
    )
    assert cases.ANSWER in answer.choices[0].message.content


def test_developer_message(client: Any) -> None:
    messages = [{"role": "developer", "content": "Answer in one sentence."}, *cases.MESSAGES]
    answer = client.chat.completions.create(**GREEDY, messages=messages)
    assert answer.choices[0].message.content


# ---- structured output ---------------------------------------------------------------------------


def test_parse(client: Any) -> None:
    answer = client.chat.completions.parse(**CHAT, response_format=cases.City)
    assert isinstance(answer.choices[0].message.parsed, cases.City)


def test_json_schema(client: Any) -> None:
    asked = CHAT | {"response_format": {"type": "json_schema", "json_schema": SCHEMA}}
    answer = client.chat.completions.create(**asked)
    cases.City.model_validate_json(answer.choices[0].message.content)
    assert "stop" == answer.choices[0].finish_reason
    stream = client.chat.completions.create(**asked, stream=True)
    streamed = "".join(each.choices[0].delta.content or "" for each in stream if each.choices)
    assert answer.choices[0].message.content == streamed


def test_json_object(client: Any) -> None:
    messages = [
        {"role": "user", "content": 'Reply in JSON, like {"city": "Rome"}: ' + cases.QUESTION}
    ]
    asked = GREEDY | {"messages": messages, "response_format": {"type": "json_object"}}
    answer = client.chat.completions.create(**asked | {"max_tokens": 400})
    assert "stop" == answer.choices[0].finish_reason
    assert isinstance(json.loads(answer.choices[0].message.content), dict)


def test_guided_by_choice_and_pattern(client: Any) -> None:
    """Forms that OpenAI lacks, by vLLM's names."""
    for form, expected in (
        ({"structured_outputs": {"choice": ["Rome", "Oslo"]}}, ("Rome", "Oslo")),
        ({"structured_outputs": {"regex": "[ab]{3}c"}}, None),
        ({"guided_choice": ["Rome", "Oslo"]}, ("Rome", "Oslo")),
    ):
        answer = client.chat.completions.create(**CHAT, extra_body=form)
        text = answer.choices[0].message.content
        assert text in expected if expected else (len(text), text[-1]) == (4, "c")


# ---- tools ---------------------------------------------------------------------------------------


def calls_of(message: Any) -> list[tuple[str, str]]:
    """The calls of a message, each checked."""
    calls = message.tool_calls or []
    for each in calls:
        assert each.id
        cases.check_call(each.function.name, each.function.arguments)
    assert len({each.id for each in calls}) == len(calls)
    return [(each.function.name, each.function.arguments) for each in calls]


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_tools_that_need_not_be_called(client: Any, choice: str | None) -> None:
    """The model may answer in words; `none` obliges it to."""
    asked = CHAT | {"tools": cases.TOOLS} | ({"tool_choice": choice} if choice else {})
    answer = client.chat.completions.create(**asked).choices[0]
    calls = calls_of(answer.message)
    assert answer.message.content or calls
    assert ("tool_calls" if calls else "stop") == answer.finish_reason
    assert choice != "none" or not calls


def test_required_tools(client: Any) -> None:
    answer = client.chat.completions.create(
        **CHAT, tools=cases.TOOLS, tool_choice="required"
    ).choices[0]
    assert len(calls_of(answer.message)) >= 1
    assert "tool_calls" == answer.finish_reason
    assert not answer.message.content


def test_a_named_tool(client: Any) -> None:
    """OpenAI ends with "stop" here; clients take either reason."""
    answer = client.chat.completions.create(**CHAT, tools=cases.TOOLS, tool_choice=NAMED).choices[0]
    assert ["get_time"] == [name for name, _ in calls_of(answer.message)]
    assert answer.finish_reason in ("stop", "tool_calls")


def test_one_call_where_parallel_ones_are_not_wanted(client: Any) -> None:
    asked = CHAT | {"tools": cases.TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    assert 1 == len(calls_of(client.chat.completions.create(**asked).choices[0].message))


@pytest.mark.parametrize("choice", ["auto", "required", NAMED], ids=["auto", "required", "named"])
def test_streamed_tools(client: Any, choice: Any) -> None:
    """The client's own accumulator finds the same calls as in a whole answer."""
    asked = CHAT | {"tools": cases.TOOLS, "tool_choice": choice}
    whole = client.chat.completions.create(**asked).choices[0]
    with client.chat.completions.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion().choices[0]
    assert calls_of(whole.message) == calls_of(final.message)
    assert whole.finish_reason == final.finish_reason
    assert (whole.message.content or "") == (final.message.content or "")
    assert bool(final.message.tool_calls) == ("tool_calls.function.arguments.delta" in kinds), (
        "arguments arrive as deltas"
    )


def test_tool_history(client: Any) -> None:
    """Assistants that called a tool have no content."""
    answer = client.chat.completions.create(**GREEDY, messages=cases.HISTORY, tools=cases.TOOLS)
    assert answer.choices[0].message.content


# ---- responses -----------------------------------------------------------------------------------

RESPONSE = {
    "model": cases.MODEL,
    "temperature": 0,
    "max_output_tokens": cases.MAX_TOKENS,
    "input": cases.QUESTION,
}
RESPONSE_TOOLS = [{"type": "function", "strict": True, **each} for each in cases.FUNCTIONS]


def test_response(client: Any, plain: str) -> None:
    answer = client.responses.create(**RESPONSE)
    assert plain == answer.output_text
    assert "completed" == answer.status
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


def test_response_that_is_cut(client: Any) -> None:
    answer = client.responses.create(**RESPONSE | {"max_output_tokens": 3})
    assert "incomplete" == answer.status
    assert "max_output_tokens" == answer.incomplete_details.reason


def test_streamed_response(client: Any, plain: str) -> None:
    with client.responses.stream(**RESPONSE) as stream:
        events = list(stream)
        final = stream.get_final_response()
    texts = [each.delta for each in events if each.type == "response.output_text.delta"]
    assert plain == "".join(texts) == final.output_text
    assert ("response.created", "response.completed") == (events[0].type, events[-1].type)
    assert [*range(len(events))] == [each.sequence_number for each in events]


def test_parsed_response(client: Any) -> None:
    assert isinstance(
        client.responses.parse(**RESPONSE, text_format=cases.City).output_parsed, cases.City
    )


@pytest.mark.parametrize(
    "choice", ["auto", "required", {"type": "function", "name": "get_time"}], ids=str
)
def test_tools_of_responses(client: Any, choice: Any) -> None:
    asked = RESPONSE | {"tools": RESPONSE_TOOLS, "tool_choice": choice}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        streamed = stream.get_final_response()
    found = [
        [(each.name, each.arguments) for each in answer.output if each.type == "function_call"]
        for answer in (whole, streamed)
    ]
    assert found[0] == found[1]
    assert found[0] or choice == "auto"
    for name, arguments in found[0]:
        cases.check_call(name, arguments)


def test_response_to_a_tool(client: Any) -> None:
    """The history travels with the request, in items."""
    call = {
        "type": "function_call",
        "call_id": "call_1",
        **cases.HISTORY[1]["tool_calls"][0]["function"],
    }
    output = {
        "type": "function_call_output",
        "call_id": "call_1",
        "output": cases.HISTORY[2]["content"],
    }
    asked = RESPONSE | {"input": [cases.HISTORY[0], call, output], "tools": RESPONSE_TOOLS}
    answer = client.responses.create(**asked, instructions="Be brief.", store=False)
    assert answer.output_text
