// Sums of products w g whose bits do not depend on the order of their terms: integers, added atomically.
//
// Let W and G be the largest finite |w| and |g|, W < 2^i and G < 2^j with the smallest such exponents (i = 0
// where factors |w| <= 1 are not searched), and let at most n <= 2^b factors w, each divided into shares that
// sum to at most |w|, reach one sum. Kernels compute the share of w 2^-i, at most 1, times g 2^(t - j), below
// 2^t, with t = 59 - b, in float32, round it to an integer and add that. Every partial sum, in any order,
// stays below n 2^t + 2n < 2^60 in absolute value, for b < 57. A sum of m terms errs by at most m / 2 units
// of 2^(i + j - t) <= 4 W G 2^(b - 59), or m W G 2^(b - 58), beside the rounding of each term to float32.
// Deformable DETR's encoder has b = 17 (22,323 queries, 4 points a level), so each term errs by at most 2^-41
// W G, and by 2^-42 W G in a 3 x 3 deformable convolution of 64 x 64 pixels; float32's own terms of that size
// err by 2^-25.
//
// Sums begin at 2^60, so they stay within 61 bits and never carry into the upper three, which record terms
// that are not finite. These bits are set with atomicOr, whose order does not matter either.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "common/dispatch.cuh"
#include "common/launch.cuh"
#include "common/tensor_ops.h"
#include "common/vector.cuh"

namespace attn_plugins {

using Fixed = unsigned long long;
constexpr Fixed kFixedZero = Fixed(1) << 60;
constexpr int kFlags = 61;  // the first of the bits for +inf, -inf and NaN

// How factors become integers.
struct FixedPoint {
  static constexpr int kBias = 256;  // above the exponents of float32, so that 0 stands for no factor

  const int* exponents = nullptr;  // i and j, biased
  int room = 0;                    // t

  static int room_for(int64_t n) {
    int room = 59;
    for (; n > 0; n /= 2) --room;
    return room;
  }

  // The same with the exponents in registers.
  struct Loaded {
    int first, second;

    __device__ __forceinline__ float first_factor(float w) const { return scalbnf(w, first); }
    __device__ __forceinline__ float second_factor(float g) const { return scalbnf(g, second); }
  };

  __device__ __forceinline__ int exponent(int which) const {
    const int biased = __ldg(exponents + which);
    return biased > 0 ? biased - kBias : 0;
  }
  __device__ __forceinline__ Loaded loaded() const { return {-exponent(0), room - exponent(1)}; }

  __device__ __forceinline__ float value_of(Fixed sum) const {
    const unsigned flags = static_cast<unsigned>(sum >> kFlags);
    if (flags == 0)
      return scalbnf(static_cast<float>(static_cast<int64_t>(sum - kFixedZero)),
                     exponent(0) + exponent(1) - room);
    if (flags > 2) return std::numeric_limits<float>::quiet_NaN();  // NaN, or both infinities
    return flags == 1 ? std::numeric_limits<float>::infinity() : -std::numeric_limits<float>::infinity();
  }
};

__device__ __forceinline__ void add_fixed(Fixed* to, float term) {
  if (fabsf(term) <= std::numeric_limits<float>::max()) {
    atomicAdd(to, static_cast<Fixed>(__float2ll_rn(term)));
  } else {
    atomicOr(to, Fixed(term > 0.f ? 1 : term < 0.f ? 2 : 4) << kFlags);
  }
}

template <int N>
__device__ __forceinline__ void add_atomically(Fixed* to, const float (&terms)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) add_fixed(to + i, terms[i]);
}

// In place of a FixedPoint: factors are not scaled.
struct AsTheyAre {
  __device__ __forceinline__ AsTheyAre loaded() const { return {}; }
  template <class A>
  __device__ __forceinline__ A first_factor(A weight) const {
    return weight;
  }
  template <class A>
  __device__ __forceinline__ A second_factor(A gradient) const {
    return gradient;
  }
};

