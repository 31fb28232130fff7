// Short vectors of the four floating-point types: a single memory access each, with arithmetic in float, or
// in double for double.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <torch/headeronly/core/ScalarType.h>
#include <bit>
#include <cstdint>
#include <cstring>

#include "ptx.cuh"

namespace attn_plugins {

template <class T>
struct Accumulate {
  using type = float;
};
template <>
struct Accumulate<double> {
  using type = double;
};
template <class T>
using accumulate_t = typename Accumulate<T>::type;

__device__ __forceinline__ float widen(float x) {
  return x;
}
__device__ __forceinline__ double widen(double x) {
  return x;
}
__device__ __forceinline__ float widen(__half x) {
  return __half2float(x);
}
__device__ __forceinline__ float widen(__nv_bfloat16 x) {
  return __bfloat162float(x);
}

template <class T>
__device__ __forceinline__ T narrow_to(accumulate_t<T> x) {
  return x;
}
template <>
__device__ __forceinline__ __half narrow_to<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 narrow_to<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

template <int bytes>
struct Bits;
template <>
struct Bits<16> {
  using type = uint4;
};
template <>
struct Bits<8> {
  using type = uint2;
};
template <>
struct Bits<4> {
  using type = unsigned;
};
template <>
struct Bits<2> {
  using type = unsigned short;
};

// N elements of T, aligned to their total size, in one register group.
template <class T, int N>
union Vector {
  using Word = typename Bits<N * sizeof(T)>::type;
  Word word;
  T element[N];

  __device__ __forceinline__ Vector() : word{} {}  // zeros
};

// Loads from memory that no thread writes while the kernel runs.
template <class T, int N>
__device__ __forceinline__ Vector<T, N> load_constant(const T* from) {
  Vector<T, N> v;
  v.word = __ldg(reinterpret_cast<const typename Vector<T, N>::Word*>(from));
  return v;
}

// Keeps the load of v before the code that follows, even if v is only used conditionally.
template <class T, int N>
__device__ __forceinline__ void loaded(Vector<T, N>& v) {
  keep(v.word);
}

template <class T, int N>
__device__ __forceinline__ Vector<T, N> load(const T* from) {
  Vector<T, N> v;
  v.word = *reinterpret_cast<const typename Vector<T, N>::Word*>(from);
  return v;
}

template <class T, int N>
__device__ __forceinline__ void store(T* to, const Vector<T, N>& v) {
  *reinterpret_cast<typename Vector<T, N>::Word*>(to) = v.word;
}

template <class T, int N>
__device__ __forceinline__ void widen(const Vector<T, N>& v, accumulate_t<T> (&x)[N]) {
#pragma unroll
  for (int e = 0; e < N; ++e) x[e] = widen(v.element[e]);
}

// Packs two neighboring elements into a register.
template <class T>
__device__ __forceinline__ unsigned pack(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return round_pair<T>(first, second);
#else
  Vector<T, 2> v;
  v.element[0] = narrow_to<T>(first), v.element[1] = narrow_to<T>(second);
  return v.word;
#endif
}

template <class T, int N>
__device__ __forceinline__ Vector<T, N> narrow(const accumulate_t<T> (&x)[N]) {
  Vector<T, N> v;
  if constexpr (sizeof(T) == 2 && N % 2 == 0) {
    unsigned pairs[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) pairs[i] = pack<T>(x[2 * i], x[2 * i + 1]);
    memcpy(&v.word, pairs, sizeof(pairs));
  } else {
#pragma unroll
    for (int e = 0; e < N; ++e) v.element[e] = narrow_to<T>(x[e]);
  }
  return v;
}

// A bfloat16 is the upper half of a float, so an element of a pair takes one instruction.
template <int N>
__device__ __forceinline__ void widen(const Vector<__nv_bfloat16, N>& v, float (&x)[N]) {
  if constexpr (N % 2 == 0) {
    unsigned pairs[N / 2];
    memcpy(pairs, &v.word, sizeof(pairs));
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      x[2 * i] = std::bit_cast<float>(pairs[i] << 16);
      x[2 * i + 1] = std::bit_cast<float>(pairs[i] & 0xffff0000u);
    }
  } else {
    x[0] = widen(v.element[0]);
  }
}

// to[i] += x[i], each atomically. Devices of sm_90 and later send two or four floats as one request.
template <int N>
__device__ __forceinline__ void add_atomically(float* to, const float (&x)[N]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if constexpr (N == 2) {
    add_two(to, x[0], x[1]);
    return;
  }
  constexpr int kFours = N / 4 * 4;
#pragma unroll
  for (int i = 0; i < kFours; i += 4) add_four(to + i, x[i], x[i + 1], x[i + 2], x[i + 3]);
#else
  constexpr int kFours = 0;
#endif
#pragma unroll
  for (int i = kFours; i < N; ++i) atomicAdd(to + i, x[i]);
}

template <int N>
__device__ __forceinline__ void add_atomically(double* to, const double (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) atomicAdd(to + i, x[i]);
}

}  // namespace attn_plugins
