// Window attention's entry points on a GPU: arguments, and the choice of cuda_kernels.cuh's kernels.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include "common/tensor_ops.h"
#include "cuda_general_kernels.cuh"
#include "cuda_tensor_kernels.cuh"

namespace attn_plugins {
namespace {

constexpr int kOwnChannels = 8;    // of a lane
constexpr int kWideChannels = 16;  // of a lane, where 32 lanes of eight are too few
constexpr int kWidestHead = 32 * kWideChannels;
constexpr int kForwardQueries = 4;  // of a team
constexpr int kBackwardQueries = 2, kBackwardKeys = 2;

template <class T>
Maps<T> maps(const std::optional<Tensor>& t) {
  Maps<T> m;
  if (!t.has_value() || !t->defined()) return m;
  const auto stride = [&](int64_t axis) { return t->size(axis) == 1 ? 0 : t->stride(axis); };
  m.data = static_cast<T*>(t->data_ptr());
  m.batch = stride(0), m.head = stride(1), m.row = stride(2), m.column = stride(3), m.channel = stride(4);
  return m;
}

// True where vectors of N elements can be read and written.
template <int N, class T>
bool aligned(const Maps<T>& m) {
  const bool whole = m.batch % N == 0 && m.head % N == 0 && m.row % N == 0 && m.column % N == 0;
  return whole && reinterpret_cast<uintptr_t>(m.data) % (N * sizeof(T)) == 0;
}

GeneralAxis general_axis(int64_t queries, int64_t keys, const std::vector<int64_t>& geometry, int axis,
                         Border border) {
  return {queries,
          keys,
          geometry[axis],
          geometry[2 + axis],
          geometry[4 + axis],
          geometry[6 + axis],
          border == Border::kInside};
}

template <class T>
GeneralProblem<T> general_problem(const std::optional<Tensor>& query, const std::optional<Tensor>& key,
                                  const Tensor& value, const std::optional<Tensor>& position_logits,
                                  const Tensor& log_sum_exp, const std::vector<int64_t>& geometry,
                                  std::string border, double scale) {
  GeneralProblem<T> g{};
  g.query = maps<const T>(query), g.key = maps<const T>(key), g.value = maps<const T>(value);
  g.position_logits = maps<const T>(position_logits);
  g.log_sum_exp = static_cast<float*>(log_sum_exp.data_ptr());
  g.B = log_sum_exp.size(0), g.M = log_sum_exp.size(1);
  g.border = border_of(border);
  g.y = general_axis(log_sum_exp.size(2), value.size(2), geometry, 0, g.border);
  g.x = general_axis(log_sum_exp.size(3), value.size(3), geometry, 1, g.border);
  const int64_t d = query.has_value() ? query->size(4) : 0, dv = value.size(4);
  STD_TORCH_CHECK(std::max(d, dv) <= kWidestHead, "attn_plugins: a head may have up to ", kWidestHead,
                  " channels on CUDA, got ", std::max(d, dv));
  g.d = int(d), g.dv = int(dv), g.scale = float(scale);
  return g;
}

// Calls body(maps) for the tensors of which kernels read or write rows of channels.
template <class T, class Body>
void for_rows(const WindowOperands<T>& w, const Body& body) {
  body(w.query), body(w.key), body(w.value), body(w.output), body(w.output_read), body(w.grad_output);
  body(w.grad_query), body(w.grad_key), body(w.grad_value);
}

// Returns whether the fast kernels apply: windows are not moved, channels are contiguous, neighboring
// windows overlap tap on tap, and places, and distances in memory as far as the windows of a tile reach, fit
// into 32 bits. ATTN_PLUGINS_WINDOW_FAST=0 disables them, for comparisons.
template <class T>
bool fast_kernels_fit(const GeneralProblem<T>& g) {
  constexpr int64_t places = int64_t(1) << 27, elements = int64_t(1) << 29, teams = int64_t(1) << 29;
  const char* wanted = std::getenv("ATTN_PLUGINS_WINDOW_FAST");
  if (g.border == Border::kInside || (wanted != nullptr && wanted[0] == '0')) return false;
  const GeneralAxis axes[] = {g.y, g.x};
  for (const GeneralAxis& axis : axes) {
    const bool overlap = axis.dilation == 1 || axis.dilation < std::min(axis.queries, axis.keys);
    const int64_t size = std::max(axis.queries, axis.keys) + kBand,
                  greatest = std::max(axis.taps, axis.padding);
    if (axis.stride != 1 || !overlap || std::max(size, greatest) >= places) return false;
    if (axis.taps * axis.dilation >= places) return false;
  }
  const int64_t queries = (g.y.queries + kBand) * g.x.queries, keys = (g.y.keys + kBand) * g.x.keys;
  const int64_t taps = g.y.taps * g.x.taps, map = std::max(queries, keys);
  if (std::max(map, taps) >= places || g.B * g.M >= teams || g.B * g.M * map >= teams) return false;
  const int64_t reach = (g.x.taps + 32) * std::max<int64_t>(g.x.dilation, 2);
  bool fit = true;
  const auto check = [&](const auto& m) {
    fit = fit && m.column < elements / reach && m.row < elements / g.y.dilation;
  };
  for_rows(g, [&](const auto& m) { check(m), fit = fit && m.channel <= 1; });
  check(g.position_logits), check(g.grad_position_logits);
  return fit && std::max(g.position_logits.channel, g.grad_position_logits.channel) < elements / (taps + 32);
}

// A problem that the fast kernels compute.
template <class T>
struct WindowArguments {
  WindowProblem<T> p{};
  int64_t heads;  // of the whole batch
  bool vectors;   // 16 bytes at a time
  static constexpr int kVector = 16 / sizeof(T);

