"""Memory that a model keeps of every token, measured by forward passes without weights.

A configuration does not tell this: latent attention is cached compressed or expanded, different
fields say how many heads share keys, layers differ by type, and transformers' releases differ. So
the model is built on torch's `meta` device, which has shapes and no memory, and its cache is
compared after two passes: differences between them grow with the text. Rows of an engine have the
shapes that the proof of a model gives them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import cache_utils

from ..core.cache.geometry import LayerShape
from ..errors import ConfigError, one_line
from ..step.states import tensors_of
from . import compat
from .configuration import layer_windows
from .proof import layers_of, over_latents

#: Tokens of the first pass, and how many more the second has. transformers' own layers grow with
#: each token; a model's own may group tokens (DeepSeek-V4 up to 128).
_SHORT_TOKENS, _MORE_TOKENS, _MANY_MORE_TOKENS = 2, 1, 128


@dataclass(frozen=True)
class KeptLayer:
    """Memory that one layer keeps of one sequence.

    `shape` is of one token's key and value, None without them. `is_paged` layers live in virtual
    memory, others stay transformers'. `extra_token_bytes` come with each token (an indexer's keys),
    `fixed_bytes` do not depend on the length (states of linear attention, convolutions, …).
    """

    shape: LayerShape | None
    window_tokens: int | None
    is_paged: bool
    extra_token_bytes: int
    fixed_bytes: int


def build_without_weights(config: Any, dtype: torch.dtype) -> Any:
    """Build the causal language model of a configuration on the `meta` device, in eval mode."""
    try:
        with _shapes_only():
            return (
                compat.auto_class(config)
                .from_config(config, dtype=dtype, trust_remote_code=False, **compat.eager_options())
                .eval()
            )
    except Exception as error:  # any model's constructor, with any values
        raise ConfigError(
            f"the installed transformers builds no {config.model_type} model from this "
            f"configuration: {one_line(error)}"
        ) from error


def kept_layers(model: Any) -> list[KeptLayer]:
    """Return what each layer of a model without weights keeps; `ConfigError` if unknown."""
    name = model.config.model_type
    if not compat.takes_cache(model):
        raise ConfigError(
            f"{name} models with this configuration take no key-value cache of transformers: what "
            "they keep of a text, if anything, is a state of their own"
        )
    before = _run(model, _SHORT_TOKENS)
    if not any(isinstance(getattr(layer, "keys", None), torch.Tensor) for layer in before):
        raise ConfigError(f"no layer of this {name} model keeps keys and values")
    if all(compat.window_of(layer)[0] for layer in before):
        return [_kept(name, layer, layer, 0) for layer in before]
    num_more = _MORE_TOKENS
    if any(type(layer).__module__ != cache_utils.__name__ for layer in before):
        num_more = _MANY_MORE_TOKENS
    after = _run(model, _SHORT_TOKENS + num_more)
    return [_kept(name, *pair, num_more) for pair in zip(before, after, strict=True)]


def served_layers(model: Any, kv_dtype: str) -> list[KeptLayer]:
    """Return what an engine keeps of each layer; of a model it refuses, `kept_layers`.

    Both differ where attention gets other keys than the cache: repeated ones, or expanded latents.
    """
    kept = kept_layers(model)
    try:
        with _shapes_only():
            tokens = torch.zeros(_SHORT_TOKENS, dtype=torch.long, device="meta")
            proof = layers_of(model, layer_windows(model.config), {}, tokens)
    except ConfigError:
        return kept
    rows = (over_latents(proof) if kv_dtype == "auto" else proof).signatures
    for at, (k_shape, v_shape, dtype, _) in rows.items():
        kept[at] = replace(kept[at], shape=LayerShape(*k_shape, *v_shape, dtype.itemsize))
    return kept


def _run(model: Any, num_tokens: int) -> list[Any]:
    """Return the layers of transformers' own cache after a text of `num_tokens`."""
    cache = compat.default_cache(model.config)
    tokens = torch.zeros((1, num_tokens), dtype=torch.long, device="meta")
    try:
        with _shapes_only():
            model(input_ids=tokens, use_cache=True, **{compat.cache_argument(model): cache})
    except Exception as error:  # any model's forward, with any values
        raise ConfigError(
            f"what {model.config.model_type} models keep cannot be told from its configuration: "
            f"run without weights it fails ({one_line(error)})"
        ) from error
    return list(cache.layers)


