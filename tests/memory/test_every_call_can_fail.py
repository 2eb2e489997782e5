"""Every driver call of every operation fails once, and nothing is left half done.

For each operation: the first call fails, then the second, and so on to the last. Each time what a
user can see is as before, the books balance (I1-I9), the operation succeeds when repeated, and
closing leaves nothing behind. This covers the failures that systems of this kind ship most.

Faults are single; a driver that goes on failing is not played here.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import pytest
import torch

from vmkv import ExtentPool, HostBackend, KVCache, Sequence
from vmkv.cache import layer_group
from vmkv.testing import FaultInjectingBackend, Scenario, check_every_call_can_fail
from vmkv.units import KiB

PAGE = 4 * KiB
# A token of 2 layers x 2 heads x 32 x 4 B x (K and V) is 1 KiB: four tokens in a page.
TOKENS_PER_PAGE = 4


class _State:
    """A cache with some history, over a backend that fails on command."""

    def __init__(
        self,
        backend: FaultInjectingBackend,
        *,
        window_tokens: int | None = None,
        budget_pages: int = 256,
        keep_free_bytes: int | None = None,
    ):
        self.backend = backend
        self.pool = ExtentPool(
            backend, budget_pages * PAGE, keep_free_bytes=keep_free_bytes, close_when_unused=True
        )
        self.cache = KVCache(self.pool, max_tokens=400, max_sequences=4, layers_per_group=2)
        self.add_layers(0)
        if window_tokens is not None:
            self.add_layers(2, window_tokens=window_tokens)
        self.sequences: list[Sequence] = []
        self.is_closing = False

    def add_layers(self, first: int, window_tokens: int | None = None) -> None:
        self.cache.add_layers(
            range(first, first + 2),
            num_kv_heads=2,
            head_dim=32,
            dtype=torch.float32,
            window_tokens=window_tokens,
        )

    def begin(self, num_tokens: int, step: int = 0) -> Sequence:
        """A live sequence of so many tokens, of known content; with `step`, grown by so many."""
        sequence = self.cache.open(num_tokens)
        for length in range(step, num_tokens, step) if step else ():
            self.cache.grow([(sequence, length)])
        self.cache.grow([(sequence, num_tokens)])
        self.cache.check()  # Before writing: where memory is missing, that would be a fault.
        for layer in self.cache.layers:
            _, at = self.cache.place(layer)
            kept = self.kept(sequence, layer)
            for value, tensor in enumerate((sequence.keys(layer), sequence.values(layer))):
                tensor[kept:] = 100 * len(self.sequences) + 10 * at + value
        self.sequences.append(sequence)
        return sequence

    def kept(self, sequence: Sequence, layer: int) -> int:
        """The first token that is still there for certain."""
        group, _ = self.cache.place(layer)
        window = group.window_tokens
        return 0 if window is None else max(0, sequence.num_tokens - window + 1)

    def observe(self) -> object:
        """What a user sees: layers, live sequences, and every byte of their content."""
        if self.is_closing:
            return None
        cache = self.cache
        live = [each for each in self.sequences if not each.is_closed]
        return (
            sorted(cache.layers),
            cache.stats().num_sequences,
            cache.stats().used_bytes,
            cache.stats().reserved_bytes,
            sorted(cache._rows.live),
            [each.num_tokens for each in live],
            [
                zlib.crc32(tensor[self.kept(each, layer) :].numpy().tobytes())
                for each in live
                for layer in cache.layers
                for tensor in (each.keys(layer), each.values(layer))
            ],
        )

    def close_cache(self) -> None:
        self.is_closing = True
        self.cache.close()

    def scenario(self, operation: Callable[[], object]) -> Scenario:
        return Scenario(operation, self.observe, self.cache.check, self.close_cache)


def _add_layers(backend: FaultInjectingBackend) -> Scenario:
    state = _State(backend)
    return state.scenario(lambda: state.add_layers(5))


def _add_layers_to_live_sequences(backend: FaultInjectingBackend) -> Scenario:
    state = _State(backend)
    state.begin(30)
    state.begin(3)
    return state.scenario(lambda: state.add_layers(5))


def _append_small(backend: FaultInjectingBackend) -> Scenario:
    state = _State(backend)
    sequence = state.begin(0)
    return state.scenario(lambda: sequence.append(1))


def _append_large(backend: FaultInjectingBackend) -> Scenario:
    state = _State(backend)
    sequence = state.begin(5)
    return state.scenario(lambda: sequence.append(250))  # 62 pages and some: 6 extents.


def _append_over_groups_and_sequences(backend: FaultInjectingBackend) -> Scenario:
    state = _State(backend, window_tokens=40)
    sequences = [state.begin(num_tokens) for num_tokens in (0, 10, 33)]
    wanted = [(each, each.num_tokens + 20) for each in sequences]
    return state.scenario(lambda: state.cache.grow(wanted))


def _append_past_a_window(backend: FaultInjectingBackend) -> Scenario:
    state = _State(backend, window_tokens=12)
    sequence = state.begin(96, step=4)
    return state.scenario(lambda: sequence.append(4))


def _append_under_pressure(backend: FaultInjectingBackend) -> Scenario:
    state = _State(backend, budget_pages=24)
    sequence = state.begin(16)
    state.begin(20)
    state.begin(40).close()  # 19 pages so far; six more do not fit beside them.
    return state.scenario(lambda: sequence.append(24))


def _append_at_a_watermark(backend: FaultInjectingBackend) -> Scenario:
    """With nothing kept free, every page that leaves a window is released at once."""
    state = _State(backend, window_tokens=12, keep_free_bytes=0)
    sequence = state.begin(96, step=4)
    return state.scenario(lambda: sequence.append(4))


def _truncate(backend: FaultInjectingBackend) -> Scenario:
    state = _State(backend, window_tokens=12)
    sequence = state.begin(96, step=4)
    return state.scenario(lambda: sequence.truncate(0))


def _close_sequence(backend: FaultInjectingBackend) -> Scenario:
    state = _State(backend, window_tokens=12)
    sequence = state.begin(96, step=4)
    state.begin(4)
    return state.scenario(sequence.close)


def _adopt(backend: FaultInjectingBackend) -> Scenario:
    state = _State(backend)
    state.begin(4)
    state.begin(40).close()
    return state.scenario(lambda: state.sequences.append(state.cache.open(30)))


def _trim(backend: FaultInjectingBackend) -> Scenario:
    state = _State(backend, window_tokens=12)
    state.begin(40).truncate(10)
    state.begin(96, step=4)
    state.begin(60).close()
    return state.scenario(state.cache.trim)


def _trim_at_a_watermark(backend: FaultInjectingBackend) -> Scenario:
    state = _State(backend, keep_free_bytes=0)
    state.begin(4)
    state.begin(61).close()
    return state.scenario(state.cache.trim)


def _close_cache(backend: FaultInjectingBackend) -> Scenario:
    state = _State(backend, window_tokens=12)
    state.begin(96, step=4)
    state.begin(60).close()
    state.is_closing = True  # Its sequences are closed from the first attempt on.
    return state.scenario(state.cache.close)


OPERATIONS = {
    # operation: (how to make it, the primitives it is known to consist of)
    "add_layers": (_add_layers, {"address_reserve"}),
    "add_layers to live sequences": (
        _add_layers_to_live_sequences,
        {"address_reserve", "mem_create", "mem_map", "mem_set_access"},
    ),
    "append small": (_append_small, {"mem_create", "mem_map", "mem_set_access"}),
    "append large": (_append_large, {"mem_create", "mem_map", "mem_set_access"}),
    "append over groups": (
        _append_over_groups_and_sequences,
        {"mem_create", "mem_map", "mem_set_access"},
    ),
    "append past a window": (_append_past_a_window, {"record_fence"}),
    "append under pressure": (
        _append_under_pressure,
        {"record_fence", "mem_unmap", "mem_map", "mem_set_access"},
    ),
    "append at a watermark": (_append_at_a_watermark, {"record_fence", "mem_unmap", "mem_release"}),
    "truncate": (_truncate, {"record_fence"}),
    "close a sequence": (_close_sequence, {"record_fence"}),
    "adopt": (_adopt, {"join_streams"}),
    "trim": (_trim, {"record_fence", "mem_unmap", "mem_release"}),
    "trim at a watermark": (_trim_at_a_watermark, {"record_fence", "mem_unmap", "mem_release"}),
    "close the cache": (
        _close_cache,
        {"record_fence", "mem_unmap", "mem_release", "address_free"},
    ),
}


@pytest.mark.parametrize("is_out_of_memory", [False, True], ids=["broken", "full"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_call_can_fail(
    operation: str, is_out_of_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unchanged on failure, whichever call fails; and the scenario makes the calls it is for."""
    monkeypatch.setattr(layer_group, "_UNDERREAD_TOKENS", 0)  # So that short windows move.
    make_scenario, primitives = OPERATIONS[operation]
    struck = check_every_call_can_fail(
        lambda: HostBackend(PAGE), make_scenario, is_out_of_memory=is_out_of_memory
    )
    assert primitives <= set(struck)
