"""Generation over ragged batches: no padding, each prompt in its own row.

    outputs = vmkv.generate(model, [[1, 2, 3], [4, 5], ...], max_new_tokens=64)
    outputs = model.generate(**inputs, custom_generate=vmkv.ragged_generate)

Generation settings, logits processors and stopping criteria are transformers' own: the first line
has them prepared for each prompt alone (`sampling.py`), the second takes those that
`model.generate` prepared for its padded batch. Prompts are prefilled in packed chunks, then all
sequences decode together, on CUDA by captured steps; a finished sequence leaves the batch and frees
its row.

Of prompts that begin alike, the first is the *leader*; the others wait until it has computed their
common beginning, and then find it in the cache:

    pass 1   | system prompt, question A |  other prompts ...   |
    pass 2   | question B | question C | question D | ...

Rows of sliding-window layers drop tokens behind the window, so that a prompt finds nothing once its
leader is far ahead. There a leader stops where its followers diverge.

A cache that outlives a call keeps the rows of that call's sequences. The next call's prompts begin
with their contents, as far as the tokens are the same:

    with vmkv.RaggedCache(model.config) as cache:
        first = vmkv.generate(model, [system + question], cache=cache)
        second = vmkv.generate(model, [first[0] + answer], cache=cache)  # Computes the answer.

See DESIGN.md, Note [A batch needs no scheduler].
"""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import weakref
from collections import abc
from collections.abc import Iterator
from typing import Any

import torch
from transformers.cache_utils import Cache

from ..core.backend import MemoryLocation
from ..core.cache import KVCache, Sequence
from ..core.cache.forking import find_beginning
from ..core.cache.geometry import check_positive
from ..core.cache.prefix import BLOCK_TOKENS
from ..core.memory import ExtentPool
from ..core.offload_options import check_offload_options
from ..errors import CapacityError, ConfigError
from ..step import Piece, Stepper
from ..step.compiled_layers import CompiledLayers
from ..step.piece import StepLogits
from . import compat
from .capture import CapturedDecoding
from .configuration import check_length, layer_windows
from .group_step import read_left_pad
from .proof import Proof, locks_of, prove
from .sampling import Group, Tokens, check_adapters, check_inputs, prepare
from .store import CacheOptions, Store, StoreOwner, signature_for_help

#: Tokens of one prefill pass: enough to fill a GPU, few enough that activations stay small.
_MAX_BATCHED_TOKENS = 8192
#: Tokens that waiting prompts must save together: one more pass costs the time of some hundred.
_MIN_SAVED_TOKENS = 256


