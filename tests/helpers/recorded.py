"""Record the operations that torch dispatches, which include all reads of a value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

#: Operations that read a value from the device, or need one for the shape of their output.
SYNCS = {
    "_local_scalar_dense",
    "item",
    "nonzero",
    "equal",
    "is_nonzero",
    "masked_select",
    "unique",
    "_unique2",
    "unique_dim",
    "repeat_interleave",
}


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def recorded() -> Iterator[Counter[str]]:
    """Count the dispatches of each operation."""
    with torch.no_grad(), _Recorder() as recorder:
        yield recorder.calls
