"""Rows of ragged batches, and the prefixes that ended sequences have left in them.

A cache that outlives a call of `vmkv.generate` keeps the rows of that call's sequences. The next
call's prompts begin with their contents, as far as the tokens are the same:

    with vmkv.RaggedCache(model.config) as cache:
        first = vmkv.generate(model, [system + question], cache=cache)
        second = vmkv.generate(model, [first[0] + answer], cache=cache)  # Computes the answer.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as List_
from typing import Any

from ..core.cache import CacheStats, KVCache, Sequence
from ..errors import CapacityError, ClosedError, ConfigError
from ..step import Piece, Stepper
from ..step.piece import StepLogits
from . import store as orphans
from .configuration import layer_kinds
from .store import CacheOptions, Signature, Store


class RaggedCache:
    """The rows of many sequences, on every device that the model is spread over. Not thread-safe.

    The first call with a model allocates memory and determines devices and shapes. Cached prefixes
    were computed with the weights and adapters of that time: after changing these, call `trim()`.

    Args:
        config: The model's configuration.
        options: Those of `VMKVCache`; `max_batch_size` is the number of sequences that are
            generated or kept at most, by default up to 256.

    Raises:
        ConfigError: An option is invalid; or the model has layers whose state is not keys and
            values of their own.
        TypeError: There is no such option.

    `close()` or the end of a `with` block frees the cache. A cache dropped without `close` is freed
    when the next one is made, with a ResourceWarning.
    """

    def __init__(self, config: Any, **options: Any):
        orphans.collect()
        self.store = Store(config, CacheOptions(**options), layer_kinds(config), num_spare_rows=1)
        # Per sequence, its part on each device.
        self._sequences: dict[int, list[Sequence]] = {}
        self._model: weakref.ref[Any] | None = None
        self._tenant: str | None = None
        self._is_serving = False
        finalizer = weakref.finalize(self, orphans.add, self.store)
        finalizer.atexit = False

    @property
    def has_windows(self) -> bool:
        """Whether some layers have a sliding window."""
        return any([kind.window_tokens is not None for kind in self.store.kinds.values()])

    # ---- a call ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def serving(
        self,
        model: Any,
        signatures: Mapping[int, Signature],
        num_sequences: int,
        tenant: str | None,
    ) -> Iterator[None]:
        """Serve one call of `vmkv.generate`; its sequences end with the block, also after an error.

        A cache serves one model; prompts do not find prefixes of other tenants than `tenant`.

        Raises:
            ConfigError: The cache is another model's, has too few rows, or serves another call; or
                the model was moved or converted since the last one.
            ClosedError: The cache is closed.
            OutOfAddressSpaceError, DriverError: The layers cannot be laid out.
        """
        if self.store.is_closed:
            raise ClosedError("this RaggedCache is closed; make a new one")
        if self._is_serving:
            raise ConfigError("this cache serves another call of generate; give each its own")
        if tenant is not None and not isinstance(tenant, str):
            raise ConfigError(f"tenant={tenant!r} must be a string, or None")
        self._bind(model, signatures)
        num_rows = min(map(self.store.num_rows, self.store.cores))
        if num_sequences > num_rows:
            raise ConfigError(
                f"{num_sequences} prompts do not fit the {num_rows} rows of this cache; make it "
                "with a larger max_batch_size"
            )
        self._is_serving, self._tenant = True, tenant
        try:
            yield
        finally:
            self._is_serving = False
            for sequence_id in tuple(self._sequences):
                self.end(sequence_id)

    def _bind(self, model: Any, signatures: Mapping[int, Signature]) -> None:
        """Lay out the layers of the first model, or check that it is the same, unchanged."""
        if self._model is None:
            if {kind.index: kind for kind in layer_kinds(model.config)} != self.store.kinds:
                raise ConfigError(
                    "this cache was made for a model with other layers than this one's; make it "
                    "with this model's configuration"
                )
            self.store.bind_all(signatures)
            self._model = weakref.ref(model)
        elif self._model() is not model:
            raise ConfigError(
                "this cache holds what another model has computed; make a cache for each model"
            )
        for index, before in self.store.signatures.items():
            signature = signatures[index]
            if before != signature:
                raise ConfigError(
                    f"layer {index} has {signature.k_shape[0]} key heads of "
                    f"{signature.k_shape[1]} in {signature.dtype} on {signature.device}; this "
                    f"cache holds {before.k_shape[0]} of {before.k_shape[1]} in {before.dtype} "
                    f"on {before.device}, from before the model was changed: make a new one"
                )

    # ---- sequences ------------------------------------------------------------------------

    def find(self, prompt: List_[int]) -> int:
        """Return how many tokens of `prompt` a sequence begun now would find; changes nothing.

        Cost: about 5 ns per token, and one look per row that holds the last one found.
        """
        core = self.store.cores[0]
        with core.pool.lock:
            for match in core.prefixes.matches(prompt, self._tenant, len(prompt) - 1):
                if any(core.keeps(row, match.num_tokens) for row in match.rows):
                    return match.num_tokens
        return 0

    def begin(self, sequence_id: int, num_tokens: int, prompt: List_[int] | None = None) -> int:
        """Begin a sequence of about `num_tokens`; returns how many of its tokens are cached.

        With `prompt`, it begins with the prefix of these tokens in the cache.

        Raises:
            OutOfAddressSpaceError: Every row is live. The sequence was not begun.
            ConfigError: The prompt is invalid. The sequence was not begun.
        """
        parts = self._sequences[sequence_id] = []  # Ended with the call, if one cannot be opened.
        for core in self.store.cores:
            parts.append(_open(core, num_tokens, prompt, self._tenant))
        return _cut_to_least(parts)

    def row(self, sequence_id: int) -> int:
        """Return the row of a sequence on the first device."""
        return self._sequences[sequence_id][0].row

    def run(self, stepper: Stepper, pieces: List_[Piece]) -> StepLogits:
        """Grow the sequences of `pieces`, whose numbers are the slots, and run them as one step.

        Raises:
            OutOfPagesError, SequenceFullError, DriverError: On each device all have grown, or none.
        """
        sequences = [self._sequences[piece.slot] for piece in pieces]
        ends = [piece.num_tokens for piece in pieces]
        on_devices = list(zip(*sequences, strict=True))
        for core, parts in zip(self.store.cores, on_devices, strict=True):
            core.grow(list(zip(parts, ends, strict=True)))
        rows = [[part.row for part in parts] for parts in on_devices]
        with contextlib.ExitStack() as stack:
            for core, its in zip(self.store.cores, rows, strict=True):
                starts = [piece.num_past_tokens for piece in pieces]
                stack.enter_context(core.submitting(zip(its, starts, ends, strict=True)))
            return stepper.run(pieces, rows[1:])

    def record(self, sequence_id: int, token_ids: List_[int]) -> None:
        """Append token ids that a sequence's steps have computed, at most as many as it holds."""
        for sequence in self._sequences[sequence_id]:
            sequence.record(token_ids)

    def end(self, sequence_id: int) -> None:
        """End a sequence; its rows are parked for the next one, on every device."""
        for sequence in self._sequences.pop(sequence_id):
            sequence.close()

    # ---- the whole ------------------------------------------------------------------------

    def stats(self) -> CacheStats:
        """Return the cache's present contents and memory, all devices together."""
        return self.store.stats()

    def trim(self, num_bytes: int | None = None) -> int:
        """Return memory that no sequence needs to the device; returns the bytes released.

        Rows of ended sequences go first, and with them their prefixes: all, without `num_bytes`.
        """
        return self.store.trim(num_bytes)

    def check(self) -> None:
        """Check the invariants of all memory; raises `InternalError` where one is broken."""
        for core in self.store.cores:
            core.check()

    def close(self) -> None:
        """Free everything. Idempotent."""
        self._sequences.clear()
        self.store.close()

    def __enter__(self) -> RaggedCache:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _open(
    core: KVCache, num_tokens: int, prompt: List_[int] | None, tenant: str | None
) -> Sequence:
    """Open a sequence with the prefix of `prompt` in `core`; with none if there is no room."""
    if prompt is not None:
        # Sharing needs memory for a tail, or a second row; computing may need neither.
        with contextlib.suppress(CapacityError):
            return core.open(num_tokens, prompt=prompt, tenant=tenant)
    return core.open(num_tokens, tenant=tenant)


def _cut_to_least(sequences: List_[Sequence]) -> int:
    """Truncate the parts of a sequence on all devices to the shortest; returns its length."""
    least = min([each.num_tokens for each in sequences])
    if any([each.num_tokens > least for each in sequences]):
        try:
            for each in sequences:
                each.truncate(least)
        except ConfigError:  # A window has passed that point.
            for each in sequences:
                each.truncate(0)
            least = 0
    return least
