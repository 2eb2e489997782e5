"""Every driver call of every operation fails once, and no operation is left half done.

For each operation the first call fails, then the second, and so on to the last. Each time the
visible state is as before, the books balance (I1-I9), the operation succeeds when repeated, and
closing leaves nothing behind.

SIGINT is sent at some bytecode offsets of each operation (at all of them: see `STRIDE`).

One call fails at a time; a driver that goes on failing is not tested here.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.faulty_cache import PAGE, FaultyCache
from helpers.interrupts import interrupted, offsets

from vmkv import BackendUsage, HostBackend, KVCache, Sequence
from vmkv.core.backend.host import HostFence
from vmkv.core.cache import StateShape, disk, layer_group
from vmkv.core.cache.forking import CostModel
from vmkv.errors import CapacityError, ClosedError, DriverError
from vmkv.testing import FaultInjectingBackend, Scenario, check_every_call_can_fail
from vmkv.units import KiB

_MAPS = {"mem_create", "mem_map", "mem_set_access"}
_WITH_HOST: dict[str, Any] = {"window_tokens": 40, "host_budget_bytes": 256 * PAGE}
_EXCHANGES = {"record_fence", "mem_unmap", "mem_map", "mem_set_access"}
Prepared = Callable[[], object] | Scenario
#: By name: a maker of the operation's scenario, and the primitives that it must call.
OPERATIONS: dict[str, tuple[Callable[[Any], Scenario], set[str]]] = {}


def operation(*primitives: str, **options: Any) -> Callable[[Any], Any]:
    """Register an operation on a cache that is made with `options`."""

    def register(prepare: Callable[[FaultyCache], Prepared]) -> Callable[[Any], Scenario]:
        def make(backend: Any) -> Scenario:
            state = FaultyCache(backend, **options)
            made = prepare(state)
            return made if isinstance(made, Scenario) else state.scenario(made)

        OPERATIONS[prepare.__name__.strip("_").replace("_", " ")] = make, set(primitives)
        return make

    return register


@operation("address_reserve")
def _add_layers(state: FaultyCache) -> Prepared:
    return lambda: state.add_layers(5)


@operation("address_reserve", *_MAPS)
def _add_layers_to_live_sequences(state: FaultyCache) -> Prepared:
    state.begin(30)
    state.begin(3)
    return lambda: state.add_layers(5)


@operation("record_fence", "mem_unmap", "address_free")
def _drop_layers(state: FaultyCache) -> Prepared:
    """Groups that cannot be closed yet are closed later, by the pool: the layers are gone."""
    state.add_layers(2)
    state.begin(40)

    def drop() -> None:
        state.cache.drop_layers([2, 3])
        assert [0, 1] == state.cache.layers

    return drop


@operation("address_reserve", "address_free", *_MAPS, *_EXCHANGES, window_tokens=40)
def _compact(state: FaultyCache) -> Prepared:
    """Two groups, one with a window: all of their pages are moved, or none."""
    state.begin(98, step=14)
    state.begin(20)
    state.cache.drop_layers([0, 3])
    homes = dict(state.cache.places)

    def compact() -> None:
        assert homes == state.cache.places
        state.cache.compact()

    return compact


@operation(*_MAPS)
def _append_small(state: FaultyCache) -> Prepared:
    sequence = state.begin(0)
    return lambda: sequence.append(1)


@operation(*_MAPS)
def _append_large(state: FaultyCache) -> Prepared:
    sequence = state.begin(5)
    return lambda: sequence.append(250)  # 62 pages and some: 6 extents.


@operation(*_MAPS, window_tokens=40)
def _append_over_groups(state: FaultyCache) -> Prepared:
    sequences = [state.begin(num_tokens) for num_tokens in (0, 10, 33)]
    wanted = [(each, each.num_tokens + 20) for each in sequences]
    return lambda: state.cache.grow(wanted)


@operation("record_fence", window_tokens=12)
def _append_past_a_window(state: FaultyCache) -> Prepared:
    sequence = state.begin(96, step=4)
    return lambda: sequence.append(4)


@operation(*_EXCHANGES, budget_pages=24)
def _append_under_pressure(state: FaultyCache) -> Prepared:
    sequence = state.begin(16)
    state.begin(20)
    state.begin(40).close()  # 19 pages so far; six more do not fit beside them.
    return lambda: sequence.append(24)


@operation("join_streams", "record_fence", window_tokens=12)
def _truncate(state: FaultyCache) -> Prepared:
    sequence = state.begin(96, step=4)
    return lambda: sequence.truncate(0)


@operation("record_fence", window_tokens=12)
def _close_a_sequence(state: FaultyCache) -> Prepared:
    sequence = state.begin(96, step=4)
    state.begin(4)
    return sequence.close


@operation("record_fence", **_WITH_HOST)
def _close_a_swapped_sequence(state: FaultyCache) -> Prepared:
    """The extents that it shares have stayed mapped."""
    sequence = state.fork(state.begin(96, step=4))
    state.cache.grow([(sequence, 120)])
    sequence.swap_out()
    assert state.cache.groups[1].table.rows[sequence.row].first_page

    def observe() -> object:
        return state.is_closing or (sequence.is_closed, sequence.is_resident)

    return Scenario(sequence.close, observe, state.cache.check, state.close_cache)


@operation("join_streams", "record_fence", window_tokens=12)
def _truncate_to_nothing_with_states(state: FaultyCache) -> Prepared:
    """A checkpoint and the window's pages go, each behind a fence."""
    state.cache.add_states({9: [StateShape((100,), torch.float32)]})
    sequence = state.begin(96, step=4)
    sequence.checkpoint()
    state.cache.grow([(sequence, 100)])
    return lambda: sequence.truncate(0)


