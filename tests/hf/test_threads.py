"""Threads that use one model: calls of `vmkv.generate` in turn, plain passes as without vmkv."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.tiny_models import VERSION, VOCABULARY, tiny_model

import vmkv
from vmkv.hf.proof import prove

PROMPT = [5, 7, 11, 13]


@pytest.fixture(params=["eager", "sdpa"])
def model(request: pytest.FixtureRequest) -> Any:
    """A model of the test."""
    return copy.deepcopy(tiny_model("llama", request.param))


def in_a_thread(function: Callable[[], Any]) -> Any:
    """The result of a function that another thread runs."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def plain_logits(model: Any, num_tokens: int = 30) -> torch.Tensor:
    ids = torch.arange(num_tokens)[None] * 7 % (VOCABULARY - 3) + 3
    with torch.no_grad():
        logits: torch.Tensor = model(ids, use_cache=False).logits
    return logits


@pytest.mark.parametrize("begins_inside", [True, False])
def test_a_plain_pass_is_not_changed_by_a_call_that_ends_or_begins(
    model: Any, begins_inside: bool
) -> None:
    """Between the pass's mask and its layers, `vmkv.generate` of another thread ends, or begins."""
    wanted, chosen = plain_logits(model), model.config._attn_implementation
    inside, outside = threading.Event(), threading.Event()
    said: list[Any] = []

    def hold(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        inside.set()
        assert outside.wait(60)
        return scores

    def serve() -> None:
        options: dict[str, Any] = {"max_new_tokens": 2, "logits_processor": [hold]}
        said.append(vmkv.generate(model, [PROMPT], **options))

    server, me = threading.Thread(target=serve), threading.get_ident()

    def between(*_: Any) -> None:
        if threading.get_ident() != me:
            return
        if begins_inside:
            outside.set()
            server.join()
        elif not inside.is_set():
            server.start()
            assert inside.wait(60)

    prove(model)
    hook = model.model.layers[0].register_forward_pre_hook(between)
    if begins_inside:
        server.start()
        assert inside.wait(60)
    torch.testing.assert_close(plain_logits(model), wanted)
    assert chosen == model.config._attn_implementation
    outside.set()
    server.join()
    hook.remove()
    assert said == [vmkv.generate(model, [PROMPT], max_new_tokens=2)]


def test_a_plain_pass_is_not_changed_by_an_engine_that_ends(model: Any) -> None:
    """Between the pass's mask and its layers another thread closes the engine."""
    if VERSION < (5, 0) and model.config._attn_implementation == "eager":
        pytest.skip("eager attention of 4.57 takes another mask")
    wanted = plain_logits(model)
    engine = vmkv.Engine(model, max_num_seqs=2, max_tokens=100, budget_bytes=8 << 20)
    model.model.layers[0].register_forward_pre_hook(lambda *_: in_a_thread(engine.close))
    torch.testing.assert_close(plain_logits(model), wanted)


def test_a_plain_pass_beside_a_proof_is_not_changed(model: Any) -> None:
    """It has the shape of a packed pass, whose layers get other inputs; no hook hears it."""
    wanted, me = plain_logits(model, 51), threading.get_ident()
    found = []

    def beside(*_: Any) -> None:
        if threading.get_ident() == me:
            found.append(in_a_thread(lambda: plain_logits(model, 51)))

    model.model.layers[1].mlp.register_forward_pre_hook(beside)
    prove(model)
    torch.testing.assert_close(torch.stack(found), wanted.expand(len(found), *wanted.shape))


def test_calls_of_threads_run_in_turn_and_share_a_cache(model: Any) -> None:
    """A call that comes during another one waits for its end; one in the same thread is nested."""
    wanted = vmkv.generate(model, [PROMPT], max_new_tokens=4)
    said: list[Any] = []

    def call(**options: Any) -> None:
        said.append(vmkv.generate(model, [PROMPT], max_new_tokens=4, **options))

    with vmkv.RaggedCache(model.config) as cache:
        second = threading.Thread(target=lambda: call(cache=cache))

        def begin_another(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if ids.shape[1] == len(PROMPT):
                second.start()
                second.join(0.2)
                assert second.is_alive()
                call()
            return scores

        call(cache=cache, logits_processor=[begin_another])
        second.join()
    assert said == [wanted] * 3


def test_a_compiler_may_trace_a_plain_pass_beside_a_call(model: Any) -> None:
    """As one graph, which `"vmkv"` attention would break."""
    wanted, found = plain_logits(model), []

    def beside(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        found.append(in_a_thread(lambda: plain_logits(compiled)))
        return scores

    vmkv.generate(model, [PROMPT], max_new_tokens=1, logits_processor=[beside])
    torch.testing.assert_close(found, [wanted])
