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

#include "common/vectors.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Operands of one call; absent ones are null. Packed matrices are contiguous, one after another for each
// (b, m).
template <typename T>
struct Problem {
  int64_t B, M, Hq, Wq, Hk, Wk, d = 0, d_padded = 0, dv = 0, dv_padded = 0, keys_padded = 0, slots = 1;
  View<T> query, row, column, key_logits, log_sum_exp, output, grad_output, grad_query, grad_row, grad_column;
  const T* key_columns = nullptr;    // (d, keys_padded)
  const T* key_rows = nullptr;       // (keys, d_padded); if null, the query's gradient uses key_columns
  const T* value_rows = nullptr;     // (keys, dv_padded); the forward has one of the two
  const T* value_columns = nullptr;  // (dv, keys_padded)
  T* grad_key = nullptr;             // (slots, d, keys_padded), +=
  T* grad_value = nullptr;           // (slots, dv, keys_padded), +=
  T* grad_key_logits = nullptr;      // (slots, keys), +=
  bool logits_wanted = false;
};

#define KERNEL "global_attention/cpu_kernel.h"
#include "common/each_target.h"

template <typename T>
void run(const Problem<T>& p, bool backward) {
  using Range = void (*)(const Problem<T>&, int64_t, int64_t);
  const Range range = backward ? BEST(Range, backward_range) : BEST(Range, forward_range);
  const int64_t blocks = (p.Hq * p.Wq + baseline::BLOCK - 1) / baseline::BLOCK;
  const int64_t tasks = p.B * p.M * (backward ? p.slots : blocks);
  torch::stable::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) { range(p, begin, end); });
}

template <typename T>
T* pointer(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? static_cast<T*>(tensor->data_ptr()) : nullptr;
}

template <typename T>
Problem<T> problem(const std::optional<Tensor>& query, const std::optional<Tensor>& key_columns,
                   const std::optional<Tensor>& row, const std::optional<Tensor>& column,
                   const std::optional<Tensor>& key_logits, const Tensor& log_sum_exp, int64_t Hk,
                   int64_t keys) {
  Problem<T> p;
  p.B = log_sum_exp.size(0), p.M = log_sum_exp.size(1), p.Hq = log_sum_exp.size(2),
  p.Wq = log_sum_exp.size(3);
  p.Hk = Hk, p.Wk = keys / Hk;
  p.query = View<T>(query), p.row = View<T>(row), p.column = View<T>(column),
  p.key_logits = View<T>(key_logits);
  p.log_sum_exp = View<T>(log_sum_exp);
  p.key_columns = pointer<T>(key_columns);
  if (query.has_value()) p.d = query->size(4);
  // As packed: rounded up to whole vectors of 64 bytes.
  const int64_t lanes = 64 / sizeof(T);
  p.d_padded = (p.d + lanes - 1) / lanes * lanes;
  p.keys_padded = (keys + lanes - 1) / lanes * lanes;
  return p;
}

template <typename T>
void forward(const std::optional<Tensor>& query, const std::optional<Tensor>& key_columns,
             const std::optional<Tensor>& value_rows, const std::optional<Tensor>& value_columns,
             const std::optional<Tensor>& row, const std::optional<Tensor>& column,
             const std::optional<Tensor>& key_logits, const Tensor& output, const Tensor& log_sum_exp,
             int64_t keys, int64_t Hk) {
  auto p = problem<T>(query, key_columns, row, column, key_logits, log_sum_exp, Hk, keys);
  p.value_rows = pointer<const T>(value_rows), p.value_columns = pointer<const T>(value_columns);
  p.output = View<T>(output);
  const int64_t lanes = 64 / sizeof(T);
  p.dv = output.size(4), p.dv_padded = (p.dv + lanes - 1) / lanes * lanes;
  run(p, false);
}

template <typename T>
void backward(const Tensor& grad_output, const std::optional<Tensor>& query,
              const std::optional<Tensor>& key_columns, const std::optional<Tensor>& key_rows,
              const Tensor& value_columns, const std::optional<Tensor>& row,
              const std::optional<Tensor>& column, const std::optional<Tensor>& key_logits,
              const Tensor& log_sum_exp, const std::optional<Tensor>& grad_query,
              const std::optional<Tensor>& grad_key, const std::optional<Tensor>& grad_value,
              const std::optional<Tensor>& grad_row, const std::optional<Tensor>& grad_column,
              const std::optional<Tensor>& grad_key_logits, int64_t keys, int64_t Hk, int64_t slots) {
  auto p = problem<T>(query, key_columns, row, column, key_logits, log_sum_exp, Hk, keys);
  p.key_rows = pointer<const T>(key_rows);
  p.value_columns = static_cast<const T*>(value_columns.data_ptr());
  p.grad_output = View<T>(grad_output), p.grad_query = View<T>(grad_query);
  p.grad_row = View<T>(grad_row), p.grad_column = View<T>(grad_column);
  p.grad_key = pointer<T>(grad_key), p.grad_value = pointer<T>(grad_value);
  p.grad_key_logits = pointer<T>(grad_key_logits);
  const int64_t lanes = 64 / sizeof(T);
  p.dv = grad_output.size(4), p.dv_padded = (p.dv + lanes - 1) / lanes * lanes;
  p.slots = slots;
  p.logits_wanted =
      p.grad_query.data || p.grad_key || p.grad_row.data || p.grad_column.data || p.grad_key_logits;
  run(p, true);
}

void forward_entry(std::optional<Tensor> query, std::optional<Tensor> key_columns,
                   std::optional<Tensor> value_rows, std::optional<Tensor> value_columns,
                   std::optional<Tensor> row, std::optional<Tensor> column, std::optional<Tensor> key_logits,
                   Tensor output, Tensor log_sum_exp, int64_t keys, int64_t Hk) {
  auto* typed = output.scalar_type() == ScalarType::Double ? forward<double> : forward<float>;
  typed(query, key_columns, value_rows, value_columns, row, column, key_logits, output, log_sum_exp, keys,
        Hk);
}

void backward_entry(Tensor grad_output, std::optional<Tensor> query, std::optional<Tensor> key_columns,
                    std::optional<Tensor> key_rows, Tensor value_columns, std::optional<Tensor> row,
                    std::optional<Tensor> column, std::optional<Tensor> key_logits, Tensor log_sum_exp,
                    std::optional<Tensor> grad_query, std::optional<Tensor> grad_key,
                    std::optional<Tensor> grad_value, std::optional<Tensor> grad_row,
                    std::optional<Tensor> grad_column, std::optional<Tensor> grad_key_logits, int64_t keys,
                    int64_t Hk, int64_t slots) {
  auto* typed = value_columns.scalar_type() == ScalarType::Double ? backward<double> : backward<float>;
  typed(grad_output, query, key_columns, key_rows, value_columns, row, column, key_logits, log_sum_exp,
        grad_query, grad_key, grad_value, grad_row, grad_column, grad_key_logits, keys, Hk, slots);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attn_plugins, CPU, m) {
  m.impl("global_attention_forward_", TORCH_BOX(&forward_entry));
  m.impl("global_attention_backward_", TORCH_BOX(&backward_entry));
}
