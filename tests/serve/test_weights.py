"""Weights in extents: they leave the device, and return to the same addresses."""

from __future__ import annotations

import copy
import logging
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.device import Device
from helpers.limited_device import UNLIMITED_BYTES, LimitedDevice
from helpers.tiny_models import tiny_model

from vmkv import BackendUsage, HostBackend
from vmkv.core.backend import Access, Backend
from vmkv.core.memory import Broker, PoolMember, check_pool
from vmkv.errors import ConfigError, DriverError, OutOfPagesError
from vmkv.serve import weights as weights_module
from vmkv.serve.weights import Weights
from vmkv.step.joined_layers import SiblingLinear
from vmkv.testing import FaultInjectingBackend, Scenario, check_every_call_can_fail
from vmkv.units import KiB

PAGE = 4 * KiB


class Limited(LimitedDevice):
    """A device that stays open, so that it can be looked at, and used again."""

    def close(self) -> None:
        """Do nothing."""


class Late(Device):
    """A device whose pending work runs before it is closed."""

    def close(self) -> None:
        """Close it."""
        self.run_some()
        super().close()


def make_model(name: str = "llama") -> Any:
    return copy.deepcopy(tiny_model(name))


def contents(model: torch.nn.Module) -> dict[str, int]:
    """A checksum of each parameter and buffer."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: zlib.crc32(each.detach().numpy().tobytes()) for name, each in named}


def addresses(model: torch.nn.Module) -> list[int]:
    return [each.data_ptr() for each in (*model.parameters(), *model.buffers())]


def check_books(weights: Weights) -> None:
    if weights._pool is not None:
        check_pool(weights._pool)


def held(model: Any, backend: Backend, **how: bool) -> Weights:
    weights = Weights(model, lambda: backend)
    weights.hold(**how)
    return weights


def test_a_broker_that_cannot_be_joined(tmp_path: Path) -> None:
    """The model is as before, and what was opened for its weights is closed."""
    model, closed = make_model(), []

    class Backend(HostBackend):
        def close(self) -> None:
            closed.append(self)
            super().close()

    expected, where = contents(model), addresses(model)
    path = str(tmp_path / "none.sock")
    with Broker(path, 4 * PAGE, page_bytes=PAGE):
        member = PoolMember.join(path, name="other", device="host", free_bytes=0)
    weights = Weights(model, lambda: Backend(PAGE), beside=member)
    with pytest.raises(ConfigError, match="no broker answers at"):
        weights.hold()
    assert 1 == len(closed)
    assert (0, expected, where) == (weights.num_bytes, contents(model), addresses(model))
    member.leave()
    weights.close()


@pytest.mark.parametrize("call", ["_open_memory", "_open_pool", "_fill"])
def test_weights_that_cannot_be_held_are_not_joined(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    model, backend = make_model(), Limited(HostBackend(PAGE))
    expected, weights = contents(model), Weights(model, lambda: backend)
    with monkeypatch.context() as patch:
        patch.setattr(weights, call, fail)
        with pytest.raises(MemoryError):
            weights.hold(joins=True)
    assert not any(isinstance(each, SiblingLinear) for each in model.modules())
    assert expected == contents(model)
    assert weights.is_closed
    assert BackendUsage() == backend.usage()


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3", "mixtral"])
@pytest.mark.parametrize("joins", [False, True], ids=["", "joined"])
def test_weights_return_to_their_addresses(name: str, joins: bool) -> None:
    """With all contents, however tensors share storages; afterwards they are torch's again."""
    model, backend = make_model(name), Limited(HostBackend(PAGE))
    expected = contents(model)
    weights = held(model, backend, joins=joins)
    at_start, num_bytes = addresses(model), weights.num_bytes
    storages = {each.untyped_storage().data_ptr() for each in model.parameters()}
    assert expected == contents(model)
    assert num_bytes == backend.usage().physical_bytes
    assert num_bytes < sum(each.nbytes for each in model.parameters()) + 64 * KiB
    for _ in range(3):
        weights.leave()
        assert weights.are_away
        assert (0, num_bytes) == (backend.usage().physical_bytes, backend.usage().host_bytes)
        assert 0 == backend.upstream.file_bytes()  # type: ignore[attr-defined]
        check_books(weights)
        weights.come_back()
        assert not weights.are_away
        assert expected == contents(model)
        assert at_start == addresses(model)
        check_books(weights)
    siblings = [each for each in model.modules() if isinstance(each, SiblingLinear)]
    assert bool(siblings) == joins
    for each in siblings:
        assert each._vmkv_joint.untyped_storage().data_ptr() in storages
        start = each._vmkv_start
        assert torch.equal(each.weight, each._vmkv_joint[start : start + each.out_features])
    weights.close()
    assert expected == contents(model)
    assert BackendUsage() == backend.usage()


