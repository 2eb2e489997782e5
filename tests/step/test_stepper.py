"""Packed steps compute what the plain model computes for each sequence alone, in any mixture.

Eagerly, and in the padded form that graphs have, which runs uncaptured on the host. Captured graphs
are tested in `tests/serve/test_runner_gpu.py` and `tests/hf/test_ragged_logits.py`.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers.hybrids import HYBRIDS, hybrid
from helpers.ragged import alone
from helpers.tiny_models import SERVED_LATELY, VOCABULARY, tiny_model

import vmkv
from vmkv import ConfigError, KVCache, Sequence
from vmkv.hf import proof
from vmkv.hf.configuration import layer_windows
from vmkv.hf.proof import prove
from vmkv.hf.store import CacheOptions, Store
from vmkv.step import Piece, Stepper
from vmkv.step.graphs import GraphSpace
from vmkv.step.piece import packing_order
from vmkv.step.warm_up import warm_up

SLOTS = 5
EAGER_AND_PADDED = pytest.mark.parametrize("padded_tokens", [0, 256], ids=["eager", "padded"])


@dataclass
class Place:
    """A stepper with its model and its cache."""

    model: Any
    cache: KVCache
    stepper: Stepper

    def run(self, spans: list[tuple[int, Sequence, list[int], int]]) -> dict[int, torch.Tensor]:
        """Run `tokens[past:]` of each (slot, row, tokens, past); return the logits by slot."""
        self.cache.grow([(row, len(tokens)) for _, row, tokens, _ in spans])
        pieces = [
            Piece(slot, row.row, past, len(tokens) - past, tokens[past:])
            for slot, row, tokens, past in spans
        ]
        step = self.stepper.run(pieces)
        return {
            pieces[at].slot: logits.clone()
            for at, logits in zip(step.pieces, step.logits, strict=True)
        }

    def plain(self, tokens: list[int]) -> torch.Tensor:
        """Logits of the model after `tokens`, without a cache."""
        with torch.no_grad():
            return self.model(torch.tensor([tokens]), use_cache=False).logits[0, -1]


@pytest.fixture
def make() -> Iterator[Callable[..., Place]]:
    """Make steppers over the rows of tiny models."""
    with contextlib.ExitStack() as stack:

        def place(
            name: str = "llama",
            *,
            num_rows: int = SLOTS + 1,
            padded_tokens: int = 0,
            compile_with: str | None = None,
        ) -> Place:
            model = tiny_model(name) if compile_with is None else copy.deepcopy(tiny_model(name))
            options = CacheOptions(max_tokens=300, max_batch_size=num_rows)
            signatures, calls, _ = prove(model)
            memory = stack.enter_context(
                contextlib.closing(Store(model.config, options, layer_windows(model.config)))
            )
            memory.bind_all(signatures, calls)
            (cache,) = memory.cores
            stepper = stack.enter_context(
                contextlib.closing(
                    Stepper(model, [cache], SLOTS, compile_with=compile_with, calls=calls)
                )
            )
            if compile_with is None:
                stack.enter_context(stepper.attending())
            if padded_tokens:
                stepper.make_graphs(VOCABULARY, torch.float32, padded_tokens)
            return Place(model, cache, stepper)

        yield place


def _tokens(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, VOCABULARY) for _ in range(count)]


@EAGER_AND_PADDED
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
def test_any_mixture_of_pieces_computes_what_each_row_computes_alone(
    make: Callable[..., Place], name: str, padded_tokens: int
) -> None:
    """Rows that begin, continue and decode, in any order, several of each or none."""
    place = make(name, padded_tokens=padded_tokens)
    draw = random.Random(0)
    rows = [place.cache.open() for _ in range(SLOTS)]
    texts = [_tokens(100, seed) for seed in range(SLOTS)]
    past = [0] * SLOTS
    for _ in range(12):
        chosen = draw.sample(range(SLOTS), draw.randint(1, SLOTS))
        ends = {at: min(100, past[at] + draw.choice((1, 1, 2, 9, 30))) for at in chosen}
        ends = {at: end for at, end in ends.items() if end > past[at]}
        spans = [(at, rows[at], texts[at][:end], past[at]) for at, end in ends.items()]
        for at, logits in place.run(spans).items():
            torch.testing.assert_close(
                logits, place.plain(texts[at][: ends[at]]), atol=1e-4, rtol=1e-4
            )
        for at, end in ends.items():
            past[at] = end
        place.cache.check()
    assert sum(past) > 150


def test_layers_that_cannot_be_compiled_run_as_they_are(
    make: Callable[..., Place], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Their weights are joined before, and where the model had them after."""

    def fails(*_: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(torch._dynamo.backends.registry, "lookup_backend", lambda _: fails)
    place = make(compile_with="fails")
    warm_up(place.stepper, 64)
    assert "run as they are" in caplog.text
    tokens = _tokens(30, seed=1)
    (logits,) = place.run([(0, place.cache.open(), tokens, 0)]).values()
    place.stepper.close()
    torch.testing.assert_close(logits, place.plain(tokens), atol=1e-4, rtol=1e-4)


class _WatchedHead:
    """A head over the whole vocabulary that records the number of rows it puts together."""

    num_columns = VOCABULARY

    def __init__(self) -> None:
        self.num_rows: list[int] = []

    def in_part(self, room: torch.Tensor) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def likeliest(self, part: torch.Tensor) -> torch.Tensor:
        return part.argmin(-1)

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        self.num_rows.append(len(part))
        return part + 7


@pytest.mark.parametrize("samples", [(True, True, True), (False, True, False), (False, True, True)])
@pytest.mark.parametrize("count", [1, 4])
def test_logits_are_put_together_when_they_are_read(
    make: Callable[..., Place], count: int, samples: tuple[bool, ...]
) -> None:
    """Only once and only for the rows that sample; the step's tokens are the head's `likeliest`."""
    place, head = make(), _WatchedHead()
    place.stepper.make_graphs(VOCABULARY, torch.float32, 64, head=head)
    rows = [place.cache.open() for _ in range(3)]
    text = _tokens(4, 0)
    place.cache.grow([(row, count) for row in rows])
    told = [
        Piece(at, row.row, 0, count, text[:count], each)
        for at, (row, each) in enumerate(zip(rows, samples, strict=True))
    ]
    step = place.stepper.run(told)
    assert [] == head.num_rows
    if step.token_ids is not None:
        likeliest = step.kept.argmin(-1)
        assert torch.equal(step.token_ids, likeliest)
        assert torch.equal(place.stepper.last_tokens[list(step.pieces)], likeliest)
    assert step.logits is step.logits
    assert [sum(samples)] == head.num_rows
    expected = (place.plain(text[:count]) + 7).expand(sum(samples), -1)
    torch.testing.assert_close(step.logits, expected, atol=1e-4, rtol=1e-4)


@EAGER_AND_PADDED
def test_logits_come_for_the_pieces_that_sample(
    make: Callable[..., Place], padded_tokens: int
) -> None:
    """In the packed order; a step without sampling pieces has none, nor has an empty step."""
    place = make(padded_tokens=padded_tokens)
    rows = [place.cache.open() for _ in range(3)]
    text = _tokens(10, 0)
    place.cache.grow([(row, 10) for row in rows])
    first = [Piece(at, row.row, 0, 6, text[:6], at == 1) for at, row in enumerate(rows)]
    step = place.stepper.run(first)
    assert [1] == list(step.pieces)
    torch.testing.assert_close(step.logits[0], place.plain(text[:6]), atol=1e-4, rtol=1e-4)
    second = [
        Piece(0, rows[0].row, 6, 4, text[6:], samples=True),
        Piece(1, rows[1].row, 6, 1, text[6:7], samples=False),
        Piece(2, rows[2].row, 6, 1, text[6:7], samples=True),
    ]
    step = place.stepper.run(second)
    assert [2, 0] == list(step.pieces)
    for logits, count in zip(step.logits, (7, 10), strict=True):
        torch.testing.assert_close(logits, place.plain(text[:count]), atol=1e-4, rtol=1e-4)
    for pieces in ([second[1]], []):
        step = place.stepper.run(pieces)
        assert 0 == len(step.pieces) == len(step.logits)


@EAGER_AND_PADDED
def test_a_piece_without_tokens_takes_the_last_token_of_its_slot(
    make: Callable[..., Place], padded_tokens: int
) -> None:
    place = make(padded_tokens=padded_tokens)
    rows = [place.cache.open() for _ in range(2)]
    texts = [_tokens(5, 0), _tokens(9, 1)]
    place.run([(at, row, texts[at][:-1], 0) for at, row in enumerate(rows)])
    place.cache.grow([(row, len(text)) for row, text in zip(rows, texts, strict=True)])
    place.stepper.last_tokens[0] = texts[0][-1]
    step = place.stepper.run(
        [
            Piece(0, rows[0].row, 4, 1, None),
            Piece(1, rows[1].row, 8, 1, texts[1][-1:]),  # Its token comes from the host.
        ]
    )
    for text, logits in zip(texts, step.logits, strict=True):
        torch.testing.assert_close(logits, place.plain(text), atol=1e-4, rtol=1e-4)


# ---- captures of frequent sizes -----------------------------------------------------------------


def _begun(place: Place, num_rows: int) -> tuple[list[Sequence], list[list[int]]]:
    """Rows with seven tokens each, and their texts; from now on frequent sizes are captured."""
    rows = [place.cache.open() for _ in range(num_rows)]
    texts = [_tokens(60, seed) for seed in range(num_rows)]
    place.run([(at, row, texts[at][:7], 0) for at, row in enumerate(rows)])
    place.stepper.capture_where_it_pays()
    return rows, texts


def _decode(place: Place, rows: list[Sequence], texts: list[list[int]], num_steps: int) -> None:
    """Run steps of one token for each row and compare the logits with the plain model."""
    for _ in range(num_steps):
        spans = []
        for at, row in enumerate(rows):
            length = row.num_tokens
            spans.append((at, row, texts[at][: length + 1], length))
        for at, logits in place.run(spans).items():
            expected = place.plain(spans[at][2])
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.fixture
def can_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the stepper capture as on a device with graphs; the padded steps run uncaptured."""
    monkeypatch.setattr(Stepper, "can_capture", True)
    monkeypatch.setattr(proof, "refusing_waits", contextlib.nullcontext)


def test_a_size_is_captured_the_third_time(make: Callable[..., Place], can_capture: None) -> None:
    """Other sizes run eagerly, and `close` returns the row for padding."""
    place = make()
    rows, texts = _begun(place, 4)
    _decode(place, rows, texts, 2)
    graphs = place.stepper.decode_graphs
    assert graphs is not None
    assert () == tuple(graphs.captured)
    _decode(place, rows, texts, 1)
    assert [4] == [width for width, _ in graphs.captured]
    _decode(place, rows[:3], texts, 1)  # Fits the graph for 4.
    assert 1 == len(graphs.captured)
    _decode(place, rows[:1], texts, 2)
    assert [4] == [width for width, _ in graphs.captured]
    _decode(place, rows[:1], texts, 2)
    assert [4, 1] == [width for width, _ in graphs.captured]
    _decode(place, rows, texts, 3)
    assert 5 == place.cache.stats().num_sequences
    place.stepper.close()
    assert 4 == place.cache.stats().num_sequences


def test_after_a_failed_capture_steps_run_eagerly(
    make: Callable[..., Place], can_capture: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The capture is tried only once."""
    place = make()
    rows, texts = _begun(place, 2)
    _decode(place, rows, texts, 1)
    graphs = place.stepper.decode_graphs
    assert graphs is not None
    tried = []

    def refuse(*_: object) -> None:
        tried.append(True)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphs, "capture", refuse)
    _decode(place, rows, texts, 8)
    assert [True] == tried
    assert not graphs.captured


