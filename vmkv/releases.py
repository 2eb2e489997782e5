"""The last releases of other libraries that the tests have passed with."""

from __future__ import annotations

from importlib import metadata

#: Lines of releases by distribution; pyproject.toml installs none after them.
LAST_TESTED = {"transformers": (5, 24)}


def newer_than_tested(distribution: str) -> str | None:
    """Say that the installed release is newer than the last one tested; None if it is not."""
    tested = LAST_TESTED.get(distribution)
    if tested is None:
        return None
    version = metadata.version(distribution)
    if tuple(map(int, version.split(".")[:2])) <= tested:
        return None
    last = ".".join(map(str, tested))
    return (
        f"{distribution} {version} is newer than {last}, the last release that this vmkv is tested "
        f"with: if something fails, pip install '{distribution}=={last}.*'"
    )
