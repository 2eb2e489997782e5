"""The rows of a served model: the engine opens and grows them, the model attends from them.

The model has proven itself before. A `RaggedCache` learns how layers look from their first keys
and values. Serving wants that settled before the first request: one token is run through the
model, and its memory given back.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from collections.abc import Sequence as List_
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import torch

from ..backend import Backend
from ..cache import KVCache, Sequence
from ..cache.device_memory import open_pool
from ..errors import ConfigError
from ..hf import compat
from ..hf.device_rows import DeviceRows
from ..hf.forward import attending_through, forward_packed
from ..hf.proof import prove
from ..hf.ragged import Piece, RaggedCache, RaggedStep
from ..hf.store import Settings
from ..hf.unservable import check_length
from ..memory import ExtentPool
from ..units import format_bytes

_LOG = logging.getLogger(__name__)
_PROBE_ID = -1
#: What the cache may take of the memory that is free when the engine is made; the rest is for
#: activations, which grow with `max_num_batched_tokens`.
_BUDGET_FRACTION = 0.9


@dataclass(frozen=True)
class _Row:
    """All that a step asks of a sequence: where it is."""

    row: int


class ServedRows(RaggedCache):
    """Rows named by their index; steps find them grown.

    Args:
        model: A transformers causal language model on one device.
        pool: Physical memory.
        num_rows: Sequences that are open or parked at most.
        max_tokens: The longest sequence; by default what the model was made for.
        attention_backend: See `VMKVCache`.

    Raises:
        ConfigError: The model cannot be served: see `RaggedCache` and `prove`; or it is spread
            over several devices.
        OutOfPagesError: The pool does not hold one token.
    """

    def __init__(
        self,
        model: Any,
        pool: ExtentPool,
        *,
        num_rows: int,
        max_tokens: int | None = None,
        attention_backend: str | None = None,
    ):
        if model.config.is_encoder_decoder:
            raise ConfigError(
                "the engine serves decoder-only models; use model.generate with "
                "past_key_values=VMKVCache.for_encoder_decoder(config)"
            )
        prove(model, attention_backend)
        if max_tokens is not None:
            check_length(model.config, max_tokens)
        settings = Settings(
            compat.text_config(model.config),
            max_tokens=max_tokens,
            past_stated=False,
            max_batch_size=num_rows,
            memory=pool,
            attention_backend=attention_backend,
        )
        super().__init__(model.config, settings)
        self._model = model
        try:
            self.cache = self._probe(model)
        except BaseException:
            self.close()
            raise

    def _probe(self, model: Any) -> KVCache:
        """Run one token, so that every layer has its place; returns the cache, empty."""
        device = model.get_input_embeddings().weight.device
        with torch.inference_mode(), attending_through(model):
            token = torch.zeros(1, dtype=torch.int64, device=device)
            forward_packed(model, RaggedStep(self, [Piece(_PROBE_ID, 0, 1)]), token)
        self.store.close_gaps()
        self.end(_PROBE_ID)
        if len(self.store.cores) != 1:
            raise ConfigError(
                "the model is spread over several devices, which the engine cannot serve yet; "
                "load it on one, or use vmkv.generate"
            )
        cache = self.store.cores[0]
        cache.trim()
        return cache

    def rows_for(self, rows: DeviceRows, pieces: List_[Piece]) -> list[Sequence]:
        """The sequences in the rows that `pieces` name, which the engine has grown."""
        if pieces[0].sequence_id == _PROBE_ID:
            return super().rows_for(rows, pieces)
        return cast("list[Sequence]", [_Row(piece.sequence_id) for piece in pieces])

    def attending(self) -> contextlib.AbstractContextManager[None]:
        """While this lasts, the model attends from the rows."""
        return attending_through(self._model)

    def forward(self, pieces: List_[Piece], tokens: torch.Tensor) -> torch.Tensor:
        """Run packed `tokens [Tq]`; logits `[pieces, vocabulary]` of each piece's last one."""
        ends = [end - 1 for end in accumulate(piece.num_new_tokens for piece in pieces)]
        return forward_packed(self._model, RaggedStep(self, pieces), tokens, ends)


def open_rows(
    model: Any,
    pool: ExtentPool,
    max_num_seqs: int,
    max_tokens: int | None,
    attention_backend: str | None,
) -> ServedRows:
    """Rows for so many requests at once; a pool that closes with its last user does so on failure.

    Args:
        model: The model.
        pool: Physical memory.
        max_num_seqs: Requests that run at once.
        max_tokens: See `ServedRows`, as for the rest and for what is raised.
        attention_backend: Likewise.
    """
    pool.attach()  # A pool of the engine's own closes with its last user, whatever fails.
    try:
        return ServedRows(
            model,
            pool,
            # Twice as many: swapped requests and cached prefixes keep theirs.
            num_rows=2 * max_num_seqs + 2,
            max_tokens=max_tokens,
            attention_backend=attention_backend,
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
    """Physical memory on the model's device: what is shared, or else a pool of its own.

    Args:
        model: The model.
        shared: A pool that has its budgets.
        budget_bytes: By default 0.9 of what is free now.
        host_budget_bytes: Host memory for swapping.
        open_memory: The memory of a device by its name.

    Raises:
        ConfigError: A budget is impossible, or given beside a shared pool.
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
    """Have a pool promise no more memory than its device still has.

    A budget is chosen before the model's graphs and activations have taken their part. To be called
    once they have.

    Args:
        pool: What to cut the budget of; one that fits stays as it is.
        spare_bytes: What others will want yet.
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
