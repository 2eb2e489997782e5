"""Everything that depends on transformers' internals and on its releases.

Supported: 4.57 and 5.x. Features are detected by what the installed release has, rather than by its
version number, where possible.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)
from transformers.utils import generic

from ..errors import CapacityError, ConfigError, one_line
from ..step.cache_argument import CACHE_NAME as CACHE_NAME
from ..step.cache_argument import CACHE_NAMES as CACHE_NAMES
from ..step.cache_argument import cache_argument as cache_argument
from ..step.cache_argument import named_cache as named_cache

# ---- compat --------------------------------------------------------------------------------------

#: Since 5.17 `crop(n)` takes tokens to remove; before, a length to keep.
_CROP_REMOVES = hasattr(CacheLayerMixin, "is_croppable")
#: Since 5.20 a length is refused; before, it brought a warning.
_CROP_REFUSES_LENGTHS = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 20)
#: Error of a sliding layer whose past is lost: ValueError before the past could be recorded.
CROPPED_TOO_FAR: type[Exception] = (
    RuntimeError if hasattr(DynamicSlidingWindowLayer, "activate_past_recording") else ValueError
)
_CACHES = CacheLayerMixin.__module__
#: Layers with states, by name: 4.57 has none of them.
_WITH_STATES = ("LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer")
#: Layer types for which 4.57's plain dynamic layers are correct.
_PLAIN_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
#: Logits processors and stopping criteria that do not read the prompt. By name, because not every
#: release has them all.
_READ_NO_PROMPT = {
    *("EpsilonLogitsWarper", "EtaLogitsWarper", "InfNanRemoveLogitsProcessor"),
    *("LogitNormalization", "MinPLogitsWarper", "SuppressTokensLogitsProcessor"),
    *("TemperatureLogitsWarper", "TopHLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper"),
    *("TypicalLogitsWarper", "EosTokenCriteria", "MaxTimeCriteria"),
}


def check_model(model: Any, *, may_be_offloaded: bool = False) -> None:
    """Raise `ConfigError` unless `model` is a model, with weights or `may_be_offloaded`."""
    if not hasattr(model, "config"):
        raise ConfigError(
            f"model is a {type(model).__name__}, not a model: pass what "
            "AutoModelForCausalLM.from_pretrained returns"
        )
    if not may_be_offloaded and model.get_input_embeddings().weight.is_meta:
        raise ConfigError(
            "accelerate has offloaded this model's weights: load them whole, or use model.generate "
            "with past_key_values=VMKVCache(model.config)"
        )


def text_config(config: Any) -> Any:
    """Return the decoder's part of a configuration; raises `ConfigError` for anything else."""
    if not hasattr(config, "get_text_config"):
        raise ConfigError(
            f"config={type(config).__name__} is no transformers configuration; pass model.config"
        )
    return config.get_text_config(decoder=True)


def rope_limit_tokens(config: Any) -> int | None:
    """Return the length above which longrope and dynamic change a whole pass, or None."""
    decoder = text_config(config)
    # 4.57 has `rope_scaling`.
    parameters = getattr(decoder, "rope_parameters", None) or getattr(decoder, "rope_scaling", None)
    if not isinstance(parameters, dict):
        return None
    of_layer_types = [each for each in parameters.values() if isinstance(each, dict)]
    limits = []
    for each in of_layer_types or [parameters]:
        kind = each.get("rope_type", each.get("type")) or ""
        stated = decoder.max_position_embeddings
        if kind == "longrope":
            stated = getattr(decoder, "original_max_position_embeddings", None) or stated
            limits.append(int(each.get("original_max_position_embeddings") or stated))
        elif "dynamic" in kind:
            limits.append(int(stated))
    return min(limits, default=None)


