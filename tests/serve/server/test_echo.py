"""Prompts in answers: echoed, scored, as tokens, and cut to their end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers.serving import PLAIN, TEXT, tiny_llama, tiny_tokenizer

from vmkv.serve.server import Limits
from vmkv.serve.server.choices import Places, Tokens

GREEDY = PLAIN | {"temperature": 0, "ignore_eos": True, "max_tokens": 5}
CHAT = {
    "messages": [{"role": "user", "content": "What is a page?"}],
    "max_tokens": 3,
    "temperature": 0,
}
#: Characters of several tokens each.
UNICODE = "5 € for a 日本 page 🙂, naïve"
CHATS = "/v1/chat/completions"


def ids_of(text: str) -> list[int]:
    return tiny_tokenizer()(text)["input_ids"]


def scored(prompt: Sequence[int]) -> torch.Tensor:
    """The model's log-probabilities after each token of a prompt."""
    with torch.no_grad():
        return tiny_llama()(torch.tensor([prompt])).logits[0].float().log_softmax(-1)


def close(found: float, expected: torch.Tensor) -> bool:
    return abs(found - float(expected)) < 1e-4


# ---- echo ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [TEXT[0], UNICODE, [TEXT[1], TEXT[2]], ids_of(UNICODE)])
def test_each_choice_begins_with_its_prompt(server, prompt: Any) -> None:
    """The rest is the same as without an echo, whole and streamed."""
    body = GREEDY | {"prompt": prompt, "n": 2}
    plain, echoed = server.ask(body), server.ask(body | {"echo": True})
    texts = prompt if isinstance(prompt, list) and isinstance(prompt[0], str) else [prompt]
    texts = [UNICODE if isinstance(each, int | list) else each for each in texts]
    expected = [texts[at // 2] + each["text"] for at, each in enumerate(plain["choices"])]
    assert expected == [each["text"] for each in echoed["choices"]]
    assert plain["usage"] | {"prompt_tokens_details": None} == echoed["usage"] | {
        "prompt_tokens_details": None
    }
    streamed = [""] * len(expected)
    for chunk in server.chunks(body | {"echo": True}):
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert expected == streamed


@pytest.mark.parametrize("text", [TEXT[0], UNICODE, "<s>" + TEXT[3] * 40])
def test_echoed_logprobs_are_the_models(server, text: str) -> None:
    """The first is null; offsets are those of the text; streams concatenate to the same."""
    ids = ids_of(text)
    body = GREEDY | {"prompt": text, "echo": True, "logprobs": 2}
    choice = server.ask(body)["choices"][0]
    found, count = choice["logprobs"], len(ids)
    tokens = Tokens(tiny_tokenizer())
    assert [tokens[each].text for each in ids] == found["tokens"][:count]
    assert 5 == len(found["tokens"]) - count
    assert (None, None) == (found["token_logprobs"][0], found["top_logprobs"][0])
    for at, row in enumerate(scored(ids)[:-1], 1):
        token = found["tokens"][at]
        assert close(found["token_logprobs"][at], row[ids[at]])
        best = {tokens[each].text: row[each] for each in row.topk(2).indices.tolist()}
        best[token] = row[ids[at]]
        assert best.keys() == found["top_logprobs"][at].keys()
        assert all(close(found["top_logprobs"][at][each], best[each]) for each in best)
    for token, offset in zip(found["tokens"][:count], found["text_offset"], strict=False):
        if not token.startswith("bytes:"):
            assert choice["text"].startswith(token, offset)
    assert found["text_offset"] == sorted(found["text_offset"])
    assert len(text) == found["text_offset"][count]
    streamed: dict[str, list[Any]] = {}
    for chunk in server.chunks(body):
        for name, values in (chunk["choices"][0]["logprobs"] or {}).items():
            streamed.setdefault(name, []).extend(values)
    assert found["tokens"] == streamed["tokens"]
    assert found["text_offset"] == streamed["text_offset"]


def test_no_token_after_an_echo(server) -> None:
    """`max_tokens` of 0 scores a prompt; the token that is computed is not reported."""
    body = GREEDY | {"prompt": TEXT[:2], "echo": True, "max_tokens": 0, "logprobs": 1, "n": 2}
    answer = server.ask(body | {"return_token_ids": True})
    assert 0 == answer["usage"]["completion_tokens"]
    assert [TEXT[0]] * 2 + [TEXT[1]] * 2 == [each["text"] for each in answer["choices"]]
    for choice in answer["choices"]:
        ids = ids_of(choice["text"])
        assert ("length", []) == (choice["finish_reason"], choice["token_ids"])
        assert {len(ids)} == {len(each) for each in choice["logprobs"].values()}
    plain = server.ask(body | {"logprobs": None, "stop": ["a"]})
    assert [None] * 4 == [each["logprobs"] for each in plain["choices"]]
    texts = [chunk["choices"][0]["text"] for chunk in server.chunks(body | {"prompt": "A row"})]
    assert ["A row"] * 2 == [each for each in texts if each]


def test_places_of_tokens_that_differ_from_the_text() -> None:
    """Spaces that a tokenizer drops, added special tokens, and parts of characters."""
    text = "Hello world, 日."
    tokens = [b"<s>", b"Hello", b"world", b",", b" \xe6\x97", b"\xa5", b".", b"</s>"]
    places = Places(text, len(tokens))
    assert [0, 0, 6, 11, 12, 14, 14, 15] == [places.next(token) for token in tokens]
    assert 0 == places.num_left


# ---- prompt_logprobs -----------------------------------------------------------------------------


def check_entries(entries: list[Any], ids: Sequence[int], count: int) -> None:
    """Compare vLLM's shape with the model's log-probabilities."""
    assert (len(ids), None) == (len(entries), entries[0])
    tokens = Tokens(tiny_tokenizer())
    for row, token_id, entry in zip(scored(ids)[:-1], ids[1:], entries[1:], strict=True):
        best = row.topk(count).indices.tolist()
        assert {str(each) for each in (token_id, *best)} == entry.keys()
        assert str(token_id) == next(iter(entry))
        for name, told in entry.items():
            assert close(told["logprob"], row[int(name)])
            assert tokens[int(name)].text == told["decoded_token"]
            rank = best.index(int(name)) + 1 if int(name) in best else None
            assert rank == told["rank"]


def test_prompt_logprobs_of_completions(server) -> None:
    """Each choice has those of its prompt, besides other log-probabilities."""
    body = GREEDY | {"prompt": TEXT[:2], "n": 2, "prompt_logprobs": 2, "logprobs": 1}
    for at, choice in enumerate(server.ask(body)["choices"]):
        check_entries(choice["prompt_logprobs"], ids_of(TEXT[at // 2]), 2)
        assert 5 == len(choice["logprobs"]["tokens"])
    both = server.ask(body | {"prompt_logprobs": 0, "echo": True, "logprobs": 3})["choices"][0]
    assert all(1 == len(each) for each in both["prompt_logprobs"][1:])
    assert all(len(each) in (3, 4) for each in both["logprobs"]["top_logprobs"][1:])
    assert "prompt_logprobs" not in server.ask(body | {"prompt_logprobs": None})["choices"][0]


def test_prompt_logprobs_of_chats(server) -> None:
    """Beside the choices."""
    ids = tiny_tokenizer()("<user>What is a page?\n<assistant>", add_special_tokens=False)
    for options in ({}, {"logprobs": True, "top_logprobs": 1}, {"n": 2}):
        answer = server.ask(CHAT | {"prompt_logprobs": 3} | options, CHATS)
        check_entries(answer["prompt_logprobs"], ids["input_ids"], 3)
        assert "prompt_logprobs" not in answer["choices"][0]
    assert "prompt_logprobs" not in server.ask(CHAT, CHATS)


def test_prompts_count_against_the_limit_of_log_probabilities(run_server) -> None:
    """As often as they are reported."""
    most = 4096 * 21  # One sample is never refused.
    with run_server(Limits(max_answer_logprobs=1)) as server:
        long = {"prompt": [[5] * 2000] * 3, "max_tokens": 1}
        assert 200 == server.post(GREEDY | long | {"prompt_logprobs": 1}).status_code
        assert 200 == server.post(GREEDY | long | {"prompt": [5] * 4000}).status_code
        for scores in ({"prompt_logprobs": 20}, {"echo": True, "logprobs": 20}):
            refused = server.post(GREEDY | long | scores)
            assert 400 == refused.status_code
            assert f"max_answer_logprobs={most}" in refused.json()["error"]["message"]


# ---- tokens --------------------------------------------------------------------------------------


def test_token_ids_of_prompts_and_outputs(server) -> None:
    """Whole, and streamed where a text is not sent at once as well."""
    body = GREEDY | {"prompt": TEXT[:2], "return_token_ids": True, "max_tokens": 12}
    choices = server.ask(body)["choices"]
    found: list[list[int]] = [[], []]
    prompts: list[list[int]] = []
    for chunk in server.chunks(body):
        (choice,) = chunk["choices"]
        found[choice["index"]] += choice["token_ids"]
        prompts += [choice["prompt_token_ids"]] if "prompt_token_ids" in choice else []
    for at, choice in enumerate(choices):
        assert ids_of(TEXT[at]) == choice["prompt_token_ids"]
        assert tiny_tokenizer().decode(choice["token_ids"]) == choice["text"]
        assert choice["token_ids"] == found[at]
    assert sorted(prompts) == sorted(ids_of(text) for text in TEXT[:2])
    many = server.ask(body | {"prompt": TEXT[0], "logprobs": 20, "max_tokens": 60})
    assert 60 == len(many["choices"][0]["token_ids"])
    chat = server.ask(CHAT | {"return_token_ids": True}, CHATS)
    ids = tiny_tokenizer()("<user>What is a page?\n<assistant>", add_special_tokens=False)
    assert ids["input_ids"] == chat["prompt_token_ids"]
    assert 3 == len(chat["choices"][0]["token_ids"])
    first, *others = server.chunks(CHAT | {"return_token_ids": True}, CHATS)
    assert ids["input_ids"] == first["prompt_token_ids"]
    assert not any("prompt_token_ids" in each for each in others)
    told = [each["choices"][0]["token_ids"] for each in (first, *others)]
    assert chat["choices"][0]["token_ids"] == [token for each in told for token in each]


def test_prompts_are_cut_to_their_last_tokens(server) -> None:
    """A number of tokens, or -1 for as many as leave room for the answer."""
    base = GREEDY | {"return_token_ids": True, "truncate_prompt_tokens": 4}
    for prompt in (TEXT[0], ids_of(TEXT[0]), ids_of(TEXT[0])[-4:]):
        choice = server.ask(base | {"prompt": prompt, "echo": True})["choices"][0]
        assert ids_of(TEXT[0])[-4:] == choice["prompt_token_ids"]
        assert choice["text"].startswith(tiny_tokenizer().decode(ids_of(TEXT[0])[-4:]))
    chat = server.ask(CHAT | {"return_token_ids": True, "truncate_prompt_tokens": 4}, CHATS)
    assert 4 == len(chat["prompt_token_ids"])
    for prompt in (TEXT[0] * 900, ids_of(TEXT[0] * 900)):
        assert 400 == server.post(GREEDY | {"prompt": prompt}).status_code
        body = base | {"prompt": prompt, "truncate_prompt_tokens": -1}
        (choice,) = server.ask(body)["choices"]
        assert ids_of(TEXT[0] * 900)[-4091:] == choice["prompt_token_ids"]


# ---- lm-eval -------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_tokens", [True, False])
def test_the_requests_of_lm_eval(server, as_tokens: bool) -> None:
    """lm-eval's `local-completions` sums the log-probabilities of continuations, in batches.

    It leaves out the last token, which it did not ask for, and takes a continuation for the greedy
    one where each log-probability is the largest of its `top_logprobs`.
    """
    pairs = [(TEXT[0][:20], TEXT[0][20:]), (TEXT[1][:9], TEXT[1][9:]), ("A", " row"), ("日", "本")]
    texts = [context + continuation for context, continuation in pairs]
    asked = [ids_of(text) for text in texts]
    starts = [len(ids_of(context)) for context, _ in pairs]
    # The first continuation is the model's own.
    greedy = server.ask(GREEDY | {"prompt": asked[0], "return_token_ids": True, "max_tokens": 7})
    starts[0] = len(asked[0])
    asked[0] = asked[0] + greedy["choices"][0]["token_ids"]
    texts[0] += greedy["choices"][0]["text"]
    body = {
        "model": "tiny",
        "prompt": asked if as_tokens else texts,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    if not as_tokens:  # A text of the output may have other tokens.
        asked = [ids_of(text) for text in texts]
    answer = server.ask(body)
    choices = sorted(answer["choices"], key=lambda each: each["index"])
    for ids, start, choice in zip(asked, starts, choices, strict=True):
        told = choice["logprobs"]["token_logprobs"][start:-1]
        rows = scored(ids)[start - 1 : -1]
        expected = sum(float(row[token]) for row, token in zip(rows, ids[start:], strict=True))
        assert abs(expected - sum(told)) < 1e-3
        best = [max(each.values()) for each in choice["logprobs"]["top_logprobs"][start:-1]]
        assert (best == told) == (rows.argmax(-1).tolist() == ids[start:])
    if as_tokens:
        first = choices[0]["logprobs"]
        best = [max(each.values()) for each in first["top_logprobs"][starts[0] : -1]]
        assert best == first["token_logprobs"][starts[0] : -1]
    until = {"max_tokens": 20, "temperature": 0, "stop": ["\n", "Q:", "###", "</s>", "Question:"]}
    body = {"model": "tiny", "prompt": body["prompt"], "seed": 1234, **until}
    assert 4 == len(server.ask(body)["choices"])
