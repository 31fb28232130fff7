// CUDA kernels of deformable convolution: bilinear samples into columns, and back.
//
// A team of `lanes` neighboring threads (a power of two, at most a warp) works on one output pixel and one
// offset group; each lane takes a vector of channels. A block goes through the taps of its teams in rounds of
// `lanes` taps. In each round every thread first locates one sample; neighboring threads locate samples of
// neighboring pixels, whose offsets are neighbors in memory. Then all teams read their samples. Teams of
// neighboring pixels share a block, so that their overlapping reads hit the L1 cache.
#pragma once

#include "common/bilinear.cuh"
#include "common/divisor.cuh"
#include "common/fixed_point.cuh"
#include "deform_conv.h"

namespace attn_plugins {

template <class T>
struct SamplingProblem {
  const T* input;   // (N, H, W, C)
  const T* offset;  // (N, D * K * 2, Ho, Wo)
  const T* mask;    // (N, D * K, Ho, Wo); nullptr: every mask is 1
  TapStrides offset_strides, mask_strides;
  int64_t image;       // elements per image: H * W * C
  int64_t group_step;  // elements between the columns of consecutive groups, minus Cg
  int start, length;   // the block of output pixels
  int C, H, W, taps;
  int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  int group_channels, offset_group_channels;
  int pixel_bytes;  // of an input pixel: C * sizeof(T)
  int lanes_log2;   // log2 of the lanes of a team
  int slice_taps;   // taps per team
  // Divisors by Ho, Wo, Kw, group_channels, D, and by the numbers of teams that share a pixel's taps and its
  // channels (the latter is 1 in the backward pass).
  Divisor rows, columns, kernel_columns, channel_groups, offset_groups, tap_slices, channel_slices;
};

// The work of one team.
struct Team {
  int pixel;  // within the block
  int n, oy, ox, offset_group, channel_slice;
  int first_tap, taps;  // no taps if the pixel does not exist
};

// Returns team `number` of the grid. Beyond the last team, the last pixel stands in, without taps.
template <class T>
__device__ __forceinline__ Team find_team(const SamplingProblem<T>& p, int number) {
  Team team;
  int slice;
  int rest = p.channel_slices.divide(number, &team.channel_slice);
  rest = p.tap_slices.divide(rest, &slice);
  rest = p.offset_groups.divide(rest, &team.offset_group);
  team.pixel = min(rest, p.length - 1);
  team.first_tap = slice * p.slice_taps;
  team.taps = rest < p.length ? min(p.slice_taps, p.taps - team.first_tap) : 0;
  rest = p.columns.divide(p.start + team.pixel, &team.ox);
  team.n = p.rows.divide(rest, &team.oy);
  return team;
}

// The teams of a block, and the roles of a thread in them.
struct TeamLayout {
  int lanes, lane, teams;  // teams per block
  int own;                 // the thread's team within the block
  int located, tap;        // team and tap of the sample that the thread locates in each round

  template <class T>
  __device__ __forceinline__ explicit TeamLayout(const SamplingProblem<T>& p) {
    const int thread = static_cast<int>(threadIdx.x);
    lanes = 1 << p.lanes_log2;
    lane = thread & (lanes - 1);
    own = thread >> p.lanes_log2;
    teams = kThreads >> p.lanes_log2;
    located = thread & (teams - 1);
    tap = thread / teams;
  }

  // The index of the round's tap `tap` among the staged samples, which is the thread that locates it.
  __device__ __forceinline__ int slot(int tap) const { return tap * teams + own; }

