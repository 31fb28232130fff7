// Window attention on the CPU, without materialising windows. This file holds the entry points, the geometry
// of the packing and the choice of the instruction set; the arithmetic is in cpu_kernel.h.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "common/tensor_ops.h"
#include "common/vectors.h"
#include "window_attention/border.h"

namespace {

using attn_plugins::Border;
using attn_plugins::border_of;
using attn_plugins::zeros_like_options;
using torch::headeronly::ScalarType;

// Operands and geometry of one call; absent operands are null.
template <typename T>
struct Problem {
  int64_t B, M, Hq, Wq, Hk, Wk, d = 0, dv;
  // kernel[1] and padding[1] are those of a row's taps: of windows inside the map, all taps from the one that
  // is window[1] - 1 steps before a query to the one as far behind it, of which each query has window[1] in a
  // row.
  int64_t kernel[2], stride[2], padding[2], dilation[2], window[2];
  int64_t tile;  // queries of a row computed together
  Border border;
  T scale;
  View<T> value_view, position_logits, output, log_sum_exp, grad_query, grad_key, grad_value,
      grad_position_logits;
  // Packed keys and values are (heads, rows, phases, width, line); packed queries and output gradients are
  // (heads, rows, width, line) and begin at `margin`, the largest distance of a tap within its phase.
  int64_t line, margin;
  const T *key = nullptr, *value = nullptr, *query = nullptr, *gradient = nullptr;
  // (phases, line): 0 inside the map, -inf outside; of windows inside the map (taps of a row, line) by
  // queries.
  const T* outside = nullptr;
  // Backward workspace of `heads` heads from `first_head`: (heads, rows, taps, line).
  T *weights = nullptr, *slopes = nullptr;
  int64_t first_head = 0, heads = 0;
  bool logits_wanted = false;

  int64_t taps() const { return kernel[0] * kernel[1]; }
  bool inside() const { return border == Border::kInside; }
  // The first key of a query's window along an axis.
  int64_t first_key(int axis, int64_t query) const {
    if (!inside()) return query * stride[axis] - padding[axis];
    const int64_t step = dilation[axis], rest = query % step;
    const int64_t last = ((axis ? Wk : Hk) - rest + step - 1) / step - window[axis];
    return rest + step * std::clamp(query / step - window[axis] / 2, int64_t(0), last);
  }
  // The first of a row's taps in the window of column x, which falls, or stays, from column to column.
  int64_t first_tap(int64_t x) const {
    return inside() ? (first_key(1, x) - x + padding[1]) / dilation[1] : 0;
  }
  // True for position logits alone over dense windows that are wide enough, with enough channels, for vectors
  // along the channels to pay off.
  bool predicted() const {
    const bool dense = stride[0] == 1 && stride[1] == 1 && dilation[0] == 1 && dilation[1] == 1;
    return d == 0 && position_logits.data && dense && !inside() && kernel[1] >= 7 && dv * sizeof(T) >= 32;
  }
};

// A (B, M, rows, columns, width) view to be packed.
template <typename T>
struct Packing {
  View<T> view;
  int64_t M, rows, columns, width, phases, first, line;
  T* to;
};

enum class Stage { FORWARD, PREDICTED, QUERIES, KEYS };

#define KERNEL "window_attention/cpu_kernel.h"
#include "common/each_target.h"

template <typename T>
void run(Stage stage, const Problem<T>& p, int64_t tasks) {
  using Range = void (*)(Stage, const Problem<T>&, int64_t, int64_t);
  const Range range = BEST(Range, run_range);
  torch::stable::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) { range(stage, p, begin, end); });
}

template <typename T>
constexpr ScalarType COMPUTED = sizeof(T) == sizeof(double) ? ScalarType::Double : ScalarType::Float;

// Packs `tensor` into a new zero-filled tensor of T.
template <typename T>
Tensor packed(const std::optional<Tensor>& tensor, int64_t phases, int64_t first, int64_t line) {
  Packing<T> p;
  p.view = View<T>(tensor);
  p.M = tensor->size(1), p.rows = tensor->size(2), p.columns = tensor->size(3), p.width = tensor->size(4);
  p.phases = phases, p.first = first, p.line = line;
  const int64_t tasks = tensor->size(0) * p.M * p.rows;
  Tensor result = zeros_like_options(*tensor, {tasks, phases, p.width, line}, COMPUTED<T>);
  p.to = static_cast<T*>(result.data_ptr());
  using Range = void (*)(const Packing<T>&, int64_t, int64_t);
  const Range range = BEST(Range, pack_range);
  torch::stable::parallel_for(0, tasks, 16, [&](int64_t begin, int64_t end) { range(p, begin, end); });
  return result;
}

