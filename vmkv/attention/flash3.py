"""FlashAttention-3 (Hopper): the fastest kernel there, at the cost of an over-read.

Three packagings of the same kernels are accepted, tried in this order:

  `flash_attn_interface`   installed by the flash-attention repository from `hopper/`
  `_vllm_fa3_C`            the operator library inside vLLM's wheel; found beside an installed
                           vLLM, already loaded, or named by `VMKV_FLASH3_LIBRARY`
  `flash-attn3`            the first one, from the Hugging Face Hub (`flash_common.py`)

The kernel fetches whole key tiles by TMA, past a sequence's length up to the tile's end, and faults
on unmapped memory; it never fetches outside the tensor's shape. So `overread_tokens` is one tile,
and the view is cut to the batch's longest sequence, lest a tile reach into the next row. Prompts
without a past attend to their own packed keys (`attend_new`), where no margin is needed: past the
last key the kernel fetches the tensor's own memory, and beyond its end the copy engine returns
zeros.

The schedule over the device depends on the batch alone, so layers of one kind share one (`_plan`):
32 of 536 kernels of an 8B model's decode step are saved (H200: 50 us and as many gaps).

Latents (`Call.is_latent`) have scores of two parts, of which the kernel takes the wide one as `q_v`
with the values; its tiles are narrower than those of heads of 64, whose margin rows keep. vLLM's
library alone is taken for them.

Decode batches over float8 rows use `decode.py`. Prompt queries are rounded to float8, and sums
in fewer bits than float32 lose too much over long rows (DESIGN.md, Note [Eight bits]) unless the
kernel promotes them. vLLM's library does; the other two do not, and are refused for float8 rows of
more than 8,192 tokens.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ..core.cache.fp8 import FP8
from ..errors import ConfigError
from . import decode, flash_common
from .append import encoded
from .base import AttentionSpec, Call
from .flash_common import FlashBackend, why_not_flash, window_bounds, with_sinks

LIBRARY_VARIABLE = "VMKV_FLASH3_LIBRARY"
"""Environment variable: path of vLLM's `_vllm_fa3_C` library, for use without vLLM."""

# Widest key tile by head size, of the 16-bit kernels, over causal, windowed and plain, in all
# packagings (`tile_size_fwd_sm90` in hopper/tile_size.h).
KEY_TILES = ((64, 192), (96, 144), (128, 176), (192, 128), (256, 80))
FP8_KEY_TILES = ((64, 160), (96, 128), (128, 224), (192, 160), (256, 128))
"""Widest key tile by head size, of the float8 kernels."""
NARROW_SUMS_MAX_TOKENS = 8192
"""Longest float8 rows, in tokens, for kernels that do not promote partial sums."""

HUB_KERNEL = ("kernels-community/flash-attn3", 1)
"""Repository and version on the Hugging Face Hub."""

_QUERY_BLOCK = 128
"""Queries, over all heads, of one thread block."""

# Values of the library's arguments that are neither tensors nor set by a call. Other arguments
# must be optional and get None; `library_kernel` refuses a release that requires more.
NEUTRAL = {
    "is_rotary_interleaved": True,
    "num_splits": 0,  # 0: the kernel's own heuristic; `Flash3Backend.launch` may override it
    "sm_margin": 0,
    "attention_chunk": 0,
    "cp_world_size": 1,
    "cp_rank": 0,
}
# Arguments that a call sets, which the kernel must accept.
CALL_ARGUMENTS = frozenset(
    {
        *("q", "k", "v", "out", "cu_seqlens_q", "seqused_k", "max_seqlen_q", "kv_batch_idx"),
        *("leftpad_k", "softmax_scale", "is_causal", "window_size_left", "window_size_right"),
        *("softcap", "num_splits", "k_descale", "v_descale"),
    }
)

Result = tuple[torch.Tensor, torch.Tensor]
Kernel = Callable[..., Result]


