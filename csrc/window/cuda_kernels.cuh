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

  // How the team shares out what there is to do for each of N queries, but not for each channel: N a power of
  // two, up to PARTS of them at the same time in as many lanes, COUNT one after the other in a lane.
  template <int N>
  struct Share {
    static constexpr int MOST = LANES > 0 && LANES < 4 ? LANES : 4, PARTS = N < MOST ? N : MOST,
                         COUNT = N / PARTS;
  };
  // The n-th of a lane's own queries. (Those that share a part do the same.)
  template <int N>
  __device__ __forceinline__ int own(int n) const {
    return n * Share<N>::PARTS + (lane & (Share<N>::PARTS - 1));
  }

  // Sums over the team's lanes, of the lane's own queries alone; all threads of a warp must come here
  // together. In the first steps a lane gives away the sums that it does not keep, so that a step has half as
  // many of them as the step before.
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

  // From what lanes have of their own queries: query n's, for all lanes, together as well.
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

// The line of keys that the windows of a team's queries share, row by row: place j is tap j of the first
// query, tap j - r * shift of query r. (Pointers are carried from row to row, and counts say what is not
// there: the compiler would compute them anew for every load.)
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
    const int column = at.x * p.x.stride - p.x.padding;
    on_map = Span::on_axis(column, p.x.by_dilation, p.x.keys).only_if(at.exists);
    row = at.y * p.y.stride - p.y.padding;
    chunks = team.chunks_of(p.d) | team.chunks_of(p.dv) << Team::CHUNKS;
    const int first = column + on_map.first * p.x.dilation;
    keys = team.own_of(p.key.at(at.b, at.m, row, first));
    values = team.own_of(p.value.at(at.b, at.m, row, first));
    key_bytes = p.key_step * int(sizeof(T)), value_bytes = p.value_step * int(sizeof(T));
    tap_bytes = int(p.position.channel * sizeof(T));
#pragma unroll
    for (int n = 0; n < COUNT; ++n) {
      const int r = team.template own<QUERIES>(n), x = at.x + r * p.x.step, start = r * p.x.shift;
      const Span all{start, p.x.taps};
      window[n] = p.zero_border ? all : on_map.common(start, start + p.x.taps);
      window[n] = window[n].only_if(at.exists && x < p.x.queries);
      positions[n] = p.position.at(at.b, at.m, at.y, x) + (window[n].first - start) * p.position.channel;
    }
  }

  __device__ __forceinline__ static int length(const WindowProblem<T>& p) {
    return p.x.taps + (QUERIES - 1) * p.x.shift;
  }

  __device__ __forceinline__ void begin_row(const WindowProblem<T>& p) {
    const bool inside = within(row, p.y.keys);
    row_chunks = inside ? chunks : 0;
#pragma unroll
    for (int n = 0; n < COUNT; ++n) {
      counting[n] = inside || p.zero_border ? window[n].count : 0;
      biasing[n] = p.position.data ? counting[n] : 0;
      keep(biasing[n]), keep(positions[n]);
    }
    keep(row_chunks), keep(keys), keep(values), keep(tap_bytes);
  }

  __device__ __forceinline__ void end_row(const WindowProblem<T>& p) {
    row += p.y.dilation, keys += p.y.dilation * p.key.row, values += p.y.dilation * p.value.row;
#pragma unroll
    for (int n = 0; n < COUNT; ++n) positions[n] += p.x.taps * p.position.channel;
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

// Queries at.x, at.x + p.x.step, ... of a row. Each lane has the softmax of a few of them, and its channels
// of all. Threads branch as all of them do.
template <int QUERIES, class T, class Team>
__device__ __forceinline__ void window_forward(const WindowProblem<T>& p, const Team& team, const Place& at) {
  constexpr int kOwn = Team::template Share<QUERIES>::COUNT, kParts = Team::template Share<QUERIES>::PARTS;
  const bool content = p.d > 0;
  float query[QUERIES][Team::OWN], sum[QUERIES][Team::OWN], top[kOwn], total[kOwn];
#pragma unroll
  for (int r = 0; r < QUERIES; ++r) {
    const int x = at.x + r * p.x.step;
    team.read_row(p.query.at(at.b, at.m, at.y, x), at.exists && x < p.x.queries, p.d, query[r]);
#pragma unroll
    for (int c = 0; c < Team::OWN; ++c) query[r][c] *= p.scale, sum[r][c] = 0;
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
        logit[n] = counts[n] ? logit[n] + bias[n] : -INFINITY;  // chosen: a sum could be NaN
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
        if (!within(j - r * p.x.shift, p.x.taps)) continue;  // not times 0: the value may be infinite
        add_scaled(sum[r], weights[r], value);
      }
    }
    line.end_row(p);
  }
  float inverse[kOwn];
