"""`vmkv serve`: a model behind the OpenAI API."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ..errors import CapacityError, ConfigError, one_line
from ..units import GiB, MiB, format_bytes
from .arguments import (
    DTYPES,
    KV_DTYPES,
    Commands,
    count,
    device,
    gib,
    host,
    integer,
    layers,
    name,
    port,
    positive_gib,
    positive_int,
    positive_mib,
    seconds,
)

if TYPE_CHECKING:
    from ..serve.engine import Engine
    from ..serve.observer import EngineObserver
    from ..serve.server import ServerOptions

_API_KEY_VARIABLE = "VMKV_API_KEY"
#: Of a body, by default: more than a text has, and as many as 32 prompts of 4,096 tokens.
_VALUES_PER_MIB = 8192


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "serve",
        help="serve a model behind the OpenAI API",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        description="Completions, chat, streaming; /tokenize, /health, /metrics and /version "
        "beside them. SIGTERM drains: what is under way is finished. API keys come from a file or "
        f"from the variable {_API_KEY_VARIABLE}; without either everybody may ask.",
    )
    parser.set_defaults(run=run)
    parser.add_argument("model", metavar="MODEL", type=name, help="a folder, or a Hub name")
    add = parser.add_argument_group("model").add_argument
    add("--tokenizer", type=name, help="a folder or Hub name, where it is not the model's")
    add("--served-model-name", type=name, help="what clients call it; by default MODEL")
    add("--device", type=device, default="auto", help="auto, cpu, cuda, cuda:1 …")
    add("--dtype", choices=DTYPES, help="of the weights; by default as they were saved")
    add("--tensor-parallel", type=positive_int, default=1, help="GPUs that share the model")
    add("--chat-template", type=name, metavar="FILE", help="a Jinja template, not the tokenizer's")
    add = parser.add_argument_group("engine").add_argument
    add("--max-num-seqs", type=integer(1, 1 << 16), default=256, help="sequences in a step")
    add("--max-num-batched-tokens", type=integer(1, 1 << 20), default=8192, help="tokens in a step")
    add(
        "--max-num-mixed-tokens",
        type=count,
        default=1280,
        help="tokens in a step that decodes and computes prompts, unless more of those are left "
        "than a step takes; 0 for no such bound",
    )
    add("--max-model-tokens", type=positive_int, help="prompt and output; by default the model's")
    add("--memory", type=positive_gib, metavar="GiB", help="for keys and values; by default all")
    add("--swap", type=gib, metavar="GiB", default=0, help="host memory for preempted requests")
    add("--watermark", type=gib, metavar="GiB", help="kept when idle; by default everything")
    add("--attention-backend", type=name, help="see vmkv doctor; by default the best that can run")
    add(
        "--kv-dtype",
        choices=KV_DTYPES,
        default="auto",
        help="of keys and values",
    )
    add("--kv-scales", type=name, metavar="FILE", help="of keys and values in fp8; by default 1")
    add(
        "--skip-layers",
        type=layers,
        default=(),
        metavar="LAYERS",
        help="which stay in the model's type, as in 0,1,sliding",
    )
    add("--no-prefix-caching", action="store_true", help="compute common prefixes again")
    add("--deterministic", action="store_true", help="tokens do not depend on other requests")
    add = parser.add_argument_group("replicas").add_argument
    add(
        "--replicas",
        type=integer(1, 1024),
        metavar="N",
        help="engines that share the requests, on a GPU each: by what they hold of a prompt, and "
        "by load; on the Ray cluster that RAY_ADDRESS names, or on this machine",
    )
    add = parser.add_argument_group("server").add_argument
    add("--host", type=host, default="127.0.0.1", help="0.0.0.0 for every address of the machine")
    add("--port", type=port, default=8000, help="0 for any free one")
    add("--api-key-file", metavar="FILE", type=Path, help="one key per line, in UTF-8")
    add("--protect-all", action="store_true", help="metrics and documentation need a key too")
    add("--cors-origin", action="append", default=[], metavar="URL", help="whose pages may ask")
    add("--max-body-mib", type=positive_mib, default=16, help="of a request")
    add("--max-prompt-tokens", type=positive_int, help="by default as many as the model takes")
    add("--max-concurrent", type=positive_int, default=1024, help="requests in the engine")
    add("--max-queued", type=count, default=1024, help="requests waiting for that; then 429")
    add("--max-connections", type=positive_int, default=4096, help="as far as ulimit -n permits")
    add("--max-priority", type=count, default=0, help="levels for clients to choose; 0 for none")
    add("--send-timeout", type=seconds, default=60, help="seconds a client may not read")
    add("--silence-timeout", type=seconds, default=60, help="until /health fails a hung engine")
    add("--drain-timeout", type=seconds, default=300, help="seconds to finish, on SIGTERM")
    add(
        "--trace", type=name, metavar="FILE", help="write a trace of every step, in Chrome's format"
    )
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info")


def run(arguments: argparse.Namespace, out: TextIO) -> int:
    """Load, serve, drain; returns when a signal has said stop."""
    # Everything cheap that can be wrong comes before the model is loaded.
    _check_installed()
    if arguments.replicas:
        _check_replicas(arguments)
    from ..serve.server.run import open_socket

    options_for = server_options(arguments)
    listener = open_socket(arguments.host, arguments.port, unread_timeout_s=arguments.send_timeout)
    try:
        serve = _serve_replicas if arguments.replicas else _serve
        return serve(arguments, listener, options_for, out)
    finally:
        listener.close()


def _serve(
    arguments: argparse.Namespace,
    listener: Any,
    options_for: Callable[[int], ServerOptions],
    out: TextIO,
) -> int:
    from ..hf.kv_format import KVFormat
    from ..serve.metrics import Metrics
    from ..serve.process import EngineProcess
    from ..serve.server import create_app, run_server
    from .models import load_config, load_tokenizer

    _set_logging(arguments)
    config = load_config(arguments.model)  # The plainest error first.
    KVFormat.of(config, arguments.kv_dtype, arguments.kv_scales, arguments.skip_layers)
    _check_engine(arguments, config)
    tokenizer = load_tokenizer(arguments.tokenizer or arguments.model)
    metrics = Metrics()
    engine = EngineProcess(
        functools.partial(_engine, arguments),
        tokenizer=tokenizer,
        observer=metrics,
        silence_max_s=arguments.silence_timeout,
    )
    try:
        metrics.bind_pages(engine.page_bytes)
        options = options_for(engine.max_tokens)
        app = create_app(engine, tokenizer, options, metrics)

        def announce() -> None:
            host, port = listener.getsockname()[:2]
            out.write(
                f"vmkv serves {options.model_name} at http://{_as_host(host)}:{port}/v1: up to "
                f"{engine.max_tokens:,} tokens a request, "
                f"{format_bytes(engine.stats.budget_bytes)} for keys and values, "
                f"{'with' if options.api_keys else 'without'} API keys\n"
            )
            out.flush()

        run_server(
            app,
            listener,
            drain_timeout_s=arguments.drain_timeout,
            log_level=arguments.log_level,
            on_ready=announce,
        )
    finally:
        engine.close()
    return 0


def _serve_replicas(
    arguments: argparse.Namespace,
    listener: Any,
    options_for: Callable[[int], ServerOptions],
    out: TextIO,
) -> int:
    from ..serve.replicas.local import running_replicas
    from ..serve.server import create_app, run_server
    from .models import load_config, load_tokenizer

    _set_logging(arguments)
    config = load_config(arguments.model)  # The plainest error first.
    _check_engine(arguments, config)
    tokenizer = load_tokenizer(arguments.tokenizer or arguments.model)
    make = functools.partial(_replica_engine, arguments)
    on_gpus = _device(arguments.device) == "cuda"
    with running_replicas(make, arguments.replicas, on_gpus=on_gpus) as replicas:
        options = options_for(replicas.facts.max_tokens)
        app = create_app(replicas.engine, tokenizer, options, replicas.metrics)

        def announce() -> None:
            host, port = listener.getsockname()[:2]
            out.write(
                f"vmkv serves {options.model_name} at http://{_as_host(host)}:{port}/v1 with "
                f"{arguments.replicas} replicas: up to {replicas.facts.max_tokens:,} tokens a "
                f"request, {format_bytes(replicas.facts.budget_bytes)} for keys and values of "
                f"each, {'with' if options.api_keys else 'without'} API keys\n"
            )
            out.flush()

        run_server(
            app,
            listener,
            drain_timeout_s=arguments.drain_timeout,
            log_level=arguments.log_level,
            on_ready=announce,
        )
    return 0


def _replica_engine(
    arguments: argparse.Namespace, observer: EngineObserver
) -> contextlib.AbstractContextManager[Engine]:
    """The engine of a replica, in its process, where its tokens become text."""
    from .models import load_tokenizer

    return _engine(arguments, observer, load_tokenizer(arguments.tokenizer or arguments.model))


def _check_replicas(arguments: argparse.Namespace) -> None:
    if arguments.trace:
        raise ConfigError("--trace is of one engine, and --replicas would have one each")
    if arguments.tensor_parallel > 1:
        raise ConfigError("--replicas and --tensor-parallel do not go together yet: take one")
    if arguments.device.startswith("cuda:"):
        raise ConfigError(
            f"--device {arguments.device} is one GPU, and each of --replicas has its own: say "
            "--device cuda, and which GPUs in CUDA_VISIBLE_DEVICES"
        )
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("--replicas needs the package ray: pip install 'vmkv[ray]'")


def _check_engine(arguments: argparse.Namespace, config: Any) -> None:
    """Refuse what can be refused before a process is started and the model loaded.

    Raises:
        ConfigError: There can be no such engine.
    """
    from ..attention import registry
    from ..serve.planning import Capacity
    from ..serve.trace import ChromeTrace
    from .models import check_device

    Capacity(arguments.max_num_seqs, arguments.max_num_batched_tokens)
    check_device(_device(arguments.device))
    if arguments.tensor_parallel > 1:
        from ..parallel.loading import check_config

        check_config(config, arguments.tensor_parallel)
        if ":" in arguments.device:
            raise ConfigError(
                f"--tensor-parallel takes the first GPUs, not {arguments.device}; choose them with "
                "CUDA_VISIBLE_DEVICES"
            )
    backend = arguments.attention_backend
    if backend is not None and backend not in registry.backend_names():
        registry.get(backend)  # Says which there are.
    if arguments.trace:
        ChromeTrace(arguments.trace).close()


@contextlib.contextmanager
def _engine(
    arguments: argparse.Namespace, observer: EngineObserver, tokenizer: Any = None
) -> Iterator[Engine]:
    """The engine, in the process that it has for itself."""
    from ..serve.failures import is_out_of_memory
    from ..serve.observer import Observers
    from ..serve.trace import ChromeTrace
    from .models import load_model

    _set_logging(arguments)
    with contextlib.ExitStack() as stack:
        observers = [observer]
        if arguments.trace:
            trace = ChromeTrace(arguments.trace)
            stack.callback(trace.close)
            observers.append(trace)
        if arguments.tensor_parallel > 1:
            yield stack.enter_context(_parallel_engine(arguments, Observers(observers)))
            return
        model = load_model(arguments.model, device=_device(arguments.device), dtype=arguments.dtype)
        try:
            engine = make_engine(arguments, model, Observers(observers), tokenizer)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise CapacityError(
                f"there is no memory left for the engine's own tensors ({one_line(error)}); lower "
                "--max-num-seqs, --max-num-batched-tokens or --memory"
            ) from error
        yield stack.enter_context(engine)


def _parallel_engine(
    arguments: argparse.Namespace, observer: EngineObserver
) -> AbstractContextManager[Engine]:
    """The engine over several devices: its other ranks are processes of this one."""
    from ..serve.parallel_engine import open_parallel_engine

    return open_parallel_engine(
        arguments.model,
        arguments.tensor_parallel,
        device_type=_device(arguments.device),
        dtype=arguments.dtype,
        observer=observer,
        **_engine_options(arguments),
    )


def _set_logging(arguments: argparse.Namespace) -> None:
    from .models import be_quiet

    if arguments.log_level != "debug":
        be_quiet(with_progress=sys.stderr is not None and sys.stderr.isatty())


def make_engine(
    arguments: argparse.Namespace, model: Any, observer: Any, tokenizer: Any = None
) -> Any:
    """The engine that the options describe."""
    from ..serve.engine import Engine

    return Engine(model, tokenizer=tokenizer, observer=observer, **_engine_options(arguments))


def _engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    watermark = arguments.watermark
    return {
        "max_num_seqs": arguments.max_num_seqs,
        "max_num_batched_tokens": arguments.max_num_batched_tokens,
        "max_num_mixed_tokens": arguments.max_num_mixed_tokens or None,
        "max_tokens": arguments.max_model_tokens,
        "budget_bytes": None if arguments.memory is None else round(arguments.memory * GiB),
        "host_budget_bytes": round(arguments.swap * GiB),
        "watermark_bytes": None if watermark is None else round(watermark * GiB),
        "attention_backend": arguments.attention_backend,
        "kv_dtype": arguments.kv_dtype,
        "kv_scales": arguments.kv_scales,
        "skip_layers": arguments.skip_layers,
        "deterministic": arguments.deterministic,
        "prefix_caching": not arguments.no_prefix_caching,
    }


def server_options(arguments: argparse.Namespace) -> Callable[[int], ServerOptions]:
    """The server that the options describe, for requests of so many tokens at most.

    Raises:
        ConfigError: It cannot be.
    """
    from ..serve.server import Limits, ServerOptions
    from ..serve.server.keys import read_api_keys
    from ..serve.server.prompts import read_template

    template = read_template(arguments.chat_template) if arguments.chat_template else None
    api_keys = read_api_keys(arguments.api_key_file, os.environ.get(_API_KEY_VARIABLE))
    limits = Limits(
        max_connections=arguments.max_connections,
        max_body_bytes=round(arguments.max_body_mib * MiB),
        max_held_bytes=round(8 * arguments.max_body_mib * MiB),
        max_values=max(1, round(arguments.max_body_mib * _VALUES_PER_MIB)),
        max_prompt_tokens=arguments.max_prompt_tokens,
        max_concurrent=arguments.max_concurrent,
        max_queued=arguments.max_queued,
        max_priority=arguments.max_priority,
        send_timeout_s=arguments.send_timeout,
    )
    return lambda max_model_tokens: ServerOptions(
        model_name=arguments.served_model_name or arguments.model,
        max_model_tokens=max_model_tokens,
        limits=limits,
        api_keys=api_keys,
        protects_everything=arguments.protect_all,
        cors_origins=arguments.cors_origin,
        chat_template=template,
    )


def _device(wanted: str) -> str:
    import torch

    if wanted != "auto":
        return wanted
    return "cuda" if torch.cuda.is_available() else "cpu"


def _as_host(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _check_installed() -> None:
    try:
        import fastapi  # noqa: F401
        import msgspec  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"serving needs the package {error.name}: pip install 'vmkv[serve]'"
        ) from error
