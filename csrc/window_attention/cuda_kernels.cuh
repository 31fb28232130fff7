// The kernels of window attention. Nothing is unfolded, nothing added atomically: a sum's order is fixed.
//
// A team of lanes shares out the channels of a few queries of one row (in the keys' gradients: of a few
// keys), chosen so that their windows overlap tap on tap: a key row is read once for all of them.
// Neighboring teams walk along bands of rows, so the halo that their windows share stays in the first-level
// cache. Arithmetic is in float.
#pragma once

#include "cuda_team.cuh"

namespace attn_plugins {

// Keys of one row that the windows of a team's queries share: position j is tap j of query 0 and tap
// j - r of query r. Pointers are advanced from row to row, since the compiler would otherwise
// recompute them for every load.
template <int QUERIES, class T, class Team>
struct KeyLine {
  static constexpr int COUNT = Team::template Share<QUERIES>::COUNT;
  Span on_map, window[COUNT];  // window: of the lane's own queries, that part of them which counts
  unsigned chunks, row_chunks;
  int row, counting[COUNT],
      biasing[COUNT];  // of the row: how much of the window counts, has a position logit
  int key_bytes, value_bytes, tap_bytes;
  const T *keys, *values,
      *positions[COUNT];  // of the row: the first key on the map, the window's first logit

  __device__ __forceinline__ KeyLine(const WindowProblem<T>& p, const Team& team, const Place& at) {
    const int column = at.x - p.x.padding;
    on_map = Span::on_axis(column, p.x.by_dilation, p.x.keys).only_if(at.exists);
    row = at.y - p.y.padding;
    chunks = team.chunks_of(p.d) | team.chunks_of(p.dv) << Team::CHUNKS;
    const int first = column + on_map.first * p.x.dilation;
    keys = team.own_of(p.key.at(at.b, at.m, row, first));
    values = team.own_of(p.value.at(at.b, at.m, row, first));
    key_bytes = p.key_step * int(sizeof(T)), value_bytes = p.value_step * int(sizeof(T));
    tap_bytes = int(p.position_logits.channel * sizeof(T));
#pragma unroll
    for (int n = 0; n < COUNT; ++n) {
      const int r = team.template own<QUERIES>(n), x = at.x + r * p.x.dilation, start = r;
      const Span all{start, p.x.taps};
      window[n] = p.border == Border::kZero ? all : on_map.common(start, start + p.x.taps);
      window[n] = window[n].only_if(at.exists && x < p.x.queries);
      positions[n] =
          p.position_logits.at(at.b, at.m, at.y, x) + (window[n].first - start) * p.position_logits.channel;
    }
  }

  __device__ __forceinline__ static int length(const WindowProblem<T>& p) { return p.x.taps + QUERIES - 1; }

  __device__ __forceinline__ void begin_row(const WindowProblem<T>& p) {
    const bool inside = within(row, p.y.keys);
    row_chunks = inside ? chunks : 0;
#pragma unroll
    for (int n = 0; n < COUNT; ++n) {
      counting[n] = inside || p.border == Border::kZero ? window[n].count : 0;
      biasing[n] = p.position_logits.data ? counting[n] : 0;
      keep(biasing[n]), keep(positions[n]);
    }
    keep(row_chunks), keep(keys), keep(values), keep(tap_bytes);
  }

  __device__ __forceinline__ void end_row(const WindowProblem<T>& p) {
    row += p.y.dilation, keys += p.y.dilation * p.key.row, values += p.y.dilation * p.value.row;
#pragma unroll
    for (int n = 0; n < COUNT; ++n) positions[n] += p.x.taps * p.position_logits.channel;
  }

