"""Answers to OpenAI's client equal the model's output, whole and streamed.

The sampler has tests of its own; here, options are shown to have an effect.
"""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
import torch
from helpers.serving import PLAIN, TEXT, tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from vmkv.serve.server.choices import Tokens

GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}


def expected_tokens(server: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """Tokens that transformers generates for a prompt alone."""
    with torch.no_grad():
        output = server.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return output[0, len(prompt) :].tolist()


def expected_text(server: Any, prompt: str, num_tokens: int, **options: Any) -> str:
    """The text of `expected_tokens`."""
    tokens = tiny_tokenizer()(prompt, **options)["input_ids"]
    return tiny_tokenizer().decode(
        expected_tokens(server, tokens, num_tokens), skip_special_tokens=True
    )


def test_models_are_listed_and_found_by_name(server) -> None:
    client = server.client()
    assert ["tiny"] == [model.id for model in client.models.list()]
    assert "tiny" == client.models.retrieve("tiny").id


def test_completion(server) -> None:
    """A completion has the text that transformers generates, and its token counts."""
    answer = server.client().completions.create(prompt=TEXT[0], max_tokens=20, **GREEDY)
    assert expected_text(server, TEXT[0], 20) == answer.choices[0].text
    assert "length" == answer.choices[0].finish_reason
    num_prompt = len(tiny_tokenizer()(TEXT[0])["input_ids"])
    usage = answer.usage
    assert (num_prompt, 20, num_prompt + 20) == (
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.total_tokens,
    )


def test_completion_of_tokens(server) -> None:
    """A prompt may be token ids; several prompts are answered in order."""
    prompts = [tiny_tokenizer()(text)["input_ids"] for text in TEXT]
    client = server.client()
    one = client.completions.create(prompt=prompts[0], max_tokens=8, **GREEDY)
    assert expected_text(server, TEXT[0], 8) == one.choices[0].text
    for several in (prompts, TEXT):
        answer = client.completions.create(prompt=several, max_tokens=8, **GREEDY)
        assert [expected_text(server, text, 8) for text in TEXT] == [
            choice.text for choice in answer.choices
        ]
        assert [0, 1, 2, 3] == [choice.index for choice in answer.choices]


def test_streamed_completion(server) -> None:
    """The chunks concatenate to the whole text; the last one has the finish reason."""
    pieces = list(
        server.client().completions.create(
            prompt=TEXT[1],
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
            **GREEDY,
        )
    )
    assert len(pieces) > 5, "the text came in one chunk"
    *texts, usage = pieces
    assert expected_text(server, TEXT[1], 20) == "".join(p.choices[0].text for p in texts)
    assert ["length"] == [p.choices[0].finish_reason for p in texts if p.choices[0].finish_reason]
    assert "length" == texts[-1].choices[0].finish_reason
    assert ([], 20) == (usage.choices, usage.usage.completion_tokens)
    assert all(p.usage is None for p in texts)
    assert 1 == len({p.id for p in pieces})


def test_streamed_chunks_carry_the_index_of_their_choice(server) -> None:
    """Prompts and samples may be interleaved in a stream."""
    texts: dict[int, str] = {}
    for piece in server.client().completions.create(
        prompt=TEXT[:3], n=2, max_tokens=12, stream=True, **GREEDY
    ):
        (choice,) = piece.choices
        texts[choice.index] = texts.get(choice.index, "") + choice.text
    # Greedy: both samples of a prompt are equal.
    assert [expected_text(server, text, 12) for text in TEXT[:3] for _ in range(2)] == [
        texts[at] for at in range(6)
    ]


def test_chat(server) -> None:
    """The prompt of a chat is the messages as rendered by the tokenizer's template."""
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What is a row?"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "I won't say."}]},
        {"role": "user", "content": "What is a page?"},
    ]
    rendered = "<system>Be brief.\n<user>What is a row?\n<assistant>I won't say.\n"
    rendered += "<user>What is a page?\n<assistant>"
    expected = expected_text(server, rendered, 15, add_special_tokens=False)
    client = server.client()
    answer = client.chat.completions.create(messages=messages, max_completion_tokens=15, **GREEDY)
    assert expected == answer.choices[0].message.content
    assert "assistant" == answer.choices[0].message.role
    pieces = list(
        client.chat.completions.create(messages=messages, max_tokens=15, stream=True, **GREEDY)
    )
    assert "assistant" == pieces[0].choices[0].delta.role
    assert expected == "".join(p.choices[0].delta.content or "" for p in pieces)
    assert "length" == pieces[-1].choices[0].finish_reason


def test_logprobs(server) -> None:
    """Completions and chats return log-probabilities and the most likely tokens."""
    client = server.client()
    answer = client.completions.create(prompt=TEXT[0], max_tokens=5, logprobs=3, **GREEDY)
    found = answer.choices[0].logprobs
    tokens = expected_tokens(server, tiny_tokenizer()(TEXT[0])["input_ids"], 5)
    assert [Tokens(tiny_tokenizer())[token].text for token in tokens] == found.tokens
    assert all(logprob <= 0 for logprob in found.token_logprobs)
    for token, logprob, top in zip(
        found.tokens, found.token_logprobs, found.top_logprobs, strict=True
    ):
        assert top[token] == logprob == max(top.values())
    assert found.text_offset[0] == 0
    assert found.text_offset == sorted(found.text_offset)
    chat = client.chat.completions.create(
        messages=[{"role": "user", "content": "page"}],
        max_tokens=4,
        logprobs=True,
        top_logprobs=2,
        **GREEDY,
    )
    content = chat.choices[0].logprobs.content
    assert 4 == len(content)
    assert all(len(each.top_logprobs) == 2 for each in content)
    # Tokens may be parts of characters; their bytes together are the text.
    raw = b"".join(bytes(each.bytes) for each in content)
    assert chat.choices[0].message.content == raw.decode(errors="replace")
    with_none = client.chat.completions.create(
        messages=[{"role": "user", "content": "page"}], max_tokens=4, logprobs=True, **GREEDY
    )
    assert 4 == len(with_none.choices[0].logprobs.content)


