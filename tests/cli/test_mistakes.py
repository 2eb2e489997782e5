"""Wrong arguments and damaged files give a one-line error and an exit status, not a traceback.

A table of command lines, run in this process, and damaged model folders. Wrong servers have a file
of their own.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch

from vmkv import InternalError
from vmkv.cli import plan
from vmkv.cli.main import main
from vmkv.serve.process import EngineProcess
from vmkv.serve.process.host import Relay

#: Values that no option for integers, or for numbers, takes.
INTEGERS = ["", " ", "x", "-1", "1.5", "1e3", "inf", "nan", "0x10", "1_000", "8q", "k", "٣"]
INTEGERS += [str(2**31), str(2**70), "9" * 5000, "2048m"]
NUMBERS = ["", " ", "x", "-1", "-0.5", "inf", "-inf", "nan", "1e400", "1e300", str(2**70), "1,5"]
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 400,
}
PLAN = ["plan", "{model}", "--context", "1k"]
SERVE = ["serve", "{model}", "--port", "0", "--device", "cpu", "--memory", "0.0625"]
EIGHT_BITS = [*SERVE, "--kv-dtype", "fp8"]
TOP = ["top", "127.0.0.1:1", "--once"]
WRONG: dict[str, tuple[list[str], list[str]]] = {
    "plan --context": (PLAN, [*INTEGERS, "0"]),
    "plan --users": (PLAN, [*INTEGERS, "0"]),
    "plan --longest": (PLAN, [*INTEGERS, "0"]),
    "plan --share-prefix": (PLAN, [*INTEGERS, "1025"]),
    "plan --tensor-parallel": (PLAN, [*INTEGERS, "0", "3"]),
    "plan --device-memory": (PLAN, [*NUMBERS, "0", "1e-30"]),
    "plan --weights": (PLAN, NUMBERS),
    "plan --reserve": (PLAN, NUMBERS),
    "plan --swap": (PLAN, NUMBERS),
    "plan --dtype": (PLAN, ["", "int3", "float64", "torch.float16", "FLOAT16", "8"]),
    "plan --kv-dtype": (PLAN, ["", "int8", "fp8_e5m2", "FP8"]),
    "serve --device": (
        SERVE,
        ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "cuda:9999", "cuda:7", "meta", "mps", "CPU"],
    ),
    "serve --dtype": (SERVE, ["", "int3", "float64", "half", "fp8"]),
    "serve --max-num-seqs": (SERVE, [*INTEGERS, "0", "65537", "9000"]),
    "serve --max-num-batched-tokens": (SERVE, [*INTEGERS, "0", "2m", "255"]),
    "serve --max-model-tokens": (SERVE, [*INTEGERS, "0"]),
    "serve --tensor-parallel": (SERVE, [*INTEGERS, "0", "3"]),  # It has two key-value heads.
    "serve --memory": (SERVE, [*NUMBERS, "0", "1e-30", "1e-9", "500000"]),  # More than any has.
    "serve --swap": (SERVE, [*NUMBERS, "500000"]),
    "serve --disk-size": (SERVE, NUMBERS),
    "serve --watermark": (SERVE, NUMBERS),
    "serve --attention-backend": (SERVE, ["", "flash9", "x" * 300]),
    "serve --replicas": (SERVE, [*INTEGERS, "0", "1025"]),
    "serve --kv-dtype": (SERVE, ["", "int8", "fp8_e5m2", "bfloat16"]),
    "serve --kv-scales": (EIGHT_BITS, ["", "/nowhere", "/", "{binary}", "{unended}", "n" * 300]),
    "serve --skip-layers": (EIGHT_BITS, ["", "x", "-1", "0,,1", "1.5", "2", "sliding,7", "9" * 50]),
    "serve --host": (SERVE, ["", " ", "a" * 70, "a..b", "..", "999.9.9.9", "[", "ü" * 70, "\x07"]),
    "serve --port": (SERVE, [*INTEGERS, "65536", "99999"]),
    "serve --max-body-mib": (SERVE, [*NUMBERS, "0"]),
    "serve --max-prompt-tokens": (SERVE, [*INTEGERS, "0"]),
    "serve --max-concurrent": (SERVE, [*INTEGERS, "0"]),
    "serve --max-queued": (SERVE, INTEGERS),
    "serve --send-timeout": (SERVE, [*NUMBERS, "0", "1e9"]),
    "serve --drain-timeout": (SERVE, [*NUMBERS, "0", "1e9"]),
    "serve --log-level": (SERVE, ["", "loud"]),
    "serve --chat-template": (SERVE, ["", "/nowhere", "/", "{binary}", "{unended}", "n" * 300]),
    "serve --response-template": (SERVE, ["", "/nowhere", "/", "{binary}", "qwen", "n" * 300]),
    "serve --trace": (SERVE, ["/nowhere/x", "/", "n" * 300]),
    "serve --tokenizer": (SERVE, ["/nowhere", "a b", "x/y/z", "{empty}", "n" * 300]),
    "top --interval": (TOP, [*NUMBERS, "0"]),
    "top --timeout": (TOP, [*NUMBERS, "0"]),
}
ADDRESSES = ["", " ", "http://", "http://[::1", "http://127.0.0.1:99999", "http://127.0.0.1:0"]
ADDRESSES += ["http://127.0.0.1:x", "http://127.0.0.1:-1", "ftp://127.0.0.1", "file:///etc/passwd"]
ADDRESSES += ["http://" + "a" * 70, "http://a..b", "http://ü" + "ü" * 70, "http://127.0.0.1:1/ü"]
ADDRESSES += ["http://me:secret@127.0.0.1", "http://127.0.0.1 x", "127.0.0.1:1", "\x1b[2J"]
MODELS = ["/nowhere/model", "/nowhere/config.json", "no/such/model", "a b", "", " ", "~", "n" * 300]
MODELS += ["a/b/c", "../..", "/dev/null", "/dev/zero", "\x1b[2J", "-", "ü"]
OTHERS = [
    *([], ["levitate"], ["plan"], ["plan", "{model}"], ["serve"], ["top"], ["--no-such-option"]),
    *(["top", "127.0.0.1:1", "extra"], ["doctor", "extra"], ["plan", "{model}", "--context"]),
]
LINES = [
    *(
        [*line, name.split()[1], value]
        for name, (line, values) in WRONG.items()
        for value in values
    ),
    *(["top", url, "--once"] for url in ADDRESSES),
    *(["plan", model, "--context", "1k"] for model in MODELS),
    *(["serve", model, "--port", "0"] for model in MODELS),
    *OTHERS,
]


#: Command lines, and words of their errors; what `serve` names need not be there.
SAID = (
    ("", "required: COMMAND"),
    ("levitate", "invalid choice: 'levitate'"),
    ("plan x --context 0", "argument --context: '0' is no integer from 1"),
    ("plan x --context 8q", "'8q' is no integer from 1 to 2,147,483,647"),
    ("plan x --context 1 --swap -1", "'-1' is no number"),
    ("serve x --port 70000", "'70000' is no integer from 0 to 65,535"),
    ("serve x --max-body-mib 0", "'0' is no number of MiB"),
    ("serve x --api-key-file /nowhere/keys", "--api-key-file /nowhere/keys"),
    ("serve x --chat-template /nowhere/t.jinja", "chat template /nowhere/t.jinja"),
    ("serve /nowhere/model --port 0", "no file or folder /nowhere/model"),
    ("top ftp://localhost", "unsupported protocol"),
    ("top localhost:1 --once", "is `vmkv serve` running there?"),
    ("serve x --max-num-seq 3", "no option '--max-num-seq'; did you mean --max-num-seqs?"),
    ("plan x --context 1k --user=3", "no option '--user'; did you mean --users?"),
    ("doctor --jsn", "no option '--jsn'; did you mean --json?"),
    ("serve a --memory 1 --gpu-memory-utilization 0.9", "take one"),
    ("serve {model} --port 0 --max-model-len 100000", "was made for 4096 tokens"),
    ("serve a b --replicas 2", "--replicas and several models do not go together"),
    ("serve a b --trace t", "--trace is for one model: start one server per model, with a"),
    ("serve a b --served-model-name n", "--served-model-name is for one model"),
    ("serve a b --lazy", "--lazy needs --memory"),
    ("serve a --lazy", "--lazy is for several models"),
    ("serve a --floor 1", "name a --pool, or more models"),
    ("serve a --weight 2", "name a --pool, or more models"),
    ("serve a a", "a model is named twice"),
    ("serve a --replicas 2 --trace trace.json", "--trace is for one engine"),
    ("serve a --replicas 2 --device cuda:1", "CUDA_VISIBLE_DEVICES"),
    ("serve a --replicas 2 --tensor-parallel 2", "take one"),
    ("serve a --replicas 2 --sleep-after 60", "leave --sleep-after, --enable-sleep-mode out"),
    ("serve a --replicas 2 --enable-sleep-mode", "do not sleep"),
)


@pytest.fixture(scope="module")
def names(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Files that the command lines refer to."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "binary").write_bytes(b"\xff\xfe\x00\x81")
    (folder / "unended").write_text("{% for each in messages %}")
    (folder / "empty").mkdir()
    return {"model": str(model)} | {each.name: str(each) for each in folder.iterdir()}


@pytest.fixture(autouse=True)
def engines_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make engines in this process, because a process takes seconds to start."""

    def start(engine: EngineProcess) -> None:
        with engine._make(Relay()):
            raise AssertionError("the engine was made despite a wrong option")

    monkeypatch.setattr(EngineProcess, "_start", start)
    nothing = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr("vmkv.serve.start.start_process", lambda make: nothing)


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_wrong_arguments_give_a_one_line_error(complaint, names: dict[str, str]) -> None:
    """Every option with invalid values, and invalid addresses and model names."""
    assert len(LINES) > 400
    for line in LINES:
        arguments = [names.get(word.strip("{}"), word) for word in line]
        try:
            complaint(*arguments)
        except BaseException as error:
            raise AssertionError(f"vmkv {' '.join(map(repr, line))[:300]}") from error


