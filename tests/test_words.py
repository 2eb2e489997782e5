"""One word for one thing: names in the code are those of DESIGN.md, and the tour there is true.

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
}
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
_FILE = re.compile(r"`([\w/]+\.(?:py|c|md))`")


def _section(title: str, text: str = DESIGN) -> str:
    """What stands in a chapter of DESIGN.md."""
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def _retired() -> set[str]:
    """The words in code type in the last column of the list, and in the sentence below it."""
    words = _section("Words")
    rows = [line.split("|") for line in words.splitlines() if line.startswith("|")]
    below = words.partition("is no name either: ")[2].partition(".\n")[0]
    return set(re.findall(r"`(\w+)`", " ".join([below, *(avoid for *_, avoid, _ in rows)])))


RETIRED = sorted(_retired())


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


def _offences(source: str, file: str) -> list[str]:
    """The names in it that hold a retired word, in the singular or the plural."""
    forbidden = [word for word in RETIRED if not file.startswith(HOMES.get(word, "\0"))]
    pattern = re.compile(rf"_(?:{'|'.join(forbidden)})s?_")
    return [
        f"{name} ({file}:{line})"
        for name, line in _defined(source)
        if not name.startswith("__")
        and pattern.search(f"_{'_'.join(_WORD.findall(name))}_".lower())
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_are_of_the_list(path: Path) -> None:
    """What DESIGN.md says not to say is no name, nor part of one."""
    assert [] == _offences(path.read_text(), str(path.relative_to(ROOT)))


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
def test_other_words_are_free(source: str, file: str) -> None:
    """English, longer words, what libraries call theirs, and a word where it is at home."""
    assert [] == _offences(source, file)


def test_exceptions_are_used() -> None:
    """A word that has moved out of its home needs none."""
    unused = [
        (word, home)
        for word, homes in HOMES.items()
        for home in homes
        if word not in RETIRED
        or not any(
            re.search(rf"(?i){word}", name)
            for path in FILES
            if str(path.relative_to(ROOT)).startswith(home)
            for name, _ in _defined(path.read_text())
        )
    ]
    assert [] == unused


def test_files_of_the_tour_are_there() -> None:
    """A newcomer finds every file that the tour leads to, and each is named once."""
    named = _FILE.findall(_section("A tour"))
    assert len(named) > 20
    assert [] == [name for name in named if not (ROOT / "vmkv" / name).is_file()]
    assert [] == sorted({name for name in named if named.count(name) > 1})


@pytest.mark.parametrize(
    "path",
    [*(ROOT / name for name in ("DESIGN.md", "CONTRIBUTING.md", "README.md")), *FILES],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_files_that_are_named_are_there(path: Path) -> None:
    """By their path from the root or from vmkv, or by their name in some package."""
    packages = [each.parent for each in (ROOT / "vmkv").rglob("__init__.py")]
    folders = [ROOT, ROOT / "vmkv", ROOT / "bench", *packages]
    named = set(_FILE.findall(path.read_text()))
    assert [] == [name for name in named if not any((each / name).is_file() for each in folders)]


def test_state_of_the_process_is_listed() -> None:
    """What a module changes of its own, DESIGN.md knows; everything else belongs to an object."""
    note = DESIGN.partition("### Note [State of the process]")[2].partition("\n### ")[0]
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
def test_state_of_the_process_is_found(source: str) -> None:
    """The check above can fail, on the ways to change what a module holds."""
    assert _changed(source)


def test_constants_are_no_state() -> None:
    """What is only read, or filled while the module is loaded, is no state."""
    assert not _changed("x = {}\nx[1] = 2\ny = [3]\ndef f(): return x.get(1), y[0]")
    assert not _changed("x = {}\ndef f(x): x.append(1)")


_CHANGES = {
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem"),
    *("popleft", "remove", "setdefault", "update"),
}


def _changed(source: str) -> set[str]:
    """Names of a module, assigned or defined there, that its functions change."""
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
