"""The memory behind a `VMKVCache`: one `KVCache` per device, shared by the cache's layers.

transformers updates each layer on its own; a `KVCache` lays all layers of one kind side by side.
The store learns shapes and devices from the first update (configurations are wrong under tensor
parallelism), groups layers by kind, and makes the tensors of a step for all layers at once, because
views made one by one would cost more than `torch.cat`.

A store does not refer to its cache and may outlive it: the store of a cache that was never closed
becomes an orphan, which is closed when the next cache is made.

See DESIGN.md, Note [Shapes come from the first update],
Note [An unclosed cache is closed later].
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import math
import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..attention import registry
from ..attention.append import why_not_fp8
from ..core.backend import Backend, open_backend
from ..core.cache import CacheStats, KVCache
from ..core.cache.device_memory import open_member_pool
from ..core.cache.fp8 import FP8
from ..core.cache.geometry import check_positive, fitting_rows
from ..core.cache.stats import add_stats
from ..core.memory import ExtentPool, PoolMember, default_socket_path
from ..errors import CapacityError, ClosedError, ConfigError
from ..step.model_guard import fingerprint_of
from ..step.row_attention import AttentionCalls
from . import compat
from .configuration import default_max_tokens, rows_and_tokens
from .group_step import DeviceRows, GroupStep
from .kv_format import KVScales, SkipLayers, layers_in_fp8

if TYPE_CHECKING:
    from typing_extensions import Self

    from .capture import CapturedSteps

# ---- store ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """Options of a cache for a model; those of `VMKVCache` and `RaggedCache`.

    Attributes:
        max_tokens: The longest sequence. Only addresses are reserved for it, which are free; by
            default twice the length that the model was trained for, at least 32k.
        max_batch_size: The largest batch, beams included; by default rows are reserved for 256 or
            the first batch, and for more when a larger one comes.
        budget_bytes: Physical memory at most, per device; by default all that is free.
        backend: `"host"`, `"cuda:0"`, a backend, or None to follow the model's tensors.
        pool: Physical memory to share with other caches; excludes backend and budget_bytes.
        memory: "pool" joins the broker of this user (`vmkv pool`), which shares a device's memory
            between processes, and "pool:PATH" the one at a socket; `budget_bytes` is then the most
            that this cache may have. Live rows are never taken back. Excludes pool.
        layers_per_group: See `KVCache`.
        attention_backend: The kernel for models that attend through `"vmkv"`: a name of
            `vmkv.attention.backend_names()`; by default the best that can serve.
        kv_dtype: "fp8" stores keys and values in eight bits (`float8_e4m3fn`), in half the memory;
            "auto" in the model's type.
        kv_scales: Divisors of stored keys and values: `KVScales`, or a file of them; by default 1.
        skip_layers: Layers that stay in the model's type: their indices, or "sliding" for layers
            with a sliding window.

    Raises:
        ConfigError: An option is invalid by itself, or two exclude each other.
    """

    max_tokens: int | None = None
    max_batch_size: int | None = None
    budget_bytes: int | None = None
    backend: str | Backend | None = None
    pool: ExtentPool | None = None
    memory: str | None = None
    layers_per_group: int | None = None
    attention_backend: str | None = None
    kv_dtype: str = "auto"
    kv_scales: KVScales | str | os.PathLike[str] | None = None
    skip_layers: SkipLayers = ()

    def __post_init__(self) -> None:
        if self.pool is not None and (self.backend is not None or self.budget_bytes is not None):
            raise ConfigError("a pool has its own budget and backend; leave those out")
        if self.memory is not None and (self.pool is not None or self._broker is None):
            raise ConfigError(
                f'memory={self.memory!r} is neither "pool" nor "pool:PATH", the socket of a '
                "`vmkv pool`"
                if self._broker is None
                else "pool and memory exclude each other: leave one out"
            )
        for name in ("max_tokens", "max_batch_size", "budget_bytes", "layers_per_group"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        if self.attention_backend is not None:
            registry.get(self.attention_backend)  # Refuses an unknown name.

    @property
    def _broker(self) -> str | None:
        """Socket of the broker that `memory` names; None if it names none."""
        kind, colon, path = (self.memory or "").partition(":")
        if kind != "pool" or bool(colon) != bool(path):
            return None
        return path or default_socket_path()

    def open_pool(self, device: str) -> ExtentPool | None:
        """Return the pool to make a cache over, if there is one; see `memory` and `pool`."""
        if self.memory is None:
            return self.pool
        return open_member_pool(
            self.backend or device,
            partial(PoolMember.join, self._broker or ""),
            name=f"a cache of process {os.getpid()}",
            limit_bytes=self.budget_bytes,
        )


class Signature(NamedTuple):
    """Properties that updates of a layer must not change; shapes are `(heads, dim)`."""

    k_shape: tuple[int, int]
    v_shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor) -> Signature:
        """Return the signature of `[batch, heads, tokens, head_dim]` tensors, which must agree."""
        if keys.ndim != 4 or values.ndim != 4:
            raise ConfigError(
                "keys and values must be [batch, heads, tokens, head_dim]; got "
                f"{tuple(keys.shape)} and {tuple(values.shape)}"
            )
        if keys.dtype != values.dtype or keys.device != values.device:
            raise ConfigError(
                f"keys are {keys.dtype} on {keys.device}, values {values.dtype} on "
                f"{values.device}; they must agree"
            )
        k, v = keys.shape, values.shape
        return cls((k[1], k[3]), (v[1], v[3]), keys.dtype, keys.device)


class Store:
    """Binds layers to memory on their first update.

    `num_layouts` counts changes of the layers' places, `num_batches` changes and truncations of the
    batch. `num_spare_rows` are added on CUDA to the rows asked for, if there are addresses. For
    `past_stated` see `default_max_tokens`. `ConfigError` for what the first update would refuse.
    """

    owner = "cache"  #: What messages call the cache.

    def __init__(
        self,
        config: Any,
        options: CacheOptions,
        windows: Mapping[int, int | None],
        *,
        num_spare_rows: int = 0,
        past_stated: bool = True,
    ):
        close_orphans()
        self.options = options
        self.decoder_config = compat.text_config(config)
        self.returns_copies = compat.views_keys(config)  #: Instead of views of the rows.
        self.is_encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
        self._max_tokens = options.max_tokens or default_max_tokens(
            self.decoder_config, past_stated=past_stated
        )
        self._num_spare_rows = num_spare_rows
        self.windows = windows
        self._fp8_layers, self.kv_scales = layers_in_fp8(config, options, windows)
        self.is_closed = False
        self.keeps_past = False
        self.was_continued = False  #: Whether tokens have been added in passes after decoding.
        self.rows: dict[torch.device, DeviceRows] = {}  #: The batch's rows.
        self.cores: list[KVCache] = []  #: The caches, one per device.
        #: Of bound layers, their group's step and their index in the group.
        self.places: dict[int, tuple[GroupStep, int]] = {}
        self.signatures: dict[int, Signature] = {}  #: Of bound layers.
        self._seen: set[int] = set()  # Layers whose shape is known rather than guessed.
        self._has_gaps = False
        self._min_rows = 0  # Of copies.
        self.num_layouts = 0
        self.num_batches = 0
        #: Steps that read the rows, closed before these are.
        self.readers: weakref.WeakSet[CapturedSteps] = weakref.WeakSet()

    # ---- binding --------------------------------------------------------------------------

    def bind(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Give layer `index` and unseen ones of its kind places; out of memory, none is bound."""
        self.check_open()
        self._make_room(keys.shape[0])
        signature = Signature.of(keys, values)
        if self.signatures.get(index) != signature:
            self._bind_alike(index, signature, keys.shape[0])
        self._seen.add(index)

    def _bind_alike(self, index: int, signature: Signature, batch_size: int) -> None:
        rows = self._rows_on(signature, batch_size)
        window, scales = self.windows[index], self.kv_scales
        stored = self._stored(index, signature)
        alike = [index] + [
            other
            for other, its_window in self.windows.items()
            if its_window == window
            and other > index
            and other not in self._seen
            and self._stored(other, signature) == stored
        ]
        for other in alike:
            if self.signatures.pop(other, None) is not None:
                step, _ = self.places.pop(other)
                step.rows.core.drop_layers([other])
                self._has_gaps = True
        rows.core.add_layers(
            alike,
            num_kv_heads=signature.k_shape[0],
            head_dim=signature.k_shape[1],
            num_v_heads=signature.v_shape[0],
            v_head_dim=signature.v_shape[1],
            dtype=stored,
            window_tokens=window,
            scales=[scales.layers[at] for at in alike] if stored == FP8 and scales else None,
        )
        self.signatures |= dict.fromkeys(alike, signature)
        self._follow(rows)

    def _stored(self, index: int, signature: Signature) -> torch.dtype:
        """Return the type that a layer is stored in; refused if the device cannot convert to it."""
        if index not in self._fp8_layers:
            return signature.dtype
        if signature.device.type == "cuda":
            reason = why_not_fp8(signature.device, signature.dtype)
            if reason is not None:
                raise ConfigError(reason)
        return FP8

    def bind_all(
        self, signatures: Mapping[int, Signature], calls: AttentionCalls | None = None
    ) -> None:
        """Bind every layer of a proven model, before any sequence and the first update."""
        for index, signature in sorted(signatures.items()):
            if self.signatures.get(index) != signature:
                self._bind_alike(index, signature, 1)
        self._seen.update(signatures)
        self.close_gaps()
        if calls is not None:
            calls.add_rows(self.cores[0])

    def open_files(self, model: Any, folder: str | os.PathLike[str], budget_bytes: int) -> None:
        """Keep evicted prefixes in files too; on several devices each has a folder in `folder`.

        Raises `ConfigError` as `HostBlocks.open_files`. Cost: one read of the weights.
        """
        config = model.config.to_dict()
        for name in ("_name_or_path", "transformers_version"):
            config.pop(name, None)
        text = json.dumps(config, sort_keys=True, default=str)
        identity = hashlib.sha256(text.encode() + fingerprint_of(model)).digest()
        try:
            for at, core in enumerate(self.cores):
                its = folder if len(self.cores) == 1 else Path(folder) / f"device-{at}"
                core.host_blocks.open_files(its, budget_bytes // len(self.cores), identity)
        except BaseException:  # All or none: another call must not find a folder in use.
            for core in self.cores:
                core.host_blocks.close_files()
            raise

    def close_gaps(self) -> None:
        """Compact groups with gaps, between two passes; without room in the pool the gaps stay."""
        if not self._has_gaps or not self.has_seen_all:
            return
        self._has_gaps = False
        for rows in self.rows.values():
            try:
                moved = rows.core.compact()
            except CapacityError:
                continue
            if moved:
                self._follow(rows)

    def _follow(self, rows: DeviceRows) -> None:
        self.num_layouts += 1
        steps = {step.group: step for step, _ in self.places.values()}
        for layer, (group, at) in rows.core.places.items():
            if group not in steps:
                steps[group] = GroupStep(rows, group)
            self.places[layer] = steps[group], at

    @property
    def has_seen_all(self) -> bool:
        """Whether every layer has been updated since the beginning, or the last reset."""
        return len(self._seen) == len(self.windows)

    def _rows_on(self, signature: Signature, batch_size: int) -> DeviceRows:
        device = signature.device
        if device not in self.rows:
            if device.type not in ("cpu", "cuda"):
                raise ConfigError(
                    f"vmkv has no backend for device {device}; it runs on CUDA and on the CPU: use "
                    "DynamicCache there"
                )
            options = self.options
            if self.rows and (options.backend or options.pool or options.memory):
                raise ConfigError(
                    f"keys arrived on {device}, but this cache was given one device's memory "
                    f"({next(iter(self.rows))}); leave backend out for models spread over several"
                )
            num_values = math.prod(signature.k_shape) + math.prod(signature.v_shape)
            token_bytes = num_values * signature.dtype.itemsize * len(self.windows)
            num_rows, max_tokens = rows_and_tokens(
                batch_size, token_bytes, options, self._max_tokens
            )
            if device.type == "cuda":
                wanted_rows = num_rows + self._num_spare_rows
                num_rows = max(num_rows, fitting_rows(token_bytes, max_tokens, wanted_rows))
            pool = options.open_pool(str(device))
            try:
                core = KVCache(
                    pool or options.backend or open_backend(str(device)),
                    max_tokens=max_tokens,
                    max_sequences=num_rows,
                    budget_bytes=options.budget_bytes if pool is None else None,
                    layers_per_group=options.layers_per_group,
                )
            except BaseException:
                if pool is not None and options.memory is not None:
                    pool.close()
                raise
            if core.device != device:
                core.close()
                raise ConfigError(
                    f"keys arrived on {device}, but this cache's memory is on {core.device}; "
                    "leave backend out, or name the model's device"
                )
            core.keeps_past = self.keeps_past
            self.rows[device] = DeviceRows(core)
            self.cores.append(core)
        return self.rows[device]

    @property
    def attends_in_place(self) -> bool:
        """Whether the model reads rows themselves rather than the tensors that updates return."""
        return getattr(self.decoder_config, "_attn_implementation", None) == "vmkv"

    def keep_past(self) -> None:
        """Keep tokens that leave sliding windows, so that they can be rolled back to."""
        self.keeps_past = True
        for rows in self.rows.values():
            rows.core.keeps_past = True

    # ---- the batch ------------------------------------------------------------------------

    def _forget_steps(self) -> None:
        for step, _ in self.places.values():
            step.forget()

    def settle(self, batch_size: int, num_tokens: int) -> None:
        """End rows and truncate them, after layers have changed their batch or length."""
        self.num_batches += 1
        self._forget_steps()
        for rows in self.rows.values():
            rows.keep_rows(batch_size)
            rows.set_length(num_tokens)
            rows.paddings.clear()  # Another batch may rewrite the same tensor.
        if not batch_size:
            self._seen.clear()  # The next batch may have other shapes.

    def take_over(self, sources: Sequence[int]) -> None:
        """Make the batch the entries `sources`; after an error some devices are unchanged."""
        self.check_open()
        self._make_room(len(sources))
        self.num_batches += 1
        self._forget_steps()
        for rows in self.rows.values():
            rows.take_over(sources)

    def _make_room(self, batch_size: int) -> None:
        """Have rows for a batch that no option bounds, if need be by a move to other addresses."""
        has_rows = all([batch_size <= core.max_sequences for core in self.cores])
        if has_rows or self.options.max_batch_size is not None:
            return
        self._min_rows = batch_size
        twin = copy.deepcopy(self)
        self._end_readers()
        for before, core in zip(self.cores, twin.cores, strict=True):
            core.keep_resident(before.overread_tokens)
            before.close()
        self.rows, self.cores, self.places = twin.rows, twin.cores, twin.places
        self.num_layouts = twin.num_layouts

    def __deepcopy__(self, memo: dict[int, Any]) -> Store:
        """Return a store of the same layers, in the same pools, whose rows are forks of these."""
        self.check_open()
        close_orphans()
        twin = copy.copy(self)
        twin.rows, twin.cores, twin.places = {}, [], {}
        twin.signatures, twin._seen = dict(self.signatures), set(self._seen)
        twin.readers = weakref.WeakSet()
        try:
            for device, rows in self.rows.items():
                core = KVCache(
                    rows.core.pool,
                    max_tokens=rows.core.max_tokens,
                    max_sequences=max(rows.core.max_sequences, self._min_rows),
                    layers_per_group=rows.core.layers_per_group,
                )
                core.keeps_past = self.keeps_past
                twin.cores.append(core)
                twin.rows[device] = DeviceRows(core)
                for group in rows.core.kv_groups:
                    members = dict(rows.core.members(group))
                    # Gaps stay gaps, because only equal groups share memory.
                    layers = [members.get(at, ~at) for at in range(group.geometry.num_layers)]
                    core.add_layers(
                        layers,
                        num_kv_heads=group.geometry.shape.num_k_heads,
                        head_dim=group.geometry.shape.k_dim,
                        num_v_heads=group.geometry.shape.num_v_heads,
                        v_head_dim=group.geometry.shape.v_dim,
                        dtype=group.dtype,
                        window_tokens=group.window_tokens,
                        scales=group.scales,
                    )
                    core.drop_layers([layer for layer in layers if layer < 0])
                twin._follow(twin.rows[device])
                for row, each in enumerate(rows.sequences):
                    twin.rows[device].sequences.append(core.fork(each, each.num_tokens, row=row))
        except BaseException:
            twin.close()
            raise
        return twin

    def keeps(self, num_tokens: int) -> bool:
        """Whether the batch can go back to `num_tokens`: its windows still hold their tokens."""
        return all(rows.keeps(num_tokens) for rows in self.rows.values())

    # ---- the whole ------------------------------------------------------------------------

    def _end_readers(self) -> None:
        for reader in list(self.readers):
            reader.close()

    def has_outside_views(self) -> bool:
        """Whether tensors from the cache still live outside it; drops the store's own."""
        self._end_readers()
        self._forget_steps()
        return any([core.has_outside_views() for core in self.cores])

    def close(self) -> None:
        """Close readers, and the caches of all devices. Idempotent; after an error it goes on."""
        self._end_readers()
        self.is_closed = True
        self._forget_steps()
        for core in self.cores:
            core.close()

    def check_open(self) -> None:
        """Raise `ClosedError` if the store is closed, `ConfigError` in a forked child."""
        if self.is_closed:
            raise ClosedError(f"this {self.owner} is closed; make a new one")
        for core in self.cores:
            core.pool.check_process()


_CONFIG = inspect.Parameter("config", inspect.Parameter.POSITIONAL_OR_KEYWORD)


def signature_for_help(*own: inspect.Parameter) -> inspect.Signature:
    """Return the signature of a cache: `config`, `own`, and the options by name."""
    options = inspect.signature(CacheOptions).parameters.values()
    return inspect.Signature([_CONFIG, *own, *options])


class StoreOwner:
    """A cache over a store: its memory, its end, and its finalizer."""

    _store: Store
    # For `help`, which would show `**options`.
    __signature__ = signature_for_help()

    def _own(self, store: Store) -> None:
        """Keep `store`, which does not refer to the cache, so that it can outlive it as orphan."""
        self._store = store
        store.owner = type(self).__name__
        close_later(self, store)

    def stats(self) -> CacheStats:
        """Return the cache's present contents and memory, all devices together."""
        return add_stats([core.stats() for core in self._store.cores])

    def trim(self, num_bytes: int | None = None) -> int:
        """Return memory that no live token needs to the devices; returns the bytes released.

        Rows of ended sequences go first: all, without `num_bytes`. Their prefixes move to host
        memory where there is some, and are forgotten elsewhere.
        """
        self._store.check_open()
        released_bytes = 0
        for core in self._store.cores:
            rest = None if num_bytes is None else max(0, num_bytes - released_bytes)
            released_bytes += core.trim(rest)
        return released_bytes

    @property
    def kv_caches(self) -> tuple[KVCache, ...]:
        """The `KVCache` of each device; none before the first tokens."""
        self._store.check_open()
        return tuple(self._store.cores)

    def check(self) -> None:
        """Check the invariants of all memory; raises `InternalError` where one is broken."""
        for core in self._store.cores:
            core.check()

    def close(self) -> None:
        """Wait for submitted work and free everything. Idempotent.

        Tensors from the cache must not be used afterwards.
        """
        self._store.close()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._store.is_closed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


# ---- orphans -------------------------------------------------------------------------------------

_orphans: deque[Any] = deque()
_collecting = threading.Lock()


def close_later(owner: object, memory: Any) -> None:
    """Make `memory`, which does not refer to `owner`, an orphan if `owner` ends without closing."""
    weakref.finalize(owner, _keep_orphan, memory, type(owner).__name__).atexit = False


def _keep_orphan(memory: Any, owner: str) -> None:
    if memory.is_closed:
        return
    _orphans.append(memory)
    warnings.warn(
        f"{owner} was never closed; its memory is given back when the next cache or engine is "
        f"made. Use `with {owner}(...)`, or close it",
        ResourceWarning,
        stacklevel=2,
    )


def close_orphans() -> None:
    """Close the orphans that no tensor points into any more."""
    with _collecting:
        for _ in range(len(_orphans)):
            if _orphans[0].has_outside_views():
                _orphans.rotate(-1)
            else:
                _orphans[0].close()
                _orphans.popleft()  # After an error another call tries again.
