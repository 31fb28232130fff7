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
}
