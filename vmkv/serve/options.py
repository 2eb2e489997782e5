"""Options of the engine and of its server; each default stands here only.

Their keywords are those of `Engine`, `Limits` and `ServerOptions`. `vmkv serve` has flags for most,
whose helps are the first sentences here. This module imports no torch, so that the help is quick.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.offload_options import check_offload_options
from ..errors import ConfigError, shown
from ..units import MiB

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..hf.kv_format import KVScales, SkipLayers

#: More priority levels would make waiting times practically unbounded: Note [Waiting is bounded].
_PRIORITY_MAX = 16
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
"""Choices of `EngineOptions.logprobs_mode`."""
_MAY_BE_ZERO = ("max_queued", "max_priority")


SPECULATION_METHODS = ("ngram", "suffix", "draft_model")
"""Methods of `EngineOptions.speculative_config`."""
#: Guesses of a request in a step: by default, and at most.
_NUM_GUESSES, _NUM_GUESSES_MAX = 8, 32


class Speculation(NamedTuple):
    """How tokens are guessed, the most guesses of a request in a step, and a draft model."""

    method: str
    num_speculative_tokens: int = _NUM_GUESSES
    model: Any = None  # A folder, a Hub name, or a module.

    @classmethod
    def of(cls, config: Mapping[str, Any] | str) -> Speculation:
        """Read vLLM's `speculative_config`, a mapping or JSON; `ConfigError` if it is wrong."""
        try:
            given = json.loads(config) if isinstance(config, str) else config
            found = cls(**given)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"speculative_config={shown(config)} must be a JSON object with method, "
                "num_speculative_tokens and, for a draft model, model alone: "
                "where texts are looked up, and when guesses pay, is found out while serving"
            ) from error
        if found.method not in SPECULATION_METHODS:
            raise ConfigError(
                f"speculative_config: method={shown(found.method)} is none of "
                f"{', '.join(SPECULATION_METHODS)}; draft heads are not served"
            )
        if (found.method == "draft_model") != (found.model is not None):
            raise ConfigError(
                'speculative_config: the method "draft_model" needs a model, and no other takes one'
            )
        is_name = isinstance(found.model, (str, os.PathLike)) and str(found.model)
        if not (found.model is None or is_name or hasattr(found.model, "parameters")):
            raise ConfigError(
                f"speculative_config: model={shown(found.model)} must be a folder, a name on the "
                "Hub or a module"
            )
        count = found.num_speculative_tokens
        if type(count) is not int or not 1 <= count <= _NUM_GUESSES_MAX:
            raise ConfigError(
                f"speculative_config: num_speculative_tokens={shown(count)} must be an integer, "
                f"from 1 to {_NUM_GUESSES_MAX}"
            )
        return found


