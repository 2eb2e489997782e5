"""Types for argparse, whose complaints name the option by themselves."""

from __future__ import annotations

import argparse
import math
from typing import Any

Commands = Any  # argparse's own type for subparsers is private.


def positive_int(text: str) -> int:
    """An integer above zero; `8k` is 8192, `1m` 1048576."""
    factor = {"k": 1 << 10, "m": 1 << 20}.get(text[-1:].lower(), 1)
    digits = text[:-1] if factor > 1 else text
    if not digits.isdecimal() or not int(digits):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive integer")
    return int(digits) * factor


def count(text: str) -> int:
    """An integer, zero included."""
    return 0 if text == "0" else positive_int(text)


def positive_number(text: str) -> float:
    """A number above zero."""
    value = number(text)
    if not value:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return value


def number(text: str) -> float:
    """A number, zero included."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from zero up")
    return value


def port(text: str) -> int:
    """A TCP port; 0 for any free one."""
    value = count(text)
    if value > 65535:
        raise argparse.ArgumentTypeError(f"{text} is no port; the last one is 65535")
    return value
