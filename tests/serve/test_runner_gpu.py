"""The graph runner on a GPU: graphs, compiled layers, and kernels that read rows in place.

As in flash-attention's tests, an error against float32 may be at most twice that of plain attention
in the same dtype. Not covered: speed (bench_serve.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from helpers.dense_rows import changed_tokens, skip_unless_served
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from vmkv import Engine
from vmkv.attention import AttentionSpec
from vmkv.core.cache import KVCache
from vmkv.core.cache.fp8 import FP8
from vmkv.serve.options import EngineOptions
from vmkv.serve.params import SamplingParams
from vmkv.serve.runner import ModelRunner, RunnerOptions
from vmkv.step import Piece

pytestmark = pytest.mark.gpu
SLOTS = 6
LAYERS, KV_HEADS, WIDTH, VOCABULARY = 3, 2, 64, 512
MAX_TOKENS = 4096


def make_model(dtype: torch.dtype, attention: str) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=KV_HEADS,
        head_dim=WIDTH,
        max_position_embeddings=MAX_TOKENS,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval().requires_grad_(requires_grad=False)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            scale = (
                1.0 if parameter.shape == (VOCABULARY, 512) else 1.5 * parameter.shape[1] ** -0.5
            )
            parameter.normal_(0.0, scale, generator=generator)
    model.set_attn_implementation(attention)
    # Rounded once, so that the models differ in arithmetic alone.
    return model.to(torch.bfloat16).to("cuda", dtype)


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (num_tokens,), generator=generator).tolist()


@pytest.fixture(scope="module")
def exact() -> LlamaForCausalLM:
    """The model in float32, with attention written out."""
    return make_model(torch.float32, "eager")


@pytest.fixture(scope="module")
def plain() -> LlamaForCausalLM:
    """The model in bfloat16, likewise."""
    return make_model(torch.bfloat16, "eager")


class Served:
    """A runner with its cache, and the sequences in its slots."""

    def __init__(
        self,
        stored: torch.dtype = torch.bfloat16,
        attention_backend: str | None = None,
        **options,
    ):
        self.model = make_model(torch.bfloat16, "sdpa")
        self.cache = KVCache(
            "cuda:0", max_tokens=MAX_TOKENS, max_sequences=SLOTS + 1, budget_bytes=2**30
        )
        self.cache.add_layers(range(LAYERS), num_kv_heads=KV_HEADS, head_dim=WIDTH, dtype=stored)
        given = EngineOptions(
            max_num_seqs=SLOTS,
            max_num_batched_tokens=2048,
            attention_backend=attention_backend,
            runner_options=RunnerOptions(show_progress=False, **options),
        )
        self.runner = ModelRunner(self.model, self.cache, given)
        self.runner.warm_up()
        self.logits: list[torch.Tensor] = []
        self.num_mapped = 0  # Mappings when the prompts of the last `say` had been submitted.
        sample = self.runner.sampler.sample
        self.runner.sampler.sample = lambda *a: (self.logits.append(a[0].clone()), sample(*a))[1]

    def say(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, count: int
    ) -> list[list[int]]:
        """Run prompts in one step and `count - 1` decoding steps, one of them ahead; the tokens."""
        rows = [self.cache.open() for _ in prompts]
        for slot, each in enumerate(prompts):
            self.runner.set_slot(slot, params, each)
        self.cache.grow([(row, len(each)) for row, each in zip(rows, prompts, strict=True)])
        chunks = [
            Piece(slot, row.row, 0, len(each), each, samples=True)
            for slot, (row, each) in enumerate(zip(rows, prompts, strict=True))
        ]
        pending = [self.runner.submit(chunks)]
        self.num_mapped = self.cache.pool.backend.calls["mem_map"]
        said: list[Sequence[int]] = []
        for step in range(count - 1):
            lengths = [len(each) + step for each in prompts]
            self.cache.grow([(row, each + 1) for row, each in zip(rows, lengths, strict=True)])
            chunks = [
                Piece(slot, row.row, length, 1, None, samples=True)
                for slot, (row, length) in enumerate(zip(rows, lengths, strict=True))
            ]
            pending.append(self.runner.submit(chunks))
            said.append(pending.pop(0).result().token_ids)
        said.append(pending.pop().result().token_ids)
        for row in rows:
            row.close()
        self.cache.check()
        return [list(each) for each in zip(*said, strict=True)]

    def close(self) -> None:
        self.runner.close()
        self.cache.close()


@pytest.fixture(
    scope="module", params=[None, "flash2", "torch"], ids=["preferred", "flash2", "torch"]
)
def served(request) -> Iterator[Served]:
    """Compiled and captured, with each attention kernel."""
    made = Served(attention_backend=request.param)
    yield made
    made.close()


@pytest.fixture(scope="module")
def uncaptured() -> Iterator[Served]:
    """The same kernels, launched one by one."""
    made = Served(capture=False, compile_layers=False)
    yield made
    made.close()


PROMPTS = [prompt(each, seed=each) for each in (5, 130, 700, 1024, 33)]
GREEDY = SamplingParams(temperature=0)


def deficit(reference: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    """The largest gap from the likeliest token to the chosen one, of logits `[T, V]`."""
    chosen = reference.gather(1, torch.tensor(tokens, device=reference.device)[:, None])[:, 0]
    return (reference.max(-1).values - chosen).max()


def assert_likeliest(exact, plain, prompts, said) -> None:
    """Check that each token is the likeliest after those before it, within half precision.

    Equal tokens are too strict: some logits of this model nearly tie.
    """
    for start, tokens in zip(prompts, said, strict=True):
        ids = torch.tensor([[*start, *tokens[:-1]]], device="cuda")
        with torch.no_grad():
            reference = exact(ids, logits_to_keep=len(tokens)).logits[0]
            in_half = plain(ids, logits_to_keep=len(tokens)).logits[0].float()
        assert deficit(reference, tokens) <= 4 * (in_half - reference).abs().max()


def test_logits_are_as_good_as_plain_attentions(served, exact, plain) -> None:
    """In the step of the prompts and in graphs, along the tokens of the runner."""
    count = 6
    served.logits.clear()
    # A request with log-probabilities is sampled outside the graph, from the graph's logits.
    asking = SamplingParams(temperature=0, logprobs=0)
    said = served.say(PROMPTS, asking, count)
    ours = torch.stack(served.logits, 1).float()
    for at, (start, tokens) in enumerate(zip(PROMPTS, said, strict=True)):
        ids = torch.tensor([[*start, *tokens[:-1]]], device="cuda")
        with torch.no_grad():
            reference = exact(ids, logits_to_keep=count).logits[0]
            in_half = plain(ids, logits_to_keep=count).logits[0].float()
        bound = 2 * (in_half - reference).abs().max()
        assert (ours[at] - reference).abs().max() <= bound
        # Each token is the likeliest, within twice the bound.
        assert deficit(reference, tokens) <= 2 * bound


def test_pages_are_mapped_under_captured_graphs(served, exact, plain) -> None:
    """Across page boundaries nothing is captured again, and tokens stay right."""
    captured = list(served.runner.stepper.decode_graphs.captured)
    served.cache.trim()
    tokens_per_page = served.cache.pool.page_bytes // (LAYERS * 2 * KV_HEADS * WIDTH * 2)
    # A page ends while the first decodes, another while the second does, over-read or not.
    prompts = [prompt(tokens_per_page - 230), prompt(2 * tokens_per_page - 245), prompt(9)]
    said = served.say(prompts, GREEDY, 260)
    assert served.cache.pool.backend.calls["mem_map"] > served.num_mapped
    assert captured == list(served.runner.stepper.decode_graphs.captured)
    assert said == served.say(prompts, GREEDY, 260)
    assert_likeliest(exact, plain, prompts, said)


def test_graphs_are_as_good_as_the_same_launches(served, uncaptured, exact, plain) -> None:
    """Unused entries of a wide graph do not change tokens."""
    for prompts in ([PROMPTS[2]], PROMPTS[:3], PROMPTS):
        for each in (served, uncaptured):
            assert_likeliest(exact, plain, prompts, each.say(prompts, GREEDY, 8))


def test_prompts_are_prefilled_beside_decoding(served, uncaptured, exact, plain) -> None:
    """In chunks that match no bucket; no further graph is captured."""
    prompts = [prompt(each, seed=each) for each in (300, 41, 5, 611, 129, 64)]
    captured = list(served.runner.stepper.mixed_graphs.captured)
    for each in (served, uncaptured):
        rows = [each.cache.open() for _ in prompts]
        done, said, unread = [0] * len(prompts), [[] for _ in prompts], []
        for slot, start in enumerate(prompts):
            each.runner.set_slot(slot, GREEDY, start)
        for step in range(24):
            chunks, room = [], 200
            for slot, start in enumerate(prompts[: step + 1]):
                past, left = done[slot], len(start) - done[slot]
                new = min(left, room) if left > 0 else 1
                if not new:
                    continue
                room -= new
                ids = start[past : past + new] if left > 0 else None
                chunks.append(Piece(slot, rows[slot].row, past, new, ids, samples=left <= new))
                done[slot] += new
            each.cache.grow([(rows[chunk.slot], chunk.num_tokens) for chunk in chunks])
            unread.append((chunks, each.runner.submit(chunks)))
            if step:
                _read(*unread.pop(0), said)
        _read(*unread.pop(), said)
        for row in rows:
            row.close()
        each.cache.check()
        assert min(map(len, said)) > 4
        assert_likeliest(exact, plain, prompts, said)
    assert captured == list(served.runner.stepper.mixed_graphs.captured)


def _read(chunks: Sequence[Piece], pending, said: list[list[int]]) -> None:
    sampling = [chunk.slot for chunk in chunks if chunk.samples]
    for slot, token in zip(sampling, pending.result().token_ids, strict=True):
        said[slot].append(token)


def test_padding_writes_nothing(served) -> None:
    """A graph changes the places of its tokens and no other mapped byte."""
    cache, model_layers = served.cache, range(LAYERS)
    rows = [cache.open() for _ in range(4)]
    cache.grow([(row, 400) for row in rows])
    rows_and_lengths = [(row.row, 400) for row in rows] + [(served.runner.stepper.scratch.row, 1)]
    views = [view for at in model_layers for view in (cache.keys(at), cache.values(at))]
    before = 3.25
    for view in views:
        for row, count in rows_and_lengths:
            view[row, :count] = before
    chunks = [
        Piece(0, rows[0].row, 7, 300, [5] * 300, samples=True),
        Piece(1, rows[2].row, 0, 1, [5], samples=True),
    ]
    for slot in range(2):
        served.runner.set_slot(slot, GREEDY, [5])
    served.runner.submit(chunks).result()
    written = {rows[0].row: [*range(7, 307)], rows[2].row: [0]}
    for view in views:
        assert written == changed_tokens(view, rows_and_lengths, before)
    for row in rows:
        row.close()


def test_seeded_samples_repeat(served) -> None:
    """Through graphs: equal seeds give equal tokens, another seed gives others."""
    for options in ({}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.1}):
        params = [
            SamplingParams(temperature=1.5, seed=seed, repetition_penalty=1.1, **options)
            for seed in (1, 1, 2)
        ]
        runs = [served.say(PROMPTS[:4], each, 12) for each in params]
        assert runs[0] == runs[1]
        assert runs[0] != runs[2]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_step_never_waits_for_the_device(served) -> None:
    """Neither with prompts nor in decoding, greedy or sampled; only `result` waits."""
    drawn = SamplingParams(temperature=1.0, seed=0, top_p=0.9, frequency_penalty=0.1)
    served.say(PROMPTS, drawn, 3)  # Triggers initialisations at first use.
    row = served.cache.open()
    served.cache.grow([(row, 300)])
    ids = prompt(256)
    for params in (GREEDY, SamplingParams(seed=0), drawn):
        served.runner.set_slot(0, params, ids)
        torch.cuda.set_sync_debug_mode("error")
        try:
            steps = [
                served.runner.submit([Piece(0, row.row, 0, 200, ids[:200], samples=False)]),
                served.runner.submit([Piece(0, row.row, 200, 56, ids[200:], samples=True)]),
                served.runner.submit([Piece(0, row.row, 256, 1, None, samples=True)]),
            ]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert [0, 1, 1] == [len(step.result().token_ids) for step in steps]
    row.close()


# ---- rows in eight bits -------------------------------------------------------------------


def rounded_cache(model: LlamaForCausalLM) -> DynamicCache:
    """Transformers' cache, with keys and values rounded by torch."""
    cache = DynamicCache(config=model.config)
    for layer in cache.layers:
        layer.update = _rounding(layer.update)
    return cache


