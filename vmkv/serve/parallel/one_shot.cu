// Adds the parts of all ranks in one kernel (one_shot.py); after numbers.cu of vmkv/attention.

typedef long long word;

constexpr int COUNT = 16 / sizeof(number);
constexpr int WARPS = THREADS / 32;
constexpr word ASK_AFTER_NS = 2000000;
union Vector { uint4 whole; number at[COUNT]; };

struct Exchange {
  word* turns;          // [block]
  char* const* rooms;   // [rank]: flags [block][rank], vectors [block][turn % TURNS][rank][CHUNK]
  int* given_up;
  word rank, patience_ns;
};

__device__ uint4 received(const uint4* from) {  // Not from a cache that other devices do not see.
  uint4 value;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w) : "l"(from)
               : "memory");
  return value;
}

__device__ void say(word* flag, word turn) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" :: "l"(flag), "l"(turn) : "memory");
}

__device__ word said(const word* flag) {
  word turn;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(turn) : "l"(flag) : "memory");
  return turn;
}

__device__ word now_ns() {
  word time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}

// Whether the turn has come; false once the kernel has given up waiting for it.
__device__ bool has_come(const word* flag, word turn, volatile int* given_up, word patience_ns) {
  const word start = now_ns();
  word asked = start;
  for (int tries = 1; said(flag) < turn; ++tries) {
    if (tries % 64) continue;
    // The word is in the host's memory, which answers 256 blocks one by one, in 0.2 ms. A rank that
    // asked earlier would be late by that, so that the next sum would make the other rank ask, too.
    const word now = now_ns();
    if (now - asked < ASK_AFTER_NS) continue;
    asked = now;
    if (*given_up) return false;
    if (now - start > patience_ns) *given_up = 1;
  }
  return true;
}

__device__ word* flag_of(const Exchange& to, word at, word from) {
  return reinterpret_cast<word*>(to.rooms[at] + (blockIdx.x * SIZE + from) * FLAG);
}

__device__ uint4* room_of(const Exchange& to, word at, word from, word turn) {
  const word slot = (blockIdx.x * word(TURNS) + turn % TURNS) * SIZE + from;
  return reinterpret_cast<uint4*>(to.rooms[at] + BLOCKS * SIZE * FLAG) + slot * CHUNK;
}

__device__ void send(const Exchange& to, const uint4* part, word begin, word end, word turn) {
#pragma unroll 4
  for (word i = begin + threadIdx.x; i < end; i += THREADS) {
    const uint4 mine = part[i];
#pragma unroll
    for (int other = 0; other < SIZE; ++other)
      if (other != to.rank) room_of(to, other, to.rank, turn)[i - begin] = mine;
  }
  __syncthreads();
  if (threadIdx.x < SIZE && threadIdx.x != to.rank) say(flag_of(to, threadIdx.x, to.rank), turn);
}

__device__ void await(const Exchange& to, word turn, bool& is_alone) {
  if (threadIdx.x < SIZE && threadIdx.x != to.rank && !is_alone)
    is_alone = !has_come(flag_of(to, to.rank, threadIdx.x), turn, to.given_up, to.patience_ns);
  __syncthreads();
}

// The sum of vector i, which is `at` in its chunk, rounded.
__device__ Vector sum_of(const Exchange& to, const uint4* part, word i, word at, word turn) {
  Vector out;
  out.whole = part[i];
  if (SIZE == 1) return out;
  float sums[COUNT];
#pragma unroll
  for (int each = 0; each < SIZE; ++each) {
    Vector theirs = out;
    if (each != to.rank) theirs.whole = received(room_of(to, to.rank, each, turn) + at);
#pragma unroll
    for (int n = 0; n < COUNT; ++n) {
      const float value = as_float(theirs.at[n]);
      sums[n] = each ? sums[n] + value : value;
    }
  }
#pragma unroll
  for (int n = 0; n < COUNT; ++n) out.at[n] = as_number(sums[n]);
  return out;
}

__device__ void finish(const Exchange& to, uint4* part, word begin, word end, word turn) {
  for (word i = begin + threadIdx.x; i < end; i += THREADS)
    part[i] = sum_of(to, part, i, i - begin, turn).whole;
}

#if NORM
struct Norm { const uint4* residual; const uint4* weight; uint4* out; word row; float epsilon; };

