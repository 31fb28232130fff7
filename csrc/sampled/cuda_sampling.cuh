// Device code of deformable convolution: bilinear samples into columns, and back.
//
// The same function as cpu.cpp, cut for a GPU: a team of `lanes` neighbouring threads (a power of two, at
// most a warp) serves one output pixel and one offset group. Each lane locates another tap's sample; then,
// tap by tap, the sample is handed to the whole team and every lane moves one vector of channels. Teams of
// neighbouring pixels share a block, whose overlapping reads then meet in the first-level cache.
#pragma once

#include "common/launch.cuh"
#include "common/vector.cuh"

namespace attn_plugins {

struct PlaneStrides {  // in elements, of (N, channels, Ho, Wo)
  int64_t n, channel, y, x;
};

template <class T>
struct SamplingProblem {
  const T* input;   // (N, H, W, C)
  const T* offset;  // (N, D * K * 2, Ho, Wo)
  const T* mask;    // (N, D * K, Ho, Wo); nullptr: every mask is 1
  PlaneStrides offset_strides, mask_strides;
  int64_t start, length;  // the block of output pixels
  int64_t C;
  int H, W, Ho, Wo, Kw, taps, groups, offset_groups;
  int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  int group_channels, offset_group_channels;
  int lanes_log2;      // of a team
  int tap_slices;      // teams that share a pixel's taps
  int channel_slices;  // teams that share a pixel's channels (sampling only; 1 in the backward pass)
};

// quotient of value / divisor; *remainder gets the rest. 32-bit arithmetic where it suffices: it nearly
// always does.
__device__ __forceinline__ int64_t divide(int64_t value, int divisor, int* remainder) {
  if (value <= 0xffffffffll) {
    const unsigned quotient = static_cast<unsigned>(value) / static_cast<unsigned>(divisor);
    *remainder = static_cast<int>(static_cast<unsigned>(value) - quotient * static_cast<unsigned>(divisor));
    return quotient;
  }
  *remainder = static_cast<int>(value % divisor);
  return value / divisor;
}

// One bilinear sample. (row, column): its upper left pixel; dy, dx: the fractions. A sample outside the map
// has no pixel inside it, and weight 0.
template <class A>
struct Sample {
  int row, column;
  A dy, dx, mask;
  A scale;  // mask, or 0 outside
};

template <class A>
__device__ __forceinline__ Sample<A> sample_at(A y, A x, A mask, int H, int W) {
  Sample<A> s{-2, -2, A(0), A(0), mask, A(0)};
  // Written so that a NaN, too, is outside; nothing outside is ever converted to an integer.
  if (y >= A(-1) && y < A(H) && x >= A(-1) && x < A(W)) {
    const A top = floor(y), left = floor(x);
    s.row = static_cast<int>(top);
    s.column = static_cast<int>(left);
    s.dy = y - top;
    s.dx = x - left;
    s.scale = mask;
  }
  return s;
}

// Where a team works.
struct Team {
  int64_t pixel;  // within the block
  int64_t n;
  int oy, ox, offset_group, channel_slice, first_tap, last_tap;  // taps [first, last)
  int lane, lanes;
  unsigned members;  // the team's bits among the warp's

  // The value that lane `source` of the team holds.
  template <class V>
  __device__ __forceinline__ V from(V value, int source) const {
    return __shfl_sync(members, value, source, lanes);
  }

  template <class V>
  __device__ __forceinline__ V sum(V value) const {
    for (int step = lanes >> 1; step > 0; step >>= 1) value += __shfl_xor_sync(members, value, step, lanes);
    return value;
  }

