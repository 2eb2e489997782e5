// Instructions that C++ has no name for; after numbers.cu.

typedef long long word;
typedef unsigned int u32;
#if EIGHT_BITS || FORMAT == 1
#define OPERAND "f16"
#else
#define OPERAND "bf16"
#endif
#if EIGHT_BITS
__device__ u32 widened(u32 two) {  // Two of e4m3 as two of float16.
  u32 wide;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(wide) : "h"((unsigned short)two));
  return wide;
}
#endif
__device__ u32 packed(float low, float high) {
  u32 both;
  asm("cvt.rn." OPERAND "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
__device__ u32 transposed(u32 part) {
  u32 other;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(other) : "r"(part));
  return other;
}
__device__ void multiply(float* sum, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32." OPERAND "." OPERAND ".f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ uint4 fetched(const char* from) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}
