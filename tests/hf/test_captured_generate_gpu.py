"""transformers' own loop on a GPU: steps are replayed without waits and compute the same.

Kernels sum in another order than the model's own attention, and in bfloat16 an equally likely
token may come instead. So tests compare logits with those of a float32 model for the generated
tokens, by FlashAttention's rule: the error is at most a few times that of the plain model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.tiny_models import kernel_model

import vmkv
from vmkv import VMKVCache
from vmkv.attention import AttentionSpec, why_not

pytestmark = pytest.mark.gpu

NEW_TOKENS = 24
PADDING = (0, 3, 17)
KERNELS = ("flash2", "flash3")


@pytest.fixture(scope="module")
def plain() -> Any:
    """A model whose attention uses kernels that can be captured."""
    made = kernel_model()
    for module in made.modules():  # Makes the next token depend on the previous ones.
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, 0.0, 1.5 * module.in_features**-0.5)
    return made


@pytest.fixture(scope="module")
def exact(plain: Any) -> Any:
    """The same model in float32."""
    return copy.deepcopy(plain).float()


@pytest.fixture
def model(plain: Any) -> Iterator[Any]:
    """A copy that decodes by captured steps."""
    copied = copy.deepcopy(plain)
    with vmkv.capture_decoding(copied):
        yield copied


def _needs(kernel: str) -> str:
    reason = why_not(kernel, AttentionSpec("cuda", torch.bfloat16, 4, 2, 64, 64, left_pad=True))
    if reason is not None:
        pytest.skip(f"{kernel}: {reason}")
    return kernel


def _inputs(batch_size: int = 3, num_tokens: int = 40, *, padded: bool = False) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 256, (batch_size, num_tokens), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(batch_size if padded else 0):
        ids[row, : PADDING[row]] = mask[row, : PADDING[row]] = 0
    return {"input_ids": ids.cuda(), "attention_mask": mask.cuda()}


def _generate(model: Any, inputs: dict[str, Any], cache: Any, **options: Any) -> Any:
    """Tokens and logits of `generate`."""
    torch.manual_seed(7)
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **options}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    return model.generate(**inputs, past_key_values=cache, **options)


@torch.no_grad()
def _check(output: Any, inputs: dict[str, Any], plain: Any, exact: Any) -> None:
    """Compare the logits of each step with those of the float32 model."""
    mask, ids = inputs["attention_mask"], output.sequences[:, :-1]
    num_tokens = mask.shape[1]
    mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - num_tokens), value=1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    expected, eager = (
        each(ids, attention_mask=mask, position_ids=positions, use_cache=False)
        .logits[:, num_tokens - 1 :]
        .float()
        for each in (exact, plain)
    )
    error = (torch.stack(output.logits, 1).float() - expected).abs()
    allowed = (eager - expected).abs()
    assert error.max() <= 3 * allowed.max()
    assert error.mean() <= 2 * allowed.mean()


def _graphs(model: Any, cache: Any) -> Any:
    """The graphs of a cache."""
    return model.forward._caches[cache].steps._graphs


@pytest.mark.parametrize("options", [{}, {"do_sample": True}], ids=["greedy", "sampling"])
@pytest.mark.parametrize("kind", ["one", "three", "padded"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_replayed_steps_compute_what_the_model_does(
    plain: Any, exact: Any, model: Any, kernel: str, kind: str, options: dict[str, Any]
) -> None:
    """One row, several, and left-padded rows; later calls run the model's code for prompts only."""
    inputs = _inputs(1 if kind == "one" else 3, padded=kind == "padded")
    count = []
    forward = model.model.forward
    with VMKVCache(model.config, attention_backend=_needs(kernel)) as cache:
        _check(_generate(model, inputs, cache, **options), inputs, plain, exact)
        (bucket,) = _graphs(model, cache).captured
        assert (kind == "padded") is bucket.is_padded
        model.model.forward = lambda *a, **k: (count.append(1), forward(*a, **k))[1]
        replayed = []
        for _ in range(2):
            cache.reset()
            replayed.append(_generate(model, inputs, cache, **options))
        _check(replayed[0], inputs, plain, exact)
        assert torch.equal(replayed[0].sequences, replayed[1].sequences)
        cache.check()
    assert [1, 1] == count  # The prompts; steps replay existing graphs.
    assert 3 * (NEW_TOKENS - 1) == model.forward.num_steps


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_replayed_steps_never_wait(model: Any) -> None:
    """With the mask and positions of a padded batch in every step, and with new pages."""
    _needs("flash2")
    inputs = _inputs(padded=True)
    mask = inputs["attention_mask"]
    token = torch.full((3, 1), 5, device="cuda")
    with VMKVCache(model.config, attention_backend="flash2") as cache, torch.no_grad():

        def step() -> None:
            nonlocal mask
            mask = torch.cat([mask, mask.new_ones(3, 1)], 1)
            positions = mask.sum(1, keepdim=True) - 1
            model(
                token,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            )

        model(**inputs, past_key_values=cache, use_cache=True)
        for _ in range(4):
            step()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(300):
                step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert 304 == model.forward.num_steps
        cache.check()


