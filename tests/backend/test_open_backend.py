"""Opening a backend by name."""

from __future__ import annotations

import pytest

from vmkv import ConfigError, HostBackend, open_backend


@pytest.mark.parametrize("name", ["host", "cpu"])
def test_open_backend_host_needs_no_driver(name: str) -> None:
    backend = open_backend(name)
    assert "host" == backend.name
    backend.close()


@pytest.mark.parametrize("name", ["", "tpu", "cuda:x", "cuda:-1", "cuda:0:1", "Host"])
def test_open_backend_unknown_name_lists_the_known(name: str) -> None:
    with pytest.raises(ConfigError, match='"host", "cuda"'):
        open_backend(name)


@pytest.mark.parametrize("granularity_bytes", [0, -4096, 1000, 2048, 3 * 4096])
def test_host_backend_refuses_impossible_granularity(granularity_bytes: int) -> None:
    """The granularity must be a power of two and a multiple of the system's page."""
    with pytest.raises(ConfigError, match=str(granularity_bytes)):
        HostBackend(granularity_bytes)


@pytest.mark.gpu
def test_open_backend_unknown_device_says_how_many() -> None:
    with pytest.raises(ConfigError, match="cuda:1000; found"):
        open_backend("cuda:1000")