@pytest.mark.parametrize(("line", "words"), SAID)
def test_mistakes_are_named(complaint, names: dict[str, str], line: str, words: str) -> None:
    """In the words of the command line, in one line and without a traceback."""
    assert words in complaint(*[names.get(word.strip("{}"), word) for word in line.split()])


def broken_configs() -> Iterator[tuple[str, bytes]]:
    """Names and contents of invalid config.json files."""
    yield "empty", b""
    yield "cut", b'{"model_type": "llama", "hidden_size": 3'
    yield "zeros", bytes(300)
    yield "binary", b"\x89PNG\xff\xfe"
    yield "page", b"<html>Access denied</html>"
    yield "pointer", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 7\n"
    yield "nested list", b"[" * 100_000
    yield "nested object", b'{"model_type": ' + b'{"a":' * 5000 + b"1" + b"}" * 5001
    for value in (b"null", b"3", b'"llama"', b"[]", b"{}"):
        yield value.decode(), value
    for value in (None, "", "no such type", 7, ["llama"], {"llama": 1}, "llama\n\nllama"):
        yield f"model_type {value!r}", json.dumps({"model_type": value}).encode()
    numbers = (-1, 2**40, 2**70, 1.5, "many", None, [], {}, float("nan"), float("inf"))
    for field in ("hidden_size", "num_hidden_layers", "num_attention_heads"):
        for number in (0, *numbers):
            yield f"{field} {number!r}", json.dumps({**LLAMA, field: number}).encode()
    for field, value in (
        ("vocab_size", -1),
        ("vocab_size", 2**70),
        ("num_key_value_heads", 3),
        ("head_dim", 0),
        ("max_position_embeddings", "long"),
        ("max_position_embeddings", 0),
        ("dtype", "int3"),
        ("dtype", 7),
        ("rope_scaling", "none"),
        ("rope_scaling", {"rope_type": "no such"}),
        ("hidden_act", "no such"),
    ):
        yield f"{field} {value!r}", json.dumps({**LLAMA, field: value}).encode()
    remote = {"model_type": "own", "auto_map": {"AutoConfig": "code.Config"}}
    yield "code of its own", json.dumps(remote).encode()


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_an_invalid_configuration_gives_a_one_line_error(
    complaint, model: Path, tmp_path: Path
) -> None:
    """Truncated, empty or other files, and absurd numbers, for `plan` and `serve`."""
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    file = folder / "config.json"
    for name, data in broken_configs():
        file.write_bytes(data)
        for arguments in (
            ["plan", str(folder), "--context", "1k"],
            ["plan", str(file), "--context", "1k"],
            ["serve", str(folder), "--port", "0", "--device", "cpu", "--memory", "0.0625"],
        ):
            try:
                complaint(*arguments)
            except BaseException as error:
                raise AssertionError(f"{name}: vmkv {arguments[0]}") from error


