"""The OpenAI API over an engine: FastAPI for the routes, uvicorn for the connections.

What comes in passes, from the outside: `connections.py` how many, and how slow; `guard.py` and
`keys.py` who; `uploads.py` and `reading.py` how much; `schema.py` what is asked; `limits.py` the
gate. Only behind that is anything done for it: `prompts.py` text to tokens; `answer.py` and
`choices.py` the engine's answer; `streaming.py` server-sent events and clients that leave.
`app.py` the routes, `service.py` what they share, `run.py` the process: sockets, signals,
draining. Of the engine it knows `protocol.py` alone. Needs the extra `vmkv[serve]`.
"""

from .app import ServerOptions as ServerOptions
from .app import create_app as create_app
from .limits import Limits as Limits
from .run import run_server as run_server
