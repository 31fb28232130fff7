// Deformable convolution on CUDA: the drivers of deform_conv.h with the kernels of cuda.cuh.
#include "cuda.cuh"

namespace attn_plugins {
namespace {

Tensor deform_conv2d(const Tensor& input, const Tensor& offset, const Tensor& weight,
                     std::optional<Tensor> bias, std::optional<Tensor> mask, std::vector<int64_t> stride,
                     std::vector<int64_t> padding, std::vector<int64_t> dilation, int64_t groups,
                     int64_t offset_groups) {
  const OnDeviceOf guard(input);
  return deform_conv2d_driver<CudaKernels>(input, offset, weight, bias, mask, stride, padding, dilation,
                                           groups, offset_groups);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> deform_conv2d_backward(
    const Tensor& grad_output, const Tensor& input, const Tensor& offset, const Tensor& weight,
    std::optional<Tensor> mask, std::vector<int64_t> stride, std::vector<int64_t> padding,
    std::vector<int64_t> dilation, int64_t groups, int64_t offset_groups, bool needs_input, bool needs_offset,
    bool needs_weight) {
  const OnDeviceOf guard(input);
  return deform_conv2d_backward_driver<CudaKernels>(grad_output, input, offset, weight, mask, stride, padding,
                                                    dilation, groups, offset_groups, needs_input,
                                                    needs_offset, needs_weight);
}

}  // namespace
}  // namespace attn_plugins

STABLE_TORCH_LIBRARY_IMPL(attn_plugins, CUDA, m) {
  m.impl("deform_conv2d_forward_kernel", TORCH_BOX(&attn_plugins::deform_conv2d));
  m.impl("deform_conv2d_backward_kernel", TORCH_BOX(&attn_plugins::deform_conv2d_backward));
}
