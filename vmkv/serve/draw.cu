// Tokens are ordered by a key: how far their score is behind the greatest one, then their id. Each
// filter is a bound on keys, and the best token by score plus Gumbel noise among the keys below the
// bound is drawn. The bound of top-p is not searched: the best token of all is right if the mass
// before its key is below top-p; otherwise its key is the next bound, below which the next best
// token is searched. With top-p 0.95 one row of twenty takes a second round; each round halves what
// is left. The bound of top-k is selected by digits of the key (radix selection); top-p refers to
// the mass below it.
//
// A row is cut into parts of equal size, each for a block, which find the greatest score, the mass
// and the best token; the block that finishes last goes on with the whole row, from the L2 cache.
// Parts depend on the vocabulary alone, floats are added in a fixed order and atomics count
// integers, so a row's token depends neither on the batch nor on the order of blocks.
//
// A token's noise is -log(e), where e is at least the uniform number that it is made of. So the
// token can only beat the best one so far if that number is at most exp(score - best), and
// logarithms are computed for few tokens. None is computed for tokens of so little weight that even
// all of them together are outside of top-p or min-p.
//
// `packed` tokens are in the order of their values, the first of equal ones last. `each` visits the
// tokens of [begin, end) by COUNT, and calls `after` in whole warps. `combine` finds the greatest
// and the sum over all threads. `scan` finds the mass of the tokens whose keys are below `limit`,
// and the best of them with noise; `reach` times a token's weight is the greatest number with which
// it can win, with slack for rounding. `bound_of` finds the key below which there are `count`
// tokens, at most `ceiling` behind; its digits are 11, 11 and 9 bits of the distance, and 11 and 11
// of the token, whose others are 0. Noise is that of `gumbel_noise` in sampler.py.

typedef long long word; typedef unsigned long long u64; typedef unsigned int u32;
enum { WARPS = THREADS / 32, BATCH = 2, BINS = 2048, FLOATS = 6, INTEGERS = 3 };
#define ALL 0xffffffffu
#define EVERY_KEY 0xffffffffffffffffull
#define LEAST_NOISE -2.82f  // Of a uniform number of 1 - 2^-24.
struct alignas(sizeof(number) * COUNT) Numbers { number at[COUNT]; };
struct Part { u64 likeliest, best; float mass; u32 floor; };

__device__ u32 ordered(float value) {
  const u32 bits = __float_as_uint(value + 0.0f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ float unordered(u32 bits) {
  return __uint_as_float(bits >> 31 ? bits & 0x7fffffffu : ~bits);
}
__device__ u64 packed(float value, u32 token) { return (u64)ordered(value) << 32 | (u32)~token; }
__device__ u32 token_of(u64 found) { return ~(u32)found; }
__device__ float value_of(u64 found) { return unordered((u32)(found >> 32)); }
__device__ u64 mixed(u64 bits) {
  bits += 0x9E3779B97F4A7C15ull;
  bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9ull;
  bits = (bits ^ bits >> 27) * 0x94D049BB133111EBull;
  return bits ^ bits >> 31;
}
__device__ u32 mixed(u32 bits) {
  bits = (bits ^ bits >> 16) * 0x85EBCA6Bu;
  bits = (bits ^ bits >> 13) * 0xC2B2AE35u;
  return bits ^ bits >> 16;
}
__device__ float noise(u32 bits) {
  const float uniform = fminf((__uint2float_rn(bits) + 0.5f) * 0x1p-32f, 1 - 0x1p-24f);
  return -logf(-log1pf(-uniform));
}
struct Row {
  const number* logits;
  u64 noise_key;
  u32 vocabulary;
  float inverse_temperature, least;  // Least weight of tokens that can be drawn.
  __device__ float score(number logit) const {
    return __fmul_rn(as_float(logit), inverse_temperature);
  }
  __device__ u32 bits(u32 token) const {
    return mixed(mixed(token ^ (u32)noise_key) + (u32)(noise_key >> 32));
  }
};
__device__ u64 key_of(float most, float score, u32 token) {
  return (u64)__float_as_uint(fabsf(most - score)) << 32 | token;
}

template <class Visit, class After>
__device__ void each(const Row& row, u32 begin, u32 end, Visit visit, After after) {
  for (u32 base = begin; base < end; base += THREADS * COUNT * BATCH) {
    Numbers batch[BATCH];
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
      const u32 first = base + (b * THREADS + threadIdx.x) * COUNT;
      if (first < end) batch[b] = *reinterpret_cast<const Numbers*>(row.logits + first);
    }
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
      const u32 first = base + (b * THREADS + threadIdx.x) * COUNT;
      if (first < end) visit(first, batch[b]);
      after();
    }
  }
}