@pytest.mark.parametrize("sleeps", [False, True], ids=["", "sleeps"])
def test_weights_are_copied_out_before_they_are_unmapped(
    monkeypatch: pytest.MonkeyPatch, sleeps: bool
) -> None:
    """On a device that works late; also if nothing has noted the stream of the copies before."""
    device = Late(PAGE, is_late=True, seed=0)
    device.stream = 101
    monkeypatch.setattr(weights_module, "stream_getter", lambda _: lambda: device.stream)
    weights = held(make_model(), device)
    if sleeps:
        weights.leave()
        weights.come_back()
    move_out = weights._move_out

    def copy_late(its: Any, start: int) -> int:
        storage = its[0].untyped_storage()
        place = storage.data_ptr(), storage.nbytes(), Access.READ
        device.submit(lambda: device.check_access("a copy reads", *place))
        return move_out(its, start)

    monkeypatch.setattr(weights, "_move_out", copy_late)
    weights.close()


def test_tied_weights_stay_tied() -> None:
    model = make_model()
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    head.weight = embedding.weight
    model.score = torch.nn.Parameter(embedding.weight.data[3:9].t())  # A view of it.
    weights = held(model, HostBackend(PAGE))
    weights.leave()
    weights.come_back()
    with torch.no_grad():
        embedding.weight += 1
    for _ in range(2):
        assert torch.equal(head.weight, embedding.weight)
        assert torch.equal(model.score, embedding.weight[3:9].t())
        assert model.score.untyped_storage().data_ptr() == embedding.weight.data_ptr()
        weights.close()


def test_a_sleeping_model_is_not_called() -> None:
    """By its user or by another engine; that would read addresses without memory."""
    model = make_model()
    weights = held(model, HostBackend(PAGE))
    tokens, hooks = torch.tensor([[1, 2, 3]]), len(model._forward_pre_hooks)
    expected = model(tokens).logits
    weights.leave()
    with pytest.raises(ConfigError, match=r"wake\(\)"):
        model(tokens)
    weights.come_back()
    assert torch.equal(expected, model(tokens).logits)
    assert hooks == len(model._forward_pre_hooks)
    weights.close()


# ---- short of memory -------------------------------------------------------------------------


class _Emulated(Limited):
    """A device whose memory torch has taken in one piece, until all weights have moved."""

    num_given_back = 0

    def __init__(self, model: Any, spare_bytes: int):
        super().__init__(HostBackend(PAGE))
        self._model, self._spare_bytes = model, spare_bytes
        self._before = addresses(model)

    @property
    def device_bytes(self) -> int:  # type: ignore[override]
        """What torch leaves."""
        is_moved = not {*self._before} & {*addresses(self._model)}
        return UNLIMITED_BYTES if is_moved else self._spare_bytes


