"""What an attention backend is: one protocol over rows, and the shapes it speaks in.

A cache layer is a pair of strided views, keys and values, in which every sequence is one
contiguous row. A backend reads those views in place: it is told which rows, how long they are
and where each sequence's queries lie, and no backend ever gathers, pads or copies the past.

Shape letters, used in every docstring of this package:

  B   sequences in the batch            Hq  query heads
  Tq  query tokens of the whole batch   H   key/value heads (Hq is a multiple of H)
  Dk  head size of queries and keys     Dv  head size of values

The one invariant: of a live row only tokens `[0, num_tokens + overread_tokens)` are mapped
memory. A backend that touches anything else faults, so none may reduce, copy or index over a
whole view, and a kernel that fetches past the length must say by how much.

This module holds the protocol and its argument types; `base.py` holds the batch. Neither
launches anything.
"""

from __future__ import annotations

import abc
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from ..core.cache.fp8 import FP8, Scales
from ..core.cache.geometry import POSITIONS_MAX
from ..errors import ConfigError

# ---- batch ---------------------------------------------------------------------------------------


class Span(NamedTuple):
    """One sequence of a batch, in host integers.

    Attributes:
        row: Its row.
        query_start: Where its queries begin in the packed tensor.
        query_end: One past where they end.
        num_tokens: Its keys, this step's included.
        left_pad: How many of them, from the first, are not attended to.
    """

    row: int
    query_start: int
    query_end: int
    num_tokens: int
    left_pad: int


@dataclass(frozen=True)
class AttentionBatch:
    """A ragged batch over the rows of a cache.

    The vectors live on the device of the views. Properties that derive further vectors do so
    once per batch object and keep them for all layers; a batch whose vectors are rewritten in
    place (by a CUDA graph) must therefore be a new object, made where the rewriting is captured.

    Attributes:
        row_indices: `[B] int32`, each sequence's row; distinct.
        num_tokens: `[B] int32`, keys of each sequence, this step's included.
        query_starts: `[B + 1] int32`, where each sequence's queries begin, and the total.
        max_query_tokens: An upper bound of any sequence's queries; the exact maximum unless
            the batch was made on the device.
        max_num_tokens: An upper bound of `num_tokens`; kernels choose their grid by it.
        row_tokens: Capacity of a row, the views' second dimension.
        left_pad: `[B] int32`, how many leading tokens of each row are not attended to, or None.
    """

    row_indices: torch.Tensor
    num_tokens: torch.Tensor
    query_starts: torch.Tensor
    max_query_tokens: int
    max_num_tokens: int
    row_tokens: int
    left_pad: torch.Tensor | None = None

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
        """Make a batch from host integers, refusing whatever a kernel could not survive.

        Args:
            rows: Each sequence's row.
            num_tokens: Each sequence's keys, this step's included.
            query_tokens: How many of them, from the last, are queried in this step.
            row_tokens: Capacity of a row.
            num_rows: How many rows the views have; None skips that test.
            left_pad: How many leading tokens of each row to ignore; None means none.
            device: Where the views live.

        Returns:
            A batch whose vectors share one small allocation on `device`.

        Raises:
            TypeError: Something is not an integer.
            ConfigError: The batch is empty, the lists differ in length, a row is used twice or
                does not exist, a length is zero or longer than its row, a sequence has no query
                or more queries than tokens, or is padding only.

        Cost: O(B) on the host, one copy of `4 * B + 1` integers to the device.
        """
        counts = [len(rows), len(num_tokens), len(query_tokens)]
        counts += [len(left_pad)] if left_pad is not None else []
        if not rows:
            raise ConfigError("an empty batch: pass at least one sequence, or skip the step")
        if len(set(counts)) > 1:
            raise ConfigError(f"one entry per sequence is needed in every list, got {counts}")
        pads = left_pad if left_pad is not None else [0] * len(rows)
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
        # What is known here need not be asked of the device later: fill the cached property.
        columns = zip(rows, starts, starts[1:], num_tokens, pads, strict=False)
        vars(batch)["spans"] = tuple(Span(*column) for column in columns)
        return batch

    @property
    def batch_size(self) -> int:
        """B."""
        return self.row_indices.shape[0]

    def is_uniform(self, total_query_tokens: int) -> bool:
        """Whether every sequence has `max_query_tokens` queries.

        Args:
            total_query_tokens: Tq, the packed tensor's first dimension. The sum can only reach
                `B * max_query_tokens` if no sequence has fewer.
        """
        return self.batch_size * self.max_query_tokens == total_query_tokens

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The batch in host integers.

        Cost: free after `build`; otherwise one device synchronisation per batch.
        """
        starts = self.query_starts.tolist()
        pads = self.left_pad.tolist() if self.left_pad is not None else [0] * self.batch_size
        columns = zip(
            self.row_indices.tolist(),
            starts,
            starts[1:],
            self.num_tokens.tolist(),
            pads,
            strict=False,
        )
        return tuple(Span(*column) for column in columns)

    @cached_property
    def plans(self) -> dict[Hashable, torch.Tensor]:
        """What kernels work out once for all layers that ask the same of them, by what they ask."""
        return {}

    @cached_property
    def tokens_before(self) -> torch.Tensor:
        """`[B] int32`: keys of each sequence before this step's are appended."""
        return self.num_tokens - (self.query_starts[1:] - self.query_starts[:-1])

    @cached_property
    def key_starts(self) -> torch.Tensor:
        """`[B + 1] int32`: where each sequence's visible keys begin in the flat view.

        What varlen kernels call `cu_seqlens_k`. Rows need not ascend: beside `visible_tokens`
        kernels read only each sequence's start, and the last entry is there for its shape.
        Left padding is skipped here, so a varlen kernel needs no notion of it.
        """
        starts = torch.zeros_like(self.query_starts)
        torch.mul(self.row_indices, self.row_tokens, out=starts[:-1])
        if self.left_pad is not None:
            starts[:-1] += self.left_pad
        return starts

    @cached_property
    def visible_tokens(self) -> torch.Tensor:
        """`[B] int32`: keys of each sequence, left padding not counted (`seqused_k`)."""
        return self.num_tokens if self.left_pad is None else self.num_tokens - self.left_pad

    @cached_property
    def flat_positions(self) -> torch.Tensor:
        """`[Tq] int64`: each query token's place in the flat view; negative for padding.

        Cost: a handful of small operations per batch; synchronises on a CUDA device, where the
        fused append computes the same inside its kernel.
        """
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
    highest = num_rows - 1 if num_rows is not None else (POSITIONS_MAX - 1) // row_tokens - 1
    for row in rows:
        if not 0 <= row <= highest:
            raise ConfigError(f"row {row} is not one of the rows 0 to {highest}")
    if (max(rows) + 1) * row_tokens >= POSITIONS_MAX:
        raise ConfigError(
            f"{max(rows) + 1} rows of {row_tokens} tokens pass the {POSITIONS_MAX} that kernels "
            "can index; use fewer rows or shorter ones"
        )


