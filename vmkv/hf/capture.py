"""transformers' own decoding loop over captured steps.

    vmkv.capture_decoding(model)
    model.generate(**inputs, cache=VMKVCache(model.config))

(`past_key_values` before transformers 5.24, here as everywhere.)

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
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..errors import CapacityError, ConfigError, one_line
from ..step import Stepper
from ..step.compiled_layers import CompiledLayers
from ..step.graphs import BatchGraphs, GraphSpace, Scratch
from ..step.model_guard import chosen_attention
from ..step.row_attention import AttentionCalls
from ..step.stepper import has_hooks
from . import compat
from .cache import VMKVCache
from .group_step import LeftPadding
from .proof import Proof, locks_of, prove
from .store import Store

_LOG = logging.getLogger(__name__)
#: Arguments of a decode step of `generate` that captured steps handle.
_KNOWN = {
    *("input_ids", "attention_mask", "position_ids", "cache_position", "use_cache"),
    *("return_dict", "logits_to_keep"),
}
#: Outputs that a configuration may request and a graph does not return.
_OUTPUTS = ("output_attentions", "output_hidden_states", "output_router_logits")


def capture_decoding(
    model: Any, *, compile_layers: bool = False, compile_backend: str = "inductor"
) -> CapturedDecoding:
    """Capture a model's decode steps over a `VMKVCache`, in any decoding loop.

    Afterwards `model.generate(**inputs, cache=VMKVCache(model.config))` decodes by replaying
    CUDA graphs, captured once a size has come three times: greedily or sampling, with beams, with
    left padding. Graphs stay with their cache between calls. Everything else runs as
    before, with the same cache: prompts, other caches, masks other than left padding, steps without
    positions after left padding or images, models with hooks or adapters, in training or under
    autocast, divided or spread over devices, and models that fail their proof (see
    `vmkv.generate`), which are logged. Without CUDA the same steps run uncaptured.

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
        ConfigError: The model is an encoder-decoder or takes no cache, its layers cannot be
            compiled, or it is captured already with another `compile_layers`. The model is
            unchanged.

    Cost: a copy of the weights, part by part, where layers are compiled; at the first step that
        could be captured, a proof (see `vmkv.generate`). A mask is read once per prompt, and later
        ones are compared with it while the device computes the step.
    """
    compat.check_model(model, may_be_offloaded=True)
    capture = vars(model).get("forward")
    if isinstance(capture, CapturedDecoding):
        if (capture.layers is not None) != compile_layers:
            raise ConfigError(
                "decode steps of this model are captured already, with another compile_layers; "
                "close that first"
            )
        return capture
    if model.config.is_encoder_decoder:
        raise ConfigError(
            "decode steps of encoder-decoders cannot be captured; generate with "
            f"{compat.CACHE_NAME}=VMKVCache.for_encoder_decoder(config) as it is"
        )
    compat.cache_argument(model)  # Refuses a model that takes none.
    layers = None
    if compile_layers:
        layers = CompiledLayers(model, backend=compile_backend)
        layers.stand_aside()
    return CapturedDecoding(model, layers)


class _OfCache:
    """The captured steps of one cache, and its model's outputs: `logits [0, vocabulary]`."""

    def __init__(self, output: Any, steps: CapturedSteps | None):
        self.steps = steps
        self.logits = output.logits.new_empty((0, output.logits.shape[-1]))
        self.output_type = type(output)
        self.cache_name = compat.named_cache(self.output_type) or compat.CACHE_NAME
        self.is_checked = self.runs_plainly = self.offsets_positions = False


