"""Many requests at once from an ordinary transformers model: the engine, without a server.

Requests of different lengths join and leave the batch as they come and end; those that begin alike
share memory; one is streamed token by token, one cancelled midway.
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from vmkv import Engine, SamplingParams
from vmkv.units import format_bytes

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "host")
arguments = parser.parse_args()

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=1000,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=4096,
)
on_gpu = arguments.device != "host"
dtype = torch.bfloat16 if on_gpu else torch.float32
model = LlamaForCausalLM(config).to(arguments.device if on_gpu else "cpu", dtype).eval()

system_prompt = [token % 900 + 5 for token in range(1200)]
prompts = [[*system_prompt, 7 * at + 1, 7 * at + 2] for at in range(12)]

with Engine(model, max_num_seqs=8, max_tokens=2048) as engine:
    own_bytes = engine.cache.stats().used_bytes  # With CUDA graphs, a token for their padding.
    first = engine.generate(prompts[:1], SamplingParams(max_tokens=8))[0]
    print(f"the first request: {first.outputs[0].token_ids}")

    outputs = engine.generate(prompts[1:], SamplingParams(max_tokens=24))
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    stats = engine.cache.stats()
    print(
        f"{len(outputs)} more: {tokens} tokens; {stats.num_prefix_hits} began with a prefix that "
        f"was there, {stats.num_prefix_hit_tokens} tokens not computed again"
    )

    sampled = SamplingParams(max_tokens=6, temperature=0.8, top_p=0.9, seed=1, n=2)
    handle = engine.add(prompts[3], sampled)
    cancelled = engine.add(prompts[4], SamplingParams(max_tokens=500, ignore_eos=True))
    for step, _ in enumerate(handle):
        if step == 2:
            cancelled.cancel()
    samples = handle.output().outputs
    print(f"two samples of one prompt: {[len(each.token_ids) for each in samples]} tokens")
    print(f"the cancelled one ended as {cancelled.output().outputs[0].finish_reason.value!r}")
    left_bytes = engine.cache.stats().used_bytes - own_bytes
    print(f"at the end: {format_bytes(left_bytes)} in use by requests")
