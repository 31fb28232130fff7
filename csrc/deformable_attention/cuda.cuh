// CUDA kernels of deformable attention. A team of neighboring threads (a power of two, at most a warp) works
// on one head of one query; each thread takes a vector of its channels. The teams of a query's heads are
// neighbors, so that together they read contiguous locations and write a contiguous output.
//
// A team goes through its points in rounds: its threads locate kRound samples each, and then all of them read
// these samples (bilinear.cuh).
#pragma once

#include <optional>
#include <type_traits>
#include <vector>

#include "common/bilinear.cuh"
#include "common/fixed_point.cuh"
#include "cuda_problem.cuh"
#include "deformable_attention.h"

namespace attn_plugins {

constexpr int kRound = 2;  // samples that a thread locates per round

// Where the data of a team's (b, q, m) begin.
struct AttentionTeam {
  int64_t index;  // (b * Q + q) * M + m: its row of locations, weights and outputs
  int64_t head;   // element of pixel 0 in (B, S, M, d)
  int slice;

  // Team `number` of the block. Beyond the last team, the last one stands in.
  __device__ __forceinline__ AttentionTeam(const AttentionProblem& p, int number) {
    const int64_t team = int64_t(blockIdx.x) * (kThreads >> p.lanes_log2) + number;
    int m, q;
    const int row = p.slices.divide(static_cast<int>(min(team, p.teams - 1)), &slice);
    const int b = p.queries.divide(p.heads.divide(row, &m), &q);
    index = row;
    head = (b * p.S * p.M + m) * p.d;
  }
};

// The teams of a block, and the role of a thread in them.
struct AttentionLayout {
  int lanes, lane, teams, own;
  bool writes;  // false if its team is a stand-in

  __device__ __forceinline__ explicit AttentionLayout(const AttentionProblem& p) {
    const int thread = static_cast<int>(threadIdx.x);
    lanes = 1 << p.lanes_log2;
    lane = thread & (lanes - 1);
    own = thread >> p.lanes_log2;
    teams = kThreads >> p.lanes_log2;
    writes = int64_t(blockIdx.x) * teams + own < p.teams;
  }

