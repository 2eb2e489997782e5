"""The rows of ragged batches: which sequences there are, and what of ended ones is left.

A cache that outlives a call of `vmkv.generate` keeps what the sequences of that call have left
in their rows. The next call's prompts begin with it, as far as they are the same:

    with vmkv.RaggedCache(model.config) as cache:
        first = vmkv.generate(model, [system + question], cache=cache)
        second = vmkv.generate(model, [first[0] + answer], cache=cache)  # Computes the answer.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from collections.abc import Sequence as List_
from dataclasses import dataclass
from typing import Any

import torch

from ..attention import AttentionBackend, AttentionSpec, SteadyDecode, select
from ..attention import get as get_attention_backend
from ..cache import CacheStats, KVCache, Sequence
from ..cache.geometry import check_positive
from ..errors import CapacityError, ClosedError, ConfigError, InternalError
from ..memory import ExtentPool
from . import compat, orphans
from .defaults import default_max_tokens
from .device_rows import DeviceRows
from .step import Slot
from .store import LayerKind, Settings, Signature, Store
from .unservable import UnservableError


@dataclass(frozen=True)
class Piece:
    """What one sequence does in a step.

    Attributes:
        sequence_id: Which sequence.
        num_past_tokens: Tokens it holds already.
        num_new_tokens: Tokens of this step.
    """

    sequence_id: int
    num_past_tokens: int
    num_new_tokens: int

    @property
    def num_tokens(self) -> int:
        """Tokens it holds after the step."""
        return self.num_past_tokens + self.num_new_tokens


class RaggedCache:
    """The rows of many sequences, on every device that the model is spread over.

    Nothing is allocated before the model's first forward pass, which tells devices and shapes.

    Args:
        config: The model's configuration.
        settings: Everything else at once, in place of what follows.
        max_tokens: The longest sequence. Only addresses are reserved for it, which are free;
            by default twice what the model was trained for, at least 32k.
        max_batch_size: Sequences that are generated or kept at most; by default up to 256.
        budget_bytes: Physical memory at most, per device; by default what is free then.
        pool: Physical memory to share with other caches; excludes budget_bytes.
        layers_per_group: See `KVCache`.
        attention_backend: See `VMKVCache`.

    Raises:
        ConfigError: An argument is impossible; or the model has layers whose state is not keys
            and values of their own.

    Freed by `close()`, or at the end of a `with` block. One that is dropped is freed when the
    next one is made, with a ResourceWarning. Not thread-safe.
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
            )
            _check_settings(settings)
        self.store = Store(settings, layer_kinds(config))
        self._sequences: dict[int, dict[int, Sequence]] = {}
        self._backends: dict[tuple[int, AttentionSpec], AttentionBackend] = {}
        self._signatures: dict[int, Signature] = {}
        # While a decode goes on, its sequences are grown ahead of what was written.
        self._steady: SteadyDecode | None = None
        self._model: weakref.ref[Any] | None = None
        self._tenant: str | None = None
        self._is_serving = False
        finalizer = weakref.finalize(self, orphans.add, self.store)
        finalizer.atexit = False

    @property
    def has_windows(self) -> bool:
        """Whether some layers forget what has left a sliding window."""
        return any(kind.window_tokens is not None for kind in self.store.kinds.values())

    # ---- a call ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def serving(self, model: Any, num_sequences: int, tenant: str | None) -> Iterator[None]:
        """For a call of `vmkv.generate`: its sequences end when it does, whatever happens.

        Args:
            model: The model. A cache is one model's: what is kept is of no use to another.
            num_sequences: How many sequences it will have.
            tenant: Whose they are: prefixes of other tenants are not found.

        Raises:
            ConfigError: The cache is another model's, has too few rows, or serves another call.
            ClosedError: The cache is closed.
        """
        if self.store.is_closed:
            raise ClosedError("this RaggedCache is closed; make a new one")
        if self._is_serving:
            raise ConfigError("this cache serves another call of generate; give each its own")
        if tenant is not None and not isinstance(tenant, str):
            raise ConfigError(f"tenant={tenant!r} must be a string, or None")
        self._check_rows(num_sequences)
        self._check_model(model)
        self._is_serving, self._tenant = True, tenant
        try:
            yield
        finally:
            self._is_serving, self._tenant = False, None
            self._end_all()

    def _check_rows(self, num_sequences: int) -> None:
        limits = [core.max_sequences for core in self.store.cores]
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
        """How many tokens of `prompt` a sequence that begins now would find. Changes nothing.

        Cost: a hash for each block of 16 tokens, and one look per row that holds the last.
        """
        for core in self.store.cores[:1]:
            for match in core.prefixes.matches(prompt[:-1], self._tenant):
                for row in match.rows:
                    if all(
                        group.keeps(row, match.num_tokens)
                        and group.resident_tokens(row) >= match.num_tokens
                        for group in core.groups
                    ):
                        return match.num_tokens
        return 0

    def begin(self, sequence_id: int, prompt: List_[int]) -> int:
        """Begin a sequence with what the cache holds of its prompt; returns how many tokens.

        Before the model's first pass there is nothing to begin with: its step makes the rows.

        Raises:
            OutOfAddressSpaceError: Every row is live. There is no such sequence.
            ConfigError: The prompt is none. Likewise.
        """
        self.settle()
        opened: list[Sequence] = []
        try:
            for core in self.store.cores:
                opened.append(_open(core, prompt, self._tenant))
            num_tokens = _cut_to_least(opened)
        except BaseException:
            for sequence in opened:
                sequence.close()
            raise
        for sequence in opened:
            self._sequences.setdefault(id(sequence.cache), {})[sequence_id] = sequence
        return num_tokens

    def record(self, sequence_id: int, token_ids: List_[int]) -> None:
        """Say which tokens a sequence's passes have computed, after those recorded before.

        Ends a steady decode, as `settle` does.

        Raises:
            ConfigError: More than it holds, or no token ids.
        """
        self.settle()
        for mine in self._sequences.values():
            if sequence_id in mine:
                mine[sequence_id].record(token_ids)

    def end(self, sequence_id: int) -> None:
        """A sequence is finished: its rows are parked for the next one, on every device."""
        self.settle()
        for mine in self._sequences.values():
            sequence = mine.pop(sequence_id, None)
            if sequence is not None:
                sequence.close()

    def _end_all(self) -> None:
        for sequence_id in {each for mine in self._sequences.values() for each in mine}:
            self.end(sequence_id)
        self.settle()

    # ---- a step ---------------------------------------------------------------------------

    def rows_for(self, rows: DeviceRows, pieces: List_[Piece]) -> list[Sequence]:
        """The sequences of `pieces` on one device, grown for the step; all of them or none.

        Those that have not begun do now.

        Raises:
            OutOfPagesError, OutOfAddressSpaceError, SequenceFullError: None has grown.
        """
        self.settle()
        core = rows.core
        mine = self._sequences.setdefault(id(core), {})
        opened = []
        try:
            for piece in pieces:
                if piece.sequence_id not in mine:
                    if piece.num_past_tokens:
                        raise InternalError(f"nothing of {piece} is on {core.device}")
                    mine[piece.sequence_id] = core.open(piece.num_tokens, tenant=self._tenant)
                    opened.append(piece.sequence_id)
            sequences = [mine[piece.sequence_id] for piece in pieces]
            core.grow(
                (sequence, piece.num_tokens)
                for sequence, piece in zip(sequences, pieces, strict=True)
            )
        except BaseException:
            for sequence_id in opened:
                mine.pop(sequence_id).close()
            raise
        return sequences

    def bind(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> Slot:
        """Where layer `index` lies, given keys and values of it; see `Store.bind`.

        Raises:
            ConfigError: They differ in shape, type or device from those it had before.
        """
        signature = Signature.of(keys, values)
        before = self._signatures.get(index, signature)
        if before != signature:
            raise ConfigError(
                f"layer {index} has {signature.k_shape[0]} key heads of {signature.k_shape[1]} in "
                f"{signature.dtype} on {signature.device}; this cache holds "
                f"{before.k_shape[0]} of {before.k_shape[1]} in {before.dtype} on "
                f"{before.device}, from before the model was changed: make a new one"
            )
        slot = self.store.bind(index, keys, values)
        self._signatures[index] = signature
        return slot

    def begin_steady(self, steady: SteadyDecode) -> None:
        """From now on sequences grow ahead of what is written, until anyone asks about them."""
        self._steady = steady

    def is_steady(self, steady: SteadyDecode) -> bool:
        """Whether nothing else has been done with the sequences since `begin_steady`."""
        return self._steady is steady

    def settle(self) -> None:
        """End a decode that is under way: every sequence says how long it is. Idempotent."""
        if self._steady is not None:
            self._steady.settle()
            self._steady = None

    def backend(self, core: KVCache, spec: AttentionSpec) -> AttentionBackend:
        """The attention backend for layers of this kind; its over-read is kept resident."""
        key = (id(core), spec)
        if key not in self._backends:
            backend = select(spec, self.store.settings.attention_backend)
            core.keep_resident(backend.overread_tokens(spec.k_dim, spec.v_dim))
            self._backends[key] = backend
        return self._backends[key]

    # ---- the whole ------------------------------------------------------------------------

    def stats(self) -> CacheStats:
        """All devices together. Ends a steady decode, as `settle` does."""
        self.settle()
        return self.store.stats()

    def trim(self, num_bytes: int | None = None) -> int:
        """Give memory that no sequence needs back; returns the bytes given back.

        What ended sequences left goes first, and with it what prompts could begin with.
        """
        self.settle()
        return self.store.trim(num_bytes)

    def check(self) -> None:
        """Check the invariants of all memory. Ends a steady decode, as `settle` does."""
        self.settle()
        for core in self.store.cores:
            core.check()

    def close(self) -> None:
        """Free everything. Idempotent."""
        self._steady = None
        self._sequences.clear()
        self.store.close()

    def __enter__(self) -> RaggedCache:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def layer_kinds(config: Any) -> list[LayerKind]:
    """The layers of a model's configuration, all of which vmkv holds.

    Raises:
        ConfigError: It has others.
    """
    decoder = compat.text_config(config)
    if "chunked_attention" in (getattr(decoder, "layer_types", None) or ()):
        raise UnservableError("it attends in chunks, which no kernel here does")
    layers = compat.default_layers(config)
    if len(layers) != getattr(decoder, "num_hidden_layers", len(layers)):
        raise UnservableError("layers share keys and values, which only a cache can hand on")
    kinds = []
    for index, layer in enumerate(layers):
        is_ours, window = compat.window_of(layer)
        if not is_ours:
            raise UnservableError(
                f"its layer {index} is a {type(layer).__name__}, whose state is not keys and "
                "values of its own"
            )
        kinds.append(LayerKind(index, window))
    return kinds


def _check_settings(settings: Settings) -> None:
    """Refuse at once what the first update would refuse."""
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


def _open(core: KVCache, prompt: List_[int], tenant: str | None) -> Sequence:
    """A sequence that begins with what `core` holds of `prompt`; with nothing if it must."""
    try:
        return core.open(len(prompt), prompt=prompt, tenant=tenant)
    except CapacityError:
        # To share takes memory for a tail, or a row besides the one shared. Computing may not.
        return core.open(len(prompt), tenant=tenant)


def _cut_to_least(sequences: List_[Sequence]) -> int:
    """Have one sequence's parts on all devices be equally long; returns how long."""
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
