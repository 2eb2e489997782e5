"""How long is a step of GRPO, and what memory does it take, by who generates?

Question. TRL trains a model with GRPO: completions are generated, scored, and trained on. How long
is a step with rollouts by vmkv's engine, against TRL's own ways to generate? How much memory does
it take at most, and how much does the engine hold while the model is trained?

Prediction. The 1B shape, 512 completions of 512 tokens, on an H200. Training costs the same in all
ways: 330,000 tokens of 1.24e9 weights, forward twice because of checkpointing, and backward: 3.3e15
operations, 8 s at 400 TFLOP/s. A decode step of 512 sequences reads 5 GB of float32 weights, writes
and reads 5 GB in bfloat16, and reads 7 GB of keys and values: 7 ms with launches out of the way,
4 s for 512 steps. Plain generate launches some 600 kernels a step from Python, 25 ms: 13 s, and 4 s
more for copying the cache. Correction by importance sampling is a forward pass, 2 s, that plain
generate does not need. So 14 s against 25 s: 0.56. With 8B and LoRA, 128 completions: training 10
s, correction 3 s, decoding 512 × 8 ms against 512 × 40 ms: 17 s against 30 s: 0.57. The engine
holds a row of padding, captured steps (some 300 MiB for sizes up to 512) and 50 MiB of loaded
kernels.

Method. `GRPOTrainer` of TRL with the defaults of its configuration, but for the sizes: checkpointed
gradients, autocast to bfloat16, AdamW (fused), dapo loss, temperature 1. 1B: Llama-3.2-1B's shape,
weights in float32, all trained, 64 prompts x 8 samples, 16 for each backward pass. 8B: Llama-3-8B's
shape, weights in bfloat16, LoRA of rank 16 on all linear layers, 16 prompts x 8 samples, 16 for
each backward pass. Random weights, prompts of 64 to 192 random tokens, the same for all; no token
ends a completion, so that each has all new tokens. The reward counts token ids. Each way is a
process of its own. A step is the time from one update of the weights to the next: generation
(handing weights over included), scoring (log-probabilities for the correction, rewards) and
training; medians after one step of warm-up. A way begins no step that its time limit would cut;
where no second step fits, `steps` is 0 and the first one counts. cuDNN's attention is switched off
in all ways, as vLLM does when it is imported: with it, gradients of these padded batches were NaN
on an H100 (torch 2.11); a way whose gradients are not finite has failed. Memory: what the driver
says is in use, polled every 20 ms, and torch's reserve at most. What a way holds while the model is
trained: free memory before the first generation, after a short pass forward and backward, and after
that generation; torch's idle memory is given back both times. The engine's captured steps are given
back once, after the last step, to see their size.

Rivals. TRL's generation by `model.generate`, by transformers' continuous batching
(`use_transformers_continuous_batching`; TRL turns the weights into bfloat16 for good then), and by
vLLM in the same process, asleep while the model is trained, where vLLM can be imported
(`--vllm-path` names its folders): once for each `--vllm-memory`, of which the smallest within 5 %
of the best time counts. `vmkv_uncorrected` is ours without the correction; `vmkv_recaptured` gives
captured steps back after each rollout.

Not measured. Tools, several turns, several ranks, completions of different lengths.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from harness import HAS_GPU, VLLM_ENVIRONMENT, Bench, Figure, Row, on_gpu, quartiles, synchronize
from models import SEED, free_device_bytes, llama_config, make_model, reserved_bytes, reset_memory

from vmkv.units import MiB

PLAIN, BATCHED, VLLM, OURS = "generate", "continuous_batching", "vllm", "vmkv"
WAYS = (PLAIN, BATCHED, VLLM, OURS, "vmkv_uncorrected", "vmkv_recaptured")
WARMUP = 1
PROMPT_TOKENS = (64, 192)
POLL_S = 0.02
#: Time that a way has to end by itself, once its limit has passed; lines of its log that are shown.
GRACE_S = 10.0
LOG_LINES = 60
#: Most time of each way against the fastest rival.
BOUNDS = {"1b": 0.9, "8b": 1.0}
SHAPE_1B = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Plan:
    """What one process measures, until when (`time.time`), and the file for its row."""

    way: str
    shape: str
    num_prompts: int
    num_samples: int
    new_tokens: int
    batch: int
    steps: int
    vllm_memory: float
    smoke: bool
    ends_s: float
    row: str


# ---- one way, in its process --------------------------------------------------------------------


class Watch:
    """Times of the parts of each step, and the driver's memory in use at most in each."""

    def __init__(self) -> None:
        self.parts: list[dict[str, float]] = []
        self.held_bytes = 0
        self._peaks, self._part = {"training": 0}, "training"
        self._now: dict[str, float] = {}
        self._start_s = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._poll)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()

    def _poll(self) -> None:
        while HAS_GPU and not self._ended.wait(POLL_S):
            free_bytes, all_bytes = torch.cuda.mem_get_info()
            part = self._part
            self._peaks[part] = max(self._peaks.get(part, 0), all_bytes - free_bytes)

    def peaks(self) -> Row:
        """Memory in use at most, in all and in each part; that of scoring is `rollout`'s."""
        its = {f"{name}_peak_bytes": peak for name, peak in self._peaks.copy().items()}
        return {"peak_bytes": max(its.values()), **its}

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add to a part of the step, waiting for the device at both ends."""
        synchronize()
        start_s, outer, self._part = time.perf_counter(), self._part, name
        yield
        synchronize()
        self._part = outer
        self._now[name] = self._now.get(name, 0.0) + time.perf_counter() - start_s

    def next_step(self) -> None:
        """End a step, if one was begun, and begin another."""
        synchronize()
        now_s = time.perf_counter()
        if self._now:
            self.parts.append({**self._now, "step": now_s - self._start_s})
        self._now, self._start_s = {}, now_s


def watched(kind: Any, watch: Watch, new_tokens: int) -> Any:
    """The trainer's class, whose generation and scoring are timed."""

    class Watched(kind):
        def _generate(self, *args: Any) -> Any:
            is_first = not watch.parts
            if is_first:
                self._load_kernels()
                reset_memory()
                before_bytes = free_device_bytes()
            with watch.part("generation"):
                found = super()._generate(*args)
            if is_first:
                reset_memory()
                watch.held_bytes = before_bytes - free_device_bytes()
            assert {len(each) for each in found[1]} == {new_tokens}
            return found

        def _load_kernels(self) -> None:
            """Train in vain, so that training's own handles and modules are there."""
            ids = torch.ones((1, 64), dtype=torch.long, device=self.accelerator.device)
            with self.accelerator.autocast():
                self.model(input_ids=ids, labels=ids).loss.backward()
            self.model.zero_grad(set_to_none=True)

        def _generate_and_score_completions(self, *args: Any) -> Any:
            with watch.part("rollout"):
                return super()._generate_and_score_completions(*args)

    return Watched


