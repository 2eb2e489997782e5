"""transformers' own decoding loop over captured steps.

    vmkv.capture_decoding(model)
    model.generate(**inputs, past_key_values=VMKVCache(model.config))

An object replaces the model's `forward`. A call with one token for every row of a `VMKVCache`, and
nothing else, replays a graph over the cache's rows, whose addresses stay; the model itself computes
any other call, over the same rows. See Note [Graphs over addresses that stay] in DESIGN.md.
"""

from __future__ import annotations

import copy
import inspect
import logging
import types
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ..errors import CapacityError, ConfigError, one_line
from ..step.compiled_layers import CompiledLayers
from ..step.stepper import has_hooks
from . import compat
from .cache import VMKVCache
from .captured_steps import CapturedSteps
from .proof import Proof, prove
from .store import Store

_LOG = logging.getLogger(__name__)
#: Arguments of a decode step of `generate` that captured steps handle.
_KNOWN = {
    *("input_ids", "attention_mask", "position_ids", "cache_position", "past_key_values"),
    *("use_cache", "return_dict", "logits_to_keep"),
}
#: Outputs that a configuration may request and a graph does not return.
_OUTPUTS = ("output_attentions", "output_hidden_states", "output_router_logits")


def capture_decoding(
    model: Any, *, compile_layers: bool = False, compile_backend: str = "inductor"
) -> CapturedDecoding:
    """Capture a model's decode steps over a `VMKVCache`, in any decoding loop.

    Afterwards `model.generate(**inputs, past_key_values=VMKVCache(model.config))` decodes by
    replaying CUDA graphs, captured once a size has come three times: greedily or sampling, with
    beams, with left padding. Graphs stay with their cache between calls. Everything else runs as
    before, with the same cache: prompts, other caches, masks other than left padding, left padding
    without positions, models with hooks or adapters, in training or under autocast, divided or
    spread over devices, and models that fail their proof (see `vmkv.generate`), which are logged.
    Without CUDA the same steps run uncaptured.

    A graph holds the model's code as it was at capture: after changing it, call `close` and this
    again. While a part of the model is in training mode, or after another attention implementation
    was set or the model was converted, the model itself computes its steps, until the next prompt.

    Args:
        model: A transformers causal language model, whose `forward` is replaced.
        compile_layers: Compile the layers for captured steps: some tens of seconds at the first
            step of one row, and of several. `vmkv.generate` then uses them too, prompts included.
        compile_backend: Of `torch.compile`.

    Returns:
        A handle with `close()`, also a context manager; the same one for a second call.

    Raises:
        ConfigError: The model is an encoder-decoder, its layers cannot be compiled, or it is
            captured already with another `compile_layers`. The model is unchanged.

    Cost: a copy of the weights, part by part, where layers are compiled; at the first step that
        could be captured, a proof (see `vmkv.generate`). A mask is read once per prompt, and later
        ones are checked without waiting.
    """
    forward = vars(model).get("forward")
    if isinstance(forward, _Forward):
        if (forward.capture.layers is not None) != compile_layers:
            raise ConfigError(
                "decode steps of this model are captured already, with another compile_layers; "
                "close that first"
            )
        return forward.capture
    if model.config.is_encoder_decoder:
        raise ConfigError(
            "decode steps of encoder-decoders cannot be captured; generate with "
            "past_key_values=VMKVCache.for_encoder_decoder(config) as it is"
        )
    layers = None
    if compile_layers:
        layers = CompiledLayers(model, backend=compile_backend)
        layers.stand_aside()
    return CapturedDecoding(model, layers)


def compiled_layers_of(model: Any) -> CompiledLayers | None:
    """Return the layers that `capture_decoding` has compiled for the model, or None."""
    forward = vars(model).get("forward")
    return forward.capture.layers if isinstance(forward, _Forward) else None


class _Step(NamedTuple):
    """A call with one token of every row; tensors as `CapturedSteps` takes them."""

    token_ids: torch.Tensor
    positions: torch.Tensor | None
    mask: torch.Tensor | None


class _OfCache:
    """The captured steps of one cache, and the form of its model's outputs.

    `logits` is `[0, vocabulary]`. `is_checked` says that the model was checked for hooks and moved
    weights since the last prompt, and `runs_plainly` that its steps cannot be captured.
    """

    def __init__(self, output: Any):
        self.steps: CapturedSteps | None = None
        self.note(output)

    def note(self, output: Any) -> None:
        """Reset after the model itself has run over a prompt."""
        self.logits = output.logits.new_empty((0, output.logits.shape[-1]))
        self.output_type = type(output)
        self.is_checked = self.runs_plainly = False


