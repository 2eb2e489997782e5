"""Experts by kernels of our own: which modules qualify, what is traced, what is computed."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import one_hot

from vmkv.step import experts, graph_passes
from vmkv.step.expert_forms import Form, apply_gate, form_of, top_k_of

moe = pytest.importorskip("transformers.integrations.moe")  # Since transformers 5.
if not hasattr(moe, "_default_apply_gate"):
    pytest.skip("experts have no gate of their own before", allow_module_level=True)

from transformers import GptOssConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM  # noqa: E402
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts  # noqa: E402
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts  # noqa: E402

SILU = Form(False, False, False, 1.0, 0.0, 0.0)
OSS = Form(True, True, False, 1.702, 7.0, 1.0)


def _config(**options: Any) -> Any:
    its = {"hidden_size": 64, "moe_intermediate_size": 48, "num_experts": 6, **options}
    config = Qwen3MoeConfig(**{"num_experts_per_tok": 2, **its})
    config._experts_implementation = "grouped_mm"
    return config


def _qwen(dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    return _filled(Qwen3MoeExperts(_config(**options)).to(dtype))


def _oss(num_experts: int = 6, top_k: int = 2, hidden: int = 64, inner: int = 48) -> Any:
    config = GptOssConfig(
        num_local_experts=num_experts,
        num_experts_per_tok=top_k,
        hidden_size=hidden,
        intermediate_size=inner,
    )
    config._experts_implementation = "grouped_mm"
    return _filled(GptOssExperts(config).to(torch.bfloat16))


def _filled(module: Any) -> Any:
    torch.manual_seed(0)
    module.requires_grad_(False)
    for each in module.parameters():
        each.normal_(0, 0.2)
    return module.eval()


# ---- which modules qualify -----------------------------------------------------------------------


def test_forms_are_recognised() -> None:
    """By what the gate computes: halves or in turn, limits, slopes, GELU's approximation."""
    assert form_of(_qwen()) == SILU
    assert top_k_of(_qwen()) == 2
    assert form_of(_oss()) == OSS
    gelu = _qwen(hidden_act="gelu_pytorch_tanh")
    assert form_of(gelu) == SILU._replace(is_gelu=True)
    limited = _qwen()
    limited.limit = 3.0
    assert form_of(limited) == SILU  # A number that the gate does not use.
    limited._apply_gate = lambda x: apply_gate(x, SILU._replace(limit=3.0))
    assert form_of(limited) == SILU._replace(limit=3.0)


@pytest.mark.parametrize("module", [_qwen(), _oss()], ids=["qwen", "oss"])
def test_a_form_computes_the_gate(module: Any) -> None:
    x = 10 * torch.randn(32, 96, generator=torch.Generator().manual_seed(1))
    form = form_of(module)
    assert form is not None
    torch.testing.assert_close(apply_gate(x, form), module._apply_gate(x))


def _chosen_by_user(module: Any) -> None:
    module.config._experts_implementation = "eager"


def _another_gate(module: Any) -> None:
    module._apply_gate = lambda x: x.chunk(2, -1)[0]


def _hooked(module: Any) -> None:
    module.register_forward_hook(lambda *_: None)


def _parallel(module: Any) -> None:
    module._is_expert_parallel = True


def _normed(module: Any) -> None:
    module.has_post_expert_norm = True


def _more_parameters(module: Any) -> None:
    module.scale = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))


def _other_shapes(module: Any) -> None:
    module.down_proj = torch.nn.Parameter(module.down_proj[:, :, 1:].clone())


def _not_contiguous(module: Any) -> None:
    module.down_proj = torch.nn.Parameter(module.down_proj.transpose(1, 2).contiguous().mT)


def _quantised(module: Any) -> None:
    module.down_proj = torch.nn.Parameter(module.down_proj.to(torch.float8_e4m3fn), False)


def _wrapped(module: Any) -> None:
    module.forward = lambda *_: None


@pytest.mark.parametrize(
    "change",
    [
        *(_chosen_by_user, _another_gate, _hooked, _parallel, _normed, _more_parameters),
        *(_other_shapes, _not_contiguous, _quantised, _wrapped),
    ],
)
def test_other_experts_run_as_before(change: Callable[[Any], None]) -> None:
    module = _qwen()
    assert form_of(module) is not None
    change(module)
    assert form_of(module) is None


