"""Batched sampling on the device, without synchronisation.

Token i of a request is drawn with Gumbel noise that is a hash of `(seed, i, token id)` alone, so
the result depends neither on the rest of the batch nor on the path, which the host selects by what
the slots need:

  greedy       argmax of the logits; can be part of a CUDA graph
  kernel       on CUDA, everything else: one launch (`draw.py`)
  full         elsewhere, noise over the whole vocabulary: temperature and min-p only
  candidates   elsewhere, tokens sorted by likelihood: top-k, top-p

Biases, penalties and bans change the logits before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from ..attention.nvrtc import FORMATS
from ..errors import CapacityError
from ..step.piece import likeliest
from ..units import format_bytes
from .draw import MAX_VOCABULARY, DrawKernel
from .params import SamplingParams

# ---- random --------------------------------------------------------------------------------------

# Constants of splitmix64 (as signed integers: arithmetic wraps) and murmur3.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_SPLIT_1 = 0xBF58476D1CE4E5B9 - 2**64
_SPLIT_2 = 0x94D049BB133111EB - 2**64
_LOW_32 = 2**32 - 1
_MURMUR_1 = 0x85EBCA6B
_MURMUR_2 = 0xC2B2AE35


def row_keys(seeds: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Derive one random key per row, `[n] int64`, from seeds and counters, both `[n] int64`."""
    return _mix_64(_mix_64(seeds) + counters * _GOLDEN)


