"""Results of compiling and timing, kept on disk from one start to the next.

The folder is `VMKV_CACHE_DIR`, or `vmkv` in `XDG_CACHE_HOME`, or `~/.cache/vmkv`. A file is named
by the digest of everything that its contents depend on, and begins with the digest of its contents.
So a damaged file is not used, and is written again. Files are replaced in one step; servers that
start together write the same. If the folder cannot be written, each start compiles again.

Contents are trusted like the code of vmkv: the folder is readable and writable by its owner only,
and one that another user may write is not used.
See Note [Kept results cannot change an answer].
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

_LOG = logging.getLogger(__name__)
_DIGEST_BYTES = 32
#: Distributions whose release decides what is compiled, and how fast it is.
_DISTRIBUTIONS = ("torch", "triton", "transformers", "cuda-bindings", "flash-attn", "flash-attn-3")


def folder() -> Path:
    """Return the folder of kept results; it need not exist.

    Raises `PermissionError` if another user, but for root, owns it or a link to it, or may write
    it: what is in it is run.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = Path(os.environ.get("VMKV_CACHE_DIR") or cache / "vmkv")
    with contextlib.suppress(FileNotFoundError):
        its = path.lstat(), path.stat()
        if not {0, os.geteuid()}.issuperset(each.st_uid for each in its) or its[1].st_mode & 0o022:
            _warn(path)
            raise PermissionError(f"others may write {path}")
    return path


@functools.cache
def _warn(path: Path) -> None:
    _LOG.warning(
        "others may write %s: nothing is kept there, so each start compiles again; run chmod 700, "
        "or name another folder in VMKV_CACHE_DIR",
        path,
    )


@functools.cache
def versions() -> tuple[str, ...]:
    """Return releases of what compiles and computes, and a digest of vmkv's sources."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    found = [digest.hexdigest()]
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append(f"{name} {metadata.version(name)}")
    return tuple(found)


def name_of(kind: str, *key: object) -> str:
    """Return the name of a result of `kind` under `key`, which has a stable `repr`."""
    return f"{kind}-{hashlib.sha256(repr((kind, versions(), key)).encode()).hexdigest()[:32]}"


def read(name: str) -> bytes | None:
    """Return the contents kept under `name_of(...)`; None without a file, or for a damaged one.

    Cost: a tenth of a millisecond for small ones.
    """
    try:
        data = (folder() / name).read_bytes()
    except OSError:
        return None
    contents = data[_DIGEST_BYTES:]
    return contents if hashlib.sha256(contents).digest() == data[:_DIGEST_BYTES] else None


def write(name: str, contents: bytes) -> None:
    """Keep `contents` under a name. An error of the file system is logged, and not raised."""
    try:
        folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder(), delete=False) as file:
            try:
                file.write(hashlib.sha256(contents).digest() + contents)
                file.flush()
                os.replace(file.name, folder() / name)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        _LOG.info("%s cannot be kept for the next start: %s", name, error)


# ---- folders of other libraries ------------------------------------------------------------------

_COMPILER_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def choose_compiler_folder() -> None:
    """Have torch's compiler keep its files here, unless the user has chosen a folder."""
    with contextlib.suppress(OSError):
        path = folder() / f"compiled-{metadata.version('torch')}"
        os.environ.setdefault(_COMPILER_VARIABLE, str(path))


def choose_bytecode_folder() -> None:
    """Have Python keep bytecode here if that of torch is not beside its sources.

    Packages may be installed without bytecode in folders that are not writable. Compiling thousands
    of modules then takes longer than the rest of their imports. Python compares each file with its
    source. Call it before torch is imported.
    """
    spec = importlib.util.find_spec("torch")
    source = None if spec is None else spec.origin
    if source is None or Path(importlib.util.cache_from_source(source)).exists():
        return
    # Sources of unpacked images may all have the same time, so that releases are compared too.
    releases = sorted(each.name for each in Path(source).parents[1].glob("*.dist-info"))
    name = f"bytecode-{hashlib.sha256(repr(releases).encode()).hexdigest()[:32]}"
    with contextlib.suppress(OSError):
        folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        sys.pycache_prefix, sys.dont_write_bytecode = str(folder() / name), False


@contextlib.contextmanager
def compiler_folder() -> Iterator[None]:
    """Context for compiling: the chosen folder is checked before, and noted after it."""
    choose_compiler_folder()
    path, noting = Path(os.environ.get(_COMPILER_VARIABLE, "")), contextlib.ExitStack()
    with noting:
        with contextlib.suppress(OSError):
            if path.parent == folder():
                noting.enter_context(kept_folder(path.name))
        yield


@contextlib.contextmanager
def kept_folder(name: str) -> Iterator[Path]:
    """Context with a library's folder, which is removed first if noted files have changed."""
    path = folder() / name
    if any(_digest(path / each) != digest for each, digest in _noted(name).items()):
        _LOG.warning("files in %s have changed since they were written; they are removed", path)
        shutil.rmtree(path, ignore_errors=True)
    yield path
    files = [each for each in sorted(path.rglob("*")) if each.is_file()]
    found = {str(each.relative_to(path)): _digest(each) for each in files}
    if found and found != _noted(name):
        write(f"{name}.files", json.dumps(found).encode())


def _noted(name: str) -> dict[str, str]:
    noted: dict[str, str] = json.loads(read(f"{name}.files") or b"{}")
    return noted


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""
