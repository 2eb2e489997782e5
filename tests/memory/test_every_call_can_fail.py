"""Every driver call of every operation fails once, and nothing is left half done.

For each operation: the first call fails, then the second, and so on to the last. Each time what a
user can see is as before, the books balance (I1-I9), the operation succeeds when repeated, and
closing leaves nothing behind. This covers the failures that systems of this kind ship most.

Interrupts come as SIGINT, at some bytecode offsets of each operation (all: see `STRIDE`).

Faults are single; a driver that goes on failing is not played here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from helpers.faulty_cache import PAGE, FaultyCache
from helpers.interrupts import interrupted, offsets

from vmkv import BackendUsage, HostBackend, KVCache, Sequence
from vmkv.core.backend.host import HostFence
from vmkv.core.cache import layer_group, make_ready
from vmkv.core.cache.cost import CostModel
from vmkv.errors import CapacityError, ClosedError, DriverError
from vmkv.testing import FaultInjectingBackend, Scenario, check_every_call_can_fail


def _add_layers(backend: FaultInjectingBackend) -> Scenario:
    state = FaultyCache(backend)
    return state.scenario(lambda: state.add_layers(5))


def _add_layers_to_live_sequences(backend: FaultInjectingBackend) -> Scenario:
    state = FaultyCache(backend)
    state.begin(30)
    state.begin(3)
    return state.scenario(lambda: state.add_layers(5))


def _drop_layers(backend: FaultInjectingBackend) -> Scenario:
    """What cannot be closed yet is closed later, by the pool: the layers are gone."""
    state = FaultyCache(backend)
    state.add_layers(2)
    state.begin(40)

    def drop() -> None:
        state.cache.drop_layers([2, 3])
        assert [0, 1] == state.cache.layers

    return state.scenario(drop)


def _compact(backend: FaultInjectingBackend) -> Scenario:
    """Two groups, and what a window keeps: all are moved, or none."""
    state = FaultyCache(backend, window_tokens=40)
    state.begin(98, step=14)
    state.begin(20)
    state.cache.drop_layers([0, 3])
    homes = dict(state.cache.places)

    def compact() -> None:
        assert homes == state.cache.places
        state.cache.compact()

    return state.scenario(compact)


def _append_small(backend: FaultInjectingBackend) -> Scenario:
    state = FaultyCache(backend)
    sequence = state.begin(0)
    return state.scenario(lambda: sequence.append(1))


def _append_large(backend: FaultInjectingBackend) -> Scenario:
    state = FaultyCache(backend)
    sequence = state.begin(5)
    return state.scenario(lambda: sequence.append(250))  # 62 pages and some: 6 extents.


def _append_over_groups_and_sequences(backend: FaultInjectingBackend) -> Scenario:
    state = FaultyCache(backend, window_tokens=40)
    sequences = [state.begin(num_tokens) for num_tokens in (0, 10, 33)]
    wanted = [(each, each.num_tokens + 20) for each in sequences]
    return state.scenario(lambda: state.cache.grow(wanted))


def _append_past_a_window(backend: FaultInjectingBackend) -> Scenario:
    state = FaultyCache(backend, window_tokens=12)
    sequence = state.begin(96, step=4)
    return state.scenario(lambda: sequence.append(4))


def _append_under_pressure(backend: FaultInjectingBackend) -> Scenario:
    state = FaultyCache(backend, budget_pages=24)
    sequence = state.begin(16)
    state.begin(20)
    state.begin(40).close()  # 19 pages so far; six more do not fit beside them.
    return state.scenario(lambda: sequence.append(24))


def _truncate(backend: FaultInjectingBackend) -> Scenario:
    state = FaultyCache(backend, window_tokens=12)
    sequence = state.begin(96, step=4)
    return state.scenario(lambda: sequence.truncate(0))


def _close_sequence(backend: FaultInjectingBackend) -> Scenario:
    state = FaultyCache(backend, window_tokens=12)
    sequence = state.begin(96, step=4)
    state.begin(4)
    return state.scenario(sequence.close)


def _adopt(backend: FaultInjectingBackend) -> Scenario:
    state = FaultyCache(backend)
    state.begin(4)
    state.begin(40).close()
    return state.scenario(lambda: state.sequences.append(state.cache.open(30)))


def _trim(backend: FaultInjectingBackend) -> Scenario:
    state = FaultyCache(backend, window_tokens=12)
    state.begin(40).truncate(10)
    state.begin(96, step=4)
    state.begin(60).close()
    return state.scenario(state.cache.trim)


def _close_cache(backend: FaultInjectingBackend) -> Scenario:
    state = FaultyCache(backend, window_tokens=12)
    state.begin(96, step=4)
    state.begin(60).close()
    state.is_closing = True  # Its sequences are closed from the first attempt on.
    return state.scenario(state.cache.close)


# ---- sharing ------------------------------------------------------------------------------


def _fork(backend: FaultInjectingBackend) -> Scenario:
    state = FaultyCache(backend, window_tokens=40)
    sequence = state.begin(98, step=14)
    return state.scenario(lambda: state.fork(sequence))


def _fork_under_pressure(backend: FaultInjectingBackend) -> Scenario:
    state = FaultyCache(backend, budget_pages=35)
    sequence = state.begin(98)
    state.begin(40).close()
    return state.scenario(lambda: state.fork(sequence))


def _fork_in_place_of_a_parked_row(backend: FaultInjectingBackend) -> Scenario:
    state = FaultyCache(backend)
    sequence = state.begin(98)
    for each in [state.begin(10) for _ in range(3)]:
        each.close()
    return state.scenario(lambda: state.fork(sequence))


def _fork_into_scrubbed_memory(backend: FaultInjectingBackend) -> Scenario:
    state = FaultyCache(backend, scrub="always")
    sequence = state.begin(98)
    state.begin(1).close()
    state.cache.retire_parked(1, 0)
    state.pool.reclaimer.wait()
    return state.scenario(lambda: state.fork(sequence))


def _copy_on_write(backend: FaultInjectingBackend) -> Scenario:
    state = FaultyCache(backend, window_tokens=200)
    sequence = state.begin(98)
    state.fork(sequence)
    sequence.truncate(50)
    return state.scenario(lambda: sequence.append(5))


def _copy_on_write_under_pressure(backend: FaultInjectingBackend) -> Scenario:
    state = FaultyCache(backend, budget_pages=40)
    sequence = state.begin(98)
    state.fork(sequence)
    state.begin(56).close()
    sequence.truncate(50)
    return state.scenario(lambda: sequence.append(5))


def _give_up_what_is_shared(backend: FaultInjectingBackend) -> Scenario:
    """At an extent's end nothing is copied: what lies behind goes, and is mapped anew."""
    state = FaultyCache(backend)
    sequence = state.begin(98)
    state.fork(sequence)
    sequence.truncate(64)
    return state.scenario(lambda: sequence.append(5))


