"""Graph passes over traced layers: rotary embeddings, and ranks' sums with norms.

Rotary embeddings move into the append kernel. Most models rotate queries and keys by the same
lines, just before attention:

    x * cos.unsqueeze(1) + cat((-x[..., half:], x[..., :half]), -1) * sin.unsqueeze(1)

Where a traced layer passes exactly this to `attend_rows`, the operator gets the unrotated tensors
and the angles, and `RowAttention` rotates, in one launch where it can.

Ranks that share a model add their parts twice a layer, usually followed by a residual and a norm:

    hidden = residual + sum
    wide = hidden.to(torch.float32)
    weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(dtype)

Where a traced layer has exactly this after `all_reduce_`, `norm_of_sum_` replaces it, which reads
and writes each tensor once. `vmkv.serve.parallel` defines both operators. Any other form of either
is unchanged.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

GROUP = "_vmkv_group"
"""Attribute of a model and its modules: the name of the group of ranks that share it."""

_ATTEND = "attend_rows"
_SUM = "vmkv.all_reduce_"
_Order = dict[torch.fx.Node, int]

# ---- rotary embeddings ---------------------------------------------------------------------------


class _Turned(NamedTuple):
    """A matched embedding: `x`, rotated by the angles; nodes of a graph."""

    x: torch.fx.Node
    cos: torch.fx.Node
    sin: torch.fx.Node


def take_out_rotary(module: torch.fx.GraphModule) -> int:
    """Pass unrotated tensors and angles to `attend_rows` in a traced layer; return the count."""
    count = 0
    for node in tuple(module.graph.nodes):
        if node.op != "call_function" or _ATTEND not in str(node.target) or node.kwargs:
            continue
        query, key = _turned(node.args[0]), _turned(node.args[1])
        if query is None or key is None or query[1:] != key[1:]:
            continue
        unused = list(node.args[:2])
        node.args = (query.x, key.x, *node.args[2:])
        node.kwargs = {"cos": query.cos, "sin": query.sin}
        _erase(unused, {query.x, query.cos, query.sin, key.x})
        count += 1
    if count:
        module.graph.lint()
        module.recompile()
    return count


def _erase(unused: list[torch.fx.Node], kept: set[torch.fx.Node]) -> None:
    """Erase unused nodes and their otherwise unused inputs, down to `kept`.

    A general dead-code pass would also erase some operators that mutate their arguments and return
    nothing.
    """
    while unused:
        node = unused.pop()
        if node in kept or node.users or node.op not in ("call_function", "call_method"):
            continue
        sources = node.all_input_nodes
        node.graph.erase_node(node)
        unused += sources


def _turned(node: Any) -> _Turned | None:
    """Match the rotary-embedding pattern at an fx node; None if it is something else."""
    if not _is_call(node, operator.add):
        return None
    straight, crossed = node.args
    if not (_is_call(straight, operator.mul) and _is_call(crossed, operator.mul)):
        return None
    (x, cos), (swapped, sin) = straight.args, crossed.args
    cos, sin = _unsqueezed(cos), _unsqueezed(sin)
    if cos is None or sin is None or getattr(swapped, "target", None) is not torch.cat:
        return None
    halves, *dim = swapped.args or (None,)
    if [*dim, *swapped.kwargs.values()] != [-1] or not isinstance(x, torch.fx.Node):
        return None
    if not isinstance(halves, list | tuple) or len(halves) != 2:
        return None
    negated, low = halves
    if not _is_call(negated, operator.neg):
        return None
    shape = getattr(x.meta.get("example_value"), "shape", ())
    if not shape or not isinstance(shape[-1], int) or shape[-1] % 2:
        return None
    half = shape[-1] // 2
    if _part(negated.args[0], x) != slice(half, None) or _part(low, x) != slice(None, half):
        return None
    return _Turned(x, cos, sin)


def _unsqueezed(node: Any) -> torch.fx.Node | None:
    """Return the angles `[1, T, D]` that a node unsqueezes for heads; None for other nodes."""
    if not isinstance(node, torch.fx.Node) or node.op != "call_method":
        return None
    if node.target != "unsqueeze" or [*node.args[1:], *node.kwargs.values()] != [1]:
        return None
    source = node.args[0]
    if not isinstance(source, torch.fx.Node):
        return None
    return source if getattr(source.meta.get("example_value"), "ndim", 0) == 3 else None


def _part(node: Any, x: torch.fx.Node) -> slice | None:
    """Return the slice of each head of `x` that a node takes; None for other nodes."""
    if not _is_call(node, operator.getitem) or node.args[0] is not x:
        return None
    index = node.args[1]
    if not isinstance(index, tuple) or len(index) != 2 or index[0] is not Ellipsis:
        return None
    return index[1] if isinstance(index[1], slice) else None


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate `x [T, H, D]` by `cos` and `sin [T, D]`, with the operations that models use."""
    half = x.shape[-1] // 2
    crossed = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos[:, None] + crossed * sin[:, None]


