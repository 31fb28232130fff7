// Deformable attention on a GPU: a team of neighbouring threads (a power of two, at most a warp) serves one
// head of one query, each thread a vector of its channels. Teams of a query's heads are neighbours: together
// they read the query's locations and write its output without gaps.
//
// Every thread computes the places of the samples for itself: that is a few operations on numbers that its
// team reads as one, and no thread waits for another.
#pragma once

#include <limits>
#include <optional>
#include <vector>

#include "common/dispatch.cuh"
#include "common/launch.cuh"

namespace attn_plugins {

constexpr int kMostLevels = 16;

struct AttentionProblem {
  int64_t teams, S, Q;  // teams: B * Q * M
  int M, d, P, levels;
  int lanes_log2;
  int height[kMostLevels], width[kMostLevels], points[kMostLevels];
  int64_t start[kMostLevels];
};

// Of one (b, q, m): where the team's numbers begin, in elements.
struct AttentionTeam {
  int64_t index;  // (b * Q + q) * M + m: its row of locations, weights and outputs
  int64_t head;   // of pixel 0 in (B, S, M, d)
  int lane, lanes;
  unsigned members;

  template <class A>
  __device__ __forceinline__ A sum(A value) const {
    for (int step = lanes >> 1; step > 0; step >>= 1) value += __shfl_xor_sync(members, value, step, lanes);
    return value;
  }
};

__device__ __forceinline__ bool find_team(const AttentionProblem& p, AttentionTeam* team) {
  const int64_t thread = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  team->lanes = 1 << p.lanes_log2;
  team->lane = threadIdx.x & (team->lanes - 1);
  team->members = (0xffffffffu >> (32 - team->lanes)) << ((threadIdx.x & 31) - team->lane);
  team->index = thread >> p.lanes_log2;
  if (team->index >= p.teams) return false;
  const int64_t query = team->index / p.M, b = query / p.Q;
  team->head = (b * p.S * p.M + (team->index - query * p.M)) * p.d;
  return true;
}

// The four pixels of a sample, in the order upper left, upper right, lower left, lower right.
template <class A>
struct AttentionSample {
  A dy, dx;
  A share[4];     // bilinear weights
  int64_t at[4];  // elements from the head's pixel 0
  bool inside[4];

