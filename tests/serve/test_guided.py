"""Guided requests give what their grammar allows, and leave the requests beside them alone."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import jsonschema
import numpy as np
import pytest
import torch
from helpers.hosted import hosted
from helpers.requests import finish_all
from helpers.scheduler_books import check_scheduler
from helpers.serving import TEXT, tiny_llama, tiny_tokenizer
from tokenizers import AddedToken

from vmkv import ConfigError
from vmkv.serve.engine import Engine
from vmkv.serve.grammar_trial import GrammarTrials
from vmkv.serve.guided import TEXT_BYTES_MAX, Grammars, check_grammar, vocabulary_of
from vmkv.serve.params import SamplingParams, StructuredOutputs
from vmkv.serve.request import CompletionOutput, FinishReason, Request, RequestHandle, joined
from vmkv.serve.runner import ModelRunner, RunnerOptions
from vmkv.serve.scheduler import PreemptionCosts
from vmkv.units import KiB, MiB

END = 1  # The tokenizer's end of sequence.
WORD = {"type": "string", "pattern": "^[a-z]{1,6}$"}
SCHEMAS: dict[str, dict[str, Any]] = {
    "nested": {
        "type": "object",
        "properties": {
            "a": {
                "type": "object",
                "properties": {"b": WORD},
                "required": ["b"],
                "additionalProperties": False,
            }
        },
        "required": ["a"],
        "additionalProperties": False,
    },
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 5},
    "enum": {"enum": ["ja", "nein", 3, None]},
    "reference": {
        "$defs": {"pair": {"type": "array", "items": WORD, "minItems": 2, "maxItems": 2}},
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/pair"}, "y": {"$ref": "#/$defs/pair"}},
        "required": ["x", "y"],
        "additionalProperties": False,
    },
    "union": {"anyOf": [{"type": "integer", "minimum": 3, "maximum": 900}, WORD]},
    "length": {"type": "string", "minLength": 4, "maxLength": 9},
}
PROMPTS = [line[:20] for line in TEXT]
HOT = SamplingParams(temperature=1.0, seed=5, max_tokens=200)
MakeEngine = Callable[..., Engine]


def guided(base: SamplingParams = HOT, /, **form: Any) -> SamplingParams:
    options = {name: form.pop(name) for name in [*form] if name in vars(base)}
    given = {name: getattr(base, name) for name in ("temperature", "seed", "max_tokens")}
    return SamplingParams(**{**given, **options}, structured_outputs=StructuredOutputs(**form))


@pytest.fixture
def engine_of(make_engine: MakeEngine) -> MakeEngine:
    def make(**options: Any) -> Engine:
        options = {"max_tokens": 512, "max_num_batched_tokens": 32, **options}
        return make_engine(tiny_llama(), tokenizer=tiny_tokenizer(), **options)

    return make


def first(handle: RequestHandle) -> CompletionOutput:
    output = handle.output()
    assert output.error is None, repr(output.error)
    return output.outputs[0]


def answer(engine: Engine, params: SamplingParams, prompt: str = "A") -> CompletionOutput:
    handle = engine.add(prompt, params)
    finish_all(engine)
    return first(handle)


def is_complete(output: CompletionOutput) -> bool:
    """It ended by its grammar, with the end-of-sequence token."""
    return output.finish_reason is FinishReason.STOP and output.token_ids[-1] == END


# ---- answers -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=str)
def test_answers_that_stop_are_valid(engine_of: MakeEngine, options: dict[str, Any]) -> None:
    engine = engine_of(**options)
    asked = [(name, seed) for name in SCHEMAS for seed in range(3)]
    handles = [engine.add("A", guided(json=SCHEMAS[name], seed=seed)) for name, seed in asked]
    finish_all(engine)
    for (name, _), handle in zip(asked, handles, strict=True):
        output = first(handle)
        assert is_complete(output), output
        jsonschema.validate(json.loads(output.text), SCHEMAS[name])
    assert 6 < len({first(each).text for each in handles})


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": "(ab|c){2,5}x"}, "(ab|c){2,5}x"),
        ({"choice": ['"quoted"\n', "日本", "a\\b"]}, '"quoted"\n|日本|a\\\\b'),
        ({"choice": ["a\x7fb", "\x7f"]}, "a?\x7fb?"),
        ({"grammar": 'start: item ("," item)*\nitem: /[0-9]{1,3}/'}, "[0-9]{1,3}(,[0-9]{1,3})*"),
        pytest.param({"json_object": True}, r"\{.*", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_other_forms(engine_of: MakeEngine, form: dict[str, Any], pattern: str) -> None:
    engine = engine_of()
    handles = [engine.add("A", guided(**form, seed=seed)) for seed in range(8)]
    finish_all(engine)
    complete = [each for each in map(first, handles) if is_complete(each)]
    assert len(complete) >= 3
    for output in complete:
        assert re.fullmatch(pattern, output.text, re.DOTALL), output.text
        if "json_object" in form:
            assert isinstance(json.loads(output.text), dict)


def test_samples_are_guided_each(engine_of: MakeEngine) -> None:
    """As requests of their own would be."""
    engine = engine_of()
    handle = engine.add(PROMPTS[0], guided(json=SCHEMAS["union"], n=3))
    alone = [engine.add(PROMPTS[0], guided(json=SCHEMAS["union"], seed=5 + at)) for at in range(3)]
    finish_all(engine)
    outputs = handle.output().outputs
    assert [each.token_ids for each in outputs] == [first(each).token_ids for each in alone]
    assert 1 < len({each.text for each in outputs})


def test_log_probabilities_are_of_unmodified_logits(engine_of: MakeEngine) -> None:
    engine = engine_of()
    output = answer(engine, guided(regex="[xyz]{4}", temperature=0, logprobs=1), PROMPTS[0])
    tokens = [*tiny_tokenizer().encode(PROMPTS[0]), *output.token_ids]
    with torch.no_grad():
        logits = tiny_llama()(torch.tensor([tokens])).logits[0]
    expected = logits.log_softmax(-1)[len(tokens) - len(output.token_ids) - 1 : -1]
    for at, entry in enumerate(output.logprobs or ()):
        assert expected[at, entry.token_id].item() == pytest.approx(entry.logprob, abs=1e-3)
        assert expected[at].max().item() == pytest.approx(max(entry.top.values()), abs=1e-3)
    assert len(output.token_ids) == len(output.logprobs or ())


# ---- ends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"regex": "ab", "min_tokens": 10}, "ab"),  # The grammar ends before.
        ({"regex": "a{2,90}", "min_tokens": 20, "logits_processors": [lambda ids, s: s]}, "a{19,}"),
        ({"regex": "ab", "ignore_eos": True}, "ab"),
        ({"regex": "a{30}", "max_tokens": 8}, "a{8,}"),
        ({"regex": "a{3}b{3}", "stop": "ab"}, "aa"),
    ],
    ids=lambda value: str(value).partition(" at 0x")[0],
)
def test_ends(engine_of: MakeEngine, options: dict[str, Any], text: str) -> None:
    engine = engine_of()
    output = answer(engine, guided(**options))
    assert re.fullmatch(text, output.text)
    reason = FinishReason.LENGTH if "max_tokens" in options else FinishReason.STOP
    assert reason is output.finish_reason


def test_stop_tokens_end_the_output(engine_of: MakeEngine) -> None:
    """The request's own, anywhere, but for the first `min_tokens`."""
    engine = engine_of()
    [x] = tiny_tokenizer().encode("x")
    output = answer(engine, guided(regex="[xyz]{300}", stop_token_ids=[x], min_tokens=20))
    assert x == output.token_ids[-1] == output.stop_reason
    assert x not in output.token_ids[:-1]
    assert 20 <= len(output.token_ids) < 300
    assert set("yz") >= set(output.text)


