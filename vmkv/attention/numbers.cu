// Conversion between numbers of -DFORMAT and float.

#if FORMAT == 2
typedef unsigned int number;
__device__ float as_float(number bits) { return __uint_as_float(bits); }
__device__ number as_number(float value) { return __float_as_uint(value); }
#elif FORMAT == 1
typedef unsigned short number;
__device__ float as_float(number bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
__device__ number as_number(float value) {
  number bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
#else
typedef unsigned short number;
__device__ float as_float(number bits) { return __uint_as_float((unsigned int)bits << 16); }
__device__ number as_number(float value) {
  number bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
#endif
