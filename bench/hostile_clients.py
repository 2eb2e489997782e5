"""Hostile clients: what each kind sends, and how it behaves. Run in a process of its own.

    python bench/hostile_clients.py HOST PORT HOLD_S SEED COUNT CONCURRENCY FUZZED

sends so many requests of kinds drawn at random, and prints one JSON object: per kind, how each
ended. What is sent is made before the first is, except for bodies with random values in the fields
that the server's `/openapi.json` names, a share FUZZED of all requests (`Fuzz`).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

#: Longer than any time limit of the server; a request that takes longer hangs.
PATIENCE_S = 90.0
MiB = 1 << 20
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 1000, "ignore_eos": True}

Kind = Callable[["Target"], Awaitable[str]]


class Target:
    """The server's address, and how long clients hold a connection."""

    def __init__(self, host: str, port: int, hold_s: float = 3.0):
        self.host, self.port, self.hold_s = host, port, hold_s

    async def connect(self, receive_bytes: int | None = None) -> Connection:
        """Open a connection; with a small window for a client that does not read."""
        peer = socket.socket()
        peer.setblocking(False)
        if receive_bytes is not None:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        await asyncio.get_running_loop().sock_connect(peer, (self.host, self.port))
        # asyncio would read ahead: no more than this.
        reader, writer = await asyncio.open_connection(sock=peer, limit=1 << 14)
        return Connection(reader, writer)


class Connection:
    """One connection, from the outside."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self._writer = reader, writer

    async def send(self, data: bytes) -> None:
        """Send, as far as the server takes it."""
        self._writer.write(data)
        await self._writer.drain()

    async def status(self) -> str:
        """The status of an answer, or that there was none."""
        line = await self.reader.readline()
        return line.split()[1].decode() if line.startswith(b"HTTP/1.1 ") else "closed"

    async def until_closed(self) -> None:
        """Read whatever comes, to its end."""
        while await self.reader.read(1 << 14):
            pass

    def leave(self) -> None:
        """Close the connection."""
        self._writer.transport.abort()


def request(body: Any, path: str = COMPLETIONS, *, length: int | None = None) -> bytes:
    """A request as it goes over the wire; with `length`, one that announces another length."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {length or len(data)}\r\n\r\n".encode() + data


def chunked(pieces: bytes) -> bytes:
    """A request with a chunked body."""
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + pieces


def asking(data: bytes) -> Kind:
    """Sends a request and reads the answer."""

    async def run(target: Target) -> str:
        connection = await target.connect()
        try:
            await connection.send(data)
            return await connection.status()
        finally:
            connection.leave()

    return run


def leaving(data: bytes) -> Kind:
    """Sends a whole request and disconnects at once."""

    async def run(target: Target) -> str:
        connection = await target.connect()
        await connection.send(data)
        connection.leave()
        return "left"

    return run


def holding(data: bytes) -> Kind:
    """Sends an incomplete request, and waits."""

    async def run(target: Target) -> str:
        connection = await target.connect()
        try:
            await connection.send(data)
            try:
                return await asyncio.wait_for(connection.status(), target.hold_s)
            except asyncio.TimeoutError:
                return "held"
        finally:
            connection.leave()

    return run


async def dripping(target: Target) -> str:
    """A head, byte by byte."""
    connection = await target.connect()
    try:
        for byte in b"POST /v1/completions HTTP/1.1\r\nHost: example.com\r\nX-Wait":
            await connection.send(bytes([byte]))
            await asyncio.sleep(target.hold_s / 50)
        return "held"
    finally:
        connection.leave()


async def never_reading(target: Target) -> str:
    """A stream with large events that is not read."""
    connection = await target.connect(receive_bytes=2048)
    try:
        await connection.send(request(LONG | {"stream": True, "logprobs": 20}))
        await asyncio.sleep(target.hold_s)
        return "held"
    finally:
        connection.leave()


async def leaving_a_stream(target: Target) -> str:
    """Starts a stream and disconnects after its beginning."""
    connection = await target.connect()
    try:
        await connection.send(request(LONG | {"stream": True, "n": 2}))
        status = await connection.status()
        await connection.reader.read(4096)
        return status
    finally:
        connection.leave()