def tokenizer_of(size: int) -> Any:
    """A tokenizer with a word for each entry."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "</s>": 1, **{f"t{at}": at for at in range(2, size)}}
    inner = Tokenizer(models.WordLevel(words, "<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="</s>", padding_side="left"
    )


def prompts_of(plan: Plan, vocab_size: int) -> list[str]:
    """Texts of random tokens; enough for all steps."""
    draw = random.Random(SEED)
    lengths = (4, 12) if plan.smoke else PROMPT_TOKENS
    return [
        " ".join(f"t{draw.randrange(2, vocab_size)}" for _ in range(draw.randint(*lengths)))
        for _ in range(plan.num_prompts * (plan.steps + WARMUP))
    ]


def share_of_low_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward without a model."""
    middle = max(map(max, completion_ids)) / 2
    return [sum(each < middle for each in ids) / len(ids) for ids in completion_ids]


def configuration(plan: Plan, folder: str) -> Any:
    """TRL's configuration; what is not named is its default."""
    from trl import GRPOConfig

    completions = plan.num_prompts * plan.num_samples
    pages = {"num_blocks": 16, "max_batch_tokens": 64} if plan.smoke else None
    ways: dict[str, Row] = {
        BATCHED: {
            "use_transformers_continuous_batching": True,
            "transformers_continuous_batching_config": pages,
        },
        "vmkv_uncorrected": {"vllm_importance_sampling_correction": False},
        VLLM: {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_enable_sleep_mode": True,
            "vllm_gpu_memory_utilization": plan.vllm_memory,
            "vllm_max_model_length": PROMPT_TOKENS[1] + plan.new_tokens,
            "generation_kwargs": {"ignore_eos": True},
        },
    }
    return GRPOConfig(
        output_dir=folder,
        max_steps=plan.steps + WARMUP,
        per_device_train_batch_size=plan.batch,
        gradient_accumulation_steps=completions // plan.batch,
        num_generations=plan.num_samples,
        max_completion_length=plan.new_tokens,
        use_cpu=plan.smoke,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        seed=SEED,
        **ways.get(plan.way, {}),
    )


