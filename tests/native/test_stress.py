"""The free list under native threads, with and without ThreadSanitizer, and with broken headers.

``stress_free_list.c`` next to this file includes ``freelist.h``, the same header that the extension
is built from. The last tests break one line of a copy of that header each, and require that the
stress notices: a test that cannot fail proves nothing.

Not covered: see the head of ``stress_free_list.c``. On a processor with strong ordering the plain
run cannot notice a missing memory order; the run under ThreadSanitizer does.
"""

import functools
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tempfile

import pytest

HERE = pathlib.Path(__file__).resolve().parent
HEADER = HERE.parents[1] / "vmkv" / "core" / "_native" / "freelist.h"
PROGRAM = HERE / "stress_free_list.c"
PLAIN = ()
THREAD_SANITIZER = ("-fsanitize=thread", "-g")

# ThreadSanitizer wants its shadow where some kernels put the program at random. Without address
# randomisation (ADDR_NO_RANDOMIZE, 0x40000) it starts; where that is forbidden, nothing is lost.
WITHOUT_RANDOMISATION = """
import ctypes, os, sys
ctypes.CDLL(None).personality(0x0040000)
os.execv(sys.argv[1], sys.argv[1:])
"""


def find_compiler():
    """The C compiler to use, or a skip."""
    words = (sysconfig.get_config_var("CC") or "cc").split()
    compiler = shutil.which("cc") or shutil.which(words[0])
    if compiler is None:
        pytest.skip("no C compiler")
    return compiler


def compile_program(source, folder, flags):
    """Compile a C file of ``folder`` or elsewhere, headers from ``folder`` first."""
    program = folder / "program"
    command = [find_compiler(), "-std=c11", "-O2", "-Wall", "-Wextra", "-pthread", *flags]
    command += ["-I", str(folder), str(source), "-o", str(program)]
    return program, subprocess.run(command, capture_output=True, text=True)


@functools.cache
def why_not(flags):
    """The compiler's error for these flags, empty if there is none."""
    with tempfile.TemporaryDirectory() as folder:
        hello = pathlib.Path(folder) / "hello.c"
        hello.write_text("int main(void) { return 0; }\n")
        return compile_program(hello, hello.parent, flags)[1].stderr.strip()


def build(folder, flags, old="", new=""):
    """Build the stress program, with ``old`` replaced by ``new`` in its copy of the header."""
    if flags and why_not(flags):
        pytest.skip(f"the compiler cannot do {flags[0]}: {why_not(flags)}")
    header = HEADER.read_text()
    assert old in header, "freelist.h has changed; adapt the line that this test breaks"
    (folder / "freelist.h").write_text(header.replace(old, new) if old else header)
    program, result = compile_program(PROGRAM, folder, flags)
    assert result.returncode == 0, result.stderr
    assert "warning" not in result.stderr, result.stderr
    return program


def run(program, *args):
    """Run the stress program; skip when the sanitizer cannot start on this kernel."""
    command = [str(program), *map(str, args)]
    if sys.platform == "linux":
        command = [sys.executable, "-c", WITHOUT_RANDOMISATION, *command]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if "unexpected memory mapping" in result.stderr:
        pytest.skip(f"ThreadSanitizer cannot start: {result.stderr.strip()}")
    return result


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The program as it is."""
    return build(tmp_path_factory.mktemp("plain"), PLAIN)


@pytest.mark.slow
@pytest.mark.parametrize("num_threads", [1, 2, 8])
def test_race_neither_doubles_nor_loses_ids(plain, num_threads):
    """Native threads over few ids never hold one twice and lose none."""
    result = run(plain, num_threads, 500_000)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.slow
def test_race_is_clean_under_thread_sanitizer(tmp_path):
    """The list's memory orders also order its users' accesses between pop and push."""
    result = run(build(tmp_path, THREAD_SANITIZER), 4, 100_000)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.slow
def test_a_delayed_pop_starts_over(plain):
    """The ABA schedule, replayed in one thread, delays the pop."""
    result = run(plain, "aba")
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.slow
def test_stress_notices_a_missing_tag(tmp_path):
    """Without the tag, the ABA schedule hands out an id that is out; so does the race."""
    program = build(
        tmp_path, PLAIN, old="vmkv_head_tag(head) + 1, below", new="vmkv_head_tag(head), below"
    )
    result = run(program, "aba")
    assert result.returncode == 1
    assert "an id that is out was handed out again" in result.stderr
    assert run(program, 8, 500_000).returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize("order", ["memory_order_release", "memory_order_acquire"])
def test_thread_sanitizer_notices_a_missing_order(tmp_path, order):
    """With either side of the pair relaxed, ThreadSanitizer sees owners race on their marks."""
    result = run(
        build(tmp_path, THREAD_SANITIZER, old=order, new="memory_order_relaxed"), 4, 100_000
    )
    assert result.returncode != 0
    assert "WARNING: ThreadSanitizer: data race" in result.stderr


@pytest.mark.slow
def test_stress_notices_a_state_that_is_not_kept(tmp_path):
    """If pop does not mark an id as out, a later push of that id is refused."""
    program = build(
        tmp_path,
        PLAIN,
        old="atomic_store_explicit(&list->state[*id], VMKV_OUT, memory_order_relaxed);",
        new="(void)0;",
    )
    result = run(program, 2, 10_000)
    assert result.returncode == 1
    assert "a correct push was refused" in result.stderr
