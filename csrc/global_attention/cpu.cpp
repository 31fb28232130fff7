// Global attention on the CPU: everything between the projections in one pass over blocks of queries, with
// one parallel region per call. This file holds the entry points and the choice of the instruction set; the
// arithmetic is in cpu_kernel.h.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>
#include <optional>
#include <vector>

#include "common/tensor_ops.h"
#include "common/vectors.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t BLOCK = 48;  // queries of a block, whole tiles of products; the last one has 24 to 71
constexpr int64_t TASKS = 16;  // of the backward, at least, for threads to share

int64_t padded(int64_t size, int64_t bytes) {
  const int64_t lanes = 64 / bytes;
  return (size + lanes - 1) / lanes * lanes;
}

// Operands of one call; absent ones are null. Packed matrices and sums are contiguous, one after another for
// each (b, m).
template <typename T>
struct Problem {
  int64_t B, M, Hq, Wq, Hk, Wk, d = 0, d_padded = 0, dv = 0, dv_padded = 0, keys_padded = 0, slots = 1;
  int64_t blocks = 1;  // of a head's queries
  T scale;
  View<T> query, key, value, row, column, key_logits, log_sum_exp, output, grad_output;
  View<T> grad_query, grad_key, grad_value, grad_row, grad_column;
  T* grad_key_logits = nullptr;  // (keys)
  T* key_columns = nullptr;      // (d, keys_padded)
  T* key_rows = nullptr;         // (keys, d_padded); if null, the query's gradient uses key_columns
  T* value_rows = nullptr;       // (keys, dv_padded); the forward has one of the two
  T* value_columns = nullptr;    // (dv, keys_padded)
  T* key_sums = nullptr;         // (slots, d, keys_padded)
  T* value_sums = nullptr;       // (slots, dv, keys_padded)
  T* key_logits_sums = nullptr;  // (slots, keys)
  bool logits_wanted = false;

  // The queries of a block: the last one takes the rest, since few queries would read all keys for
  // themselves.
  int64_t count(int64_t block) const { return block + 1 < blocks ? BLOCK : Hq * Wq - block * BLOCK; }
};

#define KERNEL "global_attention/cpu_kernel.h"
#include "common/each_target.h"

template <typename T>
using Range = void (*)(const Problem<T>&, int64_t, int64_t);

template <typename T>
void run(const Problem<T>& p, int64_t tasks, Range<T> range) {
  torch::stable::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) { range(p, begin, end); });
}

template <typename T>
T* pointer(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? static_cast<T*>(tensor->data_ptr()) : nullptr;
}

// Memory of one call, which torch's allocator counts.
template <typename T>
struct Memory {
  const Tensor& like;
  int64_t heads;
  std::vector<Tensor> owned;

  T* operator()(int64_t size) {
    owned.push_back(attn_plugins::empty_like_options(like, {heads * size}));
    return static_cast<T*>(owned.back().data_ptr());
  }
};

// Rows need so much padding at this width that products over the keys are cheaper.
bool is_narrow(int64_t width, int64_t padded) {
  return 4 * width <= 3 * padded;
}

template <typename T>
Problem<T> problem(const std::optional<Tensor>& query, const std::optional<Tensor>& key, const Tensor& value,
                   const std::optional<Tensor>& row, const std::optional<Tensor>& column,
                   const std::optional<Tensor>& key_logits, const Tensor& log_sum_exp, double scale) {
  Problem<T> p;
  p.B = log_sum_exp.size(0), p.M = log_sum_exp.size(1), p.Hq = log_sum_exp.size(2),
  p.Wq = log_sum_exp.size(3);
  p.Hk = value.size(2), p.Wk = value.size(3), p.scale = T(scale);
  p.query = View<T>(query), p.key = View<T>(key), p.value = View<T>(value);
  p.row = View<T>(row), p.column = View<T>(column), p.key_logits = View<T>(key_logits);
  p.log_sum_exp = View<T>(log_sum_exp);
  if (query.has_value()) p.d = query->size(4);
  p.dv = value.size(4);
  p.d_padded = padded(p.d, sizeof(T)), p.dv_padded = padded(p.dv, sizeof(T));
  p.keys_padded = padded(p.Hk * p.Wk, sizeof(T));
  p.blocks = std::max<int64_t>(1, (p.Hq * p.Wq + BLOCK / 2) / BLOCK);
  return p;
}

