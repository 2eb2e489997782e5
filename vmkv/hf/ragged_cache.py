"""Rows of ragged batches, and the prefixes that ended sequences have left in them.

A cache that outlives a call of `vmkv.generate` keeps the rows of that call's sequences. The next
call's prompts begin with their contents, as far as the tokens are the same:

    with vmkv.RaggedCache(model.config) as cache:
        first = vmkv.generate(model, [system + question], cache=cache)
        second = vmkv.generate(model, [first[0] + answer], cache=cache)  # Computes the answer.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as List_
from typing import Any

from ..attention import get as get_attention_backend
from ..core.cache import CacheStats, KVCache, Sequence
from ..core.cache.geometry import check_positive
from ..core.memory import ExtentPool
from ..errors import CapacityError, ClosedError, ConfigError
from . import compat
from . import store as orphans
from .defaults import default_max_tokens
from .kv_format import KVFormat, KVScales, SkipLayers
from .prefill import Chunk
from .store import Settings, Signature, Store
from .unservable import layer_kinds


class RaggedCache:
    """The rows of many sequences, on every device that the model is spread over. Not thread-safe.

    The first call with a model allocates memory and determines devices and shapes. Cached prefixes
    were computed with the weights and adapters of that time: after changing these, call `trim()`.

    Args:
        config: The model's configuration.
        settings: Everything else at once, in place of the arguments below.
        max_tokens: The longest sequence. Only addresses are reserved for it, which are free; by
            default twice the length that the model was trained for, at least 32k.
        max_batch_size: Sequences that are generated or kept at most; by default up to 256.
        budget_bytes: Physical memory at most, per device; by default all that is free.
        pool: Physical memory to share with other caches; excludes budget_bytes.
        layers_per_group: See `KVCache`.
        attention_backend, kv_dtype, kv_scales, skip_layers: See `VMKVCache`.

    Raises:
        ConfigError: An argument is invalid; or the model has layers whose state is not keys and
            values of their own.

    `close()` or the end of a `with` block frees the cache. A cache dropped without `close` is freed
    when the next one is made, with a ResourceWarning.
    """

    def __init__(
        self,
        config: Any,
        settings: Settings | None = None,
        *,
        max_tokens: int | None = None,
        max_batch_size: int | None = None,
        budget_bytes: int | None = None,
        pool: ExtentPool | None = None,
        layers_per_group: int | None = None,
        attention_backend: str | None = None,
        kv_dtype: str = "auto",
        kv_scales: KVScales | str | os.PathLike[str] | None = None,
        skip_layers: SkipLayers = (),
    ):
        orphans.collect()
        if settings is None:
            settings = Settings(
                compat.text_config(config),
                max_tokens=max_tokens,
                max_batch_size=max_batch_size,
                budget_bytes=budget_bytes,
                layers_per_group=layers_per_group,
                memory=pool,
                attention_backend=attention_backend,
                kv_format=KVFormat.of(config, kv_dtype, kv_scales, skip_layers),
            )
            _check_settings(settings)
        self.store = Store(settings, layer_kinds(config), num_spare_rows=1)
        # Per sequence, its part on each device; empty until `serving` binds the layers.
        self._sequences: dict[int, list[Sequence]] = {}
        self._signatures: Mapping[int, Signature] | None = None
        self._model: weakref.ref[Any] | None = None
        self._tenant: str | None = None
        self._is_serving = False
        finalizer = weakref.finalize(self, orphans.add, self.store)
        finalizer.atexit = False

    @property
    def has_windows(self) -> bool:
        """Whether some layers have a sliding window."""
        return any(kind.window_tokens is not None for kind in self.store.kinds.values())

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
        self._check_rows(num_sequences)
        self._check_model(model)
        self._bind(signatures)
        self._check_rows(num_sequences)
        self._is_serving, self._tenant = True, tenant
        try:
            yield
        finally:
            self._is_serving, self._tenant = False, None
            for sequence_id in tuple(self._sequences):
                self.end(sequence_id)

    def _bind(self, signatures: Mapping[int, Signature]) -> None:
        """Lay out the layers, or check that their signatures have not changed."""
        if self._signatures is None:
            self.store.bind_all(signatures)
            self._signatures = signatures
        for index, signature in signatures.items():
            before = self._signatures[index]
            if before != signature:
                raise ConfigError(
                    f"layer {index} has {signature.k_shape[0]} key heads of "
                    f"{signature.k_shape[1]} in {signature.dtype} on {signature.device}; this "
                    f"cache holds {before.k_shape[0]} of {before.k_shape[1]} in {before.dtype} "
                    f"on {before.device}, from before the model was changed: make a new one"
                )

    def _check_rows(self, num_sequences: int) -> None:
        limits = [self.store.num_rows(core) for core in self.store.cores]
        if self.store.settings.max_batch_size is not None:
            limits.append(self.store.settings.max_batch_size)
        if num_sequences > min(limits, default=num_sequences):
            raise ConfigError(
                f"{num_sequences} prompts do not fit the {min(limits)} rows of this cache; make it "
                "with a larger max_batch_size"
            )

    def _check_model(self, model: Any) -> None:
        known = None if self._model is None else self._model()
        if self._model is None:
            if {kind.index: kind for kind in layer_kinds(model.config)} != self.store.kinds:
                raise ConfigError(
                    "this cache was made for a model with other layers than this one's; make it "
                    "with this model's configuration"
                )
            self._model = weakref.ref(model)
        elif known is not model:
            raise ConfigError(
                "this cache holds what another model has computed; make a cache for each model"
            )

    # ---- sequences ------------------------------------------------------------------------

    def find(self, prompt: List_[int]) -> int:
        """Return how many tokens of `prompt` a sequence begun now would find; changes nothing.

        Cost: about 5 ns per token, and one look per row that holds the last one found.
        """
        for core in self.store.cores[:1]:
            with core.pool.lock:
                for match in core.prefixes.matches(prompt, self._tenant, max(0, len(prompt) - 1)):
                    for row in match.rows:
                        if all(
                            group.keeps(row, match.num_tokens)
                            and group.resident_tokens(row) >= match.num_tokens
                            for group in core.groups
                        ):
                            return match.num_tokens
        return 0

    def begin(self, sequence_id: int, num_tokens: int, prompt: List_[int] | None = None) -> int:
        """Begin a sequence of about `num_tokens`; returns how many of its tokens are cached.

        With `prompt`, it begins with the prefix of these tokens in the cache.

        Raises:
            OutOfAddressSpaceError: Every row is live. The sequence was not begun.
            ConfigError: The prompt is invalid. The sequence was not begun.
        """
        opened: list[Sequence] = []
        try:
            for core in self.store.cores:
                opened.append(_open(core, num_tokens, prompt, self._tenant))
            num_cached_tokens = _cut_to_least(opened)
        except BaseException:
            for sequence in opened:
                sequence.close()
            raise
        self._sequences[sequence_id] = opened
        return num_cached_tokens

    def grow(self, wanted: List_[tuple[int, int]]) -> None:
        """Make each sequence hold so many tokens, on every device.

        Raises:
            OutOfPagesError, SequenceFullError, DriverError: On each device all have grown, or none.
        """
        for at, core in enumerate(self.store.cores):
            core.grow([(self._sequences[each][at], num_tokens) for each, num_tokens in wanted])

    def rows(self, sequence_ids: List_[int]) -> list[list[int]]:
        """Return the rows of the sequences, per device."""
        found = [self._sequences[each] for each in sequence_ids]
        return [[each[at].row for each in found] for at in range(len(self.store.cores))]

    @contextlib.contextmanager
    def submitting(self, chunks: List_[Chunk]) -> Iterator[None]:
        """Submit a step of grown sequences inside the block; see `KVCache.submitting`."""
        with contextlib.ExitStack() as stack:
            for at, core in enumerate(self.store.cores):
                writes = (
                    (self._sequences[sequence_id][at].row, past, past + new)
                    for sequence_id, past, new in chunks
                )
                stack.enter_context(core.submitting(writes))
            yield

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


def _check_settings(settings: Settings) -> None:
    """Refuse settings at once that the first update would refuse."""
    for name in ("max_tokens", "max_batch_size", "budget_bytes", "layers_per_group"):
        value = getattr(settings, name)
        if value is not None:
            check_positive(name, value)
    if settings.memory is not None and settings.budget_bytes is not None:
        raise ConfigError("a pool has its own budget; leave budget_bytes out")
    if settings.attention_backend is not None:
        get_attention_backend(settings.attention_backend)
    if settings.max_tokens is None:
        default_max_tokens(settings.decoder_config)


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
    least = min((each.num_tokens for each in sequences), default=0)
    if any(each.num_tokens > least for each in sequences):
        try:
            for each in sequences:
                each.truncate(least)
        except ConfigError:  # A window has passed that point.
            for each in sequences:
                each.truncate(0)
            least = 0
    return least
