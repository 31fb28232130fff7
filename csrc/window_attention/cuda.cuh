// Window attention's entry points on a GPU: arguments, and the choice of cuda_kernels.cuh's kernels.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <optional>
#include <vector>

#include "common/tensor_ops.h"
#include "cuda_tensor_kernels.cuh"

namespace attn_plugins {
namespace {

constexpr int kOwnChannels = 8;     // of a lane
constexpr int kWideChannels = 16;   // of a lane, where 32 lanes of eight are too few
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

WindowAxis window_axis(int64_t queries, int64_t keys, const std::vector<int64_t>& geometry, int axis) {
  const int64_t taps = geometry[axis], stride = geometry[2 + axis], padding = geometry[4 + axis],
                dilation = geometry[6 + axis];
  // Places and taps are 32-bit in the kernels; what they address is not.
  constexpr int64_t limit = int64_t(1) << 27;
  for (const int64_t n : {queries, keys, taps, stride, padding, dilation}) {
    STD_TORCH_CHECK(n < limit, "attn_plugins: no size of a window may reach 2^27 on CUDA, got ", n);
  }
  STD_TORCH_CHECK(std::max(queries, keys) * stride < limit && taps * dilation < limit,
                  "attn_plugins: a window's stride and dilation reach beyond 2^27 keys, too far for CUDA");
  const int64_t divisor = std::gcd(stride, dilation), step = dilation / divisor, shift = stride / divisor;
  int64_t inverse = 0;
  while (inverse < shift && inverse * step % shift != 1 % shift) ++inverse;
  return {int(queries),    int(keys),         int(taps),     int(stride),    int(padding),
          int(dilation),   int(step),         int(shift),    int(divisor),   int(inverse),
          Divisor(stride), Divisor(dilation), Divisor(step), Divisor(shift), Divisor(divisor)};
}

template <class T>
struct WindowArguments {
  WindowProblem<T> p{};
  int64_t heads;          // of the whole batch
  bool vectors;           // 16 bytes at a time
  bool lines_fit = true;  // their distances are 32-bit

  WindowArguments(const std::optional<Tensor>& query, const std::optional<Tensor>& key, const Tensor& value,
                  const std::optional<Tensor>& position, const Tensor& log_sum_exp,
                  const std::vector<int64_t>& geometry, bool zero_border, double scale) {
    p.query = maps<const T>(query), p.key = maps<const T>(key), p.value = maps<const T>(value);
    p.position = maps<const T>(position);
    p.log_sum_exp = static_cast<float*>(log_sum_exp.data_ptr());
    const int64_t B = log_sum_exp.size(0), M = log_sum_exp.size(1);
    p.M = int(M), heads = B * M;
    p.y = window_axis(log_sum_exp.size(2), value.size(2), geometry, 0);
    p.x = window_axis(log_sum_exp.size(3), value.size(3), geometry, 1);
    constexpr int64_t limit = int64_t(1) << 27;
    STD_TORCH_CHECK(int64_t(p.y.queries + kBand) * p.x.queries < limit &&
                        int64_t(p.y.keys + kBand) * p.x.keys < limit &&
                        int64_t(p.y.taps) * p.x.taps < limit && M < limit,
                    "attn_plugins: a map of queries, of keys or of taps may not reach 2^27 places on CUDA");
    p.d = query.has_value() ? int(query->size(4)) : 0, p.dv = int(value.size(4));
    STD_TORCH_CHECK(width() <= 32 * kWideChannels, "attn_plugins: a head may have up to ", 32 * kWideChannels,
                    " channels on CUDA, got ", width());
    p.scale = float(scale), p.power_scale = p.scale * kLog2E, p.zero_border = zero_border;
    vectors = p.d % kVector == 0 && p.dv % kVector == 0;
    add_rows("query", p.query), add_rows("key", p.key), add_rows("value", p.value);
    check_distance("position_logits", p.position.column, p.x.dilation);
    check_taps("position_logits", p.position.channel);
    p.key_step = int(p.x.dilation * p.key.column), p.value_step = int(p.x.dilation * p.value.column);
    p.query_step = int(p.x.step * p.query.column);
    p.position_step = int(p.x.step * p.position.column - p.x.shift * p.position.channel);
    set_bytes(p.key_bytes, p.y.dilation * p.key.row, sizeof(T));
    set_bytes(p.value_bytes, p.y.dilation * p.value.row, sizeof(T));
    set_bytes(p.query_bytes, p.y.step * p.query.row, sizeof(T));
    const int64_t taps_row = p.x.taps * p.position.channel;
    set_bytes(p.position_bytes, p.y.step * p.position.row - p.y.shift * taps_row, sizeof(T));
    set_bytes(p.stats_bytes, 2 * int64_t(p.y.step) * p.x.queries, sizeof(float));
  }

