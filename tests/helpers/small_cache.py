"""Shorten constants that are chosen for GPUs, so that short sequences exceed them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

# Imported now: a later import would keep the small values.
import vmkv.hf.generation
import vmkv.serve  # noqa: F401


@contextmanager
def small_constants(underread_tokens: int, block_tokens: int) -> Iterator[None]:
    """Set the tokens kept before a window and the tokens of a prefix block, in all modules."""
    values = {"UNDERREAD_TOKENS": underread_tokens, "BLOCK_TOKENS": block_tokens}
    with ExitStack() as stack:
        for name, value in values.items():
            homes = [
                module
                for path, module in sorted(sys.modules.items())
                if path.startswith("vmkv.") and name in vars(module)
            ]
            assert homes, f"nothing in vmkv has {name}"
            for module in homes:
                stack.enter_context(mock.patch.object(module, name, value))
        yield
