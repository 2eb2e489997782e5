"""Which layer lies in which group, and at which place of its token row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..errors import ConfigError
from .layer_group import LayerGroup


class LayerMap:
    """The groups of a cache, and the caller's numbers for their layers."""

    def __init__(self) -> None:
        self.groups: list[LayerGroup] = []
        self._places: dict[int, tuple[LayerGroup, int]] = {}

    @property
    def layers(self) -> list[int]:
        """The layers, in order."""
        return sorted(self._places)

    def check_new(self, layers: Sequence[int]) -> None:
        """Raise `ConfigError` unless `layers` are some, distinct, and not here yet."""
        taken = [layer for layer in layers if layer in self._places]
        if taken or not layers or len(set(layers)) != len(layers):
            raise ConfigError(
                f"layers {taken or list(layers)} are in the cache already, or none is named"
            )

    def add(self, group: LayerGroup, layers: Iterable[int]) -> None:
        """`layers` are the places of `group`, in order."""
        self.groups.append(group)
        self._places.update({layer: (group, at) for at, layer in enumerate(layers)})

    def place(self, layer: int) -> tuple[LayerGroup, int]:
        """The group of `layer`, and its place there.

        Raises:
            ConfigError: No such layer was added.
        """
        if layer not in self._places:
            raise ConfigError(f"layer {layer} was not added; there are {self.layers}")
        return self._places[layer]

    def members(self, group: LayerGroup) -> list[tuple[int, int]]:
        """`(place, layer)` of each layer in `group`, in order; fewer than places where dropped."""
        return sorted((at, layer) for layer, (home, at) in self._places.items() if home is group)

    def drop(self, layer: int) -> LayerGroup | None:
        """Forget a layer; returns its group if that was the last one in it."""
        group, _ = self.place(layer)
        del self._places[layer]
        return None if self.members(group) else group

    def replace(self, old: LayerGroup, new: LayerGroup) -> None:
        """The layers of `old` are the places of `new`, in the same order."""
        members = self.members(old)
        self.groups[self.groups.index(old)] = new
        self._places.update({layer: (new, at) for at, (_, layer) in enumerate(members)})

    def clear(self) -> None:
        """Forget every layer; the groups stay, to be closed."""
        self._places.clear()