def test_without_a_row_for_padding_nothing_is_captured(
    make: Callable[..., Place], can_capture: None
) -> None:
    """All rows are live, so steps run eagerly."""
    place = make(num_rows=2)
    rows, texts = _begun(place, 2)
    _decode(place, rows, texts, 6)
    assert place.stepper.decode_graphs is None


@pytest.mark.parametrize(
    "name", ["llama", "mistral", "gemma3", "gpt_oss", *SERVED_LATELY, *HYBRIDS]
)
def test_generation_through_captured_steps_gives_the_same_tokens(
    name: str, can_capture: None
) -> None:
    """Rows end at different times, so the batch shrinks."""
    model = copy.deepcopy(hybrid(name) if name in HYBRIDS else tiny_model(name))  # Not proven yet.
    prompts = [_tokens(count, seed) for seed, count in enumerate((13, 1, 30, 4, 9))]
    options: dict[str, Any] = {"max_new_tokens": 14, "do_sample": False}
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        said = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        expected.append(said[0].tolist())
    ends = [expected[0][13 + 7], expected[2][30 + 10]]
    stopped = [
        text[
            : next((at + 1 for at in range(len(prompt), len(text)) if text[at] in ends), len(text))
        ]
        for prompt, text in zip(prompts, expected, strict=True)
    ]
    with vmkv.RaggedCache(model.config, max_batch_size=len(prompts) + 1) as cache:
        for _ in range(2):
            assert stopped == vmkv.generate(
                model, prompts, cache=cache, eos_token_id=ends, **options
            )
            assert 0 == cache.stats().num_sequences
            cache.check()


