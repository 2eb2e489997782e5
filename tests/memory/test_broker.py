"""A broker and its members: pools of this process, and of others that are stopped and killed."""

from __future__ import annotations

import fcntl
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import pytest
from helpers.members import PAGE, member_of, pool_of
from helpers.waiting import PATIENCE_S, until

from vmkv import BackendUsage, ConfigError, ExtentPool, HostBackend, OutOfPagesError
from vmkv.core.memory import (
    Broker,
    Extent,
    PoolMember,
    default_socket_path,
    member,
    shares,
)
from vmkv.core.memory.broker import VERSION
from vmkv.core.memory.shares import Report

BUDGET = 64 * PAGE
Join = Callable[..., ExtentPool]
Spawn = Callable[[Broker, str, int], "subprocess.Popen[str]"]

#: A member in another process: grows to so many pages, says so, and waits for its end.
CHILD = """
import sys
from vmkv import ExtentPool, HostBackend
from vmkv.core.memory import PoolMember
path, name, pages = sys.argv[1], sys.argv[2], int(sys.argv[3])
backend = HostBackend(4096)
member = PoolMember.join(path, name=name, device=backend.name, free_bytes=0, floor_bytes=4096)
pool = ExtentPool(backend, member.budget_bytes)
member.bind(pool)
held = []
while len(held) < pages:
    if pool.available_bytes < 4096:
        assert member.grow((pages - len(held)) * 4096), "no memory"
    held += pool.acquire([0])
if name == "idle":
    pool.disown(held)
    held = []
print("full", flush=True)
sys.stdin.readline()
pool.disown(held)
pool.close()
print("closed", flush=True)
"""


#: A broker in another process.
BROKER = """
import sys, time
from vmkv.core.memory import Broker
with Broker(sys.argv[1], 64 * 4096, page_bytes=4096):
    print("open", flush=True)
    time.sleep(1000)
"""


def stop(child: subprocess.Popen[str]) -> None:
    """Stop a process, and wait until all of its threads are stopped."""
    child.send_signal(signal.SIGSTOP)
    threads = Path(f"/proc/{child.pid}/task")
    until(
        lambda: all(
            (each / "stat").read_text().rpartition(")")[2].split()[0] == "T"
            for each in threads.iterdir()
        )
    )


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    """Open a broker of 64 pages."""
    with Broker(tmp_path / "pool.sock", BUDGET, page_bytes=PAGE) as made:
        yield made


