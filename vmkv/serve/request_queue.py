"""The requests of a scheduler: who runs, in order, and who waits for a slot, in order."""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterator

from ..errors import InternalError
from .request import Request, RequestState


class RequestQueue:
    """All requests that have not ended.

    Args:
        max_num_seqs: How many run at once.

    Attributes:
        requests: By number; to be read only.
        running: Those that have a slot, in order; likewise.
    """

    def __init__(self, max_num_seqs: int):
        self.requests: dict[int, Request] = {}
        self.running: list[Request] = []
        self._max_num_seqs = max_num_seqs
        self._waiting: list[tuple[tuple[int, int], int]] = []  # A heap; may hold ended requests.
        self._free_slots = list(range(max_num_seqs))  # A heap: low slots first.

    @property
    def has_free_slot(self) -> bool:
        """Whether one more may run."""
        return bool(self._free_slots)

    @property
    def first_waiting(self) -> Request | None:
        """Who runs next."""
        while self._waiting:
            rank, request_id = self._waiting[0]
            request = self.requests.get(request_id)
            if request is not None and request.rank == rank:
                return request
            heapq.heappop(self._waiting)
        return None

    def waiting(self) -> Iterator[Request]:
        """All that wait, in no order."""
        return (self.requests[number] for _, number in self._waiting if number in self.requests)

    def add(self, request: Request) -> None:
        """A request waits."""
        self.requests[request.request_id] = request
        heapq.heappush(self._waiting, (request.rank, request.request_id))

    def remove(self, request_id: int) -> None:
        """A request has ended; its slot is free. Idempotent."""
        request = self.requests.pop(request_id, None)
        if request is not None:
            self._leave(request)
            request.state = RequestState.FINISHED

    def run_first(self) -> None:
        """Give the first that waits a slot; there must be both."""
        request = self.requests[heapq.heappop(self._waiting)[1]]
        request.slot = heapq.heappop(self._free_slots)
        request.state = RequestState.RUNNING
        insort(self.running, request, key=lambda each: each.rank)

    def requeue(self, request: Request, state: RequestState) -> None:
        """A running request waits again, with its memory on the host (`SWAPPED`) or lost."""
        self._leave(request)
        request.is_on_device = False
        self.wait_as(request, state)
        self.add(request)

    def wait_as(self, request: Request, state: RequestState) -> None:
        """Say what has become of a waiting request's memory."""
        request.state = state
        if state is RequestState.WAITING:
            request.num_computed = 0

    def _leave(self, request: Request) -> None:
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
            heapq.heappush(self._free_slots, request.slot)
            request.slot = -1

    def check(self) -> None:
        """Check what must hold between steps.

        Raises:
            InternalError: It does not.
        """
        slots = sorted([request.slot for request in self.running] + self._free_slots)
        ranks = [request.rank for request in self.running]
        running = {request.request_id for request in self.running}
        queued = {request_id for _, request_id in self._waiting}
        requests = self.requests.values()
        claims = {
            "every slot is free or one request's": slots == list(range(self._max_num_seqs)),
            "running requests are in order": ranks == sorted(ranks),
            "who has a slot runs": running
            == {each.request_id for each in requests if each.state is RequestState.RUNNING},
            "who does not run waits": queued & self.requests.keys()
            == self.requests.keys() - running,
            "nothing is computed before it exists": all(
                0 <= each.num_computed <= each.num_tokens for each in requests
            ),
        }
        for claim, holds in claims.items():
            if not holds:
                raise InternalError(f"the scheduler's books are wrong; not so: {claim}")