template <typename T>
const T* data(const Tensor& tensor) {
  return static_cast<const T*>(tensor.data_ptr());
}

// Returns the problem with everything but its packed operands and outputs.
template <typename T>
Problem<T> described(const std::optional<Tensor>& query, const Tensor& value,
                     const std::optional<Tensor>& position_logits, const Tensor& log_sum_exp,
                     const std::vector<int64_t>& geometry, const std::string& border, double scale) {
  Problem<T> p;
  p.B = log_sum_exp.size(0), p.M = log_sum_exp.size(1), p.Hq = log_sum_exp.size(2);
  p.Wq = log_sum_exp.size(3), p.Hk = value.size(2), p.Wk = value.size(3), p.dv = value.size(4);
  p.d = query.has_value() ? query->size(4) : 0;
  for (int axis = 0; axis < 2; ++axis) {
    p.kernel[axis] = geometry[axis], p.stride[axis] = geometry[2 + axis];
    p.padding[axis] = geometry[4 + axis], p.dilation[axis] = geometry[6 + axis];
    p.window[axis] = p.kernel[axis];
  }
  p.border = border_of(border), p.scale = T(scale), p.tile = baseline::TILE;
  if (p.inside()) {  // narrow tiles, since one at the edge has more taps
    p.kernel[1] = 2 * p.window[1] - 1, p.padding[1] = (p.window[1] - 1) * p.dilation[1],
    p.tile = baseline::NARROW_TILE;
  }
  p.value_view = View<T>(value), p.position_logits = View<T>(position_logits),
  p.log_sum_exp = View<T>(log_sum_exp);
  return p;
}

// A problem that owns the packed tensors it points into.
template <typename T>
struct Packed {
  Problem<T> p;
  std::vector<Tensor> owned;
  std::vector<T> outside;

  Packed(const Problem<T>& problem, const std::optional<Tensor>& query, const std::optional<Tensor>& key,
         const Tensor& value)
      : p(problem) {
    const int64_t lanes = 64 / sizeof(T), step = p.stride[1];
    auto whole = [&](int64_t n) { return (n + lanes - 1) / lanes * lanes; };
    p.margin = (p.kernel[1] - 1) * p.dilation[1] / step;
    const int64_t keys = (p.Wk + p.padding[1] + step - 1) / step;
    p.line = whole(p.margin + std::max(whole(p.Wq), whole(keys)));
    p.value = keep(packed<T>(value, step, p.padding[1], p.line));
    if (query.has_value()) {
      p.key = keep(packed<T>(key, step, p.padding[1], p.line));
      p.query = keep(packed<T>(query, 1, p.margin, p.line));
    }
    if (p.border == Border::kExclude) {
      outside.assign(step * p.line, -std::numeric_limits<T>::infinity());
      for (int64_t x = 0; x < p.Wk; ++x) {
        const int64_t column = x + p.padding[1];
        outside[column % step * p.line + column / step] = T(0);
      }
      p.outside = outside.data();
    }
    if (p.inside()) {
      outside.assign(p.kernel[1] * p.line, -std::numeric_limits<T>::infinity());
      for (int64_t x = 0; x < p.Wq; ++x)
        for (int64_t j = 0; j < p.window[1]; ++j)
          outside[(p.first_tap(x) + j) * p.line + p.margin + x] = T(0);
      p.outside = outside.data();
    }
  }

  const T* keep(Tensor tensor) {
    owned.push_back(tensor);
    return data<T>(tensor);
  }
};

template <typename T>
void forward(const std::optional<Tensor>& query, const std::optional<Tensor>& key, const Tensor& value,
             const std::optional<Tensor>& position_logits, const Tensor& output, const Tensor& log_sum_exp,
             const std::vector<int64_t>& geometry, const std::string& border, double scale) {
  auto problem = described<T>(query, value, position_logits, log_sum_exp, geometry, border, scale);
  problem.output = View<T>(output);
  const int64_t tiles = (problem.Wq + problem.tile - 1) / problem.tile;
  const int64_t tasks = problem.B * problem.M * problem.Hq * tiles;
  if (problem.predicted()) return run(Stage::PREDICTED, problem, tasks);
  run(Stage::FORWARD, Packed<T>(problem, query, key, value).p, tasks);
}

