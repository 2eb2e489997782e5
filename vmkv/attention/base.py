"""The attention protocol over rows, the ragged batch, and the checks that backends share.

A cache layer is a pair of strided views, keys and values, in which every sequence is one contiguous
row. A backend is told the rows, their lengths and the offsets of each sequence's queries; it reads
the views in place and never gathers, pads or copies past tokens.

Shape letters, used in every docstring of this package:

  B   sequences in the batch            Hq  query heads
  Tq  query tokens of the whole batch   H   key/value heads (Hq is a multiple of H)
  Dk  head size of queries and keys     Dv  head size of values

Invariant: only tokens `[0, num_tokens + overread_tokens)` of a live row are mapped memory, and any
other access faults. No backend may reduce, copy or index over a whole view, and a kernel that
fetches past the length must declare how far. Nothing here launches a kernel.
"""

from __future__ import annotations

import abc
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch

from ..core.cache.fp8 import FP8, Scales
from ..core.cache.geometry import POSITIONS_MAX
from ..errors import ConfigError

# ---- batch ---------------------------------------------------------------------------------------


class Span(NamedTuple):
    """A sequence of a batch, in host integers.

    Attributes:
        row: Row index.
        query_start: Offset of its first query in the packed tensor.
        query_end: Offset one past its last query.
        num_tokens: Number of its keys, this step's included.
        left_pad: Number of leading keys that are not attended to.
    """

    row: int
    query_start: int
    query_end: int
    num_tokens: int
    left_pad: int


