"""The last release of transformers that the tests have passed with."""

from __future__ import annotations

from importlib import metadata

LAST_TESTED = (5, 24)  #: pyproject.toml installs none after it.


def newer_than_tested() -> str:
    """Say that the installed transformers is newer than the last one tested; "" if it is not."""
    version, last = metadata.version("transformers"), "{}.{}".format(*LAST_TESTED)
    if tuple(map(int, version.split(".")[:2])) <= LAST_TESTED:
        return ""
    newer = f"transformers {version} is newer than {last}, the last release tested with vmkv"
    return f"{newer}: if something fails, pip install 'transformers=={last}.*'"