  __device__ __forceinline__ int first() const { return static_cast<int>(blockIdx.x) * teams; }
};

// The index of a tap's value in a tensor with one channel per (offset group, tap, component).
__device__ __forceinline__ int64_t plane_index(const TapStrides& s, const Team& t, int64_t channel) {
  return t.n * s.n + channel * s.channel + t.oy * s.y + t.ox * s.x;
}

// Returns the sample of a team's tap, or a sample outside the map if the team has no such tap.
template <class T>
__device__ __forceinline__ Sample<accumulate_t<T>> locate(const SamplingProblem<T>& p, const Team& t, int tap,
                                                          accumulate_t<T>* mask) {
  using A = accumulate_t<T>;
  *mask = A(0);
  if (tap >= t.taps) return {};
  tap += t.first_tap;
  int kx;
  const int ky = p.kernel_columns.divide(tap, &kx), channel = t.offset_group * p.taps + tap;
  const T* offset = p.offset + plane_index(p.offset_strides, t, 2 * int64_t(channel));
  const A y = A(t.oy * p.stride_h - p.pad_h + ky * p.dilation_h) + widen(__ldg(offset));
  const A x =
      A(t.ox * p.stride_w - p.pad_w + kx * p.dilation_w) + widen(__ldg(offset + p.offset_strides.channel));
  *mask = p.mask ? A(widen(__ldg(p.mask + plane_index(p.mask_strides, t, channel)))) : A(1);
  Sample<A> s = sample_at<A>(y, x, p.H, p.W);
  if (!s.inside) {  // as in torchvision: 0 beyond the map, else NaN, and infinite positions have NaN
                    // fractions
    s.dy = y - y, s.dx = x - x;
    const bool beyond = y < A(-1) || y >= A(p.H) || x < A(-1) || x >= A(p.W);
    s.outside = beyond ? A(0) : s.dy + s.dx;
  }
  return s;
}

// In columns (G, length, K, Cg), (pixel, tap) of the first group begins at (pixel * K + tap) * Cg. Returns
// the distance from there to channel c, which counts through all groups.
template <class T>
__device__ __forceinline__ int64_t column_index(const SamplingProblem<T>& p, int c) {
  int rest;
  return p.channel_groups.divide(c, &rest) * p.group_step + c;
}

// Writes N channels of TAPS samples, times mask, into the columns. The loads of all TAPS samples are in
// flight together.
template <int TAPS, class T, int N>
__device__ __forceinline__ void sample_taps(const Staged<accumulate_t<T>>& staged, int slot, int teams,
                                            const T* image, int pixel_bytes, T* column, int column_step,
                                            int writes) {
  using A = accumulate_t<T>;
  Vector<T, N> corner[TAPS][4];
#pragma unroll
  for (int u = 0; u < TAPS; ++u) {
    const Corners<const T> corners(image, staged.places[slot + u * teams], pixel_bytes);
#pragma unroll
    for (int i = 0; i < 4; ++i) corner[u][i] = load_constant<T, N>(corners.at[i]);
  }
#pragma unroll
  for (int u = 0; u < TAPS; ++u) {
    A total[N] = {};
    blend<T, N>(staged.weights[slot + u * teams], corner[u], total);
    const int inside = staged.places[slot + u * teams].inside;
    if (u < writes) store(column + u * int64_t(column_step), narrow_sample<T>(total, inside));
  }
}

// columns = samples * mask. Each lane takes N channels.
template <class T, int N>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 8 ? 2 : 4)
    sample_kernel(const SamplingProblem<T> p, T* __restrict__ columns) {
  using A = accumulate_t<T>;
  constexpr int kTogether = 2;  // taps
  __shared__ Staged<A> rounds[2];
  const TeamLayout layout(p);
  const Team own = find_team(p, layout.first() + layout.own);
  const Team located = find_team(p, layout.first() + layout.located);
  const int v = (own.channel_slice * layout.lanes + layout.lane) * N;
  const bool active = v < p.offset_group_channels;
  const int c = own.offset_group * p.offset_group_channels + (active ? v : 0);
  const T* image = p.input + own.n * p.image + c;
  T* column = columns + column_index(p, c) + int64_t(own.pixel * p.taps + own.first_tap) * p.group_channels;

  for (int first = 0, round = 0; first < p.slice_taps; first += layout.lanes, round ^= 1) {
    const int count = min(layout.lanes, p.slice_taps - first);
    Staged<A>& staged = rounds[round];  // other threads may still be reading the other one
    if (layout.tap < count) {
      A mask;
      const Sample<A> s = locate(p, located, first + layout.tap, &mask);
      staged.put(static_cast<int>(threadIdx.x), s, mask, p.H, p.W, 0);
    }
    __syncthreads();
    const int writes = active ? own.taps - first : 0;
    int j = 0;
    for (; j + kTogether <= count; j += kTogether) {
      sample_taps<kTogether, T, N>(staged, layout.slot(j), layout.teams, image, p.pixel_bytes,
                                   column + int64_t(first + j) * p.group_channels, p.group_channels,
                                   writes - j);
    }
    if (j < count) {
      sample_taps<1, T, N>(staged, layout.slot(j), layout.teams, image, p.pixel_bytes,
                           column + int64_t(first + j) * p.group_channels, p.group_channels, writes - j);
    }
  }
}

// Gradients read and written by the backward pass; results that are not needed are nullptr. The sums of the
// input's gradient are Fixed where their bits must not depend on the order of threads, else A.
template <class T, class S>
struct SamplingGradients {
  const T* grad_columns;
  T* columns;     // may equal grad_columns: one thread reads and writes each element
  S* grad_input;  // (N, H, W, C), +=
  T* grad_offset;
  T* grad_mask;
  TapStrides offset_strides, mask_strides;
  ScaleOf<S> scale;
};

