// Decoding, one query per sequence (decode.py); after numbers.cu and decode_instructions.cu.

enum { WARPS = 4, COLUMNS = 8, BYTES = EIGHT_BITS ? 1 : 2, BLOCKS_OF_16 = 2 / BYTES };
enum { TILE = 16 * BLOCKS_OF_16 };
// A warp's dimensions, and how many warps have tokens of their own.
enum { IS_WIDE = D > 128, WIDTH = IS_WIDE ? D / WARPS : D, TOKEN_WARPS = IS_WIDE ? 1 : WARPS };
enum { KEY_VECTORS = WIDTH * BYTES / 64, PRODUCTS = 4 / BYTES, PAIRS = WIDTH / 16 };
// Values of a token in a lane: words, and dimensions side by side.
enum { VALUE_WORDS = WIDTH * BYTES / 32, RUN = (VALUE_WORDS < 4 ? 8 : 16) / BYTES };
enum { STAGED = COLUMNS * COLUMNS + 2 };
#define NEVER __int_as_float(0xff800000)

__device__ float over_lanes(float value, bool is_sum) {  // Of the lanes of the same columns.
  for (int by = 4; by < 32; by *= 2) {
    const float other = __shfl_xor_sync(0xffffffff, value, by);
    value = is_sum ? value + other : fmaxf(value, other);
  }
  return value;
}

// Two neighbours among the dimensions of keys, as operands.
__device__ u32 operand(const u32* words, int at) {
#if EIGHT_BITS
  return widened(words[at / 2] >> 16 * (at % 2));
#else
  return words[at];
#endif
}

// Lane 4 * g + t. Keys of token g: 16 bytes at 64 * i + 16 * t, the same dimensions of queries.
__device__ void take_keys(uint4 (&keys)[BLOCKS_OF_16][2][KEY_VECTORS], const char* from,
                          word stride, int first, int last, int g, int t) {
#pragma unroll
  for (int m = 0; m < BLOCKS_OF_16; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int token = min(first + 16 * m + 8 * half + g, last);
#pragma unroll
      for (int i = 0; i < KEY_VECTORS; i++)
        keys[m][half][i] = fetched(from + token * stride + 64 * i + 16 * t);
    }
}