def test_a_model_without_end_tokens_takes_the_tokenizers(make_engine: MakeEngine) -> None:
    model = tiny_llama()
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    engine = make_engine(model, tokenizer=tiny_tokenizer())
    output = answer(engine, guided(regex="ab"))
    assert is_complete(output)
    assert "ab" == output.text


# ---- beside others -------------------------------------------------------------------------------


def mixed_requests() -> list[tuple[str, SamplingParams]]:
    unguided = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    params = [
        unguided,
        guided(json=SCHEMAS["reference"], max_tokens=70),
        guided(json=SCHEMAS["nested"], temperature=0.7, top_p=0.9, max_tokens=50),
        SamplingParams(temperature=0.8, seed=2, max_tokens=30, top_k=9, ignore_eos=True),
        guided(regex="[a-f]{20}", temperature=0, max_tokens=30),
        guided(json=SCHEMAS["array"], n=2, presence_penalty=0.5, max_tokens=40),
        unguided,
    ]
    return [(PROMPTS[at % len(PROMPTS)], each) for at, each in enumerate(params)]


def said(handles: Sequence[RequestHandle]) -> list[list[list[int]]]:
    outputs = [handle.output() for handle in handles]
    assert [None] * len(outputs) == [each.error for each in outputs]
    return [[list(each.token_ids) for each in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def alone() -> list[list[list[int]]]:
    """Tokens of the mixed requests, each alone in an engine."""
    handles = []
    with Engine(
        tiny_llama(),
        tokenizer=tiny_tokenizer(),
        max_tokens=512,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        budget_bytes=16 * MiB,
    ) as engine:
        for request in mixed_requests():
            handles.append(engine.add(*request))
            finish_all(engine)
    return said(handles)


CAPTURED = RunnerOptions(compile_layers=False, capture=True, show_progress=False)
SWAPS, RECOMPUTES = PreemptionCosts(flops_per_s=1.0), PreemptionCosts(flops_per_s=1e30)


@pytest.mark.parametrize(
    ("options", "is_short"),
    [
        ({}, False),
        ({"runner": "graphs", "runner_options": CAPTURED}, False),
        ({"budget_bytes": 28 * KiB, "preemption_costs": RECOMPUTES}, True),
        ({"budget_bytes": 28 * KiB, "preemption_costs": SWAPS, "host_budget_bytes": MiB}, True),
    ],
    ids=["eager", "graphs", "recomputed", "swapped"],
)
def test_tokens_do_not_depend_on_the_batch(
    engine_of: MakeEngine, alone: Any, options: dict[str, Any], is_short: bool
) -> None:
    engine = engine_of(**options)
    handles = [engine.add(*request) for request in mixed_requests()]
    finish_all(engine)
    assert alone == said(handles)
    requests = [each for handle in handles for each in handle.requests]
    assert is_short == any(each.num_preemptions and each.matcher for each in requests)


def test_steps_without_guided_requests_are_submitted_whole(engine_of: MakeEngine) -> None:
    engine = engine_of()
    launch = mock.patch.object(engine._runner, "launch", wraps=engine._runner.launch)
    sample = mock.patch.object(engine.loop, "_sample", wraps=engine.loop._sample)
    with launch as launched, sample as sampled:
        engine.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=4))
        assert 0 == sampled.call_count < launched.call_count
        engine.generate(PROMPTS, guided(regex="a{9}"))
        assert 10 <= sampled.call_count


