// The kernels of window attention. Nothing is unfolded, nothing added atomically: a sum's order is fixed.
//
// A team of lanes shares out the channels of a few queries of one row (in the keys' gradients: of a few
// keys), chosen so that their windows overlap tap on tap: a key row is read once for all of them.
// Neighbouring teams walk along bands of rows, so the halo that their windows share stays in the first-level
// cache. Arithmetic is in float.
#pragma once

#include <cmath>

#include "cuda_geometry.cuh"

namespace attn_plugins {

constexpr float kLowest = -3.4028235e38f;  // finite, so that a masked logit, -inf, is infinitely below it
constexpr float kSlack = 5;  // weights may grow to e^5 before sums are scaled down to a new greatest logit

// The lanes that hold a row of channels: LANES of them, or as many as the problem says where LANES is 0. A
// lane has CHUNKS vectors of VECTOR elements, dealt out in turn.
template <int LANES_, int VECTOR_, int CHUNKS_>
struct Team {
  static constexpr int LANES = LANES_, VECTOR = VECTOR_, OWN = VECTOR_ * CHUNKS_;
  int lanes, lane;
  int64_t index;

  __device__ __forceinline__ explicit Team(int given) : lanes(LANES > 0 ? LANES : given) {
    lane = int(threadIdx.x) % lanes;
    index = int64_t(blockIdx.x) * (kThreads / lanes) + int(threadIdx.x) / lanes;
  }

  // Over the team's lanes; all threads of a warp must come here together.
  __device__ __forceinline__ float sum(float x) const {
    if constexpr (LANES > 0) {
#pragma unroll
      for (int step = LANES / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step, 32);
    } else {
      for (int step = lanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step, 32);
    }
    return x;
  }

  __device__ __forceinline__ float greatest(float x) const {
    for (int step = lanes / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step, 32));
    return x;
  }

  // This lane's channels of a row of `width`; zeros where it is not present.
  template <class T>
  __device__ __forceinline__ void read(const T* row, bool present, int width, float (&to)[OWN]) const {
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS_; ++chunk) {
      const int first = (chunk * lanes + lane) * VECTOR;
      Vector<T, VECTOR> v;
      if (present && first < width) v = load_constant<T, VECTOR>(row + first);
#pragma unroll
      for (int e = 0; e < VECTOR; ++e) to[chunk * VECTOR + e] = widen(v.element[e]);
    }
  }

  template <class T>
  __device__ __forceinline__ void write(T* row, int width, const float (&from)[OWN], float factor) const {
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS_; ++chunk) {
      const int first = (chunk * lanes + lane) * VECTOR;
      Vector<T, VECTOR> v;
#pragma unroll
      for (int e = 0; e < VECTOR; ++e) v.element[e] = narrow_to<T>(from[chunk * VECTOR + e] * factor);
      if (first < width) store(row + first, v);
    }
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

__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float exponential(float x) {
  return power_of_two(x * kLog2E);
}

template <class T>
__device__ __forceinline__ float load_one(const T* from) {
  return widen(load_constant<T, 1>(from).element[0]);
}

