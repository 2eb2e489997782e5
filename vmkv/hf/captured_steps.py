"""Captured decode steps of one transformers cache; without CUDA, the same steps run uncaptured."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch

from ..errors import ConfigError
from ..step import Stepper
from ..step.compiled_layers import CompiledLayers
from ..step.model_guard import chosen_attention
from .attention import attending_in_place
from .group_step import LeftPadding
from .store import Store

_LOG = logging.getLogger(__name__)


class CapturedSteps:
    """The decode steps of one cache, while its layers stay where they are.

    `store` has rows on the model's device alone, `logits` is `[B, …, vocabulary]` as the model
    returned them for this batch, and `layers` are compiled and stand aside, or None.
    """

    def __init__(
        self,
        model: Any,
        store: Store,
        batch_size: int,
        logits: torch.Tensor,
        layers: CompiledLayers | None = None,
        stream: torch.cuda.Stream | None = None,
        calls: tuple[int, ...] | None = None,
    ):
        (core,) = store.cores
        self.batch_size = batch_size
        self.is_closed = False
        self._model = model
        self._layers = layers
        self._core = core
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
            self._graphs = self._stepper.make_batch_graphs(logits.shape[-1], logits.dtype, stream)
        self._weights = _addresses(model)
        self._attention = chosen_attention(model)
        self._padding: LeftPadding | None = None
        # Tokens and batch count of a step that continues the last one, and whether the last one was
        # declined for its mask.
        self._next = (-1, -1)
        self._was_declined = False
        store.add_reader(self)

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

    def has_weights_of(self, model: Any) -> bool:
        """Whether the model's parameters have the same addresses. Cost: a look at each."""
        return self._weights == _addresses(model)

    def takes(self, mask: torch.Tensor | None, num_past_tokens: int, num_batches: int) -> bool:
        """Whether the next step's mask `[B, num_past_tokens + 1]` is left padding, or None.

        Waits for the device only where the batch does not continue the last step. Raises what
        `LeftPadding.check` raises, after which the mask is read anew.
        """
        goes_on = self._next == (num_past_tokens, num_batches)
        self._next = (num_past_tokens + 1, num_batches)
        if goes_on and self._was_declined:
            return False
        before, self._padding = self._padding, None
        self._was_declined = False
        if before is not None:
            before.look()
        if mask is None:
            return True
        if goes_on and before is not None:
            before.check(mask)
            self._padding = before
            return True
        self._padding = LeftPadding.read(mask)
        if self._padding is None:
            self._was_declined = True
            return False
        if self._padding.left_pad is not None:
            self._graphs.left_pad.copy_(self._padding.left_pad)
        return True

    @property
    def is_padded(self) -> bool:
        """Whether the mask taken last begins with padding in some row."""
        return self._padding is not None and self._padding.left_pad is not None

    def run(
        self, token_ids: torch.Tensor, positions: torch.Tensor | None, num_past_tokens: int
    ) -> torch.Tensor | None:
        """Run a step whose rows have grown and whose mask was taken; never waits for the device.

        `token_ids` is `[B, 1]`; `positions` is `[B or 1, 1]`, by default `num_past_tokens`. Returns
        new logits `[B, 1, vocabulary]`, or None where steps of this size cannot be captured: the
        model then computes the step itself, over the same rows.
        """
        graphs, num_tokens = self._graphs, num_past_tokens + 1
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
            if not graphs.run_recurring(bucket, integers, self._attending):
                return None
        return graphs.space.logits[:, None].clone()

    def _attending(self) -> contextlib.AbstractContextManager[None]:
        if self._layers is None:
            return attending_in_place(self._model)
        return self._stepper.attending(self._layers)

    def close(self) -> None:
        """Wait for the device, and drop graphs and tensors. Idempotent."""
        if self.is_closed:
            return
        self.is_closed = True
        if self._core.device.type == "cuda":
            torch.cuda.synchronize(self._core.device)
        self._graphs.close()
        self._stepper.close()
        if self._padding is not None:
            try:
                self._padding.look()
            except ConfigError as error:
                _LOG.error("%s", error)


def _addresses(model: Any) -> list[int]:
    """Return the addresses at which graphs read the model's parameters and buffers."""
    return [each.data_ptr() for part in (model.parameters(), model.buffers()) for each in part]
