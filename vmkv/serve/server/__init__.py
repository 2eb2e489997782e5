"""The APIs of OpenAI and Anthropic over an engine: FastAPI for routes, uvicorn for connections.

A request passes, in order: `run.py` (connections and heads), `guard.py` (API key, size and time of
the body), `schema.py` (parsing and validation), `service.py` (admission, the engine's outputs,
JSON and server-sent events), with `prompts.py` (tokenisation) and `choices.py` (formats). Requests
of `responses.py` and `messages.py` become chats and return as items (`items.py`). Errors are made
in `errors.py`. `app.py` has the routes. Needs the extra `vmkv[serve]`.
"""

from ..options import Limits as Limits
from ..options import ServerOptions as ServerOptions
from .app import create_app as create_app
from .app import create_app_for as create_app_for
from .run import run_server as run_server
from .service import Service as Service