@pytest.mark.parametrize("what", ["processor", "grammar"])
def test_waiting_for_the_last_token_takes_no_more_steps(engine_of: MakeEngine, what: str) -> None:
    """A step for each token, the prompt's, and one that is superfluous."""
    engine = engine_of()
    told: list[list[int]] = []

    def note(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        told.append(input_ids[0].tolist())
        return scores

    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logits_processors=[note])
    handle = engine.add("A", params if what == "processor" else guided(regex="x{19}"))
    num_steps = 0
    while engine.has_unfinished:
        engine.step()
        num_steps += 1
    assert num_steps <= 22
    if what == "processor":
        tokens = [*handle.output().prompt_token_ids, *first(handle).token_ids]
        assert [tokens[:end] for end in range(len(tokens) - 20, len(tokens))] == told


# ---- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 4, 9])
@pytest.mark.parametrize("what", ["launch", "sample", "_masks", "result"])
def test_an_interrupt_between_launch_and_sample(
    engine_of: MakeEngine, alone: Any, what: str, number: int
) -> None:
    """The step is undone; requests continue with the same tokens."""
    engine = engine_of()
    handles = [engine.add(*request) for request in mixed_requests()]
    owner: Any = {"_masks": engine.loop, "result": None}.get(what, engine._runner)
    if owner is None:
        from vmkv.serve.runner import PendingTokens as owner  # noqa: N813
    calls, real = itertools.count(1), getattr(owner, what)

    def interrupted(*arguments: Any) -> Any:
        if next(calls) == number:
            raise KeyboardInterrupt
        return real(*arguments)

    with mock.patch.object(owner, what, interrupted), pytest.raises(KeyboardInterrupt):
        finish_all(engine)
    engine.cache.check()
    check_scheduler(engine._scheduler)
    finish_all(engine)
    assert alone == said(handles)


