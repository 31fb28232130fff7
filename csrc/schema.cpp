// The operators' schemas. Kernels are in cpu/ and cuda/, fake functions and gradients in plugins/ops/.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(attn_plugins, m) {
  // grad_* of what is not needed come back empty.
  m.def(
      "deform_conv2d(Tensor input, Tensor offset, Tensor weight, Tensor? bias, Tensor? mask, "
      "int[] stride, int[] padding, int[] dilation, int groups, int offset_groups) -> Tensor");
  m.def(
      "deform_conv2d_backward(Tensor grad_output, Tensor input, Tensor offset, Tensor weight, "
      "Tensor? mask, int[] stride, int[] padding, int[] dilation, int groups, int offset_groups, "
      "bool needs_input, bool needs_offset, bool needs_weight) "
      "-> (Tensor grad_input, Tensor grad_offset, Tensor grad_weight, Tensor grad_mask)");
  // One chunk of queries, in place: logits (B, M, Hc, Wc, Hk * Wk) become probabilities. `known`: the
  // log-sum-exp is given, else written. `content`: the chunk already holds the content logits.
  m.def(
      "global_attention_softmax_(Tensor(a!) logits, Tensor? row_logits, Tensor? column_logits, "
      "Tensor? key_logits, Tensor(b!) log_sum_exp, int key_rows, bool content, bool known) -> ()");
  // In place: gradient of the probabilities -> gradient of the logits; its sums go to row_gradient and
  // column_gradient (written) and key_gradient (B, M, slots, Hk * Wk) (added to).
  m.def(
      "global_attention_logit_gradient_(Tensor probabilities, Tensor(a!) gradient, "
      "Tensor(b!)? row_gradient, Tensor(c!)? column_gradient, Tensor(d!)? key_gradient, int key_rows, "
      "int slots) -> ()");
}
