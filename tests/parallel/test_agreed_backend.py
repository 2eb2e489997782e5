"""`AgreedBackend` gives all ranks the same answers; an error on one rank ends all ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from vmkv import ConfigError, DriverError, HostBackend, RankError
from vmkv.serve.parallel import TensorParallel
from vmkv.serve.parallel.lockstep import AgreedBackend
from vmkv.units import Address, KiB


@pytest.fixture
def one() -> Iterator[TensorParallel]:
    """A group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield TensorParallel()
    dist.destroy_process_group()


def test_fences_pass_when_earlier_steps_are_completed(one: TensorParallel) -> None:
    """Independent of the device's fences, which ranks may see at different times."""
    device = HostBackend(64 * KiB)
    backend = AgreedBackend(device, one)
    device.hold_fences()
    assert backend.record_fence().has_passed(), "without earlier steps, a fence has passed"
    backend.num_submitted = 2
    fence = backend.record_fence()
    device.pass_fences()
    backend.num_completed = 1
    assert not fence.has_passed()
    backend.num_completed = 2
    assert fence.has_passed()


def test_a_driver_error_on_one_rank_ends_all(one: TensorParallel) -> None:
    backend = AgreedBackend(HostBackend(64 * KiB), one)
    with pytest.raises(RankError, match="address_free"):
        backend.address_free(backend.address_reserve(64 * KiB) + 4096, 64 * KiB)
    with pytest.raises(RankError, match="address_free"):
        one.min(1)


def test_memory_is_pinned_on_all_ranks_or_none(
    one: TensorParallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another rank could not pin is unpinned here; no rank ends."""
    device = HostBackend(64 * KiB)
    backend = AgreedBackend(device, one)
    backend.pin(Address(1 << 20), 64 * KiB)
    assert 64 * KiB == device.usage().pinned_bytes
    backend.unpin(Address(1 << 20))
    monkeypatch.setattr(one, "max", lambda _: 1)
    with pytest.raises(DriverError, match="another rank"):
        backend.pin(Address(1 << 20), 64 * KiB)
    assert not device.usage().pinned_bytes


def test_a_group_needs_ranks() -> None:
    """The error says how to start ranks."""
    with pytest.raises(ConfigError, match="torchrun"):
        TensorParallel()
