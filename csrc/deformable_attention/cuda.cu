// Deformable attention on CUDA: the entry points of cuda.cuh's kernels.
#include <torch/csrc/stable/library.h>

#include "cuda.cuh"

STABLE_TORCH_LIBRARY_IMPL(attn_plugins, CUDA, m) {
  using namespace attn_plugins;
  m.impl("deformable_attention_forward_", ON_DEVICE(deformable_attention_forward));
  m.impl("deformable_attention_backward_", ON_DEVICE(deformable_attention_backward));
}