@pytest.mark.parametrize("what", ["launch", "sample"])
def test_a_step_without_memory_is_split(engine_of: MakeEngine, alone: Any, what: str) -> None:
    engine = engine_of()
    handles = [engine.add(*request) for request in mixed_requests()]
    calls, real = itertools.count(1), getattr(engine._runner, what)

    def short(*arguments: Any) -> Any:
        if next(calls) in (2, 5, 6):
            raise torch.OutOfMemoryError("none left")
        return real(*arguments)

    with mock.patch.object(engine._runner, what, short):
        finish_all(engine)
    assert alone == said(handles)


def test_a_failing_sampler_fails_its_step_only(engine_of: MakeEngine) -> None:
    engine = engine_of()
    handle = engine.add("A", guided(regex="a{9}"))
    engine.step()
    with mock.patch.object(ModelRunner, "_sample", side_effect=ZeroDivisionError("sampling")):
        engine.step()
    assert isinstance(handle.output().error, ZeroDivisionError)
    assert 1 == len(handle.output().outputs[0].token_ids)
    assert "a" * 9 == answer(engine, guided(regex="a{9}")).text


def test_a_failing_processor_leaves_guided_requests_alone(
    engine_of: MakeEngine, alone: Any
) -> None:
    def broken(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] > 14:
            raise ZeroDivisionError("in the processor")
        return scores

    engine = engine_of(max_num_seqs=9)
    handles = [engine.add(*request) for request in mixed_requests()]
    bad = engine.add("A row", guided(regex="[a-z]{90}", logits_processors=[broken]))
    finish_all(engine)
    assert "in the processor" in str(bad.output().error)
    assert alone == said(handles)


def test_a_grammar_that_becomes_too_much_work_ends_its_request_only(
    engine_of: MakeEngine, alone: Any
) -> None:
    import llguidance

    few = llguidance.LLParserLimits(step_max_items=60, verbose_errors=False)
    engine = engine_of(max_num_seqs=9)
    handles = [engine.add(*request) for request in mixed_requests()]
    with mock.patch("vmkv.serve.grammar_trial.limits", return_value=few):
        # Each letter adds to the parses of all before.
        ambiguous = 'start: s\ns: s s | s s s | "a"'
        bad = engine.add("A", guided(grammar=ambiguous, min_tokens=150))
    finish_all(engine)
    assert isinstance(bad.output().error, ConfigError)
    assert "structured_outputs" in str(bad.output().error)
    assert alone == said(handles)