__device__ void combine(u64& most, float& sum) {
  __shared__ u64 mosts[WARPS];
  __shared__ float sums[WARPS];
  for (int by = 16; by > 0; by /= 2) {
    most = max(most, __shfl_xor_sync(ALL, most, by));
    sum += __shfl_xor_sync(ALL, sum, by);
  }
  __syncthreads();  // Earlier results were read.
  if (threadIdx.x % 32 == 0) mosts[threadIdx.x / 32] = most, sums[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0;
  for (int warp = 0; warp < WARPS; warp++) most = max(most, mosts[warp]), sum += sums[warp];
}

__device__ __noinline__ void scan(const Row row, u32 begin, u32 end, float most, u64 limit,
                                  float& mass, u64& best) {
  const float slack = fabsf(most) * 0x1p-22f, width = 0x1p32f * 1.001f;
  float reach = __expf(slack - LEAST_NOISE) * width, sum = 0;
  u64 found = 0;
  each(row, begin, end, [&](u32 first, const Numbers& numbers) {
    u32 can_win = 0;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const u32 token = first + i;
      const float score = row.score(numbers.at[i]);
      const float behind = fabsf(most - score);
      if (key_of(most, score, token) >= limit) continue;
      const float weight = behind >= 0 ? __expf(-behind) : 0.0f;  // 0 for NaN.
      sum += weight;
      if (weight >= row.least && __uint2float_rn(row.bits(token)) <= weight * reach)
        can_win |= 1u << i;
    }
    for (; can_win != 0; can_win &= can_win - 1) {
      const u32 token = first + __ffs(can_win) - 1;
      const float score = row.score(row.logits[token]);
      found = max(found, packed(__fadd_rn(score, noise(row.bits(token))), token));
    }
  }, [&] {
    const u32 top = __reduce_max_sync(ALL, (u32)(found >> 32));
    if (top != 0) reach = __expf(fminf(most - unordered(top), -LEAST_NOISE) + slack) * width;
  });
  mass = sum, best = found;
  combine(best, mass);
}

__device__ __noinline__ u64 bound_of(const Row row, float most, u32 ceiling, int count) {
  __shared__ int bins[BINS];
  __shared__ int before_warps[WARPS];
  __shared__ int chosen, before_chosen;
  enum { PER_THREAD = BINS / THREADS };
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, mine_first = threadIdx.x * PER_THREAD;
  u64 low = 0;
  for (int known = 63, shift = 52;;) {
    for (int i = threadIdx.x; i < BINS; i += THREADS) bins[i] = 0;
    __syncthreads();
    each(row, 0, row.vocabulary, [&](u32 first, const Numbers& numbers) {
#pragma unroll
      for (int i = 0; i < COUNT; i++) {
        const u64 key = key_of(most, row.score(numbers.at[i]), first + i), above = key - low;
        if (key >> 32 <= ceiling && above >> known == 0) atomicAdd(&bins[above >> shift], 1);
      }
    }, [] {});
    __syncthreads();
    int mine = 0;
    for (int i = 0; i < PER_THREAD; i++) mine += bins[mine_first + i];
    int upto = mine;
    for (int by = 1; by < 32; by *= 2) {
      const int other = __shfl_up_sync(ALL, upto, by);
      if (lane >= by) upto += other;
    }
    if (lane == 31) before_warps[warp] = upto;
    __syncthreads();
    for (int w = 0; w < warp; w++) upto += before_warps[w];
    int before = upto - mine;
    if (before < count && upto >= count) {  // One thread.
      int bin = mine_first;
      while (before + bins[bin] < count) before += bins[bin++];
      chosen = bin, before_chosen = before;
    }
    __syncthreads();
    count -= before_chosen;
    low += (u64)chosen << shift;
    const bool is_whole = bins[chosen] == count;
    __syncthreads();
    if (is_whole || shift == 0) return low + (1ull << shift);
    known = shift;
    shift = shift > 30 ? shift - 11 : shift > 11 ? 11 : 0;
  }
}