def default_cache(config: Any) -> DynamicCache:
    """Make this release's empty cache for the model; raises `ConfigError` if it has none."""
    decoder = text_config(config)
    if not _CROP_REMOVES:
        # Before 5.x, hybrid models had caches of their own, which DynamicCache cannot replace.
        foreign = set(getattr(decoder, "layer_types", None) or ()) - _PLAIN_LAYER_TYPES
        if foreign:
            raise ConfigError(
                f"transformers {transformers.__version__} keeps {sorted(foreign)} layers of "
                f"{type(decoder).__name__} in a cache of the model's own; upgrade to "
                "transformers>=5.17 to use VMKVCache with it"
            )
    try:
        cache = DynamicCache(config=config)
        reason = "no layers"
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # Invalid values.
        cache, reason = None, one_line(error)
    if cache is None or not cache.layers:
        raise ConfigError(
            f"cannot tell the layers of {type(config).__name__} ({reason}); pass the configuration "
            "of a model with a key-value cache"
        )
    if getattr(config, "is_encoder_decoder", False):
        # T5's number of layers is the encoder's.
        del cache.layers[getattr(config, "num_decoder_layers", None) or len(cache.layers) :]
    return cache


def views_keys(config: Any) -> bool:
    """Whether the model's code needs a batch's keys adjacent in memory, so that rows are copied."""
    return getattr(config, "model_type", None) == "gpt_neox_japanese"


def cross_attention_layers(config: Any) -> frozenset[int]:
    """Return layers of a decoder's own cache that hold an image's keys, which its code reads."""
    return frozenset(getattr(text_config(config), "cross_attention_layers", None) or ())


def window_of(layer: Any) -> tuple[bool, int | None]:
    """Whether vmkv can replace `layer`, by exact type, and the window of a sliding one."""
    if type(layer) is DynamicLayer:
        return True, None
    if type(layer) is DynamicSlidingWindowLayer:
        return True, int(layer.sliding_window)
    return False, None


def keeps_nothing(layer: Any) -> bool:
    """Whether `layer` holds a place in the cache for a model's layer without keys of its own."""
    return type(layer).__name__ == "DummyLayer" and type(layer).__module__ == _CACHES


def keeps_state(layer: Any) -> bool:
    """Whether `layer` of a cache holds states of fixed size, perhaps beside keys and values."""
    return type(layer).__name__ in _WITH_STATES and type(layer).__module__ == _CACHES


def keys_beside_state(layer: Any) -> bool:
    """Whether a layer that holds states also holds all keys and values."""
    return keeps_state(layer) and isinstance(layer, DynamicLayer)


def is_known(layer: Any) -> bool:
    """Whether packed passes have rows for what `layer` keeps apart from keys, if anything."""
    return keeps_nothing(layer) or keeps_state(layer)


def cropped_length(length: int, argument: int) -> int:
    """Return how many of `length` tokens `crop(argument)` keeps in this release."""
    if argument < 0:
        return max(0, length + argument)
    if argument == 0 and _CROP_REMOVES:
        return length
    if _CROP_REFUSES_LENGTHS:
        raise ValueError(
            f"crop({argument}): transformers {transformers.__version__} takes the number of "
            "tokens to remove as a negative integer"
        )
    return min(length, argument)


def auto_class(config: Any) -> Any:
    """Return the class that loads a model which continues text; `ConfigError` for another kind."""
    own = getattr(config, "auto_map", None) or {}
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText):
        if type(config) in auto._model_mapping or auto.__name__ in own:
            return auto
    raise ConfigError(f"a {config.model_type} model does not continue text")


def load_causal_lm(name: str, dtype: str | None, **options: Any) -> Any:
    """Load a model in eval mode, from a folder or the Hub, with options of `from_pretrained`.

    `dtype` is by default as saved. Raises `ConfigError` unless it is a causal language model, or
    one that reads images too, with all its weights; `CapacityError` if they do not fit.
    """
    try:
        if (Path(name) / "generation_config.json").exists():
            # transformers ignores a broken file, and texts would then never end.
            transformers.GenerationConfig.from_pretrained(name)
        options.setdefault("trust_remote_code", False)
        source = {key: options[key] for key in ("trust_remote_code", "revision") if key in options}
        config = transformers.AutoConfig.from_pretrained(name, **source)
        with _more_readers():
            model, info = auto_class(config).from_pretrained(
                name, dtype=dtype or "auto", output_loading_info=True, **options
            )
    except ConfigError:
        raise
    except torch.OutOfMemoryError as error:
        raise CapacityError(f"the weights of {name} do not fit: {one_line(error)}") from error
    except Exception as error:  # a folder or the Hub may hold anything
        raise ConfigError(f"cannot load {name}: {one_line(error)}") from error
    missing = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
    if missing:
        # transformers only warns, and initialises them randomly.
        raise ConfigError(
            f"{name} lacks {len(missing)} weights, such as {missing[0]}: is it a whole causal "
            "language model?"
        )
    return model.eval()


