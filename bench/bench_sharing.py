"""What does it cost to begin with what another sequence holds, and how much memory does it take?

Question. How long does a fork of 8,192 tokens of Llama-3-8B take, and a sequence whose prompt
begins with 8,192 tokens that the cache holds, and what do 64 requests with a common prefix of
2,048 tokens hold together?

Prediction. 8,192 tokens that came as one prompt are 16 extents of 64 MiB; mapping one again and
granting access costs 35 us: 0.6 ms, and no new memory. One token less leaves an extent that is not
whole: 15 mappings and a fresh extent of 64 MiB, filled by a copy of 35 us. A sequence that was
decoded from 2,048 tokens on has grown by small extents, 128 of them: 4 ms and more, and there a
fork is slower than mapping fresh memory and copying 1 GiB (0.8 and 0.5 ms). A prefix hit compares
8,192 tokens with those of rows, 0.1 ms, most of it to read them from a list, and then forks: 0.7
ms. If the row is parked it is adopted as it is: no driver call, and the comparison remains. 64
requests over 2,048 tokens share 4 whole extents and have 4 pages each: 1.00 times what the tokens
need. A prefix of 2,000 tokens ends within an extent, because the donor's question came with it: 464
tokens, 58 MiB, are copied once, for the second request, whose extents end where the prefix does,
and serve the others. The last page of the prefix is by itself then, and cheaper to copy than to
map: 62 * 2 MiB. (250 + 58 + 124 + 512) MiB of 762 are 1.24 times. If the prefix was computed by
itself first, there is no second copy: 1.17 times.

Method. `KVCache` by itself. `host_us` is the wall time of the call, `done_us` until the device has
done the copies too, both with the device idle before. `new_bytes` is what the cache holds more
after it. Variants take turns within each repeat. Before each repeat all free and parked memory is
given back, so fresh extents are created, not found; but for the adopted row, which is the point.
For requests, all 64 are live at the end, and each was opened with its whole prompt.

Rivals. The same code with a cost model that never maps an extent twice: a copy, which is what a
cache of dense tensors does. For the requests by arithmetic: a block table of 16 tokens with a
prefix cache, whose whole blocks are shared and whose rest is computed again, and no sharing.

Not measured. The model that would compute the prefix (about 220 ms for 8,192 tokens); attention
over shared memory; many threads.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from harness import Bench, Figure, Row, in_turns, on_gpu, quartiles, synchronize
from models import LLAMA_3_8B, SEED, CacheShape, close_cache, open_cache, open_pool
from rivals import BLOCK_TOKENS, block_table_bytes

import vmkv
from vmkv import CostModel
from vmkv.units import GiB, KiB, MiB

VOCABULARY = 128_256
COUNTED = ("calls", "new_bytes")


@dataclass(frozen=True)
class Case:
    """A model's cache, and what is shared in it."""

    shape: CacheShape
    num_tokens: int  # of the sequence that is forked, or hit
    prompt_tokens: int  # of it, where the rest is decoded
    prefix_tokens: int  # that requests have in common
    odd_prefix_tokens: int  # the same, where an extent does not end
    own_tokens: int  # of each request
    num_requests: int
    page_bytes: int
    budget_bytes: int
    smoke: bool = False


LLAMA = Case(LLAMA_3_8B, 8192, 2048, 2048, 2000, 64, 64, 2 * MiB, 24 * GiB)
SMOKE = Case(CacheShape("smoke", 4, 2, 16), 1024, 256, 256, 240, 16, 4, 4 * KiB, 64 * MiB, True)

ALIAS, COPY = "vmkv", "copying"
#: Mapping costs so much that copying is always cheaper.
NEVER_ALIAS = CostModel(map_us=1e12)


class Subject:
    """A cache of one variant over a pool of its own, with nothing in it."""

    def __init__(self, case: Case, variant: str, num_rows: int):
        self.case, self.variant = case, variant
        pool = open_pool(case.budget_bytes, smoke=case.smoke, page_bytes=case.page_bytes)
        cost_model = NEVER_ALIAS if variant == COPY else None
        options = {"max_tokens": 2 * case.num_tokens, "max_sequences": num_rows}
        self.cache = open_cache(pool, case.shape, cost_model=cost_model, **options)

    def measure(self, work: Callable[[], vmkv.Sequence]) -> tuple[Row, vmkv.Sequence]:
        """The cost of `work`, and its result."""
        backend = self.cache.pool.backend
        synchronize()
        resident_bytes = self.cache.stats().resident_bytes
        calls = Counter(backend.calls)
        start = time.perf_counter()
        made = work()
        host_us = 1e6 * (time.perf_counter() - start)
        synchronize()
        row: Row = {"host_us": host_us, "done_us": 1e6 * (time.perf_counter() - start)}
        row["calls"] = (Counter(backend.calls) - calls).total()
        row["new_bytes"] = self.cache.stats().resident_bytes - resident_bytes
        return row, made


