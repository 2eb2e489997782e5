"""`ReplicatedEngine` hides the loss of a replica if it can, and translates errors.

A fake handle raises Ray's errors, so that a replica can be lost at any point. Not covered: that Ray
raises them (`test_replicas.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from vmkv import CapacityError, ClosedError, ConfigError, SamplingParams
from vmkv.errors import LostError
from vmkv.serve.request import CompletionOutput, RequestOutput

ray_exceptions = pytest.importorskip("ray.exceptions")
serve_exceptions = pytest.importorskip("ray.serve.exceptions")
pytestmark = pytest.mark.ray


def output_of(text: str) -> RequestOutput:
    """An output as a replica sends it: without the prompt."""
    return RequestOutput(0, None, (), [CompletionOutput(0, [], text)])


class Response:
    """The response to a call of a replica: some outputs, then an error or none.

    A response that hangs ends when it is cancelled, unless its replica `is_stopped`.
    """

    def __init__(
        self,
        outputs: Sequence[Any],
        error: Exception | None,
        hangs: bool = False,
        is_stopped: bool = False,
    ):
        self._outputs, self._error, self._hangs = list(map(output_of, outputs)), error, hangs
        self._is_stopped = is_stopped
        self._cancelled = asyncio.Event()
        self._iterator = self._items()

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    def cancel(self) -> None:
        self._cancelled.set()

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        try:
            return await anext(self._iterator)
        except asyncio.CancelledError:
            if self.is_cancelled:
                raise serve_exceptions.RequestCancelledError("r") from None
            raise

    async def _items(self) -> AsyncIterator[Any]:
        for each in self._outputs:
            yield each
        if self._hangs:
            await (asyncio.Event() if self._is_stopped else self._cancelled).wait()
            raise serve_exceptions.RequestCancelledError("r")
        if self._error is not None:
            raise self._error


class Handle:
    """A handle whose calls return the given responses in order."""

    def __init__(self, *responses: Response):
        self.responses = list(responses)
        self.num_calls = 0
        self.reports: list[Any] = [ray_exceptions.ActorDiedError()]
        self.num_broadcasts = 0
        self.stream = SimpleNamespace(remote=self._next)

    def options(self, **_: Any) -> Handle:
        return self

    def broadcast(self, method: str) -> Any:
        self.num_broadcasts += 1
        return SimpleNamespace(results=self._results, results_async=self._results_async)

    def _results(self, **_: Any) -> list[Any]:
        return self.reports

    async def _results_async(self, **_: Any) -> list[Any]:
        if any(isinstance(each, TimeoutError) for each in self.reports):
            raise TimeoutError  # As Ray does for one silent replica.
        return self.reports

    def _next(self, *_: Any, **options: Any) -> Response:
        self.num_calls += 1
        return self.responses[self.num_calls - 1]


#: The metrics of a replica.
PAGE = b"vmkv_sequences 3.0\n"


def engine_of(handle: Handle) -> Any:
    from vmkv.serve.replicas.client import ReplicatedEngine

    return ReplicatedEngine(handle)


async def outputs_of(engine: Any, found: list[Any]) -> None:
    """Append the texts of a stream's outputs to `found`; check that each output has the prompt."""
    async for each in engine.stream([1], SamplingParams()):
        assert each.prompt_token_ids == [1]
        found.append(each.outputs[0].text)


DEATHS = [
    lambda: ray_exceptions.ActorDiedError(),
    lambda: ray_exceptions.ActorUnavailableError("gone", b"\0" * 16),
    lambda: ray_exceptions.WorkerCrashedError(),
]


@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize(
    ("lost", "texts", "num_calls"),
    [([[], []], ["x", "y"], 3), ([["x"]], ["x"], 1), ([[]] * 9, [], 3)],
    ids=["run again without outputs", "not run again with outputs", "tried three times"],
)
async def test_a_lost_request(
    death: Callable[[], Exception], lost: list[list[str]], texts: list[str], num_calls: int
) -> None:
    """The caller gets the outputs of the last run, of three: the request may kill replicas."""
    handle = Handle(*(Response(each, death()) for each in lost), Response(["x", "y"], None))
    found: list[Any] = []
    error = pytest.raises(LostError, match="send the request again")
    with contextlib.nullcontext() if texts == ["x", "y"] else error:
        await outputs_of(engine_of(handle), found)
    assert (texts, num_calls) == (found, handle.num_calls)