  // Sets a distance of lines, for tensor cores.
  void set_bytes(int& bytes, int64_t elements, int64_t size) {
    bytes = int(elements * size), lines_fit = lines_fit && bytes == elements * size;
  }

  static constexpr int kVector = 16 / sizeof(T);

  int width() const { return std::max(p.d, p.dv); }

  // What kernels read or write in vectors, where it permits.
  template <class U>
  void add_rows(const char* name, const Maps<U>& m) {
    STD_TORCH_CHECK(m.channel <= 1, "attn_plugins: ", name,
                    "'s last axis must be contiguous on CUDA, got stride ", m.channel);
    check_distance(name, m.column, p.x.dilation);
    vectors = vectors && aligned<kVector>(m);
  }

  // Within a row kernels compute in 32 bits: as far as all windows of a tile reach.
  void check_distance(const char* name, int64_t stride, int64_t step) const {
    const int64_t places = (int64_t(p.x.taps) + 32 * p.x.shift) * std::max<int64_t>(step, 2);
    STD_TORCH_CHECK(stride < (int64_t(1) << 31) / places, "attn_plugins: ", name, "'s windows span ", places,
                    " places of stride ", stride, ", too far apart on CUDA; make it contiguous");
  }
  void check_taps(const char* name, int64_t stride) const {
    const int64_t taps = int64_t(p.y.taps) * p.x.taps + 32 * p.x.shift;
    STD_TORCH_CHECK(stride < (int64_t(1) << 31) / taps, "attn_plugins: ", name, "'s ", taps,
                    " taps have stride ", stride, ", too far apart on CUDA; make it contiguous");
  }

  // Teams of `height` x `width` places at these distances, of a map of rows x columns.
  void assign(int64_t rows, int64_t columns, int64_t row_step, int64_t column_step, int64_t height,
              int64_t width) {
    const auto runs = [](int64_t size, int64_t step, int64_t count) {
      return std::min(step, size) * ((size + step * count - 1) / (step * count));
    };
    p.rows = int(runs(rows, row_step, height)), p.columns = int(runs(columns, column_step, width));
    const int64_t teams = heads * p.rows * p.columns;
    STD_TORCH_CHECK(teams < (int64_t(1) << 31) - kThreads, "attn_plugins: ", teams,
                    " runs of places of windows are too many for CUDA");
    const auto by = [](int64_t n) { return Divisor(std::max<int64_t>(n, 1)); };
    p.teams = int(teams), p.by_heads = by(p.M), p.by_map = by(int64_t(p.rows) * p.columns);
    p.by_band = by(int64_t(kBand) * p.columns), p.by_last_rows = by(p.rows % kBand);
  }