@functools.cache
def described(options: type) -> dict[str, str]:
    """Return the first sentence of each attribute's description."""
    found = re.findall(r"^    (\w+): ((?:.|\n {8})+)", inspect.getdoc(options) or "", re.MULTILINE)
    texts = {name: " ".join(text.split()).partition(". ")[0] for name, text in found}
    return {name: text[0].lower() + text[1:].rstrip(".") for name, text in texts.items()}


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of an engine.

    Attributes:
        max_num_seqs: Maximum number of running requests. Each slot takes 5 bytes of device memory
            per vocabulary entry, allocated at the start.
        max_num_batched_tokens: Token budget of a step; longer prompts take several steps.
        max_num_mixed_tokens: Token budget of a step that both decodes and computes prompts, and up
            to twice as much to fit half of the next prompt; None (on the command line 0) for no
            extra bound. All running requests decode, and prompts get at least half of the budget,
            so many decoding requests may exceed it. Not applied while more prompt tokens are left
            than `max_num_batched_tokens`. None suits requests that arrive together.
        max_tokens: Maximum length of a request, prompt and output; by default the model's.
        budget_bytes: Physical memory for keys and values; by default 0.9 of what is free now.
        memory_fraction: Share of a GPU's whole memory for weights, graphs, keys and values, of
            which the rest stays free. It excludes `budget_bytes`. Without a GPU it is a share of
            the free memory.
        host_budget_bytes: Host memory for evicted prefixes and swapped requests; by default none,
            so both are computed again.
        disk_folder: Folder for evicted prefixes that leave host memory, which a later server of the
            same model finds. It is made if it is not there, and no other engine may use it.
            Files of other weights that are in it are removed.
        disk_budget_bytes: Size of the files in `disk_folder`.
        pool_socket: Socket of a broker (`vmkv pool`) that shares the device's memory between
            processes; several models get one by default. `budget_bytes` is then the most that
            this engine may have.
        floor_bytes: Memory that a broker never takes back; at least a page.
        pool_weight: Share relative to the broker's other members, where they want the same memory.
        deterministic: Make a request's tokens independent of the rest of the batch, by forward
            passes of its own. This costs most of the throughput.
        prefix_caching: Reuse cached keys and values of prompts' prefixes. Samples of one request
            share their prompt either way, unless `deterministic`.
        attention_backend: Attention kernel, of those of `vmkv doctor`; by default the best that
            runs.
        kv_dtype: Type of keys and values: fp8, in half the memory, or auto, the model's.
        kv_scales: Divisors of keys and values in fp8, as a file (or `KVScales`); by default 1.
        skip_layers: Layers kept out of fp8, for instance 0, 1 and "sliding", those with a window.
        runner: "eager", "graphs" (compiled layers and CUDA graphs), or "auto": graphs on CUDA.
        runner_options: A `RunnerOptions` for "graphs".
        preemption_costs: `PreemptionCosts`, the speed of the machine; by default an H200 and the
            model's size.
        watermark_bytes: Device memory, free memory and cached prefixes together, that the pool
            keeps when no request is left. The rest returns to the device: free memory first, then
            the least recently used prefixes. Memory of the pool's other users counts but is not
            taken. None, the default, keeps everything.
        enable_sleep_mode: Put the weights where a sleep can take them from the device: that of
            `Engine.sleep(weights=True)`, or of the server's routes /sleep and /wake_up. They move
            at the start, and back when the engine is closed.
        sleep_after_s: Seconds without requests after which the weights move to host memory, until
            the next request; by default never. For engines in a loop (`AsyncEngine`, `vmkv serve`).
            Includes `enable_sleep_mode`.
        sleep_keeps_prefixes: Move cached prefixes to host memory in such a sleep, as far as there
            is room. The room is `host_budget_bytes`; other prefixes are dropped.
        seed: Seed for requests without one; by default random.
        logprobs_mode: Log-probabilities of generated tokens: raw ones of the model's logits, or
            processed ones of the distribution that tokens are drawn from. The latter are after
            biases, penalties, masks, logits processors, temperature, top-k, top-p and min-p; for
            greedy requests, as in vLLM, without the last four. Those of prompts are the model's.

        speculative_config: Guess tokens and verify several a step, where that is faster, as vLLM's
            JSON: `{"method": "suffix", "num_speculative_tokens": 8}`. The method "ngram" looks in
            the request's own prompt and answer, "suffix" in its tenant's recent answers too.
            "draft_model" asks a small model of the same vocabulary, `"model"`: a folder, a Hub name
            or a module, with rows in the same pool, on one device. Its weights do not sleep.
            Tokens stay those of decoding one by one. Requests with logits processors (or bad
            words of several tokens) and models with states guess nothing; not with
            `deterministic`, for which every token has a pass of the same shape.

    Raises:
        ConfigError: The fraction is not above 0 and up to 1, the watermark negative, the time to
            sleep not positive, there is no such mode, `speculative_config` is wrong, or a folder
            for files has no budget.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_num_mixed_tokens: int | None = None
    max_tokens: int | None = None
    budget_bytes: int | None = None
    memory_fraction: float | None = None
    host_budget_bytes: int = 0
    disk_folder: str | os.PathLike[str] | None = None
    disk_budget_bytes: int = 0
    pool_socket: str | None = None
    floor_bytes: int = 0
    pool_weight: float = 1.0
    deterministic: bool = False
    prefix_caching: bool = True
    attention_backend: str | None = None
    kv_dtype: str = "auto"
    kv_scales: KVScales | str | os.PathLike[str] | None = None
    skip_layers: SkipLayers = ()
    runner: str = "auto"
    runner_options: Any = None
    preemption_costs: Any = None
    watermark_bytes: int | None = None
    enable_sleep_mode: bool = False
    sleep_after_s: float | None = None
    sleep_keeps_prefixes: bool = False
    seed: int | None = None
    logprobs_mode: str = LOGPROBS_MODES[0]
    speculative_config: Mapping[str, Any] | str | None = None

    def __post_init__(self) -> None:
        share, kept_bytes, after_s = self.memory_fraction, self.watermark_bytes, self.sleep_after_s
        if share is not None and not 0 < share <= 1:
            raise ConfigError(f"memory_fraction={share} is a share of memory: above 0, up to 1")
        if kept_bytes is not None and kept_bytes < 0:
            raise ConfigError(f"watermark_bytes={kept_bytes} is negative; None keeps everything")
        if after_s is not None and not 0 < after_s < math.inf:
            raise ConfigError(f"sleep_after_s={after_s} must be a positive number; None for never")
        check_offload_options(self.host_budget_bytes, self.disk_folder, self.disk_budget_bytes)
        if self.logprobs_mode not in LOGPROBS_MODES:
            names = ", ".join(LOGPROBS_MODES)
            raise ConfigError(f"logprobs_mode={self.logprobs_mode!r} is none of {names}")
        if self.speculation is not None and self.deterministic:
            raise ConfigError(
                "deterministic computes each token in a pass of its own: leave speculative_config "
                "out, whose passes have as many tokens as were guessed"
            )

    @property
    def speculation(self) -> Speculation | None:
        """`speculative_config` as it was read."""
        config = self.speculative_config
        return None if config is None else Speculation.of(config)

    @property
    def can_sleep(self) -> bool:
        """Whether weights are put where they can leave the device."""
        return self.enable_sleep_mode or self.sleep_after_s is not None


