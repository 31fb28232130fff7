// The kernels of csrc/deform_conv/*.cuh, csrc/deformable_attention/*.cuh and csrc/common/transpose.cuh on CPU
// tensors, as operators of attn_plugins_emulated with the schemas of schema.cpp.
#include "cuda_emulator.h"  // first

#include "deform_conv/cuda.cuh"
#include "deformable_attention/cuda.cuh"

namespace {

// Replaces the columns of numbers (n, 2), int64, by the quotient and remainder of the first column.
void divide_(attn_plugins::Tensor numbers, int64_t divisor) {
  const attn_plugins::Divisor by(divisor);
  auto* number = static_cast<int64_t*>(numbers.data_ptr());
  for (int64_t i = 0; i < numbers.size(0); ++i, number += 2) {
    int rest;
    number[0] = by.divide(static_cast<int>(number[0]), &rest);
    number[1] = rest;
  }
}

// The number of launches so far.
int64_t launches() {
  return emulator::now.launch;
}

// Reverses 256 numbers, with a fault that the emulator must report: without the barrier (1), reading beyond x
// (2) or writing beyond the tile (3).
__global__ void faulty_kernel(const float* x, float* out, int fault) {
  __shared__ float tile[attn_plugins::kThreads];
  const int i = int(threadIdx.x);
  *(tile + i + (fault == 3)) = x[i + (fault == 2)];
  if (fault != 1) __syncthreads();
  out[i] = tile[attn_plugins::kThreads - 1 - i];
}
void faulty(attn_plugins::Tensor out, attn_plugins::Tensor x, int64_t fault, int64_t blocks) {
  attn_plugins::launch(faulty_kernel, blocks, static_cast<const float*>(x.data_ptr()),
                       static_cast<float*>(out.data_ptr()), int(fault));
}

}  // namespace

STABLE_TORCH_LIBRARY(attn_plugins_emulated, m) {
  m.def("faulty(Tensor(a!) out, Tensor x, int fault, int blocks) -> ()");
  m.def("divide_(Tensor(a!) numbers, int divisor) -> ()");
  m.def("transposed(Tensor matrices, Tensor? addend, Tensor? scale) -> Tensor");
  m.def(
      "deform_conv2d(Tensor input, Tensor offset, Tensor weight, Tensor? bias, Tensor? mask, int[] stride, "
      "int[] padding, int[] dilation, int groups, int offset_groups) -> Tensor");
  m.def(
      "deform_conv2d_backward(Tensor grad_output, Tensor input, Tensor offset, Tensor weight, Tensor? mask, "
      "int[] stride, int[] padding, int[] dilation, int groups, int offset_groups, bool needs_input, "
      "bool needs_offset, bool needs_weight, bool needs_bias=False) -> (Tensor, Tensor, Tensor, Tensor, "
      "Tensor)");
  m.def(
      "deform_conv2d_deterministic_backward(Tensor grad_output, Tensor input, Tensor offset, Tensor weight, "
      "Tensor? mask, int[] stride, int[] padding, int[] dilation, int groups, int offset_groups, "
      "bool needs_input, bool needs_offset, bool needs_weight, bool needs_bias) -> (Tensor, Tensor, Tensor, "
      "Tensor, Tensor)");
  m.def(
      "deformable_attention(Tensor value, Tensor locations, Tensor weights, int[] shapes, int[] points, "
      "bool propagates_nan) -> Tensor");
  m.def(
      "deformable_attention_backward(Tensor grad_output, Tensor value, Tensor locations, Tensor weights, "
      "int[] shapes, int[] points, bool propagates_nan, bool needs_value, bool needs_locations, bool "
      "needs_weights) -> (Tensor, Tensor, Tensor)");
  m.def(
      "deformable_attention_deterministic_backward(Tensor grad_output, Tensor value, Tensor locations, "
      "Tensor weights, int[] shapes, int[] points, bool propagates_nan, bool needs_value, "
      "bool needs_locations, bool needs_weights) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(attn_plugins_emulated, CPU, m) {
  using namespace attn_plugins;
  m.impl("divide_", TORCH_BOX(&divide_));
  m.impl("faulty", EMULATED(faulty));
  m.impl("transposed", EMULATED(transposed_matrices));
  m.impl("deform_conv2d", EMULATED(deform_conv2d_driver<CudaKernels>));
  m.impl("deform_conv2d_backward", EMULATED(deform_conv2d_backward_driver<CudaKernels>));
  m.impl("deform_conv2d_deterministic_backward",
         EMULATED(deform_conv2d_backward_driver<DeterministicCudaKernels>));
  m.impl("deformable_attention", EMULATED(deformable_attention_driver<AttentionKernels>));
  m.impl("deformable_attention_backward", EMULATED(deformable_attention_backward_driver<AttentionKernels>));
  m.impl("deformable_attention_deterministic_backward",
         EMULATED(deformable_attention_backward_driver<DeterministicAttentionKernels>));
}

namespace attn_plugins {
namespace {

// Returns how a convolution is cut on the device: images per chunk, and pixels per block of such a chunk.
// sizes: N, C, H, W, Ho, Wo, Kh, Kw, out_channels.
std::tuple<int64_t, int64_t> cut(std::vector<int64_t> sizes, int64_t element_bytes) {
  DeformConvGeometry g{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5],
                       sizes[6], sizes[7], sizes[8], 1,        1,        1,
                       1,        0,        0,        1,        1};
  const int64_t images = CudaKernels::images_per_chunk(g, element_bytes);
  g.N = images;
  return {images, CudaKernels::block_pixels(g, element_bytes)};
}

}  // namespace
}  // namespace attn_plugins

STABLE_TORCH_LIBRARY_FRAGMENT(attn_plugins_emulated, m) {
  m.def("cut(int[] sizes, int element_bytes) -> (int, int)");
  m.def("launches() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(attn_plugins_emulated, CompositeExplicitAutograd, m) {
  m.impl("cut", TORCH_BOX(&attn_plugins::cut));
  m.impl("launches", TORCH_BOX(&launches));
}
