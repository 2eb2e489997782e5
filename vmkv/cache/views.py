"""Torch tensors over virtual ranges.

A range becomes a one-dimensional byte tensor through DLPack with the device named explicitly
(a tensor made from a bare pointer would have to guess, and guesses "CPU" over addresses that
are not mapped). Everything else is a strided view of it.

The byte tensor spans the whole reservation, mapped or not. Only ever hand out views that are
cut to what is mapped: `.sum()`, `.zero_()` or `copy.deepcopy` of anything larger touches
addresses with nothing behind them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .. import _native
from ..backend import Backend
from .geometry import Geometry

_DLPACK_CUDA = 2


def torch_device(backend: Backend) -> torch.device:
    """The torch device whose tensors live in this backend's memory."""
    device_type, index = backend.dlpack_device
    return torch.device("cuda", index) if device_type == _DLPACK_CUDA else torch.device("cpu")


def stream_getter(backend: Backend) -> Callable[[], int]:
    """A function that returns the raw handle of torch's current stream on this device."""
    device_type, index = backend.dlpack_device
    if device_type != _DLPACK_CUDA:
        return lambda: 0
    # The private name costs 0.1 µs; torch.cuda.current_stream builds an object for 2 µs.
    raw: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
    return lambda: raw(index)


@dataclass(frozen=True)
class GroupViews:
    """The tensors over one layer group.

    Attributes:
        keys: `[layers, rows, k_heads, row_tokens, k_dim]`, strided over the reservation.
        values: `[layers, rows, v_heads, row_tokens, v_dim]`.
    """

    keys: torch.Tensor
    values: torch.Tensor


def group_views(
    backend: Backend,
    address: int,
    geometry: Geometry,
    dtype: torch.dtype,
    counter: _native.ViewCounter,
    *,
    inference: bool = False,
) -> GroupViews:
    """Tensors over the reservation at `address`.

    A cache has two sets of them. Ordinary tensors work everywhere, but in inference mode each
    operation on one passes through autograd's dispatch all the same, which costs a decode step
    of 32 layers 1 ms. Inference tensors do not, and must not be written outside that mode.

    Args:
        backend: Whose memory it is.
        address: Where the reservation starts.
        geometry: How it is divided.
        dtype: The element type, of the geometry's item size.
        counter: Counts the storages that point into the range; the reservation must outlive it.
        inference: Make inference tensors.
    """
    device_type, device_index = backend.dlpack_device
    capsule = _native.view_capsule(
        address, geometry.reserved_bytes, device_type, device_index, counter
    )
    with torch.inference_mode(mode=inference), torch.no_grad():
        flat = torch.utils.dlpack.from_dlpack(capsule).view(dtype)
        item_bytes = geometry.shape.itemsize_bytes

        def strided(num_heads: int, dim: int, offset_bytes: int) -> torch.Tensor:
            steps_bytes = geometry.layer_bytes, geometry.row_bytes, geometry.token_bytes
            layer, row, token = (each // item_bytes for each in steps_bytes)
            return flat.as_strided(
                (geometry.num_layers, geometry.num_rows, num_heads, geometry.row_tokens, dim),
                (layer, row, dim, token, 1),
                offset_bytes // item_bytes,
            )

        shape = geometry.shape
        keys = strided(shape.num_k_heads, shape.k_dim, geometry.k_offset_bytes(0))
        values = strided(shape.num_v_heads, shape.v_dim, geometry.v_offset_bytes(0))
    return GroupViews(keys, values)
