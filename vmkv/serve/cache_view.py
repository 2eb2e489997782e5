"""What the scheduler may know of a cache: pages, per request. Nothing here changes anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol


class CacheView(Protocol):
    """What the scheduler may know of the cache. Pages are the pool's, over all layer groups."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""

    @property
    def total_pages(self) -> int:
        """What the cache could ever hold."""

    def free_pages(self) -> int:
        """What growth could get now, but for `evictable_pages`."""

    def evictable_pages(self, enough_pages: int) -> int:
        """What ended sequences still hold, and give way with; counted until it is enough.

        Costs more than `free_pages`, and the more there is to count.
        """

    def surplus_pages(self) -> int:
        """What open sequences hold beyond their length. Costs a look at each of them."""

    def peak_pages(self, num_tokens: int) -> int:
        """The most a sequence holds at once on its way from nothing to `num_tokens`."""

    def lacking(self, wanted: Iterable[tuple[int, int]]) -> Mapping[int, int]:
        """What open sequences lack, by request, to hold so many tokens; of those that lack any."""

    def held_pages(self, request_id: int) -> int:
        """What would become free if the request's sequence ended."""

    def pages_to_begin(self, request_id: int, num_tokens: int) -> int:
        """What a new sequence of the request takes to hold `num_tokens`; shared pages are free."""

    def is_ready(self, request_id: int) -> bool:
        """Whether the request may begin; not if it shares a prompt that is being computed."""

    def cached_tokens(self, request_id: int) -> int:
        """How many of the first tokens a new sequence of the request would find computed."""

    def pages_to_resume(self, request_id: int) -> int:
        """What bringing a swapped request back takes."""

    def can_swap(self, request_id: int) -> bool:
        """Whether the request's sequence can go to host memory now."""
