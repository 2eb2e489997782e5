"""`vmkv serve`: a model behind the OpenAI API."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import logging
import os
import re
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO, TypeAlias

from .. import compile_cache
from ..errors import CapacityError, ConfigError, VMKVError, one_line
from ..phases import phase, without_collections
from ..serve.options import LOGPROBS_MODES, EngineOptions, Limits, ServerOptions, described
from ..units import DTYPES, KV_DTYPES, GiB, MiB, format_bytes
from . import arguments as types
from .folders import check_folder
from .progress import Progress, handling, on_stderr

if TYPE_CHECKING:
    from ..core.memory import Broker
    from ..serve.engine import Engine
    from ..serve.observer import EngineObserver
    from ..serve.parallel import TensorParallel
    from ..serve.server.service import ServerMetrics, Service, StreamingEngine
    from ..serve.start import StartedProcess

_LOG = logging.getLogger(__name__)
_API_KEY_VARIABLE = "VMKV_API_KEY"
Flags: TypeAlias = dict[str, tuple[Any, ...]]
#: Flags of `EngineOptions`: for each field the type, the metavar and, if they are not the field's
#: name, the flags; those after the first are vLLM's. Helps are the fields' descriptions.
_ENGINE: Flags = {
    "max_num_seqs": (types.integer(1, 1 << 16), "N"),
    "max_num_batched_tokens": (types.integer(1, 1 << 20), "N"),
    "max_num_mixed_tokens": (types.count_or_none, "N"),
    "max_tokens": (types.positive_int, "N", "--max-model-tokens", "--max-model-len"),
    "budget_bytes": (types.positive_gib, "GiB", "--memory"),
    "memory_fraction": (types.share, "SHARE", "--gpu-memory-utilization"),
    "pool_socket": (types.name, "PATH", "--pool"),
    "floor_bytes": (types.gib, "GiB", "--floor"),
    "pool_weight": (types.number(0.001, 1000, "weights"), "W", "--weight"),
    "host_budget_bytes": (types.gib, "GiB", "--swap"),
    "disk_folder": (types.name, "FOLDER", "--disk"),
    "disk_budget_bytes": (types.gib, "GiB", "--disk-size"),
    "watermark_bytes": (types.gib, "GiB", "--watermark"),
    "enable_sleep_mode": (bool, None),
    "sleep_after_s": (types.seconds, "S", "--sleep-after"),
    "sleep_keeps_prefixes": (bool, None),
    "attention_backend": (types.name, "NAME"),
    "kv_dtype": (KV_DTYPES, None, "--kv-dtype", "--kv-cache-dtype"),
    "kv_scales": (types.name, "FILE"),
    "skip_layers": (types.layers, "LAYERS"),
    "prefix_caching": (bool, None, "--prefix-caching", "--enable-prefix-caching"),
    "deterministic": (bool, None),
    "seed": (types.count, "N"),
    "logprobs_mode": (LOGPROBS_MODES, None),
    "speculative_config": (types.name, "JSON"),
}
#: Flags of `Limits`, likewise.
_LIMITS: Flags = {
    "max_body_bytes": (types.positive_mib, "MiB", "--max-body-mib"),
    "max_prompt_tokens": (types.positive_int, "N"),
    "max_concurrent": (types.positive_int, "N"),
    "max_queued": (types.count, "N"),
    "max_connections": (types.positive_int, "N"),
    "max_priority": (types.count, "N"),
    "send_timeout_s": (types.seconds, "S", "--send-timeout"),
}
_OF_ONE_MODEL = (
    *("--tokenizer", "--served-model-name", "--revision", "--kv-scales", "--trace"),
    *("--chat-template", "--response-template"),
)
#: Here requests arrive one by one, so that long mixed steps would delay tokens.
_MAX_NUM_MIXED_TOKENS = 1024


def add_parser(commands: types.Commands) -> None:
    """Add the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "serve",
        help="serve a model behind the OpenAI API",
        formatter_class=types.DefaultsFormatter,
        description="Completions, chats, OpenAI's responses and Anthropic's messages, streamed or "
        "not; also /tokenize, /health, /metrics and /version. SIGTERM drains: running requests are "
        "finished. API keys come from --api-key, a file or the variable "
        f"{_API_KEY_VARIABLE}; without a key, every client is served.",
    )
    text = "a folder, or a Hub name; several have an engine each, and share the memory by need"
    parser.add_argument("models", metavar="MODEL", type=types.name, nargs="+", help=text)
    add = parser.add_argument_group("model").add_argument
    types.add_source(add)
    add("--tokenizer", type=types.name, help="folder or Hub name, if it is not the model's")
    add("--served-model-name", type=types.name, help="model name in requests (default: MODEL)")
    add("--lazy", action="store_true", help="load each model at its first request")
    add("--device", type=types.device, default="auto", help="auto, cpu, cuda, cuda:1 …")
    add("--dtype", choices=("auto", *DTYPES), help="weight dtype (default: auto, as saved)")
    flags, text = ("--tensor-parallel", "--tensor-parallel-size"), "GPUs that share the model"
    add(*flags, type=types.positive_int, default=1, help=text)
    add("--chat-template", type=types.name, metavar="FILE", help="Jinja template to use instead")
    text = "format of tool calls and reasoning: a JSON file, or qwen3, llama3, mistral …"
    add("--response-template", type=types.name, metavar="FILE|NAME", help=text)
    text = (
        "folder whose generation_config.json has sampling defaults; auto: the model's; vllm: none"
    )
    add("--generation-config", type=types.name, metavar="FOLDER", default="auto", help=text)
    add = parser.add_argument_group("engine").add_argument
    _add_all(add, EngineOptions, _ENGINE)
    add = parser.add_argument_group("replicas").add_argument
    text = "number of engines, each on a GPU, on the Ray cluster of RAY_ADDRESS or on this machine"
    add("--replicas", type=types.integer(1, 1024), metavar="N", help=text)
    add = parser.add_argument_group("server").add_argument
    add("--host", type=types.name, default="127.0.0.1", help="address; 0.0.0.0 for all")
    add("--port", type=types.port, default=8000, help="port; 0 for any free one")
    text = "key that clients must send; may be repeated. Other users of this machine can see it"
    add("--api-key", metavar="KEY", type=types.name, action="append", default=[], help=text)
    add("--api-key-file", metavar="FILE", type=Path, help="file of keys, one per line, in UTF-8")
    text = "one prefix cache for all API keys: cached_tokens then shows what others have sent"
    add("--share-prefixes", action="store_true", help=text)
    add("--protect-all", action="store_true", help="metrics and documentation need a key too")
    add("--cors-origin", action="append", default=[], metavar="URL", help="origin of allowed pages")
    _add_all(add, Limits, _LIMITS)
    text = "seconds without a finished step after which a busy engine counts as hung"
    add("--silence-timeout", type=types.seconds, default=60, help=text)
    text = "seconds to finish requests on SIGTERM"
    add("--drain-timeout", type=types.seconds, default=300, help=text)
    add("--trace", type=types.name, metavar="FILE", help="write a trace in Chrome's format")
    flags, text = ("--log-requests", "--enable-log-requests"), "log requests (the default)"
    add(*flags, action=argparse.BooleanOptionalAction, help=text)
    text = "do not log each request on stderr"
    add("--disable-log-requests", dest="log_requests", action="store_false", help=text)
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    # `_part_of` sets the model.
    parser.set_defaults(run=run, model=None, log_requests=True)
    parser.set_defaults(max_num_mixed_tokens=_MAX_NUM_MIXED_TOKENS)


