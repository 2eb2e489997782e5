"""Our kernels compile for every supported GPU architecture. No GPU is needed."""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import pytest
import torch

from vmkv import ConfigError
from vmkv.attention import decode
from vmkv.attention.nvrtc import FORMATS, Kernel, assembled
from vmkv.serve import draw
from vmkv.serve.parallel import one_shot

append_cuda = importlib.import_module("vmkv.attention.append")  # The package exports a function.
KERNELS = {
    **{f"append by {size}": (append_cuda, "_kernel", (0, size)) for size in (1, 2, 4, 8, 16)},
    **{
        f"append {dtype} in eight bits, {count} at a time": (
            append_cuda,
            "_numbers_kernel",
            ("append", 0, dtype, count, True),
        )
        for dtype in FORMATS
        for count in (1, 16 // dtype.itemsize)
    },
    **{
        f"turn and append {dtype}{' in eight bits' if encodes else ''}": (
            append_cuda,
            "_numbers_kernel",
            ("append_rotated", 0, dtype, 8, encodes),
        )
        for dtype in (torch.bfloat16, torch.float16)
        for encodes in (False, True)
    },
    **{
        f"decode {dtype}{' over eight bits' if is_fp8 else ''}, head size {dim}": (
            decode,
            "_kernel",
            (0, dtype, dim, is_fp8),
        )
        for dtype in (torch.bfloat16, torch.float16)
        for is_fp8, dims in ((False, decode.WIDE_HEAD_DIMS), (True, decode.FP8_HEAD_DIMS))
        for dim in dims
    },
    **{
        f"add {dtype} of {size}{f', and norms of {vectors} vectors' if vectors else ''}": (
            one_shot,
            "kernel_of",
            (0, dtype, size, vectors),
        )
        for dtype in FORMATS
        for size, vectors in ((1, 512), (2, None), (2, 640), (3, 3), (8, None), (8, 2048))
    },
    **{
        f"draw from {dtype}, {count} at a time": (draw, "_kernel", (0, dtype, count))
        for dtype in FORMATS
        for count in (1, 16 // dtype.itemsize)
    },
}


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    """Skip the file without NVRTC, CUDA's compiler, which pip installs."""
    try:
        assembled('extern "C" __global__ void nothing() {}', "nothing", "sm_80")
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"no NVRTC: {error}")


#: For the other architectures one kernel of each source file is enough.
FIRST_OF_A_SOURCE = {
    (module, name, its[0]): what for what, (module, name, its) in reversed(KERNELS.items())
}


@pytest.mark.parametrize(
    ("what", "architecture"),
    [
        *((what, "sm_90") for what in KERNELS),
        *itertools.product(FIRST_OF_A_SOURCE.values(), ("sm_80", "sm_100")),
    ],
)
def test_kernels_compile(what: str, architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the options of their launch."""
    if "eight bits" in what and architecture == "sm_80":
        pytest.skip("sm_80 has no FP8 conversions")
    binaries: list[bytes] = []

    def compiled(source: str, name: str, device_index: int, *options: str) -> Kernel:
        binaries.append(assembled(source, name, architecture, *options))
        return Kernel(name, device_index, 0, 0)

    module, function, arguments = KERNELS[what]
    monkeypatch.setattr(module, "compiled", compiled)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    make: Any = getattr(module, function)
    make.__wrapped__(*arguments)
    assert binaries[0].startswith(b"\x7fELF")


def test_compiler_messages_are_in_the_error() -> None:
    with pytest.raises(ConfigError, match='identifier "nowhere" is undefined'):
        assembled('extern "C" __global__ void bad() { nowhere(); }', "bad", "sm_90")
