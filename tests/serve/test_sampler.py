"""The sampler: filters as in transformers, the distribution, and independence of rows.

Not covered: speed, and CUDA (tests/serve/test_runner_gpu.py).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation import logits_process as hf

from vmkv.errors import CapacityError
from vmkv.serve.params import SamplingParams
from vmkv.serve.sampler import Sampler, _likeliest, _Needs, gumbel_noise, row_keys

VOCABULARY = 50
PROMPT = (3, 3, 7)


def some_logits(rows: int = 1, *, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, VOCABULARY, generator=generator) * spread


def sampler_of(*params: SamplingParams, **options) -> Sampler:
    sampler = Sampler(max(8, len(params)), VOCABULARY, "cpu")
    for slot, each in enumerate(params):
        sampler.set_slot(slot, each, PROMPT, **options)
    return sampler


def draws(params: SamplingParams, logits: torch.Tensor, count: int) -> torch.Tensor:
    """Sample `[count]` tokens: two from each of `count / 2` slots."""
    seeds = range(params.seed, params.seed + count // 2)
    sampler = sampler_of(*[dataclasses.replace(params, seed=seed) for seed in seeds])
    slots = torch.arange(len(seeds))
    batch = logits.expand(len(seeds), -1)
    return torch.cat([sampler.sample(batch, slots, slots.tolist()).token_ids for _ in range(2)])


def allowed(tokens: torch.Tensor) -> set[int]:
    return set(tokens.tolist())


# ---- filters and distribution -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "processor"),
    [
        ({"top_k": 5}, hf.TopKLogitsWarper(5)),
        ({"top_k": 1}, hf.TopKLogitsWarper(1)),
        ({"top_p": 0.8}, hf.TopPLogitsWarper(0.8)),
        ({"top_p": 0.01}, hf.TopPLogitsWarper(0.01)),
        ({"min_p": 0.05}, hf.MinPLogitsWarper(0.05)),
        ({"min_p": 1.0}, hf.MinPLogitsWarper(1.0)),
    ],
)
@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_filters_keep_the_tokens_that_transformers_keeps(params, processor, temperature) -> None:
    """Over many draws, exactly the tokens that transformers' processor keeps."""
    logits = some_logits(spread=1.5)
    warped = hf.TemperatureLogitsWarper(temperature)(None, logits.clone())
    kept = set(torch.nonzero(processor(None, warped)[0] > -math.inf).flatten().tolist())
    tokens = draws(SamplingParams(temperature=temperature, seed=1, **params), logits, 3000)
    assert allowed(tokens) <= kept
    likely = set(torch.nonzero(warped.softmax(-1)[0] > 0.01).flatten().tolist())
    assert kept & likely <= allowed(tokens)


def test_top_k_comes_before_top_p() -> None:
    """Top-p applies to the probabilities among the top k, as in transformers and vLLM."""
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1] + [1e-9] * (VOCABULARY - 4)]))
    # Among the first two alone, 0.4 becomes 0.57, so 0.56 excludes the second one.
    tokens = draws(SamplingParams(top_k=2, top_p=0.56, seed=0), logits, 200)
    assert {0} == allowed(tokens)
    tokens = draws(SamplingParams(top_k=2, top_p=0.58, seed=0), logits, 200)
    assert {0, 1} == allowed(tokens)


@pytest.mark.parametrize("params", [{}, {"top_k": 4}, {"top_p": 0.9}, {"min_p": 0.02}])
def test_frequencies_are_the_probabilities(params) -> None:
    """A chi-squared test over many draws, with a high threshold and a fixed seed."""
    logits = some_logits(seed=5, spread=1.0)
    one = SamplingParams(temperature=0.8, seed=3, **params)
    expected = logits / 0.8
    if one.top_k:
        expected = hf.TopKLogitsWarper(one.top_k)(None, expected)
    if one.top_p < 1:
        expected = hf.TopPLogitsWarper(one.top_p)(None, expected)
    if one.min_p:
        expected = hf.MinPLogitsWarper(one.min_p)(None, expected)
    probabilities = expected.softmax(-1)[0]
    count = 6000
    seen = torch.bincount(draws(one, logits, count), minlength=VOCABULARY)
    kept = probabilities > 0
    assert seen[~kept].sum() == 0
    wanted = probabilities[kept] * count
    statistic = ((seen[kept] - wanted) ** 2 / wanted).sum().item()
    freedom = int(kept.sum()) - 1
    # Mean `freedom`, deviation sqrt(2 freedom).
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