def _cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def _index(weights: Path) -> None:
    weights.rename(weights.with_name("model-00001-of-00002.safetensors"))
    weight_map = {"lm_head.weight": "model-00002-of-00002.safetensors"}
    index = {"metadata": {}, "weight_map": weight_map}
    weights.with_name("model.safetensors.index.json").write_text(json.dumps(index))


def _without_head(file: Path) -> None:
    weights = safetensors.torch.load_file(file)
    del weights["lm_head.weight"]
    safetensors.torch.save_file(weights, file, {"format": "pt"})


def _narrow(config: Path) -> None:
    config.write_text(json.dumps({**json.loads(config.read_text()), "intermediate_size": 40}))


def _replaced(make: Callable[[Path], object]) -> Callable[[Path], object]:
    """Replace a file by one of another kind."""
    return lambda file: (file.unlink(), make(file))


WEIGHTS, CONFIG, GENERATION = "model.safetensors", "config.json", "generation_config.json"
#: A model's file, its damage, and a part of the error message.
DAMAGE: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "cut weights": (WEIGHTS, _cut, "cannot load"),
    "a part is missing": (WEIGHTS, _index, "cannot load"),
    "a weight is missing": (WEIGHTS, _without_head, "lacks 1 weights, such as lm_head.weight"),
    "weights of another model": (CONFIG, _narrow, "cannot load"),
    "no tokenizer": (
        ".",
        lambda folder: [each.unlink() for each in folder.glob("tokenizer*")],
        "no tokenizer",
    ),
    "cut tokenizer settings": ("tokenizer_config.json", _cut, "no tokenizer"),
    "cut generation settings": (
        GENERATION,
        lambda file: file.write_text('{"eos_token_id":'),
        "generation_config.json of",
    ),
    "a text for the end of sequence": (
        GENERATION,
        lambda file: file.write_text('{"eos_token_id": "12"}'),
        "eos_token_id is '12'",
    ),
    "a pipe for a configuration": (CONFIG, _replaced(os.mkfifo), "holds no config.json"),
}


