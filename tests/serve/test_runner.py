"""The graph runner's steps on the host equal transformers, for any mixture of chunks.

There are no CUDA graphs here, and the compiler only traces: test_runner_gpu.py tests both. Tested
here: packing, the operator, the places of layers, joint weights, tokens that stay on the device,
and that a closed runner restores the model.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from helpers.dense_rows import changed_tokens
from helpers.mixing import BACKENDS
from helpers.tiny_models import VOCABULARY, tiny_model

from vmkv import ExtentPool, HostBackend
from vmkv.core.cache import KVCache
from vmkv.core.cache import Sequence as Row
from vmkv.errors import ClosedError, ConfigError
from vmkv.hf import compat
from vmkv.serve.options import EngineOptions
from vmkv.serve.params import SamplingParams
from vmkv.serve.runner import ModelRunner, RunnerOptions
from vmkv.serve.served_rows import fit_budget
from vmkv.step import Piece
from vmkv.step.compiled_layers import decoder_layers
from vmkv.step.graphs import batch_buckets, length_buckets
from vmkv.step.mixed_graphs import TILE_TOKENS, decode_widths, token_buckets
from vmkv.step.mixed_graphs import _Like as Like
from vmkv.step.mixed_graphs import _places as places_of

MODELS = ("llama", "mistral", "qwen3", "gemma3", "gpt_oss", "mixtral")
TRACED = RunnerOptions(compile_layers=True, compile_backend="aot_eager", show_progress=False)
PLAIN = RunnerOptions(show_progress=False)
# Steps are padded as for graphs, but not captured.
PADDED = RunnerOptions(capture=True, show_progress=False)
SLOTS = 4


def model_named(name: str):
    """A model that a test may change."""
    return copy.deepcopy(tiny_model(name))


def cache_for(model, max_tokens: int = 200) -> KVCache:
    config = compat.text_config(model.config)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache = KVCache("host", max_tokens=max_tokens, max_sequences=SLOTS + 2)
    for layer, default in enumerate(compat.default_cache(model.config).layers):
        cache.add_layers(
            [layer],
            num_kv_heads=config.num_key_value_heads,
            head_dim=width,
            dtype=torch.float32,
            window_tokens=compat.window_of(default)[1],
        )
    return cache


def prompts_of(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def alone(model, prompt: Sequence[int], count: int) -> list[int]:
    with torch.no_grad():
        out = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
    return out[0, len(prompt) :].tolist()


def given(
    options: RunnerOptions | None = None, num_tokens: int = 16, num_seqs: int = SLOTS, **others: Any
) -> EngineOptions:
    """An engine's options for a runner of steps of `num_tokens`."""
    its = {"max_num_seqs": num_seqs, "max_num_batched_tokens": num_tokens, **others}
    return EngineOptions(runner_options=options, **its)


@contextlib.contextmanager
def running(
    model,
    num_tokens: int = 16,
    options: RunnerOptions | None = None,
    *,
    num_seqs: int = SLOTS,
    **others: Any,
) -> Iterator[tuple[ModelRunner, KVCache]]:
    """A runner of steps of `num_tokens`, and its cache."""
    with cache_for(model) as cache:
        runner = ModelRunner(model, cache, given(options, num_tokens, num_seqs, **others))
        yield runner, cache
        runner.close()


@dataclass
class Request:
    prompt: list[int]
    params: SamplingParams
    said: list[int] = field(default_factory=list)
    num_past: int = 0
    num_planned: int = 0
    slot: int = -1
    row: Row | None = None


def asked(model, lengths: Sequence[int], count: int) -> tuple[list[Request], list[list[int]]]:
    """Greedy requests with prompts of these lengths, and the tokens of each alone."""
    greedy = SamplingParams(temperature=0, max_tokens=count)
    prompts = prompts_of(lengths)
    expected = [alone(model, prompt, count) for prompt in prompts]
    return [Request(prompt, greedy) for prompt in prompts], expected


