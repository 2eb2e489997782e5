"""State that the routes share: the engine, the admission gate, tokenisation and limits."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ...errors import ConfigError, shown
from ..params import SamplingParams
from .answer import Answer
from .choices import ChatForm, CompletionForm, Form
from .errors import ApiError, invalid
from .keys import tenant_of
from .limits import Gate, Limits
from .prompts import Prompt, Prompts
from .protocol import ServerMetrics, StreamingEngine
from .reading import Reader
from .schema import ChatRequest, CompletionRequest, Sampling, TokenizeRequest
from .streaming import EventStream, WholeBody, until_disconnect
from .tokens import Tokens
from .uploads import Uploads

_NUM_TOKENIZING = 2


class Service:
    """Serves one model: validates requests, admits them and builds their responses.

    `max_model_tokens` bounds prompt and output of one request together. While `is_draining`, new
    requests are refused. `gate` bounds the engine's requests, `uploads` the bodies in memory.
    """

    def __init__(
        self,
        engine: StreamingEngine,
        tokenizer: Any,
        *,
        model_name: str,
        max_model_tokens: int,
        limits: Limits,
        chat_template: str | None,
        metrics: ServerMetrics,
    ):
        self._engine = engine
        self._model_name = model_name
        self._max_model_tokens = max_model_tokens
        self._started_s = int(time.time())
        most_tokens = min(max_model_tokens, limits.max_prompt_tokens or max_model_tokens)
        self._prompts = Prompts(tokenizer, most_tokens, chat_template)
        self._tokens = Tokens(tokenizer)
        self.limits = limits
        self.metrics = metrics
        self.is_draining = False
        self.gate = Gate(limits.max_concurrent, limits.max_queued)
        # /tokenize has its own gate, so that it does not wait for completions.
        self._tokenizing = Gate(_NUM_TOKENIZING, limits.max_queued)
        self.uploads = Uploads(limits)
        self.reader = Reader(max(limits.max_values, 2 * max_model_tokens))

    # ---- answers --------------------------------------------------------------------------

    async def complete(self, request: Request, body: CompletionRequest) -> Response:
        """Answer `/v1/completions`: continue one or several prompts.

        Like the other routes' methods, raises `ApiError` for a request that cannot be served and
        `ClientGoneError` if the client disconnects.
        """
        self.check_model(body.model)
        num_prompts, most = len(body.prompts), self.limits.max_prompts
        if not 1 <= num_prompts <= most:
            raise invalid(f"{num_prompts} prompts; from 1 to {most} are served", "prompt")
        # OpenAI's default is 16 here; for a chat it is as many as fit.
        most_tokens = 16 if body.max_tokens is None else body.max_tokens
        form = CompletionForm(self._tokens)
        return await self._answer(request, body, form, body.prompts, most_tokens, body.logprobs)

    async def chat(self, request: Request, body: ChatRequest) -> Response:
        """Answer `/v1/chat/completions`."""
        self.check_model(body.model)
        form = ChatForm(self._tokens)
        prompts = [body.prompt]
        return await self._answer(request, body, form, prompts, body.most_tokens, body.num_logprobs)

    async def tokenize(self, request: Request, body: TokenizeRequest) -> Response:
        """Answer `/tokenize` with the tokens of a prompt."""
        if body.model is not None:
            self.check_model(body.model)
        prompt = body.what
        self._prompts.check(prompt)

        async def tokens() -> Sequence[int]:
            async with self._tokenizing.entered():
                return await self._prompts.tokens(prompt)

        found = await until_disconnect(request.receive, tokens())
        strings = self._prompts.strings(found) if body.return_token_strs else None
        return JSONResponse(
            {
                "count": len(found),
                "max_model_len": self._max_model_tokens,
                "tokens": found,
                "token_strs": strings,
            }
        )

    async def _answer(
        self,
        request: Request,
        body: Sampling,
        form: Form,
        prompts: Sequence[Prompt],
        most_tokens: int | None,
        logprobs: int | None,
    ) -> Response:
        """Run every check that needs no tokenisation, then build the response."""
        num_samples = len(prompts) * body.num_samples
        if num_samples > self.limits.max_samples:
            raise invalid(
                f"{len(prompts)} prompts of {shown(body.num_samples)} samples; at most "
                f"{self.limits.max_samples} samples are computed at once",
                "n",
            )
        params = self._params(body, most_tokens, logprobs)
        self._check_logprobs(num_samples, params)
        for prompt in prompts:
            self._prompts.check(prompt)
            if isinstance(prompt, Sequence):
                self._check_length(len(prompt), params)
        answer = Answer(
            engine=self._engine,
            gate=self.gate,
            form=form,
            tokens=self._tokens,
            encoder=self._prompts,
            model=self._model_name,
            prompts=prompts,
            check_length=lambda num_tokens: self._check_length(num_tokens, params),
            encoded=request.state.upload.release,
            params=params,
            priority=body.priority,
            tenant=tenant_of(request.state.api_key, body.cache_salt),
            wants_usage=body.wants_usage,
            wants_running_usage=body.wants_running_usage,
        )
        if body.stream:
            return EventStream(answer.events(), self.limits.send_timeout_s)
        parts = await until_disconnect(request.receive, answer.whole())
        return WholeBody(parts, self.limits.send_timeout_s)

    def _params(
        self, body: Sampling, most_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        try:
            return body.sampling_params(most_tokens, logprobs, self.limits)
        except ConfigError as error:
            # Messages of ConfigError begin with `name=value`.
            name = str(error).partition("=")[0]
            raise invalid(str(error), name if name in type(body).model_fields else None) from error

    def _check_logprobs(self, num_samples: int, params: SamplingParams) -> None:
        if params.logprobs is None:
            return
        most_tokens = self._max_model_tokens
        num_tokens = min(params.max_tokens or most_tokens, most_tokens)
        # A single sample is never refused for its length.
        of_one = most_tokens * (1 + self.limits.max_logprobs)
        most = max(self.limits.max_answer_logprobs, of_one)
        num_logprobs = num_samples * num_tokens * (1 + params.logprobs)
        if num_logprobs > most:
            raise invalid(
                f"{num_samples} samples of up to {num_tokens} tokens with {1 + params.logprobs} "
                f"log-probabilities each are {num_logprobs}; max_answer_logprobs={most} of this "
                "server: ask for fewer samples (n), tokens (max_tokens) or log-probabilities",
                "max_tokens",
            )

    def _check_length(self, num_tokens: int, params: SamplingParams) -> None:
        if not num_tokens:
            raise invalid("the prompt is empty: it has no tokens", "prompt")
        longest = self._max_model_tokens
        num_wanted = params.max_tokens or 1
        if num_tokens + num_wanted > longest:
            raise invalid(
                f"this model's context is {longest} tokens; the prompt has {num_tokens}, and "
                f"{num_wanted} were asked for: shorten the prompt or lower max_tokens",
                "prompt" if num_tokens >= longest else "max_tokens",
                "context_length_exceeded",
            )

    # ---- model and health -----------------------------------------------------------------

    def card(self) -> dict[str, Any]:
        """Return the model's entry in `/v1/models`."""
        return {
            "id": self._model_name,
            "object": "model",
            "created": self._started_s,
            "owned_by": "vmkv",
            "max_model_len": self._max_model_tokens,
        }

    def check_model(self, name: str) -> None:
        """Raise `ApiError` unless `name` is the served model."""
        if name != self._model_name:
            raise ApiError(
                404,
                f"the model {shown(name)} is not served here; {self._model_name!r} is",
                param="model",
                code="model_not_found",
            )

    def health(self) -> tuple[int, dict[str, Any]]:
        """Return the HTTP status and body of `/health`."""
        reason = self._engine.failure
        status = "ok" if reason is None else "failing"
        if self.is_draining:
            status, reason = "draining", reason or "the server is about to stop"
        body = {
            "status": status,
            "reason": reason,
            "requests_inside": self.gate.num_inside,
            "requests_waiting": self.gate.num_waiting,
        }
        return 200 if status == "ok" else 503, body

    # ---- shutdown -------------------------------------------------------------------------

    async def cut(self) -> None:
        """Cancel every request: whole answers end with an error, streams with an error event."""
        self.is_draining = True
        self.gate.close()
        self._tokenizing.close()
        await self._engine.shutdown(drain=False)

    def close(self) -> None:
        """Stop the tokenizer and parser threads."""
        self.is_draining = True
        self.reader.close()
        self._prompts.close()