@pytest.fixture
def join(broker: Broker) -> Iterator[Join]:
    """Make pools that join the broker; closed at the end, which leaves no member."""
    pools: list[ExtentPool] = []

    def make(name: str, floor_pages: int = 1, **options: float) -> ExtentPool:
        pools.append(pool_of(broker.socket_path, name, floor_bytes=floor_pages * PAGE, **options))
        return pools[-1]

    yield make
    for pool in pools:
        pool.disown([each for each in pool.extents() if each.num_owners])
        pool.close()
    until(lambda: not broker.members())


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Start members of a broker in other processes, each full of so many pages."""
    children: list[subprocess.Popen[str]] = []

    def start(broker: Broker, name: str, num_pages: int) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, broker.socket_path, name, str(num_pages)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        children.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "full\n"
        return child

    yield start
    for child in children:
        child.kill()
        child.communicate()


def filled(pool: ExtentPool, num_pages: int) -> list[object]:
    """Take pages of a pool one by one, with more from the broker where it has none."""
    taken: list[object] = []
    assert pool.member is not None
    while len(taken) < num_pages:
        if pool.available_bytes < PAGE:
            assert pool.member.grow((num_pages - len(taken)) * PAGE)
        taken += pool.acquire([0])
    return taken


def fill_queue(member: PoolMember) -> None:
    """Report more than the socket of a broker that does not read can hold."""
    for number in range(5000):
        member.ask(number % 2 * PAGE, 0, is_busy=True, preempts=False)


def budgets(broker: Broker) -> dict[str, int]:
    """Return the pages that each member may have."""
    return {each.name: each.given_bytes // PAGE for each in broker.members()}


def test_free_memory_moves_to_who_asks(broker: Broker, join: Join) -> None:
    """It is released to the driver first: together the pools never hold more than the budget."""
    first, second = join("first"), join("second", floor_pages=4)
    assert budgets(broker) == {"first": 1, "second": 4}
    extents = filled(first, 50)
    assert first.stats().created_bytes == 50 * PAGE
    first.disown(extents)  # type: ignore[arg-type]
    held = filled(second, 40)
    assert first.stats().created_bytes + second.stats().created_bytes <= BUDGET
    assert first.stats().created_bytes <= 24 * PAGE
    second.disown(held)  # type: ignore[arg-type]
    assert filled(first, 60)


def test_free_memory_of_members_that_wait_is_not_withheld(
    join: Join,
) -> None:
    """Each has 30 pages free, and needs 40: first one gets them, then the other."""
    pools = [join("first"), join("second")]
    for pool in pools:
        assert pool.member is not None
        assert pool.member.grow(29 * PAGE)
        pool.member._grow_timeout_s = PATIENCE_S / 2

    def take_many(pool: ExtentPool) -> int:
        extents = pool.asking_broker(lambda: pool.acquire([0] * 40))
        pool.disown(extents)
        return len(extents)

    with ThreadPoolExecutor(2) as threads:
        assert [40, 40] == list(threads.map(take_many, pools))


def test_live_memory_stays_with_its_member(broker: Broker, join: Join) -> None:
    """A pool without an engine gives up nothing that is in use; the others get the rest."""
    first, second = join("first"), join("second")
    filled(first, 40)
    filled(second, 24)
    assert second.member is not None
    second.member._grow_timeout_s = 0.0
    assert not second.member.grow(PAGE)
    assert first.budget_bytes >= 40 * PAGE


def test_an_idle_pool_keeps_its_floor_only(broker: Broker, join: Join) -> None:
    """What nobody uses goes back to the driver, although nobody has asked for it."""
    pool = join("idle", floor_pages=3)
    pool.disown(filled(pool, 30))  # type: ignore[arg-type]
    until(lambda: pool.stats().created_bytes <= 3 * PAGE)
    until(lambda: budgets(broker) == {"idle": 3})
    assert broker.members()[0].report.created_bytes <= 3 * PAGE


def test_a_killed_process_has_given_all_back(broker: Broker, join: Join, spawn: Spawn) -> None:
    """Its memory is counted as free once the kernel reports its end."""
    pool, child = join("pool"), spawn(broker, "child", 50)
    assert pool.member is not None
    child.kill()
    assert filled(pool, 60)


def test_a_process_that_closes_its_pool_has_given_all_back(broker: Broker, spawn: Spawn) -> None:
    """It leaves while it still lives."""
    child = spawn(broker, "child", 50)
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write("\n")
    child.stdin.flush()
    assert child.stdout.readline() == "closed\n"
    until(lambda: not broker.members())


def test_memory_of_a_stopped_process_counts_until_its_end(
    monkeypatch: pytest.MonkeyPatch,
    broker: Broker,
    join: Join,
    spawn: Spawn,
) -> None:
    """It is mapped whether the process runs or not; others go on with the rest meanwhile."""
    monkeypatch.setattr(shares, "HANG_S", 0.2)
    pool, child = join("pool"), spawn(broker, "child", 40)
    stop(child)
    filled(pool, 24)
    assert pool.member is not None
    pool.member._grow_timeout_s = 1.0
    assert not pool.member.grow(PAGE)
    child.kill()
    pool.member._grow_timeout_s = PATIENCE_S
    assert filled(pool, 30)


def test_a_child_that_hangs_is_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, spawn: Spawn
) -> None:
    """Only a process that this one has started, and only when its memory is wanted."""
    monkeypatch.setattr(shares, "HANG_S", 0.7)
    monkeypatch.setattr(shares, "IDLE_S", 1000.0)
    path = tmp_path / "pool.sock"
    with Broker(path, BUDGET, page_bytes=PAGE, kills_after_s=0.3) as broker:
        pool = pool_of(path)
        child = spawn(broker, "idle", 40)
        until(lambda: not broker.members()[-1].report.live_bytes)
        stop(child)
        extents = filled(pool, 60)
        assert child.wait(PATIENCE_S) == -signal.SIGKILL
        assert budgets(broker) == {"pool": 60}
        pool.disown(extents)  # type: ignore[arg-type]
        pool.close()


def test_a_broker_that_ends_leaves_members_what_they_have(tmp_path: Path) -> None:
    """They go on within it, and ask nobody for more."""
    path = tmp_path / "pool.sock"
    with Broker(path, BUDGET, page_bytes=PAGE) as broker, closing(pool_of(path)) as pool:
        member = pool.member
        extents = filled(pool, 20)
        broker.close()
        until(lambda: not member.may_grow)
        assert not member.grow(PAGE)
        until(lambda: member.most_bytes == pool.budget_bytes)
        pool.disown(extents)  # type: ignore[arg-type]
        pool.disown(pool.acquire([0] * 20))


def test_the_budget_follows_what_the_device_has(tmp_path: Path) -> None:
    """Without a given one it is nine tenths of what is free when members join, or less."""
    path = tmp_path / "pool.sock"
    with Broker(path, page_bytes=PAGE) as broker:
        assert broker.budget_bytes is None
        its = {"floor_bytes": 10 * PAGE}
        with closing(pool_of(path, "first", free_bytes=100 * PAGE, **its)) as pool:
            first = pool.member
            assert broker.budget_bytes == 90 * PAGE
            pool.disown(pool.acquire([0] * 10))
            first.fit(40 * PAGE)
            until(lambda: broker.budget_bytes == 50 * PAGE)
            second = member_of(path, "second", free_bytes=200 * PAGE, **its)
            assert broker.budget_bytes == 50 * PAGE
            assert second.most_bytes == 40 * PAGE
            second.leave()


def test_who_cannot_join_is_told_why(broker: Broker, join: Join, tmp_path: Path) -> None:
    """No broker, floors that do not fit, another device, another version, a broken message."""
    join("first", floor_pages=40)
    path = broker.socket_path
    its = {"name": "late", "device": HostBackend(PAGE).name, "free_bytes": 0}
    with pytest.raises(ConfigError, match="start `vmkv pool`"):
        member_of(tmp_path / "none.sock")
    with pytest.raises(ConfigError, match="refuses: late wants a floor of"):
        member_of(path, "late", floor_bytes=30 * PAGE)
    with pytest.raises(ConfigError, match="late runs on cuda:7, and the broker"):
        member_of(path, "late", device="cuda:7")
    asked = {**its, "limit_bytes": None, "floor_bytes": 0, "brought_bytes": 0, "weight": 1}
    asked |= {"name": "odd", "version": VERSION}
    of_another_version = ["join", {"version": VERSION + 1, "name": "odd", "unknown": 1}]
    for message in (
        of_another_version,
        ["join", {**its, "version": 0}],
        ["report", *Report()],
        7,
        ["join"],
        ["join", asked | {"weight": "2"}],
        ["join", asked | {"weight": None}],
        ["join", asked | {"weight": 1e-320}],
        ["join", asked | {"weight": 10**400}],
        ["join", asked | {"weight": float("nan")}],
        ["join", asked | {"free_bytes": 10**400}],
        ["join", asked | {"floor_bytes": "1"}],
        ["join", asked | {"floor_bytes": 1.0}],
        ["join", asked | {"brought_bytes": float("nan")}],
        ["join", asked | {"brought_bytes": -1}],
        ["join", asked | {"limit_bytes": float("inf")}],
    ):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(PATIENCE_S)
            connection.connect(path)
            connection.send(json.dumps(message).encode())
            with suppress(ConnectionResetError):
                answer = connection.recv(1 << 16)
                assert b'"order"' not in answer
                if message == of_another_version:
                    assert b"speaks version" in answer
    assert budgets(broker) == {"first": 40}
    assert broker.budget_bytes == BUDGET


#: Joins with a message, and reports by another until it is sent away.
ODD = """
import contextlib, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
    connection.connect(sys.argv[1])
    for message in sys.argv[2:]:
        connection.send(message.encode())
        with contextlib.suppress(ConnectionResetError):
            answer = connection.recv(1 << 16)
            if message.startswith('["join"'):
                assert b'"order"' in answer
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(1 << 16):
            pass
