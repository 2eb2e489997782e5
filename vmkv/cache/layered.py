"""The layers of a cache: groups over one pool, made as layers become known.

What `KVCache` is without its sequences.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as List_

import torch

from ..backend import Backend
from ..errors import ClosedError, ConfigError
from ..memory import ExtentPool
from .compaction import without_gaps
from .device_memory import open_pool
from .fp8 import LayerScales, Scales, check_layer_scales
from .geometry import Geometry, LayerShape, check_positive
from .layer_group import LayerGroup, split_layers
from .layer_map import LayerMap
from .sequence import Sequence
from .transaction import Target, grow
from .views import stream_getter, torch_device


class LayeredCache:
    """Layer groups over a pool, and the rows of them that sequences hold.

    Args: as of `KVCache`.
    """

    def __init__(
        self,
        memory: str | Backend | ExtentPool,
        *,
        max_tokens: int,
        max_sequences: int,
        budget_bytes: int | None,
        host_budget_bytes: int | None,
        layers_per_group: int | None,
    ):
        check_positive("max_tokens", max_tokens)
        check_positive("max_sequences", max_sequences)
        for name, value in (
            ("budget_bytes", budget_bytes),
            ("host_budget_bytes", host_budget_bytes),
            ("layers_per_group", layers_per_group),
        ):
            if value is not None:
                check_positive(name, value)
        self.pool = open_pool(memory, budget_bytes, host_budget_bytes)
        self.pool.attach()
        self.max_tokens = max_tokens
        self.max_sequences = max_sequences
        is_host = self.pool.backend.name == "host"
        self._layers_per_group = 1 if layers_per_group is None and is_host else layers_per_group
        self._layers = LayerMap()
        self._sequences: dict[int, Sequence] = {}
        #: The raw handle of torch's current stream on the cache's device.
        self.current_stream = stream_getter(self.pool.backend)
        #: Tokens past a sequence's length that are kept resident; see `KVCache.keep_resident`.
        self.overread_tokens = 0
        #: While true, sliding-window groups keep what has left the window (for rollback).
        self.keeps_past = False
        self.is_closed = False
        self._side_stream: int | None = None

    @property
    def device(self) -> torch.device:
        """The device whose tensors live here."""
        return torch_device(self.pool.backend)

    @property
    def groups(self) -> list[LayerGroup]:
        """The layer groups, in the order in which they were made."""
        return self._layers.groups

    @property
    def layers(self) -> list[int]:
        """The layers that were added, as the caller numbers them."""
        return self._layers.layers

    # ---- layers ---------------------------------------------------------------------------

    def add_layers(
        self,
        layers: Iterable[int],
        *,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        v_head_dim: int | None = None,
        num_v_heads: int | None = None,
        window_tokens: int | None = None,
        num_past_tokens: int = 0,
        scales: List_[LayerScales] | None = None,
    ) -> list[LayerGroup]:
        """Add layers of one shape; returns the groups made for them.

        Sequences that are open already get memory for the tokens they hold.

        Args:
            layers: The caller's numbers for them.
            num_kv_heads: Key heads, and value heads unless `num_v_heads` says otherwise.
            head_dim: Width of a key head, and of a value head unless `v_head_dim` does.
            dtype: Element type.
            v_head_dim: See `head_dim`.
            num_v_heads: See `num_kv_heads`.
            window_tokens: For sliding-window layers, how many tokens a query sees.
            num_past_tokens: Where the first query will be, in sequences that are open already:
                what lies before its window is not mapped.
            scales: For each layer, what its keys and values in `float8_e4m3fn` are multiplied
                by when they are read; see `fp8.encode`. By default 1.

        Raises:
            ConfigError: A size is impossible, a layer was added before, or scales do not fit.
            OutOfPagesError, OutOfAddressSpaceError: Nothing was added.
        """
        self.check_open()
        wanted = list(layers)
        self._layers.check_new(wanted)
        if window_tokens is not None:
            check_positive("window_tokens", window_tokens)
        shape = LayerShape(
            num_k_heads=num_kv_heads,
            k_dim=head_dim,
            num_v_heads=num_kv_heads if num_v_heads is None else num_v_heads,
            v_dim=head_dim if v_head_dim is None else v_head_dim,
            itemsize_bytes=dtype.itemsize,
        )
        if scales is not None:
            check_layer_scales(scales, wanted, shape, dtype)
        made: list[LayerGroup] = []
        members: list[list[int]] = []
        try:
            for part in split_layers(len(wanted), self._layers_per_group):
                geometry = Geometry(
                    len(part), shape, self.pool.page_bytes, self.max_tokens, self.max_sequences
                )
                of_part = None if scales is None else [scales[at] for at in part]
                made.append(LayerGroup(self.pool, geometry, dtype, window_tokens, of_part))
                members.append([wanted[at] for at in part])
            targets = [
                Target(sequence.row, sequence.num_tokens, num_past_tokens, sequence.tenant)
                for sequence in self._sequences.values()
            ]
            self._grow(targets, made)
        except BaseException:
            for group in made:
                group.close()
            raise
        for group, group_layers in zip(made, members, strict=True):
            self._layers.add(group, group_layers)
        return made

    def drop_layers(self, layers: Iterable[int]) -> None:
        """Forget layers that were added but never written.

        Their room in the token row stays empty. A group with none left is closed.
        """
        self.check_open()
        for layer in layers:
            emptied = self._layers.drop(layer)
            if emptied is not None:
                emptied.close()
                self.groups.remove(emptied)

    def compact(self) -> bool:
        """Close the gaps that `drop_layers` left, by moving the groups that have any.

        Tensors made before do not follow: make new ones. Returns whether something moved.

        Raises:
            OutOfPagesError, OutOfAddressSpaceError: Nothing moved; the gaps stay.
            ConfigError: A sequence is swapped out. Nothing moved.
        """
        self.check_open()
        if not all(each.is_resident for each in self._sequences.values()):
            raise ConfigError("a sequence is swapped out; swap_in() before moving layers")
        moved = False
        for group in tuple(self.groups):
            places = [at for at, _ in self._layers.members(group)]
            if len(places) < group.geometry.num_layers:
                live = self._sequences.values()
                lengths = [(each.row, each.num_tokens, each.tenant) for each in live]
                self._layers.replace(group, without_gaps(group, places, lengths, self._grow))
                group.close()
                moved = True
        return moved

    def place(self, layer: int) -> tuple[LayerGroup, int]:
        """The group of `layer`, and its index in the group.

        Raises:
            ConfigError: No such layer was added.
        """
        return self._layers.place(layer)

    def keys(self, layer: int) -> torch.Tensor:
        """All rows' keys of `layer`: `[rows, row_tokens, k_heads, k_dim]`, mostly unmapped.

        What kernels take that are told rows and lengths, as it is stored: see `scales`. Only
        tokens below a live sequence's `num_tokens` (and `overread_tokens` more) may be touched.
        """
        self.check_open()
        group, at = self.place(layer)
        return group.views.keys[at].transpose(1, 2)

    def values(self, layer: int) -> torch.Tensor:
        """All rows' values of `layer`: `[rows, row_tokens, v_heads, v_dim]`, as `keys`."""
        self.check_open()
        group, at = self.place(layer)
        return group.views.values[at].transpose(1, 2)

    def scales(self, layer: int) -> Scales | None:
        """What stored keys and values of `layer` are multiplied by; None for nothing."""
        group, at = self.place(layer)
        return group.scales_at(at)

    def note_stream(self) -> None:
        """Say that torch's current stream works on this cache's memory. Cost: about 0.3 µs."""
        self.pool.backend.note_stream(self.current_stream())

    def side_stream(self) -> int:
        """The stream on which sequences are swapped, made when first needed."""
        if self._side_stream is None:
            self._side_stream = self.pool.backend.new_stream()
        return self._side_stream

    def _end_side_stream(self) -> None:
        if self._side_stream is not None:
            self.pool.backend.stream_destroy(self._side_stream)
            self._side_stream = None

    def _grow(self, targets: list[Target], groups: list[LayerGroup]) -> None:
        """Map what `targets` lack in `groups`, all or nothing."""
        if self.keeps_past:
            targets = [target._replace(num_past_tokens=0) for target in targets]
        grow(self.pool, groups, targets, self.overread_tokens, self.current_stream())

    def check_open(self) -> None:
        """Raise `ClosedError` if the cache is closed."""
        if self.is_closed:
            raise ClosedError("this KVCache is closed; make a new one")
