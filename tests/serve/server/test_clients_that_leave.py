"""Requests of clients that leave or do not read are cancelled; engine failures are answered."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
from typing import Any

import httpx
import pytest
from helpers.serving import LONG, MAX_TOKENS, PLAIN, wire

from vmkv import RankError
from vmkv.serve.server import Limits
from vmkv.serve.server.errors import ApiError
from vmkv.serve.server.guard import Gate


def wait_for_cancellations(server: Any, count: int) -> None:
    """Wait for `count` cancelled requests, and check that each ended before its last tokens."""

    def cancelled() -> list[Any]:
        return [each for each in server.watch.finished if each.finish_reason == "cancelled"]

    server.watch.wait(lambda: len(cancelled()) >= count, f"{count} cancellations")
    assert all(each.num_output_tokens < MAX_TOKENS - 50 for each in cancelled())


@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses", "messages"])
def test_closing_a_stream_cancels_the_request(run_server, path: str) -> None:
    body = LONG | {"messages": [{"role": "user", "content": "A row"}], "input": "A row"}
    body |= {"max_output_tokens": LONG["max_tokens"], "stream": True}
    if path != "completions":
        del body["prompt"]
    if path == "responses":
        del body["max_tokens"]
    with run_server() as server:
        with httpx.stream("POST", f"{server.url}/v1/{path}", json=body, timeout=60) as answer:
            assert next(answer.iter_lines()).startswith(("data: {", "event: "))
        wait_for_cancellations(server, 1)


def test_closing_the_connection_of_a_whole_answer_cancels_it(run_server) -> None:
    with run_server() as server:
        with server.sent(LONG | {"n": 2}):
            server.watch.wait(lambda: server.watch.num_first_tokens >= 1, "the first token")
        wait_for_cancellations(server, 1)


def test_a_client_that_does_not_read_is_cancelled(run_server) -> None:
    """Other clients are served meanwhile; after `send_timeout_s` the request is cancelled."""
    with run_server(Limits(send_timeout_s=0.5)) as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(server.address)
        # Log-probabilities make the events large: the sockets fill in a few tokens.
        body = LONG | {"stream": True, "logprobs": 20, "stop": []}
        client.sendall(wire(body))
        server.watch.wait(lambda: server.watch.num_first_tokens >= 1, "the first token")
        for _ in range(3):
            answer = server.post(PLAIN)
            assert 200 == answer.status_code
        wait_for_cancellations(server, 1)


def test_draining_finishes_streams_and_refuses_requests(run_server) -> None:
    """New requests and health get 503; a stream that is running ends with all its tokens."""
    with run_server() as server, httpx.Client(base_url=server.url) as kept:
        assert "ok" == kept.get("/health").json()["status"]
        with server.streaming(LONG | {"max_tokens": 200}) as lines:
            server.service.is_draining = True
            health = kept.get("/health")
            assert (503, "draining") == (health.status_code, health.json()["status"])
            refused = kept.post("/v1/completions", json=PLAIN)
            assert (503, "shutting_down") == (
                refused.status_code,
                refused.json()["error"]["code"],
            )
            server.stop()
            *_, last, done = lines
            assert '"finish_reason":"length"' in last
            assert "data: [DONE]" == done


def end_by_interrupts(server: Any) -> None:
    """Interrupt the server twice, as Ctrl+C does."""
    for _ in range(2):
        server.server.handle_exit(signal.SIGINT, None)


@pytest.mark.parametrize(
    ("drain_timeout_s", "end"),
    [(0.1, lambda server: server.stop()), (60, end_by_interrupts)],
    ids=["time to drain is over", "two interrupts"],
)
def test_a_cut_off_request_gets_an_error(run_server, drain_timeout_s: float, end: Any) -> None:
    """The stream's last event is an error; running and queued requests get 503."""
    with run_server(Limits(max_concurrent=2, max_queued=1), drain_timeout_s=drain_timeout_s) as (
        server
    ):
        answers: list[httpx.Response] = []

        def ask() -> None:
            answers.append(server.post(LONG))

        waiting = [threading.Thread(target=ask) for _ in range(2)]
        with server.streaming() as lines:
            for thread in waiting:
                thread.start()
            server.until(lambda: server.service.gate.num_waiting == 1)
            # An admitted request may still be in the tokenizer.
            server.watch.wait(lambda: len(server.watch.added) == 2, "the second request")
            end(server)
            *_, error, done = lines
        for thread in waiting:
            thread.join(60)
        assert "cancelled" == json.loads(error.removeprefix("data: "))["error"]["code"]
        assert "data: [DONE]" == done
        assert [503, 503] == [answer.status_code for answer in answers]
        codes = sorted(answer.json()["error"]["code"] for answer in answers)
        assert ["cancelled", "shutting_down"] == codes
        wait_for_cancellations(server, 2)


def test_a_failing_model_is_500(run_server) -> None:
    """The error has OpenAI's shape and hides internals; the next request is served."""
    with run_server() as server, server.failing(RuntimeError("the model is broken")) as fails:
        answer = server.post(PLAIN)
        assert 500 == answer.status_code
        error = answer.json()["error"]
        assert ("server_error", "internal_error") == (error["type"], error["code"])
        assert "RuntimeError" in error["message"]
        assert "broken" not in error["message"], "the answer reveals internals"
        assert 500 == server.post(PLAIN | {"stream": True}).status_code
        fails.clear()
        assert 200 == server.post(PLAIN).status_code


def test_a_lost_rank_is_503(run_server) -> None:
    """The answer, whole or streamed, asks the client to retry: the engine is restarted."""
    lost = RankError("rank 1 has ended: its disk is gone")
    with run_server() as server, server.failing(lost):
        for change in ({}, {"stream": True}):
            answer = server.post(PLAIN | change)
            assert 503 == answer.status_code
            assert "1" == answer.headers["Retry-After"]
            error = answer.json()["error"]
            assert ("server_error", "engine_stopped") == (error["type"], error["code"])
            assert "try again" in error["message"]
            assert "disk" not in error["message"], "the answer reveals internals"


def test_a_failure_within_a_stream_is_an_event(run_server) -> None:
    """The status is already sent: the error is an event, and the stream ends."""
    with run_server() as server, server.failing(RuntimeError("the model is broken")) as fails:
        fails.clear()
        with server.streaming() as lines:
            fails.set()
            *_, error, done = lines
        assert "internal_error" == json.loads(error.removeprefix("data: "))["error"]["code"]
        assert "data: [DONE]" == done


async def test_the_gate_passes_on_the_places_of_cancelled_requests() -> None:
    """A request may be cancelled while it waits, runs, or has just been admitted."""
    gate = Gate(max_concurrent=1, max_queued=3)
    entered: list[str] = []
    may_leave = {name: asyncio.Event() for name in "abcd"}

    async def visit(name: str) -> None:
        async with gate.entered():
            entered.append(name)
            await may_leave[name].wait()

    async def settle() -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    tasks = {name: asyncio.ensure_future(visit(name)) for name in "abcd"}
    await settle()
    assert (["a"], 3) == (entered, gate.num_waiting)
    with pytest.raises(ApiError, match="busy"):
        async with gate.entered():
            pass
    tasks["b"].cancel()
    await settle()
    assert 2 == gate.num_waiting
    may_leave["a"].set()
    await asyncio.sleep(0)  # c has been admitted, but has not run yet.
    tasks["c"].cancel()
    await settle()
    assert entered[-1] == "d"
    may_leave["d"].set()
    await settle()
    assert (0, 0) == (gate.num_inside, gate.num_waiting)
    await asyncio.gather(*tasks.values(), return_exceptions=True)
