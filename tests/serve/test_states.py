"""An engine over models whose layers keep states: a sequence has rows and states, in one budget."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import families
from helpers.evictor import Evictor
from helpers.hybrids import HYBRIDS, hybrid
from helpers.ragged import assert_likeliest, random_prompts
from helpers.requests import check_said, reference
from helpers.runners import EAGER, PADDED, TRACED
from helpers.tiny_models import VERSION

from vmkv import ConfigError, ExtentPool, HostBackend, OutOfPagesError, Sequence
from vmkv.serve import runner
from vmkv.serve.engine import Engine
from vmkv.serve.params import SamplingParams
from vmkv.serve.request import FinishReason, RequestHandle
from vmkv.serve.scheduler import PreemptionCosts
from vmkv.units import KiB, MiB

if not HYBRIDS:
    pytest.skip("this release has no layers with states in its cache", allow_module_level=True)

MakeEngine = Callable[..., Engine]
NUM_TOKENS = 8
LONG = 70
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
PROMPTS = random_prompts(40, 1, 13, 25, 2, 9)
NAME = HYBRIDS[0]
#: Families whose layers with states run once over the prompts of a step.
PACKED = [each for each in ("qwen3_next", "qwen3_5_text", "lfm2") if each in HYBRIDS]
#: Gated DeltaNet, Mamba-2 (which earlier releases share between sequences), layers that go on with
#: one token only, KDA.
PREEMPTED = [
    name
    for name in (NAME, "nemotron_h", "jamba", "kimi_linear")
    if name in families.surveyed() and (name != "nemotron_h" or VERSION >= (5, 23))
]


def _model(name: str) -> Any:
    return copy.deepcopy(hybrid(name))


def _check(
    engine: Engine, prompts: list[list[int]] = PROMPTS, name: str = NAME, **options: Any
) -> list[RequestHandle]:
    """Greedy requests of an engine, each checked to be as alone."""
    params = dataclasses.replace(GREEDY, **options)
    handles = [engine.add(prompt, params) for prompt in prompts]
    _run(engine)
    check_said(prompts, handles, params.max_tokens, name)
    return handles


def _run(engine: Engine) -> None:
    """Run until no request is unfinished, and check the cache after each step."""
    while engine.has_unfinished:
        engine.step()
        engine.cache.check()


def _found(handles: list[RequestHandle]) -> list[int]:
    return [each.output().num_cached_tokens for each in handles]


@pytest.mark.slow
@pytest.mark.parametrize("name", HYBRIDS)
def test_requests_get_the_tokens_that_they_get_alone(make_engine: MakeEngine, name: str) -> None:
    """Beside each other, in chunks of 16 tokens, and again over rows with others' states."""
    engine = make_engine(name)
    for _ in range(2):
        _check(engine, name=name)


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKED)
def test_compiled_layers(make_engine: MakeEngine, name: str) -> None:
    """Traced once for a kind, with states in their rows; the model is as before afterwards."""
    model = _model(name)
    kinds = [type(each) for each in model.modules()]
    engine = make_engine(model, prefix_caching=True, **TRACED)
    assert engine._runner.stepper._layers._variants
    for _ in range(2):
        _check(engine, name=name)
    with engine.paused():
        assert kinds == [type(each) for each in model.modules()]
    _check(engine, name=name)
    engine.close()
    assert kinds == [type(each) for each in model.modules()]


