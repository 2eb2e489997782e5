"""Taste, made mechanical: words, sizes, citations, habits that hide failures.

What ruff checks already (line length but for long strings, imports, docstrings) is not repeated,
except columns, which count characters here and include comments and C.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = sorted((ROOT / "vmkv").rglob("*.py"))
SOURCES = sorted(
    path for ending in ("py", "pyi", "c", "h") for path in (ROOT / "vmkv").rglob(f"*.{ending}")
)
FILE_LINES_MAX = 700
FUNCTION_LINES_MAX = 80
COLUMNS_MAX = 100
# Words that mean two things, or nothing, and what to say instead.
FORBIDDEN = {
    r"page_size": "page_bytes or page_tokens: units are in names",
    r"cache_size": "max_tokens or budget_bytes",
    r"blazing|lightning[- ]fast|seamless|state[- ]of[- ]the[- ]art": "a number",
    r"FIXME|XXX|HACK": "TODO(name) and a reason",
    r"TODO(?!\()": "TODO(name) and a reason",
    r"copy[- ]pasted?": "one place",
}
_NOTE = re.compile(r"\bNote \[([^\]\n]+)\]")


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _flat(text: str) -> str:
    """Text whose comments and docstrings are one line, so that a citation may be wrapped."""
    return re.sub(r"\s*\n\s*(?:#:?|\*|//)?\s*", " ", text)


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_words_are_the_projects(path: Path) -> None:
    """One word for one thing."""
    text = path.read_text()
    found = {
        match.group(0): instead
        for pattern, instead in FORBIDDEN.items()
        for match in re.finditer(pattern, text)
    }
    assert {} == found


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_lines_fit_the_column(path: Path) -> None:
    """100 characters."""
    lines = path.read_text().splitlines()
    assert [] == [at for at, line in enumerate(lines, 1) if len(line) > COLUMNS_MAX]


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_files_are_one_idea_long(path: Path) -> None:
    """A longer file hides a second idea: name it and give it a file."""
    assert len(path.read_text().splitlines()) <= FILE_LINES_MAX


@pytest.mark.parametrize("path", PYTHON, ids=_name)
def test_functions_fit_on_a_screen(path: Path) -> None:
    """80 lines, docstring included."""
    long = {
        node.name: node.end_lineno - node.lineno + 1
        for node in _functions(path)
        if node.end_lineno is not None and node.end_lineno - node.lineno >= FUNCTION_LINES_MAX
    }
    assert {} == long


@pytest.mark.parametrize("path", PYTHON, ids=_name)
def test_library_does_not_print_or_exit(path: Path) -> None:
    """Only `python -m` modules talk to a terminal."""
    if path.name == "__main__.py":
        pytest.skip("a command may print")
    calls = [
        node.func.id
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    assert [] == [name for name in calls if name in ("print", "exit", "quit", "breakpoint")]


@pytest.mark.parametrize("path", PYTHON, ids=_name)
def test_exceptions_are_not_swallowed(path: Path) -> None:
    """No bare `except`; who catches everything raises again, or gives a reason beside it."""
    offences = []
    lines = path.read_text().splitlines()
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ExceptHandler):
            continue
        name = node.type.id if isinstance(node.type, ast.Name) else None
        raises = any(isinstance(each, ast.Raise) for each in ast.walk(node))
        has_reason = re.search(r"noqa: BLE001\s+# \w", lines[node.lineno - 1])
        is_broad = name in ("Exception", "BaseException") and not raises and not has_reason
        if node.type is None or is_broad:
            offences.append(node.lineno)
    assert [] == offences


@pytest.mark.parametrize("path", PYTHON, ids=_name)
def test_destructors_do_not_touch_the_device(path: Path) -> None:
    """A destructor runs at any moment, on any thread: it warns and does nothing else."""
    for node in _functions(path):
        if node.name == "__del__":
            called = {
                ast.unparse(each.func) for each in ast.walk(node) if isinstance(each, ast.Call)
            }
            assert called <= {"getattr", "warnings.warn"}


def test_notes_that_are_cited_exist() -> None:
    """`Note [Title]` in code is a line of DESIGN.md."""
    cited = {
        (title, _name(path)) for path in SOURCES for title in _NOTE.findall(_flat(path.read_text()))
    }
    assert cited, "nobody cites a note any more: delete this test"
    design = ROOT / "DESIGN.md"
    assert design.exists(), f"DESIGN.md is to hold the notes {sorted(title for title, _ in cited)}"
    written = set(_NOTE.findall(design.read_text()))
    assert [] == sorted(f"{title} ({file})" for title, file in cited if title not in written)


def test_versions_of_transformers_are_asked_in_one_file() -> None:
    """Every `if transformers version` lives in hf/compat.py."""
    pattern = re.compile(r"transformers\.__version__|version\([\"']transformers[\"']\)")
    asking = [_name(path) for path in PYTHON if pattern.search(path.read_text())]
    assert set(asking) <= {"vmkv/hf/compat.py", "vmkv/__main__.py"}