class CapturedDecoding:
    """The captured decode steps of one model, over any number of caches; see `capture_decoding`.

    Attributes:
        layers: The compiled layers, which `close` ends; None without `compile_layers`.
        num_steps: Steps that the model's own `forward` did not run.
        refusals: Reasons why steps could not be captured, each once.
    """

    def __init__(self, model: Any, layers: CompiledLayers | None = None):
        self.layers = layers
        self.num_steps = 0
        self.refusals: list[str] = []
        # Kernels and devices with which the model failed its proof.
        self._unproven: set[tuple[str | None, torch.device]] = set()
        self._model = weakref.ref(model)
        self._caches: weakref.WeakKeyDictionary[VMKVCache, _OfCache] = weakref.WeakKeyDictionary()
        self._stream: torch.cuda.Stream | None = None
        self._is_closed = False
        self._forward = _Forward(self, model)
        model.forward = self._forward

    def close(self) -> None:
        """Drop all graphs and restore the model's `forward`. Idempotent."""
        self._is_closed = True
        for known in list(self._caches.values()):
            if known.steps is not None:
                known.steps.close()
        self._caches.clear()
        if self.layers is not None:
            self.layers.close()
        model = self._model()
        if model is not None and vars(model).get("forward") is self._forward:
            self._forward.restore(model)

    def __enter__(self) -> CapturedDecoding:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ---- a call ---------------------------------------------------------------------------

    def serve(self, model: Any, cache: VMKVCache, given: Mapping[str, Any]) -> Any:
        """Compute the model's output by a captured step; None where the model must run itself."""
        known = self._caches.get(cache)
        if self._is_closed or known is None or known.runs_plainly:
            return None
        step = self._forward.as_step(model, given)
        if step is None or not cache.is_uniform(step.token_ids.shape[0]):
            return None
        steps = self._steps(model, cache, known, step.token_ids)
        num_past_tokens = cache.get_seq_length()
        if steps is None or not steps.is_current or not _fit(step, num_past_tokens):
            return None
        if not steps.takes(step.mask, num_past_tokens, cache._store.num_batches):
            return None
        if steps.is_padded and given.get("position_ids") is None:
            return None  # Models derive missing positions from the mask or from the cache.
        cache.begin_step(steps.batch_size)
        logits = steps.run(step.token_ids, step.positions, num_past_tokens)
        if logits is None:
            return None
        cache.end_step()
        self.num_steps += 1
        return known.output_type(logits=logits, past_key_values=cache)

    def note(self, cache: VMKVCache, given: Mapping[str, Any], output: Any) -> None:
        """Record an output that the model itself computed over `cache`."""
        if self._is_closed or not isinstance(getattr(output, "logits", None), torch.Tensor):
            return
        known, token_ids = self._caches.get(cache), given.get("input_ids")
        if known is None:
            self._caches[cache] = _OfCache(output)
        elif token_ids is None or token_ids.shape[1] > 1 or cache.get_seq_length() == 1:
            known.note(output)  # A prompt, not a decode step.

    def _steps(
        self, model: Any, cache: VMKVCache, known: _OfCache, token_ids: torch.Tensor
    ) -> CapturedSteps | None:
        """Return the steps of a cache, made anew if necessary; None if there can be none now."""
        store, steps = cache._store, known.steps
        store.close_gaps()  # First: the checks below compare layouts.
        if not known.is_checked:
            known.is_checked = True
            known.runs_plainly = has_hooks(model) or _is_divided_or_adapted(model)
            if steps is not None and not (steps.is_current and steps.has_weights_of(model)):
                steps.close()
        if known.runs_plainly or store.cores[0].device != token_ids.device:
            return None
        if steps is None or not steps.fits(store, token_ids.shape[0]):
            if steps is not None:
                steps.close()
            known.steps = steps = None
            proof = self._proof(model, store)
            known.runs_plainly = proof is None
            if proof is not None:
                known.steps = steps = CapturedSteps(
                    model,
                    store,
                    token_ids.shape[0],
                    known.logits,
                    self.layers,
                    self._stream_on(token_ids.device),
                    proof.calls,
                )
        return steps

    def _stream_on(self, device: torch.device) -> torch.cuda.Stream | None:
        """Return the stream on which the steps of all caches are captured; None without CUDA."""
        if device.type == "cuda" and (self._stream is None or self._stream.device != device):
            # torch leaves its constructor untyped.
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._stream

    def _proof(self, model: Any, store: Store) -> Proof | None:
        """Return the model's proof; None if packed steps cannot serve the model or its cache."""
        backend, device = store.options.attention_backend, store.cores[0].device
        if (backend, device) in self._unproven:
            return None
        reason = proof = None
        try:
            proof = prove(model, backend)
        except (ConfigError, CapacityError, torch.OutOfMemoryError) as error:
            reason = one_line(error)
        else:
            if device.type == "cuda" and not proof.never_waits:
                reason = "its steps wait for the device"
        if reason is not None:
            self._unproven.add((backend, device))
        elif proof is not None and not store.looks_like(proof.signatures):
            reason = "it caches something else than the keys and values it attends to"
        if reason is not None and reason not in self.refusals:
            self.refusals.append(reason)
            _LOG.warning("decode steps of %s are not captured: %s", type(model).__name__, reason)
        return proof if reason is None else None


