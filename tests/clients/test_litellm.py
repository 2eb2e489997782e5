"""litellm, as a library and as a proxy of its own process."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers import client_cases as cases

pytestmark = pytest.mark.clients
ASKED: dict[str, Any] = {
    "messages": cases.MESSAGES,
    "max_tokens": cases.MAX_TOKENS,
    "temperature": 0,
}
#: Of the proxy: it imports for a while.
START_S = 120
#: The proxy does not start without.
KEY = f"sk-{secrets.token_hex(16)}"


@pytest.fixture(scope="module", params=["openai", "hosted_vllm"])
def to(url: str, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Parameters that lead to the server, by both providers that speak its API."""
    pytest.importorskip("litellm")
    return {"model": f"{request.param}/{cases.MODEL}", "api_base": f"{url}/v1", "api_key": "none"}


def calls_of(message: Any) -> list[str]:
    for each in message.tool_calls or []:
        cases.check_call(each.function.name, each.function.arguments)
    return [each.function.name for each in message.tool_calls or []]


def test_chat_and_stream(to: dict[str, Any]) -> None:
    import litellm

    plain = litellm.completion(**ASKED, **to).choices[0].message.content
    assert cases.ANSWER in plain
    stream = litellm.completion(**ASKED, **to, stream=True)
    assert plain == "".join(each.choices[0].delta.content or "" for each in stream)


def test_completion(to: dict[str, Any]) -> None:
    import litellm

    to = to | {"model": to["model"].replace("openai/", "text-completion-openai/")}
    prompt = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    assert cases.ANSWER in litellm.text_completion(**prompt, **to).choices[0].text


@pytest.mark.parametrize(
    "choice",
    ["auto", "none", "required", {"type": "function", "function": {"name": "get_time"}}],
    ids=["auto", "none", "required", "named"],
)
def test_tools(to: dict[str, Any], choice: Any) -> None:
    import litellm

    asked = {**ASKED, **to, "tools": cases.TOOLS, "tool_choice": choice}
    whole = litellm.completion(**asked).choices[0].message
    chunks = list(litellm.completion(**asked, stream=True))
    streamed = litellm.stream_chunk_builder(chunks).choices[0].message
    names = calls_of(whole)
    assert names == calls_of(streamed)
    if isinstance(choice, dict):
        assert ["get_time"] == names
    else:
        assert bool(names) or choice != "required"
        assert not names or choice != "none"


def test_structured_output(to: dict[str, Any]) -> None:
    import litellm

    answer = litellm.completion(**ASKED, **to, response_format=cases.City)
    cases.City.model_validate_json(answer.choices[0].message.content)


def test_history_and_effort(to: dict[str, Any]) -> None:
    import litellm

    asked = ASKED | {"messages": cases.HISTORY, "tools": cases.TOOLS}
    effort = {"reasoning_effort": "low", "allowed_openai_params": ["reasoning_effort"]}
    assert litellm.completion(**asked, **to, **effort).choices[0].message.content


def test_responses(to: dict[str, Any]) -> None:
    import litellm

    asked = {"input": cases.QUESTION, "max_output_tokens": cases.MAX_TOKENS, "temperature": 0}
    assert cases.ANSWER in litellm.responses(**asked, **to).output[0].content[0].text


# ---- the proxy -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def proxy(url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a proxy in front of the server."""
    pytest.importorskip("litellm.proxy.proxy_server", exc_type=ImportError)
    route = {"model": f"hosted_vllm/{cases.MODEL}", "api_base": f"{url}/v1", "api_key": "none"}
    config = tmp_path_factory.mktemp("proxy") / "config.yaml"  # JSON is YAML.
    config.write_text(
        json.dumps({"model_list": [{"model_name": cases.MODEL, "litellm_params": route}]})
    )
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [Path(sys.executable).with_name("litellm"), "--config", config]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    environment = {**os.environ, "LITELLM_TELEMETRY": "False", "LITELLM_MASTER_KEY": KEY}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as child:
        try:
            base, deadline_s = f"http://127.0.0.1:{port}", time.monotonic() + START_S
            while not is_live(base):
                assert child.poll() is None, "the proxy has ended; see its messages above"
                assert time.monotonic() < deadline_s, f"the proxy does not listen in {START_S} s"
                time.sleep(0.5)
            yield base
        finally:
            child.kill()


def is_live(base: str) -> bool:
    try:
        return httpx.get(f"{base}/health/liveliness", timeout=5).is_success
    except httpx.TransportError:
        return False


def test_chats_through_the_proxy(proxy: str) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{proxy}/v1", api_key=KEY, max_retries=0) as client:
        create = client.chat.completions.create
        plain = create(**ASKED, model=cases.MODEL).choices[0].message.content
        assert cases.ANSWER in plain
        stream = create(**ASKED, model=cases.MODEL, stream=True)
        assert plain == "".join(each.choices[0].delta.content or "" for each in stream)
        called = create(**ASKED, model=cases.MODEL, tools=cases.TOOLS, tool_choice="required")
        assert calls_of(called.choices[0].message)
        parsed = client.chat.completions.parse(
            **ASKED, model=cases.MODEL, response_format=cases.City
        )
        assert isinstance(parsed.choices[0].message.parsed, cases.City)


def test_messages_through_the_proxy(proxy: str) -> None:
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=proxy, api_key=KEY, max_retries=0) as client:
        asked = {"model": cases.MODEL, "max_tokens": cases.MAX_TOKENS, "messages": cases.MESSAGES}
        answer = client.messages.create(**asked, extra_body={"temperature": 0})
        assert cases.ANSWER in answer.content[0].text
