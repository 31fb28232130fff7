// Window attention as it is defined, in loops over the keys of a query and the queries of a key: one warp a
// query (or a key), sums over channels by shuffles, 64-bit indices. It serves every stride, dilation and
// size, and is what the fast kernels of cuda_kernels.cuh and cuda_tensor_kernels.cuh must equal.
#pragma once

#include <cmath>

#include "cuda_team.cuh"

namespace attn_plugins {

// One axis: tap t of query q is key q * stride - padding + t * dilation; of windows inside the map, first_key
// + t * dilation.
struct GeneralAxis {
  int64_t queries, keys, taps, stride, padding, dilation;
  bool inside;

  __device__ __forceinline__ int64_t first_key(int64_t query) const {
    if (!inside) return query * stride - padding;
    const int64_t phase = query % dilation, last = (keys - phase + dilation - 1) / dilation - taps;
    return phase + dilation * min(max(query / dilation - taps / 2, int64_t(0)), last);
  }
  __device__ __forceinline__ int64_t key(int64_t query, int64_t tap) const {
    return first_key(query) + tap * dilation;
  }
  // Numbers of queries that may have a key.
  __device__ __forceinline__ int64_t pairs() const { return inside ? 2 * taps - 1 : taps; }
  // Sets `query` to the n-th of these and `tap` to its tap that is the key. Returns false if there is none.
  __device__ __forceinline__ bool pair(int64_t key, int64_t n, int64_t& query, int64_t& tap) const {
    const int64_t first = key + padding - n * dilation;
    if (!inside) {
      query = first / stride, tap = n;
      return first >= 0 && first % stride == 0 && query < queries;
    }
    query = key + (n - taps + 1) * dilation;
    if (query < 0 || query >= queries) return false;
    const int64_t distance = key - first_key(query);
    tap = distance / dilation;
    return distance >= 0 && tap < taps;
  }
};

template <class T>
struct GeneralProblem : WindowOperands<T> {
  GeneralAxis y, x;
  int64_t B, M;
};

struct GeneralPlace {
  int64_t b, m, y, x;

  // Place n of maps of `rows` x `columns`.
  __device__ __forceinline__ GeneralPlace(int64_t n, int64_t M, int64_t rows, int64_t columns)
      : b(n / columns / rows / M), m(n / columns / rows % M), y(n / columns % rows), x(n % columns) {}
};

// A lane's channels of a row: lane, lane + 32, ..., N in all.
template <int N>
struct Row {
  float of[N] = {};

  Row() = default;
  template <class T>
  __device__ __forceinline__ Row(const Maps<T>& map, const GeneralPlace& at, int width) {
    for_channels(map, at, width, [&](T& element, int c) { of[c] = widen(element); });
  }
  template <class T>
  __device__ __forceinline__ void write(const Maps<T>& map, const GeneralPlace& at, int width, float factor) {
    for_channels(map, at, width, [&](T& element, int c) { element = narrow_to<T>(of[c] * factor); });
  }
  __device__ __forceinline__ void add(float factor, const Row& other) {
    for (int c = 0; c < N; ++c) of[c] += factor * other.of[c];
  }
  // Returns the scalar product, in every lane.
  __device__ __forceinline__ float dot(const Row& other) const {
    float sum = 0;
    for (int c = 0; c < N; ++c) sum += of[c] * other.of[c];
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step, 32);
    return sum;
  }

 private:
  template <class T, class Body>
  __device__ __forceinline__ static void for_channels(const Maps<T>& map, const GeneralPlace& at, int width,
                                                      const Body& body) {
    T* const row = map.at(at.b, at.m, at.y, at.x);
#pragma unroll
    for (int c = 0; c < N; ++c) {
      const int channel = 32 * c + int(threadIdx.x) % 32;
      if (channel < width) body(row[channel * map.channel], c);
    }
  }
};

// The logit of a query's tap; key: that of the tap, zeros outside the map.
template <class T, int N>
__device__ __forceinline__ float general_logit(const GeneralProblem<T>& p, const GeneralPlace& at,
                                               int64_t tap, const Row<N>& query, const Row<N>& key) {
  float logit = p.d > 0 ? query.dot(key) * p.scale : 0;
  if (p.position_logits.data) {
    logit += widen(p.position_logits.at(at.b, at.m, at.y, at.x)[tap * p.position_logits.channel]);
  }
  return logit;
}

// Calls body(tap, logit, key, value) for the keys in the window of a query.
template <class T, int N, class Body>
__device__ __forceinline__ void for_window(const GeneralProblem<T>& p, const GeneralPlace& at,
                                           const Row<N>& query, const Body& body) {
  for (int64_t i = 0; i < p.y.taps; ++i) {
    for (int64_t j = 0; j < p.x.taps; ++j) {
      GeneralPlace place = at;
      place.y = p.y.key(at.y, i), place.x = p.x.key(at.x, j);
      const bool on_map = place.y >= 0 && place.y < p.y.keys && place.x >= 0 && place.x < p.x.keys;
      if (!on_map && p.border == Border::kExclude) continue;
      const Row<N> key(p.key, place, on_map ? p.d : 0), value(p.value, place, on_map ? p.dv : 0);
      const int64_t tap = i * p.x.taps + j;
      body(tap, general_logit(p, at, tap, query, key), key, value);
    }
  }
}