  // The index of the team's point among the staged samples; those of neighboring teams are neighbors.
  __device__ __forceinline__ int slot(int point) const { return point * teams + own; }
};

// Locates a point's sample and returns its level. Points are ordered by level. L is the type of locations and
// weights: the arithmetic's, A, or the values'.
template <class A, class L>
__device__ __forceinline__ const AttentionLevel& locate(const AttentionProblem& p, const L* locations,
                                                        int point, Sample<A>* sample) {
  int level = 0;
  while (level + 1 < p.levels && point >= p.level[level].last_point) ++level;
  const AttentionLevel& found = p.level[level];
  const A x = widen(__ldg(locations + 2 * point)), y = widen(__ldg(locations + 2 * point + 1));
  const A row = y * A(found.height) - A(0.5), column = x * A(found.width) - A(0.5);
  *sample = sample_at<A>(row, column, found.height, found.width);
  if (p.propagates_nan && !sample->inside) {
    sample->dy = row - row;  // NaN if not finite, else 0
    sample->dx = column - column;
    sample->outside = sample->dy + sample->dx;
  }
  return found;
}

// Stages points [first, first + count) of every team. The lanes of a team locate its points. The weights are
// scaled as `scale` says.
template <class A, class L, int SLOTS, class Scale = AsTheyAre>
__device__ __forceinline__ void stage(const AttentionProblem& p, const AttentionLayout& layout,
                                      const L* locations, const L* weights, int first, int count,
                                      Staged<A, SLOTS>* staged, const Scale& scale = {}) {
#pragma unroll
  for (int i = 0; i < kRound; ++i) {
    const int point = layout.lane + i * layout.lanes;
    if (point >= count) break;
    Sample<A> s;
    const AttentionLevel& level = locate(p, locations, first + point, &s);
    staged->put(layout.slot(point), s, scale.first_factor(A(widen(__ldg(weights + first + point)))),
                level.height, level.width, level.first_pixel);
  }
}

// Adds the weighted samples of POINTS points to N channels. Their loads are in flight together.
template <int POINTS, class T, int N, class Points>
__device__ __forceinline__ void add_points(const Points& staged, int slot, int teams, const T* head,
                                           int pixel_bytes, accumulate_t<T> (&total)[N]) {
  Vector<T, N> corner[POINTS][4];
#pragma unroll
  for (int u = 0; u < POINTS; ++u) {
    const Corners<const T> corners(head, staged.places[slot + u * teams], pixel_bytes);
#pragma unroll
    for (int i = 0; i < 4; ++i) corner[u][i] = load_constant<T, N>(corners.at[i]);
  }
#pragma unroll
  for (int u = 0; u < POINTS; ++u) {
#pragma unroll
    for (int i = 0; i < 4; ++i) loaded(corner[u][i]);  // or the compiler moves the loads behind the condition
  }
#pragma unroll
  for (int u = 0; u < POINTS; ++u) {
    if (!staged.places[slot + u * teams].inside) continue;
    blend<T, N>(staged.weights[slot + u * teams], corner[u], total);
  }
}

// output = sum of weighted samples. Each thread takes N channels.
template <class T, class L, int N>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 8 ? 2 : 4)
    attend_kernel(const AttentionProblem p, const T* __restrict__ value, const L* __restrict__ locations,
                  const L* __restrict__ weights, T* __restrict__ output) {
  using A = accumulate_t<T>;
  __shared__ Staged<A, kThreads * kRound> staged;
  const AttentionLayout layout(p);
  const AttentionTeam team(p, layout.own);
  const int channel = (team.slice * layout.lanes + layout.lane) * N;
  const bool active = channel < p.d;
  const int c = active ? channel : 0, pixel_bytes = p.M * p.d * int(sizeof(T));
  const T* head = value + team.head + c;
  A total[N] = {};
  for (int first = 0; first < p.P; first += kRound * layout.lanes) {
    const int count = min(kRound * layout.lanes, p.P - first);
    if (first > 0) __syncthreads();  // wait until the previous round has been read
    stage(p, layout, locations + team.index * p.P * 2, weights + team.index * p.P, first, count, &staged);
    __syncthreads();
    int point = 0;
    for (; point + 2 <= count; point += 2) {
      add_points<2, T, N>(staged, layout.slot(point), layout.teams, head, pixel_bytes, total);
    }
    if (point < count)
      add_points<1, T, N>(staged, layout.slot(point), layout.teams, head, pixel_bytes, total);
  }
  if (active && layout.writes) store(output + team.index * p.d + c, narrow<T>(total));
}

// Results of the backward pass; nullptr if not needed. The kernel adds to the value's gradient, whose sums
// are Fixed where their bits must not depend on the order of threads, else A.
template <class S, class L>
struct AttentionGradients {
  S* value;
  L *locations, *weights;
  ScaleOf<S> scale;
};