def measure(plan: Plan) -> Row:
    """Train in one way; the row of it."""
    if plan.way == VLLM and importlib.util.find_spec("vllm") is None:
        return {"skipped": "vLLM is not installed"}
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    torch.backends.cuda.enable_cudnn_sdp(enabled=False)
    is_ours, is_8b = plan.way.startswith(OURS), plan.shape == "8b"
    device = torch.device("cuda" if HAS_GPU and not plan.smoke else "cpu")
    shape = {} if plan.smoke or is_8b else SHAPE_1B
    config = llama_config(smoke=plan.smoke, **{"max_position_embeddings": 2048} | shape)
    config.bos_token_id, config.eos_token_id, config.pad_token_id = None, 1, 0
    model = make_model(config, device, torch.bfloat16 if is_8b else torch.float32)
    model.requires_grad_(requires_grad=True).train()
    tokenizer = tokenizer_of(config.vocab_size)
    kind, options = GRPOTrainer, {}
    if is_ours:
        from vmkv.trl import VMKVGRPOTrainer

        kind, options = VMKVGRPOTrainer, {"keep_graphs": plan.way != "vmkv_recaptured"}
    if is_8b:
        from peft import LoraConfig

        options["peft_config"] = LoraConfig(
            r=16, target_modules="all-linear", task_type="CAUSAL_LM"
        )
    row: Row = {}
    with tempfile.TemporaryDirectory() as folder, Watch() as watch:
        if plan.way == VLLM:  # Makes its own copy of the weights.
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            model.name_or_path = folder
        trainer = watched(kind, watch, plan.new_tokens)(
            model=model,
            reward_funcs=share_of_low_tokens,
            args=configuration(plan, folder),
            train_dataset=Dataset.from_dict({"prompt": prompts_of(plan, config.vocab_size)}),
            processing_class=tokenizer,
            **options,
        )
        trainer.eos_token_ids = []
        if plan.way in (PLAIN, BATCHED):
            trainer.generation_config.eos_token_id = None
            trainer.generation_kwargs["eos_token_id"] = None

        def look_at_engine(*args: Any) -> Any:
            found = generate(*args)
            pool = trainer.rollouts.engine.cache.pool
            row["pool_peak_bytes"] = max(row.get("pool_peak_bytes", 0), pool.stats().created_bytes)
            return found

        if is_ours:
            generate, trainer.rollouts.generate = trainer.rollouts.generate, look_at_engine

        class Steps(TrainerCallback):
            def on_train_begin(self, *_: Any, **__: Any) -> None:
                watch.next_step()

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                watch.next_step()
                row["torch_peak_bytes"] = reserved_bytes(peak=True)
                if time.time() + watch.parts[-1]["step"] > plan.ends_s:
                    control.should_training_stop = True
                Path(plan.row).write_text(json.dumps(row_of(plan, watch, row)))
                is_last = control.should_training_stop or state.global_step == args.max_steps
                if is_ours and HAS_GPU and is_last:
                    reset_memory()
                    before_bytes = free_device_bytes()
                    trainer.rollouts.engine.sleep(graphs=True)
                    reset_memory()
                    row["graphs_bytes"] = free_device_bytes() - before_bytes

        trainer.add_callback(Steps())
        trainer.train()
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    assert len(norms) == len(watch.parts)
    assert all(map(math.isfinite, norms)), f"norms of gradients: {norms}"
    return row_of(plan, watch, row)


