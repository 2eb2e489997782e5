"""Warm-up: compile, tune and capture all steps in advance."""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch._dynamo

from .. import compile_cache
from ..errors import CapacityError, ConfigError
from ..phases import phase
from ..units import GiB
from .graphs import DecodeGraphs, GraphSpace
from .mixed_graphs import MixedGraphs
from .piece import Piece
from .stepper import Stepper

_LOG = logging.getLogger(__name__)
#: Tolerance of logits, relative and absolute: above any dtype's rounding, below a defect.
_ROUNDING = 0.02
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


@torch.no_grad()
def warm_up(
    stepper: Stepper,
    max_num_batched_tokens: int,
    *,
    must_compile: bool = False,
    then: Callable[[], object] = lambda: None,
    show_progress: bool = False,
    agree: Callable[[int], int] = int,
) -> int:
    """Compile, tune and capture everything, so that no step waits for it.

    A kind of step that cannot be captured runs without graphs; with `must_compile`, layers that
    cannot be compiled raise. `then` runs after the steps and before the graphs. The stepper's one
    cache needs a free row; `CapacityError` if not even a short prompt fits. Returns the bytes of
    device memory that graphs hold.
    """
    from tqdm import tqdm  # type: ignore[import-untyped]  # comes with transformers

    kinds = [each for each in (stepper.mixed_graphs, stepper.decode_graphs) if each is not None]
    total = 2 + sum(len(each.keys()) for each in kinds)
    with tqdm(total=total, disable=None if show_progress else True, leave=False) as bar:
        what = "compiling layers" if stepper.uses_operator else "running first steps"
        # With floats as variables, the compiler traces layers a second time once it gives that up.
        floats = torch._dynamo.config.patch(specialize_float=True)
        with phase(what), floats:
            bar.set_description("prompts")
            _warm_up_prompts(stepper, max_num_batched_tokens, must_compile)
            bar.update()
        with phase(f"{what} for one token"), floats:
            bar.set_description("one token")
            slot, row = stepper.open_scratch()
            one_token = Piece(slot, row, 0, 1, [0])
            stepper.run_eagerly([one_token])
            for space in {each.space for each in kinds}:
                _prove_head(stepper, space, one_token, agree)
        with phase("preparing sampling"):
            then()
            bar.update()
        bar.set_description("graphs")
        with phase(f"capturing up to {total - 2} CUDA graphs"):
            return _capture_all(stepper, kinds, bar.update, agree)


def _prove_head(
    stepper: Stepper, space: GraphSpace, piece: Piece, agree: Callable[[int], int]
) -> None:
    """Gather logits in every step if the model transforms logits other than element-wise."""
    head = space.head
    if head is None:
        return
    with head.in_part(space.logits):
        part = stepper.run_eagerly([piece])
    found, expected = head.whole(part), stepper.run_eagerly([piece])
    # Equal but for rounding: the library may round a product of other columns differently.
    is_same = found.shape == expected.shape and torch.allclose(
        found.float(), expected.float(), rtol=_ROUNDING, atol=_ROUNDING, equal_nan=True
    )
    if agree(int(not is_same)):
        _LOG.info("this model's logits depend on each other: ranks put them together")
        space.keep_whole()


def _capture_all(
    stepper: Stepper,
    kinds: Sequence[DecodeGraphs | MixedGraphs],
    captured: Callable[[], object],
    agree: Callable[[int], int],
) -> int:
    """Capture every graph, kind by kind; drop the kinds that fail. Returns their bytes."""
    free_bytes, name = _free_bytes(stepper.device), _sizes_name(stepper)
    if stepper.mixed_graphs is not None:
        stepper.mixed_graphs.slow_sizes = known = _kept_sizes(name, agree)
    for graphs in kinds:
        failure: Exception | None = None
        try:
            graphs.capture_all(captured)
        except (RuntimeError, ConfigError) as error:
            if graphs.captured:
                raise
            failure = error
        if agree(int(failure is not None)):
            reason = failure or "another rank cannot"
            _LOG.warning("%s cannot be captured as CUDA graphs: %s", graphs.name, reason)
            graphs.close()
            if graphs is stepper.mixed_graphs:
                stepper.mixed_graphs = None
            else:
                stepper.decode_graphs = None
    mixed = stepper.mixed_graphs
    if mixed is not None and mixed.slow_sizes is not None and known is None:
        compile_cache.write(name, json.dumps(sorted(mixed.slow_sizes)).encode())
    if stepper.device.type == "cuda":
        torch.cuda.synchronize(stepper.device)
    graph_bytes = max(0, free_bytes - _free_bytes(stepper.device))
    _LOG.info(
        "captured %d graphs; they hold %.2f GiB",
        sum(len(each.captured) for each in kinds),
        graph_bytes / GiB,
    )
    return graph_bytes


def _sizes_name(stepper: Stepper) -> str:
    device, space = stepper.device, stepper.mixed_graphs and stepper.mixed_graphs.space
    machine: tuple[object, ...] = (device.type,)
    if device.type == "cuda":
        driver = _DRIVER_FILE.read_text() if _DRIVER_FILE.exists() else ""
        machine = (torch.cuda.get_device_name(device), torch.version.cuda, driver)
    (cache,), weights = stepper.caches, stepper.model.named_parameters()
    shapes = [(name, tuple(each.shape), each.dtype) for name, each in weights]
    groups = cache.kv_groups
    layers = [(each.geometry.shape, each.dtype, each.window_tokens) for each in groups]
    sizes = space and (space.max_num_seqs, space.max_tokens, tuple(space.logits.shape))
    how = stepper.attention.kernel_names, stepper.uses_operator
    return compile_cache.name_of("slow-sizes", machine, shapes, layers, sizes, how)


def _kept_sizes(name: str, agree: Callable[[int], int]) -> frozenset[int] | None:
    """Return the sizes kept by an earlier start; None unless all ranks have the same."""
    data = compile_cache.read(name)
    mark = 0 if data is None else 1 + zlib.crc32(data)
    if agree(int(agree(mark) != mark or data is None)):
        return None
    assert data is not None  # Agreed.
    return frozenset(json.loads(data))


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def _warm_up_prompts(stepper: Stepper, max_num_batched_tokens: int, must_compile: bool) -> None:
    """Run the largest prompt that fits, and then a step with pieces of every kind."""
    (cache,) = stepper.caches
    num_tokens = min(max_num_batched_tokens, cache.max_tokens)
    while True:
        sequence = cache.open()
        try:
            cache.grow([(sequence, num_tokens)])
            _warm_up_in(stepper, sequence.row, num_tokens, must_compile)
            break
        except CapacityError:
            if num_tokens < 2:
                raise
            num_tokens //= 2
        finally:
            sequence.close()
    cache.trim()


def _warm_up_in(stepper: Stepper, row: int, num_tokens: int, must_compile: bool) -> None:
    slot, scratch_row = stepper.open_scratch()
    ids = [0] * num_tokens
    first = [Piece(slot, row, 0, num_tokens, ids)]
    try:
        stepper.run_eagerly(first)
    except (CapacityError, torch.OutOfMemoryError):
        raise
    except RuntimeError as error:
        if must_compile or not stepper.run_layers_plainly():
            raise
        _LOG.warning("this model's layers cannot be compiled, and run as they are: %s", error)
        stepper.run_eagerly(first)
    half = num_tokens // 2
    if half > 1:
        later = Piece(slot, row, half, num_tokens - half, ids[half:])
        stepper.run_eagerly([Piece(slot, scratch_row, 0, 1, [0]), later])
