"""The routes.

app = create_app(async_engine, tokenizer, ServerOptions(model_name="llama", max_model_tokens=8192))
uvicorn.run(app)                       # or `run_server(app, ...)`, which drains on SIGTERM
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import FastAPI, Request
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

import vmkv

from ...errors import ConfigError
from ..metrics import Metrics
from ..options import ServerOptions
from .errors import ApiError
from .guard import Guard
from .messages import CountTokensRequest, MessagesRequest
from .responses import ResponsesRequest
from .schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from .service import ServerMetrics, Service, StreamingEngine

_REFS = "#/components/schemas/{model}"


def create_app(
    engine: StreamingEngine,
    tokenizer: Any,
    options: ServerOptions,
    metrics: ServerMetrics | None = None,
) -> FastAPI:
    """Create the application, which owns the engine: its shutdown shuts the engine down.

    Args:
        engine: An `AsyncEngine`.
        tokenizer: The model's transformers tokenizer.
        options: The server's options.
        metrics: The engine's observer, shown at `/metrics`.

    Its `state.service` is the `Service` that a server drains.
    """
    return create_app_for([Service(engine, tokenizer, options, metrics or Metrics())], options)


def create_app_for(
    services: Sequence[Service], options: ServerOptions, common: Sequence[ServerMetrics] = ()
) -> FastAPI:
    """Create the application of several models, one for each service; see `create_app`.

    `options` are of the server as a whole, `common` metrics that are of no model. Raises
    `ConfigError` if two models have the same name.
    """
    service = services[0]
    service.served.update({each.model_name: each for each in services})
    service.common.extend(common)
    if len(service.served) < len(services):
        raise ConfigError("two models have the same name, by which clients choose: leave one out")

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as engines:
            for each in services:
                await engines.enter_async_context(each.engine)
            yield
            service.close()

    app = FastAPI(title="vmkv", version=vmkv.__version__, lifespan=lifespan)
    app.state.service = service
    app.add_middleware(Guard, service=service, options=options)
    if options.cors_origins:
        # Outside the guard: a browser's preflight request has no key.
        origins, every = list(options.cors_origins), ["*"]
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=every, allow_headers=every
        )
    app.exception_handler(HTTPException)(_http_error)
    app.get("/v1/models")(service.models)
    app.get("/v1/models/{name:path}")(service.model)
    app.get("/health")(service.health)
    for ask in (app.get, app.post):
        ask("/ping")(service.health)
    for path in ("/health", "/ping"):
        app.head(path, include_in_schema=False)(service.health)
    app.get("/load")(service.load)
    app.get("/version")(version)
    app.head("/version", include_in_schema=False)(version)
    app.get("/metrics")(service.metrics)
    if options.can_sleep:
        app.post("/sleep", response_class=Response)(service.sleep)
        app.post("/wake_up", response_class=Response)(service.wake_up)
        app.get("/is_sleeping")(service.is_sleeping)
    routes: tuple[tuple[str, type[BaseModel], Any], ...] = (
        ("/v1/completions", CompletionRequest, service.completions),
        ("/v1/chat/completions", ChatRequest, service.chat_completions),
        ("/v1/responses", ResponsesRequest, service.responses),
        ("/v1/messages", MessagesRequest, service.messages),
        ("/v1/messages/count_tokens", CountTokensRequest, service.count_tokens),
        ("/tokenize", TokenizeRequest, service.tokenize),
        ("/detokenize", DetokenizeRequest, service.detokenize),
    )
    for path, form, route in routes:
        # The route parses its body itself, so FastAPI does not know what to document.
        content = {"application/json": {"schema": {"$ref": _REFS.format(model=form.__name__)}}}
        body = {"requestBody": {"required": True, "content": content}}
        app.post(path, response_model=None, openapi_extra=body)(route)
    forms: list[Any] = [(form, "validation") for _, form, _ in routes]
    _, described = models_json_schema(forms, ref_template=_REFS)
    app.openapi()["components"]["schemas"].update(described["$defs"])  # FastAPI keeps it.
    return app


async def version() -> dict[str, str]:
    """Return the version of vmkv."""
    return {"version": vmkv.__version__}


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return ApiError(error.status_code, message, headers=error.headers).response(request.url.path)