template <typename T>
void backward(const Tensor& grad_output, const std::optional<Tensor>& query, const std::optional<Tensor>& key,
              const Tensor& value, const std::optional<Tensor>& position_logits, const Tensor& log_sum_exp,
              const std::optional<Tensor>& grad_query, const std::optional<Tensor>& grad_key,
              const std::optional<Tensor>& grad_value, const std::optional<Tensor>& grad_position_logits,
              const std::vector<int64_t>& geometry, const std::string& border, double scale) {
  Packed<T> packed_problem(described<T>(query, value, position_logits, log_sum_exp, geometry, border, scale),
                           query, key, value);
  auto& p = packed_problem.p;
  p.gradient = packed_problem.keep(packed<T>(grad_output, 1, p.margin, p.line));
  p.grad_query = View<T>(grad_query), p.grad_key = View<T>(grad_key), p.grad_value = View<T>(grad_value);
  p.grad_position_logits = View<T>(grad_position_logits);
  p.logits_wanted = p.grad_query.data || p.grad_key.data || p.grad_position_logits.data;
  // Process as many heads at a time as fit into a bounded workspace, so that small maps occupy all threads as
  // well. The workspace starts as zeros because margins are read but never written.
  constexpr int64_t WORKSPACE = int64_t(1) << 23;  // elements
  const int64_t all = p.B * p.M, one = p.Hq * p.taps() * p.line;
  const bool keys_wanted = p.grad_key.data || p.grad_value.data;
  const int64_t heads =
      keys_wanted ? std::clamp(WORKSPACE / std::max(one, int64_t(1)), int64_t(1), all) : all;
  Tensor weights, slopes;
  if (keys_wanted) {
    weights = zeros_like_options(value, {heads, one}, COMPUTED<T>);
    slopes = zeros_like_options(value, {heads, one}, COMPUTED<T>);
    p.weights = static_cast<T*>(weights.data_ptr()), p.slopes = static_cast<T*>(slopes.data_ptr());
  }
  const int64_t tiles = (p.Wq + p.tile - 1) / p.tile;
  const int64_t columns = (p.Wk + p.padding[1] + p.stride[1] - 1) / p.stride[1];
  const int64_t key_tiles = (columns + p.tile - 1) / p.tile * p.stride[1];
  for (int64_t first = 0; first < all; first += heads) {
    p.first_head = first, p.heads = std::min(heads, all - first);
    run(Stage::QUERIES, p, p.heads * p.Hq * tiles);
    if (keys_wanted) run(Stage::KEYS, p, p.heads * p.Hk * key_tiles);
  }
}

void forward_entry(std::optional<Tensor> query, std::optional<Tensor> key, Tensor value,
                   std::optional<Tensor> position_logits, Tensor output, Tensor log_sum_exp,
                   std::vector<int64_t> geometry, std::string border, double scale) {
  auto* typed = value.scalar_type() == ScalarType::Double ? forward<double> : forward<float>;
  typed(query, key, value, position_logits, output, log_sum_exp, geometry, border, scale);
}

void backward_entry(Tensor grad_output, std::optional<Tensor> query, std::optional<Tensor> key, Tensor value,
                    std::optional<Tensor> position_logits, Tensor log_sum_exp,
                    std::optional<Tensor> grad_query, std::optional<Tensor> grad_key,
                    std::optional<Tensor> grad_value, std::optional<Tensor> grad_position_logits,
                    std::vector<int64_t> geometry, std::string border, double scale) {
  auto* typed = value.scalar_type() == ScalarType::Double ? backward<double> : backward<float>;
  typed(grad_output, query, key, value, position_logits, log_sum_exp, grad_query, grad_key, grad_value,
        grad_position_logits, geometry, border, scale);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attn_plugins, CPU, m) {
  m.impl("window_attention_forward_", TORCH_BOX(&forward_entry));
  m.impl("window_attention_backward_", TORCH_BOX(&backward_entry));
}