  int64_t blocks() const {
    const int64_t teams = kThreads / p.lanes;
    return (p.teams + teams - 1) / teams;
  }
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

// Returns whether the tensor kernels apply: half precision in aligned vectors, heads that fit into registers,
// and neighbouring windows that overlap. ATTN_PLUGINS_WINDOW_TENSOR_CORES=0 disables them, for comparisons.
template <class T>
bool tensor_cores_fit(const WindowArguments<T>& a) {
  if (std::is_same_v<T, float> || !a.vectors || !a.lines_fit || a.width() > 64 || a.p.x.shift > 2 ||
      !has_tensor_cores())
    return false;
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
  if (a.p.position.data == nullptr) {
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

// Assigns a warp to each tile of queries, in the tile shape that needs fewer products: rows of keys times
// runs of 16 keys.
template <class T>
void assign_queries(WindowArguments<T>& a) {
  auto& p = a.p;
  const int64_t tall = int64_t(p.y.taps + p.y.shift) * ((p.x.taps + 7 * p.x.shift + 15) / 16);
  const int64_t flat = int64_t(p.y.taps) * ((p.x.taps + 15 * p.x.shift + 15) / 16);
  p.tall = p.y.queries > p.y.step && tall <= flat;
  a.assign(p.y.queries, p.x.queries, p.y.step, p.x.step, p.tall ? 2 : 1, p.tall ? 8 : 16);
}

// The same of keys.
template <class T>
void assign_keys(WindowArguments<T>& a) {
  auto& p = a.p;
  const auto runs = [](int64_t count, int64_t of) { return (count + of - 1) / of; };
  const int64_t tall = runs(p.y.taps + 1, p.y.shift) * runs(p.x.taps + 7, 16 * p.x.shift);
  const int64_t flat = runs(p.y.taps, p.y.shift) * runs(p.x.taps + 15, 16 * p.x.shift);
  p.tall = p.y.keys > p.y.dilation && tall <= flat;
  a.assign(p.y.keys, p.x.keys, p.y.dilation, p.x.dilation, p.tall ? 2 : 1, p.tall ? 8 : 16);
}

template <class Body>
void for_window_type(ScalarType type, const Body& body) {
  if (type == ScalarType::Float) return body(float());
  if (type == ScalarType::Half) return body(__half());
  if (type == ScalarType::BFloat16) return body(__nv_bfloat16());
  STD_TORCH_CHECK(false, "attn_plugins: window attention on CUDA expects float16, bfloat16 or float32");
}

void window_attention_forward(std::optional<Tensor> query, std::optional<Tensor> key, Tensor value,
                              std::optional<Tensor> position, Tensor output, Tensor log_sum_exp,
                              std::vector<int64_t> geometry, bool zero_border, double scale) {
  for_window_type(value.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    WindowArguments<T> a(query, key, value, position, log_sum_exp, geometry, zero_border, scale);
    a.p.output = maps<T>(output);
    a.add_rows("output", a.p.output);
    if constexpr (!std::is_same_v<T, float>) {
      if (tensor_cores_fit(a)) {
        assign_queries(a);
        return launch_tiles<true>(a, [](auto width, auto logits, auto content) {
          return window_forward_tensor_kernel<T, decltype(width)::value, decltype(logits)::value,
                                              decltype(content)::value>;
        });
      }
    }
    for_team(a, [&](auto team, auto wide) {
      using Chosen = typename decltype(team)::type;
      constexpr int kQueries = decltype(wide)::value ? 1 : kForwardQueries;
      a.assign(a.p.y.queries, a.p.x.queries, 1, a.p.x.step, 1, kQueries);
      launch(window_forward_kernel<T, Chosen, kQueries>, a.blocks(), a.p);
    });
  });
}

void window_attention_backward(Tensor grad_output, std::optional<Tensor> query, std::optional<Tensor> key,
                               Tensor value, std::optional<Tensor> position, Tensor output,
                               Tensor log_sum_exp, std::optional<Tensor> grad_query,
                               std::optional<Tensor> grad_key, std::optional<Tensor> grad_value,
                               std::optional<Tensor> grad_position, std::vector<int64_t> geometry,
                               bool zero_border, double scale) {
  for_window_type(value.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    WindowArguments<T> a(query, key, value, position, log_sum_exp, geometry, zero_border, scale);
    auto& p = a.p;
    p.grad_output = maps<const T>(grad_output), p.output_read = maps<const T>(output);
    p.grad_query = maps<T>(grad_query), p.grad_key = maps<T>(grad_key), p.grad_value = maps<T>(grad_value);
    p.grad_position = maps<T>(grad_position);
    a.check_taps("grad_position_logits", p.grad_position.channel);
    p.gradient_step = int(p.x.step * p.grad_output.column);
    a.set_bytes(p.gradient_bytes, p.y.step * p.grad_output.row, sizeof(T));
    a.add_rows("grad_output", p.grad_output), a.add_rows("output", p.output_read);
    a.add_rows("grad_query", p.grad_query), a.add_rows("grad_key", p.grad_key);
    a.add_rows("grad_value", p.grad_value);
    const Tensor stats = empty_like_options(log_sum_exp, {log_sum_exp.numel(), 4});
    p.stats = static_cast<float*>(stats.data_ptr()), p.peaks = p.stats + 2 * log_sum_exp.numel();
    // Their kernel also mends the statistics, of which half values' gradients take the log-sum-exp alone.
    const bool queries_wanted =
        p.grad_query.data || p.grad_position.data || p.grad_key.data || std::is_same_v<T, float>;
    const bool keys_wanted = p.grad_key.data || p.grad_value.data;
    for_team(a, [&](auto team, auto wide) {
      using Chosen = typename decltype(team)::type;
      constexpr int kQueries = decltype(wide)::value ? 1 : kBackwardQueries;
      constexpr int kKeys = decltype(wide)::value ? 1 : kBackwardKeys;
      a.assign(p.y.queries, p.x.queries, 1, 1, 1, 1);
      launch(window_stats_kernel<T, Chosen>, a.blocks(), p);
      if (tensor_cores_fit(a)) return;
      if (queries_wanted) {
        a.assign(p.y.queries, p.x.queries, 1, p.x.step, 1, kQueries);
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
        assign_queries(a);
        launch_tiles<true>(a, [](auto width, auto logits, auto content) {
          return window_query_gradient_tensor_kernel<T, decltype(width)::value, decltype(logits)::value,
                                                     decltype(content)::value>;
        });
      }
      if (keys_wanted) {
        assign_keys(a);
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
