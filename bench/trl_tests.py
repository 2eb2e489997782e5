"""Do TRL's own tests of GRPO and RLOO pass with vmkv's rollouts?

    python bench/trl_tests.py CHECKOUT --revision COMMIT -n 2    # more options are pytest's

It needs the extras `trl` and `dev`, and jmespath.

Question. Each test of `tests/test_grpo_trainer.py` and `tests/test_rloo_trainer.py` of a checkout
of TRL, with `VMKVGRPOTrainer` and `VMKVRLOOTrainer` in place of TRL's trainers: does it pass, and
does it pass with TRL's own?

Prediction. Whatever passes with TRL's own passes with ours, but for what ours refuses in words.

Method. The tests are run unchanged, once with each kind of trainers, against the installed TRL.
They name models and data sets of the hub: these are folders below the working directory, with the
shapes of TRL's tiny models, random weights, a byte-level tokenizer of 16,384 entries with TRL's own
chat templates, and the Zen of Python as prompts: 17 lines for tests that count steps, else 3. Three
tests call a trainer that was made without its constructor; they get an engine that is never opened.
A test is refused where it ends with vmkv's `ConfigError`, which says what cannot be had. Tests that
cannot run so are not run, with a reason each.

Not measured. What needs an accelerator, vLLM, Liger's kernels or a processor of images. TRL's
source distribution has no tests. Where the checkout is of another revision than the installed TRL,
some tests expect what the installed one does not do, and fail with TRL's own trainers, too.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import importlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, Figure, Row, make_record, print_figures, print_rows, write_result

_KIND = "VMKV_TRL_TESTS"
VOCAB_SIZE = 16384
#: Rows for training in the data sets of two folders: what the hub's has, for tests that count
#: steps, and fewer, for the others.
NUM_ROWS = {"all_rows": 17, "few_rows": 3}
#: Words of each line of the Zen of Python that are prompts of TRL's data set; where no test tells
#: them, three.
ZEN_WORDS = (4, 2, 3, 1, 4, 3, 1, 4, 3, 3, 2, 6, *[3] * 7)
_COUNTS_STEPS = "prepare_input_called"
MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
#: Tests that are not run: a part of the name, and the reason.
NOT_RUN = {
    r"VLM|vlm|multimodal": "images, which vmkv's rollouts refuse in words",
    r"with_tools\[|environment_factory|multiple_environments$|environment_owned_reward$"
    r"|environment_owned_data$|malformed_tool_calls|mask_truncated_completions$": (
        "puts a mock with token ids of a real tokenizer in place of model.generate, which vmkv's "
        "rollouts do not call"
    ),
}

# ---- a plugin of pytest: other trainers, and what is not run -----------------------------------


def pytest_configure() -> None:
    """Put our trainers in the place of TRL's, before tests import them."""
    looks: Any = importlib.import_module("trl.import_utils")
    # Tests of another release ask for it, to skip others than these.
    if not hasattr(looks, "is_joblib_available"):
        looks.is_joblib_available = lambda: False
    if os.environ.get(_KIND) != "ours":
        return
    import trl

    from vmkv.trl import RolloutMixin, Rollouts, VMKVGRPOTrainer, VMKVRLOOTrainer

    RolloutMixin.rollouts = Rollouts()  # For trainers that are made without their constructor.
    trl.GRPOTrainer, trl.RLOOTrainer = VMKVGRPOTrainer, VMKVRLOOTrainer