class CapturedDecoding(AbstractContextManager["CapturedDecoding"]):
    """The captured decode steps of one model, over any number of caches; see `capture_decoding`.

    It replaces the model's `forward`, and tries a captured step first.

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
        self.__signature__ = inspect.signature(model.forward)  # transformers looks at it.
        self._names = tuple(self.__signature__.parameters)
        # A `forward` that was set on the instance, e.g. by accelerate; mostly None.
        self._before: Any = vars(model).get("forward")
        model.forward = self

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
        if model is not None and vars(model).get("forward") is self:
            del model.forward
            if self._before is not None:
                model.forward = self._before

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self._before is not None:
            return copy.deepcopy(self._before, memo)
        return _forward_of_class(memo[id(self._model())])

    def __reduce__(self) -> Any:
        # An unpickled model has its class's `forward` only.
        return getattr, (self._model(), "forward")

    # ---- a call ---------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output."""
        model = self._model()
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        # By any name, those that transformers renames for callers included.
        name = next((name for name, its in given.items() if isinstance(its, VMKVCache)), None)
        cache = None if name is None else given.pop(name)
        output = None
        if cache is not None:
            output = self._serve(model, cache, given)
        if output is None:
            output = (self._before or _forward_of_class(model))(*args, **kwargs)
            if cache is not None:
                self._note(cache, given, output)
        return output

    def _serve(self, model: Any, cache: VMKVCache, given: Mapping[str, Any]) -> Any:
        """Compute the model's output by a captured step; None where the model must run itself."""
        known = self._caches.get(cache)
        if self._is_closed or known is None or known.runs_plainly or not _is_step(model, given):
            return None
        token_ids, mask = given["input_ids"], given.get("attention_mask")
        if not cache.is_uniform(token_ids.shape[0]):
            return None
        steps = self._steps(model, cache, known, token_ids)
        num_past_tokens = cache.get_seq_length()
        if steps is None or not steps.is_current:
            return None
        positions = given.get("position_ids")
        has_positions = positions is not None
        if not has_positions and "cache_position" in self._names:
            positions = given.get("cache_position")  # 4.57 uses these then.
            positions = None if positions is None else positions[None]
        device, batch_size = token_ids.device, steps.batch_size
        fit = _fits(mask, device, (batch_size, num_past_tokens + 1))
        planes = (3, batch_size, 1), (4, batch_size, 1)  # Of M-RoPE.
        if not fit or not _fits(positions, device, (batch_size, 1), (1, 1), *planes):
            self._refuse(model, "their mask or positions are not [B, T]")
            return None
        if not steps.takes(mask, num_past_tokens, cache._store.num_batches):
            self._refuse(model, "their mask or positions are not those of left padding")
            return None
        if not has_positions and (steps.is_padded or known.offsets_positions):
            return None  # Models derive missing positions from the mask or from their prompt.
        cache.begin_step(steps.batch_size)
        logits = steps.run(token_ids, positions, num_past_tokens)
        if logits is None:
            return None
        cache.end_step()
        self.num_steps += 1
        return known.output_type(logits=logits, **{known.cache_name: cache})

    def _note(self, cache: VMKVCache, given: Mapping[str, Any], output: Any) -> None:
        """Record an output that the model itself computed over `cache`."""
        if self._is_closed or not isinstance(getattr(output, "logits", None), torch.Tensor):
            return
        known, token_ids = self._caches.get(cache), given.get("input_ids")
        is_prompt = token_ids is None or token_ids.shape[1] > 1 or cache.get_seq_length() == 1
        if known is None or is_prompt:
            self._caches[cache] = _OfCache(output, None if known is None else known.steps)

    def _steps(
        self, model: Any, cache: VMKVCache, known: _OfCache, token_ids: torch.Tensor
    ) -> CapturedSteps | None:
        """Return the steps of a cache, made again if necessary; None if there can be none now."""
        store, steps = cache._store, known.steps
        store.close_gaps()  # First: the checks below compare layouts.
        if not known.is_checked:
            known.is_checked = True
            reason = _why_plain(model)
            known.runs_plainly = reason is not None
            if reason is not None:
                self._refuse(model, reason)
            known.offsets_positions = compat.offsets_positions(model)
            if steps is not None and not (steps.is_current and steps.weights == _addresses(model)):
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
                batch_size, stream = token_ids.shape[0], self._stream_on(token_ids.device)
                known.steps = steps = CapturedSteps(
                    model, store, batch_size, known.logits, self.layers, stream, proof.calls
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
        try:
            proof = prove(model, backend, store.options.kv_dtype)
            if proof.calls.chunks:
                reason = "chunks of its attention begin after the padding"
            elif proof.calls.states:
                reason = "its layers keep states, which are transformers' own in this cache"
            elif proof.never_waits or device.type != "cuda":
                if store.signatures == proof.signatures:
                    return proof
                reason = "it caches something else than the keys and values it attends to"
            else:
                self._unproven.add((backend, device))
                reason = "its steps wait for the device"
        except (ConfigError, CapacityError, torch.OutOfMemoryError) as error:
            self._unproven.add((backend, device))
            reason = one_line(error)
        self._refuse(model, reason)
        return None

    def _refuse(self, model: Any, reason: str) -> None:
        """Log a reason why the model itself computes a step, unless it was logged before."""
        if reason not in self.refusals:
            self.refusals.append(reason)
            _LOG.warning("decode steps of %s are not captured: %s", type(model).__name__, reason)


def _forward_of_class(model: Any) -> Any:
    return types.MethodType(type(model).forward, model)


def _is_step(model: Any, given: Mapping[str, Any]) -> bool:
    """Whether a call gives one token of every row and asks for nothing but logits."""
    token_ids, config = given.get("input_ids"), model.config
    return (
        isinstance(token_ids, torch.Tensor)
        and token_ids.ndim == 2
        and token_ids.shape[1] == 1
        and all(given[name] is None or given[name] is False for name in given.keys() - _KNOWN)
        and all(_is_on(name, given, config) for name in ("use_cache", "return_dict"))
        and isinstance(kept := given.get("logits_to_keep", 0), int)
        and kept in (0, 1)
        and not any(getattr(config, name, False) for name in _OUTPUTS)
        and not (model.training or torch.is_grad_enabled())
        and not torch.is_autocast_enabled(token_ids.device.type)
    )


def _is_on(name: str, given: Mapping[str, Any], config: Any) -> bool:
    value = given.get(name)
    return bool(getattr(config, name, True) if value is None else value)


def _fits(given: Any, device: torch.device, *shapes: tuple[int, ...]) -> bool:
    """Whether a mask or positions are None, or integers in one of the shapes on the device."""
    return given is None or (
        isinstance(given, torch.Tensor)
        and given.shape in shapes
        and given.device == device
        and not given.is_floating_point()
    )


def _why_plain(model: Any) -> str | None:
    """Return why steps of the model cannot be captured, whatever its proof; None if they can."""
    if has_hooks(model):
        return "a captured step would leave out the forward hooks of its modules"
    if (getattr(model, "tp_size", None) or 1) > 1:
        return "it is divided over processes"
    if any(type(each).__module__.partition(".")[0] == "peft" for each in model.modules()):
        return "it has adapters, which may be switched off between steps"
    return None


# ---- the steps of one cache ----------------------------------------------------------------------


class CapturedSteps:
    """The decode steps of one cache, while its layers stay where they are.

    `store` has rows on the model's device alone, `logits` is `[B, …, vocabulary]` as the model
    returned them for this batch, and `layers` are compiled and stand aside, or None. `weights` are
    the addresses of the model's parameters.
    """

    def __init__(
        self,
        model: Any,
        store: Store,
        batch_size: int,
        logits: torch.Tensor,
        layers: CompiledLayers | None,
        stream: torch.cuda.Stream | None,
        calls: AttentionCalls,
    ):
        (core,) = store.cores
        self.batch_size = batch_size
        self.is_closed = False
        self._model = model
        self._core = core
        self._layers = layers
        self._num_layouts = store.num_layouts
        # No inference tensors: steps may run in inference mode or outside it.
        with torch.inference_mode(mode=False), torch.no_grad():
            self._stepper = Stepper(
                model,
                [core],
                batch_size,
                attention_backend=store.options.attention_backend,
                layers=layers,
                calls=calls,
            )
            unused = Scratch(batch_size, 0)  # A batch needs no padding.
            form = logits.shape[-1], logits.dtype, unused
            self._graphs = BatchGraphs(GraphSpace(self._stepper, *form, stream=stream))
            # On the host: whether the last step's mask or positions differed.
            is_cuda = core.device.type == "cuda"
            self._has_differed = torch.zeros((), dtype=torch.bool, pin_memory=is_cuda)
        self.weights = _addresses(model)
        self._attention = chosen_attention(model)
        self._padding: LeftPadding | None = None
        self._differs: torch.Tensor | None = None  # Whether the step's mask differs from that.
        # Tokens and batch count of a step that continues the last one, and whether the last one was
        # declined for its mask or positions.
        self._next = (-1, -1)
        self._was_declined = False
        store.readers.add(self)

    def fits(self, store: Store, batch_size: int) -> bool:
        """Whether the cache's layers are where they were, in a batch of the same size."""
        return (
            not self.is_closed
            and self.batch_size == batch_size
            and self._num_layouts == store.num_layouts
        )

    @property
    def is_current(self) -> bool:
        """Whether the model is as at capture, by `ModelGuard`, and attends by the same function."""
        return (
            self._stepper.guard.is_as_captured()
            and chosen_attention(self._model) == self._attention
        )

    def takes(self, mask: torch.Tensor | None, num_past_tokens: int, num_batches: int) -> bool:
        """Whether the next step can run: `mask [B, num_past_tokens + 1]` is None or left padding.

        Waits for the device unless the batch continues the last step; `run` then compares the
        masks.
        """
        goes_on = self._next == (num_past_tokens, num_batches)
        self._next = (num_past_tokens + 1, num_batches)
        if goes_on and self._was_declined:
            return False
        before, self._padding = self._padding, None
        self._was_declined, self._differs = False, None
        if mask is None:
            return True
        if goes_on and before is not None:
            self._differs = before.differs(mask)
            self._padding = before
            return True
        self._padding = padding = LeftPadding.read(mask)
        self._was_declined = padding is None
        if padding is not None and padding.left_pad is not None:
            self._graphs.left_pad.copy_(padding.left_pad)
        return padding is not None

    @property
    def is_padded(self) -> bool:
        """Whether the mask taken last begins with padding in some row."""
        return self._padding is not None and self._padding.left_pad is not None

    def run(
        self, token_ids: torch.Tensor, positions: torch.Tensor | None, num_past_tokens: int
    ) -> torch.Tensor | None:
        """Run a step whose rows have grown and whose mask was taken.

        `token_ids` is `[B, 1]`; `positions` is `[B or 1, 1]`, or `[3 or 4, B, 1]` for M-RoPE, by
        default `num_past_tokens`. Returns new logits `[B, 1, vocabulary]`, or None where steps of
        this size cannot be captured, the mask differs from the one before, or axes of M-RoPE from
        each other: the model then computes the step itself, over the same rows. Waits for the
        device's comparison of masks while the device computes.
        """
        graphs, num_tokens = self._graphs, num_past_tokens + 1
        differs = [] if self._differs is None else [self._differs]
        if positions is not None and positions.ndim == 3:  # Text positions may come first.
            differs.append((positions[-3:] != positions[-1]).any())
            positions = positions[-1]
        compared: torch.cuda.Event | None = None
        if differs:
            self._has_differed.copy_(torch.stack(differs).any(), non_blocking=True)
            if self._has_differed.is_pinned():
                compared = torch.cuda.current_stream(token_ids.device).record_event()
        self._core.note_stream()
        self._stepper.last_tokens[: self.batch_size].copy_(token_ids[:, 0])
        if positions is None:
            graphs.positions.fill_(num_past_tokens)
        else:
            graphs.positions.copy_(positions[:, 0].expand(self.batch_size))
        integers = graphs.fill(num_tokens)
        writes = [(row, num_past_tokens, num_tokens) for row in range(self.batch_size)]
        with self._core.submitting(writes):
            bucket = graphs.key(num_tokens, is_padded=self.is_padded)
            with locks_of(self._model).proof:
                if self._layers is not None and self._layers.are_in_place:
                    return None  # For a call of `vmkv.generate` in another thread.
                if not graphs.run_recurring(bucket, integers, self._stepper.attending):
                    return None
        if compared is not None:
            compared.synchronize()
        self._was_declined = bool(differs) and bool(self._has_differed.numpy()[()])
        return None if self._was_declined else graphs.space.logits[:, None].clone()

    def close(self) -> None:
        """Wait for the device, and drop graphs and tensors. Idempotent."""
        if self.is_closed:
            return
        self.is_closed = True
        if self._core.device.type == "cuda":
            torch.cuda.synchronize(self._core.device)
        self._graphs.close()
        self._stepper.close()


def _addresses(model: Any) -> list[int]:
    return [each.data_ptr() for part in (model.parameters(), model.buffers()) for each in part]
