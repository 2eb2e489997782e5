"""`vmkv serve`: a model behind the OpenAI API."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ..errors import CapacityError, ConfigError, one_line
from ..options import EngineOptions, Limits, ServerOptions
from ..units import MiB, format_bytes
from . import arguments as types

if TYPE_CHECKING:
    from ..serve.engine import Engine
    from ..serve.observer import EngineObserver
    from ..serve.parallel import TensorParallel
    from ..serve.server.service import ServerMetrics, StreamingEngine

_API_KEY_VARIABLE = "VMKV_API_KEY"
_MIXED_HELP = """tokens in a step that decodes and computes prompts, both counted; twice as many for
half of a long prompt; all running requests decode and prompts get half of this anyway; no bound
while more prompt tokens are left than --max-num-batched-tokens; 0 for none"""
#: Fields of `EngineOptions`: name, type, metavar, help, and the flag where it is not the name.
_ENGINE = (
    ("max_num_seqs", types.integer(1, 1 << 16), "N", "sequences in a step"),
    ("max_num_batched_tokens", types.integer(1, 1 << 20), "N", "tokens in a step"),
    ("max_num_mixed_tokens", types.count_or_none, "N", _MIXED_HELP),
    ("max_tokens", types.positive_int, "N", "of a request; else the model's", "--max-model-tokens"),
    ("budget_bytes", types.positive_gib, "GiB", "for keys and values; by default all", "--memory"),
    ("host_budget_bytes", types.gib, "GiB", "host memory for preempted requests", "--swap"),
    ("watermark_bytes", types.gib, "GiB", "kept when idle; by default everything", "--watermark"),
    ("attention_backend", types.name, "NAME", "see vmkv doctor; by default the best that runs"),
    ("kv_scales", types.name, "FILE", "of keys and values in fp8; by default 1"),
    ("skip_layers", types.layers, "LAYERS", "which stay in the model's type, as in 0,1,sliding"),
)
#: Fields of `Limits`, likewise.
_LIMITS = (
    ("max_body_bytes", types.positive_mib, "MiB", "of a request", "--max-body-mib"),
    ("max_prompt_tokens", types.positive_int, "N", "by default the model's"),
    ("max_concurrent", types.positive_int, "N", "requests in the engine"),
    ("max_queued", types.count, "N", "requests waiting for that; then 429"),
    ("max_connections", types.positive_int, "N", "as far as ulimit -n permits"),
    ("max_priority", types.count, "N", "levels for clients to choose; 0 for none"),
    ("send_timeout_s", types.seconds, "S", "seconds a client may not read", "--send-timeout"),
)
#: Here requests arrive one by one, so that long mixed steps would delay tokens.
_MAX_NUM_MIXED_TOKENS = 1024


def add_parser(commands: types.Commands) -> None:
    """Add the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "serve",
        help="serve a model behind the OpenAI API",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        description="Completions, chats, OpenAI's responses and Anthropic's messages, streamed or "
        "not; /tokenize, /health, /metrics and /version beside them. SIGTERM drains: what is under "
        f"way is finished. API keys come from a file or from the variable {_API_KEY_VARIABLE}; "
        "without either everybody may ask.",
    )
    parser.add_argument("model", metavar="MODEL", type=types.name, help="a folder, or a Hub name")
    add = parser.add_argument_group("model").add_argument
    add("--tokenizer", type=types.name, help="a folder or Hub name, where it is not the model's")
    add("--served-model-name", type=types.name, help="what clients call it; by default MODEL")
    add("--device", type=types.device, default="auto", help="auto, cpu, cuda, cuda:1 …")
    add("--dtype", choices=types.DTYPES, help="of the weights; by default as they were saved")
    add("--tensor-parallel", type=types.positive_int, default=1, help="GPUs that share the model")
    add("--chat-template", type=types.name, metavar="FILE", help="in Jinja, not the tokenizer's")
    text = "by which tool calls and reasoning are found: a JSON file, or qwen3, llama3, mistral …"
    add("--response-template", type=types.name, metavar="FILE|NAME", help=text)
    text = (
        "folder whose generation_config.json has sampling defaults; auto: the model's; vllm: none"
    )
    add("--generation-config", type=types.name, metavar="FOLDER", default="auto", help=text)
    add = parser.add_argument_group("engine").add_argument
    _add_all(add, EngineOptions, _ENGINE)
    add("--kv-dtype", choices=types.KV_DTYPES, default="auto", help="of keys and values")
    text = "compute common prefixes again"
    add("--no-prefix-caching", dest="prefix_caching", action="store_false", help=text)
    add("--deterministic", action="store_true", help="tokens do not depend on other requests")
    add = parser.add_argument_group("replicas").add_argument
    text = "engines on a GPU each, on the Ray cluster that RAY_ADDRESS names, or on this machine"
    add("--replicas", type=types.integer(1, 1024), metavar="N", help=text)
    add = parser.add_argument_group("server").add_argument
    add("--host", type=types.name, default="127.0.0.1", help="0.0.0.0 for every address")
    add("--port", type=types.port, default=8000, help="0 for any free one")
    add("--api-key-file", metavar="FILE", type=Path, help="one key per line, in UTF-8")
    text = "one prefix cache for all keys: usage tells each what others have sent"
    add("--share-prefixes", action="store_true", help=text)
    add("--protect-all", action="store_true", help="metrics and documentation need a key too")
    add("--cors-origin", action="append", default=[], metavar="URL", help="whose pages may ask")
    _add_all(add, Limits, _LIMITS)
    add("--silence-timeout", type=types.seconds, default=60, help="until a hung engine fails")
    add("--drain-timeout", type=types.seconds, default=300, help="seconds to finish, on SIGTERM")
    add("--trace", type=types.name, metavar="FILE", help="of every step, in Chrome's format")
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    parser.set_defaults(run=run, max_num_mixed_tokens=_MAX_NUM_MIXED_TOKENS)


