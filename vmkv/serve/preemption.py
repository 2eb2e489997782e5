"""Whether a request that must give way is swapped out or computed again: a cost model.

Swapping moves its keys and values to host memory and back; computing again runs its tokens
through the model once more. Both grow linearly with its length, so on one machine one of them
nearly always wins; which one is a matter of bandwidth against arithmetic:

    8,192 tokens of Llama-3-8B on an H200:  swap 2 x 1 GiB at 55 GB/s = 39 ms;  prefill 220 ms
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from .cache_view import CacheView
from .plan import Preemption, PreemptionMethod
from .request import Request


@dataclass(frozen=True)
class PreemptionCosts:
    """What the machine can do. The defaults were measured on one H200.

    Attributes:
        copy_bytes_per_s: Between device and pinned host memory, one way.
        flops_per_s: Of a prefill; 8B parameters x 2 x 8,192 tokens took 220 ms.
        mapping_s: Per page that is unmapped and mapped again; both ways pay for it.
        flops_per_token: Twice the model's active parameters.

    Raises:
        ConfigError: A figure is not positive.
    """

    copy_bytes_per_s: float = 55e9
    flops_per_s: float = 6e14
    mapping_s: float = 35e-6
    flops_per_token: float = 16e9

    def __post_init__(self) -> None:
        for name in ("copy_bytes_per_s", "flops_per_s", "flops_per_token"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be above zero")
        if self.mapping_s < 0:
            raise ConfigError(f"mapping_s={self.mapping_s!r} must not be negative")

    @classmethod
    def of(cls, model: Any) -> PreemptionCosts:
        """An H200 and this model. All parameters count, which overrates mixtures of experts."""
        return cls(flops_per_token=2.0 * max(1, sum(each.numel() for each in model.parameters())))

    def swap_s(self, num_bytes: int, num_pages: int) -> float:
        """Seconds to move so much out and in again."""
        return 2 * num_bytes / self.copy_bytes_per_s + num_pages * self.mapping_s

    def recompute_s(self, num_tokens: int, num_pages: int) -> float:
        """Seconds to compute so many tokens again, attention's share neglected."""
        return num_tokens * self.flops_per_token / self.flops_per_s + num_pages * self.mapping_s

    def preemption(self, victim: Request, view: CacheView) -> Preemption:
        """How a running request is preempted: swapped out if it can be and that costs less."""
        method, request_id = PreemptionMethod.RECOMPUTE, victim.request_id
        if view.can_swap(request_id):
            pages = view.held_pages(request_id)
            method = self.cheaper(victim.num_computed, pages, view.page_bytes)
        return Preemption(request_id, method)

    def cheaper(self, num_tokens: int, num_pages: int, page_bytes: int) -> PreemptionMethod:
        """What costs less for a request of `num_tokens` in `num_pages`."""
        swap_s = self.swap_s(num_pages * page_bytes, num_pages)
        if swap_s < self.recompute_s(num_tokens, num_pages):
            return PreemptionMethod.SWAP
        return PreemptionMethod.RECOMPUTE
