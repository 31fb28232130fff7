// Replaces csrc/common/ptx.cuh: what its instructions do, in C++. Capabilities before 8.0 are not emulated.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

namespace attn_plugins {

template <class T>
void keep(T&) {}

inline uintptr_t add_wide_product(uintptr_t x, int a, int b) {
  return x + uintptr_t(int64_t(a) * b);
}

inline float power_of_two(float x) {
  const auto flushed = [](float y) {
    return std::fpclassify(y) == FP_SUBNORMAL ? std::copysign(0.0f, y) : y;
  };
  return flushed(std::exp2(flushed(x)));
}

template <class T>
unsigned round_pair(float first, float second) {
  return T(first).x | unsigned(T(second).x) << 16;
}

// The fragments that a lane passes to multiply_matrices; csrc/common/tensor_core.cuh says what they hold.
struct Fragments {
  unsigned a[4], b[2];
  float sum[4];
};

// Products are exact and summed in double, because order and rounding on a device are not documented.
template <class T>
void multiply_fragments(emulator::Payload* lanes, unsigned) {
  const auto element = [](unsigned word, unsigned e) {
    return float(T(static_cast<unsigned short>(word >> 16 * e), T::from_bits()));
  };
  Fragments fragments[emulator::kLanes];
  float a[16][16], b[16][8];
  for (unsigned l = 0; l < emulator::kLanes; ++l) {
    std::memcpy(&fragments[l], lanes[l].bytes, sizeof fragments[l]);
    for (unsigned e = 0; e < 2; ++e) {
      for (unsigned word = 0; word < 2; ++word) {
        const unsigned k = 8 * word + 2 * (l % 4) + e;
        a[l / 4][k] = element(fragments[l].a[2 * word], e);
        a[l / 4 + 8][k] = element(fragments[l].a[2 * word + 1], e);
        b[k][l / 4] = element(fragments[l].b[word], e);
      }
    }
  }
  for (unsigned l = 0; l < emulator::kLanes; ++l) {
    for (unsigned i = 0; i < 4; ++i) {
      double total = fragments[l].sum[i];
      for (unsigned k = 0; k < 16; ++k) total += double(a[l / 4 + i / 2 * 8][k]) * b[k][2 * (l % 4) + i % 2];
      fragments[l].sum[i] = float(total);
    }
    std::memcpy(lanes[l].bytes, &fragments[l], sizeof fragments[l]);
  }
}

template <class T>
void multiply_matrices(float (&sum)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                       unsigned b1) {
  Fragments mine{{a0, a1, a2, a3}, {b0, b1}, {sum[0], sum[1], sum[2], sum[3]}};
  emulator::together("mma.sync", ~0u, &mine, sizeof mine, multiply_fragments<T>);
  std::memcpy(sum, mine.sum, sizeof mine.sum);
}

template <int N>
EMULATOR_UNSEEN void add_at_once(float* to, const float (&x)[N]) {
  emulator::access(to, sizeof x, emulator::kAtomic, sizeof x);
  for (int i = 0; i < N; ++i) to[i] += x[i];
}
inline void add_two(float* to, float x0, float x1) {
  add_at_once<2>(to, {x0, x1});
}
inline void add_four(float* to, float x0, float x1, float x2, float x3) {
  add_at_once<4>(to, {x0, x1, x2, x3});
}

}  // namespace attn_plugins
