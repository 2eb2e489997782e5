"""Graph passes over traced layers: rotary embeddings, ranks' sums with norms, choices, reshapes.

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

Gated DeltaNet reshapes values to heads of another size, and these to one dimension. Compiled, both
together read values one by one and divide by the number of tokens for each; one reshape does not.
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
_EXPERTS = "vmkv.experts"
_Order = dict[torch.fx.Node, int]

# ---- forms ---------------------------------------------------------------------------------------


class _Form(NamedTuple):
    """A call in a graph: its target, arguments in order or `commutes`, and perhaps a `name`.

    An argument is a form, a value, or a name, which stands for the same argument everywhere.
    """

    target: Any
    arguments: tuple[Any, ...]
    name: str = ""
    commutes: bool = False


def _match(node: Any, form: Any, found: dict[str, Any]) -> dict[str, Any] | None:
    """Match `form` at a node; return `found` with the arguments of its names, or None."""
    if isinstance(form, str):
        return found | {form: node} if found.get(form, node) is node else None
    if isinstance(form, _Form):
        if not isinstance(node, torch.fx.Node) or node.target != form.target:
            return None
        given = [*node.args, *node.kwargs.values()]
        found = found | {form.name: node} if form.name else found
        for order in (given, given[::-1]) if form.commutes else (given,):
            matched = _match(order, list(form.arguments), found)
            if matched is not None:
                return matched
        return None
    if isinstance(form, list | tuple):
        if not isinstance(node, list | tuple) or len(node) != len(form):
            return None
        matched = found
        for each, wanted in zip(node, form, strict=True):
            matched = None if matched is None else _match(each, wanted, matched)
        return matched
    return found if node == form else None


def _rewrite(module: torch.fx.GraphModule, rewrite: Callable[[torch.fx.Node], bool]) -> int:
    """Apply `rewrite` to each node of a traced layer; return how often it changed the graph."""
    count = sum([rewrite(node) for node in tuple(module.graph.nodes)])
    if count:
        module.graph.lint()
        module.recompile()
    return count


# ---- rotary embeddings ---------------------------------------------------------------------------


def _part(name: str) -> _Form:
    """Return the form of a slice of each head of `x`."""
    return _Form(operator.getitem, ("x", (..., name)))


_CROSSED = _Form(torch.cat, ((_Form(operator.neg, (_part("high"),)), _part("low")), -1))
_TURNED = _Form(
    operator.add,
    (
        _Form(operator.mul, ("x", _Form("unsqueeze", ("cos", 1)))),
        _Form(operator.mul, (_CROSSED, _Form("unsqueeze", ("sin", 1)))),
    ),
)


def take_out_rotary(module: torch.fx.GraphModule) -> int:
    """Pass unrotated tensors and angles to `attend_rows` in a traced layer; return the count."""
    return _rewrite(module, _take_out)


def _take_out(node: torch.fx.Node) -> bool:
    if node.op != "call_function" or _ATTEND not in str(node.target) or node.kwargs:
        return False
    query, key = _turned(node.args[0]), _turned(node.args[1])
    if query is None or key is None or query[1:] != key[1:]:
        return False
    unused: list[Any] = list(node.args[:2])
    x, cos, sin = query
    node.args = (x, key[0], *node.args[2:])
    node.kwargs = {"cos": cos, "sin": sin}
    _erase(unused, {*query, key[0]})
    return True


def _erase(unused: list[torch.fx.Node], kept: set[torch.fx.Node]) -> None:
    """Erase unused nodes and inputs; a general pass would erase mutations, too."""
    while unused:
        node = unused.pop()
        if node in kept or node.users or node.op not in ("call_function", "call_method"):
            continue
        sources = node.all_input_nodes
        node.graph.erase_node(node)
        unused += sources


def _turned(node: Any) -> tuple[torch.fx.Node, torch.fx.Node, torch.fx.Node] | None:
    """Match rotary embedding at an fx node; return its input, cosines and sines, or None."""
    found = _match(node, _TURNED, {})
    if found is None:
        return None
    shape = getattr(_value(found["x"]), "shape", ())
    if not shape or not isinstance(shape[-1], int) or shape[-1] % 2:
        return None
    half = shape[-1] // 2
    if (found["low"], found["high"]) != (slice(None, half), slice(half, None)):
        return None
    angles = found["cos"], found["sin"]
    has_angles = all(getattr(_value(each), "ndim", 0) == 3 for each in angles)
    return (found["x"], *angles) if has_angles else None


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate `x [T, H, D]` by `cos` and `sin [T, D]`, with the operations that models use."""
    half = x.shape[-1] // 2
    crossed = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos[:, None] + crossed * sin[:, None]


# ---- reshapes ------------------------------------------------------------------------------------


def skip_reshapes(module: torch.fx.GraphModule) -> int:
    """Merge consecutive reshapes in a traced layer; return the number merged."""
    return _rewrite(module, _skip)


def _skip(node: torch.fx.Node) -> bool:
    before: Any = node.args[0] if node.target == "reshape" else node
    if before.target != "reshape" or {each.target for each in before.users} - {"reshape", "size"}:
        return False  # Others may write to it.
    node.args = (before.args[0], *node.args[1:])
    return True