class Flash3Backend(FlashBackend):
    """FlashAttention-3 as an `AttentionBackend`."""

    name = "flash3"

    def mixes(self, spec: AttentionSpec) -> bool:
        """Whether rows are not float8; those have a separate decode kernel."""
        return not spec.is_fp8

    @property
    def reads_new(self) -> bool:
        """Whether a packaging has the kernel for packed keys."""
        return _load_packed() is not None

    def overread_tokens(self, spec: AttentionSpec) -> int:
        """Return one key tile, e.g. 176 tokens at head size 128 (`KEY_TILES`, `FP8_KEY_TILES`)."""
        k_dim = spec.k_dim - spec.v_dim if spec.is_latent else spec.k_dim
        for limit, tile in FP8_KEY_TILES if spec.is_fp8 else KEY_TILES:
            if k_dim <= limit:
                return tile
        raise ConfigError(f"FlashAttention-3 serves head sizes up to 256, not {spec.k_dim}")

    def why_not(self, spec: AttentionSpec) -> str | None:
        """Check for Hopper, a packaging, and the limits of FlashAttention-3."""
        if spec.is_latent:
            return _why_not_latent(spec)
        limit = why_not_flash(spec, 3)
        if limit is not None:
            return limit
        if torch.cuda.get_device_capability()[0] != 9:
            return "its kernels are for Hopper (compute capability 9.0)"
        same = spec.k_dim == spec.v_dim
        latent = spec.k_dim <= 64
        wide_keys = 128 < spec.k_dim <= 192 and 96 < spec.v_dim <= 128
        if not (same or latent or wide_keys):
            return f"it has no kernel for head sizes {spec.k_dim} and {spec.v_dim}"
        return flash_common.reason(_load_for_fp8(spec.max_tokens) if spec.is_fp8 else _load())

    def launch(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch the kernel over rows cut to the batch's longest sequence."""
        if decode.serves(call):
            return decode.decode(call)
        query, keys, values, batch = call.query, call.keys, call.values, call.batch
        is_fp8, options = keys.dtype == FP8, dict[str, torch.Tensor]()
        is_latent = call.is_latent
        if is_latent:  # The kernel takes scores of both parts of keys, and values once.
            rank = values.shape[3]
            (absorbed, query), keys = query.tensor_split((rank,), 2), keys[..., rank:]
            options["q_v"] = absorbed
        if is_latent:
            found = library_kernel()
        else:
            found = _load_for_fp8(batch.max_num_tokens) if is_fp8 else _load()
        kernel = flash_common.usable("flash3", found)
        dtype = query.dtype
        if is_fp8:
            query = encoded(query)
        uniform = batch.is_uniform(query.shape[0])
        if uniform:
            by_sequence = batch.batch_size, batch.max_query_tokens, query.shape[1]
            query = query.view(*by_sequence, -1)
            options = {name: each.view(*by_sequence, -1) for name, each in options.items()}
        longest = batch.max_num_tokens
        # Permission to split costs a pass that joins the parts even if nothing is split (H200,
        # 2,048 queries in tiles: 45 us, 32 without); not worth it if queries fill the device.
        num_blocks = query.numel() // (query.shape[-1] * _QUERY_BLOCK)
        is_busy = num_blocks >= _num_processors(query.device)
        if call.scales is not None:  # `[B, H]` each, the same for every sequence.
            k_scale, v_scale = (each.expand(batch.batch_size, -1) for each in call.scales[:2])
            options |= {"k_descale": k_scale, "v_descale": v_scale}
        if kernel is library_kernel():
            if not is_busy:
                options |= _plan(call, query, keys, uniform)
            # The kernel's output for float8 inputs is bfloat16.
            if call.out is not None and call.out.dtype == (torch.bfloat16 if is_fp8 else dtype):
                options["out"] = call.out.view(*query.shape[:-1], call.out.shape[-1])
        out, logsumexp = kernel(
            query,
            keys[:, :longest],
            values[:, :longest],
            seqused_k=batch.num_tokens,
            kv_batch_idx=batch.row_indices,
            leftpad_k=batch.left_pad,
            cu_seqlens_q=None if uniform else batch.query_starts,
            max_seqlen_q=None if uniform else batch.max_query_tokens,
            scale=call.scale,
            window=window_bounds(call.window),
            softcap=call.softcap,
            num_splits=1 if is_busy else 0,
            **options,
        )
        out = out.flatten(0, 1) if uniform else out
        return out.to(dtype) if is_fp8 else out, logsumexp

    def attend_new(self, call: Call) -> torch.Tensor:
        """Launch the kernel over the new keys and values."""
        kernel = _load_packed()
        assert kernel is not None  # As `reads_new` says.
        assert call.new is not None  # By the contract of `attend_new`.
        starts, most = call.batch.query_starts, call.batch.max_query_tokens
        out, logsumexp = kernel(
            call.query,
            *call.new,
            cu_seqlens_q=starts,
            cu_seqlens_k=starts,
            max_seqlen_q=most,
            max_seqlen_k=most,
            scale=call.scale,
            window=window_bounds(call.window),
            softcap=call.softcap,
            **({"out": call.out} if kernel is library_kernel() else {}),
        )
        return with_sinks(call, out, logsumexp)


def _why_not_latent(spec: AttentionSpec) -> str | None:
    """Return why the kernel cannot read latents, whose scores have a part of their own (`q_v`)."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return "its kernels are for Hopper (compute capability 9.0)"
    if spec.dtype not in flash_common.DTYPES or spec.is_fp8:
        return f"it reads latents in float16 and bfloat16, not in {spec.kv_dtype or spec.dtype}"
    if (spec.v_dim, spec.k_dim - spec.v_dim) != (512, 64):
        return f"latents are 512 and 64 wide, not {spec.v_dim} and {spec.k_dim - spec.v_dim}"
    if spec.window is not None or spec.softcap:
        return "it attends to latents without windows and soft caps"
    if "q_v" not in _arguments():
        return flash_common.reason(library_kernel()) or "this _vllm_fa3_C lacks the argument q_v"
    return flash_common.reason(library_kernel())


def _plan(
    call: Call, query: torch.Tensor, keys: torch.Tensor, uniform: bool
) -> dict[str, torch.Tensor]:
    """Return the batch's schedule over the device; the first layer of each kind computes it."""
    planner = _planner()
    if planner is None:
        return {}
    batch, window = call.batch, window_bounds(call.window)
    kind = {
        "num_heads": query.shape[-2],
        "num_heads_k": call.keys.shape[2],
        "headdim": keys.shape[3],
        "headdim_v": call.values.shape[3],
        "qkv_dtype": query.dtype,
        "window_size_left": window[0],
        "window_size_right": window[1],
        "has_softcap": call.softcap > 0,
    }
    key = ("flash3", uniform, *kind.values())
    plan = batch.plans.get(key)
    if plan is None:
        plan = planner(
            **kind,
            batch_size=batch.batch_size,
            max_seqlen_q=batch.max_query_tokens,
            max_seqlen_k=min(batch.max_num_tokens, call.keys.shape[1]),
            seqused_k=batch.num_tokens,
            cu_seqlens_q=None if uniform else batch.query_starts,
            leftpad_k=batch.left_pad,
            is_causal=True,
        )
        if plan is None:
            return {}
        batch.plans[key] = plan
    return {"scheduler_metadata": plan}


@functools.cache
def _planner() -> Callable[..., torch.Tensor | None] | None:
    """Return the library's scheduling function; None if its kernels take no plan."""
    library = torch.ops._vllm_fa3_C
    if "scheduler_metadata" not in _arguments() or not hasattr(library, "get_scheduler_metadata"):
        return None
    operator: Any = library.get_scheduler_metadata.default
    names = [argument.name for argument in operator._schema.arguments]
    neutral = {"max_seqlen_k_new": 0, "num_splits": 0} | NEUTRAL

    def plan(**asked: Any) -> torch.Tensor | None:
        if not asked.keys() <= set(names):
            return None
        found: torch.Tensor = operator(*(asked.get(name, neutral.get(name)) for name in names))
        return found

    return plan


@functools.cache
def _num_processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def _load() -> Kernel | str:
    # The Hub last, because it may use the network.
    return flash_common.first_found(package_kernel, library_kernel, hub_kernel)


def _load_for_fp8(max_tokens: int | None) -> Kernel | str:
    library = library_kernel()
    if not isinstance(library, str):
        return library
    package = _fp8_package_kernel()
    if isinstance(package, str):
        return f"{library}; {package}"
    if max_tokens is None or max_tokens > NARROW_SUMS_MAX_TOKENS:
        return (
            f"in eight bits the package flash_attn_interface loses precision beyond "
            f"{NARROW_SUMS_MAX_TOKENS} tokens, and these rows may have "
            f"{'any number' if max_tokens is None else max_tokens}: lower max_tokens, or use "
            f"vLLM's kernels, which do not ({library})"
        )
    return package


@functools.cache
def _fp8_package_kernel() -> Kernel | str:
    return flash_common.first_found(package_kernel, hub_kernel)


def package() -> ModuleType | str:
    """Return the package `flash_attn_interface`, or why there is none."""
    return flash_common.package("flash_attn_interface")


def of_hub() -> ModuleType | str:
    """Return the package from the Hugging Face Hub, or why there is none."""
    return flash_common.load(*HUB_KERNEL)


def package_kernel() -> Kernel | str:
    """Return the kernel of the package `flash_attn_interface`, or why there is none."""
    return _over_kvcache(package())


def hub_kernel() -> Kernel | str:
    """Return the kernel of the Hugging Face Hub, or why there is none."""
    return _over_kvcache(of_hub())


def _over_kvcache(module: ModuleType | str) -> Kernel | str:
    if isinstance(module, str):
        return module
    return _as_kernel(module.flash_attn_with_kvcache, return_softmax_lse=True)


def _as_kernel(function: Callable[..., Any], **returns: bool) -> Kernel:
    """Wrap a package's function in the signature of `Kernel`."""
    names = {
        "seqused_k": "cache_seqlens",
        "kv_batch_idx": "cache_batch_idx",
        "leftpad_k": "cache_leftpad",
        "scale": "softmax_scale",
        "window": "window_size",
    }

    def kernel(*qkv: torch.Tensor, **options: Any) -> Result:
        renamed = {names.get(name, name): value for name, value in options.items()}
        out, logsumexp, *_ = function(*qkv, causal=True, **returns, **renamed)
        return out, logsumexp

    return kernel


def _arguments() -> dict[str, Any]:
    """Return the arguments of the library's kernel by name; none without the library."""
    operator = _operator()
    schema = () if isinstance(operator, str) else operator._schema.arguments
    return {argument.name: argument for argument in schema}


@functools.cache
def library_kernel() -> Kernel | str:
    """Return the kernel of vLLM's library, whose releases differ, or why there is none."""
    operator, arguments = _operator(), _arguments()
    if isinstance(operator, str):
        return operator
    missing = CALL_ARGUMENTS - arguments.keys()
    unknown = [
        name
        for name, argument in arguments.items()
        if name not in CALL_ARGUMENTS
        and name not in NEUTRAL
        and not isinstance(argument.type, torch.OptionalType)
    ]
    if missing or unknown:
        return f"this _vllm_fa3_C lacks arguments {sorted(missing)} or needs {unknown}"
    neutral: dict[str, Any] = {name: NEUTRAL.get(name) for name in arguments}

    def kernel(*qkv: torch.Tensor, scale: float, window: tuple[int, int], **others: Any) -> Result:
        call = neutral | others | dict(zip("qkv", qkv, strict=True))
        call |= {"softmax_scale": scale, "is_causal": True}
        call |= {"window_size_left": window[0], "window_size_right": window[1]}
        out, logsumexp, *_ = operator(*call.values())
        return out, logsumexp

    return kernel


@functools.cache
def _load_packed() -> Kernel | None:
    library = library_kernel()
    has_arguments = _arguments().keys() >= {"out", "cu_seqlens_k", "max_seqlen_k"}
    if isinstance(package(), str) and not isinstance(library, str) and has_arguments:
        return library
    module = flash_common.first_found(
        package, of_hub
    )  # The Hub last, because it may use the network.
    if isinstance(module, str):
        return None
    return _as_kernel(module.flash_attn_varlen_func, return_attn_probs=True)


def _operator() -> Any:
    """Return `torch.ops._vllm_fa3_C.fwd.default`, loading its library if needed, or a reason."""
    if not hasattr(torch.ops._vllm_fa3_C, "fwd"):
        path = _library_path()
        if path is None:
            return f"no vLLM with _vllm_fa3_C is installed, and {LIBRARY_VARIABLE} is not set"
        try:
            torch.ops.load_library(path)  # type: ignore[no-untyped-call]
        except OSError as error:
            return f"{path} cannot be loaded: {error}"
    if not hasattr(torch.ops._vllm_fa3_C, "fwd"):
        return f"{path} registers no operator _vllm_fa3_C::fwd"
    return torch.ops._vllm_fa3_C.fwd.default


def _library_path() -> Path | None:
    named = os.environ.get(LIBRARY_VARIABLE)
    if named:
        return Path(named)
    # `find_spec` of a top-level package does not run it; importing vLLM takes seconds.
    spec = importlib.util.find_spec("vllm")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        for path in sorted(Path(folder, "vllm_flash_attn").glob("_vllm_fa3_C*.so")):
            return path
    return None