@dataclass(frozen=True)
class AttentionBatch:
    """A ragged batch over the rows of a cache.

    The vectors live on the device of the views. Derived vectors are computed once per batch object
    and kept for all layers; a batch whose vectors are rewritten in place (by a CUDA graph) must
    therefore be a new object, made inside the capture.

    Attributes:
        row_indices: `[B] int32`, each sequence's row; distinct.
        num_tokens: `[B] int32`, keys of each sequence, this step's included.
        query_starts: `[B + 1] int32`, offset of each sequence's first query, then the total.
        max_query_tokens: Upper bound of a sequence's queries; the exact maximum unless the batch
            was made on the device.
        max_num_tokens: Upper bound of `num_tokens`; kernels choose their grid by it.
        row_tokens: Capacity of a row, the views' second dimension.
        left_pad: `[B] int32`, leading tokens of each row that are not attended to, or None.
        past_tokens: `[B] int32`, `tokens_before` if known; None to compute it when needed.
    """

    row_indices: torch.Tensor
    num_tokens: torch.Tensor
    query_starts: torch.Tensor
    max_query_tokens: int
    max_num_tokens: int
    row_tokens: int
    left_pad: torch.Tensor | None = None
    past_tokens: torch.Tensor | None = None

    @classmethod
    def build(
        cls,
        rows: Sequence[int],
        num_tokens: Sequence[int],
        query_tokens: Sequence[int],
        *,
        row_tokens: int,
        num_rows: int | None = None,
        left_pad: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
    ) -> AttentionBatch:
        """Make a batch from host integers and validate them.

        Args:
            rows: Row of each sequence.
            num_tokens: Keys of each sequence, this step's included.
            query_tokens: Queries of each sequence: its last tokens.
            row_tokens: Capacity of a row.
            num_rows: Number of rows of the views; None skips that check.
            left_pad: Leading tokens of each row to ignore; None means none.
            device: Device of the views.

        Raises:
            TypeError: A value is not an integer.
            ConfigError: The batch is empty, the lists differ in length, a row is used twice or does
                not exist, a length is zero or exceeds its row, a sequence has no query or more
                queries than tokens, or a sequence is padding only.

        Cost: O(B) on the host, one copy of `4 * B + 1` integers to the device.
        """
        pads = left_pad if left_pad is not None else [0] * len(rows)
        counts = [len(each) for each in (rows, num_tokens, query_tokens, pads)]
        if not rows:
            raise ConfigError("an empty batch: pass at least one sequence, or skip the step")
        if len(set(counts)) > 1:
            raise ConfigError(f"one entry per sequence is needed in every list, got {counts}")
        _check_rows(rows, row_tokens, num_rows)
        for row, tokens, queries, pad in zip(rows, num_tokens, query_tokens, pads, strict=True):
            _check_sequence(row, tokens, queries, pad, row_tokens)

        starts = [0, *accumulate(query_tokens)]
        size = len(rows)
        packed = torch.tensor([*rows, *num_tokens, *pads, *starts], dtype=torch.int32)
        packed = packed.to(device, non_blocking=True)
        batch = cls(
            row_indices=packed[:size],
            num_tokens=packed[size : 2 * size],
            left_pad=packed[2 * size : 3 * size] if any(pads) else None,
            query_starts=packed[3 * size :],
            max_query_tokens=max(query_tokens),
            max_num_tokens=max(num_tokens),
            row_tokens=row_tokens,
        )
        # Fill the cached property, so that it need not read from the device later.
        vars(batch)["spans"] = tuple(map(Span, rows, starts, starts[1:], num_tokens, pads))
        return batch

    @property
    def batch_size(self) -> int:
        """Number of sequences, B."""
        return self.row_indices.shape[0]

    def is_uniform(self, total_query_tokens: int) -> bool:
        """Whether all sequences have `max_query_tokens` queries, given the packed total Tq."""
        return self.batch_size * self.max_query_tokens == total_query_tokens

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The batch in host integers: free after `build`, else one device synchronisation."""
        starts = self.query_starts.tolist()
        pads = self.left_pad.tolist() if self.left_pad is not None else [0] * self.batch_size
        rows, lengths = self.row_indices.tolist(), self.num_tokens.tolist()
        return tuple(map(Span, rows, starts, starts[1:], lengths, pads))

    @cached_property
    def plans(self) -> dict[Hashable, torch.Tensor]:
        """Schedules and scratch memory that kernels share among layers of one kind, by kind."""
        return {}

    @cached_property
    def tokens_before(self) -> torch.Tensor:
        """`[B] int32`: keys of each sequence before this step's are appended."""
        if self.past_tokens is not None:
            return self.past_tokens
        return self.num_tokens - (self.query_starts[1:] - self.query_starts[:-1])

    @cached_property
    def key_starts(self) -> torch.Tensor:
        """`[B + 1] int32`: each sequence's first visible key in the flat view (`cu_seqlens_k`)."""
        starts = torch.zeros_like(self.query_starts)
        torch.mul(self.row_indices, self.row_tokens, out=starts[:-1])
        if self.left_pad is not None:
            starts[:-1] += self.left_pad
        return starts

    @cached_property
    def visible_tokens(self) -> torch.Tensor:
        """`[B] int32`: keys of each sequence without left padding (`seqused_k`)."""
        return self.num_tokens if self.left_pad is None else self.num_tokens - self.left_pad

    @cached_property
    def flat_positions(self) -> torch.Tensor:
        """`[Tq] int64`: each query token's place in the flat view, -1 for padding."""
        lengths = (self.query_starts[1:] - self.query_starts[:-1]).long()
        # Token i of a sequence whose queries start at s is at position `before + (i - s)`.
        shifts = self.tokens_before.long() - self.query_starts[:-1].long()
        shifts = torch.repeat_interleave(shifts, lengths)
        positions = shifts + torch.arange(shifts.shape[0], device=shifts.device)
        rows = torch.repeat_interleave(self.row_indices.long(), lengths)
        return torch.where(positions < 0, -1, rows * self.row_tokens + positions)


def _check_rows(rows: Sequence[int], row_tokens: int, num_rows: int | None) -> None:
    if row_tokens < 1:
        raise ConfigError(f"rows must hold at least one token, not {row_tokens}")
    if len(set(rows)) != len(rows):
        twice = sorted({row for row in rows if list(rows).count(row) > 1})
        raise ConfigError(f"rows {twice} are used more than once in one batch")
    num_indexable = (POSITIONS_MAX - 1) // row_tokens
    highest = min(num_indexable, num_indexable if num_rows is None else num_rows) - 1
    for row in rows:
        if not 0 <= row <= highest:
            raise ConfigError(
                f"row {row} of {row_tokens} tokens is not one of the rows 0 to {highest}; kernels "
                f"index {POSITIONS_MAX} tokens at most"
            )