# ---- choice of experts ---------------------------------------------------------------------------

_TOP_K_NAMES = ("input", "k", "dim", "largest", "sorted")
_MOST_CHOSEN = 16
_MOST_EXPERTS = 1024


def choose_by_kernel(module: torch.fx.GraphModule) -> int:
    """Let routers of traced mixtures choose experts by one kernel; return the number of choices."""
    has_fused = any(str(each.target).startswith(_EXPERTS) for each in module.graph.nodes)
    return _rewrite(module, _choose) if has_fused else 0


def _choose(node: torch.fx.Node) -> bool:
    if node.target not in (torch.topk, "topk"):
        return False
    arguments: Any = node.args
    options: Any = dict(zip(_TOP_K_NAMES, arguments, strict=False)) | node.kwargs
    x, k = options["input"], options["k"]
    shape: Any = getattr(_value(x), "shape", ())
    if {*options} - {*_TOP_K_NAMES} or not options.get("largest", True):
        return False
    if options.get("dim", -1) not in (-1, 1):
        return False
    if len(shape) != 2 or type(shape[1]) is not int or shape[1] > _MOST_EXPERTS:
        return False
    if type(k) is not int or k > min(_MOST_CHOSEN, shape[1]):
        return False
    if any(each.target is not operator.getitem for each in node.users):
        return False
    with node.graph.inserting_before(node):
        chosen = node.graph.call_function(torch.ops.vmkv.top_k.default, (x, k))
    chosen.meta = {**node.meta, "example_value": tuple(node.meta["example_value"])}
    node.replace_all_uses_with(chosen)
    node.graph.erase_node(node)
    return True


# ---- sums with norms -----------------------------------------------------------------------------


_SQUARES = _Form("pow", ("wide", 2), "squares")
_MEAN = _Form("mean", (_SQUARES, -1, True), "mean")
_ROOT = _Form(torch.rsqrt, (_Form(operator.add, (_MEAN, "epsilon"), "added"),), "root")
_HIDDEN = _Form(operator.add, ("one", "other"), "hidden")
_WIDE = _Form("to", (_HIDDEN, torch.float32), "wide")
_SCALED = _Form(operator.mul, (_WIDE, _ROOT), "scaled", commutes=True)
_NORM = _Form(
    operator.mul, ("weight", _Form("to", (_SCALED, "dtype"), "narrow")), "out", commutes=True
)


_CHAIN = ("out", "narrow", "scaled", "root", "added", "mean", "squares", "wide")
"""Names of a norm's nodes, the last first."""


def take_in_sums(module: torch.fx.GraphModule) -> int:
    """Replace norms of sums in a traced layer by the fused operator; return the number replaced."""
    return _rewrite(module, _take_in)


def _take_in(out: torch.fx.Node) -> bool:
    norm, graph = _norm_at(out), out.graph
    if norm is None:
        return False
    hidden, chain = norm["hidden"], [norm[name] for name in _CHAIN]
    terms: Any = hidden.args
    for part, residual in (terms, terms[::-1]):
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
        if any(start <= order[user] < order[out] for user in _users(each, order) - {*chain}):
            return False
    arguments = (part, residual, norm["weight"], norm["epsilon"], added.args[1])
    with graph.inserting_before(out):
        merged = graph.call_function(torch.ops.vmkv.norm_of_sum_, arguments)
    out.replace_all_uses_with(merged)
    for each in chain:
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
    return {user for alias in _aliases(node, order) for user in alias.users}


def _aliases(node: torch.fx.Node, order: _Order) -> list[torch.fx.Node]:
    """Return the nodes of a graph that share this node's memory, itself included."""
    storage = _storage(node)
    return [each for each in order if _storage(each) == storage]


def _storage(node: torch.fx.Node) -> int | None:
    value = _value(node)
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _are_alike(part: torch.fx.Node, residual: Any, norm: dict[str, Any]) -> bool:
    """Whether part and residual have one shape and separate memory, and the weight fits them."""
    values = part_value, residual_value, weight = [
        _value(each) for each in (part, residual, norm["weight"])
    ]
    return (
        all(isinstance(each, torch.Tensor) for each in values)
        and _storage(part) != _storage(residual)
        and part_value.shape == residual_value.shape
        and part_value.shape[-1:] == weight.shape
        and len({each.dtype for each in values}) == 1
        and not isinstance(_value(norm["epsilon"]), torch.Tensor)
    )


def _norm_at(out: torch.fx.Node) -> dict[str, Any] | None:
    """Match the usual form of a norm whose last node is `out`, by name; None if it is none."""
    found = _match(out, _NORM, {})
    if found is None:
        return None
    chain, hidden = [found[name] for name in _CHAIN], found["hidden"]
    is_its_own = all(user in chain for each in chain[1:] for user in each.users)
    if not is_its_own or found["dtype"] != getattr(_value(hidden), "dtype", None):
        return None
    return found


def _value(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, torch.fx.Node) else node
