"""The clients of OpenAI and Anthropic: texts, structured output and tools of every API.

What options do is tested in tests/serve/server; here clients send them and read the answers.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from helpers import client_cases as cases
from helpers.apis import APIS, Chats, Reply, claude

pytestmark = pytest.mark.clients
GREEDY: dict[str, Any] = {"model": cases.MODEL, "temperature": 0, "max_tokens": cases.MAX_TOKENS}
CHAT = GREEDY | {"messages": cases.MESSAGES}
FUNCTIONS = [{**each, "strict": True} for each in cases.FUNCTIONS]


class Served:
    """The server, as `helpers.apis` takes it."""

    def __init__(self, url: str, clients: contextlib.ExitStack):
        self.url, self.clients = url, clients

    def client(self, **options: Any) -> Any:
        openai = pytest.importorskip("openai")
        options = {"api_key": "none", "max_retries": 0, "timeout": 120, **options}
        return self.clients.enter_context(openai.OpenAI(base_url=f"{self.url}/v1", **options))


@pytest.fixture(scope="module")
def served(url: str) -> Iterator[Served]:
    with contextlib.ExitStack() as clients:
        yield Served(url, clients)


@pytest.fixture(scope="module")
def client(served: Served) -> Any:
    """OpenAI's client."""
    return served.client()


@pytest.fixture(scope="module", params=APIS)
def api(request: pytest.FixtureRequest) -> Chats:
    return APIS[request.param]


def asked(served: Served, api: Chats, messages: Any = None, **options: Any) -> Reply:
    """The reply that the client makes of a whole answer, and of a stream."""
    how = {"model": cases.MODEL, "max_tokens": cases.MAX_TOKENS, **options}
    body = api.body(messages or cases.MESSAGES, **how)
    answers = [api.send(served, body, is_streamed=each, is_typed=True) for each in (False, True)]
    whole, streamed = map(api.reply, answers)
    assert whole == streamed
    usage = api.usage(answers[0])
    assert 0 < usage.num_prompt
    assert 0 < usage.num_output <= how["max_tokens"]
    for call in whole.calls:
        cases.check_call(*call)
    return whole


# ---- every API -----------------------------------------------------------------------------------


def test_text(served: Served, api: Chats) -> None:
    """Of a text and of parts, with a system message, and cut."""
    plain = asked(served, api)
    assert cases.ANSWER in plain.text
    assert Reply(text=plain.text) == plain
    system = {"role": "system", "content": "Answer in one sentence."}
    assert asked(served, api, [system, *cases.MESSAGES]).text
    parts = [{"type": "text", "text": cases.QUESTION}]
    if api is not APIS["message"]:  # Its messages are of parts already.
        kind = "input_text" if api is APIS["response"] else "text"
        parts = [{"type": kind, "text": cases.QUESTION}]
        assert plain == asked(served, api, [{"role": "user", "content": parts}])
    body = api.body(cases.MESSAGES, model=cases.MODEL, max_tokens=3)
    assert "length" == api.reply(api.send(served, body, is_typed=True)).end


@pytest.mark.parametrize(
    "choice", [None, "auto", "none", "required", {"name": "get_time"}], ids=lambda it: str(it)[:9]
)
def test_tools(served: Served, api: Chats, choice: Any) -> None:
    """The model may answer in words unless it must call, and calls nothing with `none`."""
    found = asked(served, api, tools=FUNCTIONS, choice=choice)
    assert ("calls" if found.calls else "stop") == found.end
    assert found.text or found.calls
    assert not found.calls or choice != "none"
    assert found.calls or choice in (None, "auto", "none")
    if isinstance(choice, dict):
        assert ["get_time"] == [name for name, _ in found.calls]


def test_one_call_where_parallel_ones_are_not_wanted(served: Served, api: Chats) -> None:
    how = {"tools": FUNCTIONS, "choice": "required", "parallel_tool_calls": False}
    assert 1 == len(asked(served, api, **how).calls)


def test_tool_history(served: Served, api: Chats) -> None:
    """Assistants that called a tool have no content."""
    history = cases.HISTORY if api is APIS["chat"] else []
    for each in cases.HISTORY[len(history) :]:
        history = [*history, {**each, "content": each["content"] or "I look."}]
    assert asked(served, api, history, tools=FUNCTIONS).text


#: Fields that clients send and that have no effect here.
IDLE: dict[str, Any] = {
    "chat": {
        "reasoning_effort": "low",
        "user": "me",
        "store": False,
        "metadata": {"a": "b"},
        "prompt_cache_key": "x",
        "cache_prompt": True,
        "keep_alive": 5,
        "thinking": {"type": "disabled"},
        "top_k": -1,
    },
    "response": {"instructions": "", "store": False, "user": "me", "metadata": {"a": "b"}},
    "message": {"metadata": {"user_id": "me"}, "thinking": {"type": "disabled"}},
}


@pytest.mark.parametrize("name", APIS)
def test_fields_without_an_effect_here(served: Served, name: str) -> None:
    plain = asked(served, APIS[name])
    assert plain == asked(served, APIS[name], **IDLE[name])


