"""Names that were replaced do not come back in the code: one word for one thing.

DESIGN.md has the words in use. Docstrings and comments are not checked.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "vmkv").rglob("*.py"))
#: Words that may be in no name in the code, in the singular or the plural.
RETIRED = {
    *("arena", "door", "going_on", "hand", "iteration", "job", "let_go", "lets_go"),
    *("ptr", "remap", "said", "segment", "slot", "tier"),
}
#: Folders where a retired word is allowed.
HOMES = {"slot": ("vmkv/serve/", "vmkv/step/")}
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")


def _defined(source: str) -> Iterator[tuple[str, int]]:
    """Yield the names that a file defines: functions, classes, arguments, variables, attributes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def _offences(source: str, file: str) -> list[str]:
    """List the names in a file with a retired word."""
    forbidden = [word for word in RETIRED if not file.startswith(HOMES.get(word, "\0"))]
    pattern = re.compile(rf"_(?:{'|'.join(forbidden)})s?_")
    return [
        f"{name} ({file}:{line})"
        for name, line in _defined(source)
        if not name.startswith("__")
        and pattern.search(f"_{'_'.join(_WORD.findall(name))}_".lower())
    ]


def test_names_have_no_retired_words() -> None:
    files = [(path.read_text(), str(path.relative_to(ROOT))) for path in FILES]
    assert [] == [each for text, file in files for each in _offences(text, file)]


@pytest.mark.parametrize(
    "source",
    [
        "def let_go(self): ...",
        "said = 1",
        "class LoadJob: ...",
        "self.keeps_said = 1",
        "def f(going_on): ...",
        "num_slots: int = 3",
        "for hands in range(2): pass",
        "async def requests_at_the_door(): ...",
        "class _Store:\n    def remap(self): ...",
    ],
)
def test_retired_words_are_found(source: str) -> None:
    """The check above can fail, for every form of definition."""
    assert len(_offences(source, "vmkv/hf/new.py")) == 1


@pytest.mark.parametrize(
    ("source", "file"),
    [
        ("x = handle.jobs + unlet_golf + handler", "vmkv/hf/new.py"),
        ("def handle(doorway, outdoors): ...", "vmkv/hf/new.py"),
        ('"""What is said of a job at the door is let go."""  # By hand.', "vmkv/hf/new.py"),
        ("slot = tensor.said(job=1)", "vmkv/serve/new.py"),
    ],
)
def test_other_words_are_allowed(source: str, file: str) -> None:
    """In text, in longer words, in names of libraries, and in the folders of a word."""
    assert [] == _offences(source, file)
