// Teams of lanes, and what the kernels of window attention compute with them.
#pragma once

#include <cmath>

#include "cuda_geometry.cuh"

namespace attn_plugins {

constexpr float kLowest = -3.4028235e38f;  // finite, so that a masked logit, -inf, is infinitely below it
constexpr float kSlack = 5;  // weights may grow to e^5 before sums are scaled down to a new greatest logit

// The lanes that hold a row of channels: LANES of them, or as many as the problem says, four at least, where
// LANES is 0. A lane has CHUNKS vectors of VECTOR elements, dealt out in turn.
template <int LANES_, int VECTOR_, int CHUNKS_>
struct Team {
  static constexpr int LANES = LANES_, VECTOR = VECTOR_, CHUNKS = CHUNKS_, OWN = VECTOR_ * CHUNKS_;
  int lanes, lane;
  int index;

  __device__ __forceinline__ explicit Team(int given) : lanes(LANES > 0 ? LANES : given) {
    lane = int(threadIdx.x) % lanes;
    index = int(blockIdx.x) * (kThreads / lanes) + int(threadIdx.x) / lanes;
  }

  // Distribution of work that is per query, not per channel, over the lanes: PARTS of N queries (a power of
  // two) in parallel, COUNT in sequence.
  template <int N>
  struct Share {
    static constexpr int MOST = LANES > 0 && LANES < 4 ? LANES : 4, PARTS = N < MOST ? N : MOST,
                         COUNT = N / PARTS;
  };
  // Returns the index of a lane's n-th query. Lanes of one part do the same work.
  template <int N>
  __device__ __forceinline__ int own(int n) const {
    return n * Share<N>::PARTS + (lane & (Share<N>::PARTS - 1));
  }

  // Reduces x over the team's lanes; a lane receives the sums of its own queries. Each of the first steps
  // halves the number of sums that a lane holds. Call with the whole warp.
  template <int N>
  __device__ __forceinline__ void sums(float (&x)[N], float (&to)[Share<N>::COUNT]) const {
    constexpr int kParts = Share<N>::PARTS;
#pragma unroll
    for (int step = 1; step < kParts; step *= 2) {
      const bool upper = lane & step;
#pragma unroll
      for (int n = 0; n < N / 2 / step; ++n) {
        const float kept = upper ? x[2 * n + 1] : x[2 * n], given = upper ? x[2 * n] : x[2 * n + 1];
        x[n] = kept + exchange(given, step);
      }
    }
#pragma unroll
    for (int n = 0; n < Share<N>::COUNT; ++n) to[n] = sum_from<kParts>(x[n]);
  }

  // Broadcasts the value of query n from the lanes that hold it. Call with the whole warp.
  template <int N>
  __device__ __forceinline__ float of_query(const float (&x)[Share<N>::COUNT], int n) const {
    constexpr int kParts = Share<N>::PARTS;
    return kParts == 1 ? x[n] : __shfl_sync(0xffffffffu, x[n / kParts], n % kParts, kParts);
  }

  __device__ __forceinline__ float sum(float x) const { return sum_from<1>(x); }

  __device__ __forceinline__ float greatest(float x) const {
    for (int step = lanes / 2; step > 0; step /= 2) x = fmaxf(x, exchange(x, step));
    return x;
  }

  // Bit c: chunk c has channels of a row of `width`.
  __device__ __forceinline__ unsigned chunks_of(int width) const {
    unsigned there = 0;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      there |= unsigned((chunk * lanes + lane) * VECTOR < width) << chunk;
    }
    return there;
  }

  // Where the lane's channels begin in a row.
  template <class T>
  __device__ __forceinline__ const T* own_of(const T* row) const {
    return row + lane * VECTOR;
  }

  // This lane's channels of a row, which begin at `own`, in these chunks; zeros in others.
  template <class T>
  __device__ __forceinline__ void read(const T* own, unsigned there, float (&to)[OWN]) const {
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      Vector<T, VECTOR> v;
      if (there >> chunk & 1) v = load_constant<T, VECTOR>(own + chunk * lanes * VECTOR);
#pragma unroll
      for (int e = 0; e < VECTOR; ++e) to[chunk * VECTOR + e] = widen(v.element[e]);
    }
  }

  // The same of a row of `width`, where it is present.
  template <class T>
  __device__ __forceinline__ void read_row(const T* row, bool present, int width, float (&to)[OWN]) const {
    read(own_of(row), present ? chunks_of(width) : 0, to);
  }

  template <class T>
  __device__ __forceinline__ void write(T* row, int width, const float (&from)[OWN], float factor) const {
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      const int first = (chunk * lanes + lane) * VECTOR;
      Vector<T, VECTOR> v;
#pragma unroll
      for (int e = 0; e < VECTOR; ++e) v.element[e] = narrow_to<T>(from[chunk * VECTOR + e] * factor);
      if (first < width) store(row + first, v);
    }
  }

 private:
  static __device__ __forceinline__ float exchange(float x, int step) {
    return __shfl_xor_sync(0xffffffffu, x, step, 32);
  }

  // Over the lanes that are FIRST apart. Whole warps, the most frequent teams of variable size, need no loop.
  template <int FIRST>
  __device__ __forceinline__ float sum_from(float x) const {
    if (LANES > 0 || lanes == 32) {
#pragma unroll
      for (int step = FIRST; step < (LANES > 0 ? LANES : 32); step *= 2) x += exchange(x, step);
    } else {
#pragma unroll 1
      for (int step = FIRST; step < lanes; step *= 2) x += exchange(x, step);
    }
    return x;
  }
};

template <int N>
__device__ __forceinline__ float dot(const float (&a)[N], const float (&b)[N]) {
  float sum = 0;
#pragma unroll
  for (int c = 0; c < N; ++c) sum += a[c] * b[c];
  return sum;
}

template <int N>
__device__ __forceinline__ void add_scaled(float (&to)[N], float factor, const float (&x)[N]) {
#pragma unroll
  for (int c = 0; c < N; ++c) to[c] += factor * x[c];
}

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLowestTop = -2e38f;  // its power of two has a finite exponent

__device__ __forceinline__ float exponential(float x) {
  return power_of_two(x * kLog2E);
}

template <class T>
__device__ __forceinline__ float load_one(const T* from) {
  return widen(load_constant<T, 1>(from).element[0]);
}

}  // namespace attn_plugins