// How the factors of sums of type S are scaled.
template <class S>
using ScaleOf = std::conditional_t<std::is_same_v<S, Fixed>, FixedPoint, AsTheyAre>;

// Raises *exponent to that of the thread's largest finite element, biased. Threads take `step`-th elements.
template <class T>
__device__ __forceinline__ void raise_exponent(const T* x, int64_t count, int64_t first, int64_t step,
                                               int* exponent) {
  constexpr int kTogether = 16 / sizeof(T);  // loads in flight at once
  float largest = 0.f;
  for (int64_t i = first; i < count; i += kTogether * step) {
    float size[kTogether] = {};
#pragma unroll
    for (int n = 0; n < kTogether; ++n) {
      if (i + n * step < count) size[n] = fabsf(widen(__ldg(x + i + n * step)));
    }
#pragma unroll
    for (int n = 0; n < kTogether; ++n) {
      if (size[n] <= std::numeric_limits<float>::max()) largest = max(largest, size[n]);
    }
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2)
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, lanes, 32));
  if (threadIdx.x % 32 == 0 && largest > 0.f) atomicMax(exponent, ilogbf(largest) + 1 + FixedPoint::kBias);
}

// Finds the exponents of w and g, which begin at 0, and sets the sums to zero.
template <class W, class G>
__global__ void __launch_bounds__(kThreads)
    begin_sums_kernel(const W* __restrict__ w, int64_t w_count, const G* __restrict__ g, int64_t g_count,
                      int* __restrict__ exponents, Fixed* __restrict__ sums, int64_t sum_count) {
  __shared__ int largest[2];
  if (threadIdx.x < 2) largest[threadIdx.x] = 0;
  __syncthreads();
  const int64_t first = int64_t(blockIdx.x) * kThreads + threadIdx.x, step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = first; i < sum_count; i += step) sums[i] = kFixedZero;
  raise_exponent(w, w_count, first, step, &largest[0]);
  raise_exponent(g, g_count, first, step, &largest[1]);
  __syncthreads();
  if (threadIdx.x < 2) atomicMax(exponents + threadIdx.x, largest[threadIdx.x]);
}

// result = or += the values of the sums.
template <class T, bool ADDS>
__global__ void __launch_bounds__(kThreads)
    end_sums_kernel(const Fixed* __restrict__ sums, const FixedPoint scale, int64_t count,
                    T* __restrict__ result) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  const float value = scale.value_of(__ldg(sums + i));
  result[i] = narrow_to<T>(ADDS ? widen(result[i]) + value : value);
}

namespace {

// The sums for a tensor of `like`'s size, of at most n products each.
struct FixedSums {
  Tensor sums, exponents;
  FixedPoint scale;

  FixedSums(const Tensor& like, int64_t n)
      : sums(empty_like_options(like, sizes_of(like), ScalarType::Long)),
        exponents(zeros_like_options(like, {2}, ScalarType::Int)),
        scale{data_of<const int>(exponents), FixedPoint::room_for(n)} {}

  Fixed* data() const { return data_of<Fixed>(sums); }

  // Sets them to zero, for products of the elements of w, contiguous of type W, and g, contiguous of type G.
  // w may be undefined if no factor is above 1.
  template <class W, class G>
  void begin(const Tensor& w, const Tensor& g) const {
    const int64_t count = sums.numel(), w_count = w.defined() ? w.numel() : 0;
    const int64_t most = std::max({count, w_count, int64_t(g.numel())});
    const int64_t blocks = std::min(divide_up(most, kThreads * 4), device_limits().multiprocessors * 8);
    launch(begin_sums_kernel<W, G>, blocks, data_of<const W>(w), w_count, data_of<const G>(g),
           int64_t(g.numel()), data_of<int>(exponents), data(), count);
  }

  template <class T, bool ADDS = false>
  void end(const Tensor& result) const {
    const int64_t count = sums.numel();
    launch(end_sums_kernel<T, ADDS>, divide_up(count, kThreads), data_of<const Fixed>(sums), scale, count,
           data_of<T>(result));
  }
};

}  // namespace
}  // namespace attn_plugins