extern "C" __global__ __launch_bounds__(128, MIN_BLOCKS) void decode(
    const number* query, word query_stride, const char* all_keys, const char* all_values,
    word row_stride, word token_stride, const int* row_indices, const int* num_tokens,
    const float* key_scales, const float* value_scales,
    double scale, double softcap, double log2_e,
    word window, word parts, word heads, word group,
    number* out, float* logsumexp, float* part_sums, float2* part_weights, int* num_done,
    word batch_size, const int* left_pad) {
  __shared__ __align__(8) float staged[WARPS][PAIRS * 2 * STAGED];
  __shared__ float weights[WARPS][2][COLUMNS];
  __shared__ float4 shared_scores[2][IS_WIDE ? WARPS : 1][BLOCKS_OF_16][32];
  __shared__ bool is_last;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int head = blockIdx.x % heads, part = blockIdx.x / heads % parts;
  const int sequence = blockIdx.x / heads / parts;
  const int end = num_tokens[sequence];
  const int padding = left_pad == nullptr ? 0 : left_pad[sequence];
  const int begin = max(padding, window > 0 && end > window ? end - (int)window : 0);
  const int each = ((end - begin + parts - 1) / parts + TILE - 1) / TILE * TILE;
  const int low = begin + part * each, high = min(end, low + each);
  const int first_dim = IS_WIDE ? warp * WIDTH : 0;
  const word row = (word)row_indices[sequence] * row_stride + (head * D + first_dim) * BYTES;
  const char* keys = all_keys + row;
  const char* values = all_values + row + g * RUN * BYTES;
  const float key_scale = (float)scale * (key_scales == nullptr ? 1.0f : key_scales[head]);

  float sums[PAIRS][4] = {}, total[2] = {}, most[2] = {NEVER, NEVER};
  uint4 now[BLOCKS_OF_16][2][KEY_VECTORS];
  int first = low + (IS_WIDE ? 0 : warp * TILE), turn = 0;
  if (first < high) take_keys(now, keys, token_stride, first, high - 1, g, t);
  u32 queries[KEY_VECTORS][PRODUCTS][2];
#pragma unroll
  for (int i = 0; i < KEY_VECTORS; i++)
#pragma unroll
    for (int w = 0; w < 2 * PRODUCTS; w++) {
      const number* two = query + sequence * query_stride + (head * group + g) * D + first_dim
                          + (64 * i + 16 * t) / BYTES + 2 * w;
      queries[i][w / 2][w % 2] = g < group ? packed(as_float(two[0]), as_float(two[1])) : 0;
    }
  for (; first < high; first += TOKEN_WARPS * TILE) {
    // Values of four tokens a product, as its second operand has them: 2t, 2t + 1, 2t + 8, 2t + 9.
    u32 theirs[BLOCKS_OF_16][4][VALUE_WORDS];
#pragma unroll
    for (int m = 0; m < BLOCKS_OF_16; m++)
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const int token = min(first + 16 * m + 2 * t + k % 2 + k / 2 * 8, high - 1);
        const char* from = values + token * token_stride;
        if (VALUE_WORDS < 4) {
          const uint2 two = *reinterpret_cast<const uint2*>(from);
          theirs[m][k][0] = two.x, theirs[m][k][1] = two.y;
        }
#pragma unroll
        for (int i = 0; i < VALUE_WORDS / 4; i++) {
          const uint4 four = fetched(from + 128 * i);
          theirs[m][k][4 * i] = four.x, theirs[m][k][4 * i + 1] = four.y;
          theirs[m][k][4 * i + 2] = four.z, theirs[m][k][4 * i + 3] = four.w;
        }
      }
    float scores[BLOCKS_OF_16][4] = {};
#pragma unroll
    for (int m = 0; m < BLOCKS_OF_16; m++)
#pragma unroll
      for (int i = 0; i < KEY_VECTORS; i++) {
        const u32 upper[4] = {now[m][0][i].x, now[m][0][i].y, now[m][0][i].z, now[m][0][i].w};
        const u32 lower[4] = {now[m][1][i].x, now[m][1][i].y, now[m][1][i].z, now[m][1][i].w};
#pragma unroll
        for (int w = 0; w < PRODUCTS; w++)
          multiply(scores[m], operand(upper, 2 * w), operand(lower, 2 * w),
                   operand(upper, 2 * w + 1), operand(lower, 2 * w + 1), queries[i][w][0],
                   queries[i][w][1]);
      }
    if (first + TOKEN_WARPS * TILE < high)
      take_keys(now, keys, token_stride, first + TOKEN_WARPS * TILE, high - 1, g, t);
    if (IS_WIDE) {  // Sums over the dimensions of all warps, in the same order in each.
#pragma unroll
      for (int m = 0; m < BLOCKS_OF_16; m++)
        shared_scores[turn][warp][m][lane] =
            make_float4(scores[m][0], scores[m][1], scores[m][2], scores[m][3]);
      __syncthreads();  // One a tile: the next tile has the other half of the memory.
#pragma unroll
      for (int m = 0; m < BLOCKS_OF_16; m++) {
        float4 sum = shared_scores[turn][0][m][lane];
#pragma unroll
        for (int w = 1; w < (IS_WIDE ? WARPS : 1); w++) {
          const float4 part = shared_scores[turn][w][m][lane];
          sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
        }
        scores[m][0] = sum.x, scores[m][1] = sum.y, scores[m][2] = sum.z, scores[m][3] = sum.w;
      }
      turn ^= 1;
    }

    float most_here[2] = {most[0], most[1]};
#pragma unroll
    for (int m = 0; m < BLOCKS_OF_16; m++)
#pragma unroll
      for (int c = 0; c < 4; c++) {
        float score = scores[m][c] * key_scale;
        if (softcap > 0) score = (float)softcap * tanhf(score / (float)softcap);
        score = first + 16 * m + g + c / 2 * 8 < high ? score * (float)log2_e : NEVER;
        scores[m][c] = score;
        most_here[c % 2] = fmaxf(most_here[c % 2], score);
      }
#pragma unroll
    for (int column = 0; column < 2; column++) {
      most_here[column] = over_lanes(most_here[column], false);
      const float shrink = exp2f(most[column] - most_here[column]);
      most[column] = most_here[column];
      total[column] *= shrink;
#pragma unroll
      for (int j = 0; j < PAIRS; j++) sums[j][column] *= shrink, sums[j][column + 2] *= shrink;
    }
#pragma unroll
    for (int m = 0; m < BLOCKS_OF_16; m++) {
#pragma unroll
      for (int c = 0; c < 4; c++) {
        scores[m][c] = exp2f(scores[m][c] - most[c % 2]);
        total[c % 2] += scores[m][c];
      }
      const u32 b0 = transposed(packed(scores[m][0], scores[m][1]));
      const u32 b1 = transposed(packed(scores[m][2], scores[m][3]));
#pragma unroll
      for (int w = 0; w < VALUE_WORDS; w++) {
        const u32 a = theirs[m][0][w], b = theirs[m][1][w], c = theirs[m][2][w];
        const u32 d = theirs[m][3][w];
#if EIGHT_BITS
#pragma unroll
        for (int two = 0; two < 2; two++) {  // Dimensions 4w + 2 * two and the next.
          const u32 order = two ? 0x7362 : 0x5140;
          const u32 ab = __byte_perm(a, b, order), cd = __byte_perm(c, d, order);
          multiply(sums[2 * w + two], widened(ab), widened(ab >> 16), widened(cd),
                   widened(cd >> 16), b0, b1);
        }
#else
        multiply(sums[w], __byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632),
                 __byte_perm(c, d, 0x5410), __byte_perm(c, d, 0x7632), b0, b1);
#endif
      }
    }
  }

  // What the warps have found, put together.
