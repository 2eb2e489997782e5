"""Imports point left only, and all layers up to `memory` are free of torch.

    errors, units, phases, compile_cache, releases
        <- core (_native, forks, interrupts, offload_options <- backend <- memory <- cache)
        <- viz, guests <- attention <- step <- hf <- serve <- cli, trl

An import inside a function counts like any other, and across packages so does one under
TYPE_CHECKING. No modules import each other in a circle; within one package, imports under
TYPE_CHECKING do not count for circles.
"""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "vmkv"
LAYERS = [
    *(
        "errors",
        "units",
        "phases",
        "compile_cache",
        "releases",
        "_native",
        "forks",
        "interrupts",
        "offload_options",
        "backend",
        "memory",
        "cache",
        "viz",
        "guests",
    ),
    *("attention", "step", "hf", "serve", "cli", "trl"),
]
TORCH_FREE = {*LAYERS[: LAYERS.index("cache")], "testing"}
FILES = sorted(ROOT.rglob("*.py"))

# Layers that `testing` may import: those without torch.
TESTING_MAY_IMPORT = {"testing", "errors", "units", "_native", "backend", "memory"}
# Third parties, and the layers that may import them.
HOMES_OF = {
    "transformers": {"step", "hf", "serve", "cli", "trl"},
    "cuda": {"backend", "attention", "testing"},
    "flash_attn": {"attention"},
    "flash_attn_interface": {"attention"},
    "kernels": {"attention"},
    "ray": {"serve"},
    "trl": {"trl"},
    "vllm": {"guests"},
}


def imports(path: Path, root: Path = ROOT, *, with_types: bool = True) -> Iterator[str]:
    """Yield the dotted names that a file imports, relative ones made absolute."""
    package = path.relative_to(root.parent).parts[:-1]
    tree = ast.parse(path.read_text())
    for node in [] if with_types else [*ast.walk(tree)]:
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            node.body.clear()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*prefix, *([node.module] if node.module else [])))
            yield from (f"{module}.{alias.name}" for alias in node.names)


def layer_of(path: Path, root: Path = ROOT) -> str:
    """`backend` for vmkv/core/backend/host.py, `errors` for vmkv/errors.py."""
    return layer_of_name(path.relative_to(root).with_suffix("").parts)


def layer_of_name(parts: Sequence[str]) -> str:
    """The layer of a module below `vmkv`; the packages of `core` are layers of their own."""
    return parts[1] if parts[0] == "core" and len(parts) > 1 else parts[0]


def violations(path: Path, root: Path = ROOT) -> list[str]:
    """Names that a file imports against the rules."""
    layer = layer_of(path, root)
    found = []
    for name in imports(path, root):
        top, *rest = name.split(".")
        if top == "vmkv" and rest:
            imported = layer_of_name(rest)
            if layer in ("__init__", "__main__"):  # The package names its modules for types.
                is_allowed = imported != "testing" or layer == "__init__"
            elif layer == "testing":
                is_allowed = imported in TESTING_MAY_IMPORT
            elif imported in LAYERS and layer in LAYERS:
                is_allowed = LAYERS.index(imported) <= LAYERS.index(layer)
            else:
                is_allowed = False
        elif top == "torch":
            is_allowed = layer not in TORCH_FREE
        else:
            # `__main__` may look for installed packages.
            is_allowed = layer in HOMES_OF.get(top, {layer}) | {"__main__"}
        if not is_allowed:
            found.append(name)
    return found


def test_imports_point_left() -> None:
    """No file imports from its right, the test kit, or a third party outside its layers."""
    assert [] == [(module_of(path), name) for path in FILES for name in violations(path)]


def test_every_package_is_in_the_order_of_layers() -> None:
    packages = {layer_of(path) for path in FILES}
    assert packages <= {*LAYERS, "__init__", "__main__", "testing"}


@pytest.mark.parametrize(
    ("file", "text", "found"),
    [
        ("core/memory/pool.py", "from ..cache import views", ["vmkv.core.cache.views"]),
        ("core/memory/pool.py", "from vmkv.core import cache", ["vmkv.core.cache"]),
        ("core/memory/pool.py", "def f():\n    import vmkv.hf.cache", ["vmkv.hf.cache"]),
        ("core/memory/pool.py", "if TYPE_CHECKING:\n    from ...hf import x", ["vmkv.hf.x"]),
        ("core/memory/pool.py", "import torch.nn", ["torch.nn"]),
        ("core/memory/pool.py", "from ...testing import faults", ["vmkv.testing.faults"]),
        (
            "core/cache/layer_group.py",
            "import torch\nfrom ..memory import pool\nfrom . import rows",
            [],
        ),
        ("core/cache/layer_group.py", "import transformers", ["transformers"]),
        ("core/memory/pool.py", "import cuda.bindings", ["cuda.bindings"]),
        ("testing/faults.py", "import torch", ["torch"]),
    ],
)
def test_wrong_imports_are_found(tmp_path: Path, file: str, text: str, found: list[str]) -> None:
    """The check above can fail, for every form of import."""
    path = tmp_path / "vmkv" / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert found == violations(path, tmp_path / "vmkv")


