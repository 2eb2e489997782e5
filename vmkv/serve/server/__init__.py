"""The OpenAI API over an engine: FastAPI for the routes, uvicorn for the connections.

A request passes, in order: `connections.py` (number and speed of connections), `guard.py` and
`keys.py` (authentication), `uploads.py` and `reading.py` (body size and parsing), `schema.py`
(parameters), `limits.py` (admission gate), `prompts.py` (tokenisation), `answer.py` and
`choices.py` (the engine's outputs as JSON), `streaming.py` (server-sent events, disconnects).
`app.py` has the routes, `service.py` their shared state, `run.py` sockets, signals and draining.
The server uses the engine through `protocol.py` only. Needs the extra `vmkv[serve]`.
"""

from .app import ServerOptions as ServerOptions
from .app import create_app as create_app
from .limits import Limits as Limits
from .run import run_server as run_server
