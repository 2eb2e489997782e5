"""One word for one thing: names in the code are those of DESIGN.md.

DESIGN.md's list of words says for each what not to say. What stands there in code type was said
once, or is said elsewhere, and no name that vmkv defines may hold it; the rest of that column means
other things in other places, and is for readers. Docstrings and comments are English, and free.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "vmkv").rglob("*.py"))
DESIGN = (ROOT / "DESIGN.md").read_text()
#: Where a word is a name all the same: the thing itself, or an interface that is not ours.
HOMES = {
    "slot": ("vmkv/serve/", "vmkv/step/"),
    "adopt": ("vmkv/cache/",),
    "offload": ("vmkv/hf/layers.py",),
    "clone": ("vmkv/step/compiled_layers.py",),
    "salt": ("vmkv/serve/server/keys.py", "vmkv/serve/server/schema.py"),  # `cache_salt` is vLLM's.
}
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")


def _retired() -> set[str]:
    """The words in code type in the last column of the list, and in the sentence below it."""
    words = DESIGN.partition("\n## Words\n")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in words.splitlines() if line.startswith("|")]
    below = words.partition("is no name either: ")[2].partition(".\n")[0]
    return set(re.findall(r"`(\w+)`", " ".join([below, *(avoid for *_, avoid, _ in rows)])))


RETIRED = _retired()


def _defined(source: str) -> Iterator[tuple[str, int]]:
    """Names that a file gives: to functions, classes, arguments, variables and attributes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def _offences(source: str, file: str, retired: set[str]) -> list[str]:
    """List the names in a file that hold a retired word, in the singular or the plural."""
    forbidden = [word for word in retired if not file.startswith(HOMES.get(word, "\0"))]
    if not forbidden:
        return []
    pattern = re.compile(rf"_(?:{'|'.join(forbidden)})s?_")
    return [
        f"{name} ({file}:{line})"
        for name, line in _defined(source)
        if not name.startswith("__")
        and pattern.search(f"_{'_'.join(_WORD.findall(name))}_".lower())
    ]


def test_names_are_of_the_list() -> None:
    """Words that DESIGN.md retires are no names in the code, nor parts of names."""
    files = [(path.read_text(), str(path.relative_to(ROOT))) for path in FILES]
    assert [] == [each for text, file in files for each in _offences(text, file, RETIRED)]


# The tests of the check need no word of DESIGN.md's list, which may shrink.
EXAMPLES = {"let_go", "lets_go", "said", "job", "going_on", "slot", "hand", "door", "adopt"}


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
        "class _Store:\n    def adopt(self): ...",
    ],
)
def test_retired_words_are_found(source: str) -> None:
    """The check above can fail, on every way to give a name."""
    assert len(_offences(source, "vmkv/hf/new.py", EXAMPLES)) == 1


@pytest.mark.parametrize(
    ("source", "file"),
    [
        ("x = handle.jobs + unlet_golf + handler", "vmkv/hf/new.py"),
        ("def handle(doorway, outdoors): ...", "vmkv/hf/new.py"),
        ('"""What is said of a job at the door is let go."""  # By hand.', "vmkv/hf/new.py"),
        ("slot = tensor.said(job=1)", "vmkv/serve/new.py"),
    ],
)
def test_other_words_are_free(source: str, file: str) -> None:
    """English, longer words, what libraries call theirs, and a word where it is at home."""
    assert [] == _offences(source, file, EXAMPLES)


def test_the_list_is_read() -> None:
    """Words in code type in the last column of DESIGN.md's list are retired."""
    assert RETIRED
    assert all(re.fullmatch(r"\w+", word) for word in RETIRED)