def given_or_loaded(model: Any, tokenizer: Any) -> tuple[Any, Any]:
    """Return a model and its tokenizer, loaded to the first GPU or the CPU if `model` is a name."""
    if not isinstance(model, str | os.PathLike):
        check_model(model)
        return model, tokenizer
    name, device = os.fspath(model), "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(name, device=device, dtype=None)
    return model, load_tokenizer(name) if tokenizer is None else tokenizer


def load_model(model: str, *, device: str, dtype: str | None, **source: Any) -> Any:
    """Load a model onto a device in eval mode; a CUDA device becomes the current one.

    `source` are options of `from_pretrained`. Raises `ConfigError` and `CapacityError`.
    """
    check_device(device)
    if device.startswith("cuda"):  # Kernels are chosen and timed on the current device.
        torch.cuda.set_device(torch.device(device).index or 0)
    if importlib.util.find_spec("accelerate") is not None:
        source["device_map"] = {"": device}
    loaded = load_causal_lm(model, dtype, **source)
    try:
        return loaded.to(device)
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"the weights of {model} do not fit {device}: {one_line(error)}"
        ) from error


def check_device(device: str) -> None:
    """Check that this machine has a device; raises `ConfigError` otherwise."""
    if not device.startswith("cuda"):
        return
    index = torch.device(device).index or 0
    if not torch.cuda.is_available():
        raise ConfigError("torch sees no CUDA device here; run `vmkv doctor`, or pass --device cpu")
    if index >= torch.cuda.device_count():
        raise ConfigError(f"there is no device cuda:{index}; there are {torch.cuda.device_count()}")


def load_tokenizer(name: str, **source: Any) -> Any:
    """Load a model's tokenizer, with options of `from_pretrained`; `ConfigError` if it has none."""
    try:
        source.setdefault("trust_remote_code", False)
        return transformers.AutoTokenizer.from_pretrained(name, **source)
    except Exception as error:  # a folder or the Hub may hold anything
        raise ConfigError(
            f"no tokenizer for {name}: {one_line(error)}; pass tokenizer=, of another folder"
        ) from error


@contextlib.contextmanager
def _with_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _more_readers() -> contextlib.AbstractContextManager[None]:
    """Context in which transformers 5 reads weights with eight threads: a third faster."""
    try:
        from transformers import core_model_loading
    except ImportError:
        return contextlib.nullcontext()
    num_readers = max(core_model_loading.GLOBAL_WORKERS, min(8, os.cpu_count() or 1))
    return _with_attribute(core_model_loading, "GLOBAL_WORKERS", num_readers)


def in_parts(num_ranks: int) -> dict[str, Any]:
    """Return options of `from_pretrained` that load a rank's part of a model. Since 5.17."""
    try:
        from transformers.distributed.configuration_utils import DistributedConfig

        return {"distributed_config": DistributedConfig(tp_size=num_ranks)}
    except (ImportError, TypeError) as error:
        raise ConfigError(
            f"transformers {transformers.__version__} cannot load a part of a model; upgrade to "
            "transformers>=5.17 for tensor parallelism"
        ) from error


class PlainMask(NamedTuple):
    """A mask that is only causal: over all, or in a window, or in chunks of the sequence."""

    window: int | None
    chunk: int | None = None


