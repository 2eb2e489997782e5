"""The OpenAI API over an engine: FastAPI for the routes, uvicorn for the connections.

A request passes, in order: `run.py` (connections and heads), `guard.py` (API key, size and time of
the body), `schema.py` (parsing and validation), `service.py` (admission, the engine's outputs,
JSON and server-sent events), with `prompts.py` (tokenisation) and `choices.py` (formats). Errors
are made in `errors.py`. `app.py` has the routes. Needs the extra `vmkv[serve]`.
"""

from .app import create_app as create_app
from .guard import Limits as Limits
from .run import run_server as run_server
from .service import ServerOptions as ServerOptions