template <typename T>
void forward(const std::optional<Tensor>& query, const std::optional<Tensor>& key, const Tensor& value,
             const std::optional<Tensor>& row, const std::optional<Tensor>& column,
             const std::optional<Tensor>& key_logits, const Tensor& output, const Tensor& log_sum_exp,
             double scale) {
  auto p = problem<T>(query, key, value, row, column, key_logits, log_sum_exp, scale);
  const int64_t keys = p.Hk * p.Wk, heads = p.B * p.M;
  Memory<T> memory{value, heads, {}};
  p.output = View<T>(output);
  if (p.key.data) p.key_columns = memory(p.d * p.keys_padded);
  if (is_narrow(p.dv, p.dv_padded))
    p.value_columns = memory(p.dv * p.keys_padded);
  else
    p.value_rows = memory(keys * p.dv_padded);
  run(p, heads, BEST(Range<T>, pack_range));
  run(p, heads * p.blocks, BEST(Range<T>, forward_range));
}

template <typename T>
void backward(const Tensor& grad_output, const std::optional<Tensor>& query, const std::optional<Tensor>& key,
              const Tensor& value, const std::optional<Tensor>& row, const std::optional<Tensor>& column,
              const std::optional<Tensor>& key_logits, const Tensor& log_sum_exp,
              const std::optional<Tensor>& grad_query, const std::optional<Tensor>& grad_key,
              const std::optional<Tensor>& grad_value, const std::optional<Tensor>& grad_row,
              const std::optional<Tensor>& grad_column, const std::optional<Tensor>& grad_key_logits,
              double scale) {
  auto p = problem<T>(query, key, value, row, column, key_logits, log_sum_exp, scale);
  const int64_t keys = p.Hk * p.Wk, heads = p.B * p.M;
  Memory<T> memory{value, heads, {}};
  p.grad_output = View<T>(grad_output), p.grad_query = View<T>(grad_query);
  p.grad_key = View<T>(grad_key), p.grad_value = View<T>(grad_value);
  p.grad_row = View<T>(grad_row), p.grad_column = View<T>(grad_column);
  p.grad_key_logits = pointer<T>(grad_key_logits);
  p.logits_wanted =
      p.grad_query.data || p.grad_key.data || p.grad_row.data || p.grad_column.data || p.grad_key_logits;
  p.slots = std::max<int64_t>(1, (TASKS + heads - 1) / std::max<int64_t>(heads, 1));
  if (p.key.data) p.key_columns = memory(p.d * p.keys_padded);
  if (p.grad_query.data && !is_narrow(p.d, p.d_padded)) p.key_rows = memory(keys * p.d_padded);
  p.value_columns = memory(p.dv * p.keys_padded);
  if (p.grad_key.data) p.key_sums = memory(p.slots * p.d * p.keys_padded);
  if (p.grad_value.data) p.value_sums = memory(p.slots * p.dv * p.keys_padded);
  if (p.grad_key_logits) p.key_logits_sums = memory(p.slots * keys);
  run(p, heads, BEST(Range<T>, pack_range));
  run(p, heads * p.slots, BEST(Range<T>, backward_range));
  run(p, heads, BEST(Range<T>, finish_range));
}

void forward_entry(std::optional<Tensor> query, std::optional<Tensor> key, Tensor value,
                   std::optional<Tensor> row, std::optional<Tensor> column, std::optional<Tensor> key_logits,
                   Tensor output, Tensor log_sum_exp, double scale) {
  auto* typed = output.scalar_type() == ScalarType::Double ? forward<double> : forward<float>;
  typed(query, key, value, row, column, key_logits, output, log_sum_exp, scale);
}

void backward_entry(Tensor grad_output, std::optional<Tensor> query, std::optional<Tensor> key, Tensor value,
                    std::optional<Tensor> row, std::optional<Tensor> column, std::optional<Tensor> key_logits,
                    Tensor log_sum_exp, std::optional<Tensor> grad_query, std::optional<Tensor> grad_key,
                    std::optional<Tensor> grad_value, std::optional<Tensor> grad_row,
                    std::optional<Tensor> grad_column, std::optional<Tensor> grad_key_logits, double scale) {
  auto* typed = value.scalar_type() == ScalarType::Double ? backward<double> : backward<float>;
  typed(grad_output, query, key, value, row, column, key_logits, log_sum_exp, grad_query, grad_key,
        grad_value, grad_row, grad_column, grad_key_logits, scale);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attn_plugins, CPU, m) {
  m.impl("global_attention_forward_", TORCH_BOX(&forward_entry));
  m.impl("global_attention_backward_", TORCH_BOX(&backward_entry));
}