def token_ids(num_tokens: int, seed: int) -> list[int]:
    """Random tokens, different for each seed."""
    source = random.Random(seed)
    return [source.randrange(VOCABULARY) for _ in range(num_tokens)]


# ---- one sequence -----------------------------------------------------------------------------


def fork_samples(subject: Subject) -> Iterator[tuple[str, Row]]:
    """Forks of a sequence given as a prompt, whole and with an odd end, and of a decoded one."""
    case, cache = subject.case, subject.cache
    source = cache.open()
    source.append(case.num_tokens)
    for operation, num_tokens in (("fork", case.num_tokens), ("fork, odd", case.num_tokens - 1)):
        cache.trim()
        sample, fork = subject.measure(lambda end=num_tokens: source.fork(end))
        fork.close()
        yield operation, sample
    source.close()
    cache.trim()
    source = cache.open()
    source.append(case.prompt_tokens)
    for _ in range(case.num_tokens - case.prompt_tokens):
        source.append(1)
    sample, fork = subject.measure(source.fork)
    fork.close()
    source.close()
    cache.trim()
    yield "fork of a decoded one", sample


def prefix_samples(subject: Subject) -> Iterator[tuple[str, Row]]:
    """Prompts whose prefix is in a live row, in a parked row, and in no row."""
    case, cache = subject.case, subject.cache
    common = token_ids(case.num_tokens, SEED)
    question = token_ids(case.own_tokens, SEED + 1)
    prompt = common + question
    donor = cache.open()
    donor.append(case.num_tokens)

    def record() -> vmkv.Sequence:
        donor.record(common)
        return donor

    yield "recording tokens", subject.measure(record)[0]
    sample, found = subject.measure(lambda: cache.open(prompt=prompt))
    check_hit(found, case.num_tokens)
    found.close()
    yield "prefix hit, live row", sample
    cache.trim()
    donor.close()
    sample, found = subject.measure(lambda: cache.open(prompt=prompt))
    check_hit(found, case.num_tokens)
    found.close()
    yield "prefix hit, parked row", sample
    sample, other = subject.measure(lambda: cache.open(prompt=question + common))
    check_hit(other, 0)
    other.close()
    yield "prefix miss", sample
    cache.trim()


def check_hit(sequence: vmkv.Sequence, num_tokens: int) -> None:
    """Check the number of cached tokens; otherwise the time means nothing."""
    if sequence.num_cached_tokens != num_tokens:
        raise AssertionError(f"{sequence} began with {sequence.num_cached_tokens} tokens")


def measure_operations(case: Case, repeats: int) -> list[Row]:
    """Forks and hits by both variants."""
    subjects = [Subject(case, variant, 3) for variant in (ALIAS, COPY)]
    samples: dict[tuple[str, str], list[Row]] = {}
    for subject, at in in_turns(subjects, repeats, warmup=1):
        for taker in (fork_samples, prefix_samples):
            for operation, sample in taker(subject):
                if at >= 0:
                    samples.setdefault((operation, subject.variant), []).append(sample)
    for subject in subjects:
        close_cache(subject.cache)
    rows = []
    for (operation, variant), taken in samples.items():
        row: Row = {"operation": operation, "variant": variant, "tokens": case.num_tokens}
        for name in ("host_us", "done_us"):
            row |= quartiles(name, [each[name] for each in taken])
        rows.append(row | {name: max(each[name] for each in taken) for name in COUNTED})
    operations = list(dict.fromkeys(operation for operation, _ in samples))
    return sorted(rows, key=lambda row: operations.index(row["operation"]))


# ---- many requests ----------------------------------------------------------------------------


def serve(case: Case, prefix_tokens: int, *, is_alone: bool) -> list[Row]:
    """Live requests with a common prefix; a row for vmkv and one for each rival.

    Args:
        case: The case.
        prefix_tokens: What they have in common.
        is_alone: Whether the first one computes the prefix by itself, before its own tokens.
    """
    cache = Subject(case, ALIAS, case.num_requests).cache
    common = token_ids(prefix_tokens, SEED)
    seeds = range(SEED + 1, SEED + 1 + case.num_requests)
    prompts = [common + token_ids(case.own_tokens, seed) for seed in seeds]
    whole_tokens = prefix_tokens // BLOCK_TOKENS * BLOCK_TOKENS
    live = []
    start = time.perf_counter()
    for at, prompt in enumerate(prompts):
        sequence = cache.open(prompt=prompt)
        check_hit(sequence, whole_tokens if at else 0)
        if is_alone and not at:
            sequence.append(prefix_tokens)
        sequence.append(len(prompt) - sequence.num_tokens)
        sequence.record(prompt[sequence.num_cached_tokens :])
        live.append(sequence)
    synchronize()
    request_us = 1e6 * (time.perf_counter() - start) / case.num_requests
    resident_bytes = cache.stats().resident_bytes
    close_cache(cache)

    token_bytes, count = case.shape.token_bytes, case.num_requests
    needed_bytes = (prefix_tokens + count * case.own_tokens) * token_bytes
    rest_tokens = prefix_tokens - whole_tokens + case.own_tokens
    tails_bytes = block_table_bytes([rest_tokens] * count, token_bytes)
    held = {
        ALIAS: resident_bytes,
        "block table, 16": whole_tokens * token_bytes + tails_bytes,
        "no sharing": count * (prefix_tokens + case.own_tokens) * token_bytes,
    }
    operation = f"{case.num_requests} requests" + (", prefix computed alone" if is_alone else "")
    rows = []
    for variant, num_bytes in held.items():
        row: Row = {"operation": operation, "variant": variant, "tokens": prefix_tokens}
        row |= {"resident_bytes": num_bytes, "resident_ratio": num_bytes / needed_bytes}
        rows.append(row | ({"request_us": request_us} if variant == ALIAS else {}))
    return rows


