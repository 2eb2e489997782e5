"""Log-probabilities of prompts equal the model's, and are reported once whatever happens."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from helpers.hybrids import model_named
from helpers.random_engine import HYBRIDS
from helpers.requests import finish_all, prompts
from helpers.tiny_models import SERVED_LATELY, VOCABULARY, tiny_model

from vmkv.core.backend import MemoryLocation
from vmkv.serve import runner
from vmkv.serve.engine import Engine
from vmkv.serve.params import SamplingParams
from vmkv.serve.request import RequestOutput
from vmkv.serve.runner import RunnerOptions
from vmkv.serve.scheduler import PreemptionCosts
from vmkv.step import Piece, Stepper
from vmkv.units import MiB

MakeEngine = Callable[..., Engine]
#: On the host, the padded steps of graphs run uncaptured.
PADDED = {"runner": "graphs", "runner_options": RunnerOptions(capture=True, show_progress=False)}
SCORED = SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=3)


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes and slices of fewer tokens than a chunk, so that there are several of each."""
    monkeypatch.setattr(runner, "_PASS_TOKENS", 5)
    monkeypatch.setattr(runner, "_ROWS", 3)


def check(name: str, prompt: Sequence[int], output: RequestOutput, count: int = 3) -> None:
    """Compare with one forward pass of the whole prompt."""
    told = output.prompt_logprobs
    assert told is not None
    assert (len(prompt), None) == (len(told), told[0])
    with torch.no_grad():
        wanted = model_named(name)(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    for row, token_id, entry in zip(wanted[:-1], prompt[1:], told[1:], strict=True):
        assert entry is not None
        assert token_id == entry.token_id
        torch.testing.assert_close(torch.tensor(entry.logprob), row[token_id], atol=1e-4, rtol=1e-4)
        best = row.topk(count)
        assert best.indices.tolist() == list(entry.top)
        torch.testing.assert_close(
            torch.tensor(list(entry.top.values())), best.values, atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral", *SERVED_LATELY, *HYBRIDS])
@pytest.mark.parametrize("options", [{}, PADDED], ids=["eager", "graphs"])
def test_they_equal_the_models(
    make_engine: MakeEngine, name: str, options: dict[str, object]
) -> None:
    """Chunked prompts of one to forty tokens, beside requests that want none."""
    wanted = [[7], [7, 8], *prompts(4, shortest=15, longest=40, seed=2)]
    plain = prompts(3, seed=5)
    engine = make_engine(name, **options)
    its = [SCORED] * len(wanted) + [dataclasses.replace(SCORED, prompt_logprobs=None)] * len(plain)
    outputs = engine.generate([*wanted, *plain], its)
    for prompt, output in zip(wanted, outputs, strict=False):
        check(name, prompt, output)
    alone = make_engine(name).generate([*wanted, *plain], its[-1])
    assert [list(each.outputs[0].token_ids) for each in alone] == [
        list(each.outputs[0].token_ids) for each in outputs
    ]
    assert all(each.prompt_logprobs is None for each in outputs[len(wanted) :])


def test_other_requests_keep_their_passes(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of other requests run together, and may be captured; outputs decode with them."""
    engine = make_engine(**PADDED, max_num_batched_tokens=64)
    long, short = prompts(1, shortest=40, longest=40)[0], prompts(1, seed=1)[0]
    told: list[list[int]] = []
    run = Stepper.run

    def noted(stepper: Stepper, pieces: Sequence[Piece], *rest: Sequence[Sequence[int]]) -> object:
        told.append([piece.num_new_tokens for piece in pieces])
        return run(stepper, pieces, *rest)

    monkeypatch.setattr(Stepper, "run", noted)
    plain = dataclasses.replace(SCORED, prompt_logprobs=None, max_tokens=9)
    handles = [engine.add(short, plain), engine.add(long, SCORED)]
    finish_all(engine)
    check("llama", long, handles[1].output())
    assert [[len(short)], [1, 1]] == [told[0], told[1]]
    assert all(each in ([1], [1, 1]) for each in told[1:])


@pytest.mark.parametrize("host_bytes", [0, 1 * MiB], ids=["recompute", "swap"])
@pytest.mark.parametrize("num_steps", range(1, 7))
def test_a_preempted_prompt_reports_once(
    make_engine: MakeEngine, host_bytes: int, num_steps: int
) -> None:
    """Preempted between the prompt's three chunks, and while it decodes."""
    prompt = prompts(1, shortest=40, longest=40, seed=3)[0]
    costs = PreemptionCosts(flops_per_s=1.0 if host_bytes else 1e30)
    engine = make_engine(host_budget_bytes=host_bytes, preemption_costs=costs)
    handle = engine.add(prompt, SCORED)
    for _ in range(num_steps):
        engine.step()
    engine.loop._give_way()  # To another engine over the pool.
    finish_all(engine)
    assert 1 == handle.requests[0].num_preemptions
    swapped = engine.cache.pool.stats(MemoryLocation.HOST)
    assert bool(host_bytes) == bool(swapped.created_bytes)
    check("llama", prompt, handle.output())
    [plain] = engine.generate([prompt], dataclasses.replace(SCORED, prompt_logprobs=None))
    assert plain.outputs[0].token_ids == handle.output().outputs[0].token_ids


def test_cached_prefixes_are_computed_again(engine: Engine) -> None:
    """They are cached for others, which may hit them."""
    prompt = prompts(1, shortest=40, longest=40)[0]
    plain = dataclasses.replace(SCORED, prompt_logprobs=None)
    for _ in range(2):
        engine.generate([prompt], plain)
        [output] = engine.generate([prompt], SCORED)
        assert 0 == output.num_cached_tokens
        check("llama", prompt, output)
    other = engine.generate([prompt], SCORED, tenant="other")
    again = engine.generate([prompt], plain, tenant="other")
    assert 0 == other[0].num_cached_tokens < again[0].num_cached_tokens


@pytest.mark.parametrize("deterministic", [False, True])
def test_samples_have_one_report(make_engine: MakeEngine, deterministic: bool) -> None:
    """The prompt is computed once where samples share it, and scored once in any case."""
    prompt = prompts(1, shortest=30, longest=30)[0]
    engine = make_engine(deterministic=deterministic)
    params = dataclasses.replace(SCORED, n=3, temperature=1.0, seed=4)
    [output] = engine.generate([prompt], params)
    check("llama", prompt, output)
    assert 3 == len(output.outputs)
    assert deterministic != bool(engine.cache.stats().sharing.num_forks)
    [plain] = engine.generate([prompt], dataclasses.replace(params, prompt_logprobs=None))
    assert [each.token_ids for each in plain.outputs] == [each.token_ids for each in output.outputs]


def test_deterministic_reports_do_not_depend_on_others(make_engine: MakeEngine) -> None:
    """Equal to the last bit, and so is the output."""
    prompt = prompts(1, shortest=40, longest=40, seed=4)[0]
    params = SamplingParams(max_tokens=8, seed=5, logprobs=2, prompt_logprobs=2)

    def run(num_others: int) -> object:
        engine = make_engine(deterministic=True)
        others = prompts(num_others, seed=6)
        handles = [engine.add(other, SCORED) for other in others]
        handle = engine.add(prompt, params)
        finish_all(engine)
        assert all(each.output().prompt_logprobs for each in handles)
        output = handle.output()
        return output.prompt_logprobs, output.outputs[0].token_ids, output.outputs[0].logprobs

    assert run(0) == run(3) == run(9)


def test_handles_stream_them_with_the_first_token(make_engine: MakeEngine) -> None:
    """A handle's outputs hold everything so far."""
    prompt = prompts(1, shortest=40, longest=40)[0]
    for output in make_engine().add(prompt, SCORED):
        check("llama", prompt, output)


def test_counts_beyond_the_vocabulary_and_tokens_without_a_logit(make_engine: MakeEngine) -> None:
    """An embedding may have more rows than there are logits; such a token has no probability."""
    model = copy.deepcopy(tiny_model("llama"))
    num_logits = VOCABULARY - 10
    head = torch.nn.Linear(model.lm_head.in_features, num_logits, bias=False)
    head.weight.data = model.lm_head.weight.data[:num_logits]
    model.lm_head = head
    engine = make_engine(model)
    [output] = engine.generate([[5, VOCABULARY - 1, 6]], SamplingParams(prompt_logprobs=1000))
    assert output.prompt_logprobs is not None
    _, outside, inside = output.prompt_logprobs
    assert outside is not None
    assert inside is not None
    assert -math.inf == outside.logprob < inside.logprob
    assert num_logits == len(outside.top) == len(inside.top)
    assert inside.logprob == inside.top[6]
