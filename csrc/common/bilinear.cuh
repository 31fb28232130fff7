// Bilinear samples shared within a block of threads. One thread locates each sample and hands it, through
// shared memory, to the team of threads that reads its channels.
//
// A sample has four pixels, and those outside the map read as 0. To spare the readers the check, a row or
// column outside the map is replaced by the one inside, and each of the two gets half of its weight. All
// loads are then unconditional, and no substitute is multiplied by 0, which would turn an infinite value into
// NaN.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/launch.cuh"
#include "common/vector.cuh"

namespace attn_plugins {

// (row, column) is the upper left pixel, from -1 on; dy and dx are the fractions. If `inside` is false, no
// pixel is inside the map, and the sample is `outside`: 0, or NaN if dy or dx is.
template <class A>
struct Sample {
  int row = 0, column = 0;
  A dy = A(0), dx = A(0);
  A outside = A(0);
  bool inside = false;
};

template <class A>
__device__ __forceinline__ Sample<A> sample_at(A y, A x, int H, int W) {
  Sample<A> s;
  // Comparisons that also put NaN outside: values outside must not be converted to an integer.
  s.inside = y >= A(-1) && y < A(H) && x >= A(-1) && x < A(W);
  const A top = s.inside ? floor(y) : A(0), left = s.inside ? floor(x) : A(0);
  s.row = static_cast<int>(top);
  s.column = static_cast<int>(left);
  s.dy = s.inside ? y - top : A(0);
  s.dx = s.inside ? x - left : A(0);
  return s;
}

// The four pixels of a sample: the number of the upper left pixel in the map, and the distances to the pixels
// to the right and below. `inside` is 1 if any is inside the map, 0 if the weighted sample is 0, else -1: it
// is NaN, as its weights are.
struct alignas(16) Place {
  int pixel, right, below, inside;
};

// Values of the four pixels, in the order upper left, upper right, lower left, lower right.
template <class A>
struct alignas(16) Four {
  A of[4];
};

// Places and weights of a round of samples.
template <class A, int SLOTS = kThreads>
struct Staged {
  Four<A> weights[SLOTS];
  Place places[SLOTS];

  // Stores a sample of an H x W map whose pixel 0 has number `first`. The weights are multiplied by `scale`.
  __device__ __forceinline__ void put(int slot, const Sample<A>& s, A scale, int H, int W, int first) {
    const bool above = s.row < 0, under = s.row + 1 >= H, before = s.column < 0, behind = s.column + 1 >= W;
    const A down = above ? s.dy / 2 : s.dy, up = above ? down : A(1) - s.dy;
    const A across = before ? s.dx / 2 : s.dx, back = before ? across : A(1) - s.dx;
    const A upper = under ? up / 2 : up, lower = under ? upper : down;
    const A left = behind ? back / 2 : back, right = behind ? left : across;
    weights[slot] = {
        {upper * left * scale, upper * right * scale, lower * left * scale, lower * right * scale}};
    places[slot] = {first + (above ? 0 : s.row) * W + (before ? 0 : s.column), before || behind ? 0 : 1,
                    above || under ? 0 : W,
                    s.inside                    ? 1
                    : s.outside * scale == A(0) ? 0
                                                : -1};
  }
};

// The address of pixel number `pixel` in a map whose pixels are `pixel_bytes` apart.
template <class P>
__device__ __forceinline__ P* pixel_at(P* map, int pixel, int pixel_bytes) {
  return reinterpret_cast<P*>(
      reinterpret_cast<std::conditional_t<std::is_const_v<P>, const char, char>*>(map) +
      int64_t(pixel) * pixel_bytes);
}

// The addresses of a sample's four pixels.
template <class P>
struct Corners {
  P* at[4];

  __device__ __forceinline__ Corners(P* map, const Place& place, int pixel_bytes) {
    at[0] = pixel_at(map, place.pixel, pixel_bytes);
    at[1] = pixel_at(at[0], place.right, pixel_bytes);
    at[2] = pixel_at(at[0], place.below, pixel_bytes);
    at[3] = pixel_at(at[2], place.right, pixel_bytes);
  }
};

// Adds the weighted sum of the four pixels' channels to `total`.
template <class T, int N>
__device__ __forceinline__ void blend(const Four<accumulate_t<T>>& weights, const Vector<T, N> (&corner)[4],
                                      accumulate_t<T> (&total)[N]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    accumulate_t<T> x[N];
    widen(corner[i], x);
#pragma unroll
    for (int e = 0; e < N; ++e) total[e] += weights.of[i] * x[e];
  }
}

// Converts N channels of a sample to T, or returns 0 if `inside` is 0.
template <class T, int N>
__device__ __forceinline__ Vector<T, N> narrow_sample(const accumulate_t<T> (&total)[N], int inside) {
  Vector<T, N> value = narrow<T>(total);
  if (inside == 0) value.word = {};
  return value;
}

// Derives the gradients of a sample's location and weight from `found`, the products with its four pixels.
// Pixels outside the map are dropped, because `put` has replaced them.
template <class A>
struct PixelSums {
  A dy, dx, of[4];

  __device__ __forceinline__ PixelSums(const Sample<A>& s, const Four<A>& found, int H, int W)
      : dy(s.dy), dx(s.dx) {
    const bool above = s.inside && s.row >= 0, under = s.inside && s.row + 1 < H;
    const bool before = s.column >= 0, behind = s.column + 1 < W;
    of[0] = above && before ? found.of[0] : A(0);
    of[1] = above && behind ? found.of[1] : A(0);
    of[2] = under && before ? found.of[2] : A(0);
    of[3] = under && behind ? found.of[3] : A(0);
  }

  // The product with the sample itself, and its derivatives by y and x.
  __device__ __forceinline__ A sampled() const {
    return (A(1) - dy) * ((A(1) - dx) * of[0] + dx * of[1]) + dy * ((A(1) - dx) * of[2] + dx * of[3]);
  }
  __device__ __forceinline__ A down() const { return (A(1) - dx) * (of[2] - of[0]) + dx * (of[3] - of[1]); }
  __device__ __forceinline__ A across() const { return (A(1) - dy) * (of[1] - of[0]) + dy * (of[3] - of[2]); }
};

// Sums four values over teams of `lanes` neighboring threads, at least 4, and stores the totals. The whole
// warp must call it together. After two steps each lane holds one of the four values, so that later steps
// exchange one value instead of four.
template <class A>
__device__ __forceinline__ void sum_over_team(const A (&values)[4], int lane, int lanes, Four<A>* totals) {
  constexpr unsigned kWarp = 0xffffffffu;
  const bool odd = lane & 1, upper = lane & 2;
  A first = odd ? values[1] : values[0], second = odd ? values[3] : values[2];
  first += __shfl_xor_sync(kWarp, odd ? values[0] : values[1], 1, 32);
  second += __shfl_xor_sync(kWarp, odd ? values[2] : values[3], 1, 32);
  A total = upper ? second : first;
  total += __shfl_xor_sync(kWarp, upper ? first : second, 2, 32);
  if (lanes == 32) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) total += __shfl_xor_sync(kWarp, total, step, 32);
  } else {
#pragma unroll 1
    for (int step = 4; step < lanes; step *= 2) total += __shfl_xor_sync(kWarp, total, step, 32);
  }
  if (lane < 4) totals->of[lane] = total;
}

}  // namespace attn_plugins