  __device__ __forceinline__ AttentionSample(const AttentionProblem& p, int level, A x, A y, int64_t stride) {
    const int H = p.height[level], W = p.width[level];
    const A row = y * A(H) - A(0.5), column = x * A(W) - A(0.5);
    // Written so that a NaN, too, is outside; nothing outside is ever converted to an integer.
    const bool near = row >= A(-1) && row < A(H) && column >= A(-1) && column < A(W);
    const A top = near ? floor(row) : A(-2), left = near ? floor(column) : A(-2);
    const int iy = static_cast<int>(top), ix = static_cast<int>(left);
    dy = near ? row - top : A(0);
    dx = near ? column - left : A(0);
    share[0] = (A(1) - dy) * (A(1) - dx);
    share[1] = (A(1) - dy) * dx;
    share[2] = dy * (A(1) - dx);
    share[3] = dy * dx;
    const bool above = near && iy >= 0, below = near && iy + 1 < H;
    const bool before = ix >= 0, behind = ix + 1 < W;
    inside[0] = above && before;
    inside[1] = above && behind;
    inside[2] = below && before;
    inside[3] = below && behind;
    at[0] = (p.start[level] + int64_t(iy) * W + ix) * stride;
    at[1] = at[0] + stride;
    at[2] = at[0] + W * stride;
    at[3] = at[2] + stride;
  }
};

// output = sum of weighted samples; N channels to a thread.
template <class T, int N>
__global__ void __launch_bounds__(kThreads)
    attend_kernel(const AttentionProblem p, const T* __restrict__ value,
                  const accumulate_t<T>* __restrict__ locations, const accumulate_t<T>* __restrict__ weights,
                  T* __restrict__ output) {
  using A = accumulate_t<T>;
  AttentionTeam team;
  if (!find_team(p, &team)) return;
  const int64_t stride = int64_t(p.M) * p.d;
  for (int c = team.lane * N; c < p.d; c += team.lanes * N) {
    const T* head = value + team.head + c;
    const A* location = locations + team.index * p.P * 2;
    const A* weight = weights + team.index * p.P;
    A total[N] = {};
    for (int level = 0; level < p.levels; ++level) {
#pragma unroll 2
      for (int k = 0; k < p.points[level]; ++k, location += 2, ++weight) {
        const AttentionSample<A> s(p, level, __ldg(location), __ldg(location + 1), stride);
        const A attention = __ldg(weight);
        Vector<T, N> corner[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (s.inside[i]) corner[i] = load_constant<T, N>(head + s.at[i]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const A share = attention * s.share[i];
#pragma unroll
          for (int e = 0; e < N; ++e) total[e] += share * A(widen(corner[i].element[e]));
        }
      }
    }
    Vector<T, N> result;
#pragma unroll
    for (int e = 0; e < N; ++e) result.element[e] = narrow_to<T>(total[e]);
    store(output + team.index * p.d + c, result);
  }
}

// Results of the backward; nullptr where not needed. The value's is added to.
template <class A>
struct AttentionGradients {
  A *value, *locations, *weights;
};

template <class T, int N>
__global__ void __launch_bounds__(kThreads)
    attend_backward_kernel(const AttentionProblem p, const T* __restrict__ grad_output,
                           const T* __restrict__ value, const accumulate_t<T>* __restrict__ locations,
                           const accumulate_t<T>* __restrict__ weights,
                           const AttentionGradients<accumulate_t<T>> grads) {
  using A = accumulate_t<T>;
  AttentionTeam team;
  if (!find_team(p, &team)) return;
  const int64_t stride = int64_t(p.M) * p.d;
  int64_t point = team.index * p.P;
  for (int level = 0; level < p.levels; ++level) {
    for (int k = 0; k < p.points[level]; ++k, ++point) {
      const AttentionSample<A> s(p, level, __ldg(locations + 2 * point), __ldg(locations + 2 * point + 1),
                                 stride);
      const A attention = __ldg(weights + point);
      A sums[4] = {};  // <gradient, pixel i>
      for (int c = team.lane * N; c < p.d; c += team.lanes * N) {
        const Vector<T, N> gradient = load_constant<T, N>(grad_output + team.index * p.d + c);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (!s.inside[i]) continue;
          const int64_t at = team.head + s.at[i] + c;
          const Vector<T, N> corner = load_constant<T, N>(value + at);
          A part[N];
#pragma unroll
          for (int e = 0; e < N; ++e) {
            const A g = widen(gradient.element[e]);
            sums[i] += g * A(widen(corner.element[e]));
            part[e] = attention * s.share[i] * g;
          }
          if (grads.value) add_atomically(grads.value + at, part);
        }
      }
      if (!grads.locations && !grads.weights) continue;
      const A above = (A(1) - s.dx) * sums[0] + s.dx * sums[1];
      const A below = (A(1) - s.dx) * sums[2] + s.dx * sums[3];
      const A sampled = team.sum((A(1) - s.dy) * above + s.dy * below);
      const A across = team.sum((A(1) - s.dy) * (sums[1] - sums[0]) + s.dy * (sums[3] - sums[2]));
      const A down = team.sum(below - above);
      if (team.lane != 0) continue;
      if (grads.weights) grads.weights[point] = sampled;
      if (grads.locations) {
        grads.locations[2 * point] = attention * A(p.width[level]) * across;
        grads.locations[2 * point + 1] = attention * A(p.height[level]) * down;
      }
    }
  }
}

namespace {

inline AttentionProblem attention_problem(const Tensor& value, const Tensor& weights,
                                          const std::vector<int64_t>& shapes,
                                          const std::vector<int64_t>& points, int vector) {
  constexpr int64_t limit = std::numeric_limits<int32_t>::max();
  AttentionProblem p{};
  p.S = value.size(1), p.Q = weights.size(1);
  p.M = static_cast<int>(value.size(2)), p.d = static_cast<int>(value.size(3));
  p.P = static_cast<int>(weights.size(3)), p.levels = static_cast<int>(points.size());
  p.teams = value.size(0) * p.Q * p.M;
  STD_TORCH_CHECK(points.size() <= kMostLevels && value.size(2) <= limit && value.size(3) <= limit &&
                      weights.size(3) <= limit && p.S <= limit,
                  "attn_plugins: deformable attention on CUDA takes at most 16 levels and sizes below 2^31");
  int64_t first = 0;
  for (int level = 0; level < p.levels; ++level) {
    p.height[level] = static_cast<int>(shapes[2 * level]);
    p.width[level] = static_cast<int>(shapes[2 * level + 1]);
    p.points[level] = static_cast<int>(points[level]);
    p.start[level] = first;
    first += shapes[2 * level] * shapes[2 * level + 1];
  }
  while (p.lanes_log2 < 5 && (vector << p.lanes_log2) < p.d) ++p.lanes_log2;
  return p;
}

inline int64_t attention_blocks(const AttentionProblem& p) {
  return ((p.teams << p.lanes_log2) + kThreads - 1) / kThreads;
}

// All tensors contiguous; locations and weights in the arithmetic's type.
inline void deformable_attention_forward(Tensor value, Tensor locations, Tensor weights, Tensor output,
                                         std::vector<int64_t> shapes, std::vector<int64_t> points) {
  for_type(value.scalar_type(), [&](auto type) {
    using T = decltype(type);
    using A = accumulate_t<T>;
    for_width<T>({value.size(3)}, {value.data_ptr(), output.data_ptr()}, [&](auto, auto width) {
      constexpr int N = decltype(width)::value;
      const auto p = attention_problem(value, weights, shapes, points, N);
      launch(attend_kernel<T, N>, attention_blocks(p), p, data_of<const T>(value),
             data_of<const A>(locations), data_of<const A>(weights), data_of<T>(output));
    });
  });
}

// grad_value is added to, and of the arithmetic's type as the other gradients.
inline void deformable_attention_backward(Tensor grad_output, Tensor value, Tensor locations, Tensor weights,
                                          std::optional<Tensor> grad_value,
                                          std::optional<Tensor> grad_locations,
                                          std::optional<Tensor> grad_weights, std::vector<int64_t> shapes,
                                          std::vector<int64_t> points) {
  for_type(value.scalar_type(), [&](auto type) {
    using T = decltype(type);
    using A = accumulate_t<T>;
    const auto found = [](const std::optional<Tensor>& t) {
      return t.has_value() ? static_cast<A*>(t->data_ptr()) : nullptr;
    };
    const AttentionGradients<A> grads{found(grad_value), found(grad_locations), found(grad_weights)};
    // Sums are as wide as the gradient's vectors are in the arithmetic's type.
    for_width<T>({value.size(3)}, {value.data_ptr(), grad_output.data_ptr()}, [&](auto, auto width) {
      constexpr int N = decltype(width)::value;
      const auto p = attention_problem(value, weights, shapes, points, N);
      launch(attend_backward_kernel<T, N>, attention_blocks(p), p, data_of<const T>(grad_output),
             data_of<const T>(value), data_of<const A>(locations), data_of<const A>(weights), grads);
    });
  });
}

}  // namespace
}  // namespace attn_plugins