// Calls body(n) for numbers below `count`, each by one warp.
template <class Body>
__device__ __forceinline__ void for_warp(int64_t count, const Body& body) {
  const int64_t thread = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  for (int64_t n = thread / 32; n < count; n += int64_t(gridDim.x) * (kThreads / 32)) body(n);
}

template <class T, int N>
__global__ void __launch_bounds__(kThreads) window_forward_general_kernel(const GeneralProblem<T> p) {
  for_warp(p.B * p.M * p.y.queries * p.x.queries, [&](int64_t n) {
    const GeneralPlace at(n, p.M, p.y.queries, p.x.queries);
    Row<N> output;
    float top = kLowest, total = 0;
    for_window(p, at, Row<N>(p.query, at, p.d),
               [&](int64_t, float logit, const Row<N>&, const Row<N>& value) {
                 const float next = fmaxf(top, logit), factor = expf(top - next), weight = expf(logit - next);
                 for (int c = 0; c < N; ++c) output.of[c] *= factor;
                 output.add(weight, value);
                 total = total * factor + weight, top = next;
               });
    output.write(p.output, at, p.dv, total == 0 ? 0 : 1 / total);
    if (threadIdx.x % 32 == 0) p.log_sum_exp[n] = total == 0 ? INFINITY : top + logf(total);
  });
}

// The gradient of a logit is weight * (slope - mean), where slope = grad_output · value, and mean is the
// weights' average of slopes. Statistics of a query, for its keys: what its weights by the rounded
// log-sum-exp sum to, and the mean.
template <class T, int N>
__global__ void __launch_bounds__(kThreads) window_query_gradient_general_kernel(const GeneralProblem<T> p) {
  for_warp(p.B * p.M * p.y.queries * p.x.queries, [&](int64_t n) {
    const GeneralPlace at(n, p.M, p.y.queries, p.x.queries);
    const Row<N> query(p.query, at, p.d), grad_output(p.grad_output, at, p.dv);
    float total = 0, mean = 0;
    for_window(p, at, query, [&](int64_t, float logit, const Row<N>&, const Row<N>& value) {
      const float weight = expf(logit - p.log_sum_exp[n]);
      if (weight == 0) return;
      total += weight, mean += weight / total * (grad_output.dot(value) - mean);
    });
    if (total == 0) total = 1;  // all keys are masked, all weights 0
    if (threadIdx.x % 32 == 0) p.stats[2 * n] = total, p.stats[2 * n + 1] = mean;
    Row<N> grad_query;
    T* const grad_logits = p.grad_position_logits.at(at.b, at.m, at.y, at.x);
    const auto write = [&](int64_t tap, float grad) {
      if (p.grad_position_logits.data) grad_logits[tap * p.grad_position_logits.channel] = narrow_to<T>(grad);
    };
    for (int64_t tap = threadIdx.x % 32; tap < p.y.taps * p.x.taps; tap += 32) write(tap, 0);
    __syncwarp();
    for_window(p, at, query, [&](int64_t tap, float logit, const Row<N>& key, const Row<N>& value) {
      const float weight = expf(logit - p.log_sum_exp[n]) / total;
      const float grad = weight * (grad_output.dot(value) - mean);
      grad_query.add(grad, key);
      if (threadIdx.x % 32 == 0) write(tap, grad);
    });
    if (p.grad_query.data) grad_query.write(p.grad_query, at, p.d, p.scale);
  });
}

template <class T, int N>
__global__ void __launch_bounds__(kThreads) window_key_gradient_general_kernel(const GeneralProblem<T> p) {
  for_warp(p.B * p.M * p.y.keys * p.x.keys, [&](int64_t n) {
    const GeneralPlace at(n, p.M, p.y.keys, p.x.keys);
    const Row<N> key(p.key, at, p.d), value(p.value, at, p.dv);
    Row<N> grad_key, grad_value;
    for (int64_t m = 0; m < p.y.pairs(); ++m) {
      for (int64_t n = 0; n < p.x.pairs(); ++n) {
        GeneralPlace place = at;
        int64_t i, j;
        if (!p.y.pair(at.y, m, place.y, i) || !p.x.pair(at.x, n, place.x, j)) continue;
        const Row<N> query(p.query, place, p.d), grad_output(p.grad_output, place, p.dv);
        const int64_t index = ((at.b * p.M + at.m) * p.y.queries + place.y) * p.x.queries + place.x;
        const float logit = general_logit(p, place, i * p.x.taps + j, query, key);
        const float weight = expf(logit - p.log_sum_exp[index]) / p.stats[2 * index];
        grad_value.add(weight, grad_output);
        grad_key.add(weight * (grad_output.dot(value) - p.stats[2 * index + 1]), query);
      }
    }
    if (p.grad_key.data) grad_key.write(p.grad_key, at, p.d, p.scale);
    if (p.grad_value.data) grad_value.write(p.grad_value, at, p.dv, 1);
  });
}

}  // namespace attn_plugins