# ---- sums with norms -----------------------------------------------------------------------------


class _Norm(NamedTuple):
    """A norm in a graph: its input, its weight and epsilon, and its nodes, the last first."""

    hidden: torch.fx.Node
    weight: torch.fx.Node
    epsilon: Any
    chain: tuple[torch.fx.Node, ...]


def take_in_sums(module: torch.fx.GraphModule) -> int:
    """Replace norms of sums in a traced layer by the fused operator; return the number replaced."""
    count = 0
    for node in tuple(module.graph.nodes):
        norm = _norm_at(node)
        if norm is not None and _take_in(module.graph, norm):
            count += 1
    if count:
        module.graph.lint()
        module.recompile()
    return count


def _take_in(graph: torch.fx.Graph, norm: _Norm) -> bool:
    hidden, out = norm.hidden, norm.chain[0]
    for part, residual in _both_ways(hidden, operator.add):
        added = _sum_of(part, hidden)
        if added is not None and _are_alike(part, residual, norm):
            break
    else:
        return False
    order = {node: place for place, node in enumerate(graph.nodes)}
    if not _is_last(part, added, hidden, order):
        return False
    # The operator takes the place of `out`. Other users of the new residual must come after it; so
    # must users of the old one, which it reads there and which they may write to.
    for each, start in ((hidden, 0), (residual, order[hidden] + 1)):
        if any(start <= order[user] < order[out] for user in _users(each, order) - {*norm.chain}):
            return False
    arguments = (part, residual, norm.weight, norm.epsilon, added.args[1])
    with graph.inserting_before(out):
        merged = graph.call_function(torch.ops.vmkv.norm_of_sum_, arguments)
    out.replace_all_uses_with(merged)
    for each in norm.chain:
        graph.erase_node(each)
    hidden.replace_all_uses_with(part)
    graph.erase_node(hidden)
    graph.erase_node(added)
    return True


def _sum_of(part: Any, hidden: torch.fx.Node) -> torch.fx.Node | None:
    """Return the all-reduce of `part` if `hidden` is the only other user; else None."""
    if not isinstance(part, torch.fx.Node):
        return None
    others = [each for each in part.users if each is not hidden]
    if len(others) != 1 or str(others[0].target).removesuffix(".default") != _SUM:
        return None
    return None if others[0].users else others[0]


def _is_last(
    part: torch.fx.Node, added: torch.fx.Node, hidden: torch.fx.Node, order: _Order
) -> bool:
    """Whether no node but `hidden`, and no caller, reads the sum's memory after the sum."""
    is_made_here = all(each.op.startswith("call_") for each in _aliases(part, order))
    others = _users(part, order) - {hidden}
    return is_made_here and all(order[user] <= order[added] < order[hidden] for user in others)


def _users(node: torch.fx.Node, order: _Order) -> set[torch.fx.Node]:
    """Return the users of all nodes that share this node's memory."""
    return {user for alias in _aliases(node, order) for user in alias.users}


