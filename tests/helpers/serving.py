"""A tiny model with a real tokenizer, and a server of it on a free port.

Everything is made here: nothing is downloaded. The tokenizer is byte-level BPE, so it accepts and
returns text of any script.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import re
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from fastapi import FastAPI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from vmkv.serve.observer import (
    Event,
    FirstToken,
    ObservedCache,
    RequestAdded,
    RequestRecord,
    StepRecord,
)
from vmkv.serve.params import SamplingParams
from vmkv.serve.request import RequestOutput
from vmkv.serve.server.choices import ChatForm, Tokens
from vmkv.serve.server.reply import ReplyDelta
from vmkv.serve.server.run import Server
from vmkv.serve.server.schema import ChatRequest
from vmkv.serve.start import open_socket

from . import warm_python
from .tiny_models import llama_config

ROOT = Path(__file__).parents[2]
TEXT = [
    "A row is one sequence's range in a reservation.",
    "A page is one cell of a range, and the unit of account.",
    "Nothing is unmapped before the work that may read it has passed its fence.",
    "The next sequence adopts the memory of one that has ended.",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('unknown role ' + message.role) }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
#: So many that a request for all of them is still running when a test looks.
MAX_TOKENS = 4096
#: Requests with short answers, and one that runs until it is cancelled.
PLAIN: dict[str, Any] = {"model": "tiny", "prompt": "A row", "max_tokens": 2}
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 2,
}
LONG = PLAIN | {"max_tokens": MAX_TOKENS - 50, "temperature": 0, "ignore_eos": True}


def wire(body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    """The bytes of an HTTP request."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


@functools.cache
def tiny_tokenizer() -> Any:
    """Byte-level BPE trained on a few lines, with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        chat_template=CHAT_TEMPLATE,
    )


def tiny_llama() -> Any:
    """A Llama with that vocabulary, and with random weights that do not repeat one token.

    Each caller has a copy.
    """
    return copy.deepcopy(_tiny_llama())


@functools.cache
def _tiny_llama() -> Any:
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
    sizes = {"vocab_size": len(tiny_tokenizer()), "max_position_embeddings": MAX_TOKENS}
    config = llama_config(**sizes, **ends)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5, generator=generator)
        model.lm_head.weight[1] = 0.0  # The end-of-sequence token is never the most likely one.
    model.generation_config.eos_token_id = 1
    return model


def save_tiny_model(folder: Path) -> Path:
    """Save model and tokenizer for `from_pretrained`."""
    tiny_llama().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


class Watch:
    """An engine's observer with a wait for conditions."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.added: list[int] = []
        self.finished: list[RequestRecord] = []
        self.num_first_tokens = 0
        self.num_steps = self.num_idle = 0
        self.is_idle = False

    def on(self, event: Event, cache: ObservedCache) -> None:
        with self._changed:
            if isinstance(event, RequestAdded):
                self.added.append(event.request_id)
                self.is_idle = False
            elif isinstance(event, FirstToken):
                self.num_first_tokens += 1
            elif isinstance(event, RequestRecord):
                self.finished.append(event)
            elif isinstance(event, StepRecord):
                self.num_steps += 1
            else:
                self.num_idle += 1
                self.is_idle = True
            self._changed.notify_all()

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until a condition on the attributes holds."""
        with self._changed:
            assert self._changed.wait_for(condition, timeout=60), f"timed out waiting for {what}"


@contextlib.contextmanager
def serving(app: FastAPI, drain_timeout_s: float = 20) -> Iterator[tuple[str, Server]]:
    """Serve the application on a free local port; yield its address and its server.

    Socket buffers are small, so that a client that does not read is noticed soon.
    """
    listener = open_socket("127.0.0.1", 0, unread_timeout_s=60)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    listener.listen()  # Clients may connect from now on; the server accepts them once it runs.
    server = Server(app, drain_timeout_s=drain_timeout_s, log_level="warning")
    failures: list[BaseException] = []

    def run() -> None:
        try:
            server.run(sockets=[listener])
        except BaseException as error:
            failures.append(error)
            raise

    thread = threading.Thread(target=run, name="server")
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", server
    finally:
        server.should_exit = True
        thread.join(60)
    assert not thread.is_alive(), f"the server does not end\n{_stacks()}"
    assert not failures


def _stacks() -> str:
    """What each thread of this process does."""
    names = {each.ident: each.name for each in threading.enumerate()}
    found = [
        f"{names.get(at)}\n{''.join(traceback.format_stack(frame)[-8:])}"
        for at, frame in sys._current_frames().items()
    ]
    return "\n".join(found)


@contextlib.contextmanager
def serving_process(
    *arguments: str, status: int = 0, drains: bool = False
) -> Iterator[tuple[warm_python.Child, str]]:
    """Run `vmkv serve` in a process that has imported torch already; yield it with its address.

    It must end with `status`: by itself, or on the SIGTERM that it gets in the end if it `drains`.
    """
    command = ["-m", "vmkv.cli", "serve", *arguments, "--port", "0", "--device", "cpu"]
    child = warm_python.start(*command, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        line = child.stdout.readline()
        found = re.search(r"http://[\d.]+:\d+", line)
        assert found, line or child.stderr.read()
        yield child, found.group(0)
        if drains:
            child.send_signal(signal.SIGTERM)
        assert status == child.wait(60), child.stderr.read()
    finally:
        child.kill()
        child.wait(60)
        print(child.communicate(timeout=60)[1])  # Seen if the test has failed.


# ---- answers -------------------------------------------------------------------------------------


def named_events(data: bytes | str) -> list[dict[str, Any]]:
    """Parse server-sent events, and check that each is named as its type."""
    text = data if isinstance(data, str) else data.decode()
    found = []
    for event in text.removesuffix("\n\n").split("\n\n"):
        name, payload = event.split("\n")
        found.append(json.loads(payload.removeprefix("data: ")))
        assert f"event: {found[-1]['type']}" == name
    return found


def scripted_form(
    deltas: Sequence[ReplyDelta], new_form: Callable[..., ChatForm] = ChatForm, **names: str
) -> Any:
    """A form with a prompt of three tokens, whose parser takes a text as the number of a delta."""

    class Scripted:
        def push(self, text: str, *, is_last: bool) -> ReplyDelta:
            return deltas[int(text)]

    body = ChatRequest.model_validate(CHAT)
    its = (Tokens(tiny_tokenizer()), body, SamplingParams(), lambda _: Scripted())
    form = new_form(*its, **names)
    assert [] == list(form.advance(0, RequestOutput(0, None, [1, 2, 3], [])))
    return form


def engines_of(pid: int) -> list[int]:
    """Return the processes of a server's engines, in the order of their start.

    Each is a child, or a child of the child that forks processes.
    """

    def children_of(pid: int) -> list[int]:
        return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]

    children = children_of(pid)
    forked = [each for child in children for each in children_of(child)]
    return forked or [
        each for each in children if b"spawn_main" in Path(f"/proc/{each}/cmdline").read_bytes()
    ]