def generate(
    model: Any,
    prompts: abc.Sequence[abc.Sequence[int] | torch.Tensor],
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

    Calls of several threads for one model run in turn, whole; forward passes of other threads are
    as without vmkv.

    Args:
        model: A transformers causal language model.
        prompts: Token ids, one sequence each, of any lengths; or a left-padded tensor `[B, T]`.
            Leading padding tokens are hidden where `model.generate` would hide them, and count for
            lengths and logits processors as there; `attention_mask` may say which tokens are.
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
        Per prompt, its tokens as given and those that were generated, the end-of-sequence token
        included.

    Raises:
        ConfigError: No prompts, an empty one, one padded on the right, a way of decoding that needs
            more than one sequence per prompt, or a cache of another model. The model fails its
            proof, is in training mode, or changes on the way (attention, type or device).
        ClosedError: The cache is closed.
        OutOfPagesError: All sequences together do not fit the budget.
        After any error the sequences of this call have ended, and `cache` stays usable.
    """
    rows = [_as_list(prompt, at) for at, prompt in enumerate(prompts)]
    if not rows:
        raise ConfigError("no prompts: pass at least one list of token ids")
    own = {"pool": pool, "budget_bytes": budget_bytes, "attention_backend": attention_backend}
    if cache is not None and any(value is not None for value in own.values()):
        raise ConfigError("a cache has its own pool, budget and kernels; leave those out")
    rows = _checked(model, rows, cache, max_num_batched_tokens)
    mask = options.pop("attention_mask", None)
    groups = prepare(model, rows, options)
    given = compat.hidden_token(groups[0].config), mask, not hasattr(prompts, "ndim")
    texts = [_without_padding(row, at, *given) for at, row in enumerate(rows)]
    pad, longest = compat.pad_token(groups[0].config), groups[0].num_tokens
    input_ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows])
    input_ids = input_ids.to(model.get_input_embeddings().weight.device)
    return _generate(
        model,
        texts,
        Tokens(input_ids, list(map(len, texts)), groups, streamer),
        cache,
        tenant=tenant,
        prefix_caching=prefix_caching,
        max_num_batched_tokens=max_num_batched_tokens,
        **own,
    ).as_lists()


def ragged_generate(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
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
        vmkv_cache: See `generate`.
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
    batch_size, width = input_ids.shape
    group = Group.of(
        range(batch_size), width, logits_processor, stopping_criteria, generation_config
    )
    if "inputs_embeds" in model_kwargs or not width:
        raise ConfigError("ragged generation needs token ids; inputs_embeds cannot be served")
    check_inputs(model_kwargs)
    lengths = _lengths(input_ids, model_kwargs.get("attention_mask"))
    ids = zip(input_ids.tolist(), lengths, strict=True)
    prompts = [row[width - length :] for row, length in ids]
    prompts = _checked(model, prompts, vmkv_cache, vmkv_max_num_batched_tokens)
    return _generate(
        model,
        prompts,
        Tokens(input_ids, lengths, [group], vmkv_streamer),
        vmkv_cache,
        tenant=vmkv_tenant,
        prefix_caching=vmkv_prefix_caching,
        max_num_batched_tokens=vmkv_max_num_batched_tokens,
    ).ids


@torch.no_grad()
def _generate(
    model: Any,
    prompts: abc.Sequence[abc.Sequence[int]],
    tokens: Tokens,
    cache: RaggedCache | None,
    *,
    tenant: str | None,
    prefix_caching: bool,
    max_num_batched_tokens: int,
    **own: Any,
) -> Tokens:
    outlives = cache is not None
    options = CacheOptions(**own) if cache is None else cache.store.options
    backend = options.attention_backend
    locks = locks_of(model)
    with contextlib.ExitStack() as stack:
        stack.enter_context(locks.calls)
        proof = prove(model, backend, options.kv_dtype)
        check_length(model.config, tokens.max_tokens)
        if cache is None:
            cache = RaggedCache(model.config, max_batch_size=len(prompts), **own)
            stack.enter_context(cache)
        stack.enter_context(cache.serving(model, proof, len(prompts), tenant))
        cores = cache.store.cores
        has_states = bool(proof.calls.states)
        layers = _compiled_layers_of(model) if len(cores) == 1 and not has_states else None
        stepper = Stepper(
            model, cores, len(prompts), attention_backend=backend, layers=layers, calls=proof.calls
        )
        stack.callback(stepper.close)
        with locks.proof:  # No captured step of another thread uses the layers.
            stack.enter_context(stepper.attending())
        # A single prompt can share nothing in a cache of its own.
        finds = prefix_caching and (outlives or len(prompts) > 1)
        last_logits: dict[int, torch.Tensor] = {}
        for pieces in prefill_passes(prompts, max_num_batched_tokens, cache, finds=finds):
            step = cache.run(stepper, pieces)
            for at, logits in zip(step.pieces, step.logits, strict=True):
                last_logits[pieces[at].slot] = logits
            for piece in pieces if finds else ():
                cache.record(piece.slot, piece.token_ids or ())
        if proof.never_waits:
            stepper.capture_where_it_pays()
        first = torch.stack([last_logits[at] for at in tokens.live])
        _decode(stepper, cache, tokens, first, records=prefix_caching and outlives)
    return tokens


# ---- prefill ----------------------------------------------------------------------------------


def _compiled_layers_of(model: Any) -> CompiledLayers | None:
    """Return the layers that `capture_decoding` has compiled for the model, or None."""
    capture = vars(model).get("forward")
    return capture.layers if isinstance(capture, CapturedDecoding) else None


def prefill_passes(
    prompts: abc.Sequence[abc.Sequence[int]],
    max_num_batched_tokens: int,
    cache: RaggedCache,
    *,
    finds: bool,
) -> Iterator[list[Piece]]:
    """Begin the sequences of prompts and cut them into passes; run each before taking the next.

    With `finds`, prompts begin with what the cache holds, and wait for their leaders.
    """
    leaders = _leaders_worth_waiting_for(prompts, cache) if finds else {}
    past: dict[int, int] = {}
    unfinished = list(range(len(prompts)))
    while unfinished:
        # Leaders come before their followers, so that the first prompt never waits.
        waiting = [
            at
            for at, (leader, shared_tokens) in leaders.items()
            if at not in past and past.get(leader, 0) < shared_tokens
        ]
        stops: dict[int, int] = {}
        for leader, shared_tokens in [leaders[at] for at in waiting if cache.forks_at_ends]:
            stops[leader] = min(shared_tokens, stops.get(leader, shared_tokens))
        pieces = []
        room = max_num_batched_tokens
        for at in sorted(set(unfinished).difference(waiting), key=lambda at: (at not in past, at)):
            prompt = prompts[at]
            if at not in past and (room or at in leaders):  # Its prefix may be gone later.
                past[at] = cache.begin(at, len(prompt), prompt if finds else None)
            if room:
                start = past[at]
                stop = stops.get(at, 0)
                end = min(start + room, stop if stop > start else len(prompt))
                row, is_last = cache.row(at), end == len(prompt)
                pieces.append(Piece(at, row, start, end - start, prompt[start:end], is_last))
                past[at] = end
                room -= end - start
        yield pieces
        unfinished = [at for at in unfinished if past.get(at, 0) < len(prompts[at])]


def _leaders_worth_waiting_for(
    prompts: abc.Sequence[abc.Sequence[int]], cache: RaggedCache
) -> dict[int, tuple[int, int]]:
    """Return the leaders of prompts that save by waiting; none if they save too little together."""
    leaders, num_saved = {}, 0
    for at, (leader, shared_tokens) in find_leaders(prompts).items():
        saved_tokens = shared_tokens - cache.find(prompts[at])
        if saved_tokens > 0:
            leaders[at] = leader, shared_tokens
            num_saved += saved_tokens
    return leaders if num_saved >= _MIN_SAVED_TOKENS else {}


def find_leaders(prompts: abc.Sequence[abc.Sequence[int]]) -> dict[int, tuple[int, int]]:
    """Return for each prompt the first one that begins most like it, and the tokens they share.

    Whole blocks of 16 tokens count, short of a prompt's last token. Cost: a look-up for each block.
    """
    leaders = {}
    # Ends of blocks, by the end before and the block: the prompt that has it first.
    blocks: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}
    for at, prompt in enumerate(prompts):
        node = -1
        for end in range(BLOCK_TOKENS, len(prompt) + 1, BLOCK_TOKENS):
            block = tuple(prompt[end - BLOCK_TOKENS : end])
            node, first = blocks.setdefault((node, block), (len(blocks), at))
            if first != at and end < len(prompt):
                leaders[at] = first, end
    return leaders


# ---- decoding ---------------------------------------------------------------------------------


def _decode(
    stepper: Stepper, cache: RaggedCache, tokens: Tokens, logits: torch.Tensor, *, records: bool
) -> None:
    while True:
        chosen = tokens.choose(logits)
        ended = tokens.stop()
        if ended and records:
            for at, generated in zip(ended, tokens.generated(ended), strict=True):
                cache.record(at, generated[:-1])  # The last one was never given to the model.
        for at in ended:
            cache.end(at)
        if not tokens.live:
            return
        stepper.last_tokens[: len(chosen)].copy_(chosen)
        pieces = [
            Piece(at, cache.row(at), tokens.num_tokens(at) - 1, 1, None) for at in tokens.live
        ]
        logits = cache.run(stepper, pieces).logits


# ---- arguments --------------------------------------------------------------------------------


def _checked(
    model: Any, prompts: abc.Sequence[list[Any]], cache: Any, max_num_batched_tokens: int
) -> list[list[int]]:
    """Check arguments that `generate` and `ragged_generate` have in common; return the prompts."""
    compat.check_model(model)
    check_adapters(model)
    check_positive("max_num_batched_tokens", max_num_batched_tokens)
    if cache is not None and not isinstance(cache, RaggedCache):
        raise ConfigError(
            f"a {type(cache).__name__} cannot be the cache of vmkv.generate: pass a RaggedCache"
        )
    if model.config.is_encoder_decoder:
        raise ConfigError(
            "ragged generation is for decoder-only models; use "
            f"{compat.CACHE_NAME}=VMKVCache.for_encoder_decoder(config)"
        )
    return [
        list(compat.check_tokens(prompt, compat.num_embeddings(model), f"prompt {at}"))
        for at, prompt in enumerate(prompts)
    ]


def _as_list(prompt: Any, at: int) -> list[Any]:
    ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(ids, (list, tuple)):
        raise ConfigError(f"prompt {at} must be a sequence of token ids, not {prompt!r}")
    return list(ids)


def _without_padding(
    row: list[int], at: int, hidden: int | None, mask: Any, is_list: bool
) -> list[int]:
    """Return a prompt without its first tokens that are `hidden`, or that `mask` hides."""
    kept = [token != hidden for token in row]
    if mask is not None:
        kept = [bool(each) for its in mask[at : at + 1] for each in its]
    num_hidden = kept.index(True) if True in kept else 0
    is_text = is_list and mask is None and (kept[-1] or len(row) == 1)
    if len(kept) != len(row) or not (is_text or all(kept[num_hidden:])):
        raise ConfigError(
            f'prompt {at} is not padded on the left only: set the tokenizer\'s padding_side="left",'
            " or pass an attention_mask, with ones where its padding token is text"
        )
    return row[num_hidden:]


def _lengths(input_ids: torch.Tensor, mask: torch.Tensor | None) -> list[int]:
    """Return the prompt lengths of a left-padded batch; waits for the device."""
    batch_size, width = input_ids.shape
    if mask is None:
        return [width] * batch_size
    is_left_padding, _, left_pad = read_left_pad(mask.bool())
    if not is_left_padding:
        raise ConfigError(
            "the attention mask is not left padding (0 … 0 1 … 1 in every row); set the "
            'tokenizer\'s padding_side="left"'
        )
    return [width - pad for pad in left_pad.tolist()]


# ---- cache ------------------------------------------------------------------------------------


class RaggedCache(StoreOwner):
    """The rows of many sequences, on every device that the model is spread over. Not thread-safe.

    The first call with a model allocates memory and determines devices and shapes. Cached prefixes
    were computed with the weights and adapters of that time: after changing these, call
    `forget_prefixes()`.

    Args:
        config: The model's configuration.
        options: Those of `VMKVCache`; `max_batch_size` is the number of sequences that are
            generated or kept at most, by default up to 256.
        host_budget_bytes: Host memory for evicted prefixes, of all devices.
        disk_folder: Folder for prefixes that leave host memory, which a later cache of the same
            model finds; no other cache may use it. Prompts wait for what is read from it.
        disk_budget_bytes: Size of the files in `disk_folder`.

    Raises:
        ConfigError: An option is invalid; or the model has layers whose state is not keys and
            values of their own. The first call raises it for a folder that cannot be used.
        TypeError: There is no such option.

    `close()` or the end of a `with` block frees the cache. A cache dropped without `close` is freed
    when the next one is made, with a ResourceWarning.
    """

    def __init__(
        self,
        config: Any,
        *,
        host_budget_bytes: int = 0,
        disk_folder: str | os.PathLike[str] | None = None,
        disk_budget_bytes: int = 0,
        **options: Any,
    ):
        check_offload_options(host_budget_bytes, disk_folder, disk_budget_bytes)
        if host_budget_bytes and options.get("pool") is not None:
            raise ConfigError("a pool has its own host_budget_bytes: leave it out here")
        self._own(Store(config, CacheOptions(**options), layer_windows(config), num_spare_rows=1))
        self.store = self._store  #: The memory of all sequences.
        # Per sequence, its part on each device.
        self._sequences: dict[int, list[Sequence]] = {}
        self._model: weakref.ref[Any] | None = None
        self._tenant: str | None = None
        self._is_serving = False
        self._host_budget_bytes = host_budget_bytes
        self._disk = (disk_folder, disk_budget_bytes) if disk_folder is not None else None

    # For `help`: without `self`, `config` and `**options`, which are shown in full.
    __signature__ = signature_for_help(*list(inspect.signature(__init__).parameters.values())[2:-1])

    def __getattr__(self, name: str) -> Any:
        if hasattr(Cache, name):  # An access by transformers.
            raise ConfigError(
                "a RaggedCache is for vmkv.generate(model, prompts, cache=cache); model.generate "
                f"and the model itself take {compat.CACHE_NAME}=VMKVCache(model.config)"
            )
        raise AttributeError(f"RaggedCache has no attribute {name!r}")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigError(
            "a RaggedCache cannot be copied or pickled; make another one over the same pool"
        )

    @property
    def has_windows(self) -> bool:
        """Whether some layers have a sliding window."""
        return any([window is not None for window in self.store.windows.values()])

    @property
    def forks_at_ends(self) -> bool:
        """Whether a sequence can be forked at its present end only: with windows or states."""
        return self.has_windows or self.store.cores[0].states is not None

    # ---- a call ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def serving(
        self, model: Any, proof: Proof, num_sequences: int, tenant: str | None
    ) -> Iterator[None]:
        """Serve one call of `vmkv.generate`, whose sequences end with the block.

        Raises `ConfigError`, `ClosedError`, `OutOfAddressSpaceError` and `DriverError`.
        """
        self.store.check_open()
        if self._is_serving:
            raise ConfigError("this cache serves another call of generate; give each its own")
        if tenant is not None and not isinstance(tenant, str):
            raise ConfigError(f"tenant={tenant!r} must be a string, or None")
        self._bind(model, proof)
        num_rows = min([core.max_sequences for core in self.store.cores])
        num_rows = min(num_rows, self.store.options.max_batch_size or num_rows)  # No spare ones.
        if num_sequences > num_rows:
            raise ConfigError(
                f"{num_sequences} prompts do not fit the {num_rows} rows of this cache; make it "
                "with a larger max_batch_size"
            )
        self._is_serving, self._tenant = True, tenant
        try:
            yield
        finally:
            self._is_serving = False
            for sequence_id in tuple(self._sequences):
                self.end(sequence_id)
            for core in self.store.cores:
                core.host_blocks.keep_ahead()

    def _bind(self, model: Any, proof: Proof) -> None:
        """Lay out the layers of the first model, or check that it is the same, unchanged."""
        if self._model is None:
            if layer_windows(model.config) != self.store.windows:
                raise ConfigError(
                    "this cache was made for a model with other layers than this one's; make it "
                    "with this model's configuration"
                )
            self.store.bind_all(proof.signatures, proof.calls)
            for core in self.store.cores if self._host_budget_bytes else ():
                its_bytes = self._host_budget_bytes // len(self.store.cores)
                core.pool.set_budget(its_bytes, MemoryLocation.HOST)
            if self._disk is not None:
                self.store.open_files(model, *self._disk)
            self._model = weakref.ref(model)
        elif self._model() is not model:
            raise ConfigError(
                "this cache holds what another model has computed; make a cache for each model"
            )
        for index, before in self.store.signatures.items():
            signature = proof.signatures[index]
            if before != signature:
                raise ConfigError(
                    f"layer {index} has {signature.k_shape[0]} key heads of "
                    f"{signature.k_shape[1]} in {signature.dtype} on {signature.device}; this "
                    f"cache holds {before.k_shape[0]} of {before.k_shape[1]} in {before.dtype} "
                    f"on {before.device}, from before the model was changed: make a new one"
                )

    def forget_prefixes(self) -> None:
        """Forget cached prefixes in device memory, host memory and files: weights have changed."""
        self.store.check_open()
        for core in self.store.cores:
            core.forget_prefixes()

    # ---- sequences ------------------------------------------------------------------------

    def find(self, prompt: abc.Sequence[int]) -> int:
        """Return how many tokens of `prompt` a sequence would find; about 5 ns for each."""
        return self.store.cores[0].find_prefix(prompt, self._tenant)

    def begin(
        self, sequence_id: int, num_tokens: int, prompt: abc.Sequence[int] | None = None
    ) -> int:
        """Begin a sequence of about `num_tokens`; return how many tokens of `prompt` are cached.

        After an `OutOfAddressSpaceError` or a `ConfigError` it was not begun.
        """
        parts = self._sequences[sequence_id] = []  # Ended with the call, if one cannot be opened.
        for core in self.store.cores:
            if prompt is not None:
                _read(core, prompt, self._tenant)
            parts.append(_open(core, num_tokens, prompt, self._tenant))
        return _cut_to_least(parts)

    def row(self, sequence_id: int) -> int:
        """Return the row of a sequence on the first device."""
        return self._sequences[sequence_id][0].row

    def run(self, stepper: Stepper, pieces: abc.Sequence[Piece]) -> StepLogits:
        """Grow the sequences of `pieces`, by slot, and run them; on a device all grow or none."""
        sequences = [self._sequences[piece.slot] for piece in pieces]
        ends = [piece.num_tokens for piece in pieces]
        on_devices = list(zip(*sequences, strict=True))
        for core, parts in zip(self.store.cores, on_devices, strict=True):
            core.grow(list(zip(parts, ends, strict=True)))
        rows = [[part.row for part in parts] for parts in on_devices]
        with contextlib.ExitStack() as stack:
            for core, its in zip(self.store.cores, rows, strict=True):
                starts = [piece.num_past_tokens for piece in pieces]
                stack.enter_context(core.submitting(zip(its, starts, ends, strict=True)))
            return stepper.run(pieces, rows[1:])

    def record(self, sequence_id: int, token_ids: abc.Sequence[int]) -> None:
        """Append token ids that a sequence's steps have computed, at most as many as it holds."""
        for sequence in self._sequences[sequence_id]:
            sequence.record(token_ids)

    def end(self, sequence_id: int) -> None:
        """End a sequence; its rows are parked for the next one, on every device."""
        for sequence in self._sequences.pop(sequence_id):
            sequence.close()


def _read(core: KVCache, prompt: abc.Sequence[int], tenant: str | None) -> None:
    """Wait until host memory holds what files hold of a prompt."""
    if core.host_blocks.files is None:
        return
    with core.pool.lock:
        num_there, _ = find_beginning(core, prompt, tenant)
        reading = core.host_blocks.read(prompt, tenant, num_there, math.inf)
    if reading is not None:
        reading.wait()


def _open(
    core: KVCache, num_tokens: int, prompt: abc.Sequence[int] | None, tenant: str | None
) -> Sequence:
    if prompt is not None:
        # Sharing needs memory for a tail, or a second row; computing may need neither.
        with contextlib.suppress(CapacityError):
            return core.open(num_tokens, prompt=prompt, tenant=tenant)
    return core.open(num_tokens, tenant=tenant)


def _cut_to_least(sequences: abc.Sequence[Sequence]) -> int:
    """Truncate the parts of a sequence on all devices to the shortest; returns its length."""
    least = min([each.num_tokens for each in sequences])
    if any([each.num_tokens > least for each in sequences]):
        try:
            for each in sequences:
                each.truncate(least)
        except ConfigError:  # A window has passed that point.
            for each in sequences:
                each.truncate(0)
            least = 0
    return least
