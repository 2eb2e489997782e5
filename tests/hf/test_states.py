"""`vmkv.generate` over models whose layers keep states: each sequence has its own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers.hybrids import HYBRIDS, hybrid
from helpers.ragged import Collects, alone, check_generate, random_prompts

import vmkv
from vmkv import ConfigError
from vmkv.hf.proof import prove
from vmkv.step import states
from vmkv.units import MiB

if not HYBRIDS:
    pytest.skip("this release has no layers with states in its cache", allow_module_level=True)

GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
BUDGET_BYTES = 64 * MiB
PROMPTS = random_prompts(40, 1, 13, 25, 2)


def _expected(model: Any) -> list[list[int]]:
    return [alone(model, prompt, **GREEDY) for prompt in PROMPTS]


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("chunk", [3, 16, 8192])
def test_prompts_beside_each_other_give_what_each_gives_alone(name: str, chunk: int) -> None:
    """In chunks smaller than a convolution, and in whole prompts."""
    check_generate(hybrid(name), PROMPTS, max_num_batched_tokens=chunk)


def test_a_cache_of_several_calls_begins_each_sequence_anew() -> None:
    """Rows are adopted with the states of ended sequences, which are prefixes if wanted."""
    model = hybrid(HYBRIDS[0])
    with vmkv.RaggedCache(model.config, budget_bytes=BUDGET_BYTES) as cache:
        for _ in range(2):
            said = vmkv.generate(model, PROMPTS, cache=cache, prefix_caching=False, **GREEDY)
            assert _expected(model) == said
            cache.check()
        stats = cache.stats()
        assert 0 == stats.num_prefix_hits == stats.num_sequences
        assert stats.parked_bytes


@pytest.mark.parametrize(("name", "chunk"), [(HYBRIDS[0], 16), *((name, 8192) for name in HYBRIDS)])
def test_prompts_begin_where_others_of_their_call_and_of_earlier_ones_ended(
    name: str, chunk: int
) -> None:
    """A common beginning is computed once; a conversation goes on from its own state."""
    model = hybrid(name)
    [common] = random_prompts(150)
    prompts = [common + tail for tail in random_prompts(20, 3, 9)]
    options = {**GREEDY, "max_num_batched_tokens": chunk}
    with vmkv.RaggedCache(model.config, budget_bytes=BUDGET_BYTES) as cache:
        said = vmkv.generate(model, prompts, cache=cache, **options)
        assert [alone(model, prompt, **GREEDY) for prompt in prompts] == said
        assert 2 * 144 == cache.stats().num_prefix_hit_tokens
        turns = [[*text, 7, 8] for text in said]
        again = vmkv.generate(model, turns, cache=cache, **options)
        assert [alone(model, turn, **GREEDY) for turn in turns] == again
        found = cache.stats().num_prefix_hit_tokens - 2 * 144
        assert sum(len(text) - 1 for text in said) == found
        cache.check()


def test_padded_batches_of_transformers_are_served() -> None:
    """Left padding, as `model.generate` passes it on."""
    model = hybrid(HYBRIDS[0])
    ids = torch.tensor([[0, 0, 5, 6, 7], [3, 4, 5, 6, 7]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    said = model.generate(ids, attention_mask=mask, custom_generate=vmkv.ragged_generate, **GREEDY)
    assert alone(model, [5, 6, 7], **GREEDY) == said[0, 2:].tolist()
    assert alone(model, [3, 4, 5, 6, 7], **GREEDY) == said[1].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_proof_finds_the_layers_with_states(dtype: torch.dtype) -> None:
    """Their types are those that transformers keeps. The model stays as it was."""
    model = copy.deepcopy(hybrid("qwen3_next")).to(dtype)
    before = [sorted(vars(each)) for each in model.modules()]
    proof = prove(model)
    assert before == [sorted(vars(each)) for each in model.modules()]
    kinds = model.config.layer_types
    linear = [at for at, kind in enumerate(kinds) if kind == "linear_attention"]
    assert linear == [*proof.calls.states]
    assert {*range(len(kinds))} - {*linear} == {*proof.signatures}
    assert not proof.never_waits
    cache = vmkv.hf.compat.default_cache(model.config)
    with torch.no_grad():
        model(torch.tensor([[3, 4, 5]]), past_key_values=cache, use_cache=True)
    for at, known in proof.calls.states.items():
        kept = states.tensors_of(cache.layers[at])
        assert {path: (1, *its.shape) for path, its in known.shapes.items()} == {
            path: tuple(each.shape) for path, each in kept.items()
        }
        assert {its.dtype for its in known.shapes.values()} == {
            each.dtype for each in kept.values()
        }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [name for name in HYBRIDS if name in ("lfm2", "jamba")])
def test_layers_that_forget_their_state_are_found(name: str, dtype: torch.dtype) -> None:
    """Jamba's, given several tokens at once; in a coarse type, too."""
    proof = prove(copy.deepcopy(hybrid(name)).to(dtype))
    assert {name != "jamba"} == {each.is_chunkable for each in proof.calls.states.values()}


def test_a_model_that_mixes_the_states_of_sequences_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The proof compares every sequence of a packed step with the plain pass."""

    def as_one(self: Any, layer: int, forward: Any, hidden: torch.Tensor) -> Any:
        self._called.append(layer)
        known = self.layers[layer]
        return forward(hidden, known.cache_of(layer, states.with_tensors(known.empty, {})))

    monkeypatch.setattr(states.PackedStates, "run", as_one)
    with pytest.raises(ConfigError, match="other hidden states than by themselves"):
        prove(copy.deepcopy(hybrid("qwen3_next")))


def test_the_models_own_calls_are_untouched_while_it_is_served() -> None:
    """Another use of the model between two steps computes as before."""
    model = hybrid(HYBRIDS[0])
    expected = alone(model, PROMPTS[2], **GREEDY)

    said_between: list[list[int]] = []

    class Asks(Collects):
        def put(self, value: torch.Tensor) -> None:
            said_between.append(alone(model, PROMPTS[2], **GREEDY))

    said = vmkv.generate(model, PROMPTS[:1], streamer=Asks(), budget_bytes=BUDGET_BYTES, **GREEDY)
    assert [alone(model, PROMPTS[0], **GREEDY)] == said
    assert said_between
    assert [expected] * len(said_between) == said_between
    assert "forward" not in {name for each in model.modules() for name in vars(each)}


def test_a_model_without_keys_is_refused() -> None:
    """Mamba alone: packed steps need rows of keys and values."""
    with pytest.raises(ConfigError, match="none of its layers keeps keys and values"):
        prove(hybrid("mamba2"))


def test_pieces_of_one_token_begin_without_a_state() -> None:
    """Only sequences that go on run as a batch."""
    model = hybrid(HYBRIDS[0])
    prompts = random_prompts(1, 1, 1)
    expected = [alone(model, prompt, **GREEDY) for prompt in prompts]
    assert expected == vmkv.generate(model, prompts, budget_bytes=BUDGET_BYTES, **GREEDY)


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_reset_cache_takes_a_batch_of_another_size_and_mode(name: str) -> None:
    """States of the ended batch are dropped: transformers' own reset keeps their tensors."""
    model = hybrid(name)
    first, second = (torch.randint(3, 60, size) for size in ((3, 7), (2, 5)))
    with vmkv.VMKVCache(model.config, budget_bytes=BUDGET_BYTES) as cache, torch.no_grad():
        with torch.inference_mode():
            model(first, past_key_values=cache)
        cache.reset()
        assert torch.equal(model(second).logits, model(second, past_key_values=cache).logits)