def _add_all(add: Callable[..., object], options: type, flags_of: Flags) -> None:
    """Add a flag for each of some fields, with the field's default and description."""
    for dest, (of, metavar, *flags) in flags_of.items():
        default, text = getattr(options, dest), described(options)[dest]
        given: dict[str, Any] = {"type": of, "metavar": metavar}
        if isinstance(of, tuple):
            given = {"choices": of}
        elif of is bool:
            given = {"action": argparse.BooleanOptionalAction if default else "store_true"}
        shown = str(default // MiB) if metavar == "MiB" else default
        flags = flags or [f"--{dest.replace('_', '-')}"]
        add(*flags, dest=dest, default=shown, help=text, **given)


def chosen(options: type, arguments: Namespace) -> dict[str, Any]:
    """Return the fields of `options` that were parsed, by name."""
    names = [each.name for each in fields(options)]
    return {each: getattr(arguments, each) for each in names if each in arguments}


def run(arguments: Namespace, out: TextIO) -> int:
    """Load and serve until a signal, then drain."""
    # Checks that need no model come before one is loaded, the cheapest first.
    with _names_of_options():
        _check_combination(arguments)
    for each in arguments.models:
        check_folder(each)
    options_for = [server_options(_part_of(arguments, each, None)) for each in arguments.models]
    from ..serve.start import ending_in_order, holding_signals, open_socket, start_process

    arguments.began_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        listener = open_socket(
            arguments.host, arguments.port, unread_timeout_s=arguments.send_timeout_s
        )
        stack.enter_context(contextlib.closing(listener))
        stack.enter_context(ending_in_order())
        progress = stack.enter_context(_progress(arguments))
        if arguments.log_requests:
            stack.enter_context(_log_of(arguments, "vmkv.serve.server.guard"))
        stack.enter_context(_names_of_options())
        broker = _broker(stack, arguments)
        parts = [_part_of(arguments, model, broker) for model in arguments.models]
        started: list[StartedProcess | None] = [None] * len(parts)
        if not (arguments.replicas or arguments.lazy):
            for at, each in enumerate(parts):
                process = start_process(functools.partial(_engine, each))
                started[at] = stack.enter_context(contextlib.closing(process))
        compile_cache.choose_bytecode_folder()
        imports = phase("importing torch and transformers")
        with holding_signals(), imports, without_collections():
            from ..serve.metrics import BrokerMetrics
            from ..serve.server import create_app_for, run_server
            from ..serve.server.reply_format import ReplyFormat

        _set_logging(arguments)
        with holding_signals():
            if (template := options_for[0].keywords["response_template"]) is not None:
                ReplyFormat(template)  # Raises for what is no response template.
            longest = [_check_engine(each) for each in parts]
        every = zip(parts, started, longest, options_for, strict=True)
        served = [_serve(stack, *its) for its in every]
        services, options = [each.service for each in served], served[0].options

        def announce() -> None:
            host, port = listener.getsockname()[:2]
            host = f"[{host}]" if ":" in host else host
            if progress is not None:
                progress.write("listening")
            out.writelines(_announcement(arguments, f"http://{host}:{port}/v1", served, broker))
            out.flush()

        common = [] if broker is None else [BrokerMetrics(broker)]
        run_server(
            create_app_for(services, options, common),
            listener,
            drain_timeout_s=arguments.drain_timeout,
            log_level=arguments.log_level,
            on_ready=announce,
        )
    return 0


class _Served(NamedTuple):
    service: Service
    options: ServerOptions
    budget_bytes: int


def _serve(
    stack: contextlib.ExitStack,
    arguments: Namespace,
    started: StartedProcess | None,
    longest: int,
    options_for: Callable[..., ServerOptions],
) -> _Served:
    from ..serve.metrics import Metrics
    from ..serve.process import EngineProcess
    from ..serve.server import Service
    from .models import load_sampling_defaults

    defaults = load_sampling_defaults(
        arguments.model, arguments.generation_config, revision=arguments.revision
    )
    tokenizer, make = _tokenizer(arguments), functools.partial(_engine, arguments)
    engine: StreamingEngine
    metrics: ServerMetrics
    if arguments.replicas:
        engine, metrics, (max_tokens, budget_bytes) = _replicas(stack, arguments, make)
    else:
        metrics = Metrics()
        engine = EngineProcess(
            make,
            tokenizer=tokenizer,
            observer=metrics,
            started=started,
            is_lazy=arguments.lazy,
            silence_max_s=arguments.silence_timeout,
        )
        stack.enter_context(contextlib.closing(engine))
        metrics.bind_pages(lambda: engine.page_bytes)
        max_tokens, budget_bytes = longest, 0  # Until a lazy model is loaded.
        if not arguments.lazy:
            max_tokens, budget_bytes = engine.max_tokens, engine.stats.budget_bytes
    if max_tokens < longest:
        _LOG.warning(
            "the memory for keys and values holds requests of up to %d tokens, and the model takes "
            "up to %d: raise --memory",
            max_tokens,
            longest,
        )
    options = options_for(max_tokens, sampling_defaults=defaults)
    return _Served(Service(engine, tokenizer, options, metrics), options, budget_bytes)


def _announcement(
    arguments: Namespace, url: str, served: Sequence[_Served], broker: Broker | None
) -> Iterator[str]:
    of_each = f" with {arguments.replicas} replicas" if arguments.replicas else ""
    names = ", ".join(each.options.model_name for each in served)
    first, tokens = served[0], ""
    if len(served) == 1:
        tokens = f"up to {first.options.max_model_tokens:,} tokens a request, "
    memory = f"{format_bytes(first.budget_bytes)} for keys and values"
    if broker is not None:
        known = broker.budget_bytes and format_bytes(broker.budget_bytes)
        memory = f"{known or 'what is free'} for keys and values of all"
    elif arguments.pool_socket is not None:
        memory = f"memory of the pool at {arguments.pool_socket}"
    yield (
        f"vmkv serves {names} at {url}{of_each}: {tokens}{memory}{' of each' if of_each else ''}, "
        f"{'with' if first.options.api_keys else 'without'} API keys\n"
    )
    if broker is not None:
        yield f"other programs join its memory at {broker.socket_path}\n"
    for each in served:
        if defaults := each.options.sampling_defaults:
            told = ", ".join(f"{name}={value}" for name, value in defaults.items())
            of = f" of {each.options.model_name}" if len(served) > 1 else ""
            yield f"default sampling parameters{of}: {told} (--generation-config)\n"


def _broker(stack: contextlib.ExitStack, arguments: Namespace) -> Broker | None:
    """Open the broker of several models, where none is named; it ends with the stack."""
    if len(arguments.models) == 1 or arguments.pool_socket is not None:
        return None
    from ..core.memory import Broker

    path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vmkv-"))) / "pool.sock"
    broker = Broker(path, arguments.budget_bytes, kills_after_s=arguments.silence_timeout)
    return stack.enter_context(broker)


def _part_of(arguments: Namespace, model: str, broker: Broker | None) -> Namespace:
    part = Namespace(**vars(arguments))
    part.model = model
    if broker is not None:
        part.pool_socket, part.budget_bytes = broker.socket_path, None
    if arguments.disk_folder and len(arguments.models) > 1:  # A folder is for one engine.
        part.disk_folder = Path(arguments.disk_folder) / f"model-{model.replace('/', '--')}"
    return part


def _progress(arguments: Namespace) -> AbstractContextManager[Progress | None]:
    if arguments.log_level not in ("debug", "info") or arguments.replicas:
        return contextlib.nullcontext()
    return handling("vmkv.phases", Progress(arguments.began_s))


def _log_of(arguments: Namespace, name: str) -> AbstractContextManager[object]:
    if arguments.log_level not in ("debug", "info"):
        return contextlib.nullcontext()
    return on_stderr(name)


@contextlib.contextmanager
def _names_of_options() -> Iterator[None]:
    rows = _ENGINE.items()
    names = {dest: (*flags, f"--{dest.replace('_', '-')}")[0] for dest, (_, _, *flags) in rows}
    names["tokenizer="] = "--tokenizer"
    pattern = re.compile(rf"\b({'|'.join(each for each in names if '_' in each)})\b|\btokenizer=")
    try:
        yield
    except VMKVError as error:
        if error.args and isinstance(error.args[0], str):
            message = pattern.sub(lambda found: names[found.group()], error.args[0])
            error.args = (message, *error.args[1:])
        raise


def _replicas(
    stack: contextlib.ExitStack, arguments: Namespace, make: Any
) -> tuple[StreamingEngine, ServerMetrics, tuple[int, int]]:
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("--replicas needs the package ray: pip install 'vmkv[ray]'")
    if "RAY_ADDRESS" not in os.environ:
        # Ray listens on this machine's loopback alone, as by default on other systems.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    from ..serve.replicas.deployment import running_replicas

    its = {"on_gpus": _device(arguments.device) == "cuda"}
    replicas = running_replicas(
        make, arguments.replicas, **its, silence_max_s=arguments.silence_timeout
    )
    engine, facts = stack.enter_context(replicas)
    return engine, engine.metrics, facts


def _check_combination(arguments: Namespace) -> None:
    if None not in (arguments.budget_bytes, arguments.memory_fraction):
        raise ConfigError("--memory and --gpu-memory-utilization exclude each other: take one")
    if arguments.tensor_parallel > 1 and ":" in arguments.device:
        raise ConfigError(
            f"--tensor-parallel takes the first GPUs, not {arguments.device}; choose them with "
            "CUDA_VISIBLE_DEVICES"
        )
    given = EngineOptions(**chosen(EngineOptions, arguments))
    can_sleep, speculation = given.can_sleep, given.speculation
    if speculation is not None and speculation.model is not None:
        check_folder(speculation.model)
    if arguments.sleep_keeps_prefixes and not (can_sleep and arguments.host_budget_bytes):
        raise ConfigError(
            "--sleep-keeps-prefixes needs --sleep-after or --enable-sleep-mode, and --swap memory"
        )
    if arguments.disk_folder and not arguments.host_budget_bytes:
        raise ConfigError("--disk needs --swap memory, which blocks pass through")
    _check_sharing(arguments)
    if not arguments.replicas:
        return
    if can_sleep:
        raise ConfigError("--replicas do not sleep: leave --sleep-after, --enable-sleep-mode out")
    if arguments.disk_folder:
        raise ConfigError("a --disk folder is for one engine, --replicas are several: leave it out")
    if arguments.trace:
        raise ConfigError("--trace is for one engine, --replicas are several: leave --trace out")
    if arguments.tensor_parallel > 1:
        raise ConfigError("--replicas and --tensor-parallel do not go together yet: take one")
    if arguments.device.startswith("cuda:"):
        raise ConfigError(
            f"--device {arguments.device} is one GPU, and each of --replicas has its own: say "
            "--device cuda, and which GPUs in CUDA_VISIBLE_DEVICES"
        )


def _check_sharing(arguments: Namespace) -> None:
    is_shared = arguments.pool_socket is not None or len(arguments.models) > 1
    what = "several models" if len(arguments.models) > 1 else "--pool"
    if is_shared and arguments.replicas:
        raise ConfigError(f"--replicas and {what} do not go together: replicas have a GPU each")
    if not is_shared and (arguments.floor_bytes or arguments.pool_weight != 1):
        raise ConfigError("--floor and --weight need shared memory: name a --pool, or more models")
    if arguments.lazy and len(arguments.models) == 1:
        raise ConfigError("--lazy is for several models: leave it out, or name more models")
    if arguments.lazy and arguments.pool_socket is None and arguments.budget_bytes is None:
        raise ConfigError(
            "--lazy needs --memory, the memory for keys and values of all models, which leaves "
            "room for the weights of those that are loaded later"
        )
    if len(arguments.models) == 1:
        return
    if len(set(arguments.models)) < len(arguments.models):
        raise ConfigError("a model is named twice, and clients choose by its name: leave one out")
    for flag in _OF_ONE_MODEL:
        if getattr(arguments, flag[2:].replace("-", "_")) is not None:
            raise ConfigError(f"{flag} is for one model: start one server per model, with a --pool")


def _check_engine(arguments: Namespace) -> int:
    """Check engine options without loading the model; return the tokens of the longest request."""
    from ..hf.compat import check_device
    from ..serve.scheduler import Scheduler
    from ..serve.served_rows import make_store
    from .models import check_servable, load_config, longest_request

    # The most common error first.
    config = load_config(arguments.model, **types.source_of(arguments))
    check_servable(arguments.model, config)
    longest = longest_request(config, arguments.max_tokens)
    _check_memory(arguments, config)
    make_store(config, EngineOptions(**chosen(EngineOptions, arguments)))
    Scheduler(arguments.max_num_seqs, arguments.max_num_batched_tokens)  # Checks its bounds.
    device = _device(arguments.device)
    if not (arguments.replicas and "RAY_ADDRESS" in os.environ):  # Else devices are remote.
        check_device(device)
    if arguments.tensor_parallel > 1:
        from ..serve.parallel.engine import checked_options
        from ..serve.parallel.localise import check_config

        checked_options(chosen(EngineOptions, arguments))
        check_config(config, arguments.tensor_parallel)
        if device == "cuda":
            check_device(f"cuda:{arguments.tensor_parallel - 1}")
    return longest


def _check_memory(arguments: Namespace, config: Any) -> None:
    # Larger budgets hold one of any model; the model's shape takes a second.
    if arguments.budget_bytes is None or arguments.budget_bytes >= GiB:
        return
    from .capacity import kind_bytes, model_shape

    shape = model_shape(config, kv_dtype=arguments.kv_dtype, num_ranks=arguments.tensor_parallel)
    least_bytes = sum(kind_bytes(each, 1).prompt_bytes for each in shape.kinds if each.is_paged)
    if arguments.budget_bytes < least_bytes:
        raise ConfigError(
            f"--memory of {format_bytes(arguments.budget_bytes)} does not hold one token of this "
            f"model, which takes {format_bytes(least_bytes)}: raise it"
        )


@contextlib.contextmanager
def _engine(arguments: Namespace, observer: EngineObserver) -> Iterator[Engine]:
    from ..core.cache.device_memory import check_budgets
    from ..hf.compat import load_model
    from ..serve.engine import Engine
    from ..serve.observer import Observers
    from ..serve.sampler import is_out_of_memory
    from ..serve.trace import ChromeTrace

    _set_logging(arguments)
    device = _device(arguments.device)
    with contextlib.ExitStack() as stack, contextlib.ExitStack() as start:
        progress = start.enter_context(_progress(arguments))
        start.enter_context(compile_cache.compiler_folder())
        stack.enter_context(_log_of(arguments, "vmkv.serve.engine"))
        if arguments.trace:
            trace = stack.enter_context(contextlib.closing(ChromeTrace(arguments.trace)))
            observer = Observers([observer, trace])
        # For grammars; weights are copied meanwhile, mostly without the lock of the interpreter.
        loading = start.enter_context(ThreadPoolExecutor(1)).submit(_tokenizer, arguments)
        engine: Engine
        if arguments.tensor_parallel > 1:
            from ..serve.parallel.engine import open_parallel_engine

            parallel_engine = open_parallel_engine(
                functools.partial(_part, arguments),
                arguments.tensor_parallel,
                device_type=device,
                observer=observer,
                tokenizer=loading.result(),
                **chosen(EngineOptions, arguments),
            )
            engine = stack.enter_context(parallel_engine)
        else:
            check_budgets(device, arguments.budget_bytes, arguments.host_budget_bytes)
            with phase("loading weights"):
                source = types.source_of(arguments)
                model = load_model(arguments.model, device=device, dtype=arguments.dtype, **source)
            try:
                its = {"tokenizer": loading.result(), **chosen(EngineOptions, arguments)}
                engine = stack.enter_context(Engine(model, observer=observer, **its))
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                raise CapacityError(
                    f"there is no memory left for the engine's own tensors ({one_line(error)}); "
                    "lower --max-num-seqs, --max-num-batched-tokens or --memory"
                ) from error
        start.close()  # Keeps the compiler's files.
        if progress is not None:
            progress.write(f"the engine is ready: {progress.summary()}")
        yield engine


def _tokenizer(arguments: Namespace) -> Any:
    from ..hf.compat import load_tokenizer

    name = arguments.tokenizer or arguments.model
    with phase("loading the tokenizer"):
        return load_tokenizer(name, **types.source_of(arguments, name))


def _part(arguments: Namespace, ranks: TensorParallel) -> Any:
    from ..serve.parallel.localise import load

    _set_logging(arguments)
    with phase("loading weights"):
        return load(arguments.model, ranks, dtype=arguments.dtype, **types.source_of(arguments))


def _set_logging(arguments: Namespace) -> None:
    from .models import be_quiet

    if arguments.log_level != "debug":
        be_quiet(with_progress=sys.stderr is not None and sys.stderr.isatty())


def server_options(arguments: Namespace) -> functools.partial[ServerOptions]:
    """Make a function from a request's token limit to server options; reads the files they name."""
    from ..serve.files import read_api_keys, read_response_template, read_template

    file, name = arguments.chat_template, arguments.response_template
    from_file = read_api_keys(arguments.api_key_file, os.environ.get(_API_KEY_VARIABLE))
    return functools.partial(
        ServerOptions,
        arguments.served_model_name or arguments.model,
        limits=Limits(**chosen(Limits, arguments)),
        api_keys=[*arguments.api_key, *from_file],
        protects_everything=arguments.protect_all,
        cors_origins=arguments.cors_origin,
        chat_template=read_template(file) if file else None,
        response_template=read_response_template(name) if name else None,
        share_prefixes=arguments.share_prefixes,
        can_sleep=EngineOptions(**chosen(EngineOptions, arguments)).can_sleep,
    )


def _device(wanted: str) -> str:
    import torch

    if wanted != "auto":
        return wanted
    return "cuda" if torch.cuda.is_available() else "cpu"
