// Shared by deformable attention on CPUs and CUDA: the operator, around kernels that take contiguous tensors
// of few dtypes.
#pragma once

#include <tuple>

#include "common/tensor_ops.h"

namespace attn_plugins {

// The dtype of sums over `t`.
inline ScalarType sum_type(const Tensor& t) {
  return t.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// A `Kernels` class provides:
//   static ScalarType compute_type(value)
//       dtype of the values that kernels read, and of the outputs that they write
//   static Tensor readable(value)
//       value, or a copy whose strides kernels take
//   static Tensor sums_of(value)
//       memory for the value's gradient, of dtype sum_type
//   static void forward(value, locations, weights, output, shapes, points, propagates_nan)
//   static void backward(grad_output, value, locations, weights, grad_value, grad_locations, grad_weights,
//                        shapes, points, propagates_nan)
//       gradients that are not needed are undefined
// Locations and weights, and their gradients, are contiguous and both of dtype compute_type or sum_type;
// weights are (B, Q, M, P).

// The tensors of a call as kernels take them: locations and weights as they are, unless their dtypes differ.
template <class Kernels>
struct __attribute__((visibility("hidden"))) AttentionOperands {
  Tensor value, locations, weights;

  AttentionOperands(const Tensor& value_, const Tensor& locations_, const Tensor& weights_)
      : value(Kernels::readable(to_dtype(value_, Kernels::compute_type(value_)))) {
    const ScalarType type = value.scalar_type();
    const bool as_they_are = locations_.scalar_type() == type && weights_.scalar_type() == type;
    const ScalarType common = as_they_are ? type : sum_type(value);
    locations = as_contiguous(to_dtype(locations_, common));
    weights = as_contiguous(to_dtype(weights_, common));
    if (weights.dim() == 4) return;
    Sizes sizes{weights.size(0), weights.size(1), weights.size(2), 1};
    for (int64_t axis = 3; axis < weights.dim(); ++axis) sizes[3] *= weights.size(axis);
    weights = view_of(weights, sizes, contiguous_strides(sizes));
  }
};

template <class Kernels>
Tensor deformable_attention_driver(const Tensor& value, const Tensor& locations, const Tensor& weights,
                                   std::vector<int64_t> shapes, std::vector<int64_t> points,
                                   bool propagates_nan) {
  const AttentionOperands<Kernels> of(value, locations, weights);
  const Tensor output =
      empty_like_options(of.value, {value.size(0), weights.size(1), value.size(2) * value.size(3)});
  if (output.numel() > 0)
    Kernels::forward(of.value, of.locations, of.weights, output, shapes, points, propagates_nan);
  return to_dtype(output, value.scalar_type());
}

// Gradients that are not needed are returned as empty tensors.
template <class Kernels>
std::tuple<Tensor, Tensor, Tensor> deformable_attention_backward_driver(
    const Tensor& grad_output, const Tensor& value, const Tensor& locations, const Tensor& weights,
    std::vector<int64_t> shapes, std::vector<int64_t> points, bool propagates_nan, bool needs_value,
    bool needs_locations, bool needs_weights) {
  const AttentionOperands<Kernels> of(value, locations, weights);
  const Tensor gradient = as_contiguous(to_dtype(grad_output, of.value.scalar_type()));
  const Tensor grad_value = needs_value ? Kernels::sums_of(of.value) : Tensor();
  const Tensor grad_locations =
      needs_locations ? empty_like_options(of.locations, sizes_of(locations)) : Tensor();
  const Tensor grad_weights = needs_weights ? empty_like_options(of.weights, sizes_of(weights)) : Tensor();
  Kernels::backward(gradient, of.value, of.locations, of.weights, grad_value, grad_locations, grad_weights,
                    shapes, points, propagates_nan);
  const auto result = [](const Tensor& grad, const Tensor& term) {
    return grad.defined() ? to_dtype(grad, term.scalar_type()) : empty_like_options(term, {0});
  };
  return {result(grad_value, value), result(grad_locations, locations), result(grad_weights, weights)};
}

}  // namespace attn_plugins
