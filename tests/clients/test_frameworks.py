"""Frameworks that call tools and parse answers by themselves."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from helpers.client_cases import ANSWER, MAX_TOKENS, MODEL, QUESTION, City, get_time, get_weather

pytestmark = pytest.mark.clients

# ---- llama-index ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama_index(url: str) -> Any:
    like = pytest.importorskip("llama_index.llms.openai_like", exc_type=ImportError)
    return like.OpenAILike(
        model=MODEL,
        api_base=f"{url}/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        should_use_structured_outputs=True,
        temperature=0,
        max_tokens=MAX_TOKENS,
        max_retries=0,
    )


def test_llama_index_text(llama_index: Any) -> None:
    whole = llama_index.complete(QUESTION).text
    assert ANSWER in whole
    assert whole == "".join(each.delta or "" for each in llama_index.stream_complete(QUESTION))


def test_llama_index_tools(llama_index: Any) -> None:
    from llama_index.core.tools import FunctionTool

    tools = [FunctionTool.from_defaults(get_weather), FunctionTool.from_defaults(get_time)]
    answer = llama_index.chat_with_tools(tools, QUESTION)
    assert answer.message.content or llama_index.get_tool_calls_from_response(answer)
    outcome = llama_index.predict_and_call(tools, QUESTION, tool_required=True)
    [output] = outcome.sources
    assert not output.is_error
    assert output.raw_output.startswith(("It rains in ", "It is noon in "))
    *_, last = llama_index.stream_chat_with_tools(tools, QUESTION, tool_required=True)
    [call] = llama_index.get_tool_calls_from_response(last)
    assert output.raw_input["kwargs"] == call.tool_kwargs


@pytest.mark.parametrize("is_schema", [True, False], ids=["schema", "tool"])
def test_llama_index_structured_output(llama_index: Any, is_schema: bool) -> None:
    model = llama_index.model_copy(update={"should_use_structured_outputs": is_schema})
    assert isinstance(model.as_structured_llm(City).complete(QUESTION).raw, City)


# ---- instructor ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"])
def test_instructor(url: str, mode: str) -> None:
    instructor = pytest.importorskip("instructor")
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as plain:
        client = instructor.from_openai(plain, mode=instructor.Mode[mode])
        asked: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": MAX_TOKENS}
        asked |= {"messages": [{"role": "user", "content": QUESTION}], "response_model": City}
        found = client.chat.completions.create(**asked, max_retries=0)
        assert isinstance(found, City)
        *_, streamed = client.chat.completions.create_partial(**asked)
        assert found.model_dump() == streamed.model_dump()


# ---- pydantic-ai ---------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["chat", "responses", "anthropic"])
def pydantic_model(url: str, request: pytest.FixtureRequest) -> Any:
    pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    if request.param == "anthropic":
        provider = AnthropicProvider(api_key="none", base_url=url)
        return AnthropicModel(MODEL, provider=provider)
    kind = OpenAIChatModel if request.param == "chat" else OpenAIResponsesModel
    return kind(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))


SETTINGS: dict[str, Any] = {"temperature": 0, "max_tokens": MAX_TOKENS}


@pytest.mark.anyio
async def test_pydantic_ai_text(pydantic_model: Any) -> None:
    from pydantic_ai import Agent

    agent = Agent(pydantic_model, model_settings=SETTINGS)
    whole = (await agent.run(QUESTION)).output
    assert ANSWER in whole
    async with agent.run_stream(QUESTION) as run:
        assert whole == await run.get_output()


@pytest.mark.anyio
@pytest.mark.parametrize("by", ["tool", "schema"])
async def test_pydantic_ai_structured_output(pydantic_model: Any, by: str) -> None:
    """By a tool that must be called, or by the form of the answer."""
    from pydantic_ai import Agent, NativeOutput, ToolOutput

    if by == "schema" and not pydantic_model.profile.get("supports_json_schema_output"):
        pytest.skip("the client expects no such form of this API")
    form: Any = ToolOutput(City) if by == "tool" else NativeOutput(City)
    agent = Agent(pydantic_model, output_type=form, model_settings=SETTINGS, retries=0)
    whole = (await agent.run(QUESTION)).output
    assert isinstance(whole, City)
    async with agent.run_stream(QUESTION) as run:
        assert whole == await run.get_output()


@pytest.mark.anyio
async def test_pydantic_ai_tools(pydantic_model: Any) -> None:
    """Whether or not the model calls tools, the run comes to an end."""
    from pydantic_ai import Agent

    agent = Agent(pydantic_model, tools=[get_weather, get_time], model_settings=SETTINGS)
    assert (await agent.run(QUESTION)).output


# ---- openai-agents -------------------------------------------------------------------------------


@pytest.fixture(params=["chat", "responses"])
async def agents_model(url: str, request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    agents = pytest.importorskip("agents")
    openai = pytest.importorskip("openai")
    kinds = (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel)
    # Closed in its own loop: if it were collected later, another test would fail.
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield kinds[request.param == "responses"](MODEL, client)


@pytest.mark.anyio
async def test_openai_agents(agents_model: Any) -> None:
    """Text, whole and streamed; a tool that must be called, then an answer; a parsed answer."""
    import agents

    settings = agents.ModelSettings(temperature=0, max_tokens=MAX_TOKENS)
    plain = agents.Agent("plain", model=agents_model, model_settings=settings)
    whole = (await agents.Runner.run(plain, QUESTION)).final_output
    assert ANSWER in whole
    run = agents.Runner.run_streamed(plain, QUESTION)
    _ = [event async for event in run.stream_events()]
    assert whole == run.final_output
    typed = plain.clone(output_type=City)
    assert isinstance((await agents.Runner.run(typed, QUESTION)).final_output, City)


@pytest.mark.anyio
async def test_openai_agents_call_tools(agents_model: Any) -> None:
    """A tool must be called; the answer comes after its output, or with the last turn."""
    import agents

    tools = [agents.function_tool(get_weather), agents.function_tool(get_time)]
    settings = agents.ModelSettings(temperature=0, max_tokens=MAX_TOKENS, tool_choice="required")
    agent = agents.Agent("caller", model=agents_model, model_settings=settings, tools=tools)
    result = await agents.Runner.run(agent, QUESTION)
    outputs = [each.output for each in result.new_items if each.type == "tool_call_output_item"]
    assert outputs
    assert all(each.startswith(("It rains in ", "It is noon in ")) for each in outputs)
    assert result.final_output
