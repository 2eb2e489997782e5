"""Try each causal family of transformers with a tiny model, in every interface of vmkv.

    make models      # writes vmkv/hf/MODELS.md, which `test_families.py` keeps current

A family is served if every prompt gets the tokens of `model.generate` alone, and refused if vmkv
raises its own error. Everything else is an error.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import vmkv
from vmkv.hf.configuration import UnservableError
from vmkv.serve.runner import RunnerOptions
from vmkv.units import MiB

from . import families
from .tiny_models import redraw_weights

TABLE = Path(vmkv.__file__).parent / "hf" / "MODELS.md"
SERVED, NOT_TRIED = "served", "not tried"
NEW_TOKENS = 5
BUDGET_BYTES = 64 * MiB
#: Prompts of one token, of a few, and of more than a window.
LENGTHS = (20, 1, 5)
_PROLOGUE = """\
# Which models are served

Made by `make models` with transformers {version}: of each causal language model that it has, a
tiny one with random weights, three prompts, and the tokens that `model.generate` gives each of them
alone. *Served* is the same tokens; *refused* is an error that says why before anything runs, and
what to use instead. Some are not tried. vmkv tests each model when it is first used, and this list
decides nothing: see Note [A model proves itself] in [DESIGN.md](DESIGN.md).

Some families are listed in several configurations. Gemma 4 is served with layers that read another
layer's keys and values (`num_kv_shared_layers` above 0 in its `config.json`: E2B, E4B) and without,
with keys as values and with experts. Qwen3-VL is
served for text prompts, loaded by `AutoModelForImageTextToText`, as `vmkv serve` loads it.

Models whose layers keep states (linear attention, state spaces, short convolutions: Qwen3-Next,
Qwen3.5, Granite 4, Nemotron-H, LFM2, …) are served with captured steps for decoding only.

{counts}

| family | `VMKVCache` | `vmkv.generate` | `Engine` | why not |
| --- | --- | --- | --- | --- |
"""


class Verdict(NamedTuple):
    """The outcome for a family.

    Attributes:
        cache: Of `model.generate(..., past_key_values=VMKVCache(config))`: served, refused or
            not tried.
        generate: Of `vmkv.generate`, likewise.
        engine: Of `Engine`, likewise.
        why_not: Reasons of refusals.
        instead: Alternatives that the errors propose; empty without errors.
    """

    cache: str
    generate: str
    engine: str
    why_not: str
    instead: str = ""

    def row(self, family: str) -> str:
        """The family's row of the table."""
        return f"| {family} | {self.cache} | {self.generate} | {self.engine} | {self.why_not} |\n"


def model_of(family: str) -> Any:
    """A tiny model of the family, in float32, whose tokens depend on the whole prompt.

    Raises:
        ValueError: Transformers cannot build it.
    """
    config = families.tiny_config(family)
    torch.manual_seed(0)
    is_causal = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    auto = AutoModelForCausalLM if is_causal else AutoModelForImageTextToText
    model = auto.from_config(config).eval().float()
    redraw_weights(model, 0)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def model_or_skip(family: str) -> Any:
    """Return `model_of` a family, or skip the test if this release does not have it."""
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip("this release of transformers does not have it")
    return model_of(family)