def gumbel_noise(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float32, of `token_ids` `[vocabulary]` or `[n, k]`, below 2^32."""
    low, high = keys & _LOW_32, (keys >> 32) & _LOW_32
    bits = _mix_32(token_ids ^ low[:, None])
    bits = _mix_32((bits + high[:, None]) & _LOW_32)
    # An exponential variable by inversion, from the end where floats are densest, as the smallest
    # wins. 32 bits make ties between tokens rare.
    uniform = ((bits.float() + 0.5) * 2.0**-32).clamp_(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))


def _mix_64(bits: torch.Tensor) -> torch.Tensor:
    """splitmix64's finalizer."""
    bits = bits + _GOLDEN
    bits = (bits ^ _shifted(bits, 30)) * _SPLIT_1
    bits = (bits ^ _shifted(bits, 27)) * _SPLIT_2
    return bits ^ _shifted(bits, 31)


def _mix_32(bits: torch.Tensor) -> torch.Tensor:
    """murmur3's finalizer on 32 bits, held in 64 to avoid the sign."""
    bits = ((bits ^ (bits >> 16)) * _MURMUR_1) & _LOW_32
    bits = ((bits ^ (bits >> 13)) * _MURMUR_2) & _LOW_32
    return bits ^ (bits >> 16)


def _shifted(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Logical right shift; torch's is arithmetic."""
    shifted: torch.Tensor = (bits >> by) & (2 ** (64 - by) - 1)
    return shifted


# ---- sampler -------------------------------------------------------------------------------------

#: Columns of the float parameters.
_TEMPERATURE, _TOP_P, _MIN_P, _REPETITION, _PRESENCE, _FREQUENCY = range(6)
#: Columns of the integer parameters, followed by the token count sent with them.
_SEED, _TOP_K, _MIN_TOKENS, _COUNT = range(4)
#: Bits of a token's mark: it is in the prompt, is never drawn, or not before `min_tokens`.
_PROMPT, _NEVER, _EARLY = 1, 2, 4
#: Bounds that keep scores in the range of float32; a temperature of 1e-5 is greedy in practice.
_LEAST, _MOST = 1e-5, 1e5


class SampledTokens(NamedTuple):
    """Sampled tokens, on the device; log-probabilities are None unless a slot requests them."""

    token_ids: torch.Tensor  # `[n] int64`; -1 if bans, a mask and logits processors leave no token.
    logprobs: torch.Tensor | None = None  # `[n] float32`, under the model's or processed logits.
    top_token_ids: torch.Tensor | None = None  # `[n, k] int64`, likeliest first, as many as wanted.
    top_logprobs: torch.Tensor | None = None  # `[n, k] float32`, of `top_token_ids`.

    def rows(self) -> Iterator[tuple[float, list[int], list[float]]]:
        """Iterate over the log-probabilities of each token; over nothing if there are none."""
        return zip(*(each.tolist() for each in self[1:] if each is not None), strict=True)

    def to_host(self) -> SampledTokens:
        """Begin to copy the tensors to pinned memory; synchronise before they are read."""
        return SampledTokens._make(None if each is None else _to_host(each) for each in self)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class _Needs(NamedTuple):
    """Sampling features of a slot; those of a batch are the greatest of its slots'."""

    draws: bool = False
    cuts: bool = False
    orders: bool = False
    num_candidates: int = 0  # Of a drawing slot: tokens to choose among, at most.
    penalties: bool = False
    bans: bool = False
    biases: bool = False
    logprobs: int = -1

    @classmethod
    def of(cls, params: SamplingParams, vocab_size: int) -> _Needs:
        draws = params.temperature > 0
        num_candidates = min(params.top_k or vocab_size, vocab_size) if draws else 0
        orders = draws and (num_candidates < vocab_size or params.top_p < 1)
        return cls(
            draws,
            orders or (draws and params.min_p > 0),
            orders,
            num_candidates,
            params.has_penalties,
            # The masks of a grammar leave out stop tokens where they may.
            bool(params.min_tokens and params.stop_token_ids and params.structured_outputs is None)
            or params.allowed_token_ids is not None
            or any(len(each) == 1 for each in params.bad_words),
            bool(params.logit_bias),
            -1 if params.logprobs is None else params.logprobs,
        )


_PLAIN = _Needs()


class Sampler:
    """Samples for `max_num_seqs` slots, and one greedy slot for padding.

    `vocab_size` is the logits' number of columns. `CapacityError` if the device has no memory for
    the token counts, 5 bytes per slot and vocabulary entry.
    """

    tells_processed = False  #: See `EngineOptions.logprobs_mode`.

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device | str):
        self.max_num_seqs = max_num_seqs
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        slots = max_num_seqs + 1
        self._floats = torch.zeros(slots, 6, dtype=torch.float32, device=device)
        self._floats[-1, _REPETITION] = 1.0
        self._integers = torch.zeros(slots, 3, dtype=torch.int64, device=device)
        #: Number of tokens sampled in each slot: the counter of its random generator.
        self._counts = torch.zeros(slots, dtype=torch.int64, device=device)
        self._needs: dict[int, _Needs] = {}  # By slot, if it needs more than greedy decoding.
        #: Per slot: float parameters, and integer parameters with the count, to be uploaded.
        self._staged: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._make_tables()  # Now: the cache's budget is fitted to the remaining memory.
        #: Biased tokens of each slot, and their biases; rows are padded with biases of 0.
        self._biased = torch.zeros(slots, 0, dtype=torch.int64, device=device)
        self._biases = torch.zeros(slots, 0, dtype=torch.float32, device=device)
        self._kernel: DrawKernel | None = None
        is_cuda = self.device.type == "cuda"
        # The kernel reduces over warps by instructions of 8.0.
        is_new = is_cuda and torch.cuda.get_device_capability(self.device) >= (8, 0)
        if is_new and vocab_size <= MAX_VOCABULARY:
            self._kernel = DrawKernel(slots, vocab_size, self.device)
        #: Masks of the bits of a byte.
        self._bits = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=device)

    # ---- slots ----------------------------------------------------------------------------

    def set_slot(
        self, slot: int, params: SamplingParams, prompt: Sequence[int], output: Sequence[int] = ()
    ) -> None:
        """Set the state of a slot; see `ModelRunner.set_slot`."""
        if not self._marks.numel():  # After `sleep`.
            self._make_tables()
        needs, earlier = _Needs.of(params, self.vocab_size), self._needs.get(slot, _PLAIN)
        if needs.penalties or needs.bans or earlier.bans:
            self._mark(slot, params, prompt, output)
        if needs.biases or earlier.biases:
            self._bias(slot, params)
        self._needs.pop(slot, None)  # Not before: a call that failed is repeated.
        if needs != _PLAIN:
            self._needs[slot] = needs
        self._staged[slot] = self._as_tensors(params, needs, len(output))

    def _make_tables(self) -> None:
        size = (self.max_num_seqs + 1, self.vocab_size)
        try:
            marks = torch.zeros(size, dtype=torch.uint8, device=self.device)
            counts = torch.zeros(size, dtype=torch.int32, device=self.device)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise CapacityError(
                f"the sampler's token counts need {format_bytes(5 * math.prod(size))} on "
                f"{self.device} (5 bytes for each of {size[1]} tokens in {size[0]} slots), which "
                "are not free; lower max_num_seqs"
            ) from error
        self._marks, self._token_counts = marks, counts

    def sleep(self) -> None:
        """Free the token counts until the next `set_slot`; no slot is in use, nor the device."""
        self._needs.clear()
        self._biases.zero_()
        self._marks, self._token_counts = self._marks.new_empty(0), self._token_counts.new_empty(0)

    def is_greedy(self, slots: Sequence[int]) -> bool:
        """Whether all slots are greedy and stateless, so that `likeliest` can replace `sample`."""
        return self._needs.keys().isdisjoint(slots)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile the kernel for logits of `dtype`, and for float32 that biases make of them."""
        if self._kernel is not None:
            for each in {dtype, torch.float32}:
                logits = torch.zeros(1, self.vocab_size, dtype=each, device=self.device)
                slots = torch.tensor([self.max_num_seqs], device=self.device)
                tables = self._floats, self._integers, self._counts, None
                self._kernel.draw(logits, slots, tables)

    # ---- sampling -------------------------------------------------------------------------

    def sample(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        slot_ids: Sequence[int] | None = None,
        processed: torch.Tensor | None = None,
        masks: torch.Tensor | None = None,
    ) -> SampledTokens:
        """Sample the next token of each slot, and count it. Never synchronises.

        `logits` are `[n, vocabulary]` and not changed; `slots` are distinct, `[n] int64` on the
        device, `slot_ids` the same on the host. `processed` are the logits after logits processors.
        `masks`, `[n, words] int32`, has a bit for each token that may be chosen.
        """
        scores = logits if processed is None else processed
        slot_ids = range(self.max_num_seqs + 1) if slot_ids is None else slot_ids
        if masks is None and self.is_greedy(slot_ids):
            tokens = likeliest(scores)
            return SampledTokens(tokens if processed is None else _allowed(tokens, scores))
        self._upload()
        its = {self._needs.get(slot, _PLAIN) for slot in slot_ids}
        needs = _Needs(*map(max, zip(*its, strict=True)))
        scores = self._adjusted(scores, slots, needs)
        if masks is not None:
            is_out = (masks.view(torch.uint8)[..., None] & self._bits) == 0
            scores = scores.masked_fill(is_out.flatten(1)[:, : self.vocab_size], -math.inf)
        if self._kernel is not None:
            scores = scores if scores.dtype in FORMATS else scores.float()
            token_counts = self._token_counts if needs.penalties else None
            tables = self._floats, self._integers, self._counts, token_counts
            tokens = self._kernel.draw(scores, slots, tables)
        else:
            tokens = self._choose(scores.float(), slots, needs)
            if needs.penalties:
                ones = torch.ones_like(tokens, dtype=torch.int32)
                self._token_counts.index_put_((slots, tokens), ones, accumulate=True)
            self._counts[slots] += 1
        is_limited = needs.bans or masks is not None or processed is not None
        told = _allowed(tokens, scores) if is_limited else tokens
        if needs.logprobs < 0:
            return SampledTokens(told)
        if self.tells_processed:
            logits = self._processed(scores.float(), slots, needs, tokens)
        sampled = with_logprobs(tokens, logits, min(needs.logprobs, self.vocab_size))
        return sampled._replace(token_ids=told)

    def _choose(self, scores: torch.Tensor, slots: torch.Tensor, needs: _Needs) -> torch.Tensor:
        if not needs.draws:
            return likeliest(scores)
        keys = row_keys(self._integers[slots, _SEED], self._counts[slots])
        ordered, ids, is_out = self._filtered(scores, slots, needs)
        is_out |= self._floats[slots, _TEMPERATURE, None] == 0
        is_out.scatter_(1, ordered.max(-1, keepdim=True).indices, False)
        noisy = (ordered + gumbel_noise(keys, ids)).masked_fill(is_out, -math.inf)
        return ids.expand_as(noisy).gather(1, noisy.argmax(-1, keepdim=True))[:, 0]

    def _scaled(self, scores: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        temperature = self._floats[slots, _TEMPERATURE, None]
        return scores / temperature.masked_fill(temperature == 0, 1.0)

    def _filtered(
        self, scores: torch.Tensor, slots: torch.Tensor, needs: _Needs
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        floats, integers = self._floats[slots], self._integers[slots]
        ordered = self._scaled(scores, slots)
        ids = torch.arange(self.vocab_size, device=scores.device)
        if needs.num_candidates < self.vocab_size:
            ordered, ids = _likeliest(ordered, needs.num_candidates)
        elif needs.orders:
            ordered, ids = ordered.sort(dim=-1, descending=True, stable=True)
        is_out = ordered < ordered.amax(-1, keepdim=True) + floats[:, _MIN_P, None]
        if needs.orders:
            rank = torch.arange(ids.shape[1], device=ids.device)
            ordered = ordered.masked_fill(rank >= integers[:, _TOP_K, None], -math.inf)
            # A token stays while the probability of the likelier ones has not reached top-p.
            probabilities = ordered.softmax(-1)
            before = probabilities.cumsum(-1) - probabilities
            is_out |= before >= floats[:, _TOP_P, None]
        return ordered, ids, is_out

    def _processed(
        self, scores: torch.Tensor, slots: torch.Tensor, needs: _Needs, tokens: torch.Tensor
    ) -> torch.Tensor:
        if not needs.draws:
            return scores
        if not needs.cuts:
            return self._scaled(scores, slots)
        ordered, ids, is_out = self._filtered(scores, slots, needs)
        ordered = ordered.masked_fill(is_out, -math.inf)
        kept = torch.full_like(scores, -math.inf).scatter_(1, ids.expand_as(ordered), ordered)
        # A drawn token was not ruled out; the kernel rounds otherwise at the edge.
        drawn, temperature = tokens[:, None], self._floats[slots, _TEMPERATURE, None]
        kept.scatter_(1, drawn, scores.gather(1, drawn) / temperature)
        return torch.where(temperature == 0, scores, kept)

    def _adjusted(self, scores: torch.Tensor, slots: torch.Tensor, needs: _Needs) -> torch.Tensor:
        if needs.biases:
            # Padding adds 0 to the first token, so the order of additions does not matter.
            scores = scores.float().scatter_add(1, self._biased[slots], self._biases[slots])
        if needs.penalties or needs.bans:
            scores, marks = scores.float(), self._marks[slots]
        if needs.penalties:
            floats = self._floats[slots]
            counts = self._token_counts[slots]
            is_in_output = counts > 0
            repetition = floats[:, _REPETITION, None]
            scores = torch.where(
                (marks & _PROMPT > 0) | is_in_output,
                torch.where(scores > 0, scores / repetition, scores * repetition),
                scores,
            )
            scores = scores - counts * floats[:, _FREQUENCY, None]
            scores = scores - is_in_output * floats[:, _PRESENCE, None]
        if needs.bans:
            is_early = self._counts[slots] < self._integers[slots, _MIN_TOKENS]
            bits = is_early.to(torch.uint8) * _EARLY + _NEVER
            scores = scores.masked_fill(marks & bits[:, None] > 0, -math.inf)
        return scores

    # ---- state ----------------------------------------------------------------------------

    def _as_tensors(
        self, params: SamplingParams, needs: _Needs, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        floats = [
            params.temperature and _clamped(params.temperature),
            params.top_p,
            # As a difference from the greatest logit.
            math.log(params.min_p) if params.min_p else -math.inf,
            _clamped(params.repetition_penalty),
            params.presence_penalty,
            params.frequency_penalty,
        ]
        top_k = min(params.top_k, self.vocab_size) or self.vocab_size
        integers = [params.seed or 0, top_k, params.min_tokens if needs.bans else 0, count]
        return torch.tensor(floats, dtype=torch.float32), torch.tensor(integers)

    def _upload(self) -> None:
        if not self._staged:
            return
        slots = torch.tensor(list(self._staged)).to(self.device, non_blocking=True)
        floats = torch.stack([each[0] for each in self._staged.values()])
        integers = torch.stack([each[1] for each in self._staged.values()])
        integers = integers.to(self.device, non_blocking=True)
        self._floats.index_copy_(0, slots, floats.to(self.device, non_blocking=True))
        self._integers.index_copy_(0, slots, integers[:, :_COUNT])
        self._counts.index_copy_(0, slots, integers[:, _COUNT])
        # Last: after a device failure, the next step uploads them again.
        self._staged.clear()

    def _mark(
        self, slot: int, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
    ) -> None:
        marks, counts = self._marks[slot].zero_(), self._token_counts[slot].zero_()
        if params.allowed_token_ids is not None:
            marks.fill_(_NEVER).index_fill_(0, self._sent(params.allowed_token_ids), 0)
        words: Any = params.bad_words  # Token ids, in resolved parameters.
        never = [each[0] for each in words if len(each) == 1]
        has_early = params.min_tokens and params.structured_outputs is None
        early = params.stop_token_ids if has_early else ()
        known: Sequence[int] = ()
        if params.has_penalties:
            # An embedding may have more rows than there are logits; those are never sampled.
            known = [each for each in prompt if each < self.vocab_size]
            generated = self._sent(output)
            counts.index_add_(0, generated, torch.ones_like(generated, dtype=torch.int32))
        for token_ids, bit in ((never, _NEVER), (early, _EARLY), (known, _PROMPT)):
            if token_ids:
                marks[self._sent(token_ids)] |= bit

    def _bias(self, slot: int, params: SamplingParams) -> None:
        token_ids, width = list(params.logit_bias), self._biased.shape[1]
        if len(token_ids) > width:
            more = (0, len(token_ids) - width)
            self._biased, self._biases = pad(self._biased, more), pad(self._biases, more)
        self._biases[slot] = 0
        self._biased[slot, : len(token_ids)] = self._sent(token_ids)
        biases = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
        self._biases[slot, : len(token_ids)] = biases.to(self.device, non_blocking=True)

    def _sent(self, token_ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(token_ids, dtype=torch.int64).to(self.device, non_blocking=True)


def is_out_of_memory(error: Exception) -> bool:
    """Whether the device or the host was out of memory; torch on the CPU has no class for that."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def _allowed(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return tokens.masked_fill(scores.gather(1, tokens[:, None])[:, 0] == -math.inf, -1)


