"""Argument types; argparse adds the option's name to their errors.

Numbers are bounded on both sides, so that a value larger than any machine is refused here, and does
not overflow an allocation, a driver or a clock later.
"""

from __future__ import annotations

import argparse
import difflib
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import shown
from ..units import GiB, MiB

Commands = Any  # argparse's own type for subparsers is private.

#: Kernels and drivers count with int32.
_INTEGER_MAX = 2**31 - 1
#: A pebibyte, in GiB and in MiB: more than any host has.
_GIB_MAX, _MIB_MAX = 2**20, 2**30
#: Eleven days and a half; the system takes timeouts of up to 24 days.
_SECONDS_MAX = 1_000_000
#: Longer numbers are slow to convert, and out of every range.
_DIGITS_MAX = 20


def integer(low: int, high: int = _INTEGER_MAX) -> Callable[[str], int]:
    """Make a type for integers in a range; `8k` is 8192, `1m` 1048576."""

    def parse(text: str) -> int:
        factor = {"k": 1 << 10, "m": 1 << 20}.get(text[-1:].lower(), 1)
        digits = text[:-1] if factor > 1 else text
        if len(digits) <= _DIGITS_MAX and digits.isascii() and digits.isdecimal():
            value = int(digits) * factor
            if low <= value <= high:
                return value
        raise argparse.ArgumentTypeError(f"{shown(text)} is no integer from {low} to {high:,}")

    return parse


def count_or_none(text: str) -> int | None:
    """Parse a number, which is None if it is 0."""
    return count(text) or None


def layers(text: str) -> tuple[int | str, ...]:
    """Parse layer numbers and `sliding`, separated by commas."""
    parse = integer(0, 1 << 16)
    return tuple(each if each == "sliding" else parse(each) for each in text.split(","))


def number(low: float, high: float, unit: str) -> Callable[[str], float]:
    """Make a type for numbers in a range, both ends included."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:  # NaN fails every comparison.
            raise argparse.ArgumentTypeError(
                f"{shown(text)} is no number of {unit} from {low:g} to {high:,}"
            )
        return value

    return parse


def size(low: float, high: float, unit: str, unit_bytes: int) -> Callable[[str], int]:
    """Make a type for sizes, typed in a unit and returned in bytes."""
    parse = number(low, high, unit)
    return lambda text: round(parse(text) * unit_bytes)


positive_int = integer(1)
count = integer(0)
port = integer(0, 65535)
gib = size(0, _GIB_MAX, "GiB", GiB)
#: The lower bound is about one byte.
positive_gib = size(1e-9, _GIB_MAX, "GiB", GiB)
positive_mib = size(1e-6, _MIB_MAX, "MiB", MiB)
seconds = number(1e-3, _SECONDS_MAX, "seconds")
#: A share of the whole.
share = number(0.01, 1.0, "shares")


class Parser(argparse.ArgumentParser):
    """Parser of a command; options are not abbreviated, and errors name the nearest option."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, **options)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse; an unknown option that resembles one of this command is an error here."""
        parsed, unknown = super().parse_known_args(args, namespace)
        names = [each.strip("-") for each in self._option_string_actions]
        for flag in [each.partition("=")[0] for each in unknown if each.startswith("-")]:
            for near in difflib.get_close_matches(flag.strip("-"), names, 1):
                self.error(f"there is no option {shown(flag)}; did you mean --{near}?")
        return parsed, unknown


class DefaultsFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults in the help, where there are any."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_default = action.default not in (None, False, (), []) and action.nargs != 0
        return super()._get_help_string(action) if has_default else action.help


def add_source(add: Callable[..., object]) -> None:
    """Add the options that say where a model comes from."""
    add("--revision", type=name, help="branch, tag or commit of the model on the Hub")
    add("--trust-remote-code", action="store_true", help="run code that comes with the model")


def source_of(arguments: argparse.Namespace, of: str | None = None) -> dict[str, Any]:
    """Return the options of `from_pretrained` for the model, or for a tokenizer named `of`."""
    revision = arguments.revision if of in (None, arguments.model) else None
    return {"trust_remote_code": arguments.trust_remote_code, "revision": revision}


def device(text: str) -> str:
    """Parse a device: `auto`, `cpu`, `cuda` or `cuda:N`."""
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", text):
        raise argparse.ArgumentTypeError(f"{shown(text)} is no device: auto, cpu, cuda or cuda:N")
    return text


def name(text: str) -> str:
    """Parse a name or path, which must not be empty."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the name is empty")
    return text