def test_eager_and_replayed_steps_mix(plain: Any, exact: Any, model: Any) -> None:
    """Calls that continue each other's tokens, beam search, and prompt lookup."""
    _needs("flash2")
    inputs = _inputs(padded=True)
    with VMKVCache(model.config) as cache:
        for count in (6, 3, 8):
            output = _generate(model, inputs, cache, max_new_tokens=count)
            _check(output, inputs, plain, exact)
            mask, ids = inputs["attention_mask"], output.sequences
            ids = torch.cat([ids, ids[:, -2:]], 1)
            mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
            inputs = {"input_ids": ids, "attention_mask": mask}
        cache.check()
    one = _inputs(1)
    for options in ({"num_beams": 3}, {"prompt_lookup_num_tokens": 4}):
        with VMKVCache(model.config) as cache:
            output = _generate(model, one, cache, **options)
            if "num_beams" not in options:  # The output does not name the beams of the logits.
                _check(output, one, plain, exact)
            cache.check()
    assert model.forward.num_steps > 6 + 3 + 8


def test_with_a_kernel_that_synchronizes_steps_run_eagerly(model: Any, plain: Any) -> None:
    """Torch's synchronization mode is unchanged."""
    inputs = _inputs()
    with VMKVCache(plain.config, attention_backend="sdpa") as cache:
        expected = _generate(plain, inputs, cache)
    with VMKVCache(model.config, attention_backend="sdpa") as cache:
        assert torch.equal(expected.sequences, _generate(model, inputs, cache).sequences)
    assert 0 == model.forward.num_steps
    assert torch.cuda.get_sync_debug_mode() == 0
    assert torch.rand(3, device="cuda").shape == (3,)


def test_graphs_are_freed_with_their_cache(model: Any) -> None:
    """Closed caches leave no device memory allocated; a cache also works after `capture.close`."""
    _needs("flash2")
    inputs = _inputs()
    for _ in range(2):  # The first call makes allocations that are kept.
        with VMKVCache(model.config) as cache:
            _generate(model, inputs, cache)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
    for _ in range(3):
        with VMKVCache(model.config) as cache:
            _generate(model, inputs, cache)
    torch.cuda.synchronize()
    assert before == torch.cuda.memory_allocated()
    cache = VMKVCache(model.config)
    _generate(model, inputs, cache)
    model.forward.close()
    cache.reset()
    _generate(model, inputs, cache)
    cache.close()


@pytest.mark.slow
def test_compiled_layers_are_captured(plain: Any, exact: Any) -> None:
    """With one row and with a padded batch."""
    _needs("flash2")
    model = copy.deepcopy(plain)
    with vmkv.capture_decoding(model, compile_layers=True) as capture:
        for inputs in (_inputs(1), _inputs(padded=True)):
            with VMKVCache(model.config) as cache:
                _check(_generate(model, inputs, cache), inputs, plain, exact)
                assert _graphs(model, cache).captured
        assert 2 * (NEW_TOKENS - 1) == capture.num_steps


def test_steps_outlive_the_workspaces_of_another_cache(model: Any) -> None:
    """All caches capture on one stream, for which cuBLAS has one workspace."""
    _needs("flash2")
    inputs = _inputs()
    with VMKVCache(model.config) as first, VMKVCache(model.config) as cache:
        _generate(model, inputs, first)
        wanted = _generate(model, inputs, cache).sequences
        first.close()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        cache.reset()
        assert torch.equal(wanted, _generate(model, inputs, cache).sequences)