  explicit WindowArguments(const GeneralProblem<T>& g) : heads(g.B * g.M) {
    static_cast<WindowOperands<T>&>(p) = g;
    const auto axis = [](const GeneralAxis& a) {
      return WindowAxis{int(a.queries), int(a.keys),     int(a.taps),
                        int(a.padding), int(a.dilation), Divisor(a.dilation)};
    };
    p.y = axis(g.y), p.x = axis(g.x), p.M = int(g.M), p.power_scale = p.scale * kLog2E;
    vectors = p.d % kVector == 0 && p.dv % kVector == 0;
    for_rows(p, [&](const auto& m) { vectors = vectors && aligned<kVector>(m); });
    const auto columns = [&](const auto& m) { return int(p.x.dilation * m.column); };
    const auto row_bytes = [&](const auto& m) { return int(p.y.dilation * m.row * int64_t(sizeof(T))); };
    const auto& logits = p.position_logits;
    p.key_step = columns(p.key), p.value_step = columns(p.value), p.query_step = columns(p.query);
    p.gradient_step = columns(p.grad_output), p.position_step = int(columns(logits) - logits.channel);
    p.key_bytes = row_bytes(p.key), p.value_bytes = row_bytes(p.value), p.query_bytes = row_bytes(p.query);
    p.gradient_bytes = row_bytes(p.grad_output);
    p.position_bytes = row_bytes(logits) - int(p.x.taps * logits.channel * int64_t(sizeof(T)));
    p.stats_bytes = 2 * p.y.dilation * p.x.queries * int(sizeof(float));
  }

  int width() const { return std::max(p.d, p.dv); }

  // Teams of `height` x `width` places, a dilation apart, of a map of rows x columns.
  void assign(int64_t rows, int64_t columns, int64_t row_dilation, int64_t column_dilation, int64_t height,
              int64_t width) {
    const auto runs = [](int64_t size, int64_t dilation, int64_t count) {
      return dilation * divide_up(size, dilation * count);
    };
    p.rows = int(runs(rows, row_dilation, height)), p.columns = int(runs(columns, column_dilation, width));
    const auto by = [](int64_t n) { return Divisor(std::max<int64_t>(n, 1)); };
    p.teams = int(heads * p.rows * p.columns), p.by_heads = by(p.M);
    p.by_map = by(int64_t(p.rows) * p.columns);
    p.by_band = by(int64_t(kBand) * p.columns), p.by_last_rows = by(p.rows % kBand);
  }

