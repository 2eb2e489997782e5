"""Rules for sources: words, sizes, citations, exception handlers, output.

Rules of ruff are not repeated, except for columns: here they count characters, also in comments and
in C.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = sorted((ROOT / "vmkv").rglob("*.py"))
DESIGNS = [ROOT / "DESIGN.md", *sorted((ROOT / "vmkv").rglob("DESIGN.md"))]
SOURCES = sorted(
    path for ending in ("py", "pyi", "c", "h") for path in (ROOT / "vmkv").rglob(f"*.{ending}")
)
FILE_LINES_MAX = 700
FUNCTION_LINES_MAX = 80
COLUMNS_MAX = 100
# Ambiguous or empty words, and what to use instead.
FORBIDDEN = {
    r"page_size(?!_bytes)": "page_bytes or page_tokens: units are in names",
    r"cache_size": "max_tokens or budget_bytes",
    r"blazing|lightning[- ]fast|seamless|state[- ]of[- ]the[- ]art": "a number",
    r"FIXME|XXX|HACK": "TODO(name) and a reason",
    r"TODO(?!\()": "TODO(name) and a reason",
    r"copy[- ]pasted?": "one place",
}
_NOTE = re.compile(r"\bNote \[([^\]\n]+)\]")


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _flat(text: str) -> str:
    """Join the lines of comments and docstrings, since a citation may be wrapped."""
    return re.sub(r"\s*\n\s*(?:#:?|\*|//)?\s*", " ", text)


def _in_text(text: str) -> Iterator[str]:
    """Yield what is wrong with the lines of a source file in any language."""
    lines = text.splitlines()
    for at, line in enumerate(lines, 1):
        if len(line) > COLUMNS_MAX:
            yield f"{at}: more than {COLUMNS_MAX} columns"
        for pattern, instead in FORBIDDEN.items():
            for match in re.finditer(pattern, line):
                yield f"{at}: {match.group(0)}; say {instead}"
    if len(lines) > FILE_LINES_MAX:
        yield f"{len(lines)} lines: a second idea wants a file of its own"


def _in_code(text: str) -> Iterator[str]:
    """Yield what is wrong with the functions, calls and handlers of a Python file."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if (node.end_lineno or 0) - node.lineno >= FUNCTION_LINES_MAX:
                yield f"{node.lineno}: {node.name} is longer than a screen"
            # A destructor runs at any time on any thread, so it may only warn.
            called = {
                ast.unparse(each.func) for each in ast.walk(node) if isinstance(each, ast.Call)
            }
            if node.name == "__del__" and not called <= {"getattr", "warnings.warn"}:
                yield f"{node.lineno}: __del__ calls {sorted(called)}"
        elif isinstance(node, ast.ImportFrom):
            for each in node.names:
                # A class under another name is a second word for one thing; a module may be.
                is_class = node.module and (node.level or node.module == "collections.abc")
                if is_class and each.asname not in (None, each.name, f"_{each.name}"):
                    yield f"{node.lineno}: {each.name} has a second name, {each.asname}"
        elif isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "ClassVar":
            yield f"{node.lineno}: a ClassVar without a type, which pydantic refuses on Python 3.10"
        elif isinstance(node, ast.ExceptHandler):
            name = node.type.id if isinstance(node.type, ast.Name) else None
            raises = any(isinstance(each, ast.Raise) for each in ast.walk(node))
            has_reason = re.search(r"noqa: BLE001\s+# \w", lines[node.lineno - 1])
            is_broad = name in ("Exception", "BaseException") and not raises and not has_reason
            if node.type is None or is_broad:
                yield f"{node.lineno}: catches everything, and neither raises nor says why"


def _talk(text: str) -> Iterator[str]:
    """Yield calls that print, exit or start a debugger."""
    for node in ast.walk(ast.parse(text)):
        name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if name in ("print", "exit", "quit", "breakpoint"):
            yield f"{node.lineno}: {name}"


def test_sources_are_tidy() -> None:
    found = [(_name(path), each) for path in SOURCES for each in _in_text(path.read_text())]
    found += [(_name(path), each) for path in PYTHON for each in _in_code(path.read_text())]
    assert [] == found


def test_library_does_not_print_or_exit() -> None:
    """Only `__main__.py` files do."""
    modules = [path for path in PYTHON if path.name != "__main__.py"]
    assert [] == [(_name(path), each) for path in modules for each in _talk(path.read_text())]


@pytest.mark.parametrize(
    ("check", "source"),
    [
        (_in_text, "x = 1  # " + "-" * COLUMNS_MAX),
        (_in_text, "page_size = 1"),
        (_in_text, "# TODO: later"),
        (_in_text, "x = 1\n" * (FILE_LINES_MAX + 1)),
        (_in_code, "def f():\n" + "    x = 1\n" * FUNCTION_LINES_MAX),
        (_in_code, "class C:\n    def __del__(self): self.close()"),
        (_in_code, "class C:\n    x: ClassVar = 1"),
        (_in_code, "from .sequence import Sequence as Row"),
        (_in_code, "from collections.abc import Sequence as Rows"),
        (_in_code, "try: f()\nexcept: pass"),
        (_in_code, "try: f()\nexcept Exception: pass"),
        (_in_code, "try: f()\nexcept BaseException:  # noqa: BLE001\n    pass"),
        (_talk, "def f(): print(1)"),
    ],
)
def test_untidy_sources_are_found(check: Callable[[str], Iterator[str]], source: str) -> None:
    """The checks above can fail."""
    assert 1 == len(list(check(source)))


@pytest.mark.parametrize(
    "source",
    [
        "try: f()\nexcept BaseException:\n    raise",
        "try: f()\nexcept Exception:  # noqa: BLE001  # Reported by the caller.\n    pass",
        "class C:\n    def __del__(self): warnings.warn('open')",
        "# TODO(name): a reason",
        "from . import arguments as types\nfrom .pool import Pool as Pool",
    ],
)
def test_tidy_sources_pass(source: str) -> None:
    """For example handlers that raise or have a reason."""
    assert [] == [*_in_text(source), *_in_code(source), *_talk(source)]


def test_notes_that_are_cited_exist() -> None:
    """`Note [Title]` in code refers to a note in a DESIGN.md."""
    cited = {
        (title, _name(path)) for path in SOURCES for title in _NOTE.findall(_flat(path.read_text()))
    }
    assert cited, "no note is cited: delete this test"
    written = {title for path in DESIGNS for title in _NOTE.findall(path.read_text())}
    assert [] == sorted(f"{title} ({file})" for title, file in cited if title not in written)


def test_versions_of_transformers_are_compared_in_one_file() -> None:
    pattern = re.compile(r"transformers\.__version__|version\([\"']transformers[\"']\)")
    asking = [_name(path) for path in PYTHON if pattern.search(path.read_text())]
    assert set(asking) <= {"vmkv/hf/compat.py", "vmkv/releases.py"}


def test_notes_are_cited() -> None:
    text = "".join(path.read_text() for path in DESIGNS)
    written = re.findall(r"^### Note \[(.*)\]$", text, re.MULTILINE)
    cited = {title for path in SOURCES for title in _NOTE.findall(_flat(path.read_text()))}
    assert len(written) > 10
    assert [] == [title for title in written if title not in cited]
