"""Public names exist, are documented, and document errors that exist."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import vmkv
import vmkv.errors
import vmkv.testing

ROOT = Path(vmkv.__file__).parent
PUBLIC = {
    name: getattr(module, name)
    for module in (vmkv, vmkv.testing)
    for name in dir(module)
    if not name.startswith("_") and not inspect.ismodule(getattr(module, name))
}
SOURCES = sorted(path for path in ROOT.rglob("*.py"))
# "Raises:" section of a docstring, with lines like "    OutOfPagesError, DriverError: When."
_RAISES = re.compile(r"^[ ]*Raises:\n((?:[ ]+.*\n|\n)*)", re.MULTILINE)
_NAMES = re.compile(r"^[ ]*((?:[A-Z]\w*(?:Error|Exception))(?:, [A-Z]\w*)*):", re.MULTILINE)

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _public_nodes(path: Path) -> list[tuple[str, Documented]]:
    """The module and its public classes, functions and methods."""
    tree = ast.parse(path.read_text())
    found: list[tuple[str, Documented]] = [(path.stem, tree)]

    def walk(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            is_documented = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            if is_documented and not node.name.startswith("_"):
                found.append((f"{prefix}{node.name}", node))
                if isinstance(node, ast.ClassDef):
                    walk(node.body, f"{prefix}{node.name}.")

    walk(tree.body, f"{path.stem}.")
    return found


def test_public_objects_have_docstrings() -> None:
    """All public modules, classes, functions and methods."""
    undocumented = [
        (str(path.relative_to(ROOT)), name)
        for path in SOURCES
        for name, node in _public_nodes(path)
        if not (ast.get_docstring(node) or "").strip() and not _is_overload(node)
    ]
    assert [] == undocumented


def _is_overload(node: Documented) -> bool:
    decorators = getattr(node, "decorator_list", [])
    return any(isinstance(each, ast.Name) and each.id == "overload" for each in decorators)


def test_documented_errors_exist() -> None:
    """Each name in a `Raises:` section is a class of vmkv.errors or Python's own."""
    documented = [
        (str(path.relative_to(ROOT)), name, error)
        for path in SOURCES
        for name, node in _public_nodes(path)
        for section in _RAISES.findall((ast.get_docstring(node) or "") + "\n")
        for names in _NAMES.findall(section)
        for error in names.split(", ")
    ]
    assert documented
    known = {*dir(vmkv.errors), *dir(builtins)}
    assert [] == [each for each in documented if each[-1] not in known]


def test_only_the_projects_own_names_are_exported() -> None:
    """Names that `vmkv/__init__.py` imports from other packages are private."""
    foreign = [
        name
        for name, value in PUBLIC.items()
        if name != "annotations" and not getattr(value, "__module__", "vmkv").startswith("vmkv")
    ]
    assert [] == foreign


def test_every_error_is_exported_except_those_of_single_drivers() -> None:
    """Users catch `DriverError` instead of those."""
    errors = {
        name
        for name, value in vars(vmkv.errors).items()
        if inspect.isclass(value) and issubclass(value, vmkv.errors.VMKVError)
    }
    assert errors - {"CudaDriverError", "HostDriverError"} <= set(PUBLIC)


@pytest.mark.parametrize(
    ("error", "bases"),
    [
        (vmkv.ConfigError, ValueError),
        (vmkv.CapacityError, MemoryError),
        (vmkv.OutOfPagesError, vmkv.CapacityError),
        (vmkv.OutOfAddressSpaceError, vmkv.CapacityError),
        (vmkv.SequenceFullError, vmkv.CapacityError),
        (vmkv.DriverError, RuntimeError),
    ],
)
def test_errors_are_subclasses_of_builtin_errors(error: type, bases: type) -> None:
    """`except MemoryError` catches exhaustion, `except ValueError` a wrong argument."""
    assert issubclass(error, bases)
    assert issubclass(error, vmkv.VMKVError)


def test_modules_are_attributes_of_the_package() -> None:
    """After `import vmkv` alone, as the README's table uses them; a misspelt one is not there."""
    names = [name for name in vmkv._MODULES if name != "trl"]  # It needs TRL.
    script = (
        f"import vmkv; [getattr(vmkv, name) for name in {names}]; assert not hasattr(vmkv, 'x')"
    )
    line = [sys.executable, "-c", script]
    child = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    assert 0 == child.returncode, child.stderr


def test_type_checkers_know_the_public_names_and_no_others(tmp_path: Path) -> None:
    names = [*vmkv._HOME_OF, *vmkv._MODULES]
    file = tmp_path / "user.py"
    file.write_text("import vmkv\n" + "".join(f"vmkv.{name}\n" for name in [*names, "Engin"]))
    line = [sys.executable, "-m", "mypy", "--config-file=", "--follow-imports=skip"]
    line += ["--cache-dir", str(tmp_path / "cache"), str(file), str(ROOT / "__init__.py")]
    checked = subprocess.run(line, capture_output=True, text=True, timeout=250, check=False)
    errors = [each for each in checked.stdout.splitlines() if each.startswith(str(file))]
    assert 1 == len(errors), checked.stdout + checked.stderr
    assert 'has no attribute "Engin"' in errors[0]


def test_signatures_of_caches_name_every_option_of_their_docstring() -> None:
    """`help` shows no `**options`, so what is left out there seems not to exist."""
    for cache in (vmkv.VMKVCache, vmkv.RaggedCache):
        documented = set(re.findall(r"^        (\w+): ", cache.__doc__ or "", re.MULTILINE))
        documented -= {"options", "ConfigError", "TypeError"}
        assert documented <= set(inspect.signature(cache).parameters), cache
