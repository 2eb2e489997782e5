"""What clients send beyond OpenAI's reference is accepted, as by OpenAI and vLLM."""

from __future__ import annotations

import logging
from typing import Any

import httpx
import pytest
from helpers.serving import CHAT, CHAT_TEMPLATE, PLAIN, TEXT, tiny_tokenizer

GREEDY = PLAIN | {"temperature": 0, "ignore_eos": True}


def choice_of(answer: httpx.Response) -> dict[str, Any]:
    """The only choice of an answer, which must have succeeded."""
    assert 200 == answer.status_code, answer.text
    (choice,) = answer.json()["choices"]
    return choice


def test_unknown_fields_are_ignored_and_logged_once(
    run_server, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither does a field that is named like a part of the server have an effect."""
    strange = {"keep_alive": "5m", "thinking": {"type": "enabled"}, "prompts": 1, "detokenize": 0}
    with run_server() as server, caplog.at_level(logging.WARNING, "vmkv.serve.server.service"):
        plain = choice_of(server.post(GREEDY))
        for _ in range(2):
            assert plain == choice_of(server.post(GREEDY | strange | {"user": "me"}))
        options = {"stream": True, "stream_options": {"include_usage": True, "new": 1}}
        assert 200 == server.post(GREEDY | options).status_code
        body = {"prompt": "a", "keep_alive": 1}
        assert 200 == httpx.post(f"{server.url}/tokenize", json=body).status_code
        named = sorted(record.args[0] for record in caplog.records)  # type: ignore[index]
        assert sorted(map(repr, strange)) == named
        for at in range(3):
            many = {f"{at}-{number:0100d}": None for number in range(100)}
            assert 200 == server.post(GREEDY | many).status_code
        assert len(caplog.records) <= 100, "clients fill the log"


def test_integers_may_be_whole_floats(server) -> None:
    body = GREEDY | {"max_tokens": 3.0, "seed": 5.0, "top_k": 2.0, "temperature": 1.0}
    answer = server.post(body)
    assert 3 == answer.json()["usage"]["completion_tokens"]
    assert choice_of(answer) == choice_of(server.post(body | {"max_tokens": 3, "seed": 5}))


def test_the_model_may_be_left_out(server) -> None:
    body = {name: value for name, value in GREEDY.items() if name != "model"}
    assert "tiny" == server.post(body).json()["model"]


def test_best_of_n_is_n(server) -> None:
    assert 2 == len(server.post(PLAIN | {"best_of": 2, "n": 2}).json()["choices"])


def test_a_stop_among_sixteen_is_the_reason(server) -> None:
    """`stop_reason` is the text or the token, and null for the model's end or the length."""
    whole = choice_of(server.post(GREEDY | {"max_tokens": 30}))
    assert ("length", None) == (whole["finish_reason"], whole["stop_reason"])
    stop = whole["text"][10:13]
    stops = [f"never {at}" for at in range(15)] + [stop]
    stopped = choice_of(server.post(GREEDY | {"max_tokens": 30, "stop": stops}))
    assert ("stop", stop) == (stopped["finish_reason"], stopped["stop_reason"])
    assert whole["text"].split(stop)[0] == stopped["text"]
    tokens = tiny_tokenizer().convert_tokens_to_ids([*"abdefhimnprst"])
    body = GREEDY | {"max_tokens": 500, "temperature": 1.9, "seed": 1, "stop_token_ids": tokens}
    stopped = choice_of(server.post(body))
    assert ("stop", True) == (stopped["finish_reason"], stopped["stop_reason"] in tokens)
    body = CHAT | {"stop": stops, "max_tokens": 3, "temperature": 0}
    assert "stop_reason" in choice_of(server.post(body, "/v1/chat/completions"))


@pytest.mark.parametrize("logprobs", [None, False])
def test_no_top_logprobs_need_no_logprobs(server, logprobs: bool | None) -> None:
    """As in vLLM, whose default is 0."""
    body = CHAT | {"top_logprobs": 0, "logprobs": logprobs}
    answer = server.post(body, "/v1/chat/completions")
    assert 200 == answer.status_code, answer.text
    assert choice_of(answer)["logprobs"] is None


def test_requests_have_the_name_that_their_client_gave(server) -> None:
    """The header comes before the field, and a name is made where there is none, also of errors."""
    answer = server.post(GREEDY | {"request_id": "mine"})
    assert ("cmpl-mine", "mine") == (answer.json()["id"], answer.headers["x-request-id"])
    answer = server.post(GREEDY | {"request_id": "mine"}, **{"X-Request-Id": "header"})
    assert ("cmpl-header", "header") == (answer.json()["id"], answer.headers["x-request-id"])
    body = CHAT | {"stream": True}
    answer = server.post(body, "/v1/chat/completions", **{"X-Request-Id": "chat"})
    assert '"id":"chatcmpl-chat"' in answer.text
    assert "chat" == answer.headers["x-request-id"]
    answers = [server.post(GREEDY, **{"X-Request-Id": given}) for given in ("", "x" * 999)]
    names = [each.headers["x-request-id"] for each in answers]
    assert [f"cmpl-{name}" for name in names] == [each.json()["id"] for each in answers]
    assert 2 == len(set(names))
    assert all(len(name) == 32 for name in names)
    refused = server.post(GREEDY | {"n": 0}, **{"X-Request-Id": "wrong"})
    assert (400, "wrong") == (refused.status_code, refused.headers["x-request-id"])


def test_tool_history_without_content_reaches_the_template(run_server) -> None:
    """Templates append the content to a text, which null is not; the tool calls are there."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "What is f?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "user", "content": TEXT[0]},
    ]
    template = CHAT_TEMPLATE.replace(
        "{{ message.content }}",
        "{{ message.content + (message.tool_calls[0].function.name if message.tool_calls "
        "else '') }}",
    )
    with run_server(chat_template=template) as server:
        body = CHAT | {"messages": messages}
        assert 200 == server.post(body, "/v1/chat/completions").status_code
        told = httpx.post(f"{server.url}/tokenize", json={"messages": messages}).json()["tokens"]
        expected = f"<user>What is f?\n<assistant>f\n<assistant>f\n<user>{TEXT[0]}\n<assistant>"
        assert expected == tiny_tokenizer().decode(told)


def test_sampling_defaults_apply_where_a_request_leaves_them_out(run_server) -> None:
    """A default of `max_tokens` is cut to what fits behind the prompt, and null is left out."""
    defaults = {"temperature": 0.0, "max_tokens": 40, "min_p": 0.1}
    with run_server(sampling_defaults=defaults) as server:
        body = {"prompt": "A row", "ignore_eos": True, "n": 2}
        whole = [each["text"] for each in server.post(body).json()["choices"]]
        assert 1 == len(set(whole))
        assert 1 == len(
            {each["text"] for each in server.post(body | {"top_p": None}).json()["choices"]}
        )
        warm = server.post(body | {"temperature": 1.5, "min_p": 0}).json()
        assert 2 == len({each["text"] for each in warm["choices"]})
        assert 2 * 16 == warm["usage"]["completion_tokens"]
        for content, num_tokens in (("a", 40), ("a" * 4070, None), ("a" * 4070, 1)):
            chat = {"messages": [{"role": "user", "content": content}], "ignore_eos": True}
            chat |= {} if num_tokens != 1 else {"max_tokens": 1}
            usage = server.post(chat, "/v1/chat/completions").json()["usage"]
            assert (num_tokens or 4096 - usage["prompt_tokens"]) == usage["completion_tokens"]
            assert usage["completion_tokens"] <= 40