async def pipelining(target: Target) -> str:
    """A hundred requests at once, on one connection."""
    connection = await target.connect()
    try:
        await connection.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 99)
        await connection.send(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        status = await connection.status()
        await connection.until_closed()
        return status
    finally:
        connection.leave()


def kinds() -> dict[str, tuple[int, Kind]]:
    """How often each kind comes, and what it does."""
    plain = {"model": "tiny", "prompt": "A row", "max_tokens": 2}
    nested = "[" * 500 + "]" * 500
    message = '{"model":"tiny","messages":[{"role":"user","content":"x","deep":%s}]}'
    text = "the page of a row "
    stops = [f"{at:06x}#" for at in range(200_000)]
    keys = b",".join(b'"%07d":1' % at for at in range(MiB // 12))
    return {
        "top_k of 2^63": (4, asking(request(plain | {"top_k": 2**63}))),
        "seed of 4,000 digits": (2, asking(request(plain | {"seed": 10**4000}))),
        "priority of -2^20": (4, asking(request(plain | {"priority": -(2**20)}))),
        "200,000 stop texts": (2, asking(request(plain | {"stop": stops}))),
        "stop texts of a mebibyte": (2, asking(request(plain | {"stop": ["~" * MiB] * 2}))),
        "1 MiB of numbers": (4, asking(request(list_of(b"0.5,", MiB)))),
        "16 MiB of numbers": (1, asking(request(list_of(b"0.5,", 16 * MiB - 100)))),
        "1 MiB of lists": (4, asking(request(list_of(b"[],", MiB)))),
        "1 MiB of texts": (4, asking(request(list_of(b'"",', MiB)))),
        "1 MiB of keys": (2, asking(request(b'{"model":"tiny","metadata":{' + keys + b"}}"))),
        "wrong messages": (4, asking(request({"model": "tiny", "messages": [3] * 50_000}, CHAT))),
        "unknown parameters": (
            4,
            asking(request({f"key{at}": at for at in range(16_000)})),
        ),
        "a name of a mebibyte": (2, asking(request(plain | {"model": "x" * MiB}))),
        "nested JSON": (6, asking(request((message % nested).encode(), CHAT))),
        "endless brackets": (2, asking(request(b"[" * MiB))),
        "no JSON": (4, asking(request(b'{"model": "tiny", "prompt": \x00\xff'))),
        "too large": (2, asking(request(b"", length=1 << 40))),
        "a long prompt": (3, asking(request(plain | {"prompt": text * (MiB // len(text))}))),
        "a long prompt, and gone": (
            4,
            leaving(request(plain | {"prompt": text * (4 * MiB // len(text))})),
        ),
        "a prompt that just fits, and gone": (6, leaving(request(plain | {"prompt": text * 400}))),
        "half a body, and gone": (4, leaving(request(b'{"model":', length=MiB))),
        "half a body": (4, holding(request(b'{"model":', length=MiB))),
        "most of 8 MiB": (1, holding(request(b" " * (6 * MiB), length=8 * MiB))),
        "chunks of a byte": (2, asking(chunked(b"1\r\n \r\n" * 100_000))),
        "no end of chunks": (1, asking(chunked((b"4000\r\n" + b" " * 0x4000 + b"\r\n") * 1100))),
        "silence": (8, holding(b"")),
        "half a head": (8, holding(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-")),
        "a dripping head": (4, dripping),
        "an endless head": (4, asking(b"GET / HTTP/1.1\r\n" + b"X-A: b\r\n" * 20_000)),
        "no HTTP": (4, asking(random.Random(0).randbytes(4096) + b"\r\n\r\n")),
        "a pipeline": (2, pipelining),
        "a stream, and gone": (8, leaving_a_stream),
        "a stream that is never read": (4, never_reading),
        "a wrong route": (2, asking(b"PUT /v1/%2e%2e/etc HTTP/1.1\r\nHost: x\r\n\r\n")),
    }


class Fuzz:
    """Bodies of every route, in which some fields have random values; by what the server says."""

    def __init__(self, seed: int):
        self._draw = random.Random(seed)
        self._routes: list[tuple[str, dict[str, Any]]] = []
        self._defs: dict[str, Any] = {}
        self._left_bytes = 0

    async def learn(self, target: Target) -> None:
        """Read which routes there are, and their fields."""
        connection = await target.connect()
        await connection.send(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        pieces = []
        while piece := await connection.reader.read(1 << 16):
            pieces.append(piece)
        connection.leave()
        told = json.loads(b"".join(pieces).partition(b"\r\n\r\n")[2])
        self._defs = told["components"]["schemas"]
        for path, methods in told["paths"].items():
            content = methods.get("post", {}).get("requestBody", {}).get("content", {})
            for each in content.values():
                self._routes.append((path, self._defs[each["schema"]["$ref"].rsplit("/", 1)[1]]))

    def drawn(self) -> tuple[str, Kind]:
        """A route, and a client that sends it a body."""
        draw, self._left_bytes = self._draw, 4 * MiB
        path, form = draw.choice(self._routes)
        body: dict[str, Any] = {"max_tokens": 4, "max_output_tokens": 4}
        body |= {name: self._usual(name, form) for name in form.get("required", ())}
        if path == "/tokenize":
            body[draw.choice(["prompt", "messages"])] = draw.choice([PLAIN_TEXT, MESSAGES])
        names = [*form["properties"], "unknown", *form.get("required", ())]
        for name in draw.sample(names, min(len(names), draw.choice([0, 1, 1, 2, 3]))):
            body[name] = self._value(form["properties"].get(name, {}))
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if body.get(name, 4) in (None, 20, 128):  # As in earnest; steps are not the question.
                body[name] = 4
        data = json.dumps(body).encode()
        if draw.random() < 0.05:
            at = draw.randrange(len(data))
            data = data[:at] + draw.randbytes(3) + data[at:]
        behave = draw.choice([asking, asking, asking, leaving])
        return path, behave(request(data, path))

    def _usual(self, name: str, form: dict[str, Any]) -> Any:
        usual = {"prompt": PLAIN_TEXT, "input": PLAIN_TEXT, "tokens": [5, 6], "messages": MESSAGES}
        return usual.get(name) or self._typed(form["properties"][name], 0)

    def _value(self, form: dict[str, Any]) -> Any:
        """A value of the right type more often than not, small or grown."""
        return self._typed(form, 0) if self._draw.random() < 0.7 else self._any(0)

    def _typed(self, form: dict[str, Any], depth: int) -> Any:
        """A value as a schema says, with grown ends."""
        draw = self._draw
        if depth > 6:
            return None
        if "$ref" in form:
            return self._typed(self._defs[form["$ref"].rsplit("/", 1)[1]], depth + 1)
        for several in ("anyOf", "oneOf"):
            if several in form:
                return self._typed(draw.choice(form[several]), depth + 1)
        if "enum" in form or "const" in form:
            return draw.choice([form.get("const"), *form.get("enum", ())])
        kind = form.get("type")
        if kind == "object" and "properties" in form:
            needed = set(form.get("required", ()))
            chosen = [at for at in form["properties"] if at in needed or draw.random() < 0.3]
            return {at: self._typed(form["properties"][at], depth + 1) for at in chosen}
        if kind == "array":
            items = form.get("items", {})
            some = [self._typed(items, depth + 1) for _ in range(draw.choice([0, 1, 3]))]
            return self._repeated(some, draw.choice([1, 1, 1, 16, 128, 1000]))
        if kind == "string":
            return self._text()
        if kind in ("integer", "number"):
            return draw.choice(NUMBERS)
        if kind == "boolean":
            return draw.random() < 0.5
        return self._any(depth)

    def _text(self) -> str:
        draw = self._draw
        part = draw.choice(
            ["a", "page ", "\\", '"', "\u00e9\ud800", "\x00", "{", "(a|b)*", "\U0001f642"]
        )
        count = int(min(10 ** draw.uniform(0, 6.5), self._left_bytes / 4))
        self._left_bytes -= count
        return draw.choice([*GRAMMARS, *[part * count] * len(GRAMMARS)])

    def _repeated(self, some: list[Any], times: int) -> list[Any]:
        num_bytes = len(json.dumps(some))
        times = max(1, min(times, self._left_bytes // num_bytes))
        self._left_bytes -= times * num_bytes
        return some * times

    def _any(self, depth: int) -> Any:
        """Any JSON: a scalar, a schema, or something nested or long."""
        draw = self._draw
        kind = draw.randrange(8)
        if kind == 0:
            return draw.choice([None, True, *NUMBERS])
        if kind == 1:
            return self._text()
        if kind == 2 and depth < 4:
            return {draw.choice(KEYWORDS): self._any(depth + 1) for _ in range(draw.randrange(5))}
        if kind == 3 and depth < 4:
            some = [self._any(depth + 1) for _ in range(draw.randrange(5))]
            return self._repeated(some, draw.choice([1, 1, 64]))
        if kind == 4:
            return draw.choice(SCHEMAS)
        if kind == 5:
            nested: Any = {"type": "string"}
            for _ in range(draw.randrange(80)):
                keys = draw.sample(["properties", "$defs", "items", "allOf"], 2)
                nested = {
                    keys[0]: {"a": nested},
                    keys[1]: draw.choice([0, [], {"a": {"$ref": "#"}}]),
                }
            return nested
        if kind == 6:
            return {f"k{at}": draw.choice(SCHEMAS[:3]) for at in range(draw.choice([1, 30, 400]))}
        return [draw.choice(NUMBERS)] * draw.choice([1, 100, 10_000])


PLAIN_TEXT = "A row of the page"
MESSAGES = [{"role": "user", "content": PLAIN_TEXT}]
NUMBERS = (0, 1, -1, 2, 4, 20, 128, 0.5, 1e-9, 1e30, 2**31, 2**63, 2**64, -(2**63), 10**400)
KEYWORDS = ("type", "properties", "items", "anyOf", "allOf", "$ref", "pattern", "enum", "x", "json")
GRAMMARS = (
    'start: s\ns: s s s s | s s s | s s | "a" | "b"',
    "start: %json " + '{"allOf":[{"type":"integer","multipleOf":9973},{"multipleOf":9967}]}',
    "(.{1,1000}x){1,1000}y",
    ".*a.{40}b",
    "([a-z]+)+\\d{2,5000}",
    "start: start",
)
SCHEMAS: tuple[Any, ...] = (
    {"type": "string"},
    {"allOf": [{"type": "integer", "multipleOf": each} for each in (9973, 9967)]},
    {"type": "integer", "multipleOf": 99991},
    {"type": "object", "properties": {f"k{at}": {"type": "string"} for at in range(3000)}},
    {"type": "array", "items": {"$ref": "#"}, "minItems": 3},
    {"allOf": [{"type": "string", "pattern": f"^.*{each}.*$"} for each in "abcdefgh"]},
    {"anyOf": [{"type": "string", "maxLength": at} for at in range(300)]},
    {"type": "string", "pattern": "^(a?){500}a{500}$"},
)


def list_of(element: bytes, num_bytes: int) -> bytes:
    """A prompt of so many bytes, in elements."""
    return b'{"model":"tiny","prompt":[' + element * (num_bytes // len(element)) + b"0]}"


async def attack(
    target: Target, seed: int, count: int, concurrency: int, fuzzed: float
) -> dict[str, Any]:
    """Send `count` requests; how each ended, by its kind."""
    all_kinds = kinds()
    weights = [weight for weight, _ in all_kinds.values()]
    fuzz, draw = Fuzz(seed), random.Random(seed)
    await fuzz.learn(target)
    names = draw.choices(list(all_kinds), weights, k=count)
    drawn = iter(names)
    ends: dict[str, Counter[str]] = {}

    async def client() -> None:
        for name in drawn:
            kind = all_kinds[name][1]
            if draw.random() < fuzzed:
                name, kind = fuzz.drawn()
            try:
                how = await asyncio.wait_for(kind(target), PATIENCE_S)
            except asyncio.TimeoutError:
                how = "hangs"
            except OSError:
                how = "closed"
            ends.setdefault(name, Counter())[how] += 1

    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    start_s = time.monotonic()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    return {"seconds": time.monotonic() - start_s, "ends": ends}


def main(arguments: list[str]) -> None:
    """See the module."""
    host, port, hold_s, *counts, fuzzed = arguments
    # Lower priority: hostile clients would run on other machines.
    os.nice(10)
    target = Target(host, int(port), float(hold_s))
    print(json.dumps(asyncio.run(attack(target, *map(int, counts), float(fuzzed)))))


if __name__ == "__main__":
    main(sys.argv[1:])