extern "C" __global__ __launch_bounds__(THREADS) void draw(
    const number* logits, word row_stride, word vocabulary, const word* slots,
    const float* floats, const word* integers, word* counts, int* token_counts,
    word* scratch, word num_parts, word part_tokens, word* out) {
  __shared__ bool is_last;
  const word at = blockIdx.x / num_parts, slot = slots[at];
  const u32 part = blockIdx.x % num_parts;
  const float temperature = floats[slot * FLOATS], top_p = floats[slot * FLOATS + 1];
  const float min_p = floats[slot * FLOATS + 2];  // Its logarithm.
  const word seed = integers[slot * INTEGERS], top_k = integers[slot * INTEGERS + 1];
  const bool draws = temperature > 0 && top_k > 1;
  Row row;
  row.logits = logits + at * row_stride, row.vocabulary = (u32)vocabulary;
  row.noise_key = mixed(mixed((u64)seed) + (u64)counts[slot] * 0x9E3779B97F4A7C15ull);
  row.inverse_temperature = temperature > 0 ? 1.0f / temperature : 1.0f;
  // All mass is at least 1. Tokens of up to this weight have less than 1 - top_p of it.
  row.least = fmaxf(__expf(min_p), (1 - top_p) / (float)vocabulary) * 0.999f;
  const u32 begin = part * (u32)part_tokens, end = min(begin + (u32)part_tokens, row.vocabulary);
  u64 likeliest = 0, best = 0;
  each(row, begin, end, [&](u32 first, const Numbers& numbers) {
    float most = row.score(numbers.at[0]);
    u32 token = first;
#pragma unroll
    for (int i = 1; i < COUNT; i++) {
      const float score = row.score(numbers.at[i]);
      if (score > most) most = score, token = first + i;
    }
    likeliest = max(likeliest, packed(most, token));
  }, [] {});
  float mass = 0;
  u64 floor = ~likeliest;  // In the end each thread has a token of at least its score.
  combine(likeliest, mass);
  combine(floor, mass);
  if (draws && top_k == vocabulary)
    scan(row, begin, end, value_of(likeliest), EVERY_KEY, mass, best);
  word* results = scratch + at * (num_parts * (sizeof(Part) / sizeof(word)) + 1);
  Part* parts = reinterpret_cast<Part*>(results + 1);
  if (threadIdx.x == 0) {
    parts[part].likeliest = likeliest, parts[part].best = best;
    parts[part].mass = mass, parts[part].floor = (u32)(~floor >> 32);
    __threadfence();
    is_last = atomicAdd(reinterpret_cast<int*>(results), 1) == num_parts - 1;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  u32 highest_floor = 0;
  for (int p = 0; p < num_parts; p++) {
    likeliest = max(likeliest, __ldcg(&parts[p].likeliest));
    best = max(best, __ldcg(&parts[p].best));
    highest_floor = max(highest_floor, __ldcg(&parts[p].floor));
  }
  const float most = value_of(likeliest);
  u32 token = token_of(likeliest);
  if (draws && fabsf(most) < __int_as_float(0x7f800000)) {
    if (top_k < vocabulary) {
      // No more than THREADS tokens: as many are not below the floor.
      const u32 ceiling = __float_as_uint(fabsf(most - unordered(highest_floor)));
      const u64 limit = bound_of(row, most, top_k <= THREADS ? ceiling : ALL, (int)top_k);
      scan(row, 0, row.vocabulary, most, limit, mass, best);
    } else {
      mass = 0;
      for (int p = 0; p < num_parts; p++)
        mass += __ldcg(&parts[p].mass) * __expf(value_of(__ldcg(&parts[p].likeliest)) - most);
    }
    const u64 min_p_limit = ((u64)__float_as_uint(fabsf(min_p)) + 1) << 32;
    const auto key = [&] {
      return key_of(most, row.score(row.logits[token_of(best)]), token_of(best));
    };
    float before;
    u64 next;
    if (key() >= min_p_limit) scan(row, 0, row.vocabulary, most, min_p_limit, before, best);
    while (top_p < 1 && token_of(best) != token) {
      scan(row, 0, row.vocabulary, most, key(), before, next);
      if (before < top_p * mass) break;
      best = next;
    }
    token = token_of(best);
  }
  if (threadIdx.x == 0) {
    *reinterpret_cast<int*>(results) = 0;  // For the next launch.
    out[at] = token;
    counts[slot] += 1;
    if (token_counts != nullptr) token_counts[slot * vocabulary + token] += 1;
  }
}
