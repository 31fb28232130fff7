// Transposition of matrices on CUDA, which converts maps between memory formats.
#include <torch/csrc/stable/library.h>

#include "transpose.cuh"

STABLE_TORCH_LIBRARY_IMPL(attn_plugins, CUDA, m) {
  m.impl("transposed_kernel", ON_DEVICE(attn_plugins::transposed_matrices));
}