@pytest.mark.slow
@pytest.mark.timeout(60)  # A model that is served by mistake is served for ever.
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_model_gives_a_one_line_error(
    complaint, model: Path, tmp_path: Path, damage: str
) -> None:
    """As after an interrupted download; missing weights are not made up."""
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    file, apply, reason = DAMAGE[damage]
    apply(folder / file)
    arguments = ["--port", "0", "--device", "cpu", "--memory", "0.0625"]
    assert reason in complaint("serve", str(folder), *arguments)


def test_internal_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (TypeError("ours"), KeyError("ours"), InternalError("ours"), AssertionError()):

        def fail(*_: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(plan, "run", fail)
        with pytest.raises(type(error)):
            main(["plan", "x", "--context", "1"])


def test_a_full_disk_gives_a_one_line_error(capsys: pytest.CaptureFixture[str]) -> None:
    """The output is not written again at exit."""
    with open("/dev/full", "w") as full:
        assert 1 == main(["doctor"], full)
    err = capsys.readouterr().err
    assert err.startswith("vmkv: [Errno 28]")
    assert 1 == err.count("\n")


def test_closed_or_ascii_output(names: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed one, as by `vmkv doctor >&-`, and one that encodes only ASCII."""
    monkeypatch.setattr(sys, "stdout", None)
    assert 0 == main(["doctor"])
    data = io.BytesIO()
    out = io.TextIOWrapper(data, encoding="ascii")
    assert 0 == main(["plan", names["model"], "--context", "1k"], out)
    assert b"1.000 \\xd7" in data.getvalue()
