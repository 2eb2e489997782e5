"""Invalid sampling parameters are refused when they are made, with an error that names them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import NoBadWordsLogitsProcessor

from vmkv import ConfigError
from vmkv.serve.params import SamplingParams, StructuredOutputs, resolve

NAN = float("nan")
#: Values that each parameter refuses.
BAD: dict[str, list[Any]] = {
    "temperature": [-0.1, NAN, "warm"],
    "top_p": [0.0, 1.1],
    "min_p": [-1],
    "top_k": [-2, 1.5],
    "n": [0],
    "max_tokens": [0],
    "logprobs": [-1],
    "prompt_logprobs": [-1],
    "seed": [2**64],
    "repetition_penalty": [0.0],
    "presence_penalty": [3],
    "stop": [["a", ""]],
    "stop_token_ids": [[-1]],
    "logit_bias": [{3: 101}, {3: NAN}, {-3: 1}, {"3": 1}, [3], dict.fromkeys(range(1025), 1)],
    "allowed_token_ids": [[], [-1], 3],
    "bad_words": [[""], ["  "], [[]], [[-1]], [3]],
    "logits_processors": [[3]],
    "structured_outputs": [{"regex": "a"}],
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_parameters_are_refused(name: str) -> None:
    for value in BAD[name]:
        with pytest.raises(ConfigError, match=name):
            SamplingParams(**{name: value})


def test_fewer_tokens_than_min_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match="min_tokens"):
        SamplingParams(max_tokens=3, min_tokens=4)


INTEGERS = ("n", "top_k", "min_tokens", "max_tokens", "logprobs", "prompt_logprobs", "seed")
NUMBERS = (
    *("temperature", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
any_integer = st.integers() | st.sampled_from([2**31, 2**63 - 1, 2**63, -(2**63) - 1, 10**5000])


@given(name=st.sampled_from(INTEGERS + NUMBERS), value=any_integer | st.floats())
def test_any_number_is_accepted_or_refused(name: str, value: float) -> None:
    """The error names the parameter, and is short even if the number is long."""
    params = {"max_tokens": None, name: value}
    try:
        kept = SamplingParams(**params)
    except ConfigError as error:
        complaint = str(error)
    else:
        assert abs(getattr(kept, name)) < 2**63 if name in INTEGERS else True
        return
    assert complaint.startswith(f"{name}=")
    assert len(complaint) < 200


@pytest.mark.parametrize("name", ["stop", "stop_token_ids", "logits_processors"])
@pytest.mark.parametrize("value", [5, None, 2.5, ["x" * 10**6, 10**5000], [None]], ids=type)
def test_invalid_sequences_are_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name) as raised:
        SamplingParams(**{name: value})
    assert len(str(raised.value)) < 200


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({}, "exactly one .* not none"),
        ({"json_object": False}, "exactly one .* not none"),
        ({"json": "{}", "regex": "a"}, "exactly one .* not json and regex"),
        ({"json": {"const": {1, 2}}}, "json is no JSON"),
        ({"json": 3}, "json=3 must be a text"),
        ({"json_object": "yes"}, "json_object='yes' must be true or false"),
        ({"regex": ["a"]}, "regex=.* must be a text"),
        ({"choice": "ab"}, "choice='ab' must be a list"),
        ({"choice": []}, "choice=.* must be a list of non-empty texts"),
        ({"choice": ["a", ""]}, "choice=.* must be a list of non-empty texts"),
    ],
    ids=str,
)
def test_invalid_structured_outputs_are_refused(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=f"structured_outputs.*{complaint}"):
        StructuredOutputs(**given)


def test_structured_outputs_can_be_keys() -> None:
    """Compiled grammars are found by them: a schema is kept as text, and choices as a tuple."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert StructuredOutputs(json=schema) in {StructuredOutputs(json=json.dumps(schema))}
    assert StructuredOutputs(choice=["a", "b"]) in {StructuredOutputs(choice=("a", "b"))}


def test_bad_words_of_several_tokens_are_banned_as_by_transformers() -> None:
    """Only the output counts, whatever its length."""
    words = [[1, 2], [2, 1, 3], [4, 4], [1, 1, 1, 1, 5]]
    params = SamplingParams(bad_words=words)
    ban = resolve(params, 0, (), 8, vocab_size=9, num_prompt_tokens=2).logits_processors[0]
    expected = NoBadWordsLogitsProcessor(words)
    scores = torch.zeros(1, 9)
    for output in [[], [1], [2, 1], [4], [1, 1, 1, 1], [3, 2, 1], [7, 7]]:
        got = ban(torch.tensor([[1, 4, *output]]), scores)
        wanted = expected(torch.tensor([output], dtype=torch.long), scores)
        assert torch.equal(got, wanted), output
