"""Scores of lm-eval over the server and over the model itself; a measurement by guidellm."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.client_cases import MODEL

pytestmark = pytest.mark.clients
NUM_QUESTIONS = 200
#: The most by which log-likelihoods may differ; both sides compute in float32.
TOLERANCE = 1e-3


def questions() -> Iterator[dict[str, Any]]:
    """Sums, sequences and opposites, each with four choices, of which one is right."""
    rng = random.Random(0)
    opposites = ["hot cold", "big small", "up down", "old new", "open closed", "rich poor"]
    opposites += ["early late", "full empty", "hard soft", "light dark", "fast slow", "wet dry"]
    words = [each.split() for each in opposites]
    for at in range(NUM_QUESTIONS):
        first, second = rng.randrange(2, 60), rng.randrange(2, 40)
        kind = at % 3
        if kind == 0:
            text, right = f"{first} plus {second} is", first + second
        elif kind == 1:
            text = f"Count on: {first}, {first + second}, {first + second * 2},"
            right = first + second * 3
        else:
            word, opposite = rng.choice(words)
            text = f"The opposite of {word} is"
            wrong = rng.sample([each for _, each in words if each != opposite], 3)
            choices = [opposite, *wrong]
        if kind < 2:
            choices = [str(right + each) for each in (0, *rng.sample([-11, -2, 1, 3, 10], 3))]
        gold, *_ = order = rng.sample(range(4), 4)
        shuffled = [choices[order.index(each)] for each in range(4)]
        yield {"question": text, "choices": shuffled, "gold": gold}


@pytest.fixture(scope="module")
def task() -> Any:
    pytest.importorskip("lm_eval")
    import datasets
    from lm_eval.api.task import ConfigurableTask

    return ConfigurableTask(
        config={
            "task": "made_here",
            "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list([*questions()])},
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_choice": "choices",
            "doc_to_target": "gold",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        }
    )


def test_lm_eval_scores_as_over_the_model_itself(url: str, model_folder: str, task: Any) -> None:
    """The prompts' log-probabilities come from echoes."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    served = LocalCompletionsAPI(
        model=MODEL, base_url=f"{url}/v1/completions", tokenizer=model_folder, batch_size=16
    )
    own = HFLM(pretrained=model_folder, dtype="float32", device="cpu", batch_size=16)
    found = [
        lm_eval.simple_evaluate(model=each, tasks=[task], bootstrap_iters=0)
        for each in (served, own)
    ]
    accuracies = [each["results"]["made_here"] for each in found]
    assert accuracies[0]["acc,none"] == accuracies[1]["acc,none"]
    assert accuracies[0]["acc_norm,none"] == accuracies[1]["acc_norm,none"]
    assert 0.3 < accuracies[0]["acc,none"] < 1, "the questions tell models apart"
    likelihoods = [
        [pair for sample in each["samples"]["made_here"] for pair in sample["filtered_resps"]]
        for each in found
    ]
    assert 4 * NUM_QUESTIONS == len(likelihoods[0])
    for of_served, of_own in zip(*likelihoods, strict=True):
        assert of_own[0] == pytest.approx(of_served[0], abs=TOLERANCE)


def test_lm_eval_generates(url: str, model_folder: str) -> None:
    """With more stop strings than OpenAI permits."""
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    served = LocalCompletionsAPI(
        model=MODEL, base_url=f"{url}/v1/completions", tokenizer=model_folder
    )
    stops = ["\n", ".", "Question:", "</s>", "<|im_end|>", "§"]
    asked = ("The capital of France is", {"until": stops, "max_gen_toks": 12, "temperature": 0})
    [text] = served.generate_until([Instance("generate_until", {}, asked, 0)])
    assert "Paris" in text
    assert "\n" not in text


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_guidellm(url: str, model_folder: str, tmp_path: Path, route: str) -> None:
    pytest.importorskip("guidellm")
    report = tmp_path / "report.json"
    command = [Path(sys.executable).with_name("guidellm"), "run", "--disable-console"]
    command += ["--backend", f"kind=openai_http,target={url},request_format={route}"]
    command += ["--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=3"]
    command += ["--tokenizer", f"kind=hf_auto,model={model_folder}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"]
    command += ["--output", f"kind=json,path={report}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stdout + done.stderr
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    # The last one is dropped if the others have ended when it begins.
    assert totals["successful"] >= 2, totals
    assert 0 == totals["errored"], totals
