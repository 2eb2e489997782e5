"""Generation over ragged batches: no padding, each prompt in its own row.

    outputs = vmkv.generate(model, [[1, 2, 3], [4, 5], ...], max_new_tokens=64)
    outputs = model.generate(**inputs, custom_generate=vmkv.ragged_generate)

Generation settings, logits processors and stopping criteria are transformers' own: the first line
has them prepared for each prompt alone (`prepared.py`), the second takes those that
`model.generate` prepared for its padded batch. Prompts are prefilled in packed chunks, then all
sequences decode together, on CUDA by captured steps; a finished sequence leaves the batch and frees
its row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from ..core.cache.geometry import check_positive
from ..core.memory import ExtentPool
from ..errors import ConfigError
from ..step import Piece, Stepper
from ..step.logits import StepLogits
from . import compat
from . import compat as vocabulary
from .attention import attending_in_place
from .capture import compiled_layers_of
from .prefill import Chunk, LeadersFirst, prefill_passes
from .prepared import Prepared, check_config, check_inputs, prepare
from .prompt_tokens import check_tokens
from .proof import prove
from .ragged_cache import RaggedCache
from .store import Settings
from .token_state import TokenState
from .unservable import check_length

#: Tokens of one prefill pass: enough to fill a GPU, few enough that activations stay small.
_MAX_BATCHED_TOKENS = 8192


def generate(
    model: Any,
    prompts: Sequence[Sequence[int] | torch.Tensor],
    *,
    max_num_batched_tokens: int = _MAX_BATCHED_TOKENS,
    prefix_caching: bool = True,
    cache: RaggedCache | None = None,
    tenant: str | None = None,
    attention_backend: str | None = None,
    pool: ExtentPool | None = None,
    budget_bytes: int | None = None,
    streamer: Any = None,
    **options: Any,
) -> list[list[int]]:
    """Continue each prompt as `model.generate` would continue it alone.

    Args:
        model: A transformers causal language model.
        prompts: Token ids, one sequence each, of any lengths.
        max_num_batched_tokens: Tokens per prefill pass.
        prefix_caching: Whether prompts reuse common beginnings, of each other and from `cache`, and
            leave theirs there. Otherwise every token is computed.
        cache: Cache to use and leave prefixes in, for later calls; by default one for this call.
        tenant: Owner of the prompts: prefixes of other tenants are not reused.
        attention_backend: See `VMKVCache`.
        pool: Physical memory to share with other caches.
        budget_bytes: Physical memory at most, where there is no pool.
        streamer: As for `model.generate`; for one prompt.
        **options: Anything `model.generate` takes: `max_new_tokens`, `do_sample`,
            `logits_processor`, `stopping_criteria`, `generation_config`, …

    Returns:
        Per prompt, its tokens and those that were generated, the end-of-sequence token included.

    Raises:
        ConfigError: No prompts, an empty one, a way of decoding that needs more than one
            sequence per prompt, or a cache of another model. The model fails its proof, is in
            training mode, or changes on the way (attention, type or device).
        ClosedError: The cache is closed.
        OutOfPagesError: All sequences together do not fit the budget.
        After any error the sequences of this call have ended, and `cache` stays usable.
    """
    check_positive("max_num_batched_tokens", max_num_batched_tokens)
    embedding = model.get_input_embeddings().weight
    vocab_size = vocabulary.num_embeddings(model)
    rows = [_token_ids(prompt, at, vocab_size) for at, prompt in enumerate(prompts)]
    if not rows:
        raise ConfigError("no prompts: pass at least one list of token ids")
    if cache is not None and (pool, budget_bytes, attention_backend) != (None, None, None):
        raise ConfigError("a cache has its own pool, budget and kernels; leave those out")
    _check_model(model)
    prepared = prepare(model, rows, options)
    pad = compat.pad_token(prepared[0].config)
    longest = max(map(len, rows))
    input_ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows])
    settings = Settings(
        compat.text_config(model.config),
        max_batch_size=len(rows),
        budget_bytes=budget_bytes,
        memory=pool,
        attention_backend=attention_backend,
    )
    state = TokenState(input_ids.to(embedding.device), [len(row) for row in rows], prepared)
    _generate(
        model,
        state,
        rows,
        settings if cache is None else cache,
        prefix_caching=prefix_caching,
        tenant=tenant,
        streamer=streamer,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    return state.as_lists()


@torch.no_grad()
def ragged_generate(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    vmkv_options: Settings | None = None,
    vmkv_cache: RaggedCache | None = None,
    vmkv_prefix_caching: bool = True,
    vmkv_tenant: str | None = None,
    vmkv_streamer: Any = None,
    vmkv_max_num_batched_tokens: int = _MAX_BATCHED_TOKENS,
    **model_kwargs: Any,
) -> torch.Tensor:
    """Decode ragged rows, for `model.generate(custom_generate=vmkv.ragged_generate)`.

    Lengths and logits processors count padding, as in `model.generate` for a padded batch.

    Args:
        model: The model.
        input_ids: `[B, T]`, left-padded prompts.
        logits_processor: Prepared by transformers for the padded batch.
        stopping_criteria: Prepared by transformers for the padded batch.
        generation_config: Prepared by transformers.
        vmkv_options: Memory and kernels; by default derived from the model.
        vmkv_cache: See `generate`; excludes `vmkv_options`.
        vmkv_prefix_caching: See `generate`.
        vmkv_tenant: See `generate`.
        vmkv_streamer: A streamer. `model.generate(streamer=…)` would get the prompts only; use
            this, or `vmkv.generate(streamer=…)`.
        vmkv_max_num_batched_tokens: Tokens per prefill pass.
        **model_kwargs: Inputs of the model, of which only the mask is used.

    Returns:
        `[B, T + new]` token ids, left-padded like the input and right-padded where a sequence
        ended early.

    Raises:
        ConfigError, ClosedError, OutOfPagesError: See `generate`; also for model inputs besides
            tokens, and a mask that is not left padding.
    """
    _check_model(model)
    check_config(generation_config)
    if "inputs_embeds" in model_kwargs or not input_ids.shape[1]:
        raise ConfigError("ragged generation needs token ids; inputs_embeds cannot be served")
    check_inputs(model_kwargs)
    check_positive("vmkv_max_num_batched_tokens", vmkv_max_num_batched_tokens)
    if vmkv_cache is not None and vmkv_options is not None:
        raise ConfigError("a cache has its own settings; leave vmkv_options out")
    batch_size, width = input_ids.shape
    lengths = _lengths(input_ids, model_kwargs.get("attention_mask"))
    _check_padded_tokens(model, input_ids, lengths)
    prepared = Prepared(
        tuple(range(batch_size)), width, logits_processor, stopping_criteria, generation_config
    )
    state = TokenState(input_ids, lengths, [prepared])
    settings = Settings(compat.text_config(model.config), max_batch_size=batch_size)
    _generate(
        model,
        state,
        state.prompts(),
        vmkv_cache or vmkv_options or settings,
        prefix_caching=vmkv_prefix_caching,
        tenant=vmkv_tenant,
        streamer=vmkv_streamer,
        max_num_batched_tokens=vmkv_max_num_batched_tokens,
    )
    return state.ids


@torch.no_grad()
def _generate(
    model: Any,
    state: TokenState,
    prompts: Sequence[Sequence[int]],
    memory: RaggedCache | Settings,
    *,
    prefix_caching: bool,
    tenant: str | None,
    streamer: Any,
    max_num_batched_tokens: int,
) -> None:
    """Continue the sequences of `state` to their ends, in `memory` or a cache made from it."""
    if not isinstance(memory, RaggedCache | Settings):
        raise ConfigError(
            f"a {type(memory).__name__} cannot be the cache of vmkv.generate: pass a RaggedCache"
        )
    settings = memory.store.settings if isinstance(memory, RaggedCache) else memory
    proof = prove(model, settings.attention_backend)
    check_length(model.config, state.max_tokens)
    if streamer is not None:
        streamer.put(state.ids.cpu())
    outlives = isinstance(memory, RaggedCache)
    with contextlib.ExitStack() as stack:
        if isinstance(memory, RaggedCache):
            cache = memory
        else:
            cache = stack.enter_context(contextlib.closing(RaggedCache(model.config, memory)))
        stack.enter_context(cache.serving(model, proof.signatures, len(prompts), tenant))
        cores = cache.store.cores
        layers = compiled_layers_of(model) if len(cores) == 1 else None
        stepper = Stepper(
            model,
            cores,
            len(prompts),
            attention_backend=settings.attention_backend,
            layers=layers,
            calls=proof.calls,
        )
        stack.enter_context(contextlib.closing(stepper))
        stack.enter_context(
            attending_in_place(model) if layers is None else stepper.attending(layers)
        )
        # A single prompt can share nothing in a cache of its own.
        finds = prefix_caching and (outlives or len(prompts) > 1)
        logits = _prefill(stepper, cache, prompts, max_num_batched_tokens, finds=finds)
        if proof.never_waits:
            stepper.capture_where_it_pays()
        _decode(stepper, cache, state, logits, streamer, records=prefix_caching and outlives)
    if streamer is not None:
        streamer.end()


# ---- steps ------------------------------------------------------------------------------------


def _prefill(
    stepper: Stepper,
    cache: RaggedCache,
    prompts: Sequence[Sequence[int]],
    max_num_batched_tokens: int,
    *,
    finds: bool,
) -> torch.Tensor:
    """Run all prompts in passes of bounded size; returns logits `[B, vocabulary]`."""
    lengths = [len(prompt) for prompt in prompts]

    def begin(at: int) -> int:
        return cache.begin(at, lengths[at], prompts[at] if finds else None)

    if finds:
        passes = prefill_passes(
            lengths,
            max_num_batched_tokens,
            begin=begin,
            choose=LeadersFirst(
                prompts,
                lambda at: cache.find(prompts[at]),
                leaders_stop=cache.has_windows,
                max_num_batched_tokens=max_num_batched_tokens,
            ),
        )
    else:
        passes = prefill_passes(lengths, max_num_batched_tokens, begin=begin)
    last_logits: dict[int, torch.Tensor] = {}
    for chunks in passes:
        told = [
            prompts[each.sequence_id][each.num_past_tokens : each.num_tokens] for each in chunks
        ]
        samples = [each.num_tokens == lengths[each.sequence_id] for each in chunks]
        step = _step(stepper, cache, chunks, told, samples)
        for at, logits in zip(step.pieces, step.logits, strict=True):
            last_logits[chunks[at].sequence_id] = logits
        if finds:
            for chunk, token_ids in zip(chunks, told, strict=True):
                cache.record(chunk.sequence_id, token_ids)
    return torch.stack([last_logits[at] for at in range(len(lengths))])


def _decode(
    stepper: Stepper,
    cache: RaggedCache,
    state: TokenState,
    logits: torch.Tensor,
    streamer: Any,
    *,
    records: bool,
) -> None:
    """Generate a token for every live sequence, until all have ended."""
    num_sequences = len(logits)
    while True:
        tokens = state.choose(logits)
        if streamer is not None:
            streamer.put(tokens.cpu())
        ended = state.stop()
        if ended and records:
            for at, generated in zip(ended, state.generated(ended), strict=True):
                cache.record(at, generated[:-1])  # The last one was never given to the model.
        for at in ended:
            cache.end(at)
        if not state.live:
            return
        stepper.last_tokens[:num_sequences].copy_(tokens)
        chunks = [Chunk(at, state.length(at) - 1, 1) for at in state.live]
        logits = _step(stepper, cache, chunks, [None] * len(chunks), [True] * len(chunks)).logits


def _step(
    stepper: Stepper,
    cache: RaggedCache,
    chunks: Sequence[Chunk],
    token_ids: Sequence[Sequence[int] | None],
    samples: Sequence[bool],
) -> StepLogits:
    """Grow the sequences of `chunks` and run them; `token_ids` and `samples` as in `Piece`."""
    cache.grow([(chunk.sequence_id, chunk.num_tokens) for chunk in chunks])
    rows, *elsewhere = cache.rows([chunk.sequence_id for chunk in chunks])
    pieces = [
        Piece(chunk.sequence_id, row, chunk.num_past_tokens, chunk.num_new_tokens, told, asked)
        for chunk, row, told, asked in zip(chunks, rows, token_ids, samples, strict=True)
    ]
    with cache.submitting(chunks):
        return stepper.run(pieces, elsewhere)


# ---- arguments --------------------------------------------------------------------------------


def _check_model(model: Any) -> None:
    if model.config.is_encoder_decoder:
        raise ConfigError(
            "ragged generation is for decoder-only models; use "
            "past_key_values=VMKVCache.for_encoder_decoder(config)"
        )


def _token_ids(prompt: Any, at: int, vocab_size: int) -> list[int]:
    ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(ids, (list, tuple)):
        raise ConfigError(f"prompt {at} must be a sequence of token ids, not {prompt!r}")
    check_tokens(ids, vocab_size, f"prompt {at}")
    return list(ids)


def _check_padded_tokens(model: Any, input_ids: torch.Tensor, lengths: Sequence[int]) -> None:
    """Refuse tokens outside the vocabulary, except padding; waits for the device once."""
    at = torch.arange(input_ids.shape[1], device=input_ids.device)
    starts = torch.tensor(lengths, device=input_ids.device).neg() + input_ids.shape[1]
    given = input_ids[at >= starts[:, None]]
    ends = torch.stack(given.aminmax()).tolist()
    check_tokens(ends, vocabulary.num_embeddings(model), "a prompt")


def _lengths(input_ids: torch.Tensor, mask: torch.Tensor | None) -> list[int]:
    """Return the prompt lengths of a left-padded batch; waits for the device once."""
    if mask is None:
        return [input_ids.shape[1]] * input_ids.shape[0]
    kept = mask.bool()
    lengths: list[int] = kept.sum(1).tolist()
    at = torch.arange(mask.shape[1], device=mask.device)
    starts = torch.tensor([mask.shape[1] - length for length in lengths], device=mask.device)
    if 0 in lengths or not bool((kept == (at >= starts[:, None])).all()):
        raise ConfigError(
            "the attention mask is not left padding (0 … 0 1 … 1 in every row); set the "
            'tokenizer\'s padding_side="left"'
        )
    return lengths
