// Arguments of the window-attention kernels, and index arithmetic between queries and keys.
#pragma once

#include <type_traits>

#include "common/divisor.cuh"
#include "common/launch.cuh"
#include "common/vector.cuh"
#include "window_attention/border.h"

namespace attn_plugins {

constexpr int kBand = 8;  // rows of maps that teams walk along together

// A (B, M, rows, columns, channels) tensor.
template <class T>
struct Maps {
  T* data = nullptr;
  int64_t batch = 0, head = 0, row = 0, column = 0, channel = 0;

  __device__ __forceinline__ T* at(int64_t b, int64_t m, int64_t y, int64_t x) const {
    return data + (b * batch + m * head + y * row + x * column);
  }
};

// One axis: tap t of query q is key q - padding + t * dilation, which is tap t - 1 of query q + dilation.
struct WindowAxis {
  int queries, keys, taps, padding, dilation;
  Divisor by_dilation;
};

__device__ __forceinline__ int quotient(int number, const Divisor& by) {
  int rest;
  return by.divide(number, &rest);
}

// Numbers of a query in the backward: the log-sum-exp, and the mean of grad_output · value. Float32 has four:
// the third is the binary logarithm of what weights by the rounded log-sum-exp sum to, the fourth is unused.
template <class T>
constexpr int kStats = std::is_same_v<T, float> ? 4 : 2;

template <class T>
struct WindowOperands {
  Maps<const T> query, key, value, position_logits, output_read, grad_output;
  Maps<T> output, grad_query, grad_key, grad_value, grad_position_logits;
  float* log_sum_exp;  // (B, M, Hq, Wq); natural, +inf where a window is empty
  float* stats;        // (B, M, Hq, Wq, kStats<T>)
  float* peaks;        // (B, M, Hq, Wq), of float16 alone: grad_output's greatest magnitude
  int d, dv;           // d is 0 without content
  float scale;         // of content
  Border border;
};

template <class T>
struct WindowProblem : WindowOperands<T> {
  WindowAxis y, x;
  int teams, M;
  int rows, columns;                                // of teams
  Divisor by_heads, by_map, by_band, by_last_rows;  // M; teams of a map, of a band; rows of the last band
  // Element strides between neighboring positions of a row: of keys, values, queries and gradients, and of
  // the logits of one key. Kernels read them from constant memory, which is cheaper than computing them.
  int key_step, value_step, query_step, gradient_step, position_step;
  // Byte strides between rows, for kernels on tensor cores, which are not chosen if a stride exceeds an int.
  int key_bytes, value_bytes, query_bytes, gradient_bytes, position_bytes, stats_bytes;
  int lanes;          // of a team, where the kernel does not fix them
  int staged;         // elements of shared memory for a warp's position logits
  float power_scale;  // of logits as powers of two
  bool tall;          // a warp's tile has two rows

  __device__ __forceinline__ int64_t query_index(int b, int m, int row, int column) const {
    return ((int64_t(b) * M + m) * y.queries + row) * x.queries + column;
  }
};

template <class T>
__device__ __forceinline__ float* stats_of(const WindowProblem<T>& p, int b, int m, int row, int column) {
  return p.stats + kStats<T> * p.query_index(b, m, row, column);
}

// Where a team works: in head m of image b, in row y, on the x-th run of that row.
struct Place {
  int b, m, y, x;
  bool exists;
};

template <class T>
__device__ __forceinline__ Place locate(const WindowProblem<T>& p, int team) {
  Place at;
  at.exists = team < p.teams;
  int in_head, in_band, in_column;
  at.b = p.by_heads.divide(p.by_map.divide(at.exists ? team : 0, &in_head), &at.m);
  const int first = p.by_band.divide(in_head, &in_band) * kBand;
  if (first + kBand <= p.rows) {
    at.x = in_band / kBand, in_column = in_band % kBand;
  } else {
    at.x = p.by_last_rows.divide(in_band, &in_column);
  }
  at.y = first + in_column;
  return at;
}

// The first place of the n-th run of `count` places at distances of `step`.
__device__ __forceinline__ int spread(int n, const Divisor& step, int count) {
  int rest;
  return step.divide(n, &rest) * (int(step.divisor) * count) + rest;
}

// The team's run of `count` places of a row.
template <class T>
__device__ __forceinline__ Place locate_run(const WindowProblem<T>& p, int team, int count) {
  Place at = locate(p, team);
  at.x = spread(at.x, p.x.by_dilation, count);
  return at;
}

__device__ __forceinline__ bool within(int i, int count) {
  return unsigned(i) < unsigned(count);
}

// Places n of a line: first <= n < first + count.
struct Span {
  int first, count;

  // Those n >= 0 for which start + n * step is on an axis of `size`.
  static __device__ __forceinline__ Span on_axis(int start, const Divisor& step, int size) {
    const int up = int(step.divisor) - 1;
    const int first = quotient(max(up - start, 0), step), end = quotient(max(size - start + up, 0), step);
    return {first, end > first ? end - first : 0};
  }
  __device__ __forceinline__ bool has(int n) const { return within(n - first, count); }
  // Those that are in other_first <= n < other_end, too.
  __device__ __forceinline__ Span common(int other_first, int other_end) const {
    const int low = first > other_first ? first : other_first, end = min(first + count, other_end);
    return {low, end > low ? end - low : 0};
  }
  __device__ __forceinline__ Span only_if(bool condition) const { return {first, condition ? count : 0}; }
};

// Distances along a row are 32-bit (cuda.cuh sees to it).
template <class T>
__device__ __forceinline__ T* along(T* row, int place, int distance) {
  return row + place * distance;
}

// Place i, places being this many bytes apart.
template <class T>
__device__ __forceinline__ T* go(T* first, int i, int bytes) {
  return reinterpret_cast<T*>(add_wide_product(reinterpret_cast<uintptr_t>(first), i, bytes));
}

// The place so many bytes on.
template <class T>
__device__ __forceinline__ T* next(T* place, int bytes) {
  return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(place) + int64_t(bytes));
}

}  // namespace attn_plugins
