"""Arithmetic of capacity: the memory of sequences, and how many fit.

Sizes are those of `cache.geometry` and `cache.growth`, so they are what a `KVCache` maps (tests
compare the two). Layers in transformers' own tensors and states of fixed size count by their
contents. Not counted: windows kept while a prompt's chunk is computed, parked rows, which are
evicted when memory is short, and transformers' second copy of a layer while it appends.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core.cache.geometry import (
    Geometry,
    check_positive,
    growth_quantum_class,
    largest_class_for_window,
)
from ..core.cache.layer_group import UNDERREAD_TOKENS
from ..units import MiB, div_ceil
from .models import LayerKind

#: Page size: the driver's granularity on every NVIDIA GPU so far.
PAGE_BYTES = 2 * MiB
#: Class of the pool's largest extents: 64 MiB in pages of 2 MiB.
_LARGEST_CLASS = 5
#: Default block size of paged caches.
_BLOCK_TOKENS = 16


@dataclass(frozen=True)
class KindBytes:
    """Memory of one kind of layers in one sequence.

    Attributes:
        kind: The layers.
        token_bytes: Bytes of a token in all of these layers.
        kept_tokens: Tokens inside the window.
        used_bytes: Bytes of the kept tokens.
        prompt_bytes: Bytes mapped after a prompt of that length.
        most_bytes: Most bytes mapped at that length during growth by single tokens.
        shared_bytes: Bytes of a shared common prefix.
    """

    kind: LayerKind
    token_bytes: int
    kept_tokens: int
    used_bytes: int
    prompt_bytes: int
    most_bytes: int
    shared_bytes: int

    @property
    def mean_bytes(self) -> int:
        """Bytes mapped on average during growth."""
        return (self.prompt_bytes + self.most_bytes) // 2


def kind_bytes(kind: LayerKind, num_tokens: int, *, shared_tokens: int = 0) -> KindBytes:
    """Compute the memory of one kind of layers in one sequence; raises `ConfigError` for no tokens.

    Layers in transformers' own tensors are as long as their contents, and never shared.
    """
    check_positive("num_tokens", num_tokens)
    window = kind.window_tokens
    kept_tokens = num_tokens if window is None else min(num_tokens, window - 1)
    token_bytes = kind.cached_token_bytes
    used_bytes = kept_tokens * token_bytes
    if not kind.is_paged:
        return KindBytes(kind, token_bytes, kept_tokens, used_bytes, used_bytes, used_bytes, 0)
    geometry = Geometry(kind.num_layers, kind.shape, PAGE_BYTES, num_tokens, 1)
    largest_class, first_page, lagging_pages = _LARGEST_CLASS, 0, 0
    if window is not None:
        largest_class = largest_class_for_window(geometry.pages_for(window), _LARGEST_CLASS)
        first_page = _first_page(geometry, window, num_tokens)
        # A growth retires the pages that the window had left behind before it.
        before = _first_page(geometry, window, num_tokens - 1)
        lagging_pages = first_page - before
        if before:  # An extent is freed once the window has passed it.
            lagging_pages += (1 << largest_class) - 1
    pages = geometry.pages_for(num_tokens) - first_page
    late_pages = (1 << growth_quantum_class(pages, largest_class)) - 1
    # A sequence as long as its window has left the prefix behind, so it is not shared.
    is_shared = window is None or num_tokens < window
    # The last token is always computed, for its logits.
    shared_tokens = min(shared_tokens, num_tokens - 1)
    shared_pages = min(geometry.whole_pages_below(shared_tokens), pages) if is_shared else 0
    return KindBytes(
        kind,
        geometry.token_bytes,
        kept_tokens,
        kept_tokens * geometry.token_bytes,
        pages * PAGE_BYTES,
        (pages + lagging_pages + late_pages) * PAGE_BYTES,
        shared_pages * PAGE_BYTES,
    )


def _first_page(geometry: Geometry, window_tokens: int, num_tokens: int) -> int:
    """Return the first page that a kernel may read for a query at `num_tokens`."""
    first_seen = num_tokens - window_tokens + 1
    return geometry.whole_pages_below(max(0, first_seen - UNDERREAD_TOKENS))


@dataclass(frozen=True)
class SequenceBytes:
    """Memory of one sequence in all layers, under several memory layouts.

    Attributes:
        used_bytes: Bytes of its tokens.
        vmkv_bytes: Bytes that vmkv maps on average during growth.
        most_bytes: Most bytes that vmkv maps.
        shared_bytes: Bytes of a shared common prefix.
        block_table_bytes: In blocks of 16 tokens with a block table.
        layer_pages_bytes: In pages that hold one layer's keys or values.
        longest_bytes: In one tensor with room for the longest sequence.
    """

    used_bytes: int
    vmkv_bytes: int
    most_bytes: int
    shared_bytes: int
    block_table_bytes: int
    layer_pages_bytes: int
    longest_bytes: int


def sequence_bytes(
    parts: list[KindBytes],
    num_tokens: int,
    longest_tokens: int,
    *,
    state_bytes: int = 0,
) -> SequenceBytes:
    """Add up all kinds of layers, for each memory layout; `state_bytes` is the same in all."""
    block = layer_pages = longest = state_bytes
    for part in parts:
        kind = part.kind
        blocks = div_ceil(num_tokens, _BLOCK_TOKENS)
        if kind.window_tokens is not None:  # Blocks that the window has passed are freed.
            blocks = min(blocks, div_ceil(part.kept_tokens, _BLOCK_TOKENS) + 1)
        block += blocks * _BLOCK_TOKENS * part.token_bytes
        # Paging by layer keeps tokens outside the window: rows grow at the end only.
        for half_bytes in (kind.shape.k_bytes, kind.shape.v_bytes):
            pages = div_ceil(num_tokens * half_bytes, PAGE_BYTES)
            layer_pages += kind.num_layers * pages * PAGE_BYTES
        longest += part.token_bytes * min(longest_tokens, kind.window_tokens or longest_tokens)
    return SequenceBytes(
        used_bytes=state_bytes + sum(part.used_bytes for part in parts),
        vmkv_bytes=state_bytes + sum(part.mean_bytes for part in parts),
        most_bytes=state_bytes + sum(part.most_bytes for part in parts),
        shared_bytes=sum(part.shared_bytes for part in parts),
        block_table_bytes=block,
        layer_pages_bytes=layer_pages,
        longest_bytes=longest,
    )


@dataclass(frozen=True)
class Fit:
    """Number of sequences that fit, by memory layout.

    Attributes:
        longest: One tensor each, with room for the longest sequence.
        layer_pages: Pages of one layer's keys or values.
        block_table: Blocks of 16 tokens.
        vmkv: Pages that all layers share.
        vmkv_shared: As `vmkv`, with the common prefix mapped once.
        vmkv_swapped: As `vmkv_shared`, with idle sequences in host memory.
    """

    longest: int
    layer_pages: int
    block_table: int
    vmkv: int
    vmkv_shared: int
    vmkv_swapped: int


def fit(sequence: SequenceBytes, budget_bytes: int, swap_bytes: int = 0) -> Fit:
    """Compute how many sequences fit `budget_bytes`, plus `swap_bytes` of host memory."""
    own_bytes = max(1, sequence.vmkv_bytes - sequence.shared_bytes)
    shared = max(0, budget_bytes - sequence.shared_bytes) // own_bytes
    return Fit(
        longest=budget_bytes // sequence.longest_bytes,
        layer_pages=budget_bytes // sequence.layer_pages_bytes,
        block_table=budget_bytes // sequence.block_table_bytes,
        vmkv=budget_bytes // sequence.vmkv_bytes,
        vmkv_shared=shared,
        vmkv_swapped=shared + swap_bytes // own_bytes,
    )


def need_bytes(sequence: SequenceBytes, num_users: int) -> int:
    """Compute the memory of `num_users` sequences that share their prefix."""
    return sequence.shared_bytes + num_users * (sequence.vmkv_bytes - sequence.shared_bytes)