// Stores the gradients of a sample's coordinates and mask, which are combinations of
// s_i = <grad column, pixel i> (derivative of Zhu et al. 2019, Eq. 4).
template <class T, class S>
__device__ __forceinline__ void store_tap_gradients(const SamplingProblem<T>& p,
                                                    const SamplingGradients<T, S>& g, const Team& t, int tap,
                                                    const Sample<accumulate_t<T>>& s, accumulate_t<T> mask,
                                                    const Four<accumulate_t<T>>& found) {
  using A = accumulate_t<T>;
  if (tap >= t.taps) return;
  const PixelSums<A> sums(s, found, p.H, p.W);
  const int64_t channel = int64_t(t.offset_group) * p.taps + t.first_tap + tap;
  T* out = g.grad_offset + plane_index(g.offset_strides, t, 2 * channel);
  out[0] = narrow_to<T>(mask * sums.down());
  out[g.offset_strides.channel] = narrow_to<T>(mask * sums.across());
  if (!g.grad_mask) return;
  g.grad_mask[plane_index(g.mask_strides, t, channel)] = narrow_to<T>(s.inside ? sums.sampled() : s.outside);
}

// Bytes of a thread's channels beyond which three blocks a multiprocessor would spill registers in the loop
// over taps.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr size_t kBytesOfThreeBlocks = 8;
#else
constexpr size_t kBytesOfThreeBlocks = 16;
#endif

template <class T, int N, class S>
__global__ void __launch_bounds__(kThreads,
                                  sizeof(T) == 8 || N > 4 || N * sizeof(T) > kBytesOfThreeBlocks ? 2 : 3)
    sample_backward_kernel(const SamplingProblem<T> p, const SamplingGradients<T, S> g) {
  using A = accumulate_t<T>;
  __shared__ Staged<A> staged;
  __shared__ Four<A> sums[kThreads];  // of the staged samples
  const TeamLayout layout(p);
  const Team own = find_team(p, layout.first() + layout.own);
  const Team located = find_team(p, layout.first() + layout.located);
  const int first_channel = own.offset_group * p.offset_group_channels;
  const T* image = p.input + own.n * p.image;
  const int first_column = own.pixel * p.taps + own.first_tap;
  S* grad_image = g.grad_input ? g.grad_input + own.n * p.image : nullptr;
  const auto scale = g.scale.loaded();

  for (int first = 0; first < p.slice_taps; first += layout.lanes) {
    const int count = min(layout.lanes, p.slice_taps - first);
    Sample<A> mine;
    A mask = A(0);
    if (layout.tap < count) {
      mine = locate(p, located, first + layout.tap, &mask);
      staged.put(static_cast<int>(threadIdx.x), mine, mask, p.H, p.W, 0);
    }
    __syncthreads();
    for (int j = 0; j < count; ++j) {
      const int slot = layout.slot(j);
      const int64_t column = int64_t(first_column + first + j) * p.group_channels;
      const Place place = staged.places[slot];
      const Four<A> weights = staged.weights[slot];
      A shares[4], products[4] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) shares[i] = scale.first_factor(weights.of[i]);
      // A team without this tap reads nothing.
      const int channels = first + j < own.taps ? p.offset_group_channels : 0;
      for (int v = layout.lane * N; v < channels; v += layout.lanes * N) {
        const int c = first_channel + v;
        const int64_t at = column + column_index(p, c);
        const Vector<T, N> column_gradient = load<T, N>(g.grad_columns + at);
        const Corners<const T> corners(image + c, place, p.pixel_bytes);
        Vector<T, N> corner[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) corner[i] = load_constant<T, N>(corners.at[i]);
        A grad[N], sample[N] = {};
        widen(column_gradient, grad);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          A x[N];
          widen(corner[i], x);
#pragma unroll
          for (int e = 0; e < N; ++e) {
            products[i] += x[e] * grad[e];
            sample[e] += weights.of[i] * x[e];
          }
        }
        if (g.columns) store(g.columns + at, narrow_sample<T>(sample, place.inside));
        if (grad_image && place.inside > 0) {
          const Corners<S> corners(grad_image + c, place, p.C * int(sizeof(S)));
#pragma unroll
          for (int e = 0; e < N; ++e) grad[e] = scale.second_factor(grad[e]);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            A part[N];
#pragma unroll
            for (int e = 0; e < N; ++e) part[e] = shares[i] * grad[e];
            add_atomically(corners.at[i], part);
          }
        }
      }
      if (g.grad_offset) sum_over_team(products, layout.lane, layout.lanes, &sums[slot]);
    }
    __syncthreads();
    if (g.grad_offset && layout.tap < count) {
      store_tap_gradients(p, g, located, first + layout.tap, mine, mask, sums[threadIdx.x]);
    }
  }
}

}  // namespace attn_plugins