def verdict(family: str, model: Any = None) -> Verdict:
    """Try a family with `model`, by default a new one.

    Raises:
        AssertionError: It got wrong tokens, or an error that is not vmkv's.
    """
    if family in families.UNBUILDABLE:
        return Verdict(NOT_TRIED, NOT_TRIED, NOT_TRIED, families.UNBUILDABLE[family])
    model = model_of(family) if model is None else model
    prompts = _prompts()
    try:
        expected = [_alone(model, prompt) for prompt in prompts]
    except AttributeError as error:
        return Verdict(NOT_TRIED, NOT_TRIED, NOT_TRIED, f"model.generate fails: {error}")
    cache, why_no_cache = _try(lambda: _through_cache(model, prompts), expected, Exception)
    refused = vmkv.ConfigError
    generate, why_no_generate = _try(lambda: _generate(model, prompts), expected, refused)
    engine, why_no_engine = _try(lambda: _serve(model, prompts), expected, refused)
    errors = {id(each): each for each in (why_no_generate, why_no_engine) if each is not None}
    reasons = [] if why_no_cache is None else [f"{_reason(why_no_cache)} (`VMKVCache`)"]
    reasons += dict.fromkeys(_reason(each) for each in errors.values())
    instead = {str(each).rpartition("; ")[2] for each in errors.values()}
    return Verdict(cache, generate, engine, "; ".join(reasons), " ".join(instead))


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randint(3, families.VOCABULARY, (length,), generator=generator).tolist()
        for length in LENGTHS
    ]


def _alone(model: Any, prompt: list[int], times: int = 1, **options: Any) -> list[int]:
    """Tokens for a prompt, from a batch that holds it so many times."""
    ids = torch.tensor([prompt] * times)
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **options}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[-1].tolist()


def _through_cache(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Tokens alone; those of a batch must be as without our cache."""
    said = []
    batch = _alone(model, prompts[0], 2)
    for prompt, times in [*((each, 1) for each in prompts), (prompts[0], 2)]:
        with vmkv.VMKVCache(model.config, budget_bytes=BUDGET_BYTES) as cache:
            # Some configurations set `use_cache=False` and then use a cache wrongly.
            said.append(_alone(model, prompt, times, past_key_values=cache, use_cache=True))
    assert batch == said.pop(), "other tokens than model.generate's in a batch"
    return said


def _generate(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    return vmkv.generate(model, prompts, budget_bytes=BUDGET_BYTES, **options)


def _serve(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Use the runner for GPUs: `generate` has tried eager steps."""
    params = vmkv.SamplingParams(temperature=0, max_tokens=NEW_TOKENS)
    with vmkv.Engine(
        model,
        max_num_seqs=4,
        budget_bytes=BUDGET_BYTES,
        runner="graphs",
        runner_options=RunnerOptions(show_progress=False),
    ) as engine:
        outputs = engine.generate(prompts, params)
    return [
        [*prompt, *output.outputs[0].token_ids]
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def _try(
    serve: Callable[[], list[list[int]]],
    expected: list[list[int]],
    refusals: type[Exception],
) -> tuple[str, Exception | None]:
    try:
        said = serve()
    except refusals as error:
        return "refused", error
    assert expected == said, "other tokens than model.generate's, without an error"
    return SERVED, None


def _reason(error: Exception) -> str:
    """The reason, without details that depend on the machine or on torch."""
    if isinstance(error, UnservableError):
        return error.why.partition(" (")[0]
    if isinstance(error, vmkv.ConfigError):
        return str(error)
    return "transformers hands it no cache, or cannot use another's"


def table() -> str:
    """Make the text of MODELS.md by trying all families. Takes half a minute."""
    rows, tried = [], []
    for family in families.surveyed():
        tried.append(verdict(family))
        rows.append(tried[-1].row(family))
    return prologue(tried) + "".join(rows)


def prologue(tried: list[Verdict]) -> str:
    """The text above the rows."""
    columns = {
        "`VMKVCache`": [each.cache for each in tried],
        "`vmkv.generate`": [each.generate for each in tried],
        "`Engine`": [each.engine for each in tried],
    }
    counts = "\n".join(
        f"- {name}: {column.count(SERVED)} served, {column.count('refused')} refused, "
        f"{column.count(NOT_TRIED)} not tried, of {len(tried)}"
        for name, column in columns.items()
    )
    return _PROLOGUE.format(version=transformers.__version__, counts=counts)


def main() -> None:
    """Write MODELS.md."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    TABLE.write_text(table())
    print(TABLE)


if __name__ == "__main__":
    main()
