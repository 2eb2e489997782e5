"""Experts of compiled layers by kernels of our own, where these are faster than `grouped_mm`.

`fuse` gives modules that qualify (`expert_forms.py`) a class whose traced code is one operator;
called otherwise, they run as before. The weights stay the module's own, in transformers' layout.
Each module is compared with its own code first. Tiles are chosen by timing, once for a shape and a
device, and kept on disk (`compile_cache.py`); a shape for which `grouped_mm` is faster runs as
before. See DESIGN.md, Note [Experts in two products].
"""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import logging
import os
import statistics
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from .. import compile_cache
from ..errors import one_line
from ..phases import part
from .expert_forms import Form, form_of, top_k_of
from .graph_passes import GROUP

_LOG = logging.getLogger(__name__)
#: Numbers of tokens that tiles are chosen for; other numbers take those of the next one.
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
#: Relative error at which results differ: above the types' rounding, below a defect.
_ROUNDING = 0.02
#: Clock cycles that the device sleeps while launches to be timed are queued.
_QUEUE_CYCLES = 2_000_000
_REPEATS = 6


#: Of `grouped_mm`'s time, at most, over all sizes: compiled, it takes up to a quarter less.
_GAIN = 0.8
#: Compute capability that the kernels need.
_FIRST = (8, 0)


class Shape(NamedTuple):
    """The properties of experts that the choice of tiles depends on."""

    device: int
    dtype: torch.dtype
    gate_up: tuple[int, ...]
    down: tuple[int, ...]
    has_bias: bool
    top_k: int
    form: Form


def fuse(model: torch.nn.Module) -> int:
    """Let the experts of `model` that qualify run by our kernels once compiled; return how many.

    Experts with adapters, and those that ranks share, run as before. The first call for a shape
    and device compiles and times kernels, for up to a minute.
    """
    decided: dict[tuple[Any, Shape], bool] = {}
    count = 0
    for module, form in _qualifying(model) if find_spec("triton") else ():
        kind: Any = type(module)
        shape = _shape_of(module, form)
        if shape is None:
            continue
        if (kind, shape) not in decided:
            with part("choosing tiles of experts"):
                decided[kind, shape] = _is_worthwhile(module, shape)
        if decided[kind, shape]:
            module.__class__ = fused_class(kind, shape.form, shape.top_k)
            count += 1
    return count


def restore(modules: Iterable[torch.nn.Module]) -> None:
    """Undo `fuse` of the modules among these. Idempotent."""
    for module in modules:
        if hasattr(module, _FORM):
            module.__class__ = type(module).__mro__[1]


def _qualifying(model: torch.nn.Module) -> list[tuple[Any, Form]]:
    """Return experts that could be fused, and are not."""
    if GROUP in vars(model):
        return []
    adapted = {id(getattr(each, "base_layer", None)) for each in model.modules()}
    found = [each for each in model.modules() if not hasattr(each, _FORM)]
    forms = [(each, form_of(each)) for each in found if id(each) not in adapted]
    return [(module, form) for module, form in forms if form is not None]


# ---- modules -------------------------------------------------------------------------------------

_FORM = "_vmkv_form"


@functools.cache
def fused_class(of: Any, form: Form, top_k: int) -> Any:
    """Return the class of a known class's modules when fused, the same for all of them."""
    text = repr((top_k, *form))

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> Any:
        if not torch.compiler.is_compiling():
            return of.forward(self, hidden_states, top_k_index, top_k_weights)
        biases = (self.gate_up_proj_bias, self.down_proj_bias) if self.has_bias else (None, None)
        out = torch.ops.vmkv.experts(
            hidden_states.to(self.gate_up_proj.dtype),
            *(top_k_index, top_k_weights),
            *(self.gate_up_proj, biases[0], self.down_proj, biases[1], text),
        )
        return out.to(hidden_states.dtype)

    return type(f"Fused{of.__name__}", (of,), {"forward": forward, _FORM: form})


