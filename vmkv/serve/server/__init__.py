"""The OpenAI API over an engine: FastAPI for the routes, uvicorn for the connections.

`app.py` the routes; `schema.py` what is asked; `prompts.py` text to tokens; `choices.py` what is
answered; `streaming.py` server-sent events and clients that leave; `limits.py`, `guard.py` what is
refused; `run.py` the process: sockets, signals, draining. Needs the extra `vmkv[serve]`.
"""

from .app import ServerOptions as ServerOptions
from .app import create_app as create_app
from .limits import Limits as Limits
from .run import run_server as run_server