def serve(
    runner: ModelRunner,
    cache: KVCache,
    requests: Sequence[Request],
    *,
    step_tokens: int = 16,
    ahead: int = 2,
) -> None:
    """A small engine: prompts in chunks beside decoding, tokens read `ahead - 1` steps late."""
    waiting, running = deque(requests), []
    slots = list(range(SLOTS))
    pending: deque = deque()
    while waiting or running or pending:
        chunks, asked, room = [], [], step_tokens
        while waiting and slots:
            request = waiting.popleft()
            request.slot, request.row = slots.pop(), cache.open()
            runner.set_slot(request.slot, request.params, request.prompt)
            running.append(request)
        for request in running:
            left = len(request.prompt) - request.num_past
            if not room or request.num_planned == request.params.max_tokens:
                continue
            count = min(left, room) if left > 0 else 1
            end = request.num_past + count
            assert request.row is not None
            cache.grow([(request.row, end)])
            ids = request.prompt[request.num_past : end] if left > 0 else None
            samples = end >= len(request.prompt)
            chunks.append(
                Piece(request.slot, request.row.row, request.num_past, count, ids, samples)
            )
            if samples:
                asked.append(request)
                request.num_planned += 1
            request.num_past, room = end, room - count
        if chunks:
            pending.append((runner.submit(chunks), asked))
        if len(pending) == ahead or not chunks:
            step, asked = pending.popleft()
            for request, token in zip(asked, step.result().token_ids, strict=True):
                request.said.append(token)
                if len(request.said) == request.params.max_tokens:
                    request.row.close()
                    slots.append(request.slot)
                    running.remove(request)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *itertools.product(MODELS, [PLAIN, PADDED]),
        *itertools.product(["gemma3", "gpt_oss", "mixtral"], [TRACED]),
    ],
)
def test_tokens_equal_those_of_each_prompt_alone(name, options) -> None:
    """Chunked prompts beside decoding, slots reused, one step ahead."""
    model = model_named(name)
    requests, expected = asked(model, (5, 13, 30, 1, 2, 17), 9)
    with running(model, 16, options) as (runner, cache):
        runner.warm_up()
        serve(runner, cache, requests)
        cache.check()
    assert expected == [request.said for request in requests]


@pytest.mark.parametrize("step_tokens", [40, 200, 500])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_chunks_of_any_size_fit_steps_of_fixed_size(name, step_tokens) -> None:
    """Shorter or longer than a tile, with or without decoding, in full or nearly empty buckets."""
    serve_chunks(model_named(name), step_tokens)


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_a_mixing_kernel_attends_in_one_launch(name) -> None:
    """Unused decode entries and tiles of padding are sequences of that launch."""
    for backend in BACKENDS.values():
        backend.launches.clear()
        serve_chunks(model_named(name), 200, backend.name)
    whole, parted = (BACKENDS[each].launches for each in ("mixing", "parting"))
    (num_tokens, num_sequences), (num_tiled_tokens, num_tiles) = max(whole), max(parted)
    assert num_tokens == num_tiled_tokens > 200
    assert num_sequences == num_tiles + SLOTS
    assert len(whole) < len(parted)


def serve_chunks(model, step_tokens: int, attention_backend: str | None = None) -> None:
    """Serve prompts around the length of a tile in padded steps; check that tokens are as alone."""
    requests, expected = asked(model, (150, 3, TILE_TOKENS, 190, 1, 2, TILE_TOKENS + 1), 3)
    with running(model, 512, PADDED, attention_backend=attention_backend) as (runner, cache):
        serve(runner, cache, requests, step_tokens=step_tokens)
        assert runner.stepper.mixed_graphs is not None
        assert len(runner.stepper.mixed_graphs.captured) > 1
    assert expected == [request.said for request in requests]


def test_padding_writes_nothing() -> None:
    """Only the places of the step's tokens change."""
    model = model_named("llama")
    with running(model, 300, PADDED) as (runner, cache):
        rows = [cache.open() for _ in range(4)]
        cache.grow([(row, 150) for row in rows])
        scratch = runner.stepper.scratch
        mapped = [(row.row, 150) for row in rows] + [(scratch.row, 1)]
        views = [view for at in cache.layers for view in (cache.keys(at), cache.values(at))]
        before = 3.25
        for view in views:
            for row, count in mapped:
                view[row, :count] = before
        runner.submit(
            [
                Piece(0, rows[0].row, 7, 140, [5] * 140, samples=True),
                Piece(1, rows[2].row, 0, 1, [5], samples=True),
            ]
        )
        graphs = runner.stepper.mixed_graphs
        assert graphs is not None
        with torch.no_grad():
            for bucket in graphs.keys():  # noqa: SIM118  # no dictionary
                graphs.replay(bucket, graphs.unlike_tokens(bucket))
        written = {rows[0].row: [*range(7, 147)], rows[2].row: [0]}
        for view in views:
            assert written == changed_tokens(view, mapped, before)
        for row in rows:
            row.close()