def _clamped(value: float) -> float:
    return min(max(value, _LEAST), _MOST)


def _likeliest(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Greatest `count` of `scores [n, vocabulary] float32`, in order, and their columns.

    Ties go to the lower column; `topk` alone breaks them in a way that depends on `count`.
    """
    if not count:
        return scores.new_empty(len(scores), 0), scores.new_empty(len(scores), 0, dtype=torch.int64)
    bits = (scores + 0.0).view(torch.int32)  # Adding 0.0 turns -0.0 into 0.0.
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # Integers in the order of the floats.
    last = scores.shape[1] - 1
    keys = bits.long().bitwise_left_shift_(32)
    keys |= torch.arange(last, -1, -1, device=scores.device)
    ids = last - (keys.topk(count, dim=-1).values & 0xFFFFFFFF)
    return scores.gather(1, ids), ids


def with_logprobs(tokens: torch.Tensor, logits: torch.Tensor, most: int) -> SampledTokens:
    """Add log-probabilities of `tokens [n]` and of the `most` likeliest to them, under `logits`."""
    logprobs = logits.float().log_softmax(-1)
    top, top_ids = _likeliest(logprobs, most)
    return SampledTokens(tokens, logprobs.gather(1, tokens[:, None])[:, 0], top_ids, top)
