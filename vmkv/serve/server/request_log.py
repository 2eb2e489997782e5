"""Logs a line for each request that has ended, at info."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from starlette.types import Scope

if TYPE_CHECKING:
    from .service import Answer

_LOG = logging.getLogger(__name__)


def log_request(scope: Scope, route: str, status: int, began_s: float) -> None:
    """Log a request: its client, route, status, tokens, times and identifier.

    `began_s` is a `time.monotonic`; `scope["state"]` may have an `Answer`.
    """
    if not _LOG.isEnabledFor(logging.INFO):
        return
    host, port = scope.get("client") or ("-", 0)
    state, now_s = scope["state"], time.monotonic()
    text = f"{host}:{port} {scope['method']} {route} {status}"
    answer: Answer | None = state.get("answer")
    for form in answer.forms[-1:] if answer else ():
        usage = form.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        text += f" prompt={usage['prompt_tokens']} cached={cached}"
        text += f" output={usage['completion_tokens']}"
        if form.first_s is not None:
            text += f" first_token={form.first_s - began_s:.3f}s"
        text += f" finish={','.join(sorted(set(form.finish_reasons))) or '-'}"
    _LOG.info("%s took=%.3fs id=%s", text, now_s - began_s, state["request_id"])
