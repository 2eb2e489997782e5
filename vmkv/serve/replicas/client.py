"""Presents several replicas as one engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

from ray.exceptions import (
    ObjectLostError,
    RayActorError,
    RayError,
    RayTaskError,
    TaskCancelledError,
    WorkerCrashedError,
)
from ray.serve.exceptions import BackPressureError, RayServeException

from ...errors import CapacityError, ClosedError, LostError, one_line
from ..metrics import ReplicaMetrics
from ..request import RequestOutput
from .replica import ReplicaReport

#: Retries of a request whose replica is lost before its first output.
_RERUNS_MAX = 2
#: Interval and time limit of the replicas' status reports.
_REPORT_S = 2.0
_REPORT_TIMEOUT_S = 5.0
_NONE_THERE = "no replica is there: Ray starts new ones"
_CUT = "the server is shutting down"
#: Errors of a request whose replica has ended. Ray cancels requests when it stops waiting for a
#: replica that is being removed.
_LOST = (RayActorError, WorkerCrashedError, ObjectLostError, TaskCancelledError)


class ReplicatedEngine:
    """Replicas behind a handle of Ray Serve, for one event loop; used as an `EngineClient` is."""

    def __init__(self, handle: Any):
        self._handle = handle.options(stream=True)
        #: Metrics of all replicas.
        self.metrics = ReplicaMetrics()
        #: The reason why no replica serves requests, or None; some seconds old.
        self.failure: str | None = None
        self._reads: dict[Any, asyncio.Future[Any]] = {}  # The last one of each response
        self._all_done = asyncio.Event()
        self._all_done.set()
        self._is_stopping = self._is_cut = False
        self._reporting: asyncio.Task[None] | None = None

    async def facts(self) -> tuple[int, int]:
        """Wait for the first replica; return its `EngineReplica.facts`."""
        facts: tuple[int, int] = await self._handle.options(stream=False).facts.remote()
        return facts

    async def stream(
        self, prompt: Sequence[int], *asked: Any, tenant: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream a request's outputs from a replica, as `EngineClient.stream`; waits for one.

        Raises `LostError` if the replica ends after the first output, or the retries' replicas do
        too.
        """
        self._watch()
        has_begun = False
        for num_left in range(_RERUNS_MAX, -1, -1):
            try:
                answer = self._ask(prompt, *asked, tenant=tenant)
                async with contextlib.aclosing(answer) as outputs:
                    async for output in outputs:
                        yield replace(output, prompt_token_ids=prompt)
                        has_begun = True
            except LostError:
                if has_begun or not num_left:
                    raise
            else:
                return

    async def _ask(self, *asked: Any, **options: Any) -> AsyncGenerator[RequestOutput, None]:
        if self._is_stopping:
            raise ClosedError("the server is shutting down and takes no more requests")
        response = self._handle.stream.remote(*asked, **options)
        self._all_done.clear()
        try:
            while (output := await self._read(response)) is not None:
                yield output
        except Exception as error:
            raise self._worded(error) from error
        except BaseException:  # The reader has left.
            response.cancel()
            raise
        finally:
            self._reads.pop(response, None)
            if not self._reads:
                self._all_done.set()

    async def _read(self, response: Any) -> RequestOutput | None:
        if self._is_cut:
            raise ClosedError(_CUT)
        read = self._reads[response] = asyncio.ensure_future(anext(response, None))
        output: RequestOutput | None = await read
        return output

    def _worded(self, error: Exception) -> Exception:
        if self._is_stopping and isinstance(error, _LOST):
            return ClosedError(_CUT)
        if isinstance(error, _LOST):
            return LostError(
                "the replica that computed this request has ended, and the answer is incomplete: "
                "send the request again"
            )
        if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
            return error.cause
        if isinstance(error, BackPressureError):
            return CapacityError(f"too many requests wait for a replica: {one_line(error)}")
        if isinstance(error, RayServeException):
            return ClosedError(f"no replica takes requests: {one_line(error)}")
        return error

    # ---- status ---------------------------------------------------------------------------

    def _watch(self) -> None:
        if self._reporting is None:
            self._reporting = asyncio.get_running_loop().create_task(self._report_on())

    async def _report_on(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):  # A silent replica is there.
                reports = await self._reports()
                failures = [each.failure for each in reports] or [_NONE_THERE]
                self.failure = None if None in failures else "; ".join(map(str, failures))
                self.metrics.take({each.replica: each.metrics for each in reports})
            await asyncio.sleep(_REPORT_S)

    async def _reports(self) -> list[ReplicaReport]:
        """Return the reports of the replicas that answer.

        Raises `TimeoutError` if no replica answers and some are silent.
        """
        try:
            response = self._handle.broadcast("report")
            # `results_async` has one time limit for all replicas, `results` one for each.
            found = await asyncio.to_thread(
                response.results, timeout_s=_REPORT_TIMEOUT_S, return_exceptions=True
            )
        except (RayServeException, RayError):
            return []
        reports = [each for each in found if isinstance(each, ReplicaReport)]
        if not reports and any(isinstance(each, TimeoutError) for each in found):
            raise TimeoutError
        return reports

    # ---- shutdown -------------------------------------------------------------------------

    async def shutdown(self, drain: bool = True) -> None:
        """Stop serving; the replicas keep running. Idempotent."""
        self._is_stopping = True
        if not drain:
            self._is_cut = True
            for response, read in self._reads.items():
                response.cancel()
                read.cancel()  # A replica that hangs would not end it.
        await self._all_done.wait()
        if self._reporting is not None:
            self._reporting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reporting

    async def __aenter__(self) -> ReplicatedEngine:
        self._watch()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.shutdown()
