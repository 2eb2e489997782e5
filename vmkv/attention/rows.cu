// The beginning of the kernels that append. Conversion saturates at the largest float8 value. A thread
// moves one VECTOR of bytes at a time or, if numbers.cu comes before, COUNT numbers.

typedef long long word;

__device__ unsigned short encode(float low, float high) {
  unsigned short two;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(high), "f"(low));
  return two;
}

// The last of the sequences that starts at or before the token.
__device__ word sequence_of(word token, const int* query_starts, word num_sequences) {
  word low = 0, high = num_sequences;
  while (high - low > 1) {
    const word middle = (low + high) / 2;
    if (query_starts[middle] <= token) low = middle; else high = middle;
  }
  return low;
}

#ifdef VECTOR
typedef VECTOR Numbers;
#else
struct alignas(sizeof(number) * COUNT) Numbers { number at[COUNT]; };
#endif

#ifdef ENCODES
struct alignas(COUNT) Stored { unsigned char at[COUNT]; };
__device__ Stored stored(Numbers numbers, float by) {
  Stored out;
  for (int at = 0; at < COUNT; at += 2) {
    const int next = at + 1 < COUNT ? at + 1 : at;
    const unsigned short two = encode(as_float(numbers.at[at]) * by,
                                      as_float(numbers.at[next]) * by);
    out.at[at] = two & 0xff;
    out.at[next] = next > at ? two >> 8 : out.at[at];
  }
  return out;
}
#else
typedef Numbers Stored;
__device__ Stored stored(Numbers numbers, float) { return numbers; }
#endif

__device__ float scale_of(const float* inverse, word head) {
  return inverse == nullptr ? 1.0f : inverse[head];
}