def test_other_types_and_modules_run_as_before() -> None:
    assert form_of(_qwen(torch.float32)) is None
    assert form_of(_qwen(hidden_act="relu")) is None
    assert form_of(torch.nn.Linear(4, 4)) is None


def test_nothing_is_fused_on_the_host() -> None:
    model = Qwen3MoeForCausalLM(_small_config()).to(torch.bfloat16)
    assert experts.fuse(model) == 0
    assert not any(hasattr(each, experts._FORM) for each in model.modules())


def test_adapted_and_shared_experts_run_as_before() -> None:
    """Those that peft wraps, and those of ranks that share a model; and none is fused twice."""
    model = Qwen3MoeForCausalLM(_small_config()).to(torch.bfloat16)
    first, second = (layer.mlp.experts for layer in model.model.layers)
    assert experts._qualifying(model) == [(first, SILU), (second, SILU)]
    wrapper = torch.nn.Module()
    wrapper.base_layer = first
    model.model.layers[0].mlp.experts = wrapper
    assert experts._qualifying(model) == [(second, SILU)]
    second.__class__ = experts.fused_class(type(second), SILU, 2)
    assert experts._qualifying(model) == []
    experts.restore(model.modules())
    setattr(model, graph_passes.GROUP, "ranks")
    assert experts._qualifying(model) == []


def _small_config() -> Any:
    return _config(
        num_hidden_layers=2, num_attention_heads=2, head_dim=32, num_key_value_heads=1,
        intermediate_size=32, vocab_size=64,
    )  # fmt: skip


# ---- what is traced ------------------------------------------------------------------------------


def _traced(function: Callable[..., Any], *inputs: Any) -> torch.fx.GraphModule:
    graphs = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(copy.deepcopy(module))
        return module.forward

    torch.compile(function, backend=backend, fullgraph=True, dynamic=True)(*inputs)
    return graphs[0]


def _calls(module: torch.fx.GraphModule, name: str) -> list[Any]:
    return [each for each in module.graph.nodes if name in str(each.target)]


@pytest.mark.parametrize("make", [_qwen, _oss])
def test_fused_experts_are_one_operator(make: Callable[[], Any]) -> None:
    """In traced code; elsewhere, and once restored, the module's own code runs."""
    module = make()
    inputs = torch.randn(3, 64).bfloat16(), torch.tensor([[0, 1], [5, 2], [1, 3]]), torch.rand(3, 2)
    own, kind = module(*inputs), type(module)
    form = form_of(module)
    assert form is not None
    module.__class__ = experts.fused_class(kind, form, 2)
    assert torch.equal(own, module(*inputs))
    assert form_of(module) == form
    traced = _traced(module.to("meta"), *(each.to("meta") for each in inputs))
    (call,) = _calls(traced, "vmkv.experts")
    assert experts._parsed(call.args[-1]) == (2, form)
    assert not _calls(traced, "sort")
    experts.restore([module])
    experts.restore([module])
    assert type(module) is kind


def _router(choose: Callable[[torch.Tensor], Any]) -> Callable[..., Any]:
    def run(
        x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, logits: torch.Tensor
    ) -> Any:
        values, ids = choose(logits)
        return torch.ops.vmkv.experts(x, ids, values, gate_up, None, down, None, "")

    return run


@pytest.mark.parametrize(
    ("choose", "count"),
    [
        (lambda x: torch.topk(x, 2, dim=-1), 1),
        (lambda x: x.topk(2, -1, sorted=False), 1),
        (lambda x: torch.topk(x.softmax(-1), k=2), 1),
        (lambda x: torch.topk(x, 2, largest=False), 0),
        (lambda x: torch.topk(x[None], 2)[0:2], 0),
        (lambda x: [each.mT for each in torch.topk(x.mT, 2, dim=0)], 0),
        (lambda x: torch.topk(x.repeat(1, 4), 17), 0),
    ],
)
def test_routers_choose_by_one_kernel(choose: Callable[..., Any], count: int) -> None:
    shapes = (3, 64), (6, 96, 64), (6, 64, 48), (3, 6)
    inputs = [torch.randn(each, device="meta") for each in shapes]
    for each in inputs:  # As of parameters.
        torch._dynamo.mark_static(each)
    torch._dynamo.mark_dynamic(inputs[0], 0)
    torch._dynamo.mark_dynamic(inputs[3], 0)
    traced = _traced(_router(choose), *inputs)
    assert graph_passes.choose_by_kernel(traced) == count
    assert len(_calls(traced, "vmkv.top_k")) == count
    assert bool(_calls(traced, "topk")) != bool(count)
    assert traced.code  # It is still whole.