def test_a_mask_that_takes_too_long_ends_its_request_only(
    engine_of: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here every mask does; a text beside it is answered."""
    monkeypatch.setattr("vmkv.serve.guided.MASK_S", 0.0)
    engine = engine_of()
    slow, plain = engine.add("A", guided(regex="[a-z]{90}")), engine.add("A", HOT)
    finish_all(engine)
    assert "which all requests wait for" in str(slow.output().error)
    assert first(plain).token_ids
    engine.grammars.ends_slow = False  # Ranks would end different ones.
    assert answer(engine, guided(regex="[a-z]{9}")).token_ids


async def test_grammars_are_compiled_beside_the_engines_thread(
    engine_of: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other requests are served meanwhile, also those that come later; `drain` waits for them."""
    compile_, may_go_on, threads = Grammars._compiled, threading.Event(), set()

    def held(grammars: Grammars, asked: StructuredOutputs) -> Any:
        threads.add(threading.current_thread())
        assert may_go_on.wait(60)
        return compile_(grammars, asked)

    monkeypatch.setattr(Grammars, "_compiled", held)
    client = hosted(engine_of())

    async def ask(params: SamplingParams) -> CompletionOutput:
        return joined([each async for each in client.stream("A", params)]).outputs[0]

    params = guided(SamplingParams(seed=5, n=3, max_tokens=9), regex="[a-c]{9}")
    waiting = [asyncio.ensure_future(ask(params)) for _ in range(2)]
    bad = asyncio.ensure_future(ask(guided(json=ENDLESS)))
    assert (await ask(replace(HOT, max_tokens=5))).token_ids
    assert not any(each.done() for each in (*waiting, bad))
    draining = asyncio.ensure_future(client.shutdown())
    await asyncio.sleep(0)
    may_go_on.set()
    answers = await asyncio.gather(*waiting, bad, return_exceptions=True)
    await draining
    assert client._worker not in threads
    first_, second, refused = answers
    assert re.fullmatch("[a-c]{9}", first_.text)
    assert first_.text == second.text
    assert isinstance(refused, ConfigError)


# ---- refusals ------------------------------------------------------------------------------------

ENDLESS = {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
DEEP = "[" * 3000 + "]" * 3000


@pytest.mark.parametrize(
    ("form", "reason", "needs_tokenizer"),
    [
        ({"json": "{"}, "EOF", False),
        ({"json": {"type": "nope"}}, "Invalid type: nope", False),
        ({"json": {"$ref": "#/$defs/x"}}, "does not exist", False),
        ({"json": DEEP}, "recursion limit", False),
        ({"json": ENDLESS}, "no output satisfies", True),
        ({"regex": "(a"}, "unclosed group", False),
        ({"regex": "a" * (TEXT_BYTES_MAX + 1)}, f"at most {TEXT_BYTES_MAX}", False),
        ({"regex": "\ud800"}, "surrogate", False),
        ({"grammar": "start: x"}, 'unknown name: "x"', False),
        ({"grammar": "start: start"}, "no output satisfies", True),
        ({"choice": ["x" * TEXT_BYTES_MAX, "y"]}, "too large", False),
    ],
    ids=lambda value: str(value)[:40].partition(" at 0x")[0],
)
def test_bad_grammars_are_refused(
    engine_of: MakeEngine, form: dict[str, Any], reason: str, needs_tokenizer: bool
) -> None:
    asked = StructuredOutputs(**form)
    if needs_tokenizer:
        check_grammar(asked)
    else:
        with pytest.raises(ConfigError, match=f"^structured_outputs: .*{reason}"):
            check_grammar(asked)
    engine = engine_of()
    with pytest.raises(ConfigError, match=f"^structured_outputs: .*{reason}"):
        engine.add("A", guided(**form))
    assert not engine.has_unfinished


#: It compiles for ever.
HANGING = {"allOf": [{"type": "integer", "multipleOf": each} for each in (9973, 9967)]}
#: Each token costs more than the one before.
AMBIGUOUS = 'start: s\ns: s s s s | s s s | s s | "a" | "b"'


@pytest.mark.parametrize("with_vocabulary", [False, True])
def test_grammars_that_are_too_much_work_are_refused_by_a_trial(with_vocabulary: bool) -> None:
    """The process of trials survives them, and is started anew if somebody ends it."""
    of = vocabulary_of(tiny_tokenizer()) if with_vocabulary else ()
    with contextlib.closing(GrammarTrials(*of)) as trials:
        hanging = [StructuredOutputs(json=HANGING)]
        if with_vocabulary:  # Another vocabulary's error would hide what follows.
            named = f"start: <s> x\nx: %json {json.dumps(HANGING)}"
            hanging.append(StructuredOutputs(grammar=named))
        for asked in hanging:
            with pytest.raises(ConfigError, match=r"^structured_outputs: .*processor time"):
                check_grammar(asked, trials)
        with pytest.raises(ConfigError, match=r"^structured_outputs: "):
            check_grammar(StructuredOutputs(grammar=AMBIGUOUS), trials)
        process = trials._process
        assert process is not None
        for schema in SCHEMAS.values():
            check_grammar(StructuredOutputs(json=schema), trials)
        assert process is trials._process
        process.kill()
        check_grammar(StructuredOutputs(regex="a"), trials)
        assert process is not trials._process


@pytest.mark.parametrize("asked", [{}, HANGING], ids=["idle", "compiling"])
def test_the_process_of_trials_ends_with_its_parent(asked: dict[str, Any]) -> None:
    """Also if that is killed, and during a trial."""
    program = f"""
from vmkv.serve.grammar_trial import GrammarTrials
from vmkv.serve.guided import check_grammar
from vmkv.serve.params import StructuredOutputs
trials = GrammarTrials()
check_grammar(StructuredOutputs(regex="a"), trials)
print(trials._process.pid, flush=True)
check_grammar(StructuredOutputs(json={asked!r}), trials)
input()
"""
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as parent:
        assert parent.stdout is not None
        trials = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    poll = select.poll()
    poll.register(trials, select.POLLIN)
    assert poll.poll(60_000)
    os.close(trials)


@pytest.mark.parametrize("has_one", [False, True])
def test_grammars_need_a_fast_tokenizer(make_engine: MakeEngine, has_one: bool) -> None:
    class Slow:
        is_fast = False

    tokenizer = Slow() if has_one else None
    engine = make_engine(tiny_llama(), tokenizer=tokenizer)
    engine.grammars.prepare()
    with pytest.raises(ConfigError, match="a slow Slow" if has_one else "has none"):
        engine.add([3, 4], guided(regex="a", detokenize=False))


def test_without_llguidance_other_requests_are_served(
    engine_of: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    engine = engine_of()
    engine.grammars.prepare()
    for call in (check_grammar, engine.grammars.matcher):
        with pytest.raises(ConfigError, match="need llguidance"):
            call(StructuredOutputs(regex="a"))
    assert engine.generate("A", SamplingParams(max_tokens=2))[0].error is None


# ---- masks ---------------------------------------------------------------------------------------


def request_of(grammars: Grammars, form: dict[str, Any], **options: Any) -> Request:
    request = Request(0, [2], SamplingParams(stop_token_ids=[END], **options))
    request.matcher = grammars.matcher(StructuredOutputs(**form))
    return request


def allowed(mask: torch.Tensor) -> set[int]:
    bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def test_masks() -> None:
    """Of each request; all tokens without a grammar, and ends where the grammar may end."""
    tokenizer = tiny_tokenizer()
    size = len(tokenizer) + 70  # The model's columns, more than the tokenizer's tokens.
    grammars = Grammars(tokenizer, size, {0, END}, is_pinned=False)
    [a], [b] = tokenizer.encode("a"), tokenizer.encode("b")
    plain = Request(0, [2], SamplingParams())
    assert grammars.masks([plain, None]) is None
    its = [request_of(grammars, {"regex": each}) for each in ("[ab]", "b?", "b{3}c*")]
    late = request_of(grammars, {"regex": "b?"}, min_tokens=2)
    masks = grammars.masks([its[0], plain, its[1], None, its[2], late])
    assert masks is not None
    assert (6, -(-size // 32)) == masks.shape
    assert {a, b} == allowed(masks[0])
    assert {0, END, b} == allowed(masks[2])
    assert allowed(masks[4]) <= set(range(2, len(tokenizer)))
    assert {0, b} == allowed(masks[5])  # Only stop tokens of the request are withheld.
    for row in (1, 3):
        assert set(range(size)) <= allowed(masks[row])


@pytest.mark.parametrize("token_id", [0, 30, 31, 32, 63])
def test_stop_tokens_are_withheld_by_their_bit(token_id: int) -> None:
    from vmkv.serve.guided import _withhold

    mask = torch.full((2,), -1, dtype=torch.int32)
    _withhold(mask, [token_id])
    assert set(range(64)) - {token_id} == allowed(mask)
    _withhold(mask, range(64))
    assert set(range(64)) - {token_id} == allowed(mask)  # Something stays.


def test_grammars_are_compiled_once_for_each_thread() -> None:
    """Copies of one original wait for its lexer, so each thread has one to itself."""
    grammars = Grammars(tiny_tokenizer(), len(tiny_tokenizer()), {END}, is_pinned=False)
    grammars._num_threads = 3
    form = {"json": SCHEMAS["length"]}
    with mock.patch.object(
        Grammars, "_compiled", autospec=True, side_effect=Grammars._compiled
    ) as it:
        requests = [request_of(grammars, form) for _ in range(7)]
        assert 3 == it.call_count
    groups = [each.matcher.group for each in requests]
    assert {0, 1, 2} == set(groups[:3]) == set(groups[3:6])
    expected: dict[int, set[int]] = {}
    tokens = [tiny_tokenizer().encode(text)[-1] for text in ('"', "b", "c")]
    for at, request in enumerate(requests):  # Of different lengths.
        for token_id in tokens[: at % 4]:
            grammars.advance(StructuredOutputs(**form), request.matcher, token_id)
        alone = grammars.masks([request])
        assert alone is not None
        expected[at] = allowed(alone[0])
    together = grammars.masks([*requests, None])
    assert together is not None
    assert expected == {at: allowed(together[at]) for at in range(7)}
    assert expected[0] != expected[1]
    assert (together[7] == -1).all()


def test_the_executor_asks_one_lexer_after_another() -> None:
    """Neighbours go to one thread; those of one lexer are neighbours."""
    grammars = Grammars(tiny_tokenizer(), len(tiny_tokenizer()), {END}, is_pinned=False)
    grammars._num_threads = 2
    requests = [request_of(grammars, {"regex": "a+"}) for _ in range(6)]
    with mock.patch.object(grammars, "_executor", wraps=grammars._executor) as it:
        grammars.masks(requests)
    ((guided, *_), _) = it.unsafe_compute_mask_ptr.call_args
    groups = [requests[at].matcher.group for _, at in guided]
    assert [0, 0, 0, 1, 1, 1] == groups


def test_a_grammar_whose_lexer_failed_is_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies share the lexer, which keeps the states of all outputs and fails for good."""
    import llguidance

    few = llguidance.LLParserLimits(verbose_errors=False, max_lexer_states=20)
    monkeypatch.setattr("vmkv.serve.grammar_trial.limits", lambda: few)
    grammars = Grammars(tiny_tokenizer(), len(tiny_tokenizer()), {END}, is_pinned=False)
    grammars._num_threads = 1
    form = {"regex": "[a-c]*a[a-c]{12}b"}
    tokens = [tiny_tokenizer().encode(each)[-1] for each in "abcacbaabbccabcb"]

    def num_accepted() -> int:
        request, accepted = request_of(grammars, form), iter(tokens)

        def answer() -> None:
            for token_id in accepted:
                grammars.masks([request])
                grammars.advance(StructuredOutputs(**form), request.matcher, token_id)

        with pytest.raises(ConfigError, match="too many states"):
            answer()
        return len(tokens) - len([*accepted]) - 1

    first = num_accepted()
    assert first > 0
    assert first == num_accepted()


@pytest.mark.parametrize(
    "form",
    [
        {"json": {"const": "<think>"}},
        {"json": {"type": "array", "items": {"const": "<think>"}, "minItems": 2, "maxItems": 2}},
        {"regex": "<think>[a-c]"},
        {"choice": ["<think>", "<think>a"]},
        {"grammar": 'start: "a<think>"'},
    ],
)
def test_the_text_of_an_added_token_is_spelled_by_others(form: dict[str, Any]) -> None:
    """The token itself is no text to llguidance, though it is how the tokenizer writes it."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    assert [len(tokenizer) - 1] == tokenizer.encode("<think>", add_special_tokens=False)
    grammars = Grammars(tokenizer, len(tokenizer), {END}, is_pinned=False)
    request, said = request_of(grammars, form), []
    while END not in said:
        masks = grammars.masks([request])
        assert masks is not None
        said.append(max(allowed(masks[0]) & set(range(len(tokenizer)))))
        grammars.advance(StructuredOutputs(**form), request.matcher, said[-1])
    assert "<think>" in tokenizer.decode(said)
    assert len(tokenizer) - 1 not in said


def test_grammars_are_kept_but_few() -> None:
    grammars = Grammars(tiny_tokenizer(), len(tiny_tokenizer()), {END}, is_pinned=False)
    grammars._num_threads = 1
    with mock.patch.object(
        Grammars, "_compiled", autospec=True, side_effect=Grammars._compiled
    ) as it:
        for text in ["a", "b", "a"]:
            grammars.matcher(StructuredOutputs(regex=text))
        assert 2 == it.call_count
        for number in range(80):
            grammars.matcher(StructuredOutputs(regex=f"x{number}"))
            grammars.matcher(StructuredOutputs(regex="b"))
        assert 82 == it.call_count
        grammars.matcher(StructuredOutputs(regex="a"))
        assert 83 == it.call_count


# ---- another process -----------------------------------------------------------------------------


async def test_a_grammar_reaches_the_engines_process(engine_of: MakeEngine) -> None:
    """The client has the answer's text; its engine refuses what it did not notice."""
    engine = engine_of()
    client = hosted(engine)
    params = guided(json=SCHEMAS["nested"])
    outputs = [each async for each in client.stream("A", params)]
    with pytest.raises(ConfigError, match="no output satisfies"):
        await anext(client.stream("A", guided(json=ENDLESS)))
    await client.shutdown()
    last = joined(outputs).outputs[0]
    text, reason = last.text, str(last.finish_reason)
    jsonschema.validate(json.loads(text), SCHEMAS["nested"])
    assert "stop" == reason
