"""Which operations torch dispatches: whatever reads a value back is among them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

#: What reads a value back from the device, or needs one to know its own shape.
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
    """How often each operation is dispatched while this lasts."""
    with torch.no_grad(), _Recorder() as recorder:
        yield recorder.calls