def _add_all(add: Callable[..., object], options: type, rows: Sequence[tuple[Any, ...]]) -> None:
    """Add a flag for each of some fields, with the field's default."""
    for dest, of, metavar, text, *flags in rows:
        flag = flags[0] if flags else f"--{dest.replace('_', '-')}"
        default = getattr(options, dest)
        shown = str(default // MiB) if metavar == "MiB" else default
        add(flag, dest=dest, type=of, default=shown, metavar=metavar, help=text)


def _chosen(options: type, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of `options` that have a flag."""
    names = [each.name for each in fields(options)]
    return {each: getattr(arguments, each) for each in names if each in arguments}


def run(arguments: argparse.Namespace, out: TextIO) -> int:
    """Load and serve until a signal, then drain."""
    # Checks that need no model come before one is loaded, the cheapest first.
    _check_installed()
    _check_combination(arguments)
    from ..serve.server import create_app, run_server
    from ..serve.server.run import ending_in_order, open_socket
    from .models import load_sampling_defaults, load_tokenizer

    _set_logging(arguments)
    options_for = server_options(arguments)
    listener = open_socket(
        arguments.host, arguments.port, unread_timeout_s=arguments.send_timeout_s
    )
    with contextlib.closing(listener), ending_in_order():
        _check_engine(arguments)
        defaults = load_sampling_defaults(arguments.model, arguments.generation_config)
        tokenizer = load_tokenizer(arguments.tokenizer or arguments.model)
        with _running(arguments, tokenizer) as (engine, metrics, max_tokens, budget_bytes):
            options = options_for(max_tokens, sampling_defaults=defaults)

            def announce() -> None:
                host, port = listener.getsockname()[:2]
                host = f"[{host}]" if ":" in host else host
                of_each = f" with {arguments.replicas} replicas" if arguments.replicas else ""
                out.write(
                    f"vmkv serves {options.model_name} at http://{host}:{port}/v1{of_each}: up to "
                    f"{max_tokens:,} tokens a request, {format_bytes(budget_bytes)} for keys and "
                    f"values{' of each' if of_each else ''}, "
                    f"{'with' if options.api_keys else 'without'} API keys\n"
                )
                if defaults:
                    told = ", ".join(f"{name}={value}" for name, value in defaults.items())
                    out.write(f"requests that leave them out have {told} (--generation-config)\n")
                out.flush()

            run_server(
                create_app(engine, tokenizer, options, metrics),
                listener,
                drain_timeout_s=arguments.drain_timeout,
                log_level=arguments.log_level,
                on_ready=announce,
            )
    return 0


@contextlib.contextmanager
def _running(
    arguments: argparse.Namespace, tokenizer: Any
) -> Iterator[tuple[StreamingEngine, ServerMetrics, int, int]]:
    """Start an engine in a process of its own, or replicas, each with a tokenizer.

    Yields it, its metrics, the tokens of a request, and the memory for keys and values.
    """
    make, silence_max_s = functools.partial(_engine, arguments), arguments.silence_timeout
    if arguments.replicas:
        if importlib.util.find_spec("ray") is None:
            raise ConfigError("--replicas needs the package ray: pip install 'vmkv[ray]'")
        from ..serve.replicas.deployment import running_replicas

        on_gpus = _device(arguments.device) == "cuda"
        with running_replicas(
            make, arguments.replicas, on_gpus=on_gpus, silence_max_s=silence_max_s
        ) as (engine, shown, facts):
            yield engine, shown, facts.max_tokens, facts.budget_bytes
        return
    from ..serve.metrics import Metrics
    from ..serve.process import EngineProcess

    metrics = Metrics()
    process = EngineProcess(
        make, tokenizer=tokenizer, observer=metrics, silence_max_s=silence_max_s
    )
    with contextlib.closing(process):
        metrics.bind_pages(process.page_bytes)
        yield process, metrics, process.max_tokens, process.stats.budget_bytes


def _check_combination(arguments: argparse.Namespace) -> None:
    if arguments.tensor_parallel > 1 and ":" in arguments.device:
        raise ConfigError(
            f"--tensor-parallel takes the first GPUs, not {arguments.device}; choose them with "
            "CUDA_VISIBLE_DEVICES"
        )
    if not arguments.replicas:
        return
    if arguments.trace:
        raise ConfigError("--trace is of one engine, and --replicas would have one each")
    if arguments.tensor_parallel > 1:
        raise ConfigError("--replicas and --tensor-parallel do not go together yet: take one")
    if arguments.device.startswith("cuda:"):
        raise ConfigError(
            f"--device {arguments.device} is one GPU, and each of --replicas has its own: say "
            "--device cuda, and which GPUs in CUDA_VISIBLE_DEVICES"
        )


def _check_engine(arguments: argparse.Namespace) -> None:
    """Raise `ConfigError` for engine options that are wrong without loading the model."""
    from ..serve.memory_view import make_store
    from ..serve.scheduler import Scheduler
    from ..serve.trace import ChromeTrace
    from .models import check_device, load_config

    config = load_config(arguments.model)  # The most common error first.
    make_store(config, EngineOptions(**_chosen(EngineOptions, arguments)))
    Scheduler(arguments.max_num_seqs, arguments.max_num_batched_tokens)  # Checks its bounds.
    device = _device(arguments.device)
    if not (arguments.replicas and "RAY_ADDRESS" in os.environ):  # Else devices are remote.
        check_device(device)
    if arguments.tensor_parallel > 1:
        from ..serve.parallel.engine import checked_options
        from ..serve.parallel.localise import check_config

        checked_options(_chosen(EngineOptions, arguments))
        check_config(config, arguments.tensor_parallel)
        if device == "cuda":
            check_device(f"cuda:{arguments.tensor_parallel - 1}")
    if arguments.trace:
        ChromeTrace(arguments.trace).close()


@contextlib.contextmanager
def _engine(arguments: argparse.Namespace, observer: EngineObserver) -> Iterator[Engine]:
    """Make the engine, in its own process."""
    from ..serve.observer import Observers
    from ..serve.sampler import is_out_of_memory
    from ..serve.trace import ChromeTrace
    from .models import load_model, load_tokenizer

    _set_logging(arguments)
    device = _device(arguments.device)
    with contextlib.ExitStack() as stack:
        if arguments.trace:
            trace = stack.enter_context(contextlib.closing(ChromeTrace(arguments.trace)))
            observer = Observers([observer, trace])
        # Of every engine, for grammars.
        tokenizer = load_tokenizer(arguments.tokenizer or arguments.model)
        if arguments.tensor_parallel > 1:
            from ..serve.parallel.engine import open_parallel_engine

            parallel_engine = open_parallel_engine(
                functools.partial(_part, arguments),
                arguments.tensor_parallel,
                device_type=device,
                observer=observer,
                tokenizer=tokenizer,
                **_chosen(EngineOptions, arguments),
            )
            yield stack.enter_context(parallel_engine)
            return
        model = load_model(arguments.model, device=device, dtype=arguments.dtype)
        try:
            engine = make_engine(arguments, model, observer, tokenizer)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise CapacityError(
                f"there is no memory left for the engine's own tensors ({one_line(error)}); lower "
                "--max-num-seqs, --max-num-batched-tokens or --memory"
            ) from error
        yield stack.enter_context(engine)


def _part(arguments: argparse.Namespace, ranks: TensorParallel) -> Any:
    from ..serve.parallel.localise import load

    _set_logging(arguments)
    return load(arguments.model, ranks, dtype=arguments.dtype)


def _set_logging(arguments: argparse.Namespace) -> None:
    from .models import be_quiet

    if arguments.log_level != "debug":
        be_quiet(with_progress=sys.stderr is not None and sys.stderr.isatty())


def make_engine(
    arguments: argparse.Namespace, model: Any, observer: Any, tokenizer: Any = None
) -> Any:
    """Make the engine that the options describe."""
    from ..serve.engine import Engine

    options = _chosen(EngineOptions, arguments)
    return Engine(model, tokenizer=tokenizer, observer=observer, **options)


def server_options(arguments: argparse.Namespace) -> Callable[..., ServerOptions]:
    """Make a function from a request's token limit to server options; raises `ConfigError`."""
    from ..serve.server.guard import read_api_keys
    from ..serve.server.prompts import read_template
    from ..serve.server.reply_format import read_response_template

    template = read_template(arguments.chat_template) if arguments.chat_template else None
    response_template = None
    if arguments.response_template:
        response_template = read_response_template(arguments.response_template)
    api_keys = read_api_keys(arguments.api_key_file, os.environ.get(_API_KEY_VARIABLE))
    limits = Limits(**_chosen(Limits, arguments))
    return functools.partial(
        ServerOptions,
        arguments.served_model_name or arguments.model,
        limits=limits,
        api_keys=api_keys,
        protects_everything=arguments.protect_all,
        cors_origins=arguments.cors_origin,
        chat_template=template,
        response_template=response_template,
        share_prefixes=arguments.share_prefixes,
    )


def _device(wanted: str) -> str:
    import torch

    if wanted != "auto":
        return wanted
    return "cuda" if torch.cuda.is_available() else "cpu"


def _check_installed() -> None:
    for package in ("fastapi", "msgspec", "prometheus_client", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"serving needs the package {package}: pip install 'vmkv[serve]'")