def remote(error: Exception) -> Exception:
    """An error as Ray raises it for a replica's error."""
    return ray_exceptions.RayTaskError("stream", "a traceback", error).as_instanceof_cause()


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (
            lambda: remote(ConfigError("n=0 must be positive")),
            ConfigError,
            "^n=0 must be positive$",
        ),
        (lambda: remote(ClosedError("it has stopped")), ClosedError, "^it has stopped$"),
        (lambda: serve_exceptions.BackPressureError(3, 2), CapacityError, "wait for a replica"),
        (
            lambda: serve_exceptions.DeploymentUnavailableError("vmkv"),
            ClosedError,
            "no replica takes requests",
        ),
    ],
)
async def test_replica_errors(
    error: Callable[[], Exception], kind: type[Exception], words: str
) -> None:
    """An engine's error is raised as it is, Ray's as one of vmkv; neither causes another run."""
    handle = Handle(Response([], error()))
    with pytest.raises(kind, match=words):
        await outputs_of(engine_of(handle), [])
    assert handle.num_calls == 1


async def test_closing_a_stream_cancels_its_request() -> None:
    response = Response(["x"], None, hangs=True)
    stream = engine_of(Handle(response)).stream([1], SamplingParams())
    assert (await anext(stream)).outputs[0].text == "x"
    await stream.aclose()
    assert response.is_cancelled


async def test_shutdown_drains_or_ends_requests_and_refuses_new_ones() -> None:
    response = Response(["x"], None, hangs=True)
    engine = engine_of(Handle(response, response))
    asking = asyncio.ensure_future(outputs_of(engine, []))
    await asyncio.sleep(0)
    draining = asyncio.ensure_future(engine.shutdown())
    while not engine._is_stopping:
        await asyncio.sleep(0)
    with pytest.raises(ClosedError, match="no more requests"):
        await outputs_of(engine, [])
    assert not draining.done()
    await engine.shutdown(drain=False)
    await draining
    with pytest.raises(ClosedError, match="shutting down"):
        await asking


@pytest.mark.parametrize("waits", [True, False])
async def test_shutdown_ends_requests_of_replicas_that_hang(waits: bool) -> None:
    """Whether a reader waits for an output, or reads only afterwards."""

    async def turns() -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    engine = engine_of(Handle(Response(["x"], None, hangs=True, is_stopped=True)))
    stream = engine.stream([1], SamplingParams())
    await anext(stream)
    if waits:
        reading = asyncio.ensure_future(anext(stream))
        await turns()
    cutting = asyncio.ensure_future(engine.shutdown(drain=False))
    await turns()
    if not waits:
        reading = asyncio.ensure_future(anext(stream))
    await turns()
    assert isinstance(reading.done() and reading.exception(), ClosedError)
    await cutting


async def test_failure_says_that_no_replica_is_there() -> None:
    async with engine_of(Handle()) as engine:
        while engine.failure is None:
            await asyncio.sleep(0)
        assert "no replica is there" in engine.failure


SILENT = ray_exceptions.GetTimeoutError("Get timed out")


DEAD = ray_exceptions.ActorDiedError()


@pytest.mark.parametrize(
    ("reports", "failure", "replicas"),
    [
        ([SILENT, "y"], None, {"y"}),
        ([SILENT, DEAD], None, {"x"}),  # What it reported last stays.
        ([DEAD], "no replica is there: Ray starts new ones", set()),
    ],
    ids=["silent, beside another", "silent", "dead"],
)
async def test_replicas_that_do_not_report(
    monkeypatch: pytest.MonkeyPatch, reports: list[Any], failure: str | None, replicas: set[str]
) -> None:
    """The failure, and the replicas with metrics, after `x` has reported before."""
    from vmkv.serve.replicas import client

    monkeypatch.setattr(client, "_REPORT_S", 0)
    handle = Handle()
    async with engine_of(handle) as engine:
        for turn in (["x"], reports):
            handle.reports = [
                client.ReplicaReport(each, None, PAGE) if isinstance(each, str) else each
                for each in turn
            ]
            num_seen = handle.num_broadcasts
            while handle.num_broadcasts < num_seen + 3:
                await asyncio.sleep(0)
        samples = [each for family in engine.metrics.families() for each in family.samples]
        assert (failure, replicas) == (engine.failure, {each.labels["replica"] for each in samples})
