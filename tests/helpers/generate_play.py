"""Operations on a `RaggedCache` between calls of `vmkv.generate`, with checks.

The model is real and tiny. After any history of the cache, a call gives each prompt the tokens that
transformers gives it alone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

import vmkv
from helpers.pool_play import PoolPlay, cost_model
from helpers.tiny_models import tiny_model
from vmkv import KVCache, OutOfPagesError, RaggedCache

_SAID_MAX = 40


@dataclass(frozen=True)
class GenerateShape:
    """A model and its cache.

    Attributes:
        name: Model of `helpers.tiny_models`.
        max_batch_size: As of `RaggedCache`.
        max_tokens: As of `RaggedCache`.
        budget_pages: Budget of device memory.
        max_num_batched_tokens: As of `vmkv.generate`.
        alias_pages: Smallest extent that is aliased instead of copied.
    """

    name: str = "llama"
    max_batch_size: int = 4
    max_tokens: int = 200
    budget_pages: int = 60
    max_num_batched_tokens: int = 64
    alias_pages: int = 0


class GeneratePlay(PoolPlay):
    """One ragged cache, and another cache on its pool.

    Args:
        shape: Options of the cache and of its memory.

    Attributes:
        said: Prompts with their outputs.
        num_steps: Number of passes through the model.
    """

    def __init__(self, shape: GenerateShape):
        super().__init__(
            shape.budget_pages,
        )
        self.shape = shape
        self.said: list[list[int]] = []
        self.num_steps = 0
        self._model = tiny_model(shape.name)
        self._handle = self._model.register_forward_pre_hook(self._note_step)
        self.cache = RaggedCache(
            self._model.config,
            pool=self.pool,
            max_tokens=shape.max_tokens,
            max_batch_size=shape.max_batch_size,
        )

    def _note_step(self, *_: object) -> None:
        self.num_steps += 1

    def generate(
        self,
        prompts: list[list[int]],
        num_new: int,
        *,
        prefix_caching: bool = True,
        tenant: str | None = None,
    ) -> None:
        """Continue prompts and check the tokens; memory may run out only if live rows hold it."""
        what = f"generate({prompts}, {num_new}, prefix_caching={prefix_caching}, tenant={tenant!r})"
        needed = self._pages_for([len(prompt) + num_new for prompt in prompts])
        slack = len(prompts) * self._adoption_slack()
        with self._doing(what):
            available = self.pool.stats().budget_bytes // self.pool.page_bytes - self._live_pages()
            try:
                outputs = vmkv.generate(
                    self._model,
                    prompts,
                    max_new_tokens=num_new,
                    do_sample=False,
                    cache=self.cache,
                    prefix_caching=prefix_caching,
                    tenant=tenant,
                    max_num_batched_tokens=self.shape.max_num_batched_tokens,
                )
            except OutOfPagesError:
                fits = needed is not None and needed + slack <= available
                assert self._end_fault() or not fits, "idle memory was not evicted"
                return
            wanted = [alone(self.shape.name, tuple(prompt), num_new) for prompt in prompts]
            assert wanted == outputs
            self.said = [*self.said, *outputs][-_SAID_MAX:]
            for core in self.cache.store.cores:
                core.cost_model = cost_model(self.shape.alias_pages)

    def trim(self, num_pages: int | None) -> None:
        """Trim the cache."""
        with self._doing(f"trim({num_pages})"):
            self.cache.trim(None if num_pages is None else num_pages * self.pool.page_bytes)
            if num_pages is None and self.cache.store.cores:
                stats = self.cache.stats()
                assert (0, 0, 0) == (stats.parked_bytes, stats.free_bytes, stats.retired_bytes)

    def check(self) -> None:
        super().check()
        self.cache.check()
        for core in self.cache.store.cores:
            assert 0 == core.stats().num_sequences

    def close(self) -> None:
        self._end_fault()
        self._handle.remove()
        self.cache.close()
        super().close()

    def abandon(self) -> None:
        self._handle.remove()
        super().abandon()
        self.cache.store.is_closed = True

    def _caches(self) -> Iterator[KVCache]:
        yield from super()._caches()
        yield from self.cache.store.cores

    def _adoption_slack(self) -> int:
        """Pages of a sequence beyond its need: it adopts a row's extents whole."""
        return sum(
            max(
                (each.extent.num_pages for row in group.table.rows for each in row.mappings),
                default=1,
            )
            - 1
            for core in self.cache.store.cores
            for group in core.groups
        )

    def _pages_for(self, lengths: list[int]) -> int | None:
        """Most pages that sequences of these lengths hold; None before the first call."""
        if not self.cache.store.cores:
            return None
        [core] = self.cache.store.cores
        return sum(
            group.pages_for(min(length + core.overread_tokens, group.row_tokens))
            for length in lengths
            for group in core.groups
        )


@functools.lru_cache(maxsize=4096)
def alone(name: str, prompt: tuple[int, ...], num_new: int) -> list[int]:
    """Tokens of transformers for one prompt, with a new cache."""
    ids = torch.tensor([prompt])
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False}
    output: list[int] = (
        tiny_model(name, seed=0).generate(ids, max_new_tokens=num_new, **options)[0].tolist()
    )
    return output