def plain_mask(mask_function: Any) -> PlainMask | None:
    """Recognise a mask function that is causal, also in a window or in chunks, by its parts."""
    from transformers import masking_utils

    if mask_function is masking_utils.causal_mask_function:
        return PlainMask(None)
    if getattr(mask_function, "__name__", "") != "and_mask":
        return None
    parts = inspect.getclosurevars(mask_function).nonlocals.get("mask_functions", ())
    if len(parts) != 2 or parts[1] is not masking_utils.causal_mask_function:
        return None
    kind, _, _ = getattr(parts[0], "__qualname__", "").partition(".")
    values = inspect.getclosurevars(parts[0]).nonlocals
    window, chunk = values.get("sliding_window"), values.get("chunk_size")
    if kind == "sliding_window_overlay" and isinstance(window, int):
        return PlainMask(window)
    if kind == "chunked_overlay" and isinstance(chunk, int):
        return PlainMask(None, chunk)
    return None


@functools.cache
def takes_attention(config_class: type) -> tuple[bool, bool]:
    """Whether transformers' model takes SDPA, and whether it takes any function but eager."""
    try:
        model_class = transformers.AutoModel._model_mapping.get(config_class, None)
    except (ImportError, RuntimeError, ValueError):  # A module that cannot be imported here.
        model_class = None
    takes_sdpa = bool(getattr(model_class, "_supports_sdpa", True))
    return takes_sdpa, takes_sdpa or bool(getattr(model_class, "_supports_attention_backend", True))


def explicit_mask(**arguments: Any) -> torch.Tensor | None:
    """Build transformers' mask for SDPA, or eager attention's: `[B, 1, Tq, T]`, or None."""
    from transformers import masking_utils

    name = "sdpa" if mask_dtype(arguments) == torch.bool else "eager"
    mask: torch.Tensor | None = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[name](**arguments)
    return mask


def mask_dtype(arguments: Mapping[str, Any]) -> torch.dtype:
    """Return the type of `explicit_mask`."""
    kind: Any = type(arguments.get("config"))
    takes_sdpa, _ = takes_attention(kind)
    dtype: torch.dtype = arguments.get("dtype", torch.float32)
    return torch.bool if takes_sdpa else dtype


def is_transformers_own(rule: Any) -> bool:
    """Whether a logits processor or stopping criterion is transformers', not the caller's."""
    return type(rule).__module__.partition(".")[0] == "transformers"


def reads_prompt(rule: Any) -> bool:
    """Whether a processor or criterion of transformers reads more than scores or the last token."""
    return is_transformers_own(rule) and type(rule).__name__ not in _READ_NO_PROMPT


def decoder(tokenizer: Any) -> Callable[[list[int], bool], str]:
    """Return the fast form of `tokenizer.decode(token_ids, skip_special_tokens)`; keeps spaces."""
    kind, base = type(tokenizer), transformers.PreTrainedTokenizerFast
    is_plain = isinstance(tokenizer, base) and "decode" not in vars(tokenizer)
    if is_plain and (kind.decode, kind._decode) == (base.decode, base._decode):
        decode: Callable[[list[int], bool], str] = tokenizer.backend_tokenizer.decode
        return decode
    return lambda token_ids, skips_special: tokenizer.decode(
        token_ids, skip_special_tokens=skips_special, clean_up_tokenization_spaces=False
    )


def pad_token(generation_config: Any) -> int:
    """Return the padding token of a generation config that transformers has prepared."""
    pad = getattr(generation_config, "_pad_token_tensor", None)
    return 0 if pad is None else int(pad.flatten()[0])


def hidden_token(generation_config: Any) -> int | None:
    """Return the token that `model.generate` hides where no mask is given: padding, no end."""
    ends = getattr(generation_config, "_eos_token_tensor", None)
    pad = pad_token(generation_config)
    is_end = ends is not None and pad in ends.tolist()
    return None if generation_config.pad_token_id is None or is_end else pad


