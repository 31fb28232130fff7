// Schemas of the kernels, each in the folder of its operator. The operators themselves, with their fake
// functions and gradients, are defined by plugins/core/operator.py.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(attn_plugins, m) {
  // Gradients that are not needed are returned as empty tensors.
  m.def(
      "deform_conv2d_forward_kernel(Tensor input, Tensor offset, Tensor weight, Tensor? bias, Tensor? mask, "
      "int[] stride, int[] padding, int[] dilation, int groups, int offset_groups) -> Tensor");
  m.def(
      "deform_conv2d_backward_kernel(Tensor grad_output, Tensor input, Tensor offset, Tensor weight, "
      "Tensor? mask, int[] stride, int[] padding, int[] dilation, int groups, int offset_groups, "
      "bool needs_input, bool needs_offset, bool needs_weight, bool needs_bias) "
      "-> (Tensor grad_input, Tensor grad_offset, Tensor grad_weight, Tensor grad_mask, Tensor grad_bias)");
  // CUDA's backward with gradients whose bits are equal in every run; no float64.
  m.def(
      "deform_conv2d_deterministic_backward_kernel(Tensor grad_output, Tensor input, Tensor offset, "
      "Tensor weight, Tensor? mask, int[] stride, int[] padding, int[] dilation, int groups, "
      "int offset_groups, bool needs_input, bool needs_offset, bool needs_weight, bool needs_bias) "
      "-> (Tensor grad_input, Tensor grad_offset, Tensor grad_weight, Tensor grad_mask, Tensor grad_bias)");
  // CPU kernels of attn_plugins::global_attention, which plugins/ops defines for every device. The gradients
  // of keys and values have contiguous last axes, that of key logits is contiguous.
  m.def(
      "global_attention_forward_(Tensor? query, Tensor? key, Tensor value, Tensor? row_logits, "
      "Tensor? column_logits, Tensor? key_logits, Tensor(a!) output, Tensor(b!) log_sum_exp, float scale) "
      "-> ()");
  m.def(
      "global_attention_backward_(Tensor grad_output, Tensor? query, Tensor? key, Tensor value, "
      "Tensor? row_logits, Tensor? column_logits, Tensor? key_logits, Tensor log_sum_exp, "
      "Tensor(a!)? grad_query, Tensor(b!)? grad_key, Tensor(c!)? grad_value, Tensor(d!)? grad_row_logits, "
      "Tensor(e!)? grad_column_logits, Tensor(f!)? grad_key_logits, float scale) -> ()");
  // result = or += scale * left @ right for float or double (B, M, N, rows, columns), of any strides.
  m.def("criss_cross_product_(Tensor(a!) result, Tensor left, Tensor right, bool add, float scale) -> ()");
  // CPU kernels of attn_plugins::sequence_attention. Every tensor has an axis of slots after (B, M); its size
  // is 1 except for gradients that are sums over queries. The gradients of logits are accumulated into.
  m.def(
      "sequence_attention_forward_(Tensor? query, Tensor? key, Tensor value, Tensor? band_logits, "
      "Tensor? outside_logits, Tensor? position_logits, Tensor? key_padding_mask, Tensor? segment_ids, "
      "Tensor(a!) output, Tensor(b!) log_sum_exp, int start, bool causal, float scale, int slots) -> ()");
  m.def(
      "sequence_attention_backward_(Tensor grad_output, Tensor? query, Tensor? key, Tensor value, "
      "Tensor? band_logits, Tensor? outside_logits, Tensor? position_logits, Tensor? key_padding_mask, "
      "Tensor? segment_ids, Tensor log_sum_exp, Tensor(a!)? grad_query, Tensor(b!)? grad_key, Tensor(c!)? "
      "grad_value, "
      "Tensor(d!)? grad_band_logits, Tensor(e!)? grad_outside_logits, Tensor(f!)? grad_position_logits, "
      "int start, bool causal, float scale, int slots, int groups) -> ()");
  // Kernels of attn_plugins::window_attention. geometry holds kernel size, stride, padding and dilation, each
  // for rows and columns. Gradients are overwritten.
  m.def(
      "window_attention_forward_(Tensor? query, Tensor? key, Tensor value, Tensor? position_logits, "
      "Tensor(a!) output, Tensor(b!) log_sum_exp, int[] geometry, str border, float scale) -> ()");
  m.def(
      "window_attention_backward_(Tensor grad_output, Tensor? query, Tensor? key, Tensor value, "
      "Tensor? position_logits, Tensor log_sum_exp, Tensor(a!)? grad_query, Tensor(b!)? grad_key, "
      "Tensor(c!)? grad_value, Tensor(d!)? grad_position_logits, int[] geometry, str border, "
      "float scale) -> ()");
  // CUDA backward: it gathers every gradient, so it also reads the output.
  m.def(
      "window_attention_gather_backward_(Tensor grad_output, Tensor? query, Tensor? key, Tensor value, "
      "Tensor? position_logits, Tensor output, Tensor log_sum_exp, Tensor(a!)? grad_query, "
      "Tensor(b!)? grad_key, Tensor(c!)? grad_value, Tensor(d!)? grad_position_logits, int[] geometry, "
      "str border, float scale) -> ()");
  // Kernels of attn_plugins::deformable_attention. Locations are (B, Q, M, P, 2) and weights (B, Q, M, P),
  // where P may be several axes, of the value's dtype or another; shapes holds the rows and columns of every
  // level, and points the number of the P samples on each level. A location that is not finite reads NaN with
  // propagates_nan, else 0. Gradients that are not needed are returned as empty tensors.
  m.def(
      "deformable_attention_forward_kernel(Tensor value, Tensor locations, Tensor weights, int[] shapes, "
      "int[] points, bool propagates_nan) -> Tensor");
  m.def(
      "deformable_attention_backward_kernel(Tensor grad_output, Tensor value, Tensor locations, Tensor "
      "weights, "
      "int[] shapes, int[] points, bool propagates_nan, bool needs_value, bool needs_locations, bool "
      "needs_weights) "
      "-> (Tensor grad_value, Tensor grad_locations, Tensor grad_weights)");
  // CUDA's backward with gradients whose bits are equal in every run; no float64.
  m.def(
      "deformable_attention_deterministic_backward_kernel(Tensor grad_output, Tensor value, Tensor "
      "locations, "
      "Tensor weights, int[] shapes, int[] points, bool propagates_nan, bool needs_value, bool "
      "needs_locations, "
      "bool needs_weights) -> (Tensor grad_value, Tensor grad_locations, Tensor grad_weights)");
  // Copies of maps between memory formats: addend + scale * the transposes of (N, rows, columns), scale
  // having one element.
  m.def("transposed_kernel(Tensor matrices, Tensor? addend, Tensor? scale) -> Tensor");
  // Soft non-maximum suppression on the CPU, for plugins/mmcv_ext. The first rows of dets and indices are
  // written; their number is returned.
  m.def(
      "soft_nms_(Tensor boxes, Tensor scores, Tensor(a!) dets, Tensor(b!) indices, float iou_threshold, "
      "float sigma, float min_score, int method, int offset) -> int");
}
