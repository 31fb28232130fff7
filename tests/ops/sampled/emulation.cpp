// csrc/sampled/cuda.cuh on CPU tensors: the operators attn_plugins_emulated::deform_conv2d and its
// backward.
#include "cuda_emulator.h"  // first

#include "sampled/cuda.cuh"

STABLE_TORCH_LIBRARY(attn_plugins_emulated, m) {
  m.def(
      "deform_conv2d(Tensor input, Tensor offset, Tensor weight, Tensor? bias, Tensor? mask, int[] stride, "
      "int[] padding, int[] dilation, int groups, int offset_groups) -> Tensor");
  m.def(
      "deform_conv2d_backward(Tensor grad_output, Tensor input, Tensor offset, Tensor weight, Tensor? mask, "
      "int[] stride, int[] padding, int[] dilation, int groups, int offset_groups, bool needs_input, "
      "bool needs_offset, bool needs_weight) -> (Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(attn_plugins_emulated, CPU, m) {
  using namespace attn_plugins;
  m.impl("deform_conv2d", TORCH_BOX(&deform_conv2d_driver<CudaKernels>));
  m.impl("deform_conv2d_backward", TORCH_BOX(&deform_conv2d_backward_driver<CudaKernels>));
}
