// Runs a CUDA kernel on the host: one block after another, each thread of a block a coroutine.
// Threads take turns at barriers only, so results are the same in every run. KERNEL is the file with
// the kernel's source and NAME its name; its arguments are 64-bit words, as in launch.c.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace host {
struct Index { unsigned x; };
Index thread, block;
ucontext_t scheduler, threads[THREADS];
bool has_ended[THREADS];
struct Barrier { int count = 0, turn = 0; } whole, warps[THREADS / 32];
struct { char bytes[32]; } exchanged[THREADS];

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
template <class T> T argument(long long word) {
  if constexpr (std::is_integral_v<T>)
    return (T)word;
  else
    return bits<T>(word);
}
}  // namespace host

#define threadIdx host::thread
#define blockIdx host::block
#define __device__ inline
#define __global__
#define __shared__ static
#define __align__(...)
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
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned order) {
  const auto both = (unsigned long long)high << 32 | low;
  unsigned result = 0;
  for (int at = 0; at < 4; at++)
    result |= (unsigned)(both >> 8 * (order >> 4 * at & 7) & 0xff) << 8 * at;
  return result;
}
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

static const long long* arguments;

template <class... T, size_t... at>
static void call(void (*kernel)(T...), std::index_sequence<at...>) {
  kernel(host::argument<T>(arguments[at])...);
}
template <class... T> static void call(void (*kernel)(T...)) {
  call(kernel, std::index_sequence_for<T...>());
}
static void run_thread() {
  call(NAME);
  host::has_ended[host::thread.x] = true;
}

extern "C" void run(unsigned num_blocks, const long long* words) {
  constexpr size_t STACK_BYTES = 64 * 1024;
  arguments = words;
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
