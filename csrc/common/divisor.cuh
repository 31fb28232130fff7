// Fast division in kernels by numbers known before the launch.
#pragma once

#include <cstdint>

namespace attn_plugins {

// Divides numbers below 2^31 by a divisor from 1 to 2^31 - 1 with a multiplication and a shift (Granlund and
// Montgomery 1994).
struct Divisor {
  unsigned divisor = 1, factor = 0, shift = 0;

  Divisor() = default;
  explicit Divisor(int64_t by) : divisor(static_cast<unsigned>(by)) {
    if (by == 1) return;
    unsigned bits = 1;  // ceil(log2(by))
    while ((int64_t(1) << bits) < by) ++bits;
    factor = static_cast<unsigned>(((uint64_t(1) << (31 + bits)) + divisor - 1) / divisor);
    shift = bits - 1;
  }

  // Returns the quotient and stores the remainder.
  __device__ __forceinline__ int divide(int number, int* remainder) const {
    const unsigned n = static_cast<unsigned>(number);
    const unsigned quotient = divisor == 1 ? n : static_cast<unsigned>((uint64_t(n) * factor) >> 32) >> shift;
    *remainder = static_cast<int>(n - quotient * divisor);
    return static_cast<int>(quotient);
  }
};

}  // namespace attn_plugins
