"""Projections of one input, as one matrix product: queries with keys and values, gate with up.

With few tokens a product takes as long as reading its matrix, and three small matrices are read
less well than one large one. So siblings' weights are laid side by side, each parameter becoming a
view of its part: nothing is copied twice, and whoever calls a projection alone gets what it always
gave. Under a compiler each asks for the joint product and takes its part, and
`merge_equal_products` leaves one product of the equal ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch.nn import functional

#: Names that transformers' models give to projections of one input, in the order of the parts.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_PRODUCTS = (functional.linear, torch._C._nn.linear)
_PARTS = ("narrow", "as_strided")


class SiblingLinear(torch.nn.Linear):
    """A linear layer whose weight is a part of a joint one. Only ever made by `join`."""

    _vmkv_joint: torch.Tensor
    _vmkv_joint_bias: torch.Tensor | None
    _vmkv_start: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The projection, as ever."""
        if not torch.compiler.is_compiling():
            return super().forward(input)
        joint = functional.linear(input, self._vmkv_joint, self._vmkv_joint_bias)
        if input.numel() > input.shape[-1]:
            return joint.narrow(-1, self._vmkv_start, self.out_features)
        # A product of one row is no library's call: unless the compiler must have all of it in
        # memory, it rounds each part in a kernel of its own.
        shape = (*input.shape[:-1], self.out_features)
        return joint.as_strided(shape, joint.stride(), self._vmkv_start)


def join(model: torch.nn.Module) -> int:
    """Join all siblings of `model` in place; returns how many groups there are.

    Only plain linear layers over the same input are joined: what is quantised, adapted, hooked
    or tied stays as it is.

    Cost: a copy of the weights, one group at a time. What they lay in goes back to the device at
        the end, with all else that torch keeps and does not use; so until then there are two.
    """
    tied = _tied_parameters(model)
    count = 0
    for parent in tuple(model.modules()):
        for names in SIBLINGS:
            group = [getattr(parent, name, None) for name in names]
            if _can_join(group, tied):
                _join(group)
                count += 1
    if count and any(parameter.is_cuda for parameter in model.parameters()):
        torch.cuda.empty_cache()  # The parts' own memory: of sizes that nothing asks for again.
    return count


def separate(model: torch.nn.Module) -> None:
    """Undo `join`: every layer gets a weight of its own again. Idempotent."""
    for module in model.modules():
        if type(module) is SiblingLinear:
            module.__class__ = torch.nn.Linear  # type: ignore[assignment]  # what it was
            for name in ("_vmkv_joint", "_vmkv_joint_bias", "_vmkv_start"):
                vars(module).pop(name, None)
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.clone()


def merge_equal_products(module: torch.fx.GraphModule) -> None:
    """Leave one of several linear products of the same tensors in a traced graph.

    Of those only that parts are taken of: others may be written to.
    """
    seen: dict[object, torch.fx.Node] = {}
    for node in tuple(module.graph.nodes):
        if node.op != "call_function" or node.target not in _PRODUCTS:
            continue
        if not all(user.op == "call_method" and user.target in _PARTS for user in node.users):
            continue
        key = (node.args, tuple(sorted(node.kwargs.items())))
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            module.graph.erase_node(node)
    module.recompile()


def _can_join(group: Sequence[object], tied: set[int]) -> bool:
    if not all(type(each) is torch.nn.Linear for each in group):
        return False
    layers = [each for each in group if isinstance(each, torch.nn.Linear)]
    first = layers[0]
    return all(
        each.in_features == first.in_features
        and (each.bias is None) == (first.bias is None)
        and (each.weight.dtype, each.weight.device) == (first.weight.dtype, first.weight.device)
        and type(each.weight) is torch.nn.Parameter
        and not any(id(parameter) in tied for parameter in each.parameters())
        and not each._forward_hooks
        and not each._forward_pre_hooks
        for each in layers
    )


def _join(group: Sequence[object]) -> None:
    layers = [each for each in group if isinstance(each, torch.nn.Linear)]
    with torch.no_grad():
        weights: list[torch.Tensor] = [each.weight for each in layers]
        biases: list[torch.Tensor] = [each.bias for each in layers if each.bias is not None]
        weight = torch.cat(weights)
        bias = torch.cat(biases) if biases else None
    # A compiler is to know their shapes, as it does those of parameters.
    for joint in (weight, bias):
        if joint is not None:
            torch._dynamo.mark_static(joint)
    start = 0
    for each in layers:
        end = start + each.out_features
        each.weight.data = weight[start:end]
        if bias is not None:
            each.bias.data = bias[start:end]
        each.__class__ = SiblingLinear
        vars(each).update(_vmkv_joint=weight, _vmkv_joint_bias=bias, _vmkv_start=start)
        start = end


def _tied_parameters(model: torch.nn.Module) -> set[int]:
    """Parameters that more than one module holds."""
    holders = Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
    )
    return {each for each, count in holders.items() if count > 1}