def test_drawn_tokens_are_among_the_likeliest(server) -> None:
    """As OpenAI has it: beside the alternatives that were asked for, and alone without any."""
    for count in (0, 1):
        body = PLAIN | {"max_tokens": 50, "temperature": 1.5, "seed": 3, "logprobs": count}
        found = server.post(body).json()["choices"][0]["logprobs"]
        for token, logprob, top in zip(
            found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
        ):
            assert logprob == top[token]
            assert len(top) in (1, count + 1)


def test_offsets_of_tokens_count_characters(server) -> None:
    """A token that is part of a character begins where the character does, or behind it."""
    body = PLAIN | {"max_tokens": 20, "guided_regex": "😀é😀x", "logprobs": 0}
    choice = server.post(body).json()["choices"][0]
    found = choice["logprobs"]
    assert choice["text"].index("x") == found["text_offset"][found["tokens"].index("x")]
    assert len(choice["text"]) == max(found["text_offset"])  # Where the last token ended it.


def test_spaces_of_sentencepiece_are_bytes() -> None:
    """Its decoder drops the space at a text's beginning, which each token is by itself."""
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={"▁pa": 0, "pa": 1, "▁": 2, "ge": 3}, merges=[])
    )
    parts = [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.Strip(" ", 1, 0)]
    inner.decoder = tokenizers.decoders.Sequence(parts)
    tokens = Tokens(PreTrainedTokenizerFast(tokenizer_object=inner))
    assert [b" pa", b"pa", b" ", b"ge"] == [tokens[each].raw for each in range(4)]


def test_every_token_has_bytes_and_a_text_of_its_own() -> None:
    """The bytes of a text's tokens concatenate to the text, also for parts of characters."""
    text = "5 € for a 日本 page 🙂"
    tokens = Tokens(tiny_tokenizer())
    found = [tokens[each] for each in tiny_tokenizer()(text)["input_ids"]]
    assert text.encode() == b"".join(each.raw or b"" for each in found)
    assert any(each.text.startswith("bytes:\\x") for each in found)
    texts = [tokens[each].text for each in range(len(tiny_tokenizer()))]
    assert len(texts) == len(set(texts))


def test_streamed_logprobs_are_complete(server) -> None:
    """Each token's log-probability is sent once, with the token's chunk or a later one."""
    pieces = list(
        server.client().completions.create(
            prompt=TEXT[0], max_tokens=12, logprobs=1, stream=True, **GREEDY
        )
    )
    tokens = [
        token for p in pieces if p.choices[0].logprobs for token in p.choices[0].logprobs.tokens
    ]
    expected = expected_tokens(server, tiny_tokenizer()(TEXT[0])["input_ids"], 12)
    assert [Tokens(tiny_tokenizer())[token].text for token in expected] == tokens


def test_stop_strings(server) -> None:
    """Text ends before a stop string, in whole answers and streams."""
    text = expected_text(server, TEXT[0], 30)
    stop = text[10:13]
    before = text[: text.index(stop)]
    client = server.client()
    whole = client.completions.create(prompt=TEXT[0], max_tokens=30, stop=stop, **GREEDY)
    assert (before, "stop") == (whole.choices[0].text, whole.choices[0].finish_reason)
    pieces = client.completions.create(
        prompt=TEXT[0], max_tokens=30, stop=[stop], stream=True, **GREEDY
    )
    assert before == "".join(p.choices[0].text for p in pieces)


def test_a_seed_determines_the_samples(server) -> None:
    """Equal seeds give equal texts; the samples of one request differ."""
    client = server.client()

    def sample(seed: int) -> list[str]:
        answer = client.completions.create(
            model="tiny", prompt=TEXT[0], max_tokens=12, n=3, temperature=1.0, seed=seed
        )
        return [choice.text for choice in answer.choices]

    first = sample(7)
    assert first == sample(7)
    assert 3 == len(set(first))
    assert first != sample(8)


@pytest.mark.parametrize(
    "option",
    [
        {"top_p": 1e-6},
        {"extra_body": {"top_k": 1}},
        {"extra_body": {"min_p": 1.0}},
    ],
    ids=["top_p", "top_k", "min_p"],
)
def test_sampling_filters_have_an_effect(server, option: dict[str, Any]) -> None:
    """At its tightest setting, each filter leaves only the most likely token."""
    extra = {"ignore_eos": True, **option.get("extra_body", {})}
    answer = server.client().completions.create(
        **{"model": "tiny", "prompt": TEXT[2], "max_tokens": 10, "temperature": 1.0}
        | option
        | {"extra_body": extra}
    )
    assert expected_text(server, TEXT[2], 10) == answer.choices[0].text


def test_penalties_have_an_effect(server) -> None:
    """Each penalty changes a repetitive text."""
    plain = server.client().completions.create(prompt=TEXT[3], max_tokens=40, **GREEDY)
    for name, value in (
        ("presence_penalty", 2.0),
        ("frequency_penalty", 2.0),
        ("repetition_penalty", 5.0),
    ):
        body = {"model": "tiny", "prompt": TEXT[3], "max_tokens": 40, "temperature": 0}
        body |= {"ignore_eos": True, name: value}
        answer = server.post(body)
        assert 200 == answer.status_code, answer.text
        assert plain.choices[0].text != answer.json()["choices"][0]["text"], name