def test_noise_is_gumbel_noise() -> None:
    """Its mean is Euler's constant, its variance pi^2 / 6, within rows and across rows."""
    keys = row_keys(torch.arange(200), torch.zeros(200, dtype=torch.int64))
    noise = gumbel_noise(keys, torch.arange(4096)).double()
    assert torch.isfinite(noise).all()
    for values in (noise.flatten(), noise[0], noise[:, 17]):
        error = 6 * math.pi / math.sqrt(6 * values.numel())
        assert values.mean().item() == pytest.approx(0.5772, abs=error)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, rel=0.02)
    assert abs(torch.corrcoef(noise[:50]) - torch.eye(50)).max() < 0.1


# ---- greedy, and penalties ----------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_penalties_count_prompt_and_output(temperature) -> None:
    """Repetition counts prompt and output; frequency and presence count the output alone."""
    penalty = SamplingParams(
        temperature=temperature,
        top_k=1,  # So that the draw shows the adjusted maximum.
        repetition_penalty=1.3,
        frequency_penalty=0.4,
        presence_penalty=0.2,
        seed=0,
    )
    sampler = sampler_of(penalty)
    said: list[int] = []
    for step in range(30):
        logits = some_logits(seed=step % 3)
        expected = hf.RepetitionPenaltyLogitsProcessor(1.3)(
            torch.tensor([[*PROMPT, *said]]), logits.clone()
        )
        for token in set(said):
            expected[0, token] -= 0.4 * said.count(token) + 0.2
        token = int(sampler.sample(logits, torch.tensor([0]), [0]).token_ids)
        assert int(expected.argmax()) == token
        said.append(token)
    assert len(set(said)) > 3


def test_prompts_may_have_tokens_without_logits() -> None:
    """An embedding may have more rows than the head; penalties ignore such tokens."""
    params = SamplingParams(temperature=0, repetition_penalty=1.5)
    sampler = sampler_of(params)
    sampler.set_slot(1, params, [VOCABULARY + 2, *PROMPT, VOCABULARY], [4])
    sampler.set_slot(2, params, PROMPT, [4])
    logits = some_logits(1).abs()
    for token in range(VOCABULARY):
        raised = logits.clone()
        raised[0, token] = 1.2 * logits.max()
        tokens = sampler.sample(raised.expand(2, -1), torch.tensor([1, 2]), [1, 2]).token_ids
        assert tokens[0] == tokens[1]


def test_a_slot_forgets_its_earlier_request() -> None:
    penalty = SamplingParams(
        temperature=0, frequency_penalty=2.0, min_tokens=2, stop_token_ids=(1,), max_tokens=9
    )
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 1], logits[0, 5] = 3, 1
    sampler = sampler_of(penalty)
    first = [int(sampler.sample(logits, torch.tensor([0]), [0]).token_ids) for _ in range(4)]
    sampler.set_slot(0, penalty, PROMPT)
    again = [int(sampler.sample(logits, torch.tensor([0]), [0]).token_ids) for _ in range(4)]
    assert first == again
    assert [5, 0, 1, 1] == first


