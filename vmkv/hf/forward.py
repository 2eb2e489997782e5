"""A packed forward pass: the unmodified transformers model over the tokens of one `RaggedStep`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from . import compat
from .attention import register
from .ragged import RaggedStep


def forward_packed(
    model: Any,
    step: RaggedStep,
    tokens: torch.Tensor,
    ends: Sequence[int] | None = None,
) -> torch.Tensor:
    """Call the model on packed tokens `[Tq]`; logits `[len(ends), vocabulary]`.

    Args:
        model: The model, attending through `"vmkv"`.
        step: What the tokens are.
        tokens: `[Tq]`.
        ends: Which tokens' logits are wanted; None for all of them.

    Raises:
        ConfigError: A layer has attended twice, or not at all. What was computed is worthless.
        OutOfPagesError, SequenceFullError: The step's sequences cannot grow.
        Whatever else the model raises.
    """
    device = tokens.device
    # A mask of four dimensions is passed through as it is, and ours ignores it: otherwise
    # transformers would look for packed sequences in the positions and build a dense mask.
    placeholder = torch.empty((1, 1, 1, 1), dtype=torch.bool, device=device)
    placeholder._vmkv_placeholder = True  # type: ignore[attr-defined]
    kept = {}
    if ends is not None:
        kept["logits_to_keep"] = torch.tensor(ends).to(device, non_blocking=True)
    output = model(
        input_ids=tokens[None],
        position_ids=step.positions(device)[None],
        attention_mask=placeholder,
        use_cache=False,
        vmkv_batch=step,
        return_dict=True,
        **kept,
    )
    step.check_complete()
    return kept_logits(output, kept.get("logits_to_keep"))


def kept_logits(output: Any, keep: torch.Tensor | None) -> torch.Tensor:
    """Logits `[kept, vocabulary]` of a packed pass, whether or not the model can keep but those.

    Args:
        output: What the model returned.
        keep: Which tokens' were asked for; None for all.
    """
    logits: torch.Tensor = output.logits[0]
    return logits if keep is None or logits.shape[0] == keep.shape[0] else logits[keep]


@contextlib.contextmanager
def attending_through(model: Any, name: str = "vmkv") -> Iterator[None]:
    """Have the model attend through an attention implementation, and as before afterwards."""
    register()
    before, wanted, restored = compat.attention_settings(model, name)
    if before == name:
        yield
        return
    model.set_attn_implementation(wanted)
    try:
        yield
    finally:
        model.set_attn_implementation(restored)
