"""Generation over ragged batches: no padding, each prompt in its own row.

    outputs = vmkv.generate(model, [[1, 2, 3], [4, 5], ...], max_new_tokens=64)
    outputs = model.generate(**inputs, custom_generate=vmkv.ragged_generate)

Both go through `model.generate`, so generation settings, logits processors and stopping criteria
are transformers' own. Prompts are prefilled in packed chunks, then all sequences decode together;
one that is finished leaves the batch, and its row is free at once. What prompts have in common is
computed once; with a `RaggedCache` that outlives the call, once for all calls.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch

from ..cache.geometry import check_positive
from ..errors import ConfigError
from ..memory import ExtentPool
from . import compat
from .attention import register
from .prefill import LeadersFirst
from .prefill import prefill_passes as prefill_passes
from .ragged import Piece, RaggedCache, RaggedStep
from .store import Settings
from .token_state import TokenState

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
    """Continue each prompt; what `model.generate` would do for each of them alone.

    Args:
        model: A transformers causal language model.
        prompts: Token ids, one sequence each, of any lengths.
        max_num_batched_tokens: Tokens per prefill pass.
        prefix_caching: Whether prompts begin with what the cache holds of them, and leave what
            they hold to others. Without it every token is computed.
        cache: Where sequences live and what they leave, for calls to come; by default a cache of
            this call alone.
        tenant: Whose the prompts are: they begin with nothing of other tenants.
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
            sequence per prompt, or a cache of another model.
        ClosedError: The cache is closed.
        OutOfPagesError: All sequences together do not fit the budget.
        Whatever is raised, the sequences of this call have ended, and `cache` can be used.
    """
    check_positive("max_num_batched_tokens", max_num_batched_tokens)
    rows = [_token_ids(prompt, at) for at, prompt in enumerate(prompts)]
    if not rows:
        raise ConfigError("no prompts: pass at least one list of token ids")
    longest = max(map(len, rows))
    if cache is not None and (pool, budget_bytes, attention_backend) != (None, None, None):
        raise ConfigError("a cache has its own pool, budget and kernels; leave those out")
    max_length = _own_max_length(options, rows)
    device = model.get_input_embeddings().weight.device
    pad = _pad_token(model, options)
    input_ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows], device=device)
    mask = torch.tensor(
        [[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device
    )
    loop = functools.partial(
        ragged_generate,
        vmkv_options=None
        if cache is not None
        else Settings(
            compat.text_config(model.config),
            max_batch_size=len(rows),
            budget_bytes=budget_bytes,
            memory=pool,
            attention_backend=attention_backend,
        ),
        vmkv_cache=cache,
        vmkv_prefix_caching=prefix_caching,
        vmkv_tenant=tenant,
        vmkv_lengths=[len(row) for row in rows],
        vmkv_streamer=streamer,
        vmkv_max_num_batched_tokens=max_num_batched_tokens,
        vmkv_as_lists=True,
        vmkv_max_length=max_length,
    )
    outputs: list[list[int]] = model.generate(
        input_ids, attention_mask=mask, custom_generate=loop, **options
    )
    return outputs


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
    vmkv_lengths: Sequence[int] | None = None,
    vmkv_streamer: Any = None,
    vmkv_max_num_batched_tokens: int = _MAX_BATCHED_TOKENS,
    vmkv_as_lists: bool = False,
    vmkv_max_length: int | None = None,
    **model_kwargs: Any,
) -> Any:
    """The decoding loop, for `model.generate(custom_generate=vmkv.ragged_generate)`.

    Args:
        model: The model.
        input_ids: `[B, T]`, left-padded prompts.
        logits_processor: Prepared by transformers; sees the padded batch, as usual.
        stopping_criteria: Prepared by transformers; likewise.
        generation_config: Prepared by transformers.
        vmkv_options: Memory and kernels; by default derived from the model.
        vmkv_cache: See `generate`; excludes `vmkv_options`.
        vmkv_prefix_caching: See `generate`.
        vmkv_tenant: See `generate`.
        vmkv_lengths: Prompt lengths; by default counted from the attention mask.
        vmkv_streamer: A streamer. One that is given to `model.generate` gets the prompt from it
            and nothing after; use `vmkv.generate(streamer=…)`.
        vmkv_max_num_batched_tokens: Tokens per prefill pass.
        vmkv_as_lists: Return unpadded lists instead of a padded tensor.
        vmkv_max_length: End each sequence at this many tokens of its own.
        **model_kwargs: What transformers would give to the model; only the mask matters.

    Returns:
        `[B, T + new]` token ids, left-padded like the input and right-padded where a sequence
        ended early; or lists.
    """
    _check_mode(model, generation_config)
    if "inputs_embeds" in model_kwargs or not input_ids.shape[1]:
        raise ConfigError("ragged generation needs token ids; inputs_embeds cannot be served")
    check_positive("vmkv_max_num_batched_tokens", vmkv_max_num_batched_tokens)
    if vmkv_cache is not None and vmkv_options is not None:
        raise ConfigError("a cache has its own settings; leave vmkv_options out")
    lengths = vmkv_lengths or _lengths(input_ids, model_kwargs.get("attention_mask"))
    state = TokenState(input_ids, lengths, logits_processor, generation_config, vmkv_max_length)
    if vmkv_streamer is not None:
        vmkv_streamer.put(input_ids.cpu())
    with contextlib.ExitStack() as stack:
        cache = vmkv_cache
        if cache is None:
            settings = vmkv_options or Settings(
                compat.text_config(model.config), max_batch_size=len(lengths)
            )
            cache = stack.enter_context(contextlib.closing(RaggedCache(model.config, settings)))
        stack.enter_context(cache.serving(model, len(lengths), vmkv_tenant))
        stack.enter_context(_attending_through_vmkv(model))
        prompts = None
        # One prompt finds nothing in a cache of its own.
        if vmkv_prefix_caching and (vmkv_cache is not None or len(lengths) > 1):
            prompts = state.prompts()
        logits = _prefill(model, cache, input_ids, lengths, vmkv_max_num_batched_tokens, prompts)
        keeps_said = vmkv_prefix_caching and vmkv_cache is not None
        _decode(model, cache, state, logits, stopping_criteria, vmkv_streamer, keeps_said)
    if vmkv_streamer is not None:
        vmkv_streamer.end()
    return state.as_lists() if vmkv_as_lists else state.ids


# ---- passes -----------------------------------------------------------------------------------


def _prefill(
    model: Any,
    cache: RaggedCache,
    input_ids: torch.Tensor,
    lengths: Sequence[int],
    max_num_batched_tokens: int,
    prompts: Sequence[Sequence[int]] | None,
) -> torch.Tensor:
    """Run all prompts, in passes of at most so many tokens; logits `[B, vocabulary]`.

    Args:
        model: The model.
        cache: Where the sequences begin.
        input_ids: `[B, T]`.
        lengths: Tokens of each prompt.
        max_num_batched_tokens: Tokens of a pass.
        prompts: Their tokens, for the cache to find what it holds of them; None if it is not to.
    """
    if prompts is None:
        passes = prefill_passes(lengths, max_num_batched_tokens)
    else:
        passes = prefill_passes(
            lengths,
            max_num_batched_tokens,
            begin=lambda at: cache.begin(at, prompts[at]),
            choose=LeadersFirst(
                prompts,
                lambda at: cache.find(prompts[at]),
                leaders_stop=cache.has_windows,
                max_num_batched_tokens=max_num_batched_tokens,
            ),
        )
    width = input_ids.shape[1]
    last_logits: dict[int, torch.Tensor] = {}
    for pieces in passes:
        tokens = torch.cat(
            [
                input_ids[
                    piece.sequence_id,
                    width - lengths[piece.sequence_id] + piece.num_past_tokens :,
                ][: piece.num_new_tokens]
                for piece in pieces
            ]
        )
        ends = [end - 1 for end in accumulate(piece.num_new_tokens for piece in pieces)]
        logits = _forward(model, RaggedStep(cache, pieces), len(pieces), tokens, ends)
        for at, piece in enumerate(pieces):
            if prompts is not None:
                done = prompts[piece.sequence_id][piece.num_past_tokens : piece.num_tokens]
                cache.record(piece.sequence_id, done)
            if piece.num_tokens == lengths[piece.sequence_id]:
                last_logits[piece.sequence_id] = logits[at]
    return torch.stack([last_logits[at] for at in range(len(lengths))])


def _decode(
    model: Any,
    cache: RaggedCache,
    state: TokenState,
    logits: torch.Tensor,
    stopping_criteria: Any,
    streamer: Any,
    keeps_said: bool,
) -> None:
    """One token for every sequence, again and again, until all have ended.

    Args:
        model: The model.
        cache: Where the sequences are.
        state: What they say.
        logits: `[B, vocabulary]`, of their prompts' last tokens.
        stopping_criteria: When they end.
        streamer: Gets every token; or None.
        keeps_said: Whether the cache is to find what was said, when a prompt begins with it.
    """
    step: RaggedStep | None = None
    while True:
        tokens = state.choose(logits)
        if streamer is not None:
            streamer.put(tokens.cpu())
        ended = state.stop(stopping_criteria)
        if ended and keeps_said:
            for row, said in zip(ended, state.said(ended), strict=True):
                cache.record(row, said[:-1])  # The last one was never given to the model.
        for row in ended:
            cache.end(row)
        if not state.live:
            return
        step = _decode_step(cache, state, step)
        logits = _forward(model, step, len(state.live), state.last_tokens)


def _decode_step(cache: RaggedCache, state: TokenState, last: RaggedStep | None) -> RaggedStep:
    """One token for every live sequence: the step before, counted on, while all still live."""
    if last is not None and state.is_steady and last.can_advance:
        last.advance()
        return last
    state.is_steady = True
    pieces = [Piece(row, state.length(row) - 1, 1) for row in state.live]
    return RaggedStep(cache, pieces, is_steady=True)


def _forward(
    model: Any,
    step: RaggedStep,
    num_pieces: int,
    tokens: torch.Tensor,
    ends: Sequence[int] | None = None,
) -> torch.Tensor:
    """Call the model on packed tokens `[Tq]`; logits `[pieces, vocabulary]` of their last ones.

    Args:
        model: The model.
        step: What the tokens are.
        num_pieces: Its pieces.
        tokens: `[Tq]`.
        ends: Where each piece's last token is; None where every piece is one token.
    """
    device = tokens.device
    # A mask of four dimensions is passed through as it is, and ours ignores it: otherwise
    # transformers would look for packed sequences in the positions and build a dense mask.
    placeholder = torch.empty((1, 1, 1, 1), dtype=torch.bool, device=device)
    placeholder._vmkv_placeholder = True  # type: ignore[attr-defined]
    kept = {}
    if ends is not None:
        kept["logits_to_keep"] = torch.tensor(ends).to(device, non_blocking=True)
    try:
        output = model(
            input_ids=tokens[None],
            position_ids=step.positions(device)[None],
            attention_mask=placeholder,
            use_cache=False,
            vmkv_batch=step,
            return_dict=True,
            **kept,
        )
    except torch.OutOfMemoryError:
        raise  # Also a RuntimeError; what it says is true.
    except RuntimeError:
        # A model that attends by itself trips over the placeholder: say that instead.
        if not step.has_attended:
            step.check_complete()
        raise
    step.check_complete()
    logits: torch.Tensor = output.logits[0]
    return logits if ends is None or logits.shape[0] == num_pieces else logits[ends]


@contextlib.contextmanager
def _attending_through_vmkv(model: Any) -> Iterator[None]:
    """Have the model attend through `"vmkv"`, and as before afterwards."""
    register()
    before, ours, theirs = compat.attention_settings(model)
    if before == "vmkv":
        yield
        return
    model.set_attn_implementation(ours)
    try:
        yield
    finally:
        model.set_attn_implementation(theirs)


# ---- arguments --------------------------------------------------------------------------------


def _check_mode(model: Any, config: Any) -> None:
    if model.config.is_encoder_decoder:
        raise ConfigError(
            "ragged generation is for decoder-only models; use "
            "past_key_values=VMKVCache.for_encoder_decoder(config)"
        )
    if getattr(config, "prompt_lookup_num_tokens", None):
        raise ConfigError("ragged generation does not look prompts up; use a VMKVCache for that")
    for name, most in (("num_beams", 1), ("num_return_sequences", 1)):
        if (getattr(config, name, None) or 1) > most:
            raise ConfigError(
                f"ragged generation has one sequence per prompt; {name} must be {most}. Pass a "
                "VMKVCache to model.generate for beam search"
            )
    if config.return_dict_in_generate:
        raise ConfigError(
            "ragged generation returns tokens only; leave return_dict_in_generate out"
        )


def _token_ids(prompt: Any, at: int) -> list[int]:
    ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(ids, (list, tuple)) or not ids or not all(type(each) is int for each in ids):
        raise ConfigError(f"prompt {at} must be a non-empty sequence of token ids, not {prompt!r}")
    return list(ids)


def _own_max_length(options: dict[str, Any], rows: Sequence[Sequence[int]]) -> int | None:
    """Take `max_length` out of `options`: transformers would count padding into it.

    Each sequence ends at that many tokens of its own; transformers is told how many more the
    shortest needs for that.

    Raises:
        ConfigError: A prompt is as long already, or `min_length` would count padding too.
    """
    if options.get("assistant_model") is not None:
        raise ConfigError("ragged generation takes no assistant model; use a VMKVCache for that")
    lengths = [len(row) for row in rows]
    if options.get("min_length") and len(set(lengths)) > 1:
        raise ConfigError("min_length means another thing for every prompt; use min_new_tokens")
    if options.get("max_length") is None or options.get("max_new_tokens") is not None:
        return None
    max_length = int(options.pop("max_length"))
    if max(lengths) >= max_length:
        raise ConfigError(
            f"a prompt of {max(lengths)} tokens leaves no room below max_length={max_length}; "
            "raise it, or use max_new_tokens"
        )
    options["max_new_tokens"] = max_length - min(lengths)
    return max_length


def _pad_token(model: Any, options: dict[str, Any]) -> int:
    """Any token will do: padding is never run. The one given keeps transformers quiet."""
    config = options.get("generation_config") or model.generation_config
    candidates = (options.get("pad_token_id"), config.pad_token_id, config.eos_token_id)
    for token in candidates:
        if token is not None:
            return int(token[0] if isinstance(token, list) else token)
    return 0


def _lengths(input_ids: torch.Tensor, mask: torch.Tensor | None) -> list[int]:
    """Prompt lengths of a left-padded batch; asks the device once.

    Raises:
        ConfigError: The mask is not left padding.
    """
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