def _check_sequence(row: int, tokens: int, queries: int, pad: int, row_tokens: int) -> None:
    for value in (row, tokens, queries, pad):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"rows and lengths must be int, got {value!r}")
    if not 1 <= tokens <= row_tokens:
        raise ConfigError(
            f"row {row}: {tokens} tokens must be 1 to {row_tokens}, the length of a row"
        )
    if not 1 <= queries <= tokens:
        raise ConfigError(f"row {row}: {queries} queries must be 1 to its {tokens} tokens")
    if not 0 <= pad < tokens:
        raise ConfigError(f"row {row}: {pad} of {tokens} tokens are padding; one must be real")


# ---- layer, backend, call ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Description of a layer, by which a backend decides whether it can serve it.

    Attributes:
        device_type: `"cuda"` or `"cpu"`, as in `torch.device.type`.
        dtype: Type of queries, and of keys and values unless `kv_dtype` is given.
        num_query_heads: Hq.
        num_kv_heads: H; divides Hq.
        k_dim: Dk.
        v_dim: Dv; most kernels require Dv = Dk.
        window: A query at position p sees keys `(p - window, p]`; None for all keys up to p.
        softcap: Scores become `softcap * tanh(score / softcap)`; 0 for no cap.
        has_sinks: Each query head has a logit that joins the softmax's denominator only.
        left_pad: Whether rows may begin with tokens that are not attended to.
        kv_dtype: Type of the rows: `float8_e4m3fn`, or None for `dtype`.
        max_tokens: Longest sequence of float8 rows, which some kernels limit; None if unknown.
        is_latent: Whether values are the first Dv numbers of each key (latent attention).

    Raises:
        ConfigError: Heads do not divide, a number is out of range, or `kv_dtype` is unsupported.
    """

    device_type: str
    dtype: torch.dtype
    num_query_heads: int
    num_kv_heads: int
    k_dim: int
    v_dim: int
    window: int | None = None
    softcap: float = 0.0
    has_sinks: bool = False
    left_pad: bool = False
    kv_dtype: torch.dtype | None = None
    max_tokens: int | None = None
    is_latent: bool = False

    def __post_init__(self) -> None:
        for field in ("num_query_heads", "num_kv_heads", "k_dim", "v_dim"):
            if getattr(self, field) < 1:
                raise ConfigError(f"{field} must be at least 1, not {getattr(self, field)}")
        check_heads(self.num_query_heads, self.num_kv_heads)
        if self.window is not None and self.window < 1:
            raise ConfigError(f"a window holds at least the query's own token, not {self.window}")
        if self.softcap < 0:
            raise ConfigError(f"softcap must be positive, or 0 for none, not {self.softcap}")
        if self.kv_dtype == self.dtype:
            # Normalised, because specs are compared.
            object.__setattr__(self, "kv_dtype", None)
        if self.kv_dtype is None:
            object.__setattr__(self, "max_tokens", None)
        check_dtypes(self.dtype, self.kv_dtype or self.dtype)

    @property
    def is_fp8(self) -> bool:
        """Whether rows hold keys and values as float8."""
        return self.kv_dtype == FP8

    def __str__(self) -> str:
        given = [(each.name, getattr(self, each.name)) for each in fields(self)]
        return ", ".join(f"{name}={value}" for name, value in given if value)


class AttentionBackend(abc.ABC):
    """An attention kernel; subclass it and `register` the class to plug in one of your own.

    A backend is stateless and shared by all layers.

    Attributes:
        name: Name in `select(name=...)` and in error messages.
        needs_cuda: Whether it runs on GPUs only.
        appends: Whether `attend` writes `Call.new` into the rows first, in the same launch.
        reads_new: Whether there is `attend_new`.
    """

    name: str
    needs_cuda: bool = False
    appends: bool = False

    @property
    def reads_new(self) -> bool:
        """Whether there is `attend_new`."""
        return False

    def overread_tokens(self, spec: AttentionSpec) -> int:
        """Return the most tokens past a row's length that the kernel may fetch, by default 0.

        The cache keeps that many resident before every launch. The kernel multiplies them by a
        weight of zero, so they must be finite, as fresh pages and old keys and values are. 0 means
        that the kernel predicates every fetch.
        """
        return 0

    @abc.abstractmethod
    def why_not(self, spec: AttentionSpec) -> str | None:
        """Return why this backend cannot serve `spec`, in one clause, or None if it can."""

    def mixes(self, spec: AttentionSpec) -> bool:
        """Whether one launch for decodes and prompts together is as fast as one for each."""
        return False

    @abc.abstractmethod
    def attend(self, call: Call) -> torch.Tensor:
        """Attend from packed queries to the rows of one layer; `call` has been checked.

        A sequence's queries are its last tokens, and its keys are already in its row (but `new`
        where the backend `appends`). A query sees its own position and earlier ones: causality is
        aligned at the bottom right. A query that sees no key (a padding token) yields zeros.

        Returns `[Tq, Hq, Dv]` in the query's dtype: `call.out`, or a new tensor of the caller's.
        Launches on the current stream and returns without synchronising, unless the backend's
        docstring says otherwise. Raises, with nothing launched, for a call that the kernel cannot
        serve.
        """

    def attend_new(self, call: Call) -> torch.Tensor:
        """Attend to `call.new` instead of rows, as `attend`; sequences have no other tokens."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Call:
    """A call of attention, checked when it is made: about 5 us of host time, no synchronisation.

    Attributes:
        query: `[Tq, Hq, Dk]`, packed by `batch.query_starts`.
        keys: `[rows, row_tokens, H, Dk]`, a strided view of a cache layer, in the query's dtype or
            `float8_e4m3fn`.
        values: `[rows, row_tokens, H, Dv]`, as `keys`.
        batch: Rows and lengths; its device is that of all tensors.
        scale: Factor of the scores, usually `Dk ** -0.5`.
        window: As in `AttentionSpec`.
        softcap: As in `AttentionSpec`.
        sinks: `[Hq]`, floating, one logit per query head, or None.
        scales: Scales of float8 keys and values; None for 1.
        new: Keys `[Tq, H, Dk]` and values `[Tq, H, Dv]` of the query tokens, for a backend that
            `appends`, or for `attend_new`; otherwise None.
        out: `[Tq, Hq, Dv]`, contiguous and in the query's dtype, where a kernel may write its
            result, or None.

    Raises:
        ConfigError: Shapes, strides, dtypes, devices or options do not fit.
    """

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    batch: AttentionBatch
    scale: float
    window: int | None = None
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    scales: Scales | None = None
    new: tuple[torch.Tensor, torch.Tensor] | None = None
    out: torch.Tensor | None = None

    def __post_init__(self) -> None:
        query, keys, values, batch = self.query, self.keys, self.values, self.batch
        if query.ndim != 3 or keys.ndim != 4 or values.ndim != 4:
            raise ConfigError(
                "expected query [Tq, Hq, D] and keys, values [rows, row_tokens, H, D], got "
                f"{tuple(query.shape)}, {tuple(keys.shape)}, {tuple(values.shape)}"
            )
        if query.shape[2] != keys.shape[3] or keys.shape[:3] != values.shape[:3]:
            raise ConfigError(
                f"query {tuple(query.shape)}, keys {tuple(keys.shape)} and values "
                f"{tuple(values.shape)} disagree on rows, heads or head size"
            )
        if keys.dtype != values.dtype:
            raise ConfigError(f"keys are {keys.dtype}, values {values.dtype}: must be the same")
        if keys.dtype != query.dtype:
            check_dtypes(query.dtype, keys.dtype)
        if self.scales is not None:
            check_scales(self.scales, keys)
        if not query.device == keys.device == values.device == batch.num_tokens.device:
            raise ConfigError(
                f"query is on {query.device}, keys on {keys.device}, values on {values.device} and "
                f"the batch on {batch.num_tokens.device}: must be the same"
            )
        if query.shape[1] % keys.shape[2]:
            check_heads(query.shape[1], keys.shape[2])
        check_rows(keys, batch.row_tokens)
        check_rows(values, batch.row_tokens)
        if self.window is not None and self.window < 1:
            raise ConfigError(f"window={self.window} needs at least one token")
        if self.sinks is not None and self.sinks.shape != (query.shape[1],):
            raise ConfigError(
                f"sinks must hold one logit for each of {query.shape[1]} query heads, "
                f"got {tuple(self.sinks.shape)}"
            )
        if self.new is not None:
            check_new(*self.new, keys, values)
        count, total = batch.row_indices.shape[0], query.shape[0]
        if not batch.max_query_tokens <= total <= count * batch.max_query_tokens:
            raise ConfigError(
                f"{total} query tokens cannot belong to {count} sequences of at most "
                f"{batch.max_query_tokens}"
            )

    @property
    def kind(self) -> tuple[object, ...]:
        """Key of everything that `spec` depends on."""
        query, keys = self.query, self.keys
        return (
            *(query.device.type, query.dtype, query.shape[1], keys.dtype, keys.shape[2:]),
            *(self.values.shape[3], self.window, self.softcap, self.sinks is None),
            self.batch.left_pad is None,
        )

    @property
    def is_latent(self) -> bool:
        """As in `AttentionSpec`."""
        keys, values = self.keys, self.values
        return keys.shape[3] > values.shape[3] and keys.data_ptr() == values.data_ptr()

    def spec(self, max_tokens: int | None = None) -> AttentionSpec:
        """Describe the layer of the call; `max_tokens` as in `AttentionSpec`."""
        return AttentionSpec(
            device_type=self.query.device.type,
            dtype=self.query.dtype,
            num_query_heads=self.query.shape[1],
            num_kv_heads=self.keys.shape[2],
            k_dim=self.keys.shape[3],
            v_dim=self.values.shape[3],
            window=self.window,
            softcap=self.softcap,
            has_sinks=self.sinks is not None,
            left_pad=self.batch.left_pad is not None,
            kv_dtype=self.keys.dtype,
            max_tokens=max_tokens,
            is_latent=self.is_latent,
        )