@operation("record_fence", window_tokens=12)
def _close_a_sequence_at_a_checkpoint(state: FaultyCache) -> Prepared:
    """The window has moved, and the checkpoint is dropped for the newer state."""
    state.cache.add_states({9: [StateShape((100,), torch.float32)]})
    sequence = state.begin(96, step=4)
    sequence.checkpoint()

    return sequence.close


@operation("join_streams")
def _adopt(state: FaultyCache) -> Prepared:
    state.begin(4)
    state.begin(40).close()
    return lambda: state.sequences.append(state.cache.open(30))


@operation("record_fence", "mem_unmap", "mem_release", window_tokens=12)
def _trim(state: FaultyCache) -> Prepared:
    state.begin(40).truncate(10)
    state.begin(96, step=4)
    state.begin(60).close()
    return state.cache.trim


@operation("record_fence", "mem_unmap", window_tokens=12)
def _make_room_ahead(state: FaultyCache) -> Prepared:
    state.begin(40).truncate(10)
    state.begin(60).close()
    state.begin(60).close()
    pool = state.cache.pool
    return lambda: pool.make_room_ahead(pool.budget_bytes)


@operation("record_fence", "mem_unmap", "mem_release", "address_free", window_tokens=12)
def _close_the_cache(state: FaultyCache) -> Prepared:
    state.begin(96, step=4)
    state.begin(60).close()
    state.is_closing = True  # The first attempt closes its sequences.
    return state.cache.close


# ---- sharing ------------------------------------------------------------------------------


@operation("join_streams", "copy", *_MAPS, window_tokens=40)
def _fork(state: FaultyCache) -> Prepared:
    sequence = state.begin(98, step=14)
    return lambda: state.fork(sequence)


@operation("copy", *_EXCHANGES, budget_pages=35)
def _fork_under_pressure(state: FaultyCache) -> Prepared:
    sequence = state.begin(98)
    state.begin(40).close()
    return lambda: state.fork(sequence)


@operation("copy", *_EXCHANGES)
def _fork_in_place_of_a_parked_row(state: FaultyCache) -> Prepared:
    sequence = state.begin(98)
    for each in [state.begin(10) for _ in range(3)]:
        each.close()
    return lambda: state.fork(sequence)


@operation("fill", "copy", scrub="always")
def _fork_into_scrubbed_memory(state: FaultyCache) -> Prepared:
    sequence = state.begin(98)
    state.begin(1).close()
    state.cache.rows.retire_parked(1)
    state.pool.reclaimer.wait()
    return lambda: state.fork(sequence)


@operation("address_reserve", "copy", "address_free", *_EXCHANGES, window_tokens=200)
def _copy_on_write(state: FaultyCache) -> Prepared:
    sequence = state.begin(98)
    state.fork(sequence)
    sequence.truncate(50)
    return lambda: sequence.append(5)


