// csrc/window_attention/cuda.cuh on CPU tensors: the operators attn_plugins_emulated_window::forward_ and
// ::backward_.
#include "cuda_emulator.h"  // first

#include "window_attention/cuda.cuh"

STABLE_TORCH_LIBRARY(attn_plugins_emulated_window, m) {
  m.def(
      "forward_(Tensor? query, Tensor? key, Tensor value, Tensor? position_logits, Tensor(a!) output, "
      "Tensor(b!) log_sum_exp, int[] geometry, str border, float scale) -> ()");
  m.def(
      "backward_(Tensor grad_output, Tensor? query, Tensor? key, Tensor value, Tensor? position_logits, "
      "Tensor output, Tensor log_sum_exp, Tensor(a!)? grad_query, Tensor(b!)? grad_key, "
      "Tensor(c!)? grad_value, Tensor(d!)? grad_position_logits, int[] geometry, str border, "
      "float scale) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(attn_plugins_emulated_window, CPU, m) {
  using namespace attn_plugins;
  m.impl("forward_", EMULATED(window_attention_forward));
  m.impl("backward_", EMULATED(window_attention_backward));
}
