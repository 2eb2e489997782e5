"""The draw kernel: its source runs on the host against the sampler's path in torch, and on CUDA.

On the host blocks have 64 threads and parts 512 tokens, so that small rows have several parts.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from vmkv.attention.nvrtc import FORMATS, NUMBERS
from vmkv.serve import draw
from vmkv.serve.draw import DrawKernel
from vmkv.serve.params import SamplingParams
from vmkv.serve.sampler import Sampler

EMULATOR = Path(__file__).parents[1] / "helpers" / "kernel_on_host.cpp"
HOST_THREADS, HOST_PART_TOKENS = 64, 512
VOCABULARY = 1504  # So that 16 bytes are loaded at once, as with usual vocabularies.

CHOICES = [
    SamplingParams(),
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.8, top_p=0.95),
    SamplingParams(temperature=1.5, top_p=0.3),
    SamplingParams(top_p=1e-6),
    SamplingParams(temperature=5, top_p=0.999),
    SamplingParams(top_k=1),
    SamplingParams(top_k=2),
    SamplingParams(temperature=3, top_k=40),
    SamplingParams(temperature=3, top_k=700),
    SamplingParams(temperature=3, top_k=VOCABULARY - 1),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.8),
    SamplingParams(temperature=2, top_k=300, top_p=0.6, min_p=0.05),
    SamplingParams(min_p=0.1),
    SamplingParams(min_p=1.0),
    SamplingParams(temperature=2, top_p=0.9, min_p=0.01),
    SamplingParams(temperature=1e-5),
    SamplingParams(temperature=100, top_p=0.5),
]


def compiled(folder: Path, dtype: torch.dtype, count: int) -> Any:
    """Compile the kernel's source for the host."""
    library = folder / f"draw_{FORMATS[dtype]}_{count}.so"
    if not library.exists():
        source = folder / "draw.cu"
        source.write_text(NUMBERS + draw._SOURCE)
        options = {"FORMAT": FORMATS[dtype], "COUNT": count, "THREADS": HOST_THREADS}
        options |= {"KERNEL": f'"{source}"', "NAME": "draw"}
        flags = [f"-D{name}={value}" for name, value in options.items()]
        base = ["g++", "-O1", "-std=c++17", "-ffp-contract=off", "-w", "-shared", "-fPIC"]
        subprocess.run([*base, *flags, str(EMULATOR), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library)).run