def test_stop_tokens_wait_for_min_tokens() -> None:
    """Greedy or sampled; other slots in the batch are not affected."""
    logits = torch.zeros(3, VOCABULARY)
    logits[:, [1, 2]] = 50
    params = [
        SamplingParams(temperature=0, min_tokens=3, stop_token_ids=(1, 2)),
        SamplingParams(seed=0, min_tokens=1, stop_token_ids=(1,)),
        SamplingParams(temperature=0, stop_token_ids=(1, 2)),
    ]
    sampler = sampler_of(*params)
    steps = [sampler.sample(logits, torch.arange(3), range(3)).token_ids for _ in range(5)]
    first, second, third = torch.stack(steps, 1).tolist()
    assert not {1, 2} & set(first[:3])
    assert [1, 1] == first[3:]
    assert second[0] == 2
    assert [1] * 5 == third


# ---- biases, and bans ---------------------------------------------------------------------------


def chosen(sampler: Sampler, logits: torch.Tensor) -> list[int]:
    slots = torch.arange(len(logits))
    return sampler.sample(logits, slots, slots.tolist()).token_ids.tolist()


@pytest.mark.parametrize("temperature", [0.0, 1e-4])
def test_biases_are_added_to_the_logits(temperature: float) -> None:
    """Of one slot alone, however many another one has; a later request of the slot has none."""
    options = {"temperature": temperature, "seed": 0}
    plain = SamplingParams(**options)
    biased = [
        SamplingParams(**options, logit_bias={5: 100}),
        SamplingParams(**options, logit_bias={0: -100, 5: 3, 6: 4.5, 7: 4}),
        plain,
    ]
    logits = torch.zeros(3, VOCABULARY)
    logits[:, 0] = 1
    sampler = sampler_of(*biased)
    assert [5, 6, 0] == chosen(sampler, logits)
    sampler.set_slot(0, plain, PROMPT)
    sampler.set_slot(2, biased[0], PROMPT)
    assert [0, 6, 5] == chosen(sampler, logits)


@pytest.mark.parametrize("temperature", [0.0, 5.0])
def test_only_allowed_tokens_are_chosen(temperature: float) -> None:
    """Whatever the logits; other slots and later requests choose among all."""
    options = {"temperature": temperature, "seed": 3}
    some = SamplingParams(**options, allowed_token_ids=[9, 4, 9], repetition_penalty=1.1)
    logits = some_logits(2, seed=3)
    logits[:, [4, 9]] = -30.0
    sampler = sampler_of(some, SamplingParams(**options))
    for _ in range(20):
        first, second = chosen(sampler, logits)
        assert first in (4, 9)
        assert second not in (4, 9)
    sampler.set_slot(0, SamplingParams(**options, bad_words=[(1,)]), PROMPT)
    assert chosen(sampler, logits)[0] not in (4, 9)


def test_bad_words_of_one_token_are_never_chosen() -> None:
    """Those of several tokens are a logits processor's, see `resolve`."""
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 1], logits[0, 2], logits[0, 3] = 9, 8, 7
    params = SamplingParams(
        temperature=0, bad_words=[(2,), (3, 1)], min_tokens=2, stop_token_ids=(1,)
    )
    sampler = sampler_of(params)
    assert [[3], [3], [1]] == [chosen(sampler, logits) for _ in range(3)]


# ---- independence -------------------------------------------------------------------------------

MIXED = [
    SamplingParams(temperature=0.9, seed=11),
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.3, top_k=7, seed=12),
    SamplingParams(temperature=0.8, top_p=0.7, seed=13),
    SamplingParams(temperature=1.1, min_p=0.1, seed=14),
    SamplingParams(temperature=0.7, top_k=9, top_p=0.9, repetition_penalty=1.2, seed=15),
    SamplingParams(temperature=1.0, presence_penalty=0.5, logprobs=3, seed=16),
]


def test_tokens_do_not_depend_on_other_rows_or_order() -> None:
    """Each alone, by its shortest path, has the same tokens as in a batch in another order."""
    steps = 12
    logits = [some_logits(len(MIXED), seed=100 + step) for step in range(steps)]
    alone = []
    for slot, params in enumerate(MIXED):
        sampler = Sampler(len(MIXED), VOCABULARY, "cpu")
        sampler.set_slot(5, params, PROMPT)
        alone.append(
            [
                int(sampler.sample(each[slot : slot + 1], torch.tensor([5]), [5]).token_ids)
                for each in logits
            ]
        )
    together = sampler_of(*MIXED)
    said: list[list[int]] = [[] for _ in MIXED]
    for step, each in enumerate(logits):
        order = list(range(len(MIXED)))[:: -1 if step % 2 else 1]
        tokens = together.sample(each[order], torch.tensor(order), order).token_ids.tolist()
        for slot, token in zip(order, tokens, strict=True):
            said[slot].append(token)
    assert alone == said


