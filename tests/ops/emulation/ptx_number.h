// PTX's arithmetic on registers, which hold bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>

#include "emulator.h"

namespace emulator {

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
inline double double_of(uint64_t bits) {
  double x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline float from_bfloat16(uint16_t bits) {
  return float_of(uint32_t(bits) << 16);
}
inline uint16_t to_bfloat16(float x) {
  const uint32_t bits = uint32_t(bits_of(x));
  if (x != x) return 0x7fff;
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float from_half(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float size = exponent == 31  ? (fraction ? NAN : INFINITY)
                     : exponent == 0 ? std::ldexp(float(fraction), -24)
                                     : std::ldexp(float(fraction + 1024), exponent - 25);
  return bits >> 15 ? -size : size;
}
inline uint16_t to_half(float x) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const float size = std::fabs(x);
  if (x != x) return 0x7fff;
  if (size >= 65520) return sign | 0x7c00;
  if (size < std::ldexp(1.0f, -14)) return sign | uint16_t(std::nearbyint(std::ldexp(size, 24)));
  int exponent;
  std::frexp(size, &exponent);  // size = fraction * 2^exponent, 1/2 <= fraction < 1
  const int mantissa = int(std::nearbyint(std::ldexp(size, 11 - exponent)));  // 1024 ... 2048
  return uint16_t(sign + ((exponent + 13) << 10) + mantissa);
}
inline float flushed(float x) {
  return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x;
}

inline size_t size_of_type(const std::string& type) {
  if (type.size() > 2 && type.substr(type.size() - 2) == "x2") return 4;
  if (type == "bf16") return 2;
  const int bits = std::atoi(type.c_str() + (type.empty() ? 0 : 1));
  if (bits != 8 && bits != 16 && bits != 32 && bits != 64) fail("asm: type %s is not emulated", type.c_str());
  return size_t(bits / 8);
}

template <class N>
bool compared(const std::string& how, N a, N b) {
  if (how == "eq") return a == b;
  if (how == "ne" || how == "neu") return a != b;
  if (how == "lt" || how == "lo") return a < b;
  if (how == "le" || how == "ls") return a <= b;
  if (how == "gt" || how == "hi") return a > b;
  if (how == "ge" || how == "hs") return a >= b;
  fail("asm: comparison %s is not emulated", how.c_str());
}

inline bool compare(const std::string& text, const std::string& how, const std::string& type, uint64_t a,
                    uint64_t b) {
  if (type == "f32") return compared(how, float_of(uint32_t(a)), float_of(uint32_t(b)));
  if (type == "f64") return compared(how, double_of(a), double_of(b));
  if (type == "s32") return compared(how, int32_t(a), int32_t(b));
  if (type == "s64") return compared(how, int64_t(a), int64_t(b));
  if (type == "u16" || type == "b16") return compared(how, uint16_t(a), uint16_t(b));
  if (type == "u32" || type == "b32") return compared(how, uint32_t(a), uint32_t(b));
  if (type == "u64" || type == "b64") return compared(how, a, b);
  fail("asm: %s is not emulated", text.c_str());
}

template <class N>
N calculated(const std::string& text, const std::string& name, N a, N b) {
  if (name == "add") return a + b;
  if (name == "sub") return a - b;
  if (name == "mul") return a * b;
  if (name == "min") return b < a || a != a ? b : a;
  if (name == "max") return a < b || a != a ? b : a;
  if constexpr (std::is_integral_v<N>) {
    if (name == "and") return a & b;
    if (name == "or") return a | b;
    if (name == "xor") return a ^ b;
    if (name == "not") return ~a;
    if (name == "shl") return b >= N(8 * sizeof(N)) ? N(0) : a << b;
    if (name == "shr") return b >= N(8 * sizeof(N)) ? N(a < N(0) ? -1 : 0) : a >> b;
  } else {
    if (name == "ex2") return flushed(std::exp2(flushed(float(a))));
    if (name == "lg2") return std::log2(flushed(float(a)));
    if (name == "rcp") return N(1) / a;
    if (name == "sqrt") return std::sqrt(a);
    if (name == "rsqrt") return N(1) / std::sqrt(a);
    if (name == "tanh") return std::tanh(a);
    if (name == "neg") return -a;
    if (name == "abs") return std::fabs(a);
  }
  fail("asm: %s is not emulated", text.c_str());
}

template <class Body>
uint64_t of_pairs(bool brain, uint64_t a, uint64_t b, uint64_t c, const Body& body) {
  uint64_t result = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const auto wide = [&](uint64_t x) {
      return brain ? from_bfloat16(uint16_t(x >> shift)) : from_half(uint16_t(x >> shift));
    };
    const float x = body(wide(a), wide(b), wide(c));
    result |= uint64_t(brain ? to_bfloat16(x) : to_half(x)) << shift;
  }
  return result;
}

inline uint64_t calculate(const std::string& text, const std::string& name, const std::string& type,
                          uint64_t a, uint64_t b) {
  if (type == "f32") return bits_of(calculated(text, name, float_of(uint32_t(a)), float_of(uint32_t(b))));
  if (type == "f64") return bits_of(calculated(text, name, double_of(a), double_of(b)));
  if (type == "s32") return uint32_t(calculated(text, name, int32_t(a), int32_t(b)));
  if (type == "s64") return uint64_t(calculated(text, name, int64_t(a), int64_t(b)));
  if (type == "u32" || type == "b32") return calculated(text, name, uint32_t(a), uint32_t(b));
  if (type == "u64" || type == "b64") return calculated(text, name, a, b);
  if (type == "f16x2" || type == "bf16x2") {
    return of_pairs(type[0] == 'b', a, b, 0,
                    [&](float x, float y, float) { return calculated(text, name, x, y); });
  }
  fail("asm: %s is not emulated", text.c_str());
}

inline uint64_t multiply_add_numbers(const std::string& text, const std::string& type, uint64_t a, uint64_t b,
                                     uint64_t c) {
  if (type == "f32")
    return bits_of(std::fma(float_of(uint32_t(a)), float_of(uint32_t(b)), float_of(uint32_t(c))));
  if (type == "f64") return bits_of(std::fma(double_of(a), double_of(b), double_of(c)));
  if (type == "f16x2" || type == "bf16x2") {
    return of_pairs(type[0] == 'b', a, b, c, [](float x, float y, float z) { return std::fma(x, y, z); });
  }
  if (type == "s32" || type == "u32") return uint32_t(a) * uint32_t(b) + uint32_t(c);
  fail("asm: %s is not emulated", text.c_str());
}

// cvt.rn.f16x2.f32 result, high, low.
inline uint64_t convert_pair(const std::string& text, const std::string& to, uint64_t high, uint64_t low) {
  const float first = float_of(uint32_t(low)), second = float_of(uint32_t(high));
  if (to == "f16x2") return to_half(first) | uint32_t(to_half(second)) << 16;
  if (to == "bf16x2") return to_bfloat16(first) | uint32_t(to_bfloat16(second)) << 16;
  fail("asm: %s is not emulated", text.c_str());
}

inline uint64_t convert(const std::string& text, const std::string& to, const std::string& from,
                        uint64_t value) {
  if (from == "f32" && to == "f16") return to_half(float_of(uint32_t(value)));
  if (from == "f32" && to == "bf16") return to_bfloat16(float_of(uint32_t(value)));
  if (from == "f32" && to == "tf32") return (uint32_t(value) + 0x1000) & 0xffffe000u;  // rna
  if (from == "f16" && to == "f32") return bits_of(from_half(uint16_t(value)));
  if (from == "bf16" && to == "f32") return bits_of(from_bfloat16(uint16_t(value)));
  fail("asm: %s is not emulated", text.c_str());
}

}  // namespace emulator
