"""A small real model, and its tokens with transformers' own cache: the reference of all tests.

Each test runs twice: with keys and values in the model's dtype, and in FP8. The reference for FP8
is transformers' cache with numbers that torch has rounded.

The weights come from a package (see `examples/real_model.py`); without it all tests are skipped.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import transformers

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
torch.set_num_threads(1)

SCRIPT = Path(__file__).parents[2] / "examples" / "real_model.py"
#: Smallest difference of the two highest logits. Float32 logits have errors of 1e-4 or so. FP8
#: rounding makes larger differences, which depend on the processor's order of summation.
_MARGIN_MIN = {"auto": 0.01, "fp8": 0.1}
#: The first has an answer of one sentence. In FP8 so small a model is sure of other answers: these
#: have twice the margin with each of PyTorch's instruction sets (`ATEN_CPU_CAPABILITY`).
QUESTIONS = {
    "auto": (
        "What is the capital of France?",
        "Tell me a story about a lighthouse.",
        "Why is the sky blue?",
        "Explain what a cache is in one sentence.",
    ),
    "fp8": (
        "Which city is the capital of Japan?",
        "Who was the first president of the United States?",
        "Which ocean is the largest?",
        "Count from one to ten.",
    ),
}


class RealModel:
    """A chat model in float32 on the CPU.

    Attributes:
        folder: Folder for `from_pretrained`.
        model: The model.
        tokenizer: Its tokenizer, with a chat template.
        kv_dtype: Dtype option of its cache.
    """

    def __init__(self, folder: Path):
        self.kv_dtype = "auto"
        self.folder = folder
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
        self.model = self.load()
        self._expected: dict[tuple[int, ...], list[int]] = {}

    def load(self, **changes: Any) -> Any:
        """Load another instance, with changes of the configuration."""
        load = transformers.AutoModelForCausalLM.from_pretrained
        return load(self.folder, dtype=torch.float32, **changes).eval()

    def storing(self, kv_dtype: str) -> RealModel:
        """The same model with another dtype of keys and values."""
        twin = copy.copy(self)
        twin.kv_dtype, twin._expected = kv_dtype, {}
        return twin

    @property
    def questions(self) -> Sequence[str]:
        """Questions with clear answers."""
        return QUESTIONS[self.kv_dtype]

    @property
    def stored_bytes(self) -> int:
        """Bytes of one stored number."""
        return 1 if self.kv_dtype == "fp8" else 4

    def reference_cache(self) -> transformers.DynamicCache:
        """Transformers' cache, which rounds to the stored dtype."""
        cache = transformers.DynamicCache(config=self.model.config)
        if self.kv_dtype == "fp8":
            for layer in cache.layers:
                layer.update = _rounding(layer.update)
        return cache

    def chat(self, question: str, *, system: str | None = None) -> list[int]:
        """Token ids of a conversation in the model's chat template."""
        messages = [{"role": "user", "content": question}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        ids: list[int] = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        return ids

    def generate(self, prompt: Sequence[int], cache: Any, num_tokens: int, **options: Any) -> Any:
        """`model.generate` for one prompt through `cache`."""
        ids = torch.tensor([list(prompt)])
        return self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=num_tokens,
            **{"do_sample": False, **options},
        )

    def expected(self, prompt: Sequence[int], num_tokens: int = 16) -> list[int]:
        """The greedy tokens after a prompt, alone and through `reference_cache`.

        The two highest logits must differ by more than another order of summation could change.
        """
        known = self._expected.get(tuple(prompt), [])
        if len(known) < num_tokens and self.tokenizer.eos_token_id not in known:
            cache = self.reference_cache()
            output = self.generate(
                prompt, cache, num_tokens, output_logits=True, return_dict_in_generate=True
            )
            likeliest = torch.cat(output.logits).topk(2).values
            least = _MARGIN_MIN[self.kv_dtype]
            assert (likeliest[:, 0] - likeliest[:, 1]).min() > least, "take another prompt"
            known = output.sequences[0, len(prompt) :].tolist()
            self._expected[tuple(prompt)] = known
        return known[:num_tokens]

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special tokens."""
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text


def _rounding(update: Callable[..., Any]) -> Callable[..., Any]:
    def rounded(keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        both = (
            each.clamp(-448, 448).to(torch.float8_e4m3fn).to(each.dtype) for each in (keys, values)
        )
        return update(*both, *args, **kwargs)

    return rounded


@pytest.fixture(scope="session", params=["auto", "fp8"])
def real(request: pytest.FixtureRequest, loaded: RealModel) -> RealModel:
    """The model, with keys and values in its dtype or in FP8."""
    return loaded.storing(request.param)


@pytest.fixture(scope="session")
def loaded() -> RealModel:
    """The model, or a skip with the package to install."""
    made = subprocess.run(
        [sys.executable, SCRIPT], capture_output=True, text=True, timeout=280, check=False
    )
    if made.returncode:
        reason = made.stderr.strip().splitlines()[-1]
        if not reason.startswith("no real model"):
            pytest.fail(made.stderr)
        pytest.skip(reason)
    return RealModel(Path(made.stdout.strip()))


@pytest.fixture(scope="session")
def prompts(real: RealModel) -> list[list[int]]:
    """Questions whose answers end early and late, in a chat."""
    return [real.chat(question) for question in real.questions]