// Asked for two blocks a multiprocessor, the compiler takes up to 96 registers where 56 do.
template <class T, class L, int N, class S>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 8 ? 2 : 3)
    attend_backward_kernel(const AttentionProblem p, const T* __restrict__ grad_output,
                           const T* __restrict__ value, const L* __restrict__ locations,
                           const L* __restrict__ weights, const AttentionGradients<S, L> grads) {
  using A = accumulate_t<T>;
  constexpr bool kFixed = std::is_same_v<S, Fixed>;
  __shared__ Staged<A, kThreads * kRound> staged;
  __shared__ Four<A> sums[kThreads * kRound];  // <gradient, pixel> of the staged samples
  const AttentionLayout layout(p);
  const AttentionTeam team(p, layout.own);
  const int pixel_bytes = p.M * p.d * int(sizeof(T)), sum_bytes = p.M * p.d * int(sizeof(S));
  const T* head = value + team.head;
  const T* output_gradient = grad_output + team.index * p.d;
  const int channels = layout.writes ? p.d : 0, own_channel = layout.lane * N;
  const bool needs_points = grads.locations || grads.weights;
  const auto scale = grads.scale.loaded();
  // A thread usually has a single vector of channels, so its gradient is read only once.
  Vector<T, N> own_gradient;
  if (own_channel < channels) own_gradient = load_constant<T, N>(output_gradient + own_channel);
  // Integers are added one at a time, so neighboring threads take neighboring channels.
  const auto scaled = [&](int c) { return scale.second_factor(widen(__ldg(output_gradient + c))); };
  A factors[kFixed ? N : 1];
  if constexpr (kFixed) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const int c = layout.lane + k * layout.lanes;
      factors[k] = c < channels ? scaled(c) : A(0);
    }
  }

  for (int first = 0; first < p.P; first += kRound * layout.lanes) {
    const int count = min(kRound * layout.lanes, p.P - first);
    stage(p, layout, locations + team.index * p.P * 2, weights + team.index * p.P, first, count, &staged,
          scale);
    __syncthreads();
    for (int point = 0; point < count; ++point) {
      const int slot = layout.slot(point);
      const Place place = staged.places[slot];
      const Four<A> shares = staged.weights[slot];
      A products[4] = {};
      for (int c = own_channel; c < channels; c += layout.lanes * N) {
        Vector<T, N> gradient = own_gradient;
        if (c != own_channel) gradient = load_constant<T, N>(output_gradient + c);
        const Corners<const T> corners(head + c, place, pixel_bytes);
        Vector<T, N> corner[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) corner[i] = load_constant<T, N>(corners.at[i]);
        A grad[N];
        widen(gradient, grad);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          A x[N];
          widen(corner[i], x);
#pragma unroll
          for (int e = 0; e < N; ++e) products[i] += x[e] * grad[e];
        }
        if constexpr (!kFixed) {
          if (!grads.value || place.inside <= 0) continue;
          const Corners<A> targets(grads.value + team.head + c, place, sum_bytes);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            A part[N];
#pragma unroll
            for (int e = 0; e < N; ++e) part[e] = shares.of[i] * grad[e];
            add_atomically(targets.at[i], part);
          }
        }
      }
      if constexpr (kFixed) {
        const auto add = [&](int c, A factor) {
          const Corners<Fixed> targets(grads.value + team.head + c, place, sum_bytes);
#pragma unroll
          for (int i = 0; i < 4; ++i) add_fixed(targets.at[i], shares.of[i] * factor);
        };
        const int reached = place.inside > 0 ? channels : 0;
#pragma unroll
        for (int k = 0; k < N; ++k) {
          const int c = layout.lane + k * layout.lanes;
          if (c < reached) add(c, factors[k]);
        }
        for (int c = layout.lane + N * layout.lanes; c < reached; c += layout.lanes) add(c, scaled(c));
      }
      if (needs_points) sum_over_team(products, layout.lane, layout.lanes, &sums[slot]);
    }
    __syncthreads();
    for (int point = layout.lane; needs_points && layout.writes && point < count; point += layout.lanes) {
      const int64_t at = team.index * p.P + first + point;
      Sample<A> s;
      const AttentionLevel& level = locate(p, locations + team.index * p.P * 2, first + point, &s);
      const PixelSums<A> found(s, sums[layout.slot(point)], level.height, level.width);
      const A attention = widen(__ldg(weights + at));
      if (grads.weights) grads.weights[at] = narrow_to<L>(found.sampled());
      if (grads.locations) {
        grads.locations[2 * at] = narrow_to<L>(attention * A(level.width) * found.across());
        grads.locations[2 * at + 1] = narrow_to<L>(attention * A(level.height) * found.down());
      }
    }
  }
}

namespace {

inline int64_t attention_blocks(const AttentionProblem& p) {
  return divide_up(p.teams, kThreads >> p.lanes_log2);
}

// Calls body(T(), L()): the types of values, and of locations and weights.
template <class Body>
void for_attention_types(const Tensor& value, const Tensor& locations, const Body& body) {
  for_type(value.scalar_type(), [&](auto type) {
    using T = decltype(type);
    if (locations.scalar_type() == value.scalar_type()) {
      body(T(), T());
    } else {
      body(T(), accumulate_t<T>());
    }
  });
}

// The kernels of deformable_attention.h. All tensors are contiguous.
struct AttentionKernels {
  static ScalarType compute_type(const Tensor& value) { return value.scalar_type(); }
  static Tensor readable(const Tensor& value) { return as_contiguous(value); }
  static Tensor sums_of(const Tensor& value) {
    return zeros_like_options(value, sizes_of(value), sum_type(value));
  }

