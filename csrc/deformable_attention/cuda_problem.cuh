// The sizes of a call of deformable attention, as kernels get them.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "common/dispatch.cuh"
#include "common/divisor.cuh"

namespace attn_plugins {

constexpr int kMostLevels = 16;

struct AttentionLevel {
  int height, width, first_pixel;
  int last_point;  // number of points of this level and the levels before it
};

struct AttentionProblem {
  int64_t teams, S;  // teams: B * Q * M * slices
  int M, d, P, levels;
  int lanes_log2;
  bool propagates_nan;  // a location that is not finite reads NaN, as by grid_sample on CPUs, instead of 0
  Divisor slices, heads, queries;  // by the slices of a head's channels (1 in the backward), by M and by Q
  AttentionLevel level[kMostLevels];
};

namespace {

// If `forward`, several teams share the channels of a head that exceed one team's, and a team may be a single
// thread.
inline AttentionProblem attention_problem(const Tensor& value, const Tensor& weights,
                                          const std::vector<int64_t>& shapes,
                                          const std::vector<int64_t>& points, bool propagates_nan, int vector,
                                          bool forward) {
  constexpr int64_t limit = std::numeric_limits<int32_t>::max();
  const int64_t M = value.size(2), d = value.size(3), Q = weights.size(1), P = weights.size(3);
  AttentionProblem p{};
  while (p.lanes_log2 < 5 && (int64_t(vector) << p.lanes_log2) < d) ++p.lanes_log2;
  const int64_t lanes = int64_t(1) << p.lanes_log2;
  const int64_t slices = forward ? std::max<int64_t>(1, divide_up(d, lanes * vector)) : 1;
  if (!forward) p.lanes_log2 = std::max(p.lanes_log2, 2);  // sum_over_team needs 4 lanes
  p.S = value.size(1), p.M = static_cast<int>(M), p.d = static_cast<int>(d), p.P = static_cast<int>(P);
  p.levels = static_cast<int>(points.size());
  p.propagates_nan = propagates_nan;
  p.teams = value.size(0) * Q * M * slices;
  STD_TORCH_CHECK(points.size() <= kMostLevels && p.teams < limit && M * d <= limit / 8 && P < limit / 2 &&
                      p.S < limit && *std::ranges::max_element(shapes) < limit,
                  "attn_plugins: deformable attention on CUDA takes at most 16 levels, and fewer than 2^31 "
                  "pixels and heads of queries, got ",
                  points.size(), ", ", p.S, " and ", p.teams);
  p.slices = Divisor(slices), p.heads = Divisor(std::max<int64_t>(M, 1));
  p.queries = Divisor(std::max<int64_t>(Q, 1));
  int pixel = 0, point = 0;
  for (int level = 0; level < p.levels; ++level) {
    const int height = static_cast<int>(shapes[2 * level]), width = static_cast<int>(shapes[2 * level + 1]);
    point += static_cast<int>(points[level]);
    p.level[level] = {height, width, pixel, point};
    pixel += height * width;
  }
  return p;
}

}  // namespace
}  // namespace attn_plugins
