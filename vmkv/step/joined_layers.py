"""Projections of one input as one matrix product: queries with keys and values, gate with up.

With few tokens a product is bound by reading its matrix, and three small matrices are read less
efficiently than a large one. So sibling weights are stored side by side, and each parameter becomes
a view of its part; calling one projection alone still works. Under a compiler each takes its part
of the joint product, and `merge_equal_products` removes the duplicates.

LoRA adapters of float32, which autocast would convert for each product, are copied in its type:

    | query | key | value | first matrices |      one product of the projections' input
    diagonal of second matrices                   one product of what the first ones give

Another `join` renews the copies when weights have changed. The first matrices of other adapters are
joined.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch.nn import functional

#: Names that transformers' models give to projections of one input, in the order of the parts.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
#: Attribute of a model whose weights are in host memory: the hook that refuses calls.
AWAY = "_vmkv_refusing"
_PRODUCTS = (functional.linear, torch._C._nn.linear)
_PARTS = {("call_method", "narrow"), ("call_method", "as_strided")}


class SiblingLinear(torch.nn.Linear):
    """A linear layer whose weight is part of a joint one, or copied there; only `join` makes it."""

    _vmkv_joint: torch.Tensor
    _vmkv_joint_bias: torch.Tensor | None
    _vmkv_start: int
    _vmkv_column: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Apply the projection."""
        if not torch.compiler.is_compiling():
            return super().forward(input)
        matrix = self._vmkv_joint
        if self.in_features < matrix.shape[1]:
            matrix = matrix.narrow(1, self._vmkv_column, self.in_features)
        joint = functional.linear(input, matrix, self._vmkv_joint_bias)
        if input.numel() > input.shape[-1]:
            return joint.narrow(-1, self._vmkv_start, self.out_features)
        # The compiler generates products of one row itself; `as_strided` makes it materialise the
        # joint one, instead of rounding each part in a separate kernel.
        shape = (*input.shape[:-1], self.out_features)
        return joint.as_strided(shape, joint.stride(), self._vmkv_start)


def join(model: torch.nn.Module, autocast: torch.dtype | None = None) -> None:
    """Join all siblings of `model` in place.

    Only plain linear layers over the same input are joined; quantised, hooked or tied ones stay.
    Adapters that autocast converts to their layer's type stay too, and are copied.
    Weights are copied group by group, and the freed memory returns to the device each time: the
    next group's would be cut from it, and leave a rest that nothing can use. After an error no
    weights are joined.
    """
    try:
        _join_all(model, autocast)
        _refresh(model)
    except BaseException:
        separate(model)
        raise


def _join_all(model: torch.nn.Module, autocast: torch.dtype | None) -> None:
    tied = _tied_parameters(model)
    for parent in tuple(model.modules()):
        for layers, adapters in _groups(parent):
            if _can_join(layers, tied):
                copied = [each for each in adapters if _can_copy(each, layers[0], autocast, tied)]
                if copied or len(layers) > 1:
                    _join(layers, copied)
                    if layers[0].weight.is_cuda:
                        torch.cuda.empty_cache()


def _refresh(model: torch.nn.Module) -> None:
    """Renew the copies of adapters, after their weights have changed."""
    for each in model.modules():
        if isinstance(each, SiblingLinear) and is_copied(each):
            rows = each._vmkv_joint.narrow(0, each._vmkv_start, each.out_features)
            rows.narrow(1, each._vmkv_column, each.in_features).copy_(each.weight.detach())


def separate(model: torch.nn.Module, modules: Iterable[torch.nn.Module] | None = None) -> None:
    """Undo `join` of all layers or of those among `modules`, unless `AWAY` is set. Idempotent.

    First all are plain layers again, with weights that stay side by side if memory runs out. Then
    each weight is copied; nothing else refers to a joint one, so that it is freed with its last
    part, and its memory returns to the device as in `join`.
    """
    if AWAY in vars(model):
        return
    parameters: list[torch.nn.Parameter] = []
    for layer in model.modules() if modules is None else modules:
        if type(layer) is SiblingLinear:
            if not is_copied(layer):
                parameters += layer.parameters(recurse=False)
            layer.__class__ = torch.nn.Linear  # type: ignore[assignment]  # what it was
            for name in [each for each in vars(layer) if each.startswith("_vmkv_")]:
                del vars(layer)[name]
    for parameter in parameters:
        parameter.data = parameter.data.clone()
        if parameter.is_cuda:
            torch.cuda.empty_cache()


def is_copied(layer: SiblingLinear) -> bool:
    """Whether the joint weight has a copy of the layer's, in another type."""
    return layer.weight.dtype != layer._vmkv_joint.dtype


