// Sequence attention on the CPU: the entry points and the choice of the instruction set. The arithmetic is in
// cpu_kernel.h.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>
#include <optional>
#include <type_traits>
#include <vector>

#include "common/vectors.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Operands of one call. Views are (B, M, 1, rows, width); gradients that are accumulated into are
// (B or groups, M, slots, rows, width). A stride of 0 broadcasts. A group is a run of batch entries that one
// task processes, so that they can add to the same gradients.
template <typename T>
struct Problem {
  int64_t B, M, queries, S, K = 0, left = 0, start, d = 0, d_padded = 0, dv, dv_padded, slots, groups;
  int64_t line;  // elements between the logits of consecutive queries
  bool causal, logits_wanted = false;
  bool band_by_group = false, outside_by_group = false, position_by_group = false;
  bool direct = false;  // read keys and values in place: too few queries to pay for packing
  T scale;
  View<T> query, key, value, band, outside, position, log_sum_exp, output;
  View<T> grad_output, grad_query, grad_key, grad_value, grad_band, grad_outside, grad_position;
  const bool* padding = nullptr;      // (B, S), true for padding
  const int32_t* segments = nullptr;  // (period, S), ids of which a query sees its own
  int64_t period = 1;                 // of batch entries
};

#define KERNEL "sequence_attention/cpu_kernel.h"
#include "common/each_target.h"

template <typename T>
void run(const Problem<T>& p, bool backward) {
  using Range = void (*)(const Problem<T>&, int64_t, int64_t);
  const Range range = backward ? BEST(Range, backward_range) : BEST(Range, forward_range);
  torch::stable::parallel_for(0, p.groups * p.M * p.slots, 1,
                              [&](int64_t begin, int64_t end) { range(p, begin, end); });
}

template <typename T>
Problem<T> problem(const std::optional<Tensor>& query, const std::optional<Tensor>& key, const Tensor& value,
                   const std::optional<Tensor>& band, const std::optional<Tensor>& outside,
                   const std::optional<Tensor>& position, const std::optional<Tensor>& key_padding_mask,
                   const std::optional<Tensor>& segment_ids, const Tensor& log_sum_exp, int64_t start,
                   bool causal, double scale, int64_t slots) {
  constexpr int64_t lanes = 64 / sizeof(T);  // of the widest vector
  const auto padded = [](int64_t size) { return (size + lanes - 1) / lanes * lanes; };
  Problem<T> p;
  p.B = value.size(0), p.M = value.size(1), p.S = value.size(3), p.dv = value.size(4);
  p.queries = log_sum_exp.size(3);
  p.start = start, p.causal = causal, p.scale = static_cast<T>(scale), p.slots = slots, p.groups = p.B;
  p.query = View<T>(query), p.key = View<T>(key), p.value = View<T>(value);
  p.band = View<T>(band), p.outside = View<T>(outside), p.position = View<T>(position);
  p.log_sum_exp = View<T>(log_sum_exp);
  if (query.has_value()) p.d = query->size(4);
  if (band.has_value()) p.K = band->size(4), p.left = causal ? p.K - 1 : p.K / 2;
  if (key_padding_mask.has_value()) p.padding = static_cast<const bool*>(key_padding_mask->data_ptr());
  if (segment_ids.has_value()) {
    p.segments = static_cast<const int32_t*>(segment_ids->data_ptr());
    p.period = segment_ids->size(0);
  }
  p.d_padded = padded(p.d), p.dv_padded = padded(p.dv);
  // An odd number of cache lines spreads the logits of one key over many cache sets.
  p.line = padded(p.S) / lanes % 2 ? padded(p.S) : padded(p.S) + lanes;
  return p;
}

