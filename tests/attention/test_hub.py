"""FlashAttention from the Hugging Face Hub: found, called, and reported if missing.

The repositories are local folders, which `kernels` uses in place of the Hub's.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.dense_rows import DenseRows, random_query
from helpers.reference_backend import ReferenceBackend

from vmkv.attention import AttentionBatch, Call, append, flash2, flash3, registry
from vmkv.attention import flash_common as hub

HEADS, KV_HEADS, DIM, ROW_TOKENS = 8, 2, 64, 96
BATCHES = {
    "decode": ([3, 0, 5], [10, 90, 1], [1, 1, 1]),
    "uniform": ([2, 1], [40, 17], [4, 4]),
    "mixed": ([3, 0, 5], [10, 90, 7], [3, 1, 7]),
}


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """Clear the process-wide caches of loaded kernels before and after each test."""
    cached = (
        hub.load,
        flash2._load,
        flash3._load,
        flash3._fp8_package_kernel,
        flash3._load_packed,
    )
    for each in cached:
        each.cache_clear()
    yield
    for each in cached:
        each.cache_clear()


@pytest.fixture
def repositories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both repositories in a local folder, built for the CPU."""
    pytest.importorskip("kernels")
    monkeypatch.setattr(torch.version, "cuda", None)  # Selects the CPU build.
    places = []
    for repository, version in ((flash2.HUB_KERNEL, 4), flash3.HUB_KERNEL):
        name = repository.split("/")[1]
        build = tmp_path / name / "build" / "torch-cpu"
        shutil.copytree(
            Path(__file__).parent / "hub_repository",
            build,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        facts = {
            "name": name,
            "id": f"_{name.replace('-', '_')}_{id(tmp_path)}",
            "version": version,
            "license": "Apache-2.0",
            "python-depends": [],
            "backend": {"type": "cpu"},
        }
        (build / "metadata.json").write_text(json.dumps(facts))
        places.append(f"{repository}={tmp_path / name}")
    monkeypatch.setenv("LOCAL_KERNELS", ":".join(places))


@pytest.fixture(params=BATCHES)
def call(request: pytest.FixtureRequest) -> Call:
    """The attention call of a layer in a step."""
    rows, num_tokens, queries = BATCHES[request.param]
    batch = AttentionBatch.build(
        rows, num_tokens, queries, row_tokens=ROW_TOKENS, num_rows=6, device="cpu"
    )
    generator = torch.Generator().manual_seed(0)
    dense = DenseRows(6, ROW_TOKENS, KV_HEADS, DIM, dtype=torch.bfloat16)
    dense.fill(batch, 0, generator)
    query = random_query(batch, HEADS, DIM, dtype=torch.bfloat16, device="cpu", generator=generator)
    return Call(query, dense.keys, dense.values, batch, 0.125)


def check(call: Call, out: torch.Tensor) -> None:
    """Compare with the reference."""
    expected = ReferenceBackend().attend(call)
    assert torch.allclose(expected.float(), out.float(), atol=2e-2)


@pytest.mark.usefixtures("repositories")
def test_flash2_of_the_hub_reads_rows(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both of its kernels, if the package is not installed."""
    monkeypatch.setattr(flash2, "_package", lambda: "it is not installed")
    check(call, flash2.Flash2Backend().attend(call))


@pytest.mark.usefixtures("repositories")
def test_flash3_of_the_hub_reads_rows(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """If neither the package nor the library is installed."""
    for source in ("package_kernel", "library_kernel"):
        monkeypatch.setattr(flash3, source, lambda: "it is not installed")
    monkeypatch.setattr(flash3, "_num_processors", lambda device: 10**9)
    check(call, flash3.Flash3Backend().attend(call))


@pytest.mark.usefixtures("repositories")
def test_flash3_of_the_hub_reads_packed_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """First chunks attend to their new keys only, not to a row."""
    for source in ("package", "library_kernel"):
        monkeypatch.setattr(flash3, source, lambda: "it is not installed")
    monkeypatch.setattr(registry, "why_not", lambda name, spec: None)
    lengths = [40, 3]
    batch = AttentionBatch.build([2, 0], lengths, lengths, row_tokens=ROW_TOKENS, device="cpu")
    qkv = torch.randn(43, HEADS + 2 * KV_HEADS, DIM, dtype=torch.bfloat16)
    query, key, value = qkv.split((HEADS, KV_HEADS, KV_HEADS), 1)
    dense = DenseRows(3, ROW_TOKENS, KV_HEADS, DIM, dtype=torch.bfloat16)
    call = Call(query, dense.keys, dense.values, batch, 0.125, new=(key, value))
    backend = registry.select_for_new(call.spec())
    assert backend is not None
    assert backend.name == "flash3"
    out = backend.attend_new(call)
    append(call, (key, value))
    check(call, out)


@pytest.mark.usefixtures("repositories")
def test_flash3_of_the_hub_serves_short_fp8_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the package's kernel, which sums in narrow accumulators."""
    for source in ("package_kernel", "library_kernel"):
        monkeypatch.setattr(flash3, source, lambda: "it is not installed")
    assert callable(flash3._load_for_fp8(flash3.NARROW_SUMS_MAX_TOKENS))
    assert "loses precision" in flash3._load_for_fp8(flash3.NARROW_SUMS_MAX_TOKENS + 1)


def test_a_missing_hub_kernel_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The Hub is asked only once."""
    pytest.importorskip("kernels")
    monkeypatch.setenv("LOCAL_KERNELS", f"{flash3.HUB_KERNEL[0]}={tmp_path}")
    reason = hub.load(*flash3.HUB_KERNEL)
    assert isinstance(reason, str)
    assert reason.startswith("kernels-community/flash-attn3 cannot be loaded from the Hub: ")
    assert "\n" not in reason
    assert hub.load(*flash3.HUB_KERNEL) is reason


def test_without_the_package_kernels_the_hub_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kernels", None)
    assert "package kernels, for a/b, cannot be imported" in str(hub.load("a/b", 1))
    assert "package kernels" in str(flash3._load()) or callable(flash3._load())