@operation("copy", *_EXCHANGES, budget_pages=40)
def _copy_on_write_under_pressure(state: FaultyCache) -> Prepared:
    sequence = state.begin(98)
    state.fork(sequence)
    state.begin(56).close()
    sequence.truncate(50)
    return lambda: sequence.append(5)


@operation(*_EXCHANGES)
def _give_up_what_is_shared(state: FaultyCache) -> Prepared:
    """At an extent's end nothing is copied: shared extents behind it are replaced by new ones."""
    sequence = state.begin(98)
    state.fork(sequence)
    sequence.truncate(64)
    return lambda: sequence.append(5)


@operation("mem_set_access", "fill", scrub="always")
def _write_what_was_shared(state: FaultyCache) -> Prepared:
    """The other holder is gone, so the row gets write access again."""
    sequence = state.begin(98)
    fork = state.fork(sequence)
    sequence.close()
    state.cache.rows.retire_parked(0)
    fork.truncate(50)
    return lambda: fork.append(5)


@operation(*_EXCHANGES)
def _reorder_by_aliases(state: FaultyCache) -> Prepared:
    """Beams that end with an extent: all extents are exchanged, no token is copied."""
    beams = [state.begin(64), state.say(64), state.begin(64)]
    return lambda: state.cache.reorder(beams, [1, 2, 1])


@operation("join_streams", "copy")
def _reorder_by_copies(state: FaultyCache) -> Prepared:
    """Beams that share their prompt and have tails, which a failing copy may destroy."""
    sequence = state.begin(64)
    beams = [sequence, state.fork(sequence), state.fork(sequence)]
    state.cache.grow([(beam, 66) for beam in beams])
    state.defined_tokens = 64
    return lambda: state.cache.reorder(beams, [1, 2, 1])


@operation("copy", "fill", *_EXCHANGES, scrub="poison")
def _reorder_into_shared_tails(state: FaultyCache) -> Prepared:
    """Extents that forks share are not copied into; the beams get new ones."""
    beams = [state.begin(68), state.begin(68)]
    for beam in beams:
        state.fork(beam)
    state.cache.grow([(beam, 70) for beam in beams])
    state.cache.cost_model = CostModel(map_us=1e9)
    state.defined_tokens = 0
    return lambda: state.cache.reorder(beams, [1, 0])


@operation("join_streams", "copy", *_MAPS)
def _hit_by_alias(state: FaultyCache) -> Prepared:
    state.say(98)
    return lambda: state.hear(91)  # 80 tokens: 16 pages, and 4 to be copied.


@operation("join_streams")
def _hit_by_adoption(state: FaultyCache) -> Prepared:
    state.begin(4)
    state.say(98).close()
    return lambda: state.hear(98)


@operation("copy", *_EXCHANGES, budget_pages=62)
def _hit_by_alias_of_a_parked_row_under_pressure(state: FaultyCache) -> Prepared:
    state.say(248).close()  # 32 + 16 + 8 + 4 + 2 pages; 92 tokens are copied, as 24 pages.
    return lambda: state.hear(92)


@operation("fill", scrub="cross-tenant")
def _adopt_with_states_and_scrubbing(state: FaultyCache) -> Prepared:
    """All groups are scrubbed before any row is taken, and the state stays at rest meanwhile."""
    state.cache.add_states({9: [StateShape((100,), torch.float32)]})
    state.add_layers(20)  # Scrubbed last.
    state.begin(4)
    state.begin(30).close()
    return lambda: state.sequences.append(state.cache.open(20, tenant="other"))


@operation("join_streams", "fill", scrub="always")
def _adopt_with_scrubbing(state: FaultyCache) -> Prepared:
    state.begin(40).close()
    return lambda: state.sequences.append(state.cache.open(30))


@operation("mem_map", "mem_set_access", "fill", scrub="always")
def _append_with_scrubbing(state: FaultyCache) -> Prepared:
    sequence = state.begin(10)
    state.begin(40).close()
    state.cache.rows.retire_parked(1)
    state.pool.reclaimer.wait()
    return lambda: sequence.append(30)


@operation(*_EXCHANGES, budget_pages=60)
def _evict_by_extents(state: FaultyCache) -> Prepared:
    """Two prefixes lose their ends; the rest stays intact."""
    sequence = state.begin(4)
    for each in [state.say(98), state.say(98)]:
        each.close()
    return lambda: sequence.append(100)