@pytest.mark.parametrize(
    "beside",
    [SamplingParams(top_k=7), SamplingParams(top_k=30, top_p=0.9), SamplingParams(top_p=0.9)],
)
def test_ties_do_not_depend_on_other_rows(beside: SamplingParams) -> None:
    """The first of equally likely tokens counts; half precision has many ties."""
    mixed = [
        SamplingParams(temperature=0),
        SamplingParams(top_k=1, seed=1),
        *(SamplingParams(top_k=6, top_p=0.6, seed=seed) for seed in range(2, 22)),
    ]
    for seed in range(20):
        logits = some_logits(len(mixed) + 1, seed=seed).round()
        alone = [
            sampler_of(params).sample(logits[at : at + 1], torch.tensor([0]), [0]).token_ids
            for at, params in enumerate(mixed)
        ]
        order = torch.arange(len(mixed) + 1)
        together = sampler_of(*mixed, beside).sample(logits, order, order.tolist()).token_ids
        assert torch.cat(alone).tolist() == together[:-1].tolist()
        assert logits[:2].argmax(-1).tolist() == together[:2].tolist()


def test_equal_seeds_give_equal_tokens() -> None:
    logits = torch.zeros(1, VOCABULARY)
    runs = [draws(SamplingParams(seed=seed), logits, 20).tolist() for seed in (4, 4, 5, -4)]
    assert runs[0] == runs[1]
    assert len({tuple(run) for run in runs}) == 3


@pytest.mark.parametrize("params", MIXED)
def test_a_resumed_request_continues_with_the_same_tokens(params) -> None:
    """After a preemption, in another slot, with its earlier output."""
    logits = [some_logits(seed=step) for step in range(10)]
    sampler = sampler_of(params)
    said = [int(sampler.sample(each, torch.tensor([0]), [0]).token_ids) for each in logits]
    sampler.set_slot(3, params, PROMPT, said[:4])
    rest = [int(sampler.sample(each, torch.tensor([3]), [3]).token_ids) for each in logits[4:]]
    assert said[4:] == rest


