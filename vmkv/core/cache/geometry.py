"""Byte offsets in a group of keys and values: pure arithmetic, no memory.

The layers of a group lie side by side in one *token row*, so that a page holds few tokens of many
layers rather than many tokens of one:

    row r      | token 0 | token 1 | token 2 | ...                       | (row_tokens of them)
    token row  | layer 0: K heads, V heads | layer 1: K heads, V heads | ... | padding |

For Llama-3-8B a token row is 32 layers x 2 x 8 heads x 128 x 2 B = 128 KiB, so a page of 2 MiB
holds 16 tokens and growth costs one mapping where a per-layer layout needs 64. See Note [All layers
share a page] in DESIGN.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from ...errors import ConfigError
from ...units import TiB, align_up, format_bytes

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
        check_addresses(self.num_rows, self.row_bytes)

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

    def whole_pages_below(self, token: int) -> int:
        """Pages that hold nothing but tokens before `token`."""
        return token * self.token_bytes // self.page_bytes


def fitting_rows(token_bytes: int, max_tokens: int, wanted_rows: int) -> int:
    """Return how many rows fit in one reservation, from 1 to `wanted_rows`; used for defaults."""
    by_positions = (POSITIONS_MAX - 1) // (2 * max_tokens)
    by_addresses = _RESERVATION_MAX_BYTES // (2 * max_tokens * token_bytes)
    return max(1, min(wanted_rows, by_positions, by_addresses))


def check_addresses(num_rows: int, row_bytes: int) -> None:
    """Raise `ConfigError` for more rows of `row_bytes` than a reservation may hold."""
    reserved_bytes = num_rows * row_bytes
    if reserved_bytes > _RESERVATION_MAX_BYTES:
        raise ConfigError(
            f"{num_rows} rows of {format_bytes(row_bytes)} need {format_bytes(reserved_bytes)} of "
            f"addresses; at most {format_bytes(_RESERVATION_MAX_BYTES)} are possible: lower "
            "max_tokens or max_batch_size"
        )


def check_positive(name: str, value: object) -> None:
    """Raise `ConfigError` unless `value` is an integer above zero."""
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ConfigError(f"{name}={value!r} must be a positive integer")
