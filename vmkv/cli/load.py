"""A load of requests against an OpenAI server, and how it bore it. Standard library only."""

from __future__ import annotations

import json
import random
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, one_line
from .client import Address, Client, read_lines, read_whole

#: For a whole answer.
TIMEOUT_S = 600.0
#: The lowest ones are mostly special.
_FIRST_TOKEN = 2


@dataclass(frozen=True)
class Load:
    """What is asked of a server.

    Attributes:
        num_requests: Requests in all.
        num_clients: How many at once.
        prompt_tokens: Length of each prompt.
        output_tokens: Tokens generated for each; its end of sequence is ignored.
        vocabulary: Tokens are drawn below this; at least 3.
        seed: Makes the prompts repeatable.
    """

    num_requests: int
    num_clients: int
    prompt_tokens: int
    output_tokens: int
    vocabulary: int
    seed: int = 0

    def body(self, model: str, number: int) -> bytes:
        """Request `number`, as JSON."""
        tokens = random.Random(f"{self.seed} {number}").choices(
            range(_FIRST_TOKEN, self.vocabulary), k=self.prompt_tokens
        )
        body = {
            "model": model,
            "prompt": tokens,
            "max_tokens": self.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return json.dumps(body).encode()


@dataclass(frozen=True)
class Timing:
    """One request's times, in seconds from when it was sent."""

    first_token_s: float
    total_s: float
    num_tokens: int

    @property
    def per_token_s(self) -> float | None:
        """Between tokens after the first; None where there was but one."""
        if self.num_tokens < 2:
            return None
        return (self.total_s - self.first_token_s) / (self.num_tokens - 1)


def model_of(client: Client, api_key: str | None) -> str:
    """The first model a server serves.

    Raises:
        ConfigError: There is no such server, or it refuses.
    """
    with client.ask("GET", _path(client, "/v1/models"), headers=_headers(api_key)) as answer:
        text = read_whole(answer)
    if answer.status != 200:
        raise ConfigError(f"{client.address} answers {answer.status}: {_message(text)}")
    try:
        return str(_json(text)["data"][0]["id"])
    except (LookupError, TypeError) as error:
        raise ConfigError(
            f"{client.address} lists no models as an OpenAI server does; is it `vmkv serve`?"
        ) from error


def apply(
    load: Load,
    address: Address,
    model: str,
    api_key: str | None = None,
    *,
    timeout_s: float = TIMEOUT_S,
) -> tuple[float, list[Timing]]:
    """Send the load; returns the seconds it took and each request's times.

    Args:
        load: What to send.
        address: The server.
        model: What it calls the model.
        api_key: Its key, where it wants one.
        timeout_s: For each whole answer.

    Raises:
        ConfigError: A request was refused, failed or took too long; the message is the server's.
            What else was under way is given up.
    """
    numbers = iter(range(load.num_requests))
    timings: list[Timing] = []
    failures: list[Exception] = []
    lock = threading.Lock()
    clients = [Client(address, timeout_s=timeout_s) for _ in range(load.num_clients)]

    def run(client: Client) -> None:
        try:
            while True:
                with lock:
                    number = None if failures else next(numbers, None)
                if number is None:
                    return
                timing = _one(client, load.body(model, number), api_key)
                with lock:
                    timings.append(timing)
        except Exception as error:  # noqa: BLE001  # raised again by the caller
            with lock:
                failures.append(error)
            for each in clients:
                each.cut()
        finally:
            client.close()

    start_s = time.monotonic()
    threads = [threading.Thread(target=run, args=[client], daemon=True) for client in clients]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except RuntimeError as error:  # The system has no more threads.
        raise ConfigError(f"{load.num_clients} clients are too many here: {error}") from error
    finally:
        for client in clients:
            client.cut()
    if failures:
        raise failures[0]
    return time.monotonic() - start_s, timings


def summary(load: Load, seconds: float, timings: Sequence[Timing]) -> dict[str, Any]:
    """What a reader wants to know."""
    first = sorted(each.first_token_s for each in timings)
    later = sorted(each.per_token_s for each in timings if each.per_token_s is not None)
    num_output = sum(each.num_tokens for each in timings)
    return {
        "requests": len(timings),
        "clients": load.num_clients,
        "prompt_tokens": load.prompt_tokens,
        "output_tokens": num_output,
        "seconds": seconds,
        "requests_per_s": len(timings) / seconds,
        "output_tokens_per_s": num_output / seconds,
        "total_tokens_per_s": (num_output + len(timings) * load.prompt_tokens) / seconds,
        "first_token_s": _spread(first),
        "per_token_s": _spread(later),
    }


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {
        "median": statistics.median(values),
        "p99": values[min(len(values) - 1, int(0.99 * len(values)))],
        "max": values[-1],
    }


def _one(client: Client, body: bytes, api_key: str | None) -> Timing:
    start_s = time.monotonic()
    headers = {"Content-Type": "application/json", **_headers(api_key)}
    first_s, num_tokens = 0.0, None
    with client.ask("POST", _path(client, "/v1/completions"), body, headers) as answer:
        if answer.status != 200:
            text = read_whole(answer)
            raise ConfigError(f"{client.address} answers {answer.status}: {_message(text)}")
        for line in read_lines(answer):
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            first_s = first_s or time.monotonic() - start_s
            payload = _json(line.removeprefix(b"data: "))
            if "error" in payload:
                raise ConfigError(f"{client.address} failed: {_message(line[len(b'data: ') :])}")
            usage = payload.get("usage")
            if isinstance(usage, dict):
                num_tokens = usage.get("completion_tokens")
    if not isinstance(num_tokens, int) or num_tokens < 1:
        raise ConfigError(f"{client.address} ended a stream without saying how long it was")
    return Timing(first_s, time.monotonic() - start_s, num_tokens)


def _path(client: Client, path: str) -> str:
    return client.address.path.removesuffix("/v1") + path


def _headers(api_key: str | None) -> dict[str, str]:
    if not api_key:
        return {}
    if not (api_key.isascii() and api_key.isprintable()):
        raise ConfigError("the API key has characters that no HTTP header can carry")
    return {"Authorization": f"Bearer {api_key}"}


def _json(text: bytes) -> dict[str, Any]:
    """An object as JSON.

    Raises:
        ConfigError: It is none.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the server's answer is no JSON: {one_line(error)}") from error
    if not isinstance(data, dict):
        raise ConfigError("the server's answer is no JSON object")
    return data


def _message(text: bytes) -> str:
    """What a server says went wrong, on one line."""
    try:
        return one_line(ValueError(json.loads(text)["error"]["message"]))
    except (ValueError, LookupError, TypeError, RecursionError):
        return one_line(ValueError(text[:200].decode(errors="replace")))