@pytest.mark.parametrize("spare_pages", [8, 32])
def test_weights_move_with_little_memory_beside_them(spare_pages: int) -> None:
    """What has been moved waits in host memory, until torch gives its segment back."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 100) for _ in range(40)]
    model: Any = torch.nn.Sequential(torch.nn.Embedding(500, 64), *layers)
    model.get_input_embeddings = lambda: model[0]
    model.config = object()
    expected = contents(model)
    backend = _Emulated(model, spare_pages * PAGE)
    if spare_pages < 32:  # Not even one row of the reservation.
        with pytest.raises(OutOfPagesError):
            held(model, backend)
    else:
        weights = held(model, backend)
        assert not weights.are_away
        assert weights.num_bytes > 6 * spare_pages * PAGE
        check_books(weights)
        assert expected == contents(model)
        weights.close()
    assert expected == contents(model)
    assert BackendUsage() == backend.usage()


def test_weights_stay_without_memory_in_the_host() -> None:
    """At the start, and when they are to leave."""
    model, backend = make_model(), Limited(HostBackend(PAGE))
    expected = contents(model)
    weights = held(model, backend)
    backend.host_bytes = weights.num_bytes - PAGE
    with pytest.raises(OutOfPagesError, match="host"):
        weights.leave()
    assert not weights.are_away
    assert expected == contents(model)
    check_books(weights)
    backend.host_bytes = weights.num_bytes
    weights.leave()
    backend.device_bytes = weights.num_bytes - PAGE
    for _ in range(2):
        with pytest.raises(OutOfPagesError, match="no more memory"):
            weights.come_back()
        assert weights.are_away
        check_books(weights)
    backend.device_bytes = weights.num_bytes
    weights.come_back()
    assert expected == contents(model)
    weights.close()
    assert BackendUsage() == backend.usage()


def test_weights_that_cannot_come_back_are_lost_in_words(caplog: pytest.LogCaptureFixture) -> None:
    """At the end they are empty, instead of addresses without memory."""
    model, backend = make_model(), Limited(HostBackend(PAGE))
    weights = held(model, backend)
    weights.leave()
    backend.device_bytes = 0
    with caplog.at_level(logging.ERROR):
        weights.close()
    assert "are lost" in caplog.text
    assert {0} == {each.numel() for each in model.parameters()}
    assert BackendUsage() == backend.usage()


# ---- every call can fail ---------------------------------------------------------------------


Act = Callable[[Weights], object]


def _leave_and_come_back(weights: Weights) -> None:
    if not weights.are_away:
        weights.leave()
    weights.come_back()


def _leave_twice(weights: Weights) -> None:
    _leave_and_come_back(weights)
    weights.leave()
    weights.come_back()


_EXCHANGES = {"record_fence", "mem_unmap", "mem_release", "mem_create", "mem_map", "copy"}
ACTS: dict[str, tuple[Act | None, Act, set[str]]] = {
    "hold": (None, Weights.hold, {"address_reserve", "new_stream", "mem_create", "mem_map"}),
    "hold anew": (Weights.hold, Weights.hold, {"address_free", "stream_destroy", *_EXCHANGES}),
    "sleep": (Weights.hold, _leave_and_come_back, {"stream_wait", "join_streams", *_EXCHANGES}),
    "sleep again": (Weights.hold, _leave_twice, {*_EXCHANGES}),
    "close": (Weights.hold, Weights.close, {"record_fence", "mem_unmap", "mem_release"}),
}


@pytest.mark.parametrize("is_out_of_memory", [False, True], ids=["broken", "full"])
@pytest.mark.parametrize("name", ACTS)
def test_every_call_can_fail(name: str, is_out_of_memory: bool) -> None:
    """The weights are where they were, or in host memory; another call does the rest."""
    before, act, primitives = ACTS[name]
    model = make_model()
    expected = contents(model)

    def make(backend: FaultInjectingBackend) -> Scenario:
        weights = Weights(model, lambda: Limited(backend))
        if before is not None:
            before(weights)

        def observe() -> object:
            """Contents, or where they are in host memory, those of before."""
            return expected if weights.are_away else contents(model)

        return Scenario(
            operation=lambda: act(weights),
            observe=observe,
            check=lambda: check_books(weights),
            close=weights.close,
        )

    struck = check_every_call_can_fail(
        lambda: HostBackend(PAGE), make, is_out_of_memory=is_out_of_memory
    )
    assert primitives - {"copy"} <= set(struck)
    assert expected == contents(model)


@pytest.mark.parametrize("is_out_of_memory", [False, True], ids=["broken", "full"])
def test_weights_stay_after_a_failed_call(is_out_of_memory: bool) -> None:
    """On the way out they come back; on the way back they stay in host memory."""
    model = make_model()
    expected = contents(model)
    for goes in (True, False):
        num_failed = 0
        for fail_at in range(1, 200):
            backend = FaultInjectingBackend(HostBackend(PAGE))
            weights = held(model, Limited(backend))
            if not goes:
                weights.leave()
            backend.arm(fail_at, is_out_of_memory=is_out_of_memory)
            try:
                weights.leave() if goes else weights.come_back()
            except (DriverError, OutOfPagesError):
                num_failed += 1
                assert weights.are_away != goes
            else:
                assert weights.are_away == goes
            struck = backend.failed_call
            backend.arm(0)
            check_books(weights)
            weights.come_back()
            assert expected == contents(model)
            weights.close()
            assert BackendUsage() == backend.usage()
            if struck is None:
                break
        assert 3 < num_failed
        assert fail_at < 199