def row_of(plan: Plan, watch: Watch, row: Row) -> Row:
    """Times of the steps so far, after that of warm-up if there are more."""
    timed = watch.parts[WARMUP:] or watch.parts
    seconds = {
        "step_s": [each["step"] for each in timed],
        "generation_s": [each["generation"] for each in timed],
        "scoring_s": [each["rollout"] - each["generation"] for each in timed],
        "training_s": [each["step"] - each["rollout"] for each in timed],
    }
    times: Row = {"steps": len(watch.parts) - WARMUP}
    for name, samples in seconds.items():
        times |= quartiles(name, samples)
    times["first_step_s"] = watch.parts[0]["step"]
    if not HAS_GPU or plan.smoke:
        return times
    return {**times, **watch.peaks(), **row, "held_bytes": watch.held_bytes}


# ---- all of them --------------------------------------------------------------------------------


def run(plan: Plan, name: str, vllm_path: str | None) -> Row:
    """Measure in a process of its own; a fault is a row in words, and its log is printed."""
    result = Path(plan.row)
    log = result.with_suffix(".log")
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "PYTHONFAULTHANDLER": "1"}
    if plan.way == VLLM:
        paths = (vllm_path, os.environ.get("PYTHONPATH"))
        environment |= {**VLLM_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, __file__, "--plan", json.dumps(asdict(plan))]
    command += ["--smoke"] * plan.smoke
    start_s = time.perf_counter()
    result.unlink(missing_ok=True)
    with log.open("w") as out:
        process = subprocess.Popen(
            command, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        is_late = False
        try:
            process.wait(plan.ends_s + GRACE_S - time.time())
        except subprocess.TimeoutExpired:
            is_late = True
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    row: Row = {"way": name, "shape": plan.shape}
    row |= json.loads(result.read_text()) if result.exists() else {}
    lines = log.read_text(errors="replace").splitlines()
    if is_late:  # What was measured before counts.
        row["stopped"] = f"in step {row.get('steps', -WARMUP) + WARMUP + 1}, by the time limit"
    elif process.returncode and "failed" not in row:
        row["failed"] = f"exit status {process.returncode}: {lines[-1][:200] if lines else ''}"
    if "step_s" not in row or "failed" in row:
        print(f"---- log of {name}", *lines[-LOG_LINES:], sep="\n", file=sys.stderr, flush=True)
    print(f"{name}: {time.perf_counter() - start_s:.0f} s, {row}", flush=True)
    return row


def measure_in_words(plan: Plan) -> None:
    """Measure, and write the row, with the cause of a fault."""
    result = Path(plan.row)
    try:
        row = measure(plan)
    except BaseException as error:
        before = json.loads(result.read_text()) if result.exists() else {}
        row = {**before, "failed": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
        raise
    finally:
        result.write_text(json.dumps(row))


def figures_of(rows: Sequence[Row], shape: str) -> list[Figure]:
    """Ours against the fastest rival, and what the engine holds."""
    done = {row["way"]: row for row in rows if "step_s" in row and "failed" not in row}
    figures: list[Figure] = []
    if OURS not in done:
        return figures
    ours = done[OURS]
    colocated = [row for name, row in done.items() if name.startswith(VLLM)]
    if colocated:
        best_s = min(row["step_s"] for row in colocated)
        near = [row for row in colocated if row["step_s"] <= 1.05 * best_s]
        colocated = [min(near, key=lambda row: row.get("peak_bytes", 0))]
    rivals = [done[name] for name in (PLAIN, BATCHED) if name in done] + colocated
    if rivals:
        rival = min(rivals, key=lambda row: row["step_s"])
        figures.append(
            Figure(
                f"rollout_{shape}_step",
                f"time of a GRPO step, {shape.upper()} shape, against the fastest rival",
                ours["step_s"] / rival["step_s"],
                "×",
                at_most=on_gpu(BOUNDS[shape]),
                rival=f"{rival['way']} {rival['step_s']:.3g} s"
                + ("" if rival["steps"] else ", its first step"),
            )
        )
    if "held_bytes" not in ours:
        return figures
    held = {"graphs kept": ours["held_bytes"]}
    held["graphs given back"] = ours["held_bytes"] - ours.get("graphs_bytes", 0)
    for (what, held_bytes), name, bound in zip(
        held.items(), ("kept", "given_back"), (512, 64), strict=True
    ):
        figures.append(
            Figure(
                f"rollout_{shape}_held_{name}_mib",
                f"device memory that the engine holds while the model is trained, {what}",
                held_bytes / MiB,
                "MiB",
                at_most=bound,
            )
        )
    for rival in rivals:
        figures.append(
            Figure(
                f"rollout_{shape}_peak_{rival['way'].split()[0]}",
                f"peak memory of the device, against {rival['way']}",
                ours["peak_bytes"] / rival["peak_bytes"],
                "×",
                at_most=0.75 if rival["way"].startswith(VLLM) else None,
            )
        )
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write."""
    bench = Bench("rollout", __doc__, needs_gpu=True)
    bench.option("--shape", choices=sorted(BOUNDS), default="1b")
    bench.option("--ways", nargs="+", choices=WAYS, default=list(WAYS[:4]))
    bench.option("--steps", type=int, default=3, help="timed, after one of warm-up")
    bench.option("--prompts", type=int, help="64, or 16 for the 8B shape; 8 samples of each")
    bench.option("--new-tokens", type=int, default=512)
    bench.option("--batch", type=int, default=16, help="completions of a backward pass")
    bench.option("--limit-s", type=float, default=240.0, help="for each way, its start included")
    bench.option("--total-s", type=float, help="for all ways; those without time are left out")
    bench.option("--after", type=Path, help="record of the same sizes: its other ways are kept")
    bench.option("--logs", type=Path, help="folder for the whole log of each way")
    bench.option("--vllm-memory", type=float, nargs="+", default=[0.3], help="shares of the device")
    bench.option("--vllm-path", help="folders with vLLM, as of PYTHONPATH")
    bench.option("--plan", help="run one way in this process: a JSON object")
    options = bench.parse(argv)
    if options.plan:
        measure_in_words(Plan(**json.loads(options.plan)))
        return 0
    if importlib.util.find_spec("trl") is None:
        bench.error('TRL is not installed: pip install -e ".[trl]"')
    is_8b, smoke = options.shape == "8b", options.smoke
    if is_8b:
        bench.name = "rollout_8b"
    sizes = {
        "shape": options.shape,
        "num_prompts": 2 if smoke else options.prompts or (16 if is_8b else 64),
        "num_samples": 2 if smoke else 8,
        "new_tokens": 8 if smoke else options.new_tokens,
        "batch": 2 if smoke else options.batch,
    }
    shares = {way: options.vllm_memory[: None if way == VLLM else 1] for way in options.ways}
    plans = {
        f"{VLLM} {share:g}" if way == VLLM else way: (way, share)
        for way, its in shares.items()
        for share in its
    }
    before = bench.rows_before(options.after, sizes)
    rows = [row for row in before if row["way"] not in plans]
    end_s = time.time() + (options.total_s or float("inf"))
    steps = 1 if smoke else options.steps
    with tempfile.TemporaryDirectory() as folder:
        logs = options.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        for name, (way, share) in plans.items():
            its_end_s = min(time.time() + options.limit_s, end_s - GRACE_S)
            path = str(logs / f"{options.shape}-{name.replace(' ', '-')}.json")
            plan = Plan(
                way=way,
                vllm_memory=share,
                smoke=smoke,
                steps=steps,
                ends_s=its_end_s,
                row=path,
                **sizes,
            )
            if its_end_s > time.time():
                rows.append(run(plan, name, options.vllm_path))
            else:
                rows.append({"way": name, "shape": options.shape, "stopped": "no time was left"})
            bench.finish(rows, figures_of(rows, options.shape), sizes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