// The sums of a block's threads, in each of them.
__device__ void add_up(float (&values)[ROWS], float (*shared)[WARPS]) {
#pragma unroll
  for (int n = 0; n < ROWS; ++n) {
#pragma unroll
    for (int lane = 16; lane; lane /= 2) values[n] += __shfl_xor_sync(~0u, values[n], lane);
    if (threadIdx.x % 32 == 0) shared[n][threadIdx.x / 32] = values[n];
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < ROWS; ++n) {
    values[n] = threadIdx.x % 32 < WARPS ? shared[n][threadIdx.x % 32] : 0;
#pragma unroll
    for (int lane = 16; lane; lane /= 2) values[n] += __shfl_xor_sync(~0u, values[n], lane);
  }
}

__device__ void finish(const Exchange& to, uint4* part, word begin, word end, word turn,
                       const Norm& norm) {
  // In turns: what is read may not be written yet. Between chunks all threads wait in `await`.
  __shared__ float shared[2][ROWS][WARPS];
  int which = 0;
  for (word first = begin; first < end; first += ROWS * norm.row, which ^= 1) {
    Vector kept[ROWS][PER_THREAD];
    float squares[ROWS];
#pragma unroll
    for (int n = 0; n < ROWS; ++n) {
      squares[n] = 0;
#pragma unroll
      for (int v = 0; v < PER_THREAD; ++v) {
        const word column = threadIdx.x + v * THREADS;
        const word i = first + n * norm.row + column;
        if (column >= norm.row || i >= end) continue;
        Vector sum = sum_of(to, part, i, i - begin, turn), old;
        old.whole = norm.residual[i];
#pragma unroll
        for (int c = 0; c < COUNT; ++c) {
          sum.at[c] = as_number(as_float(old.at[c]) + as_float(sum.at[c]));
          const float value = as_float(sum.at[c]);
          squares[n] += value * value;
        }
        part[i] = sum.whole;
        kept[n][v] = sum;
      }
    }
    add_up(squares, shared[which]);
#pragma unroll
    for (int v = 0; v < PER_THREAD; ++v) {
      const word column = threadIdx.x + v * THREADS;
      if (column >= norm.row) continue;
      Vector weight;
      weight.whole = norm.weight[column];
#pragma unroll
      for (int n = 0; n < ROWS; ++n) {
        const word i = first + n * norm.row + column;
        if (i >= end) continue;
        const float scale = rsqrtf(squares[n] / (norm.row * COUNT) + norm.epsilon);
        Vector out;
#pragma unroll
        for (int c = 0; c < COUNT; ++c) {
          const number scaled = as_number(as_float(kept[n][v].at[c]) * scale);
          out.at[c] = as_number(as_float(weight.at[c]) * as_float(scaled));
        }
        norm.out[i] = out.whole;
      }
    }
  }
}
#endif

// `share` is a block's, and `chunk` what it sends at a time, or all: vectors, of whole rows with a
// norm.
extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)
add_parts(uint4* part, word num_vectors, word share, word chunk, word* turns, word rank,
          char* const* rooms, int* given_up, word patience_ns
#if NORM
          , const uint4* residual, const uint4* weight, uint4* out, word row, double epsilon
#endif
          ) {
  const Exchange to{turns, rooms, given_up, rank, patience_ns};
  word begin = blockIdx.x * share;
  const word last = begin + share < num_vectors ? begin + share : num_vectors;
  if (begin >= last) return;
  word turn = SIZE == 1 ? 0 : turns[blockIdx.x] + 1;
  word end = begin + chunk < last ? begin + chunk : last;
  bool is_alone = false;

  if (SIZE > 1) send(to, part, begin, end, turn);
  while (true) {
    const word next = end + chunk < last ? end + chunk : last;
    if (SIZE > 1) {
      if (end < last) send(to, part, end, next, turn + 1);
      await(to, turn, is_alone);
    }
#if NORM
    finish(to, part, begin, end, turn, Norm{residual, weight, out, row, (float)epsilon});
#else
    finish(to, part, begin, end, turn);
#endif
    if (end == last) break;
    begin = end;
    end = next;
    ++turn;
  }
  if (SIZE > 1 && threadIdx.x == 0) turns[blockIdx.x] = turn;
}
