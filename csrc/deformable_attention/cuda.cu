// Deformable attention on CUDA: the entry points of cuda.cuh's kernels.
#include <torch/csrc/stable/library.h>

#include <limits>
#include <optional>
#include <vector>

#include "cuda.cuh"

namespace attn_plugins {
namespace {

void forward_entry(Tensor value, Tensor locations, Tensor weights, Tensor output, std::vector<int64_t> shapes,
                   std::vector<int64_t> points) {
  const OnDeviceOf guard(value);
  deformable_attention_forward(value, locations, weights, output, shapes, points);
}

void backward_entry(Tensor grad_output, Tensor value, Tensor locations, Tensor weights,
                    std::optional<Tensor> grad_value, std::optional<Tensor> grad_locations,
                    std::optional<Tensor> grad_weights, std::vector<int64_t> shapes,
                    std::vector<int64_t> points) {
  const OnDeviceOf guard(value);
  deformable_attention_backward(grad_output, value, locations, weights, grad_value, grad_locations,
                                grad_weights, shapes, points);
}

}  // namespace
}  // namespace attn_plugins

STABLE_TORCH_LIBRARY_IMPL(attn_plugins, CUDA, m) {
  m.impl("deformable_attention_forward_", TORCH_BOX(&attn_plugins::forward_entry));
  m.impl("deformable_attention_backward_", TORCH_BOX(&attn_plugins::backward_entry));
}
