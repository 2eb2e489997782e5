"""Graph pass: move rotary embeddings of compiled layers into the append kernel.

Most models rotate queries and keys by the same lines, just before attention:

    x * cos.unsqueeze(1) + cat((-x[..., half:], x[..., :half]), -1) * sin.unsqueeze(1)

Where a traced layer passes exactly this to `attend_rows`, the operator gets the unrotated tensors
and the angles, and `RowAttention` rotates, in one launch where it can. Any other form is unchanged.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch

_ATTEND = "attend_rows"


class _Turned(NamedTuple):
    """A matched embedding: `x`, rotated by the angles; nodes of a graph."""

    x: torch.fx.Node
    cos: torch.fx.Node
    sin: torch.fx.Node


def take_out(module: torch.fx.GraphModule) -> int:
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
    if not _calls(node, operator.add) or node.kwargs:
        return None
    straight, crossed = node.args
    if not (_calls(straight, operator.mul) and _calls(crossed, operator.mul)):
        return None
    (x, cos), (swapped, sin) = straight.args, crossed.args
    cos, sin = _unsqueezed(cos), _unsqueezed(sin)
    if cos is None or sin is None or not _calls(swapped, torch.cat):
        return None
    halves, *dim = swapped.args
    if [*dim, *swapped.kwargs.values()] != [-1] or not isinstance(x, torch.fx.Node):
        return None
    if not isinstance(halves, list | tuple) or len(halves) != 2:
        return None
    negated, low = halves
    if not _calls(negated, operator.neg):
        return None
    shape = getattr(x.meta.get("example_value"), "shape", ())
    if not shape or not isinstance(shape[-1], int) or shape[-1] % 2:
        return None
    half = shape[-1] // 2
    if _part(negated.args[0], x) != slice(half, None) or _part(low, x) != slice(None, half):
        return None
    return _Turned(x, cos, sin)


def _calls(node: Any, function: Any) -> bool:
    return (
        isinstance(node, torch.fx.Node)
        and node.op == "call_function"
        and node.target is function
        and bool(node.args)
    )


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
    if not _calls(node, operator.getitem) or node.args[0] is not x:
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