def check_dtypes(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Raise `ConfigError` unless rows have the queries' type or float8."""
    if kv_dtype not in (dtype, FP8):
        raise ConfigError(
            f"queries are {dtype} and rows {kv_dtype}: rows are of the same type, or {FP8}"
        )


def check_scales(scales: Scales, keys: torch.Tensor) -> None:
    """Raise `ConfigError` unless `keys` are float8 and every head has a scale."""
    if keys.dtype != FP8:
        raise ConfigError(f"scales are for {FP8}, and these keys are {keys.dtype}")
    for each in scales:
        if each.shape != keys.shape[2:3] or each.device != keys.device:
            raise ConfigError(
                f"scales must be [{keys.shape[2]}] on {keys.device}, got {tuple(each.shape)} on "
                f"{each.device}"
            )


def check_heads(num_query_heads: int, num_kv_heads: int) -> None:
    """Raise `ConfigError` unless every key/value head serves the same number of query heads."""
    if num_query_heads % num_kv_heads:
        raise ConfigError(
            f"{num_query_heads} query heads cannot share {num_kv_heads} key/value heads evenly; "
            "the first must be a multiple of the second"
        )


def check_new(
    key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """Raise `ConfigError` unless new keys and values `[Tq, H, D]` can go into the views."""
    for new, view, what in ((key, keys, "keys"), (value, values, "values")):
        if view.ndim != 4 or new.ndim != 3 or new.shape[1:] != view.shape[2:]:
            raise ConfigError(
                f"new {what} {tuple(new.shape)} do not fit the view {tuple(view.shape)}"
            )
        if view.dtype not in (new.dtype, FP8) or new.device != view.device:
            raise ConfigError(
                f"new {what} are {new.dtype} on {new.device}, "
                f"the view is {view.dtype} on {view.device}"
            )
    if key.shape[0] != value.shape[0]:
        raise ConfigError(f"{key.shape[0]} new keys but {value.shape[0]} new values")


def check_rows(view: torch.Tensor, row_tokens: int) -> None:
    """Raise `ConfigError` unless `view` is `[rows, row_tokens, H, D]` of back-to-back rows."""
    rows, tokens, _, dim = view.shape
    if tokens != row_tokens:
        raise ConfigError(f"the batch is for rows of {row_tokens} tokens, the view has {tokens}")
    _, token_stride, head_stride, dim_stride = view.stride()
    if (head_stride, dim_stride) != (dim, 1) and (view.shape[2] > 1 or dim_stride != 1):
        raise ConfigError(f"heads of one token must be contiguous, got strides {view.stride()}")
    if rows > 1 and view.stride(0) != tokens * token_stride:
        raise ConfigError(
            f"rows must follow each other without a gap ({tokens} tokens of {token_stride} "
            f"elements), got strides {view.stride()}"
        )


def flat(view: torch.Tensor) -> torch.Tensor:
    """View `[rows, row_tokens, H, D]` as `[rows * row_tokens, H, D]`; never a copy."""
    # `view` and not `reshape`: where the rows were not back to back, a copy of the whole
    # reservation would fault, and an error is better.
    return view.view(-1, *view.shape[2:])