class Operators(TorchDispatchMode):
    """Records the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_slot_with_penalties_allocates_no_table() -> None:
    """The token counts of all slots are allocated at the start."""
    sampler = Sampler(8, VOCABULARY, "cpu")
    with Operators() as operators:
        sampler.set_slot(0, SamplingParams(repetition_penalty=1.5, seed=0), PROMPT, [4])
    assert "index_add_" in operators.names
    assert "zeros" not in operators.names


def test_token_counts_that_do_not_fit_name_the_option() -> None:
    """When the sampler is made, not at the first request with penalties."""
    with pytest.raises(CapacityError, match=r"need 36\.38 TiB on cpu .*; lower max_num_seqs"):
        Sampler(7, 10**12, "cpu")


@pytest.mark.parametrize(
    ("top_k", "is_ordered"),
    [(0, False), (VOCABULARY, False), (VOCABULARY + 1, False), (VOCABULARY - 1, True)],
)
def test_top_k_of_the_whole_vocabulary_does_not_sort(top_k: int, is_ordered: bool) -> None:
    """It has the tokens of a request without top-k."""
    logits = some_logits()
    every = sampler_of(SamplingParams(seed=4)).sample(logits, torch.tensor([0]), [0])
    sampler = sampler_of(SamplingParams(top_k=top_k, seed=4))
    with Operators() as ran:
        sampled = sampler.sample(logits, torch.tensor([0]), [0])
    assert is_ordered == bool({"topk", "sort"} & ran.names)
    assert sampled.token_ids.tolist() == every.token_ids.tolist()


def test_the_host_list_of_slots_is_optional() -> None:
    """Without it, a path that serves all parameters gives the same tokens."""
    logits = some_logits(len(MIXED))
    order = torch.arange(len(MIXED))
    told = sampler_of(*MIXED).sample(logits, order, range(len(MIXED))).token_ids
    untold = sampler_of(*MIXED).sample(logits, order).token_ids
    assert told.tolist() == untold.tolist()


# ---- log-probabilities, and refusals ------------------------------------------------------------


def test_logprobs_are_of_the_models_logits() -> None:
    """Before temperature and penalties; all rows have as many as the request with most."""
    sampler = sampler_of(
        SamplingParams(temperature=2, repetition_penalty=1.5, logprobs=2, seed=0),
        SamplingParams(temperature=0, logprobs=4),
        SamplingParams(temperature=0),
    )
    logits = some_logits(3)
    sampled = sampler.sample(logits, torch.arange(3), range(3))
    expected = logits.log_softmax(-1)
    assert sampled.logprobs is not None
    assert sampled.top_logprobs is not None
    assert torch.equal(expected.gather(1, sampled.token_ids[:, None])[:, 0], sampled.logprobs)
    assert (3, 4) == tuple(sampled.top_logprobs.shape)
    assert torch.equal(expected.topk(4).values, sampled.top_logprobs)
    assert torch.equal(expected.topk(4).indices, sampled.top_token_ids)
    only_chosen = sampler_of(SamplingParams(logprobs=0, seed=1))
    sampled = only_chosen.sample(logits[:1], torch.tensor([0]), [0])
    assert (1, 0) == tuple(sampled.top_token_ids.shape)


def test_processed_logprobs_are_of_the_distribution_drawn_from() -> None:
    """Transformers' processors in their order, beside requests without filters, and greedy ones."""
    sampler = sampler_of(
        SamplingParams(temperature=0.7, top_k=9, top_p=0.8, min_p=0.02, logprobs=12, seed=0),
        SamplingParams(temperature=2, repetition_penalty=1.5, logit_bias={3: 2.0}, logprobs=5),
        SamplingParams(temperature=0, repetition_penalty=1.5, logprobs=4),
        SamplingParams(temperature=1.3, allowed_token_ids=(4, 5, 6), logprobs=5, seed=1),
    )
    sampler.tells_processed = True
    logits = some_logits(4)
    got = sampler.sample(logits, torch.arange(4), range(4))
    ids = torch.tensor([PROMPT])
    filtered = logits[:1] / 0.7
    for processor in (hf.TopKLogitsWarper(9), hf.TopPLogitsWarper(0.8), hf.MinPLogitsWarper(0.02)):
        filtered = processor(ids, filtered)
    biased = logits.clone()[1:3]
    biased[0, 3] += 2
    penalised = hf.RepetitionPenaltyLogitsProcessor(1.5)(ids.expand(2, -1), biased)
    penalised[0] /= 2
    allowed_only = torch.full_like(logits[3:], -math.inf)
    allowed_only[:, 4:7] = logits[3:, 4:7] / 1.3
    expected = torch.cat([filtered, penalised, allowed_only]).log_softmax(-1)
    assert got.logprobs is not None
    assert got.logprobs.isfinite().all()
    torch.testing.assert_close(got.logprobs, expected.gather(1, got.token_ids[:, None])[:, 0])
    torch.testing.assert_close(got.top_logprobs, expected.sort(descending=True).values[:, :12])


