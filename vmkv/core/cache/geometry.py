"""Byte offsets in a layer group, and growth steps: pure arithmetic, no memory.

The layers of a group lie side by side in one *token row*, so that a page holds few tokens of many
layers rather than many tokens of one:

    row r      | token 0 | token 1 | token 2 | ...                       | (row_tokens of them)
    token row  | layer 0: K heads, V heads | layer 1: K heads, V heads | ... | padding |

For Llama-3-8B a token row is 32 layers x 2 x 8 heads x 128 x 2 B = 128 KiB, so a page of 2 MiB
holds 16 tokens and growth costs one mapping where a per-layer layout needs 64. See Note [All layers
share a page] in DESIGN.md.

See DESIGN.md, Note [Growth quanta].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from ...errors import ConfigError
from ...units import TiB, align_up, format_bytes

# ---- growth --------------------------------------------------------------------------------------

#: A row grows by the largest class not above 1/64 of it. 1/32 would halve the calls and reach
#: the 2 % of waste that DESIGN.md allows; 1/128 has no measurable benefit.
_QUANTUM_DIVISOR = 64
#: A sliding window keeps at most this many extents more than it needs.
_WINDOW_DIVISOR = 8


def growth_quantum_class(held_pages: int, largest_class: int) -> int:
    """Return the size class of the growth quantum of a row that holds `held_pages`."""
    quantum_pages = max(1, held_pages // _QUANTUM_DIVISOR)
    return min(quantum_pages.bit_length() - 1, largest_class)


def largest_class_for_window(window_pages: int, largest_class: int) -> int:
    """Largest class for a window, since an extent is freed only when the window has passed it."""
    pages = max(1, window_pages // _WINDOW_DIVISOR)
    return min(pages.bit_length() - 1, largest_class)


def pages_to_map(
    row_end_page: int, needed_end_page: int, row_pages: int, quantum_class: int
) -> int:
    """Pages to add up to `needed_end_page`: at least a quantum, never past the row's end."""
    missing = needed_end_page - row_end_page
    if missing <= 0:
        return 0
    return min(max(missing, 1 << quantum_class), row_pages - row_end_page)


# ---- geometry ------------------------------------------------------------------------------------

#: Kernels load 16 bytes at a time and DRAM delivers 128; token rows start on both.
_TOKEN_ALIGNMENT_BYTES = 128
#: Kernels index the tokens of all rows with int32.
POSITIONS_MAX = 2**31
#: User space has 128 TiB of addresses; a reservation may take 16 TiB.
_RESERVATION_MAX_BYTES = 16 * TiB


@dataclass(frozen=True)
class LayerShape:
    """The shape of one layer's key and value of one token.

    Heads are KV heads, this rank's share; `v_dim` differs from `k_dim` for latent attention.
    """

    num_k_heads: int
    k_dim: int
    num_v_heads: int
    v_dim: int
    itemsize_bytes: int

    def __post_init__(self) -> None:
        for name in ("num_k_heads", "k_dim", "num_v_heads", "v_dim", "itemsize_bytes"):
            check_positive(name, getattr(self, name))

    @property
    def k_bytes(self) -> int:
        """Bytes of one token's key."""
        return self.num_k_heads * self.k_dim * self.itemsize_bytes

    @property
    def v_bytes(self) -> int:
        """Bytes of one token's value."""
        return self.num_v_heads * self.v_dim * self.itemsize_bytes