def _check_sequence(row: int, tokens: int, queries: int, pad: int, row_tokens: int) -> None:
    for value in (row, tokens, queries, pad):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"rows and lengths must be int, got {value!r}")
    if not 1 <= tokens <= row_tokens:
        raise ConfigError(
            f"row {row}: {tokens} tokens do not fit a row of {row_tokens}, 1 at least"
        )
    if not 1 <= queries <= tokens:
        raise ConfigError(f"row {row}: {queries} queries of {tokens} tokens; 1 to {tokens} can be")
    if not 0 <= pad < tokens:
        raise ConfigError(f"row {row}: {pad} of {tokens} tokens are padding; one must be real")


# ---- base ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What a layer asks of a backend; enough to decide whether one can serve it.

    Attributes:
        device_type: `"cuda"` or `"cpu"`, as in `torch.device.type`.
        dtype: Of queries, and of keys and values unless `kv_dtype` says otherwise.
        num_query_heads: Hq.
        num_kv_heads: H; divides Hq.
        k_dim: Dk.
        v_dim: Dv; most kernels want it equal to Dk.
        window: A query at position p sees keys `(p - window, p]`; None means all before it.
        softcap: Scores become `softcap * tanh(score / softcap)`; 0 means as they are.
        has_sinks: Each query head has a logit that joins the softmax's denominator only.
        left_pad: Some rows begin with tokens that nothing may attend to.
        kv_dtype: What rows hold: `float8_e4m3fn`, or None for `dtype`.
        max_tokens: The longest sequence there will be, None where nobody knows; of rows in eight
            bits, which not every kernel reads at every length.

    Raises:
        ConfigError: The numbers contradict each other (heads that do not divide, a window of
            less than one token, a negative soft cap), or rows hold what is neither of the two.
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
            # One way to say it: specs are compared.
            object.__setattr__(self, "kv_dtype", None)
        if self.kv_dtype is None:
            object.__setattr__(self, "max_tokens", None)
        check_dtypes(self.dtype, self.kv_dtype or self.dtype)

    @property
    def is_fp8(self) -> bool:
        """Whether rows hold keys and values in eight bits."""
        return self.kv_dtype == FP8

    @classmethod
    def of(
        cls,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        window: int | None,
        softcap: float,
        has_sinks: bool,
        left_pad: bool = False,
        kv_dtype: torch.dtype | None = None,
        max_tokens: int | None = None,
    ) -> AttentionSpec:
        """What a layer asks with `[B, H, T, D]` tensors; raises what making one does.

        What rows hold may be of another type than `key` and `value`, which were just computed.
        """
        return cls(
            device_type=query.device.type,
            dtype=query.dtype,
            num_query_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            k_dim=key.shape[3],
            v_dim=value.shape[3],
            window=window,
            softcap=softcap,
            has_sinks=has_sinks,
            left_pad=left_pad,
            kv_dtype=kv_dtype,
            max_tokens=max_tokens,
        )

    def __str__(self) -> str:
        """One line for error messages."""
        parts = [
            f"{self.dtype} on {self.device_type}",
            *([f"rows in {self.kv_dtype}"] if self.kv_dtype is not None else []),
            f"{self.num_query_heads} query and {self.num_kv_heads} key/value heads",
            f"head size {self.k_dim}"
            if self.k_dim == self.v_dim
            else f"head sizes {self.k_dim} and {self.v_dim}",
        ]
        parts += [f"window {self.window}"] if self.window is not None else []
        parts += [f"softcap {self.softcap}"] if self.softcap else []
        parts += ["sinks"] if self.has_sinks else []
        parts += ["left padding"] if self.left_pad else []
        return ", ".join(parts)