  template <class A>
  __device__ __forceinline__ Sample<A> from(const Sample<A>& s, int source) const {
    Sample<A> t;
    t.row = from(s.row, source);
    t.column = from(s.column, source);
    t.dy = from(s.dy, source);
    t.dx = from(s.dx, source);
    t.scale = from(s.scale, source);
    t.mask = t.scale;
    return t;
  }
};

// False where the thread's team has nothing to do; a team's threads all get one answer.
template <class T>
__device__ __forceinline__ bool find_team(const SamplingProblem<T>& p, Team* team) {
  const int64_t thread = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  team->lanes = 1 << p.lanes_log2;
  team->lane = threadIdx.x & (team->lanes - 1);
  const int warp_lane = threadIdx.x & 31;
  team->members = (0xffffffffu >> (32 - team->lanes)) << (warp_lane - team->lane);

  int tap_slice, oy_in_image;
  int64_t rest = divide(thread >> p.lanes_log2, p.channel_slices, &team->channel_slice);
  rest = divide(rest, p.tap_slices, &tap_slice);
  team->pixel = divide(rest, p.offset_groups, &team->offset_group);
  if (team->pixel >= p.length) return false;
  const int per_slice = (p.taps + p.tap_slices - 1) / p.tap_slices;
  team->first_tap = tap_slice * per_slice;
  team->last_tap = min(p.taps, team->first_tap + per_slice);
  rest = divide(p.start + team->pixel, p.Wo, &team->ox);
  team->n = divide(rest, p.Ho, &oy_in_image);
  team->oy = oy_in_image;
  return true;
}

// Where a tap's values lie in a tensor of one channel per (offset group, tap, component).
__device__ __forceinline__ int64_t plane_index(const PlaneStrides& s, const Team& t, int64_t channel) {
  return t.n * s.n + channel * s.channel + t.oy * s.y + t.ox * s.x;
}

template <class T>
__device__ __forceinline__ Sample<accumulate_t<T>> locate(const SamplingProblem<T>& p, const Team& t,
                                                          int tap) {
  using A = accumulate_t<T>;
  const int ky = tap / p.Kw, kx = tap - ky * p.Kw;
  const int64_t channel = int64_t(t.offset_group) * p.taps + tap;
  const T* offset = p.offset + plane_index(p.offset_strides, t, 2 * channel);
  const A y = A(t.oy * p.stride_h - p.pad_h + ky * p.dilation_h) + widen(__ldg(offset));
  const A x =
      A(t.ox * p.stride_w - p.pad_w + kx * p.dilation_w) + widen(__ldg(offset + p.offset_strides.channel));
  const A mask = p.mask ? A(widen(__ldg(p.mask + plane_index(p.mask_strides, t, channel)))) : A(1);
  return sample_at<A>(y, x, mask, p.H, p.W);
}

// A sample's four pixels, in the order upper left, upper right, lower left, lower right.
template <class A>
struct Corners {
  int64_t base, right_of, below;  // elements of the image: of the upper left one, and to its neighbours
  bool inside[4];
  A weight[4];  // times the mask

  template <class T>
  __device__ __forceinline__ Corners(const SamplingProblem<T>& p, const Sample<A>& s) {
    const bool top = s.row >= 0, bottom = s.row + 1 >= 0 && s.row + 1 < p.H;
    const bool left = s.column >= 0, right = s.column + 1 >= 0 && s.column + 1 < p.W;
    base = (int64_t(s.row) * p.W + s.column) * p.C;
    right_of = p.C;
    below = p.W * p.C;
    inside[0] = top && left;
    inside[1] = top && right;
    inside[2] = bottom && left;
    inside[3] = bottom && right;
    weight[0] = (A(1) - s.dy) * (A(1) - s.dx) * s.scale;
    weight[1] = (A(1) - s.dy) * s.dx * s.scale;
    weight[2] = s.dy * (A(1) - s.dx) * s.scale;
    weight[3] = s.dy * s.dx * s.scale;
  }

  __device__ __forceinline__ int64_t at(int corner) const {
    return base + (corner & 1 ? right_of : 0) + (corner & 2 ? below : 0);
  }
};

// Where channel c of (pixel, tap 0) lies in columns (G, length, K, Cg); taps follow at distance Cg.
template <class T>
__device__ __forceinline__ int64_t column_index(const SamplingProblem<T>& p, int64_t pixel, int64_t c) {
  const int group = p.groups == 1 ? 0 : static_cast<int>(c) / p.group_channels;
  return (group * p.length + pixel) * p.taps * p.group_channels + (c - int64_t(group) * p.group_channels);
}

// columns = samples * mask; N channels to a lane, kUnroll taps in flight.
template <class T, int N>
__global__ void __launch_bounds__(kThreads, 2)
    sample_kernel(const SamplingProblem<T> p, T* __restrict__ columns) {
  using A = accumulate_t<T>;
  constexpr int kUnroll = 2;
  Team team;
  if (!find_team(p, &team)) return;
  const int v = team.channel_slice * team.lanes + team.lane;
  const bool active = v * N < p.offset_group_channels;
  const int64_t c = int64_t(team.offset_group) * p.offset_group_channels + (active ? v * N : 0);
  const T* image = p.input + team.n * p.H * p.W * p.C + c;
  T* column = columns + column_index(p, team.pixel, c);

  for (int batch = team.first_tap; batch < team.last_tap; batch += team.lanes) {
    const int count = min(team.lanes, team.last_tap - batch);
    Sample<A> mine{};
    if (team.lane < count) mine = locate(p, team, batch + team.lane);
    for (int first = 0; first < count; first += kUnroll) {
      Vector<T, N> corner[kUnroll][4];
      A weight[kUnroll][4];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (first + u >= count) break;
        const Sample<A> s = team.from(mine, first + u);
        const Corners<A> corners(p, s);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          weight[u][i] = corners.weight[i];
          if (active && corners.inside[i]) {
            corner[u][i] = load_constant<T, N>(image + corners.at(i));
          }
        }
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (first + u >= count || !active) break;
        Vector<T, N> value;
#pragma unroll
        for (int e = 0; e < N; ++e) {
          A total = weight[u][0] * A(widen(corner[u][0].element[e]));
#pragma unroll
          for (int i = 1; i < 4; ++i) total += weight[u][i] * A(widen(corner[u][i].element[e]));
          value.element[e] = narrow_to<T>(total);
        }
        store(column + int64_t(batch + first + u) * p.group_channels, value);
      }
    }
  }
}

