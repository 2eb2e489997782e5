"""Attention in chunks of the sequence (Llama 4), in packed steps.

Tokens of the tiny model, whose prompts span chunks of 8 tokens, are compared in the tests of each
interface, by `SERVED_LATELY`.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from helpers.ragged import alone, check_generate, check_padded_engine, random_prompts
from helpers.tiny_models import (
    SERVED_LATELY,
    WINDOW,
    generate,
    left_padded_prompt,
    redraw_weights,
    tiny_config,
    tiny_model,
)
from transformers import AutoModelForCausalLM
from transformers.models.llama4 import modeling_llama4

import vmkv
from vmkv import ConfigError, Engine, SamplingParams, VMKVCache
from vmkv.attention import Call, register, registry
from vmkv.attention.append import append
from vmkv.attention.sdpa import SdpaBackend
from vmkv.hf.layers import VirtualLayer
from vmkv.hf.proof import prove
from vmkv.serve.runner import RunnerOptions
from vmkv.step import Piece
from vmkv.step.piece import cut_at_chunks
from vmkv.units import MiB

if "llama4" not in SERVED_LATELY:
    pytest.skip("this release counts the positions of Llama 4 elsewhere", allow_module_level=True)

BUDGET_BYTES = 64 * MiB
#: An engine whose second step has a prompt of nine tokens' last two: a chunk ends between them.
CUT: dict[str, Any] = {
    "max_num_seqs": 1,
    "max_num_batched_tokens": 7,
    "budget_bytes": BUDGET_BYTES,
}


@pytest.fixture
def model() -> Any:
    return copy.deepcopy(tiny_model("llama4"))  # A copy that is not proven yet.


def test_the_proof_finds_the_chunks(model: Any) -> None:
    """Of the layers with rotary embeddings; the last one sees all tokens."""
    assert dict.fromkeys(range(3), WINDOW) == prove(model).calls.chunks


def test_a_mask_in_other_chunks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the proof's sequences are shorter than a chunk."""
    config = tiny_config("llama4")
    config.attention_chunk_size = 100
    model = AutoModelForCausalLM.from_config(config).eval()
    redraw_weights(model, 0)
    prove(model)
    causal = modeling_llama4.create_causal_mask
    monkeypatch.setattr(modeling_llama4, "create_chunked_causal_mask", causal)
    with pytest.raises(ConfigError, match="layer 0 attends in other chunks than it states"):
        prove(copy.deepcopy(model))


def test_pieces_are_cut_where_chunks_end() -> None:
    """Parts keep the slot, the row and their tokens; the last one alone samples."""
    pieces = [
        Piece(0, 5, 6, 12, list(range(12))),
        Piece(1, 7, 8, 8, list(range(8))),
        Piece(2, 9, 31, 1, None),
    ]
    whole, parts = cut_at_chunks(pieces, {8})
    assert [0, 0, 0, 1, 2] == whole
    assert parts == [
        Piece(0, 5, 6, 2, [0, 1], False),
        Piece(0, 5, 8, 8, list(range(2, 10)), False),
        Piece(0, 5, 16, 2, [10, 11]),
        *pieces[1:],
    ]
    assert ([0, 1, 2], pieces) == cut_at_chunks(pieces, ())


@pytest.mark.parametrize("chunk", [1, 3, 16, 8192])
def test_prompts_in_passes_of_any_size(model: Any, chunk: int) -> None:
    """Passes end within chunks, at their ends, and span several."""
    check_generate(model, random_prompts(40, 1, 8, 9, 16, 25), 12, max_num_batched_tokens=chunk)


def test_engines_with_steps_as_for_graphs(model: Any) -> None:
    """Decode steps are captured; steps with prompts are not, since their tiles may span chunks."""
    check_padded_engine(model, random_prompts(40, 1, 8, 25, 9), 12, is_mixed=False)


def test_a_prompt_that_ends_one_token_past_a_chunk_is_no_decode_step(model: Any) -> None:
    """Its last two tokens are two pieces of one token, and captured steps have one of each slot."""
    [prompt] = random_prompts(9)
    options = RunnerOptions(capture=True, show_progress=False)
    with Engine(model, runner="graphs", runner_options=options, **CUT) as engine:
        [output] = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=4))
    said = alone(model, prompt, max_new_tokens=4, do_sample=False)
    assert said == [*prompt, *output.outputs[0].token_ids]


class Appending(SdpaBackend):
    """Appends by itself, as FlashAttention-2 does, whose launch appends all entries at once."""

    name, appends = "appending", True
    #: Rows of the calls that appended.
    rows: ClassVar[list[list[int]]] = []

    def attend(self, call: Call) -> torch.Tensor:
        """Append, and attend."""
        if call.new is not None:
            self.rows.append(call.batch.row_indices.tolist())
            append(call, call.new)
        return super().attend(replace(call, new=None))


def test_parts_of_one_row_are_not_appended_by_attention(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in layers without chunks: one of the parts reads what the other writes."""
    monkeypatch.setattr(registry, "_FACTORIES", dict(registry._FACTORIES))
    register("appending", Appending)
    for prompt in random_prompts(9, 16):
        with Engine(model, runner="eager", attention_backend="appending", **CUT) as engine:
            [output] = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=4))
        said = alone(model, prompt, max_new_tokens=4, do_sample=False)
        assert said == [*prompt, *output.outputs[0].token_ids]
    assert all(len({*rows}) == len(rows) for rows in Appending.rows)


def test_layers_with_chunks_are_not_compiled(model: Any) -> None:
    """The engine says so where it was asked for, and serves them as they are by default."""
    options = RunnerOptions(compile_layers=True, show_progress=False)
    with pytest.raises(ConfigError, match="attend in chunks cannot be compiled"):
        Engine(model, runner="graphs", runner_options=options, budget_bytes=BUDGET_BYTES)


def test_captured_decoding_leaves_chunks_to_the_model(model: Any) -> None:
    """They begin after the padding, which captured steps do not know; the reason is kept."""
    inputs = left_padded_prompt()
    expected = generate(model, inputs, None)
    with (
        vmkv.capture_decoding(model) as capture,
        VMKVCache(model.config, budget_bytes=BUDGET_BYTES) as cache,
    ):
        assert torch.equal(expected, generate(model, inputs, cache))
        assert ["chunks of its attention begin after the padding"] == capture.refusals


def test_the_first_chunk_is_attended_in_place(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In `model.generate`; later ones through their mask."""
    lengths = []
    attend = VirtualLayer.attend

    def noting(layer: VirtualLayer, *given: Any) -> Any:
        if layer.window_tokens is not None:
            lengths.append(layer.get_seq_length())
        return attend(layer, *given)

    monkeypatch.setattr(VirtualLayer, "attend", noting)
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    expected = generate(model, inputs, None)
    model.set_attn_implementation("vmkv")
    with VMKVCache(model.config, budget_bytes=BUDGET_BYTES) as cache:
        assert torch.equal(expected, generate(model, inputs, cache))
    assert {5, 6, 7, 8} == {*lengths}