@dataclass(frozen=True)
class Limits:
    """Limits beyond which the server refuses a request; the HTTP status is given in parentheses.

    Attributes:
        max_connections: Simultaneous connections (503).
        max_body_bytes: Size of a request's body (413). The number of JSON values in it is bounded
            as well (400): one per 128 bytes of this limit, and at least twice the model's tokens,
            where a list, an object or a key counts as eight.
        max_prompt_tokens: Tokens of one prompt (400); by default as many as the model takes.
        max_concurrent: Requests in the engine at once; others wait for admission.
        max_queued: Requests waiting for admission (429).
        max_answer_logprobs: Log-probabilities of one answer, samples x tokens x (alternatives + 1)
            (400); at least what one sample may have. Each takes some 30 bytes in a completion and
            60 in a chat until the answer is sent.
        max_priority: Priority levels above and below zero (400), at most 16; 0 for none.
        head_timeout_s: Time to send the head of a request; the connection is closed afterwards.
        body_timeout_s: Time for a body to arrive (408).
        send_timeout_s: Seconds a client may leave sent data unread before its request is cancelled.

    Raises:
        ConfigError: A limit is not positive (`max_queued` and `max_priority`: negative).
    """

    max_connections: int = 4096
    max_body_bytes: int = 16 * MiB
    max_prompt_tokens: int | None = None
    max_concurrent: int = 1024
    max_queued: int = 1024
    max_answer_logprobs: int = 1 << 22
    max_priority: int = 0
    head_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    send_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            is_positive = value is None or 0 < value < math.inf
            if not is_positive and not (name in _MAY_BE_ZERO and value == 0):
                raise ConfigError(f"{name}={value!r} must be a positive number")
        if self.max_priority > _PRIORITY_MAX:
            raise ConfigError(f"max_priority={self.max_priority}; at most {_PRIORITY_MAX} can be")


@dataclass(frozen=True)
class ServerOptions:
    """Options of a server.

    Attributes:
        model_name: The model's name in the API.
        max_model_tokens: Prompt and output tokens of one request together.
        limits: Limits on requests and connections.
        api_keys: Accepted keys; empty to accept everybody.
        protects_everything: Whether `/metrics`, `/version` and the documentation need a key too.
        cors_origins: Origins whose pages may call the server, as `https://example.com`; `*` for
            all.
        chat_template: Replaces the tokenizer's own.
        response_template: Of transformers' `ResponseParser`, by which tool calls and reasoning are
            found in answers; replaces the tokenizer's own and those that vmkv knows.
        share_prefixes: Whether requests with different keys share cached prefixes.
        sampling_defaults: Parameters of `SamplingParams` for requests that leave them out; of
            `max_tokens`, as many as fit, and at most 16 for completions.
        can_sleep: Whether the server has vLLM's routes /sleep, /wake_up and /is_sleeping, for every
            client; with several keys none may cancel requests by it.

    Raises:
        ConfigError: A key is blank, or there is none for `protects_everything`.
    """

    model_name: str
    max_model_tokens: int
    limits: Limits = field(default_factory=Limits)
    api_keys: Sequence[str] = ()
    protects_everything: bool = False
    cors_origins: Sequence[str] = ()
    chat_template: str | None = None
    response_template: Mapping[str, Any] | None = None
    share_prefixes: bool = False
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    can_sleep: bool = False

    def __post_init__(self) -> None:
        if not all(map(str.strip, self.api_keys)):
            raise ConfigError("an API key is blank, which would admit everybody: leave it out")
        if self.protects_everything and not self.api_keys:
            raise ConfigError("--protect-all (protects_everything) needs an API key: give one")