  static void forward(const Tensor& value, const Tensor& locations, const Tensor& weights,
                      const Tensor& output, const std::vector<int64_t>& shapes,
                      const std::vector<int64_t>& points, bool propagates_nan) {
    for_attention_types(value, locations, [&](auto type, auto location) {
      using T = decltype(type);
      using L = decltype(location);
      for_width<T>({value.size(3)}, {value.data_ptr(), output.data_ptr()}, [&](auto, auto width) {
        constexpr int N = decltype(width)::value;
        const auto p = attention_problem(value, weights, shapes, points, propagates_nan, N, true);
        launch(attend_kernel<T, L, N>, attention_blocks(p), p, data_of<const T>(value),
               data_of<const L>(locations), data_of<const L>(weights), data_of<T>(output));
      });
    });
  }

  // grad_value is accumulated into.
  static void backward(const Tensor& grad_output, const Tensor& value, const Tensor& locations,
                       const Tensor& weights, const Tensor& grad_value, const Tensor& grad_locations,
                       const Tensor& grad_weights, const std::vector<int64_t>& shapes,
                       const std::vector<int64_t>& points, bool propagates_nan) {
    for_attention_types(value, locations, [&](auto type, auto location) {
      using T = decltype(type);
      using L = decltype(location);
      const AttentionGradients<accumulate_t<T>, L> grads{
          data_of<accumulate_t<T>>(grad_value), data_of<L>(grad_locations), data_of<L>(grad_weights), {}};
      const auto run = [&](auto, auto width) {
        constexpr int N = decltype(width)::value;
        const auto p = attention_problem(value, weights, shapes, points, propagates_nan, N, false);
        launch(attend_backward_kernel<T, L, N, accumulate_t<T>>, attention_blocks(p), p,
               data_of<const T>(grad_output), data_of<const T>(value), data_of<const L>(locations),
               data_of<const L>(weights), grads);
      };
      if (grads.value) {
        for_atomic_width<T>({value.size(3)}, {value.data_ptr(), grad_output.data_ptr()}, run);
      } else {
        for_width<T>({value.size(3)}, {value.data_ptr(), grad_output.data_ptr()}, run);
      }
    });
  }
};

// The same with gradients whose bits are equal in every run.
struct DeterministicAttentionKernels : AttentionKernels {
  static Tensor sums_of(const Tensor& value) { return empty_like_options(value, sizes_of(value)); }

  // grad_value, of the value's dtype, is overwritten.
  static void backward(const Tensor& grad_output, const Tensor& value, const Tensor& locations,
                       const Tensor& weights, const Tensor& grad_value, const Tensor& grad_locations,
                       const Tensor& grad_weights, const std::vector<int64_t>& shapes,
                       const std::vector<int64_t>& points, bool propagates_nan) {
    if (!grad_value.defined()) {  // the other gradients are sums within a team, in a fixed order
      return AttentionKernels::backward(grad_output, value, locations, weights, grad_value, grad_locations,
                                        grad_weights, shapes, points, propagates_nan);
    }
    const FixedSums sums(value, weights.size(1) * *std::ranges::max_element(points));
    for_attention_types(value, locations, [&](auto type, auto location) {
      using T = decltype(type);
      using L = decltype(location);
      if constexpr (sizeof(T) == 8) {
        STD_TORCH_CHECK(false, "attn_plugins: the deterministic backward takes no float64");
      } else {
        sums.begin<L, T>(weights, grad_output);
        const AttentionGradients<Fixed, L> grads{sums.data(), data_of<L>(grad_locations),
                                                 data_of<L>(grad_weights), sums.scale};
        for_atomic_width<T>(
            {value.size(3)}, {value.data_ptr(), grad_output.data_ptr()}, [&](auto, auto width) {
              constexpr int N = decltype(width)::value;
              const auto p = attention_problem(value, weights, shapes, points, propagates_nan, N, false);
              launch(attend_backward_kernel<T, L, N, Fixed>, attention_blocks(p), p,
                     data_of<const T>(grad_output), data_of<const T>(value), data_of<const L>(locations),
                     data_of<const L>(weights), grads);
            });
        sums.end<T>(grad_value);
      }
    });
  }
};

}  // namespace
}  // namespace attn_plugins
