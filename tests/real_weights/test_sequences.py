"""What happens to a sequence's memory halfway through an answer does not change the answer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.sequence_cache import add_layers, sequence_cache

from vmkv import ExtentPool, HostBackend, KVCache, Sequence
from vmkv.units import KiB, MiB

pytestmark = [pytest.mark.real_weights, pytest.mark.slow]

ROOT = Path(__file__).parents[2]


@pytest.fixture
def cache(real: Any) -> Iterator[KVCache]:
    """Rows for the model's layers, with host memory beside, and memory that can be shared."""
    pool = ExtentPool(
        HostBackend(4 * KiB),
        64 * MiB,
        host_budget_bytes=64 * MiB,
        is_shareable=True,
        page_bytes=64 * KiB,
        close_when_unused=True,
    )
    with KVCache(pool, max_tokens=512, max_sequences=4, layers_per_group=30) as cache:
        yield add_layers(cache, real.model.config, real.kv_dtype)
        cache.check()


def _swapped(sequence: Sequence, folder: Path) -> Sequence:
    sequence.swap_out()
    assert not sequence.is_resident
    sequence.swap_in()
    return sequence


def _spilled(sequence: Sequence, folder: Path) -> Sequence:
    assert sequence.spill(256 * KiB)
    return sequence


def _saved_and_loaded(sequence: Sequence, folder: Path) -> Sequence:
    sequence.save(folder / "kv")
    sequence.close()
    sequence.cache.trim()
    return sequence.cache.load(folder / "kv")


def _saved_while_swapped_out(sequence: Sequence, folder: Path) -> Sequence:
    sequence.swap_out()
    return _saved_and_loaded(sequence, folder)


def _forked(sequence: Sequence, folder: Path) -> Sequence:
    return sequence.fork()


@pytest.mark.parametrize(
    "happens",
    [_swapped, _spilled, _saved_and_loaded, _saved_while_swapped_out, _forked],
    ids=lambda happens: happens.__name__[1:],
)
def test_answer_goes_on(
    real: Any,
    prompts: list[list[int]],
    cache: KVCache,
    tmp_path: Path,
    happens: Callable[[Sequence, Path], Sequence],
) -> None:
    """Half of it before, half of it after."""
    prompt = prompts[2]
    expected = real.expected(prompt)
    sequence = cache.open()
    first = real.generate(prompt, sequence_cache(sequence), 8)[0].tolist()
    assert expected[:8] == first[len(prompt) :]
    sequence = happens(sequence, tmp_path)
    whole = real.generate(first, sequence_cache(sequence), 8)[0].tolist()
    assert expected == whole[len(prompt) :]


_IMPORTER = """
import json, sys
import torch
import transformers
from helpers.sequence_cache import add_layers, sequence_cache
from vmkv import ExtentPool, HostBackend, KVCache

folder, path, prompt, kv_dtype = *sys.argv[1:3], json.loads(sys.argv[3]), sys.argv[4]
torch.set_num_threads(1)
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
pool = ExtentPool(HostBackend(4096), 1 << 26, page_bytes=1 << 16, close_when_unused=True)
with KVCache(pool, max_tokens=512, max_sequences=2, layers_per_group=30) as cache:
    sequence = add_layers(cache, model.config, kv_dtype).import_prefix(path)
    num_imported = sequence.num_tokens
    output = model.generate(
        torch.tensor([prompt]),
        past_key_values=sequence_cache(sequence),
        max_new_tokens=8,
        do_sample=False,
    )
    print(json.dumps([num_imported, output[0, len(prompt):].tolist()]))
"""


def test_answer_goes_on_in_another_process(
    real: Any, prompts: list[list[int]], cache: KVCache, tmp_path: Path
) -> None:
    """Which reads the first half where it lies; what fills no page it computes itself."""
    prompt = prompts[2]
    expected = real.expected(prompt)
    sequence = cache.open()
    first = real.generate(prompt, sequence_cache(sequence), 8)[0].tolist()
    with sequence.export(tmp_path / "s") as exporter:
        exporter.start()
        path = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
        child = subprocess.run(
            [
                sys.executable,
                "-c",
                _IMPORTER,
                real.folder,
                tmp_path / "s",
                str(first),
                real.kv_dtype,
            ],
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert 0 == child.returncode, child.stderr
        num_imported = exporter.num_tokens
        assert 20 < num_imported < len(first)
    assert f"[{num_imported}, {expected[8:]}]" == child.stdout.strip()
    # And here: what was exported is frozen, and the answer goes on behind it.
    whole = real.generate(first, sequence_cache(sequence), 8)[0].tolist()
    assert expected == whole[len(prompt) :]