template <typename T>
void forward(const std::optional<Tensor>& query, const std::optional<Tensor>& key, const Tensor& value,
             const std::optional<Tensor>& band, const std::optional<Tensor>& outside,
             const std::optional<Tensor>& position, const std::optional<Tensor>& key_padding_mask,
             const std::optional<Tensor>& segment_ids, const Tensor& output, const Tensor& log_sum_exp,
             int64_t start, bool causal, double scale, int64_t slots) {
  auto p = problem<T>(query, key, value, band, outside, position, key_padding_mask, segment_ids, log_sum_exp,
                      start, causal, scale, slots);
  p.output = View<T>(output);
  p.direct = p.queries <= 4 && !p.value.bfloat16 && p.value.stride[4] == 1 &&
             (!p.query.data || p.key.stride[4] == 1);
  run(p, false);
}

template <typename T>
void backward(const Tensor& grad_output, const std::optional<Tensor>& query, const std::optional<Tensor>& key,
              const Tensor& value, const std::optional<Tensor>& band, const std::optional<Tensor>& outside,
              const std::optional<Tensor>& position, const std::optional<Tensor>& key_padding_mask,
              const std::optional<Tensor>& segment_ids, const Tensor& log_sum_exp,
              const std::optional<Tensor>& grad_query, const std::optional<Tensor>& grad_key,
              const std::optional<Tensor>& grad_value, const std::optional<Tensor>& grad_band,
              const std::optional<Tensor>& grad_outside, const std::optional<Tensor>& grad_position,
              int64_t start, bool causal, double scale, int64_t slots, int64_t groups) {
  auto p = problem<T>(query, key, value, band, outside, position, key_padding_mask, segment_ids, log_sum_exp,
                      start, causal, scale, slots);
  p.grad_output = View<T>(grad_output);
  p.grad_query = View<T>(grad_query), p.grad_key = View<T>(grad_key), p.grad_value = View<T>(grad_value);
  p.grad_band = View<T>(grad_band), p.grad_outside = View<T>(grad_outside);
  p.grad_position = View<T>(grad_position);
  p.groups = groups;
  const auto by_group = [&](const std::optional<Tensor>& grad) {
    return grad.has_value() && grad->size(0) == groups;
  };
  p.band_by_group = by_group(grad_band), p.outside_by_group = by_group(grad_outside);
  p.position_by_group = by_group(grad_position);
  p.logits_wanted =
      p.grad_query.data || p.grad_key.data || p.grad_band.data || p.grad_outside.data || p.grad_position.data;
  run(p, true);
}

void forward_entry(std::optional<Tensor> query, std::optional<Tensor> key, Tensor value,
                   std::optional<Tensor> band, std::optional<Tensor> outside, std::optional<Tensor> position,
                   std::optional<Tensor> key_padding_mask, std::optional<Tensor> segment_ids, Tensor output,
                   Tensor log_sum_exp, int64_t start, bool causal, double scale, int64_t slots) {
  auto* typed = value.scalar_type() == ScalarType::Double ? forward<double> : forward<float>;
  typed(query, key, value, band, outside, position, key_padding_mask, segment_ids, output, log_sum_exp, start,
        causal, scale, slots);
}

void backward_entry(Tensor grad_output, std::optional<Tensor> query, std::optional<Tensor> key, Tensor value,
                    std::optional<Tensor> band, std::optional<Tensor> outside, std::optional<Tensor> position,
                    std::optional<Tensor> key_padding_mask, std::optional<Tensor> segment_ids,
                    Tensor log_sum_exp, std::optional<Tensor> grad_query, std::optional<Tensor> grad_key,
                    std::optional<Tensor> grad_value, std::optional<Tensor> grad_band,
                    std::optional<Tensor> grad_outside, std::optional<Tensor> grad_position, int64_t start,
                    bool causal, double scale, int64_t slots, int64_t groups) {
  auto* typed = value.scalar_type() == ScalarType::Double ? backward<double> : backward<float>;
  typed(grad_output, query, key, value, band, outside, position, key_padding_mask, segment_ids, log_sum_exp,
        grad_query, grad_key, grad_value, grad_band, grad_outside, grad_position, start, causal, scale, slots,
        groups);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attn_plugins, CPU, m) {
  m.impl("sequence_attention_forward_", TORCH_BOX(&forward_entry));
  m.impl("sequence_attention_backward_", TORCH_BOX(&backward_entry));
}