def _write_what_was_shared(backend: FaultInjectingBackend) -> Scenario:
    """The other holder is gone: the right to write comes back."""
    state = FaultyCache(backend, scrub="always")
    sequence = state.begin(98)
    fork = state.fork(sequence)
    sequence.close()
    state.cache.retire_parked(0, 0)
    fork.truncate(50)
    return state.scenario(lambda: fork.append(5))


def _reorder_by_aliases(backend: FaultInjectingBackend) -> Scenario:
    """Beams that end where an extent does: everything is exchanged, nothing copied."""
    state = FaultyCache(backend)
    beams = [state.begin(64) for _ in range(3)]
    return state.scenario(lambda: state.cache.reorder(beams, [1, 2, 1]))


def _reorder_by_copies(backend: FaultInjectingBackend) -> Scenario:
    """Beams that share their prompt and have tails: a failing copy may cost those."""
    state = FaultyCache(backend)
    sequence = state.begin(64)
    beams = [sequence, state.fork(sequence), state.fork(sequence)]
    state.cache.grow([(beam, 66) for beam in beams])
    state.defined_tokens = 64
    return state.scenario(lambda: state.cache.reorder(beams, [1, 2, 1]))


def _reorder_into_shared_tails(backend: FaultInjectingBackend) -> Scenario:
    """What forks hold on to is not copied into: there is new memory for it."""
    state = FaultyCache(backend, scrub="poison")
    beams = [state.begin(68), state.begin(68)]
    for beam in beams:
        state.fork(beam)
    state.cache.grow([(beam, 70) for beam in beams])
    state.cache.cost_model = CostModel(map_us=1e9)
    state.defined_tokens = 0
    return state.scenario(lambda: state.cache.reorder(beams, [1, 0]))