def _shape_of(module: torch.nn.Module, form: Form) -> Shape | None:
    """Return the shape of a module that a GPU can run; else None."""
    its, top_k = module._parameters, top_k_of(module)
    weight = its["gate_up_proj"]
    assert weight is not None  # As of any module with a form.
    if (
        top_k is None
        or not weight.is_cuda
        or torch.cuda.get_device_capability(weight.device) < _FIRST
    ):
        return None
    return _shape(weight, its["down_proj"], len(its) > 2, top_k, form)


def _shape(gate_up: Any, down: Any, has_bias: bool, top_k: int, form: Form) -> Shape:
    device = gate_up.device.index
    return Shape(device, gate_up.dtype, (*gate_up.shape,), (*down.shape,), has_bias, top_k, form)


def _tensors_of(module: Any) -> Sequence[torch.Tensor | None]:
    """Return gate and up, their bias, down, and its bias."""
    its = module._parameters
    return [its.get(f"{each}_proj{bias}") for each in ("gate_up", "down") for bias in ("", "_bias")]


def _is_worthwhile(module: Any, shape: Shape) -> bool:
    """Whether our kernels are faster than a module's own code, and give the same."""
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

    from .expert_kernels import FAILURES

    directory = triton_cache_dir(shape.device)
    os.environ.setdefault("TRITON_CACHE_DIR", directory)  # As the compiler of layers sets it.
    try:
        return _choose(shape, module).is_faster and _is_same(module, shape)
    except FAILURES as error:  # No C compiler, no memory, …
        _LOG.warning("experts run as they are: %s", one_line(error))
        return False


def _is_same(module: Any, shape: Shape) -> bool:
    """Whether a module's own code gives what our kernels do, up to rounding.

    Runs every tile that was chosen: a kernel cannot be loaded while a step is captured.
    """
    tensors = _tensors_of(module)
    with torch.no_grad(), torch.autocast("cuda", enabled=False):
        for size in _SIZES:
            inputs = _inputs(shape, size)
            expected, found = module(*inputs).float(), _run(shape, inputs, tensors).float()
            if not (expected - found).norm() <= _ROUNDING * expected.norm():
                _LOG.warning("experts of %s differ from our kernels, and run as they are", shape)
                return False
    return True


