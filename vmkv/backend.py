"""Public path of the backend contract, for authors of backends: the names of `core.backend`."""

from .core.backend import *  # noqa: F403
