// Transposition of matrices on CUDA, which converts maps between memory formats.
#include <torch/csrc/stable/library.h>

#include "transpose.cuh"

namespace attn_plugins {
namespace {

Tensor transposed(const Tensor& in, std::optional<Tensor> addend, std::optional<Tensor> scale) {
  const OnDeviceOf guard(in);
  return transposed_matrices(in, addend, scale);
}

}  // namespace
}  // namespace attn_plugins

STABLE_TORCH_LIBRARY_IMPL(attn_plugins, CUDA, m) {
  m.impl("transposed_kernel", TORCH_BOX(&attn_plugins::transposed));
}