def test_parse(served: Served, client: Any) -> None:
    """Each client's own method, which sends the schema of a class and makes an object of it."""
    chat = client.chat.completions.parse(**CHAT, response_format=cases.City)
    response = client.responses.parse(
        model=cases.MODEL,
        input=cases.QUESTION,
        temperature=0,
        max_output_tokens=cases.MAX_TOKENS,
        text_format=cases.City,
    )
    body = APIS["message"].body(cases.MESSAGES, model=cases.MODEL, max_tokens=cases.MAX_TOKENS)
    body["extra_body"] = {"temperature": body.pop("temperature")}
    message = claude(served).messages.parse(**body, output_format=cases.City)
    for parsed in (
        chat.choices[0].message.parsed,
        response.output_parsed,
        message.parsed_output,
    ):
        assert isinstance(parsed, cases.City)


# ---- OpenAI --------------------------------------------------------------------------------------


def test_models(client: Any) -> None:
    assert [cases.MODEL] == [each.id for each in client.models.list()]
    assert cases.MODEL == client.models.retrieve(cases.MODEL).id


def test_completion(client: Any) -> None:
    """Whole and streamed; echoed with log-probabilities, of which the first token has none."""
    body = GREEDY | {"prompt": "The capital of France is", "max_tokens": 8}
    whole = client.completions.create(**body).choices[0].text
    assert cases.ANSWER in whole
    stream = client.completions.create(**body, stream=True)
    assert whole == "".join(each.choices[0].text for each in stream)
    echoed = client.completions.create(**body, echo=True, logprobs=1)
    choice, found = echoed.choices[0], echoed.choices[0].logprobs
    assert body["prompt"] + whole == choice.text == "".join(found.tokens)
    assert echoed.usage.prompt_tokens + 8 == len(found.tokens) == len(found.token_logprobs)
    assert found.token_logprobs[0] is None
    assert all(each <= 0 for each in found.token_logprobs[1:])


def test_logprobs_and_usage_of_a_stream(client: Any) -> None:
    """Usage comes in a chunk of its own, if it is asked for."""
    answer = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=3)
    found = answer.choices[0].logprobs.content
    raw = b"".join(bytes(each.bytes) for each in found)
    assert raw.decode().startswith(answer.choices[0].message.content)
    assert all(3 == len(each.top_logprobs) and each.logprob <= 0 for each in found)
    assert all(each.token == each.top_logprobs[0].token for each in found), "it is greedy"
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = client.chat.completions.create(**CHAT, **options)
    assert "stop" == chunks[-1].choices[0].finish_reason
    assert ([], answer.usage.completion_tokens) == (last.choices, last.usage.completion_tokens)


def test_json_object(client: Any) -> None:
    content = 'Reply in JSON, like {"city": "Rome"}: ' + cases.QUESTION
    body = CHAT | {"messages": [{"role": "user", "content": content}], "max_tokens": 400}
    answer = client.chat.completions.create(**body, response_format={"type": "json_object"})
    assert "stop" == answer.choices[0].finish_reason
    assert isinstance(json.loads(answer.choices[0].message.content), dict)


def test_guided_by_choice(client: Any) -> None:
    """A form that OpenAI lacks, by vLLM's names."""
    for form in ({"structured_outputs": {"choice": ["Rome"]}}, {"guided_choice": ["Rome"]}):
        answer = client.chat.completions.create(**CHAT, extra_body=form)
        assert "Rome" == answer.choices[0].message.content


# ---- Anthropic -----------------------------------------------------------------------------------


def test_count_tokens(served: Served) -> None:
    """Equal to what a message reports; tools and a system prompt add to it."""
    api, client = APIS["message"], claude(served)
    body = api.body(cases.MESSAGES, model=cases.MODEL, max_tokens=3)
    num_prompt = api.usage(api.send(served, body, is_typed=True)).num_prompt
    asked = {"model": cases.MODEL, "messages": cases.MESSAGES}
    tools = api.tools(FUNCTIONS)
    counts = [
        client.messages.count_tokens(**asked, **more).input_tokens
        for more in ({}, {"system": "Be brief."}, tools)
    ]
    assert num_prompt == counts[0] != counts[1]
    assert counts[0] <= counts[2]


def test_stop_sequences_and_errors(served: Served) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = claude(served)
    asked = {"model": cases.MODEL, "messages": cases.MESSAGES, "max_tokens": cases.MAX_TOKENS}
    cut = client.messages.create(**asked, stop_sequences=["§", "a"])
    assert ("stop_sequence", "a") == (cut.stop_reason, cut.stop_sequence)
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**asked | {"model": "other"})
    assert "not_found_error" == missing.value.body["error"]["type"]
    with pytest.raises(anthropic.BadRequestError) as wrong:
        client.messages.create(**asked | {"max_tokens": 10**9})
    assert "max_tokens" in wrong.value.body["error"]["message"]