def _hit_by_alias(backend: FaultInjectingBackend) -> Scenario:
    state = FaultyCache(backend)
    state.say(98)
    return state.scenario(lambda: state.hear(91))  # 80 tokens: 16 pages, and 4 to be copied.


def _hit_by_adoption(backend: FaultInjectingBackend) -> Scenario:
    state = FaultyCache(backend)
    state.begin(4)
    state.say(98).close()
    return state.scenario(lambda: state.hear(98))


def _hit_by_alias_of_a_parked_row_under_pressure(backend: FaultInjectingBackend) -> Scenario:
    state = FaultyCache(backend, budget_pages=62)
    state.say(248).close()  # 32 + 16 + 8 + 4 + 2 pages; 92 tokens are copied, as 24 pages.
    return state.scenario(lambda: state.hear(92))


def _adopt_with_scrubbing(backend: FaultInjectingBackend) -> Scenario:
    state = FaultyCache(backend, scrub="always")
    state.begin(40).close()
    return state.scenario(lambda: state.sequences.append(state.cache.open(30)))


def _append_with_scrubbing(backend: FaultInjectingBackend) -> Scenario:
    state = FaultyCache(backend, scrub="always")
    sequence = state.begin(10)
    state.begin(40).close()
    state.cache.retire_parked(1, 0)
    state.pool.reclaimer.wait()
    return state.scenario(lambda: sequence.append(30))


def _evict_by_extents(backend: FaultInjectingBackend) -> Scenario:
    """Two prefixes lose their ends; what is left of them is whole."""
    state = FaultyCache(backend, budget_pages=60)
    sequence = state.begin(4)
    for each in [state.say(98), state.say(98)]:
        each.close()
    return state.scenario(lambda: sequence.append(100))


def _evict_what_parked_rows_share(backend: FaultInjectingBackend) -> Scenario:
    state = FaultyCache(backend, budget_pages=30)
    sequence = state.say(98)
    fork = state.fork(sequence)
    sequence.close()
    fork.close()
    last = state.begin(4)
    return state.scenario(lambda: last.append(60))


def _set_budget(backend: FaultInjectingBackend) -> Scenario:
    state = FaultyCache(backend)
    state.begin(40)
    state.say(98).close()
    state.begin(60).close()
    return state.scenario(lambda: state.pool.set_budget(20 * PAGE))


def _make_ready(backend: FaultInjectingBackend) -> Scenario:
    """Evicts, and converts what it gets: extents of eight pages and two for two of four and two."""
    state = FaultyCache(backend, budget_pages=20)
    sequence = state.begin(16)
    state.begin(20)
    state.begin(40).close()
    return state.scenario(lambda: make_ready(state.cache, [(sequence, 40)], 16, wait=True))


_MAPS = {"mem_create", "mem_map", "mem_set_access"}
_EXCHANGES = {"record_fence", "mem_unmap", "mem_map", "mem_set_access"}


def _swapping(
    backend: FaultInjectingBackend, num_tokens: int = 150
) -> tuple[FaultyCache, Sequence]:
    state = FaultyCache(backend, window_tokens=40, host_budget_bytes=256 * PAGE)
    return state, state.begin(num_tokens)


def _swap_out(backend: FaultInjectingBackend) -> Scenario:
    """There and back: a failure leaves the sequence whole, on one side or the other."""
    state, sequence = _swapping(backend)
    moves: list[str] = []

    def there_and_back() -> None:
        if "out" not in moves:
            if sequence.is_resident:
                sequence.swap_out()
            moves.append("out")
        sequence.swap_in()
        moves.append("in")

    def observe() -> object:
        """Its content, wherever it is: read after it came back, without faults."""
        if state.is_closing or sequence.is_resident:
            return state.observe()
        return observed

    observed = state.observe()
    return Scenario(there_and_back, observe, state.cache.check, state.close_cache)