class _Forward:
    """A replacement for a model's `forward` that tries a captured step first."""

    def __init__(self, capture: CapturedDecoding, model: Any):
        self.capture = capture
        self.__signature__ = inspect.signature(model.forward)  # transformers looks at it.
        self._names = tuple(self.__signature__.parameters)
        self._model = weakref.ref(model)
        # A `forward` that was set on the instance, e.g. by accelerate; mostly None.
        self._before: Any = vars(model).get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model()
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        cache = given.get("past_key_values")
        output = None
        if isinstance(cache, VMKVCache):
            output = self.capture.serve(model, cache, given)
        if output is None:
            output = (self._before or self._of_class(model))(*args, **kwargs)
            if isinstance(cache, VMKVCache):
                self.capture.note(cache, given, output)
        return output

    @staticmethod
    def _of_class(model: Any) -> Any:
        return types.MethodType(type(model).forward, model)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Give a copied model its class's `forward`: it has no captured steps."""
        if self._before is not None:
            return copy.deepcopy(self._before, memo)
        copied = memo[id(self._model())]
        return self._of_class(copied)

    def __reduce__(self) -> Any:
        # An unpickled model has its class's `forward` only.
        return getattr, (self._model(), "forward")

    def restore(self, model: Any) -> None:
        if self._before is None:
            del model.forward
        else:
            model.forward = self._before

    def as_step(self, model: Any, given: Mapping[str, Any]) -> _Step | None:
        """Return the call as a step; None where it asks for anything else."""
        token_ids, config = given.get("input_ids"), model.config
        if (
            not isinstance(token_ids, torch.Tensor)
            or token_ids.ndim != 2
            or token_ids.shape[1] != 1
            or any(
                value is not None and value is not False
                for name, value in given.items()
                if name not in _KNOWN
            )
            or not _is_on(given.get("use_cache"), getattr(config, "use_cache", True))
            or not _is_on(given.get("return_dict"), getattr(config, "return_dict", True))
            or not _keeps_last(given.get("logits_to_keep", 0))
            or any(getattr(config, name, False) for name in _OUTPUTS)
            or model.training
            or torch.is_grad_enabled()
            or torch.is_autocast_enabled(token_ids.device.type)
        ):
            return None
        positions = given.get("position_ids")
        if positions is None and "cache_position" in self._names:
            positions = given.get("cache_position")  # 4.57 uses these then.
            positions = None if positions is None else positions[None]
        return _Step(token_ids, positions, given.get("attention_mask"))


def _is_on(given: Any, default: Any) -> bool:
    return bool(default if given is None else given)


def _keeps_last(logits_to_keep: Any) -> bool:
    return isinstance(logits_to_keep, int) and logits_to_keep in (0, 1)


def _fit(step: _Step, num_past_tokens: int) -> bool:
    """Whether captured steps support the forms of mask and positions."""
    batch_size, device = step.token_ids.shape[0], step.token_ids.device
    mask, positions = step.mask, step.positions
    return (
        mask is None
        or (
            isinstance(mask, torch.Tensor)
            and mask.shape == (batch_size, num_past_tokens + 1)
            and mask.device == device
        )
    ) and (
        positions is None
        or (
            isinstance(positions, torch.Tensor)
            and positions.shape in ((batch_size, 1), (1, 1))
            and not positions.is_floating_point()
            and positions.device == device
        )
    )


def _is_divided_or_adapted(model: Any) -> bool:
    """Whether the model is divided over processes, or has adapters that may be switched off."""
    return compat.num_parts(model) > 1 or any(
        type(each).__module__.partition(".")[0] == "peft" for each in model.modules()
    )