// Results of the backward pass; nullptr where not needed.
template <class T>
struct SamplingGradients {
  const T* grad_columns;
  T* columns;                   // may be grad_columns: every element is read and written by one thread
  accumulate_t<T>* grad_input;  // (N, H, W, C), +=
  T* grad_offset;
  T* grad_mask;
  PlaneStrides offset_strides, mask_strides;
};

// With s_i = <grad column, corner i>, the gradients of a sample's coordinates and mask are combinations of
// the s_i (Zhu et al. 2019, Eq. 4, differentiated).
template <class T>
__device__ __forceinline__ void store_tap_gradients(const SamplingProblem<T>& p,
                                                    const SamplingGradients<T>& g, const Team& t, int tap,
                                                    const Sample<accumulate_t<T>>& s,
                                                    const accumulate_t<T> (&sums)[4]) {
  using A = accumulate_t<T>;
  const int64_t channel = int64_t(t.offset_group) * p.taps + tap;
  T* out = g.grad_offset + plane_index(g.offset_strides, t, 2 * channel);
  out[0] = narrow_to<T>(s.mask * ((A(1) - s.dx) * (sums[2] - sums[0]) + s.dx * (sums[3] - sums[1])));
  out[g.offset_strides.channel] =
      narrow_to<T>(s.mask * ((A(1) - s.dy) * (sums[1] - sums[0]) + s.dy * (sums[3] - sums[2])));
  if (g.grad_mask) {
    g.grad_mask[plane_index(g.mask_strides, t, channel)] =
        narrow_to<T>((A(1) - s.dy) * ((A(1) - s.dx) * sums[0] + s.dx * sums[1]) +
                     s.dy * ((A(1) - s.dx) * sums[2] + s.dx * sums[3]));
  }
}

template <class T, int N>
__global__ void __launch_bounds__(kThreads, 2)
    sample_backward_kernel(const SamplingProblem<T> p, const SamplingGradients<T> g) {
  using A = accumulate_t<T>;
  Team team;
  if (!find_team(p, &team)) return;
  const int64_t first_channel = int64_t(team.offset_group) * p.offset_group_channels;
  const int64_t image = team.n * p.H * p.W * p.C;
  const bool reads_input = g.grad_offset || g.columns;

  for (int batch = team.first_tap; batch < team.last_tap; batch += team.lanes) {
    const int count = min(team.lanes, team.last_tap - batch);
    Sample<A> mine{};
    A my_sums[4] = {};
    if (team.lane < count) mine = locate(p, team, batch + team.lane);
    for (int j = 0; j < count; ++j) {
      const Sample<A> s = team.from(mine, j);
      const Corners<A> corners(p, s);
      A sums[4] = {};
      for (int v = team.lane * N; v < p.offset_group_channels; v += team.lanes * N) {
        const int64_t c = first_channel + v;
        const int64_t at = column_index(p, team.pixel, c) + int64_t(batch + j) * p.group_channels;
        const Vector<T, N> grad = load<T, N>(g.grad_columns + at);
        A column[N] = {};
        if (reads_input) {
          Vector<T, N> corner[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if (corners.inside[i]) {
              corner[i] = load_constant<T, N>(p.input + image + corners.at(i) + c);
            }
          }
#pragma unroll
          for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int e = 0; e < N; ++e) {
              const A x = widen(corner[i].element[e]);
              if (corners.inside[i]) sums[i] += x * A(widen(grad.element[e]));
              column[e] += corners.weight[i] * x;
            }
          }
        }
        if (g.grad_input) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if (!corners.inside[i]) continue;
            A part[N];
#pragma unroll
            for (int e = 0; e < N; ++e) part[e] = corners.weight[i] * A(widen(grad.element[e]));
            add_atomically(g.grad_input + image + corners.at(i) + c, part);
          }
        }
        if (g.columns) {
          Vector<T, N> value;
#pragma unroll
          for (int e = 0; e < N; ++e) value.element[e] = narrow_to<T>(column[e]);
          store(g.columns + at, value);
        }
      }
      if (!g.grad_offset) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const A total = team.sum(sums[i]);
        if (team.lane == j) my_sums[i] = total;
      }
    }
    if (g.grad_offset && team.lane < count) {
      store_tap_gradients(p, g, team, batch + team.lane, mine, my_sums);
    }
  }
}

}  // namespace attn_plugins
