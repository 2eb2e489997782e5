"""LangChain's chat models for both APIs."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import client_cases as cases

pytestmark = pytest.mark.clients
OPTIONS: dict[str, Any] = {
    "model": cases.MODEL,
    "api_key": "none",
    "temperature": 0,
    "max_tokens": cases.MAX_TOKENS,
    "max_retries": 0,
    "timeout": 120,
}


@pytest.fixture(scope="module", params=["openai", "responses", "anthropic"])
def model(url: str, request: pytest.FixtureRequest) -> Any:
    if request.param == "anthropic":
        langchain_anthropic = pytest.importorskip("langchain_anthropic")
        return langchain_anthropic.ChatAnthropic(base_url=url, **OPTIONS)
    langchain_openai = pytest.importorskip("langchain_openai")
    return langchain_openai.ChatOpenAI(
        base_url=f"{url}/v1", use_responses_api=request.param == "responses", **OPTIONS
    )


def test_invoke_stream_and_batch(model: Any) -> None:
    whole = model.invoke(cases.QUESTION)
    assert cases.ANSWER in whole.text
    assert whole.usage_metadata["output_tokens"] > 0
    assert whole.text == "".join(each.text for each in model.stream(cases.QUESTION))
    assert [whole.text] * 2 == [each.text for each in model.batch([cases.QUESTION] * 2)]


@pytest.mark.parametrize("choice", ["auto", "any", "get_time"])
def test_bind_tools(model: Any, choice: str) -> None:
    bound = model.bind_tools([cases.get_weather, cases.get_time], tool_choice=choice)
    whole = bound.invoke(cases.QUESTION)
    first, *rest = bound.stream(cases.QUESTION)
    streamed = sum(rest, first)
    for message in (whole, streamed):
        assert [] == message.invalid_tool_calls
        for call in message.tool_calls:
            cases.check_call(call["name"], call["args"])
    found = [[each["name"] for each in message.tool_calls] for message in (whole, streamed)]
    assert found[0] == found[1]
    assert found[0] or choice == "auto"
    assert choice != "get_time" or ["get_time"] == found[0]


@pytest.mark.parametrize("method", ["function_calling", "json_mode", "json_schema"])
def test_with_structured_output(model: Any, method: str) -> None:
    if method == "json_mode":
        if "Anthropic" in type(model).__name__:
            pytest.skip("Anthropic's API has no such mode")
        # This mode promises JSON, not the model's fields.
        found = model.with_structured_output({"title": "City"}, method=method)
        assert isinstance(
            found.invoke('Reply in JSON, like {"city": "Rome"}: ' + cases.QUESTION), dict
        )
        return
    assert isinstance(
        model.with_structured_output(cases.City, method=method).invoke(cases.QUESTION), cases.City
    )


def test_tool_history(model: Any) -> None:
    assert model.bind_tools([cases.get_weather, cases.get_time]).invoke(cases.HISTORY).text