def test_choices_elsewhere_are_unchanged() -> None:
    """Without fused experts in the graph, `topk` is torch's."""
    traced = _traced(lambda x: torch.topk(x, 2), torch.randn(3, 6))
    assert graph_passes.choose_by_kernel(traced) == 0


# ---- what kernels compute ------------------------------------------------------------------------


@pytest.fixture
def kernels() -> Any:
    pytest.importorskip("triton")
    from vmkv.step import expert_kernels

    return expert_kernels


def _exact(module: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Any:
    """Compute experts one by one in float64."""
    form, out = form_of(module), torch.zeros_like(hidden, dtype=torch.float64)
    assert form is not None
    parameters = {name: each.double() for name, each in module.named_parameters()}
    biases = [parameters.get(f"{each}_proj_bias") for each in ("gate_up", "down")]
    for expert in ids.unique().tolist():
        tokens, slots = torch.where(ids == expert)
        its = hidden[tokens].double()
        for name, bias in zip(("gate_up_proj", "down_proj"), biases, strict=True):
            weight = parameters[name][expert]
            its = its @ (weight if form.is_transposed else weight.T)
            its = its if bias is None else its + bias[expert]
            its = apply_gate(its, form) if name == "gate_up_proj" else its
        out.index_add_(0, tokens, its * weights[tokens, slots, None].double())
    return out


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def _inputs(module: Any, size: int, top_k: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    weight = module.gate_up_proj
    generator = torch.Generator("cuda").manual_seed(seed)
    hidden = weight.shape[1 if module.is_transposed else 2]
    x = torch.randn(size, hidden, device="cuda", generator=generator).to(weight.dtype)
    scores = torch.rand(size, len(weight), device="cuda", generator=generator)
    values, ids = scores.topk(top_k)
    return x, ids, values.to(weight.dtype)


CASES = {
    "qwen": lambda: (_qwen(num_experts=128, num_experts_per_tok=8, hidden_size=256), 8),
    "float16": lambda: (_qwen(torch.float16, num_experts=20, moe_intermediate_size=160), 4),
    "oss": lambda: (_oss(32, 4, 96, 80), 4),
    "few": lambda: (_qwen(num_experts=3, hidden_size=72, moe_intermediate_size=40), 2),
}


def test_choices_are_kept(kernels: Any) -> None:
    """As JSON: the next start reads what the first one has timed."""
    tiles = [kernels.candidates(size, size / 4, is_gated=True)[:2] for size in (1, 64, 4096)]
    choice = experts._Choice(tiles, is_faster=True)
    assert experts._parsed_choice(json.dumps(choice).encode()) == choice


def test_any_number_of_tokens_has_candidates(kernels: Any) -> None:
    """Of both products, and none that takes more tokens than it has rows."""
    for size, mean in itertools.product(experts._SIZES, (0.01, 3, 11, 40, 99, 101, 4096)):
        for is_gated in (True, False):
            found = kernels.candidates(size, mean, is_gated=is_gated)
            assert found
            assert all(size <= each.block_m for each in found if each.is_direct)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 2, 7, 16, 17, 64, 300, 4096])
@pytest.mark.parametrize("case", CASES)
def test_kernels_are_as_close_as_grouped_products(kernels: Any, case: str, size: int) -> None:
    """To float64, with every tile that may be chosen; most sizes leave experts without tokens."""
    module, top_k = CASES[case]()
    module.cuda()
    inputs = _inputs(module, size, top_k)
    exact, form = _exact(module, *inputs), form_of(module)
    theirs = _error(module(*inputs), exact)
    tensors = experts._tensors_of(module)
    mean = size * top_k / len(module.gate_up_proj)
    kinds = [kernels.candidates(size, mean, is_gated=each) for each in (True, False)]
    assert all(kinds)
    for at in range(max(map(len, kinds))):
        tiles = [each[at % len(each)] for each in kinds]
        assert _error(kernels.run(inputs, tensors, form, tiles), exact) <= max(theirs, 2e-3), tiles