def _spill(backend: FaultInjectingBackend) -> Scenario:
    state, sequence = _swapping(backend)
    return state.scenario(lambda: sequence.spill(20 * PAGE))


def _unspill(backend: FaultInjectingBackend) -> Scenario:
    state, sequence = _swapping(backend)
    sequence.spill(20 * PAGE)
    return state.scenario(sequence.unspill)


OPERATIONS = {
    # operation: (how to make it, the primitives it is known to consist of)
    "add_layers": (_add_layers, {"address_reserve"}),
    "add_layers to live sequences": (
        _add_layers_to_live_sequences,
        {"address_reserve", "mem_create", "mem_map", "mem_set_access"},
    ),
    "drop_layers": (_drop_layers, {"record_fence", "mem_unmap", "address_free"}),
    "compact": (_compact, {"address_reserve", "address_free", *_MAPS, *_EXCHANGES}),
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
    "truncate": (_truncate, {"join_streams", "record_fence"}),
    "close a sequence": (_close_sequence, {"record_fence"}),
    "adopt": (_adopt, {"join_streams"}),
    "trim": (_trim, {"record_fence", "mem_unmap", "mem_release"}),
    "close the cache": (
        _close_cache,
        {"record_fence", "mem_unmap", "mem_release", "address_free"},
    ),
    "fork": (_fork, {"join_streams", "copy", *_MAPS}),
    "fork under pressure": (_fork_under_pressure, {"copy", *_EXCHANGES}),
    "fork in place of a parked row": (_fork_in_place_of_a_parked_row, {"copy", *_EXCHANGES}),
    "fork into scrubbed memory": (_fork_into_scrubbed_memory, {"fill", "copy"}),
    "copy on write": (_copy_on_write, {"address_reserve", "copy", "address_free", *_EXCHANGES}),
    "copy on write under pressure": (_copy_on_write_under_pressure, {"copy", *_EXCHANGES}),
    "give up what is shared": (_give_up_what_is_shared, _EXCHANGES),
    "write what was shared": (_write_what_was_shared, {"mem_set_access", "fill"}),
    "reorder by aliases": (_reorder_by_aliases, _EXCHANGES),
    "reorder by copies": (_reorder_by_copies, {"join_streams", "copy"}),
    "reorder into shared tails": (_reorder_into_shared_tails, {"copy", "fill", *_EXCHANGES}),
    "hit by alias": (_hit_by_alias, {"join_streams", "copy", *_MAPS}),
    "hit by adoption": (_hit_by_adoption, {"join_streams"}),
    "hit by alias of a parked row under pressure": (
        _hit_by_alias_of_a_parked_row_under_pressure,
        {"copy", *_EXCHANGES},
    ),
    "adopt with scrubbing": (_adopt_with_scrubbing, {"join_streams", "fill"}),
    "append with scrubbing": (_append_with_scrubbing, {"mem_map", "mem_set_access", "fill"}),
    "evict by extents": (_evict_by_extents, _EXCHANGES),
    "evict what parked rows share": (_evict_what_parked_rows_share, _EXCHANGES),
    "swap out and in": (
        _swap_out,
        {"mem_create", "join_streams", "stream_wait", "copy", *_EXCHANGES},
    ),
    "spill": (_spill, {"mem_create", "join_streams", "copy", "address_reserve", *_EXCHANGES}),
    "unspill": (_unspill, {"copy", *_EXCHANGES}),
    "make_ready": (_make_ready, {"record_fence", "mem_unmap", "mem_release", "mem_create"}),
    "set_budget": (_set_budget, {"record_fence", "mem_unmap", "mem_release"}),
}


