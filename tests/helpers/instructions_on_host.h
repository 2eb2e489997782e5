// What attention's decode kernel takes from the GPU's instructions, in plain C++ for
// kernel_on_host.cpp: numbers, matrix products of a warp, and loads.
typedef long long word;
typedef unsigned int u32;
typedef unsigned short number;
template <int FORMAT_> float widened_number(number bits) {
  if (FORMAT_ == 1) return host::bits<_Float16>(bits);
  return __uint_as_float((u32)bits << 16);
}
template <int FORMAT_> number narrowed(float value) {
  if (FORMAT_ == 1) return host::bits<number>((_Float16)value);
  const u32 bits = __float_as_uint(value);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline float as_float(number bits) { return widened_number<FORMAT>(bits); }
inline number as_number(float value) { return narrowed<FORMAT>(value); }
enum { OPERAND_FORMAT = EIGHT_BITS ? 1 : FORMAT };

inline u32 packed(float low, float high) {
  return narrowed<OPERAND_FORMAT>(low) | (u32)narrowed<OPERAND_FORMAT>(high) << 16;
}
inline float e4m3(unsigned char bits) {
  const int exponent = bits >> 3 & 15, rest = bits & 7;
  const float size = exponent ? std::ldexp(8 + rest, exponent - 10) : std::ldexp(rest, -9);
  return bits >> 7 ? -size : size;
}
inline u32 widened(u32 two) { return packed(e4m3(two & 0xff), e4m3(two >> 8 & 0xff)); }

inline u32 transposed(u32 part) {
  const int lane = host::thread.x % 32, g = lane / 4, t = lane % 4;
  return host::exchange(part, [&](auto of) {
    const u32 low = of(8 * t + g / 2) >> 16 * (g % 2), high = of(8 * t + 4 + g / 2) >> 16 * (g % 2);
    return (low & 0xffff) | high << 16;
  });
}
struct Operands { u32 a[4], b[2]; };
inline void multiply(float* sum, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const int lane = host::thread.x % 32, g = lane / 4, t = lane % 4;
  auto half = [](u32 two, int at) { return widened_number<OPERAND_FORMAT>(two >> 16 * at); };
  host::exchange(Operands{{a0, a1, a2, a3}, {b0, b1}}, [&](auto of) {
    for (int c = 0; c < 4; c++)
      for (int k = 0; k < 16; k++) {
        const int its = k % 8 / 2, a = c / 2 + k / 8 * 2;
        sum[c] += half(of(4 * g + its).a[a], k % 2) *
                  half(of(4 * (2 * t + c % 2) + its).b[k / 8], k % 2);
      }
    return of(lane);
  });
}
inline uint4 fetched(const char* from) {
  uint4 value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}