@dataclass(frozen=True)
class Geometry:
    """The layout of one layer group: `num_rows` rows of at least `max_tokens` tokens.

    Raises `ConfigError` if a number is not positive, or positions or addresses do not suffice.
    """

    num_layers: int
    shape: LayerShape
    page_bytes: int
    max_tokens: int
    num_rows: int

    def __post_init__(self) -> None:
        for name in ("num_layers", "page_bytes", "max_tokens", "num_rows"):
            check_positive(name, getattr(self, name))
        if self.num_rows * self.row_tokens >= POSITIONS_MAX:
            raise ConfigError(
                f"{self.num_rows} rows of {self.row_tokens} tokens are "
                f"{self.num_rows * self.row_tokens} positions; kernels index fewer than 2**31, so "
                f"at most {(POSITIONS_MAX - 1) // self.row_tokens} rows of this length are "
                "possible: lower max_tokens or max_batch_size"
            )
        self._check_addresses()

    def _check_addresses(self) -> None:
        if self.reserved_bytes > _RESERVATION_MAX_BYTES:
            raise ConfigError(
                f"{self.num_rows} rows of {format_bytes(self.row_bytes)} need "
                f"{format_bytes(self.reserved_bytes)} of addresses; at most "
                f"{format_bytes(_RESERVATION_MAX_BYTES)} are possible: lower max_tokens or "
                "max_batch_size"
            )

    @cached_property
    def layer_bytes(self) -> int:
        """Bytes of one layer in a token row; keys first, then values."""
        # 16 bytes keep every head aligned for vector loads, whatever the widths.
        return align_up(self.shape.k_bytes, 16) + align_up(self.shape.v_bytes, 16)

    @cached_property
    def token_bytes(self) -> int:
        """Bytes from one token to the next."""
        # Small token rows are padded less, so that tiny models waste no memory.
        payload = self.num_layers * self.layer_bytes
        return align_up(payload, min(_TOKEN_ALIGNMENT_BYTES, 1 << (payload - 1).bit_length()))

    @cached_property
    def row_tokens(self) -> int:
        """Tokens from one row's start to the next: `max_tokens`, rounded up to a page boundary.

        Row r starts at token `r * row_tokens` of one flat tensor, as varlen kernels expect.
        """
        step = self.page_bytes // math.gcd(self.page_bytes, self.token_bytes)
        return align_up(self.max_tokens, step)

    @cached_property
    def row_bytes(self) -> int:
        """Bytes from one row to the next; a whole number of pages."""
        return self.row_tokens * self.token_bytes

    @cached_property
    def row_pages(self) -> int:
        """Pages from one row to the next."""
        return self.row_bytes // self.page_bytes

    @cached_property
    def reserved_bytes(self) -> int:
        """Bytes of virtual addresses of all rows."""
        return self.num_rows * self.row_bytes

    @property
    def v_offset_bytes(self) -> int:
        """Offset of a layer's values from its keys in a token row."""
        return align_up(self.shape.k_bytes, 16)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold the first `num_tokens` tokens of a row."""
        return -(-num_tokens * self.token_bytes // self.page_bytes)  # Every step of a growth asks.

    def bytes_for(self, num_tokens: int) -> int:
        """Bytes of a row that hold the first `num_tokens` tokens."""
        return num_tokens * self.token_bytes

    def whole_tokens_below(self, page: int) -> int:
        """Tokens that lie wholly before `page`."""
        return page * self.page_bytes // self.token_bytes

    def whole_pages_below(self, token: int) -> int:
        """Pages that hold nothing but tokens before `token`."""
        return token * self.token_bytes // self.page_bytes


#: The row of a state has no end in tokens, whatever `max_tokens` and the over-read are.
_NO_END = 2**62


@dataclass(frozen=True)
class StateGeometry(Geometry):
    """The layout of `num_rows` states of `state_bytes` each, whole from the first token on.

    `shape` and `num_layers` mean nothing here. Every write is one of the whole state.
    """

    state_bytes: int = 0

    @classmethod
    def of(cls, state_bytes: int, page_bytes: int, num_rows: int) -> StateGeometry:
        """Return the layout of a row for each sequence; `ConfigError` if addresses run out."""
        return cls(1, LayerShape(1, 1, 1, 1, 1), page_bytes, 1, num_rows, state_bytes)

    @cached_property
    def token_bytes(self) -> int:
        """Bytes from one state to the next."""
        return align_up(self.state_bytes, self.page_bytes)

    @cached_property
    def row_tokens(self) -> int:
        """A length that no sequence reaches."""
        return _NO_END

    @cached_property
    def row_bytes(self) -> int:
        """Bytes from one state to the next."""
        return self.token_bytes

    def __post_init__(self) -> None:
        for name in ("state_bytes", "page_bytes", "num_rows"):
            check_positive(name, getattr(self, name))
        self._check_addresses()

    def pages_for(self, num_tokens: int) -> int:
        """Pages of the state of a sequence of `num_tokens` tokens."""
        return self.row_pages if num_tokens > 0 else 0

    def bytes_for(self, num_tokens: int) -> int:
        """Bytes of the state of a sequence of `num_tokens` tokens."""
        return self.state_bytes if num_tokens > 0 else 0

    def whole_tokens_below(self, page: int) -> int:
        """Return 0: no token lies wholly before a page."""
        return 0

    def whole_pages_below(self, token: int) -> int:
        """Return 0: to write a token is to write every page."""
        return 0


def fitting_rows(token_bytes: int, max_tokens: int, wanted_rows: int) -> int:
    """Return how many rows fit in one reservation, from 1 to `wanted_rows`; used for defaults."""
    by_positions = (POSITIONS_MAX - 1) // (2 * max_tokens)
    by_addresses = _RESERVATION_MAX_BYTES // (2 * max_tokens * token_bytes)
    return max(1, min(wanted_rows, by_positions, by_addresses))


def check_positive(name: str, value: object) -> None:
    """Raise `ConfigError` unless `value` is an integer above zero."""
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ConfigError(f"{name}={value!r} must be a positive integer")
