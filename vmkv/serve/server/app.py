"""The routes.

app = create_app(async_engine, tokenizer, ServerOptions(model_name="llama", max_model_tokens=8192))
uvicorn.run(app)                       # or `run_server(app, ...)`, which drains on SIGTERM
"""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from ...options import ServerOptions
from ..metrics import CONTENT_TYPE, Metrics
from .errors import ApiError
from .guard import Guard
from .schema import ChatRequest, CompletionRequest, TokenizeRequest
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
    service = Service(engine, tokenizer, options, metrics or Metrics())

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with engine:
            yield
            service.close()

    app = FastAPI(title="vmkv", version=_version(), lifespan=lifespan)
    app.state.service = service
    app.add_middleware(Guard, service=service, options=options)
    if options.cors_origins:
        # Outside the guard: a browser's preflight request has no key.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(options.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
        )
    app.exception_handler(HTTPException)(_http_error)
    _add_information(app, service)
    _add_generation(app, service)
    return app


def _add_generation(app: FastAPI, service: Service) -> None:
    _describe(app, CompletionRequest, ChatRequest, TokenizeRequest)

    @app.post("/v1/completions", response_model=None, openapi_extra=_body(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Continue one or several prompts."""
        return await service.generate(request, CompletionRequest)

    @app.post("/v1/chat/completions", response_model=None, openapi_extra=_body(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        """Continue a chat."""
        return await service.generate(request, ChatRequest)

    @app.post("/tokenize", response_model=None, openapi_extra=_body(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """Return the tokens of a prompt or a chat, as a completion would use them."""
        return await service.tokenize(request)


def _body(form: type[BaseModel]) -> dict[str, Any]:
    """Describe a route's body for its documentation; the route parses it itself."""
    schema = {"$ref": _REFS.format(model=form.__name__)}
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}}


def _describe(app: FastAPI, *forms: type[BaseModel]) -> None:
    _, found = models_json_schema([(each, "validation") for each in forms], ref_template=_REFS)
    make = app.openapi

    def openapi() -> dict[str, Any]:
        described = make()
        components = described.setdefault("components", {}).setdefault("schemas", {})
        components.update(found["$defs"])
        return described

    app.openapi = openapi  # type: ignore[method-assign]


def _add_information(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the served model."""
        return {"object": "list", "data": [service.card()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """Describe a model."""
        service.check_model(name)
        return service.card()

    @app.get("/health")
    @app.head("/health", include_in_schema=False)
    async def health() -> JSONResponse:
        """Report whether the server accepts requests."""
        status, body = service.health()
        return JSONResponse(body, status)

    @app.get("/version")
    @app.head("/version", include_in_schema=False)
    async def version() -> dict[str, str]:
        """Return the version of vmkv."""
        return {"version": _version()}

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        """Return all metrics in Prometheus' format."""
        return PlainTextResponse(service.metrics_text(), media_type=CONTENT_TYPE)


def _version() -> str:
    try:
        return importlib.metadata.version("vmkv")
    except importlib.metadata.PackageNotFoundError:  # A checkout, not installed.
        return "unknown"


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer for a route or a method that does not exist, in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return ApiError(error.status_code, message, headers=error.headers).response()