"""


@pytest.mark.parametrize("number", ["7", 10**400, -1], ids=["text", "large", "negative"])
def test_a_member_that_reports_no_numbers_is_sent_away(
    broker: Broker, join: Join, number: object
) -> None:
    """The others stay."""
    asked = {"version": VERSION, "name": "odd", "device": HostBackend(PAGE).name, "weight": 1}
    asked |= {"free_bytes": 0, "floor_bytes": 0, "limit_bytes": None, "brought_bytes": 0}
    messages = [json.dumps(["join", asked]), json.dumps(["report", *Report()[:-2], number, True])]
    command = [sys.executable, "-c", ODD, broker.socket_path, *messages]
    subprocess.run(command, check=True, timeout=PATIENCE_S)
    assert filled(join("second"), 20)
    until(lambda: {"second"} == budgets(broker).keys())


def test_members_do_not_wait_for_a_broker_that_is_stopped(broker: Broker, join: Join) -> None:
    """Its queue fills; what it could not hold is told once there is room."""
    pool = join("first")
    assert pool.member is not None
    with broker._lock:
        fill_queue(pool.member)
        pool.member.ask(30 * PAGE, 0, is_busy=True, preempts=False)
    until(lambda: pool.budget_bytes >= 30 * PAGE)


def test_a_stopped_broker_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By members that wait for it: at the beginning, in an engine, and to grow."""
    path = tmp_path / "pool.sock"
    command = [sys.executable, "-c", BROKER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        with closing(pool_of(path, timeout_s=0.2)) as pool:
            joined = pool.member
            stop(child)
            named = rf"{path} \(process {child.pid}, which is stopped: .*\)"
            with pytest.raises(TimeoutError, match=f"broker at {named} could not"):
                member_of(path, timeout_s=0.2)
            monkeypatch.setattr(member, "HANG_S", 0.0)
            joined.wait(0.0, pool.budget_bytes)
            assert not joined.grow(PAGE)
            child.kill()
            until(lambda: not joined.is_connected)
    warned = [each.getMessage() for each in caplog.records]
    assert re.match(f"requests wait for memory of the broker at {named}", warned[0])
    assert re.match(f"the broker at {named} gave no memory within 0.2 s", warned[1])
    assert warned[2].startswith(f"the broker at {path} (process {child.pid}) is gone")


def test_a_quiet_member_tells_what_the_queue_could_not_hold(
    broker: Broker, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread waits for ever then, and no order of the broker's wakes it."""
    member = (pool := join("first")).member
    assert member is not None
    member.ask(10 * PAGE, 0, is_busy=True, preempts=False)
    until(lambda: pool.budget_bytes >= 10 * PAGE and member._report() == member._told)
    *_, thread = (each for each in threading.enumerate() if each.name == "vmkv-member")
    state = Path(f"/proc/self/task/{thread.native_id}/stat")
    until(lambda: state.read_text().rpartition(")")[2].split()[0] == "S")
    with monkeypatch.context() as patch:
        patch.setattr(member, "_send", lambda *_: False)
        member.ask(30 * PAGE, 0, is_busy=True, preempts=False)
    until(lambda: pool.budget_bytes >= 30 * PAGE)


def test_a_member_that_leaves_waits_for_room_in_the_queue(broker: Broker, join: Join) -> None:
    """Its memory would count until its process ends."""
    pool = join("first")
    assert pool.member is not None
    with broker._lock:
        fill_queue(pool.member)
        pool.close()
    until(lambda: not broker.members())


def test_a_child_that_drops_an_inherited_pool_does_not_leave(
    broker: Broker, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = join("first").member
    assert member is not None
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 1)
        member.leave()
    assert member.is_connected
    assert filled(join("second"), 2)  # The broker has heard all that came before.
    assert budgets(broker).keys() == {"first", "second"}


def test_members_of_one_name_are_told_apart(broker: Broker, join: Join) -> None:
    for _ in range(3):
        join("a cache")
    assert budgets(broker).keys() == {"a cache", "a cache (2)", "a cache (3)"}


def test_a_broker_leaves_the_socket_of_another_in_place(tmp_path: Path) -> None:
    path = tmp_path / "pool.sock"
    with Broker(path, BUDGET, page_bytes=PAGE) as first:
        path.unlink()
        with Broker(path, BUDGET, page_bytes=PAGE):
            first.close()
            assert path.is_socket()
        assert not path.exists()


def test_brokers_replace_an_abandoned_socket_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the second would remove the first one's, having found the abandoned one too."""
    path = tmp_path / "pool.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as abandoned:
        abandoned.bind(str(path))
    remove, seen = os.unlink, []

    def unlink(its: str) -> None:
        folder = os.open(tmp_path, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(folder)
        seen.append(its)
        remove(its)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", unlink)
        broker = Broker(path, BUDGET, page_bytes=PAGE)
    broker.close()
    assert seen == [str(path)]


def test_a_member_waits_for_its_floor_no_longer_than_it_says(broker: Broker, join: Join) -> None:
    """Live rows of a pool without an engine hold it."""
    filled(join("first"), 64)
    for floor_pages, why in ((20, "other members hold the memory"), (0, "could not give a page")):
        with pytest.raises(TimeoutError, match=why):
            member_of(broker.socket_path, floor_bytes=floor_pages * PAGE, timeout_s=0.3)
    assert budgets(broker) == {"first": 64}


def test_the_socket_has_a_place_for_each_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable names another one."""
    monkeypatch.setenv("VMKV_POOL", "/somewhere/else.sock")
    assert default_socket_path() == "/somewhere/else.sock"
    monkeypatch.delenv("VMKV_POOL")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert default_socket_path() == "/run/user/7/vmkv-pool.sock"


def test_a_member_leaves_with_an_order_unread(broker: Broker) -> None:
    """Its end with unread data is an error to the broker before the message that it leaves."""
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as connection:
        connection.connect(broker.socket_path)
        facts = {"version": VERSION, "name": "hasty", "device": "host", "free_bytes": 0}
        facts |= {"floor_bytes": PAGE, "limit_bytes": None, "weight": 1.0, "brought_bytes": 0}
        connection.send(json.dumps(["join", facts]).encode())
        until(lambda: bool(broker.members()))  # Its order has been sent.
        with broker._lock:  # So the broker reads nothing before the end.
            connection.send(b'["leave"]')
            connection.close()
    until(lambda: not broker.members())
    assert not broker._connections


def test_members_come_and_go(broker: Broker) -> None:
    """From several threads, while orders are on their way: each gives back all that it had."""
    errors: list[BaseException] = []

    def play(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(40):
            its = {"weight": draw.choice((0.5, 1.0, 3.0)), "floor_bytes": draw.randint(1, 4) * PAGE}
            pool = pool_of(broker.socket_path, str(seed), **its)
            member = pool.member
            held: list[Extent] = []
            for _ in range(draw.randint(0, 30)):
                if draw.random() < 0.5:
                    if pool.available_bytes < PAGE:
                        member.grow(draw.randint(1, 6) * PAGE)
                    with suppress(OutOfPagesError):
                        held += pool.acquire([0])
                elif held:
                    pool.disown([held.pop()])
            pool.disown(held)
            pool.close()
            assert pool.backend.usage() == BackendUsage()

    def playing(seed: int) -> None:
        try:
            play(seed)
        except BaseException as error:  # noqa: BLE001  # told below
            errors.append(error)

    threads = [threading.Thread(target=playing, args=(seed,)) for seed in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not errors
    until(lambda: not broker.members())
    assert broker._shares.free_bytes == BUDGET
