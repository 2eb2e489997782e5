"""An engine in a process of its own, asked from another's event loop.

Python runs one thread at a time, so a server in the engine's process takes from the engine what it
spends on its clients: some 50 µs for each token that it sends. `remote.py` is the side that asks,
`host.py` the engine's, `encoding.py` the bytes between them.
"""

from .remote import EngineProcess as EngineProcess
from .remote import RemoteEngine as RemoteEngine