@pytest.mark.skipif(not HYBRIDS, reason="this release has no layers with states in its cache")
@pytest.mark.parametrize("failing", [1, 3])
def test_a_capture_that_fails_leaves_states_alone(
    failing: int, can_capture: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step of padding before a first or second run tells, behind layers with states."""
    model = copy.deepcopy(hybrid(HYBRIDS[0]))
    options: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False}
    prompts = [_tokens(count, seed) for seed, count in enumerate((13, 4))]
    expected = [alone(model, prompt, **options) for prompt in prompts]
    forward, num_runs = GraphSpace.forward, 0

    def fail(self: GraphSpace, *arguments: Any) -> torch.Tensor:
        nonlocal num_runs
        logits = forward(self, *arguments)
        num_runs += 1
        if num_runs == failing:
            raise ConfigError("no kernel for this layer")
        return logits

    monkeypatch.setattr(GraphSpace, "forward", fail)
    with vmkv.RaggedCache(model.config, max_batch_size=len(prompts) + 1) as cache:
        assert expected == vmkv.generate(model, prompts, cache=cache, **options)
    assert failing == num_runs


# ---- refusals, and the order of pieces ----------------------------------------------------------


def test_a_cache_without_layers_is_refused() -> None:
    with (
        KVCache("host", max_tokens=20, max_sequences=2) as empty,
        pytest.raises(ConfigError, match="no layers"),
    ):
        Stepper(tiny_model("llama"), [empty], SLOTS)


def test_pieces_are_packed_by_kind() -> None:
    """Pieces that decode, beginnings by length, continued prompts; each kind in the given order."""
    pieces = [
        Piece(0, 0, 5, 2, [3, 4]),
        Piece(1, 1, 0, 1, [3]),
        Piece(2, 2, 0, 2, [3, 4]),
        Piece(3, 3, 7, 1, None),
        Piece(4, 4, 0, 9, [3] * 9),
    ]
    assert [3, 1, 2, 4, 0] == packing_order(pieces)