@runtime_checkable
class AttentionBackend(Protocol):
    """One stock attention kernel behind the call that all of vmkv uses.

    A backend is stateless and shared by all layers. `forward` launches on the current stream and
    returns without synchronising, unless its own docstring says otherwise.

    Attributes:
        name: What `select(name=...)` and error messages call it.
    """

    name: str

    def overread_tokens(
        self, k_dim: int, v_dim: int | None = None, kv_dtype: torch.dtype | None = None
    ) -> int:
        """How many tokens past a row's length the kernel may fetch, at worst.

        The cache keeps that many resident before every launch. What lies there gets a weight of
        zero, but it is multiplied: it must be finite, as fresh pages and old keys and values
        are. 0 means that the kernel predicates every fetch, and that anything may lie there.

        Args:
            k_dim: Head size of the keys.
            v_dim: Head size of the values; None means the keys'.
            kv_dtype: See `AttentionSpec.kv_dtype`.
        """
        ...

    def why_not(self, spec: AttentionSpec) -> str | None:
        """Why this backend cannot serve `spec`, in one clause, or None when it can.

        Cost: attribute tests; the first call may import the kernel's package.
        """
        ...

    def forward(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        causal: bool = True,
        window: int | None = None,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        scales: Scales | None = None,
    ) -> torch.Tensor:
        """Attend from packed queries to the rows of one layer.

        A sequence's queries are its last tokens, and its keys are already in its row: causality
        is aligned at the bottom right. A query that may see no key at all (a padding token)
        yields zeros.

        Args:
            query: `[Tq, Hq, Dk]`, sequence after sequence as `batch.query_starts` cuts them.
            keys: `[rows, row_tokens, H, Dk]`, a strided view of a cache layer; read only. In the
                query's dtype, or in `float8_e4m3fn`.
            values: `[rows, row_tokens, H, Dv]`, likewise.
            batch: Which rows, how long.
            scale: What scores are multiplied by, usually `Dk ** -0.5`.
            causal: Whether a query sees only its own position and those before it.
            window: See `AttentionSpec.window`; needs `causal`.
            softcap: See `AttentionSpec.softcap`.
            sinks: `[Hq]`, floating, one logit per query head, or None.
            scales: What keys and values in eight bits are multiplied by; None for 1.

        Returns:
            `[Tq, Hq, Dv]`, a new tensor in the query's dtype, owned by the caller.

        Raises:
            ConfigError: Shapes, dtypes or options do not fit. Nothing was launched.
        """
        ...


