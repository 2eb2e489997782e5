"""Options and routes that clients of OpenAI and vLLM use, besides prompts and sampling."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from helpers.serving import TEXT, tiny_tokenizer

PLAIN = {"model": "tiny", "prompt": TEXT[0], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
CHAT = {name: value for name, value in PLAIN.items() if name != "prompt"}
HELLO = [{"role": "user", "content": "What is a page?"}]


def text_of(server: Any, prompt: str, **options: Any) -> str:
    """The text of a completion of `prompt`."""
    return server.ask(PLAIN | {"prompt": prompt, **options})["choices"][0]["text"]


def chat_of(server: Any, **options: Any) -> str:
    """The content of a chat's answer."""
    answer = server.ask(CHAT | {"messages": HELLO} | options, "/v1/chat/completions")
    return answer["choices"][0]["message"]["content"]


def test_max_completion_tokens_overrides_max_tokens(server) -> None:
    """Some clients send both, for servers that know only one."""
    body = CHAT | {"messages": HELLO, "max_tokens": 0, "max_completion_tokens": 3}
    answer = server.ask(body, "/v1/chat/completions")
    assert answer["choices"][0]["message"]["content"]
    assert 3 == answer["usage"]["completion_tokens"]
    body = CHAT | {"messages": HELLO, "max_tokens": 9, "max_completion_tokens": 3}
    assert 3 == server.ask(body, "/v1/chat/completions")["usage"]["completion_tokens"]


def test_continue_final_message_continues_the_last_message(server) -> None:
    """It excludes `add_generation_prompt=True`."""
    begun = [*HELLO, {"role": "assistant", "content": "A page is"}]
    prompt = "<user>What is a page?\n<assistant>A page is"
    expected = text_of(server, prompt, add_special_tokens=False)
    assert expected == chat_of(server, messages=begun, continue_final_message=True)
    options = {"continue_final_message": True, "add_generation_prompt": False}
    assert expected == chat_of(server, messages=begun, **options)
    body = CHAT | {"messages": begun, "continue_final_message": True, "add_generation_prompt": True}
    refused = server.post(body, "/v1/chat/completions")
    assert (400, "continue_final_message") == (
        refused.status_code,
        refused.json()["error"]["param"],
    )


def test_add_special_tokens_applies_to_chats(server) -> None:
    prompt = "<user>What is a page?\n<assistant>"
    for adds in (True, False):
        expected = text_of(server, prompt, add_special_tokens=adds)
        assert expected == chat_of(server, add_special_tokens=adds)


def test_requests_choose_their_tokens(server) -> None:
    """By OpenAI's `logit_bias`, with keys of text, and vLLM's other names."""
    words = tiny_tokenizer().get_vocab()
    word = max((each for each in words if each.isalpha() and each.isascii()), key=len)
    token, four = words[word], 4 * word
    assert four == text_of(server, TEXT[0], logit_bias={str(token): 100})
    assert four == text_of(server, TEXT[0], allowed_token_ids=[token])
    assert four == chat_of(server, allowed_token_ids=[token])
    assert word not in text_of(server, TEXT[0], logit_bias={str(token): 100}, bad_words=[word])


def test_continuous_usage_stats_are_in_every_chunk(server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = PLAIN | {"stream_options": options}
    counts = [each["usage"]["completion_tokens"] for each in server.chunks(body)]
    assert counts == sorted(counts)
    assert counts[0] >= 1
    assert [4, 4] == counts[-2:]


def test_tokenize_matches_vllm(server) -> None:
    """`/tokenize` returns the tokens of a prompt or of a chat."""
    ids = tiny_tokenizer()(TEXT[0])["input_ids"]
    found = server.ask({"model": "tiny", "prompt": TEXT[0]}, "/tokenize")
    assert {"count": len(ids), "max_model_len": 4096, "tokens": ids, "token_strs": None} == found
    found = server.ask({"prompt": TEXT[0], "return_token_strs": True}, "/tokenize")
    assert tiny_tokenizer().convert_ids_to_tokens(ids) == found["token_strs"]
    rendered = "<user>What is a page?\n<assistant>"
    ids = tiny_tokenizer()(rendered, add_special_tokens=False)["input_ids"]
    assert ids == server.ask({"messages": HELLO}, "/tokenize")["tokens"]
    assert 404 == server.post({"prompt": "a", "model": "other"}, "/tokenize").status_code


def test_detokenize_matches_vllm(server) -> None:
    """Special tokens are kept."""
    ids = [0, *tiny_tokenizer()(TEXT[0])["input_ids"], 1]
    found = server.ask({"model": "tiny", "tokens": ids}, "/detokenize")
    assert {"prompt": f"<s>{TEXT[0]}</s>"} == found
    assert {"prompt": ""} == server.ask({"tokens": []}, "/detokenize")


def test_ping_is_health(server) -> None:
    """SageMaker and vLLM's clients ask so, by GET or by POST."""
    for method in ("GET", "POST"):
        answer = httpx.request(method, f"{server.url}/ping")
        assert (200, "ok") == (answer.status_code, answer.json()["status"])


def test_load_counts_requests(server) -> None:
    url = f"{server.url}/load"
    assert {"server_load": 0} == httpx.get(url).json()
    with server.streaming(), server.streaming():
        assert {"server_load": 2} == httpx.get(url).json()


@pytest.mark.parametrize("path", ["/health", "/ping", "/version"])
def test_head_requests_are_answered(server, path: str) -> None:
    """Load balancers send HEAD."""
    answer = httpx.head(server.url + path)
    assert (200, b"") == (answer.status_code, answer.content)
    assert 200 == httpx.get(server.url + path).status_code


def test_openapi_describes_the_bodies(server) -> None:
    """Each route refers to its form, and every reference resolves."""
    text = httpx.get(f"{server.url}/openapi.json").text
    described = json.loads(text)
    schemas = described["components"]["schemas"]
    for path, form in (
        ("/v1/completions", "CompletionRequest"),
        ("/v1/chat/completions", "ChatRequest"),
        ("/v1/responses", "ResponsesRequest"),
        ("/v1/messages", "MessagesRequest"),
        ("/v1/messages/count_tokens", "CountTokensRequest"),
        ("/tokenize", "TokenizeRequest"),
        ("/detokenize", "DetokenizeRequest"),
    ):
        body = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        assert {"$ref": f"#/components/schemas/{form}"} == body["schema"]
    references = {each.split('"')[0] for each in text.split('"#/components/schemas/')[1:]}
    assert references <= schemas.keys()


def test_cors_allows_the_configured_origins(run_server) -> None:
    """Preflight requests need no key; errors carry the header, too."""
    origin = {"Origin": "https://example.com"}
    asking = origin | {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    with run_server(api_keys=["key"], cors_origins=["https://example.com"]) as server:
        url = f"{server.url}/v1/completions"
        allowed = httpx.options(url, headers=asking)
        assert 200 == allowed.status_code
        assert "https://example.com" == allowed.headers["access-control-allow-origin"]
        refused = httpx.post(url, json=PLAIN, headers=origin)
        assert 401 == refused.status_code
        assert "https://example.com" == refused.headers["access-control-allow-origin"]
        other = httpx.options(url, headers=asking | {"Origin": "https://example.org"})
        assert 400 == other.status_code
    with run_server() as server:
        assert (
            "access-control-allow-origin"
            not in httpx.get(f"{server.url}/health", headers=origin).headers
        )