#pragma unroll
  for (int n = 0; n < kOwn; ++n) {
    const int x = at.x + team.template own<QUERIES>(n) * p.x.step;
    const bool empty = total[n] == 0;
    inverse[n] = empty ? 0 : 1 / total[n];
    if (team.lane < kParts && at.exists && x < p.x.queries) {
      p.log_sum_exp[p.query_index(at.b, at.m, at.y, x)] = empty ? INFINITY : top[n] + logf(total[n]);
    }
  }
#pragma unroll
  for (int r = 0; r < QUERIES; ++r) {
    const int x = at.x + r * p.x.step;
    const float factor = team.template of_query<QUERIES>(inverse, r);
    if (at.exists && x < p.x.queries) team.write(p.output.at(at.b, at.m, at.y, x), p.dv, sum[r], factor);
  }
}

template <class T, class Team, int QUERIES>
__global__ void __launch_bounds__(kThreads) window_forward_kernel(const WindowProblem<T> p) {
  const Team team(p.lanes);
  window_forward<QUERIES>(p, team, locate_run(p, team.index, p.x.by_step, QUERIES));
}

// The backward kernels' statistics, one team a query. Of half numbers the output is read as it was rounded: a
// gradient carries the error of that, relative to the gradient of the output, as in FlashAttention.
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
  constexpr int kOwn = Team::template Share<QUERIES>::COUNT, kParts = Team::template Share<QUERIES>::PARTS;
  const bool content = p.d > 0;
  float query[QUERIES][Team::OWN], gradient[QUERIES][Team::OWN], sum[QUERIES][Team::OWN];
#pragma unroll
  for (int r = 0; r < QUERIES; ++r) {
    const int x = at.x + r * p.x.step;
    const bool valid = at.exists && x < p.x.queries;
    team.read_row(p.query.at(at.b, at.m, at.y, x), valid, p.d, query[r]);
    team.read_row(p.grad_output.at(at.b, at.m, at.y, x), valid, p.dv, gradient[r]);
#pragma unroll
    for (int c = 0; c < Team::OWN; ++c) query[r][c] *= p.scale, sum[r][c] = 0;
  }
  // Of the lane's own queries; kept: gradients of position logits, which the lanes of a query write together.
  Vector<float, 2> stats[kOwn];
  T* written[kOwn];
  bool valid[kOwn];
  float kept[kOwn];
#pragma unroll
  for (int n = 0; n < kOwn; ++n) {
    const int x = at.x + team.template own<QUERIES>(n) * p.x.step;
    valid[n] = at.exists && x < p.x.queries, kept[n] = 0;
    if (valid[n]) stats[n] = load_constant<float, 2>(p.stats + 2 * p.query_index(at.b, at.m, at.y, x));
    written[n] = p.grad_position.at(at.b, at.m, at.y, x);
  }
  const int taps = p.y.taps * p.x.taps, writers = team.lanes / kParts, writer = team.lane / kParts;
  const int written_bytes = int(p.grad_position.channel * sizeof(T));
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
        const float weight = exponential(logit[n] + bias[n] - stats[n].element[0]);
        slope[n] = counts[n] ? weight * (slope[n] - stats[n].element[1]) : 0;
      }
#pragma unroll
      for (int r = 0; r < QUERIES; ++r) slopes[r] = team.template of_query<QUERIES>(slope, r);
#pragma unroll
      for (int r = 0; r < QUERIES; ++r) {
        if (!within(j - r * p.x.shift, p.x.taps)) continue;  // not times 0: the key may be infinite
        add_scaled(sum[r], slopes[r], key);
      }
      if (!p.grad_position.data) continue;
#pragma unroll
      for (int n = 0; n < kOwn; ++n) {
        const int tap = j - team.template own<QUERIES>(n) * p.x.shift;
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
#pragma unroll
  for (int r = 0; r < QUERIES; ++r) {
    const int x = at.x + r * p.x.step;
    if (p.grad_query.data && at.exists && x < p.x.queries) {
      team.write(p.grad_query.at(at.b, at.m, at.y, x), p.d, sum[r], p.scale);
    }
  }
}

