"""An engine in a process of its own, used from another process's event loop.

Python runs one thread at a time, so a server in the engine's process would slow the engine by some
50 µs for each token that it sends. `remote.py` is the client's side, `host.py` the engine's side
and the messages.
"""

from .remote import EngineProcess as EngineProcess