def module_of(path: Path, root: Path = ROOT) -> str:
    """`vmkv.core.memory.pool` for its file, `vmkv.core.memory` for its `__init__.py`."""
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def circles(root: Path = ROOT) -> list[set[str]]:
    """Sets of modules that import each other, directly or indirectly."""
    paths = {module_of(path, root): path for path in sorted(root.rglob("*.py"))}

    def home(name: str) -> str:
        while name and name not in paths:
            name = name.rpartition(".")[0]
        return name

    def package(module: str) -> str:
        return ".".join(module.split(".")[: 3 if module.startswith("vmkv.core.") else 2])

    imported = {}
    for module, path in paths.items():
        always = {home(name) for name in imports(path, root, with_types=False)}
        for_types = {home(name) for name in imports(path, root)}
        others = {name for name in for_types if package(name) != package(module)}
        imported[module] = (always | others) - {"", module}
    return knots(imported)


def knots(imported: dict[str, set[str]]) -> list[set[str]]:
    """Sets of modules that import each other, given the imports of each module."""
    reached: dict[str, set[str]] = {}
    for module in imported:
        reached[module], waiting = set[str](), [module]
        while waiting:
            new = imported[waiting.pop()] - reached[module]
            reached[module] |= new
            waiting.extend(new)
    found = {
        frozenset(other for other in reached[module] if module in reached[other])
        for module in imported
    }
    return [set(knot) for knot in sorted(found, key=sorted) if knot]


def test_modules_have_no_circular_imports() -> None:
    assert [] == circles()


def test_benches_have_no_circular_imports() -> None:
    paths = {path.stem: path for path in (ROOT.parent / "bench").glob("*.py")}
    assert [] == knots(
        {
            module: {name.partition(".")[0] for name in imports(path, path.parent)} & {*paths}
            for module, path in paths.items()
        }
    )


@pytest.mark.parametrize(
    "way_back",
    [
        "from . import pool",
        "from .pool import Pool",
        "def f():\n    import vmkv.core.memory.pool",
        "if TYPE_CHECKING:\n    pass\nelse:\n    from ..memory.pool import Pool",
    ],
)
def test_circles_are_found(tmp_path: Path, way_back: str) -> None:
    """The check above can fail, for every form of import."""
    package = tmp_path / "vmkv" / "core" / "memory"
    package.mkdir(parents=True)
    texts = {
        "__init__": "from .pool import Pool",
        "pool": "from . import shelf",
        "shelf": "import os\nfrom .. import memory_of_others\nfrom .extent import Extent",
        "extent": way_back,
        "alone": "from .pool import Pool",
    }
    for name, text in texts.items():
        (package / f"{name}.py").write_text(text)
    knot = {f"vmkv.core.memory.{name}" for name in ("pool", "shelf", "extent")}
    assert [knot] == circles(tmp_path / "vmkv")


@pytest.mark.parametrize(
    ("file", "text", "is_circle"),
    [
        ("core/memory/extent.py", "import os", False),
        ("core/memory/extent.py", "if TYPE_CHECKING:\n    from .pool import Pool", False),
        (
            "core/cache/rows.py",
            "if typing.TYPE_CHECKING:\n    from ..memory.pool import Pool",
            True,
        ),
    ],
)
def test_types_make_a_circle_only_across_packages(
    tmp_path: Path, file: str, text: str, is_circle: bool
) -> None:
    """Imports under TYPE_CHECKING count across packages only."""
    texts = {
        "core/memory/__init__.py": "from .pool import Pool",
        "core/memory/pool.py": "from .extent import Extent\nfrom ..cache import rows",
        "core/memory/extent.py": "",
        "core/cache/rows.py": "",
        file: text,
    }
    for name, each in texts.items():
        path = tmp_path / "vmkv" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(each)
    assert is_circle == bool(circles(tmp_path / "vmkv"))


def test_memory_runs_without_torch(
    run_python: Callable[[str], subprocess.CompletedProcess[str]],
) -> None:
    """A pool works in a process where torch cannot be imported."""
    child = run_python(
        "sys.modules['torch'] = None\n"
        "from vmkv.core.backend import open_backend\n"
        "from vmkv.core.memory import ExtentPool, check_pool\n"
        "from vmkv.testing import check_backend\n"
        "pool = ExtentPool(open_backend('host'), 1 << 20)\n"
        "pool.disown(pool.acquire([0, 1]))\n"
        "check_pool(pool)\n"
        "pool.close()\n"
        "assert check_backend(lambda: open_backend('host'))\n"
    )
    assert 0 == child.returncode, child.stderr
