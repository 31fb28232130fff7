// Parts of the vectorized kernels that do not depend on the instruction set: tensor views, the constants of
// exp, and the choice of the set.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <optional>
#include <type_traits>
#include <vector>

#include "bfloat16.h"
#include "simd.h"

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are never passed between functions of different targets

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define HAS_TARGETS
#include <immintrin.h>
#endif

namespace {

using torch::stable::Tensor;

// Constants of exp(x) for x <= 0. Adding SHIFTER leaves a number's integer part in the low bits. TAYLOR holds
// the coefficients from the highest power down; the polynomial's error is below one rounding.
template <typename T>
struct Exp;

template <>
struct Exp<float> {
  using Bits = int32_t;
  static constexpr float LOWEST = -87.0f, LOG2E = 1.44269504f, SHIFTER = 12582912.0f;  // 1.5 * 2^23
  static constexpr float LN2_HIGH = 0.693145752f, LN2_LOW = 1.42860677e-6f;
  static constexpr float TAYLOR[] = {1.0f / 5040, 1.0f / 720, 1.0f / 120, 1.0f / 24,
                                     1.0f / 6,    0.5f,       1.0f,       1.0f};
  static constexpr Bits BIAS = 127, MANTISSA = 23;
};

template <>
struct Exp<double> {
  using Bits = int64_t;
  static constexpr double LOWEST = -708.0, LOG2E = 1.4426950408889634,
                          SHIFTER = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double LN2_HIGH = 6.93147180369123816490e-01, LN2_LOW = 1.90821492927058770002e-10;
  static constexpr double TAYLOR[] = {1.0 / 6227020800.0,
                                      1.0 / 479001600.0,
                                      1.0 / 39916800.0,
                                      1.0 / 3628800.0,
                                      1.0 / 362880.0,
                                      1.0 / 40320.0,
                                      1.0 / 5040.0,
                                      1.0 / 720.0,
                                      1.0 / 120.0,
                                      1.0 / 24.0,
                                      1.0 / 6.0,
                                      0.5,
                                      1.0,
                                      1.0};
  static constexpr Bits BIAS = 1023, MANTISSA = 52;
};

// A (B, M, Hq, Wq, ·) view of elements of T or bfloat16, null if the tensor is absent. A stride of 0
// broadcasts.
template <typename T>
struct View {
  T* data = nullptr;
  int64_t stride[5] = {0, 0, 0, 0, 0};
  bool bfloat16 = false;  // `data` points to BFloat16 elements, and `at` must not be called

  View() = default;
  explicit View(const std::optional<Tensor>& tensor) {
    if (!tensor.has_value()) return;
    data = static_cast<T*>(tensor->data_ptr());
    for (int64_t i = 0; i < tensor->dim(); ++i) stride[i] = tensor->stride(i);
    bfloat16 = tensor->scalar_type() == torch::headeronly::ScalarType::BFloat16;
  }
  ATTN_INLINE int64_t offset(int64_t b, int64_t m, int64_t h, int64_t w) const {
    return b * stride[0] + m * stride[1] + h * stride[2] + w * stride[3];
  }
  ATTN_INLINE T* at(int64_t b, int64_t m, int64_t h, int64_t w) const { return data + offset(b, m, h, w); }
};

#ifdef HAS_TARGETS
int instruction_set() {
  static const int level = [] {
    __builtin_cpu_init();
    if (ATTN_CPU_LEVEL < 3 || !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 1;
    const bool wide = ATTN_CPU_LEVEL >= 4 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
    return wide ? 4 : 3;
  }();
  return level;
}
#endif

}  // namespace