def _rounding(update):
    def rounded(keys, values, *args, **kwargs):
        both = (each.to(FP8).to(each.dtype) for each in (keys, values))
        return update(*both, *args, **kwargs)

    return rounded


@pytest.fixture(scope="module")
def narrow() -> Iterator[Served]:
    """Compiled and captured, over rows in eight bits that are read in place."""
    spec = AttentionSpec("cuda", torch.bfloat16, 8, KV_HEADS, WIDTH, WIDTH, kv_dtype=FP8)
    skip_unless_served("flash3", spec)
    made = Served(FP8)
    yield made
    made.close()


@torch.no_grad()
def test_rows_in_eight_bits_are_captured(narrow, exact) -> None:
    """The error is at most three times that of rounding keys and values, in prompts and graphs."""
    count = 6
    narrow.logits.clear()
    said = narrow.say(PROMPTS, SamplingParams(temperature=0, logprobs=0), count)
    ours = torch.stack(narrow.logits, 1).float()
    for at, (start, tokens) in enumerate(zip(PROMPTS, said, strict=True)):
        ids = torch.tensor([[*start, *tokens[:-1]]], device="cuda")
        wanted = exact(ids, logits_to_keep=count).logits[0]
        cache = rounded_cache(exact)
        rounded = exact(ids, past_key_values=cache, logits_to_keep=count).logits[0]
        explained = (rounded - wanted).norm() / wanted.norm()
        # Queries and weights are rounded besides, and all else to bfloat16.
        assert (ours[at] - wanted).norm() / wanted.norm() <= 3 * explained + 0.03


