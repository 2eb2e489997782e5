"""Memory of a served model: its pool, its cache's rows, and the pool's budget."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from ..core.backend import Backend
from ..core.cache import KVCache
from ..core.cache.device_memory import free_bytes, open_member_pool, open_pool
from ..core.memory import ExtentPool, PoolMember
from ..errors import ConfigError
from ..hf.configuration import check_length, layer_windows
from ..hf.proof import prove
from ..hf.store import CacheOptions, Signature, Store
from ..phases import phase
from ..step.row_attention import AttentionCalls
from ..units import format_bytes
from .options import EngineOptions

_LOG = logging.getLogger(__name__)
#: Share of the free memory for the cache; the rest is for activations, which grow with
#: `max_num_batched_tokens`.
_BUDGET_FRACTION = 0.9


class ServedRows(NamedTuple):
    """The cache of a served model; `close` frees everything. Other fields are those of `Proof`."""

    cache: KVCache
    calls: AttentionCalls
    close: Callable[[], None]
    signatures: Mapping[int, Signature]


def open_rows(model: Any, pool: ExtentPool, options: EngineOptions) -> ServedRows:
    """Open the cache of a model on one device, for the engine's running requests.

    The model proves itself first. `ConfigError` if it cannot be served; a pool that closes with its
    last user is closed then.
    """
    pool.attach()  # An unshared pool closes with its last user, also on failure.
    try:
        if model.config.is_encoder_decoder:
            raise ConfigError(
                "the engine serves decoder-only models; use model.generate with "
                "VMKVCache.for_encoder_decoder(config)"
            )
        with phase("proving that packed steps compute the same"):
            signatures, calls, _ = prove(model, options.attention_backend, options.kv_dtype)
        if len({each.device for each in signatures.values()}) > 1:
            raise ConfigError(
                "the model is spread over several devices, which the engine cannot serve yet; "
                "load it on one, or use vmkv.generate"
            )
        store = make_store(model.config, options, pool)
        try:
            store.bind_all(signatures, calls)
            if options.disk_folder is not None:
                with phase("looking up the blocks of earlier servers"):
                    store.open_files(model, options.disk_folder, options.disk_budget_bytes)
        except BaseException:
            store.close()
            raise
        return ServedRows(store.cores[0], calls, store.close, signatures)
    finally:
        pool.detach()


def make_store(config: Any, options: EngineOptions, pool: ExtentPool | None = None) -> Store:
    """Make the store of a model's layers; `ConfigError` if the options do not suit the model."""
    if options.max_tokens is not None:
        check_length(config, options.max_tokens)
    names = ("max_tokens", "attention_backend", "kv_dtype", "kv_scales", "skip_layers")
    shared = {name: getattr(options, name) for name in names}
    # Twice as many rows: swapped requests and cached prefixes keep theirs.
    its = CacheOptions(max_batch_size=2 * options.max_num_seqs + 2, pool=pool, **shared)
    return Store(config, its, layer_windows(config), past_stated=False)


def pool_beside(
    model: Any,
    shared: ExtentPool | None,
    options: EngineOptions,
    open_memory: Callable[[str], str | Backend] = str,
    join: Callable[..., PoolMember] = PoolMember.join,
) -> ExtentPool:
    """Return the `shared` pool, or open one on the model's device.

    `open_memory` opens a backend by the device's name, `join` joins a broker. `ConfigError` if a
    budget is impossible, or given with a shared pool.
    """
    if shared is not None:
        if options.budget_bytes is not None or options.host_budget_bytes or options.pool_socket:
            raise ConfigError("a shared pool has its own budgets; leave budget_bytes out")
        return shared
    device: torch.device = model.get_input_embeddings().weight.device
    name = "host" if device.type == "cpu" else str(device)
    if options.pool_socket is not None:
        return open_member_pool(
            open_memory(name),
            partial(join, options.pool_socket),
            host_budget_bytes=options.host_budget_bytes,
            name=model.config.name_or_path or type(model).__name__,
            floor_bytes=options.floor_bytes,
            limit_bytes=options.budget_bytes,
            weight=options.pool_weight,
        )
    pool = open_pool(open_memory(name), options.budget_bytes, options.host_budget_bytes)
    if options.budget_bytes is None:
        page_bytes = pool.page_bytes
        most_bytes = int(pool.stats().budget_bytes * (options.memory_fraction or _BUDGET_FRACTION))
        pool.set_budget(max(page_bytes, most_bytes // page_bytes * page_bytes))
    return pool


def fit_budget(pool: ExtentPool, spare_bytes: int) -> None:
    """Lower a pool's budget to the memory that its device still has, less `spare_bytes`."""
    left_bytes = max(0, pool.backend.free_memory_bytes() - spare_bytes)
    if pool.member is not None:
        pool.member.fit(left_bytes)
        return
    stats = pool.stats()
    fitting = stats.created_bytes + left_bytes
    fitting = max(pool.page_bytes, fitting // pool.page_bytes * pool.page_bytes)
    if fitting < stats.budget_bytes:
        _LOG.info(
            "keys and values get %s instead of %s: graphs and activations have the rest",
            format_bytes(fitting),
            format_bytes(stats.budget_bytes),
        )
        pool.set_budget(fitting)


class OwnBudget:
    """Keeps an engine's budget within free device memory, which training uses between requests.

    A budget that the user sets becomes the new maximum.
    """

    def __init__(self, pool: ExtentPool, spare_bytes: int):
        self._pool = pool
        self._spare_bytes = spare_bytes
        self._most_bytes = self._fitted_bytes = pool.budget_bytes

    def refit(self) -> None:
        """Lower the budget to free memory, torch's idle memory included, or raise it again."""
        pool = self._pool
        if pool.budget_bytes != self._fitted_bytes:
            self._most_bytes = pool.budget_bytes
        lacking_bytes = self._most_bytes - pool.stats().created_bytes + self._spare_bytes
        free_bytes(pool.backend, lacking_bytes)
        pool.set_budget(self._most_bytes)
        fit_budget(pool, self._spare_bytes)
        self._fitted_bytes = pool.budget_bytes
