// Deformable attention on CUDA: the entry points of cuda.cuh's kernels.
#include <torch/csrc/stable/library.h>

#include "cuda.cuh"

STABLE_TORCH_LIBRARY_IMPL(attn_plugins, CUDA, m) {
  using namespace attn_plugins;
  m.impl("deformable_attention_forward_kernel", ON_DEVICE(deformable_attention_driver<AttentionKernels>));
  m.impl("deformable_attention_backward_kernel",
         ON_DEVICE(deformable_attention_backward_driver<AttentionKernels>));
  m.impl("deformable_attention_deterministic_backward_kernel",
         ON_DEVICE(deformable_attention_backward_driver<DeterministicAttentionKernels>));
}
