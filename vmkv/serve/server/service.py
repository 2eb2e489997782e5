"""Serves requests: checks them, runs them through the engine, and writes their answers.

The way of a request: its body (`schema.py`), prompts and sampling parameters; admission; tokens;
the engine's outputs; deltas and choices (`choices.py`); and JSON, whole or as server-sent events.
A client that disconnects cancels its request at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import Metric
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ...errors import ConfigError, LostError, shown
from ..metrics import CONTENT_TYPE, in_vllms_names, labelled
from ..options import ServerOptions
from ..params import SamplingParams
from ..request import CompletionOutput, RequestOutput
from .choices import ChatForm, CompletionForm, Form, Tokens
from .errors import ApiError, api_error, full_context, invalid
from .guard import Gate, receive_body, tenant_of
from .messages import CountTokensRequest, MessagesRequest, MessageWriter
from .prompts import Prompt, Prompts
from .reply import NewParser
from .reply_format import Replies
from .responses import ResponsesRequest, ResponseWriter
from .schema import (
    LOGPROBS_MAX,
    SAMPLES_MAX,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
    parse,
)

if TYPE_CHECKING:
    from ..engine_client import EngineClient
    from ..replicas.client import ReplicatedEngine

T = TypeVar("T")
BodyT = TypeVar("BodyT", bound=GenerationRequest | TokenizeRequest | DetokenizeRequest)
#: An engine that runs in the background, and streams outputs to an event loop. As a context manager
#: it serves the current event loop, and stops once running requests have finished.
StreamingEngine: TypeAlias = "EngineClient | ReplicatedEngine"
#: Makes the form of an answer, with the arguments of `Form`.
NewForm: TypeAlias = Callable[..., Form]

_LOG = logging.getLogger(__name__)
#: Names of unknown parameters that are logged, and characters of each: clients cannot fill the log.
_UNKNOWN_MAX, _NAME_CHARS_MAX = 100, 50
_NUM_TOKENIZING = 2
#: Allowed tokens, or those of bad words, of all samples of a request.
_CHOICE_MAX = 1 << 20
#: Bytes of a body per JSON value that it may have.
_BYTES_PER_VALUE = 128
#: Largest body that is parsed beside others, in about a millisecond.
_SMALL_BYTES = 16 * 1024
_PIECE_BYTES = 1 << 18


class ServerMetrics(Protocol):
    """An engine's metrics, shown at `/metrics`: a `Metrics`, or those of replicas."""

    def families(self) -> Iterable[Metric]:
        """Return every metric with its samples."""