@runtime_checkable
class AppendingBackend(AttentionBackend, Protocol):
    """A backend whose kernel can also write the new tokens, saving a launch per layer."""

    def append_and_attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        causal: bool = True,
        window: int | None = None,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        scales: Scales | None = None,
    ) -> torch.Tensor:
        """Write `key` and `value` into their rows and attend, in one launch.

        The batch must be uniform (`batch.is_uniform`). `batch.num_tokens` counts the new tokens,
        as everywhere. Otherwise as `append` followed by `forward`.

        Args:
            query: As in `forward`.
            key: `[Tq, H, Dk]`, the new keys, packed as the queries are.
            value: `[Tq, H, Dv]`, likewise.
            keys: As in `forward`, but written at the new tokens' places.
            values: Likewise.
            batch: As in `forward`; uniform.
            scale: As in `forward`.
            causal: As in `forward`.
            window: As in `forward`.
            softcap: As in `forward`.
            sinks: As in `forward`.
            scales: As in `forward`.

        Returns:
            As `forward`.

        Raises:
            ConfigError: As `forward`, or the batch is not uniform. Nothing was written.
        """
        ...


class Call(NamedTuple):
    """A call of `AttentionBackend.forward`; see there."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    batch: AttentionBatch
    scale: float
    causal: bool
    window: int | None
    softcap: float
    sinks: torch.Tensor | None
    scales: Scales | None = None
    out: torch.Tensor | None = None


class CheckedBackend(abc.ABC):
    """The protocol's call, spelt out and checked once for all backends of this package."""

    name: str

    def mixes(self, spec: AttentionSpec) -> bool:
        """Whether one launch for sequences that decode and for prompts is as fast as one each."""
        return False

    def forward(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        causal: bool = True,
        window: int | None = None,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        scales: Scales | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend.forward`; a kernel that can writes into `out`.

        That is `[Tq, Hq, Dv]`, contiguous and in the query's dtype. What cannot write there returns
        a new tensor, as without it.
        """
        call = Call(query, keys, values, batch, scale, causal, window, softcap, sinks, scales, out)
        check_call(call)
        return self.attend(call)

    @abc.abstractmethod
    def attend(self, call: Call) -> torch.Tensor:
        """`forward`, with arguments that fit each other."""


def check_dtypes(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Raise `ConfigError` unless rows are of the queries' type, or in eight bits."""
    if kv_dtype not in (dtype, FP8):
        raise ConfigError(
            f"queries are {dtype} and rows {kv_dtype}: rows are of the same type, or {FP8}"
        )


def check_scales(scales: Scales, keys: torch.Tensor) -> None:
    """Raise `ConfigError` unless `keys` are in eight bits, and there is a scale for each head."""
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


def check_call(call: Call) -> None:
    """Refuse what a kernel would misread, from shapes and strides alone.

    It is called once per layer and step, so it compares host integers only: about 5 us, no
    device synchronisation. Lengths were checked when the batch was built.

    Raises:
        ConfigError: See the messages.
    """
    query, keys, values, batch = call[:4]
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
    if not keys.dtype == values.dtype:
        raise ConfigError(f"keys are {keys.dtype}, values {values.dtype}: must be the same")
    check_dtypes(query.dtype, keys.dtype)
    if call.scales is not None:
        check_scales(call.scales, keys)
    if not query.device == keys.device == values.device == batch.num_tokens.device:
        raise ConfigError(
            f"query is on {query.device}, keys on {keys.device}, values on {values.device} and "
            f"the batch on {batch.num_tokens.device}: must be the same"
        )
    check_heads(query.shape[1], keys.shape[2])
    check_rows(keys, batch.row_tokens)
    check_rows(values, batch.row_tokens)
    window, sinks = call.window, call.sinks
    if window is not None and (window < 1 or not call.causal):
        raise ConfigError(f"window={window} needs at least one token, and causal attention")
    if sinks is not None and sinks.shape != (query.shape[1],):
        raise ConfigError(
            f"sinks must hold one logit for each of {query.shape[1]} query heads, "
            f"got {tuple(sinks.shape)}"
        )
    most, total = batch.batch_size * batch.max_query_tokens, query.shape[0]
    if not batch.max_query_tokens <= total <= most:
        raise ConfigError(
            f"{total} query tokens cannot belong to {batch.batch_size} sequences of at most "
            f"{batch.max_query_tokens}"
        )


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


def split(packed: torch.Tensor, dim: int, sizes: tuple[int, int]) -> torch.Tensor:
    """Dimension `dim` of `packed` as two of `sizes`; never a copy."""
    # `Tensor.unflatten` under a type: torch leaves it untyped.
    parted: torch.Tensor = packed.unflatten(dim, sizes)  # type: ignore[no-untyped-call]
    return parted


def flat(view: torch.Tensor) -> torch.Tensor:
    """`[rows, row_tokens, H, D]` as `[rows * row_tokens, H, D]`; never a copy."""
    # `view` and not `reshape`: where the rows were not back to back, a copy of the whole
    # reservation would fault, and an error is better.
    return view.view(-1, *view.shape[2:])