# ---- figures ----------------------------------------------------------------------------------


def promised(case: Case, rows: Sequence[Row]) -> list[Figure]:
    """Forks, prefix hits, and what shared prefixes hold; the unfavourable ones too."""
    by_key = {(row["operation"], row["variant"], row["tokens"]): row for row in rows}
    found = []

    def of(operation: str, variant: str = ALIAS, tokens: int = case.num_tokens) -> Row:
        return by_key[operation, variant, tokens]

    def ms(operation: str, variant: str = ALIAS) -> float:
        return of(operation, variant)["done_us"] / 1e3

    def add(name: str, what: str, got: float, unit: str, rival: str, bound: float | None) -> None:
        found.append(Figure(name, what, got, unit, bound, rival=rival))

    requests = f"{case.num_requests} requests"
    forks = ("fork", "fork, odd")
    length = f"{case.num_tokens:,}-token"
    what = f"fork of a {length} sequence, the slower of a whole and an odd end"
    rival = f"{ms('fork', COPY):.2f} ms (copying it)"
    add("fork_ms", what, max(map(ms, forks)), "ms", rival, on_gpu(1.5))
    what = "new memory of that fork, the larger of the two"
    got = max(of(each)["new_bytes"] for each in forks) / MiB
    rival = f"{of('fork', COPY)['new_bytes'] / MiB:,.0f} MiB (copying it)"
    add("fork_new_mib", what, got, "MiB", rival, 64)
    name = "fork of a decoded one"
    what = f"fork of a {length} sequence that was decoded from {case.prompt_tokens:,} tokens on"
    add("fork_decoded_ms", what, ms(name), "ms", f"{ms(name, COPY):.2f} ms (copying it)", None)
    name, what = "prefix hit, live row", f"prefix hit of {case.num_tokens:,} tokens"
    rival = f"{ms(name, COPY):.2f} ms (copying it)"
    add("prefix_alias_ms", f"{what} that a live row holds", ms(name), "ms", rival, on_gpu(1.5))
    rival, got = f"{of(name)['calls']} calls (mapping it again)", of("prefix hit, parked row")
    what = f"driver calls of a {what} in a parked row"
    add("prefix_adopt_calls", what, got["calls"], "calls", rival, 0)
    tokens = case.prefix_tokens
    what = f"resident, of prefix once and {case.num_requests} × {case.own_tokens} tokens "
    rival = f"{of(requests, 'no sharing', tokens)['resident_ratio']:.1f} × (no sharing)"
    got = of(requests, tokens=tokens)["resident_ratio"]
    add("shared_prefix_ratio", f"{what}(prefix of {tokens:,})", got, "×", rival, 1.05)
    tokens = case.odd_prefix_tokens
    alone = of(f"{requests}, prefix computed alone", tokens=tokens)["resident_ratio"]
    what = f"the same, where the prefix of {tokens:,} tokens ends within an extent "
    what += f"(computed by itself first: {alone:.2f} ×)"
    blocks = of(requests, "block table, 16", tokens)["resident_ratio"]
    got = of(requests, tokens=tokens)["resident_ratio"]
    rival = f"{blocks:.2f} × (blocks of 16 tokens)"
    add("shared_odd_prefix_ratio", what, got, "×", rival, None)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write."""
    bench = Bench("sharing", __doc__)
    smoke = bench.parse(argv).smoke
    case = SMOKE if smoke else LLAMA
    rows = measure_operations(case, 2 if smoke else 11)
    for prefix_tokens in (case.prefix_tokens, case.odd_prefix_tokens):
        for is_alone in (False, True):
            rows += serve(case, prefix_tokens, is_alone=is_alone)
    constants = {"token_bytes": case.shape.token_bytes, "own_tokens": case.own_tokens}
    return bench.finish(rows, promised(case, rows), constants | {"seed": SEED})


if __name__ == "__main__":
    sys.exit(main())