def _aliases(node: torch.fx.Node, order: _Order) -> list[torch.fx.Node]:
    """Return the nodes of a graph that share this node's memory, itself included."""
    storage = _storage(node)
    return [each for each in order if _storage(each) == storage]


def _storage(node: torch.fx.Node) -> int | None:
    value = _value(node)
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _are_alike(part: torch.fx.Node, residual: Any, norm: _Norm) -> bool:
    """Whether part and residual have one shape and separate memory, and the weight fits them."""
    values = part_value, residual_value, weight = [
        _value(each) for each in (part, residual, norm.weight)
    ]
    return (
        all(isinstance(each, torch.Tensor) for each in values)
        and _storage(part) != _storage(residual)
        and part_value.shape == residual_value.shape
        and part_value.shape[-1:] == weight.shape
        and len({each.dtype for each in values}) == 1
        and not isinstance(_value(norm.epsilon), torch.Tensor)
    )


def _norm_at(out: torch.fx.Node) -> _Norm | None:
    """Match the usual form of a norm whose last node is `out`; None if it is something else."""
    for weight, narrow in _both_ways(out, operator.mul):
        scaled = _converted(narrow)
        for wide, root in _both_ways(scaled, operator.mul):
            hidden = _converted(wide, torch.float32)
            epsilon, nodes = _under_root(root, wide)
            if hidden is None or not nodes or not isinstance(weight, torch.fx.Node):
                continue
            chain = (out, narrow, scaled, *nodes, wide)
            inner = chain[1:]
            is_its_own = all(user in chain for each in inner for user in each.users)
            is_as_narrow = narrow.args[1] == _dtype(hidden)
            if is_its_own and is_as_narrow and _is_call(hidden, operator.add):
                return _Norm(hidden, weight, epsilon, chain)
    return None


def _under_root(root: Any, wide: Any) -> tuple[Any, tuple[torch.fx.Node, ...]]:
    """Match `rsqrt(mean(wide ** 2) + epsilon)`; return epsilon and the nodes, none if no match."""
    added: Any = root.args[0] if _is_call(root, torch.rsqrt) else None
    if not _is_call(added, operator.add):
        return None, ()
    mean: Any = added.args[0]
    if not _is_method(mean, "mean", (-1,), {"keepdim": True}):
        return None, ()
    squares: Any = mean.args[0]
    if not _is_method(squares, "pow", (2,)) or squares.args[0] is not wide:
        return None, ()
    return added.args[1], (root, added, mean, squares)


def _converted(node: Any, dtype: torch.dtype | None = None) -> Any:
    """Return the source of a `to` node, optionally to `dtype`; None for other nodes."""
    if not isinstance(node, torch.fx.Node) or node.op != "call_method" or node.target != "to":
        return None
    source, *to = node.args
    if node.kwargs or len(to) != 1 or not isinstance(to[0], torch.dtype):
        return None
    return source if dtype in (None, to[0]) else None


def _both_ways(node: Any, function: Callable[..., Any]) -> tuple[tuple[Any, Any], ...]:
    """Return a call's two arguments in both orders; empty for other nodes."""
    if not _is_call(node, function) or len(node.args) != 2:
        return ()
    first, second = node.args
    return (first, second), (second, first)


def _is_call(node: Any, function: Callable[..., Any]) -> bool:
    is_one = isinstance(node, torch.fx.Node) and node.op == "call_function"
    return is_one and node.target is function and not node.kwargs


def _is_method(
    node: Any, name: str, rest: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> bool:
    is_one = isinstance(node, torch.fx.Node) and node.op == "call_method" and node.target == name
    return is_one and node.args[1:] == rest and dict(node.kwargs) == (kwargs or {})


def _dtype(node: torch.fx.Node) -> torch.dtype | None:
    return getattr(_value(node), "dtype", None)


def _value(node: Any) -> Any:
    """Return a node's example value from tracing; anything but a node unchanged."""
    return node.meta.get("example_value") if isinstance(node, torch.fx.Node) else node
