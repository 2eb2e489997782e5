"""What two processes must agree on to read each other's rows, and how a stranger's claims are read.

Rows that go to a file or to another process are raw token rows. They mean something only to a
cache that lays its layers out alike, so whoever writes them says how, and whoever reads them
compares before anything is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ConfigError
from .row_space import RowSpace

#: What else than layers a group's layout can differ in, by what the user calls it.
_REMEDIES = {"dtype": "dtype, or kv_dtype", "scales": "kv_scales"}


def describe_groups(space: RowSpace) -> list[dict[str, Any]]:
    """How layers are laid out, as plain values: one entry for each group, in order."""
    return [
        {"places_and_layers": [list(each) for each in space.members(group)], **group.layout}
        for group in space.groups
    ]


def check_groups(space: RowSpace, theirs: Sequence[Mapping[str, Any]], where: str) -> None:
    """Compare the groups that `where` describes with those of the cache.

    Raises:
        ConfigError: They differ; it says in what.
    """
    mine = describe_groups(space)
    if not mine:
        raise ConfigError(f"this cache has no layers yet; add those of {where} first")
    if len(mine) != len(theirs):
        raise ConfigError(
            f"{where} has {len(theirs)} layer groups and this cache {len(mine)}: make the cache "
            "with the same layers and the same layers_per_group"
        )
    for at, (ours, others) in enumerate(zip(mine, theirs, strict=True)):
        for name, value in ours.items():
            if others.get(name) != value:
                raise ConfigError(
                    f"layer group {at} of {where} has {name}={_shortened(others.get(name))}, this "
                    f"cache has {_shortened(value)}: make the cache with the same "
                    f"{_REMEDIES.get(name, 'layers')}"
                )


def check_length(space: RowSpace, num_tokens: int, where: str) -> None:
    """Raise `ConfigError` unless rows of the cache hold `num_tokens` tokens."""
    if num_tokens > space.max_tokens:
        raise ConfigError(
            f"{where} holds {num_tokens} tokens, and rows of this cache end at "
            f"max_tokens={space.max_tokens}: make it with a larger one"
        )


# ---- a stranger's claims ------------------------------------------------------------------


class Claims:
    """A JSON object that somebody else wrote, read with suspicion.

    Args:
        values: What it should be a mapping of.
        where: Whose it is, for messages.

    Raises:
        ConfigError: It is no mapping; in every method, that the value is not what it must be.
    """

    def __init__(self, values: object, where: str):
        if not isinstance(values, dict):
            raise ConfigError(f"{where}: {_shortened(values)} is no description of a sequence")
        self._values: dict[str, object] = values
        self._where = where

    def integer(self, name: str, low: int, high: int) -> int:
        """An integer in `[low, high]`."""
        value = self._values.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._wrong(name, f"an integer from {low} to {high}")
        return value

    def text(self, name: str) -> str:
        """A string."""
        value = self._values.get(name)
        if not isinstance(value, str):
            raise self._wrong(name, "a string")
        return value

    def integers(self, name: str, low: int, high: int, *, at_most: int) -> list[int]:
        """A list of at most so many integers in `[low, high]`."""
        values = self._list(name)
        is_right = all(type(each) is int and low <= each <= high for each in values)
        if len(values) > at_most or not is_right:
            raise self._wrong(name, f"{at_most} integers at most, from {low} to {high}")
        return values

    def claims(self, name: str) -> list[Claims]:
        """A list of further objects."""
        return [Claims(each, self._where) for each in self._list(name)]

    @property
    def values(self) -> Mapping[str, object]:
        """As it came."""
        return self._values

    def _list(self, name: str) -> list[Any]:
        values = self._values.get(name)
        if not isinstance(values, list):
            raise self._wrong(name, "a list")
        return values

    def _wrong(self, name: str, what: str) -> ConfigError:
        return ConfigError(
            f"{self._where}: {name}={_shortened(self._values.get(name))} is not {what}"
        )


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
