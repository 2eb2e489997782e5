"""Division of a model among ranks, by the tensor-parallel plan that transformers has for it.

A plan names a style for each kind of module and parameter. The styles that vmkv can run are listed
here; a model with any other is refused before it is changed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ...errors import ConfigError
from ...hf import compat
from ...units import div_ceil

#: Styles of linear layers: True if a column-wise layer gathers its output, and if a row-wise layer
#: takes its part of a whole input.
COLUMNS = {"colwise": False, "colwise_gather_output": True, "colwise_rep": True}
ROWS = {"rowwise": False, "rowwise_split_input": True, "rowwise_rep": True}
#: Styles of modules that need no other change once their parameters are divided.
UNCHANGED = ("replicated_with_grad_allreduce", "local_params", "replicate")
EMBEDDING = "embedding_rowwise"
EXPERTS = "moe_tp_experts"
_PACKED = "packed_colwise"
_STYLES = {*COLUMNS, *ROWS, *UNCHANGED, EMBEDDING, EXPERTS, _PACKED, "all_reduce"}
_KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value")


class Share(NamedTuple):
    """The part of rank `rank` among `size` ranks."""

    rank: int
    size: int

    def of(self, length: int) -> slice:
        """Return the rank's indices, divided as in torch: the last shares may be smaller."""
        chunk = div_ceil(length, self.size)
        return slice(min(self.rank * chunk, length), min((self.rank + 1) * chunk, length))


def plan_of(model: Any) -> Mapping[str, str]:
    """Return the styles of a model's modules and parameters; layer numbers are `*`.

    Raises `ConfigError` if transformers has no plan for it, or one with a style unknown to vmkv.
    """
    plan: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    name = type(model).__name__
    if not any(style in ROWS or style == EXPERTS for style in plan.values()):
        raise ConfigError(
            f"transformers does not say how to divide a {name} among ranks; serve it on one GPU, "
            "or run a replica on each"
        )
    for key, style in plan.items():
        if style not in _STYLES:
            raise ConfigError(
                f"a {name} is divided by the style {style!r} ({key}), which vmkv cannot run on "
                "parts; serve it on one GPU, or run a replica on each"
            )
    return plan


def check_heads(config: Any, plan: Mapping[str, str], size: int) -> None:
    """Check that every rank gets whole heads; raises `ConfigError` otherwise."""
    if not divides_heads(plan):
        return  # Every rank has all heads.
    decoder = compat.text_config(config)
    num_heads = decoder.num_attention_heads
    num_kv_heads = getattr(decoder, "num_key_value_heads", None) or num_heads
    for count, what in ((num_kv_heads, "key-value heads"), (num_heads, "attention heads")):
        counts = [count] if isinstance(count, int) else list(count)
        if any(each % size for each in counts):
            raise ConfigError(
                f"{count} {what} cannot be divided among {size} ranks; take a number of ranks "
                "that divides them, and replicas for the rest of the GPUs"
            )


def divides_heads(plan: Mapping[str, str]) -> bool:
    """Whether a rank has a part of the key-value heads only."""
    return any(
        key.rpartition(".")[2] in _KEY_PROJECTIONS and style == "colwise"
        for key, style in plan.items()
    )


def style_of(name: str, plan: Mapping[str, str]) -> str | None:
    """Return the style of a module or parameter by its full name."""
    return plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))


def style_of_parameter(name: str, plan: Mapping[str, str]) -> str | None:
    """Return the style of a parameter: its own, or its module's."""
    own = style_of(name, plan)
    if own is not None:
        return own
    style = style_of(name.rpartition(".")[0], plan)
    return None if style in (EXPERTS, *UNCHANGED) else style


def part_of(parameter: torch.Tensor, name: str, style: str | None, share: Share) -> torch.Tensor:
    """Return a rank's part of a whole parameter, by its style; a copy unless undivided."""
    is_whole = style is None or style in UNCHANGED or style == "all_reduce"
    if is_whole or (style in ROWS and name == "bias"):  # A bias is added once, to the sum.
        return parameter
    dim = parameter.ndim - 1 if style in ROWS else max(parameter.ndim - 2, 0)
    halves = parameter.chunk(2 if style == _PACKED else 1, dim)
    its = share.of(halves[0].shape[dim])
    return torch.cat([half.narrow(dim, its.start, its.stop - its.start) for half in halves], dim)


def bytes_per_rank(model: Any, plan: Mapping[str, str], size: int) -> int:
    """Return the bytes of a `meta` model's part on the first rank; others have at most as many."""
    share = Share(0, size)
    parts = (
        part_of(each.detach(), name.rpartition(".")[2], style_of_parameter(name, plan), share)
        for name, each in model.named_parameters()
    )
    return sum(part.nbytes for part in parts)


def modules_of(model: torch.nn.Module, plan: Mapping[str, str]) -> Iterator[tuple[Any, str]]:
    """Yield the modules that the plan names, with their styles."""
    for name, module in model.named_modules():
        style = style_of(name, plan)
        if style is not None:
            yield module, style