template <class T, class Team, int QUERIES>
__global__ void __launch_bounds__(kThreads) window_query_gradient_kernel(const WindowProblem<T> p) {
  const Team team(p.lanes);
  window_query_gradient<QUERIES>(p, team, locate_run(p, team.index, p.x.by_step, QUERIES));
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
    for (int c = 0; c < Team::OWN; ++c) {
      key[r][c] *= p.scale, key_sum[r][c] = 0, value_sum[r][c] = 0;
    }
  }
  const Reach rows(p.y, at.y), columns(p.x, at.x);
  const bool exists = at.exists && rows.exists && columns.exists;
  const int own = team.template own<KEYS>(0);
  const int line = quotient(p.x.taps + KEYS - 1 + p.x.shift - 1, p.x.by_shift);
  const Span on_map = Span::on_axis(columns.query, p.x.by_step, p.x.queries).common(0, line);
  Span window[KEYS];  // place l of the line sees key r by tap columns.tap + r - l * shift
#pragma unroll
  for (int r = 0; r < KEYS; ++r) {
    const Span reach = Span::on_axis(p.x.taps - 1 - columns.tap - r, p.x.by_shift, p.x.taps);
    window[r] = on_map.common(reach.first, reach.first + reach.count);
  }
  const Span own_window = KEYS > 1 && own > 0 ? window[KEYS - 1] : window[0];
  const unsigned chunks = team.chunks_of(p.d) | team.chunks_of(p.dv) << Team::CHUNKS;
  const int query_bytes = p.query_step * int(sizeof(T)), gradient_bytes = p.gradient_step * int(sizeof(T));
  const int position_bytes = p.position_step * int(sizeof(T));
  const int stats_bytes = 2 * p.x.step * int(sizeof(float));
  // Pointers are carried from row to row, else the compiler computes each anew for every load.
  int y = rows.query, i = rows.tap;
  const T* queries = team.own_of(p.query.at(at.b, at.m, y, columns.query));
  const T* gradients = team.own_of(p.grad_output.at(at.b, at.m, y, columns.query));
  const T* positions = p.position.at(at.b, at.m, y, columns.query) +
                       (int64_t(i) * p.x.taps + columns.tap + own) * p.position.channel;
  const float* stats_row = p.stats + 2 * p.query_index(at.b, at.m, y, columns.query);
  const int64_t query_row = p.y.step * p.query.row, gradient_row = p.y.step * p.grad_output.row;
  const int64_t position_row = p.y.step * p.position.row - int64_t(p.y.shift) * p.x.taps * p.position.channel;
  const int64_t stats_step = 2 * int64_t(p.y.step) * p.x.queries;
  for (int n = 0; n * p.y.shift < p.y.taps; ++n, i -= p.y.shift, y += p.y.step, queries += query_row,
           gradients += gradient_row, positions += position_row, stats_row += stats_step) {
    const bool row_inside = exists && i >= 0 && within(y, p.y.queries);
    int inside = row_inside ? on_map.count : 0,
        biasing = row_inside && p.position.data ? own_window.count : 0;
    int seeing[KEYS];
#pragma unroll
    for (int r = 0; r < KEYS; ++r) seeing[r] = row_inside ? window[r].count : 0;
    keep(inside), keep(biasing), keep(queries), keep(gradients), keep(positions), keep(stats_row);
    for (int l = 0; l < line; ++l) {
      const bool present = within(l - on_map.first, inside);
      const unsigned there = present ? chunks : 0;
      float query[Team::OWN], gradient[Team::OWN], dots[KEYS], logit[1] = {}, slope[1] = {}, bias = 0;
      float weights[KEYS], slopes_of[KEYS];
      Vector<float, 2> stats;
      team.read(go(queries, l, query_bytes), there, query);
      team.read(go(gradients, l, gradient_bytes), there >> Team::CHUNKS, gradient);
      if (present) stats = load_constant<float, 2>(go(stats_row, l, stats_bytes));
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
      const float weight[1] = {exponential(logit[0] + bias - stats.element[0])};
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
  window_key_gradient<KEYS>(p, team, locate_run(p, team.index, p.x.by_dilation, KEYS));
}

}  // namespace attn_plugins