def _inputs(shape: Shape, size: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Return tokens, and different experts of each with their weights."""
    generator = torch.Generator(f"cuda:{shape.device}").manual_seed(seed)
    like: Any = {"device": f"cuda:{shape.device}", "generator": generator}
    num_hidden = shape.gate_up[1 if shape.form.is_transposed else 2]
    scores, ids = torch.rand(size, shape.gate_up[0], **like).topk(shape.top_k)
    return torch.randn(size, num_hidden, **like).to(shape.dtype), ids, scores.to(shape.dtype)


# ---- operators -----------------------------------------------------------------------------------

_LIBRARY: Any = torch.library.Library("vmkv", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "experts(Tensor hidden, Tensor ids, Tensor weights, Tensor gate_up, Tensor? gate_up_bias, "
    "Tensor down, Tensor? down_bias, str chosen) -> Tensor"
)
_LIBRARY.define("top_k(Tensor x, int k) -> (Tensor, Tensor)")


def _experts(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down: torch.Tensor,
    down_bias: torch.Tensor | None,
    chosen: str,
) -> torch.Tensor:
    shape = _shape(gate_up, down, gate_up_bias is not None, *_parsed(chosen))
    inputs = hidden.contiguous(), ids.long().contiguous(), weights.contiguous()
    return _run(shape, inputs, (gate_up, gate_up_bias, down, down_bias))


def _run(
    shape: Shape, inputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor | None]
) -> torch.Tensor:
    from . import expert_kernels

    at = min(bisect_left(_SIZES, len(inputs[0])), len(_SIZES) - 1)
    return expert_kernels.run(inputs, tensors, shape.form, _CHOICES[shape].tiles[at])


@functools.cache
def _parsed(text: str) -> tuple[int, Form]:
    top_k, *form = ast.literal_eval(text)
    return top_k, Form(*form)


def _top_k(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    from . import expert_kernels

    return expert_kernels.top_k(x.contiguous(), k)


_LIBRARY.impl("experts", _experts, "CUDA")
_LIBRARY.impl("top_k", _top_k, "CUDA")
torch.library.register_fake(
    "vmkv::experts", lambda hidden, *_: hidden.new_empty(hidden.shape), lib=_LIBRARY
)
torch.library.register_fake(
    "vmkv::top_k",
    lambda x, k: (x.new_empty(x.shape[0], k), x.new_empty(x.shape[0], k, dtype=torch.int64)),
    lib=_LIBRARY,
)

# ---- tiles ---------------------------------------------------------------------------------------


class _Choice(NamedTuple):
    """The tiles of both products for each of `_SIZES`, and whether the shape is faster by them."""

    tiles: list[list[Any]]
    is_faster: bool


#: By shape, which names the device; each made once.
_CHOICES: dict[Shape, _Choice] = {}


def _choose(shape: Shape, module: Any) -> _Choice:
    """Choose tiles by timing, or read what an earlier start has chosen."""
    if shape not in _CHOICES:
        machine = torch.cuda.get_device_name(shape.device), torch.version.cuda
        name = compile_cache.name_of("experts", machine, *shape[1:])
        kept = compile_cache.read(name)
        if kept is None:
            with torch.no_grad(), torch.cuda.device(shape.device):
                kept = json.dumps(_timed(shape, module)).encode()
            compile_cache.write(name, kept)
        _CHOICES[shape] = _parsed_choice(kept)
    return _CHOICES[shape]


def _parsed_choice(kept: bytes) -> _Choice:
    from .expert_kernels import Tile

    tiles, is_faster = json.loads(kept)
    return _Choice([[Tile(*each) for each in its] for its in tiles], is_faster)


def _timed(shape: Shape, module: Any) -> _Choice:
    """Time tiles of both products for each size, and then all against `grouped_mm`."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    from . import expert_kernels as kernels

    tensors: Any = _tensors_of(module)
    tiles, ratios = [], []
    num_inner = shape.down[1 if shape.form.is_transposed else 2]
    for size in _SIZES:
        calls = [_inputs(shape, size, seed) for seed in range(_REPEATS)]
        mean = size * shape.top_k / shape.gate_up[0]
        inner = torch.randn(size * shape.top_k, num_inner, device="cuda").to(shape.dtype)
        placed = [kernels.sort_pairs(ids, shape.gate_up[0]) for _, ids, _ in calls]
        best = []
        for is_gated in (True, False):
            weight, bias = tensors[:2] if is_gated else tensors[2:]
            times = {}
            for tile in kernels.candidates(size, mean, is_gated=is_gated):
                product: Any = functools.partial(
                    kernels.product, form=shape.form, tile=tile, is_gated=is_gated
                )
                its = [
                    functools.partial(product, hidden if is_gated else inner, weight, bias, ids, at)
                    for (hidden, ids, _), at in zip(calls, placed, strict=True)
                ]
                with contextlib.suppress(kernels.DOES_NOT_FIT):
                    times[tile] = _microseconds(its)
            best.append(min(times, key=times.__getitem__))
        tiles.append(best)
        ours = [functools.partial(kernels.run, each, tensors, shape.form, best) for each in calls]
        theirs = [functools.partial(grouped_mm_experts_forward, module, *each) for each in calls]
        ratios.append(_microseconds(ours) / _microseconds(theirs))
    _LOG.info(
        "experts of %s take %s of grouped_mm's time", shape, [f"{each:.2f}" for each in ratios]
    )
    return _Choice(tiles, max(ratios) < 1 and statistics.geometric_mean(ratios) < _GAIN)


def _microseconds(calls: Sequence[Callable[[], object]]) -> float:
    """Return the time of a call on the device, the smaller of two means."""
    means: list[float] = []
    cuda: Any = torch.cuda
    for is_first in (True, False, False):
        start, end = (cuda.Event(enable_timing=True) for _ in range(2))
        if not is_first:
            cuda._sleep(_QUEUE_CYCLES)
        start.record()
        for call in calls:
            call()
        end.record()
        end.synchronize()
        means.append(1e3 * start.elapsed_time(end) / len(calls))
    return min(means[1:])