  // Of place j: key and value, zeros where there are none; whether own queries count it, and their position
  // logits.
  __device__ __forceinline__ void read(const Team& team, int j, float (&key)[Team::OWN],
                                       float (&value)[Team::OWN], bool (&counts)[COUNT],
                                       float (&bias)[COUNT]) const {
    const int place = j - on_map.first;
    const unsigned there = within(place, on_map.count) ? row_chunks : 0;
    team.read(go(keys, place, key_bytes), there, key);
    team.read(go(values, place, value_bytes), there >> Team::CHUNKS, value);
#pragma unroll
    for (int n = 0; n < COUNT; ++n) {
      const int tap = j - window[n].first;
      counts[n] = within(tap, counting[n]), bias[n] = 0;
      if (within(tap, biasing[n])) bias[n] = load_one(go(positions[n], tap, tap_bytes));
    }
  }
};

// Queries at.x, at.x + p.x.dilation, ... of a row. Each lane has the softmax of a few of them, and its
// channels of all. Threads branch as all of them do.
template <int QUERIES, class T, class Team>
__device__ __forceinline__ void window_forward(const WindowProblem<T>& p, const Team& team, const Place& at) {
  constexpr int kOwn = Team::template Share<QUERIES>::COUNT, kParts = Team::template Share<QUERIES>::PARTS;
  const bool content = p.d > 0;
  float query[QUERIES][Team::OWN], sum[QUERIES][Team::OWN], top[kOwn], total[kOwn];
#pragma unroll
  for (int r = 0; r < QUERIES; ++r) {
    const int x = at.x + r * p.x.dilation;
    team.read_row(p.query.at(at.b, at.m, at.y, x), at.exists && x < p.x.queries, p.d, query[r]);
#pragma unroll
    for (int c = 0; c < Team::OWN; ++c) sum[r][c] = 0;
  }
#pragma unroll
  for (int n = 0; n < kOwn; ++n) top[n] = kLowest, total[n] = 0;
  KeyLine<QUERIES, T, Team> line(p, team, at);
  for (int i = 0; i < p.y.taps; ++i) {
    line.begin_row(p);
    for (int j = 0; j < line.length(p); ++j) {
      float key[Team::OWN], value[Team::OWN], logit[kOwn] = {}, bias[kOwn], weight[kOwn], weights[QUERIES];
      bool counts[kOwn], higher = false;
      line.read(team, j, key, value, counts, bias);
      if (content) {
        float dots[QUERIES];
#pragma unroll
        for (int r = 0; r < QUERIES; ++r) dots[r] = dot(query[r], key);
        team.sums(dots, logit);
      }
#pragma unroll
      for (int n = 0; n < kOwn; ++n) {
        logit[n] = counts[n] ? fmaf(logit[n], p.scale, bias[n]) : -INFINITY;  // chosen: a sum could be NaN
        higher = higher || logit[n] > top[n] + kSlack;
      }
      if (__any_sync(0xffffffffu, higher)) {
        float factor[kOwn];
#pragma unroll
        for (int n = 0; n < kOwn; ++n) {
          const float next = logit[n] > top[n] + kSlack ? logit[n] : top[n];
          factor[n] = exponential(top[n] - next), top[n] = next, total[n] *= factor[n];
        }
#pragma unroll
        for (int r = 0; r < QUERIES; ++r) {
          const float f = team.template of_query<QUERIES>(factor, r);
#pragma unroll
          for (int c = 0; c < Team::OWN; ++c) sum[r][c] *= f;
        }
      }
#pragma unroll
      for (int n = 0; n < kOwn; ++n) {
        weight[n] = exponential(logit[n] - top[n]);
        total[n] += weight[n];
      }
#pragma unroll
      for (int r = 0; r < QUERIES; ++r) weights[r] = team.template of_query<QUERIES>(weight, r);
#pragma unroll
      for (int r = 0; r < QUERIES; ++r) {
        if (!within(j - r, p.x.taps)) continue;  // not times 0: the value may be infinite
        add_scaled(sum[r], weights[r], value);
      }
    }
    line.end_row(p);
  }
  float inverse[kOwn];
#pragma unroll
  for (int n = 0; n < kOwn; ++n) {
    const int x = at.x + team.template own<QUERIES>(n) * p.x.dilation;
    const bool empty = total[n] == 0;
    inverse[n] = empty ? 0 : 1 / total[n];
    if (team.lane < kParts && at.exists && x < p.x.queries) {
      p.log_sum_exp[p.query_index(at.b, at.m, at.y, x)] = empty ? INFINITY : top[n] + logf(total[n]);
    }
  }
#pragma unroll
  for (int r = 0; r < QUERIES; ++r) {
    const int x = at.x + r * p.x.dilation;
    const float factor = team.template of_query<QUERIES>(inverse, r);
    if (at.exists && x < p.x.queries) team.write(p.output.at(at.b, at.m, at.y, x), p.dv, sum[r], factor);
  }
}

template <class T, class Team, int QUERIES>
__global__ void __launch_bounds__(kThreads) window_forward_kernel(const WindowProblem<T> p) {
  const Team team(p.lanes);
  window_forward<QUERIES>(p, team, locate_run(p, team.index, QUERIES));
}

}  // namespace attn_plugins