class Service:
    """Serves one model: validates requests, admits them and builds their responses.

    The first of several services, all in `served` by name, has the routes of all, and `common`
    metrics; a request without a `model` goes to it.
    """

    def __init__(
        self,
        engine: StreamingEngine,
        tokenizer: Any,
        options: ServerOptions,
        metrics: ServerMetrics,
    ):
        limits, max_model_tokens = options.limits, options.max_model_tokens
        most_tokens = min(max_model_tokens, limits.max_prompt_tokens or max_model_tokens)
        self.engine = engine
        self.prompts = Prompts(tokenizer, most_tokens, options.chat_template)
        self.tokens = Tokens(tokenizer)
        self.replies = Replies(tokenizer, options.chat_template, options.response_template)
        self.model_name = options.model_name
        self.sampling_defaults = options.sampling_defaults
        self.limits = limits
        self.served: dict[str, Service] = {self.model_name: self}
        self.common: list[ServerMetrics] = []
        self._metrics = metrics
        self._http_metrics = CollectorRegistry()
        self.http_responses = Counter(
            "vmkv_http_responses",
            "HTTP responses by route and status",
            ("route", "status"),
            registry=self._http_metrics,
        )
        self._has_tenants = len({*options.api_keys}) > 1
        self.is_draining = False
        self.gate = Gate(limits.max_concurrent, limits.max_queued)
        # /tokenize has its own gate, so that it does not wait for completions.
        self._tokenizing = Gate(_NUM_TOKENIZING, limits.max_queued)
        # Large bodies are parsed one at a time, which bounds the parsing in a turn of the event
        # loop.
        self._parsing = asyncio.Lock()
        self.max_model_tokens, self.max_prompt_tokens = max_model_tokens, most_tokens
        self._max_values = max(limits.max_body_bytes // _BYTES_PER_VALUE, 2 * max_model_tokens)
        self._started_s = int(time.time())
        self._unknown: set[str] = set()

    # ---- routes ---------------------------------------------------------------------------
    # They raise `ApiError` for a request that cannot be served, and `ClientDisconnect` if the
    # client disconnects. Their docstrings are the API's documentation.

    async def completions(self, request: Request) -> Response:
        """Continue one or several prompts."""
        service, body = await self.read(request, CompletionRequest)
        return await service.generate(request, body, CompletionForm)

    async def chat_completions(self, request: Request) -> Response:
        """Continue a chat."""
        service, body = await self.read(request, ChatRequest)
        return await service.generate(request, body, ChatForm)

    async def generate(
        self, request: Request, body: CompletionRequest | ChatRequest, new_form: NewForm
    ) -> Response:
        """Answer a validated request."""
        tenant = tenant_of(request.state.api_key, body.cache_salt)
        if body.request_id is not None and not request.state.has_request_id:
            request.state.request_id = body.request_id
        request_id: str = request.state.request_id
        params, new_parser = body.sampling_params(self.sampling_defaults), None
        if isinstance(body, ChatRequest):
            params, new_parser = self.replies.plan(body, params)
        answer = Answer(self, body, params, tenant, request_id, new_form, new_parser)
        request.state.answer = answer
        answer.check()
        if body.stream:
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            return Streamed(answer.events(), media_type="text/event-stream", headers=headers)
        parts = await until_disconnect(request.receive, answer.whole())
        headers = {"Content-Length": str(sum(map(len, parts)))}
        return Streamed(in_pieces(parts), media_type="application/json", headers=headers)

    async def responses(self, request: Request) -> Response:
        """Answer a conversation, with texts and function calls."""
        service, body = await self.read(request, ResponsesRequest)
        return await service.generate(request, body.chat(), partial(ResponseWriter, asked=body))

    async def messages(self, request: Request) -> Response:
        """Answer a conversation, with texts and uses of tools."""
        service, body = await self.read(request, MessagesRequest)
        return await service.generate(request, body.chat(), MessageWriter)

    async def count_tokens(self, request: Request) -> Response:
        """Count the tokens of a conversation, as an answer to it would."""
        service, body = await self.read(request, CountTokensRequest)
        return JSONResponse({"input_tokens": len(await service._tokens(request, body.chat()))})

    async def tokenize(self, request: Request) -> Response:
        """Return the tokens of a prompt or a chat, as a completion would use them."""
        service, body = await self.read(request, TokenizeRequest)
        found = await service._tokens(request, body.what)
        strings = service.prompts.strings(found) if body.return_token_strs else None
        sizes = {"count": len(found), "max_model_len": service.max_model_tokens}
        return JSONResponse({**sizes, "tokens": found, "token_strs": strings})

    async def detokenize(self, request: Request) -> Response:
        """Return the text of tokens."""
        service, body = await self.read(request, DetokenizeRequest)
        service.prompts.check(body.tokens)
        text = service._converted(service.prompts.text, body.tokens)
        return JSONResponse({"prompt": await until_disconnect(request.receive, text)})

    async def _tokens(self, request: Request, prompt: Prompt) -> Sequence[int]:
        self.prompts.check(prompt)
        return await until_disconnect(request.receive, self._converted(self.prompts.tokens, prompt))

    async def _converted(self, convert: Callable[[Any], Awaitable[T]], what: Any) -> T:
        async with self._tokenizing.entered():
            return await convert(what)

    async def load(self) -> dict[str, int]:
        """Return the number of requests that run or wait, as vLLM names it."""
        return {"server_load": sum(self._counts())}

    async def models(self) -> dict[str, Any]:
        """List the served models."""
        return {"object": "list", "data": [await self.model(name) for name in self.served]}

    async def model(self, name: str) -> dict[str, Any]:
        """Describe a model."""
        service = self.find(name)
        head = {"id": name, "object": "model", "created": self._started_s, "owned_by": "vmkv"}
        return {**head, "max_model_len": service.max_model_tokens}

    async def health(self) -> JSONResponse:
        """Report whether the server accepts requests, of any model."""
        reasons = {name: each.engine.failure for name, each in self.served.items()}
        failures = {name: reason for name, reason in reasons.items() if reason is not None}
        several = len(reasons) > 1
        told = [f"{name}: {reason}" if several else reason for name, reason in failures.items()]
        reason = "; ".join(told) or None
        status = "failing" if len(failures) == len(reasons) else "ok"
        if self.is_draining:
            status, reason = "draining", reason or "the server is about to stop"
        num_inside, num_waiting = self._counts()
        counts = {"requests_inside": num_inside, "requests_waiting": num_waiting}
        body = {"status": status, "reason": reason, **counts}
        return JSONResponse(body, 200 if status == "ok" else 503)

    async def sleep(
        self, level: str = "1", mode: str = "wait", model: str | None = None
    ) -> Response:
        """Move the weights to host memory, once running requests have finished.

        With `mode=abort` they are cancelled instead, which needs the server's only key. Later
        requests wake the model. `level` must be 1.
        """
        if level != "1":
            raise invalid(
                f"level={shown(level)}: a model sleeps at level 1 here, from which a request wakes "
                "it; at level 2 its weights would be lost",
                "level",
            )
        if mode not in ("abort", "wait"):
            raise invalid(f"mode={shown(mode)} is neither abort nor wait", "mode")
        if mode == "abort" and self._has_tenants:
            message = "mode=abort would cancel requests of this server's other keys: use mode=wait"
            raise ApiError(403, message, param="mode")
        await self._asked(model).sleep(aborts=mode == "abort")
        return Response()

    async def wake_up(self, model: str | None = None) -> Response:
        """Bring the weights back."""
        await self._asked(model).wake()
        return Response()

    async def is_sleeping(self, model: str | None = None) -> dict[str, bool]:
        """Report whether the model sleeps."""
        return {"is_sleeping": bool(self._asked(model).is_sleeping)}

    def _asked(self, model: str | None) -> Any:
        return (self if model is None else self.find(model)).engine

    def _counts(self) -> tuple[int, int]:
        gates = [each.gate for each in self.served.values()]
        return sum([each.num_inside for each in gates]), sum([each.num_waiting for each in gates])

    async def metrics(self) -> PlainTextResponse:
        """Return all metrics in Prometheus' format."""
        own = {name: [*each._metrics.families()] for name, each in self.served.items()}
        by_model = labelled(own, "model_name")
        families = by_model if len(own) > 1 else own[self.model_name]
        families = [*families, *(family for each in self.common for family in each.families())]
        families += [*self._http_metrics.collect(), *in_vllms_names(by_model, own)]
        text = generate_latest(SimpleNamespace(collect=lambda: families))
        return PlainTextResponse(text, media_type=CONTENT_TYPE)

    async def read(self, request: Request, form: type[BodyT]) -> tuple[Service, BodyT]:
        """Receive and validate a request's body, and find the service of its model."""
        encoding = request.headers.get("content-encoding", "identity")
        if encoding != "identity":
            reason = "is not supported: send the body as it is"
            code = "request_body_encoding_unsupported"
            raise invalid(f"Content-Encoding {shown(encoding)} {reason}", code=code)
        received = await receive_body(request, self.limits)
        content_type = request.headers.get("content-type", "")
        is_small = len(received) <= _SMALL_BYTES
        async with contextlib.nullcontext() if is_small else self._parsing:
            most = max(each._max_values for each in self.served.values())
            body = await parse(received, content_type, form, most)
        service = self if body.model is None else self.find(body.model)
        self._note_unknown(body.model_extra or ())
        return service, body

    def _note_unknown(self, names: Collection[str]) -> None:
        new = {name[:_NAME_CHARS_MAX] for name in names} - self._unknown if names else ()
        for name in sorted(new)[: _UNKNOWN_MAX - len(self._unknown)]:
            self._unknown.add(name)
            _LOG.warning("requests have a field %s, which this server ignores", shown(name))

    def find(self, name: str) -> Service:
        """Return the service of a model; `ApiError` if it is not served here."""
        if name not in self.served:
            names = " and ".join(map(repr, self.served))
            are = "are" if len(self.served) > 1 else "is"
            message = f"the model {shown(name)} is not served here; {names} {are}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return self.served[name]

    # ---- shutdown -------------------------------------------------------------------------

    async def cut(self) -> None:
        """Cancel every request: whole answers end with an error, streams with an error event."""
        self.is_draining = True
        for each in self.served.values():
            each.gate.close()
            each._tokenizing.close()
        await asyncio.gather(*[each.engine.shutdown(drain=False) for each in self.served.values()])

    def close(self) -> None:
        """Stop the tokenizers' threads."""
        self.is_draining = True
        for each in self.served.values():
            each.prompts.close()


# ---- answers -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """The answer to one request of a tenant; `forms` has one entry per attempt.

    `new_parser` is None if the text is the content.
    """

    service: Service
    body: CompletionRequest | ChatRequest
    params: SamplingParams
    tenant: str | None
    request_id: str
    new_form: NewForm
    new_parser: NewParser | None = None
    forms: list[Form] = field(default_factory=list)

    def check(self) -> None:
        """Run every check that needs no tokenisation; raises `ApiError`."""
        service, prompts = self.service, self.body.prompts
        if self._num_samples > SAMPLES_MAX:
            raise invalid(
                f"{len(prompts)} prompts of {self.params.n} samples; at most {SAMPLES_MAX} "
                "samples are computed at once",
                "n",
            )
        most, priority = service.limits.max_priority, self.body.priority
        if abs(priority) > most:
            message = "requests have no priorities here; the server's --max-priority allows them"
            if most:
                message = f"priority={shown(priority)} must be in [{-most}, {most}]"
            raise invalid(message, "priority")
        self._check_logprobs()
        if self._num_kept() is not None:
            return
        for prompt in prompts:
            service.prompts.check(prompt)
            if isinstance(prompt, Sequence):
                self._check_length(len(prompt))

    @cached_property
    def _num_samples(self) -> int:
        return len(self.body.prompts) * self.params.n

    def _check_length(self, num_tokens: int) -> None:
        """Raise `ApiError` for a prompt that leaves no room for an answer."""
        if not num_tokens:
            raise invalid("the prompt is empty: it has no tokens", "prompt")
        most, num_wanted = self.service.max_model_tokens, self.params.max_tokens or 1
        if num_tokens + num_wanted > most:
            raise full_context(num_tokens, most, num_wanted)

    def _num_kept(self) -> int | None:
        """Return the number of tokens to cut a prompt to; None if it stays whole."""
        asked, most = self.body.truncate_prompt_tokens, self.service.max_prompt_tokens
        if asked == -1:
            return max(min(self.service.max_model_tokens - (self.params.max_tokens or 1), most), 1)
        if (asked or 0) > most:
            raise invalid(
                f"truncate_prompt_tokens={asked}, and this server takes prompts of {most} tokens; "
                "-1 keeps as many as fit",
                "truncate_prompt_tokens",
            )
        return asked

    def _check_logprobs(self, num_prompt_tokens: int = 0) -> None:
        """Raise `ApiError` for too many log-probabilities, `num_prompt_tokens` included."""
        params, most_tokens = self.params, self.service.max_model_tokens
        if params.logprobs is None and params.prompt_logprobs is None:
            return
        num_tokens = min(params.max_tokens or most_tokens, most_tokens)
        num_samples = self._num_samples
        each, each_of_prompt = (
            0 if count is None else 1 + count for count in (params.logprobs, params.prompt_logprobs)
        )
        # A single sample is never refused for its length.
        most = max(self.service.limits.max_answer_logprobs, most_tokens * (1 + LOGPROBS_MAX))
        num_of_prompts = num_prompt_tokens * each_of_prompt
        num_logprobs = num_samples * num_tokens * each + num_of_prompts
        if num_samples > 1 and num_logprobs > most:
            prompts = f"{num_of_prompts} of the prompts, and " if num_of_prompts else ""
            raise invalid(
                f"{prompts}{num_samples} samples of up to {num_tokens} tokens with {each} "
                f"log-probabilities each are {num_logprobs}; this server allows "
                f"max_answer_logprobs={most}: ask for fewer samples (n), tokens (max_tokens) or "
                "log-probabilities",
                "max_tokens" if params.logprobs is not None else "prompt_logprobs",
            )

    def _check_choice(self, params: SamplingParams) -> None:
        """Raise `ApiError` for too many allowed and banned tokens, which each sample has."""
        words = sum(map(len, params.bad_words))
        of_each = {"allowed_token_ids": len(params.allowed_token_ids or ()), "bad_words": words}
        name, num_samples = max(of_each, key=of_each.__getitem__), self._num_samples
        if num_samples > 1 and num_samples * of_each[name] > _CHOICE_MAX:
            raise invalid(
                f"{num_samples} samples with {of_each[name]} tokens of {name} each; at most "
                f"{_CHOICE_MAX} together: ask for fewer samples",
                name,
            )

    def _limited(self, params: SamplingParams, num_tokens: int) -> SamplingParams:
        """Apply the default of `max_tokens`, as far as it fits behind a prompt's tokens."""
        most = self.service.sampling_defaults.get("max_tokens")
        if params.max_tokens is not None or most is None:
            return params
        return replace(params, max_tokens=min(most, self.service.max_model_tokens - num_tokens))

    async def whole(self) -> deque[bytes | bytearray]:
        """Compute the answer as JSON, in parts; compute it once more if its replica is lost."""
        try:
            return await self._whole()
        except ApiError as error:
            if not isinstance(error.__cause__, LostError):
                raise
            return await self._whole()  # Nothing was sent.

    async def _whole(self) -> deque[bytes | bytearray]:
        form = self._begun_form()
        async with contextlib.aclosing(self._deltas(form)) as deltas:
            async for delta in deltas:
                form.add(delta)
        return await form.whole()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer as server-sent events; raises `ApiError` only before the first event."""
        form, has_begun = self._begun_form(), False
        try:
            async with contextlib.aclosing(self._deltas(form)) as deltas:
                async for delta in deltas:
                    if events := form.events(delta):
                        yield events
                        has_begun = True
        except ApiError as error:
            if not has_begun:
                raise
            yield form.failure(error)
        else:
            yield form.end()

    async def _deltas(self, form: Form) -> AsyncGenerator[CompletionOutput, None]:
        async with contextlib.aclosing(self._outputs()) as outputs:
            async for at, output in outputs:
                for _ in form.encode_prompt(at, output):
                    await asyncio.sleep(0)
                for delta in form.advance(at, output):
                    if delta.logprobs:
                        await asyncio.sleep(0)
                    yield delta

    async def _outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        service = self.service
        async with service.gate.entered():
            # Behind the gate: a waiting or abandoned request costs no work.
            try:
                params, form = self.params, self.params.structured_outputs
                if form is not None:
                    form = await service.prompts.grammar(form)
                    params = replace(params, structured_outputs=form)
                prompts, kept = [], self._num_kept()
                for prompt in self.body.prompts:
                    prompts.append(await service.prompts.tokens(prompt, kept))
                    self._check_length(len(prompts[-1]))
                num_echoes = self.params.n if getattr(self.body, "echo", None) else 1
                self._check_logprobs(num_echoes * sum(map(len, prompts)))
                params = await service.prompts.tokenised(params)
                self._check_choice(params)
                priority, tenant, stream = self.body.priority, self.tenant, service.engine.stream
                streams = [
                    stream(prompt, self._limited(params, len(prompt)), priority, tenant=tenant)
                    for prompt in prompts
                ]
                async with contextlib.aclosing(merged(streams)) as outputs:
                    async for each in outputs:
                        yield each
            except ApiError:
                raise
            except ConfigError as error:
                raise self.body.explained(error) from error
            except Exception as error:
                raise api_error(error) from error

    def _begun_form(self) -> Form:
        names = {"model_name": self.service.model_name, "answer_id": self.request_id}
        its = (self.service.tokens, self.body, self.params, self.new_parser)
        self.forms.append(self.new_form(*its, **names))
        return self.forms[-1]


# ---- streams -------------------------------------------------------------------------------------


class Streamed(StreamingResponse):
    """Sends a body as it comes, from the first piece on; its generator is closed at the end."""

    body_iterator: AsyncGenerator[bytes, None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an ASGI request."""
        async with contextlib.aclosing(self.body_iterator):
            await until_disconnect(receive, self.stream_response(send))

    async def stream_response(self, send: Send) -> None:
        """Send the response."""
        has_begun = False
        async for piece in self.body_iterator:
            if not has_begun:
                start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                await send(start)
                has_begun = True
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def in_pieces(parts: deque[bytes | bytearray]) -> AsyncGenerator[bytes, None]:
    """Yield pieces of some 256 KiB; empties `parts`, and other tasks run between pieces."""
    piece = bytearray()
    while parts:
        part = parts.popleft()
        for at in range(0, len(part), _PIECE_BYTES):
            piece += part[at : at + _PIECE_BYTES]
            if len(piece) >= _PIECE_BYTES:
                yield bytes(piece)
                await asyncio.sleep(0)
                piece.clear()
    yield bytes(piece)


async def until_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """Await `work`; cancel it and raise `ClientDisconnect` if the client disconnects first."""
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        for each in (task, leaving):
            each.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield items of several streams as they come, with the stream's index; close them all."""
    if len(streams) == 1:  # The common case needs no task and no queue.
        async with contextlib.aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    pending = {asyncio.ensure_future(anext(each)): at for at, each in enumerate(streams)}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                at = pending.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                pending[asyncio.ensure_future(anext(streams[at]))] = at
                yield at, item
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for each in streams:
            await each.aclose()
