"""Layers that compute with a part of their weights, as ordinary modules over ordinary tensors.

transformers keeps parts as distributed tensors and wraps layers in closures that exchange and
restore parameters around every call, which neither compilers nor CUDA graphs support. Here a part
is a plain parameter and communication is an operator, so a rank's layers are compiled, fused and
captured like a whole model's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from ...errors import ConfigError
from ...step.graph_passes import GROUP
from ...units import div_ceil
from . import sharding
from .collectives import all_gather, all_reduce
from .group import TensorParallel
from .sharding import Share


class RowwiseLinear(torch.nn.Linear):
    """Linear layer with some columns of the weight, and the bias; ranks' outputs are added."""

    _vmkv_group: str
    #: The slice of the input to use, as start and length; None if the input is this rank's part.
    _vmkv_input: tuple[int, int] | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Compute the whole projection."""
        its = input if self._vmkv_input is None else input.narrow(-1, *self._vmkv_input)
        out = all_reduce(functional.linear(its, self.weight), self._vmkv_group)
        return out if self.bias is None else out + self.bias


class GatheredLinear(torch.nn.Linear):
    """Linear layer with some rows of the weight, as many on every rank; outputs are joined."""

    _vmkv_group: str
    _vmkv_rank: int
    _vmkv_size: int
    #: Buffer `[any, rows]` for this rank's output; None to gather all ranks' outputs.
    _vmkv_room: torch.Tensor | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Compute the whole projection, or this rank's part (see `divided_head.py`)."""
        room = self._vmkv_room
        if room is None:
            return self.whole(super().forward(input))
        tokens = input.flatten(0, -2)
        if tokens.shape[0] > room.shape[0]:
            return super().forward(input)
        out, weight = room[: tokens.shape[0]], self.weight.t()
        bias: Any = self.bias
        if bias is None:
            torch.mm(tokens, weight, out=out)
        else:
            torch.addmm(bias, tokens, weight, out=out)
        return out.view(*input.shape[:-1], -1)

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """Concatenate all ranks' parts `[…, rows]`."""
        parts = all_gather(part, self._vmkv_group, self._vmkv_size)
        # The last rank's rows may be padded.
        return parts.movedim(0, -2).flatten(-2)[..., : self.out_features]


class _PartialEmbedding(torch.nn.Embedding):
    """Embedding with some tokens, and zero for others; ranks' outputs are added."""

    _vmkv_group: str
    _vmkv_start: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        local = input - self._vmkv_start
        inside = local.clamp(0, self.weight.shape[0] - 1)
        part = super().forward(inside)
        return all_reduce(part.masked_fill_((inside != local)[..., None], 0), self._vmkv_group)


class _PartialExperts(torch.nn.Module):
    """Experts with some columns of each; ranks' outputs are added."""

    _vmkv_group: str

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return all_reduce(super().forward(*args, **kwargs), self._vmkv_group)


def localise(model: Any, group: TensorParallel) -> None:
    """Reduce a causal language model, the same on every rank, to this rank's part, in place.

    Converts a model that transformers has divided; cuts a whole one and releases its other parts.
    Idempotent. Raises `ConfigError`, and changes nothing, if the model cannot be divided. Cost: for
    a whole model, a copy of this rank's part, one parameter at a time.
    """
    if vars(model).get(GROUP) == group.name:
        return
    plan = sharding.plan_of(model)
    sharding.check_heads(model.config, plan, group.size)
    modules = list(sharding.modules_of(model, plan))
    for module, style in modules:
        _check(module, style)
    share = Share(group.rank, group.size)
    with torch.no_grad():
        _localise_parameters(model, plan, share)
        for module, style in modules:
            vars(module).pop("forward", None)  # transformers' closure, if any.
            _change_class(module, style, group)
    setattr(model, GROUP, group.name)


def _check(module: torch.nn.Module, style: str) -> None:
    is_linear = style in sharding.COLUMNS or style in sharding.ROWS
    if is_linear and type(module) is not torch.nn.Linear:
        raise ConfigError(
            f"a {type(module).__name__} cannot be divided among ranks: quantised and adapted "
            "layers are for one GPU"
        )
    if style == sharding.EMBEDDING and not isinstance(module, torch.nn.Embedding):
        raise ConfigError(f"a {type(module).__name__} cannot be divided as an embedding")
    if style == "all_reduce":
        raise ConfigError(
            f"the parts of a {type(module).__name__} are added by the module around them, which "
            "vmkv does not know; serve the model on one GPU"
        )


def _localise_parameters(model: torch.nn.Module, plan: Any, share: Share) -> None:
    from torch.distributed.tensor import DTensor

    is_divided = any(isinstance(each, DTensor) for each in model.parameters())
    parts: dict[int, torch.nn.Parameter] = {}  # Keeps tied parameters tied.
    # A tied parameter is visited under each of its names, and replaced under all of them.
    for prefix, module in model.named_modules():
        for name, parameter in tuple(module._parameters.items()):
            if parameter is None:
                continue
            known = parts.get(id(parameter))
            if known is None:
                full_name = f"{prefix}.{name}" if prefix else name
                style = sharding.style_of_parameter(full_name, plan)
                if isinstance(parameter, DTensor):
                    part = parameter.to_local().detach()
                elif is_divided:
                    part = parameter.detach()
                else:
                    part = sharding.part_of(parameter.detach(), name, style, share)
                part = _filled_up(part, parameter.shape, style, share)
                known = torch.nn.Parameter(part.contiguous(), requires_grad=False)
                parts[id(parameter)] = known
                parts[id(known)] = known
            module._parameters[name] = known


def _filled_up(
    part: torch.Tensor, whole: torch.Size, style: str | None, share: Share
) -> torch.Tensor:
    """Pad a part that is gathered to the number of rows that every rank has."""
    if style is None or not (sharding.COLUMNS.get(style) or style == sharding.EMBEDDING):
        return part
    rows = div_ceil(whole[0], share.size)
    if part.shape[0] == rows:
        return part
    return torch.cat([part, part.new_zeros(rows - part.shape[0], *part.shape[1:])])


def _change_class(module: Any, style: str, group: TensorParallel) -> None:
    own = vars(module)
    if style in sharding.ROWS and isinstance(module, torch.nn.Linear):
        whole, module.in_features = module.in_features, module.weight.shape[1]
        start = Share(group.rank, group.size).of(whole).start
        takes = (start, module.in_features) if sharding.ROWS[style] else None
        own.update(_vmkv_group=group.name, _vmkv_input=takes)
        module.__class__ = RowwiseLinear
    elif sharding.COLUMNS.get(style):
        own.update(_vmkv_group=group.name, _vmkv_rank=group.rank, _vmkv_size=group.size)
        module.__class__ = GatheredLinear
    elif style in sharding.COLUMNS:
        module.out_features = module.weight.shape[0]
    elif style == sharding.EMBEDDING:
        start = group.rank * div_ceil(module.num_embeddings, group.size)
        own.update(_vmkv_group=group.name, _vmkv_start=start)
        module.__class__ = _derived(_PartialEmbedding, type(module))
    elif style == sharding.EXPERTS:
        own.update(_vmkv_group=group.name)
        module.__class__ = _derived(_PartialExperts, type(module))


_DERIVED: dict[tuple[type, type], type] = {}


def _derived(partial: type, of: type) -> type:
    """Return a subclass of `of` that computes with a part; one per class."""
    key = (partial, of)
    if key not in _DERIVED:
        _DERIVED[key] = type(f"Partial{of.__name__}", (partial, of), {})
    return _DERIVED[key]
