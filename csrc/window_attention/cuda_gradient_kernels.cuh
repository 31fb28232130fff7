// The gradients of window attention, by the teams of cuda_kernels.cuh.
#pragma once

#include "cuda_kernels.cuh"

namespace attn_plugins {

// The gradient of a logit is weight * (slope - mean). The mean is first grad_output · output, which is as
// wrong as the output is rounded. The sum of a query's gradients would be 0 if the mean were exact, so it is
// what the mean lacks. In a row of one large weight, whose gradients are nearly 0, that may be all there is:
// a warp with such a row computes its queries once more.

// The backward kernels' statistics, one team a query, before the queries' kernels mend them.
template <class T, class Team>
__global__ void __launch_bounds__(kThreads) window_stats_kernel(const WindowProblem<T> p) {
  const Team team(p.lanes);
  const Place at = locate(p, team.index);
  float output[Team::OWN], gradient[Team::OWN];
  team.read_row(p.output_read.at(at.b, at.m, at.y, at.x), at.exists, p.dv, output);
  team.read_row(p.grad_output.at(at.b, at.m, at.y, at.x), at.exists, p.dv, gradient);
  const float product = team.sum(dot(output, gradient));
  float peak = 0;
  if constexpr (std::is_same_v<T, __half>) {
#pragma unroll
    for (int c = 0; c < Team::OWN; ++c) peak = fmaxf(peak, fabsf(gradient[c]));
    peak = team.greatest(peak);
  }
  if (at.exists && team.lane == 0) {
    const int64_t query_index = p.query_index(at.b, at.m, at.y, at.x);
    Vector<float, kStats<T>> stats;
    stats.element[0] = p.log_sum_exp[query_index], stats.element[1] = product;
    store(p.stats + kStats<T> * query_index, stats);
    if (std::is_same_v<T, __half>) p.peaks[query_index] = peak;
  }
}

// Of a query: the sums of its logits' gradients, of their magnitudes, and of its weights.
template <class T>
struct RowSums {
  static constexpr bool kExact = std::is_same_v<T, float>;
  float drift = 0, size = 0, weights = 0;

