"""Small CUDA kernels of vmkv: compiled by NVRTC once, launched natively.

Triton's launcher takes 14 us of host time and needs a C compiler on the user's machine, while NVRTC
comes with torch and cuda-python. A launch takes 3 us. Arguments are 64-bit words, see
vmkv/core/_native/launch.c.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import torch

from .. import compile_cache
from ..core import _native
from ..core.backend.cuda import checked
from ..errors import ConfigError, CudaDriverError

FORMATS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
"""Value of `-DFORMAT` by dtype."""


def source(*names: str) -> str:
    """Return the CUDA source of some files beside this one, one after the other."""
    return "".join(Path(__file__).with_name(f"{name}.cu").read_text() for name in names)


NUMBERS = source("numbers")
"""CUDA source: conversion between numbers of `-DFORMAT` and float."""

_checked = functools.partial(checked, details="cannot prepare the kernel")


class Kernel(NamedTuple):
    """A compiled kernel on one device: driver handles of `cuLaunchKernel` and of the function."""

    name: str
    device_index: int
    launch_fn: int
    function: int


def launch(kernel: Kernel, num_blocks: int, num_threads: int, words: bytes) -> None:
    """Launch `kernel` on the current stream of its device, in 3 us; raises `CudaDriverError`."""
    _, index, launch_fn, function = kernel
    stream = torch._C._cuda_getCurrentRawStream(index)
    if torch._C._cuda_getDevice() == index:
        status = _native.launch(launch_fn, function, num_blocks, num_threads, stream, words)
    else:  # A model spread over devices: launches go to the current context.
        with torch.cuda.device(index):
            status = _native.launch(launch_fn, function, num_blocks, num_threads, stream, words)
    if status:
        raise CudaDriverError(kernel.name, status, f"CUresult {status}", "the launch was refused")


def addresses(*tensors: torch.Tensor | None) -> list[int]:
    """Return the tensors' addresses as arguments of a kernel; 0 for None."""
    return [0 if each is None else each.data_ptr() for each in tensors]


@functools.cache
def compiled(source: str, name: str, device_index: int, *options: str) -> Kernel:
    """Compile a kernel for a device, 15 to 60 ms once; may raise `ConfigError`."""
    from cuda.bindings import driver

    major, minor = torch.cuda.get_device_capability(device_index)
    binary = assembled(source, name, f"sm_{major}{minor}", *options)
    with torch.cuda.device(device_index):
        torch.cuda.current_stream()  # Creates the device's context.
        # The module lives as long as the process, as torch's own kernels do.
        module = _checked(name, driver.cuModuleLoadData(binary))
        function = _checked(name, driver.cuModuleGetFunction(module, name.encode()))
    launch_fn, *_ = _checked(name, driver.cuGetProcAddress(b"cuLaunchKernel", 12000, 0))
    return Kernel(name, device_index, int(launch_fn), int(function))


def assembled(source: str, name: str, architecture: str, *options: str) -> bytes:
    """Compile the kernel `name` of `source` to a cubin, or read the kept one; needs no device."""
    from cuda.bindings import nvrtc

    release = _checked(name, nvrtc.nvrtcVersion())
    file = compile_cache.name_of("kernel", source, name, architecture, options, release)
    found = compile_cache.read(file)
    if found is not None:
        return found
    flags = [each.encode() for each in (f"--gpu-architecture={architecture}", *options)]
    program = _checked(
        name, nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), 0, [], [])
    )
    if int(nvrtc.nvrtcCompileProgram(program, len(flags), flags)[0]):
        log = b" " * _checked(name, nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise ConfigError(f"NVRTC cannot compile the kernel {name!r}: {log.decode()}")
    binary: bytes = b" " * _checked(name, nvrtc.nvrtcGetCUBINSize(program))
    _checked(name, nvrtc.nvrtcGetCUBIN(program, binary))
    nvrtc.nvrtcDestroyProgram(program)
    compile_cache.write(file, binary)
    return binary
