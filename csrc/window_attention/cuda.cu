// Window attention on CUDA: the entry points of cuda.cuh.
#include "cuda.cuh"

STABLE_TORCH_LIBRARY_IMPL(attn_plugins, CUDA, m) {
  using namespace attn_plugins;
  m.impl("window_attention_forward_", ON_DEVICE(window_attention_forward));
  m.impl("window_attention_gather_backward_", ON_DEVICE(window_attention_backward));
}