def merge_equal_products(module: torch.fx.GraphModule) -> None:
    """Merge equal linear products in a traced graph, if only parts of them are taken.

    Equal casts are merged before: adapters cast the input of each projection.
    """
    seen: dict[object, torch.fx.Node] = {}
    for node in tuple(module.graph.nodes):
        if node.op == "call_method" and node.target == "to":
            can_merge = all(map(_is_product, node.users))
        else:
            takers = {(each.op, each.target) for each in node.users}
            can_merge = _is_product(node) and takers <= _PARTS
        if not can_merge:
            continue
        if _is_product(node) and len(node.args) > 1:
            _take_whole(node, seen)
        key = (node.op, node.args, tuple(sorted(node.kwargs.items())))
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            module.graph.erase_node(node)
    module.recompile()


def _take_whole(product: torch.fx.Node, seen: dict[object, torch.fx.Node]) -> None:
    """Let an adapter's product read the joint tensor that its siblings read, not a part of it."""
    source, matrix, *rest = cast("tuple[Any, ...]", product.args)
    if source.target == "to":
        its = [each.meta["example_value"].dtype for each in (source.args[0], source, matrix)]
        if its == [its[2], torch.float32, its[2]]:  # Autocast converts it back.
            source = source.args[0]
    is_part = (source.op, source.target) in _PARTS and matrix.target == "narrow"
    if is_part and "_vmkv_joint" in matrix.args[0].name:
        joint, start = source.args[0], source.args[2 if source.target == "narrow" else 3]
        matrix, _, column, _ = matrix.args
        place = (-1, start - column, matrix.meta["example_value"].shape[1])
        if (joint, place) not in seen:
            with product.graph.inserting_before(product):
                seen[joint, place] = product.graph.call_method("narrow", (joint, *place))
        source = seen[joint, place]
    product.args = (source, matrix, *rest)


def _is_product(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and node.target in _PRODUCTS


def _groups(parent: Any) -> Iterator[tuple[list[Any], list[tuple[Any, Any]]]]:
    """Yield lists of layers that could be joined, each with both matrices of their adapters.

    A list holds siblings or their base layers, the first matrices of their adapters, or `parent`'s
    base layer.
    """
    for names in SIBLINGS:
        layers = [getattr(parent, name, None) for name in names]
        yield [getattr(each, "base_layer", each) for each in layers], _adapters(layers)
        for name in getattr(layers[0], "lora_A", ()):
            yield [dict(getattr(each, "lora_A", {})).get(name) for each in layers], []
    yield [getattr(parent, "base_layer", None)], _adapters([parent])


def _adapters(layers: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return both matrices of peft's LoRA; variants (DoRA) multiply them with other inputs."""
    its = [each for each in layers if type(getattr(each, "lora_B", None)) is torch.nn.ModuleDict]
    plain = [each for each in its if not getattr(each, "lora_variant", None)]
    return [(each.lora_A[name], second) for each in plain for name, second in each.lora_B.items()]


def _can_copy(
    adapter: tuple[Any, Any], layer: Any, autocast: torch.dtype | None, tied: set[int]
) -> bool:
    first, second = adapter
    return (
        _can_join([first], tied)
        and _can_join([second], tied)
        and first.bias is second.bias is None
        and first.in_features == layer.in_features
        and first.weight.dtype == second.weight.dtype != layer.weight.dtype == autocast
        and first.weight.device == second.weight.device == layer.weight.device
    )


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


def _join(layers: Sequence[Any], adapters: Sequence[tuple[Any, Any]]) -> None:
    first, second = ([each[at] for each in adapters] for at in (0, 1))
    with torch.no_grad():
        weight = torch.cat([each.weight.to(layers[0].weight.dtype) for each in (*layers, *first)])
        bias = None
        if layers[0].bias is not None:
            none = weight.new_zeros(sum(each.out_features for each in first))
            bias = torch.cat([*(each.bias for each in layers), none])
        rows, columns = (sum(each.weight.shape[at] for each in second) for at in (0, 1))
        diagonal = weight.new_zeros(rows, columns)
    # Compile with static shapes, as for parameters.
    for joint in (weight, bias, diagonal):
        if joint is not None:
            torch._dynamo.mark_static(joint)
    for its, joint, its_bias in (((*layers, *first), weight, bias), (second, diagonal, None)):
        start = column = 0
        for each in its:
            if each in layers:
                each.weight.data = weight[start : start + each.out_features]
                if bias is not None:
                    each.bias.data = bias[start : start + each.out_features]
            each.__class__ = SiblingLinear
            vars(each).update(_vmkv_joint=joint, _vmkv_joint_bias=its_bias)
            vars(each).update(_vmkv_start=start, _vmkv_column=column)
            start += each.out_features
            column += each.in_features if joint is diagonal else 0


def _tied_parameters(model: torch.nn.Module) -> set[int]:
    holders = Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
    )
    return {each for each, count in holders.items() if count > 1}
