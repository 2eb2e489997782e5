"""Kernels from the Hugging Face Hub: FlashAttention, built for this torch, without a compiler.

transformers gets them the same way. The package `kernels` picks the build for this machine, fetches
it at the first use into the Hub's cache, and takes it from there when HF_HUB_OFFLINE=1 says that
there is no network. It takes them from organisations that it trusts only.
"""

from __future__ import annotations

import functools
import logging
from types import ModuleType

from ..errors import one_line

_LOG = logging.getLogger(__name__)


@functools.cache
def load(repository: str, version: int) -> ModuleType | str:
    """A kernel's package, or why there is none.

    Args:
        repository: On the Hub: `"kernels-community/flash-attn3"`.
        version: Of its interface, as the Hub numbers it.

    Cost: at the first use on a machine some hundred megabytes from the network.
    """
    try:
        from kernels import get_kernel
    except Exception as error:  # noqa: BLE001  # a release that does not fit others it needs
        return f"package kernels, for {repository}, cannot be imported: {one_line(error)}"
    try:
        module: ModuleType = get_kernel(repository, version=version)
    except Exception as error:  # noqa: BLE001  # no network, no build for this machine, …
        return f"the Hub's {repository} cannot be had: {one_line(error)}"
    _LOG.info("attention takes %s, version %d, from the Hugging Face Hub", repository, version)
    return module