def takes_positions(model: Any) -> bool:
    """Whether a model's forward names `position_ids` rather than swallowing them."""
    parameters = inspect.signature(model.forward).parameters
    names_anything = {"input_ids", "inputs_embeds"} & parameters.keys()
    return "position_ids" in parameters or not names_anything  # A wrapper names no input.


def offsets_positions(model: Any) -> bool:
    """Whether a model adds an offset, kept from a prompt with images, to missing positions."""
    return any(getattr(each, "rope_deltas", None) is not None for each in model.modules())


def takes_cache(model: Any) -> bool:
    """Whether a model accepts and uses a cache of keys and values."""
    supports = getattr(model, "_supports_default_dynamic_cache", lambda: True)
    if "input_ids" not in inspect.signature(model.forward).parameters:
        return bool(supports())  # A wrapper.
    if not supports() or named_cache(model.forward) in (None, "cache_params"):
        return False
    return any(isinstance(each, CacheLayerMixin) for each in default_cache(model.config).layers)


def special_tokens(config: Any) -> set[int]:
    """Return tokens that a configuration names: padding, ends, image placeholders, …"""
    found: set[int] = set()
    for part in (config, text_config(config)):
        for name, value in part.to_dict().items():
            if "token" in name or "_id" in name:
                values = value if isinstance(value, (list, tuple)) else [value]
                found.update(each for each in values if type(each) is int)
    return found


def eager_options() -> dict[str, str]:
    """Return options of `from_config` for a model that uses torch's own operators only."""
    options = {"attn_implementation": "eager"}
    if hasattr(transformers.PreTrainedModel, "set_experts_implementation"):  # Since 5.0.
        options["experts_implementation"] = "eager"
    return options


def autocast_on_meta() -> contextlib.AbstractContextManager[None]:
    """Let models run on `meta` that switch autocast off; before 5.x, torch's is disabled."""
    if hasattr(generic, "maybe_autocast"):
        return contextlib.nullcontext()
    return _with_attribute(torch, "autocast", lambda *_, **__: contextlib.nullcontext())


def drop_shared_layers(cache: Any) -> None:
    """Drop tensors that a model attached to the cache (Gemma3n's shared layers, in 4.57)."""
    vars(cache).pop("shared_layers", None)


# ---- vocabulary ----------------------------------------------------------------------------------


def num_embeddings(model: Any) -> int:
    """Return how many token ids a model accepts."""
    return _stated(model.get_input_embeddings(), "num_embeddings")


def num_logits(model: Any) -> int:
    """Return the number of columns of a model's logits."""
    return _stated(model.get_output_embeddings(), "out_features")


def _stated(module: Any, name: str) -> int:
    """Return the module's attribute `name`, or the rows of its weight if it has none."""
    stated = getattr(module, name, None)
    return int(module.weight.shape[0] if stated is None else stated)


def check_tokens(tokens: Sequence[Any], vocab_size: int, name: str = "the prompt") -> Sequence[int]:
    """Return a prompt's ids as Python's integers; `ConfigError` for one outside the vocabulary."""
    if not tokens:
        raise ConfigError(f"{name} is empty: pass at least one token id")
    # Takes a third of the time of a look at each token, which counts for long prompts.
    if set(map(type, tokens)) == {int} and min(tokens) >= 0 and max(tokens) < vocab_size:
        return tokens
    tokens = as_integers(tokens)
    for each in tokens:
        if type(each) is not int or not 0 <= each < vocab_size:
            outside = f"which is no token of a vocabulary of {vocab_size}"
            raise ConfigError(f"{name} holds {each!r}, {outside}")
    return tokens


def as_integers(tokens: Sequence[Any]) -> Sequence[Any]:
    """Return tokens as they are, but integers of numpy and torch as Python's."""
    return tokens if set(map(type, tokens)) == {int} else tuple(map(_as_integer, tokens))


def _as_integer(token: Any) -> Any:
    """Return an integer of any library as Python's; anything else as it is."""
    if type(token) is bool or getattr(token, "dtype", None) is torch.bool:
        return token
    try:
        return operator.index(token)
    except TypeError:
        return token