@pytest.fixture(scope="module")
def host_kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """`DrawKernel` launches its source on the host."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the kernel for the host")
    folder = tmp_path_factory.mktemp("draw")

    def launch(run: Any, num_blocks: int, num_threads: int, words: bytes) -> None:
        assert num_threads == HOST_THREADS
        run(num_blocks, ctypes.c_char_p(words))

    for count in (1, 2, 4):
        compiled(folder, torch.float32, count)
    compiled(folder, torch.bfloat16, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draw, "_THREADS", HOST_THREADS)
        patch.setattr(draw, "_PART_TOKENS", HOST_PART_TOKENS)
        patch.setattr(draw, "_kernel", lambda _, dtype, count: compiled(folder, dtype, count))
        patch.setattr(draw, "launch", launch)
        yield


def logits_of(kind: str, rows: int, vocabulary: int = VOCABULARY, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=generator) * 3
    if kind == "peaked":  # As those of a language model: few likely tokens, and a long tail.
        logits += 18 * torch.rand(rows, vocabulary, generator=generator) ** 60
    elif kind == "tied":
        logits = logits.round()
    elif kind == "equal":
        logits = torch.full_like(logits, -2.5)
    elif kind == "one token":
        logits = torch.full_like(logits, -math.inf)
        logits[:, 777 % vocabulary] = 1.0
    elif kind == "no token":
        logits = torch.full_like(logits, -math.inf)
    elif kind == "zeros":
        logits = torch.where(logits > 0, 0.0, -0.0)
    elif kind == "large":
        logits *= 1e4
    return logits


KINDS = ("normal", "peaked", "tied", "equal", "one token", "no token", "zeros", "large")


def samplers(device: str, vocabulary: int, params: list[SamplingParams]) -> tuple[Sampler, Sampler]:
    """Make one that uses the kernel, and one that does not."""
    both = Sampler(len(params), vocabulary, device), Sampler(len(params), vocabulary, device)
    both[0]._kernel = DrawKernel(len(params) + 1, vocabulary, torch.device(device))
    both[1]._kernel = None
    for sampler in both:
        for slot, each in enumerate(params):
            sampler.set_slot(slot, each, [1, 2, 3])
    return both


def check_equal_draws(
    device: str, logits: torch.Tensor, params: list[SamplingParams], steps: int = 2
) -> None:
    kernel, sorting = samplers(device, logits.shape[1], params)
    slots = torch.arange(len(params), device=device)
    for _ in range(steps):
        expected = sorting.sample(logits, slots, range(len(params))).token_ids
        tokens = kernel.sample(logits, slots, range(len(params))).token_ids
        differing = [
            (params[at], int(tokens[at]), int(expected[at]))
            for at in torch.nonzero(tokens != expected).flatten().tolist()
        ]
        assert [] == differing
        assert torch.equal(kernel._counts, sorting._counts)
        assert torch.equal(kernel._token_counts, sorting._token_counts)


def seeded(choices: Sequence[SamplingParams] = CHOICES) -> list[SamplingParams]:
    return [dataclasses.replace(each, seed=seed) for seed, each in enumerate(choices)]


# ---- on the host --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_draws_what_sorting_draws(host_kernel, kind: str, dtype: torch.dtype) -> None:
    params = seeded()
    check_equal_draws("cpu", logits_of(kind, len(params)).to(dtype), params)


@pytest.mark.parametrize("kind", ["normal", "peaked", "tied", "zeros"])
def test_log_probabilities_of_draws_are_those_of_sorting(host_kernel, kind: str) -> None:
    """Of the distribution that is drawn from; a token that was drawn has one."""
    params = [dataclasses.replace(each, logprobs=3) for each in seeded()]
    slots = torch.arange(len(params))
    both = samplers("cpu", VOCABULARY, params)
    for sampler in both:
        sampler.tells_processed = True
    logits = logits_of(kind, len(params))
    one, other = (each.sample(logits, slots, range(len(params))) for each in both)
    assert one.logprobs is not None
    assert one.logprobs.isfinite().all()
    torch.testing.assert_close(one.logprobs, other.logprobs)
    torch.testing.assert_close(one.top_logprobs, other.top_logprobs)
    assert torch.equal(one.top_token_ids, other.top_token_ids)


@pytest.mark.parametrize("vocabulary", [1, 5, 511, 513, 1537])
def test_rows_of_odd_sizes(host_kernel, vocabulary: int) -> None:
    """One number is loaded at a time."""
    params = seeded()
    check_equal_draws("cpu", logits_of("normal", len(params), vocabulary), params, 1)


def test_rows_need_not_be_packed(host_kernel) -> None:
    """Nor be aligned: the numbers that are loaded at once are."""
    wide = torch.zeros(len(CHOICES), VOCABULARY + 6)
    logits = wide[:, 2:-4]
    logits.copy_(logits_of("peaked", len(CHOICES)))
    check_equal_draws("cpu", logits, seeded(), 1)
    check_equal_draws("cpu", logits.t().contiguous().t(), seeded(), 1)


@pytest.mark.parametrize("kind", ["normal", "tied", "equal"])
def test_top_k_keeps_the_lower_of_equal_tokens(host_kernel, kind: str) -> None:
    """Selected by digits of the distance, then of the token."""
    logits = logits_of(kind, 1).expand(24, -1)
    for top_k in (2, 31, 500, 1024):
        params = [
            SamplingParams(temperature=50, top_k=top_k, seed=seed) for seed in range(len(logits))
        ]
        kernel, _ = samplers("cpu", VOCABULARY, params)
        kept = set(logits[0].sort(descending=True, stable=True).indices[:top_k].tolist())
        drawn = kernel.sample(logits, torch.arange(len(logits)), range(len(logits))).token_ids
        assert set(drawn.tolist()) <= kept
    params = seeded([SamplingParams(temperature=9, top_k=each) for each in (64, 65, 300, 1499)])
    check_equal_draws("cpu", logits[:4], params)


def test_many_rounds_end_at_the_likeliest_token(host_kernel) -> None:
    """The noise of many seeds asks for an unlikely token first, and top-p leaves one."""
    params = [SamplingParams(temperature=100, top_p=1e-9, seed=seed) for seed in range(20)]
    logits = logits_of("normal", 1).expand(20, -1)
    kernel, _ = samplers("cpu", VOCABULARY, params)
    tokens = kernel.sample(logits, torch.arange(20), range(20)).token_ids
    assert {int(logits[0].argmax())} == set(tokens.tolist())


def test_a_rows_token_does_not_depend_on_its_place(host_kernel) -> None:
    logits, params = logits_of("peaked", len(CHOICES)), seeded()
    together, _ = samplers("cpu", VOCABULARY, params)
    order = list(reversed(range(len(params))))
    drawn = together.sample(logits[order], torch.tensor(order), order).token_ids.tolist()
    for slot, token in zip(order, drawn, strict=True):
        alone, _ = samplers("cpu", VOCABULARY, params)
        its = alone.sample(logits[slot : slot + 1], torch.tensor([slot]), [slot]).token_ids
        assert [token] == its.tolist()


def test_infinite_and_undefined_scores_end(host_kernel) -> None:
    """A token of the vocabulary is drawn; the first infinite one if there is one."""
    logits = logits_of("normal", 3 * len(CHOICES))
    logits[: len(CHOICES), [700, 3]] = math.inf
    logits[len(CHOICES) : -len(CHOICES), 9] = math.nan
    logits[-len(CHOICES) :] = math.nan
    params = seeded(CHOICES * 3)
    kernel, _ = samplers("cpu", VOCABULARY, params)
    tokens = kernel.sample(logits, torch.arange(len(params)), range(len(params))).token_ids
    assert {3} == set(tokens[: len(CHOICES)].tolist())
    assert 0 <= int(tokens.min())
    assert int(tokens.max()) < VOCABULARY


def test_scores_that_leave_no_token_draw_none(host_kernel) -> None:
    """As sorting does, with greedy decoding too; tokens that are banned are none."""
    some = [dataclasses.replace(each, allowed_token_ids=(700, 3)) for each in CHOICES]
    logits = logits_of("normal", len(some))
    logits[::2, [700, 3]] = -math.inf
    for each in samplers("cpu", VOCABULARY, seeded(some)):
        tokens = each.sample(logits, torch.arange(len(some)), range(len(some))).token_ids
        assert {-1} == set(tokens[::2].tolist())
        assert set(tokens[1::2].tolist()) <= {700, 3}


def test_penalties_count_drawn_tokens(host_kernel) -> None:
    """The kernel adds to the token counts that penalties read in the next step."""
    params = [
        SamplingParams(seed=0, frequency_penalty=2.0, repetition_penalty=1.4),
        SamplingParams(temperature=0, presence_penalty=1.0, min_tokens=2, stop_token_ids=(4,)),
        SamplingParams(seed=1, logit_bias={5: 30.0}),
        SamplingParams(seed=2, top_p=0.9, allowed_token_ids=(8, 9)),
    ]
    check_equal_draws("cpu", logits_of("tied", len(params)), params, 12)


# ---- on CUDA ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocabulary", [128_256, 50_257])
def test_cuda_draws_what_sorting_draws(kind: str, vocabulary: int, dtype: torch.dtype) -> None:
    """Up to rounding at the threshold: no more than one token of some hundred differs."""
    params = seeded(CHOICES * 8)
    logits = logits_of(kind, len(params), vocabulary).to("cuda", dtype)
    kernel, sorting = samplers("cuda", vocabulary, params)
    slots = torch.arange(len(params), device="cuda")
    differing = 0
    for _ in range(4):
        expected = sorting.sample(logits, slots, range(len(params))).token_ids
        tokens = kernel.sample(logits, slots, range(len(params))).token_ids
        differing += int((tokens != expected).sum())
    assert torch.equal(kernel._counts, sorting._counts)
    assert differing <= 0.004 * 4 * len(params)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 32, 256])
def test_cuda_draws_do_not_depend_on_the_batch(num_rows: int) -> None:
    """Bit by bit: alone, in another place and again, rows have the same tokens."""
    params = seeded((CHOICES * 15)[:num_rows])
    logits = logits_of("peaked", num_rows, 128_256).to("cuda", torch.bfloat16)
    order = list(reversed(range(num_rows)))
    runs = []
    for its in (list(range(num_rows)), order, list(range(num_rows))):
        kernel, _ = samplers("cuda", 128_256, params)
        for _ in range(3):
            slots = torch.tensor(its, device="cuda")
            drawn = kernel.sample(logits[its], slots, its).token_ids.tolist()
        runs.append([token for _, token in sorted(zip(its, drawn, strict=True))])
    alone, _ = samplers("cuda", 128_256, params)
    one_by_one = []
    for slot in range(num_rows):
        for _ in range(3):
            its = alone.sample(logits[slot : slot + 1], torch.tensor([slot], device="cuda"), [slot])
        one_by_one.append(int(its.token_ids))
    assert runs[0] == runs[1] == runs[2] == one_by_one