@pytest.mark.slow
@pytest.mark.parametrize("name", HYBRIDS)
def test_steps_as_for_graphs(
    make_engine: MakeEngine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded, over a row of their own; a prompt of one token begins anew in a row of others."""
    engine = make_engine(name, **PADDED)
    stepper = engine._runner.stepper
    assert {1, 2, 4} == {width for width, _ in stepper.decode_graphs.captured}
    assert (stepper.mixed_graphs is not None) == (name in PACKED)
    eager: list[Any] = []
    run_eagerly = stepper.run_eagerly
    monkeypatch.setattr(
        stepper, "run_eagerly", lambda *args: eager.append(args[0]) or run_eagerly(*args)
    )
    for prompts in (PROMPTS, PROMPTS[1:2]):
        _check(engine, prompts, name)
    if name in PACKED:  # Neither begins a state within a decoding entry.
        assert all(each.decodes and not each.num_past_tokens for [each, *_] in eager)


@pytest.mark.parametrize("name", PACKED)
def test_checkpoints_in_steps_as_for_graphs(
    make_engine: MakeEngine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What follows a checkpoint is computed from it; prompts that begin alike are served by it."""
    sizes = {"max_num_batched_tokens": 96, "max_tokens": 192}
    engine = make_engine(name, prefix_caching=True, **sizes, **PADDED)
    graphs, steps = engine._runner.stepper.mixed_graphs, []
    fill = graphs.fill
    monkeypatch.setattr(
        graphs, "fill", lambda key, pieces: steps.append(pieces) or fill(key, pieces)
    )
    prompts = [PROMPTS[0], [*PROMPTS[0][:35], 3, 4, 5], [*PROMPTS[0][:33], 7, 8], PROMPTS[0]]
    for each in prompts:
        _check(engine, [each], name)
    handles = _check(engine, [*prompts, PROMPTS[2]], name)
    assert min(_found(handles[:-1])) >= 32
    checkpoints = [
        each.num_tokens - each.checkpoints[0][0]
        for pieces in steps
        for each in pieces
        if each.checkpoints
    ]
    assert 8 in checkpoints


def test_what_is_not_done_is_said_once(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """No step with prompts is captured if layers are called for each prompt."""
    name = next(each for each in HYBRIDS if each not in PACKED)
    with caplog.at_level(logging.INFO, "vmkv"):
        engine = make_engine(name, **PADDED)
        _check(engine, [PROMPTS[0]] * 2, name)
    assert 1 == caplog.text.count("layers keep states: steps with prompts are not captured")


def test_a_paused_engine_leaves_the_layers_as_they_were(make_engine: MakeEngine) -> None:
    """And serves as before afterwards."""
    model = _model(NAME)
    engine = make_engine(model)
    with engine.paused():
        assert "forward" not in {name for each in model.modules() for name in vars(each)}
    _check(engine, PROMPTS[:1])
    engine.sleep()
    _check(engine, PROMPTS[2:3])


def test_samples_of_one_request(make_engine: MakeEngine) -> None:
    """Each as the sample of that seed alone."""
    engine = make_engine(NAME)
    options: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 0.9}
    (together,) = engine.generate([PROMPTS[2]], SamplingParams(n=3, seed=5, **options))
    alone = [
        engine.generate([PROMPTS[2]], SamplingParams(seed=5 + at, **options))[0].outputs[0]
        for at in range(3)
    ]
    assert [each.token_ids for each in alone] == [each.token_ids for each in together.outputs]


def _tight_budget(make_engine: MakeEngine, name: str) -> int:
    """Bytes for four requests that begin, of which one can grow to its end."""
    view = make_engine(name)._view
    return (3 * view.peak_pages(1) + view.peak_pages(13 + LONG)) * 4 * KiB


@pytest.mark.slow
@pytest.mark.parametrize("host_bytes", [0, 16 * MiB], ids=["recomputed", "swapped"])
@pytest.mark.parametrize("name", PREEMPTED)
def test_preempted_requests(make_engine: MakeEngine, name: str, host_bytes: int) -> None:
    """Swapped states go to host memory with the rows, and come back."""
    costs = PreemptionCosts(flops_per_s=1.0 if host_bytes else 1e30)
    budget_bytes = _tight_budget(make_engine, name)
    engine = make_engine(
        name,
        budget_bytes=budget_bytes,
        host_budget_bytes=host_bytes,
        preemption_costs=costs,
    )
    handles = _check(engine, PROMPTS[1:3] + PROMPTS[4:], name, max_tokens=LONG)
    assert any(handle.requests[0].num_preemptions for handle in handles)
    assert bool(host_bytes) == bool(engine.cache.sharing.swapped_in_bytes)
    held_bytes = engine.cache.pool.lent_host_bytes
    assert engine.cache.host_blocks.num_bytes == held_bytes


def test_cancelled_requests_leave_the_others_alone(make_engine: MakeEngine) -> None:
    engine = make_engine(NAME)
    handles = [engine.add(prompt, GREEDY) for prompt in PROMPTS]
    for _ in range(3):
        engine.step()
    engine.cancel(handles[1])
    engine.cancel(handles[4])
    _run(engine)
    assert FinishReason.CANCELLED == handles[4].output().outputs[0].finish_reason
    for at in (0, 2, 3, 5):
        check_said(PROMPTS[at : at + 1], handles[at : at + 1], name=NAME)


def test_a_step_that_fails_midway_leaves_no_spoilt_state(make_engine: MakeEngine) -> None:
    """Out of memory behind the first layers: the requests go on, with the same tokens."""
    model = _model(NAME)
    engine = make_engine(model)
    num_calls = 0

    def fail(*_: object) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls in (3, 6, 14):
            raise torch.OutOfMemoryError("CUDA out of memory")

    model.lm_head.register_forward_pre_hook(fail)
    _check(engine)
    assert num_calls > 14


def test_states_stay_in_the_models_type_beside_keys_in_eight_bits(make_engine: MakeEngine) -> None:
    engine = make_engine(NAME, kv_dtype="fp8")
    assert len(PROMPTS) == len(engine.generate(PROMPTS, GREEDY))
    kept = {each.dtype for its in engine.cache.states.shapes.values() for each in its}
    assert {torch.float32} == kept
    full = next(group for group in engine.cache.groups if not group.is_fixed)
    assert torch.float8_e4m3fn == full.dtype


def test_a_prompt_of_one_token_between_decoding_ones(make_engine: MakeEngine) -> None:
    """It begins a state in a step where the ones before and after it go on with theirs."""
    prompts = random_prompts(17, 1, 17, 40)
    engine = make_engine(NAME, prefix_caching=True)
    for _ in range(2):  # Prompts found in the cache decode at once.
        _check(engine, prompts)


@pytest.mark.parametrize("name", PREEMPTED)
def test_checkpoints_of_scored_prompts(
    make_engine: MakeEngine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt in several scoring passes leaves its checkpoint, which serves another prompt."""
    monkeypatch.setattr(runner, "_PASS_TOKENS", 20)
    [first] = random_prompts(36)
    other = [*first[:34], 3, 5]
    engine = make_engine(name, prefix_caching=True, max_num_batched_tokens=64)
    assert [0] == _found(_check(engine, [first], name, prompt_logprobs=0))
    assert [32] == _found(_check(engine, [other], name))


def test_log_probabilities_of_prompts(make_engine: MakeEngine) -> None:
    """Passes of their own keep the states of all others."""
    prompts, params = [PROMPTS[0], PROMPTS[3]], dataclasses.replace(GREEDY, prompt_logprobs=0)
    check_said(prompts, make_engine(NAME).generate(prompts, [params, GREEDY]), name=NAME)


def test_a_budget_below_one_state_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine(NAME)
    state_bytes = engine.cache.states.table.row_bytes
    with pytest.raises((ConfigError, OutOfPagesError)):
        make_engine(NAME, budget_bytes=state_bytes)


def test_a_model_with_another_module_is_served_after_a_pause(make_engine: MakeEngine) -> None:
    """It is proven again: its layers keep the same states, in another proof's objects."""
    model = _model(NAME)
    engine = make_engine(model)
    _check(engine, PROMPTS[:1])
    with engine.paused():
        model.lm_head = copy.deepcopy(model.lm_head)
    _check(engine)


# ---- prefixes ------------------------------------------------------------------------------------


def _check_alone(name: str) -> Callable[[list[int], list[int]], None]:
    def check(prompt: list[int], said: list[int]) -> None:
        assert reference(prompt, NUM_TOKENS, name) == said

    return check


def _converse(
    engine: Engine,
    begins: list[list[int]],
    num_turns: int,
    check: Callable[[list[int], list[int]], None],
) -> tuple[int, int]:
    """Hold conversations beside each other; return tokens found, and those of the turns before.

    `check` takes the prompt and the answer of each turn.
    """
    num_found = num_known = 0
    texts, knowns = begins, [0] * len(begins)
    for turn in range(num_turns):
        handles = [engine.add(text, GREEDY) for text in texts]
        _run(engine)
        for at, handle in enumerate(handles):
            output, text = handle.output(), texts[at]
            said = list(output.outputs[0].token_ids)
            check(text, said)
            num_found += output.num_cached_tokens if turn else 0
            num_known += knowns[at]
            knowns[at] = len(text) + len(said)
            texts = [*texts[:at], [*text, *said, *random_prompts(5 + turn)[0]], *texts[at + 1 :]]
    return num_found, num_known


@pytest.mark.slow
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_conversation_goes_on_from_its_last_state(make_engine: MakeEngine, name: str) -> None:
    """Six turns each: nearly all of the turn before is found, and answers are those without."""
    engine = make_engine(name, max_num_batched_tokens=64)
    num_found, num_known = _converse(engine, random_prompts(21, 34, 40), 6, _check_alone(name))
    assert num_found > 0.9 * num_known
    assert num_found == engine.cache.stats().num_prefix_hit_tokens


@pytest.mark.gpu
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_conversation_on_a_gpu(name: str) -> None:
    """The copies of states are in the order of the stream."""
    options: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_tokens": 256}
    plain = _model(name).to("cuda")  # Not on the CPU: kernels of convolutions may be CUDA's alone.

    def check(prompt: list[int], said: list[int]) -> None:
        assert_likeliest(plain, [prompt], [[*prompt, *said]])

    with Engine(_model(name).to("cuda"), budget_bytes=256 * MiB, seed=0, **options) as engine:
        num_found, num_known = _converse(engine, random_prompts(21, 34, 40), 6, check)
    assert num_found > 0.9 * num_known


@pytest.mark.slow
def test_conversations_where_memory_is_short(make_engine: MakeEngine) -> None:
    """Rows, states and checkpoints are evicted and swapped; answers stay the same."""
    pages = make_engine(NAME)._view.peak_pages(130)
    engine = make_engine(NAME, budget_bytes=2 * pages * 4 * KiB, host_budget_bytes=MiB)
    num_found, _ = _converse(engine, random_prompts(21, 34, 40), 5, _check_alone(NAME))
    assert num_found


def test_prompts_part_where_a_checkpoint_is_made(make_engine: MakeEngine) -> None:
    """The second prompt with a common beginning marks its end, from where the third goes on."""
    [common] = random_prompts(50)
    engine = make_engine(NAME)
    handles = [_check(engine, [common + tail]) for tail in random_prompts(20, 21, 22, 9)]
    assert [[0], [0], [48], [48]] == [*map(_found, handles)]


def test_the_same_prompt_again(make_engine: MakeEngine) -> None:
    """Found up to its last whole block; not by another tenant, nor where its scores are wanted."""
    [prompt] = random_prompts(37)
    engine = make_engine(NAME)
    assert [0] == _found(_check(engine, [prompt]))
    assert [32] == _found(_check(engine, [prompt]))
    other = engine.generate([prompt], GREEDY, tenant="other")
    check_said([prompt], other, name=NAME)
    assert 0 == other[0].num_cached_tokens
    assert [0] == _found(_check(engine, [prompt], prompt_logprobs=0))


@pytest.mark.parametrize(
    ("name", "prefix_caching"), [(NAME, True), *((name, False) for name in HYBRIDS)]
)
def test_samples_fork_the_prompt(make_engine: MakeEngine, name: str, prefix_caching: bool) -> None:
    """They compute its last token only, from a checkpoint before it."""
    engine = make_engine(name, prefix_caching=prefix_caching)
    num_computed = 0
    submit = engine._runner.submit

    def count(pieces: Any) -> Any:
        nonlocal num_computed
        num_computed += sum(piece.num_new_tokens for piece in pieces)
        return submit(pieces)

    engine._runner.submit = count
    _check(engine, PROMPTS[:1], name, n=3)
    assert 2 == engine.cache.stats().sharing.num_forks
    assert len(PROMPTS[0]) + 2 + 3 * (NUM_TOKENS - 1) == num_computed


def test_samples_whose_checkpoint_was_evicted(make_engine: MakeEngine) -> None:
    """They compute the prompt."""
    engine = make_engine(NAME, prefix_caching=False, max_num_batched_tokens=64)
    handle = engine.add(PROMPTS[0], SamplingParams(n=3, temperature=0, max_tokens=NUM_TOKENS))
    engine.step()
    assert 1 == len(list(engine.cache.states.checkpoints()))
    engine.cache.trim()
    _run(engine)
    assert 0 == engine.cache.stats().sharing.num_forks
    check_said(PROMPTS[:1], [handle], name=NAME)


def test_a_checkpoint_stays_while_samples_fork_it(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another thread evicts between the choice of the leader and its fork."""
    engine = make_engine(NAME, prefix_caching=False, max_num_batched_tokens=64)
    fork, pool = Sequence.fork, engine.cache.pool

    def fork_late(sequence: Sequence, num_tokens: int) -> Sequence:
        pool.give_back()
        return fork(sequence, num_tokens)

    monkeypatch.setattr(Sequence, "fork", fork_late)
    _check(engine, PROMPTS[:1], n=3)
    assert 2 == engine.cache.stats().sharing.num_forks


def test_another_thread_evicts_checkpoints(make_engine: MakeEngine) -> None:
    """Between any two holds of the pool's lock; samples and prompts get their tokens."""
    host = HostBackend(4 * KiB)
    evictor = Evictor(lambda: ExtentPool(host, 16 * MiB), share=0.2)
    engine = make_engine(NAME, backend=host, pool=evictor.pool, max_num_batched_tokens=64)
    _check(engine, 2 * PROMPTS, n=3)
    evictor.check()
    assert evictor.num_evictions > 5


def test_a_failed_step_goes_back_to_a_checkpoint(make_engine: MakeEngine) -> None:
    """What came before it is not computed again, although idle memory is given back."""
    prompts = random_prompts(60, 39)
    model = _model(NAME)
    engine = make_engine(model, max_num_batched_tokens=128)
    sizes: list[int] = []

    def note(_: object, __: object, options: Any) -> None:
        sizes.append(options["input_ids"].shape[1])

    def fail(*_: object) -> None:
        if len(sizes) == 5:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model.register_forward_pre_hook(note, with_kwargs=True)
    model.lm_head.register_forward_pre_hook(fail)
    _check(engine, prompts)
    assert [60 + 39, 2, 2, 2, 2] == sizes[:5]
    ends = 2 * (NUM_TOKENS - 5)
    assert (60 - 48) + (39 - 32) + 2 * 4 + ends == sum(sizes[5:])


@pytest.mark.parametrize("options", [EAGER, PADDED], ids=["eager", "graphs"])
def test_a_checkpoint_within_decoding_steps(
    make_engine: MakeEngine, options: dict[str, Any]
) -> None:
    """A prompt of which each step computes one token, in the batch of those that decode."""
    [prompt] = random_prompts(37)
    engine = make_engine(NAME, max_num_batched_tokens=3, max_num_seqs=3, **options)
    for each in PROMPTS[4:]:
        engine.add(each, dataclasses.replace(GREEDY, max_tokens=LONG))
    for _ in range(12):
        engine.step()
    _check(engine, [prompt])
    assert [32] == _found(_check(engine, [prompt]))


def test_checkpoints_that_evict_each_other(make_engine: MakeEngine) -> None:
    """Where memory is short, those of a step stay, and earlier ones give way."""
    [common] = random_prompts(50)
    prompts = [common + tail for tail in random_prompts(20, 21)]
    view = make_engine(NAME)._view
    least_pages = view.peak_pages(len(prompts[1]) + NUM_TOKENS + 1)
    for num_pages in range(least_pages, least_pages + 2 * view.peak_pages(1) + 1):
        budget_bytes = num_pages * 4 * KiB
        engine = make_engine(NAME, budget_bytes=budget_bytes, max_num_batched_tokens=128)
        for prompt in prompts:
            _check(engine, [prompt])
        engine.close()


def test_prefixes_are_forgotten_with_the_weights(make_engine: MakeEngine) -> None:
    [prompt] = random_prompts(37)
    engine = make_engine(NAME)
    _check(engine, [prompt])
    engine.weights_changed()
    assert [0] == _found(_check(engine, [prompt]))