def test_processed_logprobs_without_filters_are_of_scaled_logits() -> None:
    """Beside greedy requests; with log-probabilities of no other tokens, none are looked for."""
    sampler = sampler_of(
        SamplingParams(temperature=0.7, logprobs=0, seed=0),
        SamplingParams(temperature=0, logprobs=0),
        SamplingParams(temperature=1.5, logprobs=0, seed=1),
    )
    sampler.tells_processed = True
    logits = some_logits(3)
    got = sampler.sample(logits, torch.arange(3), range(3))
    scaled = logits / torch.tensor([0.7, 1.0, 1.5])[:, None]
    expected = scaled.log_softmax(-1).gather(1, got.token_ids[:, None])[:, 0]
    torch.testing.assert_close(got.logprobs, expected)
    assert got.top_token_ids is not None
    assert (3, 0) == got.top_token_ids.shape
    assert [[], [], []] == [logprobs for _, _, logprobs in got.rows()]


def test_a_drawn_token_has_a_processed_logprob() -> None:
    """Also where the kernel's rounding has drawn the first token beyond top-p's edge."""
    params = SamplingParams(top_p=0.49, logprobs=0)
    sampler, scores = sampler_of(params), torch.zeros(1, VOCABULARY)
    needs, slots = _Needs.of(params, VOCABULARY), torch.tensor([0])
    sampler._upload()
    half = VOCABULARY // 2
    for drawn, num_kept in ((0, half), (half, half + 1)):
        kept = sampler._processed(scores, slots, needs, torch.tensor([drawn]))
        assert num_kept == int(kept.isfinite().sum())
        assert kept[0, drawn].isfinite()


def test_frequencies_of_tokens_are_their_processed_logprobs() -> None:
    params = SamplingParams(temperature=0.8, top_p=0.9, logprobs=VOCABULARY, seed=0)
    seeds, logits = range(3000), some_logits()
    sampler = Sampler(len(seeds), VOCABULARY, "cpu")
    sampler.tells_processed = True
    for seed in seeds:
        sampler.set_slot(seed, dataclasses.replace(params, seed=seed), PROMPT)
    got = sampler.sample(logits.expand(len(seeds), -1), torch.arange(len(seeds)), seeds)
    assert got.top_logprobs is not None
    assert got.top_token_ids is not None
    chances = torch.zeros(VOCABULARY).index_add(0, got.top_token_ids[0], got.top_logprobs[0].exp())
    found = torch.bincount(got.token_ids, minlength=VOCABULARY) / len(seeds)
    assert not found[chances == 0].any()
    assert (found - chances).abs().max() < 4 * (0.25 / len(seeds)) ** 0.5


def test_the_first_of_equally_likely_tokens_are_reported() -> None:
    """Whatever other rows ask for; the greedy token is the first."""
    for seed in range(10):
        logits = some_logits(2, seed=seed).round()
        sampler = sampler_of(
            SamplingParams(temperature=0, logprobs=3), SamplingParams(temperature=0, logprobs=30)
        )
        alone = sampler.sample(logits[:1], torch.tensor([0]), [0]).top_token_ids
        beside = sampler.sample(logits, torch.arange(2), [0, 1])
        assert alone is not None
        assert beside.top_token_ids is not None
        assert alone[0].tolist() == beside.top_token_ids[0, :3].tolist()
        assert beside.token_ids.tolist() == beside.top_token_ids[:, 0].tolist()


def test_logits_are_not_changed() -> None:
    """They may be in a graph's buffer."""
    logits = some_logits(len(MIXED))
    before = logits.clone()
    sampler_of(*MIXED).sample(logits, torch.arange(len(MIXED)))
    assert torch.equal(before, logits)


def test_only_plain_greedy_slots_are_sampled_in_graphs() -> None:
    """Slots with state or log-probabilities use `sample`."""
    for params in (
        SamplingParams(),
        SamplingParams(temperature=0, logprobs=0),
        SamplingParams(temperature=0, presence_penalty=0.1),
        SamplingParams(temperature=0, min_tokens=1, stop_token_ids=(3,)),
        SamplingParams(temperature=0, logit_bias={3: 1}),
        SamplingParams(temperature=0, allowed_token_ids=[3]),
        SamplingParams(temperature=0, bad_words=[[3]]),
    ):
        assert not sampler_of(params).is_greedy([0])
    plain = SamplingParams(temperature=0, top_k=4, top_p=0.5, seed=3, stop_token_ids=(3,))
    assert sampler_of(plain).is_greedy([0])


