"""Rows of a served model, and the memory behind them.

The model proves itself first, which reveals the layout of its layers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..core.backend import Backend
from ..core.cache import KVCache
from ..core.cache.device_memory import open_pool
from ..core.memory import ExtentPool
from ..errors import ConfigError
from ..hf import compat
from ..hf.kv_format import KVFormat
from ..hf.proof import prove
from ..hf.store import Settings, Signature, Store
from ..hf.unservable import check_length, layer_kinds
from ..units import format_bytes

_LOG = logging.getLogger(__name__)
#: Share of the free memory for the cache; the rest is for activations, which grow with
#: `max_num_batched_tokens`.
_BUDGET_FRACTION = 0.9


class ServedRows:
    """Rows of a model on one device: `cache`, and `calls` as in `Proof`.

    `num_rows` bounds open and parked sequences together; `max_tokens` defaults to the model's
    length. `ConfigError` if the model cannot be served (see `prove`) or is spread over several
    devices.
    """

    def __init__(
        self,
        model: Any,
        pool: ExtentPool,
        *,
        num_rows: int,
        max_tokens: int | None = None,
        attention_backend: str | None = None,
        kv_format: KVFormat | None = None,
    ):
        if model.config.is_encoder_decoder:
            raise ConfigError(
                "the engine serves decoder-only models; use model.generate with "
                "past_key_values=VMKVCache.for_encoder_decoder(config)"
            )
        signatures, self.calls, _ = prove(model, attention_backend)
        if max_tokens is not None:
            check_length(model.config, max_tokens)
        _check_one_device(signatures)
        settings = Settings(
            compat.text_config(model.config),
            max_tokens=max_tokens,
            past_stated=False,
            max_batch_size=num_rows,
            memory=pool,
            attention_backend=attention_backend,
            kv_format=kv_format or KVFormat(),
        )
        self._store = Store(settings, layer_kinds(model.config))
        try:
            self._store.bind_all(signatures)
        except BaseException:
            self.close()
            raise
        self.cache: KVCache = self._store.cores[0]

    def close(self) -> None:
        """Free everything. Idempotent."""
        self._store.close()


def _check_one_device(signatures: Mapping[int, Signature]) -> None:
    if len({each.device for each in signatures.values()}) > 1:
        raise ConfigError(
            "the model is spread over several devices, which the engine cannot serve yet; "
            "load it on one, or use vmkv.generate"
        )


def open_rows(
    model: Any,
    pool: ExtentPool,
    max_num_seqs: int,
    max_tokens: int | None,
    attention_backend: str | None,
    kv_format: KVFormat | None = None,
) -> ServedRows:
    """Open rows for `max_num_seqs` running requests; see `ServedRows`.

    A pool that closes with its last user is closed on failure.
    """
    pool.attach()  # An unshared pool closes with its last user, also on failure.
    try:
        return ServedRows(
            model,
            pool,
            # Twice as many: swapped requests and cached prefixes keep their rows.
            num_rows=2 * max_num_seqs + 2,
            max_tokens=max_tokens,
            attention_backend=attention_backend,
            kv_format=kv_format,
        )
    finally:
        pool.detach()


def pool_beside(
    model: Any,
    shared: ExtentPool | None,
    budget_bytes: int | None,
    host_budget_bytes: int,
    *,
    open_memory: Callable[[str], str | Backend] = str,
) -> ExtentPool:
    """Return the `shared` pool, or open one on the model's device.

    `budget_bytes` defaults to 0.9 of the memory that is free now; `open_memory` opens a backend by
    the device's name. `ConfigError` if a budget is impossible, or given with a shared pool.
    """
    if shared is not None:
        if budget_bytes is not None or host_budget_bytes:
            raise ConfigError("a shared pool has its own budgets; leave budget_bytes out")
        return shared
    device: torch.device = model.get_input_embeddings().weight.device
    name = "host" if device.type == "cpu" else str(device)
    pool = open_pool(open_memory(name), budget_bytes, host_budget_bytes)
    if budget_bytes is None:
        page_bytes = pool.page_bytes
        fraction = int(pool.stats().budget_bytes * _BUDGET_FRACTION)
        pool.set_budget(max(page_bytes, fraction // page_bytes * page_bytes))
    return pool


def fit_budget(pool: ExtentPool, spare_bytes: int) -> None:
    """Lower a pool's budget to the memory that its device still has, less `spare_bytes`.

    Call it after the model's graphs and activations have taken their memory.
    """
    stats = pool.stats()
    free_bytes = pool.backend.free_memory_bytes()
    fitting = stats.created_bytes + max(0, free_bytes - spare_bytes)
    fitting = max(pool.page_bytes, fitting // pool.page_bytes * pool.page_bytes)
    if fitting < stats.budget_bytes:
        _LOG.info(
            "keys and values get %s instead of %s: graphs and activations have the rest",
            format_bytes(fitting),
            format_bytes(stats.budget_bytes),
        )
        pool.set_budget(fitting)
