"""Layers that compute with a part of their weights, as ordinary modules over ordinary tensors.

transformers keeps parts as distributed tensors and wraps layers in closures, which neither
compilers nor CUDA graphs support. Here a part is a plain parameter and communication an operator.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch.nn import functional

from ...errors import ConfigError
from ...hf import compat, probe
from ...step.graph_passes import GROUP
from ...step.piece import likeliest
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
        """Compute the whole projection, or this rank's part (see `DividedHead`)."""
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
    _vmkv_group: str
    _vmkv_start: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        local = input - self._vmkv_start
        inside = local.clamp(0, self.weight.shape[0] - 1)
        part = super().forward(inside)
        return all_reduce(part.masked_fill_((inside != local)[..., None], 0), self._vmkv_group)


class _PartialExperts(torch.nn.Module):
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
        its = module.named_parameters(prefix, recurse=False, remove_duplicate=False)
        for full_name, parameter in tuple(its):
            name = full_name.rpartition(".")[2]
            known = parts.get(id(parameter))
            if known is None:
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
    if style is None or not (sharding.COLUMNS.get(style) or style == sharding.EMBEDDING):
        return part
    rows = div_ceil(whole[0], share.size)
    if part.shape[0] == rows:
        return part
    return torch.cat([part, part.new_zeros(rows - part.shape[0], *part.shape[1:])])


def _change_class(module: Any, style: str, group: TensorParallel) -> None:
    own, kind = vars(module), cast("Any", type(module))
    own.update(_vmkv_group=group.name, _vmkv_rank=group.rank, _vmkv_size=group.size)
    if style in sharding.ROWS and isinstance(module, torch.nn.Linear):
        whole, module.in_features = module.in_features, module.weight.shape[1]
        start = Share(group.rank, group.size).of(whole).start
        takes = (start, module.in_features) if sharding.ROWS[style] else None
        own.update(_vmkv_input=takes)
        module.__class__ = RowwiseLinear
    elif sharding.COLUMNS.get(style):
        module.__class__ = GatheredLinear
    elif style in sharding.COLUMNS:
        module.out_features = module.weight.shape[0]
    elif style == sharding.EMBEDDING:
        own.update(_vmkv_start=group.rank * div_ceil(module.num_embeddings, group.size))
        module.__class__ = _derived(_PartialEmbedding, kind)
    elif style == sharding.EXPERTS:
        module.__class__ = _derived(_PartialExperts, kind)


@functools.cache
def _derived(partial: type, of: type) -> type:
    return type(f"Partial{of.__name__}", (partial, of), {})


def check_config(config: Any, size: int) -> None:
    """Check within seconds that a model can be divided; raises `ConfigError` otherwise."""
    plan = sharding.plan_of(probe.build_without_weights(config, torch.bfloat16))
    sharding.check_heads(config, plan, size)


def load(path: str, group: TensorParallel, *, dtype: str | None = None, **source: Any) -> Any:
    """Load a causal language model in eval mode, reduced to this rank's part; all ranks call it.

    `path` is a folder or a Hub name; `dtype` is of the weights, by default as saved; `source` are
    options of `from_pretrained`. Raises `ConfigError` or `CapacityError` if it cannot be served.
    """
    model = compat.load_causal_lm(path, dtype, **compat.in_parts(group.size), **source)
    localise(model, group)
    return model


# ---- output head ---------------------------------------------------------------------------------

#: Largest vocabulary whose token ids float32 represents exactly.
_NUM_TOKENS_MAX = 1 << 24


class DividedHead:
    """A rank's part of the output head, which samples greedily without gathering its logits.

    Each rank finds its own likeliest token, and the ranks exchange one value and one token per row,
    by a sum to which every other rank contributes zeros. Implements `HeadInParts`.
    """

    def __init__(self, linear: GatheredLinear):
        self._linear = linear
        self.num_columns = linear.weight.shape[0]
        self._start = linear._vmkv_rank * self.num_columns
        # Excludes padding on the last ranks, whose logits are zero.
        self._num_known = min(max(linear.out_features - self._start, 0), self.num_columns)

    @contextlib.contextmanager
    def in_part(self, room: torch.Tensor) -> Iterator[None]:
        """Make the model return this rank's logits, in `room` if they fit."""
        self._linear._vmkv_room = room
        try:
            yield
        finally:
            self._linear._vmkv_room = None

    def likeliest(self, part: torch.Tensor) -> torch.Tensor:
        """Return all ranks' likeliest tokens. Cost: one read of the part, eight launches."""
        linear = self._linear
        best = ranked(part[:, : self._num_known], self._start, linear._vmkv_rank, linear._vmkv_size)
        return first_of_likeliest(all_reduce(best, linear._vmkv_group))

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """Gather the logits of all ranks."""
        return self._linear.whole(part)


def head_of(model: Any) -> DividedHead | None:
    """Return the divided head of a model; None if its head is whole."""
    head = model.get_output_embeddings()
    if not isinstance(head, GatheredLinear) or head.out_features > _NUM_TOKENS_MAX:
        return None
    return DividedHead(head)


def ranked(part: torch.Tensor, start: int, rank: int, size: int) -> torch.Tensor:
    """Return `[size, 2, n]` with this rank's best values and tokens in its own row, to be summed.

    `part` is `[n, columns]`, possibly without columns; its first column is token `start`. At least
    float32, which represents every value and token exactly.
    """
    dtype = torch.promote_types(part.dtype, torch.float32)
    places = part.new_zeros((size, 2, part.shape[0]), dtype=dtype)
    values, tokens = places[rank]
    if part.shape[1]:
        best = likeliest(part)[:, None]
        values.copy_(part.gather(1, best)[:, 0])
        torch.add(best[:, 0], start, out=tokens)
    else:
        values.fill_(-math.inf)  # An earlier rank wins a tie.
    return places


def first_of_likeliest(places: torch.Tensor) -> torch.Tensor:
    """Return `[n] int64`, the likeliest token of all ranks' `[size, 2, n]`; the first among equals.

    Ranks are ordered by their tokens, so argmax gives the same token as over whole logits, also for
    signed zeros, infinities and NaN.
    """
    values, tokens = places[:, 0], places[:, 1]
    return tokens.gather(0, values.argmax(0, keepdim=True))[0].long()