@pytest.mark.parametrize("is_out_of_memory", [False, True], ids=["broken", "full"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_call_can_fail(
    operation: str, is_out_of_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unchanged on failure, whichever call fails; and the scenario makes the calls it is for."""
    monkeypatch.setattr(layer_group, "UNDERREAD_TOKENS", 0)  # So that short windows move.
    make_scenario, primitives = OPERATIONS[operation]
    struck = check_every_call_can_fail(
        lambda: HostBackend(PAGE), make_scenario, is_out_of_memory=is_out_of_memory
    )
    assert primitives <= set(struck)


@pytest.mark.parametrize(
    "operation", ["copy on write", "reorder by aliases", "reorder into shared tails", "spill"]
)
def test_every_wait_can_be_interrupted(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who presses Ctrl-C while the device works has what was there before, and can go on."""
    monkeypatch.setattr(layer_group, "UNDERREAD_TOKENS", 0)
    wait = HostFence.wait
    for interrupted_at in itertools.count(1):
        host = HostBackend(PAGE)
        scenario = OPERATIONS[operation][0](FaultInjectingBackend(host))
        before, waits = scenario.observe(), itertools.count(1)

        def interrupted(
            fence: HostFence, at: int = interrupted_at, waits: Iterator[int] = waits
        ) -> None:
            if next(waits) == at:
                raise KeyboardInterrupt
            wait(fence)

        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr(HostFence, "wait", interrupted)
            scenario.operation()
            break
        scenario.check()
        assert before == scenario.observe()
        scenario.operation()
        scenario.check()
        scenario.close()
        assert BackendUsage() == host.usage()
    assert interrupted_at > 1
    scenario.close()


# ---- interrupts ---------------------------------------------------------------------------


def _save(backend: Any, path: Path) -> Scenario:
    state = FaultyCache(backend, window_tokens=40)
    sequence = state.say(98)
    return state.scenario(lambda: sequence.save(path))


def _load(backend: Any, path: Path) -> Scenario:
    state = FaultyCache(backend)
    state.say(98).save(path)
    return state.scenario(lambda: state.sequences.append(state.cache.load(path)))


def _close_lost(cache: KVCache, known: set[int]) -> None:
    """Close sequences that an interrupted caller did not get; they are listed."""
    for sequence in [] if cache.is_closed else cache.sequences:
        if id(sequence) not in known:
            sequence.close()


@pytest.mark.parametrize("name", [*OPERATIONS, "save", "load"])
def test_an_operation_can_be_interrupted_at_any_offset(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It has happened then, or it has not."""
    monkeypatch.setattr(layer_group, "UNDERREAD_TOKENS", 0)  # So that short windows move.
    files = {"save": _save, "load": _load}

    def make() -> tuple[HostBackend, Scenario]:
        host: Any = HostBackend(PAGE)
        path = tmp_path / "sequence"
        return host, files[name](host, path) if name in files else OPERATIONS[name][0](host)

    _, scenario = make()
    before = scenario.observe()
    scenario.operation()
    after = scenario.observe()
    scenario.close()
    for at in offsets(name):
        host, scenario = make()
        cache: KVCache = scenario.check.__self__  # type: ignore[attr-defined]
        known = {id(each) for each in cache.sequences}
        is_sent, is_interrupted = interrupted(scenario.operation, at)
        assert is_sent == is_interrupted
        scenario.check()
        if is_interrupted:
            _close_lost(cache, known)
            seen = scenario.observe()
            assert seen in (before, after), f"half done after SIGINT at offset {at}"
            if seen == before:
                scenario.operation()
                scenario.check()
        if not cache.is_closed:
            try:
                with_one_more = cache.open()
                with_one_more.append(1)
                with_one_more.close()
            except CapacityError:
                pass  # Other sequences have every row, or all memory.
            cache.check()
        scenario.close()
        assert BackendUsage() == host.usage(), f"after SIGINT at offset {at}"
        host.close()
        if not is_sent:
            break


@pytest.mark.parametrize("fail_at", [1, 2, 3])
def test_a_cache_whose_close_failed_is_not_used(fail_at: int) -> None:
    """Its addresses may be free already: only another `close` is left."""
    backend = FaultInjectingBackend(HostBackend(PAGE))
    state = FaultyCache(backend)
    state.say(20).close()
    backend.arm(fail_at)
    with pytest.raises(DriverError):
        state.cache.close()
    backend.arm(0)
    state.cache.pool.trim()
    with pytest.raises(ClosedError):
        state.cache.open()
    state.close_cache()
    assert BackendUsage() == backend.usage()
