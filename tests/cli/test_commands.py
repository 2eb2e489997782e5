"""Commands as a user types them: output, error messages and exit statuses.

`plan` has a file of its own; `top` is tested with the server.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vmkv import ConfigError
from vmkv.cli.doctor import Finding, attention_summary, environment, examine
from vmkv.cli.main import main, make_parser
from vmkv.cli.serve import server_options
from vmkv.releases import LAST_TESTED
from vmkv.serve.files import read_api_keys
from vmkv.serve.options import ServerOptions


def run(*arguments: str) -> tuple[int, str, str]:
    """Run a command; its exit status, output and error messages."""
    out, err = io.StringIO(), io.StringIO()
    return main(arguments, out, err), out.getvalue(), err.getvalue()


def test_doctor_reports_this_machine() -> None:
    """The host backend is usable; each missing package has a remedy."""
    status, out, err = run("doctor")
    assert (0, "") == (status, err)
    for name in ("host", "cuda:0", "sdpa", "flash2", "torch", "transformers", "fastapi"):
        assert name in out
    assert "vmkv runs here on" in out
    assert "\nAttention uses " in out
    findings = [*examine()]
    usable = {(each.section, each.name) for each in findings if each.is_ok}
    assert {("device", "host"), ("package", "torch"), ("package", "vmkv.core._native")} <= usable
    absent = [each for each in findings if each.section == "package" and not each.is_ok]
    assert all(each.remedy for each in absent), "a missing package has no remedy"
    assert all(each.details for each in findings)


def test_doctor_prints_json() -> None:
    status, out, _ = run("doctor", "--json")
    record = json.loads(out)
    assert 0 == status
    assert record["environment"] == environment()
    assert {"device", "attention", "package"} == {each["section"] for each in record["findings"]}


def test_a_release_newer_than_the_last_one_tested_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By doctor, and once when the cache for transformers is imported."""
    assert not any("newer than" in each.remedy for each in examine())
    (tmp_path / "transformers-99.1.dist-info").mkdir()
    (tmp_path / "transformers-99.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: transformers\nVersion: 99.1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    said = [each.remedy for each in examine() if each.name == "transformers"]
    assert ["transformers 99.1 is newer than"] == [each[:31] for each in said]
    imported = subprocess.run(
        [sys.executable, "-c", "import vmkv; vmkv.VMKVCache, vmkv.generate"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert 1 == imported.stderr.count(said[0])


def test_the_last_release_tested_bounds_the_dependency_and_is_the_default_of_make() -> None:
    root = Path(__file__).parents[2]
    major, minor = LAST_TESTED
    assert f'"transformers>=4.57,<{major}.{minor + 1}"' in (root / "pyproject.toml").read_text()
    assert f"TRANSFORMERS ?= transformers=={major}.{minor}." in (root / "Makefile").read_text()


def test_doctor_and_plan_without_torch() -> None:
    """The doctor says what to install; other commands name the package instead of a traceback."""
    script = (
        "import sys\nsys.modules['torch'] = None\n"
        "from vmkv.cli.main import main\n"
        "assert 1 == main(['doctor']) == main(['doctor', '--json'])\n"
        "sys.exit(main(['plan', 'x', '--context', '1k']))\n"
    )
    line = [sys.executable, "-c", script]
    child = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert (1, 1) == (child.returncode, child.stderr.count("\n")), child.stderr
    assert "the package torch is missing: pip install 'vmkv[serve]'" in child.stderr
    assert "host               -   needs torch" in child.stdout
    assert "vmkv cannot run here" in child.stdout


@pytest.mark.parametrize(
    ("usable", "said"),
    [
        ("", "uses sdpa (torch's own)."),
        ("torch", "uses torch (torch's own)."),
        ("torch flash2", "uses flash2."),
        ("torch flash2 flash3", "uses flash2, and in vmkv serve flash3."),
        ("torch flash3", "uses flash3."),
    ],
)
def test_doctor_names_the_kernels_in_use(usable: str, said: str) -> None:
    findings = [
        Finding("attention", name, name in [*usable.split(), "sdpa"], "")
        for name in ("flash3", "flash2", "torch", "sdpa")
    ]
    assert f"Attention {said}" == attention_summary(findings)


@pytest.mark.gpu
def test_doctor_finds_the_gpu() -> None:
    found = {each.name: each for each in examine()}
    assert found["cuda:0"].is_ok
    assert "pages of 2 MiB" in found["cuda:0"].details
    assert found["torch"].is_ok or found["flash2"].is_ok


def test_api_keys_are_read_from_a_file_or_the_environment(tmp_path: Path) -> None:
    """A file without keys is an error; comments and a byte-order mark are skipped."""
    file = tmp_path / "keys"
    file.write_text("# users\nalpha\n\n beta \n")
    assert ["alpha", "beta"] == read_api_keys(file, None)
    assert ["env", "alpha", "beta"] == read_api_keys(file, "env\n")
    assert [] == read_api_keys(None, None)
    for blank in "", " \n":
        with pytest.raises(ConfigError, match="variable with an API key is blank"):
            read_api_keys(file, blank)
    for options in {"api_keys": ["a", " "]}, {"protects_everything": True}:
        with pytest.raises(ConfigError, match="API key"):
            ServerOptions("m", 64, **options)
    # As written by an editor on Windows: a byte-order mark, carriage returns, umlauts.
    file.write_bytes(b"\xef\xbb\xbffirst\r\n  # an indented comment\r\n\tschl\xc3\xbcssel\r\n")
    assert ["first", "schlüssel"] == read_api_keys(file, None)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="--api-key-file"):
        read_api_keys(file, None)
    file.write_text(" # no users yet\n")
    with pytest.raises(ConfigError, match="holds no key"):
        read_api_keys(file, None)


def test_share_prefixes_is_an_option() -> None:
    """By default, API keys do not share prefixes."""
    for options, expected in (([], False), (["--share-prefixes"], True)):
        parsed = make_parser().parse_args(["serve", "model", *options])
        assert expected == server_options(parsed)(100).share_prefixes


def test_help_imports_no_large_packages() -> None:
    script = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'fastapi', 'httpx', 'prometheus_client'):\n"
        "    sys.modules[name] = None\n"
        "from vmkv.cli.main import make_parser\n"
        "sys.stdout.write(make_parser().format_help())\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert 0 == child.returncode, child.stderr
    for command in ("doctor", "plan", "pool", "serve", "top"):
        assert command in child.stdout


@pytest.mark.slow
def test_a_closed_output_pipe_is_no_error() -> None:
    """As in `vmkv doctor | head -0`."""
    child = subprocess.Popen(
        [sys.executable, "-m", "vmkv.cli", "doctor"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    child.stdout.close()
    assert child.stderr is not None
    assert "" == child.stderr.read()
    child.stderr.close()
    assert 0 == child.wait(60)