def _kept(name: str, before: Any, after: Any, num_more: int) -> KeptLayer:
    """Measure one layer, from its states after a text and after `num_more` tokens more."""
    is_paged, window_tokens = compat.window_of(before)
    if not is_paged:
        window_tokens = getattr(before, "sliding_window", None)
    shape, extra_token_bytes, fixed_bytes = None, 0, 0
    keys, values = getattr(before, "keys", None), getattr(before, "values", None)
    if keys is not None and values is not None:
        if not keys.ndim == values.ndim == 4 or keys.shape[0] != 1:
            raise ConfigError(
                f"{name} models keep keys of shape {tuple(keys.shape)} for one sequence, not "
                "[1, heads, tokens, width]; vmkv plan cannot size that"
            )
        shape = LayerShape(
            keys.shape[1], keys.shape[3], values.shape[1], values.shape[3], keys.dtype.itemsize
        )
        # A model's own prompt (CPM-Ant) lies before the text.
        num_own = max(0, int(keys.shape[2]) - _SHORT_TOKENS)
        fixed_bytes += num_own * (shape.k_bytes + shape.v_bytes)
    if not is_paged:
        later = tensors_of(after)
        for (attribute, key), tensor in tensors_of(before).items():
            if not tensor.ndim:
                continue
            token_bytes = _token_bytes(tensor, later.get((attribute, key)), num_more)
            if token_bytes is None:
                path = attribute if key is None else f"{attribute}[{key}]"
                raise ConfigError(
                    f"{name} models keep {path} in layers of type {type(before).__name__}, which "
                    "neither grows with every token nor stays as it is; vmkv plan cannot size that"
                )
            extra_token_bytes += token_bytes
            fixed_bytes += tensor.nbytes - _SHORT_TOKENS * token_bytes
    return KeptLayer(shape, window_tokens, is_paged, extra_token_bytes, fixed_bytes)


def _token_bytes(before: torch.Tensor, after: torch.Tensor | None, num_more: int) -> int | None:
    """Return a tensor's bytes per token, 0 if its size is fixed; None if it is neither."""
    if after is None or after.ndim != before.ndim:
        return None
    sizes = zip(before.shape, after.shape, strict=True)
    grown = [(small, large) for small, large in sizes if small != large]
    if not grown:
        return 0
    (small, large), *others = grown
    if others or large - small != num_more:
        return None
    return before.nbytes // small


@contextlib.contextmanager
def _shapes_only() -> Iterator[None]:
    """Make and compute tensors that have a shape, but no memory and no values."""
    values = _NoValues()  # type: ignore[no-untyped-call]
    with torch.no_grad(), torch.device("meta"), compat.autocast_on_meta(), values:
        yield


class _NoValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Supplies values to models that read them from tensors without memory.

    Nothing is nonzero, numbers are 0 and flags true: experts are skipped, and attention is not.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        aten, kwargs = torch.ops.aten, kwargs or {}
        subject = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if subject is not None and subject.is_meta:
            if func is aten._local_scalar_dense.default:
                is_flag = subject.dtype is torch.bool
                return is_flag or torch.zeros((), dtype=subject.dtype, device="cpu").item()
            if func is aten._to_copy.default and str(kwargs.get("device")).startswith("cpu"):
                return torch.zeros(subject.shape, dtype=subject.dtype, device="cpu")
            if func is aten.nonzero.default:
                return _nowhere(subject)
            if func in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default):
                args = (subject, _by_position(args[1]), *args[2:])
            if func is aten.split_with_sizes.default:
                args = (subject, _whole(subject, *args[1:]), *args[2:])
        return func(*args, **kwargs)


def _whole(subject: torch.Tensor, sizes: Sequence[int], dim: int = 0) -> list[int]:
    """Give a split without values the tensor's size: its first part takes the rest."""
    return [subject.shape[dim] - sum(sizes[1:]), *sizes[1:]]


def _nowhere(mask: torch.Tensor) -> torch.Tensor:
    """Return the positions at which a mask without values is set: none, `[0, mask.ndim]`."""
    return mask.new_empty((0, mask.ndim), dtype=torch.long)


def _by_position(indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    found: list[torch.Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            found += _nowhere(index).unbind(1)
        else:
            found.append(index)
    return found
