// csrc/sampled/*.cuh on CPU tensors: operators of attn_plugins_emulated, as schema.cpp has them.
#include "cuda_emulator.h"  // first

#include "sampled/cuda.cuh"
#include "sampled/cuda_attention.cuh"

STABLE_TORCH_LIBRARY(attn_plugins_emulated, m) {
  m.def(
      "deform_conv2d(Tensor input, Tensor offset, Tensor weight, Tensor? bias, Tensor? mask, int[] stride, "
      "int[] padding, int[] dilation, int groups, int offset_groups) -> Tensor");
  m.def(
      "deform_conv2d_backward(Tensor grad_output, Tensor input, Tensor offset, Tensor weight, Tensor? mask, "
      "int[] stride, int[] padding, int[] dilation, int groups, int offset_groups, bool needs_input, "
      "bool needs_offset, bool needs_weight) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "deformable_attention_forward_(Tensor value, Tensor locations, Tensor weights, Tensor(a!) output, "
      "int[] shapes, int[] points) -> ()");
  m.def(
      "deformable_attention_backward_(Tensor grad_output, Tensor value, Tensor locations, Tensor weights, "
      "Tensor(a!)? grad_value, Tensor(b!)? grad_locations, Tensor(c!)? grad_weights, int[] shapes, "
      "int[] points) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(attn_plugins_emulated, CPU, m) {
  using namespace attn_plugins;
  m.impl("deform_conv2d", EMULATED(deform_conv2d_driver<CudaKernels>));
  m.impl("deform_conv2d_backward", EMULATED(deform_conv2d_backward_driver<CudaKernels>));
  m.impl("deformable_attention_forward_", EMULATED(deformable_attention_forward));
  m.impl("deformable_attention_backward_", EMULATED(deformable_attention_backward));
}
