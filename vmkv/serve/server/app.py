"""The routes.

app = create_app(async_engine, tokenizer, ServerOptions(model_name="llama"))
uvicorn.run(app)                       # or `run_server(app, ...)`, which drains on SIGTERM
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ...errors import ConfigError
from ..metrics import CONTENT_TYPE, Metrics
from ..params import SamplingParams
from .answer import Answer
from .choices import ChatForm, CompletionForm, Form
from .errors import ApiError, failed, invalid
from .guard import BodyRefusedError, DrainSwitch, Guard
from .limits import Gate, Limits
from .prompts import Prompts
from .protocol import StreamingEngine
from .schema import ChatRequest, CompletionRequest, Sampling
from .streaming import (
    CLIENT_GONE,
    ClientGoneError,
    EventStream,
    error_response,
    until_disconnect,
)
from .tokens import Tokens

_FORM = re.compile(r"body|str|int|float|bool|list\[.*|[A-Z]\w*")


@dataclass(frozen=True)
class ServerOptions:
    """How a server presents itself, and to whom.

    Attributes:
        model_name: What clients call the model.
        max_model_tokens: Prompt and output of one request together at most.
        limits: What is refused beyond.
        api_keys: Who may ask; empty for everybody.
        chat_template: Instead of the tokenizer's own.
    """

    model_name: str
    max_model_tokens: int
    limits: Limits = field(default_factory=Limits)
    api_keys: Sequence[str] = ()
    chat_template: str | None = None


def create_app(
    engine: StreamingEngine,
    tokenizer: Any,
    options: ServerOptions,
    metrics: Metrics | None = None,
) -> FastAPI:
    """The application. It owns the engine from its startup on: its shutdown shuts the engine down.

    Args:
        engine: An `AsyncEngine`.
        tokenizer: The model's, of transformers.
        options: See there.
        metrics: What the engine reports to, to be shown at `/metrics`.

    Its `state.drain.is_draining = True` makes it refuse what comes from then on.
    """
    service = _Service(engine, tokenizer, options, metrics or Metrics())

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.drain.is_draining = True
        service.prompts.close()
        await engine.shutdown(drain=True)

    app = FastAPI(title="vmkv", lifespan=lifespan)
    app.state.drain = service.drain
    app.state.gate = service.gate
    app.add_middleware(
        Guard,
        limits=options.limits,
        api_keys=options.api_keys,
        drain=service.drain,
        metrics=service.metrics,
    )
    _add_error_handlers(app)
    _add_information(app, service)
    _add_completions(app, service)
    return app


class _Service:
    """What the routes share."""

    def __init__(
        self, engine: StreamingEngine, tokenizer: Any, options: ServerOptions, metrics: Metrics
    ):
        self.engine = engine
        self.options = options
        self.metrics = metrics
        self.started_s = int(time.time())
        self.prompts = Prompts(tokenizer, options.chat_template)
        self.tokens = Tokens(tokenizer)
        self.drain = DrainSwitch()
        self.gate = Gate(options.limits.max_concurrent, options.limits.max_queued)

    def card(self) -> dict[str, Any]:
        """The model, as `/v1/models` lists it."""
        return {
            "id": self.options.model_name,
            "object": "model",
            "created": self.started_s,
            "owned_by": "vmkv",
            "max_model_len": self.options.max_model_tokens,
        }

    def check_model(self, name: str) -> None:
        """Raise `ApiError` unless the model is ours."""
        if name != self.options.model_name:
            raise ApiError(
                404,
                f"the model {name!r} is not served here; {self.options.model_name!r} is",
                param="model",
                code="model_not_found",
            )

    def answer(
        self,
        body: Sampling,
        form: Form,
        prompts: Sequence[Sequence[int]],
        most_tokens: int | None,
        logprobs: int | None,
    ) -> Answer:
        """The answer to be computed, once everything about it is known to be possible.

        Raises `ApiError`: something is not.
        """
        limits = self.options.limits
        num_samples = len(prompts) * body.num_samples
        if num_samples > limits.max_samples:
            raise invalid(
                f"{len(prompts)} prompts of {body.num_samples} samples are {num_samples}; at most "
                f"{limits.max_samples} are computed at once",
                "n",
            )
        try:
            params = body.sampling_params(most_tokens, logprobs, limits)
        except ConfigError as error:
            # Its messages begin `name=value`.
            name = str(error).partition("=")[0]
            raise invalid(str(error), name if name in type(body).model_fields else None) from error
        for prompt in prompts:
            self._check_length(prompt, params)
        return Answer(
            self.engine,
            self.gate,
            form,
            self.tokens,
            self.options.model_name,
            prompts,
            params,
            body.priority,
            body.wants_usage,
        )

    def _check_length(self, prompt: Sequence[int], params: SamplingParams) -> None:
        if not prompt:
            raise invalid("the prompt is empty: it has no tokens", "prompt")
        most = self.options.limits.max_prompt_tokens
        if most is not None and len(prompt) > most:
            raise invalid(
                f"the prompt has {len(prompt)} tokens; this server takes {most}",
                "prompt",
                "context_length_exceeded",
            )
        longest = self.options.max_model_tokens
        num_wanted = params.max_tokens or 1
        if len(prompt) + num_wanted > longest:
            raise invalid(
                f"this model's context is {longest} tokens; the prompt has {len(prompt)}, and "
                f"{num_wanted} were asked for: shorten the prompt or lower max_tokens",
                "prompt" if len(prompt) >= longest else "max_tokens",
                "context_length_exceeded",
            )


async def _respond(request: Request, body: Sampling, answer: Answer) -> Response:
    if body.stream:
        return EventStream(answer.events(), request.app.state.send_timeout_s)
    try:
        return JSONResponse(await until_disconnect(request.receive, answer.whole()))
    except ClientGoneError:
        return Response(status_code=CLIENT_GONE)


def _add_completions(app: FastAPI, service: _Service) -> None:
    app.state.send_timeout_s = service.options.limits.send_timeout_s

    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue one or several prompts."""
        service.check_model(body.model)
        num_prompts, most = len(body.prompts), service.options.limits.max_prompts
        if not 1 <= num_prompts <= most:
            raise invalid(f"{num_prompts} prompts; from 1 to {most} are served", "prompt")
        prompts = []
        for prompt in body.prompts:
            if isinstance(prompt, str):
                prompts.append(
                    await service.prompts.encode(prompt, add_special_tokens=body.add_special_tokens)
                )
            else:
                service.prompts.check_token_ids(prompt)
                prompts.append(prompt)
        # OpenAI's default of 16, where a chat's is as many as fit.
        most_tokens = 16 if body.max_tokens is None else body.max_tokens
        form = CompletionForm(service.tokens)
        answer = service.answer(body, form, prompts, most_tokens, body.logprobs)
        return await _respond(request, body, answer)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Continue a chat."""
        service.check_model(body.model)
        prompt = await service.prompts.encode_chat(
            [message.for_template() for message in body.messages],
            body.add_generation_prompt,
            body.chat_template_kwargs,
        )
        form = ChatForm(service.tokens)
        answer = service.answer(body, form, [prompt], body.most_tokens, body.num_logprobs)
        return await _respond(request, body, answer)


def _add_information(app: FastAPI, service: _Service) -> None:
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The models: one."""
        return {"object": "list", "data": [service.card()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """One model."""
        service.check_model(name)
        return service.card()

    @app.get("/health")
    async def health() -> JSONResponse:
        """Whether requests are taken and answered."""
        status = "draining" if service.drain.is_draining else "ok"
        if not service.engine.is_running:
            status = "stopped"
        body = {
            "status": status,
            "requests_inside": service.gate.num_inside,
            "requests_at_the_door": service.gate.num_waiting,
        }
        return JSONResponse(body, 200 if status == "ok" else 503)

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        """Everything counted, for Prometheus."""
        return PlainTextResponse(service.metrics.text(), media_type=CONTENT_TYPE)


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> JSONResponse:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def validation_error(_: Request, error: RequestValidationError) -> JSONResponse:
        return error_response(_explained(error))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        if isinstance(error, BodyRefusedError):
            return error_response(error.error)
        message = f"{request.method} {request.url.path}: {error.detail}"
        return error_response(
            ApiError(error.status_code, message, headers=dict(error.headers or {}))
        )

    @app.exception_handler(Exception)
    async def unexpected(_: Request, error: Exception) -> JSONResponse:
        return error_response(failed(error))


def _explained(error: RequestValidationError) -> ApiError:
    """What pydantic found, as one sentence.

    Of several findings the deepest: of the forms that a value may have, it came closest.
    """
    found = max(error.errors(), key=lambda each: len(each["loc"]))
    # Between the names stand the forms that were tried: `str`, `list[TextPart]`.
    names = [str(part) for part in found["loc"] if not _FORM.fullmatch(str(part))]
    param = ".".join(names) or None
    if found["type"] == "json_invalid":
        reason = found.get("ctx", {}).get("error", "")
        return invalid(f"the request's body is no valid JSON: {reason}".rstrip(": "))
    if found["type"] == "extra_forbidden":
        return invalid(f"unknown parameter {param!r}", param)
    if param is None:
        return invalid(
            "the request needs a JSON object as its body, with Content-Type: application/json"
        )
    return invalid(f"{param}: {found['msg'][0].lower()}{found['msg'][1:]}", param)
