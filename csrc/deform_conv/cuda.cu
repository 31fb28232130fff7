// Deformable convolution on CUDA: the drivers of deform_conv.h with the kernels of cuda.cuh.
#include <torch/csrc/stable/library.h>

#include "cuda.cuh"

STABLE_TORCH_LIBRARY_IMPL(attn_plugins, CUDA, m) {
  using namespace attn_plugins;
  m.impl("deform_conv2d_forward_kernel", ON_DEVICE(deform_conv2d_driver<CudaKernels>));
  m.impl("deform_conv2d_backward_kernel", ON_DEVICE(deform_conv2d_backward_driver<CudaKernels>));
  m.impl("deform_conv2d_deterministic_backward_kernel",
         ON_DEVICE(deform_conv2d_backward_driver<DeterministicCudaKernels>));
}
