"""A load of requests against an OpenAI server, and how it bore it. Standard library only."""

from __future__ import annotations

import http.client
import json
import random
import statistics
import threading
import time
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError

_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Load:
    """What is asked of a server.

    Attributes:
        num_requests: Requests in all.
        num_clients: How many at once.
        prompt_tokens: Length of each prompt.
        output_tokens: Tokens generated for each; its end of sequence is ignored.
        vocabulary: Tokens are drawn below this.
        seed: Makes the prompts repeatable.
    """

    num_requests: int
    num_clients: int
    prompt_tokens: int
    output_tokens: int
    vocabulary: int
    seed: int = 0


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


def model_of(url: str, api_key: str | None) -> str:
    """The first model a server serves.

    Raises:
        ConfigError: There is no such server, or it refuses.
    """
    connection = _connect(url)
    try:
        connection.request("GET", _path(url, "/v1/models"), headers=_headers(api_key))
        answer = connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise ConfigError(f"{url} answers {answer.status}: {_message(text)}")
        return str(json.loads(text)["data"][0]["id"])
    except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
        raise ConfigError(
            f"no OpenAI server answers at {url}: {error}; is `vmkv serve` running there?"
        ) from error
    finally:
        connection.close()


def apply(
    load: Load, url: str, model: str, api_key: str | None = None
) -> tuple[float, list[Timing]]:
    """Send the load; returns the seconds it took and each request's times.

    Raises:
        ConfigError: A request was refused or failed; the message is the server's.
    """
    random_tokens = random.Random(load.seed)
    bodies = [
        {
            "model": model,
            "prompt": random_tokens.choices(range(2, load.vocabulary), k=load.prompt_tokens),
            "max_tokens": load.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for _ in range(load.num_requests)
    ]
    timings: list[Timing] = []
    failures: list[Exception] = []
    lock = threading.Lock()

    def client() -> None:
        connection = _connect(url)
        try:
            while True:
                with lock:
                    if not bodies or failures:
                        return
                    body = bodies.pop()
                timing = _one(connection, url, body, api_key)
                with lock:
                    timings.append(timing)
        except Exception as error:  # noqa: BLE001  # raised again by the caller
            with lock:
                failures.append(error)
        finally:
            connection.close()

    start_s = time.monotonic()
    threads = [threading.Thread(target=client) for _ in range(load.num_clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        error = failures[0]
        if isinstance(error, ConfigError):
            raise error
        raise ConfigError(f"a request to {url} failed: {error or type(error).__name__}") from error
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


def _one(
    connection: http.client.HTTPConnection, url: str, body: dict[str, Any], api_key: str | None
) -> Timing:
    start_s = time.monotonic()
    headers = {"Content-Type": "application/json", **_headers(api_key)}
    connection.request("POST", _path(url, "/v1/completions"), json.dumps(body), headers)
    answer = connection.getresponse()
    if answer.status != 200:
        raise ConfigError(f"{url} answers {answer.status}: {_message(answer.read())}")
    first_s, num_tokens = 0.0, 0
    for line in answer:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        first_s = first_s or time.monotonic() - start_s
        payload = json.loads(line.removeprefix(b"data: "))
        if "error" in payload:
            raise ConfigError(f"{url} failed: {payload['error']['message']}")
        if payload.get("usage"):
            num_tokens = payload["usage"]["completion_tokens"]
    return Timing(first_s, time.monotonic() - start_s, num_tokens)


def _connect(url: str) -> http.client.HTTPConnection:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url!r} is no address of a server; write http://HOST:PORT")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.hostname, parts.port, timeout=_TIMEOUT_S)


def _path(url: str, path: str) -> str:
    return urllib.parse.urlsplit(url).path.rstrip("/").removesuffix("/v1") + path


def _headers(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def _message(text: bytes) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return text.decode(errors="replace")[:200]