@pytest.mark.gpu
@pytest.mark.parametrize("size", [5, 40])
def test_a_token_may_choose_an_expert_twice(kernels: Any, size: int) -> None:
    module = _qwen().cuda()
    x, ids, weights = _inputs(module, size, 3)
    ids[2], ids[4, 1:] = 5, 0
    exact = _exact(module, x, ids, weights)
    for tile in kernels.candidates(size, size / 2, is_gated=False):
        pair = [tile, tile]
        out = kernels.run((x, ids, weights), experts._tensors_of(module), SILU, pair)
        assert _error(out, exact) < 5e-3, tile


@pytest.mark.gpu
def test_a_captured_call_follows_its_routing(kernels: Any) -> None:
    module = _oss(32, 4, 96, 80).cuda()
    tensors, form = experts._tensors_of(module), form_of(module)
    for size in (3, 100):
        inputs = _inputs(module, size, 4)
        tiles = [kernels.candidates(size, 10, is_gated=each)[-1] for each in (True, False)]
        kernels.run(inputs, tensors, form, tiles)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = kernels.run(inputs, tensors, form, tiles)
        for seed in range(1, 5):
            for old, new in zip(inputs, _inputs(module, size, 4, seed), strict=True):
                old.copy_(new)
            inputs[1][1:] = inputs[1][0] if seed == 4 else inputs[1][1:]  # All choose the same.
            graph.replay()
            assert torch.equal(out, kernels.run(inputs, tensors, form, tiles))
            assert _error(out, _exact(module, *inputs)) < 6e-3


@pytest.mark.gpu
def test_choices_are_those_of_torch(kernels: Any) -> None:
    torch.manual_seed(0)
    for shape, k, dtype in (((1, 128), 8, torch.float32), ((99, 60), 4, torch.bfloat16),
                            ((7, 512), 10, torch.float32), ((3, 2), 2, torch.float16)):  # fmt: skip
        x = torch.rand(shape, device="cuda").to(dtype)
        values, ids = kernels.top_k(x, k)
        assert torch.equal(values, x.topk(k)[0])
        assert torch.equal(values, x.gather(1, ids))
        assert one_hot(ids, shape[1]).sum(1).max() == 1
    x = torch.full((2, 6), float("nan"), device="cuda")
    x[1, :] = -float("inf")
    assert kernels.top_k(x, 3)[1].tolist() == [[0, 1, 2], [0, 1, 2]]


@pytest.mark.gpu
def test_layers_with_fused_experts_compute_the_same(
    kernels: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Compiled, with tiles timed and kept on disk; the layers are the model's own after."""
    from vmkv.step.compiled_layers import CompiledLayers

    monkeypatch.setenv("VMKV_CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setattr(experts, "_CHOICES", {})
    monkeypatch.setattr(experts, "_GAIN", float("inf"))
    config = _config(
        num_hidden_layers=2, num_attention_heads=4, head_dim=64, num_key_value_heads=2,
        hidden_size=256, moe_intermediate_size=128, num_experts=32, vocab_size=64,
        num_experts_per_tok=4,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config).to("cuda", torch.bfloat16).eval()
    ids = torch.arange(40, device="cuda")[None]
    with torch.no_grad():
        plain = model(ids).logits
        layers = CompiledLayers(model)
        mine = [each for each in model.modules() if hasattr(each, experts._FORM)]
        assert len(mine) == 2
        (kept,) = (tmp_path / "kept").glob("experts-*")
        compiled = model(ids).logits
        assert _error(compiled, plain.double()) < 0.03
        before = kept.read_bytes()
        monkeypatch.setattr(experts, "_CHOICES", {})
        layers.pause()
        assert torch.equal(model(ids).logits, plain)
        layers.resume()
        assert len(mine) == sum(hasattr(each, experts._FORM) for each in model.modules())
        assert kept.read_bytes() == before
        assert torch.equal(model(ids).logits, compiled)
        layers.close()
        assert torch.equal(model(ids).logits, plain)
