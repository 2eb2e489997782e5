"""Results that are kept on disk: found again, never believed when damaged, and never in the way."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from vmkv import compile_cache


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VMKV_CACHE_DIR", str(tmp_path / "kept"))
    return tmp_path / "kept"


def test_contents_are_found_under_their_key(folder: Path) -> None:
    name = compile_cache.name_of("kernel", "source", ("sm_90",))
    assert compile_cache.read(name) is None
    compile_cache.write(name, b"binary")
    assert compile_cache.read(name) == b"binary"
    compile_cache.write(name, b"")
    assert compile_cache.read(name) == b""
    assert [each.name for each in folder.iterdir()] == [name]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_names_depend_on_the_key_the_kind_and_the_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = [("a", 1), ("b", 1), ("a", 2), ("a",)]
    names = [compile_cache.name_of(*key) for key in keys]
    monkeypatch.setattr(compile_cache, "versions", lambda: ("other",))
    names.append(compile_cache.name_of("a", 1))
    assert len(set(names)) == len(names)


def test_damaged_files_are_none_and_are_written_anew(folder: Path) -> None:
    """Cut, changed, empty, or of another kind."""
    name = compile_cache.name_of("sizes")
    compile_cache.write(name, b"[32, 64]")
    whole = (folder / name).read_bytes()
    for damaged in (whole[:-1], b"", whole[:10], whole[:-1] + b"}", b"x" + whole[1:], whole + b" "):
        (folder / name).write_bytes(damaged)
        assert compile_cache.read(name) is None
        compile_cache.write(name, b"[32, 64]")
        assert compile_cache.read(name) == b"[32, 64]"


def test_a_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("VMKV_CACHE_DIR", str(tmp_path / "file"))
    compile_cache.write("name", b"contents")
    assert compile_cache.read("name") is None
    with compile_cache.kept_folder("compiled") as path:
        assert not path.exists()


@pytest.mark.parametrize("how", ["writable", "owned", "linked"])
def test_a_folder_that_others_may_write_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Nothing is read from it, and neither a compiler nor Python is sent there."""
    if how != "writable" and os.geteuid():
        pytest.skip("only root can give files to another user")
    compile_cache.write("name", b"contents")
    if how == "writable":
        folder.chmod(0o770)
    elif how == "owned":
        os.chown(folder, 54321, -1)
    else:
        monkeypatch.setenv("VMKV_CACHE_DIR", str(folder.with_name("link")))
        folder.with_name("link").symlink_to(folder)
        assert b"contents" == compile_cache.read("name")
        os.chown(folder.with_name("link"), 54321, -1, follow_symlinks=False)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    compile_cache.write("other", b"contents")
    with compile_cache.compiler_folder():
        assert compile_cache.read("name") is None
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    assert ["name"] == [each.name for each in folder.iterdir()]
    before = sys.pycache_prefix
    monkeypatch.setattr("importlib.util.cache_from_source", lambda _: "/nowhere")
    compile_cache.choose_bytecode_folder()
    assert before == sys.pycache_prefix


def test_the_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("VMKV_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compile_cache.folder() == tmp_path / "vmkv"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert compile_cache.folder() == tmp_path / "home" / ".cache" / "vmkv"


@pytest.mark.parametrize("damage", ["nothing", "changed", "removed", "unnoted", "note"])
def test_a_folder_with_changed_files_is_removed(folder: Path, damage: str) -> None:
    """Files of a start that did not end are not noted, and left alone."""
    with compile_cache.kept_folder("compiled") as path:
        (path / "sub").mkdir(parents=True)
        (path / "sub" / "one.py").write_text("1")
        (path / "two.so").write_text("2")
    if damage == "changed":
        (path / "sub" / "one.py").write_text("3")
    elif damage == "removed":
        (path / "two.so").unlink()
    elif damage == "unnoted":
        (path / "three.py").write_text("3")
    elif damage == "note":
        (folder / "compiled.files").write_bytes(b"nonsense")
    with compile_cache.kept_folder("compiled") as again:
        assert again == path
        assert path.exists() == (damage not in ("changed", "removed"))


@pytest.mark.parametrize("has_bytecode", [False, True])
def test_bytecode_of_packages_without_it_is_kept(
    folder: Path, tmp_path: Path, has_bytecode: bool
) -> None:
    """Even where Python is told to write none, which is for the folders of packages."""
    package = tmp_path / "site" / "torch"
    package.mkdir(parents=True)
    (tmp_path / "site" / "torch-9.dist-info").mkdir()
    source = package / "__init__.py"
    source.write_text("number = 7")
    told = {"PYTHONPATH": f"{tmp_path / 'site'}:{Path(compile_cache.__file__).parents[1]}"}
    run = [sys.executable, "-c"]
    if has_bytecode:
        subprocess.run(
            [*run, "import torch"],
            env={**os.environ, **told, "PYTHONDONTWRITEBYTECODE": ""},
            check=True,
        )
    told["PYTHONDONTWRITEBYTECODE"] = "1"
    script = "from vmkv.compile_cache import choose_bytecode_folder as choose; choose(); "
    script += "import torch; print(torch.number)"
    for number in (7, 8):
        source.write_text(f"number = {number}")
        os.utime(source, (number, number))
        done = subprocess.run(
            [*run, script], env={**os.environ, **told}, check=True, capture_output=True, text=True
        )
        assert done.stdout == f"{number}\n"  # A changed source is read anew.
    found = [*folder.glob("bytecode-*/**/torch/__init__.*.pyc")]
    assert len(found) == (0 if has_bytecode else 1)
    if not has_bytecode:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