def test_rows_in_eight_bits_are_reproducible(narrow) -> None:
    """Also in memory that earlier sequences have used."""
    assert narrow.say(PROMPTS, GREEDY, 12) == narrow.say(PROMPTS, GREEDY, 12)


@pytest.mark.parametrize("runner", ["eager", "graphs"])
def test_engines_over_one_model_close_in_any_order(runner: str) -> None:
    """Prompts longer than captured steps run through the model, and tokens stay right."""
    model = make_model(torch.bfloat16, "sdpa")
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 2048, "budget_bytes": 2**28}
    options = RunnerOptions(compile_layers=False, max_graph_tokens=64, show_progress=False)
    params = SamplingParams(temperature=0, max_tokens=12)
    prompts = [prompt(300, 1), prompt(40, 2)]

    def make() -> Engine:
        its = {} if runner == "eager" else {"runner_options": options}
        return Engine(model, max_tokens=512, runner=runner, **sizes, **its)

    def said(engine: Engine) -> list[list[int]]:
        outputs = engine.generate(prompts, params)
        return [list(each.outputs[0].token_ids) for each in outputs]

    first = make()
    wanted = said(first)
    second = make()
    first.close()
    assert wanted == said(second)
    model.model.layers[1].train()
    assert [[], []] == said(second)
    model.eval()
    assert wanted == said(second)
    second.close()
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_an_engine_on_another_device_than_the_current_one() -> None:
    """Its events are recorded, and its graphs timed, on its own device."""
    prompts, greedy = [[5, 6, 7] * 20, [8] * 50], SamplingParams(temperature=0, max_tokens=32)
    said = []
    for device in ("cuda:0", "cuda:1"):
        model = make_model(torch.bfloat16, "sdpa").to(device)
        with torch.cuda.device(0), Engine(model, max_num_seqs=4, max_tokens=256) as engine:
            said.append([each.outputs[0].token_ids for each in engine.generate(prompts, greedy)])
            graphs = engine._runner.stepper.mixed_graphs
            assert graphs is not None
            assert graphs._step_ms(graphs.keys()[0]) > 0.05
    assert said[0] == said[1]
