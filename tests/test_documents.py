"""References in documents are right: files, links, commands, the tour, state of the process."""

from __future__ import annotations

import argparse
import ast
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from vmkv.cli.main import make_parser

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "vmkv").rglob("*.py"))
GUIDES = [ROOT / "README.md", *sorted((ROOT / "vmkv").rglob("README.md"))]
DOCUMENTS = [
    *(ROOT / f"{name}.md" for name in ("DESIGN", "CONTRIBUTING", "CHANGELOG")),
    *sorted((ROOT / "vmkv").rglob("DESIGN.md")),
    *GUIDES,
]
#: Most words of the two documents that everybody reads.
WORDS_MAX = {"README.md": 1600, "DESIGN.md": 4500}
DESIGN = (ROOT / "DESIGN.md").read_text()
_FILE = re.compile(r"`([\w/]+\.(?:py|c|md))`")
_LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")


def test_files_of_the_tour_exist() -> None:
    """Each file is named once."""
    named = _FILE.findall(DESIGN.partition("\n## A tour\n")[2].partition("\n## ")[0])
    assert len(named) > 20
    assert [] == [name for name in named if not (ROOT / "vmkv" / name).is_file()]
    assert [] == sorted({name for name in named if named.count(name) > 1})


@pytest.mark.parametrize("name", WORDS_MAX)
def test_documents_are_short(name: str) -> None:
    assert len((ROOT / name).read_text().split()) <= WORDS_MAX[name]


def test_named_files_exist() -> None:
    """A file is named by its path from the root, from vmkv, or from a package."""
    packages = [each.parent for each in (ROOT / "vmkv").rglob("__init__.py")]
    folders = [ROOT, ROOT / "vmkv", ROOT / "bench", *packages]
    named = {
        (str(path.relative_to(ROOT)), name)
        for path in (*DOCUMENTS, *FILES)
        for name in _FILE.findall(path.read_text())
    }
    found = {name for _, name in named if any((each / name).is_file() for each in folders)}
    assert [] == sorted(each for each in named if each[1] not in found)


def _anchors(text: str) -> set[str]:
    """The anchors of headings in links."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w-]", "", each.lower().replace(" ", "-")) for each in headings}


PAGES = [ROOT / "bench/README.md", *sorted((ROOT / "bench/results").glob("*.md"))]


def test_links_have_targets() -> None:
    """The file exists, and so does the heading."""
    broken = []
    for path in (*DOCUMENTS, *PAGES):
        for name, anchor in _LINK.findall(path.read_text()):
            target = path.parent / name if name else path
            if name.startswith("http"):
                continue
            if not target.exists() or (anchor and anchor not in _anchors(target.read_text())):
                broken.append(f"{path.name}: {name}#{anchor}")
    assert [] == broken


def test_commands_and_options_in_documents_exist() -> None:
    """Commands in the README, options in the README and in the changelog."""
    (commands,) = (
        each for each in make_parser()._actions if isinstance(each, argparse._SubParsersAction)
    )
    options = {
        option
        for parser in commands.choices.values()
        for action in parser._actions
        for option in action.option_strings
    }
    written = "".join(path.read_text() for path in (*GUIDES, ROOT / "CHANGELOG.md"))
    of_pip = {"--no-build-isolation"}
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", written)) <= options | of_pip
    shown = re.findall(r"^    (?:\S*/)?vmkv (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert {"serve", "plan", "doctor"} <= set(shown) <= set(commands.choices)


def test_the_source_distribution_has_its_tests(tmp_path: Path) -> None:
    """And what these read: helpers, documents, examples, benches and their records."""
    pytest.importorskip("setuptools")
    left_out = shutil.ignore_patterns(
        ".*", "*.so", "*.egg-info", "build", "dist", "out", "__pycache__"
    )
    tree = shutil.copytree(ROOT, tmp_path / "tree", ignore=left_out)
    script = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", script], cwd=tree, check=True, capture_output=True)
    (packed,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(packed) as archive:
        names = {each.partition("/")[2] for each in archive.getnames()}
    wanted = {path.name for path in (*DOCUMENTS, ROOT / "Makefile")}
    for folder in ("bench", "examples", "tests", "vmkv"):
        files = [path for path in (tree / folder).rglob("*") if path.is_file()]
        wanted |= {str(path.relative_to(tree)) for path in files}
    assert set() == wanted - names


def test_hints_install_without_a_checkout() -> None:
    """In the code an extra is one of the installed package: who has a wheel has no `.[serve]`."""
    hint = re.compile(r"""['"`]\.\[[a-z]""")
    assert [] == [str(path) for path in FILES if hint.search(path.read_text())]


def test_modules_with_process_state_are_listed() -> None:
    """DESIGN.md lists every module whose functions change a variable of the module."""
    note = DESIGN.partition("### Note [State of the process]")[2].partition("\n##")[0]
    assert set(_FILE.findall(note)) == {
        str(path.relative_to(ROOT / "vmkv")) for path in FILES if _changed(path.read_text())
    }


@pytest.mark.parametrize(
    "source",
    [
        "x = {}\ndef f(): x[1] = 2",
        "x: list[int] = []\ndef f(): x.append(1)",
        "x = set()\ndef f(): x.discard(1)",
        "x = None\ndef f():\n    global x\n    x = 1",
        "x = {1: 2}\ndef f(): del x[1]",
        "x = itertools.count()\ndef f(): return next(x)",
        "class C: ...\ndef f(): C.seen = 1",
    ],
)
def test_process_state_is_found(source: str) -> None:
    """The check above can fail, for every form of change."""
    assert _changed(source)


def test_constants_are_no_process_state() -> None:
    """Variables that change only while the module is loaded, or not at all."""
    assert not _changed("x = {}\nx[1] = 2\ny = [3]\ndef f(): return x.get(1), y[0]")
    assert not _changed("x = {}\ndef f(x): x.append(1)")


_CHANGES = {
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem"),
    *("popleft", "remove", "setdefault", "update"),
}


def _changed(source: str) -> set[str]:
    """Names assigned or defined in a module that its functions change."""
    tree = ast.parse(source)
    own = {
        name.id
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        for name in ast.walk(target)
        if isinstance(name, ast.Name)
    } | {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    functions = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return {
        name
        for function in functions
        for name in _names_changed_in(function)
        if name in own and name not in _local_names(function)
    }


def _local_names(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    declared = {
        name for node in ast.walk(function) if isinstance(node, ast.Global) for name in node.names
    }
    bound = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)} | {
        node.id
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    return bound - declared


def _names_changed_in(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    for node in ast.walk(function):
        held: ast.expr | None = None
        if isinstance(node, ast.Global):
            yield from node.names
        elif isinstance(node, ast.Subscript | ast.Attribute) and not isinstance(node.ctx, ast.Load):
            held = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            held = node.func.value if node.func.attr in _CHANGES else None
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            held = node.args[0] if node.func.id == "next" and node.args else None
        if isinstance(held, ast.Name):
            yield held.id
