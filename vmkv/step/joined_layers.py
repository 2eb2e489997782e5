"""Projections of one input as one matrix product: queries with keys and values, gate with up.

With few tokens a product is bound by reading its matrix, and three small matrices are read less
efficiently than a large one. So sibling weights are stored side by side, and each parameter becomes
a view of its part; calling one projection alone still works. Under a compiler each takes its part
of the joint product, and `merge_equal_products` removes the duplicates. Of projections with LoRA
adapters, the base layers are joined, and the adapters' first matrices.

Autocast converts adapters of float32 for each product: 350 kernels a step of Llama-3-8B's shape.
Compiled layers read copies of adapters in autocast's type instead, which `refresh` renews.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional

#: Names that transformers' models give to projections of one input, in the order of the parts.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_PRODUCTS = (functional.linear, torch._C._nn.linear)
_PARTS = ("narrow", "as_strided")


class SiblingLinear(torch.nn.Linear):
    """A linear layer whose weight is part of a joint one, or copied there; only `join` makes it."""

    _vmkv_joint: torch.Tensor
    _vmkv_joint_bias: torch.Tensor | None
    _vmkv_start: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Apply the projection."""
        if not torch.compiler.is_compiling():
            return super().forward(input)
        joint = functional.linear(input, self._vmkv_joint, self._vmkv_joint_bias)
        if input.numel() > input.shape[-1]:
            return joint.narrow(-1, self._vmkv_start, self.out_features)
        # The compiler generates products of one row itself; `as_strided` makes it materialise the
        # joint one, instead of rounding each part in a separate kernel.
        shape = (*input.shape[:-1], self.out_features)
        return joint.as_strided(shape, joint.stride(), self._vmkv_start)


def join(model: torch.nn.Module, autocast: torch.dtype | None = None) -> int:
    """Join all siblings of `model` in place; return the number of groups.

    Only plain linear layers over the same input are joined; quantised, hooked or tied ones stay.
    Adapters of another type than `autocast` stay where they are and are copied into the joint one.
    Weights are copied group by group, and the freed memory returns to the device each time: the
    next group's would be cut from it, and leave a rest that nothing can use.
    """
    tied = _tied_parameters(model)
    count = 0
    for parent in tuple(model.modules()):
        for group, dtype in _groups(parent, autocast):
            if _can_join(group, tied):
                _join(group, dtype)
                count += 1
                if dtype is None and group[0].weight.is_cuda:
                    torch.cuda.empty_cache()
    return count


def refresh(model: torch.nn.Module) -> None:
    """Renew the copies of adapters, after their weights have changed."""
    for each in model.modules():
        if isinstance(each, SiblingLinear) and each.weight.dtype != each._vmkv_joint.dtype:
            part = each._vmkv_joint.narrow(0, each._vmkv_start, each.out_features)
            part.copy_(each.weight.detach())


def separate(model: torch.nn.Module) -> None:
    """Undo `join`: copy every weight out of the joint one. Idempotent."""
    for module in model.modules():
        if type(module) is SiblingLinear:
            module.__class__ = torch.nn.Linear  # type: ignore[assignment]  # what it was
            del module._vmkv_joint, module._vmkv_joint_bias, module._vmkv_start
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.clone()


def merge_equal_products(module: torch.fx.GraphModule) -> None:
    """Merge equal linear products in a traced graph, if only parts of them are taken.

    Equal casts are merged before: adapters cast the input of each projection.
    """
    seen: dict[object, torch.fx.Node] = {}
    for node in tuple(module.graph.nodes):
        if node.op == "call_method" and node.target == "to":
            can_merge = all(map(_is_product, node.users))
        else:
            can_merge = _is_product(node) and all(map(_takes_part, node.users))
        if not can_merge:
            continue
        key = (node.op, node.args, tuple(sorted(node.kwargs.items())))
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            module.graph.erase_node(node)
    module.recompile()


def _is_product(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and node.target in _PRODUCTS


def _takes_part(node: torch.fx.Node) -> bool:
    return node.op == "call_method" and node.target in _PARTS


def _groups(
    parent: Any, autocast: torch.dtype | None
) -> Iterator[tuple[list[Any], torch.dtype | None]]:
    """Yield what can be joined, and the type of a copy; None to move the weights.

    These are siblings, or their base layers and adapters' first matrices; and for a copy, each
    matrix of an adapter that has not been joined.
    """
    for names in SIBLINGS:
        layers = [getattr(parent, name, None) for name in names]
        yield [getattr(each, "base_layer", each) for each in layers], None
        for name in getattr(layers[0], "lora_A", ()):
            first = [dict(getattr(each, "lora_A", {})).get(name) for each in layers]
            yield first, autocast if _is_converted(first[0], autocast) else None
    adapters = [*getattr(parent, "lora_A", {}).values(), *getattr(parent, "lora_B", {}).values()]
    yield from [([each], autocast) for each in adapters if _is_converted(each, autocast)]


def _is_converted(adapter: Any, autocast: torch.dtype | None) -> bool:
    is_plain = type(adapter) is torch.nn.Linear and adapter.bias is None
    return is_plain and autocast not in (None, adapter.weight.dtype)


def _can_join(layers: Sequence[Any], tied: set[int]) -> bool:
    if not all(type(each) is torch.nn.Linear for each in layers):
        return False
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


def _join(layers: Sequence[torch.nn.Linear], dtype: torch.dtype | None) -> None:
    with torch.no_grad():
        weight = torch.cat([each.weight.to(dtype or each.weight.dtype) for each in layers])
        biases: list[torch.Tensor] = [each.bias for each in layers if each.bias is not None]
        bias = torch.cat(biases) if biases else None
    # Compile with static shapes, as for parameters.
    for joint in (weight, bias):
        if joint is not None:
            torch._dynamo.mark_static(joint)
    start = 0
    for each in layers:
        end = start + each.out_features
        if dtype is None:
            each.weight.data = weight[start:end]
            if bias is not None:
                each.bias.data = bias[start:end]
        each.__class__ = SiblingLinear
        vars(each).update(_vmkv_joint=weight, _vmkv_joint_bias=bias, _vmkv_start=start)
        start = end


def _tied_parameters(model: torch.nn.Module) -> set[int]:
    """Return the ids of parameters that more than one module holds."""
    holders = Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
    )
    return {each for each, count in holders.items() if count > 1}
