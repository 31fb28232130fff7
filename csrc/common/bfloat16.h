// bfloat16 storage with float arithmetic. Compilers vectorize these conversions.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

namespace {

// The upper 16 bits of a float.
struct BFloat16 {
  uint16_t bits;

  BFloat16() = default;
  ATTN_INLINE explicit BFloat16(float value) {  // round to nearest even; NaN stays NaN
    uint32_t whole;
    std::memcpy(&whole, &value, sizeof whole);
    const uint32_t rounded = (whole + 0x7fffu + (whole >> 16 & 1u)) >> 16;
    const uint32_t quiet = whole >> 16 | 0x40u;
    bits = static_cast<uint16_t>((whole & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
  }
  ATTN_INLINE operator float() const {
    const uint32_t whole = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &whole, sizeof value);
    return value;
  }
};

}  // namespace