@pytest.mark.parametrize("max_graph_tokens", range(5))
def test_max_graph_tokens_bounds_captured_steps(max_graph_tokens: int) -> None:
    """Also if no captured step has room for all decoding requests."""
    model, prompt = model_named("llama"), prompts_of((13,))[0]
    expected = alone(model, prompt, 5)
    options = dataclasses.replace(PADDED, max_graph_tokens=max_graph_tokens)
    requests = [Request(prompt, SamplingParams(temperature=0, max_tokens=5))]
    with running(model, 16, options, num_seqs=4) as (runner, cache):
        runner.warm_up()
        serve(runner, cache, requests)
    assert expected == requests[0].said


def test_a_step_gets_the_smallest_bucket_that_fits() -> None:
    """Or none, if it has too many tokens or chunks; the filled input describes the step."""
    model = model_named("llama")
    generator = random.Random(0)
    with running(model, 600, PADDED, num_seqs=20) as (runner, _):
        graphs = runner.stepper.mixed_graphs
        assert graphs is not None
        for _ in range(300):
            lengths = sorted(generator.choices((1, 1, 2, 30, 128, 129, 200), k=8))
            lengths = lengths[: generator.randint(1, 8)]
            chunks = [
                Piece(slot, slot, generator.choice((0, 9)), n, [3] * n, samples=slot % 3 > 0)
                for slot, n in enumerate(lengths)
            ]
            bucket = graphs.key(chunks)
            total, num_decode = sum(lengths), lengths.count(1)
            if bucket is None:
                assert total > 600
                continue
            smaller = [
                each
                for each in graphs.keys()  # noqa: SIM118  # no dictionary
                if total <= each.num_tokens < bucket.num_tokens and num_decode <= each.num_decode
            ]
            num_tiles = sum(-(-n // TILE_TOKENS) for n in lengths if n > 1)
            assert all(num_tiles >= each.num_tiles - 1 for each in smaller)
            assert total <= bucket.num_tokens
            assert num_decode <= bucket.num_decode
            places = places_of(bucket, Like(20, 0, 0))
            flat = graphs.fill(bucket, chunks).tolist()
            starts, rows = flat[places.starts], flat[places.rows]
            assert starts == sorted(starts)
            assert starts[-1] == bucket.num_tokens
            own = [
                row
                for row, a, b in zip(rows, starts, starts[1:], strict=False)
                for _ in range(b - a)
            ]
            wanted = [chunk.row for chunk in chunks for _ in range(chunk.num_new_tokens)]
            assert own[:total] == wanted
            assert set(own[total:]) <= {runner.stepper.scratch.row}
            ends = [at - 1 for at in itertools.accumulate(lengths)]
            sampling = [(end, at) for at, end in enumerate(ends) if at % 3]
            count = len(sampling)
            said = list(zip(flat[places.ends], flat[places.sampling_slots], strict=True))
            assert said[:count] == sampling
            assert {slot for _, slot in said[count:]} <= {20}


def test_sizes_that_run_out_of_memory_are_not_captured() -> None:
    """Smaller sizes are; larger steps run without graphs."""
    model = model_named("llama")
    requests, expected = asked(model, (5, 150, 30), 3)
    with running(model, 256, PADDED) as (runner, cache):
        forward = runner.stepper._space.forward

        def short_of_memory(token_ids, *others):
            if len(token_ids) > 100:
                raise torch.OutOfMemoryError("no memory for so many")
            return forward(token_ids, *others)

        runner.stepper._space.forward = short_of_memory
        runner.warm_up()
        assert runner.stepper.mixed_graphs is not None
        assert {32, 64, 96} == {each.num_tokens for each in runner.stepper.mixed_graphs.keys()}  # noqa: SIM118
        serve(runner, cache, requests, step_tokens=256)
    assert expected == [request.said for request in requests]


def test_steps_that_cannot_be_captured_run_without_graphs(caplog) -> None:
    """A warning says so."""
    model = model_named("llama")
    requests, expected = asked(model, (5, 30), 3)

    def refuses(*_):
        raise RuntimeError("operation not permitted when stream is capturing")

    with running(model, 64, PADDED) as (runner, cache):
        runner.stepper._space.forward = refuses
        runner.warm_up()
        serve(runner, cache, requests)
    assert expected == [request.said for request in requests]
    said = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert [True, True] == ["cannot be captured" in message for message in said]


def test_fit_budget_lowers_the_budget_to_free_memory() -> None:
    """A budget that fits is kept."""

    class Scarce(HostBackend):
        def free_memory_bytes(self) -> int:
            return 50 * 4096

    pool = ExtentPool(Scarce(4096), 100 * 4096)
    pool.attach()
    fit_budget(pool, 0)
    assert pool.stats().budget_bytes == 50 * 4096
    fit_budget(pool, 10 * 4096 + 1)
    assert pool.stats().budget_bytes == 39 * 4096
    fit_budget(pool, 0)
    assert pool.stats().budget_bytes == 39 * 4096
    pool.detach()
    pool.close()


def test_all_layers_share_one_compiled_layer() -> None:
    """Two graphs for the layers, with one token and with many, and two for the last norm."""
    from torch._dynamo.utils import counters

    model = model_named("llama")
    counters.clear()
    with running(model, 16, TRACED) as (runner, cache):
        greedy = SamplingParams(temperature=0, max_tokens=4)
        serve(runner, cache, [Request(each, greedy) for each in prompts_of((1, 3, 9, 40, 2))])
    assert counters["stats"]["unique_graphs"] == 4


def test_sibling_weights_are_joined_while_served() -> None:
    """They are views of a joint weight; a closed runner separates them again."""
    model = model_named("llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    layer = decoder_layers(model)[0]
    with running(model, 16, TRACED) as (_runner, _cache):
        attention, mlp = layer.self_attn, layer.mlp
        for first, second in ((attention.q_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)):
            storages = [each.weight.untyped_storage().data_ptr() for each in (first, second)]
            assert storages[0] == storages[1]
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    storages = {
        each.weight.untyped_storage().data_ptr() for each in (attention.q_proj, attention.k_proj)
    }
    assert len(storages) == 2


def test_a_closed_runner_restores_the_model() -> None:
    """Attention, layers and attributes; the model can be served again."""
    model = model_named("llama")
    prompt = prompts_of((7,))[0]
    expected = alone(model, prompt, 5)
    attributes = [set(vars(each)) for each in model.modules()]
    with cache_for(model) as cache:
        for _ in range(2):
            runner = ModelRunner(model, cache, given(TRACED))
            with pytest.raises(ConfigError, match="another runner"):
                ModelRunner(model, cache, given())
            runner.close()
            runner.close()
            with pytest.raises(ClosedError):
                runner.submit([])
    assert attributes == [set(vars(each)) for each in model.modules()]
    assert model.config._attn_implementation == "eager"
    assert expected == alone(model, prompt, 5)


def test_a_refused_runner_leaves_the_model_unchanged() -> None:
    """With a cache without layers, and with one without a free row for padding."""
    model = model_named("llama")
    with (
        KVCache("host", max_tokens=20, max_sequences=2) as empty,
        pytest.raises(ConfigError, match="layers"),
    ):
        ModelRunner(model, empty, given())
    with cache_for(model) as cache:
        rows = [cache.open() for _ in range(SLOTS + 2)]
        with pytest.raises(MemoryError):
            ModelRunner(model, cache, given(PADDED))
        for row in rows:
            row.close()
        ModelRunner(model, cache, given()).close()
        assert cache.stats().num_sequences == 0
    assert model.config._attn_implementation == "eager"


def test_wrapped_layers_are_not_compiled() -> None:
    """Compiled layers would not call the wrapper; it is kept, also on the last norm."""
    model = model_named("llama")
    layer, norm, prompt = decoder_layers(model)[1], model.model.norm, prompts_of((7,))[0]

    def wrapped(module: Any) -> Any:
        real = module.forward
        module.forward = lambda *args, **kwargs: 2 * real(*args, **kwargs)
        return module.forward

    of_norm = wrapped(norm)
    with cache_for(model) as cache:
        ModelRunner(model, cache, given(TRACED)).close()
        assert of_norm is norm.forward
        of_layer = wrapped(layer)
        with pytest.raises(ConfigError, match="wrapped"):
            ModelRunner(model, cache, given(TRACED))
        requests = [Request(prompt, SamplingParams(temperature=0, max_tokens=5))]
        runner = ModelRunner(model, cache, given(PLAIN))
        serve(runner, cache, requests)
        runner.close()
    assert alone(model, prompt, 5) == requests[0].said
    assert of_layer is layer.forward


def test_results_come_in_the_order_of_the_chunks() -> None:
    """Although chunks are packed by kind, and some do not sample."""
    model = model_named("llama")
    prompts = prompts_of((6, 9, 12, 8))
    expected = [alone(model, prompt, 2) for prompt in prompts]
    greedy = SamplingParams(temperature=0, logprobs=1)
    with running(model, 64) as (runner, cache):
        rows = [cache.open() for _ in prompts]
        for slot, prompt in enumerate(prompts):
            runner.set_slot(slot, greedy, prompt)
        cache.grow([(row, len(each) + 1) for row, each in zip(rows, prompts, strict=True)])
        zero, one, two, three = prompts
        first = runner.submit(
            [
                Piece(2, rows[2].row, 0, 5, two[:5], samples=False),
                Piece(0, rows[0].row, 0, 6, zero, samples=True),
                Piece(1, rows[1].row, 0, 9, one, samples=True),
            ]
        ).result()
        assert [expected[0][0], expected[1][0]] == list(first.token_ids)
        second = runner.submit(
            [
                Piece(2, rows[2].row, 5, 7, two[5:], samples=True),
                Piece(1, rows[1].row, 9, 1, None, samples=True),
                Piece(3, rows[3].row, 0, 8, three, samples=True),
                # From the host, as after a swap: the same token.
                Piece(0, rows[0].row, 6, 1, [expected[0][0]], samples=True),
            ]
        ).result()
        wanted = [expected[2][0], expected[1][1], expected[3][0], expected[0][1]]
        assert wanted == list(second.token_ids)
        assert wanted == [each.token_id for each in second.logprobs if each is not None]
        assert all(each.top == {each.token_id: each.logprob} for each in second.logprobs)
        for row in rows:
            row.close()


def test_logits_processors_see_their_own_request() -> None:
    """They get all tokens of their request and no others; other requests do not change."""
    model = model_named("llama")
    prompts = prompts_of((5, 8))
    expected = alone(model, prompts[1], 4)
    seen = []

    def never_twice(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(input_ids[0].tolist())
        return scores.index_fill(1, input_ids[0], float("-inf"))

    picky = SamplingParams(temperature=0, max_tokens=4, logits_processors=[never_twice])
    requests = [
        Request(prompts[0], picky),
        Request(prompts[1], SamplingParams(temperature=0, max_tokens=4)),
    ]
    with running(model, 64) as (runner, cache):
        serve(runner, cache, requests, ahead=1)
    said = requests[0].said
    assert seen == [[*prompts[0], *said[:at]] for at in range(4)]
    assert len({*prompts[0], *said}) == len({*prompts[0]}) + 4
    assert expected == requests[1].said


def test_an_empty_step_samples_nothing() -> None:
    model = model_named("llama")
    with running(model, 64) as (runner, _):
        assert [] == list(runner.submit([]).result().token_ids)


def test_buckets_cover_every_size_with_little_waste() -> None:
    """Batches waste at most a quarter, token counts an eighth, and lengths a half."""
    for most in (1, 3, 8, 100, 256, 1000):
        widths = batch_buckets(most)
        assert widths == sorted(set(widths))
        assert widths[-1] == most
        for size in range(1, most + 1):
            width = next(each for each in widths if each >= size)
            assert width - size < max(8, size / 4)
        few = batch_buckets(most, few=True)
        assert few == sorted(set(few))
        assert few[-1] == most
        assert all(later <= 2 * each for each, later in itertools.pairwise(few))
        assert all(2 * later <= 3 * each for each, later in itertools.pairwise(few) if each >= 64)
    assert len(batch_buckets(512, few=True)) < len(batch_buckets(512)) / 2
    for most in (10, 1024, 5000, 131072):
        bounds = length_buckets(most)
        assert bounds == sorted(set(bounds))
        assert bounds[-1] == most
        assert all(later <= 2 * bound for bound, later in itertools.pairwise(bounds))

    for most in (1, 2, 33, 300, 2048, 5000):
        sizes = token_buckets(most)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == most
        assert all(b - a <= max(32, a / 8) for a, b in itertools.pairwise([0, *sizes]))
        assert decode_widths(most)[-1] == most


def test_few_sizes_are_captured_on_request() -> None:
    """Tokens are the same."""
    model = model_named("llama")
    requests, expected = asked(model, (5, 9, 30, 7, 8), 3)
    options, num_sizes = dataclasses.replace(PADDED, max_graph_tokens=0), []
    for few in (False, True):
        its = dataclasses.replace(options, few_sizes=few)
        with running(model, 64, its, num_seqs=30) as (runner, cache):
            runner.warm_up()
            graphs = runner.stepper.decode_graphs
            assert graphs is not None
            num_sizes.append(len({width for width, _ in graphs.captured}))
            if few:
                serve(runner, cache, requests)
    assert num_sizes == [7, 6]
    assert expected == [request.said for request in requests]


def test_progress_can_be_silent(capsys) -> None:
    with running(tiny_model("llama"), options=PADDED) as (runner, _):
        runner.warm_up()
    assert capsys.readouterr().err == ""