@operation(*_EXCHANGES, budget_pages=30)
def _evict_what_parked_rows_share(state: FaultyCache) -> Prepared:
    sequence = state.say(98)
    fork = state.fork(sequence)
    sequence.close()
    fork.close()
    last = state.begin(4)
    return lambda: last.append(60)


@operation("record_fence", "mem_unmap", "mem_release")
def _set_budget(state: FaultyCache) -> Prepared:
    state.begin(40)
    state.say(98).close()
    state.begin(60).close()
    return lambda: state.pool.set_budget(20 * PAGE)


def _saving(state: FaultyCache, sequence: Sequence) -> Scenario:
    """A failed save leaves the older file, and no temporary one."""
    path = state.folder / "kv"
    path.write_text("older")

    def observe() -> object:
        files = {each.name: zlib.crc32(each.read_bytes()) for each in state.folder.iterdir()}
        return files, sequence.is_resident, state.pool.stats()

    return Scenario(lambda: sequence.save(path), observe, state.cache.check, state.close_cache)


@operation("copy", window_tokens=20)
def _save(state: FaultyCache) -> Prepared:
    return _saving(state, state.say(98))


@operation("copy", **_WITH_HOST)
def _save_while_swapped_out(state: FaultyCache) -> Prepared:
    sequence = state.say(98)
    sequence.swap_out()
    state.pool.reclaimer.wait()
    return _saving(state, sequence)


@operation("copy", *_MAPS, window_tokens=20)
def _load(state: FaultyCache) -> Prepared:
    state.say(98).save(state.folder / "kv")
    return lambda: state.sequences.append(state.cache.load(state.folder / "kv"))


@operation("mem_create", "join_streams", "stream_wait", "copy", *_EXCHANGES, **_WITH_HOST)
def _swap_out_and_in(state: FaultyCache) -> Prepared:
    """A failure leaves the sequence whole, in device or in host memory."""
    sequence = state.begin(150)
    moves: list[str] = []

    def there_and_back() -> None:
        if "out" not in moves:
            if sequence.is_resident:
                sequence.swap_out()
            moves.append("out")
        sequence.swap_in()
        moves.append("in")

    def observe() -> object:
        """Its contents, read when it is resident again, without faults."""
        if state.is_closing or sequence.is_resident:
            return state.observe()
        return observed

    observed = state.observe()
    return Scenario(there_and_back, observe, state.cache.check, state.close_cache)


@pytest.fixture(autouse=True)
def small_constants(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Short windows move, and a file takes several copies."""
    monkeypatch.setattr(layer_group, "UNDERREAD_TOKENS", 0)
    monkeypatch.setattr(disk, "_CHUNK_BYTES", 16 * KiB)
    monkeypatch.setattr(FaultyCache, "folder", tmp_path, raising=False)


@pytest.mark.parametrize("is_out_of_memory", [False, True], ids=["broken", "full"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_call_can_fail(operation: str, is_out_of_memory: bool) -> None:
    """A failure changes nothing, and the scenario makes the calls that it is meant to make."""
    make_scenario, primitives = OPERATIONS[operation]
    struck = check_every_call_can_fail(
        lambda: HostBackend(PAGE), make_scenario, is_out_of_memory=is_out_of_memory
    )
    assert primitives <= set(struck)


@pytest.mark.parametrize(
    "operation", ["copy on write", "reorder by aliases", "reorder into shared tails"]
)
def test_every_wait_can_be_interrupted(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C during a wait for the device changes nothing, and the operation can be repeated."""
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


def _close_lost(cache: KVCache, known: set[int]) -> None:
    """Close the sequences that an interrupted call has opened and its caller did not get."""
    for sequence in [] if cache.is_closed else cache.sequences:
        if id(sequence) not in known:
            sequence.close()


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_can_be_interrupted_at_any_offset(name: str) -> None:
    """The interrupted operation has happened as a whole, or not at all."""

    def make() -> tuple[HostBackend, Scenario]:
        host: Any = HostBackend(PAGE)
        return host, OPERATIONS[name][0](host)

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
                pass  # Other sequences have all rows, or all memory.
            cache.check()
        scenario.close()
        assert BackendUsage() == host.usage(), f"after SIGINT at offset {at}"
        host.close()
        if not is_sent:
            break


@pytest.mark.parametrize("fail_at", [1, 2, 3])
def test_a_cache_whose_close_failed_is_not_used(fail_at: int) -> None:
    """The cache's addresses may be free already, so every call but `close` is refused."""
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