@pytest.fixture(autouse=True)
def hub(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work where relative paths are the names of the hub."""
    name = "all_rows" if _COUNTS_STEPS in request.node.name else "few_rows"
    monkeypatch.chdir(Path(os.environ["HF_HOME"]).parent / name)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Leave out what cannot run."""
    for item in items:
        for pattern, reason in NOT_RUN.items():
            if re.search(pattern, item.nodeid):
                item.add_marker(pytest.mark.skip(reason=reason))


# ---- models and data ----------------------------------------------------------------------------


def make_hub(folder: Path, checkout: Path) -> None:
    """Folders by the names that tests use, which `from_pretrained` and `load_dataset` read."""
    import torch
    import transformers as hf

    common: Row = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 8,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "bos_token_id": None,
        "pad_token_id": 0,
        "eos_token_id": 2,
    }
    two_of_four = {"num_experts_per_tok": 2}
    gpt_oss = {"num_local_experts": 4}
    glm = {"moe_intermediate_size": 32, "head_dim": 2, "n_routed_experts": 4, "use_qk_norm": True}
    nemotron = {
        "hidden_size": 16,
        "layers_block_type": ["mamba", "attention", "moe"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 4,
        "mamba_n_groups": 1,
        "ssm_state_size": 16,
        "mamba_expand": 2,
        "n_routed_experts": 4,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "use_mamba_kernels": False,
    }
    nemotron |= two_of_four
    judge = {"num_labels": 1}
    #: Name, class, template, and what differs.
    models: list[tuple[str, str, str, Row]] = [
        ("Cohere2ForCausalLM", "Cohere2ForCausalLM", "cohere2", {"logit_scale": 1.0}),
        ("Glm4MoeForCausalLM", "Glm4MoeForCausalLM", "glm4moe", glm | two_of_four),
        (
            "GptOssForCausalLM",
            "GptOssForCausalLM",
            "gptoss",
            gpt_oss | two_of_four,
        ),
        ("Qwen2ForCausalLM-2.5", "Qwen2ForCausalLM", "qwen2_5", {}),
        ("Qwen3ForCausalLM", "Qwen3ForCausalLM", "qwen3", {"head_dim": 128}),
        ("Qwen3MoeForCausalLM", "Qwen3MoeForCausalLM", "qwen3", {"num_experts": 4} | two_of_four),
        ("NemotronHForCausalLM-nano", "NemotronHForCausalLM", "nemotron_3_nano", nemotron),
        ("LlamaForCausalLM-3.2", "LlamaForCausalLM", "llama3_2", {}),
        ("MistralForCausalLM-0.2", "MistralForCausalLM", "qwen2_5", {}),
        ("Gemma2ForCausalLM", "Gemma2ForCausalLM", "gemma", {"head_dim": 2}),
        ("Qwen2ForSequenceClassification-2.5", "Qwen2ForSequenceClassification", "qwen2_5", judge),
        ("Qwen3ForSequenceClassification", "Qwen3ForSequenceClassification", "qwen3", judge),
        (
            "LlamaForSequenceClassification-3.2",
            "LlamaForSequenceClassification",
            "llama3_2",
            judge,
        ),
        ("RemoteForCausalLM", "LlamaForCausalLM", "qwen2_5", {}),
    ]
    for name, kind, template, changes in models:
        torch.manual_seed(0)
        into = folder / "models" / f"tiny-{name}"
        model_class = getattr(hf, kind)
        model = model_class(model_class.config_class(**common | changes)).to(torch.bfloat16)
        model.save_pretrained(into)
        tokenizer_of(template).save_pretrained(into)
        if name.startswith("Remote"):
            for path in checkout.glob("scripts/**/_remote_code/*_remote.py"):
                shutil.copy(path, into)
            config = json.loads((into / "config.json").read_text())
            config |= {"model_type": "remote", "architectures": ["RemoteForCausalLM"]}
            config["auto_map"] = {
                "AutoConfig": "configuration_remote.RemoteConfig",
                "AutoModelForCausalLM": "modeling_remote.RemoteForCausalLM",
            }
            (into / "config.json").write_text(json.dumps(config))
    for name, num_rows in NUM_ROWS.items():
        owner = folder / name / "trl-internal-testing"
        make_data(owner / "zen", num_rows)
        for path in (folder / "models").iterdir():
            (owner / path.name).symlink_to(path)


def tokenizer_of(template: str) -> Any:
    """A token for each byte, and others that no text has."""
    import transformers
    import trl
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = [*MARKS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"a{at}" for at in range(len(words), VOCAB_SIZE)]
    inner = Tokenizer(models.BPE({word: at for at, word in enumerate(words)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(list(MARKS))
    path = Path(str(trl.__file__)).parent / "chat_templates" / f"{template}.jinja"
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token=MARKS[0],
        eos_token=MARKS[2],
        chat_template=path.read_text(),
    )


def make_data(into: Path, num_rows: int) -> None:
    """Prompts as text and as chats, and two more to evaluate."""
    with contextlib.redirect_stdout(io.StringIO()):
        zen = codecs.decode(importlib.import_module("this").s, "rot13").splitlines()[2:]
    prompts = [
        " ".join(line.split()[:size]).rstrip(".") for line, size in zip(zen, ZEN_WORDS, strict=True)
    ]
    lines = ["---", "configs:"]
    for name in ("standard_prompt_only", "conversational_prompt_only"):
        lines += [f"- config_name: {name}", "  data_files:"]
        for split, texts in (("train", prompts[:num_rows]), ("test", prompts[-2:])):
            # Data sets are kept by the names of their files.
            path = into / name / f"{split}-{num_rows}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            chats = [[{"role": "user", "content": f"What {each}?"}] for each in texts]
            rows = texts if name.startswith("standard") else chats
            path.write_text("".join(json.dumps({"prompt": each}) + "\n" for each in rows))
            lines += [f"  - split: {split}", f"    path: {name}/{path.name}"]
    (into / "README.md").write_text("\n".join([*lines, "---", ""]))


# ---- runs ---------------------------------------------------------------------------------------


def run(kind: str, hub: Path, told: list[str], tests: list[str]) -> dict[str, tuple[str, str]]:
    """Outcome and reason of each test, by its pytest name."""
    report, checkout = hub / f"{kind}.xml", Path(tests[0].partition("/tests/")[0])
    paths = (str(ROOT), str(ROOT / "bench"), str(checkout), os.environ.get("PYTHONPATH", ""))
    environment = os.environ | {
        _KIND: kind,
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(hub / "home"),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "trl_tests", "-W", "ignore"]
    command += ["--rootdir", str(checkout), "-c", os.devnull, f"--junitxml={report}", "--tb=short"]
    command += ["-p", "no:cacheprovider", "--timeout", "600", *told, *tests]
    subprocess.run(command, cwd=hub, env=environment, check=False)
    return outcomes(report)


def outcomes(report: Path) -> dict[str, tuple[str, str]]:
    """Read what pytest reports."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        module, _, owner = case.get("classname", "").rpartition(".")
        outcome, reason = "passed", ""
        for child in case:
            if child.tag in ("failure", "error"):
                outcome, reason = "failed", child.get("message", "")
            elif child.tag == "skipped":
                outcome, reason = "not run", child.get("message", "")
        if reason.startswith("vmkv.errors.ConfigError"):
            outcome = "refused"
        name = f"{module.replace('.', '/')}.py::{owner}::{case.get('name')}"
        found[name] = (outcome, reason.partition("\n")[0][:300])
    return found


def main() -> int:
    """Run with both kinds; compare, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="a checkout of TRL, with its tests")
    parser.add_argument("--revision", default="", help="of the checkout, for the record")
    parser.add_argument("--json", type=Path, help="where to write the record")
    options, told = parser.parse_known_args()
    root = options.checkout.resolve()
    files = [f"{root}/tests/test_{each}_trainer.py" for each in ("grpo", "rloo")]
    with tempfile.TemporaryDirectory() as folder:
        hub = Path(folder)
        make_hub(hub, root)
        ours, theirs = (run(kind, hub, told, files) for kind in ("ours", "theirs"))
    rows = [
        {
            "test": name.removeprefix("tests/test_"),
            "vmkv": outcome,
            "trl": theirs[name][0],
            "reason": reason or theirs[name][1],
        }
        for name, (outcome, reason) in sorted(ours.items())
    ]
    of_ours = Counter(row["vmkv"] for row in rows)
    of_both = Counter((row["vmkv"], row["trl"]) for row in rows)
    num_run = len(rows) - of_ours["not run"]
    figures = [
        Figure(
            "trl_tests_worse",
            "tests of TRL that pass with its own trainers, and with ours neither pass nor are "
            "refused in words",
            of_both["failed", "passed"],
            "",
            at_most=0,
        ),
        Figure(
            "trl_tests_passed",
            f"of {num_run} tests of TRL that are run pass",
            of_ours["passed"],
            "",
            rival=f"TRL's own trainers {sum(row['trl'] == 'passed' for row in rows)}",
        ),
        Figure("trl_tests_refused", "are refused in words", of_ours["refused"], ""),
        Figure(
            "trl_tests_fail_with_both", "fail with TRL's own, too", of_both["failed", "failed"], ""
        ),
        Figure("trl_tests_not_run", "are not run", of_ours["not run"], ""),
    ]
    print_rows([row for row in rows if row["vmkv"] in ("failed", "refused")])
    print_figures(figures)
    versions = {name: metadata.version(name) for name in ("trl", "peft", "accelerate", "datasets")}
    constants = {"tests_of_trl_at": options.revision, **versions}
    record = make_record(str(__doc__), rows, figures, constants)
    print("wrote", write_result("trl_tests", record, options.json))
    return 0


if __name__ == "__main__":
    sys.exit(main())
