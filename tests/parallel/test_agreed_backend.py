"""What a driver says to one rank is told by steps, or is the end of all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from vmkv import ConfigError, HostBackend, RankError
from vmkv.serve.parallel import TensorParallel
from vmkv.serve.parallel.lockstep import AgreedBackend
from vmkv.units import KiB


@pytest.fixture
def one() -> Iterator[TensorParallel]:
    """A group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield TensorParallel()
    dist.destroy_process_group()


def test_fences_pass_with_the_steps_before_them(one: TensorParallel) -> None:
    """However far the device is."""
    device = HostBackend(64 * KiB)
    backend = AgreedBackend(device, one)
    device.hold_fences()
    assert backend.record_fence().has_passed(), "nothing was submitted: it was waited for"
    backend.num_submitted = 2
    fence = backend.record_fence()
    device.pass_fences()
    backend.num_completed = 1
    assert not fence.has_passed()
    backend.num_completed = 2
    assert fence.has_passed()


def test_what_only_one_rank_meets_ends_all(one: TensorParallel) -> None:
    """But for a lack of memory, which is all ranks' lack."""
    backend = AgreedBackend(HostBackend(64 * KiB), one)
    with pytest.raises(RankError, match="address_free"):
        backend.address_free(backend.address_reserve(64 * KiB) + 4096, 64 * KiB)
    with pytest.raises(RankError, match="address_free"):
        one.min(1)


def test_a_group_needs_ranks() -> None:
    """And says how to get them."""
    with pytest.raises(ConfigError, match="torchrun"):
        TensorParallel()