// Queries at.x, at.x + p.x.step, ... of a row.
template <int QUERIES, class T, class Team>
__device__ __forceinline__ void window_forward(const WindowProblem<T>& p, const Team& team, const Place& at) {
  const bool content = p.d > 0, biased = p.position.data != nullptr;
  float query[QUERIES][Team::OWN], sum[QUERIES][Team::OWN], top[QUERIES], total[QUERIES];
  bool valid[QUERIES];
#pragma unroll
  for (int r = 0; r < QUERIES; ++r) {
    const int x = at.x + r * p.x.step;
    valid[r] = at.exists && x < p.x.queries;
    team.read(p.query.at(at.b, at.m, at.y, x), valid[r], p.d, query[r]);
    top[r] = kLowest, total[r] = 0;
#pragma unroll
    for (int c = 0; c < Team::OWN; ++c) query[r][c] *= p.scale, sum[r][c] = 0;
  }
  const int columns = p.x.taps + (QUERIES - 1) * p.x.shift;
  const int column = at.x * p.x.stride - p.x.padding;
  const Span on_map = Span::on_axis(column, p.x.dilation, p.x.keys);
  const int64_t key_row = p.y.dilation * p.key.row, value_row = p.y.dilation * p.value.row;
  // Pointers are carried from row to row, else the compiler computes each anew for every load.
  int row = at.y * p.y.stride - p.y.padding;
  const T* keys = p.key.at(at.b, at.m, row, column);
  const T* values = p.value.at(at.b, at.m, row, column);
  const T* positions = p.position.at(at.b, at.m, at.y, at.x);
  for (int i = 0; i < p.y.taps; ++i, row += p.y.dilation, keys += key_row, values += value_row,
           positions += p.x.taps * p.position.channel) {
    const bool row_inside = at.exists && within(row, p.y.keys);
    for (int j = 0; j < columns; ++j) {  // tap j of the first query, tap j - r * shift of query r
      const bool inside = row_inside && on_map.has(j), counts = inside || p.zero_border;
      float key[Team::OWN], value[Team::OWN], logit[QUERIES], bias[QUERIES];
#pragma unroll
      for (int r = 0; r < QUERIES; ++r) {
        bias[r] = 0;
        if (biased && counts && valid[r] && within(j - r * p.x.shift, p.x.taps)) {
          bias[r] = load_one(positions + (j * int(p.position.channel) + r * p.position_step));
        }
      }
      team.read(along(values, j, p.value_step), inside, p.dv, value);
#pragma unroll
      for (int r = 0; r < QUERIES; ++r) logit[r] = 0;
      if (content) {
        team.read(along(keys, j, p.key_step), inside, p.d, key);
#pragma unroll
        for (int r = 0; r < QUERIES; ++r) {
          if (within(j - r * p.x.shift, p.x.taps)) logit[r] = dot(query[r], key);
        }
#pragma unroll
        for (int r = 0; r < QUERIES; ++r) logit[r] = team.sum(logit[r]);
      }
#pragma unroll
      for (int r = 0; r < QUERIES; ++r) {
        if (!within(j - r * p.x.shift, p.x.taps)) continue;  // for all threads alike
        logit[r] = counts ? logit[r] + bias[r] : -INFINITY;  // chosen: a sum could be NaN
        if (logit[r] > top[r] + kSlack) {
          const float factor = exponential(top[r] - logit[r]);
          top[r] = logit[r], total[r] *= factor;
#pragma unroll
          for (int c = 0; c < Team::OWN; ++c) sum[r][c] *= factor;
        }
        const float weight = exponential(logit[r] - top[r]);
        total[r] += weight;
        add_scaled(sum[r], weight, value);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < QUERIES; ++r) {
    if (!valid[r]) continue;
    const int x = at.x + r * p.x.step;
    const bool empty = total[r] == 0;
    team.write(p.output.at(at.b, at.m, at.y, x), p.dv, sum[r], empty ? 0 : 1 / total[r]);
    if (team.lane == 0) {
      const int64_t query_index = p.query_index(at.b, at.m, at.y, x);
      p.log_sum_exp[query_index] = empty ? INFINITY : top[r] + logf(total[r]);
    }
  }
}

template <class T, class Team, int QUERIES>
__global__ void __launch_bounds__(kThreads) window_forward_kernel(const WindowProblem<T> p) {
  const Team team(p.lanes);
  window_forward<QUERIES>(p, team, locate_run(p, team.index, p.x.step, QUERIES));
}

// The backward kernels' statistics, one team a query. Of half numbers the output is read as it was rounded: a
// gradient carries the error of that, relative to the gradient of the output, as in FlashAttention.
template <class T, class Team>
__global__ void __launch_bounds__(kThreads) window_stats_kernel(const WindowProblem<T> p) {
  const Team team(p.lanes);
  const Place at = locate(team.index, p.teams, p.M, p.rows, p.columns);
  float output[Team::OWN], gradient[Team::OWN];
  team.read(p.output_read.at(at.b, at.m, at.y, at.x), at.exists, p.dv, output);
  team.read(p.grad_output.at(at.b, at.m, at.y, at.x), at.exists, p.dv, gradient);
  const float product = team.sum(dot(output, gradient));
  float peak = 0;
  if constexpr (std::is_same_v<T, __half>) {
#pragma unroll
    for (int c = 0; c < Team::OWN; ++c) peak = fmaxf(peak, fabsf(gradient[c]));
    peak = team.greatest(peak);
  }
  if (at.exists && team.lane == 0) {
    const int64_t query_index = p.query_index(at.b, at.m, at.y, at.x);
    Vector<float, 2> stats;
    stats.element[0] = p.log_sum_exp[query_index], stats.element[1] = product;
    store(p.stats + 2 * query_index, stats);
    if (std::is_same_v<T, __half>) p.peaks[query_index] = peak;
  }
}

// Gradients of queries at.x, at.x + p.x.step, ... of a row, and of their position logits.
template <int QUERIES, class T, class Team>
__device__ __forceinline__ void window_query_gradient(const WindowProblem<T>& p, const Team& team,
                                                      const Place& at) {
  const bool content = p.d > 0, biased = p.position.data != nullptr;
  const int taps = p.y.taps * p.x.taps;
  float query[QUERIES][Team::OWN], gradient[QUERIES][Team::OWN], sum[QUERIES][Team::OWN];
  float kept[QUERIES];  // gradients of position logits that the team's lanes write together
  Vector<float, 2> stats[QUERIES];
  bool valid[QUERIES];
#pragma unroll
  for (int r = 0; r < QUERIES; ++r) {
    const int x = at.x + r * p.x.step;
    valid[r] = at.exists && x < p.x.queries, kept[r] = 0;
    team.read(p.query.at(at.b, at.m, at.y, x), valid[r], p.d, query[r]);
    team.read(p.grad_output.at(at.b, at.m, at.y, x), valid[r], p.dv, gradient[r]);
    const int64_t query_index = p.query_index(at.b, at.m, at.y, x);
    if (valid[r]) stats[r] = load_constant<float, 2>(p.stats + 2 * query_index);
#pragma unroll
    for (int c = 0; c < Team::OWN; ++c) query[r][c] *= p.scale, sum[r][c] = 0;
  }
  const int columns = p.x.taps + (QUERIES - 1) * p.x.shift;
  const int column = at.x * p.x.stride - p.x.padding;
  const Span on_map = Span::on_axis(column, p.x.dilation, p.x.keys);
  const int64_t key_row = p.y.dilation * p.key.row, value_row = p.y.dilation * p.value.row;
  // Pointers are carried from row to row, else the compiler computes each anew for every load.
  int row = at.y * p.y.stride - p.y.padding;
  const T* keys = p.key.at(at.b, at.m, row, column);
  const T* values = p.value.at(at.b, at.m, row, column);
  const T* positions = p.position.at(at.b, at.m, at.y, at.x);
  for (int i = 0; i < p.y.taps; ++i, row += p.y.dilation, keys += key_row, values += value_row,
           positions += p.x.taps * p.position.channel) {
    const bool row_inside = at.exists && within(row, p.y.keys);
    for (int j = 0; j < columns; ++j) {  // tap j of the first query, tap j - r * shift of query r
      const bool inside = row_inside && on_map.has(j), counts = inside || p.zero_border;
      float key[Team::OWN], value[Team::OWN], logit[QUERIES], slope[QUERIES], bias[QUERIES];
#pragma unroll
      for (int r = 0; r < QUERIES; ++r) {
        bias[r] = 0;
        if (biased && counts && valid[r] && within(j - r * p.x.shift, p.x.taps)) {
          bias[r] = load_one(positions + (j * int(p.position.channel) + r * p.position_step));
        }
      }
      team.read(along(values, j, p.value_step), inside, p.dv, value);
      team.read(along(keys, j, p.key_step), inside, p.d, key);
#pragma unroll
      for (int r = 0; r < QUERIES; ++r) {
        logit[r] = 0, slope[r] = 0;
        if (within(j - r * p.x.shift, p.x.taps)) {
          logit[r] = dot(query[r], key), slope[r] = dot(gradient[r], value);
        }
      }
#pragma unroll
      for (int r = 0; r < QUERIES; ++r) {
        slope[r] = team.sum(slope[r]);
        if (content) logit[r] = team.sum(logit[r]);
      }
#pragma unroll
      for (int r = 0; r < QUERIES; ++r) {
        const int tap = j - r * p.x.shift;
        if (!within(tap, p.x.taps)) continue;
        const float weight = exponential(logit[r] + bias[r] - stats[r].element[0]);
        slope[r] = counts ? weight * (slope[r] - stats[r].element[1]) : 0;
        add_scaled(sum[r], slope[r], key);
        if (p.grad_position.data) {
          const int t = i * p.x.taps + tap, lane = t & (team.lanes - 1);
          if (lane == team.lane) kept[r] = slope[r];
          if (lane == team.lanes - 1 || t == taps - 1) {
            const int mine = t - lane + team.lane;
            if (valid[r] && mine <= t) {
              p.grad_position.at(at.b, at.m, at.y, at.x + r * p.x.step)[mine * p.grad_position.channel] =
                  narrow_to<T>(kept[r]);
            }
          }
        }
      }
    }
  }
#pragma unroll
  for (int r = 0; r < QUERIES; ++r) {
    if (valid[r] && p.grad_query.data) {
      team.write(p.grad_query.at(at.b, at.m, at.y, at.x + r * p.x.step), p.d, sum[r], p.scale);
    }
  }
}

template <class T, class Team, int QUERIES>
__global__ void __launch_bounds__(kThreads) window_query_gradient_kernel(const WindowProblem<T> p) {
  const Team team(p.lanes);
  window_query_gradient<QUERIES>(p, team, locate_run(p, team.index, p.x.step, QUERIES));
}

// Gradients of keys at.x, at.x + p.x.dilation, ... and of their values, each gathered from the queries that
// see the key.
template <int KEYS, class T, class Team>
__device__ __forceinline__ void window_key_gradient(const WindowProblem<T>& p, const Team& team,
                                                    const Place& at) {
  const bool content = p.d > 0, biased = p.position.data != nullptr, slopes = p.grad_key.data != nullptr;
  float key[KEYS][Team::OWN], value[KEYS][Team::OWN], key_sum[KEYS][Team::OWN], value_sum[KEYS][Team::OWN];
#pragma unroll
  for (int r = 0; r < KEYS; ++r) {
    const int x = at.x + r * p.x.dilation;
    const bool valid = at.exists && x < p.x.keys;
    team.read(p.key.at(at.b, at.m, at.y, x), valid, p.d, key[r]);
    team.read(p.value.at(at.b, at.m, at.y, x), valid, p.dv, value[r]);
#pragma unroll
    for (int c = 0; c < Team::OWN; ++c) {
      key[r][c] *= p.scale, key_sum[r][c] = 0, value_sum[r][c] = 0;
    }
  }
  const Reach rows(p.y, at.y), columns(p.x, at.x);
  const bool exists = at.exists && rows.exists && columns.exists;
  const Span on_map = Span::on_axis(columns.query, p.x.step, p.x.queries);
  for (int n = 0; n * p.y.shift < p.y.taps; ++n) {
    const int i = rows.tap - n * p.y.shift, y = rows.query + n * p.y.step;
    const bool row_inside = exists && i >= 0 && within(y, p.y.queries);
    const T* queries = p.query.at(at.b, at.m, y, columns.query);
    const T* gradients = p.grad_output.at(at.b, at.m, y, columns.query);
    const T* positions = p.position.at(at.b, at.m, y, columns.query);
    const float* row_stats = p.stats + 2 * p.query_index(at.b, at.m, y, columns.query);
    for (int l = 0; l * p.x.shift < p.x.taps + KEYS - 1; ++l) {
      // The query sees the first key by tap j, key r by tap j + r; greatest: the most that j can be in any
      // team.
      const int j = columns.tap - l * p.x.shift, greatest = p.x.taps - 1 - l * p.x.shift;
      const bool inside = row_inside && on_map.has(l);
      float query[Team::OWN], gradient[Team::OWN], logit[KEYS], slope[KEYS], bias[KEYS];
      bool sees[KEYS];
      Vector<float, 2> stats;
      if (inside) stats = load_constant<float, 2>(along(row_stats, l, 2 * p.x.step));
      const T* position = along(positions, l, p.x.step * int(p.position.column));
#pragma unroll
      for (int r = 0; r < KEYS; ++r) {
        sees[r] = inside && within(j + r, p.x.taps), bias[r] = 0;
        if (biased && sees[r]) {
          bias[r] = load_one(along(position, i * p.x.taps + j + r, int(p.position.channel)));
        }
      }
      team.read(along(queries, l, p.query_step), inside, p.d, query);
      team.read(along(gradients, l, p.gradient_step), inside, p.dv, gradient);
#pragma unroll
      for (int r = 0; r < KEYS; ++r) {
        logit[r] = 0, slope[r] = 0;
        if (greatest + r >= 0 &&
            greatest + r < p.x.taps + p.x.shift - 1) {  // else no team's query sees key r
          if (content) logit[r] = dot(key[r], query);
          if (slopes) slope[r] = dot(value[r], gradient);
        }
      }
#pragma unroll
      for (int r = 0; r < KEYS; ++r) {
        if (content) logit[r] = team.sum(logit[r]);
        if (slopes) slope[r] = team.sum(slope[r]);
      }
#pragma unroll
      for (int r = 0; r < KEYS; ++r) {
        if (!sees[r]) continue;  // not times 0: the query may be infinite
        const float weight = exponential(logit[r] + bias[r] - stats.element[0]);
        add_scaled(value_sum[r], weight, gradient);
        if (slopes) add_scaled(key_sum[r], weight * (slope[r] - stats.element[1]), query);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < KEYS; ++r) {
    const int x = at.x + r * p.x.dilation;
    if (!at.exists || x >= p.x.keys) continue;
    if (p.grad_key.data) team.write(p.grad_key.at(at.b, at.m, at.y, x), p.d, key_sum[r], p.scale);
    if (p.grad_value.data) team.write(p.grad_value.at(at.b, at.m, at.y, x), p.dv, value_sum[r], 1);
  }
}

template <class T, class Team, int KEYS>
__global__ void __launch_bounds__(kThreads) window_key_gradient_kernel(const WindowProblem<T> p) {
  const Team team(p.lanes);
  window_key_gradient<KEYS>(p, team, locate_run(p, team.index, p.x.dilation, KEYS));
}

}  // namespace attn_plugins
