"""Latent attention (MLA) over rows of latents, for modules that expand these themselves.

A module with latent attention computes one latent `c` and one rotated key part `r` for each token,
caches both, and expands them to keys `[Wk c | r]` and values `Wv c` of every head, where one matrix
holds `Wk` and `Wv` of all heads. Rows hold `[c | r]`, and most queries attend without expanding:

    q . [Wk c | r] = [Wk^T q | q'] . [c | r]           sum of w Wv c = Wv (sum of w c)

So there is one key head of `[c | r]`, and its values are the latents in it (`Call.is_latent`). Both
halves of the matrix are views of the module's weight. Prompts without a past attend to expanded
keys and values, which takes a third of the arithmetic.

A module is recognised by what its method `expand_kv` computes (`latent_of`), and within
`handing_latents` its packed passes hand latents to attention instead of expanded keys and values.

See DESIGN.md, Note [Latents in rows].
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch.nn.functional import linear

from .model_guard import numbered_layers
from .row_attention import V_DIM, running

_USERS = "_vmkv_latent_users"
_EXPAND = "expand_kv"
_LOCK = threading.RLock()


class Latent(NamedTuple):
    """Latent attention of one layer.

    `projection` names the module's linear layer that expands; its weight is `[heads * (k_dim +
    v_dim), rank]`, the part of the key that it makes before the value of each head. `rope_dim` is
    the width of the key part that all heads share.
    """

    projection: str
    k_dim: int
    v_dim: int
    rank: int
    rope_dim: int


class Expansion(NamedTuple):
    """The expansion of a layer, by its module's linear layer."""

    its: Latent
    linear: torch.nn.Linear

    def absorbed(self, query: torch.Tensor) -> torch.Tensor:
        """Return queries `[T, Hq, k_dim + rope_dim]` as `[T, Hq, rank + rope_dim]`."""
        (keys, _), split = self._halves(query), self.its.k_dim
        out = query.new_empty((*query.shape[:2], self.its.rank + self.its.rope_dim))
        own, shared = query[..., :split], query[..., split:]
        out[..., self.its.rank :] = shared
        torch.bmm(own.transpose(0, 1), keys, out=out[..., : self.its.rank].transpose(0, 1))
        return out

    def values(self, attended: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return sums of latents `[T, Hq, rank]` as sums of values `[T, Hq, v_dim]`."""
        if out is None:
            out = attended.new_empty((*attended.shape[:2], self.its.v_dim))
        values = self._halves(attended)[1].transpose(1, 2)
        torch.bmm(attended.transpose(0, 1), values, out=out.transpose(0, 1))
        return out

    def expanded(
        self, latent: torch.Tensor, shared: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of all heads `[T, Hq, …]`, of `[T, 1, rank]` and the rest."""
        its = self.its
        both = linear(latent[:, 0], self.linear.weight.to(latent.dtype))
        both = both.view(latent.shape[0], -1, its.k_dim + its.v_dim)
        key = both.new_empty((*both.shape[:2], its.k_dim + its.rope_dim))
        key[..., : its.k_dim] = both[..., : its.k_dim]
        key[..., its.k_dim :] = shared
        return key, both[..., its.k_dim :].contiguous()

    def _halves(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the weight, `[Hq, k_dim, rank]` and `[Hq, v_dim, rank]`; in autocast's type."""
        weight = self.linear.weight.to(like.dtype).view(like.shape[1], -1, self.its.rank)
        return weight[:, : self.its.k_dim], weight[:, self.its.k_dim :]


# ---- modules -------------------------------------------------------------------------------------


def latent_of(module: torch.nn.Module, key: torch.Tensor, value: torch.Tensor) -> Latent | None:
    """Return the latent attention of a module that attends to `[1, H, T, D]`; None if it has none.

    A few numbers are expanded by the module's method, and by each of its linear layers.
    """
    expand: Any = getattr(module, _EXPAND, None)
    heads, v_dim = key.shape[1], value.shape[3]
    children: list[tuple[str, Any]] = [] if expand is None else [*module.named_children()]
    for name, child in children:
        k_dim = getattr(child, "out_features", 0) // heads - v_dim
        its = Latent(name, k_dim, v_dim, getattr(child, "in_features", 0), key.shape[3] - k_dim)
        # Keys and values of a row then lie side by side without a gap.
        is_aligned = not its.rank * key.element_size() % 16
        if not (_is_plain(child) and is_aligned and min(k_dim, its.rope_dim) > 0):
            continue
        if child.weight.shape != (heads * (k_dim + v_dim), its.rank):
            continue
        numbers = torch.linspace(-1, 1, 2 * (its.rank + its.rope_dim), device=key.device)
        numbers = numbers.to(child.weight.dtype).view(1, 1, 2, -1)
        latent, shared = numbers.tensor_split((its.rank,), -1)
        made = Expansion(its, child).expanded(latent[0].transpose(0, 1), shared[0].transpose(0, 1))
        try:
            found = expand(latent, shared)
            if all(map(_are_close, made, (each[0].transpose(0, 1) for each in found))):
                return its
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
            continue  # Its method of that name is for something else.
    return None


def _is_plain(child: Any) -> bool:
    """Whether a module multiplies its input by its weight, and does no more."""
    kind: Any = type(child)
    return (
        issubclass(kind, torch.nn.Linear)
        and kind.forward is torch.nn.Linear.forward
        and "forward" not in vars(child)
        and child.bias is None
        and child.weight.dtype.is_floating_point
        and not child._forward_pre_hooks
        and not child._forward_hooks
    )


def _are_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    wide = torch.promote_types(one.dtype, torch.float32)
    # Unlike `torch.allclose`, this runs on tensors without values, for which it is true.
    return one.shape == other.shape and bool(
        torch.isclose(one.to(wide), other.to(wide), rtol=2e-2, atol=2e-2).all()
    )


def expansions(model: torch.nn.Module, latents: Mapping[int, Latent]) -> dict[int, Expansion]:
    """Return the expansion of each layer in `latents`, by the model's modules as they are now."""
    return {
        layer: Expansion(latents[layer], cast("Any", getattr(module, latents[layer].projection)))
        for layer, module in _modules(model, latents)
    }


def _modules(
    model: torch.nn.Module, latents: Mapping[int, Latent]
) -> Iterator[tuple[int, torch.nn.Module]]:
    for module, layer in numbered_layers(model):
        if layer in latents and hasattr(module, latents[layer].projection):
            yield layer, module


@contextlib.contextmanager
def handing_latents(model: torch.nn.Module, latents: Mapping[int, Latent]) -> Iterator[None]:
    """Context in which layers hand latents to attention in passes over rows of latents."""
    modules = list(_modules(model, latents)) if latents else []
    with _LOCK:
        for layer, module in modules:
            own = vars(module)
            own[_USERS] = own.get(_USERS, 0) + 1
            if own[_USERS] == 1:
                own[V_DIM] = latents[layer].v_dim
                # A class, so that one compilation serves all layers.
                kind: Any = type(module)
                module.__class__ = _handing(kind)
    try:
        yield
    finally:
        with _LOCK:
            for _, module in modules:
                own = vars(module)
                own[_USERS] -= 1
                if not own[_USERS]:
                    del own[_USERS], own[V_DIM]
                    module.__class__ = type(module).__bases__[0]


@functools.cache
def _handing(kind: Any) -> Any:
    """Return a subclass whose `expand_kv` returns latents in passes over rows of latents."""
    own = kind.expand_kv

    def expand_kv(self: Any, latent: Any, shared: Any) -> tuple[Any, Any]:
        return (latent, shared) if _keeps_latents() else own(self, latent, shared)

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), names | {_EXPAND: expand_kv})


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _keeps_latents() -> bool:
    """Whether this thread's pass is over rows of latents; compiled layers run in no other."""
    rows = running().rows
    return rows is not None and rows.keeps_latents
