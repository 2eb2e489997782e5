"""Names that most tests of pools share."""

from __future__ import annotations

from collections.abc import Callable

from vmkv import ExtentPool
from vmkv.units import KiB

PAGE = 4 * KiB
MakePool = Callable[..., ExtentPool]