#pragma unroll
  for (int column = 0; column < 2; column++) {
    const float sum = over_lanes(total[column], true);
    if (g == 0) weights[warp][0][2 * t + column] = most[column];
    if (g == 0) weights[warp][1][2 * t + column] = sum;
  }
#pragma unroll
  for (int j = 0; j < PAIRS; j++)
#pragma unroll
    for (int c = 0; c < 4; c++)
      staged[warp][(2 * j + c / 2) * STAGED + g * COLUMNS + 2 * t + c % 2] = sums[j][c];
  __syncthreads();
  const int first_head = head * group, query_heads = heads * group;
  for (int at = threadIdx.x; at < group * D; at += WARPS * 32) {
    const int of = at / D, dim = at % D, its = dim % WIDTH, slice = dim / WIDTH;
    const int from = (its / (8 * RUN) * RUN + its % RUN) * STAGED + its / RUN % 8 * COLUMNS + of;
    float highest = NEVER, sum = 0, weight = 0;
    for (int w = 0; w < TOKEN_WARPS; w++) highest = fmaxf(highest, weights[w][0][of]);
    for (int w = 0; w < TOKEN_WARPS && highest > NEVER; w++) {
      const float share = exp2f(weights[w][0][of] - highest);
      sum += share * staged[slice + w][from];
      weight += share * weights[w][1][of];
    }
    const word place = (word)sequence * query_heads + first_head + of;
    if (parts > 1) {
      const word its_part = part * batch_size * query_heads + place;
      part_sums[its_part * D + dim] = sum;
      if (dim == 0) part_weights[its_part] = make_float2(highest, weight);
    } else {
      const float by = value_scales == nullptr ? 1.0f : value_scales[head];
      out[place * D + dim] = as_number(weight > 0 ? sum / weight * by : 0.0f);
      if (dim == 0) logsumexp[place] = (highest + log2f(weight)) / (float)log2_e;
    }
  }
  if (parts == 1) return;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0)
    is_last = atomicAdd(&num_done[sequence * heads + head], 1) == parts - 1;
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  if (threadIdx.x == 0) num_done[sequence * heads + head] = 0;  // For the next launch.
  // Loads that wait for each other take a microsecond each: all weights at once, then eight sums.
  float2* found = reinterpret_cast<float2*>(staged);
  const word first_place = (word)sequence * query_heads + first_head;
  const word step = batch_size * query_heads;
  for (int at = threadIdx.x; at < parts * group; at += WARPS * 32) {
    const int p = at / group, of = at % group;
    found[p * COLUMNS + of] = __ldcg(&part_weights[p * step + first_place + of]);
  }
  __syncthreads();
  if (threadIdx.x < group) {
    const int of = threadIdx.x;
    float highest = NEVER, weight = 0;
    for (int p = 0; p < parts; p++) highest = fmaxf(highest, found[p * COLUMNS + of].x);
    for (int p = 0; p < parts; p++) {
      const float2 theirs = found[p * COLUMNS + of];
      const float share = theirs.x > NEVER ? exp2f(theirs.x - highest) : 0.0f;
      found[p * COLUMNS + of].x = share;
      weight += share * theirs.y;
    }
    weights[0][0][of] = highest, weights[0][1][of] = weight;
  }
  __syncthreads();
  for (int at = 4 * threadIdx.x; at < group * D; at += 4 * WARPS * 32) {
    const int of = at / D, dim = at % D;
    const float4* theirs = reinterpret_cast<float4*>(part_sums + (first_place + of) * D + dim);
    float sums[4] = {};
    for (int p = 0; p < parts; p += 8) {
      float4 eight[8];
#pragma unroll
      for (int i = 0; i < 8; i++)
        if (p + i < parts) eight[i] = __ldcg(&theirs[(p + i) * step * (D / 4)]);
#pragma unroll
      for (int i = 0; i < 8; i++)
        if (p + i < parts) {
          const float share = found[(p + i) * COLUMNS + of].x;
          sums[0] += share * eight[i].x, sums[1] += share * eight[i].y;
          sums[2] += share * eight[i].z, sums[3] += share * eight[i].w;
        }
    }
    const float highest = weights[0][0][of], weight = weights[0][1][of];
    const float by = value_scales == nullptr ? 1.0f : value_scales[head];
    for (int i = 0; i < 4; i++)
      out[(first_place + of) * D + dim + i] =
          as_number(weight > 0 ? sums[i] / weight * by : 0.0f);
    if (dim == 0) logsumexp[first_place + of] = (highest + log2f(weight)) / (float)log2_e;
  }
}