  int64_t blocks() const { return divide_up(p.teams, kThreads / p.lanes); }
};

// Calls body(Team, wide), where wide teams work on one place only, with the narrowest team that holds a head.
template <class T, class Body>
void for_team(WindowArguments<T>& a, const Body& body) {
  constexpr int kVector = a.kVector, kChunks = kOwnChannels / kVector;
  const int width = a.width();
  const auto call = [&](auto team, auto wide) {
    using Chosen = typename decltype(team)::type;
    a.p.lanes = Chosen::LANES;
    if (Chosen::LANES == 0) {
      for (a.p.lanes = 4; a.p.lanes * Chosen::OWN < width;) a.p.lanes *= 2;
    }
    body(team, wide);
  };
  if constexpr (std::is_same_v<T, float>) {  // half numbers of such widths go to tensor cores
    if (a.vectors && width <= 2 * kOwnChannels) {
      return call(std::type_identity<Team<2, kVector, kChunks>>(), std::false_type());
    }
    if (a.vectors && width <= 4 * kOwnChannels) {
      return call(std::type_identity<Team<4, kVector, kChunks>>(), std::false_type());
    }
    if (a.vectors && width <= 8 * kOwnChannels) {
      return call(std::type_identity<Team<8, kVector, kChunks>>(), std::false_type());
    }
  }
  if (width > 32 * kOwnChannels) {
    call(std::type_identity<Team<32, 1, kWideChannels>>(), std::true_type());
  } else if (a.vectors) {
    call(std::type_identity<Team<0, kVector, kChunks>>(), std::false_type());
  } else {
    call(std::type_identity<Team<0, 1, kOwnChannels>>(), std::false_type());
  }
}

// Returns whether the tensor kernels apply: half precision in aligned vectors, heads that fit into registers.
// ATTN_PLUGINS_WINDOW_TENSOR_CORES=0 disables them, for comparisons.
template <class T>
bool tensor_cores_fit(const WindowArguments<T>& a) {
  if (std::is_same_v<T, float> || !a.vectors || a.width() > 64 || !has_tensor_cores()) return false;
  const char* wanted = std::getenv("ATTN_PLUGINS_WINDOW_TENSOR_CORES");
  return wanted == nullptr || wanted[0] != '0';
}

// Calls body(width) with the narrowest of the tensor kernels' widths that holds a head.
template <class T, class Body>
void for_tile(WindowArguments<T>& a, const Body& body) {
  a.p.lanes = 32;
  if (a.width() <= 16) return body(std::integral_constant<int, 16>());
  if (a.width() <= 32) return body(std::integral_constant<int, 32>());
  body(std::integral_constant<int, 64>());
}

// Launches a tensor kernel, which may stage position logits; kernel(width, logits, content) is its instance.
template <bool STAGED, class T, class Kernel>
void launch_tiles(WindowArguments<T>& a, const Kernel& kernel) {
  const auto run = [&](auto logits, auto content) {
    constexpr bool kStaged = decltype(logits)::value == Logits::kStaged;
    const int64_t bytes = kStaged ? a.p.staged * kWarps * int64_t(sizeof(T)) : 0;
    for_tile(a, [&](auto width) {
      launch_with_shared_memory(kernel(width, logits, content), a.blocks(), bytes, a.p);
    });
  };
  if (a.p.position_logits.data == nullptr) {
    return run(std::integral_constant<Logits, Logits::kNone>(), std::true_type());
  }
  const auto run_either = [&](auto logits) {
    a.p.d > 0 ? run(logits, std::true_type()) : run(logits, std::false_type());
  };
  if constexpr (STAGED) {
    const int64_t elements = staged_elements(int64_t(a.p.y.taps) * a.p.x.taps);
    if (elements * kWarps * int64_t(sizeof(T)) <= kSharedBytes) {
      a.p.staged = int(elements);
      return run_either(std::integral_constant<Logits, Logits::kStaged>());
    }
    // Calls without content are rare here, so they run as content of no channels.
    run(std::integral_constant<Logits, Logits::kDirect>(), std::true_type());
  } else {
    run_either(std::integral_constant<Logits, Logits::kDirect>());
  }
}

// Assigns a warp to each tile of queries, or of keys, in the tile shape that needs fewer products: rows of
// the other times runs of 16 of them.
template <class T>
void assign_tiles(WindowArguments<T>& a, int64_t rows, int64_t columns) {
  auto& p = a.p;
  const int64_t tall = int64_t(p.y.taps + 1) * divide_up(p.x.taps + 7, 16);
  const int64_t flat = int64_t(p.y.taps) * divide_up(p.x.taps + 15, 16);
  p.tall = rows > p.y.dilation && tall <= flat;
  a.assign(rows, columns, p.y.dilation, p.x.dilation, p.tall ? 2 : 1, p.tall ? 8 : 16);
}

// Launches kernel(width), a general kernel of heads of up to 32 * width channels, with a warp for each of
// `count` queries or keys.
template <class T, class Kernel>
void launch_general(const GeneralProblem<T>& g, int64_t count, const Kernel& kernel) {
  const int64_t blocks = std::min(divide_up(count, kThreads / 32), int64_t(1) << 30);
  std::max(g.d, g.dv) <= 64 ? launch(kernel(std::integral_constant<int, 2>()), blocks, g)
                            : launch(kernel(std::integral_constant<int, kWidestHead / 32>()), blocks, g);
}

template <class Body>
void for_window_type(ScalarType type, const Body& body) {
  if (type == ScalarType::Float) return body(float());
  if (type == ScalarType::Half) return body(__half());
  if (type == ScalarType::BFloat16) return body(__nv_bfloat16());
  STD_TORCH_CHECK(false, "attn_plugins: window attention on CUDA expects float16, bfloat16 or float32");
}

void window_attention_forward(std::optional<Tensor> query, std::optional<Tensor> key, Tensor value,
                              std::optional<Tensor> position_logits, Tensor output, Tensor log_sum_exp,
                              std::vector<int64_t> geometry, std::string border, double scale) {
  for_window_type(value.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    auto g = general_problem<T>(query, key, value, position_logits, log_sum_exp, geometry, border, scale);
    g.output = maps<T>(output);
    if (!fast_kernels_fit(g)) {
      return launch_general(g, log_sum_exp.numel(), [](auto width) {
        return window_forward_general_kernel<T, decltype(width)::value>;
      });
    }
    WindowArguments<T> a(g);
    if constexpr (!std::is_same_v<T, float>) {
      if (tensor_cores_fit(a)) {
        assign_tiles(a, a.p.y.queries, a.p.x.queries);
        return launch_tiles<true>(a, [](auto width, auto logits, auto content) {
          return window_forward_tensor_kernel<T, decltype(width)::value, decltype(logits)::value,
                                              decltype(content)::value>;
        });
      }
    }
    for_team(a, [&](auto team, auto wide) {
      using Chosen = typename decltype(team)::type;
      constexpr int kQueries = decltype(wide)::value ? 1 : kForwardQueries;
      a.assign(a.p.y.queries, a.p.x.queries, 1, a.p.x.dilation, 1, kQueries);
      launch(window_forward_kernel<T, Chosen, kQueries>, a.blocks(), a.p);
    });
  });
}

void window_attention_backward(Tensor grad_output, std::optional<Tensor> query, std::optional<Tensor> key,
                               Tensor value, std::optional<Tensor> position_logits, Tensor output,
                               Tensor log_sum_exp, std::optional<Tensor> grad_query,
                               std::optional<Tensor> grad_key, std::optional<Tensor> grad_value,
                               std::optional<Tensor> grad_position_logits, std::vector<int64_t> geometry,
                               std::string border, double scale) {
  for_window_type(value.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    auto g = general_problem<T>(query, key, value, position_logits, log_sum_exp, geometry, border, scale);
    g.grad_output = maps<const T>(grad_output), g.output_read = maps<const T>(output);
    g.grad_query = maps<T>(grad_query), g.grad_key = maps<T>(grad_key), g.grad_value = maps<T>(grad_value);
    g.grad_position_logits = maps<T>(grad_position_logits);
    const Tensor stats = empty_like_options(log_sum_exp, {log_sum_exp.numel(), 4});
    g.stats = static_cast<float*>(stats.data_ptr()), g.peaks = g.stats + 2 * log_sum_exp.numel();
    const bool keys_wanted = g.grad_key.data || g.grad_value.data;
    if (!fast_kernels_fit(g)) {
      launch_general(g, log_sum_exp.numel(), [](auto width) {
        return window_query_gradient_general_kernel<T, decltype(width)::value>;
      });
      if (!keys_wanted) return;
      return launch_general(g, g.B * g.M * g.y.keys * g.x.keys, [](auto width) {
        return window_key_gradient_general_kernel<T, decltype(width)::value>;
      });
    }
    WindowArguments<T> a(g);
    auto& p = a.p;
    // Their kernel also mends the statistics, of which half values' gradients take the log-sum-exp alone.
    const bool queries_wanted =
        p.grad_query.data || p.grad_position_logits.data || p.grad_key.data || std::is_same_v<T, float>;
    for_team(a, [&](auto team, auto wide) {
      using Chosen = typename decltype(team)::type;
      constexpr int kQueries = decltype(wide)::value ? 1 : kBackwardQueries;
      constexpr int kKeys = decltype(wide)::value ? 1 : kBackwardKeys;
      a.assign(p.y.queries, p.x.queries, 1, 1, 1, 1);
      launch(window_stats_kernel<T, Chosen>, a.blocks(), p);
      if (tensor_cores_fit(a)) return;
      if (queries_wanted) {
        a.assign(p.y.queries, p.x.queries, 1, p.x.dilation, 1, kQueries);
        launch(window_query_gradient_kernel<T, Chosen, kQueries>, a.blocks(), p);
      }
      if (keys_wanted) {
        a.assign(p.y.keys, p.x.keys, 1, p.x.dilation, 1, kKeys);
        launch(window_key_gradient_kernel<T, Chosen, kKeys>, a.blocks(), p);
      }
    });
    if constexpr (!std::is_same_v<T, float>) {
      if (!tensor_cores_fit(a)) return;
      if (queries_wanted) {
        assign_tiles(a, a.p.y.queries, a.p.x.queries);
        launch_tiles<true>(a, [](auto width, auto logits, auto content) {
          return window_query_gradient_tensor_kernel<T, decltype(width)::value, decltype(logits)::value,
                                                     decltype(content)::value>;
        });
      }
      if (keys_wanted) {
        assign_tiles(a, a.p.y.keys, a.p.x.keys);
        launch_tiles<false>(a, [](auto width, auto logits, auto content) {
          return window_key_gradient_tensor_kernel<T, decltype(width)::value, decltype(logits)::value,
                                                   decltype(content)::value>;
        });
      }
    }
  });
}

}  // namespace
}  // namespace attn_plugins
