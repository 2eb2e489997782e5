"""The books of a scheduler."""

from __future__ import annotations

from vmkv.serve.request import RequestState
from vmkv.serve.scheduler import Scheduler


def check_scheduler(scheduler: Scheduler) -> None:
    """Check a scheduler's invariants between steps."""
    slots = sorted([request.slot for request in scheduler.running] + scheduler.free_slots)
    ranks = [request.rank for request in scheduler.running]
    running = {request.request_id for request in scheduler.running}
    queued = {request_id for _, request_id in scheduler._waiting}
    requests = scheduler.requests.values()
    claims = {
        "every slot is free or one request's": slots == list(range(scheduler.max_num_seqs)),
        "running requests are in order": ranks == sorted(ranks),
        "requests with a slot run": running
        == {each.request_id for each in requests if each.state is RequestState.RUNNING},
        "requests that do not run wait": queued & scheduler.requests.keys()
        == scheduler.requests.keys() - running,
        "nothing is computed before it exists": all(
            0 <= each.num_computed <= each.num_tokens for each in requests
        ),
    }
    assert not [claim for claim, holds in claims.items() if not holds]
