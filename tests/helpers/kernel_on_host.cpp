// Runs a CUDA kernel on the host: one block after another, each thread of a block a coroutine.
// Threads take turns at barriers only, so results are the same in every run. KERNEL is the file with
// the kernel's source, NAME its name and WORDS the number of its 64-bit arguments, 12 at most.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

namespace host {
struct Index { unsigned x; };
Index thread, block;
ucontext_t scheduler, threads[THREADS];
bool has_ended[THREADS];
struct Barrier { int count = 0, turn = 0; } whole, warps[THREADS / 32];
unsigned long long exchanged[THREADS];

void yield() {
  const unsigned self = thread.x;
  swapcontext(&threads[self], &scheduler);
  thread.x = self;
}
void arrive(Barrier& barrier, int size) {
  const int turn = barrier.turn;
  if (++barrier.count == size) barrier.count = 0, barrier.turn++;
  while (barrier.turn == turn) yield();
}
Barrier& warp() { return warps[thread.x / 32]; }

template <class T, class Read> T exchange(T value, Read read) {
  exchanged[thread.x] = 0;
  std::memcpy(&exchanged[thread.x], &value, sizeof(T));
  arrive(warp(), 32);
  auto of = [](unsigned lane) {
    T theirs;
    std::memcpy(&theirs, &exchanged[thread.x / 32 * 32 + lane], sizeof(T));
    return theirs;
  };
  const T result = read(of);
  arrive(warp(), 32);
  return result;
}
template <class To, class From> To bits(From value) {
  To out;
  std::memcpy(&out, &value, sizeof(To));
  return out;
}
}  // namespace host

#define threadIdx host::thread
#define blockIdx host::block
#define __device__ inline
#define __global__
#define __shared__ static
#define __noinline__
#define __launch_bounds__(...)
using std::max;
using std::min;
inline void __syncthreads() { host::arrive(host::whole, THREADS); }
inline void __threadfence() {}
template <class T> T __shfl_xor_sync(unsigned, T value, int by) {
  return host::exchange(value, [&](auto of) { return of(host::thread.x % 32 ^ by); });
}
template <class T> T __shfl_up_sync(unsigned, T value, int by) {
  const int lane = host::thread.x % 32;
  return host::exchange(value, [&](auto of) { return of(lane < by ? lane : lane - by); });
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  return host::exchange(value, [&](auto of) {
    unsigned most = of(0);
    for (int lane = 1; lane < 32; lane++) most = max(most, of(lane));
    return most;
  });
}
inline int atomicAdd(int* to, int by) { return *to += by, *to - by; }
template <class T> T __ldcg(const T* from) { return *from; }
inline int __ffs(unsigned value) { return __builtin_ffs(value); }
inline unsigned __float_as_uint(float value) { return host::bits<unsigned>(value); }
inline float __uint_as_float(unsigned value) { return host::bits<float>(value); }
inline float __int_as_float(int value) { return host::bits<float>(value); }
inline float __uint2float_rn(unsigned value) { return value; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __expf(float value) { return std::exp(value); }
using std::fabs;

#include KERNEL

static long long arguments[12];

static void run_thread() {
  const auto a = arguments;
  NAME((const number*)a[0], a[1], a[2], (const long long*)a[3], (const float*)a[4],
       (const long long*)a[5], (long long*)a[6], (int*)a[7], (long long*)a[8], a[9], a[10],
       (long long*)a[11]);
  host::has_ended[host::thread.x] = true;
}

extern "C" void run(unsigned num_blocks, const long long* words) {
  constexpr size_t STACK_BYTES = 64 * 1024;
  std::memcpy(arguments, words, sizeof(arguments));
  std::vector<std::unique_ptr<char[]>> stacks;
  for (int i = 0; i < THREADS; i++) stacks.emplace_back(new char[STACK_BYTES]);
  for (host::block.x = 0; host::block.x < num_blocks; host::block.x++) {
    for (unsigned i = 0; i < THREADS; i++) {
      getcontext(&host::threads[i]);
      host::threads[i].uc_stack.ss_sp = stacks[i].get();
      host::threads[i].uc_stack.ss_size = STACK_BYTES;
      host::threads[i].uc_link = &host::scheduler;
      host::has_ended[i] = false;
      makecontext(&host::threads[i], run_thread, 0);
    }
    for (bool works = true; works;) {
      works = false;
      for (unsigned i = 0; i < THREADS; i++) {
        if (host::has_ended[i]) continue;
        works = true;
        host::thread.x = i;
        swapcontext(&host::scheduler, &host::threads[i]);
      }
    }
  }
}