  __device__ __forceinline__ void add(float weight, float slope) {
    drift += slope, size += fabsf(slope), weights += weight;
  }
  // For the second turn, which is the last: an infinite size allows any drift.
  __device__ __forceinline__ void restart() { drift = 0, size = INFINITY, weights = 0; }
  // What the mean lacks.
  __device__ __forceinline__ float missing() const { return weights > 0 ? drift / weights : 0; }
  // Whether gradients are to be computed with a better mean; in float32, with better weights.
  __device__ __forceinline__ bool unsettled() const {
    const bool drifted = fabsf(drift) > size * (kExact ? 0x1p-19f : 0x1p-6f);
    return drifted || (kExact && size < INFINITY && weights > 0 && fabsf(weights - 1) > 0x1p-19f);
  }
};

template <int N>
__device__ __forceinline__ float weight_of(float logit, const Vector<float, N>& stats) {
  const float x = logit - stats.element[0];
  if constexpr (N > 2) return power_of_two(fmaf(x, kLog2E, -stats.element[2]));
  return power_of_two(x * kLog2E);
}

// Gradients of queries at.x, at.x + p.x.dilation, ... of a row, and of their position logits.
template <int QUERIES, class T, class Team>
__device__ __forceinline__ void window_query_gradient(const WindowProblem<T>& p, const Team& team,
                                                      const Place& at) {
  constexpr int kOwn = Team::template Share<QUERIES>::COUNT, kParts = Team::template Share<QUERIES>::PARTS;
  const bool content = p.d > 0;
  float query[QUERIES][Team::OWN], gradient[QUERIES][Team::OWN], sum[QUERIES][Team::OWN];
#pragma unroll
  for (int r = 0; r < QUERIES; ++r) {
    const int x = at.x + r * p.x.dilation;
    const bool valid = at.exists && x < p.x.queries;
    team.read_row(p.query.at(at.b, at.m, at.y, x), valid, p.d, query[r]);
    team.read_row(p.grad_output.at(at.b, at.m, at.y, x), valid, p.dv, gradient[r]);
  }
  // Of the lane's own queries; kept: gradients of position logits, which the lanes of a query write together.
  Vector<float, kStats<T>> stats[kOwn];
  T* written[kOwn];
  bool valid[kOwn];
  float kept[kOwn];
#pragma unroll
  for (int n = 0; n < kOwn; ++n) {
    const int x = at.x + team.template own<QUERIES>(n) * p.x.dilation;
    valid[n] = at.exists && x < p.x.queries, kept[n] = 0;
    if (valid[n]) stats[n] = load<float, kStats<T>>(stats_of(p, at.b, at.m, at.y, x));
    written[n] = p.grad_position_logits.at(at.b, at.m, at.y, x);
  }
  const int taps = p.y.taps * p.x.taps, writers = team.lanes / kParts, writer = team.lane / kParts;
  const int written_bytes = int(p.grad_position_logits.channel * sizeof(T));
  RowSums<T> sums[kOwn];
  while (true) {
#pragma unroll
    for (int r = 0; r < QUERIES; ++r) {
#pragma unroll
      for (int c = 0; c < Team::OWN; ++c) sum[r][c] = 0;
    }
    KeyLine<QUERIES, T, Team> line(p, team, at);
    for (int i = 0; i < p.y.taps; ++i) {
      line.begin_row(p);
      for (int j = 0; j < line.length(p); ++j) {
        float key[Team::OWN], value[Team::OWN], dots[QUERIES], logit[kOwn] = {}, slope[kOwn], bias[kOwn];
        float slopes[QUERIES];
        bool counts[kOwn];
        line.read(team, j, key, value, counts, bias);
#pragma unroll
        for (int r = 0; r < QUERIES; ++r) dots[r] = dot(gradient[r], value);
        team.sums(dots, slope);
        if (content) {
#pragma unroll
          for (int r = 0; r < QUERIES; ++r) dots[r] = dot(query[r], key);
          team.sums(dots, logit);
        }
#pragma unroll
        for (int n = 0; n < kOwn; ++n) {
          const float weight = counts[n] ? weight_of(fmaf(logit[n], p.scale, bias[n]), stats[n]) : 0;
          slope[n] = counts[n] ? weight * (slope[n] - stats[n].element[1]) : 0;
          sums[n].add(weight, slope[n]);
        }
#pragma unroll
        for (int r = 0; r < QUERIES; ++r) slopes[r] = team.template of_query<QUERIES>(slope, r);
#pragma unroll
        for (int r = 0; r < QUERIES; ++r) {
          if (!within(j - r, p.x.taps)) continue;  // not times 0: the key may be infinite
          add_scaled(sum[r], slopes[r], key);
        }
        if (!p.grad_position_logits.data) continue;
#pragma unroll
        for (int n = 0; n < kOwn; ++n) {
          const int tap = j - team.template own<QUERIES>(n);
          const int t = i * p.x.taps + tap, turn = t & (writers - 1);
          const bool inside = within(tap, p.x.taps), last = turn == writers - 1 || t == taps - 1;
          if (inside && turn == writer) kept[n] = slope[n];
          if (inside && last && writer <= turn && valid[n]) {
            *go(written[n], t - turn + writer, written_bytes) = narrow_to<T>(kept[n]);
          }
        }
      }
      line.end_row(p);
    }
    bool unsettled = false;
#pragma unroll
    for (int n = 0; n < kOwn; ++n) {
      unsettled = unsettled || sums[n].unsettled();
      stats[n].element[1] += sums[n].missing();
      if constexpr (RowSums<T>::kExact) {
        if (sums[n].weights > 0) stats[n].element[2] += log2f(sums[n].weights);
      }
    }
    if (!__any_sync(0xffffffffu, unsettled)) break;
#pragma unroll
    for (int n = 0; n < kOwn; ++n) sums[n].restart();
  }
  __syncwarp();  // all lanes of a query have read its statistics
#pragma unroll
  for (int n = 0; n < kOwn; ++n) {
    const int x = at.x + team.template own<QUERIES>(n) * p.x.dilation;
    if (team.lane < kParts && valid[n]) store(stats_of(p, at.b, at.m, at.y, x), stats[n]);
  }
#pragma unroll
  for (int r = 0; r < QUERIES; ++r) {
    const int x = at.x + r * p.x.dilation;
    if (p.grad_query.data && at.exists && x < p.x.queries) {
      team.write(p.grad_query.at(at.b, at.m, at.y, x), p.d, sum[r], p.scale);
    }
  }
}

template <class T, class Team, int QUERIES>
__global__ void __launch_bounds__(kThreads) window_query_gradient_kernel(const WindowProblem<T> p) {
  const Team team(p.lanes);
  window_query_gradient<QUERIES>(p, team, locate_run(p, team.index, QUERIES));
}

// Gradients of keys at.x, at.x + p.x.dilation, ... and of their values, each gathered from the queries that
// see the key.
template <int KEYS, class T, class Team>
__device__ __forceinline__ void window_key_gradient(const WindowProblem<T>& p, const Team& team,
                                                    const Place& at) {
  static_assert(KEYS <= 2 && Team::template Share<KEYS>::COUNT == 1);
  const bool content = p.d > 0, slopes = p.grad_key.data != nullptr;
  float key[KEYS][Team::OWN], value[KEYS][Team::OWN], key_sum[KEYS][Team::OWN], value_sum[KEYS][Team::OWN];
#pragma unroll
  for (int r = 0; r < KEYS; ++r) {
    const int x = at.x + r * p.x.dilation;
    const bool valid = at.exists && x < p.x.keys;
    team.read_row(p.key.at(at.b, at.m, at.y, x), valid, p.d, key[r]);
    team.read_row(p.value.at(at.b, at.m, at.y, x), valid, p.dv, value[r]);
#pragma unroll
    for (int c = 0; c < Team::OWN; ++c) key_sum[r][c] = 0, value_sum[r][c] = 0;
  }
  // The first query of the first row that sees the key, by the last tap.
  const int first_y = at.y + p.y.padding - (p.y.taps - 1) * p.y.dilation;
  const int first_x = at.x + p.x.padding - (p.x.taps - 1) * p.x.dilation;
  const int own = team.template own<KEYS>(0);
  const int line = p.x.taps + KEYS - 1;
  const Span on_map = Span::on_axis(first_x, p.x.by_dilation, p.x.queries).common(0, line);
  Span window[KEYS];  // place l of the line sees key r by tap p.x.taps - 1 + r - l
#pragma unroll
  for (int r = 0; r < KEYS; ++r) window[r] = on_map.common(r, r + p.x.taps);
  const Span own_window = KEYS > 1 && own > 0 ? window[KEYS - 1] : window[0];
  const unsigned chunks = team.chunks_of(p.d) | team.chunks_of(p.dv) << Team::CHUNKS;
  const int query_bytes = p.query_step * int(sizeof(T)), gradient_bytes = p.gradient_step * int(sizeof(T));
  const int position_bytes = p.position_step * int(sizeof(T));
  const int stats_bytes = kStats<T> * p.x.dilation * int(sizeof(float));
  // Pointers are carried from row to row, else the compiler computes each anew for every load.
  int y = first_y;
  const T* queries = team.own_of(p.query.at(at.b, at.m, y, first_x));
  const T* gradients = team.own_of(p.grad_output.at(at.b, at.m, y, first_x));
  const T* positions = p.position_logits.at(at.b, at.m, y, first_x) +
                       (int64_t(p.y.taps) * p.x.taps - 1 + own) * p.position_logits.channel;
  const float* stats_row = stats_of(p, at.b, at.m, y, first_x);
  const int64_t query_row = p.y.dilation * p.query.row, gradient_row = p.y.dilation * p.grad_output.row;
  const int64_t position_row = p.y.dilation * p.position_logits.row - p.x.taps * p.position_logits.channel;
  const int64_t stats_step = kStats<T> * int64_t(p.y.dilation) * p.x.queries;
  for (int n = 0; n < p.y.taps; ++n, y += p.y.dilation, queries += query_row, gradients += gradient_row,
           positions += position_row, stats_row += stats_step) {
    const bool row_inside = at.exists && within(y, p.y.queries);
    int inside = row_inside ? on_map.count : 0,
        biasing = row_inside && p.position_logits.data ? own_window.count : 0;
    int seeing[KEYS];
#pragma unroll
    for (int r = 0; r < KEYS; ++r) seeing[r] = row_inside ? window[r].count : 0;
    keep(inside), keep(biasing), keep(queries), keep(gradients), keep(positions), keep(stats_row);
    for (int l = 0; l < line; ++l) {
      const bool present = within(l - on_map.first, inside);
      const unsigned there = present ? chunks : 0;
      float query[Team::OWN], gradient[Team::OWN], dots[KEYS], logit[1] = {}, slope[1] = {}, bias = 0;
      float weights[KEYS], slopes_of[KEYS];
      Vector<float, kStats<T>> stats;
      team.read(go(queries, l, query_bytes), there, query);
      team.read(go(gradients, l, gradient_bytes), there >> Team::CHUNKS, gradient);
      if (present) stats = load_constant<float, kStats<T>>(go(stats_row, l, stats_bytes));
      if (within(l - own_window.first, biasing)) bias = load_one(go(positions, l, position_bytes));
      if (content) {
#pragma unroll
        for (int r = 0; r < KEYS; ++r) dots[r] = dot(key[r], query);
        team.sums(dots, logit);
      }
      if (slopes) {
#pragma unroll
        for (int r = 0; r < KEYS; ++r) dots[r] = dot(value[r], gradient);
        team.sums(dots, slope);
      }
      const float weight[1] = {weight_of(fmaf(logit[0], p.scale, bias), stats)};
      slope[0] = weight[0] * (slope[0] - stats.element[1]);
#pragma unroll
      for (int r = 0; r < KEYS; ++r) {
        weights[r] = team.template of_query<KEYS>(weight, r);
        slopes_of[r] = team.template of_query<KEYS>(slope, r);
      }
#pragma unroll
      for (int r = 0; r < KEYS; ++r) {
        if (!within(l - window[r].first, seeing[r])) continue;  // not times 0: the query may be infinite
        add_scaled(value_sum[r], weights[r], gradient);
        if (slopes) add_scaled(key_sum[r], slopes_of[r], query);
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
  window_key_gradient<KEYS>(p, team, locate_run(p, team.index, KEYS));
}

}  // namespace attn_plugins