# ---- extreme values ------------------------------------------------------------------------


EDGES = [
    {"temperature": 5e-324},
    {"temperature": 1e308},
    {"temperature": 1e-30, "top_k": 3},
    {"top_k": 2**63 - 1},
    {"top_p": 5e-324},
    {"min_p": 5e-324},
    {"repetition_penalty": 5e-324},
    {"repetition_penalty": 1e308},
    {"repetition_penalty": 1e308, "temperature": 1e-300},
    {"seed": -(2**63) + 1},
    {"temperature": 1e308, "min_tokens": 2**63 - 1, "max_tokens": None, "stop_token_ids": (1, 2)},
]


@pytest.mark.parametrize("edge", EDGES, ids=str)
def test_extreme_parameters_can_be_sampled_with(edge) -> None:
    """Tokens are in the vocabulary and not banned; another slot's tokens do not change."""
    logits, slots = some_logits(2, spread=20.0), torch.arange(2)
    alone = sampler_of(SamplingParams(temperature=0))
    sampler = sampler_of(SamplingParams(temperature=0), SamplingParams(**{"seed": 0, **edge}))
    for _ in range(20):
        first, second = sampler.sample(logits, slots, [0, 1]).token_ids.tolist()
        assert alone.sample(logits[:1], slots[:1], [0]).token_ids.tolist() == [first]
        assert 0 <= second < VOCABULARY
        assert second not in edge.get("stop_token_ids", ())


def test_the_smallest_temperature_is_greedy() -> None:
    """Although the scaled scores exceed the range of float32."""
    logits = some_logits(spread=20.0)
    tokens = draws(SamplingParams(temperature=5e-324, seed=0), logits, 50)
    assert {int(logits.argmax())} == allowed(tokens)


def test_zeros_of_either_sign_are_equally_likely() -> None:
    """The first one counts, as in `argmax`."""
    scores = torch.tensor([[-1.0, -0.0, 0.0, -0.0, -2.0]])
    values, ids = _likeliest(scores, 4)
    assert [[1, 2, 3, 0]] == ids.tolist()
    assert torch.equal(scores.gather(1, ids), values)
    assert 1 == int(scores.argmax())


def test_sleep_forgets_biases() -> None:
    """Of a slot that is plain afterwards, beside one that has others."""
    sampler = Sampler(2, VOCABULARY, "cpu")
    greedy = SamplingParams(temperature=0)
    sampler.set_slot(0, dataclasses.replace(greedy, logit_bias={5: 100.0}), [1])
    sampler.sleep()
    sampler.set_slot(0, greedy, [1])
    sampler.set_slot(1, dataclasses.replace(greedy, logit_bias={9: 100.0}), [1])
    logits = torch.zeros(2, VOCABULARY)
    logits[:, 7] = 1
    assert [7, 9] == sampler.sample(logits, torch.tensor([0, 1]), [0, 1]).token_ids.tolist()


def test_a_slot_that_could_not_be_set_is_set_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the earlier request allowed does not stay."""
    sampler = Sampler(2, VOCABULARY, "cpu")
    greedy = SamplingParams(temperature=0)
    sampler.set_slot(0, dataclasses.replace(greedy, allowed_token_ids=[5]), [1])
    with monkeypatch.context() as patch:
        patch.setattr(sampler, "_mark", mock.Mock(side_effect=torch.OutOfMemoryError))
        with pytest.raises(torch.OutOfMemoryError):
            sampler.set_slot(0, greedy, [1])
    sampler.set_slot(0, greedy, [1])
    sampler.set_slot(1, dataclasses.replace(greedy, allowed_token_ids=[9]), [1])
    logits = torch.zeros(2, VOCABULARY)
    logits[:, 7] = 1
    assert [7, 9] == sampler.sample(logits, torch.tensor([0, 1]), [0, 1]).token_ids.tolist()
